"""NaN among the indexer's scores reaches the log, once and without waiting, and the counts."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from inprocess import Request, Runner
from sglang_dsv4.attention import nan_watch
from sglang_dsv4.attention.nan_watch import EVERY, NanWatch

TOKENS = 40  # of the request before the steps that are looked at
LAYER, ENTRIES = 4, (0, 7, 8)  # where the damage is


@pytest.fixture
def runner(checkpoint: Path) -> Runner:
    return Runner(checkpoint, pages=4, slots=3)


@pytest.fixture
def request_of_40(runner: Runner) -> Request:
    request = runner.open()
    runner.step((request, range(20, 20 + TOKENS)))
    return request


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines so far."""
    caplog.set_level(logging.ERROR, nan_watch.__name__)
    return lambda: [record.getMessage() for record in caplog.records]


def damage(runner: Runner, request: Request) -> None:
    """NaN in rows of one layer's index keys that the request sees."""
    keys = runner.caches[LAYER].index_keys
    assert keys is not None
    keys[[request.pages[0] * 64 + entry for entry in ENTRIES], 5] = math.nan


def test_a_healthy_model_counts_nothing(runner, request_of_40, told) -> None:
    """Though every row of the cache that nobody wrote is NaN."""
    watch = NanWatch(runner.lm.model.layers)
    assert list(watch.indexers) == [2, 4, 6]
    for step in range(2 * EVERY):
        watch.before_forward()
        if step < 5:
            runner.step((request_of_40, [20]), padding=2)
    assert watch.counts() == {} and told() == []


def test_a_damaged_cache_row_is_told_of_once(runner, request_of_40, told) -> None:
    watch = NanWatch(runner.lm.model.layers)
    damage(runner, request_of_40)
    for step in range(EVERY - 1):
        watch.before_forward()
        if step < 2:
            (logits,) = runner.step((request_of_40, [20]))
            assert logits.isfinite().all()  # nothing else would tell
    assert told() == []
    watch.before_forward()
    (line,) = told()
    assert f"6 scores of the indexer were NaN (layer {LAYER}: 6)" in line
    for part in ("damaged", "answers may be wrong", "sglang-dsv4 inspect CKPT", "restart"):
        assert part in line
    runner.step((request_of_40, [20]))
    for _ in range(2 * EVERY):
        watch.before_forward()
    assert len(told()) == 1
    assert watch.counts() == {str(LAYER): 9}  # the count goes on


def test_who_asks_for_the_counts_has_it_told_at_once(runner, request_of_40, told) -> None:
    watch = NanWatch(runner.lm.model.layers)
    damage(runner, request_of_40)
    runner.step((request_of_40, [20]))
    assert watch.counts() == watch.counts() == {str(LAYER): len(ENTRIES)}
    assert len(told()) == 1


def test_a_weight_that_turned_nan_is_told_of(runner, told) -> None:
    """All scores of that layer; the layers after it, whose inputs are finite, have none."""
    watch = NanWatch(runner.lm.model.layers)
    with torch.no_grad():
        runner.lm.model.layers[2].attn.indexer.wq_b.weight[3, 3] = math.nan
    runner.step((runner.open(), range(20, 20 + TOKENS)))
    visible = sum(tokens // 4 for tokens in range(1, TOKENS + 1))
    assert watch.counts() == {"2": visible}
    (line,) = told()
    assert f"(layer 2: {visible})" in line


def test_a_model_without_indexers_has_nothing_to_count(told) -> None:
    layers = nn.ModuleList([nn.Module()])
    layers[0].attn = SimpleNamespace(indexer=None)
    watch = NanWatch(layers)
    for _ in range(2 * EVERY):
        watch.before_forward()
    assert watch.counts() == {} and told() == []


def test_a_copy_that_is_under_way_is_not_waited_for(
    runner, request_of_40, told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with a stand-in for its events."""
    events = []

    class Event:
        def __init__(self) -> None:
            self.recorded = self.done = False
            events.append(self)

        def record(self) -> None:
            self.recorded = True

        def query(self) -> bool:
            assert self.recorded
            return self.done

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = NanWatch(runner.lm.model.layers)
    watch.on_gpu = True
    damage(runner, request_of_40)
    runner.step((request_of_40, [20]))
    for _ in range(3 * EVERY):
        watch.before_forward()
    assert len(events) == 1 and told() == []
    events[0].done = True
    watch.before_forward()
    assert len(told()) == 1


@pytest.mark.gpu((8, 0))
def test_on_a_gpu_no_look_waits(checkpoint: Path, told) -> None:
    runner = Runner(checkpoint, pages=4, slots=3, device="cuda")
    request = runner.open()
    runner.step((request, range(20, 20 + TOKENS)))
    damage(runner, request)
    watch = NanWatch(runner.lm.model.layers)
    assert watch.on_host.is_pinned()
    runner.step((request, [20]))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2 * EVERY):
            watch.before_forward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    watch.before_forward()
    assert len(told()) == 1
    assert watch.counts() == {str(LAYER): len(ENTRIES)}
