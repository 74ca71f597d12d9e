"""Tables and plot of bench_vs_builtin.py, from the JSON of its calls.

A ratio is how many times as fast as the built-in model: its time over ours, or our tokens per
second over its; of launches, how many times as few. It is taken within each round, and told as the
median with the smallest and the largest.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_variants import BASELINES

Row = Mapping[str, Any]
Result = Mapping[str, Any]
KEY = ("kind", "what", "context", "batch", "metric", "unit", "better")
BAD_INPUT = 2


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of `count` numbers."""

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Line:
    """One point of one call: what of KEY it is, and of each variant its values, its ratios to the
    baseline, and why something is missing."""

    key: Mapping[str, Any]
    values: Mapping[str, Spread | None]
    ratios: Mapping[str, Spread | None]
    errors: Mapping[str, str]


def baseline(result: Result) -> str | None:
    """The first built-in variant of the call that was measured, in the order of all variants."""
    measured = {row["variant"] for row in result["measured"] if "value" in row}
    return next((name for name in BASELINES if name in measured), None)


def lines(result: Result) -> list[Line]:
    """Every point in the order in which it was measured; round 0 does not count."""
    counted = [row for row in result["measured"] if row["round"]]
    found: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    errors: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in counted:
        key = tuple(row[name] for name in KEY)
        rounds = found.setdefault(key, {}).setdefault(row["variant"], {})
        if "value" in row:
            rounds[row["round"]] = row["value"]
        else:
            errors.setdefault(key, {}).setdefault(row["variant"], row["error"])
    against = baseline(result)
    return [
        Line(
            key=dict(zip(KEY, key, strict=True)),
            values={name: Spread.of(list(rounds.values())) for name, rounds in variants.items()},
            ratios={
                name: Spread.of(ratios(variants.get(against or "", {}), rounds, key[-1]))
                for name, rounds in variants.items()
                if name != against
            },
            errors=errors.get(key, {}),
        )
        for key, variants in found.items()
    ]


def ratios(base: Mapping[int, float], other: Mapping[int, float], better: str) -> list[float]:
    """How many times as fast `other` is in each round that both have."""
    pairs = [(base[number], other[number]) for number in sorted(base.keys() & other.keys())]
    return [ours / theirs if better == "more" else theirs / ours for theirs, ours in pairs]


def in_turn(result: Result, name: str) -> bool:
    """Whether the variant's server ran beside the baseline's."""
    beside = result["variants"].get(name, {}).get("beside", [])
    return baseline(result) in beside


def complete(result: Result) -> bool:
    """Whether every variant is well and every point of every round has a value."""
    well = all(about.get("status") == "ok" for about in result["variants"].values())
    return well and all("value" in row for row in result["measured"] if row["round"])


# ---- text ----


def shown(spread: Spread | None, digits: int = 4) -> str:
    if spread is None:
        return "-"
    median, least, most = (_number(x, digits) for x in (spread.median, spread.least, spread.most))
    return f"{median} ({least} to {most})" if spread.count > 1 else median


def _number(value: float, digits: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def label(key: Mapping[str, Any]) -> str:
    """Of a point: `decode, batch 8, context 1,024`."""
    if key["kind"] == "ready":
        return f"time to ready, {key['what']}"
    batch = "" if key["kind"].startswith("prefill") else f", batch {key['batch']}"
    what = f" {key['what']}" if key["what"] else ""
    return f"{key['kind']}{what}{batch}, context {key['context']:,}: {key['metric']}"


def one_line(row: Row) -> str:
    """A measurement as it comes."""
    told = f"{row['value']:.3f} {row['unit']}" if "value" in row else f"failed: {row['error']}"
    return f"{row['variant']:<12} round {row['round']}  {label(row)}: {told}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown."""
    clean = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *clean)]


def markdown(result: Result) -> str:
    """One call: what it was, its variants, its points, and what went wrong."""
    device, against = result["device"], baseline(result)
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    text = [
        f"## {result['preset']}, {result['layers']} layers, {device['name']}, {result['date']}",
        "",
        f"`{' '.join(result['command'])}`",
        "",
        f"{packages}; driver {device.get('driver', 'none')}. Dummy weights. Median (smallest to"
        f" largest) of up to {result['rounds']} rounds, of serving {result['serving_rounds']};"
        " ratios: times as fast as"
        f" {against or 'the built-in model, which was not measured'}; of launches, times as few."
        " GB in brackets: how much less of the GPU's memory was free afterwards, other servers that"
        " started meanwhile included.",
        "",
        *_variants(result),
        "",
        *_starts(result),
        *_points(result),
    ]
    broken = [
        [label(line.key), name, why] for line in lines(result) for name, why in line.errors.items()
    ]
    if broken:
        text += [
            "",
            "Not measured in every round:",
            "",
            *table(["point", "variant", "why"], broken),
        ]
    for name, about in result["variants"].items():
        if about.get("log_tail"):
            text += ["", f"The end of {name}'s log:", "", "```", *about["log_tail"], "```"]
    return "\n".join(text) + "\n"


def _variants(result: Result) -> list[str]:
    head = ["variant", "status", "serves", "measured", "weights GB", "cache bytes/token",
            "graphs GB", "ready s"]  # fmt: skip
    rows = []
    for name, about in result["variants"].items():
        checks = about.get("checks") or {}
        how = "in turn" if in_turn(result, name) else "apart"
        status = about.get("status", "not started")
        rows.append([
            name,
            f"{status}: {about['why']}" if about.get("why") else status,
            str(checks.get("served", ["", "-"])[1]),
            how if status in ("ok", "suspect") else "-",
            *(_memory(about, field) for field in ("weights", "bytes_per_token", "graphs")),
            _held(about.get("ready_s")),
        ])  # fmt: skip
    return table(head, rows)


def _starts(result: Result) -> list[str]:
    """When each stage of a start was behind it; nothing where no log tells."""
    told = {name: about.get("stages") or {} for name, about in result["variants"].items()}
    head = list(dict.fromkeys(stage for found in told.values() for stage in found))
    if not head:
        return []
    rows = [[name, *(_held(found.get(stage)) for stage in head)] for name, found in told.items()]
    text = "Seconds from the start until its log tells of (of the last start of each):"
    return [text, "", *table(["variant", *head], rows), ""]


def _memory(about: Row, field: str) -> str:
    """A figure of a server's memory, in brackets where others that started meanwhile changed it."""
    memory = about.get("memory") or {}
    told = _held(memory.get(field))
    # The first results named neither.
    others = about.get("started_with", about.get("beside", ()))
    disturbed = len(others) > 1 and field in memory.get("by_free_memory", ("weights", "graphs"))
    return f"({told})" if disturbed and told != "-" else told


def _held(value: Any) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _points(result: Result) -> list[str]:
    against = baseline(result)
    names = list(result["variants"])
    others = [name for name in names if name != against]
    head = ["point", "unit", *names, *(f"{name}: ratio" for name in others)]
    rows = [
        [
            label(line.key),
            line.key["unit"],
            *(shown(line.values.get(name)) for name in names),
            *(shown(line.ratios.get(name), 3) for name in others),
        ]
        for line in lines(result)
    ]
    return table(head, rows)


# ---- picture ----

_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")


def plot(results: Sequence[Result], file: Path) -> None:
    """A panel for each kind of point and preset: ratios over batch or length, with their ranges."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[tuple[str, ...], list[tuple[str, Line]]] = {}
    for result in results:
        for line in lines(result):
            for name, ratio in line.ratios.items():
                if ratio is not None:
                    panels.setdefault(_panel(result, line.key), []).append((name, line))
    columns = min(3, max(1, len(panels)))
    height = -(-max(1, len(panels)) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.6 * height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(height, columns, squeeze=False).flatten()
    for axis, (title, drawn) in zip(axes, panels.items(), strict=False):
        _draw(axis, ", ".join(filter(None, title)), drawn)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    heading = (
        "times as fast as SGLang's built-in model; of launches, as few\n"
        "(median, smallest to largest)"
    )
    figure.suptitle(heading, fontsize=10)
    figure.savefig(file, format="png")


def _panel(result: Result, key: Mapping[str, Any]) -> tuple[str, ...]:
    context = "" if key["kind"].startswith(("ready", "prefill")) else f"context {key['context']:,}"
    preset = f"{result['preset']} {result['layers']} layers"
    return preset, key["kind"], key["what"], key["metric"], context


def _draw(axis: Any, title: str, drawn: Sequence[tuple[str, Line]]) -> None:
    names = list(dict.fromkeys(name for name, _ in drawn))
    prefill = drawn[0][1].key["kind"].startswith("prefill")
    field = "context" if prefill else "batch"
    for name, colour in zip(names, _COLOURS, strict=False):
        found = sorted((line.key[field], line.ratios[name]) for one, line in drawn if one == name)
        places = [place for place, _ in found]
        medians = [ratio.median for _, ratio in found if ratio]
        below = [ratio.median - ratio.least for _, ratio in found if ratio]
        above = [ratio.most - ratio.median for _, ratio in found if ratio]
        axis.errorbar(places, medians, yerr=[below, above], fmt="o-", color=colour, label=name,
                      capsize=3, markersize=4)  # fmt: skip
    axis.axhline(1.0, color="#6b6b6b", linewidth=1)
    if min(line.key[field] for _, line in drawn) > 0:
        axis.set_xscale("log", base=2)
        ticks = sorted({line.key[field] for _, line in drawn})
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_xlabel("prompt tokens" if prefill else "requests at once")
    axis.set_title(title, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


# ---- from the files ----


def remake(folder: Path) -> int:
    """FOLDER/bench.md and FOLDER/bench.png of every bench_*.json in it: an exit code."""
    files = sorted(folder.rglob("bench_*.json"))
    if not files:
        print(f"bench_report: {folder} has no bench_*.json", file=sys.stderr)
        return BAD_INPUT
    results = [json.loads(file.read_text()) for file in files]
    results.sort(key=lambda result: result["date"])
    text = "\n".join(["# Against SGLang's built-in model", "", *map(markdown, results)])
    (folder / "bench.md").write_text(text)
    try:
        plot(results, folder / "bench.png")
    except ModuleNotFoundError as error:
        print(f"no plot: {error}; --report {folder} makes it where matplotlib is installed")
    return 0
