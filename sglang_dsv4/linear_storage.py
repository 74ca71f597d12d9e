"""Which linear weights stay in memory as their checkpoint holds them: in FP8, or in NVFP4.

This is the one place that decides; the model, the plan of its memory and `warm` follow. Matrices
that are multiplied as one stay if each of them is in the format, and if its rows and columns on a
rank begin with a block of scales (FP8), or are made of whole tiles (NVFP4).
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_dsv4 import format_claims, fp4
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.dequant import FP8_BLOCK, NVFP4_GROUP
from sglang_dsv4.expert_storage import stored_formats
from sglang_dsv4.formats import TensorFormat
from sglang_dsv4.linears import KeptLinears, holder_of
from sglang_dsv4.memory_plan import four_bit_bytes
from sglang_dsv4.precision import DENSE, EIGHT_BITS, FOUR_BITS, VARIABLE
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.tensor_table import Slot, layer_of

# Value of the component linears -> the formats that stay, the one that is usual first.
FORMATS = {
    EIGHT_BITS: (TensorFormat.FP8,),
    FOUR_BITS: (TensorFormat.NVFP4, TensorFormat.COMPRESSED_TENSORS),
}


@dataclass(frozen=True)
class LinearStorage:
    """layers: layer -> what of it stays as it is stored; layers without any are left out.
    weights: vendor's name -> form (a value of the component linears), of all that stays."""

    layers: Mapping[int, KeptLinears] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)

    @property
    def anywhere(self) -> KeptLinears:
        """What stays in some layer, in the one form that they have."""
        (form,) = {kept.form for kept in self.layers.values()} or {DENSE}
        modules = (kept.modules for kept in self.layers.values())
        return KeptLinears(form, frozenset().union(*modules))


def stays(kept: KeptLinears, holder: str | None, held: str) -> bool:
    """Whether a layer that keeps these holds the weights of a module in memory as they are stored.
    held: their format, as told to users."""
    formats = {form.value for form in FORMATS.get(kept.form, ())}
    return holder in kept.modules and held in formats


def bytes_of(form: str, values: int, rows: int) -> int:
    """In memory, of weights with so many values and rows, whose blocks are whole."""
    if form == EIGHT_BITS:
        return values + values // FP8_BLOCK**2 * torch.float32.itemsize
    return four_bit_bytes(values, NVFP4_GROUP, rows // fp4.ROWS)


def decide(
    config: DSV4Config,
    slots: Mapping[str, Slot],
    formats: Mapping[str, TensorFormat],
    *,
    chosen: str,
    ranks: int,
) -> LinearStorage:
    """What one of `ranks` ranks keeps as it is stored.

    slots: `tensor_table.expected_tensors`. formats: of weights, by the vendor's names; what is not
    named is dense. chosen: value of the component linears. Raises SettingsError where "fp8" or
    "fp4" is chosen and nothing can stay so.
    """
    if chosen == DENSE:
        return LinearStorage()
    names: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for name in slots:
        layer, holder = layer_of(name), holder_of(name)
        if layer is not None and holder is not None:
            names[layer, holder].append(name)

    def fits(name: str, alone: bool) -> bool:
        if formats.get(name) not in FORMATS[chosen]:
            return False
        if not _has_whole_tiles(config, slots[name], ranks):
            return False
        return chosen == FOUR_BITS or _has_whole_blocks(config, slots[name], ranks, alone=alone)

    kept = {
        key: stacked
        for key, stacked in names.items()
        if all(fits(name, len(stacked) == 1) for name in stacked)
    }
    if not kept:
        raise SettingsError(_refusal(chosen, ranks))
    modules: defaultdict[int, set[str]] = defaultdict(set)
    for layer, holder in kept:
        modules[layer].add(holder)
    return LinearStorage(
        {layer: KeptLinears(chosen, frozenset(holders)) for layer, holders in modules.items()},
        {name: chosen for stacked in kept.values() for name in stacked},
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


def _has_whole_tiles(config: DSV4Config, slot: Slot, ranks: int) -> bool:
    """Whether a rank's share of it, of each group, is made of tiles that kernels read together."""
    share = list(slot.shape)
    if slot.row.cut is not None:
        share[slot.row.cut] //= ranks
    if "wo_a" in slot.row.vendor_name:
        share[0] = config.o_lora_rank
    return share[0] % fp4.ROWS == share[1] % fp4.INPUTS == 0


def _refusal(chosen: str, ranks: int) -> str:
    held, whole = "NVFP4", f"tiles of {fp4.ROWS} rows and {fp4.INPUTS} inputs"
    if chosen == EIGHT_BITS:
        held, whole = "FP8", f"{whole}, or blocks of {FP8_BLOCK}"
    return (
        f"{VARIABLE}: linears={chosen} keeps attention and the shared expert in {held}, and"
        f" nothing can stay so: the checkpoint holds none of them in {held}, or a rank of {ranks}"
        f" has no whole {whole}. Leave it at {DENSE}."
    )


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
