"""Linear layers for few tokens as Triton kernels, with weights in FP8 blocks (W8A16).

`reference.py` is the definition. Weights are the left operand, so that a tile is as many of their
rows as tensor cores want, and as few tokens as there are. They are packed in the order of its
fragments: FP8 codes become BF16 in registers, exactly, in the threads that multiply them; the scale
of a block multiplies the fp32 sum over its 128 inputs. Where the rows make too
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

from sglang_dsv4.backends import compute_capability
from sglang_dsv4.dequant import FP8_BLOCK
from sglang_dsv4.fp4 import INPUTS, ROWS
from sglang_dsv4.fp8 import FP8Matrix
from sglang_dsv4.kernels_cublas import linear_fp32
from sglang_dsv4.kernels_triton import _least_power
from sglang_dsv4.kernels_triton_fragments import (
    ASSEMBLY,
    depth_for,
    inputs_in_order,
    left_operand,
    scaled_pair,
    takes_wgmma,
    words_of,
)
from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel

# Beyond so many tokens arithmetic costs more than reading weights: they are dequantised, and cuBLAS
# multiplies.
MOST_TOKENS = 128

# So many programs fill the largest GPUs (132 to 160 multiprocessors, 3 or 4 programs each).
_PROGRAMS = 512

# Inputs of a slice for each token, at least: see `slice_depth_for`.
_DEPTH_PER_TOKEN = 16

_BLOCK, _ROWS = tl.constexpr(FP8_BLOCK), tl.constexpr(ROWS)

# Where a word holds mantissa (three bits), exponent (four) and sign of the first code of each of
# its two pairs; see `words_of`. The first pair is where a pair of BF16 has it, two shifts
# bring the other there; no order of the bits needs fewer.
_PLACES = ((4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11))
_NUMBERS = tl.constexpr(0x87F087F0 - 2**32)  # a pair of BF16, as int32: the bits of E4M3
_SIGNS_AND_LOW = tl.constexpr(0x80F080F0 - 2**32)  # those but the upper of the exponent


def linear_fp8(
    x: torch.Tensor, weight: FP8Matrix, *, dtype: torch.dtype, groups: int = 1
) -> torch.Tensor:
    """A linear layer whose weight is in FP8, with one scale for each block of 128 x 128.

    x      [T, groups * K] float: rounded to BF16 first, by kernels.
    weight [N, K], no NaN among its codes: the rows of the result's columns. As `pack` leaves it.
    dtype  of the result.
    groups of rows, equally many; each multiplies K columns of x of its own. N / groups must be a
           multiple of 128 where there are several.
    Returns [T, N], summed in fp32 and rounded once. Source: spec 4.2.
    """
    width = weight.shape[0]
    if not weight.packed:
        raise ValueError("the weight must be packed: call pack on it, once, after loading")
    if groups > 1 and width % (groups * FP8_BLOCK):
        raise ValueError(f"{width} rows in {groups} groups: each needs a multiple of {FP8_BLOCK}")
    x = x.to(torch.bfloat16).contiguous()
    if x.shape[0] > MOST_TOKENS:
        return dense_product(x, dequantised(weight), dtype, groups)
    return _tiled_product(x, weight, dtype, groups)


def pack(weight: FP8Matrix) -> None:
    """Put a loaded weight in the order that the kernels read, in place.

    For 16 rows and 32 inputs, 16 bytes of each thread, one after the other (`fragments`); of these,
    a word has the four inputs of one row and of 16 inputs. Raises ValueError for other shapes.
    """
    if weight.packed:
        raise ValueError("the weight is packed already")
    rows, columns = weight.shape
    if rows % ROWS:
        raise ValueError(f"packed matrices need a multiple of {ROWS} rows, found {rows}")
    depth_for(columns)
    # rows: tile, r8, g; inputs: tile, sixteen, two, c, neighbour
    split = weight.codes.view(rows // ROWS, 2, 8, columns // INPUTS, 2, 2, 4, 2)
    # tile of rows, tile of inputs, g, c, sixteen, r8; of a word: two, neighbour
    ordered = split.permute(0, 3, 2, 6, 4, 1, 5, 7).flatten(-2)
    weight.codes.copy_(words_of(ordered, _PLACES).view(torch.uint8).view(rows, columns))
    weight.packed = True


def dequantised(weight: FP8Matrix) -> torch.Tensor:
    """A packed matrix [N, K] in BF16: exact for scales that are powers of two."""
    rows, columns = weight.shape
    depth, tiles = depth_for(columns), 2
    values = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.codes.device)
    _dequantise_kernel[(triton.cdiv(rows, ROWS * tiles) * (columns // depth),)](
        weight.codes.view(-1).view(torch.int32),
        weight.scales,
        values,
        rows,
        columns,
        TILES=tiles,
        BLOCK_K=depth,
        num_warps=2,
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


def tiles_for(tokens: int, depth: int) -> Tiles:
    """All within 99 KiB of shared memory. depth: inputs at a time, as `depth_for` the weight's.

    Up to 64 tokens the weight is what takes time: 8 to 16 KiB of it at a time, with two such loads
    under way in each of several programs on a multiprocessor. Four warps take part in Hopper's
    products. Tokens are read again for each tile of rows, so more tokens want more rows, and those
    more warps.
    """
    if tokens <= 16:
        return Tiles(rows=64, tokens=8 if tokens <= 8 else 16, depth=depth, warps=4, stages=4)
    if tokens <= 32:
        return Tiles(rows=64, tokens=32, depth=depth, warps=4, stages=3)
    if tokens <= 64:
        return Tiles(rows=128, tokens=64, depth=depth, warps=8, stages=3)
    return Tiles(rows=128, tokens=128, depth=depth, warps=8, stages=2)


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
    x: torch.Tensor, weight: FP8Matrix, dtype: torch.dtype, groups: int
) -> torch.Tensor:
    """As linear_fp8; x in bf16."""
    tokens, (width, depth) = x.shape[0], weight.shape
    result = torch.empty(tokens, width, dtype=dtype, device=x.device)
    if tokens == 0:
        return result
    tiles = tiles_for(tokens, depth_for(depth))
    slice_depth = slice_depth_for(tokens, width, depth, tiles)
    sums = sums_of_slices(result, triton.cdiv(depth, slice_depth))
    token_tiles = triton.cdiv(tokens, tiles.tokens)
    _linear_kernel[(triton.cdiv(width, tiles.rows) * token_tiles, sums.shape[0])](
        x,
        weight.codes.view(-1).view(torch.int32),
        weight.scales,
        sums,
        tokens,
        token_tiles,
        width,
        depth,
        groups,
        slice_depth,
        BLOCK_N=tiles.rows,
        BLOCK_T=tiles.tokens,
        BLOCK_K=tiles.depth,
        WGMMA=takes_wgmma(compute_capability(), rows=tiles.rows, warps=tiles.warps),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    add_slices(sums, result)
    return result


def sums_of_slices(result: torch.Tensor, slices: int) -> torch.Tensor:
    """Where slices write their sums: [slices, T, N] fp32, or where there is one, result [T, N]."""
    if slices == 1:
        return result.unsqueeze(0)
    return torch.empty(slices, *result.shape, dtype=torch.float32, device=result.device)


def add_slices(sums: torch.Tensor, result: torch.Tensor) -> None:
    """sums [slices, T, N] fp32 -> their sum in `result` [T, N], in one order, rounded once."""
    slices, block = sums.shape[0], 256
    if slices == 1:
        return  # it is the result
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
def _unpacked(words):
    """Four E4M3 numbers of a word as two pairs of BF16 in words: exact, but that NaN becomes 480.

    Bits are moved from `_PLACES` to where BF16 has them and read as that, subnormals included,
    which makes numbers that are too small by 2^120.
    """
    if ASSEMBLY:
        pairs = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, u, zero, up;
            mov.b32 zero, 0x80008000;
            mov.b32 up, 0x7B807B80;
            and.b32 t, $2, 0x87F087F0;
            fma.rn.bf16x2 $0, t, up, zero;
            shl.b32 t, $2, 4;
            shr.b32 u, $2, 4;
            and.b32 t, t, 0x80F080F0;
            lop3.b32 t, u, 0x07000700, t, 0xEA;
            fma.rn.bf16x2 $1, t, up, zero;
            }
            """,
            # Early: the first is written while the input is still to be read.
            "=&r,=&r,r",
            [words],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        second = ((words << 4) & _SIGNS_AND_LOW) | ((words >> 4) & 0x07000700)
        up = tl.full(words.shape, 0x7B807B80, tl.int32)  # 2^120, twice
        pairs = (scaled_pair(words & _NUMBERS, up), scaled_pair(second, up))
    return pairs


@triton.jit
def _numbers(codes, tile, TILES: tl.constexpr, BLOCK_K: tl.constexpr, WGMMA: tl.constexpr):
    """TILES tiles of BLOCK_K inputs as BF16 [16 TILES, BLOCK_K] in the order of `inputs_in_order`.

    tile [32 TILES] int64: for each thread, its tile's place among all.
    """
    word = codes + tile * (BLOCK_K * 4) + tl.arange(0, TILES * 32) % 32 * 4
    word = word[:, None] + tl.arange(0, 4)[None, :]
    a = _unpacked(tl.load(word))
    if BLOCK_K == 32:
        pairs = tl.reshape(tl.join(a[0], a[1]), (TILES * 32, 4, 2, 1))
    else:
        b = _unpacked(tl.load(word + 128))
        first, second = tl.join(a[0], b[0]), tl.join(a[1], b[1])
        if BLOCK_K == 64:
            pairs = tl.permute(tl.join(first, second), (0, 1, 3, 2))
        else:
            c, d = _unpacked(tl.load(word + 256)), _unpacked(tl.load(word + 384))
            first = tl.join(first, tl.join(c[0], d[0]))
            second = tl.join(second, tl.join(c[1], d[1]))
            pairs = tl.permute(tl.join(first, second), (0, 1, 4, 3, 2))
            pairs = tl.reshape(pairs, (TILES * 32, 4, 2, 4))
    return left_operand(pairs, TILES, BLOCK_K // 32, WGMMA)


@pdl_kernel(do_not_specialize=["tokens", "token_tiles", "groups"])
def _linear_kernel(
    x,
    codes,
    scales,
    out,
    tokens,
    token_tiles,
    width,
    depth,
    groups,
    slice_depth,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WGMMA: tl.constexpr,
):
    """One slice of the inputs for one tile of rows and tokens; neighbours share their rows.

    A tile of rows lies in one block of scales and in one group, since BLOCK_N divides 128. Where
    there are no more rows or tokens, the last are read again, and nothing is stored.
    """
    after_previous()
    TILES: tl.constexpr = BLOCK_N // _ROWS
    first_row = (tl.program_id(0) // token_tiles) * BLOCK_N
    part = tl.program_id(1)
    token = (tl.program_id(0) % token_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    begin = part * slice_depth
    end = tl.minimum(begin + slice_depth, depth)
    group = first_row // (width // groups)
    line = tl.minimum(token, tokens - 1).to(tl.int64) * groups + group
    x_tile = x + (line * depth + begin)[None, :] + inputs_in_order(BLOCK_K, WGMMA)[:, None]
    tile = tl.minimum(first_row // _ROWS + tl.arange(0, TILES * 32) // 32, width // _ROWS - 1)
    tile = tile.to(tl.int64) * (depth // BLOCK_K) + begin // BLOCK_K
    scales += (first_row // _BLOCK) * tl.cdiv(depth, _BLOCK)
    scale = tl.load(scales + begin // _BLOCK)
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for first in range(begin, end, BLOCK_K):
        inputs = tl.load(x_tile)
        # The next one: it is under way while this tile is multiplied.
        following = tl.load(scales + tl.minimum(first + BLOCK_K, end - 1) // _BLOCK)
        total += tl.dot(_numbers(codes, tile, TILES, BLOCK_K, WGMMA), inputs) * scale
        scale = following
        x_tile += BLOCK_K
        tile += 1
    row = first_row + tl.arange(0, BLOCK_N)
    line = part.to(tl.int64) * tokens + token
    stored = (row < width)[:, None] & (token < tokens)[None, :]
    tl.store(out + line[None, :] * width + row[:, None], total, mask=stored)


@pdl_kernel(do_not_specialize=["slices"])
def _add_slices_kernel(sums, result, count, slices, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    """One block of the `count` numbers of the result."""
    after_previous()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, SLICES)
    parts = tl.load(
        sums + part.to(tl.int64)[:, None] * count + place[None, :],
        mask=(part < slices)[:, None] & (place < count)[None, :],
        other=0.0,
    )
    tl.store(result + place, tl.sum(parts, 0), mask=place < count)


@pdl_kernel
def _dequantise_kernel(
    codes, scales, values, rows, columns, TILES: tl.constexpr, BLOCK_K: tl.constexpr
):
    """TILES tiles, one below the other, which lie in one block of scales."""
    after_previous()
    blocks = columns // BLOCK_K
    first_row = (tl.program_id(0) // blocks) * (TILES * _ROWS)
    first = tl.program_id(0) % blocks * BLOCK_K
    tile = tl.minimum(first_row // _ROWS + tl.arange(0, TILES * 32) // 32, rows // _ROWS - 1)
    tile = tile.to(tl.int64) * blocks + first // BLOCK_K
    scale = tl.load(scales + (first_row // _BLOCK) * tl.cdiv(columns, _BLOCK) + first // _BLOCK)
    row = first_row + tl.arange(0, TILES * _ROWS)
    column = first + inputs_in_order(BLOCK_K, True)
    numbers = _numbers(codes, tile, TILES, BLOCK_K, True).to(tl.float32) * scale
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(values + place, numbers, mask=(row < rows)[:, None] & (column < columns)[None, :])
