"""The reference ops inside a CUDA graph: the calls that serve on a CPU, captured as they are.

One decode step, metadata included, reads nothing back to the host, and its replay equals the same
step run eagerly bit for bit, while requests of very different lengths pass every window boundary.
Beyond what `graph-check` runs: caches are NaN where nobody wrote, and prefill filled the rest.
"""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from inprocess import Part, Request, Runner
from sglang_dsv4.attention.metadata import Batch
from sglang_dsv4.graph_safety_device import difference
from sglang_dsv4.graph_safety_step import DecodeStep, capture, to_device

STEPS = 300  # a request that starts at 1 passes 4, 128, 256
STARTS = (1, 120, 250)
PADDING = 2  # rows that are nobody's
CONTEXT = 1024


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


def decode_step(runner: Runner, batch: Batch) -> DecodeStep:
    caches = tuple(to_device(cache, "cuda") for cache in runner.caches)
    return DecodeStep(runner.lm, runner.config.sliding_window, caches, batch, "cuda")


@pytest.mark.gpu((8, 0))
def test_replay_equals_eager_bit_for_bit(runner: Runner) -> None:
    requests = prefill(runner)
    rows = len(requests) + PADDING
    runner.lm.cuda()
    parts: list[Part] = [(request, [0]) for request in requests]
    batch = runner.batch(*parts, padding=PADDING)
    captured, eager = decode_step(runner, batch), decode_step(runner, batch)

    # Captured with padding only: no length, no page; nothing that a later step relies on.
    captured.fill([0] * rows, _idle(batch))
    graph, logits = capture(captured)

    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(15, 384, (rows,), generator=generator).tolist()
        parts = [(request, [token]) for request, token in zip(requests, ids, strict=False)]
        batch = runner.batch(*parts, padding=PADDING)
        for step in (captured, eager):
            step.fill(ids, batch)
        graph.replay()
        lengths = [*(request.length for request in requests), *[None] * PADDING]
        assert difference(logits, eager.run(), lengths) is None
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
