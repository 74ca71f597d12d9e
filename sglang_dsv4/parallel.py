"""Parallel ranks as the model sees them: who holds which part of what, and a sum over ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Share(NamedTuple):
    """One of `count` equal parts."""

    index: int
    count: int

    def of(self, length: int) -> range:
        """Which of `length` things are this part."""
        each, left = divmod(length, self.count)
        assert not left, f"{length} cannot be divided by {self.count}"
        return range(self.index * each, (self.index + 1) * each)


@dataclass(frozen=True)
class Parallel:
    """Rank and size of the tensor-parallel group; all_reduce sums a tensor over it.

    expert_parallel: over so many groups of neighbouring ranks the routed experts are divided; the
    ranks of a group divide each of its experts by width. All else is divided among all ranks.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = _alone
    expert_parallel: int = 1

    @property
    def share(self) -> Share:
        """This rank's, of what all ranks divide."""
        return Share(self.rank, self.size)

    @property
    def experts(self) -> Share:
        """Which of the routed experts this rank holds, with the others of its group."""
        return Share(self.rank // self._group, self.expert_parallel)

    @property
    def expert_width(self) -> Share:
        """What it holds of each of them."""
        return Share(self.rank % self._group, self._group)

    @property
    def _group(self) -> int:
        return self.size // self.expert_parallel
