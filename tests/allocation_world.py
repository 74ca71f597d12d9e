"""SGLang's allocator, table and batch without its scheduler: where decode steps place tokens."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

PAGE, WINDOW = 256, 128
Allocate = Callable[[Any, int], torch.Tensor]


class WindowMap(BaseSWAKVPool):
    """Of SGLang's pool only what the allocator asks of it."""

    __abstractmethods__: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.full_to_swa_index_mapping: torch.Tensor | None = None

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        assert self.full_to_swa_index_mapping is not None
        return self.full_to_swa_index_mapping[kv_indices]


WindowMap.__abstractmethods__ = frozenset()


class Tree:
    """A prefix cache that keeps whole pages of finished requests, and evicts the oldest first."""

    page_size = PAGE

    def __init__(self, allocator: SWATokenToKVPoolAllocator) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.cached: list[tuple[torch.Tensor, int]] = []  # token slots, those without window rows
        self.log: list[Any] = []

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict_for_alloc(self, wanted: Any) -> None:
        self.log.append(("evict", wanted.num_tokens, wanted.swa_num_tokens))
        full, window = wanted.num_tokens, wanted.swa_num_tokens
        while self.cached and max(full, window) > 0:
            slots, gone = self.cached.pop(0)
            release(self.token_to_kv_pool_allocator, slots, gone)
            full, window = full - len(slots), window - (len(slots) - gone)

    def available_and_evictable_str(self) -> str:
        allocator = self.token_to_kv_pool_allocator
        return f"{allocator.debug_print()} cached {[len(slots) for slots, _ in self.cached]}\n"

    def pretty_print(self) -> None:
        self.log.append("printed")


def release(allocator: SWATokenToKVPoolAllocator, slots: torch.Tensor, gone: int) -> None:
    """Free a request's slots; the first `gone` have no window rows any more."""
    allocator.free_full_segment(slots[:gone], start_pos=0)
    allocator.free_segment(slots[gone:], start_pos=gone)


@dataclass
class Request:
    """A request of a batch. evicted: tokens whose window rows were freed."""

    row: int
    length: int
    evicted: int = 0
    kv: Any = field(default_factory=SimpleNamespace)


class World:
    """Pools of `pages` and `window_pages` pages, a table, and the requests that are running."""

    def __init__(
        self,
        device: str,
        *,
        pages: int,
        window_pages: int,
        requests: int = 64,
        context: int = 2048,
        need_sort: bool = False,
    ) -> None:
        self.device, self.requests = device, list[Request]()
        self.table = ReqToTokenPool(requests, context, device, False)
        self.allocator = SWATokenToKVPoolAllocator(
            pages * PAGE,
            window_pages * PAGE,
            PAGE,
            torch.bfloat16,
            device,
            WindowMap(),
            need_sort,
        )
        self.tree = Tree(self.allocator)

    def open(self, length: int) -> bool:
        """Begin a request of so many tokens, if there is room."""
        pages = -(-length // PAGE)
        self.allocator.evict_to_free_tokens(self.tree, pages * PAGE)
        if not self.table.free_slots or not self.allocator.new_pages_available(pages, pages):
            return False
        slots = self.allocator.alloc_extend(
            *self._both([0]),
            *self._both([length]),
            torch.tensor([-1], device=self.device),
            length,
        )
        (row,) = self.table.alloc_rows(1)
        self.table.write((row, slice(0, length)), slots.int())
        kv = SimpleNamespace(kv_allocated_len=length, kv_committed_len=length)
        self.requests.append(Request(row, length, kv=kv))
        return True

    def close(self, number: int, keep: bool) -> None:
        """End a request; its whole pages may stay in the cache."""
        request = self.requests.pop(number)
        slots = self.table.req_to_token[request.row, : request.length].long()
        whole = request.length // PAGE * PAGE if keep else 0
        if whole > request.evicted:
            self.tree.cached.append((slots[:whole].clone(), request.evicted))
            self.allocator.free_segment(slots[whole:], start_pos=whole)
        else:
            release(self.allocator, slots, request.evicted)
        self.table.free_slots.append(request.row)

    def batch(self) -> Any:
        """What SGLang's function reads of a ScheduleBatch."""
        seq_lens, seq_lens_cpu = self._both([one.length for one in self.requests])
        rows, rows_cpu = self._both([one.row for one in self.requests])
        return SimpleNamespace(
            reqs=self.requests,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            req_pool_indices=rows,
            req_pool_indices_cpu=rows_cpu,
            req_to_token_pool=self.table,
            tree_cache=self.tree,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            device=self.device,
            maybe_evict_swa=self._evict_windows,
        )

    def step(self, allocate: Allocate) -> torch.Tensor:
        """Place a token of each request."""
        slots = allocate(self.batch(), 1)
        for request in self.requests:
            request.length += 1
        return slots

    def state(self) -> dict[str, Any]:
        """Copies of all that a step may change."""
        both = (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator)
        pools = dict(zip(("full", "window"), both, strict=True))
        state: dict[str, Any] = {
            f"{name} {what}": pages.clone()
            for name, pool in pools.items()
            for what, pages in (("free", pool.free_pages), ("all", pool.get_all_free_pages()))
        }
        return state | {
            "staged": [pool.num_staged_pages for pool in pools.values()],
            "map": self.allocator.full_to_swa_index_mapping.clone(),
            "table": self.table.req_to_token.clone(),
            "counters": [vars(request.kv).copy() for request in self.requests],
            "log": list(self.tree.log),
        }

    def _both(self, values: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device, and on the CPU."""
        made = torch.tensor(values, dtype=torch.int64)
        return made.to(self.device), made

    def _evict_windows(self) -> None:
        self.tree.log.append("windows")
        self.allocator.free_group_begin()
        for request in self.requests:
            start, end = request.evicted, (request.length - WINDOW) // PAGE * PAGE
            if end > start:
                slots = self.table.req_to_token[request.row, start:end].long()
                self.allocator.free_swa_segment(slots, start_pos=start)
                request.evicted = end
        self.allocator.free_group_end()


def change(world: World, rng: random.Random, most: int) -> None:
    """Some requests end, some begin, at lengths around the borders of pages too."""
    while world.requests and rng.random() < 0.3:
        world.close(rng.randrange(len(world.requests)), keep=rng.random() < 0.6)
    while len(world.requests) < most and rng.random() < 0.8:
        length = rng.choice([rng.randint(1, 700), PAGE * rng.randint(1, 3) - rng.randint(0, 9)])
        if not world.open(length):
            break


def use_own_page_size(patch: Callable[[Any, str, Any], Any]) -> None:
    """SGLang asks a running server for it, on a GPU."""
    patch(allocation, "_alloc_page_size", lambda batch: batch.tree_cache.page_size)
