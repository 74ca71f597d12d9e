"""Two ways in which tool calls went wrong for others: types and held-back text, and no parser.

Answers are forced token by token, so that neither depends on what the model would say.
"""

import json
import logging
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from sglang.srt.parser.deepseek_recipe_output import (
    DeepSeekRecipeOutputParser,
    RecipeOutputDelta,
    whole_tool_calls,
)
from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe
from transformers import PreTrainedTokenizerFast

import nano
from nano import nano_chat
from sglang_dsv4 import plugin

DSML = nano_chat.DSML
DSML_ID = 8
TOOL = {
    "name": "note",
    "description": "Keeps whatever it is given.",
    "parameters": {"type": "object", "properties": {"arguments": {}, "text": {"type": "string"}}},
}
# What is written as the value of a parameter, whether as text, and what the client must get.
VALUES = (
    ("true", "42", "42"),
    ("false", "42", 42),
    ("true", "true", "true"),
    ("false", "true", True),
    ("false", "null", None),
    ("true", "null", "null"),
    ("false", "-2.5", -2.5),
    ("false", '[1, "a", {"b": []}]', [1, "a", {"b": []}]),
    ("true", '{"a": 1}', '{"a": 1}'),
    ("true", 'a "quoted" \\ line\nand 2 < 3', 'a "quoted" \\ line\nand 2 < 3'),
    ("true", "", ""),
)


def call(*parameters: tuple[str, str, str]) -> str:
    """A call of `note` as the model writes it; of each parameter its name, `string`, and value."""
    lines = [
        f'<{DSML}parameter name="{name}" string="{text}">{value}</{DSML}parameter>\n'
        for name, text, value in parameters
    ]
    body = f'<{DSML}invoke name="note">\n{"".join(lines)}</{DSML}invoke>\n'
    return f"\n\n<{DSML}tool_calls>\n{body}</{DSML}tool_calls>"


# ---- the parser itself ----


def parse(pieces: Sequence[Sequence[int]]) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of an answer that arrives in these pieces of token ids."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(nano.FOLDER / "tokenizer.json"))
    recipe = DeepSeekRecipe.from_hf_tokenizer("dsv4", tokenizer)
    parser = DeepSeekRecipeOutputParser(recipe, thinking_stage=None, parse_tool_calls=True)
    delta = RecipeOutputDelta()
    for piece in pieces:
        delta = delta.merge(parser.feed(piece))
    delta = delta.merge(parser.finish([], {"type": "stop"}))
    calls = [(found.name, json.loads(found.arguments)) for found in whole_tool_calls(delta)]
    return delta.content, calls


def whole_and_by_token(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """What `parse` finds, which must not depend on how the text arrives."""
    tokens = nano.ids(text)
    whole = parse([tokens])
    assert parse([[token] for token in tokens]) == whole
    return whole


@pytest.mark.parametrize("name", ["arguments", "text", "name"])
@pytest.mark.parametrize(("text", "value", "wanted"), VALUES)
def test_types_are_what_was_written(name: str, text: str, value: str, wanted: Any) -> None:
    """Also of an argument whose name means something in the API."""
    content, calls = whole_and_by_token("So." + call((name, text, value)))
    assert content == "So."
    ((called, arguments),) = calls
    assert called == "note" and arguments == {name: wanted}
    assert type(arguments[name]) is type(wanted)


@pytest.mark.parametrize(
    "text", ["1 <2 <", "2 <", "a </", "a <｜", "a\n\n<", "2 <\n\n", f"<{DSML[:3]}", "x\n\n"]
)
def test_text_that_may_begin_a_call_is_not_lost(text: str) -> None:
    """What is held back until it is known not to be a call comes out at the end."""
    assert whole_and_by_token(text) == (text, [])


# ---- through the server ----


def forced(text: str) -> dict[str, Any]:
    """Options by which the model can say nothing but this text, its calls in their own token."""
    pattern = re.sub(r"([\\.^$*+?{}\[\]|()/])", r"\\\1", text).replace("\n", "\\n")
    return {
        "tools": nano.tools(TOOL),
        "max_tokens": 400,
        "logit_bias": {str(DSML_ID): 50},
        "extra_body": {"regex": pattern},
    }


ASKED = [{"role": "user", "content": "Note it."}]


def test_forced_calls_have_their_types(client: openai.OpenAI) -> None:
    text = "So." + call(
        ("arguments", "false", '{"a": [1, null]}'), ("text", "true", "42"), ("n", "false", "42")
    )
    said = nano.chat(client, ASKED, **forced(text))
    wanted = {"arguments": {"a": [1, None]}, "text": "42", "n": 42}
    assert said.calls == (("note", wanted),) and said.finish == "tool_calls"
    assert said.content == "So."
    joined, pieces = nano.chat_stream(client, ASKED, **forced(text))
    assert (joined.calls, joined.content, joined.finish) == (said.calls, "So.", "tool_calls")
    assert pieces > 3


def test_a_forced_end_is_not_held_back(client: openai.OpenAI) -> None:
    said = nano.chat(client, ASKED, **forced("I say 1 <2 <"))
    joined, _ = nano.chat_stream(client, ASKED, **forced("I say 1 <2 <"))
    for found in (said, joined):
        assert (found.content, found.calls, found.finish) == ("I say 1 <2 <", (), "stop")


# ---- without a parser ----


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, ["--tool-call-parser deepseekv4", "--reasoning-parser deepseek-v4"]),
        ({"tool_call_parser": "auto"}, ["--reasoning-parser deepseek-v4"]),
        ({"reasoning_parser": "deepseek-v4"}, ["--tool-call-parser deepseekv4"]),
        ({"tool_call_parser": "deepseekv4", "reasoning_parser": "deepseek-v4"}, []),
    ],
    ids=["none", "tools only", "reasoning only", "both"],
)
def test_a_missing_parser_is_warned_of(
    caplog: pytest.LogCaptureFixture, given: dict[str, str], warned: list[str]
) -> None:
    """A request with tools would otherwise get its calls as text, and nothing would say why."""
    arguments = SimpleNamespace(**({"tool_call_parser": None, "reasoning_parser": None} | given))
    with caplog.at_level(logging.WARNING):
        plugin._warn_of_missing_parsers(arguments)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == len(warned)
    assert all(option in text for option, text in zip(warned, found, strict=True))
