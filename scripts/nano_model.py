"""nano as a model for training: transformers' DeepseekV4ForCausalLM, and what training adds to it.

transformers' modules and their mathematics stay; tests compare. What is replaced are their loops
(attention over blocks of the window, experts in two products), what a TF32 product would spoil
(rope angles), and what inference does not need: the indexer's loss, its FP4 grid with a straight-
through gradient, and the count of tokens per expert.
"""

# Attributes of transformers' modules have no types: mypy takes each for a Tensor or a Module.
# mypy: disable-error-code="union-attr, operator, call-overload, assignment, arg-type, list-item"

from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from nano_sinkhorn import sinkhorn
from torch import Tensor, nn
from transformers import AttentionInterface, DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

COMPRESS_RATIOS = (0, 4, 128, 4, 128)  # SWA, CSA, HCA, CSA, HCA
INDEX_TOPK = 32
WINDOW = 128  # the published models'
ALL_ENTRIES = 1 << 30  # an index_topk that selects whatever is visible
ATTENTION, EXPERTS = "nano_blocks", "nano_dense"


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """On a GPU a compiled `function` of tensors, the first of them first. Whole layers compile for
    minutes, these parts for seconds; what they leave out moves fewer bytes than they save.
    """
    compiled = torch.compile(function, dynamic=False)

    @wraps(function)
    def choose(first: Tensor, *rest: Any) -> Any:
        return (compiled if first.is_cuda else function)(first, *rest)

    return choose


def config(vocab_size: int, **overrides: Any) -> DeepseekV4Config:
    """Every kind of layer, with the head, rope and index sizes of the published models."""
    fields: dict[str, Any] = dict(
        vocab_size=vocab_size,
        hidden_size=192,
        compress_ratios=list(COMPRESS_RATIOS),
        num_hidden_layers=len(COMPRESS_RATIOS),
        num_hash_layers=2,
        num_attention_heads=4,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        index_n_heads=16,
        index_head_dim=128,
        index_topk=INDEX_TOPK,
        sliding_window=WINDOW,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 65536,
        },
    )
    return DeepseekV4Config(**(fields | overrides))


def build(settings: DeepseekV4Config, seed: int) -> DeepseekV4ForCausalLM:
    """A model in float32 whose weights are drawn for training."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(settings).float()
    _initialise(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _initialise(model: DeepseekV4ForCausalLM, generator: torch.Generator) -> None:
    """Sets what transformers leaves at one small deviation, or at zero.

    Matrices by their fan-in, those that write into the streams smaller. mHC near a residual
    network: streams mix little (a heavy diagonal), and each site reads one of them more than the
    others, so that they can become different. The bias of a position within a window differs by
    channel, so that entries keep the order of their tokens from the start. Entries are projected as
    the window's keys are, so that a query that finds a key finds the entry that holds it.
    """

    def normal(tensor: Tensor, deviation: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation)

    depth = (2 * len(model.model.layers)) ** -0.5
    for name, tensor in model.state_dict().items():  # shares memory with the model
        if name.endswith("tid2eid"):
            order = torch.rand(len(tensor), model.config.n_routed_experts, generator=generator)
            tensor.copy_(order.argsort(dim=1)[:, : tensor.shape[1]])
        elif name.endswith("position_bias"):
            normal(tensor, 1.0 if len(tensor) <= 8 else 0.5)
        elif name.endswith("embed_tokens.weight"):
            normal(tensor, 0.5)
        elif name.endswith(("hc.fn", "hc_fn")):
            normal(tensor, 0.02)
        elif tensor.dim() > 1:
            writes = any(part in name for part in ("o_b_proj", "down_proj"))
            normal(tensor, tensor.shape[-1] ** -0.5 * (depth if writes else 1.0))
    model.lm_head.weight *= 0.5
    for attention in (layer.self_attn for layer in model.model.layers):
        if attention.compressor is not None:
            own, entry = attention.kv_proj.weight, attention.compressor.kv_proj.weight
            entry.copy_(own.repeat(len(entry) // len(own), 1))
    for number, layer in enumerate(model.model.layers):
        for site, connection in enumerate((layer.attn_hc, layer.ffn_hc)):
            count = connection.hc_mult
            reads = torch.full((count,), -1.0)
            reads[(2 * number + site) % count] = 1.0
            writes = torch.randn(count, generator=generator) * 0.5
            mixes = torch.eye(count) * 4.0
            connection.base.copy_(torch.cat([reads, writes, mixes.flatten()]))
            connection.scale.fill_(0.2)


# ---- the indexer's grid ----


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


def _score_on_grid(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    query, keys, hidden = inputs  # query and keys after their rope
    return _on_grid(query), _on_grid(keys), hidden


@fused
def _index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    products = query.flatten(1, 2) @ keys.transpose(1, 2)
    products = F.relu(products).unflatten(1, query.shape[1:3])
    return (products * weights.unsqueeze(-1)).sum(dim=2)


def _score(scorer: nn.Module, query: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """DeepseekV4IndexerScorer.forward without a copy of all keys for every token.

    query [rows, tokens, heads, 128]; keys [rows, entries, 128]; hidden [rows, tokens, hidden].
    Returns [rows, tokens, entries].
    """
    scale = scorer.softmax_scale * scorer.weights_scaling
    return _index_scores(query, keys, scorer.weights_proj(hidden) * scale)


def _detached(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0].detach(), inputs[1].detach(), *inputs[2:])


def indexers(model: DeepseekV4ForCausalLM) -> list[nn.Module]:
    found = [getattr(layer.self_attn.compressor, "indexer", None) for layer in model.model.layers]
    return [indexer for indexer in found if indexer is not None]


def score_on_fp4_grid(model: DeepseekV4ForCausalLM) -> None:
    """Index queries and keys of `model` go through the grid, as in serving."""
    for indexer in indexers(model):
        indexer.scorer.register_forward_pre_hook(_score_on_grid)


# ---- attention ----


def _block_attention(
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
    """`_block_attention`, and its logits: [rows, blocks, heads, window, .], of the window with the
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


class IndexLoss:
    """What the indexers are trained with: each unit of attention on an entry wants it selected.

    Selection passes no gradient, so every indexer learns from the attention of its own layer, as
    the published model's did: cross-entropy between the attention that the layer would pay to all
    visible entries (all heads together, selected or not) and the softmax of the index scores. Both
    targets and inputs are detached: the loss trains the indexers and nothing else.
    """

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self._terms: list[Tensor] = []
        self.enabled = True
        for layer in model.model.layers:
            if hasattr(layer.self_attn.compressor, "indexer"):
                layer.self_attn.index_loss = self
                indexer = layer.self_attn.compressor.indexer
                indexer.register_forward_pre_hook(_detached)
                indexer.scorer.register_forward_hook(self._keep)
        score_on_fp4_grid(model)

    def _keep(self, scorer: nn.Module, _: Any, scores: Tensor) -> None:
        scorer.scores = scores if self.enabled else None  # [rows, tokens, entries]

    def add(self, attention: nn.Module, near: Tensor, far: Tensor) -> None:
        """Called by the layer's attention with its logits (see `_attend`)."""
        if not self.enabled or not torch.is_grad_enabled():
            return
        rate = attention.compressor.compress_rate
        scores = attention.compressor.indexer.scorer.scores
        self._terms.append(_index_loss(scores, near.detach(), far.detach(), rate))

    def take(self) -> Tensor:
        """The mean over the layers of the forward pass just done."""
        loss = torch.stack(self._terms).mean()
        self._terms.clear()
        return loss


# ---- streams ----


def _connect(connection: nn.Module, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """DeepseekV4HyperConnection.forward, with Sinkhorn's loop as one operator.

    streams [rows, tokens, 4, hidden]. Returns post [rows, tokens, 4], comb [rows, tokens, 4, 4] and
    what the layer reads [rows, tokens, hidden].
    """
    pre, post, comb = _connections(
        streams.flatten(0, 1), connection.fn, connection.base, connection.scale, connection.hc_eps
    )
    comb = sinkhorn(comb, connection.hc_sinkhorn_iters, connection.hc_eps)
    read = _read(pre, streams.flatten(0, 1))
    return tuple(part.unflatten(0, streams.shape[:2]) for part in (post, comb, read))


@fused
def _connections(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre and post [tokens, 4], comb [tokens, 4, 4] before Sinkhorn, for streams [tokens, 4, .]."""
    count = streams.shape[1]
    flat = streams.flatten(1)
    weights = F.linear(F.rms_norm(flat, flat.shape[1:], eps=1e-6), fn)
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


def _layer(
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


@fused
def _index_loss(scores: Tensor, near: Tensor, far: Tensor, rate: int) -> Tensor:
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


# ---- experts, norms, rope ----


def _dense_experts(experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """All experts for all tokens, with weight 0 for those that were not chosen.

    hidden [tokens, hidden size]; index and weights [tokens, k]. The weight goes in before the last
    product, which is linear.
    """
    shares = weights.new_zeros(len(hidden), experts.num_experts).scatter(1, index, weights)
    gate_up = hidden @ experts.gate_up_proj.flatten(0, 1).T
    inner = experts._apply_gate(gate_up.view(len(hidden), experts.num_experts, -1))
    down = experts.down_proj.transpose(1, 2).flatten(0, 1)
    return (inner * shares[..., None]).flatten(1) @ down


def _norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Both of transformers' root-mean-square norms as torch's one operator."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return F.rms_norm(x, x.shape[-1:], getattr(norm, "weight", None), eps)


@torch.no_grad()
def _exact_rope(rope: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str) -> Any:
    """Angles as products of float32, element by element; TF32 would be off by whole turns."""
    frequencies = getattr(rope, f"{layer_type}_inv_freq").float()
    angles = position_ids[..., None].float() * frequencies
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Balance:
    """Keeps the scored experts equally busy by moving the bias of their choice, without a loss."""

    def __init__(self, model: DeepseekV4ForCausalLM, rate: float = 2e-3) -> None:
        self._routers = [layer.mlp.gate for layer in model.model.layers if not layer.mlp.is_hash]
        self._rate = rate
        for router in self._routers:
            router.register_forward_hook(self._count)

    def _count(self, router: nn.Module, _: Any, output: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            chosen = output[2].flatten()
            ones = torch.ones_like(chosen, dtype=torch.float32)
            router.load = ones.new_zeros(router.num_experts).scatter_add(0, chosen, ones)

    @torch.no_grad()
    def step(self) -> None:
        for router in self._routers:
            missing = router.load.mean() - router.load
            router.e_score_correction_bias += self._rate * missing.sign()

    def loads(self) -> list[Tensor]:
        """By layer, how many tokens chose each expert in the last forward pass."""
        return [router.load for router in self._routers]

    def set_loads(self, loads: list[Tensor]) -> None:
        for router, load in zip(self._routers, loads, strict=True):
            router.load = load

    def reset(self) -> None:
        for router in self._routers:
            router.e_score_correction_bias.zero_()

    def worst(self) -> float:
        """The busiest expert's load as a multiple of the mean, over all layers."""
        return float(torch.stack([load.max() / load.mean() for load in self.loads()]).max())


def prepare(model: DeepseekV4ForCausalLM) -> tuple[IndexLoss, Balance]:
    """Puts the replacements into `model`, which then is for `forward` only."""
    AttentionInterface.register(ATTENTION, _block_attention)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _dense_experts)
    model.set_attn_implementation(ATTENTION)
    use_exact_parts(model)
    for layer in model.model.layers:
        if layer.self_attn.compressor is not None:  # a tensor: a number would be compiled in
            seen = torch.tensor(model.config.sliding_window, device=model.device)
            layer.self_attn.register_buffer("seen_window", seen, persistent=False)
        layer.forward = MethodType(_layer, layer)
        for connection in (layer.attn_hc, layer.ffn_hc):
            connection.forward = MethodType(_connect, connection)
    for indexer in indexers(model):
        indexer.scorer.forward = MethodType(_score, indexer.scorer)
    for module in model.modules():
        if type(module).__name__ in ("DeepseekV4RMSNorm", "DeepseekV4UnweightedRMSNorm"):
            module.forward = MethodType(_norm, module)
    return IndexLoss(model), Balance(model)


def use_exact_parts(model: DeepseekV4ForCausalLM) -> None:
    """Experts without loops and exact rope angles: also for generating with a cache."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _dense_experts)
    model.set_experts_implementation(EXPERTS)
    for module in model.modules():
        if type(module).__name__ == "DeepseekV4RotaryEmbedding":
            module.forward = MethodType(_exact_rope, module)


def forward(model: DeepseekV4ForCausalLM, ids: Tensor) -> Tensor:
    """Logits [rows, tokens, vocabulary] of a prepared model without a cache.

    The mask is of width 0: the layers append theirs for entries, and the window needs none.
    """
    empty = torch.zeros(*ids.shape, 0, device=ids.device)[:, None]
    return model(input_ids=ids, attention_mask={"any": empty}, use_cache=False).logits


def select(model: DeepseekV4ForCausalLM, count: int) -> None:
    """How many entries the indexers choose: INDEX_TOPK, or ALL_ENTRIES to warm up."""
    for indexer in indexers(model):
        indexer.index_topk = count


def narrow(model: DeepseekV4ForCausalLM, seen: int) -> None:
    """How many tokens the window of the layers with entries shows, itself included.

    Of what a window shows, nothing has to be found in entries. In a narrow one also what is near
    has to be, and that is learnt sooner than what is far.
    """
    for layer in model.model.layers:
        if layer.self_attn.compressor is not None:
            layer.self_attn.seen_window.fill_(seen)


def index_parameters(model: DeepseekV4ForCausalLM) -> Iterator[nn.Parameter]:
    for indexer in indexers(model):
        yield from indexer.parameters()
