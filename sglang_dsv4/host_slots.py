"""Places the new tokens of a decode step as SGLang does, in one launch instead of some twenty.

SGLang's scheduler calls `alloc_for_decode` before every decode step. At small batches its torch
operators are most of the host's time there, and the GPU waits. What `DecodeSlots` leaves behind is
equal bit for bit: free pages of both pools, the map of window rows, token slots, counters, errors.
"""

import hashlib
import inspect
import logging
from typing import Any

import numpy
import torch
from sglang.srt.mem_cache import allocation, common
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.utils.common import get_num_new_pages

from sglang_dsv4.backends import Op, Ops

logger = logging.getLogger(__name__)

# What DecodeSlots does instead, and a hash of its source as it was when DecodeSlots was written.
REPLACED = (
    allocation.alloc_for_decode_default,
    allocation.alloc_paged_token_slots_decode,
    allocation._alloc_page_size,
    common.evict_from_tree_cache,
    get_num_new_pages,
    SWATokenToKVPoolAllocator.alloc_decode,
    SWATokenToKVPoolAllocator.translate_loc_from_full_to_swa,
    PagedTokenToKVPoolAllocator.alloc_decode,
    PagedTokenToKVPoolAllocator.merge_and_sort_free,
    DeepSeekV4TokenToKVPool.translate_loc_from_full_to_swa,
    ReqToTokenPool.alloc_aux_to_lengths,
    ReqToTokenPool.write,
)
KNOWN = "cc17ae93dfcba2cb"


def register(ops: Ops) -> str | None:
    """Have SGLang call ours in this process, or return why not, and leave SGLang's own in place."""
    if (found := fingerprint()) != KNOWN:
        return f"its source is another one than {KNOWN}: {found}"
    known, device = allocation.ALLOC_FOR_DECODE_FUNCS, ops.machine.device
    native = allocation.alloc_for_decode_default
    if not isinstance(taken := known.get(device, native), DecodeSlots) and taken is not native:
        return f"{taken!r} is there already"
    known[device] = DecodeSlots(ops.decode_slots)
    return None


def fingerprint() -> str:
    """Of the functions that DecodeSlots replaces. Raises OSError where there is no source."""
    source = "".join(inspect.getsource(function) for function in REPLACED)
    return hashlib.sha256(source.encode()).hexdigest()[:16]


class DecodeSlots:
    """`alloc_for_decode` for our pools; any other case is SGLang's own function's."""

    def __init__(self, op: Op) -> None:
        """op: decode_slots, by the provider that serves."""
        self.op = op
        self.told = False

    def __call__(self, batch: Any, token_per_req: int) -> torch.Tensor:
        """Make room for a token of each request and return its slot [R] int64.

        batch: SGLang's ScheduleBatch. Raises RuntimeError where memory is out, as SGLang does.
        """
        tree = batch.tree_cache
        allocator, table = tree.token_to_kv_pool_allocator, batch.req_to_token_pool
        if token_per_req != 1 or not is_plain(batch, allocator):
            self._tell_once()
            return allocation.alloc_for_decode_default(batch, token_per_req)
        batch.maybe_evict_swa()
        lengths, page = batch.seq_lens, allocator.page_size
        requests = lengths.numel()
        allocation.evict_from_tree_cache(tree, requests * page)
        full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator
        for pool in (full, window):
            if requests > pool.free_pages.numel():
                pool.merge_and_sort_free()
        begun = requests - numpy.count_nonzero(batch.seq_lens_cpu.numpy() % page)
        pages, window_pages = full.free_pages, window.free_pages
        if begun:
            taken = [_take(pool, begun) for pool in (full, window)]
            if not all(taken):
                _out_of_memory(tree, requests)
        slots: torch.Tensor = self.op(
            table.req_to_token,
            allocator.full_to_swa_index_mapping,
            batch.req_pool_indices,
            lengths,
            pages,
            window_pages,
            page=page,
        )
        if table._aux_cache is not None:
            _grow_beside(batch, slots)
        for request in batch.reqs:
            request.kv.kv_allocated_len += 1
            request.kv.kv_committed_len += 1
        return slots

    def _tell_once(self) -> None:
        if not self.told:
            logger.warning("sglang-dsv4: SGLang places the new tokens of a batch: no plain case")
            self.told = True


def is_plain(batch: Any, allocator: BaseTokenToKVPoolAllocator) -> bool:
    """Whether the batch is one that DecodeSlots can place: pages of both pools in step."""
    if type(allocator) is not SWATokenToKVPoolAllocator or allocator._swa_req_ring:
        return False
    full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator
    return (
        1 < allocator.page_size == batch.tree_cache.page_size
        and type(full) is type(window) is PagedTokenToKVPoolAllocator
        and not (full.debug_mode or window.debug_mode)
        and type(batch.req_to_token_pool) is ReqToTokenPool
        and not batch.model_config.is_encoder_decoder
    )


def _take(pool: PagedTokenToKVPoolAllocator, count: int) -> bool:
    """Take so many free pages from the front, if they are there."""
    if count > pool.free_pages.numel():
        return False
    pool.free_pages = pool.free_pages[count:]
    return True


def _grow_beside(batch: Any, slots: torch.Tensor) -> None:
    """What the host's table keeps beside token slots, or none of it all."""
    try:
        batch.req_to_token_pool.alloc_aux_to_lengths(
            req_pool_indices_cpu=batch.req_pool_indices_cpu,
            target_seq_lens_cpu=batch.seq_lens_cpu + 1,
        )
    except Exception:
        batch.tree_cache.token_to_kv_pool_allocator.free(slots)
        raise


def _out_of_memory(tree: Any, requests: int) -> None:
    """The host's error, word by word."""
    message = (
        f"Decode out of memory. Try to lower your batch size.\n"
        f"Try to allocate {requests} tokens.\n"
        f"{allocation.available_and_evictable_str(tree)}"
    )
    allocation.logger.error(message)
    tree.pretty_print()
    raise RuntimeError(message)
