"""Planted faults still fit the code; that tests notice them is shown by mutants.py itself."""

import ast
from pathlib import Path
from typing import Any

import pytest

import mutants


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_its_test_exists(name: str, repository: Path) -> None:
    file, function = mutants.MUTANTS[name].test.split("::")
    tree = ast.parse((repository / file).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_it_changes_a_function_that_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []

    def record(module: Any, function: str, change: Any) -> None:
        assert callable(getattr(module, function)) and callable(change)
        changed.append(function)

    monkeypatch.setattr(mutants, "wrap", record)
    mutants.MUTANTS[name].plant()
    assert len(changed) == 1


def test_an_unknown_mutant_is_an_error() -> None:
    with pytest.raises(ValueError, match="known: sink_dropped"):
        mutants.mutant_environment("nonsense")
