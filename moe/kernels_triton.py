"""The mixture of experts as Triton kernels: both routers, the routed experts, the gated activation.

Source: the DeepSeek-V4 paper, section 2.1; `reference.py` is the definition. Arithmetic is fp32
throughout, but the activation between the two matrices of an expert is rounded to their dtype. Sums
have a fixed order, so that two calls on equal tensors of one shape agree bit for bit. Grids depend
on shapes alone.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Keeps the weights of a token finite when all its scores underflow to zero.
_SCORE_FLOOR = tl.constexpr(1e-20)
_LEAST_INT32 = tl.constexpr(-(2**31))
_LARGEST_INT32 = tl.constexpr(2**31 - 1)

# Up to so many (token, choice) pairs, each program finds its own rows among all pairs, which saves
# the launch of a kernel that sorts them.
_MAX_SCANNED_PAIRS = 256

# At most so many numbers of the pairs' outputs exist at once (128 MiB).
_OUTPUT_ELEMENTS = 1 << 25


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
            logits.contiguous(),
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
            logits.contiguous(),
            token_ids.contiguous(),
            tid2eid.contiguous(),
            weights,
            experts,
            tokens,
            logits.shape[1],
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
    rows = gate_up.reshape(-1, 2 * width).contiguous()
    result = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(width, block)
    if rows.shape[0] > 0:
        _swiglu_kernel[(rows.shape[0] * blocks,)](rows, result, width, blocks, limit, BLOCK=block)
    return result


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    limit: float,
) -> torch.Tensor:
    """The weighted sum, for every token, of its experts' outputs.

    x       [T, D] float: the tokens.
    weights [T, k] fp32 and experts [T, k] int64 in 0..E-1: as a router returned them.
    w13     [E, 2 * I, D] float: gate rows, then up rows, of each expert.
    w2      [E, D, I] float: each expert's output projection.
    limit   see swiglu.
    Returns [T, D] fp32. A token's result depends on no other token's values.
    """
    if not x.dtype == w13.dtype == w2.dtype:
        raise ValueError(f"x, w13 and w2 must share a dtype: {x.dtype}, {w13.dtype}, {w2.dtype}")
    (tokens, top_k), (expert_count, hidden, width) = experts.shape, w2.shape
    result = torch.empty(tokens, hidden, dtype=torch.float32, device=x.device)
    pairs = tokens * top_k
    if pairs == 0:
        return result.zero_()
    tiles = _tiles(pairs, expert_count, x.element_size())
    blocks = _find_blocks(experts, expert_count, tiles)
    activated = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    _multiply(x.contiguous(), w13, activated, blocks, tiles, top_k, limit)
    step = max(_OUTPUT_ELEMENTS // pairs // 128, 1) * 128
    for first in range(0, hidden, step):
        columns = slice(first, first + step)
        outputs = result.new_empty(pairs, min(step, hidden - first))
        _multiply(activated, w2[:, columns], outputs, blocks, tiles)
        _add_choices(outputs, weights.contiguous(), result[:, columns])
    return result


@dataclass(frozen=True)
class _Tiles:
    """Tile of a grouped product: rows are pairs, columns are of the output; and how it is run."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def _tiles(pairs: int, experts: int, element_size: int) -> _Tiles:
    """Rows by the average number of pairs of an expert, all within 99 KiB of shared memory.

    With few rows the weights are what is read: small tiles make many programs, each with several
    loads under way. fp32 has no exact product on tensor cores, so its tiles stay small.
    """
    if element_size > 2:
        return _Tiles(rows=16, columns=32, depth=64, warps=4, stages=3)
    average = pairs / experts
    if average <= 8:
        return _Tiles(rows=16, columns=64, depth=128, warps=4, stages=3)
    if average <= 24:
        return _Tiles(rows=32, columns=128, depth=64, warps=4, stages=4)
    if average <= 96:
        return _Tiles(rows=64, columns=128, depth=64, warps=4, stages=3)
    return _Tiles(rows=128, columns=128, depth=64, warps=8, stages=3)


@dataclass(frozen=True)
class _Blocks:
    """Where a program finds the rows of its block: at most `tiles.rows` pairs of one expert.

    order  [pairs]: where `starts` is None, the pairs' experts (pair p is choice p % k of token
           p // k), and block p is led by pair p; else the pairs, sorted by expert.
    starts [experts] int32: the place in `order` of each expert's first pair.
    count  at most so many blocks are not empty.
    """

    order: torch.Tensor
    starts: torch.Tensor | None
    count: int
    experts: int

    @property
    def scanned(self) -> int:
        """Range of the search that each program does, 0 for none. Few variants, for compiling."""
        if self.starts is not None:
            return 0
        return 64 if self.count <= 64 else _MAX_SCANNED_PAIRS


def _find_blocks(experts: torch.Tensor, expert_count: int, tiles: _Tiles) -> _Blocks:
    pairs = experts.numel()
    chosen = experts.contiguous()
    if pairs <= _MAX_SCANNED_PAIRS and tiles.rows == 16:
        return _Blocks(chosen, None, pairs, expert_count)
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(expert_count, dtype=torch.int32, device=experts.device)
    _sort_pairs_kernel[(expert_count,)](chosen, order, starts, pairs, BLOCK=1024)
    # Each expert in use leaves at most `rows - 1` rows of its last block empty.
    count = (pairs + min(pairs, expert_count) * (tiles.rows - 1)) // tiles.rows
    return _Blocks(order, starts, count, expert_count)


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    blocks: _Blocks,
    tiles: _Tiles,
    pairs_per_row: int = 1,
    limit: float | None = None,
) -> None:
    """out[pair] = weight[expert of the pair] @ x[pair // pairs_per_row].

    With a limit, weight is twice as high as out is wide: gate rows, then up rows, for swiglu.
    """
    gated = limit is not None
    pairs, width = out.shape
    columns = tiles.columns // 2 if gated else tiles.columns
    _grouped_product_kernel[(blocks.count * triton.cdiv(width, columns),)](
        x,
        weight,
        out,
        blocks.order,
        blocks.starts,
        pairs,
        width,
        x.shape[1],
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        limit if gated else 0.0,
        EXPERTS=blocks.experts,
        PAIRS=blocks.scanned,
        PAIRS_PER_ROW=pairs_per_row,
        GATED=gated,
        WHOLE=x.shape[1] % tiles.depth == 0,
        BLOCK_M=tiles.rows,
        BLOCK_N=columns,
        BLOCK_K=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _add_choices(outputs: torch.Tensor, weights: torch.Tensor, result: torch.Tensor) -> None:
    """result[t] = sum over c of weights[t, c] * outputs[t * k + c], in this order."""
    tokens, top_k = weights.shape
    block = 512
    blocks = triton.cdiv(result.shape[1], block)
    _add_choices_kernel[(tokens * blocks,)](
        outputs,
        weights,
        result,
        result.shape[1],
        result.stride(0),
        blocks,
        TOP_K=top_k,
        BLOCK=block,
    )


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
    chosen,
    weights,
    experts,
    token,
    inside,
    expert_count,
    scale,
    TOP_K: tl.constexpr,
):
    """The scores of chosen [n, slots] for token [n], normalised, and chosen; as far as inside."""
    slot = tl.arange(0, chosen.shape[1])
    logit = tl.load(logits + token[:, None] * expert_count + chosen, mask=inside, other=0.0)
    score = tl.where(inside, _score(logit), 0.0)
    factor = tl.div_rn(scale, tl.sum(score, 1) + _SCORE_FLOOR)
    place = token[:, None] * TOP_K + slot[None, :]
    tl.store(weights + place, score * factor[:, None], mask=inside)
    tl.store(experts + place, chosen, mask=inside)


@triton.jit
def _route_scored_kernel(
    logits,
    bias,
    weights,
    experts,
    expert_count,
    scale,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < expert_count
    biased = _score(tl.load(logits + token * expert_count + expert, mask=inside, other=0.0))
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
        logits, chosen[None, :], weights, experts, first, there, expert_count, scale, TOP_K
    )


@triton.jit(do_not_specialize=["tokens"])
def _route_hashed_kernel(
    logits,
    token_ids,
    tid2eid,
    weights,
    experts,
    tokens,
    expert_count,
    scale,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_T tokens a program."""
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    slot = tl.arange(0, _least_power(TOP_K))
    inside = (token < tokens)[:, None] & (slot < TOP_K)[None, :]
    token_id = tl.load(token_ids + token, mask=token < tokens, other=0).to(tl.int64)
    chosen = tl.load(tid2eid + token_id[:, None] * TOP_K + slot[None, :], mask=inside, other=0)
    _write_routes(logits, chosen, weights, experts, token, inside, expert_count, scale, TOP_K)


# ---- the gated activation ----


@triton.jit
def _swiglu(gate, up, limit):
    """Of fp32; comparisons and not minimum and maximum, which would drop a NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _swiglu_kernel(gate_up, result, width, blocks, limit, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=inside, other=0.0)
    activated = _swiglu(gate.to(tl.float32), up.to(tl.float32), limit)
    tl.store(result + row * width + column, activated, mask=inside)


# ---- routed experts ----


@triton.jit(do_not_specialize=["pairs"])
def _sort_pairs_kernel(experts, order, starts, pairs, BLOCK: tl.constexpr):
    """One expert a program: counts the pairs that go before its own, then lists these in order."""
    expert = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(experts + first + each, mask=first + each < pairs, other=expert)
        lower += (chosen < expert).to(tl.int32)
    place = tl.sum(lower, 0)
    tl.store(starts + expert, place)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(experts + first + each, mask=first + each < pairs, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, first + each, mask=mine > 0)
        place += tl.sum(mine, 0)


@triton.jit
def _scanned_block(experts, pairs, leader, PAIRS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The block that pair `leader` leads, if it does: expert, its pairs [BLOCK_M], their number.

    Every BLOCK_M-th pair of an expert leads a block.
    """
    every = tl.arange(0, PAIRS)
    expert = tl.load(experts + leader)
    mine = tl.load(experts + every, mask=every < pairs, other=-1) == expert
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    first = tl.sum((mine & (every < leader)).to(tl.int32), 0)
    count = tl.minimum(tl.sum(mine.to(tl.int32), 0) - first, BLOCK_M)
    wanted = first + tl.arange(0, BLOCK_M)
    found = mine[None, :] & (rank[None, :] == wanted[:, None])
    pair = tl.sum(tl.where(found, every[None, :], 0), 1)
    return expert, pair, tl.where(first % BLOCK_M == 0, count, 0)


@triton.jit
def _sorted_block(order, starts, pairs, block, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Block number `block` of the sorted pairs: expert, its pairs [BLOCK_M], their number."""
    every = tl.arange(0, _least_power(EXPERTS))
    start = tl.load(starts + every, mask=every < EXPERTS, other=pairs)
    end = tl.load(starts + every + 1, mask=every + 1 < EXPERTS, other=pairs)
    blocks = (end - start + (BLOCK_M - 1)) // BLOCK_M
    last = tl.cumsum(blocks, 0)
    expert = tl.sum((last <= block).to(tl.int32), 0)
    mine = every == expert
    skipped = (block - tl.sum(tl.where(mine, last - blocks, 0), 0)) * BLOCK_M
    first = tl.sum(tl.where(mine, start, 0), 0) + skipped
    # No expert is left for the blocks beyond the last: then all the sums are 0.
    count = tl.minimum(tl.sum(tl.where(mine, end, 0), 0) - first, BLOCK_M)
    row = tl.arange(0, BLOCK_M)
    pair = tl.load(order + first + row, mask=row < count, other=0)
    return expert, pair, count


@triton.jit(do_not_specialize=["pairs"])
def _grouped_product_kernel(
    x,
    weight,
    out,
    order,
    starts,
    pairs,
    width,
    depth,
    weight_expert,
    weight_row,
    weight_column,
    limit,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of pairs of one expert, one tile of columns; see _multiply and _Blocks.

    Rows beyond a block's pairs compute token 0 and are not stored. Neighbouring programs share
    their rows, and blocks of one expert follow each other, so that its weights are read once.
    """
    tiles = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // tiles
    if PAIRS > 0:
        expert, pair, count = _scanned_block(order, pairs, block, PAIRS, BLOCK_M)
    else:
        expert, pair, count = _sorted_block(order, starts, pairs, block, EXPERTS, BLOCK_M)
    if count <= 0:
        return
    pair = pair.to(tl.int64)
    column = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(column, width - 1)
    x_tile = x + (pair // PAIRS_PER_ROW)[:, None] * depth + k[None, :]
    weight += expert.to(tl.int64) * weight_expert
    weight_tile = weight + row[None, :] * weight_row + k[:, None] * weight_column
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ups = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, depth, BLOCK_K):
        if WHOLE:
            rows = tl.load(x_tile)
            factors = tl.load(weight_tile)
        else:
            rows = tl.load(x_tile, mask=(first + k < depth)[None, :], other=0.0)
            factors = tl.load(weight_tile, mask=(first + k < depth)[:, None], other=0.0)
        total = tl.dot(rows, factors, total, input_precision="ieee")
        if GATED:
            up_tile = weight_tile + width * weight_row
            if WHOLE:
                factors = tl.load(up_tile)
            else:
                factors = tl.load(up_tile, mask=(first + k < depth)[:, None], other=0.0)
            ups = tl.dot(rows, factors, ups, input_precision="ieee")
        x_tile += BLOCK_K
        weight_tile += BLOCK_K * weight_column
    if GATED:
        total = _swiglu(total, ups, limit)
    stored = (tl.arange(0, BLOCK_M) < count)[:, None] & (column < width)[None, :]
    tl.store(out + pair[:, None] * width + column[None, :], total, mask=stored)


@triton.jit(do_not_specialize=["blocks"])
def _add_choices_kernel(
    outputs, weights, result, width, result_stride, blocks, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of columns of one token."""
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        output = tl.load(outputs + pair * width + column, mask=inside, other=0.0)
        total += tl.load(weights + pair) * output
    tl.store(result + token * result_stride + column, total, mask=inside)
