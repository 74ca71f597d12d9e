"""The routed experts with four-bit matrices by the kernels of humming 0.1.12 (W4A16).

`reference.py` is the definition. A product is humming's "indexed" one: it reads tokens and writes
pairs where lists of blocks say, and its values are exact in BF16. It rounds its sums to BF16, so
that gate and up, and the outputs of an expert, are rounded once more than by the Triton kernels.
Factors of experts' rows stay apart and in fp32: those of w13 multiply before the activation, that
of w2 goes into the token's weight.

Tiles are those of humming's policy for this GPU, but for one thing: no "stream-K". With it, several
programs round parts of a sum to BF16 and add them up, from the fourth on in the order of arrival;
so two runs could differ, and a token's result would depend on where other tokens go.
"""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sglang_dsv4.dequant import MXFP4_GROUP
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.moe.kernels_triton import scaled_swiglu
from sglang_dsv4.moe.kernels_triton_experts import Choices, add_choices

# Every tile of its policies divides a matrix of such multiples; SGLang pads to them.
_ROWS, _INPUTS = 256, 128
_COMPUTE = json.dumps({"gemm_type": "indexed"})
_SCALES = {torch.float8_e8m0fnu: "float8e8m0", torch.float8_e4m3fn: "float8e4m3"}
_TO_OTHERS = "set SGLANG_DSV4_OPS=routed_experts_fp4=triton"


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
        raise ValueError(f"humming multiplies BF16 here, found {x.dtype}: take another provider")
    (tokens, top_k), (expert_count, hidden, _) = experts.shape, w2.shape
    if total not in (None, expert_count):
        raise ValueError(f"w2 holds {expert_count} of {total} experts: take another provider")
    result = torch.empty(tokens, hidden, dtype=torch.float32, device=x.device)
    pairs = tokens * top_k
    if pairs == 0:
        return result.zero_() if base is None else result.copy_(base)
    kernels13, kernels2 = _kernels_of(w13), _kernels_of(w2)
    chosen, rows = experts.int(), kernels13.block_rows(pairs)
    blocks = _align()(chosen, rows, expert_count)
    gate_up = _multiply(x.contiguous(), w13, kernels13, blocks, pairs)
    activated = scaled_swiglu(gate_up, experts, w13.factors, limit=limit)
    if kernels2.block_rows(pairs) != rows:
        blocks = _align()(chosen, kernels2.block_rows(pairs), expert_count)
    outputs = _multiply(activated, w2, kernels2, blocks, pairs)
    if w2.group != MXFP4_GROUP:  # there factors are 1
        weights = weights * w2.factors.view(-1)[experts]
    add_choices(outputs, weights.contiguous(), result, base, Choices(experts, expert_count))
    return result


def pack(weight: FP4Matrices) -> None:
    """Put a loaded weight in the order that humming reads, in place, one matrix after the other;
    and compile its kernels for every number of tokens, so that no step has to.

    Raises ValueError for shapes and scales that humming cannot multiply.
    """
    _, rows, columns = weight.shape
    if weight.packed:
        raise ValueError("the weight is packed already")
    if rows % _ROWS or columns % _INPUTS:
        raise ValueError(
            f"humming multiplies multiples of {_ROWS} rows and {_INPUTS} inputs, found"
            f" {rows} x {columns}: {_TO_OTHERS}"
        )
    # What is not a number would be read as one.
    nvfp4 = weight.group != MXFP4_GROUP
    unsigned, nan = (0x7F, 0x7F) if nvfp4 else (0xFF, 0xFF)
    if any(bool(((scales & unsigned) == nan).any()) for scales in weight.scales):
        raise ValueError("a scale is not a number: the checkpoint is damaged")
    kernels = _kernels_of(weight)
    transform = _humming("transform").transform_humming_tensors
    for codes, scales in zip(weight.codes, weight.scales, strict=True):
        plain = {"weight": codes.view(torch.int32), "weight_scale": scales}
        packed = transform(kernels.layer, plain, already_padded=True)
        codes.copy_(packed["weight"].view(torch.uint8).view(codes.shape))
        scales.copy_(packed["weight_scale"].view(scales.shape))
    kernels.compile()
    weight.packed = True


@dataclass(frozen=True)
class _Kernels:
    """humming's for matrices of one shape and format.

    layer: its description of these. scale: dtype of scales. tuning: JSON of [(least, most, tile),
    ...], where a tile is for more than least and up to most pairs. rows: (most, rows of a tile), in
    the same order.
    """

    layer: Any
    scale: torch.dtype
    tuning: str
    rows: tuple[tuple[int, int], ...]

    def block_rows(self, pairs: int) -> int:
        return next(rows for most, rows in self.rows if pairs <= most)

    def compile(self) -> None:
        kernel = _humming("kernel.humming").HummingKernel
        kernel.prepare_kernels(self.layer.to_str(), _COMPUTE, self.tuning)


def _kernels_of(weight: FP4Matrices) -> _Kernels:
    return _kernels(*weight.shape, weight.group)


@cache
def _kernels(experts: int, rows: int, columns: int, group: int) -> _Kernels:
    scale = torch.float8_e8m0fnu if group == MXFP4_GROUP else torch.float8_e4m3fn
    layer = _humming("config").LayerConfig(
        shape_n=rows,
        shape_k=columns,
        num_experts=experts,
        a_dtype="bfloat16",
        b_dtype="float4e2m1",
        c_dtype="bfloat16",
        bs_dtype=_SCALES[scale],
        weight_scale_group_size=group,
    )
    policy = [
        (least, most, {**tile, "use_stream_k": False})
        for least, most, tile in _humming("tune").get_heuristics_config(layer, gemm_type="indexed")
    ]
    block_rows = tuple((most, tile["block_shape"][0]) for _, most, tile in policy)
    return _Kernels(layer, scale, json.dumps(policy), block_rows)


def _multiply(
    x: torch.Tensor,
    weight: FP4Matrices,
    kernels: _Kernels,
    blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pairs: int,
) -> torch.Tensor:
    """[pairs, N]: matrix of the pair's expert @ x[pair // (pairs / rows of x)], but for factors."""
    (experts, outputs, inputs), groups = weight.shape, weight.scales.shape[2]
    order, expert_of_block, ordered = blocks
    out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
    _humming("ops").humming_gemm(
        layer_config=kernels.layer.to_str(),
        compute_config=_COMPUTE,
        tuning_config=kernels.tuning,
        inputs=x,
        weight=weight.codes.view(torch.int32).view(experts, inputs // 16, 2 * outputs),
        weight_scale=weight.scales.view(kernels.scale).view(experts, groups, outputs),
        outputs=out,
        sorted_ids=order,
        expert_ids=expert_of_block,
        num_tokens_padded=ordered,
        top_k=pairs // x.shape[0],
        valid_shape_m=pairs,
    )
    return out


@cache
def _align() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """SGLang's, imported where it is needed: that takes seconds."""
    from sglang_dsv4 import host

    return host.expert_blocks()


@cache
def _humming(module: str) -> Any:
    return importlib.import_module(f"humming.{module}")
