"""What one forward needs to know about its batch: built once, on the device, read by every layer.

The op `build_metadata` derives it. No shape depends on a value that lives on the device: all follow
from the number of tokens, the number of requests and two host integers (the longest context and
the window), so the same code serves prefill, chunked prefill, decode and a captured graph.
"""

from dataclasses import dataclass

import torch

from sglang_dsv4.attention.cache import PAGE
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


def list_width(kind: LayerKind, *, window: int, top_k: int, max_len: int) -> int:
    """K of the index lists that layers of a kind attend to; window, max_len as in `build_metadata`.

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
