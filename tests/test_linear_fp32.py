"""linear_fp32 against the product in float64: nothing is rounded but the sum's last bits."""

import pytest
import torch

from op_checks import assert_stays_on_device, implementations, randn


@pytest.fixture(params=implementations("linear_fp32"))
def op(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(0, 8, 3), (1, 512, 7), (70, 200, 264)])
def test_equals_float64(op, dtype, tokens, inputs, outputs):
    x, weight = randn(tokens, inputs, dtype=dtype), randn(outputs, inputs, seed=1, dtype=dtype)
    result = op(x, weight)
    assert result.dtype is torch.float32
    # Far closer than BF16 could hold, and TF32 would be ten times as far off.
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=3e-6 * inputs**0.5)


def test_a_wider_input_is_rounded_at_most_to_the_weights_dtype(op):
    """An activation in FP32 meets a weight in BF16."""
    x, weight = randn(9, 128), randn(40, 128, seed=1, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().T
    rounded = x.bfloat16().double() @ weight.double().T
    result = op(x, weight).double()
    nearest = torch.minimum((result - exact).abs(), (result - rounded).abs())
    assert nearest.max() < 1e-4


def test_stays_on_device(op):
    assert_stays_on_device(op, randn(5, 64), randn(48, 64, seed=1))
