"""Compressors: gated pooling of m tokens into one entry (CSA overlapping, HCA online, indexer)."""

import torch
from torch import nn

from sglang_dsv4.attention.cache import LayerCache
from sglang_dsv4.attention.metadata import Metadata
from sglang_dsv4.backends import Ops
from sglang_dsv4.config import DSV4Config, LayerKind
from sglang_dsv4.parameters import Weight, tensor


class Compressor(nn.Module):
    """What every compressor has: a bias by position, a norm, and projections of the layer's input
    to values and gate scores, whose weights lie in the layer's stack (name -> rows).

    ratio: tokens per entry; width: channels of an entry; series: 2 where windows overlap, else 1.
    """

    def __init__(self, config: DSV4Config, *, ratio: int, width: int, series: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.projections = {"wkv": series * width, "wgate": series * width}
        self.ape = tensor(ratio, series * width, dtype=torch.float32)
        self.norm = Weight(width)


class CsaCompressor(Compressor):
    """One entry for every 4 tokens, pooled from 8: the windows overlap."""

    def __init__(self, config: DSV4Config, ops: Ops) -> None:
        super().__init__(config, ratio=LayerKind.CSA.value, width=config.head_dim, series=2)
        self.ops = ops

    def forward(
        self,
        kv: torch.Tensor,
        gate: torch.Tensor,
        frequencies: torch.Tensor,
        meta: Metadata,
        cache: LayerCache,
    ) -> None:
        """kv, gate [T, series * width] float32: stores the entries that these tokens close, and the
        state they leave."""
        assert cache.csa_state is not None
        self.ops.compress_csa(
            kv,
            gate,
            self.ape,
            self.norm.weight,
            frequencies,
            meta.csa,
            meta.csa.row,
            cache.csa_state,
            cache.kv,
            eps=self.eps,
        )


class IndexCompressor(Compressor):
    """CSA's compressor for index keys: narrower, and finished on the indexer's grid."""

    def __init__(self, config: DSV4Config, ops: Ops, *, fp4: bool) -> None:
        super().__init__(config, ratio=LayerKind.CSA.value, width=config.index_head_dim, series=2)
        self.ops = ops
        self.fp4 = fp4

    def forward(
        self,
        kv: torch.Tensor,
        gate: torch.Tensor,
        frequencies: torch.Tensor,
        meta: Metadata,
        cache: LayerCache,
    ) -> None:
        """kv, gate [T, series * width] float32: stores the index keys that these tokens close, and
        the state they leave."""
        assert cache.index_state is not None and cache.index_keys is not None
        self.ops.compress_csa(
            kv,
            gate,
            self.ape,
            self.norm.weight,
            frequencies,
            meta.csa,
            meta.csa.entry,
            cache.index_state,
            cache.index_keys,
            eps=self.eps,
            fp4=self.fp4,
        )


class HcaCompressor(Compressor):
    """One entry for every 128 tokens, folded in online."""

    def __init__(self, config: DSV4Config, ops: Ops) -> None:
        super().__init__(config, ratio=LayerKind.HCA.value, width=config.head_dim, series=1)
        self.ops = ops

    def forward(
        self,
        kv: torch.Tensor,
        gate: torch.Tensor,
        frequencies: torch.Tensor,
        meta: Metadata,
        cache: LayerCache,
    ) -> None:
        """kv, gate [T, series * width] float32: stores the entries that these tokens close, and the
        state they leave."""
        assert cache.hca_state is not None
        self.ops.compress_hca(
            kv,
            gate,
            self.ape,
            self.norm.weight,
            frequencies,
            meta.hca,
            meta.positions,
            cache.hca_state,
            cache.kv,
            eps=self.eps,
        )
