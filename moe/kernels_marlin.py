"""The routed experts with four-bit matrices by the Marlin kernels of SGLang (W4A16).

`reference.py` is the definition. The products are Marlin's, in an order of sums that is fixed; it
rounds them to BF16, so that gate and up, and the outputs of an expert, are rounded once more than
by the Triton kernels. Factors of experts' rows stay apart and in fp32: those of w13 multiply before
the activation, that of w2 goes into the token's weight.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from sglang_dsv4.backends import multiprocessors
from sglang_dsv4.dequant import MXFP4_GROUP
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.moe.kernels_triton import scaled_swiglu
from sglang_dsv4.moe.kernels_triton_experts import Choices, add_choices

# Rows of a block of one expert, and how full the blocks are on average before they grow.
_BLOCK_ROWS, _FULL = (8, 16, 32, 48, 64), 0.9
# What Marlin wants for a factor of 1 with E4M3 scales that it has multiplied by 2^7: exponents of
# E2M1 (bias 1) are read as BF16's (bias 127).
_FACTOR_OF_ONE = 2.0 ** (126 - 7)
_LARGEST_E4M3 = 0x7E  # as a byte; above are NaN and what has a sign
_THREAD_BLOCKS = 4  # of a multiprocessor, at most: each has a lock in the workspace


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
    Both as `pack` leaves them, all experts, and x in BF16.
    """
    if not (w13.packed and w2.packed):
        raise ValueError("w13 and w2 must be packed: call pack on each, once, after loading")
    if x.dtype is not torch.bfloat16:
        raise ValueError(f"Marlin multiplies BF16, found {x.dtype}: take another provider")
    (tokens, top_k), (expert_count, hidden, width) = experts.shape, w2.shape
    if total not in (None, expert_count):
        raise ValueError(f"w2 holds {expert_count} of {total} experts: take another provider")
    result = torch.empty(tokens, hidden, dtype=torch.float32, device=x.device)
    pairs = tokens * top_k
    if pairs == 0:
        return result.zero_() if base is None else result.copy_(base)
    full = (rows for rows in _BLOCK_ROWS if pairs / expert_count / rows < _FULL)
    rows = next(full, _BLOCK_ROWS[-1])
    align = _functions()["moe_align_block_size"]
    order = align(experts.int(), rows, expert_count, return_inactive_prefix_count=True)
    gate_up = torch.empty(pairs, 2 * width, dtype=x.dtype, device=x.device)
    _multiply(x.contiguous(), w13, gate_up, order, weights, rows, top_k)
    activated = scaled_swiglu(gate_up, experts, w13.factors, limit=limit)
    outputs = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    _multiply(activated, w2, outputs, order, weights, rows, 1)
    if _is_nvfp4(w2):  # in MXFP4 factors are 1
        weights = weights * w2.factors.view(-1)[experts]
    add_choices(outputs, weights.contiguous(), result, base, Choices(experts, expert_count))
    return result


def pack(weight: FP4Matrices) -> None:
    """Put a loaded weight in the order that Marlin reads, in place, one matrix after the other.

    Raises ValueError for scales that Marlin would take for others.
    """
    experts, rows, columns = weight.shape
    if weight.packed:
        raise ValueError("the weight is packed already")
    if _is_nvfp4(weight) and int(weight.scales.max()) > _LARGEST_E4M3:
        raise ValueError(
            "Marlin takes no negative scales: set SGLANG_DSV4_OPS=routed_experts_fp4=triton"
        )
    functions = _functions()
    nothing = torch.empty(0, dtype=torch.int32, device=weight.codes.device)
    scale_dtype, process = torch.float8_e4m3fn, functions["nvfp4_marlin_process_scales"]
    if not _is_nvfp4(weight):
        scale_dtype, process = torch.float8_e8m0fnu, functions["mxfp4_marlin_process_scales"]
    for codes, scales in zip(weight.codes, weight.scales, strict=True):
        packed = functions["gptq_marlin_repack"](
            b_q_weight=codes.view(torch.int32).T.contiguous(),
            perm=nothing,
            size_k=columns,
            size_n=rows,
            num_bits=4,
        )
        values = scales.view(scale_dtype).to(torch.bfloat16).T.contiguous()
        values = functions["marlin_permute_scales"](values, columns, rows, weight.group)
        codes.copy_(packed.view(torch.uint8).view(codes.shape))
        scales.copy_(process(values).contiguous().view(torch.uint8).view(scales.shape))
    weight.packed = True


def _multiply(
    x: torch.Tensor,
    weight: FP4Matrices,
    out: torch.Tensor,
    order: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    rows: int,
    pairs_per_row: int,
) -> None:
    """out[pair] = matrix of the pair's expert @ x[pair // pairs_per_row], but for its factors."""
    experts, outputs, inputs = weight.shape
    scaled, factors = torch.float8_e8m0fnu, None
    if _is_nvfp4(weight):
        scaled, factors = torch.float8_e4m3fn, _factors_of_one(experts, x.device)
    functions = _functions()
    functions["moe_wna16_marlin_gemm"](
        x,
        out,
        weight.codes.view(torch.int32).view(experts, inputs // 16, 2 * outputs),
        None,
        weight.scales.view(scaled).view(experts, weight.scales.shape[2], outputs),
        factors,
        None,
        None,
        None,
        _locks(x.device),
        *order,
        weights,
        moe_block_size=rows,
        top_k=pairs_per_row,
        mul_topk_weights=False,
        is_ep=False,
        b_q_type=functions["scalar_types"].float4_e2m1f,
        size_m=x.shape[0],
        size_n=outputs,
        size_k=inputs,
        use_atomic_add=False,  # sums in the order of arrival
        use_fp32_reduce=True,
        expert_ids_are_sorted=True,
        has_inactive_prefix_count=True,
    )


def _is_nvfp4(weight: FP4Matrices) -> bool:
    """By shapes alone."""
    return weight.scales.shape[2] * MXFP4_GROUP != weight.codes.shape[2] * 2


@cache
def _functions() -> Mapping[str, Any]:
    """SGLang's, imported where they are needed: that takes seconds."""
    from sglang_dsv4 import host

    return host.marlin_kernels()


@cache
def _factors_of_one(experts: int, device: torch.device) -> torch.Tensor:
    return torch.full((experts,), _FACTOR_OF_ONE, dtype=torch.bfloat16, device=device)


@cache
def _locks(device: torch.device) -> torch.Tensor:
    """Zeros, as the kernels leave them, too."""
    return torch.zeros(multiprocessors() * _THREAD_BLOCKS, dtype=torch.int32, device=device)
