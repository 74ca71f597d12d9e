"""The routed experts as Triton kernels: products of tokens grouped by expert.

Source: the DeepSeek-V4 paper, section 2.1; `reference.py` is the definition. Sums are fp32; the
activation between the two matrices of an expert is rounded to the tokens' dtype. Sums have a fixed
order, so that two calls on equal tensors of one shape agree bit for bit. Grids depend on shapes
alone.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel
from sglang_dsv4.moe.kernels_triton import _least_power, _swiglu

# Up to so many (token, choice) pairs, each program finds its own rows among all pairs, which saves
# the launch of a kernel that sorts them.
_MAX_SCANNED_PAIRS = 256

# At most so many numbers of the pairs' outputs exist at once (128 MiB).
_OUTPUT_ELEMENTS = 1 << 25


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    limit: float,
    base: torch.Tensor | None = None,
    first: int = 0,
    total: int | None = None,
) -> torch.Tensor:
    """The weighted sum, for every token, of its experts' outputs.

    x       [T, D] float: the tokens.
    weights [T, k] fp32 and experts [T, k] int64: as a router returned them.
    w13     [E, 2 * I, D] float: gate rows, then up rows, of each expert.
    w2      [E, D, I] float: each expert's output projection.
    limit   see swiglu.
    base    [T, D] fp32: added to the sum, last.
    first   and total: w13 and w2 hold the experts first..first+E-1 of so many, and the others add
            nothing; None: they hold all.
    Returns [T, D] fp32. A token's result depends on no other token's values.
    """
    if not x.dtype == w13.dtype == w2.dtype:
        raise ValueError(f"x, w13 and w2 must share a dtype: {x.dtype}, {w13.dtype}, {w2.dtype}")
    matrices = _Dense(w13), _Dense(w2)
    return weighted_sum(x, weights, experts, *matrices, limit, base, first, total)


class Grouped(Protocol):
    """Matrices [E, N, K] of whatever kind, and how they are multiplied."""

    @property
    def shape(self) -> tuple[int, ...]:
        """E, N, K."""

    def rows(self, chosen: slice) -> "Grouped":
        """Some rows of each."""

    def tiles(self, average: float, element_size: int) -> "Tiles":
        """average: pairs of an expert; element_size: bytes of a token's number."""

    def multiply(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        blocks: "Blocks",
        tiles: "Tiles",
        pairs_per_row: int = 1,
        limit: float | None = None,
    ) -> None:
        """out[pair] = matrix of the pair's expert @ x[pair // pairs_per_row].

        With a limit, matrices are twice as high as out is wide: gate rows, then up rows, for
        swiglu.
        """


def weighted_sum(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: Grouped,
    w2: Grouped,
    limit: float,
    base: torch.Tensor | None,
    first: int,
    total: int | None,
) -> torch.Tensor:
    """routed_experts for matrices of any kind."""
    (tokens, top_k), (held, hidden, width) = experts.shape, w2.shape
    choices = Choices(experts.contiguous(), held, None if total in (None, held) else first)
    result = torch.empty(tokens, hidden, dtype=torch.float32, device=x.device)
    pairs = tokens * top_k
    if pairs == 0:
        return result.zero_() if base is None else result.copy_(base)
    tiles = w13.tiles(pairs / (total or held), x.element_size())
    blocks = _find_blocks(choices, tiles)
    activated = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    w13.multiply(x.contiguous(), activated, blocks, tiles, top_k, limit)
    step = max(_OUTPUT_ELEMENTS // pairs // 128, 1) * 128
    for begin in range(0, hidden, step):
        columns = slice(begin, begin + step)
        outputs = result.new_empty(pairs, min(step, hidden - begin))
        w2.rows(columns).multiply(activated, outputs, blocks, tiles)
        part = None if base is None else base[:, columns]
        add_choices(outputs, weights.contiguous(), result[:, columns], part, choices)
    return result


@dataclass(frozen=True)
class Choices:
    """Of each token: experts [T, k]. held: so many there are matrices of.

    first: the number of the first of these, where there are others too, for which no program
    computes or reads an output; None where there are none.
    """

    experts: torch.Tensor
    held: int
    first: int | None = None


@dataclass(frozen=True)
class Tiles:
    """Tile of a grouped product: rows are pairs, columns are of the output; and how it is run.

    depth: inputs at a time, 0 where the order of the weights decides that. registers: of a thread
    at most, None for as many as the compiler likes.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    depth: int = 0
    registers: int | None = None


@dataclass(frozen=True)
class Blocks:
    """Where a program finds the rows of its block: at most `tiles.rows` pairs of one expert.

    order   [pairs]: where `starts` is None, the pairs' experts (pair p is choice p % k of token
            p // k), and block p is led by pair p; else the pairs, sorted by expert.
    starts  [held] int32: the place in `order` of each expert's first pair, and where there are
            other experts than those held, [held + 1]: also the place behind them.
    count   at most so many blocks are not empty.
    choices what was sorted.
    """

    order: torch.Tensor
    starts: torch.Tensor | None
    count: int
    choices: Choices

    @property
    def scanned(self) -> int:
        """Range of the search that each program does, 0 for none. Few variants, for compiling."""
        if self.starts is not None:
            return 0
        if self.choices.experts.shape[0] == 1:  # every pair is a block of its own
            return 1
        return 64 if self.count <= 64 else _MAX_SCANNED_PAIRS


def _find_blocks(choices: Choices, tiles: Tiles) -> Blocks:
    experts, pairs = choices.experts, choices.experts.numel()
    if pairs <= _MAX_SCANNED_PAIRS and tiles.rows <= 16:
        return Blocks(experts, None, pairs, choices)
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    ends = choices.held + (choices.first is not None)
    starts = torch.empty(ends, dtype=torch.int32, device=experts.device)
    _sort_pairs_kernel[(ends,)](experts, order, starts, pairs, choices.first, BLOCK=1024)
    # Each expert in use leaves at most `rows - 1` rows of its last block empty.
    count = (pairs + min(pairs, choices.held) * (tiles.rows - 1)) // tiles.rows
    return Blocks(order, starts, count, choices)


class _Dense:
    """Matrices [E, N, K] of any strides."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.shape = weight, weight.shape

    def rows(self, chosen: slice) -> "_Dense":
        return _Dense(self.weight[:, chosen])

    @staticmethod
    def tiles(average: float, element_size: int) -> Tiles:
        """Rows by the average number of pairs of an expert, all within 99 KiB of shared memory.

        With few rows the weights are what is read: small tiles make many programs, each with
        several loads under way. fp32 has no exact product on tensor cores, so its tiles are small.
        """
        if element_size > 2:
            return Tiles(rows=16, columns=32, depth=64, warps=4, stages=3)
        if average <= 8:
            return Tiles(rows=16, columns=64, depth=128, warps=4, stages=3)
        if average <= 24:
            return Tiles(rows=32, columns=128, depth=64, warps=4, stages=4)
        if average <= 96:
            return Tiles(rows=64, columns=128, depth=64, warps=4, stages=3)
        return Tiles(rows=128, columns=128, depth=64, warps=8, stages=3)

    def multiply(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        blocks: Blocks,
        tiles: Tiles,
        pairs_per_row: int = 1,
        limit: float | None = None,
    ) -> None:
        gated = limit is not None
        pairs, width = out.shape
        columns = tiles.columns // 2 if gated else tiles.columns
        _grouped_product_kernel[(blocks.count * triton.cdiv(width, columns),)](
            x,
            self.weight,
            out,
            blocks.order,
            blocks.starts,
            pairs,
            width,
            x.shape[1],
            *self.weight.stride(),
            limit if gated else 0.0,
            blocks.choices.first,
            EXPERTS=blocks.choices.held,
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


def add_choices(
    outputs: torch.Tensor,
    weights: torch.Tensor,
    result: torch.Tensor,
    base: torch.Tensor | None,
    choices: Choices,
) -> None:
    """result[t] = base[t] + (sum over c of weights[t, c] * outputs[t * k + c], in this order, over
    choices that are held)."""
    assert base is None or (base.shape, base.dtype) == (result.shape, torch.float32)
    assert base is None or base.stride(1) == 1
    tokens, top_k = weights.shape
    block = 512
    blocks = triton.cdiv(result.shape[1], block)
    _add_choices_kernel[(tokens * blocks,)](
        outputs,
        weights,
        result,
        base,
        result.shape[1],
        result.stride(0),
        0 if base is None else base.stride(0),
        blocks,
        *((None,) * 3 if choices.first is None else (choices.experts, choices.first, choices.held)),
        TOP_K=top_k,
        BLOCK=block,
    )


# ---- routed experts ----


@pdl_kernel(do_not_specialize=["pairs", "first_held"])
def _sort_pairs_kernel(experts, order, starts, pairs, first_held, BLOCK: tl.constexpr):
    """One expert a program: counts the pairs that go before its own, then lists these in order.

    first_held: of Choices; those before it go first, and nobody looks there.
    """
    after_previous()
    expert = tl.program_id(0)
    if first_held is not None:
        expert += first_held
    each = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(experts + first + each, mask=first + each < pairs, other=expert)
        lower += (chosen < expert).to(tl.int32)
    place = tl.sum(lower, 0)
    tl.store(starts + tl.program_id(0), place)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(experts + first + each, mask=first + each < pairs, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, first + each, mask=mine > 0)
        place += tl.sum(mine, 0)


@triton.jit
def scanned_block(
    experts,
    pairs,
    leader,
    first_held,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The block that pair `leader` leads, if it does: the place of its expert among those held, its
    pairs [BLOCK_M], their number.

    Every BLOCK_M-th pair of an expert leads a block.
    """
    expert = tl.load(experts + leader)
    if first_held is None:
        place = expert
    else:
        place = expert - first_held
        held = (place >= 0) & (place < EXPERTS)
    if PAIRS == 1:
        alone = tl.full((BLOCK_M,), leader, tl.int32)
        if first_held is None:
            return place, alone, 1
        else:
            return place, alone, held.to(tl.int32)
    every = tl.arange(0, PAIRS)
    mine = tl.load(experts + every, mask=every < pairs, other=-1) == expert
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    first = tl.sum((mine & (every < leader)).to(tl.int32), 0)
    count = tl.minimum(tl.sum(mine.to(tl.int32), 0) - first, BLOCK_M)
    if first_held is not None:
        count = tl.where(held, count, 0)
    wanted = first + tl.arange(0, BLOCK_M)
    found = mine[None, :] & (rank[None, :] == wanted[:, None])
    pair = tl.sum(tl.where(found, every[None, :], 0), 1)
    return place, pair, tl.where(first % BLOCK_M == 0, count, 0)


@triton.jit
def sorted_block(
    order, starts, pairs, block, first_held, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Block number `block` of the sorted pairs: as `scanned_block`."""
    ENDS: tl.constexpr = EXPERTS if first_held is None else EXPERTS + 1  # how long starts is
    every = tl.arange(0, _least_power(EXPERTS))
    start = tl.load(starts + every, mask=every < EXPERTS, other=pairs)
    end = tl.load(starts + every + 1, mask=every + 1 < ENDS, other=pairs)
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


@pdl_kernel(do_not_specialize=["pairs", "first_held"])
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
    first_held,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of pairs of one expert, one tile of columns; see Grouped.multiply and Blocks.

    Rows beyond a block's pairs compute token 0 and are not stored. Neighbouring programs share
    their rows, and blocks of one expert follow each other, so that its weights are read once.
    """
    after_previous()
    tiles = tl.cdiv(width, BLOCK_N)
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


@pdl_kernel(do_not_specialize=["blocks", "first_held", "held"])
def _add_choices_kernel(
    outputs,
    weights,
    result,
    base,
    width,
    result_stride,
    base_stride,
    blocks,
    experts,
    first_held,
    held,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of one token."""
    after_previous()
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        if experts is None:
            output = tl.load(outputs + pair * width + column, mask=inside, other=0.0)
            total += tl.load(weights + pair) * output
        else:  # outputs of other experts were never written
            place = tl.load(experts + pair) - first_held
            computed = (place >= 0) & (place < held)
            output = tl.load(outputs + pair * width + column, mask=inside & computed, other=0.0)
            total += tl.load(weights + pair, mask=computed, other=0.0) * output
    if base is not None:
        total += tl.load(base + token * base_stride + column, mask=inside, other=0.0)
    tl.store(result + token * result_stride + column, total, mask=inside)
