"""nano as a model for training: transformers' DeepseekV4ForCausalLM, and what training adds to it.

Added is what inference does not need: the indexer's loss and its straight-through gradient through
the FP4 grid, the count of tokens per expert, a window that can be narrowed. `nano_layers` has the
forwards that are replaced.
"""

# Attributes of transformers' modules have no types: mypy takes each for a Tensor or a Module.
# mypy: disable-error-code="union-attr, operator, call-overload, assignment, arg-type, list-item"

from collections.abc import Iterator
from types import MethodType
from typing import Any

import nano_layers
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

COMPRESS_RATIOS = (0, 4, 128, 4, 128)  # SWA, CSA, HCA, CSA, HCA
INDEX_TOPK = 32
WINDOW = 128  # the published models'
ALL_ENTRIES = 1 << 30  # an index_topk that selects whatever is visible
ATTENTION, EXPERTS = "nano_blocks", "nano_dense"


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
    sites = [site for layer in model.model.layers for site in (layer.attn_hc, layer.ffn_hc)]
    for number, connection in enumerate(sites):
        count = connection.hc_mult
        reads = torch.full((count,), -1.0)
        reads[number % count] = 1.0
        writes = torch.randn(count, generator=generator) * 0.5
        mixes = torch.eye(count) * 4.0
        connection.base.copy_(torch.cat([reads, writes, mixes.flatten()]))
        connection.scale.fill_(0.2)


def _detached(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0].detach(), inputs[1].detach(), *inputs[2:])


def indexers(model: DeepseekV4ForCausalLM) -> list[nn.Module]:
    found = [getattr(layer.self_attn.compressor, "indexer", None) for layer in model.model.layers]
    return [indexer for indexer in found if indexer is not None]


def score_on_fp4_grid(model: DeepseekV4ForCausalLM) -> None:
    """Index queries and keys of `model` go through the grid, as in serving."""
    for indexer in indexers(model):
        indexer.scorer.register_forward_pre_hook(nano_layers.score_on_grid)


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
        self._terms.append(nano_layers.index_loss(scores, near.detach(), far.detach(), rate))

    def take(self) -> Tensor:
        """The mean over the layers of the forward pass just done."""
        loss = torch.stack(self._terms).mean()
        self._terms.clear()
        return loss


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
    AttentionInterface.register(ATTENTION, nano_layers.block_attention)
    model.set_attn_implementation(ATTENTION)
    use_exact_parts(model)
    for layer in model.model.layers:
        if layer.self_attn.compressor is not None:  # a tensor: a number would be compiled in
            seen = torch.tensor(model.config.sliding_window, device=model.device)
            layer.self_attn.register_buffer("seen_window", seen, persistent=False)
        layer.forward = MethodType(nano_layers.decode, layer)
        for connection in (layer.attn_hc, layer.ffn_hc):
            connection.forward = MethodType(nano_layers.connect, connection)
    for indexer in indexers(model):
        indexer.scorer.forward = MethodType(nano_layers.score, indexer.scorer)
    for module in model.modules():
        if type(module).__name__ in ("DeepseekV4RMSNorm", "DeepseekV4UnweightedRMSNorm"):
            module.forward = MethodType(nano_layers.norm, module)
    return IndexLoss(model), Balance(model)


def use_exact_parts(model: DeepseekV4ForCausalLM) -> None:
    """Experts without loops and exact rope angles: also for generating with a cache."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, nano_layers.dense_experts)
    model.set_experts_implementation(EXPERTS)
    for module in model.modules():
        if type(module).__name__ == "DeepseekV4RotaryEmbedding":
            module.forward = MethodType(nano_layers.exact_rope, module)


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
