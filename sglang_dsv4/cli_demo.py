"""`sglang-dsv4 demo`: a server with the packaged checkpoint nano, questions to it, a prompt."""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_dsv4 import nano_demo_plot
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.nano_demo_questions import (
    Answer,
    Question,
    ask,
    faults,
    questions,
    stream,
    user_question,
)
from sglang_dsv4.nano_demo_server import (
    Client,
    Launch,
    Progress,
    Served,
    Server,
    ServerError,
    UsageError,
    choose_port,
    printable,
)

CHECK_FAILED = 1
NANO = Path(__file__).parent / "nano"
CONTEXT = 4096  # tokens, or fewer where the model knows fewer
WAIT = 600  # seconds

_DESCRIPTION = """\
Starts SGLang's own server with nano, a small trained DeepSeek-V4 that is part of this package,
asks it a few questions and prints the answers, with the prompt tokens of each and how many of them
came from the cache, and the class that served. On a terminal it then lets you ask. At the end it
stops the server. It needs no GPU, no network and no other file.
"""
_EXAMPLES = """\
examples:
  sglang-dsv4 demo
  sglang-dsv4 demo --ask "What is the capital of Norway?" --ask "How much is 6 x 7?"
  sglang-dsv4 demo --no-input --plot demo.png
  sglang-dsv4 demo --keep --port 30000
  sglang-dsv4 demo --url http://127.0.0.1:30000 --interactive
  sglang-dsv4 demo --checkpoint /models/mine --json | python -m json.tool

exit codes:
  0    all answers are as expected
  1    the server did not start or failed, another class than ours served, nano's words are wrong,
       or a repeated prompt did not come from the cache
  2    an option cannot be used: a port that is taken, a folder without a checkpoint
  130  interrupted (143: terminated); the server is stopped then too
"""
_KNOWS = "capitals, chemical elements, products up to 12 x 12, dates, units, opposites"


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "demo",
        help="serve the packaged checkpoint and ask it",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--ask",
        metavar="TEXT",
        action="append",
        help="ask this instead, in a chat (can be repeated)",
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--interactive",
        action="store_true",
        help="let me ask at a prompt afterwards (default on a terminal, unless --ask is given)",
    )
    prompt.add_argument("--no-input", action="store_true", help="never wait for input")
    add("--plot", metavar="FILE.png", type=_png, help="draw model, cache and prompts (matplotlib)")
    add("--url", type=_url, help="ask a server that is running already")
    add("--checkpoint", metavar="DIR", type=Path, help="serve this one; its words are not judged")
    add("--device", help="SGLang's --device (default: cpu)")
    add("--port", type=_port, help="port of 127.0.0.1 for the server (default: a free one)")
    add("--keep", action="store_true", help="leave the server running, and say how to talk to it")
    add("--log", metavar="FILE", type=Path, help="the server's log (default: a temporary file)")
    add(
        "--wait",
        metavar="SECONDS",
        type=_positive,
        help=f"how long the server may take to start (default: {WAIT})",
    )
    return parser


def _png(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".png" or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a .png in a writable folder, found {text!r}")
    return path


def _url(text: str) -> str:
    try:
        has_host = bool(urllib.parse.urlsplit(text).hostname)
    except ValueError:
        has_host = False
    if not has_host or not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, found {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def _port(text: str) -> int:
    port = _positive(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 65535, found {text!r}")
    return port


def run(arguments: argparse.Namespace) -> int:
    _refuse_contradictions(arguments)
    if arguments.plot is not None:
        nano_demo_plot.require_matplotlib()
    out = sys.stderr if arguments.json else sys.stdout
    progress = Progress(None if arguments.json and not out.isatty() else out)
    try:
        with _ended_by_signals():
            if arguments.url is not None:
                return _Demo(arguments, Client(arguments.url), None).run()
            launch = _launch(arguments)
            called = "" if arguments.checkpoint else "nano, a small trained DeepSeek-V4, in "
            progress.say(f"Checkpoint: {called}{launch.checkpoint}")
            with Server(launch, progress) as server:
                return _Demo(arguments, Client(server.url), server).run()
    except ServerError as error:
        print(f"sglang-dsv4: error: {error}", file=sys.stderr)
        if arguments.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        return CHECK_FAILED


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    of_a_start = ("checkpoint", "device", "port", "keep", "log", "wait")
    given = [f"--{name}" for name in of_a_start if getattr(arguments, name)]
    if arguments.url is not None and given:
        raise UsageError(f"--url starts no server: leave out {', '.join(given)}")
    if arguments.json and arguments.interactive:
        raise UsageError("--json prints one object and --interactive a conversation: choose one")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """What would end this process at once raises SystemExit, so that the server ends too."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    ending = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, leave) for number in ending]
    try:
        yield
    finally:
        for number, handler in zip(ending, before, strict=True):
            signal.signal(number, handler)


def _launch(arguments: argparse.Namespace) -> Launch:
    """Everything that can be refused is, before a process starts."""
    folder = arguments.checkpoint
    if folder is None:
        folder = NANO
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"{folder} has no checkpoint: install the package again, or serve another one with"
                " --checkpoint DIR (sglang-dsv4 make-tiny writes one)"
            )
    config = DSV4Config.from_checkpoint(folder)
    port = choose_port(arguments.port)
    log = arguments.log
    if log is None:
        with tempfile.NamedTemporaryFile(
            prefix="sglang-dsv4-demo-", suffix=".log", delete=False
        ) as file:
            log = Path(file.name)
    return Launch(
        checkpoint=folder.resolve(),
        context=min(CONTEXT, config.max_position_embeddings),
        device=arguments.device or "cpu",
        port=port,
        log=log.absolute(),
        wait=arguments.wait or WAIT,
    )


class _Demo:
    """Questions to one server, and what is printed about them."""

    def __init__(
        self, arguments: argparse.Namespace, client: Client, server: Server | None
    ) -> None:
        self.arguments, self.client, self.server = arguments, client, server
        self.served = self._served()
        self.config = self.served.config() if arguments.plot is not None else None
        # Of another checkpoint only the names of classes and the cached tokens are expected.
        self.words = arguments.checkpoint is None and self.served.serves(NANO)
        self.asked: list[tuple[Question, Answer]] = []
        self.problems = self.served.faults()

    def _served(self) -> Served:
        try:
            return Served.read(self.client)
        except ServerError as error:
            if self.server is not None or error.status is not None:
                raise
            raise UsageError(f"--url: no server: {error}") from error

    def run(self) -> int:
        self._show_served()
        own = tuple(map(user_question, self.arguments.ask or ()))
        for question in own or questions():
            self._ask(question)
        if self.config is not None:
            self._plot(self.config)
        for problem in self.problems:
            print(f"sglang-dsv4: error: {problem}", file=sys.stderr)
        if not self.problems and not self.arguments.ask:
            self._say("\nAll as expected.")
        if self._wants_prompt():
            self._talk()
        if self.server is not None:
            self.server.keep = self.arguments.keep
        if self.arguments.json:
            print(json.dumps(self._report()))
        elif self.server is not None and self.server.keep:
            print(_how_to_talk(self.server))
        return CHECK_FAILED if self.problems else 0

    def _say(self, text: str) -> None:
        if not self.arguments.json:
            print(_shown(text), flush=True)

    def _show_served(self) -> None:
        state = self.served.state
        self._say(f"Served by {state.get('model_class', 'an unknown class')}")
        if state:
            self._say(f"  attention {state.get('attention_backend')}")
            self._say(f"  cache {state.get('kv_pool')}, {state.get('rows')} rows")

    def _ask(self, question: Question) -> None:
        self._say(f"\n{question.name}: {question.shown}")
        try:
            answer = ask(self.client, question)
        except ServerError as error:
            if error.status is None:
                raise
            # The answers so far, and those to come, are not lost for one that cannot be.
            self.problems.append(f"{question.name}: refused: {error}")
            return
        self.asked.append((question, answer))
        self.problems += faults(question, answer, words=self.words, page=self.served.page)
        if answer.reasoning:
            self._say(f"  thinking: {answer.reasoning.strip()}")
        for call in answer.calls:
            self._say(f"  call: {call}")
        if answer.text or not answer.calls:
            self._say(f"  answer: {answer.text.strip()}")
        self._say(f"  {_counts(answer)}")

    def _plot(self, config: DSV4Config) -> None:
        prompts = [
            nano_demo_plot.Prompt(question.name, answer.prompt_tokens, answer.cached_tokens or 0)
            for question, answer in self.asked
        ]
        item_bytes = 4 if self.served.state.get("rows") == "float32" else 2
        nano_demo_plot.draw(self.arguments.plot, config, item_bytes, self.served.page, prompts)
        self._say(f"\nPicture: {self.arguments.plot}")

    def _wants_prompt(self) -> bool:
        if self.arguments.ask or self.arguments.no_input or self.arguments.json:
            return bool(self.arguments.interactive)
        return self.arguments.interactive or (sys.stdin.isatty() and sys.stdout.isatty())

    def _talk(self) -> None:
        """A prompt until an empty line or the end of input; each question stands alone."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() edits lines with it
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        knows = f" nano knows {_KNOWS}, and makes up the rest." if self.words else ""
        self._say(f"\nAsk; an empty line ends.{knows}")
        while True:
            try:
                text = input("you> ").strip()
            except EOFError:
                text = ""
            if not text or not sys.stdin.isatty():
                self._say(text)  # A terminal has shown what was typed, but for an end of input.
            if not text:
                return
            try:
                self._show_streamed(user_question(text))
            except ServerError as error:
                if error.status is None:
                    raise
                self._say(f"(refused: {error})")

    def _show_streamed(self, question: Question) -> None:
        print("     ", end="", flush=True)
        for piece in stream(self.client, question):
            if isinstance(piece, str):
                print(_shown(piece), end="", flush=True)
            else:
                self._say(f"\n     ({_counts(piece)})")

    def _report(self) -> dict[str, Any]:
        answers = [
            {"name": question.name, "question": question.shown} | asdict(answer)
            for question, answer in self.asked
        ]
        report = {
            "ok": not self.problems,
            "problems": self.problems,
            "url": self.client.url,
            "model_path": self.served.model_path,
            "served": self.served.state,
            "answers": answers,
        }
        if self.server is not None:
            report["log"] = str(self.server.launch.log)
            if self.server.keep and self.server.process is not None:
                report["process"] = self.server.process.pid
        if self.arguments.plot is not None:
            report["plot"] = str(self.arguments.plot)
        return report


def _shown(text: str) -> str:
    """`text` as this terminal can show it, in whatever encoding it has."""
    encoding = sys.stdout.encoding or "utf-8"
    return printable(text).encode(encoding, "replace").decode(encoding)


def _counts(answer: Answer) -> str:
    cached = "unknown" if answer.cached_tokens is None else answer.cached_tokens
    return f"{answer.prompt_tokens} prompt tokens, {cached} cached; {answer.seconds:.1f} s"


def _how_to_talk(server: Server) -> str:
    assert server.process is not None
    return f"""
The server is still running at {server.url} (process {server.process.pid}).

With curl:
  curl -s {server.url}/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "default", "prompt": "The capital of France is", "max_tokens": 16, \
"temperature": 0}}'

With the OpenAI client ({sys.executable}):
  from openai import OpenAI
  client = OpenAI(base_url="{server.url}/v1", api_key="none")
  reply = client.chat.completions.create(
      model="default", temperature=0, max_tokens=64,
      messages=[{{"role": "user", "content": "What is the capital of Norway?"}}])
  print(reply.choices[0].message.content)

Ask again:
  sglang-dsv4 demo --url {server.url} --interactive

Stop it:
  kill {server.process.pid}"""
