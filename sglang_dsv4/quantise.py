"""Numbers as quantised weights: what `dequant` reads, rounded to nearest, in plain PyTorch.

Scales as the makers of each format choose them: the inference code of DeepSeek-V4 for FP8 and
MXFP4, ModelOpt for NVFP4.
"""

import torch
from torch import Tensor

from sglang_dsv4 import dequant
from sglang_dsv4.dequant import FP8_BLOCK, MXFP4_GROUP, NVFP4_GROUP

E2M1_MAX, E4M3_MAX = 6.0, 448.0
E4M3_TOP, E4M3_BOTTOM = 8, -9  # exponents of the powers of two in E4M3, subnormal ones included
SMALLEST_SCALE = 2.0**E4M3_BOTTOM  # above 0 in E4M3
CHUNK = 1 << 20  # values worked on at a time
# Halfway between neighbours of E2M1; a tie goes to the even code: the lower, or the upper one.
_ABOVE, _FROM = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


def fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [N, K] -> E4M3 [N, K] and UE8M0 [⌈N/128⌉, ⌈K/128⌉], as `dequant.fp8` takes them."""
    rows, columns = values.shape
    padding = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    padded = torch.nn.functional.pad(values.float(), padding)
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scale = _power_of_two(blocks.abs().amax(dim=(1, 3)) / E4M3_MAX)
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    codes = codes[:rows, :columns].contiguous().to(torch.float8_e4m3fn)
    return codes, scale.to(torch.float8_e8m0fnu)


def mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [N, K] -> int8 [N, K/2] and UE8M0 [N, K/32], as `dequant.mxfp4` takes them."""
    groups = values.float().unflatten(1, (-1, MXFP4_GROUP))
    scale = _power_of_two(groups.abs().amax(dim=2) / E2M1_MAX)
    codes = pack_e2m1((groups / scale[..., None]).flatten(1))
    return codes.view(torch.int8), scale.to(torch.float8_e8m0fnu)


def nvfp4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """values [N, K] -> uint8 [N, K/2], E4M3 [N, K/16] and an fp32 scalar, for `dequant.nvfp4`.

    The scale of a group is never 0; that of a group of zeros is 1, as in ModelOpt.
    """
    low, high = torch.aminmax(values)
    most = torch.maximum(-low, high).float()
    global_scale = torch.where(most == 0, 1.0, most / (E2M1_MAX * E4M3_MAX))
    # Some rows at a time: a matrix of billions needs no second and third one in FP32 beside it.
    chunks = values.split(max(1, CHUNK // values.shape[1]))
    codes, scales = zip(*(_nvfp4_rows(rows, global_scale) for rows in chunks), strict=True)
    return torch.cat(codes), torch.cat(scales), global_scale


def _nvfp4_rows(values: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    groups = values.float().unflatten(1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(dim=2)
    scale = largest / (E2M1_MAX * global_scale)
    scale = torch.where(largest == 0, 1.0, scale).clamp(SMALLEST_SCALE, E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn)
    return pack_e2m1((groups / (scale.float() * global_scale)[..., None]).flatten(1)), scale


def nvfp4_from_mxfp4(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes [N, K/2] and UE8M0 [N, K/32], as `dequant.mxfp4` takes them -> as `nvfp4`, and lossy.

    The codes stay. The factor of the whole is a power of two, so that the largest scale becomes
    2^8, the largest power of two in E4M3. The smallest is 2^-9: every block whose scale is at
    most 2^17 below the largest keeps its values exactly, and so does a block of zeros. The codes
    of the others are rounded anew for 2^-9. lossy [N, K/32] bool: where this changed a value.
    """
    codes = weight.view(torch.uint8)
    exponent = scale.view(torch.uint8).int() - 127
    empty = (codes.unflatten(1, (-1, MXFP4_GROUP // 2)) & 0x77).amax(dim=2) == 0
    top = torch.where(empty, -127, exponent).amax()
    factor = (top - E4M3_TOP).clamp(min=-126)  # 2^-126 is the smallest that is normal in FP32
    relative = torch.where(empty, 0, exponent - factor)
    lossy = torch.zeros_like(empty)
    small = relative < E4M3_BOTTOM
    if bool(small.any()):
        codes = codes.unflatten(1, (-1, MXFP4_GROUP // 2)).clone()
        codes[small], lossy[small] = _finer(codes[small], relative[small] - E4M3_BOTTOM)
        codes = codes.flatten(1)
    scales = _two_to(relative.clamp(min=E4M3_BOTTOM)).to(torch.float8_e4m3fn)
    scales = scales.repeat_interleave(MXFP4_GROUP // NVFP4_GROUP, dim=1)
    return codes, scales, _two_to(factor), lossy


def _two_to(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def _finer(codes: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [blocks, 16] bytes of their values times 2^exponent, and where those are others."""
    ones = torch.full((len(codes), 1), 127, dtype=torch.uint8, device=codes.device)
    wanted = torch.ldexp(dequant.mxfp4(codes, ones), exponent[:, None])
    rounded = pack_e2m1(wanted)
    return rounded, (dequant.mxfp4(rounded, ones) != wanted).any(dim=1)


def _power_of_two(least: Tensor) -> Tensor:
    """The smallest power of two that is at least this, and at least 2^-126."""
    fraction, exponent = torch.frexp(least.clamp(min=2.0**-126))
    return torch.ldexp(torch.ones_like(least), exponent - (fraction == 0.5).int())


def pack_e2m1(values: Tensor) -> Tensor:
    """values [N, K] -> uint8 [N, K/2]: nearest E2M1 codes, at most 6, even inputs in lower halves.

    Ties go to the code that is even, so that 0.25 becomes 0 and 0.75 becomes 1.
    """
    size = values.abs()
    codes = torch.signbit(values).to(torch.uint8) << 3
    for bound in _ABOVE:
        codes += size > bound
    for bound in _FROM:
        codes += size >= bound
    return codes[:, 0::2] | codes[:, 1::2] << 4
