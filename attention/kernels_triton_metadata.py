"""build_metadata as Triton kernels for NVIDIA GPUs from compute capability 8.0, in two launches.

See reference_metadata.py: the same integers. Grids follow from shapes alone and every length is
read on the device, so all of it can be captured in a CUDA graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of kernels have no Python types)

import torch
import triton
import triton.language as tl

from sglang_dsv4.attention.cache import PAGE, RING
from sglang_dsv4.attention.metadata import (
    LOOKBACK,
    Batch,
    CsaPlan,
    EntryTable,
    HcaPlan,
    IndexList,
    Metadata,
)
from sglang_dsv4.config import LayerKind
from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel

CSA = tl.constexpr(LayerKind.CSA.value)
HCA = tl.constexpr(LayerKind.HCA.value)
BACK = tl.constexpr(LOOKBACK)
PAGE_TOKENS = tl.constexpr(PAGE)
RING_SLOTS = tl.constexpr(RING)

COLUMNS = 256  # of a token's lists, per program: each thread of 2 warps loads 4 rows at once
REQUEST_BLOCK = tl.constexpr(256)  # requests that are looked through at a time
SEGMENT_BLOCK = tl.constexpr(128)  # segments that a program writes at a time


def build_metadata(batch: Batch, *, window: int, window_rows: int) -> Metadata:
    """Derive a forward's metadata: what layers read of T tokens of R requests.

    window: tokens that the window branch sees, the token itself included.
    window_rows: window rows of the cache, hence the row of entry 0.
    """
    for given in (batch.positions, batch.request, batch.window_map):
        assert given.is_contiguous()
    for given in (batch.request_slots, batch.prefix_lens, batch.new_lens):
        assert given.is_contiguous()
    tokens, hca_width = batch.positions.shape[0], batch.max_len // LayerKind.HCA.value
    made = Metadata(
        positions=batch.positions,
        window_store=_integers(batch, tokens),
        window=_index_list(batch, window),
        hca_list=_index_list(batch, window + hca_width),
        csa=_csa_plan(batch),
        hca=_hca_plan(batch),
        entries=EntryTable(
            request=batch.request,
            page_table=batch.page_table,
            visible=_integers(batch, tokens),
            width=max(batch.max_len // LayerKind.CSA.value, 1),
            first_row=window_rows,
        ),
    )
    _fill_tokens(batch, made)
    _fill_segments(batch, made.hca)
    return made


def _integers(batch: Batch, *shape: int) -> torch.Tensor:
    """Memory for int64 on the batch's device; a kernel writes every element of it."""
    return torch.empty(shape, dtype=torch.int64, device=batch.positions.device)


def _flags(batch: Batch, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bool, device=batch.positions.device)


def _index_list(batch: Batch, width: int) -> IndexList:
    tokens = batch.positions.shape[0]
    return IndexList(_integers(batch, tokens, width), _integers(batch, tokens))


def _csa_plan(batch: Batch) -> CsaPlan:
    tokens = batch.positions.shape[0]
    return CsaPlan(
        position=_integers(batch, tokens, LOOKBACK),
        is_new=_flags(batch, tokens, LOOKBACK),
        token=_integers(batch, tokens, LOOKBACK),
        ring=_integers(batch, tokens, LOOKBACK),
        ring_store=_integers(batch, tokens),
        entry=_integers(batch, tokens),
        row=_integers(batch, tokens),
    )


def _hca_plan(batch: Batch) -> HcaPlan:
    tokens, requests = batch.positions.shape[0], batch.request_slots.shape[0]
    segments = tokens // LayerKind.HCA.value + 2 * requests
    return HcaPlan(
        segments=segments,
        segment=_integers(batch, tokens),
        carried=_flags(batch, segments),
        carried_slot=_integers(batch, segments),
        last_segment=_integers(batch, requests),
        request_slots=batch.request_slots,
        row=_integers(batch, tokens),
    )


def _fill_tokens(batch: Batch, made: Metadata) -> None:
    tokens, width = made.hca_list.rows.shape
    _token_metadata_kernel[(tokens, triton.cdiv(width, COLUMNS))](
        batch.positions,
        batch.request,
        batch.prefix_lens,
        batch.new_lens,
        batch.page_table,
        batch.page_table.stride(0),
        batch.page_table.stride(1),
        batch.window_map,
        made.window_store,
        made.window.rows,
        made.window.lengths,
        made.hca_list.rows,
        made.hca_list.lengths,
        made.csa.position,
        made.csa.is_new,
        made.csa.token,
        made.csa.ring,
        made.csa.ring_store,
        made.csa.entry,
        made.csa.row,
        made.hca.segment,
        made.hca.row,
        made.entries.visible,
        made.window.rows.shape[1],
        width,
        made.entries.first_row,
        COLUMNS=COLUMNS,
        num_warps=2,
    )


def _fill_segments(batch: Batch, plan: HcaPlan) -> None:
    _segment_metadata_kernel[(batch.request_slots.shape[0],)](
        batch.prefix_lens,
        batch.new_lens,
        batch.request_slots,
        plan.carried,
        plan.carried_slot,
        plan.last_segment,
        plan.segments,
        num_warps=2,
    )


# ---- kernels ----


# Not specialised: each value would compile the kernel again, while requests wait.
@pdl_kernel(do_not_specialize=["page_table_request", "page_table_page", "width"])
def _token_metadata_kernel(
    positions,
    requests,
    prefix_lens,
    new_lens,
    page_table,
    page_table_request,
    page_table_page,
    window_map,
    window_store,
    window_rows,
    window_lengths,
    hca_rows,
    hca_lengths,
    csa_position,
    csa_is_new,
    csa_token,
    csa_ring,
    csa_ring_store,
    csa_entry,
    csa_row,
    hca_segment,
    hca_row,
    visible,
    window,
    width,
    first_row,
    COLUMNS: tl.constexpr,
):
    """Some columns of one token's lists; the program of the first ones does all else.

    window, width: columns of the window's list and of HCA's, which starts with the same rows.
    """
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    position, request = tl.load(positions + token), tl.load(requests + token)
    pages = page_table + request * page_table_request
    length, entries = tl.minimum(position + 1, window), (position + 1) // HCA
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    entry = column - length
    is_entry = (entry >= 0) & (entry < entries)
    # Loads come before stores, which they would not overtake.
    page = tl.load(pages + entry * HCA // PAGE_TOKENS * page_table_page, mask=is_entry, other=0)
    seen = position + 1 - length + column
    rows = _window_rows(seen, column < length, pages, page_table_page, window_map)
    tl.store(window_rows + token * window + column, rows, mask=column < window)
    rows += tl.where(is_entry, first_row + _stored(page, entry, HCA), 0)
    tl.store(hca_rows + token * width + column, rows, mask=column < width)
    if tl.program_id(1) == 0:
        prefix = tl.load(prefix_lens + request)
        end = prefix + tl.load(new_lens + request)
        own_page = tl.load(pages + position // PAGE_TOKENS * page_table_page)
        own = _window_rows(position, position >= 0, pages, page_table_page, window_map)
        back = tl.arange(0, BACK) - (BACK - 1)  # -7 .. 0
        place = position + back
        row = _window_rows(place, place >= 0, pages, page_table_page, window_map)
        segment = _first_segment(request, prefix_lens, new_lens) + position // HCA - prefix // HCA
        tl.store(window_lengths + token, length)
        tl.store(hca_lengths + token, length + entries)
        tl.store(visible + token, (position + 1) // CSA)
        tl.store(window_store + token, own)
        # The last token of its page that maps to a slot of the ring takes it.
        keeps = position % PAGE_TOKENS >= PAGE_TOKENS - RING_SLOTS
        keeps |= position + RING_SLOTS >= end
        tl.store(csa_ring_store + token, tl.where(keeps & (own != 0), _ring_row(own), 0))
        slot = token * BACK + tl.arange(0, BACK)
        tl.store(csa_position + slot, place)
        tl.store(csa_is_new + slot, place >= prefix)
        tl.store(csa_token + slot, tl.maximum(token + back, 0))
        tl.store(csa_ring + slot, _ring_row(row))
        closed = _closed_entry(own_page, position, CSA)
        tl.store(csa_entry + token, closed)
        tl.store(csa_row + token, tl.where(closed == 0, 0, first_row + closed))
        closed = _closed_entry(own_page, position, HCA)
        tl.store(hca_row + token, tl.where(closed == 0, 0, first_row + closed))
        tl.store(hca_segment + token, segment)


@triton.jit
def _window_rows(position, exists, pages, page_table_page, window_map):
    """Window rows of positions of the request whose pages these are; 0 where there is none."""
    page = tl.load(pages + position // PAGE_TOKENS * page_table_page, mask=exists, other=0)
    slot = page * PAGE_TOKENS + position % PAGE_TOKENS
    return tl.maximum(tl.load(window_map + slot, mask=page != 0, other=0), 0)


@triton.jit
def _ring_row(window_row):
    return window_row // PAGE_TOKENS * RING_SLOTS + window_row % RING_SLOTS


@triton.jit
def _stored(page, entry, RATIO: tl.constexpr):
    """Storage index of an entry that lies in this page, 0 where there is no page."""
    per_page: tl.constexpr = PAGE_TOKENS // RATIO
    return tl.where(page == 0, 0, page * per_page + entry % per_page)


@triton.jit
def _closed_entry(page, position, RATIO: tl.constexpr):
    """Storage index of the entry that a token of this page closes, 0 where it closes none."""
    closes = (position + 1) % RATIO == 0
    return tl.where(closes, _stored(page, position // RATIO, RATIO), 0)


@pdl_kernel(do_not_specialize=["segments"])
def _segment_metadata_kernel(
    prefix_lens,
    new_lens,
    request_slots,
    carried,
    carried_slots,
    last_segments,
    segments,
):
    """One request's segments; the last request writes those that belong to nobody as well."""
    after_previous()
    request = tl.program_id(0)
    prefix = tl.load(prefix_lens + request)
    first = _first_segment(request, prefix_lens, new_lens)
    stop = first + _touched(prefix, tl.load(new_lens + request))
    tl.store(last_segments + request, stop - 1)
    is_carried = prefix % HCA != 0
    slot = tl.load(request_slots + request)
    stop = tl.where(request == tl.num_programs(0) - 1, segments, stop)
    for start in range(first, stop, SEGMENT_BLOCK):
        segment = start + tl.arange(0, SEGMENT_BLOCK)
        goes_on = (segment == first) & is_carried
        tl.store(carried + segment, goes_on, mask=segment < stop)
        tl.store(carried_slots + segment, tl.where(goes_on, slot, 0), mask=segment < stop)


@triton.jit
def _first_segment(request, prefix_lens, new_lens):
    """The number of segments that the requests before this one have."""
    total = tl.zeros((REQUEST_BLOCK,), tl.int64)
    for start in range(0, request, REQUEST_BLOCK):
        number = start + tl.arange(0, REQUEST_BLOCK)
        prefix = tl.load(prefix_lens + number, mask=number < request, other=0)
        new = tl.load(new_lens + number, mask=number < request, other=0)
        total += tl.where(number < request, _touched(prefix, new), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _touched(prefix, new):
    """Windows of HCA that a request's new tokens lie in; one without any has a segment too."""
    last = tl.maximum(prefix + new - 1, 0) // HCA
    return tl.maximum(last - prefix // HCA + 1, 1)
