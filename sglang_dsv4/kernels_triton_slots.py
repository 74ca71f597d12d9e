"""decode_slots as one Triton kernel for NVIDIA GPUs from compute capability 8.0.

See reference_slots.py: the same integers. One program does a whole batch, since a request's new
page depends on those before it, and a batch of decode is small.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of kernels have no Python types)

import torch
import triton
import triton.language as tl

REQUESTS = 256  # at a time, two of each thread


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
    for given in (window_map, request_slots, seq_lens, pages, window_pages):
        assert given.is_contiguous()
    assert req_to_token.stride(1) == 1
    requests = seq_lens.shape[0]
    slots = torch.empty(requests, dtype=torch.int64, device=seq_lens.device)
    _decode_slots_kernel[(1,)](
        req_to_token,
        req_to_token.stride(0),
        window_map,
        request_slots,
        seq_lens,
        pages,
        window_pages,
        slots,
        requests,
        PAGE=page,
        REQUESTS=REQUESTS,
        num_warps=4,
    )
    return slots


# Not specialised: requests and free pages change from step to step, and each new kind of number or
# address would compile the kernel again.
@triton.jit(
    do_not_specialize=["context", "requests"],
    do_not_specialize_on_alignment=[
        *("req_to_token", "window_map", "request_slots", "seq_lens"),
        *("pages", "window_pages", "slots"),
    ],
)
def _decode_slots_kernel(
    req_to_token,
    context,
    window_map,
    request_slots,
    seq_lens,
    pages,
    window_pages,
    slots,
    requests,
    PAGE: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """All requests, REQUESTS at a time."""
    begun = 0  # pages
    for first in range(0, requests, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        there = request < requests
        length = tl.load(seq_lens + request, mask=there, other=1).to(tl.int64)
        row = tl.load(request_slots + request, mask=there, other=0).to(tl.int64)
        column = req_to_token + row * context + length
        begins = there & (length % PAGE == 0)
        goes_on = there & (length % PAGE != 0)
        last = tl.load(column - 1, mask=goes_on, other=0).to(tl.int64)
        window_last = tl.load(window_map + last, mask=goes_on, other=0)
        rank = begun + tl.cumsum(begins.to(tl.int32), 0) - 1
        begun += tl.sum(begins.to(tl.int32), 0)
        page = tl.load(pages + rank, mask=begins, other=0)
        window_page = tl.load(window_pages + rank, mask=begins, other=0)
        slot = tl.where(begins, page * PAGE, last + 1)
        window_row = tl.where(begins, window_page * PAGE, window_last + 1)
        tl.store(column, slot.to(tl.int32), mask=there)
        tl.store(window_map + slot, window_row, mask=there)
        tl.store(slots + request, slot, mask=there)
