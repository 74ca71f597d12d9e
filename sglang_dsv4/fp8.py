"""Matrices whose values are eight bits wide, as they lie in memory, and how they are multiplied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sglang_dsv4.dequant import FP8_BLOCK
from sglang_dsv4.parameters import KeptMatrix, tensor

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


class FP8Matrix(nn.Module, KeptMatrix):
    """A matrix [N, K] in E4M3 with one scale for each block of 128 x 128, as checkpoints hold it,
    or several, one below the other, all of them but the last made of whole blocks.

    codes  [N, K] uint8: E4M3; in rows and columns until a provider packs them anew (`pack`).
    scales [⌈N/128⌉, ⌈K/128⌉] fp32.
    """

    def __init__(
        self,
        rows: int | Mapping[str, int],
        columns: int,
        op: LinearFP8,
        *,
        groups: int = 1,
        suffix: str = ".weight",
    ) -> None:
        """op: linear_fp8. rows: where they are named, as in `parameters.Stack`. groups: of rows,
        see the op. suffix: see KeptMatrix."""
        super().__init__()
        height = self.count(rows)
        self.op, self.groups, self.packed = op, groups, False
        self.name_rows(rows, suffix)
        self.codes = tensor(height, columns, dtype=torch.uint8)
        blocks = -(-height // FP8_BLOCK), -(-columns // FP8_BLOCK)
        self.scales = tensor(*blocks, dtype=torch.float32)
        # Valid before anything is loaded: the host fills floating tensors with dummies, no others.
        self.codes.fill_(_ONE)

    def forward(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, groups * K] -> [T, N] in dtype, or in x's."""
        return self.op(x, self, dtype=dtype or x.dtype, groups=self.groups)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def all_rows(self) -> FP8Rows:
        return FP8Rows(self.codes.data, self.scales.data)
