"""How each component of the model is stored and computed: one table, and the user's changes to it.

The default is the floor: the formats in which the model keeps its published quality. The parts
whose rounding costs most (head, router, compressors, indexer weights) never go below BF16. What a
checkpoint holds of them in less is dequantised to BF16 at load, and reported: nothing undoes its
rounding.
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


COMPONENTS = {
    "indexer_qk": Component(
        ("fp4", "full"),
        "indexer queries and keys: rotated by a Hadamard transform and rounded to the FP4 grid, as"
        " the model was trained, or left as they are",
    ),
    "lm_head": Component(
        ("bf16",), "weights; products are summed in FP32, logits are FP32", r"head"
    ),
    "router_gate": Component(("bf16",), "weights; scores are FP32", r"ffn\.gate"),
    "compressor": Component(
        *(("bf16",), "weights; gates, softmax and pooling are FP32"),
        r"attn\.compressor\.(wkv|wgate)",
    ),
    "indexer_compressor": Component(
        *(("bf16",), "weights; gates, softmax and pooling are FP32"),
        r"attn\.indexer\.compressor\.(wkv|wgate)",
    ),
    "indexer_weights": Component(
        ("bf16",), "projection that weighs the indexer's heads", r"attn\.indexer\.weights_proj"
    ),
}


@dataclass(frozen=True)
class Precision:
    """The value chosen for each component; a model that runs in FP32 keeps FP32 for bf16."""

    indexer_qk: str = COMPONENTS["indexer_qk"].values[0]
    lm_head: str = COMPONENTS["lm_head"].values[0]
    router_gate: str = COMPONENTS["router_gate"].values[0]
    compressor: str = COMPONENTS["compressor"].values[0]
    indexer_compressor: str = COMPONENTS["indexer_compressor"].values[0]
    indexer_weights: str = COMPONENTS["indexer_weights"].values[0]

    def __post_init__(self) -> None:
        for field in fields(self):
            assert getattr(self, field.name) in COMPONENTS[field.name].values, field.name

    def describe(self) -> str:
        """One line per component: name, value, whether it was changed, what it decides."""
        lines = []
        for field in fields(self):
            value, component = getattr(self, field.name), COMPONENTS[field.name]
            origin = "default" if value == component.values[0] else "changed"
            lines.append(f"{field.name:<18}  {value:<4}  {origin}  {component.meaning}")
        return "\n".join(lines)


def parse(text: str) -> Precision:
    """Reads "component=value,..." ("" for the defaults); raises SettingsError for anything else."""
    allowed = {name: component.values for name, component in COMPONENTS.items()}
    return Precision(**parse_assignments(VARIABLE, text, allowed))


def floor_component(tensor: str) -> str | None:
    """The component that keeps `tensor` ("attn.compressor.wkv", say) at BF16, or None."""
    for name, component in COMPONENTS.items():
        if component.tensors is not None and re.fullmatch(component.tensors, tensor):
            return name
    return None
