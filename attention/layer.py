"""Shared-KV multi-query attention over window rows and compressed entries."""

import torch
from torch import nn

from sglang_dsv4.attention.cache import LayerCache
from sglang_dsv4.attention.compressor import CsaCompressor, HcaCompressor
from sglang_dsv4.attention.indexer import Indexer
from sglang_dsv4.attention.metadata import IndexList, Metadata
from sglang_dsv4.attention.rope import rope_frequencies
from sglang_dsv4.backends import Ops
from sglang_dsv4.config import DSV4Config, LayerKind
from sglang_dsv4.linears import ALL_DENSE, KeptLinears, Linears
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import Stack, Weight, tensor
from sglang_dsv4.precision import Precision


class Attention(nn.Module):
    """Low-rank queries, one key/value vector per token, sinks, grouped output.

    Heads and output groups are split over tensor-parallel ranks; what feeds the cache is not, so
    every rank holds the same rows.
    """

    def __init__(
        self,
        config: DSV4Config,
        layer_id: int,
        precision: Precision,
        ops: Ops,
        parallel: Parallel,
        kept: KeptLinears = ALL_DENSE,
    ) -> None:
        super().__init__()
        self.ops, self.parallel = ops, parallel
        self.kind = config.layer_kinds[layer_id]
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.heads = config.num_attention_heads // parallel.size
        self.groups = config.o_groups // parallel.size
        self.o_lora = config.o_lora_rank
        self.scale = config.head_dim**-0.5

        hidden, q_lora = config.hidden_size, config.q_lora_rank
        group_width = config.num_attention_heads // config.o_groups * self.head_dim
        linears, latent = Linears(ops, kept), self.groups * self.o_lora
        rows = {"wq_a.weight": q_lora, "wkv.weight": self.head_dim}
        self.inputs = linears.stack("attn.inputs", hidden, rows)
        self.q_norm = Weight(q_lora)
        self.wq_b = linears.matrix("attn.wq_b", self.heads * self.head_dim, q_lora)
        self.kv_norm = Weight(self.head_dim)
        self.attn_sink = tensor(self.heads, dtype=torch.float32)
        self.wo_a = linears.matrix("attn.wo_a", latent, group_width, groups=self.groups)
        self.wo_b = linears.matrix("attn.wo_b", hidden, latent)
        self.compressor: CsaCompressor | HcaCompressor | None = None
        self.indexer: Indexer | None = None
        if self.kind is LayerKind.CSA:
            self.compressor = CsaCompressor(config, ops)
            self.indexer = Indexer(config, precision, ops, linears)
        elif self.kind is LayerKind.HCA:
            self.compressor = HcaCompressor(config, ops)
        self.fp32_inputs: Stack | None = None
        if projections := self._projections():
            self.fp32_inputs = Stack(hidden, projections)
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", rope_frequencies(config, self.kind), persistent=False)

    def _projections(self) -> dict[str, int]:
        """Rows of what the compressors and the indexer take of the layer's input, in FP32."""
        return {
            f"{part}.{name}.weight": rows
            for part, module in (("compressor", self.compressor), ("indexer", self.indexer))
            for name, rows in (module.projections.items() if module is not None else ())
        }

    def forward(self, x: torch.Tensor, meta: Metadata, cache: LayerCache) -> torch.Tensor:
        """x [T, D] (normed) -> [T, D]; the tokens' rows, entries and state go into the cache."""
        q_lora, kv = self.inputs.apart(self.inputs(x))
        q_lora = self.ops.rms_norm(q_lora, self.q_norm.weight, eps=self.eps)
        q = self.wq_b(q_lora).unflatten(-1, (self.heads, self.head_dim))
        q = self.ops.query_norm_rope(q, meta.positions, self.frequencies, eps=self.eps)
        self.ops.kv_norm_rope_store(
            kv,
            self.kv_norm.weight,
            meta.positions,
            self.frequencies,
            meta.window_store,
            cache.kv,
            eps=self.eps,
        )
        out = self.ops.sparse_attention(
            q,
            cache.kv,
            self._keys(x, q_lora, meta, cache),
            self.attn_sink,
            meta.positions,
            self.frequencies,
            scale=self.scale,
        )
        return self._project(out)

    def _keys(
        self, x: torch.Tensor, q_lora: torch.Tensor, meta: Metadata, cache: LayerCache
    ) -> IndexList:
        """The rows that each token attends to, its own entries among them: these are stored first,
        since a token sees the entry that it closes itself."""
        if self.compressor is None:
            return meta.window
        assert self.fp32_inputs is not None
        projected = self.ops.linear_fp32(x, self.fp32_inputs.weight)
        kv, gate, *for_indexer = self.fp32_inputs.apart(projected)
        self.compressor(kv, gate, self.frequencies, meta, cache)
        if self.indexer is None:
            return meta.hca_list
        selected = self.indexer(*for_indexer, q_lora, self.frequencies, meta, cache)
        return self.ops.csa_index_list(selected, meta.window, meta.entries)

    def _project(self, out: torch.Tensor) -> torch.Tensor:
        """Each group of heads goes down to o_lora channels, then all groups mix: [T, D]."""
        return self.parallel.all_reduce(self.wo_b(self.wo_a(out.flatten(1))))
