"""The example program in the frontend language, run as a user runs it."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import nano
from serving import Server

COSTS = re.compile(r"(\d+) prompt tokens, (\d+) cached")


@pytest.fixture(scope="module")
def tree(server: Server, repository: Path) -> str:
    """What it prints for a server with an empty cache."""
    server.flush()
    command = [sys.executable, str(repository / "scripts/story_tree.py"), "--url", server.url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    print(result.stdout)
    return result.stdout


def test_the_story_is_read_once(tree: str) -> None:
    """First it is sent ahead of the forks; then every request finds all its whole pages cached."""
    (story, first), *others = [(int(prompt), int(cached)) for prompt, cached in COSTS.findall(tree)]
    assert story > 1000 and first == 0
    assert len(others) >= 3 * 4  # of at least 3 branches: itself, sent ahead, and 2 twigs
    for prompt, cached in others:
        assert prompt > story and cached >= story // nano.PAGE * nano.PAGE
        assert cached % nano.PAGE == 0


def test_the_tree_is_two_levels_deep(tree: str) -> None:
    branches = re.findall(r"(?m)^  (?!sent ahead)\w.*\(", tree)
    twigs = re.findall(r"(?m)^    \w.*\(", tree)
    assert len(branches) >= 3 and len(twigs) == 2 * len(branches)
    assert tree.count("sent ahead") == 1 + len(branches)


def test_the_sum_is_that_of_its_requests(tree: str) -> None:
    costs = [(int(prompt), int(cached)) for prompt, cached in COSTS.findall(tree)]
    tokens, saved = (sum(column) for column in zip(*costs, strict=True))
    assert f"{saved} of {tokens} prompt tokens came from the cache" in tree
    assert f"cache: {saved / tokens:.1%} saved" in tree and saved > 0.7 * tokens


def test_its_answers_are_the_storys(tree: str) -> None:
    right, asked = map(int, re.findall(r"(\d+) of (\d+) answers are as", tree)[0])
    assert right >= 0.8 * asked


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Its exit code, in this process."""
    monkeypatch.setattr(sys, "argv", ["story_tree.py", *arguments])
    return importlib.import_module("story_tree").main()  # nano has added scripts/ to the path


def test_without_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    assert run(monkeypatch, "--url", f"http://127.0.0.1:{free_port}") == 1
    assert "Start one, or name another with --url" in capsys.readouterr().err


def test_without_a_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was reused: the exit code says so."""
    story_tree = importlib.import_module("story_tree")
    monkeypatch.setattr(story_tree, "CountingEndpoint", lambda url: SimpleNamespace(sent_ahead=[]))
    request = story_tree.Request(1300, 0, "otter")
    program = SimpleNamespace(
        run=lambda tree, **_: (
            tree.append(story_tree.Node("password of Anna", "otter", request))
            or SimpleNamespace(error=lambda: None)
        )
    )
    monkeypatch.setattr(story_tree, "ask_tree", program)
    assert run(monkeypatch) == 1
    assert "found none" in capsys.readouterr().err


def test_help_has_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, "--help")
    assert "scripts/story_tree.py --url http" in capsys.readouterr().out
