"""Attention ops as Triton kernels for NVIDIA GPUs from compute capability 8.0; see reference.py.

Arithmetic is fp32; products of BF16 matrices accumulate in fp32. Nothing but shapes decides about
launches, and every length is read on the device, so all of it can be captured in a CUDA graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of kernels have no Python types)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_dsv4.attention.cache import PAGE
from sglang_dsv4.attention.metadata import EntryTable, IndexList
from sglang_dsv4.backends import compute_capability
from sglang_dsv4.config import LayerKind
from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel

WIDTH = tl.constexpr(512)  # channels of a head, and of a cache row
ROTATED = tl.constexpr(64)  # the last of them, in interleaved pairs
PAIRS = tl.constexpr(32)
PLAIN = tl.constexpr(448)

NORM_HEADS = 4  # heads per program, one a warp: they share a token's cosines
# Programs that keep an H200 busy, one per multiprocessor. More splits than that were slower.
PROGRAMS = 132
_FEW_TOKENS = 16  # with up to so many, heads are spread over programs as well
MAX_SPLITS = 32  # merging costs by the number of splits, used or not


def query_norm_rope(
    q: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """Unweighted RMS norm of each head, then rotation of its last channels.

    q [T, heads, 512]; positions [T] int64; frequencies [32] float32. Returns q's shape and dtype.
    """
    tokens, heads = q.shape[:2]
    assert q.stride(2) == 1 and frequencies.stride(0) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    blocks = triton.cdiv(heads, NORM_HEADS)
    _query_norm_rope_kernel[(tokens * blocks,)](
        q,
        q.stride(0),
        q.stride(1),
        positions,
        positions.stride(0),
        frequencies,
        out,
        heads,
        eps,
        HEADS=NORM_HEADS,
        num_warps=NORM_HEADS,
    )
    return out


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
    assert kv.stride(1) == weight.stride(0) == frequencies.stride(0) == cache.stride(1) == 1
    _kv_norm_rope_store_kernel[(kv.shape[0],)](
        kv,
        kv.stride(0),
        weight,
        positions,
        positions.stride(0),
        frequencies,
        rows,
        rows.stride(0),
        cache,
        cache.stride(0),
        eps,
        num_warps=1,
    )


def csa_index_list(selected: torch.Tensor, window: IndexList, table: EntryTable) -> IndexList:
    """Rows that a CSA layer attends to: the window, then the selected entries.

    selected [T, k] int64 from `select_entries`, -1 padding last. Returns rows [T, window + k].
    """
    tokens, chosen = selected.shape
    width = window.rows.shape[1] + chosen
    rows = torch.empty(tokens, width, dtype=torch.int64, device=selected.device)
    lengths = torch.empty(tokens, dtype=torch.int64, device=selected.device)
    _csa_index_list_kernel[(tokens,)](
        selected,
        selected.stride(0),
        selected.stride(1),
        window.rows,
        window.rows.stride(0),
        window.rows.stride(1),
        window.lengths,
        window.lengths.stride(0),
        table.request,
        table.request.stride(0),
        table.page_table,
        table.page_table.stride(0),
        table.page_table.stride(1),
        rows,
        lengths,
        window.rows.shape[1],
        chosen,
        table.first_row,
        PER_PAGE=PAGE // LayerKind.CSA.value,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return IndexList(rows, lengths)


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

    Few tokens are split over their rows, and a second kernel merges the parts; many are not.
    BF16 weights multiply BF16 rows; all else is fp32.
    """
    tokens, heads = q.shape[:2]
    assert q.dtype == cache.dtype, f"rows in {cache.dtype} for queries in {q.dtype}"
    assert q.stride(2) == cache.stride(1) == sink.stride(0) == frequencies.stride(0) == 1
    tiles = attention_tiles(tokens, heads, q.element_size(), compute_capability())
    blocks = triton.cdiv(heads, tiles.heads)
    splits = split_count(tokens * blocks, triton.cdiv(keys.rows.shape[1], tiles.rows), tiles)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts, statistics = out, out  # not used by a single split
    if splits > 1:
        shape = (tokens, heads, splits)
        parts = torch.empty(*shape, WIDTH.value, dtype=torch.float32, device=q.device)
        statistics = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    _attention_kernel[(tokens * blocks, splits)](
        q,
        q.stride(0),
        q.stride(1),
        cache,
        cache.stride(0),
        keys.rows,
        keys.rows.stride(0),
        keys.rows.stride(1),
        keys.lengths,
        keys.lengths.stride(0),
        sink,
        positions,
        positions.stride(0),
        frequencies,
        out,
        parts,
        statistics,
        heads,
        splits,
        scale,
        WHOLE=splits == 1,
        HEADS=tiles.heads,
        ROWS=tiles.rows,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        split_block = triton.next_power_of_2(splits)
        _merge_kernel[(tokens * heads,)](
            parts,
            statistics,
            sink,
            positions,
            positions.stride(0),
            frequencies,
            out,
            heads,
            splits,
            SPLIT_BLOCK=split_block,
            num_warps=max(split_block // 4, 1),  # all parts are read at once: 64 registers
        )
    return out


# ---- how large a tile, how many splits ----


@dataclass(frozen=True)
class Tiles:
    """Heads and rows that one program multiplies at a time, its warps and pipeline stages.

    resident: programs that fit on one multiprocessor.
    """

    heads: int
    rows: int
    warps: int
    stages: int
    resident: int = 1


def attention_tiles(tokens: int, heads: int, element_size: int, capability: int) -> Tiles:
    """Tiles of `sparse_attention`: as many rows as shared memory holds twice, beside the queries.

    On an H200 64 x 64 was the fastest for 64 and more heads (with Triton 3.6 and two stages), and
    16 x 64 for 8 and 16, and for any number where there are few tokens: the programs of a token
    then share its heads. Elsewhere, and where a program finishes whole tokens, it is the largest
    that fits without spilling registers in Triton 3.8. capability: 90 for 9.0.
    """
    if element_size == 4:
        return Tiles(heads=16, rows=16, warps=4, stages=1)
    small = capability >= 120 or 86 <= capability < 90  # 99 KiB
    if heads <= 16 or tokens <= _FEW_TOKENS:
        if small:
            return Tiles(16, 32, 4, 2)
        return Tiles(16, 64 if capability >= 90 else 32, 4, 2, resident=2)
    if heads <= 32:
        return Tiles(32, 32 if small else 64, 8, 2)
    if small:
        return Tiles(64, 16, 8, 2)
    if capability >= 100:
        return Tiles(32, 64, 8, 2)
    if capability < 90:
        return Tiles(64, 32, 8, 2)
    large = Tiles(64, 64, 8, 3)
    splits = split_count(tokens * triton.cdiv(heads, large.heads), MAX_SPLITS, large)
    return large if splits > 1 else Tiles(64, 32, 8, 3)


def split_count(programs: int, row_tiles: int, tiles: Tiles) -> int:
    """Over how many programs to spread the rows of a token.

    programs: there would be without splits; row_tiles: of the longest list. Lists are shorter than
    what the shape allows, so the kernel cuts by the true length and only this count is fixed.
    """
    wanted = min(PROGRAMS * tiles.resident // max(programs, 1), MAX_SPLITS)
    per_split = triton.cdiv(row_tiles, max(wanted, 1))
    return max(triton.cdiv(row_tiles, max(per_split, 1)), 1)


# ---- kernels ----


@triton.jit
def _rotate(vectors, cos, sin, ROWS: tl.constexpr):
    """Turns the pairs of [ROWS, ROTATED] by angles whose cosines and sines are [1, PAIRS]."""
    even, odd = tl.split(tl.reshape(vectors, (ROWS, PAIRS, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (ROWS, ROTATED))


@triton.jit
def _angles(position, frequencies):
    """position * frequency in fp32, as the published code multiplies: [1, PAIRS]."""
    frequency = tl.load(frequencies + tl.arange(0, PAIRS))
    return (position.to(tl.float32) * frequency)[None, :]


@pdl_kernel
def _query_norm_rope_kernel(
    q,
    q_token,
    q_head,
    positions,
    position_stride,
    frequencies,
    out,
    heads,
    eps,
    HEADS: tl.constexpr,
):
    after_previous()
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    column, rotated = tl.arange(0, WIDTH), tl.arange(0, ROTATED) + PLAIN
    exists = (head < heads)[:, None]
    is_plain = exists & (column < PLAIN)[None, :]
    source = q + token * q_token + head.to(tl.int64)[:, None] * q_head
    plain = tl.load(source + column[None, :], mask=is_plain, other=0.0).to(tl.float32)
    tail = tl.load(source + rotated[None, :], mask=exists, other=0.0).to(tl.float32)
    square = tl.sum(plain * plain, axis=1) + tl.sum(tail * tail, axis=1)
    factor = tl.rsqrt(square / WIDTH + eps)[:, None]
    angles = _angles(tl.load(positions + token * position_stride), frequencies)
    tail = _rotate(tail * factor, tl.cos(angles), tl.sin(angles), HEADS)
    target = out + (token * heads + head)[:, None] * WIDTH
    tl.store(target + column[None, :], (plain * factor).to(out.dtype.element_ty), mask=is_plain)
    tl.store(target + rotated[None, :], tail.to(out.dtype.element_ty), mask=exists)


@pdl_kernel
def _kv_norm_rope_store_kernel(
    kv,
    kv_token,
    weight,
    positions,
    position_stride,
    frequencies,
    rows,
    rows_stride,
    cache,
    cache_row,
    eps,
):
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token * rows_stride)
    column, rotated = tl.arange(0, WIDTH)[None, :], tl.arange(0, ROTATED)[None, :] + PLAIN
    is_plain = column < PLAIN
    source = kv + token * kv_token
    plain = tl.load(source + column, mask=is_plain, other=0.0).to(tl.float32)
    tail = tl.load(source + rotated).to(tl.float32)
    square = tl.sum(plain * plain, axis=1) + tl.sum(tail * tail, axis=1)
    factor = tl.rsqrt(square / WIDTH + eps)[:, None]
    plain *= factor * tl.load(weight + column, mask=is_plain, other=0.0).to(tl.float32)
    tail *= factor * tl.load(weight + rotated).to(tl.float32)
    angles = _angles(tl.load(positions + token * position_stride), frequencies)
    tail = _rotate(tail, tl.cos(angles), tl.sin(angles), 1)
    # Row 0 takes what is not to be kept, and stays zero: not even NaN may reach it.
    plain, tail = tl.where(row == 0, 0.0, plain), tl.where(row == 0, 0.0, tail)
    target = cache + row * cache_row
    tl.store(target + column, plain.to(cache.dtype.element_ty), mask=is_plain)
    tl.store(target + rotated, tail.to(cache.dtype.element_ty))


# Not specialised: each value would compile the kernel again, while requests wait.
@pdl_kernel(do_not_specialize=["page_table_request"])
def _csa_index_list_kernel(
    selected,
    selected_token,
    selected_column,
    window,
    window_token,
    window_column,
    window_lengths,
    window_length_stride,
    requests,
    request_stride,
    page_table,
    page_table_request,
    page_table_page,
    rows,
    lengths,
    window_width,
    chosen,
    first_row,
    PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    width = window_width + chosen
    split = tl.load(window_lengths + token * window_length_stride)
    request = tl.load(requests + token * request_stride)
    number = column - split  # among the selected entries
    from_window = tl.load(
        window + token * window_token + column * window_column, mask=column < split, other=0
    )
    entry = tl.load(
        selected + token * selected_token + number * selected_column,
        mask=(number >= 0) & (number < chosen),
        other=-1,
    )
    valid = entry >= 0
    pages = page_table + request * page_table_request
    page = tl.load(pages + entry // PER_PAGE * page_table_page, mask=valid, other=0)
    stored = tl.where(page == 0, 0, page * PER_PAGE + entry % PER_PAGE)
    from_entries = tl.where(valid, first_row + stored, 0)
    result = tl.where(column < split, from_window, from_entries)
    tl.store(rows + token * width + column, result, mask=column < width)
    tl.store(lengths + token, split + tl.sum(valid.to(tl.int64)))


@pdl_kernel(do_not_specialize=["rows_token", "splits"])  # for the same reason
def _attention_kernel(
    q,
    q_token,
    q_head,
    cache,
    cache_row,
    rows,
    rows_token,
    rows_column,
    lengths,
    length_stride,
    sink,
    positions,
    position_stride,
    frequencies,
    out,
    parts,
    statistics,
    heads,
    splits,
    scale,
    WHOLE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One block of heads of a token over one split of its rows.

    A whole token (one split) is finished here. Of a split, `_merge_kernel` gets the weighted sum of
    its rows, the largest logit and the sum of weights; that sum is not written without rows.
    """
    after_previous()
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    split = tl.program_id(1)
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    column, slot = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    exists = head < heads
    query = tl.load(
        q + token * q_token + head.to(tl.int64)[:, None] * q_head + column[None, :],
        mask=exists[:, None],
        other=0.0,
    )
    length = tl.load(lengths + token * length_stride).to(tl.int32)
    chunk = tl.cdiv(tl.cdiv(length, ROWS), splits) * ROWS
    first = split * chunk
    last = tl.minimum(first + chunk, length)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, WIDTH), tl.float32)
    for start in range(first, last, ROWS):
        valid = start + slot < last
        row = tl.load(rows + token * rows_token + (start + slot) * rows_column, mask=valid, other=0)
        # Past the length this is the null row, which is zero: what the list says there may be NaN.
        keys = tl.load(cache + row[:, None] * cache_row + column[None, :])
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where(valid[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        decay = tl.exp(peak - new_peak)
        weights = tl.exp(logits - new_peak[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        mixed *= decay[:, None]
        mixed = tl.dot(weights.to(keys.dtype), keys, mixed, input_precision="ieee")
        peak = new_peak
    # 64 bits for the token's place, 32 for what lies within: registers are scarce here.
    if WHOLE:
        limit = 3.4028234663852886e38
        sinks = tl.load(sink + head, mask=exists, other=0.0)
        sinks = tl.minimum(tl.maximum(sinks, -limit), limit)  # below, inf - inf would be NaN
        top = tl.maximum(peak, sinks)
        decay = tl.exp(peak - top)
        mixed *= (decay / (total * decay + tl.exp(sinks - top)))[:, None]
        target = out + token * heads * WIDTH + head[:, None] * WIDTH
        is_plain = exists[:, None] & (column < PLAIN)[None, :]
        tl.store(target + column[None, :], mixed.to(out.dtype.element_ty), mask=is_plain)
        # The rotated channels are the last of the groups of 64; adding up zeros picks them.
        group = tl.arange(0, WIDTH // ROTATED)[None, :, None]
        groups = tl.reshape(mixed, (HEADS, WIDTH // ROTATED, ROTATED))
        tail = tl.sum(tl.where(group == PLAIN // ROTATED, groups, 0.0), axis=1)
        angles = _angles(tl.load(positions + token * position_stride), frequencies)
        tail = _rotate(tail, tl.cos(angles), -tl.sin(angles), HEADS)
        rotated = tl.arange(0, ROTATED)[None, :] + PLAIN
        tl.store(target + rotated, tail.to(out.dtype.element_ty), mask=exists[:, None])
    else:
        place = token * heads * splits + split
        target = statistics + place * 2 + head * splits * 2
        tl.store(target, peak, mask=exists)
        tl.store(target + 1, total, mask=exists)
        used = exists & (first < last)
        target = parts + place * WIDTH + (head * splits)[:, None] * WIDTH
        tl.store(target + column[None, :], mixed, mask=used[:, None])


@pdl_kernel(do_not_specialize=["splits"])
def _merge_kernel(
    parts,
    statistics,
    sink,
    positions,
    position_stride,
    frequencies,
    out,
    heads,
    splits,
    SPLIT_BLOCK: tl.constexpr,
):
    """Adds up the splits of one head of a token, takes the sink in, undoes the rotation."""
    after_previous()
    place = tl.program_id(0).to(tl.int64)
    token, head = place // heads, place % heads
    split = tl.arange(0, SPLIT_BLOCK)
    known = split < splits
    at = statistics + (place * splits + split) * 2
    peaks = tl.load(at, mask=known, other=float("-inf"))
    totals = tl.load(at + 1, mask=known, other=0.0)
    limit = 3.4028234663852886e38
    sinks = tl.load(sink + head)
    sinks = tl.minimum(tl.maximum(sinks, -limit), limit)  # below, inf - inf would be NaN
    top = tl.maximum(tl.max(peaks, axis=0), sinks)
    denominator = tl.sum(totals * tl.exp(peaks - top), axis=0) + tl.exp(sinks - top)
    weights = (tl.exp(peaks - top) / denominator)[:, None]
    used = (peaks > float("-inf"))[:, None]  # nothing was written for the others
    column, rotated = tl.arange(0, WIDTH)[None, :], tl.arange(0, ROTATED)[None, :] + PLAIN
    source = parts + (place * splits + split)[:, None] * WIDTH
    plain = tl.load(source + column, mask=used & (column < PLAIN), other=0.0)
    plain = tl.sum(plain * weights, axis=0, keep_dims=True)
    tail = tl.load(source + rotated, mask=used, other=0.0)
    tail = tl.sum(tail * weights, axis=0, keep_dims=True)
    angles = _angles(tl.load(positions + token * position_stride), frequencies)
    tail = _rotate(tail, tl.cos(angles), -tl.sin(angles), 1)
    target = out + place * WIDTH
    tl.store(target + column, plain.to(out.dtype.element_ty), mask=column < PLAIN)
    tl.store(target + rotated, tail.to(out.dtype.element_ty))
