"""What one rank needs of its device's memory: weights as they lie there, and the cache.

All sizes are bytes. The server sizes its pools by the same arithmetic (`host.PoolSizing`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from sglang_dsv4.attention.cache import PAGE, RING, entries_per_page
from sglang_dsv4.config import DSV4Config, LayerKind
from sglang_dsv4.dequant import FP8_BLOCK, NVFP4_GROUP
from sglang_dsv4.fp4 import ROWS
from sglang_dsv4.precision import EIGHT_BITS
from sglang_dsv4.tensor_table import Kept, Slot, layer_of

GIB = 1 << 30
# What SGLang takes for this model where nobody says otherwise: window rows for each token of the
# pool, requests that run at once, and tokens of a prompt that are computed at a time.
WINDOW_RATIO, RUNNING_REQUESTS, CHUNK = 0.1, 256, 8192
OTHER_SLOTS = 3  # rows of request state that the host keeps beside those of requests
WINDOW_PAGES = 2  # of a request: a window of 128 tokens may begin in one page and end in the next
SPARE_WINDOW_PAGES = 4  # beside a chunk: its own partial pages, and the pages of a prefix hit

# Name -> memory in GiB as programs see it, rounded down; sold as 40, 80, 48, 80, 141 and 180 GB.
GPUS = {"A100-40": 39, "A100-80": 79, "L40S": 44, "H100": 79, "H200": 139, "B200": 178}


# -------------------------------------------------------------------------------------- weights


def memory_dtype(kept: Kept, run: torch.dtype) -> torch.dtype:
    """The dtype in which a weight lies in memory, unless it stays in four bits.

    kept: what its parameter wants. run: the dtype in which the model runs.
    """
    return {Kept.FP32: torch.float32, Kept.INT64: torch.int64}.get(kept, run)


def four_bit_bytes(values: int, group: int, matrices: int) -> int:
    """Of `fp4.FP4Matrices`: half a byte a value, a scale for each group of values, and a factor
    in FP32 for each matrix of the checkpoint."""
    return values // 2 + values // group + matrices * torch.float32.itemsize


def fp8_bytes(rows: int, columns: int) -> int:
    """Of `fp8.FP8Matrix`: a byte a value, and a scale in FP32 for each block."""
    blocks = -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
    return rows * columns + blocks * torch.float32.itemsize


def nvfp4_bytes(rows: int, columns: int) -> int:
    """Of `fp4.FP4Matrix`, which has a factor for some rows."""
    return four_bit_bytes(rows * columns, NVFP4_GROUP, rows // ROWS)


def weight_bytes(
    slots: Mapping[str, Slot],
    run: torch.dtype,
    ranks: int,
    expert_groups: Mapping[int, int] = MappingProxyType({}),
    linears: Mapping[str, str] = MappingProxyType({}),
    expert_parallel: int = 1,
) -> int:
    """Weights of one of `ranks` ranks, which share what the table lets them; see `Parallel`.

    slots: as `tensor_table.expected_tensors` gives them. expert_groups: layer -> values that share
    a scale, of the layers whose routed experts stay in four bits: see `expert_storage`. linears:
    the form of slots that stay as they are stored: `linear_storage.LinearStorage.weights`.
    """
    total = experts = 0
    for name, slot in slots.items():
        share, routed = list(slot.shape), slot.expert is not None
        if slot.row.cut is not None:
            share[slot.row.cut] //= ranks // expert_parallel if routed else ranks
        values = math.prod(share)
        layer = None if slot.expert is None else layer_of(name)
        group = None if layer is None else expert_groups.get(layer)
        if name in linears:
            size = fp8_bytes(*share) if linears[name] == EIGHT_BITS else nvfp4_bytes(*share)
        elif group is None:
            size = values * memory_dtype(slot.row.kept, run).itemsize
        else:
            size = four_bit_bytes(values, group, matrices=1)
        total, experts = total + size, experts + size * routed
    return total - experts + experts // expert_parallel  # all experts have the same size


def parameter_counts(slots: Mapping[str, Slot], config: DSV4Config) -> tuple[int, int]:
    """(parameters, those that a token uses): spec 6.1, tables of hash routing not counted.

    A token uses its own experts, and all else but the embedding, of which it reads one row.
    """
    total = active = 0
    for name, slot in slots.items():
        if slot.row.kept is Kept.INT64:
            continue
        values = math.prod(slot.shape)
        total += values
        if slot.expert is None:
            active += values * (not name.startswith("embed."))
        elif slot.expert < config.num_experts_per_tok:  # all experts have the same size
            active += values
    return total, active


# ---------------------------------------------------------------------------------------- cache


@dataclass(frozen=True)
class CacheSizes:
    """What the cache costs a rank. Each rank holds all of it, since heads share keys and values.

    item_bytes: of a value in a row, 2 for BF16. States are FP32 always. See `attention.cache`.
    """

    config: DSV4Config
    item_bytes: int

    @property
    def row(self) -> int:
        """A window row or an entry, in one layer."""
        return self.config.head_dim * self.item_bytes

    def entries(self, kind: LayerKind) -> float:
        """Entries of a token of context, with their index keys, in one layer of this kind."""
        key = self.config.index_head_dim * self.item_bytes if kind is LayerKind.CSA else 0
        return entries_per_page(kind) * (self.row + key) / PAGE

    @property
    def token(self) -> float:
        """Entries of a token of context, in all layers."""
        return sum(map(self.entries, self.config.layer_kinds))

    @property
    def window_page(self) -> int:
        """A page of window rows with its rings of CSA state, in all layers."""
        widths = 4 * (self.config.head_dim + self.config.index_head_dim)
        rings = RING * widths * torch.float32.itemsize
        csa = self.config.layer_kinds.count(LayerKind.CSA)
        return PAGE * self.row * len(self.config.layer_kinds) + rings * csa

    @property
    def slot(self) -> int:
        """HCA state of a request, in all layers."""
        hca = self.config.layer_kinds.count(LayerKind.HCA)
        return 3 * self.config.head_dim * torch.float32.itemsize * hca

    @property
    def request(self) -> int:
        """What a request holds whatever its length: its window with rings, its HCA state."""
        return WINDOW_PAGES * self.window_page + self.slot

    def __str__(self) -> str:
        return (
            f"{self.token:.0f} bytes per context token, {self.request / 1e6:.2f} MB fixed per"
            " request"
        )


# ----------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Plan:
    """The memory of one rank, and what fits.

    device: the memory there is, None if unknown. fraction: of it, for weights and cache; the rest
      is for activations, graphs and communication (SGLang's --mem-fraction-static).
    weights: of this rank. context: tokens of a request.
    window_ratio: window rows for each token of the pool (SGLang's --swa-full-tokens-ratio).
    """

    weights: int
    cache: CacheSizes
    context: int
    device: int | None = None
    fraction: float = 0.9
    window_ratio: float = WINDOW_RATIO

    @property
    def usable(self) -> int:
        """For weights and cache; 0 of an unknown device."""
        return int((self.device or 0) * self.fraction)

    @property
    def room(self) -> int:
        """What is left for the cache; below 0 where not even the weights fit."""
        return self.usable - self.weights

    @property
    def fixed(self) -> int:
        """HCA states of all requests that may run, and a null page of each kind."""
        null = round(self.cache.token * PAGE) + self.cache.window_page
        return (RUNNING_REQUESTS + OTHER_SLOTS) * self.cache.slot + null

    @property
    def pages(self) -> int:
        """Pages of context that fit beside the window rows that they or a chunk need."""
        room, page, window = self.room - self.fixed, self.cache.token * PAGE, self.cache.window_page
        beside_chunk = (room - self._chunk_pages * window) / page if page else math.inf
        by_share = room / (page + self.window_ratio * window)
        return max(0, math.floor(min(beside_chunk, by_share)))

    @property
    def window_pages(self) -> int:
        """Pages of window rows: their share of the pool, but never fewer than a chunk needs."""
        return max(int(self.pages * self.window_ratio), self._chunk_pages)

    @property
    def _chunk_pages(self) -> int:
        return window_floor(min(CHUNK, self.context)) // PAGE

    @property
    def pool_tokens(self) -> int:
        """Tokens of context, of all requests together."""
        return self.pages * PAGE

    @property
    def cache_bytes(self) -> int:
        """All that is allocated for the cache."""
        pages = round(self.pages * PAGE * self.cache.token)
        return self.fixed + pages + self.window_pages * self.cache.window_page

    @property
    def requests(self) -> int:
        """How many requests of `context` tokens fit at once, at most."""
        by_tokens = self.pages // -(-self.context // PAGE)
        return min(by_tokens, self.window_pages // WINDOW_PAGES, RUNNING_REQUESTS)


def window_floor(chunk: int) -> int:
    """Window rows that a prefill chunk of so many tokens needs beside those of a prefix hit."""
    return (-(-chunk // PAGE) + SPARE_WINDOW_PAGES) * PAGE
