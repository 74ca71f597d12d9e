"""Matrices whose values are four bits wide, as they lie in memory."""

import torch
from torch import nn

from sglang_dsv4 import dequant
from sglang_dsv4.parameters import tensor

SCALE_OF_ONE = {dequant.NVFP4_GROUP: 0x38, dequant.MXFP4_GROUP: 0x7F}  # E4M3, UE8M0


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
