"""Parallel ranks as the model sees them: who holds which part of what, and a sum over ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_dsv4.config import ConfigError, DSV4Config


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Share(NamedTuple):
    """One of so many equal parts."""

    part: int
    parts: int

    def of(self, length: int) -> range:
        """Which of `length` things are this part."""
        each, left = divmod(length, self.parts)
        assert not left, f"{length} cannot be divided by {self.parts}"
        return range(self.part * each, (self.part + 1) * each)


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


def check(config: DSV4Config, size: int, expert_parallel: int = 1) -> None:
    """Raises ConfigError naming everything that so many ranks and groups cannot share evenly."""
    config.check_tensor_parallel(size)
    things = {"tensor parallel size": size, "n_routed_experts": config.n_routed_experts}
    refused = f"expert parallel size = {expert_parallel} is refused: must be"
    if expert_parallel < 1:
        raise ConfigError(f"{refused} at least 1")
    uneven = [f"{what} = {count}" for what, count in things.items() if count % expert_parallel]
    if uneven:
        raise ConfigError(f"{refused} a divisor of {', '.join(uneven)}")


def tensor_parallel_sizes(config: DSV4Config, expert_parallel: int = 1) -> list[int]:
    """Every number of ranks that can share the model evenly, its experts in so many groups."""
    sizes = range(1, config.o_groups + 1)
    return [size for size in sizes if _works(config, size, expert_parallel)]


def expert_parallel_sizes(config: DSV4Config, size: int) -> list[int]:
    """Every number of groups of so many ranks that can share the experts evenly."""
    return [groups for groups in range(1, size + 1) if _works(config, size, groups)]


def _works(config: DSV4Config, size: int, expert_parallel: int) -> bool:
    try:
        check(config, size, expert_parallel)
    except ConfigError:
        return False
    return True
