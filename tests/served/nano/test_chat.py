"""Chat in the official encoding: prompts, answers, reasoning, calls, turns, and their streams."""

import json
import re
from dataclasses import replace
from typing import Any

import openai
import pytest

import nano
from nano import CALL, OPEN, nano_chat, nano_text
from serving import Server

Turn = nano_chat.Turn
CONVERSATIONS = {
    "user": [Turn("user", "What is the capital of France?")],
    "system": [Turn("system", "Be brief."), Turn("user", "Which day follows Monday?")],
    "turns": [Turn("user", "a"), Turn("assistant", "b", "r"), Turn("user", "c")],
    "number call": [Turn("user", "a"), CALL, Turn("tool", "42")],
    "text call": [Turn("system", "s"), Turn("user", "a"), OPEN, Turn("tool", "open")],
}
# temperature -> questions of a kind, and the least share of them answered right
CHATS = {0: (10, 1.0), 1: (8, 0.6)}
CALLS = {0: (4, 1.0), 1: (4, 0.75)}


# ---- prompts ----


@pytest.mark.parametrize("mode", ["chat", "thinking", "low effort"])
@pytest.mark.parametrize(("name", "with_tools"), nano.with_and_without_tools(CONVERSATIONS))
def test_prompts_are_what_nano_was_trained_on(
    server: Server, name: str, with_tools: bool, mode: str
) -> None:
    """The server's own encoder and nano_chat give the same token ids."""
    turns, functions = CONVERSATIONS[name], list(nano_text.TOOLS) if with_tools else []
    body: dict[str, Any] = {"model": "nano", "messages": nano.messages(turns)}
    body |= {"tools": nano.tools(*functions)} if functions else {}
    body |= {
        "chat": {},
        "thinking": {"chat_template_kwargs": {"thinking": True}},
        "low effort": {"reasoning_effort": "low"},
    }[mode]
    ours = nano_chat.render(
        turns, thinking=mode != "chat", maximum_effort=mode == "thinking", tools=functions
    )
    assert server.request("/v1/tokenize", body)["tokens"] == nano.ids(nano.plain(ours))


# ---- answers ----


def user_of(question: Any) -> list[dict[str, Any]]:
    """The message that a question of nano_text.chat_questions or tool_questions asks."""
    text = question.prompt.split(nano_chat.USER)[1].split(nano_chat.ASSISTANT)[0]
    return [{"role": "user", "content": text}]


def expected(question: Any) -> nano.Said:
    reasoning, _, content = question.answer.rpartition(nano_chat.THINK_END)
    prompt = tuple(nano.ids(question.prompt))
    return nano.Said(content.removesuffix(nano_chat.END), reasoning, (), "stop", prompt)


def told(said: nano.Said) -> tuple[Any, ...]:
    """What a client sees of an answer, without counts."""
    return said.content, said.reasoning, said.calls, said.finish


@pytest.mark.parametrize("temperature", CHATS)
@pytest.mark.parametrize("thinking", [False, True])
def test_answers_and_reasoning(client: openai.OpenAI, thinking: bool, temperature: float) -> None:
    """The answer in `content`, what was thought in `reasoning_content`, neither in both."""
    count, least = CHATS[temperature]
    right = 0
    for question in nano_text.chat_questions(count, thinking):
        wanted = expected(question)
        said = nano.chat(client, user_of(question), thinking=thinking, temperature=temperature)
        assert said.prompt == wanted.prompt
        assert bool(said.reasoning) <= thinking
        right += told(said) == told(wanted)
    print(f"{right} of {count} right, {thinking=}, {temperature=}")
    assert right >= least * count


@pytest.mark.parametrize("temperature", CALLS)
def test_tool_calls(client: openai.OpenAI, temperature: float) -> None:
    """Name, and arguments of the right JSON types: numbers as numbers, text as text."""
    count, least = CALLS[temperature]
    right = 0
    for question in nano_text.tool_questions(count):
        (name,) = re.findall(r'invoke name="(\w+)"', question.answer)
        (tool,) = [tool for tool in nano_text.TOOLS if tool["name"] == name]
        written = re.findall(r'name="(\w+)" string="(\w+)">(.*?)</', question.answer)
        arguments = {
            key: value if text == "true" else json.loads(value) for key, text, value in written
        }
        said = nano.chat(client, user_of(question), tools=nano.tools(tool), temperature=temperature)
        assert said.prompt == tuple(nano.ids(question.prompt))
        right += told(said) == ("", "", ((name, arguments),), "tool_calls")
    print(f"{right} of {count} calls right, {temperature=}")
    assert right >= least * count


def test_a_tool_is_called_and_its_result_told(client: openai.OpenAI) -> None:
    """A whole round: thoughts, a call, its result sent back, and the answer that tells it."""
    tool = nano_text.TOOLS[2]
    asked = [Turn("user", "Please multiply 61 and 38 with the tool.")]
    said = nano.chat(client, nano.messages(asked), tools=nano.tools(tool), thinking=True)
    assert said.reasoning == "I need the tool multiply."
    assert said.calls == (("multiply", {"a": 61, "b": 38}),)
    turns = [
        *asked,
        Turn("assistant", said.content, said.reasoning, *said.calls[0]),
        Turn("tool", "2318"),
    ]
    end = nano.chat(client, nano.messages(turns), tools=nano.tools(tool), thinking=True)
    ours = nano_chat.render(turns, thinking=True, tools=[tool])
    assert end.prompt == tuple(nano.ids(nano.plain(ours)))
    assert told(end) == ("The product is 2318.", "The tool has answered.", (), "stop")


@pytest.mark.parametrize("thinking", [False, True])
def test_a_call_can_be_required(client: openai.OpenAI, thinking: bool) -> None:
    """Also where the model would answer without a tool."""
    said = nano.chat(
        client,
        nano.messages([Turn("user", "Which letter is after D?")]),
        tools=nano.tools(nano_text.TOOLS[0]),
        tool_choice="required",
        thinking=thinking,
        max_tokens=200,
    )
    assert said.finish == "tool_calls" and bool(said.reasoning) == thinking
    assert [(name, list(arguments)) for name, arguments in said.calls] == [
        ("get_weather", ["city"])
    ]


# ---- streams ----


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ("What is the capital of France?", {}),
        ("What is the capital of France?", {"thinking": True}),
        ("Please multiply 61 and 38 with the tool.", {"tools": nano.tools(nano_text.TOOLS[2])}),
        (
            "Open the door of the mill. The password is otter.",
            {"tools": nano.tools(nano_text.TOOLS[3]), "thinking": True},
        ),
    ],
    ids=["answer", "reasoning", "call", "reasoning and call"],
)
def test_a_stream_is_the_whole_answer(
    client: openai.OpenAI, asked: str, options: dict[str, Any]
) -> None:
    turns = nano.messages([Turn("user", asked)])
    whole = nano.chat(client, turns, **options)
    joined, pieces = nano.chat_stream(client, turns, **options)
    assert told(joined) == told(whole)
    assert pieces > 4
    assert bool(whole.calls) == ("tools" in options)
    assert bool(whole.reasoning) == options.get("thinking", False)


# ---- turns ----


def chapters() -> list[tuple[str, str, str]]:
    """Four short stories: text, a question about it, and the sentence that answers it."""
    found = []
    for question in nano_text.needle_questions(128, 4, seed=1):
        text, _, recall = question.prompt.removeprefix(nano_chat.BEGIN).rpartition("\n")
        found.append((text, f"What is the {recall[4:-3]}?", recall + question.answer))
    return found


def test_turns_find_what_was_said_before_in_the_cache(
    client: openai.OpenAI, server: Server
) -> None:
    """Each turn adds a story. All whole pages of the turns before are cached, and every answer is
    the one that a server with an empty cache gives."""
    server.flush()
    turns: list[Any] = []
    history: list[int] = []  # of the cache: the last prompt, and what was said after it
    said: list[nano.Said] = []
    prompts: list[list[Any]] = []
    for story, question, sentence in chapters():
        turns.append(Turn("user", f"{story}\n{question}"))
        prompts.append(list(turns))
        answer = nano.chat(client, nano.messages(turns), max_tokens=30)
        common = nano.common_prefix(history, answer.prompt)
        assert answer.cached == common // nano.PAGE * nano.PAGE
        assert common == len(history)
        assert answer.content == sentence
        history = [*answer.prompt, *nano.ids(answer.content)]
        turns.append(Turn("assistant", answer.content))
        said.append(answer)
    cached = [answer.cached for answer in said]
    assert cached[0] == 0 and cached == sorted(cached) and cached[-1] >= 2 * nano.PAGE, cached
    for turns, warm in zip(prompts, said, strict=True):
        server.flush()
        answer = nano.chat(client, nano.messages(turns), max_tokens=30)
        assert answer == replace(warm, cached=0)
