"""How well nano answers: by one forward pass, or generated greedily with a cache."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import nano_model
import nano_text
import torch
from nano_text import Question
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import DeepseekV4ForCausalLM, DynamicCache

# A batch of the scoring pass holds about this many tokens.
SCORED_TOKENS = 65536


@dataclass(frozen=True)
class Counts:
    """How many questions of each kind are asked."""

    facts: int = 256
    needles: int = 32
    chats: int = 48
    recitations: int = 5
    recited_tokens: int = 640  # a recitation is stopped here; the longest has 528


def question_sets(counts: Counts) -> dict[str, list[Question]]:
    """All questions by kind. Those called held out were never in a training batch."""
    sets = {
        "facts_seen": nano_text.fact_questions("seen", counts.facts),
        "facts_held_out_phrasing": nano_text.fact_questions("phrasing", counts.facts),
        "facts_held_out_opener": nano_text.fact_questions("opener", counts.facts),
        "chat": nano_text.chat_questions(counts.chats, thinking=False),
        "chat_thinking": nano_text.chat_questions(counts.chats, thinking=True),
        "tool_call": nano_text.tool_questions(counts.chats),
    }
    for distance in nano_text.DISTANCES:
        sets[f"needle_{distance}"] = nano_text.needle_questions(distance, counts.needles)
    sets["recitation"] = nano_text.recitation_questions()[: counts.recitations]
    return sets


@dataclass(frozen=True)
class _Encoded:
    prompt: list[int]
    answer: list[int]


def _encode(tokenizer: Tokenizer, questions: Sequence[Question]) -> list[_Encoded]:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return [_Encoded(ids(question.prompt), ids(question.answer)) for question in questions]


@torch.no_grad()
def score(
    model: DeepseekV4ForCausalLM, tokenizer: Tokenizer, questions: Sequence[Question]
) -> list[bool]:
    """Whether greedy generation gives each whole answer, by one pass over prompt and answer.

    `model` is prepared (nano_model.prepare). Rows are padded at the right, which changes nothing
    before the padding.
    """
    encoded = _encode(tokenizer, questions)
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i].prompt + encoded[i].answer))
    right = [False] * len(encoded)
    while order:
        longest = len(encoded[order[-1]].prompt + encoded[order[-1]].answer)
        length = -(-longest // 128) * 128
        count = max(1, SCORED_TOKENS // length)
        chosen, order = order[-count:], order[:-count]
        rows = [encoded[i].prompt + encoded[i].answer for i in chosen]
        padded = [row + [nano_text.PAD_ID] * (length - len(row)) for row in rows]
        ids = torch.tensor(padded, device=model.device)
        best = nano_model.forward(model, ids).argmax(dim=-1).cpu()
        for i, choices in zip(chosen, best, strict=True):
            start, answer = len(encoded[i].prompt), encoded[i].answer
            right[i] = choices[start - 1 : start - 1 + len(answer)].tolist() == answer
    return right


@torch.no_grad()
def generate(model: DeepseekV4ForCausalLM, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy tokens [rows, at most count] with a cache for prompts [rows, tokens] of equal length.

    Ends when every row has said the end-of-sentence token.
    """
    cache = DynamicCache(config=model.config)
    out = []
    ids, ended = prompts, torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
    for _ in range(count):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        out.append(ids)
        ended |= ids[:, 0] == model.config.eos_token_id
        if bool(ended.all()):
            break
    return torch.cat(out, dim=1)


def answer(
    model: DeepseekV4ForCausalLM, tokenizer: Tokenizer, questions: Sequence[Question], limit: int
) -> list[bool]:
    """Like `score`, by generating; `model` is not prepared but scores on the FP4 grid.

    Of an answer, `limit` tokens are compared at most.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    encoded = _encode(tokenizer, questions)
    for i, item in enumerate(encoded):
        groups[len(item.prompt)].append(i)
    right = [False] * len(encoded)
    for members in groups.values():
        prompts = torch.tensor([encoded[i].prompt for i in members], device=model.device)
        wanted = [encoded[i].answer[:limit] for i in members]
        said = generate(model, prompts, max(map(len, wanted))).tolist()
        for i, tokens, answer_ids in zip(members, said, wanted, strict=True):
            right[i] = tokens[: len(answer_ids)] == answer_ids
    return right


def recite(
    model: DeepseekV4ForCausalLM, tokenizer: Tokenizer, questions: Sequence[Question], limit: int
) -> list[int]:
    """How many tokens of each recitation are right before the first error, in one batch.

    The first few tokens of the shorter prompts' answers are given, so that all rows begin at the
    same length. A recitation that is right to its end counts all its tokens, the last one included.
    """
    encoded = _encode(tokenizer, questions)
    start = max(len(item.prompt) for item in encoded)
    rows = [item.prompt + item.answer for item in encoded]
    prompts = torch.tensor([row[:start] for row in rows], device=model.device)
    said = generate(model, prompts, min(limit, max(map(len, rows)) - start)).tolist()
    counted = []
    for item, row, tokens in zip(encoded, rows, said, strict=True):
        right = 0
        for wanted, got in zip(row[start:], tokens, strict=False):
            if wanted != got:
                break
            right += 1
        counted.append(start - len(item.prompt) + right)
    return counted


def scored(
    model: DeepseekV4ForCausalLM, tokenizer: Tokenizer, sets: dict[str, list[Question]]
) -> dict[str, float]:
    """Share of right answers by kind of question, by `score`."""
    model.eval()
    shares = {}
    with torch.compiler.set_stance("force_eager"):  # every kind of question has its own shapes
        for name, questions in sets.items():
            right = score(model, tokenizer, questions)
            shares[name] = sum(right) / len(right)
    model.train()
    return shares


def generated(
    model: DeepseekV4ForCausalLM,
    tokenizer: Tokenizer,
    sets: dict[str, list[Question]],
    counts: Counts,
) -> dict[str, float | list[int]]:
    """The same by generating, and for recitations the right tokens of each and their lengths."""
    model.eval()
    results: dict[str, float | list[int]] = {}
    for name, questions in tqdm(sets.items(), desc="final evaluation"):
        if name == "recitation":
            lengths = [len(item.answer) for item in _encode(tokenizer, questions)]
            right = recite(model, tokenizer, questions, counts.recited_tokens)
            results["recitation_tokens_right"], results["recitation_tokens"] = right, lengths
            whole = [a == b for a, b in zip(right, lengths, strict=True)]
            results[name] = sum(whole) / len(whole)
            continue
        found = answer(model, tokenizer, questions, counts.recited_tokens)
        results[name] = sum(found) / len(found)
    return results
