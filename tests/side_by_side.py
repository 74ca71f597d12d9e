"""One model run twice: what every layer gave and chose on either side, and how far apart they are.

Choices among near equals (experts, index entries) make a model discontinuous. So what is compared
reads the other side's streams in every layer (as in `guided`), a token that chose otherwise is
left out of its layer's errors, and choices are compared on their own.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import oracle
from guided import guide
from inprocess import Runner


@dataclass(frozen=True)
class Layer:
    """What one layer gave and chose, for every token; on the CPU.

    streams [T, m, D] float32; experts [T, k] int64; selected [T, n] int64, -1 for none, of CSA.
    index_gap, router_gap [T] float32: see oracle.Gaps; None where nothing is chosen by score, or
    nobody recorded it.
    """

    streams: torch.Tensor
    experts: torch.Tensor
    selected: torch.Tensor | None = None
    index_gap: torch.Tensor | None = None
    router_gap: torch.Tensor | None = None


@dataclass(frozen=True)
class Record:
    """A run over a sequence. logits [T, V] float32."""

    layers: tuple[Layer, ...]
    logits: torch.Tensor

    def __getitem__(self, span: slice) -> "Record":
        """Some of the tokens."""
        layers = []
        for layer in self.layers:
            values = {name: value[span] for name, value in vars(layer).items() if value is not None}
            layers.append(Layer(**values))
        return Record(tuple(layers), self.logits[span])


def of_transformers(model: Any, tokens: Sequence[int]) -> Record:
    """One pass of `oracle.load`'s model over the whole sequence."""
    experts: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, found: experts.append(found[-1]))
        for layer in model.model.layers
    ]
    trace = oracle.record(model, list(tokens))
    for hook in hooks:
        hook.remove()
    layers = (
        Layer(one.streams, chosen, one.selected, one.index_gap, one.router_gap)
        for one, chosen in zip(trace.layers, experts, strict=True)
    )
    return Record(tuple(layers), trace.logits)


def of_runner(
    runner: Runner, tokens: Sequence[int], cuts: Sequence[int], led_by: Record | None = None
) -> Record:
    """A new request's tokens in forwards that end at `cuts`; the last cut is their number.

    led_by: every layer reads the streams of this run instead of its own.
    """
    request = runner.open()
    parts: list[Record] = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        leading = () if led_by is None else led_by.layers
        expected = [layer.streams[start:end].to(runner.device) for layer in leading]
        with guide(runner, expected) as streams, _choices(runner) as chosen:
            (logits,) = runner.step((request, tokens[start:end]))
        layers = (
            Layer(one.float().cpu(), *choices) for one, choices in zip(streams, chosen, strict=True)
        )
        parts.append(Record(tuple(layers), logits.float().cpu()))
    runner.close(request)
    return _joined(parts)


class _choices:
    """While open, collects each layer's experts and selected entries (or None) of one forward."""

    def __init__(self, runner: Runner) -> None:
        self.layers = list(runner.lm.model.layers)

    def __enter__(self) -> list[list[torch.Tensor | None]]:
        found: list[list[torch.Tensor | None]] = [[None, None] for _ in self.layers]

        def keep(layer: int, place: int, _: Any, __: Any, result: Any) -> None:
            found[layer][place] = (result if place else result[1]).cpu()

        self.hooks = []
        for number, layer in enumerate(self.layers):
            for place, module in enumerate((layer.ffn.gate, layer.attn.indexer)):
                if module is not None:
                    hook = functools.partial(keep, number, place)
                    self.hooks.append(module.register_forward_hook(hook))
        return found

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


def _joined(parts: Sequence[Record]) -> Record:
    def tokens(of: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        given = [one for one in of if one is not None]
        return torch.cat(given) if given else None

    layers = []
    for steps in zip(*(part.layers for part in parts), strict=True):
        streams, experts = (torch.cat([getattr(one, name) for one in steps])
                            for name in ("streams", "experts"))  # fmt: skip
        layers.append(Layer(streams, experts, tokens([one.selected for one in steps])))
    return Record(tuple(layers), torch.cat([part.logits for part in parts]))


# ---- comparison ----


@dataclass(frozen=True)
class Apart:
    """How far one layer (or the logits) is from the other side's.

    relative, cosine [T] float64: |a - b| / |b| and 1 - cos(a, b) of each token.
    entries, experts: share of chosen ones that are the same; None where none are chosen.
    otherwise [T] bool: tokens that chose other entries or experts. unexplained [T] bool: those of
    them whose recorded gaps are no near tie.
    """

    relative: torch.Tensor
    cosine: torch.Tensor
    entries: float | None
    experts: float | None
    otherwise: torch.Tensor
    unexplained: torch.Tensor

    def figures(self) -> dict[str, Any]:
        """Errors over tokens with the same choices, and counts of the others."""
        alike = ~self.otherwise
        relative, cosine = self.relative[alike], self.cosine[alike]
        return {
            "relative_median": float(relative.median()) if len(relative) else None,
            "relative_worst": float(relative.max()) if len(relative) else None,
            "cosine_median": float(cosine.median()) if len(cosine) else None,
            "cosine_worst": float(cosine.max()) if len(cosine) else None,
            "entries_alike": self.entries,
            "experts_alike": self.experts,
            "tokens": len(alike),
            "left_out": int(self.otherwise.sum()),
            "unexplained": int(self.unexplained.sum()),
        }


@dataclass(frozen=True)
class Ties:
    """Gaps below which a choice may fall either way: of index scores, and of experts' scores."""

    index: float
    router: float


def apart(found: Record, wanted: Record, ties: Ties | None = None) -> list[Apart]:
    """Every layer, then the logits, which share the last layer's choices.

    Without ties no other choice counts as unexplained.
    """
    result = []
    for one, other in zip(found.layers, wanted.layers, strict=True):
        shares, entries = torch.ones(len(one.streams)), None
        if one.selected is not None and other.selected is not None:
            shares = overlap(one.selected, other.selected)
            entries = float(shares.mean())
        experts = overlap(one.experts, other.experts)
        unexplained = torch.zeros(len(shares), dtype=torch.bool)
        if ties is not None:
            # Experts are chosen by what attention gave, so other entries explain other experts.
            unexplained |= (shares < 1) & ~near(other.index_gap, ties.index, unexplained)
            unexplained |= (
                (shares == 1) & (experts < 1) & ~near(other.router_gap, ties.router, unexplained)
            )
        otherwise = (shares < 1) | (experts < 1)
        errors = _errors(one.streams, other.streams)
        result.append(Apart(*errors, entries, float(experts.mean()), otherwise, unexplained))
    errors, last = _errors(found.logits, wanted.logits), result[-1]
    none = torch.zeros_like(last.unexplained)
    return [*result, Apart(*errors, None, None, last.otherwise, none)]


def _errors(found: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return relative_error(found, wanted), cosine_error(found, wanted)


def near(gap: torch.Tensor | None, bound: float, like: torch.Tensor) -> torch.Tensor:
    """[T] bool: recorded near ties; none where no gap was recorded."""
    return torch.zeros_like(like) if gap is None else gap < bound


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """|a - b| / |b| of each token [T] float64; infinite where one is not finite."""
    a, b = found.double().flatten(1), wanted.double().flatten(1)
    return ((a - b).norm(dim=1) / b.norm(dim=1)).nan_to_num(torch.inf, torch.inf)


def cosine_error(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """1 - cos(a, b) of each token [T] float64; 2, the largest, where one is not finite."""
    a, b = found.double().flatten(1), wanted.double().flatten(1)
    cosine = (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1))
    return (1 - cosine).nan_to_num(2, 2)


def overlap(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Share of each token's numbers [T, n] (in any order, -1 for none) that are in both sets: [T],
    1 where both are empty."""
    highest = int(max(found.max(), wanted.max())) + 1

    def members(numbers: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(len(numbers), highest + 1, dtype=torch.bool)
        return mask.scatter_(1, numbers + 1, True)[:, 1:]

    one, other = members(found), members(wanted)
    either = torch.maximum(one.sum(dim=1), other.sum(dim=1))
    return torch.where(either > 0, (one & other).sum(dim=1) / either, 1.0)
