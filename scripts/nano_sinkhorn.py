"""Sinkhorn's normalisation of mHC as one operator: alone it is half of a training step's launches.

Same arithmetic as transformers' DeepseekV4HyperConnection, same order. The backward pass is exact:
each normalisation is undone with the sum that the forward pass divided by.
"""

# Triton's kernels have no types.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_BLOCK = 64  # tokens of a program


def _sums(matrix: Tensor, axis: int, eps: float) -> Tensor:
    return matrix.sum(dim=axis, keepdim=True) + eps


@torch.library.custom_op("nano::sinkhorn", mutates_args=())
def _forward(x: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """x [tokens, 4, 4] fp32. Returns the result and what was divided by [2 * iterations - 1,
    tokens, 4]: columns, then rows and columns in turn.
    """
    sums = x.new_empty(2 * iterations - 1, len(x), 4)
    if x.is_cuda:
        out = torch.empty_like(x)
        blocks = (triton.cdiv(len(x), _BLOCK),)
        _forward_kernel[blocks](x.contiguous(), out, sums, len(x), eps, len(sums), _BLOCK)
        return out, sums
    out = x.clone()
    for i in range(len(sums)):
        divisor = _sums(out, 1 + i % 2, eps)
        sums[i] = divisor.flatten(1)
        out = out / divisor
    return out, sums


@torch.library.custom_op("nano::sinkhorn_backward", mutates_args=())
def _backward(gradient: Tensor, out: Tensor, sums: Tensor) -> Tensor:
    """The gradient of x, from the gradient of the result, the result and the sums."""
    if out.is_cuda:
        result = torch.empty_like(out)
        blocks = (triton.cdiv(len(out), _BLOCK),)
        _backward_kernel[blocks](
            gradient.contiguous(), out, sums, result, len(out), len(sums), _BLOCK
        )
        return result
    gradient, value = gradient.clone(), out
    for i in reversed(range(len(sums))):
        divisor = sums[i].unsqueeze(1 + i % 2)
        gradient = (gradient - (gradient * value).sum(1 + i % 2, keepdim=True)) / divisor
        value = value * divisor
    return gradient


@_forward.register_fake
def _(x: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(2 * iterations - 1, len(x), 4)


@_backward.register_fake
def _(gradient: Tensor, out: Tensor, sums: Tensor) -> Tensor:
    return torch.empty_like(out)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    return _backward(gradient, *ctx.saved_tensors), None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def sinkhorn(x: Tensor, iterations: int, eps: float) -> Tensor:
    """x [..., 4, 4] fp32, positive: columns normalised, then `iterations - 1` times rows and
    columns, each by its sum plus eps.
    """
    return _forward(x.reshape(-1, 4, 4), iterations, eps)[0].view(x.shape)


if triton is not None:

    @triton.jit
    def _forward_kernel(x, out, sums, tokens, eps, steps, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        cell = token[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        inside = (token < tokens)[:, None, None]
        line = token[:, None] * 4 + four[None, :]
        there = (token < tokens)[:, None]
        value = tl.load(x + cell, mask=inside, other=1.0)
        divisor = tl.sum(value, axis=1) + eps
        tl.store(sums + line, divisor, mask=there)
        value = value / divisor[:, None, :]
        for i in range(1, steps, 2):
            divisor = tl.sum(value, axis=2) + eps
            tl.store(sums + i * tokens * 4 + line, divisor, mask=there)
            value = value / divisor[:, :, None]
            divisor = tl.sum(value, axis=1) + eps
            tl.store(sums + (i + 1) * tokens * 4 + line, divisor, mask=there)
            value = value / divisor[:, None, :]
        tl.store(out + cell, value, mask=inside)

    @triton.jit
    def _backward_kernel(gradient, out, sums, result, tokens, steps, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        cell = token[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        inside = (token < tokens)[:, None, None]
        line = token[:, None] * 4 + four[None, :]
        there = (token < tokens)[:, None]
        value = tl.load(out + cell, mask=inside, other=1.0)
        slope = tl.load(gradient + cell, mask=inside, other=0.0)
        for back in range(1, steps, 2):
            i = steps - back  # columns at i, rows at i - 1
            divisor = tl.load(sums + i * tokens * 4 + line, mask=there, other=1.0)[:, None, :]
            slope = (slope - tl.sum(slope * value, axis=1)[:, None, :]) / divisor
            value = value * divisor
            divisor = tl.load(sums + (i - 1) * tokens * 4 + line, mask=there, other=1.0)
            divisor = divisor[:, :, None]
            slope = (slope - tl.sum(slope * value, axis=2)[:, :, None]) / divisor
            value = value * divisor
        divisor = tl.load(sums + line, mask=there, other=1.0)[:, None, :]
        slope = (slope - tl.sum(slope * value, axis=1)[:, None, :]) / divisor
        tl.store(result + cell, slope, mask=inside)
