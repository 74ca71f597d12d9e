"""How each component of the model is stored and computed: one table, and the user's changes to it.

The default is the floor: the formats in which the model keeps its published quality. The parts
whose rounding costs most (head, router, compressors, indexer weights) stay in BF16. What a
checkpoint holds of them in less is dequantised to BF16 at load, and reported: nothing undoes its
rounding.

For a comparison each of them can be flipped by name to NVFP4: what the checkpoint holds is rounded
at load to the values that an NVFP4 checkpoint would hold. `sglang-dsv4 precision` measures what
that costs.
"""

import re
from dataclasses import dataclass, fields

from sglang_dsv4.settings import parse_assignments

VARIABLE = "SGLANG_DSV4_PRECISION"


@dataclass(frozen=True)
class Component:
    """One row of the table: the values allowed, the default first, and what they decide.

    tensors: pattern of its weights' names, the vendor's without the layer; None if it has none.
    """

    values: tuple[str, ...]
    meaning: str
    tensors: str | None = None


FLOOR, FLIPPED = "bf16", "nvfp4"
_WEIGHTS = (FLOOR, FLIPPED)
AUTO, FOUR_BITS, DENSE = "auto", "fp4", "bf16"  # of the routed experts, and of the linears
EIGHT_BITS = "fp8"  # of the linears alone

COMPONENTS = {
    "indexer_qk": Component(
        ("fp4", "full"),
        "indexer queries and keys: rotated by a Hadamard transform and rounded to the FP4 grid, as"
        " the model was trained, or left as they are",
    ),
    "routed_experts": Component(
        (AUTO, FOUR_BITS, DENSE),
        "weights that a checkpoint holds in MXFP4 or NVFP4: in these four bits in memory too, or"
        " dequantised to BF16 at load; auto is four bits on a GPU, BF16 on a CPU",
    ),
    "linears": Component(
        (AUTO, DENSE, EIGHT_BITS, FOUR_BITS),
        "projections of attention, index queries and the shared expert that a checkpoint holds in"
        " FP8 or NVFP4: dequantised to BF16 at load, or those in FP8 (fp8) or in NVFP4 (fp4) in"
        " these bits in memory too, where kernels multiply them by tokens in BF16; auto keeps both"
        " on a GPU in a model that runs in BF16, none elsewhere",
    ),
    "lm_head": Component(
        _WEIGHTS, "weights; products are summed in FP32, logits are FP32", r"head"
    ),
    "router_gate": Component(_WEIGHTS, "weights; scores are FP32", r"ffn\.gate"),
    "compressor_kv": Component(
        _WEIGHTS, "weights of the values; pooling is FP32", r"attn\.compressor\.wkv"
    ),
    "compressor_gate": Component(
        _WEIGHTS, "weights of the gates; gates and softmax are FP32", r"attn\.compressor\.wgate"
    ),
    "indexer_compressor": Component(
        _WEIGHTS,
        "weights; gates, softmax and pooling are FP32",
        r"attn\.indexer\.compressor\.(wkv|wgate)",
    ),
    "indexer_weights": Component(
        _WEIGHTS, "projection that weighs the indexer's heads", r"attn\.indexer\.weights_proj"
    ),
}
# One name for several components, where they are not named themselves.
JOINT = {"compressor": ("compressor_kv", "compressor_gate")}


@dataclass(frozen=True)
class Precision:
    """The value chosen for each component; a model that runs in FP32 keeps FP32 for bf16."""

    indexer_qk: str = COMPONENTS["indexer_qk"].values[0]
    routed_experts: str = COMPONENTS["routed_experts"].values[0]
    linears: str = COMPONENTS["linears"].values[0]
    lm_head: str = COMPONENTS["lm_head"].values[0]
    router_gate: str = COMPONENTS["router_gate"].values[0]
    compressor_kv: str = COMPONENTS["compressor_kv"].values[0]
    compressor_gate: str = COMPONENTS["compressor_gate"].values[0]
    indexer_compressor: str = COMPONENTS["indexer_compressor"].values[0]
    indexer_weights: str = COMPONENTS["indexer_weights"].values[0]

    def __post_init__(self) -> None:
        for field in fields(self):
            assert getattr(self, field.name) in COMPONENTS[field.name].values, field.name

    def flips(self, tensor: str) -> bool:
        """Whether `tensor` ("attn.compressor.wkv", say) is to be rounded to NVFP4 at load."""
        component = floor_component(tensor)
        return component is not None and getattr(self, component) == FLIPPED

    def describe(self) -> str:
        """One line per component: name, value, whether it was changed, what it decides."""
        lines = []
        for field in fields(self):
            value, component = getattr(self, field.name), COMPONENTS[field.name]
            origin = "default" if value == component.values[0] else "changed"
            lines.append(f"{field.name:<18}  {value:<5}  {origin}  {component.meaning}")
        return "\n".join(lines)


def parse(text: str) -> Precision:
    """Reads "component=value,..." ("" for the defaults); raises SettingsError for anything else.

    A joint name ("compressor") stands for those of its components that are not named themselves.
    """
    allowed = {name: component.values for name, component in COMPONENTS.items()}
    joint = {name: allowed[parts[0]] for name, parts in JOINT.items()}
    chosen = parse_assignments(VARIABLE, text, allowed | joint)
    for name, parts in JOINT.items():
        if name in chosen:
            value = chosen.pop(name)
            chosen = dict.fromkeys(parts, value) | chosen
    return Precision(**chosen)


def keeps_stored(chosen: str, device: str) -> bool:
    """Whether a value of routed_experts or linears keeps weights as they are stored, where they can
    be; if not, nobody need know their formats. device: "cpu" or "cuda".

    "auto" keeps them where kernels multiply them, and not on a CPU, where the reference would
    dequantise them in every step.
    """
    return device != "cpu" if chosen == AUTO else chosen != DENSE


def floor_component(tensor: str) -> str | None:
    """The component of the floor that `tensor` ("attn.compressor.wkv", say) is of, or None."""
    for name, component in COMPONENTS.items():
        if component.tensors is not None and re.fullmatch(component.tensors, tensor):
            return name
    return None
