"""What `bench` found, as tables for a terminal and as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]

COLOURS = {"triton": "#0072b2", "flashmla": "#d55e00", "flashinfer": "#009e73"}
_OTHER = "#9a9a9a"
NOT_A_TERMINAL = 150  # columns


def show(result: Result) -> None:
    """Prints the steps and every op."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=NOT_A_TERMINAL)
    console.print(f"{_what(result)}: {result['how']}", style="bold")
    console.print(
        f"copy bandwidth, measured: {result['copy_bandwidth'] / 1e9:,.0f} GB/s (the roof)"
    )
    steps = Table("batch", "context", "layers", "ms", "its ops ms", "MB", "roof", title="steps")
    for one in result["steps"]:
        steps.add_row(*_step_cells(one))
    console.print(steps)
    ops = Table("batch", "op", "first tensor", "provider", "calls", "us", "MB", "GB/s", "roof",
                title="ops; * serves")  # fmt: skip
    for one in result["ops"]:
        ops.add_row(*_op_cells(one))
    console.print(ops)


def _what(result: Result) -> str:
    formats = f"experts in {result['format']}, attention in {result['linears']}"
    return f"{result['preset']}, {formats}, on {result['device']}"


def _step_cells(one: Result) -> list[str]:
    ops = "-" if one["ops"] is None else f"{one['ops']:,.3f}"
    return [
        str(one["batch"]),
        f"{one['context']:,}",
        " ".join(one["layers"]),
        f"{one['milliseconds']:,.3f}",
        ops,
        f"{one['moved'] / 1e6:,.1f}",
        f"{one['roof']:.0%}",
    ]


def _op_cells(one: Result) -> list[str]:
    provider = one["provider"] + (" *" if one["chosen"] else "")
    cells = [str(one["batch"]), one["op"], one["label"], provider, str(one["count"])]
    moved = f"{one['moved'] / 1e6:,.3f}"
    if one["error"]:
        return [*cells, f"failed: {one['error']}", moved, "-", "-"]
    if not one["microseconds"]:
        return [*cells, "below launch", moved, "-", "-"]
    gigabytes = f"{one['bandwidth'] / 1e9:,.0f}"
    return [*cells, f"{one['microseconds']:,.1f}", moved, gigabytes, f"{one['roof']:.0%}"]


def plot(result: Result, file: Path) -> None:
    """A bar for each call of an op by each provider, one panel for each batch; a PNG. The mark is
    the time that the bytes alone would take."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = list(dict.fromkeys(one["batch"] for one in result["ops"]))
    drawn = {
        batch: [one for one in result["ops"] if one["batch"] == batch and one["microseconds"]]
        for batch in batches
    }
    rows = max(1, *map(len, drawn.values()))
    size = (8.0 * len(batches), 1.5 + 0.26 * rows)
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for panel, (batch, ops) in zip(panels, drawn.items(), strict=True):
        _bars(panel, batch, ops, result["copy_bandwidth"])
    figure.suptitle(f"{_what(result)}: ops of a decode step")
    figure.savefig(file, format="png")


def _bars(panel: Any, batch: int, ops: list[Result], copy: float) -> None:
    names = [f"{one['op']} {one['label']} ({one['provider']})" for one in ops]
    places = range(len(ops))
    colours = [COLOURS.get(one["provider"], _OTHER) for one in ops]
    panel.barh(places, [one["microseconds"] for one in ops], color=colours)
    floors = [one["moved"] / copy * 1e6 for one in ops]
    panel.plot(floors, places, "k|", markersize=9, label="bytes at the copy bandwidth")
    panel.set_yticks(places, names, fontsize=7)
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.set_xlabel("us of a call")
    panel.set_title(f"batch {batch}", fontsize=9)
    panel.legend(fontsize=7)
