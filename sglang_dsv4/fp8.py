"""Matrices whose values are eight bits wide, as they lie in memory, and how they are multiplied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sglang_dsv4.dequant import FP8_BLOCK
from sglang_dsv4.parameters import Matrix, Stack, tensor

_ONE = 0x38  # in E4M3

LinearFP8 = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class FP8Rows:
    """Some rows of an FP8Matrix, from a block's first on: codes [n, K], scales [blocks, blocks]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def part(self, number: int, parts: int) -> "FP8Rows":
        """One of `parts` equal parts."""
        return self.rows(number * (self.shape[0] // parts), self.shape[0] // parts)

    def rows(self, first: int, count: int) -> "FP8Rows":
        """first: of a block."""
        assert first % FP8_BLOCK == 0, first
        blocks = self.scales.narrow(0, first // FP8_BLOCK, -(-count // FP8_BLOCK))
        return FP8Rows(self.codes.narrow(0, first, count), blocks)


class FP8Matrix(nn.Module):
    """A matrix [N, K] in E4M3 with one scale for each block of 128 x 128, as checkpoints hold it.

    codes  [N, K] uint8: E4M3.
    scales [⌈N/128⌉, ⌈K/128⌉] fp32.
    """

    def __init__(
        self, rows: int, columns: int, op: LinearFP8, groups: int = 1, suffix: str = ".weight"
    ) -> None:
        """op: linear_fp8. groups: of rows, see there. suffix: what its parameter's name would have
        behind its own if it were dense."""
        super().__init__()
        self.op, self.groups, self.suffix = op, groups, suffix
        self.codes = tensor(rows, columns, dtype=torch.uint8)
        blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        self.scales = tensor(*blocks, dtype=torch.float32)
        # Valid before anything is loaded: the host fills floating tensors with dummies, no others.
        self.codes.fill_(_ONE)

    def forward(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, groups * K] -> [T, N] in dtype, or in x's."""
        weight = self.codes.view(torch.float8_e4m3fn)
        return self.op(x, weight, self.scales, dtype=dtype or x.dtype, groups=self.groups)

    def matrices(self) -> Mapping[str, FP8Rows]:
        """Its only one, under the empty name."""
        return {"": FP8Rows(self.codes.data, self.scales.data)}


class FP8Stack(FP8Matrix):
    """As `parameters.Stack`; all matrices but the last are made of whole blocks."""

    def __init__(self, columns: int, rows: Mapping[str, int], op: LinearFP8) -> None:
        super().__init__(sum(rows.values()), columns, op)
        self.heights = dict(rows)

    def parts(self, product: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return product.split(list(self.heights.values()), dim=1)

    def matrices(self) -> Mapping[str, FP8Rows]:
        """Name, seen from the module that holds the stack -> its rows."""
        (whole,), found, first = super().matrices().values(), {}, 0
        for name, count in self.heights.items():
            found[name] = whole.rows(first, count)
            first += count
        return found


def linear(
    rows: int, columns: int, op: LinearFP8, *, fp8: bool, groups: int = 1
) -> Matrix | FP8Matrix:
    """What multiplies [T, groups * K] by a matrix [N, K]: in FP8, or in the model's dtype."""
    if fp8:
        return FP8Matrix(rows, columns, op, groups)
    return Matrix(rows, columns, groups=groups)


def stack(columns: int, rows: Mapping[str, int], op: LinearFP8, *, fp8: bool) -> Stack | FP8Stack:
    """As `linear`, for matrices that multiply the same input."""
    return FP8Stack(columns, rows, op) if fp8 else Stack(columns, rows)


def named_rows(model: nn.Module) -> dict[str, FP8Rows]:
    """The matrices in FP8, by the names of the parameters that they would be if they were dense."""
    found: dict[str, FP8Rows] = {}
    for path, module in model.named_modules():
        if isinstance(module, FP8Stack):
            holder = path[: path.rfind(".") + 1]
            found |= {holder + name: rows for name, rows in module.matrices().items()}
        elif isinstance(module, FP8Matrix):
            found[path + module.suffix] = module.matrices()[""]
    return found
