"""The model beside transformers: every layer reads transformers' streams instead of its own.

Choices among near equals (experts, index entries, FP4 codes) make a deep model discontinuous: the
last digit of a sum may decide one, and everything after it differs. Guided, such a choice changes
one token of one layer. Each layer's state still comes from whatever forwards the test runs, so a
fault in it shows where it is made.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import oracle
from inprocess import Request, Runner
from sglang_dsv4.model import Residual

EXACT = 1e-4  # largest difference allowed in float32, of values up to 15
TIE = 1e-4  # scores closer than this may be ranked either way
# An FP4 code on the border between two values may become either; in one of 128 channels of one of
# 16 heads that moves scores by up to head weight * step * key, 0.02 * 0.5 * 2.
FP4_TIE = 0.02
EXCUSED = 2, 0.001  # what ties may excuse in one test: a number, and a share of all comparisons


@dataclass(frozen=True)
class Story:
    """A sequence, and what transformers makes of it."""

    tokens: Sequence[int]
    trace: oracle.Trace
    fp4: bool

    def streams(self, layer: int) -> torch.Tensor:
        """[tokens, m, D]: what the layer gives."""
        return self.trace.layers[layer].streams

    def tied(self, layer: int) -> torch.Tensor:
        """[tokens] bool: whether the layer had to choose among near equals."""
        found, tied = self.trace.layers[layer], torch.zeros(len(self.tokens), dtype=torch.bool)
        if found.index_gap is not None:
            tied |= found.index_gap < (FP4_TIE if self.fp4 else TIE)
        if found.router_gap is not None:
            tied |= found.router_gap < TIE
        return tied


Part = tuple[Request, Story, int]  # a request, its story, and how many more of its tokens to run


@functools.cache
def teller(folder: Path, indexer_qk: str) -> Callable[[tuple[int, ...]], Story]:
    """Makes the story of a sequence, once for each."""
    fp4 = indexer_qk == "fp4"
    model = oracle.load(folder, fp4)

    @functools.cache
    def tell(tokens: tuple[int, ...]) -> Story:
        return Story(tokens, oracle.record(model, list(tokens)), fp4)

    return tell


@contextmanager
def guide(runner: Runner, expected: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Layers after the first read `expected` of the layer before; yields what each layer gives.

    expected: for each layer [tokens, m, D]; tokens beyond (padding) go on with their own streams.
    """
    found: list[torch.Tensor] = []
    write = runner.lm.ops.mhc_post

    def lead(before: torch.Tensor, _: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        residual, *others = arguments
        own = write(*residual)
        led = torch.cat([before.to(own.dtype), own[len(before) :]])
        return Residual(None, led, None, None), *others

    def keep(_: Any, __: Any, residual: Residual) -> None:
        found.append(write(*residual))

    layers = list(runner.lm.model.layers)
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    for before, layer in zip(expected, layers[1:], strict=False):
        hooks.append(layer.register_forward_pre_hook(functools.partial(lead, before)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Follower:
    """Runs stories and compares every layer's streams and the logits; keeps count of excuses."""

    runner: Runner
    tell: Callable[[tuple[int, ...]], Story]
    compared: int = 0
    excused: int = 0

    def open(self, prefix: Request | None = None, length: int = 0) -> Request:
        return self.runner.open(prefix, length)

    def step(self, *parts: Part, padding: int = 0) -> None:
        """One forward of several requests."""
        stories = [story for _, story, _ in parts]
        spans = [slice(request.length, request.length + count) for request, _, count in parts]

        def joined(values: Iterable[torch.Tensor]) -> torch.Tensor:
            return torch.cat([value[span] for value, span in zip(values, spans, strict=True)])

        layers = range(len(self.runner.lm.model.layers))
        expected = [joined(story.streams(number) for story in stories) for number in layers]
        tied = [joined(story.tied(number) for story in stories) for number in layers]
        new = [
            (request, story.tokens[span])
            for (request, story, _), span in zip(parts, spans, strict=True)
        ]
        with guide(self.runner, expected) as found:
            logits = torch.cat(self.runner.step(*new, padding=padding))
        labels = [
            f"position {position} of request {number}"
            for number, span in enumerate(spans)
            for position in range(span.start, span.stop)
        ]
        for number, streams in enumerate(found):
            self._compare(streams, expected[number], tied[number], f"layer {number}", labels)
        rank, width = self.runner.parallel.rank, logits.shape[1]
        ranks_own = slice(rank * width, (rank + 1) * width)
        expected_logits = joined(story.trace.logits[:, ranks_own] for story in stories)
        self._compare(logits, expected_logits, tied[-1], "logits", labels)

    def run(self, request: Request, tokens: Sequence[int], chunk: int = 1 << 30) -> None:
        """The rest of a sequence, `chunk` tokens in each forward."""
        story = self.tell(tuple(tokens))
        while request.length < len(tokens):
            self.step((request, story, min(chunk, len(tokens) - request.length)))

    def _compare(
        self,
        found: torch.Tensor,
        expected: torch.Tensor,
        tied: torch.Tensor,
        what: str,
        labels: Sequence[str],
    ) -> None:
        assert found.isfinite().all(), f"{what}: not finite"
        apart = (found[: len(expected)] - expected).abs().flatten(1).amax(dim=1)
        wrong = (apart > EXACT) & ~tied
        if wrong.any():
            worst = int((apart * wrong).argmax())
            raise AssertionError(
                f"{what}: {int(wrong.sum())} tokens differ; worst {labels[worst]}: {apart[worst]}"
            )
        self.compared += len(apart)
        self.excused += int((apart > EXACT).sum())
