"""`sglang-dsv4 demo` with SGLang's server and the packaged checkpoint nano.

`test_nano_answers_as_expected` needs a nano that is trained; the others do not.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from serving import FORKED
from sglang_dsv4 import cli_demo, nano_demo_plot
from sglang_dsv4.memory_plan import CacheSizes

TOLD_OF_WORDS = ("to begin with", "the call")  # what a problem says when the words are wrong
LIMIT = 900  # seconds, for a start and six answers on a busy machine


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.out)


def demo(*arguments: str, code: str = "", **environment: str) -> Result:
    """`sglang-dsv4 demo`; `code` runs before it in the same process."""
    run = f"{code}\nimport sys; from sglang_dsv4.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", run, "demo", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, **environment},
    )
    return Result(done.returncode, done.stdout, done.stderr)


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return response.status == 200
    except OSError:
        return False


def stop(server: int) -> None:
    """As the demo says how, then whatever is left of its group."""
    os.kill(server, signal.SIGTERM)
    for _ in range(300):
        if not Path(f"/proc/{server}").exists():
            break
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "demo.png"


@pytest.fixture(scope="module")
def kept(picture: Path) -> Iterator[Result]:
    """The default demo with a picture, on a machine with a proxy; its server keeps running."""
    dead = "http://127.0.0.1:9"
    proxy = {"http_proxy": dead, "HTTP_PROXY": dead, "no_proxy": "", "NO_PROXY": ""}
    result = demo("--json", "--keep", "--plot", str(picture), OMP_NUM_THREADS="4", **proxy)
    assert result.out, result.err
    try:
        yield result
    finally:
        stop(result.report["process"])


def test_our_class_serves_nano(kept: Result) -> None:
    served = kept.report["served"]
    assert served["model_class"] == "sglang_dsv4.served.deepseek_v4.DeepseekV4ForCausalLM"
    assert served["kv_pool"] == "sglang_dsv4.host.KVPool"
    assert Path(kept.report["model_path"]) == cli_demo.NANO


def test_cached_tokens_grow(kept: Result) -> None:
    answers = {answer["name"]: answer for answer in kept.report["answers"]}
    first, again = answers["long story"], answers["long story, again"]
    assert first["prompt_tokens"] == again["prompt_tokens"] > 512
    assert first["cached_tokens"] == 0
    assert again["cached_tokens"] == again["prompt_tokens"] // 256 * 256
    assert first["text"] == again["text"]


def test_only_words_can_be_wrong(kept: Result) -> None:
    """Also an untrained nano meets every expectation that is not about words."""
    others = [
        problem
        for problem in kept.report["problems"]
        if not any(told in problem for told in TOLD_OF_WORDS)
    ]
    assert not others
    assert kept.status == (1 if kept.report["problems"] else 0)


def test_nano_answers_as_expected(kept: Result) -> None:
    """The right words, its thinking apart from the answer, and a parsed call of a tool."""
    assert (kept.status, kept.report["problems"], kept.err) == (0, [], "")
    answers = {answer["name"]: answer for answer in kept.report["answers"]}
    assert answers["completion"]["text"].strip() == "Paris."
    assert answers["chat with thinking"]["reasoning"].strip()
    assert "</think>" not in answers["chat with thinking"]["text"]
    assert answers["tool call"]["calls"] == [
        {"name": "get_weather", "arguments": {"city": "Paris"}}
    ]
    assert answers["long story, again"]["text"].strip().startswith("falcon.")


def test_environment_of_the_server(kept: Result) -> None:
    """One thread whatever the caller has, and itself reached past the proxy."""
    raw = Path(f"/proc/{kept.report['process']}/environ").read_bytes().decode()
    environment = dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)
    assert environment["OMP_NUM_THREADS"] == "1" and environment["HF_HUB_OFFLINE"] == "1"
    log = Path(kept.report["log"]).read_text(errors="replace")
    assert "ready to roll" in log and "ProxyError" not in log


def test_picture(kept: Result, picture: Path) -> None:
    assert kept.report["plot"] == str(picture)
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.size == nano_demo_plot.SIZE
        colours = image.convert("RGB").getcolors(1 << 24)
    assert len(colours) > 10


def test_rows_of_the_picture_are_those_of_the_pool(kept: Result) -> None:
    """The bytes per token that the picture shows, and those that the server's log states."""
    config = cli_demo.DSV4Config.from_checkpoint(cli_demo.NANO)
    rows = nano_demo_plot.cache_rows(config, 2, 256)
    total = sum(kind.bytes_per_token for kind in rows if kind.name != "window")
    log = Path(kept.report["log"]).read_text(errors="replace")
    assert f"torch.bfloat16 rows, {total:.0f} bytes per context token" in log
    assert f"torch.bfloat16 rows, {CacheSizes(config, 2)}" in log


def test_another_demo_asks_the_kept_server(kept: Result) -> None:
    question = "Which city is the capital of Norway? " * 40
    result = demo("--url", kept.report["url"], "--json", "--ask", question, "--ask", question)
    assert result.status == 0, result.err
    first, again = result.report["answers"]
    assert first["cached_tokens"] < again["cached_tokens"] == first["prompt_tokens"] // 256 * 256
    assert again["cached_tokens"] >= 256
    assert is_up(kept.report["url"]), "it did not start the server, so it must not stop it"


def test_prompt(kept: Result) -> None:
    """Questions from a pipe; their answers are streamed, with the counts of the last event."""
    command = [sys.executable, "-m", "sglang_dsv4.cli", "demo", "--url", kept.report["url"]]
    done = subprocess.run(
        [*command, "--interactive", "--ask", "What is the symbol of iron?"],
        input="What is the symbol of gold?\n" + "far too long " * 5000 + "\n\n",
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    prompt = done.stdout[done.stdout.index("you> ") :]
    assert prompt.startswith("you> What is the symbol of gold?\n     ")
    assert " prompt tokens, 0 cached; " in prompt
    assert "(refused: " in prompt and prompt.endswith("you> \n")


def test_nonsense_in_the_place_of_nano_fails(tmp_path: Path) -> None:
    """nano with the embeddings of its tokens in another order; also what a newcomer sees.

    Its server is forked, and is asked the first question alone: what comes later is the same as
    for `kept`, which starts as users start it.
    """
    nonsense = tmp_path / "nonsense"
    shutil.copytree(cli_demo.NANO, nonsense)
    tensors = load_file(nonsense / "model.safetensors")
    (embedding,) = (name for name in tensors if "embed" in name)
    tensors[embedding] = tensors[embedding].flip(0).contiguous()
    save_file(tensors, nonsense / "model.safetensors", metadata={"format": "pt"})
    planted = f"""
from pathlib import Path
from sglang_dsv4 import cli_demo
from sglang_dsv4.nano_demo_server import Launch
cli_demo.NANO, first = Path({str(nonsense)!r}), cli_demo.questions()[:1]
cli_demo.questions = lambda: first
users = Launch.command
def forked(launch):
    words = users(launch)
    launcher = words.index("-m")
    return [*words[:launcher], {FORKED!r}, *words[launcher + 2:]]
Launch.command = forked
"""
    result = demo(code=planted)
    assert result.status == 1
    assert "error: completion: expected answer to begin with 'Paris.', found " in result.err
    assert "cached tokens" not in result.err and "a class of" not in result.err
    assert "Served by sglang_dsv4.served.deepseek_v4.DeepseekV4ForCausalLM\n" in result.out
    assert "All as expected" not in result.out
    assert result.out.endswith("Stopping the server\n")
