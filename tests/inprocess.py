"""The model without a server: the same forward over a cache of our own, for layer-wise tests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from sglang_dsv4 import expert_storage, linear_storage, precision, weights
from sglang_dsv4.attention.cache import PAGE, RING, LayerCache, allocate
from sglang_dsv4.attention.metadata import Batch, Metadata
from sglang_dsv4.backends import Machine, choose, pack_weights
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.graph_safety_step import SmallLM, to_device
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import default_dtype
from sglang_dsv4.tensor_table import expected_tensors

WINDOW = 128  # tokens that the window branch sees, in every DeepSeek-V4


@dataclass
class Request:
    """A sequence: its slot, its token pages and window pages (0: evicted), its tokens so far."""

    slot: int
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)


Part = tuple[Request, Sequence[int]]  # a request and its new tokens


class Host:
    """Hands out slots and pages as a server does: never 0, and not in the order of the sequence.

    What is given back last is handed out first, so that tests can tell who gets it.
    """

    def __init__(self, *, pages: int = 24, slots: int = 9, context: int = 1024) -> None:
        self.context = context
        self.window_map = torch.zeros(pages * PAGE + 1, dtype=torch.int64)
        self.free_pages = list(range(pages - 1, 0, -1))
        self.free_window_pages = list(range(1, pages))
        self.free_slots = list(range(slots - 1, 0, -1))

    def open(self, prefix: Request | None = None, length: int = 0) -> Request:
        """A new request; with a prefix it shares the first `length` tokens' pages of another."""
        request = Request(self.free_slots.pop())
        if prefix is not None:
            assert length % PAGE == 0 and length <= prefix.length
            request.pages = prefix.pages[: length // PAGE]
            request.window_pages = prefix.window_pages[: length // PAGE]
            request.tokens = prefix.tokens[:length]
        return request

    def close(self, request: Request, keep: int = 0) -> None:
        """Give back the slot, and all pages but the first `keep`."""
        self.free_slots.append(request.slot)
        self.free_pages.extend(request.pages[keep:])
        self.free_window_pages.extend(filter(None, request.window_pages[keep:]))

    def evict(self, request: Request) -> list[int]:
        """Give back the window pages that no later token sees; returns them."""
        seen_from = max(request.length + 1 - WINDOW, 0)
        gone = []
        for number in range(seen_from // PAGE):
            page, request.window_pages[number] = request.window_pages[number], 0
            if page:
                gone.append(page)
                first = request.pages[number] * PAGE
                self.window_map[first : first + PAGE] = 0
        self.free_window_pages.extend(gone)
        return gone

    def batch(self, *parts: Part, padding: int = 0) -> Batch:
        """Grow each request by its new tokens and describe the batch, as the server would.

        Tokens are not appended. Where every request has one new token this is a decode, with the
        longest context as the bound of lengths. padding: requests to add that are nobody's.
        """
        for request, tokens in parts:
            self._grow(request, request.length + len(tokens))
        starts = [request.length for request, _ in parts] + [0] * padding
        counts = [len(tokens) for _, tokens in parts] + [1] * padding
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        max_len = max(ends) if max(counts) > 1 else self.context
        assert max(ends) <= self.context
        table = torch.zeros(len(starts), -(-max_len // PAGE), dtype=torch.int64)
        for row, (request, _) in enumerate(parts):
            table[row, : len(request.pages)] = torch.tensor(request.pages)
        return Batch(
            positions=torch.cat([torch.arange(*span) for span in zip(starts, ends, strict=True)]),
            request=torch.arange(len(starts)).repeat_interleave(torch.tensor(counts)),
            request_slots=torch.tensor([request.slot for request, _ in parts] + [0] * padding),
            prefix_lens=torch.tensor(starts),
            new_lens=torch.tensor(counts),
            page_table=table,
            window_map=self.window_map,
            max_len=max_len,
        )

    def _grow(self, request: Request, length: int) -> None:
        while len(request.pages) * PAGE < length:
            page, window_page = self.free_pages.pop(), self.free_window_pages.pop()
            request.pages.append(page)
            request.window_pages.append(window_page)
            slots = torch.arange(PAGE)
            self.window_map[page * PAGE + slots] = window_page * PAGE + slots


class Runner(Host):
    """A checkpoint's model over a cache that starts full of NaN, but for the null row.

    device: "cpu" with the reference ops, or "cuda" with those that a server would take there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        indexer_qk: str = "fp4",
        routed_experts: str = "auto",
        linears: str = "auto",
        dtype: torch.dtype = torch.float32,
        pages: int = 24,
        slots: int = 9,
        context: int = 1024,
        parallel: Parallel | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(pages=pages, slots=slots, context=context)
        self.config = DSV4Config.from_checkpoint(folder)
        self.device = device
        self.parallel = parallel = parallel or Parallel()
        chosen = precision.parse(
            f"indexer_qk={indexer_qk},routed_experts={routed_experts},linears={linears}"
        )
        ops, rank, size = choose(Machine.probe(device)), parallel.rank, parallel.size
        self.storage = expert_storage.decide(
            self.config,
            expert_storage.from_headers(folder),
            chosen=chosen.routed_experts,
            device=device,
            ranks=size,
        )
        self.linears = linear_storage.decide(
            self.config,
            expected_tensors(self.config),
            linear_storage.from_headers(folder),
            chosen=chosen.linears,
            device=device,
            run=dtype,
            ranks=size,
        )
        with default_dtype(dtype):
            self.lm = SmallLM(
                self.config, ops, chosen, parallel, self.storage.groups, self.linears.layers
            )
        self.report = weights.load(self.lm, _tensors(folder), self.config, rank=rank, size=size)
        self.lm.to(device)
        pack_weights(ops, self.lm)
        self.caches: tuple[LayerCache, ...] = allocate(
            self.config,
            pages=pages,
            window_pages=pages,
            requests=slots,
            dtype=dtype,
            device=device,
        )
        for cache in self.caches:
            for tensor in _tensors_of(cache):
                tensor.fill_(float("nan"))
            cache.kv[0] = 0

    def evict(self, request: Request) -> list[int]:
        """As the host; what was given back is NaN from then on."""
        gone = super().evict(request)
        for page in gone:
            for cache in self.caches:
                cache.kv[page * PAGE : (page + 1) * PAGE] = float("nan")
                for state in (cache.csa_state, cache.index_state):
                    if state is not None:
                        state[page * RING : (page + 1) * RING] = float("nan")
        return gone

    @torch.no_grad()
    def step(self, *parts: Part, padding: int = 0) -> list[torch.Tensor]:
        """Run new tokens of several requests in one forward: logits [new, V / ranks] for each."""
        meta = self.metadata(*parts, padding=padding)
        ids = torch.tensor([token for _, tokens in parts for token in tokens] + [0] * padding)
        logits = self.lm(ids.to(self.device), meta, self.caches)
        for request, tokens in parts:
            request.tokens.extend(tokens)
        counts = [len(tokens) for _, tokens in parts]
        return list(logits[: sum(counts)].split(counts))

    def run(self, request: Request, tokens: Sequence[int], chunk: int = 1 << 30) -> torch.Tensor:
        """Run a request's new tokens, `chunk` of them in each forward: logits [new, V]."""
        starts = range(0, len(tokens), chunk)
        return torch.cat([self.step((request, tokens[i : i + chunk]))[0] for i in starts])

    def metadata(self, *parts: Part, padding: int = 0) -> Metadata:
        """What the server's attention backend would build for this forward."""
        batch = to_device(self.batch(*parts, padding=padding), self.device)
        meta: Metadata = self.lm.ops.build_metadata(
            batch, window=self.config.sliding_window, window_rows=self.caches[0].window_rows
        )
        return meta


def _tensors_of(cache: LayerCache) -> list[torch.Tensor]:
    return [value for value in vars(cache).values() if isinstance(value, torch.Tensor)]


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for shard in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
