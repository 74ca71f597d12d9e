"""The script that times each tile of the four-bit experts: its examples."""

import importlib
import shlex

import pytest


def test_examples_in_the_help_are_valid(repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    script = importlib.import_module("tune_experts")
    lines = [line for line in script.EPILOG.splitlines() if line.startswith("  python")]
    assert len(lines) == 3
    for line in lines:
        script.parser().parse_args(shlex.split(line, comments=True)[2:])
