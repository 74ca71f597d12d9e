"""Compressors as Triton kernels for NVIDIA GPUs from compute capability 8.0; see reference.py.

One launch each: a token's program pools, norms, rotates and stores, and keeps the state up to date.
Arithmetic is fp32. Nothing but shapes decides about launches; which tokens close an entry, and how
many there are, is read on the device, so all of it can be captured in a CUDA graph.

Within a launch programs run in any order, so one must never overwrite what another still has to
read. Both compressors keep to a rule that gives every such read and write to a single program; it
is said at each kernel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of kernels have no Python types)

import torch
import triton
import triton.language as tl

from sglang_dsv4.attention.cache import PAGE, RING
from sglang_dsv4.attention.kernels_triton_index import WIDTH as INDEX_WIDTH
from sglang_dsv4.attention.kernels_triton_index import fp4_grid, rotate
from sglang_dsv4.attention.metadata import LOOKBACK, CsaPlan, HcaPlan
from sglang_dsv4.config import LayerKind
from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel

CSA = tl.constexpr(LayerKind.CSA.value)
HCA = tl.constexpr(LayerKind.HCA.value)
SLOTS = tl.constexpr(LOOKBACK)  # tokens that a CSA entry pools
RING_SLOTS = tl.constexpr(RING)
PAGE_TOKENS = tl.constexpr(PAGE)
REQUEST_BLOCK = tl.constexpr(256)  # requests that are looked through at a time


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

    Entry 0 has no previous window: its missing slots weigh exactly nothing. Row 0 is not written.
    """
    tokens, width = kv.shape[0], weight.shape[0]
    assert width == triton.next_power_of_2(width), f"{width} channels are no power of two"
    assert not fp4 or width == INDEX_WIDTH.value, f"the grid is not for {width} channels"
    assert kv.dtype == gate.dtype == ape.dtype == state.dtype == torch.float32
    assert kv.stride(1) == gate.stride(1) == cache.stride(1) == weight.stride(0) == 1
    assert ape.is_contiguous() and state.is_contiguous() and rows.is_contiguous()
    for part in (plan.position, plan.is_new, plan.token, plan.ring, plan.ring_store):
        assert part.is_contiguous()
    _compress_csa_kernel[(tokens,)](
        kv,
        kv.stride(0),
        gate,
        gate.stride(0),
        ape,
        weight,
        frequencies,
        plan.position,
        plan.is_new,
        plan.token,
        plan.ring,
        plan.ring_store,
        rows,
        state,
        cache,
        cache.stride(0),
        tokens,
        eps,
        WIDTH=width,
        FP4=fp4,
        **csa_options(width),
    )


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

    Row 0 of the cache and slot 0 of the state are not written, nor is the slot of a request
    without new tokens.
    """
    tokens, width = kv.shape
    requests = plan.request_slots.shape[0]
    assert width == triton.next_power_of_2(width), f"{width} channels are no power of two"
    assert kv.dtype == gate.dtype == ape.dtype == state.dtype == torch.float32
    assert kv.stride(1) == gate.stride(1) == cache.stride(1) == weight.stride(0) == 1
    assert ape.is_contiguous() and state.is_contiguous() and positions.is_contiguous()
    for part in (plan.segment, plan.carried, plan.carried_slot, plan.last_segment, plan.row):
        assert part.is_contiguous()
    _compress_hca_kernel[(tokens,)](
        kv,
        kv.stride(0),
        gate,
        gate.stride(0),
        ape,
        weight,
        frequencies,
        positions,
        plan.segment,
        plan.carried,
        plan.carried_slot,
        plan.last_segment,
        plan.request_slots,
        plan.row,
        state,
        cache,
        cache.stride(0),
        tokens,
        requests,
        eps,
        WIDTH=width,
        ROWS=fold_rows(tokens, requests),
        num_warps=warps_of(width),
    )


def csa_options(width: int) -> dict[str, int]:
    """Warps and registers of `_compress_csa_kernel`: with one warp the assembler, left alone,
    spills a few (sm_89)."""
    return {"num_warps": warps_of(width)} | ({"maxnreg": 160} if width <= 128 else {})


def warps_of(width: int) -> int:
    """Warps of a program: each thread gets 4 neighbouring channels of all rows.

    So rows load in words of 16 bytes, and sums over rows stay within a thread.
    """
    return max(width // 128, 1)


def fold_rows(tokens: int, requests: int) -> int:
    """Tokens that `compress_hca` folds at a time.

    A decode has one per request, where more rows would only be masked; a prefill wants many loads
    under way, and 8 rows are what the registers hold.
    """
    return 1 if tokens <= requests else 8


# ---- kernels ----


@pdl_kernel(do_not_specialize=["tokens"])
def _compress_csa_kernel(
    kv,
    kv_token,
    gate,
    gate_token,
    ape,
    weight,
    frequencies,
    position,
    is_new,
    new_token,
    ring,
    ring_store,
    rows,
    state,
    cache,
    cache_row,
    tokens,
    eps,
    WIDTH: tl.constexpr,
    FP4: tl.constexpr,
):
    """One token: the entry that it closes, and its row of the ring.

    A ring belongs to a page of 256 tokens of one request. Rows of earlier forwards are read by the
    first 7 new tokens of a request only. If the page's first token is new, no such row is in the
    page, and nobody reads what a token stores: it sees to itself. In a page that older tokens began
    ("shared"), the program of the request's first new token closes the entries of the first 7,
    and after that stores every ring row of the page; their own programs leave it to it. Those of
    the first 7 that lie in the next page read rows 4 to 7 of this page's ring at positions below
    the request's first new one, and so no row that a new token of this page takes: such a token is
    at most 3 positions further, not 8.
    """
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(position + token * SLOTS + SLOTS - 1)
    page = tl.load(ring + token * SLOTS + SLOTS - 1) // RING_SLOTS
    start = token - place % PAGE_TOKENS  # where the page's first token is, if it is new
    begins = _page_of(ring, start, start >= 0) == page
    is_shared = (page != 0) & (begins == 0)
    slot = tl.arange(0, SLOTS)
    before = tl.sum(tl.load(is_new + token * SLOTS + slot).to(tl.int32), axis=0) - 1
    leads = is_shared & (before == 0)
    # Its own entry; the entries of the first 7, which close at every fourth position; or none.
    first = tl.where(leads, token + CSA - 1 - place % CSA, token)
    last = tl.where(leads, tl.minimum(token + SLOTS - 1, tokens), token + 1)
    last = tl.where(is_shared & (before > 0) & (before < SLOTS - 1), token, last)
    for closing in range(first, last, CSA):
        if _page_of(ring, closing, True) == page:
            row = tl.load(rows + closing)
            if row != 0:
                back = closing * SLOTS + slot
                entry = _pool(
                    kv, kv_token, gate, gate_token, ape, state,
                    tl.load(position + back), tl.load(is_new + back),
                    tl.load(new_token + back), tl.load(ring + back), WIDTH,
                )  # fmt: skip
                _finish(
                    entry, weight, frequencies, tl.load(position + closing * SLOTS + SLOTS - 1),
                    cache + row * cache_row, eps, CSA, WIDTH, FP4,
                )  # fmt: skip
    # Other threads of this program may still be reading rows that are overwritten now.
    tl.debug_barrier()
    follows = leads & (_page_of(ring, token + 1, token + 1 < tokens) == page)
    if follows:
        candidate = token + tl.arange(0, PAGE_TOKENS)
        target = tl.load(ring_store + candidate, mask=candidate < tokens, other=0)
        for number in range(RING_SLOTS):
            row = page * RING_SLOTS + number
            keeps = tl.max(tl.where(target == row, candidate, -1), axis=0)
            if keeps >= 0:
                _keep(kv, kv_token, gate, gate_token, ape, position, state, keeps, row, WIDTH)
    elif leads | (is_shared == 0):
        row = tl.load(ring_store + token)
        if row != 0:
            _keep(kv, kv_token, gate, gate_token, ape, position, state, token, row, WIDTH)


@triton.jit
def _page_of(ring, token, exists):
    """The window page of a new token, -1 where there is no such token."""
    row = tl.load(ring + token * SLOTS + SLOTS - 1, mask=exists, other=-RING_SLOTS)
    return row // RING_SLOTS


@triton.jit
def _pool(
    kv,
    kv_token,
    gate,
    gate_token,
    ape,
    state,
    place,
    is_new,
    token,
    ring,
    WIDTH: tl.constexpr,
):
    """Each channel's softmax over [SLOTS] looked-back tokens, new ones or rows of the ring: [1, w].

    The first half of the slots gives series A, the second series B.
    """
    slot, column = tl.arange(0, SLOTS), tl.arange(0, WIDTH)
    channel = (slot // CSA * WIDTH)[:, None] + column[None, :]
    fresh, kept = (is_new & (place >= 0))[:, None], ((is_new == 0) & (place >= 0))[:, None]
    value = tl.load(kv + (token * kv_token)[:, None] + channel, mask=fresh, other=0.0)
    score = tl.load(gate + (token * gate_token)[:, None] + channel, mask=fresh, other=0.0)
    bias = tl.load(ape + (place % CSA * 2 * WIDTH)[:, None] + channel, mask=fresh, other=0.0)
    old = state + (ring * 4 * WIDTH)[:, None] + channel
    value = tl.where(fresh, value, tl.load(old, mask=kept, other=0.0))
    old_score = tl.load(old + 2 * WIDTH, mask=kept, other=float("-inf"))
    score = tl.where(fresh, score + bias, old_score)
    weights = tl.exp(score - tl.max(score, axis=0)[None, :])
    return (tl.sum(weights * value, axis=0) / tl.sum(weights, axis=0))[None, :]


@triton.jit
def _keep(
    kv,
    kv_token,
    gate,
    gate_token,
    ape,
    position,
    state,
    token,
    row,
    WIDTH: tl.constexpr,
):
    """A token's values and biased scores into a row of the ring."""
    column = tl.arange(0, 2 * WIDTH)
    place = tl.load(position + token * SLOTS + SLOTS - 1)
    value = tl.load(kv + token * kv_token + column)
    score = tl.load(gate + token * gate_token + column)
    score += tl.load(ape + place % CSA * 2 * WIDTH + column)
    tl.store(state + row * 4 * WIDTH + column, value)
    tl.store(state + row * 4 * WIDTH + 2 * WIDTH + column, score)


@pdl_kernel(do_not_specialize=["tokens", "requests"])
def _compress_hca_kernel(
    kv,
    kv_token,
    gate,
    gate_token,
    ape,
    weight,
    frequencies,
    positions,
    segments,
    carried,
    carried_slots,
    last_segments,
    request_slots,
    rows,
    state,
    cache,
    cache_row,
    tokens,
    requests,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One segment, by the program of its first token; the programs of its other tokens end at once.

    A request's stored state is read by its first segment, if that goes on from it, and replaced by
    its last. Where these are two, the first does both: it folds the last one's tokens once more.
    """
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    segment = tl.load(segments + token)
    if tl.load(segments + token - 1, mask=token > 0, other=-1) == segment:
        return
    place = tl.load(positions + token)
    count = _tokens_of(segments, segment, token, tokens)
    goes_on = tl.load(carried + segment)
    column = tl.arange(0, WIDTH)
    old = state + tl.load(carried_slots + segment) * 3 * WIDTH + column
    peak = tl.load(old, mask=goes_on, other=float("-inf"))
    total = tl.load(old + WIDTH, mask=goes_on, other=0.0)
    weighted = tl.load(old + 2 * WIDTH, mask=goes_on, other=0.0)
    peak, total, weighted = _fold(
        kv, kv_token, gate, gate_token, ape, peak, total, weighted, token, count, place, WIDTH, ROWS
    )  # fmt: skip
    row = tl.load(rows + token + count - 1)
    if row != 0:
        entry = (weighted / total)[None, :]
        _finish(
            entry, weight, frequencies, place, cache + row * cache_row, eps, HCA, WIDTH, False
        )  # fmt: skip
    first, last, slot = _request_of(last_segments, request_slots, segment, requests)
    # Other threads of this program may still be reading the state that is overwritten now.
    tl.debug_barrier()
    target = state + slot * 3 * WIDTH + column
    if slot != 0:
        is_left = tl.load(carried + first) & (first != last)  # to the first segment
        if (segment == last) & (is_left == 0):
            tl.store(target, peak)
            tl.store(target + WIDTH, total)
            tl.store(target + 2 * WIDTH, weighted)
        elif (segment == first) & is_left:
            token += count + (last - segment - 1) * HCA
            count = _tokens_of(segments, last, token, tokens)
            peak = tl.full((WIDTH,), float("-inf"), tl.float32)
            total = tl.zeros((WIDTH,), tl.float32)
            peak, total, weighted = _fold(
                kv, kv_token, gate, gate_token, ape, peak, total, total, token, count, 0, WIDTH,
                ROWS,
            )  # fmt: skip
            tl.store(target, peak)
            tl.store(target + WIDTH, total)
            tl.store(target + 2 * WIDTH, weighted)


@triton.jit
def _tokens_of(segments, segment, token, tokens):
    """How many tokens a segment has, of which `token` is the first."""
    candidate = token + tl.arange(0, HCA)
    found = tl.load(segments + candidate, mask=candidate < tokens, other=-1)
    return tl.sum((found == segment).to(tl.int32), axis=0)


@triton.jit
def _request_of(last_segments, request_slots, segment, requests):
    """The first and the last segment of the request that a segment belongs to, and its slot.

    Segments are numbered through, so a request's first follows the last of the one before.
    """
    first, last, slot = segment * 0, segment * 0, segment * 0
    for start in range(0, requests, REQUEST_BLOCK):
        request = start + tl.arange(0, REQUEST_BLOCK)
        known = request < requests
        end = tl.load(last_segments + request, mask=known, other=-1)
        begin = tl.load(last_segments + request - 1, mask=known & (request > 0), other=-1) + 1
        number = tl.load(request_slots + request, mask=known, other=0)
        mine = (begin <= segment) & (segment <= end)
        first += tl.sum(tl.where(mine, begin, 0), axis=0)
        last += tl.sum(tl.where(mine, end, 0), axis=0)
        slot += tl.sum(tl.where(mine, number, 0), axis=0)
    return first, last, slot


@triton.jit
def _fold(
    kv,
    kv_token,
    gate,
    gate_token,
    ape,
    peak,
    total,
    weighted,
    token,
    count,
    place,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Takes `count` tokens from position `place` on into a running softmax: three [w]."""
    column = tl.arange(0, WIDTH)[None, :]
    for start in range(0, count, ROWS):
        number = start + tl.arange(0, ROWS)
        valid = (number < count)[:, None]
        source = (token + number)[:, None]
        value = tl.load(kv + source * kv_token + column, mask=valid, other=0.0)
        score = tl.load(gate + source * gate_token + column, mask=valid, other=float("-inf"))
        bias = ape + ((place + number) % HCA)[:, None] * WIDTH + column
        score += tl.load(bias, mask=valid, other=0.0)
        new_peak = tl.maximum(peak, tl.max(score, axis=0))
        decay = tl.exp(peak - new_peak)
        weights = tl.exp(score - new_peak[None, :])
        total = total * decay + tl.sum(weights, axis=0)
        weighted = weighted * decay + tl.sum(weights * value, axis=0)
        peak = new_peak
    return peak, total, weighted


@triton.jit
def _finish(
    entry,
    weight,
    frequencies,
    place,
    target,
    eps,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    FP4: tl.constexpr,
):
    """Norm, rotation to the start of the window of position `place`, grid, store: entry [1, w]."""
    column = tl.arange(0, WIDTH)[None, :]
    factor = tl.rsqrt(tl.sum(entry * entry, axis=1) / WIDTH + eps)
    entry = entry * factor[:, None] * tl.load(weight + column).to(tl.float32)
    entry = rotate(entry, place // RATIO * RATIO, frequencies, 1, WIDTH)
    if FP4:
        entry = fp4_grid(entry, 1)
    tl.store(target + column, entry.to(target.dtype.element_ty))
