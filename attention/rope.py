"""Rotary frequencies: the plain base of window-only layers, the YaRN base of compressing ones."""

import math

import torch

from sglang_dsv4.config import DSV4Config, LayerKind, YarnScaling


def rope_frequencies(config: DSV4Config, kind: LayerKind) -> torch.Tensor:
    """Angle per position for each rotated channel pair of a layer.

    A layer without a compressor turns with `rope_theta` and no scaling. A layer with one turns
    everything (queries, window rows, entries, index keys) with `compress_rope_theta` under YaRN;
    neither the magnitude nor the softmax scale carries a YaRN factor.

    Returns [qk_rope_head_dim / 2] float32, in radians per token.
    """
    dim = config.qk_rope_head_dim
    if kind is LayerKind.SWA:
        return _base_frequencies(config.rope_theta, dim).float()
    base = _base_frequencies(config.compress_rope_theta, dim)
    if config.yarn is None:
        return base.float()
    return _yarn(base, config.compress_rope_theta, dim, config.yarn).float()


def _base_frequencies(theta: float, dim: int) -> torch.Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _yarn(base: torch.Tensor, theta: float, dim: int, yarn: YarnScaling) -> torch.Tensor:
    def channel(rotations: float) -> float:
        span = yarn.original_max_position_embeddings / (2 * math.pi * rotations)
        return dim * math.log(span) / (2 * math.log(theta))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return base * (1 - ramp) + base / yarn.factor * ramp
