"""The trained model that the package carries, and how tests ask it."""

import functools
import importlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

import sglang_dsv4
from checkpoint_files import dense_twin, read
from serving import Reply, Server

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
nano_chat = importlib.import_module("nano_chat")
nano_text = importlib.import_module("nano_text")

# The only place that says where the trained checkpoint lies.
FOLDER = Path(sglang_dsv4.__file__).parent / "nano"
END_ID = 1
PAGE = 256  # tokens; the radix cache shares whole pages
RUN_ON = 8  # tokens that an answer may go on beyond the right one, so that a stop is a choice


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def write_dense(folder: Path) -> Path:
    """The same checkpoint for transformers, which reads no NVFP4: every weight dense, by the tests'
    own arithmetic; what is quantised becomes float32. Returns `folder`."""
    twin = dense_twin(read(FOLDER), torch.float32)
    save_file(twin, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((FOLDER / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ids(text: str) -> list[int]:
    """Token ids of a text, in which special tokens may be spelled out; nothing is added."""
    return tokenizer().encode(text, add_special_tokens=False).ids


def plain(marked: str) -> str:
    """A text of nano_chat.render without the marks around answers."""
    return marked.replace(nano_chat.ANSWER, "").replace(nano_chat.ANSWER_END, "")


def ask(server: Server, question: Any, temperature: float = 0) -> Reply:
    """The continuation of a nano_text.Question: as long as its answer, or up to the model's end."""
    answer = ids(question.answer)
    count = len(answer) + (RUN_ON if answer[-1] == END_ID else 0)
    return server.generate(ids(question.prompt), count, temperature=temperature, ignore_eos=False)


def is_right(reply: Reply, question: Any) -> bool:
    """Whether the whole answer is right, its end included where the question has one."""
    return list(reply.tokens) == ids(question.answer)


def ask_all(server: Server, questions: Sequence[Any], temperature: float = 0) -> list[Reply]:
    """Answers to all questions: greedy ones eight at once, sampled ones one at a time, since their
    draws depend on what else is in the batch."""
    with ThreadPoolExecutor(1 if temperature else 8) as pool:
        return list(pool.map(lambda question: ask(server, question, temperature), questions))


def share_right(server: Server, questions: Sequence[Any], temperature: float) -> float:
    """Share of right answers; prints the wrong ones."""
    replies = ask_all(server, questions, temperature)
    wrong = []
    for question, reply in zip(questions, replies, strict=True):
        if not is_right(reply, question):
            said = tokenizer().decode(list(reply.tokens), skip_special_tokens=False)
            wrong.append(f"{question.prompt[-60:]!r}: {said!r}, expected {question.answer!r}")
    share = 1 - len(wrong) / len(questions)
    print(
        f"{len(questions)} questions at temperature {temperature}: {share:.3f} right", *wrong[:20]
    )
    return share


def repeats(tokens: Sequence[int], size: int = 8) -> Counter[tuple[int, ...]]:
    """How often each run of `size` tokens occurs."""
    return Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


# ---- chat ----

Conversations = dict[str, list[Any]]
CALL = nano_chat.Turn("assistant", "", "I multiply.", "multiply", {"a": 12, "b": 3.5})
OPEN = nano_chat.Turn(
    "assistant", "Now.", "I open.", "open_door", {"door": "mill", "password": "otter"}
)


def with_and_without_tools(conversations: Conversations) -> list[tuple[str, bool]]:
    """Each conversation's name, and whether tools are offered; calls need them."""
    return [
        (name, with_tools)
        for name, turns in conversations.items()
        for with_tools in (False, True)
        if with_tools or not any(turn.call for turn in turns)
    ]


def messages(turns: Sequence[Any]) -> list[dict[str, Any]]:
    """nano_chat.Turns as the messages of an OpenAI request."""
    written = []
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.role == "tool":
            message["tool_call_id"] = "call"
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.call:
            function = {"name": turn.call, "arguments": json.dumps(turn.arguments)}
            message["tool_calls"] = [{"id": "call", "type": "function", "function": function}]
        written.append(message)
    return written


def tools(*functions: Any) -> list[dict[str, Any]]:
    """Function parts as the tools of an OpenAI request."""
    return [{"type": "function", "function": function} for function in functions]


@dataclass(frozen=True)
class Said:
    """What a chat request answered. calls: name and arguments of each; prompt: its token ids."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    finish: str
    prompt: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached: int = 0


def chat(client: openai.OpenAI, asked: Sequence[dict[str, Any]], **options: Any) -> Said:
    """One chat request: at temperature 0 and without thinking, unless `options` say otherwise.

    `thinking` is SGLang's switch in chat_template_kwargs; other options are those of the API.
    """
    reply = client.chat.completions.create(**_request(asked, options, stream=False))
    (choice,), usage = reply.choices, reply.usage
    message = choice.message
    details = usage.prompt_tokens_details
    return Said(
        content=message.content or "",
        reasoning=message.reasoning_content or "",
        calls=tuple(
            (call.function.name, json.loads(call.function.arguments))
            for call in message.tool_calls or ()
        ),
        finish=choice.finish_reason,
        prompt=tuple(choice.prompt_token_ids),
        prompt_tokens=usage.prompt_tokens,
        cached=(details and details.cached_tokens) or 0,
    )


def _request(
    asked: Sequence[dict[str, Any]], options: dict[str, Any], stream: bool
) -> dict[str, Any]:
    options = {"temperature": 0, "max_tokens": 120, **options}
    extra = {
        "chat_template_kwargs": {"thinking": options.pop("thinking", False)},
        "return_prompt_token_ids": not stream,  # SGLang refuses to in a stream
        **options.pop("extra_body", {}),
    }
    request = {"model": "nano", "messages": list(asked), "extra_body": extra, "stream": stream}
    return {**request, **options}


def chat_stream(
    client: openai.OpenAI, asked: Sequence[dict[str, Any]], **options: Any
) -> tuple[Said, int]:
    """The same as a stream: what its pieces join to, and how many there were."""
    content = reasoning = finish = ""
    calls: dict[int, list[str]] = {}
    pieces = 0
    for part in client.chat.completions.create(**_request(asked, options, stream=True)):
        for choice in part.choices:
            pieces += 1
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                name, arguments = calls.setdefault(call.index, ["", ""])
                function = call.function
                calls[call.index] = [
                    name + (function.name or ""),
                    arguments + (function.arguments or ""),
                ]
    whole = tuple((name, json.loads(arguments)) for name, arguments in calls.values())
    return Said(content, reasoning, whole, finish), pieces
