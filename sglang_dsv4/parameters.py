"""Holders of parameters under the checkpoint's own names."""

import torch
from torch import nn


class Weight(nn.Module):
    """A tensor that the checkpoint calls `<name>.weight`, of the given shape.

    It is uninitialised until loaded; its dtype is torch's default unless given.
    """

    def __init__(self, *shape: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = tensor(*shape, dtype=dtype)


def tensor(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
