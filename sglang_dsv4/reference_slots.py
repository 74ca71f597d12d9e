"""decode_slots in plain PyTorch: where a decode step stores its tokens.

A token slot is a place in the space that the host's tables count in; each has a row in the smaller
pool of window rows. Both pools hand out pages in step.
"""

import torch


def decode_slots(
    req_to_token: torch.Tensor,
    window_map: torch.Tensor,
    request_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: torch.Tensor,
    window_pages: torch.Tensor,
    *,
    page: int,
) -> torch.Tensor:
    """Give each of R requests the token slot that follows its last one, and write it down.

    req_to_token  [rows, context] int32: token slots; in row request_slots[r] column seq_lens[r] is
                  written. No two requests have one row.
    window_map    [slots] int64: token slot -> window row; those of the new slots are written.
    request_slots [R] int64: rows of req_to_token.
    seq_lens      [R] int64: tokens before the new one. A multiple of `page` begins a page.
    pages         [F] int64, window_pages [W] int64: free pages of either kind. Requests that begin
                  a page take them from the front, in their order; there must be enough.
    page          tokens of a page.
    Returns [R] int64: the new token slots.
    """
    begins = seq_lens % page == 0
    rank = begins.cumsum(0) - 1
    last = req_to_token[request_slots, seq_lens - 1].long()
    slots = _next(last, begins, rank, pages, page)
    window_map[slots] = _next(window_map[last], begins, rank, window_pages, page)
    req_to_token[request_slots, seq_lens] = slots.int()
    return slots


def _next(
    last: torch.Tensor, begins: torch.Tensor, rank: torch.Tensor, pages: torch.Tensor, page: int
) -> torch.Tensor:
    """The place after `last` [R], or the first one of a page of its own."""
    if pages.shape[0] == 0:  # then nobody begins one
        return last + 1
    first = pages[rank.clamp(0, pages.shape[0] - 1)] * page
    return torch.where(begins, first, last + 1)
