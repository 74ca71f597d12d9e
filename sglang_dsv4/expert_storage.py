"""How each layer's routed experts lie in memory: in the four bits of their checkpoint, or dense.

This is the one place that decides; the model, the plan of its memory and `warm` follow. A layer
stays in four bits if all of its experts can be multiplied alike: as many values share a scale in
each, and each rank's share of their inputs is made of whole tiles.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dsv4 import format_claims
from sglang_dsv4.checkpoint import Header, read_index, read_shards
from sglang_dsv4.components import EXPERTS, component_of
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import FOUR_BITS, Part, TensorFormat, part_of, tensor_format
from sglang_dsv4.precision import AUTO, DENSE, VARIABLE, keeps_stored
from sglang_dsv4.precision import FOUR_BITS as FORCED
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.tensor_table import layer_of, vendor_names

HeldByLayer = Mapping[int, Set[TensorFormat]]
# Inputs that kernels read at a time, at least; made of whole groups in every format.
TILE = 32
assert all(TILE % group == 0 for group in FOUR_BITS.values())


@dataclass(frozen=True)
class ExpertStorage:
    """groups: layer -> values that share a scale (32 in MXFP4, 16 in NVFP4), of those that stay in
    four bits. notes: a line for layers that do not, though their experts have four bits: why."""

    groups: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def decide(
    config: DSV4Config, held: HeldByLayer, *, chosen: str, device: str, ranks: int
) -> ExpertStorage:
    """What a rank keeps in four bits, where `ranks` ranks divide the width of an expert.

    held: the formats of each layer's experts; layers that hold dense experts may be left out.
    chosen: value of the component routed_experts; what "auto" is, `precision.keeps_stored` says.
    device: "cpu" or "cuda". Raises SettingsError where "fp4" is chosen and no layer can stay so.
    """
    if not keeps_stored(chosen, device):
        return ExpertStorage()
    groups: dict[int, int] = {}
    reasons: dict[str, list[int]] = {}
    for layer in range(config.num_hidden_layers):
        formats = held.get(layer, frozenset())
        sizes = {FOUR_BITS[form] for form in formats if form in FOUR_BITS}
        if not sizes:
            continue
        reason = _why_dense(config, formats, ranks)
        if reason is None:
            (groups[layer],) = sizes
        else:
            reasons.setdefault(reason, []).append(layer)
    notes = tuple(
        f"the routed experts of {_layers(layers)} are dequantised at load, not kept in four bits:"
        f" {reason}"
        for reason, layers in reasons.items()
    )
    if chosen == FORCED and not groups:
        raise SettingsError(_refusal(held, notes))
    return ExpertStorage(groups, notes)


def _why_dense(config: DSV4Config, formats: Set[TensorFormat], ranks: int) -> str | None:
    """Why experts in four bits cannot stay so, or None."""
    if len({FOUR_BITS.get(form) for form in formats}) > 1:
        return f"they are {' and '.join(sorted(form.value for form in formats))}"
    share = config.moe_intermediate_size // ranks
    for matrix, inputs in (("w1", config.hidden_size), ("w2", share)):
        if inputs % TILE:
            return f"{matrix} has {inputs} inputs on a rank, no multiple of {TILE}"
    return None


def _layers(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "layers 0 to 2 and 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    text = " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
    return f"layer{'s' * (len(numbers) > 1)} {text}"


def _refusal(held: HeldByLayer, notes: tuple[str, ...]) -> str:
    if notes:
        why = "no layer can stay so:\n" + "\n".join(notes)
    else:
        found = sorted({form.value for formats in held.values() for form in formats})
        why = f"the checkpoint holds none, but {' and '.join(found) or 'nothing that is known'}"
    return (
        f"{VARIABLE}: routed_experts={FORCED} keeps experts in MXFP4 or NVFP4, and {why}.\n"
        f"Leave it at {AUTO}, or name {DENSE}."
    )


# ------------------------------------------------------------------------- which formats there are


def from_formats(formats: Mapping[str, TensorFormat]) -> HeldByLayer:
    """The routed experts' formats by layer, from those of weights by the vendor's names."""
    held: defaultdict[int, set[TensorFormat]] = defaultdict(set)
    for name, form in formats.items():
        layer = layer_of(name)
        if layer is not None and component_of(name) == EXPERTS:
            held[layer].add(form)
    return held


def from_headers(folder: Path) -> HeldByLayer:
    """The same from the headers of the experts alone, which is all that a model needs to be built.

    Nothing is checked but that files can be read: CheckpointError.
    """
    return from_formats(stored_formats(folder, lambda name: ".experts." in name))


def stored_formats(folder: Path, wanted: Callable[[str], bool]) -> dict[str, TensorFormat]:
    """The formats of weights by the vendor's names; of those whose tensors' names are wanted."""
    weights: defaultdict[str, dict[Part, Header]] = defaultdict(dict)
    for headers in read_shards(folder, read_index(folder)).values():
        for name, header in headers.items():
            if not wanted(name):
                continue
            if vendor_names(name, 1):
                weights[name][Part.WEIGHT] = header
            elif found := part_of(name):
                weights[found[0]][found[1]] = header
    return {
        known: tensor_format(parts)
        for name, parts in weights.items()
        for known in vendor_names(name, 1)
        if Part.WEIGHT in parts
    }


def from_claims(raw: Mapping[str, Any], config: DSV4Config) -> HeldByLayer:
    """The same by what a config.json says, for weights that are not there to be looked at."""
    claimed = format_claims.experts(raw)
    if claimed is None:
        return {}
    return dict.fromkeys(range(config.num_hidden_layers), frozenset({claimed}))
