"""Values of a checkpoint that are wrong: NaN, infinite, not an expert's number. Each is refused."""

import math

import torch
from torch import Tensor

from sglang_dsv4 import dequant
from sglang_dsv4.checkpoint import CheckpointError
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import Part, Stored, TensorFormat
from sglang_dsv4.tensor_table import Kept, Slot

DAMAGED = "the checkpoint is damaged, download it again"
_LARGEST_E4M3 = 448.0


def check_global_scales(stored: Stored) -> None:
    for part in (Part.GLOBAL, Part.RECIPROCAL):
        if part not in stored.parts:
            continue
        low, high = (bound.item() for bound in torch.aminmax(stored.tensor(part).float()))
        if not 0 < low <= high < math.inf:
            name = stored.parts[part].name
            raise CheckpointError(
                f"{name}: expected a positive number, found {low}"
                f"{'' if low == high else f' to {high}'}: {DAMAGED}"
            )


def may_overflow(scales: Tensor, factor: Tensor, scale_dtype: torch.dtype) -> bool:
    """Whether codes times scales [...] uint8 times their factor may be NaN or infinite, judging by
    the largest scale; a NaN is above all others."""
    if scale_dtype is torch.float8_e4m3fn:  # its upper bit is a sign
        scales = scales & 0x7F
    largest = scales.max().view(scale_dtype).float() * max(dequant.E2M1) * factor
    return not math.isfinite(largest.item())


def may_overflow_fp8(codes: Tensor, scales: Tensor) -> bool:
    """Whether E4M3 codes [N, K] uint8 times fp32 scales may be NaN or beyond BF16."""
    largest = scales.abs().max() * _LARGEST_E4M3
    has_nan = bool(((codes & 0x7F) == 0x7F).any())
    return has_nan or not largest.item() <= torch.finfo(torch.bfloat16).max


def check_factor(stored: Stored, factor: Tensor) -> None:
    if not math.isfinite(factor.item()):  # the reciprocal of next to nothing; all codes are 0
        raise CheckpointError(f"{stored.name}: its {Part.RECIPROCAL.value} is too small: {DAMAGED}")


def check_values(
    stored: Stored, slot: Slot, region: Tensor, number: int, config: DSV4Config
) -> None:
    """Refuses what was copied to `region`, the `number`-th of what `stored` holds."""
    # Unlike isfinite, aminmax needs no memory of its own, and it is ten times as fast on a CPU.
    low, high = (bound.item() for bound in torch.aminmax(region))
    experts = config.n_routed_experts
    if slot.row.kept is Kept.INT64:
        if low < 0 or high >= experts:
            raise CheckpointError(
                f"{stored.name}: expected experts 0 to {experts - 1}, found {low} to {high}"
            )
        return
    if math.isfinite(low) and math.isfinite(high):
        return
    expert = "" if slot.expert is None else f" (expert {slot.expert})"
    for name, values in stored.numbers():
        if stored.format is TensorFormat.DENSE:
            values = values.reshape(-1, *slot.shape)[number]
        bad = values.numel() - int(values.isfinite().sum())
        if bad:
            raise CheckpointError(
                f"{name}{expert}: {bad} of {values.numel()} values are NaN or infinite: {DAMAGED}"
            )
    raise CheckpointError(f"{stored.name}{expert}: values too large for the model's {region.dtype}")
