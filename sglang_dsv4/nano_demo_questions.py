"""What the demo asks, what nano has to answer, and how an answer is read and judged."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from sglang_dsv4.nano_demo_server import Client, ServerError

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWER_TOKENS = 128  # at most


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the server has parsed it."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        given = (f"{name}={json.dumps(value)}" for name, value in self.arguments.items())
        return f"{self.name}({', '.join(given)})"


@dataclass(frozen=True)
class Question:
    """One greedy request.

    shown: the prompt, or its end where it is long. body: the fields of the request that are not
    the same for all. expected, expected_reasoning: how nano's answer begins. expected_call: what
    nano calls. repeats: whether the prompt was sent before, so that whole pages of it are cached.
    """

    name: str
    shown: str
    path: str
    body: dict[str, Any]
    expected: str = ""
    expected_reasoning: str = ""
    expected_call: ToolCall | None = None
    repeats: bool = False

    @property
    def request(self) -> dict[str, Any]:
        return {"model": "default", "temperature": 0, "max_tokens": ANSWER_TOKENS, **self.body}


@dataclass(frozen=True)
class Answer:
    """What came back. cached_tokens: prompt tokens from the prefix cache, None if not told."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    prompt_tokens: int
    cached_tokens: int | None
    seconds: float


@dataclass
class _Parts:
    """An answer while it comes."""

    text: str = ""
    reasoning: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def answer(self, calls: tuple[ToolCall, ...] = ()) -> Answer:
        details = self.usage.get("prompt_tokens_details")
        return Answer(
            text=self.text,
            reasoning=self.reasoning,
            calls=calls,
            prompt_tokens=self.usage["prompt_tokens"],
            cached_tokens=details and details.get("cached_tokens", 0),
            seconds=time.monotonic() - self.started,
        )


def user_question(text: str) -> Question:
    """A question of the user's own, as a chat of one turn."""
    text = text.encode(errors="replace").decode()  # an argument's stray bytes are no UTF-8
    return Question("chat", text, CHAT, _chat(text))


def questions() -> tuple[Question, ...]:
    """The demo's own questions, in an order in which the last one finds its prompt cached."""
    prompt = "The capital of France is"
    chat, thinking = "Which symbol stands for the element gold?", "How much is 7 x 8?"
    weather = "How is the weather in Paris?"
    story = f"Story: {_story()}\n{_RECALL}"
    told = f"Story: ({len(story):,} letters) ... {_RECALL}"
    return (
        Question("completion", prompt, COMPLETION, {"prompt": prompt}, expected="Paris."),
        Question("chat", chat, CHAT, _chat(chat), expected="The chemical symbol of gold is Au."),
        Question(
            "chat with thinking",
            thinking,
            CHAT,
            {**_chat(thinking), "chat_template_kwargs": {"thinking": True}},
            expected="7 times 8 is 56.",
            expected_reasoning="This is about the product of 7 8.",
        ),
        Question(
            "tool call",
            weather,
            CHAT,
            {**_chat(weather), "tools": [_WEATHER]},
            expected_call=ToolCall("get_weather", {"city": "Paris"}),
        ),
        Question("long story", told, COMPLETION, {"prompt": story}, expected=f"{_PASSWORD}."),
        Question(
            "long story, again",
            told,
            COMPLETION,
            {"prompt": story},
            expected=f"{_PASSWORD}.",
            repeats=True,
        ),
    )


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_RECALL, _PASSWORD = "The password of Greta is", "falcon"
_SENTENCES = (
    "{a} walked to the {p} and carried a small {t}.",
    "On {d} it rained, and {a} stayed in the {p}.",
    "{a} lost a {t} on the way to the {p}.",
    "Every {d} the {p} was closed, so {a} went home.",
)


def _story() -> str:
    """64 sentences, the password in the third from the end.

    For nano they are 740 tokens, hence more than two pages; and even with a token for each letter
    they fit a context of 4,096.
    """
    names = cycle("Amelia Boris Clara Hugo Irene Leon Maria Oscar Vera".split())
    places = cycle("harbour mill library garden bridge station bakery".split())
    things = cycle("rope lamp book coin drum".split())
    days = cycle("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
    told = [
        sentence.format(a=next(names), p=next(places), t=next(things), d=next(days))
        for sentence in islice(cycle(_SENTENCES), 63)
    ]
    return " ".join([*told[:-2], f"{_RECALL} {_PASSWORD}.", *told[-2:]])


def ask(client: Client, question: Question) -> Answer:
    """Raises ServerError."""
    parts = _Parts()
    reply = client.json(question.path, question.request)
    try:
        (choice,) = reply["choices"]
        message = choice.get("message", choice)
        parts.text = message.get("content", message.get("text")) or ""
        parts.reasoning = message.get("reasoning_content") or ""
        parts.usage = reply["usage"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        made = (ToolCall(call["name"], json.loads(call["arguments"])) for call in calls)
        return parts.answer(tuple(made))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ServerError(f"{client.url}{question.path}: an unknown answer ({error!r})") from error


def stream(client: Client, question: Question) -> Iterator[str | Answer]:
    """Pieces of a chat's text as they come, at last the whole answer. Raises ServerError."""
    parts = _Parts()
    asked = {**question.request, "stream": True, "stream_options": {"include_usage": True}}
    for event in client.events(question.path, asked):
        parts.usage = event.get("usage") or parts.usage
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content") or ""
            parts.text += piece
            yield piece
    if not parts.usage:
        raise ServerError(f"{client.url}{question.path}: the answer broke off")
    yield parts.answer()


def faults(question: Question, answer: Answer, *, words: bool, page: int) -> list[str]:
    """What is not as expected, one sentence each.

    words: whether nano answers, so that its words are known. page: tokens of a cache page.
    """
    found = []
    if words:
        compared = [("answer", question.expected, answer.text)]
        compared.append(("reasoning", question.expected_reasoning, answer.reasoning))
        found += [
            f"expected {what} to begin with {expected!r}, found {given!r}"
            for what, expected, given in compared
            if not given.strip().startswith(expected)
        ]
        call = question.expected_call
        if call is not None and answer.calls != (call,):
            given = ", ".join(map(str, answer.calls)) or f"none (answer: {answer.text!r})"
            found.append(f"expected the call {call}, found {given}")
    if question.repeats and (answer.cached_tokens or 0) < page:
        told = f"{answer.cached_tokens}, fewer than a page of {page}"
        if answer.cached_tokens is None:
            told = "no report of them (the server needs --enable-cache-report)"
        found.append(f"expected cached tokens, since the prompt repeats the last one, found {told}")
    return [f"{question.name}: {fault}" for fault in found]
