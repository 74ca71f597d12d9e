"""rms_norm against a loop over Python floats and against transformers."""

import math

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4RMSNorm,
    DeepseekV4UnweightedRMSNorm,
)

from op_checks import assert_stays_on_device, implementations, randn
from tolerance import assert_close

EPS = 1e-6


def by_loop(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]).tolist():
        root = math.sqrt(sum(value * value for value in row) / len(row) + EPS)
        factors = [1.0] * len(row) if weight is None else weight.double().tolist()
        rows.append([value / root * factor for value, factor in zip(row, factors, strict=True)])
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


@pytest.mark.parametrize("op", implementations("rms_norm"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(1, 64), (61, 128), (3, 5, 512), (0, 128)])
def test_equals_the_loop(op, dtype, weighted, shape):
    x = randn(*shape, dtype=dtype) * 3
    weight = randn(shape[-1], seed=1, dtype=dtype) if weighted else None
    result = op(x, weight, eps=EPS)
    assert result.dtype is dtype
    # One rounding: a product that was rounded before the weight would miss this tolerance.
    assert_close(result, by_loop(x, weight))


@pytest.mark.parametrize("op", implementations("rms_norm"))
def test_equals_transformers(op):
    x, weight = randn(7, 128), randn(128, seed=1)
    theirs = DeepseekV4RMSNorm(128, eps=EPS).to(x.device)
    theirs.weight.data.copy_(weight)
    assert_close(op(x, weight, eps=EPS), theirs(x))
    assert_close(op(x, None, eps=EPS), DeepseekV4UnweightedRMSNorm(eps=EPS)(x))


@pytest.mark.parametrize("op", implementations("rms_norm"))
def test_edges(op):
    x = randn(4, 64)
    x[0] = 0
    x[1] *= 1e-4  # where eps matters
    x[2] *= 1e15  # the square is still finite
    assert_close(op(x, None, eps=EPS), by_loop(x, None))
    strided = randn(4, 128)[:, ::2]
    assert_close(op(strided, None, eps=EPS), by_loop(strided, None))
    assert_stays_on_device(op, x, randn(64), eps=EPS)
