"""What the tests of every op need: its providers on this machine, and checks that all must pass."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_dsv4.backends import PROVIDERS, Machine

MACHINE = Machine.probe()


def implementations(op: str, beside: str = "") -> list[Any]:
    """Parameters for pytest: the op by every provider that this machine can run.

    beside: for a part of an op that is none itself, one whose providers have it too.
    """
    return [
        pytest.param(getattr(importlib.import_module(provider.module), op), id=provider.name)
        for provider in PROVIDERS[beside or op]
        if provider.refuses(MACHINE) is None
    ]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers that do not depend on the machine, on its device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(MACHINE.device, dtype)


def assert_stays_on_device(op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The op must run on tensors without values, as under graph capture.

    Whatever needs a value on the host (`.item()`, `nonzero`, a boolean mask, a branch) raises; a
    plain copy to the host does not.
    """
    with FakeTensorMode() as mode:
        op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)


def thorough(*values: Any) -> Any:
    """A parameter of pytest that the interpreter has time for with --thorough alone; GPUs have."""
    return pytest.param(*values, marks=pytest.mark.thorough)
