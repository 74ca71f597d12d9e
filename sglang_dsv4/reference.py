"""RMS norm and manifold-constrained hyper-connections (mHC) in plain PyTorch.

Source: the DeepSeek-V4 paper, section 2.2, and Xie et al., 2026. Arithmetic is fp32 and each result
is rounded once. The arguments' shapes fix all others and nothing is read back to the host, so every
call can be captured in a CUDA graph. Any number of tokens is valid, also none.
"""

import torch
from torch.nn import functional

from sglang_dsv4 import dequant, fp4
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.fp8 import FP8Matrix


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A linear layer whose result is not rounded.

    x      [T, K] float: rounded to the weight's dtype first, by kernels.
    weight [N, K] float: the rows of the result's columns.
    Returns [T, N] fp32, summed in fp32.
    """
    return functional.linear(x.float(), weight.float())


def linear_fp8(
    x: torch.Tensor, weight: FP8Matrix, *, dtype: torch.dtype, groups: int = 1
) -> torch.Tensor:
    """A linear layer whose weight is in FP8, with one scale for each block of 128 x 128.

    x      [T, groups * K] float: rounded to BF16 first, by kernels.
    weight [N, K], no NaN among its codes: the rows of the result's columns.
    dtype  of the result.
    groups of rows, equally many; each multiplies K columns of x of its own. N / groups must be a
           multiple of 128 where there are several.
    Returns [T, N], summed in fp32 and rounded once. Source: spec 4.2.
    """
    rows = dequant.fp8(weight.codes.view(torch.float8_e4m3fn), weight.scales)
    return _grouped(x, rows, groups).to(dtype)


def linear_fp4(
    x: torch.Tensor, weight: FP4Matrices, *, dtype: torch.dtype, groups: int = 1
) -> torch.Tensor:
    """A linear layer whose weight is in NVFP4: one matrix of four-bit values.

    x      [T, groups * K] float: rounded to BF16 first, by kernels.
    weight E is 1, of [N, K]: the rows of the result's columns.
    dtype  of the result.
    groups of rows, equally many; each multiplies K columns of x of its own.
    Returns [T, N], summed in fp32 and rounded once.
    """
    rows = fp4.dense_values(weight.codes, weight.scales, weight.factors, weight.group)[0]
    return _grouped(x, rows, groups).to(dtype)


def _grouped(x: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
    """x [T, groups * K], weight [N, K] fp32 -> [T, N] fp32, each group of rows with its columns."""
    each, rows = x.float().unflatten(1, (groups, -1)), weight.unflatten(0, (groups, -1))
    return torch.einsum("tgi,goi->tgo", each, rows).flatten(1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, *, eps: float) -> torch.Tensor:
    """Divide every vector by its root mean square, then multiply by the weight.

    x      [..., D] float: the vectors.
    weight [D] float or None: plain factors (not 1 + w); None means all ones.
    eps    added to the mean square.
    Returns [..., D] in x's dtype.
    """
    factors = None if weight is None else weight.float()
    return functional.rms_norm(x.float(), x.shape[-1:], factors, eps).to(x.dtype)


def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the residual streams into a sub-layer's input; derive how its output is mixed back.

    streams [T, m, D] float: the residual streams.
    fn      [(2 + m) * m, m * D] fp32: projects the flattened streams to pre, post and comb logits.
    base    [(2 + m) * m] fp32: added to the logits.
    scale   [3] fp32: factors of the pre, post and comb logits.
    iterations: Sinkhorn rounds (columns, and rows between them), a fixed count.
    Returns
      x    [T, D] in streams' dtype: the sub-layer's input, before its norm.
      post [T, m] fp32: weight of the sub-layer's output in each stream.
      comb [T, m, m] fp32, indexed [source, destination]: mixes the old streams into the new ones.
    """
    m = streams.shape[1]
    wide = streams.float()  # [T, m, D]
    mix = _project(wide, fn, norm_eps)  # [T, (2 + m) * m]
    factors = torch.cat((scale[:1].expand(m), scale[1:2].expand(m), scale[2:].expand(m * m)))
    logits = torch.addcmul(base, mix, factors)
    gates = logits[:, : 2 * m].sigmoid()
    pre = gates[:, :m] + hc_eps
    post = gates[:, m:] * 2
    comb = _sinkhorn(logits[:, 2 * m :].unflatten(1, (m, m)), iterations, hc_eps)
    return _collapse(wide, pre).to(streams.dtype), post, comb


def mhc_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Write a sub-layer's output into the residual streams and mix these.

    y       [T, D] float: the sub-layer's output.
    streams [T, m, D] float: the streams that mhc_pre saw.
    post    [T, m] fp32, comb [T, m, m] fp32 [source, destination]: as mhc_pre returned them.
    Returns [T, m, D] in streams' dtype: post[k] * y + sum over j of comb[j, k] * streams[j].
    """
    written = post.unsqueeze(2) * y.float().unsqueeze(1)  # [T, m, D]
    return torch.baddbmm(written, comb.mT, streams.float()).to(streams.dtype)


def mhc_post_pre_norm(
    y: torch.Tensor | None,
    streams: torch.Tensor,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Between two sub-layers: mhc_post of the one, then mhc_pre and RMS norm of the other.

    y       [T, D] float or None: the first one's output; None before the first of all, where the
            streams stay as they are.
    streams [T, m, D] float: those that it read.
    post    [T, m] fp32, comb [T, m, m] fp32 [source, destination]: as it got them; None where y is.
    fn      [(2 + m) * m, m * D], base [(2 + m) * m], scale [3], all fp32: of the other, as in
            mhc_pre; iterations and hc_eps too.
    weight  [D] float: of its norm.
    norm_eps: added to the mean square, by both norms.
    Returns the streams [T, m, D] that the other reads, its input x [T, D] in their dtype, and the
    post [T, m] and comb [T, m, m] of its output. Rounded where the three ops round.
    """
    if y is not None:
        assert post is not None and comb is not None
        streams = mhc_post(y, streams, post, comb)
    x, post, comb = mhc_pre(
        streams, fn, base, scale, iterations=iterations, norm_eps=norm_eps, hc_eps=hc_eps
    )
    return streams, rms_norm(x, weight, eps=norm_eps), post, comb


def mhc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Collapse the residual streams after the last layer into the hidden state of the LM head.

    streams [T, m, D] float: the residual streams.
    fn [m, m * D], base [m], scale [1], all fp32: projection to one logit per stream.
    Returns [T, D] in streams' dtype, before the final norm.
    """
    wide = streams.float()
    weights = torch.addcmul(base, _project(wide, fn, norm_eps), scale).sigmoid() + hc_eps
    return _collapse(wide, weights).to(streams.dtype)


def _project(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """fn times the RMS-normalised, flattened streams (stream 0 first): [T, m, D] -> [T, rows]."""
    flat = streams.flatten(1)
    inverse_rms = torch.rsqrt(flat.square().mean(1, keepdim=True) + norm_eps)
    return functional.linear(flat, fn) * inverse_rms


def _collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the streams: [T, m, D], [T, m] -> [T, D]."""
    return torch.bmm(weights.unsqueeze(1), streams).squeeze(1)


def _sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Nearly doubly stochastic [T, m, m] from logits: softmax of rows, then columns first and last.

    Every pass C <- C / (its sums + eps) only scales rows or columns, so C = K / (rows * columns)
    with the softmax K throughout, and a column pass is columns <- K^T (1 / rows) + eps * columns:
    two small operations, where dividing the matrix itself takes three larger ones.
    """
    kernel = logits.softmax(2) + eps
    rows = columns = torch.ones_like(kernel[:, :, :1])
    columns = torch.baddbmm(columns, kernel.mT, rows.reciprocal(), beta=eps)
    for _ in range(iterations - 1):
        rows = torch.baddbmm(rows, kernel, columns.reciprocal(), beta=eps)
        columns = torch.baddbmm(columns, kernel.mT, rows.reciprocal(), beta=eps)
    return kernel / (rows * columns.mT)
