"""From tallies of texts, answers and generations to the ablation's result, as plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_dsv4.ablation_metrics import (
    RESAMPLES,
    SEED,
    Interval,
    Sums,
    bootstrap,
    change,
    layer_metric,
    perplexity,
    share,
)

# Metric -> heading, what it is; questions of the material's own kinds come after these.
METRICS = {
    "kl": ("KL", "KL divergence of the next token from the reference, nats a token"),
    "top1": ("top-1", "share of tokens after which the best next token is the reference's"),
    "perplexity": ("perplexity", "of the texts"),
    "log_perplexity": ("Δ log ppl", "log perplexity less that of `all floor`, text by text"),
    "last_layer": ("1 − cos", "1 − cosine of the last layer's streams, mean over tokens"),
    "selection": ("selected", "share of the reference's selected entries that are selected too"),
    "experts": ("experts", "share of the reference's experts, by score, that are chosen too"),
    "equal": ("equal text", "tokens, of those generated, that equal the text of `all floor`"),
}


@dataclass
class Tally:
    """What one configuration gave: sums for each text, right or wrong for each question of a kind,
    and for each generation how many tokens equal `all floor` before the first other one."""

    texts: list[Sums] = field(default_factory=list)
    answers: dict[str, list[bool]] = field(default_factory=dict)
    equal: list[int] = field(default_factory=list)

    def of(self, metric: str) -> list[tuple[float, float]]:
        return [sums[metric] for sums in self.texts]


def summary(
    tallies: Mapping[str, Tally], precision: Mapping[str, str], baseline: str
) -> dict[str, Any]:
    """{"intervals": how they were made, "configurations": one for each of `tallies`}.

    A configuration: name, precision, metrics (name -> {value, low, high}, or None where nothing
    counts), layers (a list of 1 - cosine), answers (kind -> {right, of, lost, won, value, low,
    high}; lost and won: answers that `baseline` has right and this one wrong, and the other way).
    """
    return {
        "intervals": {"level": 0.95, "bootstrap": RESAMPLES, "seed": SEED},
        "configurations": [
            {"name": name, "precision": precision[name]} | _one(tally, tallies[baseline])
            for name, tally in tallies.items()
        ],
    }


def _one(tally: Tally, baseline: Tally) -> dict[str, Any]:
    count = sum(name.startswith("layer ") for name in tally.texts[0])
    layers = [bootstrap(tally.of(layer_metric(layer))) for layer in range(count)]
    metrics = {
        "kl": bootstrap(tally.of("kl")),
        "top1": bootstrap(tally.of("top1")),
        "perplexity": perplexity(tally.of("nll")),
        "log_perplexity": change(tally.of("nll"), baseline.of("nll")),
        "last_layer": layers[-1],
        "selection": bootstrap(tally.of("selection")),
        "experts": bootstrap(tally.of("experts")),
        "equal": bootstrap([(count, 1) for count in tally.equal]),
    }
    assert metrics.keys() == METRICS.keys()
    return {
        "metrics": {name: _plain(found) for name, found in metrics.items()},
        "layers": [_plain(found) for found in layers],
        "answers": {
            kind: _answers(right, baseline.answers[kind]) for kind, right in tally.answers.items()
        },
    }


def _answers(right: list[bool], before: list[bool]) -> dict[str, Any]:
    pairs = list(zip(right, before, strict=True))
    counts = {
        "right": sum(right),
        "of": len(right),
        "lost": sum(b and not a for a, b in pairs),
        "won": sum(a and not b for a, b in pairs),
    }
    return counts | (_plain(share(right)) or {})


def _plain(found: Interval | None) -> dict[str, float] | None:
    return asdict(found) if found is not None else None
