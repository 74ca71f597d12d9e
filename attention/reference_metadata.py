"""build_metadata in plain PyTorch: what each token sees, and where what it leaves is stored.

No value is read on the host and no shape depends on one, as in reference.py.
"""

import torch

from sglang_dsv4.attention.cache import PAGE, RING
from sglang_dsv4.attention.metadata import (
    CSA,
    HCA,
    LOOKBACK,
    Batch,
    CsaPlan,
    EntryTable,
    HcaPlan,
    IndexList,
    Metadata,
    entry_rows,
    index_list,
)


def build_metadata(batch: Batch, *, window: int, window_rows: int) -> Metadata:
    """Derive a forward's metadata: what layers read of T tokens of R requests.

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
