"""Matrices whose values are four bits wide, as they lie in memory, and how they are multiplied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sglang_dsv4 import dequant
from sglang_dsv4.parameters import KeptMatrix, tensor

ROWS = 16  # of a tile of tensor cores, whose weights kernels read together
INPUTS = 32  # of the smallest tile

SCALE_OF_ONE = {dequant.NVFP4_GROUP: 0x38, dequant.MXFP4_GROUP: 0x7F}  # E4M3, UE8M0


@dataclass(frozen=True)
class FP4Rows:
    """Some rows of a matrix in four bits, from the first of a factor on: codes [n, K/2], scales
    [n, K/group], factors [m]."""

    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        rows, half = self.codes.shape
        return torch.Size((rows, 2 * half))

    @property
    def group(self) -> int:
        """Values that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def part(self, number: int, parts: int) -> "FP4Rows":
        """One of `parts` equal parts."""
        return self.rows(number * (self.shape[0] // parts), self.shape[0] // parts)

    def rows(self, first: int, count: int) -> "FP4Rows":
        """first, count: multiples of the rows that share a factor."""
        height = self.shape[0] // self.factors.shape[0]
        assert first % height == count % height == 0, (first, count, height)
        factors = self.factors.narrow(0, first // height, count // height)
        return FP4Rows(
            self.codes.narrow(0, first, count), self.scales.narrow(0, first, count), factors
        )


class FP4Matrices(nn.Module):
    """E matrices [N, K]: E2M1 codes, one scale for a group of inputs, one factor for some rows.

    codes   [E, N, K/2] uint8: two codes in a byte; as a checkpoint has them, the even input in the
            lower half, until a provider packs them anew (`pack`).
    scales  [E, N, K/group] uint8: E4M3 where the group is 16 (NVFP4), UE8M0 where it is 32 (MXFP4);
            until they are packed, too.
    factors [E, parts] fp32: of each of `parts` equal blocks of rows; 1 in MXFP4.

    A value is code times scale times factor: as in `dequant`, but that the factor of a
    compressed-tensors checkpoint is the rounded reciprocal of what it stores.
    """

    def __init__(self, experts: int, rows: int, columns: int, *, group: int, parts: int) -> None:
        """columns: a multiple of group, which is 16 or 32; rows: a multiple of parts."""
        super().__init__()
        assert columns % group == 0 and rows % parts == 0, (rows, columns, group, parts)
        self.group, self.parts = group, parts
        self.packed = False
        self.codes = tensor(experts, rows, columns // 2, dtype=torch.uint8)
        self.scales = tensor(experts, rows, columns // group, dtype=torch.uint8)
        self.factors = tensor(experts, parts, dtype=torch.float32)
        # Valid before anything is loaded: the host fills floating tensors with dummies, no others.
        self.scales.fill_(SCALE_OF_ONE[group])

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N, K."""
        experts, rows, half = self.codes.shape
        return experts, rows, 2 * half

    def matrix(self, number: int) -> FP4Rows:
        """One of them, to be loaded."""
        return FP4Rows(self.codes.data[number], self.scales.data[number], self.factors.data[number])


LinearFP4 = Callable[..., torch.Tensor]


class FP4Matrix(FP4Matrices, KeptMatrix):
    """A linear layer's matrix in NVFP4, or several, one below the other.

    It is the only one of its FP4Matrices, with a factor for every 16 rows: so each of the
    checkpoint's matrices keeps its own, however high they are.
    """

    def __init__(
        self,
        rows: int | Mapping[str, int],
        columns: int,
        op: LinearFP4,
        *,
        groups: int = 1,
        suffix: str = ".weight",
    ) -> None:
        """op: linear_fp4. The others: as for FP8Matrix. rows: multiples of 16; columns: of 32."""
        height = self.count(rows)
        super().__init__(1, height, columns, group=dequant.NVFP4_GROUP, parts=height // ROWS)
        assert columns % INPUTS == 0, columns
        self.op, self.groups = op, groups
        self.name_rows(rows, suffix)

    def forward(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, groups * K] -> [T, N] in dtype, or in x's."""
        return self.op(x, self, dtype=dtype or x.dtype, groups=self.groups)

    def all_rows(self) -> FP4Rows:
        return self.matrix(0)


def dense_values(
    codes: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor, group: int
) -> torch.Tensor:
    """[E, N, K] fp32: what matrices are that lie as in FP4Matrices and are not packed."""
    (experts, rows, half), parts = codes.shape, factors.shape[1]
    codes, scales = codes.view(-1, half), scales.view(experts * rows, -1)
    if group == dequant.MXFP4_GROUP:
        numbers = dequant.mxfp4(codes, scales)
    else:
        numbers = dequant.nvfp4(codes, scales, factors.new_ones(1))
    numbers = numbers.view(experts, parts, -1, 2 * half) * factors[..., None, None]
    return numbers.view(experts, rows, 2 * half)
