"""The reference ops inside a CUDA graph: the calls that serve on a CPU, captured as they are.

One decode step, metadata included, reads nothing back to the host, and its replay equals the same
step run eagerly bit for bit, while requests of very different lengths pass every window boundary.
"""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from inprocess import Part, Request, Runner
from sglang_dsv4.attention.cache import LayerCache
from sglang_dsv4.attention.metadata import Batch, build

STEPS = 300  # a request that starts at 1 passes 4, 128, 256
STARTS = (1, 120, 250)
PADDING = 2  # rows that are nobody's
CONTEXT = 1024


class Step:
    """One decode step over static inputs, on the GPU."""

    def __init__(self, runner: Runner, caches: tuple[LayerCache, ...], batch: Batch) -> None:
        self.lm, self.caches = runner.lm, caches
        self.window, self.window_rows = runner.config.sliding_window, caches[0].window_rows
        self.batch = on_gpu(batch)
        self.ids = torch.zeros(batch.positions.shape[0], dtype=torch.int64, device="cuda")

    def fill(self, ids: list[int], batch: Batch) -> None:
        """Copy a step's inputs into the static ones."""
        self.ids.copy_(torch.tensor(ids))
        for field in fields(Batch):
            target = getattr(self.batch, field.name)
            if isinstance(target, torch.Tensor):
                target.copy_(getattr(batch, field.name))

    def run(self) -> torch.Tensor:
        """Logits [rows, V]."""
        meta = build(self.batch, window=self.window, window_rows=self.window_rows)
        hidden = self.lm.model(self.ids, meta, self.caches)
        return functional.linear(hidden.float(), self.lm.head.weight.float())


def on_gpu(value):
    """A dataclass with its tensors copied to the GPU."""
    copies = {
        field.name: item.cuda() if isinstance(item, torch.Tensor) else item
        for field in fields(value)
        for item in [getattr(value, field.name)]
    }
    return type(value)(**copies)


@pytest.fixture
def runner(checkpoint: Path) -> Runner:
    return Runner(checkpoint, pages=12, slots=6, context=CONTEXT)


def prefill(runner: Runner) -> list[Request]:
    """Requests of several lengths, computed on the CPU."""
    generator = torch.Generator().manual_seed(0)
    requests = [runner.open() for _ in STARTS]
    for request, length in zip(requests, STARTS, strict=True):
        ids = torch.randint(15, 384, (length,), generator=generator).tolist()
        runner.step((request, ids))
    return requests


@pytest.mark.gpu((8, 0))
@torch.no_grad()
def test_replay_equals_eager_bit_for_bit(runner: Runner) -> None:
    requests = prefill(runner)
    rows = len(requests) + PADDING
    runner.lm.cuda()
    parts: list[Part] = [(request, [0]) for request in requests]
    batch = runner.batch(*parts, padding=PADDING)
    captured = Step(runner, tuple(on_gpu(cache) for cache in runner.caches), batch)
    eager = Step(runner, tuple(on_gpu(cache) for cache in runner.caches), batch)

    # Captured with padding only: no length, no page; nothing that a later step relies on.
    captured.fill([0] * rows, _idle(batch))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = captured.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(15, 384, (rows,), generator=generator).tolist()
        parts = [(request, [token]) for request, token in zip(requests, ids, strict=False)]
        batch = runner.batch(*parts, padding=PADDING)
        for step in (captured, eager):
            step.fill(ids, batch)
        graph.replay()
        wanted = eager.run()[: len(requests)]
        found = logits[: len(requests)]
        lengths = [request.length for request in requests]
        assert wanted.isfinite().all() and torch.equal(found, wanted), f"differs at {lengths}"
        for request, tokens in parts:
            request.tokens.extend(tokens)
    assert [request.length for request in requests] == [start + STEPS for start in STARTS]


def _idle(batch: Batch) -> Batch:
    """The same shapes with padding requests only."""
    zeros = {
        field.name: torch.zeros_like(item) if isinstance(item, torch.Tensor) else item
        for field in fields(Batch)
        for item in [getattr(batch, field.name)]
    }
    zeros["new_lens"] = torch.ones_like(batch.new_lens)
    zeros["request"] = batch.request
    return Batch(**zeros)
