"""What the tests of linear layers with packed weights share."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

BF16 = torch.bfloat16


def prepared(op: Callable[..., Any], weight: Any) -> Any:
    """The weight, packed as the op's module wants it."""
    module = importlib.import_module(op.__module__)
    if hasattr(module, "pack"):
        module.pack(weight)
    return weight


def among_nan(x: torch.Tensor) -> torch.Tensor:
    """The same values, followed by NaN in memory."""
    buffer = torch.full((x.numel() + 4096,), torch.nan, dtype=x.dtype, device=x.device)
    buffer[: x.numel()] = x.reshape(-1)
    return buffer[: x.numel()].view(x.shape)


def product(x: torch.Tensor, values: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """x [T, groups * K], values [N, K] -> [T, N] in float64, by groups of rows and columns."""
    each, rows = x.double().unflatten(1, (groups, -1)), values.double().unflatten(0, (groups, -1))
    return torch.einsum("tgi,goi->tgo", each, rows).flatten(1)


def assert_product(
    result: torch.Tensor, x: torch.Tensor, values: torch.Tensor, groups: int = 1
) -> None:
    """Off by less than fp32 sums may be, and one rounding. values: [N, K], of the weight."""
    exact = product(x.to(BF16), values, groups)
    sizes = product(x.to(BF16).abs(), values.abs(), groups)
    rounding = 2.0**-8 if result.dtype is BF16 else 0.0
    assert result.shape == exact.shape
    excess = (result.double() - exact).abs() - 1e-6 * sizes - rounding * exact.abs()
    assert not result.isnan().any() and (excess <= 0).all(), f"off by {excess.max()} too much"
