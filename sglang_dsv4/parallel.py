"""Tensor parallelism as the model sees it: a rank, a size, and a sum over ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class Parallel:
    """Rank and size of the tensor-parallel group; all_reduce sums a tensor over it."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = _alone
