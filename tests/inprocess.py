"""The model without a server: the same forward over a cache of our own, for layer-wise tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional

from sglang_dsv4 import precision, weights
from sglang_dsv4.attention.cache import PAGE, LayerCache, allocate
from sglang_dsv4.attention.metadata import Batch, Metadata, build
from sglang_dsv4.backends import Machine, Ops, choose
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.model import Model
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import Weight
from sglang_dsv4.precision import Precision


class TinyLM(torch.nn.Module):
    """Body and LM head under the names that the loader knows."""

    def __init__(self, config: DSV4Config, chosen: Precision, ops: Ops) -> None:
        super().__init__()
        self.model = Model(config, chosen, ops, Parallel())
        self.head = Weight(config.vocab_size, config.hidden_size)


@dataclass
class Request:
    """A sequence in the runner: its slot, its token pages and window pages, its length so far."""

    slot: int
    pages: list[int]
    window_pages: list[int]
    length: int = 0
    tokens: list[int] = field(default_factory=list)


class Runner:
    """Allocates pages as a server would (never page 0, in an order that is not the identity)."""

    def __init__(
        self,
        folder: Path,
        *,
        indexer_qk: str = "fp4",
        dtype: torch.dtype = torch.float32,
        pages: int = 24,
        slots: int = 9,
        context: int = 2048,
    ) -> None:
        self.config = DSV4Config.from_checkpoint(folder)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        chosen = precision.parse(f"indexer_qk={indexer_qk}")
        self.lm = TinyLM(self.config, chosen, choose(Machine("cpu", "CPU", None)))
        torch.set_default_dtype(previous)
        weights.load(self.lm, _tensors(folder), self.config, rank=0, size=1)
        self.context = context
        self.caches: tuple[LayerCache, ...] = allocate(
            self.config, pages=pages, window_pages=pages, requests=slots, dtype=dtype
        )
        self.window_map = torch.zeros(pages * PAGE + 1, dtype=torch.int64)
        self.free_pages = [page for page in range(pages - 1, 0, -1)]
        self.free_window_pages = [page for page in range(1, pages)]
        self.free_slots = [slot for slot in range(slots - 1, 0, -1)]

    def open(self, prefix: Request | None = None, length: int = 0) -> Request:
        """A new request; with a prefix it shares the first `length` tokens' pages of another."""
        assert length % PAGE == 0
        request = Request(self.free_slots.pop(), [], [])
        if prefix is not None:
            shared = length // PAGE
            request.pages = prefix.pages[:shared]
            request.window_pages = prefix.window_pages[:shared]
            request.length, request.tokens = length, prefix.tokens[:length]
        return request

    def close(self, request: Request, keep: int = 0) -> None:
        """Give back the slot, and all pages but the first `keep`."""
        self.free_slots.append(request.slot)
        self.free_pages.extend(request.pages[keep:])
        self.free_window_pages.extend(request.window_pages[keep:])

    @torch.no_grad()
    def step(self, *parts: tuple[Request, Sequence[int]]) -> list[torch.Tensor]:
        """Run new tokens of several requests in one forward: logits [new, V] for each."""
        meta = self.metadata(*parts)
        ids = torch.tensor([token for _, tokens in parts for token in tokens])
        hidden = self.lm.model(ids, meta, self.caches)
        logits = functional.linear(hidden.float(), self.lm.head.weight.float())
        for request, tokens in parts:
            request.length += len(tokens)
            request.tokens.extend(tokens)
        return list(logits.split([len(tokens) for _, tokens in parts]))

    def metadata(self, *parts: tuple[Request, Sequence[int]]) -> Metadata:
        """Grow each request by its new tokens and describe the batch."""
        for request, tokens in parts:
            while len(request.pages) * PAGE < request.length + len(tokens):
                page, window_page = self.free_pages.pop(), self.free_window_pages.pop()
                request.pages.append(page)
                request.window_pages.append(window_page)
                slots = torch.arange(PAGE)
                self.window_map[page * PAGE + slots] = window_page * PAGE + slots
        table = torch.zeros(len(parts), -(-self.context // PAGE), dtype=torch.int64)
        for row, (request, _) in enumerate(parts):
            table[row, : len(request.pages)] = torch.tensor(request.pages)
        lengths = [len(tokens) for _, tokens in parts]
        starts = [request.length for request, _ in parts]
        batch = Batch(
            positions=torch.cat(
                [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
            ),
            request=torch.arange(len(parts)).repeat_interleave(torch.tensor(lengths)),
            request_slots=torch.tensor([request.slot for request, _ in parts]),
            prefix_lens=torch.tensor(starts),
            new_lens=torch.tensor(lengths),
            page_table=table,
            window_map=self.window_map,
            max_len=self.context,
        )
        window_rows = self.caches[0].window_rows
        return build(batch, window=self.config.sliding_window, window_rows=window_rows)


def _tensors(folder: Path):
    for shard in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
