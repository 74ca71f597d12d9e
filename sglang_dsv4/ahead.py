"""Compiles the kernels of a server while its weights load."""

import contextvars
import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from sglang_dsv4 import warmup
from sglang_dsv4.backends import on_this_gpu
from sglang_dsv4.warmup import Builder, Target, Warmed


class Ahead:
    """Our kernels as they compile in the background, for a process that launches them afterwards.

    Begin, `finish` and `stop` belong to the thread that launches. What it may do in between: a
    kernel's variant that is under way is in Triton's cache of that kernel as a FutureKernel, so
    that a launch waits for it; every other variant compiles at its launch as ever, since the mode
    in which Triton compiles in a pool is a context variable, set here in a copy of the context.
    Only the thread that begins asks Triton for the current device, whose variants these are.
    """

    def __init__(self, target: Target, beside: Sequence[Builder] = ()) -> None:
        """Notes the launches of `target`, and begins. beside: what else is built meanwhile, in a
        thread of its own, on the current device."""
        self.target = target
        with torch.device("cpu"):  # a host builds its models with another default
            self.launches = warmup.launches(target)
        self.begin = self.end = time.monotonic()
        self.waited = 0.0  # seconds that `finish` took
        # First, as nvcc takes longer than any kernel.
        self.pool = ThreadPoolExecutor(thread_name_prefix="kernels ahead")
        self.waits = [
            (name, self._timed(self.pool.submit(on_this_gpu(build)))) for name, build in beside
        ]
        self.waits += contextvars.copy_context().run(self._begin_kernels)

    def _begin_kernels(self) -> list[tuple[str, Callable[[], Any]]]:
        mode = importlib.import_module("triton").AsyncCompileMode(self.pool)
        mode.__enter__()  # left with the context: its exit would wait
        begun = [(name, warmup.begin(build)) for name, build in warmup.builders_of(self.launches)]
        for future in mode.raw_futures:
            self._timed(future)
        return begun

    def _timed(self, future: "Future[Any]") -> Callable[[], Any]:
        def note(_: object) -> None:
            self.end = time.monotonic()

        future.add_done_callback(note)
        return future.result

    def finish(self) -> Warmed:
        """Wait for all: as `warmup.warm`; seconds are from the begin to the last that was built.
        What failed is compiled again when it is launched."""
        start = time.monotonic()
        failed = warmup.failures(self.waits)
        self.pool.shutdown()
        self.waited = round(time.monotonic() - start, 1)
        if failed:
            self._forget()
        built = len(self.waits) - len(failed)
        done = Warmed(self.target.key(), built, failed, round(self.end - self.begin, 1))
        warmup.remember(done)
        return done

    def stop(self) -> None:
        """Wait for nothing: what has not begun never will, and compiles when it is launched."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self._forget()

    def _forget(self) -> None:
        for launch in self.launches:
            launch.forget()
