"""Every attention op in plain PyTorch, fp32: the definition that kernels are tested against.

Fixed shapes, device data only, stores predicated by row 0: the same calls run inside a graph.
"""

import torch

from sglang_dsv4.attention.metadata import (
    CsaPlan,
    EntryTable,
    HcaPlan,
    IndexList,
    entry_rows,
    index_list,
)
from sglang_dsv4.config import LayerKind

# Rows gathered at a time: 8 MiB of fp32, which a CPU's cache holds; larger blocks are slower.
ATTENTION_BLOCK_ROWS = 1 << 12
SCORE_BLOCK_ROWS = 1 << 14
FP4_BLOCK = 32  # channels that share one power-of-two scale on the FP4 grid
FP4_MAX = 6.0


def query_norm_rope(
    q: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Unweighted RMS norm of each head, then rotation of its last channels.

    q [T, heads, 512]; positions [T] int64; frequencies [32] float32. Returns q's shape and dtype.
    """
    normed = _rms(q.float(), eps)
    return _rotate(normed, positions.unsqueeze(1), frequencies).to(q.dtype)


def kv_norm_rope_store(
    kv: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    rows: torch.Tensor,
    cache: torch.Tensor,
    *,
    eps: float,
) -> None:
    """Norm and rotate each token's shared key/value vector, and store it as a window row.

    kv [T, 512]; weight [512]; positions [T] int64; frequencies [32] float32; rows [T] int64,
    0 = do not store; cache [rows, 512], written in place in its own dtype.
    """
    normed = _rms(kv.float(), eps) * weight.float()
    _store(cache, rows, _rotate(normed, positions, frequencies))


def compress_csa(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    weight: torch.Tensor,
    frequencies: torch.Tensor,
    plan: CsaPlan,
    rows: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    *,
    eps: float,
    fp4: bool = False,
) -> None:
    """Pool 4 tokens of the own window (series B) and 4 of the one before (series A) into an entry.

    kv, gate [T, 2w] float32: a token's values and gate scores, series A then B. ape [4, 2w]
    float32: bias by position in the window. weight [w]: norm. frequencies [32] float32.
    rows [T] int64: row of `cache` [rows, w] for the entry that the token closes, 0 = none.
    state [ring rows, 4w] float32: values and biased scores of earlier tokens; written in place.
    fp4: put the finished entry on the indexer's grid.

    Entry 0 has no previous window: its missing slots weigh exactly nothing.
    """
    width = weight.shape[0]
    ratio = ape.shape[0]
    scores = gate + ape[plan.position[:, -1] % ratio]
    new_rows = torch.cat([kv, scores], dim=-1)  # [T, 4w]
    is_new = plan.is_new.unsqueeze(-1)
    pooled = []
    for series, slots in ((0, slice(0, ratio)), (1, slice(ratio, 2 * ratio))):
        for half in (0, 2):  # values, then scores
            channels = slice((half + series) * width, (half + series + 1) * width)
            fresh = new_rows[:, channels][plan.token[:, slots]]
            kept = state[:, channels][plan.ring[:, slots]]
            pooled.append(torch.where(is_new[:, slots], fresh, kept))
    values = torch.cat([pooled[0], pooled[2]], dim=1)  # [T, 8, w]
    weights = torch.cat([pooled[1], pooled[3]], dim=1)
    missing = (plan.position < 0).unsqueeze(-1)
    weights = weights.masked_fill(missing, float("-inf")).softmax(dim=1)
    entry = (weights * values.masked_fill(missing, 0)).sum(dim=1)
    start = plan.position[:, -1] // ratio * ratio
    entry = _rotate(_rms(entry, eps) * weight.float(), start, frequencies)
    _store(cache, rows, fp4_grid(entry) if fp4 else entry)
    _store(state, plan.ring_store, new_rows)


def compress_hca(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    weight: torch.Tensor,
    frequencies: torch.Tensor,
    plan: HcaPlan,
    positions: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    *,
    eps: float,
) -> None:
    """Fold tokens into the running softmax of their 128-window; store the entry when it closes.

    kv, gate [T, 512] float32; ape [128, 512] float32; weight [512]; frequencies [32] float32;
    positions [T] int64. state [request slots, 3 * 512] float32: maximum, sum, weighted sum;
    read where a window goes on, replaced by the last window of each request.
    cache [rows, 512]: receives the entries at plan.row (0 = none).
    """
    width, ratio = weight.shape[0], ape.shape[0]
    scores = gate + ape[positions % ratio]
    carried = plan.carried.unsqueeze(1)
    peak, total, weighted = state[plan.carried_slot].split(width, dim=1)
    peak = peak.masked_fill(~carried, float("-inf"))
    index = plan.segment.unsqueeze(1).expand_as(scores)
    new_peak = peak.scatter_reduce(0, index, scores, "amax")
    # A segment without tokens keeps peak -inf: exp(-inf - -inf) would be NaN.
    finite_peak = new_peak.masked_fill(new_peak == float("-inf"), 0)
    decay = (peak - finite_peak).exp()
    weights = (scores - finite_peak[plan.segment]).exp()
    total = (total.masked_fill(~carried, 0) * decay).index_add(0, plan.segment, weights)
    weighted = (weighted.masked_fill(~carried, 0) * decay).index_add(0, plan.segment, weights * kv)
    entry = (weighted / total)[plan.segment]
    entry = _rms(entry, eps) * weight.float()
    _store(cache, plan.row, _rotate(entry, positions // ratio * ratio, frequencies))
    state[plan.request_slots] = torch.cat([new_peak, total, weighted], dim=1)[plan.last_segment]


def index_query(
    q: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    *,
    fp4: bool,
) -> torch.Tensor:
    """Rotate index queries by position, then (fp4) put them on the indexer's grid.

    q [T, index heads, 128]; positions [T] int64; frequencies [32] float32.
    Returns q's shape and dtype.
    """
    rotated = _rotate(q.float(), positions.unsqueeze(1), frequencies)
    return (fp4_grid(rotated) if fp4 else rotated).to(q.dtype)


def select_entries(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    table: EntryTable,
    *,
    top_k: int,
    nan_scores: torch.Tensor,
) -> torch.Tensor:
    """The lightning indexer: the top_k best of the entries that each token may see.

    score(t, e) = sum over heads of head_weights[t, h] * relu(q[t, h] . keys[e]).

    q [T, index heads, 128]; head_weights [T, index heads] float32 (signed, scales included);
    keys [entries, 128]. Returns [T, top_k] int64: entry numbers within the request, best first, -1
    past the visible ones. Ties go to the lower number; a NaN score counts as the lowest, and how
    many of the visible entries' scores are NaN is added to nan_scores [1] int64.
    """
    width = table.width
    entry = torch.arange(width, device=q.device)
    chosen = q.new_full((q.shape[0], top_k), -1, dtype=torch.int64)
    block = max(1, SCORE_BLOCK_ROWS // width)
    for first in range(0, q.shape[0], block):
        part = slice(first, first + block)
        request = table.request[part]
        stored = entry_rows(
            table.page_table, request, entry.expand(request.shape[0], width), LayerKind.CSA.value
        )
        products = torch.einsum("thd,ted->the", q[part].float(), keys[stored].float()).relu()
        scores = torch.einsum("the,th->te", products, head_weights[part])
        visible = entry < table.visible[part].unsqueeze(1)
        nan_scores.add_((scores.isnan() & visible).sum())
        scores = torch.nan_to_num(scores, nan=float("-inf"))
        scores = scores.masked_fill(~visible, float("-inf"))
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        seen = visible.gather(1, order)
        chosen[part, : order.shape[1]] = order.masked_fill(~seen, -1)
    return chosen


def csa_index_list(selected: torch.Tensor, window: IndexList, table: EntryTable) -> IndexList:
    """Rows that a CSA layer attends to: the window, then the selected entries.

    selected [T, k] int64 from `select_entries`, -1 padding last. Returns rows [T, window + k].
    """
    rows = entry_rows(
        table.page_table, table.request, selected.clamp(min=0), LayerKind.CSA.value
    )
    return index_list(window, table.first_row + rows, (selected >= 0).sum(dim=1))


def sparse_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    keys: IndexList,
    sink: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of every head over a token's rows, which are both keys and values; a sink
    logit per head takes part in the denominator only; then the rotation of the values is undone.

    q [T, heads, 512]; cache [rows, 512]; keys: rows [T, K], lengths [T]; sink [heads] float32;
    positions [T] int64; frequencies [32] float32. Returns q's shape and dtype. A token without
    rows gets zeros. Rows past the length are never read into the result.
    """
    columns = torch.arange(keys.rows.shape[1], device=q.device)
    limit = torch.finfo(torch.float32).max
    sink = sink.float().clamp(-limit, limit)  # below, inf - inf would be NaN
    out = torch.empty_like(q)
    block = max(1, ATTENTION_BLOCK_ROWS // keys.rows.shape[1])
    for first in range(0, q.shape[0], block):
        part = slice(first, first + block)
        beyond = columns >= keys.lengths[part].unsqueeze(1)  # [t, K]
        rows = cache[keys.rows[part]].float().masked_fill_(beyond.unsqueeze(-1), 0)
        logits = torch.einsum("thd,tkd->thk", q[part].float(), rows) * scale
        logits = logits.masked_fill(beyond.unsqueeze(1), float("-inf"))
        peak = torch.maximum(logits.amax(dim=-1), sink)
        weights = (logits - peak.unsqueeze(-1)).exp()
        denominator = weights.sum(dim=-1) + (sink - peak).exp()
        mixed = torch.einsum("thk,tkd->thd", weights, rows) / denominator.unsqueeze(-1)
        turned = _rotate(mixed, -positions[part].unsqueeze(1), frequencies)
        out[part] = turned.to(q.dtype)
    return out


def fp4_grid(vectors: torch.Tensor) -> torch.Tensor:
    """The grid that index queries and keys were trained on.

    Hadamard transform over the last axis (a power of two, Sylvester order, orthonormal), then
    blocks of 32 channels share a scale 2^ceil(log2(amax / 6)) and values round to the nearest E2M1,
    ties to the even code. vectors [..., n] float32; returns the same shape, dequantised.
    """
    vectors = vectors @ _hadamard(vectors.shape[-1], vectors.device)
    blocks = vectors.unflatten(-1, (-1, FP4_BLOCK))
    # frexp gives amax / 6 = mantissa * 2^exponent with mantissa in [0.5, 1): the exact ceiling of
    # log2 is the exponent, less one where the mantissa is exactly a half.
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=-1, keepdim=True) / FP4_MAX)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-126, 127)
    scale = ((exponent + 127) << 23).view(torch.float32)  # 2^exponent, exact
    magnitude = (blocks / scale).abs()
    # E2M1 steps by 0.5 below 2, by 1 below 4, by 2 up to 6; rounding half to even in units of the
    # step is rounding half to the even code.
    step = 0.5 * (1 + (magnitude >= 2).float()) * (1 + (magnitude >= 4).float())
    return ((magnitude / step).round() * step * scale).copysign(blocks).flatten(-2)


def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)], dim=0
        )
    return matrix * size**-0.5


def _rms(vectors: torch.Tensor, eps: float) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().mean(dim=-1, keepdim=True) + eps)


def _rotate(
    vectors: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
) -> torch.Tensor:
    """Rotate the last channels, in interleaved pairs, by position * frequency (float32)."""
    angles = positions.unsqueeze(-1).float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    plain = vectors.shape[-1] - 2 * frequencies.shape[0]
    even, odd = vectors[..., plain::2], vectors[..., plain + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([vectors[..., :plain], turned], dim=-1)


def _store(cache: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """cache[rows] = values, where row 0 means nowhere: it only ever receives zeros."""
    cache[rows] = values.masked_fill((rows == 0).unsqueeze(1), 0).to(cache.dtype)
