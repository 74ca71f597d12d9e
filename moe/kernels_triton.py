"""The mixture of experts as Triton kernels: both routers and the gated activation.

Source: the DeepSeek-V4 paper, section 2.1; `reference.py` is the definition. Arithmetic is fp32
throughout. Sums have a fixed order, so that two calls on equal tensors of one shape agree bit for
bit. Grids depend on shapes alone.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel

# Keeps the weights of a token finite when all its scores underflow to zero.
_SCORE_FLOOR = tl.constexpr(1e-20)
_LEAST_INT32 = tl.constexpr(-(2**31))
_LARGEST_INT32 = tl.constexpr(2**31 - 1)


def route_scored(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts with the largest biased score; weigh them by the score without bias.

    logits [T, E] fp32: the gate's output.
    bias   [E] fp32: added to the scores for the choice only.
    top_k  experts a token. Of equal experts the lower id wins.
    scale  sum of a token's weights.
    Returns weights [T, top_k] fp32 and experts [T, top_k] int64, best first.
    """
    tokens, expert_count = logits.shape
    weights, experts = _empty_routes(tokens, top_k, logits.device)
    if tokens > 0:
        _route_scored_kernel[(tokens,)](
            logits,
            logits.stride(0),
            bias.contiguous(),
            weights,
            experts,
            expert_count,
            scale,
            TOP_K=top_k,
            BLOCK_E=triton.next_power_of_2(expert_count),
            num_warps=1,  # a warp finds its largest key in one instruction
        )
    return weights, experts


def route_hashed(
    logits: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look the experts up by token id; weigh them by their score.

    logits    [T, E] fp32: the gate's output.
    token_ids [T] int: each in 0..V-1.
    tid2eid   [V, k] int64: the experts of each token id.
    scale     sum of a token's weights.
    Returns weights [T, k] fp32 and experts [T, k] int64, in the table's order.
    """
    tokens, top_k = logits.shape[0], tid2eid.shape[1]
    weights, experts = _empty_routes(tokens, top_k, logits.device)
    if tokens > 0:
        _route_hashed_kernel[(triton.cdiv(tokens, 16),)](
            logits,
            logits.stride(0),
            token_ids.contiguous(),
            tid2eid.contiguous(),
            weights,
            experts,
            tokens,
            scale,
            TOP_K=top_k,
            BLOCK_T=16,
            num_warps=1,
        )
    return weights, experts


def swiglu(gate_up: torch.Tensor, *, limit: float) -> torch.Tensor:
    """silu(gate) * up, with gate clamped from above and up from both sides.

    gate_up [..., 2 * I] float: the gate half, then the up half.
    limit   bound of the clamps; infinity means none.
    Returns [..., I] in gate_up's dtype, computed in fp32 and rounded once.
    """
    width, block = gate_up.shape[-1] // 2, 1024
    rows = gate_up.reshape(-1, 2 * width)
    result = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(width, block)
    if rows.shape[0] > 0:
        _swiglu_kernel[(rows.shape[0] * blocks,)](
            rows, rows.stride(0), result, width, blocks, limit, BLOCK=block
        )
    return result


def scaled_swiglu(
    gate_up: torch.Tensor, experts: torch.Tensor, factors: torch.Tensor, *, limit: float
) -> torch.Tensor:
    """swiglu of products that lack the factors of their matrices.

    gate_up [T * k, 2 * I] float, experts [T, k] int: of each pair. factors [E, 2] fp32: of an
    expert's gate and of its up. Returns [T * k, I] in gate_up's dtype, rounded once.
    """
    pairs, width, block = gate_up.shape[0], gate_up.shape[1] // 2, 1024
    result = torch.empty(pairs, width, dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(width, block)
    _scaled_swiglu_kernel[(pairs * blocks,)](
        gate_up, experts.contiguous(), factors, result, width, blocks, limit, BLOCK=block
    )
    return result


def _empty_routes(
    tokens: int, top_k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(tokens, top_k, dtype=torch.float32, device=device),
        torch.empty(tokens, top_k, dtype=torch.int64, device=device),
    )


# ---- routers ----


@triton.constexpr_function
def _least_power(least):
    """The smallest power of two that is at least this. Kernels cannot call
    `triton.next_power_of_2`, in whose place SGLang puts a plain function."""
    return 1 << (least - 1).bit_length()


@triton.jit
def _score(logit):
    """sqrt(ln(1 + exp(logit))).

    ln(1 + p) = 2 artanh(p / (2 + p)) as its series, for p <= 1: a logarithm of the rounded 1 + p
    would lose the small scores.
    """
    power = tl.exp(-tl.abs(logit))
    z = power / (2.0 + power)
    square = z * z
    series = square * (1 / 13) + 1 / 11
    series = series * square + 1 / 9
    series = series * square + 1 / 7
    series = series * square + 1 / 5
    series = series * square + 1 / 3
    series = series * square + 1.0
    return tl.sqrt_rn(tl.maximum(logit, 0.0) + 2.0 * z * series)


@triton.jit
def _write_routes(
    logits,
    logits_stride,
    chosen,
    weights,
    experts,
    token,
    inside,
    scale,
    TOP_K: tl.constexpr,
):
    """The scores of chosen [n, slots] for token [n], normalised, and chosen; as far as inside."""
    slot = tl.arange(0, chosen.shape[1])
    logit = tl.load(logits + token[:, None] * logits_stride + chosen, mask=inside, other=0.0)
    score = tl.where(inside, _score(logit), 0.0)
    factor = tl.div_rn(scale, tl.sum(score, 1) + _SCORE_FLOOR)
    place = token[:, None] * TOP_K + slot[None, :]
    tl.store(weights + place, score * factor[:, None], mask=inside)
    tl.store(experts + place, chosen, mask=inside)


@pdl_kernel
def _route_scored_kernel(
    logits,
    logits_stride,
    bias,
    weights,
    experts,
    expert_count,
    scale,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One token a program."""
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < expert_count
    biased = _score(tl.load(logits + token * logits_stride + expert, mask=inside, other=0.0))
    biased += tl.load(bias + expert, mask=inside, other=0.0)
    # Keys are ordered as the numbers are; NaN comes first, so that it shows and is still an expert.
    bits = biased.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & _LARGEST_INT32)
    key = tl.where(biased != biased, _LARGEST_INT32, key)
    key = tl.where(inside, key, _LEAST_INT32)
    slot = tl.arange(0, _least_power(TOP_K))
    chosen = tl.zeros(slot.shape, tl.int32)
    for choice in tl.static_range(TOP_K):
        best = tl.min(tl.where(key == tl.max(key, 0), expert, BLOCK_E), 0)
        chosen = tl.where(slot == choice, best, chosen)
        key = tl.where(expert == best, _LEAST_INT32, key)
    first = tl.zeros((1,), tl.int64) + token
    there = (slot < TOP_K)[None, :]
    _write_routes(
        logits, logits_stride, chosen[None, :], weights, experts, first, there, scale, TOP_K
    )


@pdl_kernel(do_not_specialize=["tokens"])
def _route_hashed_kernel(
    logits,
    logits_stride,
    token_ids,
    tid2eid,
    weights,
    experts,
    tokens,
    scale,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_T tokens a program."""
    after_previous()
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    slot = tl.arange(0, _least_power(TOP_K))
    inside = (token < tokens)[:, None] & (slot < TOP_K)[None, :]
    token_id = tl.load(token_ids + token, mask=token < tokens, other=0).to(tl.int64)
    chosen = tl.load(tid2eid + token_id[:, None] * TOP_K + slot[None, :], mask=inside, other=0)
    _write_routes(logits, logits_stride, chosen, weights, experts, token, inside, scale, TOP_K)


# ---- the gated activation ----


@triton.jit
def _swiglu(gate, up, limit):
    """Of fp32; comparisons and not minimum and maximum, which would drop a NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * tl.sigmoid(gate) * up


@pdl_kernel
def _swiglu_kernel(gate_up, row_stride, result, width, blocks, limit, BLOCK: tl.constexpr):
    after_previous()
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + width + column, mask=inside, other=0.0)
    activated = _swiglu(gate.to(tl.float32), up.to(tl.float32), limit)
    tl.store(result + row * width + column, activated, mask=inside)


@pdl_kernel
def _scaled_swiglu_kernel(
    gate_up, experts, factors, result, width, blocks, limit, BLOCK: tl.constexpr
):
    """A block of columns of one pair: gate and up times their factors, then the activation."""
    after_previous()
    program = tl.program_id(0)
    pair = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    own = factors + tl.load(experts + pair) * 2
    row = gate_up + pair * 2 * width + column
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32) * tl.load(own)
    up = tl.load(row + width, mask=inside, other=0.0).to(tl.float32) * tl.load(own + 1)
    tl.store(result + pair * width + column, _swiglu(gate, up, limit), mask=inside)
