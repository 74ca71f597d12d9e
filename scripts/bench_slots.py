#!/usr/bin/env python3
"""Host time of placing a decode step's new tokens, ours against SGLang's: --help"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

import torch  # noqa: E402
from sglang.srt.mem_cache import allocation  # noqa: E402

from allocation_world import PAGE, Allocate, World, use_own_page_size  # noqa: E402
from sglang_dsv4.backends import Machine, choose  # noqa: E402
from sglang_dsv4.host_slots import DecodeSlots  # noqa: E402

DESCRIPTION = """\
Calls SGLang's alloc_for_decode and ours in turn, on equal pools and requests of equal lengths, and
prints microseconds of host time a call: the median and the 90th percentile. What SGLang's scheduler
does around it is left out, and so is what both share, the eviction of window rows. "no op" is ours
without the op: what Python takes beside the launch.

  goes on   no request begins a page
  begins    every request does

On a GPU the queue is drained before each call, so that no call waits for the device's work; `until
done` is the median of a call and the device's work together.
"""
LENGTHS = {"goes on": PAGE + 5, "begins": PAGE}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="requests")
    parser.add_argument("--calls", type=int, default=500)
    arguments = parser.parse_args(argv)
    machine = Machine.probe(arguments.device)
    ops = choose(machine)
    use_own_page_size(setattr)
    functions: dict[str, Allocate] = {
        "SGLang": allocation.alloc_for_decode_default,
        "ours": DecodeSlots(ops.decode_slots),
        "no op": DecodeSlots(lambda *_, **__: _),
    }
    print(f"{machine.name}, torch {torch.__version__}; ours by {ops.providers['decode_slots']}")
    print(f"{'requests':>8} {'step':<8} {'by':<7} {'us':>8} {'p90':>8} {'until done':>11}")
    for batch in arguments.batch:
        for step in LENGTHS:
            times = measure(functions, machine.device, batch, LENGTHS[step], arguments.calls)
            for name, (host, done) in times.items():
                middle, late = statistics.median(host), statistics.quantiles(host, n=10)[-1]
                whole = statistics.median(done)
                print(f"{batch:>8} {step:<8} {name:<7} {middle:>8.1f} {late:>8.1f} {whole:>11.1f}")
    return 0


def measure(
    functions: dict[str, Allocate], device: str, batch: int, length: int, calls: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Microseconds of each call: until it returns, and until the device is done."""
    worlds = {name: world(device, batch, length) for name in functions}
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in functions}
    for number in range(calls + calls // 10):
        for name, allocate in functions.items():
            host, done = timed(worlds[name], allocate)
            if number >= calls // 10:  # the first ones compile and warm up
                found[name][0].append(host)
                found[name][1].append(done)
    return found


def world(device: str, batch: int, length: int) -> World:
    made = World(device, pages=6 * batch + 8, window_pages=6 * batch + 8, requests=batch)
    for _ in range(batch):
        assert made.open(length)
    return made


def timed(made: World, allocate: Allocate) -> tuple[float, float]:
    """One call, after which the pools are as they were."""
    batch = made.batch()
    batch.maybe_evict_swa = lambda: None
    pools = (made.allocator.full_attn_allocator, made.allocator.swa_attn_allocator)
    before = [pool.free_pages for pool in pools]
    synchronize(made.device)
    start = time.perf_counter_ns()
    allocate(batch, 1)
    returned = time.perf_counter_ns()
    synchronize(made.device)
    done = time.perf_counter_ns()
    for pool, pages in zip(pools, before, strict=True):
        pool.free_pages = pages
    return (returned - start) / 1000, (done - start) / 1000


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
