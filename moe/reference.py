"""The mixture of experts in plain PyTorch: both routers, the routed experts, the gated activation.

Source: the DeepSeek-V4 paper, section 2.1. Arithmetic is fp32. The arguments' shapes fix all others
and nothing is read back to the host, so every call can be captured in a CUDA graph: which expert a
token goes to is decided, and acted on, on the device. Any number of tokens is valid, also none.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from sglang_dsv4 import fp4
from sglang_dsv4.fp4 import FP4Matrices

# At most so many weight elements are gathered at once (4 MiB in fp32), or one expert's if that is
# more: few launches for small experts, bounded memory for large ones.
_GATHERED_ELEMENTS = 1 << 20

# Rows of one expert that are multiplied together, at most: more wastes work on padding rows.
_MAX_BLOCK_ROWS = 64

# Keeps the weights of a token finite when all its scores underflow to zero.
_SCORE_FLOOR = 1e-20


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
    scores = _sqrtsoftplus(logits)
    # A stable sort and not topk, which leaves open who wins a tie.
    experts = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    return _weights(scores, experts, scale), experts


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
    experts = tid2eid.index_select(0, token_ids)
    return _weights(_sqrtsoftplus(logits), experts, scale), experts


def swiglu(gate_up: torch.Tensor, *, limit: float) -> torch.Tensor:
    """silu(gate) * up, with gate clamped from above and up from both sides.

    gate_up [..., 2 * I] float: the gate half, then the up half.
    limit   bound of the clamps; infinity means none.
    Returns [..., I] in gate_up's dtype, computed in fp32 and rounded once.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = functional.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
    return activated.to(gate_up.dtype)


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
    gather13, gather2 = partial(_gather, w13), partial(_gather, w2)
    return _experts(x, weights, experts, (gather13, gather2), w13.shape, limit, base, first, total)


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
    """
    gather13, gather2 = partial(_gather_fp4, w13), partial(_gather_fp4, w2)
    return _experts(x, weights, experts, (gather13, gather2), w13.shape, limit, base, first, total)


_Gather = Callable[[torch.Tensor], torch.Tensor]


def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gathers: tuple[_Gather, _Gather],
    shape13: tuple[int, ...],
    limit: float,
    base: torch.Tensor | None,
    first: int,
    total: int | None,
) -> torch.Tensor:
    """routed_experts, where gathers make fp32 copies of some experts' matrices, w13's and w2's."""
    (count, top_k), hidden = experts.shape, x.shape[1]
    (expert_count, wide), (gather13, gather2) = shape13[:2], gathers
    elsewhere = None
    if total not in (None, expert_count):
        experts = experts - first
        elsewhere = (experts < 0) | (experts >= expert_count)
        experts = experts.masked_fill(elsewhere, 0)  # computed, and not used
    blocks, block_rows = _block_grid(count * top_k, expert_count)
    block_expert, block_pairs, pair_row = _permutation(experts, expert_count, blocks, block_rows)
    rows = x.float().index_select(0, block_pairs // top_k).view(blocks, block_rows, hidden)
    outputs = rows.new_empty(blocks, block_rows, hidden)
    step = max(1, _GATHERED_ELEMENTS // (wide * hidden))
    for block in range(0, blocks, step):
        chunk = slice(block, block + step)
        gate_up = torch.bmm(rows[chunk], gather13(block_expert[chunk]).mT)
        activated = swiglu(gate_up, limit=limit)
        torch.bmm(activated, gather2(block_expert[chunk]).mT, out=outputs[chunk])
    of_token = outputs.view(-1, hidden).index_select(0, pair_row).view(count, top_k, hidden)
    if elsewhere is not None:
        of_token = of_token.masked_fill(elsewhere.unsqueeze(2), 0)
        weights = weights.masked_fill(elsewhere, 0)
    result = torch.bmm(weights.unsqueeze(1), of_token).squeeze(1)
    return result if base is None else base + result


def _sqrtsoftplus(logits: torch.Tensor) -> torch.Tensor:
    """The router's score function: sqrt(ln(1 + exp(logit)))."""
    return functional.softplus(logits).sqrt()


def _weights(scores: torch.Tensor, experts: torch.Tensor, scale: float) -> torch.Tensor:
    """The chosen experts' scores, normalised to the sum `scale`: [T, E], [T, k] -> [T, k]."""
    chosen = scores.gather(1, experts)
    return chosen * (scale / (chosen.sum(dim=1, keepdim=True) + _SCORE_FLOOR))


def _gather(weight: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """fp32 copies of some experts' matrices: [E, n, m], [blocks] -> [blocks, n, m]."""
    return weight.index_select(0, experts).float()


def _gather_fp4(weight: FP4Matrices, experts: torch.Tensor) -> torch.Tensor:
    """fp32 values of some experts' matrices: [blocks] -> [blocks, n, m]."""
    return fp4.dense_values(
        weight.codes.index_select(0, experts),
        weight.scales.index_select(0, experts),
        weight.factors.index_select(0, experts),
        weight.group,
    )


def _block_grid(pairs: int, experts: int) -> tuple[int, int]:
    """Number of blocks and rows per block that hold any assignment of the pairs to the experts.

    Each expert in use leaves at most `rows - 1` rows of its last block empty.
    """
    rows = 1
    while rows < _MAX_BLOCK_ROWS and rows * experts < pairs:
        rows *= 2
    return (pairs + min(pairs, experts) * (rows - 1)) // rows, rows


def _permutation(
    experts: torch.Tensor, expert_count: int, blocks: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the (token, choice) pairs into blocks of one expert each.

    Pair p is choice p % k of token p // k. Returns, all int64:
      block_expert [blocks]: the expert of each block.
      block_pairs  [blocks * block_rows]: the pair in each row. Rows left over repeat some pair;
                   nobody reads their outputs.
      pair_row     [T * k]: the row in which each pair is computed.
    """
    every_expert = torch.arange(expert_count, device=experts.device)
    every_block = torch.arange(blocks, device=experts.device)
    every_row = torch.arange(block_rows, device=experts.device)
    every_pair = torch.arange(experts.numel(), device=experts.device)
    sorted_experts, order = experts.flatten().sort(stable=True)
    pair_starts = torch.searchsorted(sorted_experts, every_expert)
    pair_ends = torch.searchsorted(sorted_experts, every_expert, right=True)
    block_counts = (pair_ends - pair_starts + (block_rows - 1)) // block_rows
    block_ends = block_counts.cumsum(0)
    # How far the padding before an expert's first row moves its rows.
    shift = (block_ends - block_counts) * block_rows - pair_starts
    block_expert = torch.searchsorted(block_ends, every_block, right=True)
    block_expert = block_expert.clamp(max=expert_count - 1)  # blocks that stay empty
    block_sources = every_block * block_rows - shift.index_select(0, block_expert)
    sources = (block_sources.unsqueeze(1) + every_row).flatten()
    block_pairs = order.index_select(0, sources.clamp(max=experts.numel() - 1))
    rows_in_order = every_pair + shift.index_select(0, sorted_experts)
    pair_row = torch.empty_like(order).scatter(0, order, rows_in_order)
    return block_expert, block_pairs, pair_row
