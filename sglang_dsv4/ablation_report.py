"""The ablation's result for people: a table on the terminal, in Markdown, and a picture.

Everything here reads the plain data of `ablation_summary.summary`.
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dsv4.ablation_summary import METRICS
from sglang_dsv4.settings import SettingsError

Result = Mapping[str, Any]
NONE = "-"
_DIGITS = {"top1": 4, "perplexity": 4, "selection": 4, "experts": 4, "equal": 1}  # after the point
# A page is narrow: first how far from the reference, then what comes of it, with the answers.
_FIRST = ("kl", "top1", "last_layer", "selection", "experts")


def number(metric: str, value: float) -> str:
    """With as many digits after the point as the metric has, else with three significant ones."""
    return f"{value:.{_DIGITS[metric]}f}" if metric in _DIGITS else f"{value:.3g}"


def headings(result: Result) -> list[str]:
    kinds = list(result["configurations"][0]["answers"])
    return ["configuration", *(METRICS[name][0] for name in METRICS), *kinds]


def rows(result: Result) -> list[list[tuple[str, str]]]:
    """For each configuration its cells, under `headings`: (value, interval)."""
    found = []
    for one in result["configurations"]:
        cells = [(one["name"], "")]
        for metric, held in one["metrics"].items():
            if held is None:
                cells.append((NONE, ""))
                continue
            value, low, high = (number(metric, held[key]) for key in ("value", "low", "high"))
            cells.append((value, f"{low} to {high}"))
        for answer in one["answers"].values():
            changed = f", -{answer['lost']} +{answer['won']}"
            cells.append((f"{answer['right']} of {answer['of']}{changed}", _percent(answer)))
        found.append(cells)
    return found


def _percent(answer: Mapping[str, Any]) -> str:
    return f"{100 * answer['low']:.1f} to {100 * answer['high']:.1f} %"


def about(result: Result) -> list[str]:
    """What was run, and what the columns are."""
    dtype, count = result["dtype"], result["intervals"]["bootstrap"]
    lines = [
        f"checkpoint: {result['checkpoint']}",
        f"computed in {dtype}; reference: {result['reference']}",
        f"texts: {result['texts']} of {result['material']}, {result['tokens']} tokens, the longest"
        f" {result['longest_text']}; generated: {result['generated']} tokens after each",
        f"intervals: 95 %, from {count} bootstrap samples of texts (seed"
        f" {result['intervals']['seed']}); of answers by Wilson's formula",
    ]
    lines += [f"{heading}: {meaning}" for heading, meaning in METRICS.values()]
    if result["configurations"][0]["answers"]:
        lines.append("answers: right of all, -lost and +won against `all floor`")
    return lines + [f"{name}: left out: {why}" for name, why in result["refused"].items()]


def _columns(result: Result) -> tuple[list[int], list[int]]:
    """Of `headings`: those of the first table, and those of the second."""
    first = [0, *(1 + list(METRICS).index(name) for name in _FIRST)]
    count = len(headings(result))
    return first, [0, *(column for column in range(count) if column not in first)]


def table(result: Result) -> str:
    """For a terminal: intervals under their values."""
    lines = about(result)
    for columns in _columns(result):
        lines += ["", *_aligned(headings(result), rows(result), columns)]
    return "\n".join(lines)


def _aligned(
    head: Sequence[str], body: Sequence[Sequence[tuple[str, str]]], columns: Sequence[int]
) -> list[str]:
    lines = [[head[column] for column in columns]]
    for cells in body:
        lines += [[cells[column][part] for column in columns] for part in (0, 1)]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def markdown(result: Result) -> str:
    """A list of what was run, the tables, and 1 - cosine by layer."""
    lines = [f"* {line}" for line in about(result)]
    head = headings(result)
    for columns in _columns(result):
        lines += ["", _row([head[column] for column in columns]), _row(["---"] * len(columns))]
        for cells in rows(result):
            shown = (cells[column] for column in columns)
            lines.append(_row([f"{value} ({span})" if span else value for value, span in shown]))
    count = len(result["configurations"][0]["layers"])
    lines += ["", "1 − cosine of the streams after each layer:", ""]
    head = ["configuration", *(f"layer {layer}" for layer in range(count))]
    lines += [_row(head), _row(["---"] * len(head))]
    for one in result["configurations"]:
        lines.append(_row([one["name"], *(number("", held["value"]) for held in one["layers"])]))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------------------------------- picture

_PANELS = ("kl", "top1", "log_perplexity", "selection", "experts")
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#0a0a0a", "#9a9a9a"),
    "#8b5a2b",
)


def require_matplotlib() -> None:
    """Raises SettingsError with the command that installs it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError(
            f"--plot draws with matplotlib, which is not installed: {sys.executable} -m pip install"
            " matplotlib"
        )


def plot(result: Result, file: Path) -> None:
    """A panel for each metric, values with their intervals, and 1 - cosine by layer; a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [one for one in result["configurations"] if one["name"] != "reference"]
    figure = Figure(figsize=(14, 1.4 + 0.9 * len(shown)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3).flatten()
    for metric, panel in zip(_PANELS, panels, strict=False):
        _dots(panel, metric, shown)
    _layers(panels[-1], shown)
    figure.suptitle(
        f"{result['checkpoint']}, computed in {result['dtype']}, against {result['reference']}"
    )
    figure.savefig(file, format="png")


def _dots(panel: Any, metric: str, shown: Sequence[Mapping[str, Any]]) -> None:
    names = [one["name"] for one in shown]
    for place, one in enumerate(shown):
        held, colour = one["metrics"][metric], _COLOURS[place % len(_COLOURS)]
        if held is None:
            continue
        panel.plot([held["low"], held["high"]], [place, place], color=colour, linewidth=2)
        panel.plot([held["value"]], [place], "o", color=colour, markersize=5)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    heading, meaning = METRICS[metric]
    panel.set_title(f"{heading}: {meaning}", fontsize=8, wrap=True)
    panel.grid(axis="x", alpha=0.3)
    if metric == "kl":
        panel.set_xscale("log")


def _layers(panel: Any, shown: Sequence[Mapping[str, Any]]) -> None:
    for place, one in enumerate(shown):
        values = [max(held["value"], 1e-16) for held in one["layers"]]
        colour = _COLOURS[place % len(_COLOURS)]
        panel.plot(range(len(values)), values, "o-", color=colour, label=one["name"], markersize=3)
    panel.set_yscale("log")
    panel.set_xticks(range(len(shown[0]["layers"])))
    panel.set_xlabel("layer")
    panel.set_title("1 − cosine of the streams after each layer", fontsize=8)
    panel.legend(fontsize=6)
    panel.grid(alpha=0.3)
