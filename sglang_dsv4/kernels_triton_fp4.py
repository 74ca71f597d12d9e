"""Matrices of four-bit values for tensor cores, in Triton: how they are packed, and multiplied.

What `moe.kernels_triton_fp4` and `kernels_triton_linear_fp4` share. Weights are unpacked in
registers, where codes times scales are exact in BF16; their factors are the caller's.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from sglang_dsv4.dequant import MXFP4_GROUP
from sglang_dsv4.fp4 import ROWS, FP4Matrices
from sglang_dsv4.kernels_triton_fragments import (
    ASSEMBLY,
    depth_for,
    finished,
    left_operand,
    scaled_pair,
    words_of,
)

# Codes, as their bits read in BF16, are too small by 2^126; scales are made larger by 2^118, and
# what remains, 2^-8, the factors make good.
FACTORS_UP = tl.constexpr(2.0**8)
_SCALES_UP = tl.constexpr(118)
# A scale of one byte becomes BF16 by a shift and a sum. UE8M0 (its bias is 127) is BF16's exponent;
# larger ones than this would be infinite.
_LARGEST_UE8M0 = 254 - _SCALES_UP.value
# `pack` makes E5M3 of E4M3: without a sign, without subnormal numbers, and with this bias.
_E5M3_BIAS = tl.constexpr(10)

# Where a word holds mantissa, exponent (two bits) and sign of the first code of each of its four
# pairs; see `words_of`. The first pair is where a pair of BF16 has it, a shift brings the
# second and the third there, two the last: no order of the bits needs fewer.
_PLACES = ((6, 7, 8, 15), (0, 1, 2, 9), (10, 11, 12, 19), (4, 5, 14, 13))
_NUMBERS = tl.constexpr(0x81C081C0 - 2**32)  # a pair of BF16, as int32: the bits of E2M1
_SIGNS_AND_LOW = tl.constexpr(0x80C080C0 - 2**32)  # those but the upper of the exponent


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
    if rows % (ROWS * weight.parts):
        raise ValueError(f"four-bit matrices need a multiple of {ROWS} rows, found {rows}")
    depth = depth_for(columns)
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
    split = codes.view(rows // ROWS, 2, 8, columns // depth, 2, blocks, -1, 2, 4, 2)
    # tile of rows, tile of inputs, block, g, c, sixteen, r8; of a word: half, two, neighbour
    ordered = split.permute(0, 3, 5, 2, 8, 6, 1, 4, 7, 9).flatten(-3)
    return words_of(ordered, _PLACES)


def _tile_of_scales(scales: torch.Tensor, depth: int, group: int) -> torch.Tensor:
    """Scales [N, K / group] to [N / 16, K / depth, 8, ...]: those of a thread's codes together, in
    the order: group within a block, row g or g + 8, block, half."""
    rows, columns = scales.shape
    blocks, groups = max(depth // 64, 1), depth // group
    halves = min(groups, 2)
    split = scales.view(rows // ROWS, 2, 8, columns // groups, halves, blocks, -1)
    return split.permute(0, 3, 2, 6, 1, 5, 4).contiguous()


# ---- in kernels ----


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
    if ASSEMBLY:
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
            scaled_pair(words & _NUMBERS, low_scales),
            scaled_pair((words << 6) & _NUMBERS, low_scales),
            scaled_pair(turned & _NUMBERS, high_scales),
            scaled_pair(in_two, high_scales),
        )
    return pairs


@triton.jit
def unpacked_halves(
    codes,
    scales,
    tile,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WGMMA: tl.constexpr,
):
    """TILES tiles as BF16 numbers, too small by FACTORS_UP: the lower and the upper half of their
    inputs, [16 TILES, BLOCK_K / 2] in the order of `inputs_in_order`.

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
    return left_operand(low, TILES, BLOCKS, WGMMA), left_operand(high, TILES, BLOCKS, WGMMA)


@triton.jit
def fp4_product(
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
    """total [16 TILES, M] + TILES tiles, as `unpacked_halves` has them, @ (lows, highs)
    [BLOCK_K / 2, M]."""
    low, high = unpacked_halves(codes, scales, tile, TILES, GROUP, BLOCK_K, WGMMA)
    total = tl.dot(low.to(lows.dtype), lows, total, input_precision="ieee")
    return finished(tl.dot(high.to(lows.dtype), highs, total, input_precision="ieee"))
