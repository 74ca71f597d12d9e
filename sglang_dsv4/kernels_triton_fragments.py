"""The order of a packed weight: that of the fragments of a tensor core's left operand, in Triton.

The threads that read codes of weights then multiply them, and nothing is exchanged: of a tile of 16
rows, thread 4 g + c has the rows g and g + 8, and of every 16 inputs 2 c, 2 c + 1 and the two that
come 8 after these. `kernels_triton_fp4` and `kernels_triton_linear` pack so.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_dsv4.fp4 import INPUTS

# The interpreter knows no assembly.
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


def depth_for(inputs: int) -> int:
    """Inputs of a tile: the largest of 128, 64 and 32 that divides."""
    depth = min(inputs & -inputs, 128)
    if depth < INPUTS:
        raise ValueError(f"packed matrices need a multiple of {INPUTS} inputs, found {inputs}")
    return depth


def takes_wgmma(capability: int, *, rows: int, warps: int) -> bool:
    """Whether Triton multiplies tiles of so many rows by wgmma. A wrong answer costs time alone.

    capability: of the GPU, as 90 for 9.0.
    """
    return capability == 90 and warps % 4 == 0 and rows % 64 == 0


def words_of(codes: torch.Tensor, places: Sequence[Sequence[int]]) -> torch.Tensor:
    """Codes [..., 2 * pairs] uint8, in the order of pairs, to words [...] int32.

    places: for the first code of each pair, where the word holds its bits, from the lowest. Those
    of the second lie 16 places on, round the end.
    """
    words = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=codes.device)
    for number, bits in enumerate(_bits_of_codes(places).to(codes.device)):
        words |= bits[codes[..., number].int()]
    return words


def _bits_of_codes(places: Sequence[Sequence[int]]) -> torch.Tensor:
    """[2 * pairs, 2^bits] int32: the bits of a word that a code sets, as each of those in it."""
    words = [
        sum((code >> bit & 1) << (place + 16 * neighbour) % 32 for bit, place in enumerate(each))
        for each in places
        for neighbour in range(2)
        for code in range(2 ** len(each))
    ]
    return torch.tensor(words).to(torch.int32).view(2 * len(places), -1)


# ---- in kernels ----


@triton.jit
def left_operand(pairs, TILES: tl.constexpr, BLOCKS: tl.constexpr, WGMMA: tl.constexpr):
    """Words of threads [TILES * 32, words, twos, blocks] -> BF16 [TILES * 16, inputs], in the order
    of `inputs_in_order`."""
    SIXTEENS: tl.constexpr = pairs.shape[1] // 2
    values = tl.reshape(_numbers(pairs), (TILES, 8, 4, SIXTEENS, 2, 2, BLOCKS, 2))
    if WGMMA:
        values = tl.permute(values, (0, 4, 1, 6, 3, 5, 2, 7))
    else:
        values = tl.permute(values, (0, 4, 1, 6, 3, 2, 5, 7))
    return tl.reshape(values, (TILES * 16, BLOCKS * SIXTEENS * 16))


@triton.jit
def _numbers(pairs):
    """Words [...] -> BF16 [..., 2]: the lower half of each first."""
    return tl.join(pairs, pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def inputs_in_order(COUNT: tl.constexpr, WGMMA: tl.constexpr):
    """[COUNT]: inputs of a tile, or of half of it, in the order in which they are multiplied.

    Triton's operands of wgmma hold what packing gives a thread; those of mma.sync, in the same
    place, four neighbours: there the tokens are read in the order of the weights.
    """
    place = tl.arange(0, COUNT)
    if WGMMA:
        return place
    each = place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
    return tl.max_contiguous(tl.multiple_of(each, 2), 2)


@triton.jit
def finished(total):
    """A product's sums, for which a program waits: each `tl.dot` of a weight needs it that adds to
    sums and ends a loop's iteration.

    Triton leaves such a product under way while the next iteration begins, which unpacks weights
    into the registers that wgmma may still be reading. Sums that something reads are waited for.
    """
    if ASSEMBLY:
        total = tl.inline_asm_elementwise(
            "mov.f32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1
        )
    return total


@triton.jit
def scaled_pair(numbers, scales):
    """Two BF16 numbers of a word times those of another: what assembly does with fma."""
    product = _float(numbers << 16) * _float(scales << 16)
    second = _float(numbers & -65536) * _float(scales & -65536)
    return ((product.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (
        second.to(tl.int32, bitcast=True) & -65536
    )


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)
