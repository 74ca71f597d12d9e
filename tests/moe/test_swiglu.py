"""swiglu against a loop over Python floats and against transformers."""

import math

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

from op_checks import MACHINE, assert_stays_on_device, implementations, randn
from tolerance import assert_close


@pytest.fixture(params=implementations("swiglu"))
def swiglu(request):
    return request.param


def by_loop(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    width = gate_up.shape[-1] // 2
    rows = []
    for row in gate_up.double().reshape(-1, 2 * width).tolist():
        gates = [min(value, limit) for value in row[:width]]
        ups = [max(-limit, min(value, limit)) for value in row[width:]]
        rows.append([g / (1 + math.exp(-g)) * u for g, u in zip(gates, ups, strict=True)])
    return torch.tensor(rows, dtype=torch.float64).reshape(*gate_up.shape[:-1], width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [0.5, 10.0, math.inf])
@pytest.mark.parametrize("shape", [(1, 2), (61, 128), (3, 5, 64), (0, 64)])
def test_equals_the_loop(swiglu, dtype, limit, shape):
    gate_up = randn(*shape, dtype=dtype) * 8
    result = swiglu(gate_up, limit=limit)
    assert result.dtype is dtype
    assert_close(result, by_loop(gate_up, limit))


def test_equals_transformers(swiglu):
    """Their experts' own activation, with a limit that bites."""
    config = DeepseekV4Config(
        hidden_size=32, moe_intermediate_size=64, n_routed_experts=2, swiglu_limit=1.5
    )
    gate_up = randn(20, 128) * 2
    assert_close(swiglu(gate_up, limit=1.5), DeepseekV4Experts(config)._apply_gate(gate_up))


def test_which_sides_are_clamped(swiglu):
    """gate only from above, up from both sides; before silu, not after it."""
    gate_up = torch.tensor(
        [[50.0, 1.0], [-50.0, 1.0], [1.0, 50.0], [1.0, -50.0]], device=MACHINE.device
    )
    silu = [10 / (1 + math.exp(-10)), -50 / (1 + math.exp(50)), 1 / (1 + math.exp(-1))]
    expected = torch.tensor([[silu[0]], [silu[1]], [10 * silu[2]], [-10 * silu[2]]])
    result = swiglu(gate_up, limit=10.0)
    assert_close(result.cpu(), expected)
    assert result[1] < 0  # -50 was not clamped to -10 and did not become 0


def test_stays_on_device(swiglu):
    assert_stays_on_device(swiglu, randn(3, 8), limit=10.0)
