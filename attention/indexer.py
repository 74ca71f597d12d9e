"""The lightning indexer of CSA layers: which entries a token attends to."""

import torch
from torch import nn

from sglang_dsv4.attention.cache import LayerCache
from sglang_dsv4.attention.compressor import IndexCompressor
from sglang_dsv4.attention.metadata import Metadata
from sglang_dsv4.backends import Ops
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.linears import Linears
from sglang_dsv4.precision import Precision


class Indexer(nn.Module):
    """Scores entries by ReLU dot products of small heads and keeps the best index_topk.

    Queries and keys lie on the FP4 grid that the model was trained for, after a Hadamard transform
    on both sides, unless precision keeps them whole; head weights and scores are float32.
    nan_scores [1] int64: how many scores were NaN since the start; `nan_watch` tells of them.
    """

    def __init__(
        self, config: DSV4Config, precision: Precision, ops: Ops, linears: Linears
    ) -> None:
        super().__init__()
        self.ops = ops
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.top_k = config.index_topk
        self.fp4 = precision.indexer_qk == "fp4"
        self.weight_scale = self.dim**-0.5 * self.heads**-0.5
        self.wq_b = linears.matrix("attn.indexer.wq_b", self.heads * self.dim, config.q_lora_rank)
        self.compressor = IndexCompressor(config, ops, fp4=self.fp4)
        inner = self.compressor.projections.items()
        self.projections = {f"compressor.{name}": rows for name, rows in inner}
        self.projections["weights_proj"] = self.heads
        self.nan_scores: torch.Tensor
        # On a GPU a memory block of its own: kernels compile for how an address is aligned.
        self.register_buffer("nan_scores", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(
        self,
        kv: torch.Tensor,
        gate: torch.Tensor,
        weights: torch.Tensor,
        q_lora: torch.Tensor,
        frequencies: torch.Tensor,
        meta: Metadata,
        cache: LayerCache,
    ) -> torch.Tensor:
        """The layer's input, projected, and q_lora [T, q] -> entry numbers [T, index_topk] int64.

        kv, gate: as IndexCompressor takes them; weights [T, heads] float32. Padded with -1.
        """
        assert cache.index_keys is not None
        self.compressor(kv, gate, frequencies, meta, cache)
        q = self.wq_b(q_lora).unflatten(-1, (self.heads, self.dim))
        q = self.ops.index_query(q, meta.positions, frequencies, fp4=self.fp4)
        return self.ops.select_entries(
            q,
            weights * self.weight_scale,
            cache.index_keys,
            meta.entries,
            top_k=self.top_k,
            nan_scores=self.nan_scores,
        )
