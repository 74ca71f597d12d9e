"""Which linear weights stay in memory as their checkpoint holds them: in FP8, or in NVFP4.

This is the one place that decides; the model, the plan of its memory and `warm` follow. Matrices
that are multiplied as one stay if each of them is in the same form, and if its rows and columns on
a rank begin with a block of scales (FP8), or are made of whole tiles (NVFP4).
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
from sglang_dsv4.linears import ALL_DENSE, KeptLinears, holder_of
from sglang_dsv4.memory_plan import four_bit_bytes
from sglang_dsv4.precision import AUTO, EIGHT_BITS, FOUR_BITS, VARIABLE, keeps_stored
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.tensor_table import Slot, layer_of

# Form, a value of the component linears -> formats that stay in it, the one that is usual first.
FORMATS = {
    EIGHT_BITS: (TensorFormat.FP8,),
    FOUR_BITS: (TensorFormat.NVFP4, TensorFormat.COMPRESSED_TENSORS),
}


@dataclass(frozen=True)
class LinearStorage:
    """layers: layer -> what of it stays as it is stored; layers without any are left out.
    weights: vendor's name -> form, of all that stays."""

    layers: Mapping[int, KeptLinears] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)

    @property
    def anywhere(self) -> tuple[KeptLinears, ...]:
        """What stays in some layer: so many layers that each module is in one of them in each form
        that it has in any."""
        forms: defaultdict[str, list[str]] = defaultdict(list)
        for kept in self.layers.values():
            for module, form in kept.items():
                if form not in forms[module]:
                    forms[module].append(form)
        turns = range(max(map(len, forms.values()), default=0))
        layers = tuple({module: own[n % len(own)] for module, own in forms.items()} for n in turns)
        return layers or (ALL_DENSE,)


def form_in_memory(kept: KeptLinears, holder: str | None, held: str) -> str | None:
    """In which form a layer that keeps these holds the weights of a module, None if densely.
    held: their format, as told to users."""
    form = None if holder is None else kept.get(holder)
    formats = {one.value for one in FORMATS.get(form or "", ())}
    return form if held in formats else None


def bytes_of(form: str, values: int, rows: int) -> int:
    """In memory, of weights with so many values and rows, whose blocks are whole."""
    if form == EIGHT_BITS:
        return values + values // FP8_BLOCK**2 * torch.float32.itemsize
    return four_bit_bytes(values, NVFP4_GROUP, rows // fp4.ROWS)


def wanted(chosen: str, device: str, run: torch.dtype) -> bool:
    """Whether any stay where they can; if not, nobody need know their formats. run: the dtype in
    which the model runs.

    "auto" keeps none in a model that runs in FP32: kernels would round its tokens to BF16.
    """
    return keeps_stored(chosen, device) and (chosen != AUTO or run is torch.bfloat16)


def decide(
    config: DSV4Config,
    slots: Mapping[str, Slot],
    formats: Mapping[str, TensorFormat],
    *,
    chosen: str,
    device: str,
    run: torch.dtype,
    ranks: int,
) -> LinearStorage:
    """What one of `ranks` ranks keeps as it is stored.

    slots: `tensor_table.expected_tensors`. formats: of weights, by the vendor's names; what is not
    named is dense. chosen: value of the component linears; "auto" keeps each matrix in the form
    that it has. device: "cpu" or "cuda". run: see `wanted`. Raises SettingsError where "fp8" or
    "fp4" is chosen and nothing can stay so.
    """
    if not wanted(chosen, device, run):
        return LinearStorage()
    names: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for name in slots:
        layer, holder = layer_of(name), holder_of(name)
        if layer is not None and holder is not None:
            names[layer, holder].append(name)

    def fits(name: str, form: str, alone: bool) -> bool:
        if formats.get(name) not in FORMATS[form]:
            return False
        if not _has_whole_tiles(config, slots[name], ranks):
            return False
        return form == FOUR_BITS or _has_whole_blocks(config, slots[name], ranks, alone=alone)

    layers: defaultdict[int, dict[str, str]] = defaultdict(dict)
    weights: dict[str, str] = {}
    for (layer, holder), stacked in names.items():
        for form in FORMATS if chosen == AUTO else (chosen,):
            if all(fits(name, form, len(stacked) == 1) for name in stacked):
                layers[layer][holder] = form
                weights |= dict.fromkeys(stacked, form)
    if not layers and chosen != AUTO:
        held = any(formats.get(name) in FORMATS[chosen] for each in names.values() for name in each)
        raise SettingsError(_refusal(chosen, ranks if held else None))
    return LinearStorage(dict(layers), weights)


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


def _refusal(chosen: str, ranks: int | None) -> str:
    """ranks: among which weights in the format are divided; None where there are none."""
    held, whole = "NVFP4", f"tiles of {fp4.ROWS} rows and {fp4.INPUTS} inputs"
    if chosen == EIGHT_BITS:
        held, whole = "FP8", f"{whole}, and of blocks of {FP8_BLOCK}"
    why = f"the checkpoint holds none of them in {held}"
    if ranks is not None:
        where = "" if ranks == 1 else f"on a rank of {ranks} "
        why = f"{where}none of them is made of whole {whole}"
    return (
        f"{VARIABLE}: linears={chosen} keeps attention and the shared expert in {held}, and"
        f" nothing can stay so: {why}. Leave it at {AUTO}."
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
