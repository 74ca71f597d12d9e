"""The decode step that graph safety looks at: a small model of ours over caches of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import cycle
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import nn

from sglang_dsv4 import linear_storage, precision, tiny_weights, weights
from sglang_dsv4.attention.cache import PAGE, LayerCache, allocate
from sglang_dsv4.attention.metadata import Batch, Metadata, list_width
from sglang_dsv4.backends import Ops, pack_weights, prepare_attention
from sglang_dsv4.components import EXPERTS, component_of
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.dequant import MXFP4_GROUP, NVFP4_GROUP
from sglang_dsv4.linear_storage import LinearStorage
from sglang_dsv4.linears import KeptLinears, holder_of
from sglang_dsv4.model import Model
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import Weight, default_dtype
from sglang_dsv4.precision import EIGHT_BITS, FOUR_BITS, Precision
from sglang_dsv4.tensor_table import expected_tensors, layer_of

CONTEXT = 1024  # tokens that a request may have: the bound that the host knows
PAGES = CONTEXT // PAGE  # of one request
# How layers hold their routed experts, in turns after a dense one: keys of `tiny_formats.ENCODERS`,
# and how many values share a scale.
GROUPS = {"mxfp4": MXFP4_GROUP, "nvfp4": NVFP4_GROUP}
# The same of other matrices: value of the component linears -> key of `ENCODERS`.
ENCODED = {EIGHT_BITS: "fp8", FOUR_BITS: "nvfp4"}

T = TypeVar("T")


class SmallLM(nn.Module):
    """Body and LM head under the names that the loader knows, without a server."""

    def __init__(
        self,
        config: DSV4Config,
        ops: Ops,
        chosen: Precision,
        parallel: Parallel,
        expert_groups: Mapping[int, int] = MappingProxyType({}),
        linears: Mapping[int, KeptLinears] = MappingProxyType({}),
    ) -> None:
        """expert_groups, linears: see `model.Model`."""
        super().__init__()
        self.ops = ops
        self.model = Model(config, chosen, ops, parallel, expert_groups, linears)
        self.head = Weight(config.vocab_size // parallel.size, config.hidden_size)

    def forward(
        self, ids: torch.Tensor, meta: Metadata, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Logits [T, V / ranks] fp32 of tokens [T]."""
        hidden = self.model(ids, meta, caches)
        return self.ops.linear_fp32(hidden, self.head.weight)


def small_lm(config: DSV4Config, ops: Ops, device: str, dtype: torch.dtype) -> SmallLM:
    """The model with random weights, or with no values at all on "meta".

    Its layers' routed experts are dense, in MXFP4 and in NVFP4, in turns; other matrices are in FP8
    and in NVFP4 in turns, as far as their shapes allow.
    """
    in_turns = zip(range(config.num_hidden_layers), cycle([None, *GROUPS]), strict=False)
    stored = {layer: how for layer, how in in_turns if how is not None}
    groups = {layer: GROUPS[how] for layer, how in stored.items()}
    linears = _linears(config)
    with default_dtype(dtype):
        lm = SmallLM(config, ops, precision.parse(""), Parallel(), groups, linears.layers)
    if device == "meta":
        return lm.to(device)
    weights.load(lm, _drawn(config, stored, linears.weights), config, rank=0, size=1)
    lm.to(device)
    pack_weights(ops, lm)
    return lm


def _linears(config: DSV4Config) -> LinearStorage:
    slots = expected_tensors(config)
    layers: dict[int, KeptLinears] = {}
    weights: dict[str, str] = {}
    for turn, form in enumerate(ENCODED):
        names = filter(holder_of, slots)
        own = [name for name in names if (layer_of(name) or 0) % len(ENCODED) == turn]
        formats = dict.fromkeys(own, linear_storage.FORMATS[form][0])
        if own:
            kept = linear_storage.decide(
                config,
                slots,
                formats,
                chosen=form,
                device="cuda",
                run=torch.bfloat16,
                ranks=1,
            )
            layers |= kept.layers
            weights |= kept.weights
    return LinearStorage(layers, weights)


def _drawn(
    config: DSV4Config, stored: Mapping[int, str], linears: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights; stored: layer -> how its routed experts are encoded; linears: name -> form of
    other weights."""
    for entry in tiny_weights.vendor_entries(config):
        layer = layer_of(entry.name) if component_of(entry.name) == EXPERTS else None
        how = None if layer is None else stored.get(layer)
        how = ENCODED.get(linears.get(entry.name, ""), how)
        yield from tiny_weights.tensors(replace(entry, stored=how), torch.float32, seed=0).items()


def caches(
    config: DSV4Config, requests: int, device: str, dtype: torch.dtype
) -> tuple[LayerCache, ...]:
    """Caches for `requests` requests of CONTEXT tokens, filled with positive numbers."""
    pages = 1 + requests * PAGES
    made = allocate(
        config,
        pages=pages,
        window_pages=pages,
        requests=requests + 1,
        dtype=dtype,
        device=device,
    )
    generator = torch.Generator().manual_seed(0)
    for cache in made if device != "meta" else ():
        for state in vars(cache).values():
            if isinstance(state, torch.Tensor):
                state.copy_(torch.rand(state.shape, generator=generator) + 0.5)
        cache.kv[0] = 0
    return made


def decode_batch(lengths: Sequence[int | None]) -> Batch:
    """One new token for each request on the CPU; lengths: tokens before it, None for padding.

    Request number r has slot r + 1 and pages of its own, as far as its length needs them.
    """
    table = torch.zeros(len(lengths), PAGES, dtype=torch.int64)
    for row, length in enumerate(lengths):
        if length is not None:
            used = length // PAGE + 1
            table[row, :used] = 1 + row * PAGES + torch.arange(used)
    prefix = torch.tensor([length or 0 for length in lengths])
    slots = [0 if length is None else row + 1 for row, length in enumerate(lengths)]
    return Batch(
        positions=prefix,
        request=torch.arange(len(lengths)),
        request_slots=torch.tensor(slots),
        prefix_lens=prefix.clone(),
        new_lens=torch.ones_like(prefix),
        page_table=table,
        window_map=torch.arange((1 + len(lengths) * PAGES) * PAGE),
        max_len=CONTEXT,
    )


def to_device(value: T, device: str) -> T:
    """A copy of a dataclass with its tensors on the device."""
    copies = {
        field.name: torch.empty_like(item, device=device).copy_(item)
        if isinstance(item, torch.Tensor)
        else item
        for field in fields(value)  # type: ignore[arg-type]
        for item in [getattr(value, field.name)]
    }
    return type(value)(**copies)


class DecodeStep:
    """One decode step over static inputs: metadata, every layer, logits.

    caches: a LayerCache per layer; batch gives the inputs' shapes. All of them belong on the device
    already, but for the batch.
    """

    def __init__(
        self,
        lm: SmallLM,
        window: int,
        caches: tuple[LayerCache, ...],
        batch: Batch,
        device: str,
    ) -> None:
        self.lm, self.window, self.caches = lm, window, caches
        self.batch = to_device(batch, device)
        self.ids = torch.zeros(batch.positions.shape[0], dtype=torch.int64, device=device)

    def fill(self, ids: Sequence[int], batch: Batch) -> None:
        """Copy a step's inputs into the static ones."""
        self.ids.copy_(torch.tensor(ids))
        for field in fields(Batch):
            target = getattr(self.batch, field.name)
            if isinstance(target, torch.Tensor):
                target.copy_(getattr(batch, field.name))

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        """Logits [rows, V] fp32."""
        rows = self.caches[0].window_rows
        build = self.lm.ops.build_metadata
        meta = build(self.batch, window=self.window, window_rows=rows)
        logits: torch.Tensor = self.lm(self.ids, meta, self.caches)
        return logits


def make_step(
    config: DSV4Config,
    ops: Ops,
    lengths: Sequence[int | None],
    device: str,
    dtype: torch.dtype = torch.float32,
) -> DecodeStep:
    """A decode step of a small model of this config, ready to run at these lengths."""
    made = caches(config, len(lengths), device, dtype)
    lm = small_lm(config, ops, device, dtype)
    for kind in config.layer_kinds if device == "cuda" else ():
        width = list_width(
            kind, window=config.sliding_window, top_k=config.index_topk, max_len=CONTEXT
        )
        prepare_attention(
            ops,
            tokens=len(lengths),
            heads=config.num_attention_heads,
            width=width,
            scale=config.head_dim**-0.5,
            device=device,
        )
    return DecodeStep(lm, config.sliding_window, made, decode_batch(lengths), device)


def described(lengths: Sequence[int | None]) -> str:
    """`1 120 -` for two requests and a padding row."""
    return " ".join("-" if length is None else str(length) for length in lengths)


class HostSync(RuntimeError):
    """The step made the host wait for the device; the cause carries the line."""


def capture(step: DecodeStep) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Warm the step up, run it where any host sync is an error, capture it under the same.

    Returns the graph and the logits that each replay overwrites. Raises HostSync.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
        with torch.cuda.graph(graph):
            logits = step.run()
    except RuntimeError as error:
        raise HostSync(str(error).partition("\n")[0]) from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return graph, logits
