"""The demo's picture: the model's layers, the rows of its cache, what of each prompt was cached."""

import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dsv4.components import component_of
from sglang_dsv4.config import DSV4Config, LayerKind
from sglang_dsv4.nano_demo_server import UsageError
from sglang_dsv4.tensor_table import Kept, expected_tensors

SIZE = (1300, 1150)  # pixels
_DOTS = 100  # per inch
_LAYERS_SHOWN = 16  # of more layers, those of one kind share a bar

# For both sorts of colour blindness, too.
_COLOURS = {
    "embedding": "#9a9a9a",
    "attention": "#0072b2",
    "compressor": "#56b4e9",
    "indexer": "#009e73",
    "router": "#cc79a7",
    "routed experts": "#d55e00",
    "shared expert": "#e69f00",
    "mHC": "#f0e442",
    "norms": "#0a0a0a",
    "head": "#6b6b6b",
}
CACHED, COMPUTED = "#3a2a88", "#e9c46a"  # nothing else has these colours


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and how many of them, from its beginning, came from the cache."""

    name: str
    tokens: int
    cached: int


def require_matplotlib() -> None:
    """Raises UsageError with the command that installs it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"--plot draws with matplotlib, which is not installed: {sys.executable} -m pip install"
            " matplotlib"
        )


def parameters(config: DSV4Config) -> dict[str, Counter[str]]:
    """Part of the model, from input to output -> component -> number of its parameters.

    A part is the embedding, a layer or the head; the table of hash-routed layers is no parameter.
    """
    labels = [_layer_label(config, layer) for layer in range(config.num_hidden_layers)]
    if len(labels) <= _LAYERS_SHOWN:
        labels = [f"layer {layer}: {label}" for layer, label in enumerate(labels)]
    else:
        counts = Counter(labels)
        labels = [f"{counts[label]} layers: {label}" for label in labels]
    parts: dict[str, Counter[str]] = {}
    for part in ("embedding", *labels, "head"):
        parts.setdefault(part, Counter())
    for name, slot in expected_tensors(config).items():
        if slot.row.kept is Kept.INT64:
            continue
        part = "embedding" if name.startswith("embed.") else "head"
        if name.startswith("layers."):
            part = labels[int(name.split(".")[1])]
        parts[part][component_of(name)] += math.prod(slot.shape)
    return parts


def _layer_label(config: DSV4Config, layer: int) -> str:
    routing = "token id" if layer < config.num_hash_layers else "score"
    return f"{config.layer_kinds[layer].name}, experts by {routing}"


@dataclass(frozen=True)
class Rows:
    """One kind of cache rows. per_page: rows in a page, of one layer. bytes_per_token: of all."""

    name: str
    per_page: int
    row_bytes: int
    layers: int
    page: int

    @property
    def bytes_per_token(self) -> float:
        return self.per_page * self.row_bytes * self.layers / self.page

    def __str__(self) -> str:
        return (
            f"{self.per_page} rows per page × {self.row_bytes:,} bytes"
            f" × {self.layers} layer{'s' if self.layers > 1 else ''}"
            f" = {self.bytes_per_token:,g} bytes per token"
        )


def cache_rows(config: DSV4Config, item_bytes: int, page: int) -> list[Rows]:
    """Window rows, CSA entries with their index keys, HCA entries; item_bytes: of one value."""
    row, key = config.head_dim * item_bytes, config.index_head_dim * item_bytes
    csa, hca = (config.layer_kinds.count(kind) for kind in (LayerKind.CSA, LayerKind.HCA))
    every = [
        Rows("window", page, row, config.num_hidden_layers, page),
        Rows("CSA entries", page // LayerKind.CSA.value, row, csa, page),
        Rows("CSA index keys", page // LayerKind.CSA.value, key, csa, page),
        Rows("HCA entries", page // LayerKind.HCA.value, row, hca, page),
    ]
    return [kind for kind in every if kind.layers]


def draw(
    path: Path, config: DSV4Config, item_bytes: int, page: int, prompts: Sequence[Prompt]
) -> None:
    """Writes a PNG of SIZE pixels. item_bytes: of one cached value; page: tokens of a page."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    inches = (SIZE[0] / _DOTS, SIZE[1] / _DOTS)
    figure = Figure(figsize=inches, dpi=_DOTS, layout=ConstrainedLayoutEngine(h_pad=0.15))
    layers, cache, pages = figure.subplots(3, 1, height_ratios=(5, 2.4, 3.6))
    _draw_layers(layers, parameters(config))
    _draw_cache(cache, cache_rows(config, item_bytes, page), config.sliding_window)
    _draw_pages(pages, prompts, page)
    for axes in (layers, cache, pages):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def _draw_layers(axes: Any, parts: dict[str, Counter[str]]) -> None:
    names = list(parts)
    left = dict.fromkeys(names, 0.0)
    for component, colour in _COLOURS.items():
        widths = [parts[name][component] for name in names]
        axes.barh(names, widths, left=list(left.values()), color=colour, label=component)
        left = {name: left[name] + parts[name][component] for name in names}
    for place, total in enumerate(left.values()):
        axes.text(total, place, f" {_short(total)}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, max(left.values()) * 1.1)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _title(axes, f"The model: {_short(sum(left.values()))} parameters, by component")


def _draw_cache(axes: Any, rows: Sequence[Rows], window: int) -> None:
    for kind in rows:
        axes.barh(kind.name, kind.bytes_per_token, color=_COLOURS["compressor"], height=0.7)
        axes.text(1.1, kind.name, str(kind), va="center")
    axes.set_xscale("log")
    axes.set_xlim(left=1)
    axes.invert_yaxis()
    axes.set_xlabel("bytes per token in all layers (logarithmic)")
    kept = sum(kind.bytes_per_token for kind in rows[1:])
    read = f"window rows, of which the last {window} are read"
    _title(axes, f"The cache: {kept:,g} bytes per token of context, and {read}")


def _draw_pages(axes: Any, prompts: Sequence[Prompt], page: int) -> None:
    longest = max(2 * page, *(prompt.tokens for prompt in prompts))
    for place, prompt in enumerate(prompts):
        for start in range(0, prompt.tokens, page):
            width = min(page, prompt.tokens - start)
            cached = min(max(prompt.cached - start, 0), width)
            frame: dict[str, Any] = {"edgecolor": "white", "linewidth": 2}
            axes.barh(place, cached, left=start, color=CACHED, **frame)
            axes.barh(place, width - cached, left=start + cached, color=COMPUTED, **frame)
        told = f" {prompt.cached} of {prompt.tokens} tokens cached"
        axes.text(prompt.tokens, place, told, va="center")
    axes.barh(0, 0, color=CACHED, label="from the cache")
    axes.barh(0, 0, color=COMPUTED, label="computed")
    axes.set_yticks(range(len(prompts)), [prompt.name for prompt in prompts])
    step = page * max(1, longest // (page * 12))
    axes.set_xticks(range(0, longest + page, step))
    axes.set_xlim(0, longest * 1.3)
    axes.invert_yaxis()
    axes.set_xlabel("tokens of the prompt")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _title(axes, f"The prompts, in pages of {page} tokens")


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontweight="bold", pad=10)


def _short(count: float) -> str:
    """12,345,678 as 12.3 M."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= unit:
            return f"{count / unit:,.3g}{name}"
    return f"{count:,.0f}"
