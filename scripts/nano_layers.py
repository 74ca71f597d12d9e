"""Forwards that training puts in the place of transformers': the same mathematics, less traffic.

Loops become products (attention over blocks of the window, experts in two products), parts that
move most of a step's bytes are compiled, and what a TF32 product would spoil is not one (rope
angles). Tests compare each with the module that it replaces.
"""

# Attributes of transformers' modules have no types: mypy takes each for a Tensor or a Module.
# mypy: disable-error-code="union-attr, operator, call-overload, assignment, arg-type, list-item"

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from nano_sinkhorn import sinkhorn
from torch import Tensor, nn


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """On a GPU a compiled `function` of tensors, the first of them first. Whole layers compile for
    minutes, these parts for seconds; what they leave out moves fewer bytes than they save.
    """
    compiled = torch.compile(function, dynamic=False)

    @wraps(function)
    def choose(first: Tensor, *rest: Any) -> Any:
        return (compiled if first.is_cuda else function)(first, *rest)

    return choose


# ---- the indexer: scores on its grid ----


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis, in Sylvester's order.

    A product with signs: TF32 rounds x to 11 bits first, far below the grid that follows.
    """
    number = torch.arange(x.shape[-1], device=x.device)
    common = number[:, None] & number
    for shift in (4, 2, 1):  # the parity of common's bits
        common = common ^ (common >> shift)
    signs = (1 - 2 * (common & 1)).to(x.dtype)
    return x @ signs * x.shape[-1] ** -0.5


def fp4_grid(x: Tensor) -> Tensor:
    """Blocks of 32 channels on E2M1 with a power-of-two scale; the gradient passes unchanged."""
    with torch.no_grad():
        blocks = x.unflatten(-1, (-1, 32))
        largest = blocks.abs().amax(dim=-1, keepdim=True)
        scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / 6))), 1.0)
        scaled = blocks / scale
        magnitude = scaled.abs()
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        change = (torch.round(scaled / step) * step * scale).flatten(-2) - x
    return x + change


@fused
def _on_grid(x: Tensor) -> Tensor:
    return fp4_grid(hadamard(x))


def score_on_grid(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    query, keys, hidden = inputs  # query and keys after their rope
    return _on_grid(query), _on_grid(keys), hidden


@fused
def _index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    products = query.flatten(1, 2) @ keys.transpose(1, 2)
    products = F.relu(products).unflatten(1, query.shape[1:3])
    return (products * weights.unsqueeze(-1)).sum(dim=2)


def score(scorer: nn.Module, query: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """DeepseekV4IndexerScorer.forward without a copy of all keys for every token.

    query [rows, tokens, heads, 128]; keys [rows, entries, 128]; hidden [rows, tokens, hidden].
    Returns [rows, tokens, entries].
    """
    scale = scorer.softmax_scale * scorer.weights_scaling
    return _index_scores(query, keys, scorer.weights_proj(hidden) * scale)


# ---- attention ----


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention without a cache over the window in blocks, and over all entries.

    query [rows, heads, tokens, 512]; key [rows, 1, tokens + entries, 512], which is also the value;
    attention_mask [rows, 1, tokens, entries], 0 or -inf (see `forward`). Tokens are a multiple of
    the window. Returns [rows, tokens, heads, 512].
    """
    window = module.sliding_window
    seen = getattr(module, "seen_window", None)  # see `narrow`
    out, near, far = _attend(query, key, attention_mask, module.sinks, seen, window, scaling)
    loss = getattr(module, "index_loss", None)
    if loss is not None:
        loss.add(module, near, far)
    return out, None


@fused
def _attend(
    query: Tensor,
    key: Tensor,
    mask: Tensor,
    sinks: Tensor,
    seen: Tensor | None,
    window: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_attention`, and its logits: [rows, blocks, heads, window, .], of the window with the
    sink and of all entries without the mask.
    """
    rows, heads, tokens, size = query.shape
    blocks = tokens // window
    q = query.reshape(rows, heads, blocks, window, size).transpose(1, 2)
    own = key[:, 0, :tokens].reshape(rows, blocks, window, size)
    near = torch.cat([F.pad(own, (0, 0, 0, 0, 1, 0))[:, :-1], own], dim=2)
    entries = key[:, 0, tokens:]
    near_logits = q.flatten(2, 3) @ near.transpose(-1, -2)
    near_logits = near_logits.view(rows, blocks, heads, window, 2 * window) * scaling
    near_logits = near_logits + _window_bias(blocks, window, seen, query.device)
    sink = sinks.view(1, 1, heads, 1, 1).expand(rows, blocks, heads, window, 1)
    near_logits = torch.cat([near_logits, sink], dim=-1)
    far_logits = q.reshape(rows, -1, size) @ entries.transpose(-1, -2)
    far_logits = far_logits.view(rows, blocks, heads, window, -1) * scaling
    logits = near_logits
    if entries.shape[1]:
        logits = torch.cat([logits, far_logits + mask.view(rows, blocks, 1, window, -1)], dim=-1)
    weights = logits.softmax(dim=-1)
    near_weights, far_weights = weights[..., : 2 * window], weights[..., 2 * window + 1 :]
    out = (near_weights.flatten(2, 3) @ near).view(rows, blocks, heads, window, size)
    if entries.shape[1]:
        far = far_weights.reshape(rows, -1, entries.shape[1]) @ entries
        out = out + far.view(rows, blocks, heads, window, size)
    return out.transpose(2, 3).reshape(rows, tokens, heads, size), near_logits, far_logits


def _window_bias(blocks: int, window: int, seen: Tensor | None, device: torch.device) -> Tensor:
    """[blocks, 1, window, 2 * window]: 0 where a token sees one of the last `seen` keys, or of the
    whole window.
    """
    seen = window if seen is None else seen
    token = torch.arange(window, device=device)[:, None]
    slot = torch.arange(2 * window, device=device)
    near = (slot > token + window - seen) & (slot <= token + window)
    exists = (torch.arange(blocks, device=device) > 0)[:, None, None] | (slot >= window)
    return torch.zeros((), device=device).masked_fill(~(near & exists)[:, None], float("-inf"))


@fused
def index_loss(scores: Tensor, near: Tensor, far: Tensor, rate: int) -> Tensor:
    """One layer's: scores [rows, tokens, entries], logits as in `_attend`."""
    blocks, window, count = far.shape[1], far.shape[3], far.shape[4]
    tokens = torch.arange(blocks * window, device=far.device)
    hidden = torch.arange(count, device=far.device) >= ((tokens + 1) // rate)[:, None]
    visible = far.masked_fill(hidden.view(blocks, 1, window, count), float("-inf"))
    every = torch.cat([near, visible], dim=-1).softmax(dim=-1)
    target = every[..., near.shape[-1] :].sum(dim=2).flatten(1, 2)
    # A finite low score: where nothing is visible the target is 0, and 0 * -inf is no number.
    predicted = scores.masked_fill(hidden, -1e4).log_softmax(dim=-1)
    return -(target * predicted).sum() / target.sum().clamp(min=1e-6)


# ---- streams ----


def connect(connection: nn.Module, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """DeepseekV4HyperConnection.forward, with Sinkhorn's loop as one operator.

    streams [rows, tokens, 4, hidden]. Returns post [rows, tokens, 4], comb [rows, tokens, 4, 4] and
    what the layer reads [rows, tokens, hidden].
    """
    pre, post, comb = _connections(
        streams.flatten(0, 1),
        connection.fn,
        connection.base,
        connection.scale,
        connection.hc_eps,
        connection.input_norm.eps,
    )
    comb = sinkhorn(comb, connection.hc_sinkhorn_iters, connection.hc_eps)
    read = _read(pre, streams.flatten(0, 1))
    return tuple(part.unflatten(0, streams.shape[:2]) for part in (post, comb, read))


@fused
def _connections(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre and post [tokens, 4], comb [tokens, 4, 4] before Sinkhorn, for streams [tokens, 4, .]."""
    count = streams.shape[1]
    flat = streams.flatten(1)
    weights = F.linear(F.rms_norm(flat, flat.shape[1:], eps=norm_eps), fn)
    pre, post, comb = weights.split([count, count, count * count], dim=1)
    pre_base, post_base, comb_base = base.split([count, count, count * count])
    comb = (comb * scale[2] + comb_base).unflatten(1, (count, count)).softmax(dim=-1) + eps
    pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
    return pre, 2 * torch.sigmoid(post * scale[1] + post_base), comb


@fused
def _read(pre: Tensor, streams: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * streams).sum(dim=1)


@fused
def _written(post: Tensor, comb: Tensor, out: Tensor, streams: Tensor) -> Tensor:
    """Streams [tokens, 4, hidden] mixed, with a layer's output; by sums, which fuse."""
    mixed = (comb.unsqueeze(-1) * streams.unsqueeze(2)).sum(dim=1)
    return post.unsqueeze(-1) * out.unsqueeze(1) + mixed


def decode(
    layer: nn.Module, hidden_states: Tensor, input_ids: Tensor | None = None, **options: Any
) -> Tensor:
    """DeepseekV4DecoderLayer.forward."""

    def written(*parts: Tensor) -> Tensor:
        return _written(*(part.flatten(0, 1) for part in parts)).unflatten(0, parts[0].shape[:2])

    post, comb, read = layer.attn_hc(hidden_states)
    out, _ = layer.self_attn(layer.input_layernorm(read), **options)
    streams = written(post, comb, out, hidden_states)
    post, comb, read = layer.ffn_hc(streams)
    out = layer.mlp(layer.post_attention_layernorm(read), input_ids=input_ids)
    return written(post, comb, out, streams)


# ---- experts, norms, rope ----


def dense_experts(experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """All experts for all tokens, with weight 0 for those that were not chosen.

    hidden [tokens, hidden size]; index and weights [tokens, k]. The weight goes in before the last
    product, which is linear.
    """
    shares = weights.new_zeros(len(hidden), experts.num_experts).scatter(1, index, weights)
    gate_up = hidden @ experts.gate_up_proj.flatten(0, 1).T
    inner = experts._apply_gate(gate_up.view(len(hidden), experts.num_experts, -1))
    down = experts.down_proj.transpose(1, 2).flatten(0, 1)
    return (inner * shares[..., None]).flatten(1) @ down


def norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Both of transformers' root-mean-square norms as torch's one operator."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return F.rms_norm(x, x.shape[-1:], getattr(norm, "weight", None), eps)


@torch.no_grad()
def exact_rope(rope: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str) -> Any:
    """Angles as products of float32, element by element; TF32 would be off by whole turns."""
    frequencies = getattr(rope, f"{layer_type}_inv_freq").float()
    angles = position_ids[..., None].float() * frequencies
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
