"""Asks a running SGLang server for a completion and a chat reply, each twice; shows the answers.

The second request of each kind repeats the first, so the server should find a prefix of it in its
cache. The exit code is 0 when it did and our class served, 1 otherwise, 2 for wrong usage.
"""

import argparse
import json
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from openai import APIError, OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

# SGLang reuses whole pages of this many tokens, so both prompts must be longer. The small
# checkpoint's tokenizer makes one token of each byte; a usual one makes one of about four.
PAGE_TOKENS = 256
STORY = "The lighthouse keeper counted the ships that passed, and wrote each into his book. " * 16
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer questions about this story. " + STORY},
    {"role": "user", "content": "What did the keeper write down?"},
]
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Answer:
    """One request's text, its number of prompt tokens, and how many of them came from the cache."""

    text: str
    prompt_tokens: int
    cached_tokens: int


def complete(client: OpenAI, model: str) -> Answer:
    """One greedy completion of STORY."""
    reply = client.completions.create(
        model=model, prompt=STORY, max_tokens=ANSWER_TOKENS, temperature=0
    )
    return answer_of(reply.choices[0].text, reply.usage)


def chat(client: OpenAI, model: str) -> Answer:
    """One greedy chat reply to MESSAGES."""
    reply = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=ANSWER_TOKENS, temperature=0
    )
    message = reply.choices[0].message
    # Where a reasoning parser splits the reply, SGLang puts what came before </think> here.
    return answer_of(message.content or getattr(message, "reasoning_content", ""), reply.usage)


def answer_of(text: str | None, usage: CompletionUsage | None) -> Answer:
    """The server leaves the details out when no token was cached."""
    assert usage is not None, "a reply that is not streamed states its usage"
    details = usage.prompt_tokens_details
    return Answer(text or "", usage.prompt_tokens, (details and details.cached_tokens) or 0)


def served_class(url: str) -> str | None:
    """The model class that the running scheduler serves with; None where the server does not say.

    The scheduler reports it under the key `sglang_dsv4`, beside the rest of its internal state.
    """
    with urllib.request.urlopen(f"{url}/server_info", timeout=30) as response:
        info = json.load(response)
    for state in [info, *info.get("internal_states", [])]:
        if "sglang_dsv4" in state:
            report = state["sglang_dsv4"]
            return report["model_class"] if isinstance(report, dict) else str(report)
    return None


def ask_twice(name: str, ask: Callable[[], Answer]) -> list[str]:
    """Print both answers; return what is wrong with the second."""
    print(f"\n{name}")
    for turn in ("first", "again"):
        answer = ask()
        print(f"  {turn}: {answer.text!r}")
        print(f"         {answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached")
    if answer.cached_tokens >= PAGE_TOKENS:
        return []
    return [
        f"{name}: expected at least {PAGE_TOKENS} cached prompt tokens the second time, "
        f"found {answer.cached_tokens}"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="the server, e.g. http://127.0.0.1:30000")
    url = parser.parse_args().url.rstrip("/")

    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)
    try:
        model = client.models.list().data[0].id
        problems = ask_twice("Completion", lambda: complete(client, model))
        problems += ask_twice("Chat", lambda: chat(client, model))
        served_by = served_class(url)
    except (APIError, OSError) as error:
        print(f"error: the request to {url} failed: {error}", file=sys.stderr)
        return 1
    print(f"\nServed by: {served_by or 'unknown'}")
    if served_by is None or not served_by.startswith("sglang_dsv4."):
        problems.append(
            "expected a class of sglang_dsv4 to serve, found "
            f"{served_by or 'no report of it from the server'}; is the plugin installed and not "
            "switched off by SGLANG_PLUGINS?"
        )
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
