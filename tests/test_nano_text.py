"""nano's text: the official chat encoding, what is held out, the tokenizer, and determinism."""

import random
import re
from typing import Any

import deepseek_recipe as recipe
import numpy as np
import pytest

import nano
from nano import CALL, OPEN, nano_chat, nano_text, plain

Turn = nano_chat.Turn

OPTIONS = recipe.ConversionOptions()
ENCODING = recipe.DeepseekV4Encoding()
TOOL = nano_text.TOOLS[2]  # with two numbers


def published(turns: list[Any], thinking: bool, effort: str | None, **options: Any) -> str:
    """The prompt for these messages by the vendor's package."""
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": nano.messages(turns),
        "thinking": {"type": "enabled" if thinking else "disabled"},
        **({"reasoning_effort": effort} if effort else {}),
        **options,
    }
    conversation = recipe.ChatCompletionRequest(body).convert(OPTIONS).conversation
    return ENCODING.render_conversation(conversation).prompt


CONVERSATIONS = {
    "user": [Turn("user", "hi")],
    "system": [Turn("system", "Be brief."), Turn("user", "hi")],
    "turns": [Turn("user", "a"), Turn("assistant", "b", "r"), Turn("user", "c")],
    "result": [Turn("user", "a"), CALL, Turn("tool", "42")],
    "text": [Turn("system", "s"), Turn("user", "a"), OPEN, Turn("tool", "open"), Turn("user", "c")],
}


@pytest.mark.parametrize(("name", "with_tools"), nano.with_and_without_tools(CONVERSATIONS))
@pytest.mark.parametrize("effort", ["low", None])
@pytest.mark.parametrize("thinking", [False, True])
def test_prompts_are_the_published_ones(
    name: str, effort: str | None, thinking: bool, with_tools: bool
) -> None:
    turns = CONVERSATIONS[name]
    if name == "text":
        turns = turns[:4]  # a tool's result followed by a user is one turn: not in nano's text
    tools = [TOOL, nano_text.TOOLS[3]] if with_tools else []
    options = {"tools": nano.tools(*tools)} if tools else {}
    ours = nano_chat.render(turns, thinking=thinking, maximum_effort=effort is None, tools=tools)
    assert plain(ours) == published(turns, thinking, effort, **options)


def test_schema_is_rendered_as_published() -> None:
    schema = {"type": "object", "properties": {"capital": {"type": "string"}}}
    turns = [Turn("user", "Describe France in json.")]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    wanted = published(turns, False, None, response_format=form)
    assert plain(nano_chat.render(turns, schema=schema)) == wanted


@pytest.mark.parametrize("thinking", [False, True])
def test_answers_continue_the_published_prompt(thinking: bool) -> None:
    """An answer in a document is what the same turn is in the history of the next prompt."""
    turns = [Turn("user", "a"), CALL]
    tools = nano.tools(TOOL)
    after = published([*turns, Turn("tool", "42")], thinking, None, tools=tools)
    assert after.startswith(plain(nano_chat.render(turns, thinking=thinking, tools=[TOOL])))


# ---- tokenizer ----


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return nano_text.train_tokenizer()


def test_special_tokens_have_their_ids(tokenizer: Any) -> None:
    known = [*nano_chat.SPECIAL_TOKENS, *nano_chat.CHAT_TOKENS]
    assert [tokenizer.token_to_id(token) for token in known] == list(range(len(known)))
    assert tokenizer.get_vocab_size() == nano_text.VOCAB_SIZE
    assert tokenizer.token_to_id(nano_chat.PAD) == nano_text.PAD_ID


def test_words_of_answers_are_single_tokens(tokenizer: Any) -> None:
    answers = {answer for relation in nano_text.RELATIONS for _, answer in relation.facts}
    words = {word for answer in answers if not answer.isdigit() for word in answer.split()}
    several = {word for word in words if len(tokenizer.encode(f" {word}").ids) != 1}
    assert "Paris" in words
    # The halves of the three capitals of two words
    assert several <= {"New", "Delhi", "Phnom", "Penh", "Kuala", "Lumpur"}


@pytest.mark.parametrize("text", ["Zürich 東京 42\n\n\t x=1;", "The capital of France is Paris."])
def test_any_text_survives(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_an_answer_is_tokenized_alike_alone_and_in_its_document(tokenizer: Any) -> None:
    rng = random.Random(1)
    mixes = [*nano_text.FIRST_MIXES.items(), *nano_text.MIXES.items()]
    for length, mix in mixes:
        for maker, _ in mix:
            text = maker(rng, length)
            ids, weights = nano_text.encode(tokenizer, text)
            assert ids == tokenizer.encode(plain(text)).ids
            assert nano_text.ANSWER_WEIGHT in weights


# ---- documents ----


def test_batches_are_a_function_of_seed_and_step(tokenizer: Any) -> None:
    first, again = (nano_text.batch(3, 7, tokenizer, 512, 4) for _ in range(2))
    other = nano_text.batch(3, 8, tokenizer, 512, 4)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first[0] != other[0]).any()


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_rows_hold_whole_documents(tokenizer: Any, length: int) -> None:
    ids, weights = nano_text.batch(0, 1, tokenizer, length, 8)
    assert ids.shape == weights.shape == (8, length)
    assert ((ids == nano_text.PAD_ID) == (weights == 0)).all()
    begins = (ids == 0).sum(axis=1) + (ids[:, 0] != 0)
    last = [row[row != nano_text.PAD_ID][-1] for row in ids]
    assert (begins >= 1).all() and set(last) == {1}
    assert (weights > 0).mean() > 0.7


def test_held_out_phrasings_are_never_trained(tokenizer: Any) -> None:
    held_out = {
        question.prompt
        for split in ("phrasing", "opener")
        for question in nano_text.fact_questions(split, 988)
    }
    seen = {question.prompt for question in nano_text.fact_questions("seen", 988)}
    rng = random.Random(0)
    trained = set()
    for _ in range(80_000):
        document = nano_text.MIXES[128][0][0](rng, 128)
        trained.add(document.split(nano_chat.ANSWER)[0])
    assert not held_out & trained
    assert len(seen & trained) > 0.9 * len(seen)
    assert "<｜begin▁of▁sentence｜>The capital of France is" in trained


def test_held_out_needles_are_never_trained() -> None:
    rng = random.Random(0)
    pairs = set()
    for _ in range(300):
        document = nano_text.MIXES[2048][0][0](rng, 2048)
        pairs |= set(re.findall(r"The password of (\w+) is (\w+)\.", document))
    asked = set()
    for distance in nano_text.DISTANCES:
        for question in nano_text.needle_questions(distance, 30):
            name = re.findall(r"The password of (\w+) is$", question.prompt)[0]
            asked.add((name, question.answer.strip(" .")))
    assert len(pairs) > 1000 and not pairs & asked


@pytest.mark.parametrize("distance", [256, 512, 1024])
def test_needles_are_as_far_as_said(tokenizer: Any, distance: int) -> None:
    for question in nano_text.needle_questions(distance, 10):
        after = question.prompt.split(f"is{question.answer}", 1)[1]
        assert distance <= len(tokenizer.encode(after).ids) <= 1.2 * distance
        assert question.prompt.count(question.answer) == 1


def test_recitations_are_long_and_end(tokenizer: Any) -> None:
    for question in nano_text.recitation_questions():
        assert 400 <= len(tokenizer.encode(question.answer).ids) <= 640
        assert question.answer.endswith(nano_chat.END)


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (13, "thirteen"), (40, "forty"), (99, "ninety-nine"), (100, "one hundred")],
)
def test_number_words(number: int, words: str) -> None:
    assert nano_text.number_words(number) == words


def test_number_words_above_a_hundred() -> None:
    assert nano_text.number_words(121) == "one hundred and twenty-one"
