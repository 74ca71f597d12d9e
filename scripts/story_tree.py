#!/usr/bin/env python
"""Asks a tree of questions about one long story, with SGLang's frontend language; see --help."""

import argparse
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import nano_text
import sglang as sgl
from nano_chat import BEGIN

_DESCRIPTION = """\
A program in SGLang's frontend language, against a running server: it reads a story of more than
1,000 tokens once, forks a question about each of its secrets, and forks each of these again into
two questions that go on from the first answer. Printed are the answers as a tree, for each request
its prompt tokens and how many of them the server had in its cache, and the share of all prompt
tokens that the cache saved. A fork sends its text ahead of its branches; these requests count, too.

The story is made for nano, the small trained model that the package carries. Another model
completes it as well.
"""
_EXAMPLES = """\
examples:
  scripts/story_tree.py                                  a server at http://127.0.0.1:30000
  scripts/story_tree.py --url http://127.0.0.1:31000     another one
  scripts/story_tree.py --story 7                        another story

exit codes: 0 pages of the story were reused, 1 none was or the server cannot be asked
"""
DISTANCE = 1024  # tokens between the first secret and the end of the story
SECRET = re.compile(r"The ((?:password|lucky number|favourite colour) of \w+) is (\w+)\.")
ANSWER = {"max_tokens": 8, "temperature": 0, "stop": [".", "\n"]}


@dataclass(frozen=True)
class Request:
    """What one request cost. answer: None where a fork sent its text ahead."""

    prompt_tokens: int
    cached_tokens: int
    answer: str | None = None

    def __str__(self) -> str:
        return f"{self.prompt_tokens} prompt tokens, {self.cached_tokens} cached"


@dataclass
class Node:
    """A question, its request, and the questions that were forked from its answer."""

    question: str
    wanted: str
    request: Request
    children: list["Node"] = field(default_factory=list)


class CountingEndpoint(sgl.RuntimeEndpoint):
    """SGLang's endpoint, which also keeps what forks cost: it does not report that."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.sent_ahead: list[Request] = []
        self._lock = threading.Lock()

    def commit_lazy_operations(self, s: Any) -> None:
        """Read a fork's text so far into the cache."""
        data = {"text": s.text_, "sampling_params": {"max_new_tokens": 0}}
        with self._lock:
            self.sent_ahead.append(_cost(self._generate_http_request(s, data)["meta_info"]))


def _cost(meta: dict[str, Any], answer: str | None = None) -> Request:
    return Request(meta["prompt_tokens"], meta["cached_tokens"], answer)


def make_story(number: int) -> tuple[str, dict[str, str]]:
    """A story of more than 1,000 tokens, and its secrets: `password of Anna` -> `otter`."""
    prompt = nano_text.needle_questions(DISTANCE, 1, seed=number)[0].prompt
    text = prompt.removeprefix(BEGIN).rpartition("\n")[0]
    return text + "\n", dict(SECRET.findall(text))


@sgl.function
def ask_tree(s: Any, story: str, secrets: dict[str, str], tree: list[Node]) -> None:
    """The story, a fork for each question, and from each of these a fork for two others."""
    questions = list(secrets)
    s += story
    s.sync()  # A fork sends ahead what has been added by then, and this is still in a queue.
    branches = s.fork(len(questions))
    for branch, question in zip(branches, questions, strict=True):
        branch += f"The {question} is" + sgl.gen("answer", **ANSWER)
    forks = []
    for i, branch in enumerate(branches):
        branch += ".\n"
        following = [questions[(i + step) % len(questions)] for step in (1, 2)]
        forks.append((following, branch.fork(2)))
        for question, twig in zip(*forks[-1], strict=True):
            twig += f"Question: What is the {question}? Answer:" + sgl.gen("answer", **ANSWER)
    for question, branch, (following, twigs) in zip(questions, branches, forks, strict=True):
        tree.append(_node(question, secrets, branch))
        tree[-1].children = [_node(q, secrets, t) for q, t in zip(following, twigs, strict=True)]
        twigs.join()
    branches.join()


def _node(question: str, secrets: dict[str, str], asked: Any) -> Node:
    """The question with what its request cost, once it has been answered."""
    meta = asked.get_meta_info("answer")
    if asked.error() is not None:
        raise RuntimeError(asked.error())
    return Node(question, secrets[question], _cost(meta, asked["answer"].strip()))


def show(tree: Sequence[Node], sent_ahead: Sequence[Request]) -> int:
    """Print everything; how many prompt tokens the cache saved."""
    print("The story")
    for request in sent_ahead:
        print(f"  sent ahead: {request}")
    asked = []
    for branch in tree:
        asked += [branch, *branch.children]
        for node, indent in [(branch, "  "), *((twig, "    ") for twig in branch.children)]:
            said = node.request.answer
            verdict = "as told" if said == node.wanted else f"told was {node.wanted!r}"
            print(f"{indent}{node.question}: {said!r} ({verdict}; {node.request})")
    costs = [*sent_ahead, *(node.request for node in asked)]
    cached = sum(request.cached_tokens for request in costs)
    tokens = sum(request.prompt_tokens for request in costs)
    right = sum(node.request.answer == node.wanted for node in asked)
    print(f"\n{right} of {len(asked)} answers are as the story tells them")
    print(f"{cached} of {tokens} prompt tokens came from the cache: {cached / tokens:.1%} saved")
    return cached


def main() -> int:
    parser = argparse.ArgumentParser(
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:30000",
        help="a running server (default: %(default)s); none is started",
    )
    parser.add_argument(
        "--story", type=int, default=0, metavar="N", help="the number of the story (default: 0)"
    )
    options = parser.parse_args()
    try:
        endpoint = CountingEndpoint(options.url.rstrip("/"))
        story, secrets = make_story(options.story)
        tree: list[Node] = []
        state = ask_tree.run(story=story, secrets=secrets, tree=tree, backend=endpoint)
        if state.error() is not None:
            raise RuntimeError(state.error())
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        print(
            f"error: expected an SGLang server at {options.url}: {error}\n"
            "Start one, or name another with --url.",
            file=sys.stderr,
        )
        return 1
    if show(tree, endpoint.sent_ahead):
        return 0
    print(
        "error: expected pages of the story in the cache, found none; is the server's radix cache "
        "switched off, or its window pool (--swa-full-tokens-ratio) too small?",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
