"""How far one run of a model is from another: sums for each text, and intervals over texts.

A metric of a text is a pair (sum, count); of many texts it is the ratio of both totals. Intervals
are 95 %: of shares of questions by Wilson's formula, of everything else by a bootstrap over texts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SEED, RESAMPLES = 0, 2000
LOW, HIGH = 0.025, 0.975
_NORMAL = 1.959964  # that quantile of the normal distribution

Sums = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Trace:
    """What a model made of one text of T tokens.

    layers: for each layer [T, streams, hidden] float: its output. logits [T, V] fp32.
    selected: for each CSA layer [T, k] int64: entries, in any order, -1 for none.
    experts: for each layer that routes by score [T, k] int64, in any order.
    """

    layers: Sequence[Tensor]
    logits: Tensor
    selected: Sequence[Tensor]
    experts: Sequence[Tensor]


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def layer_metric(layer: int) -> str:
    return f"layer {layer}"


def compare(found: Trace, reference: Trace, ids: Sequence[int], *, ratio: int) -> Sums:
    """Sums of one text `ids` [T]: metric -> (sum, count).

    kl: nats from the reference's distribution of the next token to the found one. top1: equal best
    tokens. nll: minus the log-probability of the token that follows. selection: share of the
    reference's entries that were found too, of tokens that see more entries than are selected.
    experts: the same of experts, by score. layer N: 1 - cosine of a token's streams.
    ratio: tokens of an entry that is selected.
    """
    sums: dict[str, tuple[float, float]] = {}
    tokens = len(ids)
    for layer, (a, b) in enumerate(zip(found.layers, reference.layers, strict=True)):
        cosine = torch.cosine_similarity(a.flatten(1).double(), b.flatten(1).double(), dim=1)
        sums[layer_metric(layer)] = float((1 - cosine).clamp(min=0).sum()), tokens
    ours, theirs = (trace.logits.double().log_softmax(dim=1) for trace in (found, reference))
    kl = (theirs.exp() * (theirs - ours)).sum(dim=1)
    sums["kl"] = float(kl.sum()), tokens
    sums["top1"] = float((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum()), tokens
    following = torch.tensor(ids[1:])[:, None]
    sums["nll"] = -float(ours[:-1].gather(1, following).sum()), tokens - 1
    visible = (torch.arange(tokens) + 1) // ratio
    sums["selection"] = _overlap(found.selected, reference.selected, visible)
    every = torch.full((tokens,), 1 << 30)
    sums["experts"] = _overlap(found.experts, reference.experts, every)
    return sums


def _overlap(
    found: Sequence[Tensor], reference: Sequence[Tensor], choices: Tensor
) -> tuple[float, float]:
    """Of tokens with more than k `choices` [T]: how many of the reference's k were found."""
    shared, total = 0.0, 0.0
    for a, b in zip(found, reference, strict=True):
        chooses = choices > b.shape[1]
        same = (a[chooses].unsqueeze(2) == b[chooses].unsqueeze(1)).any(dim=1)
        shared += float(same.sum())
        total += float(same.numel())
    return shared, total


def equal_tokens(logits: Tensor, prompt: int, said: Sequence[int]) -> int:
    """How many tokens of `said` the model would have said too, before the first other one.

    logits [prompt + said, V] of the prompt and of what was said after it: as long as the tokens
    are equal, greedy generation reads the same text.
    """
    best = logits[prompt - 1 : prompt - 1 + len(said)].argmax(dim=1)
    differs = (best != torch.tensor(list(said))).nonzero()
    return int(differs[0]) if len(differs) else len(said)


def bootstrap(sums: Sequence[tuple[float, float]]) -> Interval | None:
    """The ratio of totals, and its percentiles over texts drawn anew; None where nothing counts."""
    pairs = torch.tensor(sums, dtype=torch.float64).reshape(-1, 2)
    total, count = pairs.sum(dim=0).tolist()
    if not count:
        return None
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(len(pairs), (RESAMPLES, len(pairs)), generator=generator)
    totals, counts = pairs[drawn].sum(dim=1).unbind(dim=1)
    ratios = (totals / counts)[counts > 0]
    return Interval(total / count, *_percentiles(ratios))


def _percentiles(values: Tensor) -> tuple[float, float]:
    low, high = values.quantile(torch.tensor([LOW, HIGH], dtype=values.dtype)).tolist()
    return low, high


def perplexity(nll: Sequence[tuple[float, float]]) -> Interval | None:
    """exp of the mean negative log-probability."""
    mean = bootstrap(nll)
    if mean is None:
        return None
    return Interval(*(math.exp(value) for value in (mean.value, mean.low, mean.high)))


def change(
    found: Sequence[tuple[float, float]], before: Sequence[tuple[float, float]]
) -> Interval | None:
    """The difference of means of the same texts: what texts have in common cancels out."""
    pairs = zip(found, before, strict=True)
    return bootstrap([(a - b, count) for (a, count), (b, _) in pairs])


def share(right: Sequence[bool]) -> Interval | None:
    """The share of right answers, and Wilson's interval, which is no point where all are right."""
    count = len(right)
    if not count:
        return None
    value, z = sum(right) / count, _NORMAL
    middle = (value + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(value * (1 - value) / count + (z / count / 2) ** 2)
    return Interval(value, max(0.0, middle - half), min(1.0, middle + half))
