"""The picture of `inspect`: bytes by component and format, and the memory of GPUs."""

from collections import Counter
from pathlib import Path
from typing import Any

from sglang_dsv4.components import NAMES
from sglang_dsv4.inspection import Inspection
from sglang_dsv4.memory_plan import GIB, GPUS

SIZE = (1300, 1000)  # pixels
_DOTS = 100  # per inch
# Formats as told to users; colours are for both sorts of colour blindness, too.
COLOURS = {
    "BF16": "#0072b2",
    "F16": "#56b4e9",
    "F32": "#6b6b6b",
    "FP8": "#009e73",
    "MXFP4": "#d55e00",
    "NVFP4": "#e69f00",
    "compressed-tensors NVFP4": "#cc79a7",
}
_OTHER = "#0a0a0a"  # integer tables
WEIGHTS, CACHE, FREE, LACKING = "#3a2a88", "#e9c46a", "#dddddd", "#aa0000"


def draw(path: Path, found: Inspection) -> None:
    """Writes a PNG of SIZE pixels; what is unknown of a refused checkpoint stays empty."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    inches = (SIZE[0] / _DOTS, SIZE[1] / _DOTS)
    figure = Figure(figsize=inches, dpi=_DOTS, layout=ConstrainedLayoutEngine(h_pad=0.15))
    parts, memory = figure.subplots(2, 1, height_ratios=(5, 4))
    figure.suptitle(f"{found.folder.name}: {found.verdict.value}", x=0.02, ha="left")
    _draw_parts(parts, found)
    _draw_memory(memory, found)
    for axes in (parts, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def part_sizes(found: Inspection) -> dict[str, Counter[str]]:
    """Component -> format -> gigabytes in the files, those that are there in the model's order."""
    sizes: dict[str, Counter[str]] = {name: Counter() for name in NAMES}
    for row in found.holdings:
        sizes[row.component][row.held] += row.bytes
    return {name: formats for name, formats in sizes.items() if formats}


def _draw_parts(axes: Any, found: Inspection) -> None:
    sizes = part_sizes(found)
    kinds = dict.fromkeys(kind for formats in sizes.values() for kind in formats)
    left = dict.fromkeys(sizes, 0.0)
    for kind in kinds:
        widths = [formats[kind] / 1e9 for formats in sizes.values()]
        colour = COLOURS.get(kind, _OTHER)
        axes.barh(list(sizes), widths, left=list(left.values()), color=colour, label=kind)
        left = {name: left[name] + width for name, width in zip(sizes, widths, strict=True)}
    for place, total in enumerate(left.values()):
        axes.text(total, place, f" {total:.3g} GB", va="center")
    if sizes:
        axes.invert_yaxis()
        axes.set_xlim(0, max(left.values()) * 1.15)
        axes.legend(loc="lower right", frameon=False)
    axes.set_xlabel("GB (1e9 bytes)")
    _title(axes, f"In the files: {sum(left.values()):,.1f} GB, by component and format")


def _draw_memory(axes: Any, found: Inspection) -> None:
    devices = {name: float(size) for name, size in GPUS.items()}
    wanted = found.deployment
    if wanted.device is not None and wanted.device_name.removeprefix("a ") not in devices:
        devices = {wanted.device_name: wanted.device / GIB} | devices
    ranks = wanted.tensor_parallel
    if found.plan is None:
        _title(axes, f"Memory: not known for {ranks} ranks")
        return
    for place, size in enumerate(devices.values()):
        plan = found.plan_for(ranks, device=int(size * GIB))
        weights, usable = plan.weights / GIB, plan.usable / GIB
        cache = max(0.0, usable - weights)
        axes.barh(place, min(weights, size), color=WEIGHTS if plan.pages else LACKING)
        axes.barh(place, cache, left=weights, color=CACHE)
        axes.barh(place, max(0.0, size - weights - cache), left=weights + cache, color=FREE)
        fits = f"{plan.requests} requests of {plan.context:,} tokens" if plan.pages else "too small"
        axes.text(size, place, f" {fits}", va="center")
    for label, colour in (("weights", WEIGHTS), ("cache", CACHE), ("free", FREE)):
        axes.barh(0, 0, color=colour, label=label)
    axes.set_yticks(range(len(devices)), list(devices))
    axes.invert_yaxis()
    axes.set_xlim(0, max(devices.values()) * 1.35)
    axes.legend(loc="upper right", frameon=False)
    axes.set_xlabel("GiB of one device")
    weights = found.plan.weights / GIB
    _title(axes, f"In memory: {weights:,.1f} GiB of weights on each of {ranks} rank(s)")


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontweight="bold", pad=10)
