"""Which linear weights stay in FP8 in memory, as their checkpoint holds them.

This is the one place that decides; the model, the plan of its memory and `warm` follow. Matrices
that are multiplied as one stay if each of them is in FP8, and if its rows and columns on a rank
begin with a block of scales.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dsv4 import format_claims
from sglang_dsv4.components import component_of
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.dequant import FP8_BLOCK
from sglang_dsv4.expert_storage import stored_formats
from sglang_dsv4.formats import TensorFormat
from sglang_dsv4.precision import EIGHT_BITS, VARIABLE
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.tensor_table import Slot, layer_of

# Vendor's name within a layer -> the module that holds it, within the model's layer.
HOLDERS = {
    "attn.wq_a.weight": "attn.inputs",
    "attn.wkv.weight": "attn.inputs",
    "attn.wq_b.weight": "attn.wq_b",
    "attn.wo_a.weight": "attn.wo_a",
    "attn.wo_b.weight": "attn.wo_b",
    "attn.indexer.wq_b.weight": "attn.indexer.wq_b",
    "ffn.shared_experts.w1.weight": "ffn.shared_experts.w13",
    "ffn.shared_experts.w3.weight": "ffn.shared_experts.w13",
    "ffn.shared_experts.w2.weight": "ffn.shared_experts.w2",
}


@dataclass(frozen=True)
class LinearStorage:
    """fp8: layer -> modules whose matrices stay in FP8. weights: the same by the vendor's names."""

    fp8: Mapping[int, frozenset[str]] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()


def holder_of(name: str) -> str | None:
    """layers.3.attn.wkv.weight -> attn.inputs; None for what never stays in FP8."""
    return HOLDERS.get(name.split(".", 2)[-1]) if name.startswith("layers.") else None


def modules_of(component: str) -> frozenset[str]:
    """Those that may stay in FP8, of a component as `components` names it."""
    return frozenset(
        holder for name, holder in HOLDERS.items() if component_of(f"layers.0.{name}") == component
    )


def decide(
    config: DSV4Config,
    slots: Mapping[str, Slot],
    formats: Mapping[str, TensorFormat],
    *,
    chosen: str,
    ranks: int,
) -> LinearStorage:
    """What one of `ranks` ranks keeps in FP8.

    slots: `tensor_table.expected_tensors`. formats: of weights, by the vendor's names; what is not
    named is dense. chosen: value of the component linears. Raises SettingsError where "fp8" is
    chosen and nothing can stay so.
    """
    if chosen != EIGHT_BITS:
        return LinearStorage()
    names: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for name in slots:
        layer, holder = layer_of(name), holder_of(name)
        if layer is not None and holder is not None:
            names[layer, holder].append(name)
    kept = {
        key: stacked
        for key, stacked in names.items()
        if all(
            formats.get(name) is TensorFormat.FP8
            and _has_whole_blocks(config, slots[name], ranks, alone=len(stacked) == 1)
            for name in stacked
        )
    }
    if not kept:
        raise SettingsError(
            f"{VARIABLE}: linears={EIGHT_BITS} keeps attention and the shared expert in FP8, and"
            f" nothing can stay so: the checkpoint holds none of them in FP8, or a rank of {ranks}"
            f" has no whole blocks of {FP8_BLOCK}. Leave it at bf16."
        )
    fp8: defaultdict[int, set[str]] = defaultdict(set)
    for layer, holder in kept:
        fp8[layer].add(holder)
    return LinearStorage(
        {layer: frozenset(holders) for layer, holders in fp8.items()},
        frozenset(name for stacked in kept.values() for name in stacked),
    )


def _has_whole_blocks(config: DSV4Config, slot: Slot, ranks: int, *, alone: bool) -> bool:
    """Whether a rank's share of it begins with a block, and what lies below it in memory too."""
    rows, columns = slot.shape
    if slot.row.cut == 1 and ranks > 1:
        return columns // ranks % FP8_BLOCK == 0
    if slot.row.cut == 0:
        rows //= ranks
    if "wo_a" in slot.row.vendor_name and config.o_groups > ranks:
        rows = config.o_lora_rank  # of each of its groups
    elif alone and (ranks == 1 or slot.row.cut is None):
        return True
    return rows % FP8_BLOCK == 0


# ------------------------------------------------------------------------- which formats there are


def from_headers(folder: Path) -> dict[str, TensorFormat]:
    """The formats of weights by the vendor's names, from headers, experts left out.

    Nothing is checked but that files can be read: CheckpointError.
    """
    return stored_formats(folder, lambda name: ".experts." not in name)


def from_claims(raw: Mapping[str, Any], slots: Mapping[str, Slot]) -> dict[str, TensorFormat]:
    """The same by what a config.json says, for weights that are not there to be looked at."""
    claimed = format_claims.linears(raw)
    return {} if claimed is None else {name: claimed for name in slots if holder_of(name)}
