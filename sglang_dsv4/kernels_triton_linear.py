"""Linear layers for few tokens as Triton kernels, with weights in FP8 blocks (W8A16).

`reference.py` is the definition. Weights are the left operand, so that a tile is as many of their
rows as tensor cores want, and as few tokens as there are. FP8 codes become BF16 in registers,
exactly; the scale of a block multiplies the fp32 sum over its 128 inputs. Where the rows make too
few programs, the inputs are cut into slices, whose sums a second kernel adds in their order: two
calls on equal tensors of one shape agree bit for bit. Grids depend on shapes alone.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from sglang_dsv4.dequant import FP8_BLOCK
from sglang_dsv4.kernels_cublas import linear_fp32
from sglang_dsv4.kernels_triton import _least_power

# Beyond so many tokens arithmetic costs more than reading weights: they are dequantised, and cuBLAS
# multiplies.
MOST_TOKENS = 128

# So many programs fill the largest GPUs (132 to 160 multiprocessors, 3 or 4 programs each).
_PROGRAMS = 512

# Inputs of a slice for each token, at least: see `slice_depth_for`.
_DEPTH_PER_TOKEN = 16

_BLOCK = tl.constexpr(FP8_BLOCK)

# The interpreter knows no assembly.
_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    dtype: torch.dtype,
    groups: int = 1,
) -> torch.Tensor:
    """A linear layer whose weight is in FP8, with one scale for each block of 128 x 128.

    x      [T, groups * K] float: rounded to BF16 first, by kernels.
    weight [N, K] float8_e4m3fn, no NaN among them: the rows of the result's columns.
    scales [⌈N/128⌉, ⌈K/128⌉] fp32: multiply the blocks.
    dtype  of the result.
    groups of rows, equally many; each multiplies K columns of x of its own. N / groups must be a
           multiple of 128 where there are several.
    Returns [T, N], summed in fp32 and rounded once. Source: spec 4.2.
    """
    width = weight.shape[0]
    if groups > 1 and width % (groups * FP8_BLOCK):
        raise ValueError(f"{width} rows in {groups} groups: each needs a multiple of {FP8_BLOCK}")
    x = x.to(torch.bfloat16).contiguous()
    if x.shape[0] > MOST_TOKENS:
        return dense_product(x, dequantised(weight, scales), dtype, groups)
    codes = weight.contiguous().view(torch.uint8)
    return _tiled_product(x, codes, scales.contiguous(), dtype, groups)


def dequantised(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """weight [N, K] float8_e4m3fn, scales [⌈N/128⌉, ⌈K/128⌉] fp32 -> [N, K] bf16, exact for scales
    that are powers of two."""
    (rows, columns), blocks = weight.shape, scales.shape[1]
    values = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.device)
    _dequantise_kernel[(triton.cdiv(rows, 32) * blocks,)](
        weight.contiguous().view(torch.uint8),
        scales.contiguous(),
        values,
        rows,
        columns,
        blocks,
        BLOCK_N=32,
        num_warps=4,
    )
    return values


@dataclass(frozen=True)
class Tiles:
    """Tile of a product: rows of the weight, tokens, inputs at a time; and how it is run."""

    rows: int
    tokens: int
    depth: int
    warps: int
    stages: int


def tiles_for(tokens: int) -> Tiles:
    """All within 99 KiB of shared memory.

    Up to 64 tokens the weight is what takes time: 8 to 16 KiB of it at a time, with two such loads
    under way in each of several programs on a multiprocessor. Two warps take no part in Hopper's
    products by four, whose operands in FP8 would come in smaller loads. Tokens are read again for
    each tile of rows, so more tokens want more rows, and those more warps.
    """
    if tokens <= 16:
        return Tiles(rows=64, tokens=16, depth=128, warps=2, stages=4)
    if tokens <= 32:
        return Tiles(rows=64, tokens=32, depth=128, warps=2, stages=4)
    if tokens <= 64:
        return Tiles(rows=128, tokens=64, depth=128, warps=8, stages=3)
    return Tiles(rows=128, tokens=128, depth=64, warps=8, stages=3)


def slice_depth_for(
    tokens: int, width: int, depth: int, tiles: Tiles, *, per_token: int = _DEPTH_PER_TOKEN
) -> int:
    """How many of `depth` inputs each slice adds up: all, where rows alone make enough programs.

    Else slices, of two blocks of inputs at least, so that loads overlap; and so few that writing
    and reading their sums takes at most half as long as reading the weight: of `per_token` inputs
    for each token.
    """
    blocks = triton.cdiv(depth, FP8_BLOCK)
    programs = triton.cdiv(width, tiles.rows) * triton.cdiv(tokens, tiles.tokens)
    slices = min(_PROGRAMS // programs, blocks // 2, depth // (per_token * tokens))
    return triton.cdiv(blocks, max(slices, 1)) * FP8_BLOCK


def _tiled_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    groups: int,
) -> torch.Tensor:
    """As linear_fp8; x in bf16, weight as bytes."""
    tokens, (width, depth) = x.shape[0], weight.shape
    tiles = tiles_for(tokens)
    result = torch.empty(tokens, width, dtype=dtype, device=x.device)
    if tokens == 0:
        return result
    slice_depth = slice_depth_for(tokens, width, depth, tiles)
    slices = triton.cdiv(depth, slice_depth)
    sums = result
    if slices > 1:
        sums = torch.empty(slices, tokens, width, dtype=torch.float32, device=x.device)
    token_tiles = triton.cdiv(tokens, tiles.tokens)
    _linear_kernel[(triton.cdiv(width, tiles.rows) * token_tiles, slices)](
        x,
        weight,
        scales,
        sums,
        tokens,
        token_tiles,
        width,
        depth,
        groups,
        slice_depth,
        WHOLE=depth % FP8_BLOCK == 0,
        BLOCK_N=tiles.rows,
        BLOCK_T=tiles.tokens,
        BLOCK_K=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if slices > 1:
        add_slices(sums, result)
    return result


def add_slices(sums: torch.Tensor, result: torch.Tensor) -> None:
    """sums [slices, T, N] fp32 -> their sum in `result` [T, N], in one order, rounded once."""
    slices, block = sums.shape[0], 256
    _add_slices_kernel[(triton.cdiv(result.numel(), block),)](
        sums, result, result.numel(), slices, SLICES=_least_power(slices), BLOCK=block
    )


def dense_product(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, groups: int
) -> torch.Tensor:
    """As linear_fp8, by cuBLAS. x and weight: bf16."""
    if groups > 1:
        each = x.unflatten(1, (groups, -1)).transpose(0, 1)
        rows = weight.unflatten(0, (groups, -1)).mT
        same = dtype is x.dtype
        product = torch.bmm(each, rows) if same else torch.bmm(each, rows, out_dtype=dtype)
        return product.transpose(0, 1).flatten(1)
    return functional.linear(x, weight) if dtype is x.dtype else linear_fp32(x, weight)


# ---- kernels ----


@triton.jit
def _e4m3_values(codes):
    """E4M3 numbers, given as bytes, in BF16: exact, but that NaN becomes 480.

    Sign, exponent and mantissa are put where BF16 has them and read as that, subnormals included,
    which makes numbers that are too small by 2^120.
    """
    if _ASSEMBLY:
        values = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, t, u, zero, up;
            mov.b32 zero, 0x80008000;
            mov.b32 up, 0x7B807B80;
            prmt.b32 a, $2, 0, 0x4140;
            shl.b32 t, a, 4;
            shl.b32 u, a, 8;
            and.b32 t, t, 0x07F007F0;
            lop3.b32 t, u, 0x80008000, t, 0xEA;
            fma.rn.bf16x2 $0, t, up, zero;
            prmt.b32 a, $2, 0, 0x4342;
            shl.b32 t, a, 4;
            shl.b32 u, a, 8;
            and.b32 t, t, 0x07F007F0;
            lop3.b32 t, u, 0x80008000, t, 0xEA;
            fma.rn.bf16x2 $1, t, up, zero;
            }
            """,
            # Early: the first is written while the input is still to be read.
            "=&r,=&r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        bits = codes.to(tl.int32)
        bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        values = (bits.to(tl.float32, bitcast=True) * (2.0**120)).to(tl.bfloat16)
    return values


@triton.jit(do_not_specialize=["tokens", "token_tiles", "groups"])
def _linear_kernel(
    x,
    weight,
    scales,
    out,
    tokens,
    token_tiles,
    width,
    depth,
    groups,
    slice_depth,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One slice of the inputs for one tile of rows and tokens; neighbours share their rows.

    A tile of rows lies in one block of scales and in one group, since BLOCK_N divides 128.
    """
    first_row = (tl.program_id(0) // token_tiles) * BLOCK_N
    part = tl.program_id(1)
    token = (tl.program_id(0) % token_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    there = token < tokens
    row = first_row + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    begin = part * slice_depth
    end = tl.minimum(begin + slice_depth, depth)
    group = first_row // (width // groups)
    line = token.to(tl.int64) * groups + group
    x_tile = x + (line * depth + begin)[None, :] + k[:, None]
    read = tl.minimum(row, width - 1).to(tl.int64)  # the last row again, where there is none
    weight_tile = weight + (read * depth + begin)[:, None] + k[None, :]
    scales += (first_row // _BLOCK) * tl.cdiv(depth, _BLOCK)
    scale = tl.load(scales + begin // _BLOCK)
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for first in range(begin, end, BLOCK_K):
        if WHOLE:
            values = tl.load(weight_tile)
            inputs = tl.load(x_tile, mask=there[None, :], other=0.0)
        else:
            inside = first + k < end
            values = tl.load(weight_tile, mask=inside[None, :], other=0)
            inputs = tl.load(x_tile, mask=inside[:, None] & there[None, :], other=0.0)
        # The next one: it is under way while this tile is multiplied.
        following = tl.load(scales + tl.minimum(first + BLOCK_K, end - 1) // _BLOCK)
        total += tl.dot(_e4m3_values(values), inputs) * scale
        scale = following
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    line = part.to(tl.int64) * tokens + token
    stored = (row < width)[:, None] & there[None, :]
    tl.store(out + line[None, :] * width + row[:, None], total, mask=stored)


@triton.jit(do_not_specialize=["slices"])
def _add_slices_kernel(sums, result, count, slices, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    """One block of the `count` numbers of the result."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, SLICES)
    parts = tl.load(
        sums + part.to(tl.int64)[:, None] * count + place[None, :],
        mask=(part < slices)[:, None] & (place < count)[None, :],
        other=0.0,
    )
    tl.store(result + place, tl.sum(parts, 0), mask=place < count)


@triton.jit
def _dequantise_kernel(weight, scales, values, rows, columns, blocks, BLOCK_N: tl.constexpr):
    """Some rows of one block of inputs."""
    first_row = (tl.program_id(0) // blocks) * BLOCK_N
    block = tl.program_id(0) % blocks
    row = first_row + tl.arange(0, BLOCK_N)
    column = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    codes = tl.load(weight + place, mask=inside, other=0)
    scale = tl.load(scales + (first_row // _BLOCK) * blocks + block)
    tl.store(values + place, _e4m3_values(codes).to(tl.float32) * scale, mask=inside)
