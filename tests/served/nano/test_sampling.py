"""Sampling and what surrounds it: constraints, log-probabilities, stops, aborts, penalties."""

import json
import math
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

import nano
from nano import nano_chat, nano_text
from serving import Reply, Server

CAPITAL = "The capital of France is"
STORY = nano_text.needle_questions(32, 1)[0].prompt.rpartition("\n")[0]
COUNT = 40  # tokens by which the story is continued
ON = {"ignore_eos": True}


def told(server: Server, count: int = COUNT, **sampling: Any) -> Reply:
    """The story, continued."""
    return server.generate(nano.ids(STORY), count, **sampling)


def text_of(server: Server, prompt: str, **options: Any) -> str:
    """The text of a continuation through /generate; greedy, unless `options` say otherwise."""
    body = {"text": prompt, "sampling_params": {"temperature": 0, **options}}
    return server.request("/generate", body)["text"]


@pytest.fixture(scope="module")
def greedy(server: Server) -> Reply:
    """The story's greedy continuation."""
    return told(server)


# ---- constraints ----


def test_a_regex_decides_what_can_be_said(server: Server) -> None:
    """The best of what is allowed, also where the right answer is not allowed."""
    assert text_of(server, CAPITAL, regex=r" (Paris|Rome|Oslo)\.", max_new_tokens=8) == " Paris."
    other = text_of(server, CAPITAL, regex=r" (Rome|Oslo)\.", max_new_tokens=8)
    assert other in (" Rome.", " Oslo.")


def test_a_sampled_answer_keeps_to_its_regex(server: Server) -> None:
    pattern = r" [A-Z][a-z]{2,6}, [1-9][0-9]"
    said = {
        text_of(server, STORY, regex=pattern, max_new_tokens=30, temperature=1) for _ in range(4)
    }
    assert all(re.fullmatch(pattern, text) for text in said), said


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_decides_types_and_values(server: Server, temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {
            "country": {"enum": ["France", "Norway"]},
            "capital": {"enum": ["Oslo", "Rome"]},
            "month": {"type": "integer", "minimum": 10, "maximum": 12},
            "known": {"type": "boolean"},
        },
        "required": ["country", "capital", "month", "known"],
        "additionalProperties": False,
    }
    turns = [nano_chat.Turn("user", "Describe France in json.")]
    prompt = nano.plain(nano_chat.render(turns, schema=schema))
    found = json.loads(
        text_of(
            server,
            prompt,
            json_schema=json.dumps(schema),
            max_new_tokens=100,
            temperature=temperature,
        )
    )
    assert list(found) == schema["required"]
    assert found["country"] == "France"  # known, and allowed
    assert found["capital"] in ("Oslo", "Rome")  # Paris is not
    assert found["month"] in (10, 11, 12) and found["known"] in (True, False)


def test_json_in_a_chat(client: openai.OpenAI) -> None:
    """The schema is in the prompt and in the grammar, and the values are right."""
    fields = ("country", "capital", "continent")
    schema = {
        "type": "object",
        "properties": {field: {"type": "string", "maxLength": 20} for field in fields},
        "required": list(fields),
        "additionalProperties": False,
    }
    said = nano.chat(
        client,
        [{"role": "user", "content": "Describe France in json."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "country", "schema": schema},
        },
    )
    wanted = {"country": "France", "capital": "Paris", "continent": "Europe"}
    assert json.loads(said.content) == wanted and said.finish == "stop"


# ---- log-probabilities ----


def test_log_probabilities_of_what_is_said(server: Server, greedy: Reply) -> None:
    """Five best of each step: in order, a distribution's part, and the best one is chosen."""
    body = {
        "input_ids": nano.ids(STORY),
        "sampling_params": {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 5,
    }
    answer = server.request("/generate", body)
    steps = answer["meta_info"]["output_top_logprobs"]
    chosen = answer["meta_info"]["output_token_logprobs"]
    assert len(steps) == len(chosen) == COUNT
    for best, (logprob, token, _) in zip(steps, chosen, strict=True):
        values = [value for value, _, _ in best]
        assert values == sorted(values, reverse=True) and values[0] <= 0
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert (logprob, token) == tuple(best[0][:2])
    assert [token for _, token, _ in chosen] == list(greedy.tokens)


def test_log_probabilities_of_the_whole_vocabulary(server: Server) -> None:
    """Asked for all of them, they are the logarithms of one distribution."""
    body = {
        "input_ids": nano.ids(STORY),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": nano.tokenizer().get_vocab_size(),
    }
    (every,) = server.request("/generate", body)["meta_info"]["output_top_logprobs"]
    assert len({token for _, token, _ in every}) == nano.tokenizer().get_vocab_size()
    assert sum(math.exp(value) for value, _, _ in every) == pytest.approx(1, abs=1e-4)


def test_log_probabilities_of_a_prompt(server: Server, greedy: Reply) -> None:
    """Said before as an answer, read now as a prompt: nearly the same (both are BF16)."""
    prompt = nano.ids(STORY)
    body = {
        "input_ids": [*prompt, *greedy.tokens],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    read = server.request("/generate", body)["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in read] == body["input_ids"]
    assert read[0][0] is None and all(value <= 0 for value, _, _ in read[1:])
    found = [value for value, _, _ in read[len(prompt) :]]
    assert found == pytest.approx(greedy.logprobs, abs=0.1)


# ---- choices ----


def test_three_choices(client: openai.OpenAI) -> None:
    """Greedily the same three times; sampled, a story goes on in different ways."""
    request: dict[str, Any] = dict(model="nano", prompt=STORY, n=3, max_tokens=24, extra_body=ON)
    choices = client.completions.create(**request, temperature=0).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({choice.text for choice in choices}) == 1 and choices[0].text
    sampled = client.completions.create(**request, temperature=1).choices
    assert len(sampled) == 3 and len({choice.text for choice in sampled}) > 1


def test_samples_follow_the_distribution(client: openai.OpenAI, server: Server) -> None:
    """How often each likely token is drawn, within four standard errors."""
    prompt, draws = nano.ids("Story:"), 128
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 3,
    }
    (best,) = server.request("/generate", body)["meta_info"]["output_top_logprobs"]
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1, "max_new_tokens": 1, "n": draws},
    }
    drawn = [answer["output_ids"][0] for answer in server.request("/generate", body)]
    assert len(drawn) == draws
    for logprob, token, _ in best:
        share = math.exp(logprob)
        error = math.sqrt(share * (1 - share) / draws)
        assert abs(drawn.count(token) / draws - share) <= 4 * error + 1 / draws


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_narrow_choice_is_greedy(server: Server, greedy: Reply, narrow: dict[str, float]) -> None:
    assert told(server, temperature=1, **narrow).tokens == greedy.tokens


# ---- stops and streams ----


GREEDY: dict[str, Any] = dict(
    model="nano", prompt=STORY, max_tokens=COUNT, temperature=0, extra_body=ON
)


@pytest.fixture(scope="module")
def whole(client: openai.OpenAI) -> str:
    return client.completions.create(**GREEDY).choices[0].text


def test_stop_strings(client: openai.OpenAI, whole: str) -> None:
    """Ends before the first of them, wherever tokens begin; both in a stream and in one piece."""
    middle = len(whole) // 2
    stops = [whole[middle : middle + 5], "never said"]
    (choice,) = client.completions.create(**GREEDY, stop=stops).choices
    assert choice.text == whole[: whole.index(stops[0])] and choice.finish_reason == "stop"
    parts = list(client.completions.create(**GREEDY, stop=stops, stream=True))
    assert "".join(part.choices[0].text for part in parts) == choice.text


def test_a_stream_is_the_whole_text(client: openai.OpenAI, whole: str) -> None:
    parts = list(client.completions.create(**GREEDY, stream=True))
    assert len(parts) > COUNT // 2
    assert "".join(part.choices[0].text for part in parts) == whole


def running(server: Server) -> int:
    """Requests that the scheduler has in hand."""
    (load,) = server.request("/v1/loads")["loads"]
    return load["num_running_reqs"] + load["num_waiting_reqs"]


def wait_for(number: int, ask: Callable[[], int]) -> None:
    deadline = time.monotonic() + 20
    while (found := ask()) != number:
        assert time.monotonic() < deadline, f"{found} requests, expected {number}"
        time.sleep(0.05)


def events(stream: Any) -> Iterator[dict[str, Any]]:
    for line in stream:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


@pytest.mark.parametrize("how", ["the client goes", "abort_request"])
def test_abort_in_mid_stream(server: Server, greedy: Reply, how: str) -> None:
    """No request is left behind, and the next answer is right."""
    body = {
        "rid": f"to be aborted: {how}",
        "input_ids": nano.ids(STORY),
        "sampling_params": {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    request = urllib.request.Request(
        server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        said = events(stream)
        for _ in range(5):
            next(said)
        wait_for(1, lambda: running(server))
        if how == "abort_request":
            server.request("/abort_request", {"rid": body["rid"]})
            *_, last = said
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
            assert last["meta_info"]["completion_tokens"] < 1500
    wait_for(0, lambda: running(server))
    assert told(server).tokens == greedy.tokens


# ---- penalties ----

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def third_step(server: Server, greedy: Reply, **penalty: float) -> list[float]:
    """Log-probabilities of the first token that was said, and of three that were not, in the third
    step: the host counts what was said one step late, and in the second step the prompt's last."""
    said = greedy.tokens[:2]
    others = [token for token in range(100, 106) if token not in (*said, nano.ids(STORY)[-1])][:3]
    body = {
        "input_ids": nano.ids(STORY),
        "sampling_params": {"temperature": 0, "max_new_tokens": 3, **ON, **penalty},
        "return_logprob": True,
        "token_ids_logprob": [said[0], *others],
    }
    answer = server.request("/generate", body)
    assert tuple(answer["output_ids"][:2]) == said
    step = answer["meta_info"]["output_token_ids_logprobs"][2]
    assert [token for _, token, _ in step] == body["token_ids_logprob"]
    return [value for value, _, _ in step]


@pytest.mark.parametrize("value", [0.3, -0.3])  # too little to change the choice
@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_moves_what_was_said_by_its_value(
    server: Server, greedy: Reply, penalty: str, value: float
) -> None:
    """Down by the penalty, beside all that was not said."""
    said, *others = third_step(server, greedy)
    said_then, *others_then = third_step(server, greedy, **{penalty: value})
    for other, then in zip(others, others_then, strict=True):
        assert (said_then - then) - (said - other) == pytest.approx(-value, abs=1e-3)


@pytest.mark.parametrize(("value", "moves"), [(1.1, -1), (0.9, 1)])
def test_a_repetition_penalty_moves_what_was_said(
    server: Server, greedy: Reply, value: float, moves: int
) -> None:
    """It scales the logit away from what it is: above 1 what was said becomes less likely."""
    said, *others = third_step(server, greedy)
    said_then, *others_then = third_step(server, greedy, repetition_penalty=value)
    for other, then in zip(others, others_then, strict=True):
        assert ((said_then - then) - (said - other)) * moves > 0.01


@pytest.mark.parametrize("penalty", PENALTIES)
def test_with_a_penalty_less_is_said_again(server: Server, greedy: Reply, penalty: str) -> None:
    value = 1.5 if penalty == "repetition_penalty" else 2.0
    assert len(set(told(server, **{penalty: value}).tokens)) > len(set(greedy.tokens))


def test_no_penalty(server: Server, greedy: Reply) -> None:
    """The values that mean none change nothing, not even a log-probability."""
    same = told(server, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    assert same.tokens == greedy.tokens and same.logprobs == greedy.logprobs
