"""Linear layers for few tokens as Triton kernels, with weights in NVFP4 (W4A16).

`reference.py` is the definition; how weights are packed and unpacked is in `kernels_triton_fp4`.
Weights are the left operand, so that a tile is as many of their rows as tensor cores want, and as
few tokens as there are. The factor of 16 rows multiplies their fp32 sums. Where the rows make too
few programs, the inputs are cut into slices, as in `kernels_triton_linear`: two calls on equal
tensors of one shape agree bit for bit. Grids depend on shapes alone.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from sglang_dsv4.backends import compute_capability
from sglang_dsv4.fp4 import ROWS, FP4Matrices
from sglang_dsv4.kernels_triton_fp4 import (
    FACTORS_UP,
    fp4_product,
    pack,
    unpacked_halves,
)
from sglang_dsv4.kernels_triton_fragments import depth_for, inputs_in_order, takes_wgmma
from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel
from sglang_dsv4.kernels_triton_linear import (
    MOST_TOKENS,
    Tiles,
    add_slices,
    dense_product,
    slice_depth_for,
    sums_of_slices,
)

__all__ = ["linear_fp4", "pack"]

# Inputs of a slice for each token, at least: writing and reading its sums takes at most half as
# long as reading its weights, of 9/16 of a byte.
_DEPTH_PER_TOKEN = 32

_ROWS = tl.constexpr(ROWS)


def linear_fp4(
    x: torch.Tensor, weight: FP4Matrices, *, dtype: torch.dtype, groups: int = 1
) -> torch.Tensor:
    """A linear layer whose weight is in NVFP4: one matrix of four-bit values.

    x      [T, groups * K] float: rounded to BF16 first, by kernels.
    weight E is 1, of [N, K]: the rows of the result's columns. As `pack` leaves it.
    dtype  of the result.
    groups of rows, equally many; each multiplies K columns of x of its own. N / groups must be a
           multiple of 16.
    Returns [T, N], summed in fp32 and rounded once. Beyond 128 tokens weights are rounded to BF16.
    """
    _, width, _ = weight.shape
    if not weight.packed:
        raise ValueError("the weight must be packed: call pack on it, once, after loading")
    if width % (groups * ROWS):
        raise ValueError(f"{width} rows in {groups} groups: each needs a multiple of {ROWS}")
    x = x.to(torch.bfloat16).contiguous()
    if x.shape[0] > MOST_TOKENS:
        return dense_product(x, dequantised(weight), dtype, groups)
    return _tiled_product(x, weight, dtype, groups)


def dequantised(weight: FP4Matrices) -> torch.Tensor:
    """A packed matrix [N, K] in BF16: rounded once, after its factor."""
    _, rows, columns = weight.shape
    depth, tiles = depth_for(columns), 2
    values = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.codes.device)
    _unpack_kernel[(triton.cdiv(rows, ROWS * tiles) * (columns // depth),)](
        weight.codes.view(-1).view(torch.int32),
        weight.scales.view(-1).view(torch.int16),
        weight.factors,
        values,
        rows,
        columns,
        rows // weight.parts,
        GROUP=weight.group,
        TILES=tiles,
        BLOCK_K=depth,
        num_warps=2,
    )
    return values


def tiles_for(tokens: int, depth: int) -> Tiles:
    """As routed experts had them before theirs were measured on Hopper, but that more than 64 take
    two tiles of tokens: larger ones spill. depth: that of the packing."""
    if tokens <= 8:
        return Tiles(rows=64, tokens=8, depth=depth, warps=4, stages=4)
    if tokens <= 16:
        warps = 4 if compute_capability() == 90 else 2
        return Tiles(rows=64, tokens=16, depth=depth, warps=warps, stages=4)
    return Tiles(rows=64, tokens=64, depth=depth, warps=4, stages=3)


def _tiled_product(
    x: torch.Tensor, weight: FP4Matrices, dtype: torch.dtype, groups: int
) -> torch.Tensor:
    """As linear_fp4; x in bf16."""
    tokens, (_, width, depth) = x.shape[0], weight.shape
    result = torch.empty(tokens, width, dtype=dtype, device=x.device)
    if tokens == 0:
        return result
    tiles = tiles_for(tokens, depth_for(depth))
    slice_depth = slice_depth_for(tokens, width, depth, tiles, per_token=_DEPTH_PER_TOKEN)
    sums = sums_of_slices(result, triton.cdiv(depth, slice_depth))
    token_tiles = triton.cdiv(tokens, tiles.tokens)
    row_tiles = groups * triton.cdiv(width // groups, tiles.rows)
    _linear_fp4_kernel[(row_tiles * token_tiles, sums.shape[0])](
        x,
        weight.codes.view(-1).view(torch.int32),
        weight.scales.view(-1).view(torch.int16),
        weight.factors,
        sums,
        tokens,
        token_tiles,
        width,
        depth,
        width // weight.parts,
        groups,
        slice_depth,
        GROUP=weight.group,
        BLOCK_N=tiles.rows,
        BLOCK_T=tiles.tokens,
        BLOCK_K=tiles.depth,
        WGMMA=takes_wgmma(compute_capability(), rows=tiles.rows, warps=tiles.warps),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    add_slices(sums, result)
    return result


@pdl_kernel(do_not_specialize=["tokens", "token_tiles", "groups"])
def _linear_fp4_kernel(
    x,
    codes,
    scales,
    factors,
    out,
    tokens,
    token_tiles,
    width,
    depth,
    factor_rows,
    groups,
    slice_depth,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WGMMA: tl.constexpr,
):
    """One slice of the inputs for one tile of rows and tokens; neighbours share their rows.

    The last tile of a group of rows may reach beyond it: there the group's last 16 rows are read
    again, and nothing is stored.
    """
    after_previous()
    TILES: tl.constexpr = BLOCK_N // _ROWS
    group_width = width // groups
    row_tiles = tl.cdiv(group_width, BLOCK_N)
    row_tile = tl.program_id(0) // token_tiles
    group, within = row_tile // row_tiles, (row_tile % row_tiles) * BLOCK_N
    part = tl.program_id(1)
    token = (tl.program_id(0) % token_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    begin = part * slice_depth
    end = tl.minimum(begin + slice_depth, depth)
    half = inputs_in_order(BLOCK_K // 2, WGMMA)
    line = tl.minimum(token, tokens - 1).to(tl.int64) * groups + group
    x_tile = x + (line * depth + begin)[None, :] + half[:, None]
    last = group_width // _ROWS - 1
    tile = tl.minimum(within // _ROWS + tl.arange(0, TILES * 32) // 32, last)
    tile = (group * (last + 1) + tile).to(tl.int64) * (depth // BLOCK_K) + begin // BLOCK_K
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for _ in range(begin, end, BLOCK_K):
        lows = tl.load(x_tile)
        highs = tl.load(x_tile + BLOCK_K // 2)
        total = fp4_product(codes, scales, tile, lows, highs, total, TILES, GROUP, BLOCK_K, WGMMA)
        x_tile += BLOCK_K
        tile += 1
    inside = within + tl.arange(0, BLOCK_N)
    row = group * group_width + inside
    factor = tl.load(factors + row // factor_rows, mask=inside < group_width, other=0.0)
    total *= (factor * FACTORS_UP)[:, None]
    line = part.to(tl.int64) * tokens + token
    stored = (inside < group_width)[:, None] & (token < tokens)[None, :]
    tl.store(out + line[None, :] * width + row[:, None], total, mask=stored)


@pdl_kernel
def _unpack_kernel(
    codes,
    scales,
    factors,
    values,
    rows,
    columns,
    factor_rows,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """TILES tiles, one below the other."""
    after_previous()
    blocks = columns // BLOCK_K
    first_row = (tl.program_id(0) // blocks) * (TILES * _ROWS)
    block = tl.program_id(0) % blocks
    tile = first_row // _ROWS + tl.arange(0, TILES * 32) // 32
    tile = tl.minimum(tile, rows // _ROWS - 1).to(tl.int64) * blocks + block
    low, high = unpacked_halves(codes, scales, tile, TILES, GROUP, BLOCK_K, True)
    row = first_row + tl.arange(0, TILES * _ROWS)
    factor = tl.load(factors + row // factor_rows, mask=row < rows, other=0.0) * FACTORS_UP
    column = block * BLOCK_K + inputs_in_order(BLOCK_K // 2, True)
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    stored = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(values + place, low.to(tl.float32) * factor[:, None], mask=stored)
    tl.store(values + place + BLOCK_K // 2, high.to(tl.float32) * factor[:, None], mask=stored)
