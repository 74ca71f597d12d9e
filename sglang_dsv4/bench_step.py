"""The decode step that `bench` times: a cut of a preset's model, with random weights and contexts.

A layer of each kind at the preset's widths; requests of one length whose pages lie anywhere, over
caches that hold random numbers (zeros can be faster).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sglang_dsv4 import linear_storage
from sglang_dsv4.attention.cache import PAGE, LayerCache, allocate
from sglang_dsv4.attention.metadata import Batch, list_width
from sglang_dsv4.backends import Ops, pack_weights, prepare_attention
from sglang_dsv4.cli_make_tiny import shipped_config
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.dequant import FP8_BLOCK
from sglang_dsv4.formats import TensorFormat
from sglang_dsv4.graph_safety_step import DecodeStep, SmallLM
from sglang_dsv4.linear_storage import LinearStorage
from sglang_dsv4.linears import holder_of
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import default_dtype
from sglang_dsv4.precision import Precision
from sglang_dsv4.tensor_table import expected_tensors

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Preset:
    """base: preset of make-tiny. ratios: of its layers, the first of them hash-routed. experts: of
    the full model."""

    base: str
    ratios: tuple[int, ...]
    experts: int


# Pro has no layer of window attention alone, and two of its layers fill most of a GPU.
PRESETS: Mapping[str, Preset] = {
    "flash": Preset("flash-2l", (0, 4, 128), 256),
    "pro": Preset("pro-2l", (4, 128), 384),
    "tiny": Preset("tiny", (0, 4, 128), 8),
}


def preset_config(name: str, experts: int | None = None) -> DSV4Config:
    """experts: fewer than the model's, where its own do not fit into memory."""
    chosen = PRESETS[name]
    raw: dict[str, Any] = shipped_config(chosen.base, "bfloat16") | {
        "num_hidden_layers": len(chosen.ratios),
        "compress_ratios": [*chosen.ratios, 0],  # the last is the draft layer's
        "num_hash_layers": 1,
        "n_routed_experts": experts or chosen.experts,
    }
    return DSV4Config.from_dict(raw)


def make_step(
    config: DSV4Config,
    ops: Ops,
    precision: Precision,
    batch: int,
    context: int,
    group: int | None = None,
    new: int = 1,
) -> DecodeStep:
    """A step of `batch` requests that have `context` tokens each and `new` more, on the ops'
    machine: with one, of decode.

    group: values that share a scale where routed experts lie in four bits, None for BF16.
    """
    device = ops.machine.device
    caches = _caches(config, batch, context + new, device)
    for kind in set(config.layer_kinds) if new == 1 else ():
        width = list_width(
            kind, window=config.sliding_window, top_k=config.index_topk, max_len=context + 1
        )
        prepare_attention(
            ops,
            tokens=batch,
            heads=config.num_attention_heads,
            width=width,
            scale=config.head_dim**-0.5,
            device=device,
        )
    lm = _model(config, ops, precision, device, group)
    step = DecodeStep(lm, config.sliding_window, caches, _batch(batch, context, new), device)
    generator = torch.Generator().manual_seed(1)
    step.ids.copy_(torch.randint(0, config.vocab_size, step.ids.shape, generator=generator))
    return step


def _batch(requests: int, context: int, new: int) -> Batch:
    """`new` tokens each, on the CPU. Request r has slot r + 1."""
    pages = requests * -(-(context + new) // PAGE)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)) + 1
    prefix, request = torch.full((requests,), context), torch.arange(requests)
    return Batch(
        positions=context + torch.arange(new).repeat(requests),
        request=request.repeat_interleave(new),
        request_slots=request + 1,
        prefix_lens=prefix,
        new_lens=torch.full_like(prefix, new),
        page_table=order.view(requests, -1),
        window_map=torch.arange((1 + pages) * PAGE),
        max_len=context + new,
    )


def _caches(config: DSV4Config, requests: int, tokens: int, device: str) -> tuple[LayerCache, ...]:
    """tokens: of each request."""
    pages = 1 + requests * -(-tokens // PAGE)
    made = allocate(
        config,
        pages=pages,
        window_pages=pages,
        requests=requests + 1,
        dtype=DTYPE,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(0)
    for cache in made:
        for state in vars(cache).values():
            if isinstance(state, torch.Tensor):
                state.uniform_(0.5, 1.5, generator=generator)
        cache.kv.sub_(1.0)
        cache.kv[0] = 0
    return made


def _model(
    config: DSV4Config, ops: Ops, precision: Precision, device: str, group: int | None
) -> SmallLM:
    groups = {} if group is None else dict.fromkeys(range(config.num_hidden_layers), group)
    linears = stored_linears(config, precision.linears, device)
    with default_dtype(DTYPE), torch.device(device):
        lm = SmallLM(config, ops, precision, Parallel(), groups, linears.layers)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in lm.named_parameters():
        with torch.no_grad():
            _fill(name, parameter, generator)
    for name, table in lm.named_buffers():
        if name.endswith("tid2eid"):
            fill_hash_table(table, config.n_routed_experts)
    pack_weights(ops, lm)
    return lm


def stored_linears(config: DSV4Config, chosen: str, device: str) -> LinearStorage:
    """Of attention and the shared expert what stays in the form that is chosen, or for "auto" in
    that of the release, FP8."""
    slots = expected_tensors(config)
    form = linear_storage.FORMATS.get(chosen, (TensorFormat.FP8,))[0]
    formats = dict.fromkeys(filter(holder_of, slots), form)
    return linear_storage.decide(
        config, slots, formats, chosen=chosen, device=device, run=DTYPE, ranks=1
    )


def _fill(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Norms 1, matrices of a size that keeps vectors', four-bit codes any, eight-bit ones below 2;
    factors and scales of four bits stay what they are built with."""
    if parameter.dtype is torch.uint8:
        if name.endswith(".codes") and parameter.ndim == 2:
            parameter.random_(0, 0x40, generator=generator)
            parameter[::2] += 0x80  # every other row is negative
        elif name.endswith(".codes"):
            parameter.random_(0, 256, generator=generator)
    elif name.endswith(".scales"):
        parameter.fill_((FP8_BLOCK * parameter.shape[-1]) ** -0.5)
    elif name.endswith(".factors") or parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        bound = (3.0 / parameter.shape[-1]) ** 0.5
        parameter.uniform_(-bound, bound, generator=generator)


def fill_hash_table(table: torch.Tensor, experts: int) -> None:
    """table [V, k]: of token t experts t, t + s, t + 2 s, ... round the circle of all: distinct for
    each token, and all in use."""
    tokens, top_k = table.shape
    places = torch.arange(top_k, device=table.device) * max(1, experts // top_k)
    ids = torch.arange(tokens, device=table.device).unsqueeze(1)
    table.copy_((ids + places) % experts)
