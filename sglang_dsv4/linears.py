"""The linear layers of attention and of the shared expert, however their matrices lie in memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from sglang_dsv4.backends import Ops
from sglang_dsv4.fp4 import FP4Matrix, FP4Rows
from sglang_dsv4.fp8 import FP8Matrix, FP8Rows
from sglang_dsv4.parameters import KeptMatrix, Matrix, Stack
from sglang_dsv4.precision import EIGHT_BITS

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

KeptRows = FP8Rows | FP4Rows
# Which matrices of a layer lie in memory as their checkpoint holds them, as `linear_storage`
# decides: the module that holds them, seen from the layer ("attn.wq_b") -> their form, "fp8" or
# "fp4" as among the values of the component linears. All others are in the model's dtype.
KeptLinears = Mapping[str, str]
ALL_DENSE: KeptLinears = MappingProxyType({})


def holder_of(name: str) -> str | None:
    """layers.3.attn.wkv.weight -> attn.inputs; None for what never stays as it is stored."""
    return HOLDERS.get(name.split(".", 2)[-1]) if name.startswith("layers.") else None


@dataclass(frozen=True)
class Linears:
    """Makes the linear layers of one decoder layer."""

    ops: Ops
    kept: KeptLinears

    def keeps(self, module: str) -> bool:
        return module in self.kept

    def matrix(
        self, module: str, rows: int, columns: int, *, groups: int = 1
    ) -> Matrix | FP8Matrix | FP4Matrix:
        """What multiplies [T, groups * K] by a matrix [N, K]."""
        if self.keeps(module):
            return self.as_stored(module, rows, columns, groups=groups)
        return Matrix(rows, columns, groups=groups)

    def stack(
        self, module: str, columns: int, rows: Mapping[str, int]
    ) -> Stack | FP8Matrix | FP4Matrix:
        """The same for matrices that multiply the same input."""
        if self.keeps(module):
            return self.as_stored(module, rows, columns)
        return Stack(columns, rows)

    def as_stored(
        self,
        module: str,
        rows: int | Mapping[str, int],
        columns: int,
        *,
        groups: int = 1,
        suffix: str = ".weight",
    ) -> FP8Matrix | FP4Matrix:
        """As the checkpoint holds it; see `FP8Matrix`."""
        if self.kept[module] == EIGHT_BITS:
            return FP8Matrix(rows, columns, self.ops.linear_fp8, groups=groups, suffix=suffix)
        return FP4Matrix(rows, columns, self.ops.linear_fp4, groups=groups, suffix=suffix)


def named_rows(model: nn.Module) -> dict[str, KeptRows]:
    """What `Linears` made as it is stored, by the names of the parameters that the matrices would
    be if they were dense."""
    found: dict[str, KeptRows] = {}
    for path, module in model.named_modules():
        if isinstance(module, KeptMatrix):
            found |= module.matrices(path)
    return found
