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

from sglang_dsv4.dequant import MXFP4_GROUP
from sglang_dsv4.moe.fp4 import FP4Matrices
from sglang_dsv4.moe.kernels_triton import _swiglu
from sglang_dsv4.moe.kernels_triton_experts import (
    Blocks,
    Tiles,
    scanned_block,
    sorted_block,
    weighted_sum,
)

# Codes, as their bits read in BF16, are too small by 2^126; scales are multiplied by this, and what
# remains, 2^-8, the factors make good. Larger UE8M0 scales (their bias is 127) would be infinite.
_SCALES_UP = tl.constexpr(2.0**118)
_FACTORS_UP = tl.constexpr(2.0**8)
_LARGEST_UE8M0 = 127 + 9

# The interpreter knows no assembly.
_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


def routed_experts_fp4(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: FP4Matrices,
    w2: FP4Matrices,
    *,
    limit: float,
) -> torch.Tensor:
    """`routed_experts` with matrices of four-bit values, which are exact in the products.

    x, weights, experts, limit and the result: as there. w13: E matrices [2 * I, D], w2: [D, I].
    Both as `pack` leaves them, and x in BF16, or in FP32, which is slow.
    """
    if not (w13.packed and w2.packed):
        raise ValueError("w13 and w2 must be packed: call pack on each, once, after loading")
    return weighted_sum(x, weights, experts, _FP4(w13), _FP4(w2), limit)


def pack(weight: FP4Matrices) -> None:
    """Put the codes of a loaded weight in the order that the kernels read, in place, once.

    The inputs of a row are cut into tiles; a byte then holds two codes that are half a tile apart
    instead of neighbours, so that each half tile of inputs is read without a gap. Raises ValueError
    for scales that the kernels cannot multiply exactly.
    """
    experts, rows, columns = weight.shape
    if weight.packed:
        raise ValueError("the weight is packed already")
    depth = _fp4_depth(columns)
    if weight.group == MXFP4_GROUP:
        largest = int(weight.scales.max())
        if largest > _LARGEST_UE8M0:
            raise ValueError(
                f"MXFP4 scales up to 2^{_LARGEST_UE8M0 - 127} can be multiplied in BF16; the"
                f" largest is 2^{largest - 127}: set SGLANG_DSV4_PRECISION=routed_experts=bf16"
            )
    for matrix in weight.codes:
        tiles = matrix.view(rows, columns // depth, depth // 2)
        low, high = tiles & 15, tiles >> 4
        codes = torch.stack([low, high], dim=-1).view(rows, columns // depth, 2, depth // 2)
        matrix.copy_((codes[:, :, 0] | codes[:, :, 1] << 4).view(matrix.shape))
    weight.packed = True


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
        """As for dense matrices; but columns are of the output, also where there are gates, and the
        depth is that of the packing."""
        if element_size > 2:
            return Tiles(rows=16, columns=16, warps=4, stages=2)
        if average <= 8:
            return Tiles(rows=16, columns=32, warps=4, stages=4)
        if average <= 24:
            return Tiles(rows=32, columns=64, warps=4, stages=3)
        if average <= 96:
            return Tiles(rows=64, columns=64, warps=4, stages=3)
        return Tiles(rows=128, columns=64, warps=8, stages=3)

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
        _grouped_product_fp4_kernel[(blocks.count * triton.cdiv(width, tiles.columns),)](
            x,
            self.codes,
            self.scales,
            self.weight.factors,
            out,
            blocks.order,
            blocks.starts,
            pairs,
            width,
            x.shape[1],
            self.codes.stride(0),
            self.scales.stride(0),
            limit if gated else 0.0,
            EXPERTS=blocks.experts,
            PAIRS=blocks.scanned,
            PAIRS_PER_ROW=pairs_per_row,
            GATED=gated,
            GROUP=self.weight.group,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            BLOCK_K=_fp4_depth(x.shape[1]),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )


def _fp4_depth(inputs: int) -> int:
    """Inputs of a tile, whose halves share bytes: the largest of 128, 64 and 32 that divides."""
    depth = min(inputs & -inputs, 128)
    if depth < 32:
        raise ValueError(f"four-bit matrices need a multiple of 32 inputs, found {inputs}")
    return depth


@triton.jit
def _scale_values(scales, GROUP: tl.constexpr):
    """Bytes as fp32: E4M3 in NVFP4, UE8M0 in MXFP4; times _SCALES_UP."""
    bits = scales.to(tl.int32)
    if GROUP == 16:
        bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * (2.0**120) * _SCALES_UP
    return (bits << 23).to(tl.float32, bitcast=True) * _SCALES_UP


@triton.jit
def _spread(scales, ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """[ROWS, groups] -> [ROWS, WIDTH]: the scale of each value's group."""
    if GROUP > WIDTH:  # both halves of the tile lie in one group
        spread = tl.broadcast_to(scales, (ROWS, WIDTH))
    else:
        groups = tl.broadcast_to(scales[:, :, None], (ROWS, WIDTH // GROUP, GROUP))
        spread = tl.reshape(groups, (ROWS, WIDTH))
    return spread


@triton.jit
def _unpacked(codes, low_scales, high_scales):
    """The E2M1 numbers in the lower and in the upper halves of bytes, times 2^-126 and their scale.

    Sign, exponent and mantissa are put where BF16 has them and read as that, subnormals included.
    """
    if _ASSEMBLY:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, t, u, zero;
            mov.b32 zero, 0x80008000;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shl.b32 t, a, 6;
            shl.b32 u, a, 12;
            and.b32 t, t, 0x01C001C0;
            lop3.b32 t, u, 0x80008000, t, 0xEA;
            fma.rn.bf16x2 $0, t, $5, zero;
            shl.b32 t, b, 6;
            shl.b32 u, b, 12;
            and.b32 t, t, 0x01C001C0;
            lop3.b32 t, u, 0x80008000, t, 0xEA;
            fma.rn.bf16x2 $1, t, $6, zero;
            shl.b32 t, a, 2;
            shl.b32 u, a, 8;
            and.b32 t, t, 0x01C001C0;
            lop3.b32 t, u, 0x80008000, t, 0xEA;
            fma.rn.bf16x2 $2, t, $7, zero;
            shl.b32 t, b, 2;
            shl.b32 u, b, 8;
            and.b32 t, t, 0x01C001C0;
            lop3.b32 t, u, 0x80008000, t, 0xEA;
            fma.rn.bf16x2 $3, t, $8, zero;
            }
            """,
            # Early: outputs are written while inputs are still to be read.
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [codes, low_scales.to(tl.bfloat16), high_scales.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        bits = codes.to(tl.int32)
        low = ((bits & 7) << 22) | ((bits & 8) << 28)
        high = ((bits & 112) << 18) | ((bits & 128) << 24)
        low = (low.to(tl.float32, bitcast=True) * low_scales).to(tl.bfloat16)
        high = (high.to(tl.float32, bitcast=True) * high_scales).to(tl.bfloat16)
    return low, high


@triton.jit
def _fp4_product(
    codes,
    scales,
    first,
    rows,
    lows,
    highs,
    total,
    depth,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total [rows, M] + matrix[rows, first : first + BLOCK_K] @ (lows, highs) [BLOCK_K / 2, M]."""
    HALF: tl.constexpr = BLOCK_K // 2
    GROUPS: tl.constexpr = max(HALF // GROUP, 1)
    ROWS: tl.constexpr = rows.shape[0]
    row = rows[:, None].to(tl.int64)
    both = tl.load(codes + row * (depth // 2) + first // 2 + tl.arange(0, HALF)[None, :])
    scale = scales + row * (depth // GROUP) + first // GROUP + tl.arange(0, GROUPS)[None, :]
    low_scales = _scale_values(tl.load(scale), GROUP)
    high_scales = _scale_values(tl.load(scale + HALF // GROUP), GROUP)
    low, high = _unpacked(
        both,
        _spread(low_scales, ROWS, HALF, GROUP),
        _spread(high_scales, ROWS, HALF, GROUP),
    )
    total = tl.dot(low.to(lows.dtype), lows, total, input_precision="ieee")
    return tl.dot(high.to(lows.dtype), highs, total, input_precision="ieee")


@triton.jit(do_not_specialize=["pairs"])
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
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As _grouped_product_kernel, transposed: the weights, made in registers, are the left side."""
    tiles = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // tiles
    if PAIRS > 0:
        expert, pair, count = scanned_block(order, pairs, block, PAIRS, BLOCK_M)
    else:
        expert, pair, count = sorted_block(order, starts, pairs, block, EXPERTS, BLOCK_M)
    if count <= 0:
        return
    expert, pair = expert.to(tl.int64), pair.to(tl.int64)
    column = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(column, width - 1)
    half = tl.arange(0, BLOCK_K // 2)
    x_tile = x + (pair // PAIRS_PER_ROW)[None, :] * depth + half[:, None]
    codes += expert * codes_expert
    scales += expert * scales_expert
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, depth, BLOCK_K):
        lows = tl.load(x_tile)
        highs = tl.load(x_tile + BLOCK_K // 2)
        total = _fp4_product(codes, scales, first, row, lows, highs, total, depth, GROUP, BLOCK_K)
        if GATED:
            up = row + width
            ups = _fp4_product(codes, scales, first, up, lows, highs, ups, depth, GROUP, BLOCK_K)
        x_tile += BLOCK_K
    if GATED:
        total *= tl.load(factors + expert * 2) * _FACTORS_UP
        ups *= tl.load(factors + expert * 2 + 1) * _FACTORS_UP
        total = _swiglu(total, ups, limit)
    else:
        total *= tl.load(factors + expert) * _FACTORS_UP
    stored = (column < width)[:, None] & (tl.arange(0, BLOCK_M) < count)[None, :]
    tl.store(out + pair[None, :] * width + column[:, None], total, mask=stored)
