"""Served, the trained model is as good as in transformers: same tokens, log-probabilities, facts.

In float32 the two are equal. In BF16 they differ by rounding, which nearly averages out over many
tokens; docs/nano-quality.md holds what was measured, and why the bounds are what they are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import torch
from transformers import DeepseekV4ForCausalLM

import nano
import oracle
from agreement import LOGPROB_TOLERANCE, Comparison, ties
from nano import nano_chat, nano_text
from serving import Server

TOKENS = 512  # of each of the three rows that perplexity is measured on
BF16_LOG_PERPLEXITY = 0.002  # largest difference of the mean log-probability
BF16_LOGPROB = 0.3  # of the log-probability of one token
BF16_FACTS = 0.02  # of the share of right facts: one question


@pytest.fixture(scope="module")
def exact(serve: Callable[..., Server]) -> Iterator[Server]:
    """In float32, and without parsers."""
    with serve(nano.FOLDER, dtype="float32") as server:
        yield server


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV4ForCausalLM:
    """transformers in float32, with index queries and keys on the FP4 grid as they were trained.
    Its weights are the values of the shipped ones."""
    return oracle.load(nano.write_dense(tmp_path_factory.mktemp("dense")), indexer_fp4=True)


# ---- answers ----


@pytest.fixture(scope="module")
def questions() -> list[Any]:
    """Facts, a chat, a call, and a needle, which the indexer must find."""
    return [
        *nano_text.fact_questions("phrasing", 30, seed=1),
        *nano_text.chat_questions(2, thinking=True, seed=1),
        *nano_text.tool_questions(1, seed=1),
        *nano_text.needle_questions(256, 2, seed=1),
    ]


@pytest.fixture(scope="module")
def answered(reference: DeepseekV4ForCausalLM, questions: list[Any]) -> list[oracle.Generation]:
    """What transformers answers, as many tokens as the right answer has."""
    return [
        oracle.greedy(reference, nano.ids(question.prompt), len(nano.ids(question.answer)))
        for question in questions
    ]


def test_answers_equal_transformers(exact: Server, answered: list[oracle.Generation]) -> None:
    """Tokens equal, log-probabilities within 1e-4, asked one at a time."""
    comparison = Comparison()
    for wanted in answered:
        found = exact.generate(wanted.prompt, len(wanted.tokens))
        comparison.add(f"prompt of {len(wanted.prompt)}", found, wanted, ties(wanted))
    comparison.check()


def test_answers_are_right(questions: list[Any], answered: list[oracle.Generation]) -> None:
    """What is compared are answers of a trained model, not noise."""
    right = [
        list(found.tokens) == nano.ids(question.answer)
        for question, found in zip(questions, answered, strict=True)
    ]
    assert sum(right) >= 0.9 * len(right)


# ---- perplexity ----


@dataclass(frozen=True)
class Text:
    """A row of text that was never trained on, and transformers' log-probability of each token
    after the first, [tokens - 1] float32."""

    ids: list[int]
    logprobs: torch.Tensor


@pytest.fixture(scope="module")
def texts(reference: DeepseekV4ForCausalLM) -> list[Text]:
    ids, weights = nano_text.batch(10**6, 0, nano.tokenizer(), TOKENS, 3)
    assert (weights > 0).sum() > 0.8 * ids.size  # little padding
    rows = [
        row[: int((weight > 0).sum())].tolist() for row, weight in zip(ids, weights, strict=True)
    ]
    found = []
    for row in rows:
        logits = oracle.record(reference, row).logits[:-1].double()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        found.append(Text(row, chosen.float()))
    return found


def read(server: Server, ids: Sequence[int]) -> torch.Tensor:
    """[tokens - 1] float32: the server's log-probability of each token after the first."""
    server.flush()
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    found = server.request("/generate", body)["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in found] == list(ids)
    return torch.tensor([value for value, _, _ in found[1:]])


def perplexity(logprobs: Sequence[torch.Tensor]) -> float:
    return math.exp(-torch.cat(list(logprobs)).double().mean().item())


def compared(server: Server, texts: list[Text]) -> tuple[torch.Tensor, float, float]:
    """How far log-probabilities are apart, by token; the server's and transformers' perplexity."""
    found = [read(server, text.ids) for text in texts]
    apart = torch.cat([(a - text.logprobs).abs() for a, text in zip(found, texts, strict=True)])
    return apart, perplexity(found), perplexity([text.logprobs for text in texts])


def test_perplexity_in_fp32_equals_transformers(exact: Server, texts: list[Text]) -> None:
    """Token by token; a token after a near tie of an index or FP4 code may differ, one in 500."""
    apart, ours, theirs = compared(exact, texts)
    print(
        f"perplexity {ours:.6f}, transformers {theirs:.6f}; largest difference {apart.max():.2e}, "
        f"{int((apart > LOGPROB_TOLERANCE).sum())} of {len(apart)} tokens beyond the tolerance"
    )
    assert (apart > LOGPROB_TOLERANCE).float().mean() <= 0.002
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert theirs < 5  # it is the trained model that is compared


def test_perplexity_in_bf16_is_close(server: Server, texts: list[Text]) -> None:
    apart, ours, theirs = compared(server, texts)
    print(
        f"perplexity {ours:.5f}, transformers in float32 {theirs:.5f}; differences: mean "
        f"{apart.mean():.1e}, largest {apart.max():.2f}"
    )
    assert abs(math.log(ours / theirs)) <= BF16_LOG_PERPLEXITY
    assert 1e-3 < apart.max() <= BF16_LOGPROB  # less would mean that it did not run in BF16


# ---- facts ----


def test_facts_in_bf16_are_as_right(server: Server, reference: DeepseekV4ForCausalLM) -> None:
    """The share of right answers, and how many questions are answered differently."""
    questions = nano_text.fact_questions("phrasing", 60, seed=2)
    wanted = [
        oracle.greedy(reference, nano.ids(item.prompt), len(nano.ids(item.answer))).tokens
        for item in questions
    ]
    found = [nano.ask(server, item).tokens for item in questions]
    right = [nano.ids(item.answer) for item in questions]
    theirs = sum(list(a) == b for a, b in zip(wanted, right, strict=True)) / len(right)
    ours = sum(list(a) == b for a, b in zip(found, right, strict=True)) / len(right)
    other = sum(a[: len(b)] != b for a, b in zip(found, wanted, strict=True))
    print(f"right: {ours:.2f}, transformers in float32 {theirs:.2f}; {other} answered differently")
    assert abs(ours - theirs) <= BF16_FACTS and theirs >= 0.9


# ---- without parsers ----


def test_without_a_parser_a_call_stays_text(exact: Server) -> None:
    """SGLang takes no parser by itself; the log says so, once for each that is missing."""
    client = openai.OpenAI(base_url=exact.url + "/v1", api_key="none", max_retries=0)
    tool = nano_text.TOOLS[2]
    asked = [{"role": "user", "content": "Please multiply 61 and 38 with the tool."}]
    said = nano.chat(client, asked, tools=nano.tools(tool))
    wanted = nano_chat.Turn("assistant", "", "", "multiply", {"a": 61, "b": 38})
    turns = [nano_chat.Turn("user", asked[0]["content"]), wanted]
    answer = nano_chat.render(turns, tools=[tool]).split(nano_chat.ANSWER)[1]
    assert said.calls == () and said.finish == "stop"
    assert said.content == nano.plain(answer).removesuffix(nano_chat.END)
    log = exact.log.read_text()
    for option in ("--tool-call-parser deepseekv4", "--reasoning-parser deepseek-v4"):
        assert log.count(f"parsed, add {option}.") == 1
