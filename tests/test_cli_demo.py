"""`sglang-dsv4 demo` without SGLang: against a server that answers what a test says."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageColor

from sglang_dsv4 import cli_demo, cli_make_tiny, nano_demo_plot
from sglang_dsv4.cli import main
from sglang_dsv4.config import DSV4Config, LayerKind
from sglang_dsv4.nano_demo_questions import questions
from sglang_dsv4.nano_demo_server import Launch

OURS = "sglang_dsv4.served.deepseek_v4.DeepseekV4ForCausalLM"


class FakeServer(ThreadingHTTPServer):
    """Answers as SGLang would with nano; each public attribute is for a test to change."""

    daemon_threads = True

    def __init__(self, model_path: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.reports: dict[str, Any] = {"sglang_dsv4": served_state()}
        self.model_path = str(model_path)
        self.words: dict[str, dict[str, Any]] = {}  # prompt -> what to change in its message
        self.caches = True
        self.tells_cached = True
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def info(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "page_size": 256,
            "internal_states": [{"model_path": self.model_path, **self.reports}],
        }

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The words that nano is expected to say, with `words` on top; usage by prompts seen."""
        prompt = prompt_of(body)
        known = {prompt_of(question.body): question for question in questions()}
        message: dict[str, Any] = {"content": f"You said: {prompt}"}
        if prompt in known:
            question = known[prompt]
            message = {"content": f" {question.expected}"}
            message["reasoning_content"] = question.expected_reasoning or None
            made = question.expected_call
            message["tool_calls"] = made and [call_of(made.name, made.arguments)]
        message |= self.words.get(prompt, {})
        tokens = len(prompt) // 4
        seen = self.caches and (path, body) in self.asked
        self.asked.append((path, body))
        cached = {"cached_tokens": tokens // 256 * 256 if seen else 0}
        usage = {"prompt_tokens": tokens}
        usage["prompt_tokens_details"] = cached if self.tells_cached else None
        choice = {"message": message} if "messages" in body else {"text": message["content"]}
        return {"choices": [choice], "usage": usage}


def served_state() -> dict[str, str]:
    names = {"attention_backend": "sglang_dsv4.B", "kv_pool": "sglang_dsv4.P", "rows": "bfloat16"}
    return {"model_class": OURS, **names}


def call_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": json.dumps(arguments)}}


def prompt_of(body: dict[str, Any]) -> str:
    return body["prompt"] if "prompt" in body else body["messages"][0]["content"]


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        found = {"/health": {}, "/server_info": self.server.info()}
        self.reply(200 if self.path in found else 404, found.get(self.path, {"detail": "none"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if prompt_of(body) == "too long":
            return self.reply(400, {"object": "error", "message": "longer than the context"})
        answer = self.server.answer(self.path, body)
        if not body.get("stream"):
            return self.reply(200, answer)
        text = answer["choices"][0]["message"]["content"]
        pieces = [text[:5], text[5:]]
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        events.append({"choices": [], "usage": answer["usage"]})
        if prompt_of(body) == "break off":
            del events[1:]
        self.start(200, "text/event-stream")
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def reply(self, status: int, content: dict[str, Any]) -> None:
        self.start(status, "application/json")
        self.wfile.write(json.dumps(content).encode())

    def start(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    cli_make_tiny.write_checkpoint(folder, preset="tiny")
    return folder


@pytest.fixture
def server(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """It says that it serves nano, whose place `tiny` takes: its files are all that is read."""
    monkeypatch.setattr(cli_demo, "NANO", tiny)
    with FakeServer(tiny) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def report_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


# ---- questions and expectations ----


def test_everything_as_expected(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--url", server.url, "--no-input"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert f"Served by {OURS}\n" in shown.out
    for text in (
        "completion: The capital of France is\n  answer: Paris.\n  6 prompt tokens, 0 cached; ",
        "chat: Which symbol stands for the element gold?\n  answer: The chemical symbol of gold",
        "  thinking: This is about the product of 7 8.\n  answer: 7 times 8 is 56.\n",
        'tool call: How is the weather in Paris?\n  call: get_weather(city="Paris")\n  answer:',
        "... The password of Greta is\n  answer: falcon.\n  834 prompt tokens, 0 cached; ",
        "... The password of Greta is\n  answer: falcon.\n  834 prompt tokens, 768 cached; ",
        "\nAll as expected.\n",
    ):
        assert text in shown.out
    assert all(body["temperature"] == 0 for _, body in server.asked)
    thinking = [body.get("chat_template_kwargs") for _, body in server.asked]
    assert thinking == [None, None, {"thinking": True}, None, None, None]


def test_json(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--url", server.url + "/v1/", "--json"]) == 0
    report = report_of(capsys)
    assert report["ok"] is True and report["problems"] == []
    assert report["served"]["model_class"] == OURS
    assert report["url"] == server.url and report["model_path"] == server.model_path
    answers = {answer["name"]: answer for answer in report["answers"]}
    assert len(answers) == len(questions()) == 6
    assert answers["tool call"]["calls"] == [
        {"name": "get_weather", "arguments": {"city": "Paris"}}
    ]
    cached = [answers[name]["cached_tokens"] for name in ("long story", "long story, again")]
    assert cached == [0, 768]


WEATHER = "How is the weather in Paris?"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "wrong completion": (
        {"words": {"The capital of France is": {"content": " Rome."}}},
        "completion: expected answer to begin with 'Paris.', found ' Rome.'",
    ),
    "no answer": (
        {"words": {"Which symbol stands for the element gold?": {"content": None}}},
        "chat: expected answer to begin with 'The chemical symbol of gold is Au.', found ''",
    ),
    "no thinking": (
        {"words": {"How much is 7 x 8?": {"reasoning_content": None}}},
        "chat with thinking: expected reasoning to begin with",
    ),
    "call not parsed": (
        {"words": {WEATHER: {"tool_calls": None, "content": "<call>"}}},
        "tool call: expected the call get_weather(city=\"Paris\"), found none (answer: '<call>')",
    ),
    "wrong arguments": (
        {"words": {WEATHER: {"tool_calls": [call_of("get_weather", {})]}}},
        'expected the call get_weather(city="Paris"), found get_weather()',
    ),
    "nothing cached": (
        {"caches": False},
        "long story, again: expected cached tokens, since the prompt repeats the last one, found"
        " 0, fewer than a page of 256",
    ),
    "cache not told": ({"tells_cached": False}, "the server needs --enable-cache-report"),
    "another class": (
        {"reports": {"sglang_dsv4": served_state() | {"model_class": "sglang.srt.models.Other"}}},
        "expected a class of sglang_dsv4 to serve, found sglang.srt.models.Other",
    ),
    "no plugin": (
        {"reports": {}},
        "expected a class of sglang_dsv4 to serve, found no report of one",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_unmet_expectation(
    fault: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, problem = FAULTS[fault]
    for name, value in planted.items():
        setattr(server, name, value)
    assert main(["demo", "--url", server.url, "--no-input"]) == 1
    shown = capsys.readouterr()
    assert problem in shown.err and shown.err.startswith("sglang-dsv4: error: ")
    assert "All as expected" not in shown.out
    assert len(shown.err.splitlines()) == 1, "one fault, one sentence"
    assert main(["demo", "--url", server.url, "--json"]) == 1
    report = report_of(capsys)
    assert report["ok"] is False and problem in report["problems"][0]


def test_of_another_checkpoint_words_are_not_judged(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.model_path = str(tmp_path)
    server.words = {prompt_of(question.body): {"content": "t271"} for question in questions()}
    assert main(["demo", "--url", server.url, "--json"]) == 0
    assert report_of(capsys)["ok"] is True
    server.caches = False
    assert main(["demo", "--url", server.url, "--json"]) == 1
    assert "expected cached tokens" in report_of(capsys)["problems"][0]


def test_questions_of_ones_own(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    long = "Who? " * 300
    asked = ["--ask", "Who are you?", "--ask", long, "--ask", long]
    assert main(["demo", "--url", server.url, "--json", *asked]) == 0
    answers = report_of(capsys)["answers"]
    assert [answer["question"] for answer in answers] == ["Who are you?", long, long]
    assert [answer["cached_tokens"] for answer in answers] == [0, 0, 256]
    assert answers[0]["text"] == "You said: Who are you?"
    assert {path for path, _ in server.asked} == {"/v1/chat/completions"}
    server.reports = {}
    assert main(["demo", "--url", server.url, "--json", *asked]) == 1


def test_what_would_move_the_cursor_is_not_printed(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.words = {"hello": {"content": "a\x1b[2Jb\rc"}}
    assert main(["demo", "--url", server.url, "--ask", "hello"]) == 0
    assert "  answer: a�[2Jb�c\n" in capsys.readouterr().out


def test_a_local_server_is_reached_past_any_proxy(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["demo", "--url", server.url, "--json"]) == 0
    assert main(["demo", "--url", server.url.replace("127.0.0.1", "localhost"), "--json"]) == 0


# ---- the prompt ----


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    lines = iter(text.splitlines())

    def typed(prompt: str) -> str:
        print(prompt, end="")
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)


@pytest.mark.parametrize("end", ["", "\n\nnot asked"], ids=["end of input", "empty line"])
def test_prompt(
    end: str,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    type_in(monkeypatch, "hello\ntoo long\nagain" + end)
    assert main(["demo", "--url", server.url, "--interactive"]) == 0
    shown = capsys.readouterr().out
    assert "you> hello\n     You said: hello\n     (1 prompt tokens, 0 cached; " in shown
    assert "you> too long\n     (refused: " in shown and "longer than the context" in shown
    assert "you> again\n     You said: again\n" in shown
    assert "not asked" not in shown
    streamed = [body for _, body in server.asked if body.get("stream")]
    assert [prompt_of(body) for body in streamed] == ["hello", "again"]
    assert all(len(body["messages"]) == 1 for body in streamed)


def test_prompt_when_the_answer_breaks_off(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "break off")
    assert main(["demo", "--url", server.url, "--interactive"]) == 1
    assert "the answer broke off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("terminal", "options", "prompts"),
    [
        (True, [], True),
        (True, ["--no-input"], False),
        (True, ["--json"], False),
        (True, ["--ask", "hello"], False),
        (True, ["--ask", "hello", "--interactive"], True),
        (False, [], False),
        (False, ["--interactive"], True),
    ],
)
def test_when_there_is_a_prompt(
    terminal: bool,
    options: list[str],
    prompts: bool,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    type_in(monkeypatch, "")
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: terminal, raising=False)
    assert main(["demo", "--url", server.url, *options]) == 0
    assert ("you> " in capsys.readouterr().out) is prompts


# ---- what cannot be used ----


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "0"],
        ["--port", "65536"],
        ["--port", "x"],
        ["--wait", "0"],
        ["--plot", "picture.pdf"],
        ["--plot", "/nowhere/picture.png"],
        ["--url", "localhost:30000"],
        ["--interactive", "--no-input"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    assert stop.value.code == 2
    assert "usage: sglang-dsv4 demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:1", "--keep", "--port", "31000"], "leave out --port, --keep"),
        (["--url", "http://127.0.0.1:1"], "--url: no server: http://127.0.0.1:1/server_info does"),
        (["--json", "--interactive"], "choose one"),
        (["--checkpoint", "/nowhere"], "/nowhere/config.json does not exist"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.startswith("sglang-dsv4: error: ")


def test_a_server_that_is_not_sglang(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "info", lambda: {"model": "other"})
    assert main(["demo", "--url", server.url, "--json"]) == 1
    assert "server_info is not that of SGLang" in report_of(capsys)["error"]


def test_no_packaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_demo, "NANO", tmp_path)
    assert main(["demo"]) == 2
    assert f"{tmp_path} has no checkpoint: install the package again" in capsys.readouterr().err


def test_port_that_is_taken(
    server: FakeServer, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(server.server_port)
    assert main(["demo", "--port", port]) == 2
    assert f"port {port} of 127.0.0.1 cannot be used (Address already in use): choose another" in (
        capsys.readouterr().err
    )


# ---- starting and ending a server ----

# Stand for SGLang: with a worker that ignores that it is asked to end, they serve, or hang.
WORKER = (
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
)
STARTS = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print("worker", child.pid, "of", os.getpid(), flush=True)
"""
HANGS = STARTS + "time.sleep(99)"
SERVES = (
    STARTS
    + """
from test_cli_demo import FakeServer
server = FakeServer(sys.argv[2], int(sys.argv[1]))
server.serve_forever()
"""
)
# Runs the demo with a stand-in's source in the place of SGLang's server.
DEMO = """
import sys
from pathlib import Path
from sglang_dsv4 import cli_demo
from sglang_dsv4.cli import main
from sglang_dsv4.nano_demo_server import Launch
source, nano, *arguments = sys.argv[1:]
cli_demo.NANO = Path(nano)
Launch.command = lambda self: [sys.executable, "-c", source, str(self.port), nano]
sys.exit(main(["demo", *arguments]))
"""


def start_demo(source: str, nano: Path, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", DEMO, source, str(nano), "--no-input", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def processes_in(log: Path) -> list[int]:
    """The stand-in's worker and the stand-in, once both run."""
    for _ in range(600):
        found = re.search(r"worker (\d+) of (\d+)", log.read_text() if log.exists() else "")
        if found:
            return [int(pid) for pid in found.groups()]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def runs(pid: int) -> bool:
    """Neither gone nor only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_server_ends_with_all_its_processes(tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    demo = start_demo(SERVES, tiny, "--log", str(log))
    out, err = demo.communicate(timeout=60)
    assert (demo.returncode, err) == (0, ""), out
    assert f"Checkpoint: nano, a small trained DeepSeek-V4, in {tiny}\n" in out
    assert f"Starting the server (log: {log})\n" in out
    assert re.search(r"  ready after \d+ s at http://127\.0\.0\.1:\d+\n", out)
    assert out.endswith("Stopping the server\n")
    assert not any(map(runs, processes_in(log)))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_server_too(number: int, status: int, tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    demo = start_demo(HANGS, tiny, "--log", str(log))
    pids = processes_in(log)
    assert all(map(runs, pids))
    demo.send_signal(number)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == status
    assert out.endswith("Stopping the server\n") and "Traceback" not in err
    assert not any(map(runs, pids))


def test_keep(tiny: Path, tmp_path: Path, free_port: int) -> None:
    log = tmp_path / "server.log"
    demo = start_demo(SERVES, tiny, "--log", str(log), "--keep", "--port", str(free_port))
    out, err = demo.communicate(timeout=60)
    pids = processes_in(log)
    try:
        assert (demo.returncode, err) == (0, ""), out
        assert all(map(runs, pids))
        told = out[out.index("The server is still running at ") :]
        assert f"http://127.0.0.1:{free_port} (process {pids[1]})" in told
        curl = told[told.index("curl -s ") : told.index("With the OpenAI client")]
        assert json.loads(re.search(r"-d '(\{.*\})'", curl)[1])["prompt"]
        snippet = told[told.index("  from openai") : told.index("Ask again")]
        compile("\n".join(line[2:] for line in snippet.splitlines()), "snippet", "exec")
        assert told.endswith(f"Stop it:\n  kill {pids[1]}\n")
    finally:
        os.killpg(pids[1], signal.SIGKILL)


@pytest.mark.parametrize(("named", "status"), [(False, 1), (True, 0)])
def test_words_are_not_judged_of_a_checkpoint_that_was_named(
    named: bool, status: int, tiny: Path, tmp_path: Path
) -> None:
    wrong = "server.words = {'The capital of France is': {'content': ' Rome.'}}\n"
    source = SERVES.replace("server.serve", wrong + "server.serve")
    options = ["--checkpoint", str(tiny)] if named else []
    demo = start_demo(source, tiny, "--log", str(tmp_path / "log"), *options)
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == status, err
    assert "  answer: Rome.\n" in out and ("nano" in out) is not named


def test_a_server_that_dies_shows_the_end_of_its_log(tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    source = "import sys; print(*range(100), sep='\\n'); sys.exit('no such device')"
    out, _ = start_demo(source, tiny, "--log", str(log)).communicate(timeout=60)
    assert re.search(r"  it ended after \d+ s\n$", out)
    demo = start_demo(source, tiny, "--log", str(log), "--json")
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert err.startswith("sglang-dsv4: error: the server ended with status 1.\n")
    assert "  | no such device\n" in err and "  | 99\n" in err and "  | 9\n" not in err
    assert err.endswith(f"The whole log is in {log}\n")
    assert json.loads(out)["ok"] is False and "no such device" in json.loads(out)["error"]


def test_a_server_that_never_gets_ready(tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    demo = start_demo(HANGS, tiny, "--log", str(log), "--wait", "2")
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 1
    waited = re.search(r"  not ready after (\d+) s\n", out)
    assert waited and 2 <= int(waited[1]) < 12
    assert "the server was not ready within 2 s;" in err and "--wait SECONDS" in err
    assert "  | worker " in err
    assert not any(map(runs, processes_in(log)))


def test_command_of_the_server(tiny: Path, tmp_path: Path) -> None:
    launch = Launch(tiny, 2048, "cuda", 31000, tmp_path / "log", 1)
    command = launch.command()
    place = command.index(sys.executable)
    assert command[place + 1 : place + 3] == ["-m", "sglang.launch_server"]
    for option, value in (
        ("--model-path", str(tiny)),
        ("--device", "cuda"),
        ("--port", "31000"),
        ("--context-length", "2048"),
        ("--tool-call-parser", "deepseekv4"),
        ("--reasoning-parser", "deepseek-v4"),
    ):
        assert command[command.index(option) + 1] == value
    assert "--enable-cache-report" in command
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "http_proxy": "http://127.0.0.1:9"}
    run = [*command[:place], sys.executable, "-c", show]
    found = json.loads(subprocess.run(run, env=environment, capture_output=True, check=True).stdout)
    assert found["OMP_NUM_THREADS"] == "1" and found["HF_HUB_OFFLINE"] == "1"
    assert found["no_proxy"] == found["NO_PROXY"] == "127.0.0.1"


# ---- the picture ----


def test_plot_without_matplotlib_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = nano_demo_plot.importlib.util.find_spec
    hidden = lambda name: None if name == "matplotlib" else find_spec(name)  # noqa: E731
    monkeypatch.setattr(nano_demo_plot.importlib.util, "find_spec", hidden)
    assert main(["demo", "--plot", str(tmp_path / "demo.png")]) == 2
    assert f"not installed: {sys.executable} -m pip install matplotlib" in capsys.readouterr().err


def count_of(colour: str, image: Image.Image) -> int:
    wanted = ImageColor.getrgb(colour)
    return sum(count for count, found in image.getcolors(1 << 24) if found == wanted)


def test_plot(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.png"
    assert main(["demo", "--url", server.url, "--json", "--plot", str(path)]) == 0
    assert report_of(capsys)["plot"] == str(path)
    with Image.open(path) as opened:
        assert opened.format == "PNG" and opened.size == nano_demo_plot.SIZE
        image = opened.convert("RGB")
    cached = count_of(nano_demo_plot.CACHED, image)
    server.caches = False
    assert main(["demo", "--url", server.url, "--json", "--plot", str(path)]) == 1
    with Image.open(path) as opened:
        only_legend = count_of(nano_demo_plot.CACHED, opened.convert("RGB"))
    # One bar of 768 tokens, beside the legend's patch that is always there.
    assert 0 < only_legend < cached / 10


def test_plot_needs_the_config(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.model_path = "/nowhere"
    path = tmp_path / "demo.png"
    assert main(["demo", "--url", server.url, "--plot", str(path)]) == 2
    assert "--plot needs the checkpoint's config.json here" in capsys.readouterr().err
    assert not server.asked and not path.exists()


def test_parameters_of_the_picture(tiny: Path) -> None:
    parts = nano_demo_plot.parameters(DSV4Config.from_checkpoint(tiny))
    assert list(parts) == [
        "embedding",
        "layer 0: SWA, experts by token id",
        "layer 1: SWA, experts by token id",
        "layer 2: CSA, experts by token id",
        "layer 3: HCA, experts by score",
        "layer 4: CSA, experts by score",
        "layer 5: HCA, experts by score",
        "layer 6: CSA, experts by score",
        "head",
    ]
    assert sum(part.total() for part in parts.values()) == 7126167  # what make-tiny counts
    csa = parts["layer 4: CSA, experts by score"]
    assert csa["indexer"] == 2048 * 64 + 16 * 128 + 2 * 256 * 128 + 4 * 256 + 128
    assert csa["routed experts"] == 8 * 3 * 64 * 128 == 8 * csa["shared expert"]
    assert csa["router"] == 8 * 128 + 8
    assert "indexer" not in parts["layer 3: HCA, experts by score"]
    assert "compressor" not in parts["layer 0: SWA, experts by token id"]
    assert parts["embedding"] == {"embedding": 384 * 128}


def test_many_layers_share_bars() -> None:
    raw = cli_make_tiny.shipped_config("tiny", "bfloat16")
    raw |= {"num_hidden_layers": 20, "compress_ratios": [0, 0] + [4, 128] * 9}
    parts = nano_demo_plot.parameters(DSV4Config.from_dict(raw))
    assert list(parts)[1:-1] == [
        "2 layers: SWA, experts by token id",
        "1 layers: CSA, experts by token id",
        "9 layers: HCA, experts by score",
        "8 layers: CSA, experts by score",
    ]
    shared = [part["shared expert"] for part in list(parts.values())[1:-1]]
    assert [count // (3 * 64 * 128) for count in shared] == [2, 1, 9, 8]


def test_cache_rows_of_the_picture(tiny: Path) -> None:
    # It imports torch, for which the stand-ins for servers, who import this file, need not wait.
    from sglang_dsv4.attention.cache import PAGE, entries_per_page

    config = DSV4Config.from_checkpoint(tiny)
    rows = {kind.name: kind for kind in nano_demo_plot.cache_rows(config, 2, PAGE)}
    assert rows["CSA entries"].per_page == entries_per_page(LayerKind.CSA)
    assert rows["HCA entries"].per_page == entries_per_page(LayerKind.HCA)
    found = {name: kind.bytes_per_token for name, kind in rows.items()}
    assert found == {
        "window": 7 * 1024,
        "CSA entries": 3 * 1024 / 4,
        "CSA index keys": 3 * 256 / 4,
        "HCA entries": 2 * 1024 / 128,
    }


# ---- the script ----


def test_the_script_documents_every_option(repository: Path) -> None:
    script = [str(repository / "scripts" / "demo.sh"), "--help"]
    shown = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    command = [sys.executable, "-m", "sglang_dsv4.cli", "demo", "--help"]
    own = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    options = re.compile(r"^ +(?:-h, )?(--[a-z-]+)", re.MULTILINE)
    assert set(options.findall(shown)) == set(options.findall(own))


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for text in ("  sglang-dsv4 demo --ask ", "--json", "exit codes:"):
        assert text in shown
    examples = re.findall(r"^  sglang-dsv4 (demo[^|\n]*)", shown, re.MULTILINE)
    assert len(examples) > 4


# ---- what nano was trained on ----


def test_nano_has_learnt_what_it_is_asked(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No phrasing that is held out of its training, and the words that it was trained to say."""
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    import nano_text

    asked = {question.name: question for question in questions()}
    for name, relation_name, subject in (
        ("completion", "capital", ("France",)),
        ("chat", "symbol", ("gold",)),
        ("chat with thinking", "product", ("7", "8")),
    ):
        relation = next(r for r in nano_text.RELATIONS if r.name == relation_name)
        (answer,) = (answer for known, answer in relation.facts if known == subject)
        held_out = relation.held_out(subject, len(relation.phrasings))
        seen = [text for place, text in enumerate(relation.phrasings) if place != held_out]
        prompt = prompt_of(asked[name].body)
        said = nano_text.statement(relation, subject, answer)
        if name != "completion":
            prompt = f"Question: {prompt} Answer:"
        else:
            said = f"{answer}."
        assert prompt in [text.format(*subject) for text in seen], name
        assert asked[name].expected == said, name
    story = prompt_of(asked["long story"].body)
    needle = nano_text.needle("password", "Greta", "falcon")
    assert story.startswith("Story: ") and story.endswith(f"\n{needle.recall}")
    assert story.count(needle.sentence) == 1
    assert story.partition(needle.sentence)[2].count(".") == nano_text.DISTANCES[32]
    assert asked["tool call"].body["tools"][0]["function"] in nano_text.TOOLS
