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

# Codes, as their bits read in BF16, are too small by 2^126; scales are made larger by 2^118, and
# what remains, 2^-8, the factors make good.
_FACTORS_UP = tl.constexpr(2.0**8)
_SCALES_UP = tl.constexpr(118)
# A scale of one byte becomes BF16 by a shift and a sum. UE8M0 (its bias is 127) is BF16's exponent;
# larger ones than this would be infinite.
_LARGEST_UE8M0 = 254 - _SCALES_UP.value
# `pack` makes E5M3 of E4M3: without a sign, without subnormal numbers, and with this bias.
_E5M3_BIAS = tl.constexpr(10)
_ROWS = 16  # of a tile

# Where a word holds mantissa, exponent (two bits) and sign of the first code of each of its four
# pairs; those of the second lie 16 places on, round the end. They come to their places in a pair of
# BF16 by a shift for all bits of a pair, two for the last: no order of the bits does with fewer.
_PLACES = ((6, 7, 8, 15), (0, 1, 2, 9), (10, 11, 12, 19), (4, 5, 14, 13))
_NUMBERS = tl.constexpr(0x81C081C0 - 2**32)  # a pair of BF16, as int32: the bits of E2M1
_SIGNS_AND_LOW = tl.constexpr(0x80C080C0 - 2**32)  # those but the upper of the exponent

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


def pack(weight: FP4Matrices) -> None:
    """Put a loaded weight in the order that the kernels read, in place, one matrix after the other.

    A tile has 16 rows and 128 inputs (64 or 32 where these do not divide), in the order of the
    fragments of a tensor core's left operand, so that the threads that read codes multiply them:
    thread 4 g + c has the rows g and g + 8, of every 16 inputs 2 c, 2 c + 1 and the two that come
    8 after these. Its codes follow each other (`_tile_of_codes`), and so do the scales of these
    (`_tile_of_scales`). Raises ValueError for scales that cannot be multiplied exactly.
    """
    if weight.packed:
        raise ValueError("the weight is packed already")
    _, rows, columns = weight.shape
    if rows % (_ROWS * weight.parts):
        raise ValueError(f"four-bit matrices need a multiple of {_ROWS} rows, found {rows}")
    depth = _fp4_depth(columns)
    _check_scales(weight)
    e5m3 = _e5m3_of_e4m3().to(weight.scales.device)
    for codes, scales in zip(weight.codes, weight.scales, strict=True):
        unpacked = torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, columns)
        if weight.group != MXFP4_GROUP:
            _to_e5m3(unpacked, scales, e5m3)
        codes.copy_(_tile_of_codes(unpacked, depth).view(torch.uint8).reshape(codes.shape))
        scales.copy_(_tile_of_scales(scales, depth, weight.group).view(scales.shape))
    weight.packed = True


def _check_scales(weight: FP4Matrices) -> None:
    """Before anything is changed: whether all scales can be multiplied exactly."""
    if weight.group != MXFP4_GROUP:
        if any(bool(((scales & 0x7F) == 0x7F).any()) for scales in weight.scales):
            raise ValueError("an NVFP4 scale is not a number: the checkpoint is damaged")
        return
    largest = int(weight.scales.max())
    if largest > _LARGEST_UE8M0:
        raise ValueError(
            f"MXFP4 scales up to 2^{_LARGEST_UE8M0 - 127} can be multiplied in BF16; the"
            f" largest is 2^{largest - 127}: set SGLANG_DSV4_PRECISION=routed_experts=bf16"
        )


def _e5m3_of_e4m3() -> torch.Tensor:
    """[256] uint8: the size of each E4M3 number in E5M3; of 0 and NaN any."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().abs()
    mantissa, exponent = torch.frexp(values.nan_to_num())  # a half up to one
    e5m3 = (exponent - 1 + _E5M3_BIAS.value) * 8 + mantissa * 16 - 8
    return e5m3.clamp(min=0).to(torch.uint8)


def _to_e5m3(codes: torch.Tensor, scales: torch.Tensor, e5m3: torch.Tensor) -> None:
    """E4M3 scales [N, K / 16] as E5M3, in place; what these cannot say, the codes [N, K] do."""
    groups = codes.view(*scales.shape, -1)
    groups ^= ((scales >> 7) << 3).unsqueeze(-1)  # a sign
    groups.masked_fill_((scales & 0x7F == 0).unsqueeze(-1), 0)
    scales.copy_(e5m3[scales.long()])


def _tile_of_codes(codes: torch.Tensor, depth: int) -> torch.Tensor:
    """Codes [N, K] to words [N / 16, K / depth, ...]: for every 64 inputs of a tile, four words of
    each thread one after the other.

    A word has the four inputs of a thread in each half tile, two pairs of neighbours of half 0, and
    then of half 1: of the thread's inputs the first two, and the two that come 8 after these.
    """
    rows, columns = codes.shape
    blocks = max(depth // 64, 1)
    # rows: tile, r8, g; inputs: tile, half, block, sixteen, two, c, neighbour
    split = codes.view(rows // _ROWS, 2, 8, columns // depth, 2, blocks, -1, 2, 4, 2)
    # tile of rows, tile of inputs, block, g, c, sixteen, r8; of a word: half, two, neighbour
    ordered = split.permute(0, 3, 5, 2, 8, 6, 1, 4, 7, 9).flatten(-3)
    words = torch.zeros(ordered.shape[:-1], dtype=torch.int32, device=codes.device)
    for number, bits in enumerate(_bits_of_codes().to(codes.device)):
        words |= bits[ordered[..., number].int()]
    return words


def _bits_of_codes() -> torch.Tensor:
    """[8, 16] int32: the bits of a word that each code sets in each of its eight places."""
    words = [
        sum((code >> bit & 1) << (place + 16 * neighbour) % 32 for bit, place in enumerate(places))
        for places in _PLACES
        for neighbour in range(2)
        for code in range(16)
    ]
    return torch.tensor(words).to(torch.int32).view(8, 16)


def _tile_of_scales(scales: torch.Tensor, depth: int, group: int) -> torch.Tensor:
    """Scales [N, K / group] to [N / 16, K / depth, 8, ...]: those of a thread's codes together, in
    the order: group within a block, row g or g + 8, block, half."""
    rows, columns = scales.shape
    blocks, groups = max(depth // 64, 1), depth // group
    halves = min(groups, 2)
    split = scales.view(rows // _ROWS, 2, 8, columns // groups, halves, blocks, -1)
    return split.permute(0, 3, 2, 6, 1, 5, 4).contiguous()


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
        """As for dense matrices, but the depth is that of the packing: `scripts/tune_experts.py`
        times others."""
        hopper = compute_capability() == 90
        if element_size > 2:
            return Tiles(rows=16, columns=32, warps=2, stages=2)
        if average <= 5:
            return Tiles(rows=8, columns=64, warps=4, stages=4)
        if average <= 24:
            return Tiles(rows=16, columns=64, warps=4 if hopper else 2, stages=4)
        if average > 64 and hopper:  # it has the shared memory
            return Tiles(rows=128, columns=128, warps=8, stages=3)
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
            BLOCK_K=_fp4_depth(x.shape[1]),
            WGMMA=_takes_wgmma(tiles),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )


def _takes_wgmma(tiles: Tiles) -> bool:
    """Whether Triton multiplies these tiles by wgmma. A wrong answer costs time alone."""
    return compute_capability() == 90 and tiles.warps % 4 == 0 and tiles.columns % 64 == 0


def _fp4_depth(inputs: int) -> int:
    """Inputs of a tile: the largest of 128, 64 and 32 that divides."""
    depth = min(inputs & -inputs, 128)
    if depth < 32:
        raise ValueError(f"four-bit matrices need a multiple of 32 inputs, found {inputs}")
    return depth


@triton.jit
def _scale_pairs(scales, GROUP: tl.constexpr):
    """Lowest bytes as BF16, times 2^_SCALES_UP, twice in a word: E5M3 in NVFP4, UE8M0 in MXFP4."""
    SHIFT: tl.constexpr = 4 if GROUP == 16 else 7
    FIRST: tl.constexpr = (127 - _E5M3_BIAS if GROUP == 16 else 0) + _SCALES_UP
    return (scales & 0xFF) * (0x10001 << SHIFT) + (FIRST << 7) * 0x10001


@triton.jit
def _spread(scales, WORDS: tl.constexpr):
    """[n, groups * 2] -> [n, WORDS]: the scale of each word's codes."""
    GROUPS: tl.constexpr = scales.shape[1] // 2
    each = tl.reshape(scales, (scales.shape[0], GROUPS, 1, 2))
    each = tl.broadcast_to(each, (scales.shape[0], GROUPS, WORDS // 2 // GROUPS, 2))
    return tl.reshape(each, (scales.shape[0], WORDS))


@triton.jit
def _unpacked(words, low_scales, high_scales):
    """Eight E2M1 numbers of a word as four pairs of BF16 in words, times 2^-126 and their scales:
    two pairs of the lower and two of the upper half tile.

    Bits are moved from `_PLACES` to where BF16 has them and read as that, subnormals included.
    """
    if _ASSEMBLY:
        pairs = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, u, zero;
            mov.b32 zero, 0x80008000;
            and.b32 t, $4, 0x81C081C0;
            fma.rn.bf16x2 $0, t, $5, zero;
            shl.b32 t, $4, 6;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $1, t, $5, zero;
            shf.r.wrap.b32 t, $4, $4, 4;
            and.b32 t, t, 0x81C081C0;
            fma.rn.bf16x2 $2, t, $6, zero;
            shl.b32 t, $4, 2;
            shr.b32 u, $4, 6;
            and.b32 t, t, 0x80C080C0;
            lop3.b32 t, u, 0x01000100, t, 0xEA;
            fma.rn.bf16x2 $3, t, $6, zero;
            }
            """,
            # Early: outputs are written while inputs are still to be read.
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, low_scales, high_scales],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        turned = ((words >> 4) & 0x0FFFFFFF) | (words << 28)
        in_two = ((words << 2) & _SIGNS_AND_LOW) | ((words >> 6) & 0x01000100)
        pairs = (
            _scaled_pair(words & _NUMBERS, low_scales),
            _scaled_pair((words << 6) & _NUMBERS, low_scales),
            _scaled_pair(turned & _NUMBERS, high_scales),
            _scaled_pair(in_two, high_scales),
        )
    return pairs


@triton.jit
def _scaled_pair(numbers, scales):
    """Two BF16 numbers of a word times those of another."""
    product = _float(numbers << 16) * _float(scales << 16)
    second = _float(numbers & -65536) * _float(scales & -65536)
    return ((product.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (
        second.to(tl.int32, bitcast=True) & -65536
    )


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _numbers(pairs):
    """Words [...] -> BF16 [..., 2]: the lower half of each first."""
    return tl.join(pairs, pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _left_operand(pairs, TILES: tl.constexpr, BLOCKS: tl.constexpr, WGMMA: tl.constexpr):
    """Words of threads [TILES * 32, words, twos, blocks] -> BF16 [TILES * 16, inputs], in the order
    of `_inputs`."""
    SIXTEENS: tl.constexpr = pairs.shape[1] // 2
    values = tl.reshape(_numbers(pairs), (TILES, 8, 4, SIXTEENS, 2, 2, BLOCKS, 2))
    if WGMMA:
        values = tl.permute(values, (0, 4, 1, 6, 3, 5, 2, 7))
    else:
        values = tl.permute(values, (0, 4, 1, 6, 3, 2, 5, 7))
    return tl.reshape(values, (TILES * 16, BLOCKS * SIXTEENS * 16))


@triton.jit
def _inputs(COUNT: tl.constexpr, WGMMA: tl.constexpr):
    """[COUNT]: the inputs of half a tile in the order in which they are multiplied.

    Triton's operands of wgmma hold what `pack` gives a thread; those of mma.sync, in the same
    place, four neighbours: there the tokens are read in the order of the weights.
    """
    place = tl.arange(0, COUNT)
    if WGMMA:
        return place
    each = place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
    return tl.max_contiguous(tl.multiple_of(each, 2), 2)


@triton.jit
def _fp4_product(
    codes,
    scales,
    tile,
    lows,
    highs,
    total,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WGMMA: tl.constexpr,
):
    """total [16 TILES, M] + TILES tiles @ (lows, highs) [BLOCK_K / 2, M].

    tile [32 TILES] int64: for each thread, its tile's place among all.
    """
    BLOCKS: tl.constexpr = max(BLOCK_K // 64, 1)
    WORDS: tl.constexpr = BLOCK_K // BLOCKS // 16
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    thread = tl.arange(0, TILES * 32)
    scale = scales + (tile * 8 + thread % 32 // 4) * GROUPS
    scale = tl.load(scale[:, None] + tl.arange(0, GROUPS)[None, :]).to(tl.int32)
    low_scales, high_scales = _scale_pairs(scale, GROUP), _scale_pairs(scale >> 8, GROUP)
    if GROUPS == 1:  # both halves of the tile lie in one group; what differs is the row
        low_scales = tl.reshape(tl.join(low_scales, high_scales), (TILES * 32, 2))
        high_scales = low_scales
    word = codes + tile * (BLOCK_K * 2) + thread % 32 * WORDS
    word = word[:, None] + tl.arange(0, WORDS)[None, :]
    if BLOCKS == 2:
        SHAPE: tl.constexpr = (TILES * 32, GROUPS // 2, 2)
        low_a, low_b = tl.split(tl.reshape(low_scales, SHAPE))
        high_a, high_b = tl.split(tl.reshape(high_scales, SHAPE))
        a = _unpacked(tl.load(word), _spread(low_a, WORDS), _spread(high_a, WORDS))
        b = _unpacked(tl.load(word + 32 * WORDS), _spread(low_b, WORDS), _spread(high_b, WORDS))
        low = tl.join(tl.join(a[0], b[0]), tl.join(a[1], b[1]))
        high = tl.join(tl.join(a[2], b[2]), tl.join(a[3], b[3]))
        low, high = tl.permute(low, (0, 1, 3, 2)), tl.permute(high, (0, 1, 3, 2))
    else:
        a = _unpacked(tl.load(word), _spread(low_scales, WORDS), _spread(high_scales, WORDS))
        low, high = tl.join(a[0], a[1]), tl.join(a[2], a[3])
    low = _left_operand(low, TILES, BLOCKS, WGMMA)
    high = _left_operand(high, TILES, BLOCKS, WGMMA)
    total = tl.dot(low.to(lows.dtype), lows, total, input_precision="ieee")
    return tl.dot(high.to(lows.dtype), highs, total, input_precision="ieee")


@triton.jit(do_not_specialize=["pairs", "first_held"])
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
    half = _inputs(BLOCK_K // 2, WGMMA)
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
        total = _fp4_product(codes, scales, tile, lows, highs, total, TILES, GROUP, BLOCK_K, WGMMA)
        x_tile += BLOCK_K
        tile += 1
    if GATED:
        both = tl.permute(tl.reshape(total, (2, COLUMNS, BLOCK_M)), (1, 2, 0))
        gates, ups = tl.split(both)
        gates *= tl.load(factors + expert * 2) * _FACTORS_UP
        ups *= tl.load(factors + expert * 2 + 1) * _FACTORS_UP
        total = _swiglu(gates, ups, limit)
    else:
        total *= tl.load(factors + expert) * _FACTORS_UP
    columns = column + tl.arange(0, COLUMNS)
    stored = (columns < width)[:, None] & (tl.arange(0, BLOCK_M) < count)[None, :]
    tl.store(out + pair[None, :] * width + columns[:, None], total, mask=stored)
