"""What one forward needs to know about its batch: built once, on the device, read by every layer.

Nothing here depends on a value that lives on the device: shapes follow from the number of tokens,
the number of requests and two host integers (the longest context and the window), so the same
code serves prefill, chunked prefill, decode and a captured graph.
"""

from dataclasses import dataclass

import torch

from sglang_dsv4.attention.cache import PAGE, RING
from sglang_dsv4.config import LayerKind

CSA, HCA = LayerKind.CSA.value, LayerKind.HCA.value
LOOKBACK = 2 * CSA  # a CSA entry pools its own window and the one before


@dataclass(frozen=True)
class Batch:
    """The host's view of one forward of T new tokens that belong to R requests.

    positions [T] int64: 0-based position of each new token in its sequence.
    request [T] int64: which of the R requests a token belongs to; tokens of a request are adjacent.
    request_slots [R] int64: the host's slot of each request (0 is the padding slot).
    prefix_lens [R] int64: tokens of each request that were computed before.
    new_lens [R] int64: new tokens of each request.
    page_table [R, pages] int64: token pages of each request; 0 where there is none.
    window_map [token slots] int64: the host's map from token slot to window row; 0 where evicted.
    max_len: an upper bound of prefix + new length over the batch, known on the host.
    """

    positions: torch.Tensor
    request: torch.Tensor
    request_slots: torch.Tensor
    prefix_lens: torch.Tensor
    new_lens: torch.Tensor
    page_table: torch.Tensor
    window_map: torch.Tensor
    max_len: int


@dataclass(frozen=True)
class IndexList:
    """Cache rows that each token attends to.

    rows [T, K] int64: valid rows first, then the null row 0.
    lengths [T] int64: how many are valid.
    """

    rows: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class CsaPlan:
    """How CSA compressors (main and indexer) find their inputs and place their outputs.

    A token looks back at LOOKBACK positions ending at its own; each is a new token of this forward
    or a row of the ring.
    position [T, 8] int64, negative before the start of the sequence.
    is_new [T, 8] bool; token [T, 8] int64: index among the new tokens; ring [T, 8] int64: ring row.
    ring_store [T] int64: ring row that keeps the token, 0 if a later new token takes the slot.
    entry [T] int64: entry that the token closes (also its index-key row), 0 if it closes none.
    row [T] int64: the same entry's cache row, 0 if none.
    """

    position: torch.Tensor
    is_new: torch.Tensor
    token: torch.Tensor
    ring: torch.Tensor
    ring_store: torch.Tensor
    entry: torch.Tensor
    row: torch.Tensor


@dataclass(frozen=True)
class HcaPlan:
    """How the HCA compressor folds tokens into running vectors and places its outputs.

    Tokens of one request and one 128-window form a segment; there are at most S of them.
    segments: S, a host integer.
    segment [T] int64: each token's segment.
    carried [S] bool: whether the segment goes on from the request's stored state.
    carried_slot [S] int64: the request slot to read then, else 0.
    last_segment [R] int64: the segment that leaves its state behind.
    request_slots [R] int64: where it leaves it.
    row [T] int64: cache row of the entry that the token closes, 0 if it closes none.
    """

    segments: int
    segment: torch.Tensor
    carried: torch.Tensor
    carried_slot: torch.Tensor
    last_segment: torch.Tensor
    request_slots: torch.Tensor
    row: torch.Tensor


@dataclass(frozen=True)
class EntryTable:
    """Where CSA entries of each token's request live.

    request [T] int64; page_table [R, pages] int64; visible [T] int64: entries the token may see;
    width: entries to score per token, a host integer; first_row: cache row of entry 0.
    """

    request: torch.Tensor
    page_table: torch.Tensor
    visible: torch.Tensor
    width: int
    first_row: int


@dataclass(frozen=True)
class Metadata:
    """Everything that layers read during one forward."""

    positions: torch.Tensor
    window_store: torch.Tensor  # [T] int64: the window row of each new token
    window: IndexList
    hca_list: IndexList
    csa: CsaPlan
    hca: HcaPlan
    entries: EntryTable


def build(batch: Batch, *, window: int, window_rows: int) -> Metadata:
    """Derive a forward's metadata.

    window: tokens that the window branch sees, the token itself included.
    window_rows: window rows of the cache, hence the row of entry 0.
    """
    window_list = _window_list(batch, window)
    last = (window_list.lengths - 1).unsqueeze(1)
    hca_width = batch.max_len // HCA
    return Metadata(
        positions=batch.positions,
        window_store=window_list.rows.gather(1, last).squeeze(1),
        window=window_list,
        hca_list=_hca_list(batch, window_list, hca_width, window_rows),
        csa=_csa_plan(batch, window_rows),
        hca=_hca_plan(batch, window_rows),
        entries=EntryTable(
            request=batch.request,
            page_table=batch.page_table,
            visible=(batch.positions + 1) // CSA,
            width=max(batch.max_len // CSA, 1),
            first_row=window_rows,
        ),
    )


def list_width(kind: LayerKind, *, window: int, top_k: int, max_len: int) -> int:
    """K of the index lists that layers of a kind attend to; window, max_len as in `build`.

    top_k: entries that the indexer selects.
    """
    entries = {LayerKind.SWA: 0, LayerKind.CSA: top_k, LayerKind.HCA: max_len // HCA}
    return window + entries[kind]


def entry_rows(
    page_table: torch.Tensor, request: torch.Tensor, entry: torch.Tensor, ratio: int
) -> torch.Tensor:
    """Storage index of entries [T, n] of each token's request, 0 where the page is missing."""
    per_page = PAGE // ratio
    pages = page_table[request.unsqueeze(1), entry // per_page]
    return (pages * per_page + entry % per_page).masked_fill(pages == 0, 0)


def index_list(window: IndexList, entries: torch.Tensor, counts: torch.Tensor) -> IndexList:
    """Window rows followed by entry rows, without a gap, in one list of fixed length.

    entries [T, n] int64: entry rows, the valid ones first. counts [T] int64: how many are valid.
    """
    keys = window.rows.shape[1] + entries.shape[1]
    column = torch.arange(keys, device=entries.device).expand(entries.shape[0], keys)
    split = window.lengths.unsqueeze(1)
    lengths = window.lengths + counts
    from_window = window.rows.gather(1, column.clamp(max=window.rows.shape[1] - 1))
    if entries.shape[1]:
        from_entries = entries.gather(1, (column - split).clamp(0, entries.shape[1] - 1))
    else:
        from_entries = torch.zeros_like(from_window)
    rows = torch.where(column < split, from_window, from_entries)
    return IndexList(rows.masked_fill(column >= lengths.unsqueeze(1), 0), lengths)


def _window_rows(batch: Batch, positions: torch.Tensor) -> torch.Tensor:
    """Window rows of positions [T, n] of each token's request; 0 where there is none."""
    known = positions.clamp(min=0)
    pages = batch.page_table[batch.request.unsqueeze(1), known // PAGE]
    rows = batch.window_map[pages * PAGE + known % PAGE]
    return rows.masked_fill((positions < 0) | (pages == 0), 0).clamp(min=0)


def _window_list(batch: Batch, window: int) -> IndexList:
    lengths = (batch.positions + 1).clamp(max=window)
    column = torch.arange(window, device=batch.positions.device)
    positions = (batch.positions + 1 - lengths).unsqueeze(1) + column
    beyond = column >= lengths.unsqueeze(1)
    return IndexList(_window_rows(batch, positions.masked_fill(beyond, -1)), lengths)


def _hca_list(batch: Batch, window: IndexList, width: int, first_row: int) -> IndexList:
    counts = (batch.positions + 1) // HCA
    entry = torch.arange(width, device=counts.device).expand(counts.shape[0], width)
    entry = entry.masked_fill(entry >= counts.unsqueeze(1), 0)
    rows = first_row + entry_rows(batch.page_table, batch.request, entry, HCA)
    return index_list(window, rows, counts)


def _closed_entry(batch: Batch, ratio: int) -> torch.Tensor:
    """Storage index [T] of the entry that each new token closes, 0 where it closes none."""
    entry = (batch.positions // ratio).unsqueeze(1)
    stored = entry_rows(batch.page_table, batch.request, entry, ratio).squeeze(1)
    return stored.masked_fill((batch.positions + 1) % ratio != 0, 0)


def _csa_plan(batch: Batch, first_row: int) -> CsaPlan:
    device = batch.positions.device
    back = torch.arange(1 - LOOKBACK, 1, device=device)  # -7 .. 0
    position = batch.positions.unsqueeze(1) + back
    token = torch.arange(batch.positions.shape[0], device=device).unsqueeze(1) + back
    is_new = position >= batch.prefix_lens[batch.request].unsqueeze(1)
    window_row = _window_rows(batch, position)
    ring = window_row // PAGE * RING + window_row % RING
    # A slot of the ring is taken by the last token of its page that maps to it: only that one may
    # write, since the order of stores to one row is not defined.
    end = (batch.prefix_lens + batch.new_lens)[batch.request]
    keeps = (batch.positions % PAGE >= PAGE - RING) | (batch.positions + RING >= end)
    entry = _closed_entry(batch, CSA)
    return CsaPlan(
        position=position,
        is_new=is_new,
        token=token.clamp(min=0),
        ring=ring,
        ring_store=ring[:, -1].masked_fill(~keeps | (window_row[:, -1] == 0), 0),
        entry=entry,
        row=(first_row + entry).masked_fill(entry == 0, 0),
    )


def _hca_plan(batch: Batch, first_row: int) -> HcaPlan:
    tokens, requests = batch.positions.shape[0], batch.request_slots.shape[0]
    segments = tokens // HCA + 2 * requests
    first_window = batch.prefix_lens // HCA
    end = batch.prefix_lens + batch.new_lens
    # A request without new tokens keeps a segment to itself, which hands its state on.
    touched = ((end - 1).clamp(min=0) // HCA - first_window + 1).clamp(min=1)
    start = touched.cumsum(0) - touched
    carried = batch.prefix_lens % HCA != 0
    is_carried = torch.zeros(segments, dtype=torch.bool, device=carried.device)
    slots = torch.zeros(segments, dtype=torch.int64, device=carried.device)
    entry = _closed_entry(batch, HCA)
    return HcaPlan(
        segments=segments,
        segment=start[batch.request] + batch.positions // HCA - first_window[batch.request],
        carried=is_carried.scatter(0, start, carried),
        carried_slot=slots.scatter(0, start, batch.request_slots.masked_fill(~carried, 0)),
        last_segment=start + touched - 1,
        request_slots=batch.request_slots,
        row=(first_row + entry).masked_fill(entry == 0, 0),
    )
