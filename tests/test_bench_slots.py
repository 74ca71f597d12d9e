"""The script that times DecodeSlots beside SGLang's function, on a CPU."""

import importlib
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache import allocation

from allocation_world import PAGE


def test_each_function_is_timed(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    # The script replaces it for its own process.
    monkeypatch.setattr(allocation, "_alloc_page_size", allocation._alloc_page_size)
    script = importlib.import_module("bench_slots")
    assert script.main(["--device", "cpu", "--batch", "1", "3", "--calls", "4"]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head == f"CPU, torch {torch.__version__}; ours by reference"
    assert columns.split()[-2:] == ["until", "done"] and len(rows) == 2 * 2 * 3
    assert {row[18:26].strip() for row in rows} == {"SGLang", "ours", "no op"}
    assert all(0 < float(row.split()[-3]) <= float(row.split()[-1]) for row in rows)


def test_a_call_leaves_the_pools_as_they_were(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that every call finds the same, and every request begins a page each time."""
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    script = importlib.import_module("bench_slots")
    made = script.world("cpu", 2, PAGE)
    before = made.allocator.full_attn_allocator.free_pages
    for _ in range(3):
        script.timed(made, allocation.alloc_for_decode_default)
        assert made.allocator.full_attn_allocator.free_pages is before
