"""query_norm_rope against one head vector at a time in float64."""

import math
from functools import partial

import pytest
import torch

from naive_attention import EPS, rms, rope
from op_checks import MACHINE, assert_stays_on_device, implementations, randn
from tolerance import assert_close

FREQUENCIES = randn(32, seed=5).abs()
LONGEST = (1 << 20) - 1  # the model's last position


@pytest.fixture(params=implementations("query_norm_rope"))
def run(request):
    return partial(request.param, eps=EPS)


def positions_of(*values):
    return torch.tensor(values, dtype=torch.int64, device=MACHINE.device)


def by_loop(q, positions):
    result = torch.empty(q.shape, dtype=torch.float64)
    for token, position in enumerate(positions.tolist()):
        for head in range(q.shape[1]):
            normed = rms(q[token, head].cpu().double())
            result[token, head] = rope(normed, position, FREQUENCIES)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [(0,), (5, 0, 127, 128, 4095, LONGEST, 3), (), (7, 7)])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_equals_the_loop(run, dtype, positions, heads):
    q = randn(len(positions), heads, 512, dtype=dtype) * 3
    result = run(q, positions_of(*positions), FREQUENCIES)
    assert result.dtype is dtype
    assert_close(result, by_loop(q, positions_of(*positions)))


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-3, 1e15])
def test_extreme_values(run, scale):
    """Near zero eps decides; the square of 1e15 is still finite."""
    q, positions = randn(3, 2, 512) * scale, positions_of(0, 9, 700)
    assert_close(run(q, positions, FREQUENCIES), by_loop(q, positions))


def test_position_0_only_norms(run):
    q = randn(2, 3, 512)
    result = run(q, positions_of(0, 0), FREQUENCIES)
    factors = (result / q).mean(dim=-1, keepdim=True)
    assert_close(result, q * factors)


def test_tokens_and_heads_do_not_mix(run):
    q, positions = randn(6, 4, 512), positions_of(3, 1, 4, 1, 5, 9)
    whole = run(q, positions, FREQUENCIES)
    order = torch.tensor([5, 0, 3, 2, 1, 4], device=q.device)
    assert_close(run(q[order], positions[order], FREQUENCIES), whole[order])
    assert_close(run(q[2:3], positions[2:3], FREQUENCIES), whole[2:3])
    poisoned = q.clone()
    poisoned[2, 1] = math.nan
    result = run(poisoned, positions, FREQUENCIES)
    assert result[2, 1].isnan().all()
    result[2, 1] = whole[2, 1]
    assert_close(result, whole)


def test_inputs_need_not_be_contiguous(run):
    q, positions = randn(5, 3, 512), positions_of(3, 0, 1, 0, 4)
    expected = run(q, positions, FREQUENCIES)
    strided = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(run(strided, positions.repeat_interleave(2)[::2], FREQUENCIES), expected)


def test_stays_on_device(run):
    assert_stays_on_device(run, randn(3, 2, 512), positions_of(1, 2, 3), FREQUENCIES)
