"""Quantised weights as numbers: one function per format, exact, in plain PyTorch.

A weight is the product of a code, the scale of its block and, in NVFP4, one scale of the whole
tensor. Codes times block scales are exact in FP32, so at most one rounding remains: that of the
last factor. Scales of activations have no part in a weight.

Formats: E2M1, E4M3 and UE8M0 of the OCP Microscaling specification 1.0; FP8 in blocks of 128x128
and MXFP4 as DeepSeek-V4 is released; NVFP4 as ModelOpt and as compressed-tensors write it.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

FP8_BLOCK = 128  # rows, and columns, that share a scale
MXFP4_GROUP = 32  # consecutive inputs of a row that share a scale
NVFP4_GROUP = 16

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign

_BYTES = (torch.uint8, torch.int8)
_E4M3 = torch.float8_e4m3fn
_E8M0 = torch.float8_e8m0fnu
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


# ------------------------------------------------------------------------- what a format demands


def check_fp8(weight: Tensor, scale: Tensor) -> None:
    """Raises ValueError unless the two make a weight for `fp8`, or [E, ...] stacks of such."""
    *stack, rows, columns = _matrix("FP8 weight", weight, (_E4M3,))
    blocks = [-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)]
    _require("FP8 scale of 128x128 blocks", scale, (_E8M0, *_BYTES, *_FLOATS), [*stack, *blocks])


def check_mxfp4(weight: Tensor, scale: Tensor) -> None:
    """Raises ValueError unless the two make a weight for `mxfp4`, or [E, ...] stacks of such."""
    _check_fp4("MXFP4", weight, scale, (_E8M0, *_BYTES), MXFP4_GROUP)


def check_nvfp4(weight: Tensor, scale: Tensor, global_scale: Tensor) -> None:
    """Raises ValueError unless the three make a weight for `nvfp4`, or stacks with one factor."""
    _check_fp4("NVFP4", weight, scale, (_E4M3, *_BYTES), NVFP4_GROUP)
    if global_scale.dtype is not torch.float32 or global_scale.numel() != 1:
        has = _described(global_scale)
        raise ValueError(f"NVFP4 global scale: needs float32, 1 number; has {has}")


def _check_fp4(
    kind: str, weight: Tensor, scale: Tensor, scale_dtypes: Sequence[torch.dtype], group: int
) -> None:
    *stack, rows, half = _matrix(f"{kind} weight", weight, _BYTES)
    if 2 * half % group:
        raise ValueError(
            f"{kind} weight: needs a multiple of {group} inputs, two in a byte;"
            f" has {2 * half} in {half} bytes a row"
        )
    what = f"{kind} scale of groups of {group}"
    _require(what, scale, scale_dtypes, [*stack, rows, 2 * half // group])


def _matrix(what: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> Sequence[int]:
    if tensor.ndim not in (2, 3) or not tensor.numel():
        raise ValueError(f"{what}: needs 2 dimensions, or 3 in a stack; has {_described(tensor)}")
    _require(what, tensor, dtypes, tensor.shape)
    return tensor.shape


def _require(
    what: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int]
) -> None:
    if tensor.dtype in dtypes and list(tensor.shape) == list(shape) and tensor.is_contiguous():
        return
    allowed = " or ".join(map(_dtype_name, dtypes))
    raise ValueError(f"{what}: needs {allowed} {list(shape)}, contiguous; has {_described(tensor)}")


def _described(tensor: Tensor) -> str:
    strided = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{_dtype_name(tensor.dtype)} {list(tensor.shape)}{strided}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------ the values


def fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [N, K] E4M3, scale [⌈N/128⌉, ⌈K/128⌉] -> [N, K] fp32.

    scale: UE8M0, maybe in uint8 or int8, or a float dtype; it multiplies, whatever its name says
    (weight_scale_inv). Raises ValueError for anything else, saying what is needed and what is had.
    """
    check_fp8(weight, scale)
    wide = fp8_scales(scale).repeat_interleave(FP8_BLOCK, dim=1)[:, : weight.shape[1]]
    values = _e4m3(weight)
    for block in range(wide.shape[0]):
        values[block * FP8_BLOCK : (block + 1) * FP8_BLOCK].mul_(wide[block])
    return values


def fp8_scales(scale: Tensor) -> Tensor:
    """The scales of FP8 blocks as `fp8` takes them -> fp32."""
    return scale.float() if scale.dtype in _FLOATS else _powers_of_two(scale)


def mxfp4(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [N, K/2] bytes, scale [N, K/32] UE8M0 -> [N, K] fp32.

    Two E2M1 codes in a byte, the even input in the lower half. uint8 and int8 will do for both.
    Raises ValueError for anything else, saying what is needed and what is had.
    """
    check_mxfp4(weight, scale)
    return _scaled_groups(weight, _powers_of_two(scale))


def nvfp4(weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """weight [N, K/2] bytes, scale [N, K/16] E4M3, global_scale one fp32 -> [N, K] fp32.

    As ModelOpt stores it: code times scale times global scale (weight_scale_2). Containers and
    errors as in `mxfp4`.
    """
    check_nvfp4(weight, scale, global_scale)
    return _scaled_groups(weight, _e4m3(scale)).mul_(global_scale.reshape(()))


def nvfp4_reciprocal(weight: Tensor, scale: Tensor, reciprocal: Tensor) -> Tensor:
    """weight [N, K/2] bytes, scale [N, K/16] E4M3, reciprocal one fp32 -> [N, K] fp32.

    As compressed-tensors stores it: code times scale divided by weight_global_scale. Containers
    and errors as in `mxfp4`.
    """
    check_nvfp4(weight, scale, reciprocal)
    return _scaled_groups(weight, _e4m3(scale)).div_(reciprocal.reshape(()))


def _powers_of_two(scale: Tensor) -> Tensor:
    """Byte b -> 2^(b - 127), 255 -> NaN."""
    return _looked_up(scale, _every_byte(_E8M0, scale.device))


def _e4m3(codes: Tensor) -> Tensor:
    return _looked_up(codes, _every_byte(_E4M3, codes.device))


def _scaled_groups(weight: Tensor, factors: Tensor) -> Tensor:
    """Codes [N, K/2] times the factor [N, K/group] of their group -> [N, K] fp32."""
    rows, groups = factors.shape
    # Each pair of numbers looked up as one element of 8 bytes: five times as fast on a CPU.
    values = _looked_up(weight, _every_pair(weight.device)).view(torch.float32)
    return values.view(rows, groups, -1).mul_(factors[..., None]).view(rows, -1)


@cache
def _every_byte(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256] fp32: what each byte means in a dtype of one byte."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(dtype).float()


@cache
def _every_pair(device: torch.device) -> Tensor:
    """[256]: the two E2M1 numbers in each byte, fp32, seen as one element of 8 bytes."""
    # By arithmetic and not from E2M1: a captured step may not copy from the host.
    byte = torch.arange(256, dtype=torch.int32, device=device)
    code = torch.stack([byte & 15, byte >> 4], dim=1)
    exponent, mantissa = code >> 1 & 3, code & 1
    doubled = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    size = doubled.float() / 2
    return torch.where(code < 8, size, -size).view(torch.float64).view(-1)


def _looked_up(codes: Tensor, table: Tensor) -> Tensor:
    """The entry of `table` [256] for each byte of `codes`, in their shape."""
    index = codes.view(torch.uint8).reshape(-1).int()
    return table.index_select(0, index).view(codes.shape)
