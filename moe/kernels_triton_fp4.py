"""The routed experts as Triton kernels, with matrices of four-bit values (W4A16).

`reference.py` is the definition; what is not about four bits is in `kernels_triton_experts`.
Weights are unpacked in registers, where codes times scales are exact in BF16, and multiplied by the
tokens as they are; the factor of an expert's rows multiplies the fp32 sum.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from sglang_dsv4.backends import compute_capability
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.kernels_triton_fp4 import FACTORS_UP, fp4_product, pack
from sglang_dsv4.kernels_triton_fragments import depth_for, inputs_in_order, takes_wgmma
from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel
from sglang_dsv4.moe.kernels_triton import _swiglu
from sglang_dsv4.moe.kernels_triton_experts import (
    Blocks,
    Tiles,
    scanned_block,
    sorted_block,
    weighted_sum,
)

__all__ = ["pack", "routed_experts_fp4"]


def routed_experts_fp4(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: FP4Matrices,
    w2: FP4Matrices,
    *,
    limit: float,
    base: torch.Tensor | None = None,
    first: int = 0,
    total: int | None = None,
) -> torch.Tensor:
    """`routed_experts` with matrices of four-bit values, which are exact in the products.

    What is not said here is as there. w13: E matrices [2 * I, D], w2: [D, I].
    Both as `pack` leaves them, and x in BF16, or in FP32, which is slow.
    """
    if not (w13.packed and w2.packed):
        raise ValueError("w13 and w2 must be packed: call pack on each, once, after loading")
    matrices = _FP4(w13), _FP4(w2)
    return weighted_sum(x, weights, experts, *matrices, limit, base, first, total)


class _FP4:
    """Packed four-bit matrices [E, N, K], or some of their rows."""

    def __init__(self, weight: FP4Matrices, chosen: slice = slice(None)) -> None:
        self.weight = weight
        self.codes, self.scales = weight.codes[:, chosen], weight.scales[:, chosen]
        self.shape = (*self.codes.shape[:2], weight.shape[2])

    def rows(self, chosen: slice) -> "_FP4":
        return _FP4(self.weight, chosen)

    @staticmethod
    def tiles(average: float, element_size: int) -> Tiles:
        """As for dense matrices, but the depth is that of the packing. Hopper's are the fastest of
        those that `scripts/tune_experts.py` times; other GPUs' were not measured."""
        if element_size > 2:
            return Tiles(rows=16, columns=32, warps=2, stages=2)
        if compute_capability() == 90:
            return _tiles_of_hopper(average)
        if average <= 5:
            return Tiles(rows=8, columns=64, warps=4, stages=4)
        if average <= 24:
            return Tiles(rows=16, columns=64, warps=2, stages=4)
        return Tiles(rows=64, columns=64, warps=4, stages=3)

    def multiply(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        blocks: Blocks,
        tiles: Tiles,
        pairs_per_row: int = 1,
        limit: float | None = None,
    ) -> None:
        """As for dense matrices."""
        gated = limit is not None
        pairs, width = out.shape
        columns = tiles.columns // 2 if gated else tiles.columns
        _grouped_product_fp4_kernel[(blocks.count * triton.cdiv(width, columns),)](
            x,
            self.codes.flatten(1).view(torch.int32),
            self.scales.flatten(1).view(torch.int16),
            self.weight.factors,
            out,
            blocks.order,
            blocks.starts,
            pairs,
            width,
            x.shape[1],
            self.codes.stride(0) // 4,
            self.scales.stride(0) // 2,
            limit if gated else 0.0,
            blocks.choices.first,
            EXPERTS=blocks.choices.held,
            PAIRS=blocks.scanned,
            PAIRS_PER_ROW=pairs_per_row,
            GATED=gated,
            GROUP=self.weight.group,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            BLOCK_K=depth_for(x.shape[1]),
            WGMMA=takes_wgmma(compute_capability(), rows=tiles.columns, warps=tiles.warps),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            maxnreg=tiles.registers,
        )


def _tiles_of_hopper(average: float) -> Tiles:
    """A second block of an expert costs what the first did: so rows are some more than most experts
    have pairs."""
    if average <= 1 / 16:
        return Tiles(rows=8, columns=64, warps=4, stages=4)
    if average <= 8:
        return Tiles(rows=8, columns=128, warps=4, stages=3)
    if average <= 14:
        return Tiles(rows=16, columns=128, warps=4, stages=4)
    if average <= 48:
        return Tiles(rows=32, columns=128, warps=4, stages=3)
    if average <= 112:
        return Tiles(rows=128, columns=128, warps=8, stages=3)
    return Tiles(rows=64, columns=128, warps=8, stages=4)


@pdl_kernel(do_not_specialize=["pairs", "first_held"])
def _grouped_product_fp4_kernel(
    x,
    codes,
    scales,
    factors,
    out,
    order,
    starts,
    pairs,
    width,
    depth,
    codes_expert,
    scales_expert,
    limit,
    first_held,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WGMMA: tl.constexpr,
):
    """As _grouped_product_kernel, transposed: the weights, made in registers, are the left side."""
    after_previous()
    TILES: tl.constexpr = BLOCK_N // 16
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tiles = tl.cdiv(width, COLUMNS)
    block = tl.program_id(0) // tiles
    if PAIRS > 0:
        expert, pair, count = scanned_block(
            order, pairs, block, first_held, EXPERTS, PAIRS, BLOCK_M
        )
    else:
        expert, pair, count = sorted_block(
            order, starts, pairs, block, first_held, EXPERTS, BLOCK_M
        )
    if count <= 0:
        return
    expert, pair = expert.to(tl.int64), pair.to(tl.int64)
    column = (tl.program_id(0) % tiles) * COLUMNS
    half = inputs_in_order(BLOCK_K // 2, WGMMA)
    x_tile = x + (pair // PAIRS_PER_ROW)[None, :] * depth + half[:, None]
    codes += expert * codes_expert
    scales += expert * scales_expert
    row_tile = tl.arange(0, TILES * 32) // 32
    part_tiles = width // 16
    if GATED:  # tiles of gate rows, then the same of up rows
        first_tile = row_tile // (TILES // 2) * part_tiles
        row_tile = row_tile % (TILES // 2)
    else:
        first_tile = tl.zeros_like(row_tile)
    tile = first_tile + tl.minimum(column // 16 + row_tile, part_tiles - 1)
    tile = tile.to(tl.int64) * (depth // BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in range(0, depth, BLOCK_K):
        lows = tl.load(x_tile)
        highs = tl.load(x_tile + BLOCK_K // 2)
        total = fp4_product(codes, scales, tile, lows, highs, total, TILES, GROUP, BLOCK_K, WGMMA)
        x_tile += BLOCK_K
        tile += 1
    if GATED:
        both = tl.permute(tl.reshape(total, (2, COLUMNS, BLOCK_M)), (1, 2, 0))
        gates, ups = tl.split(both)
        gates *= tl.load(factors + expert * 2) * FACTORS_UP
        ups *= tl.load(factors + expert * 2 + 1) * FACTORS_UP
        total = _swiglu(gates, ups, limit)
    else:
        total *= tl.load(factors + expert) * FACTORS_UP
    columns = column + tl.arange(0, COLUMNS)
    stored = (columns < width)[:, None] & (tl.arange(0, BLOCK_M) < count)[None, :]
    tl.store(out + pair[None, :] * width + columns[:, None], total, mask=stored)
