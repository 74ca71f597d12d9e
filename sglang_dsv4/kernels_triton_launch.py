"""Kernels that may start before those ahead of them end: programmatic dependent launch (PDL).

A decode step is a chain of short kernels. From compute capability 9.0 on, one that is launched so
starts while its predecessor still runs, and waits on the device instead of in a queue.

The rule: a `pdl_kernel` calls `after_previous` before it reads or writes any memory but weights.
Writes, too: what they overwrite may still be read. That is enough, for these reasons:

* The wait ends when the grid ahead has ended and what it wrote can be seen. All blocks of that grid
  waited likewise; or it was launched as usual, and began when all ahead of it had ended. So, by
  induction, all earlier work has ended, and not the last grid alone.
* What is launched as usual behind a `pdl_kernel`, copies and fills among it, begins when that has
  ended: by the above, when all has.
* Only two kernels in a row in one stream overlap. After a copy, a fill or an event of another
  stream, CUDA makes the dependency a full one; in a graph, too, where only edges between kernels
  are programmatic. There, and in a graph's first kernel, the wait ends at once: a graph begins when
  what was launched ahead of it has ended, such as another replay.
* The next grid is let in once every block of this one has begun and the one before has ended. So a
  block that waits may take room on a multiprocessor, but never from one that it waits for.

Libraries whose kernels are launched so are held to the same: each of their blocks must wait.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

import functools
import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from sglang_dsv4.backends import compute_capability
from sglang_dsv4.kernels_triton_fragments import ASSEMBLY

# With more of them, a step of 32 or 64 tokens was slower than without any of this.
MOST_PROGRAMS = 200


class _PDLKernel(JITFunction[Any]):
    """Launched so where the GPU can and the kernel is short: callers need not ask for it."""

    @staticmethod
    def launch_options(grid: tuple[int, ...]) -> dict[str, bool]:
        """What a launch with this grid adds to the caller's options."""
        early = compute_capability() >= 90 and math.prod(grid) <= MOST_PROGRAMS
        return {"launch_pdl": early}

    def run(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        return super().run(*arguments, grid=grid, **{**self.launch_options(grid), **options})


def pdl_kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit` for a kernel that follows the rule above: its first statement is
    `after_previous()`. options: of `triton.jit`."""
    if function is None:
        return functools.partial(pdl_kernel, **options)
    return _PDLKernel(function, **options) if ASSEMBLY.value else triton.jit(function, **options)


@triton.jit
def after_previous():
    """Waits until all before this one have ended, then lets the next kernel in. Nothing before
    compute capability 9.0."""
    if ASSEMBLY:
        if tl.target_info.cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
