"""DeepSeek-V4 without its host: embedding, layers with hyper-connected streams, collapse, norm."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from sglang_dsv4.attention.cache import LayerCache
from sglang_dsv4.attention.layer import Attention
from sglang_dsv4.attention.metadata import Metadata
from sglang_dsv4.backends import Ops
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.linears import ALL_DENSE, KeptLinears
from sglang_dsv4.moe.layer import MoE
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import Weight, tensor
from sglang_dsv4.precision import Precision


class Residual(NamedTuple):
    """What goes from one sub-layer to the next: the streams that it read, and its output, which the
    next one writes into them when it reads, since one op can do both at less cost.

    y [T, D]; streams [T, m, D]; post [T, m] and comb [T, m, m] fp32: how y is written and streams
    are mixed, `mhc_post(*residual)`. Before the first sub-layer there are only streams.
    """

    y: torch.Tensor | None
    streams: torch.Tensor
    post: torch.Tensor | None
    comb: torch.Tensor | None


class DecoderLayer(nn.Module):
    """Attention, then mixture of experts; each reads a mix of the streams and writes into all."""

    def __init__(
        self,
        config: DSV4Config,
        layer_id: int,
        chosen: Precision,
        ops: Ops,
        parallel: Parallel,
        expert_group: int | None = None,
        kept: KeptLinears = ALL_DENSE,
    ) -> None:
        """expert_group: see `moe.layer.MoE`; kept: of its other matrices."""
        super().__init__()
        self.ops = ops
        self.mhc = {
            "iterations": config.hc_sinkhorn_iters,
            "norm_eps": config.rms_norm_eps,
            "hc_eps": config.hc_eps,
        }
        self.attn_norm = Weight(config.hidden_size)
        self.attn = Attention(config, layer_id, chosen, ops, parallel, kept)
        self.ffn_norm = Weight(config.hidden_size)
        self.ffn = MoE(config, layer_id, ops, parallel, expert_group, kept)
        mixes, width = (2 + config.hc_mult) * config.hc_mult, config.hc_mult * config.hidden_size
        for site in ("attn", "ffn"):
            setattr(self, f"hc_{site}_fn", tensor(mixes, width, dtype=torch.float32))
            setattr(self, f"hc_{site}_base", tensor(mixes, dtype=torch.float32))
            setattr(self, f"hc_{site}_scale", tensor(3, dtype=torch.float32))

    def forward(
        self, residual: Residual, token_ids: torch.Tensor, meta: Metadata, cache: LayerCache
    ) -> Residual:
        """From the sub-layer before to the one after; token_ids [T] feed the hash router."""
        streams, x, post, comb = self.ops.mhc_post_pre_norm(
            *residual,
            self.hc_attn_fn,
            self.hc_attn_base,
            self.hc_attn_scale,
            self.attn_norm.weight,
            **self.mhc,
        )
        streams, x, post, comb = self.ops.mhc_post_pre_norm(
            self.attn(x, meta, cache),
            streams,
            post,
            comb,
            self.hc_ffn_fn,
            self.hc_ffn_base,
            self.hc_ffn_scale,
            self.ffn_norm.weight,
            **self.mhc,
        )
        return Residual(self.ffn(x, token_ids), streams, post, comb)


class Model(nn.Module):
    """Token ids to the final hidden state; the embedding is split by vocabulary over ranks."""

    def __init__(
        self,
        config: DSV4Config,
        chosen: Precision,
        ops: Ops,
        parallel: Parallel,
        expert_groups: Mapping[int, int] = MappingProxyType({}),
        linears: Mapping[int, KeptLinears] = MappingProxyType({}),
    ) -> None:
        """expert_groups: of `expert_storage`: the layers whose routed experts lie in four bits.
        linears: of `linear_storage`: layer -> its other matrices that lie as they are stored."""
        super().__init__()
        self.ops, self.parallel = ops, parallel
        self.eps, self.hc_eps, self.hc_mult = config.rms_norm_eps, config.hc_eps, config.hc_mult
        self.embed = Weight(config.vocab_size // parallel.size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(
                *(config, i, chosen, ops, parallel),
                *(expert_groups.get(i), linears.get(i, ALL_DENSE)),
            )
            for i in range(config.num_hidden_layers)
        )
        self.norm = Weight(config.hidden_size)
        width = config.hc_mult * config.hidden_size
        self.hc_head_fn = tensor(config.hc_mult, width, dtype=torch.float32)
        self.hc_head_base = tensor(config.hc_mult, dtype=torch.float32)
        self.hc_head_scale = tensor(1, dtype=torch.float32)

    def forward(
        self, token_ids: torch.Tensor, meta: Metadata, caches: tuple[LayerCache, ...]
    ) -> torch.Tensor:
        """token_ids [T] int64 -> [T, D], ready for the LM head."""
        streams = self._embed(token_ids).unsqueeze(1).repeat(1, self.hc_mult, 1)
        residual = Residual(None, streams, None, None)
        for layer, cache in zip(self.layers, caches, strict=True):
            residual = layer(residual, token_ids, meta, cache)
        x = self.ops.mhc_head(
            self.ops.mhc_post(*residual),
            self.hc_head_fn,
            self.hc_head_base,
            self.hc_head_scale,
            norm_eps=self.eps,
            hc_eps=self.hc_eps,
        )
        return self.ops.rms_norm(x, self.norm.weight, eps=self.eps)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self.embed.weight.shape[0]
        local = token_ids - self.parallel.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        x = functional.embedding(local.clamp(0, rows - 1), self.embed.weight)
        return self.parallel.all_reduce(x.masked_fill(elsewhere.unsqueeze(1), 0))
