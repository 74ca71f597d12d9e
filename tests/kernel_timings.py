"""Times kernels on a GPU and prints one table: python tests/kernel_timings.py [WORD ...]

Only cases whose names contain every word are run. A case comes from `cases()` of a timings_*.py
file, as name -> (setup, bytes): setup() makes the inputs and returns a call without arguments;
bytes is what the call has to move at least, for the bandwidth that it reaches.

Each time is the median over replays of a CUDA graph in which every call finds a cold L2: the same
graph without the calls is subtracted.
"""

import importlib
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]
Cases = Mapping[str, tuple[Callable[[], Call], int]]

REPLAYS = 30
CALLS = 10  # in a graph
FLUSHED_BYTES = 256 << 20  # several times the largest L2


def collected() -> dict[str, tuple[Callable[[], Call], int]]:
    """The cases of every timings_*.py beside this file."""
    found: dict[str, tuple[Callable[[], Call], int]] = {}
    for file in sorted(Path(__file__).parent.glob("timings_*.py")):
        cases: Cases = importlib.import_module(file.stem).cases()
        repeated = found.keys() & cases.keys()
        assert not repeated, f"{file.name} repeats {sorted(repeated)}"
        found.update(cases)
    return found


def microseconds(call: Call) -> float:
    """Of one call on the device, in a graph, with a cold L2."""
    buffer = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    with_calls = _graph(lambda: (buffer.zero_(), call()))
    without = _graph(buffer.zero_)
    difference = _replay_time(with_calls) - _replay_time(without)
    return difference * 1000 / CALLS


def _graph(step: Call) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            step()
    return graph


def _replay_time(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of a replay, the median."""
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the host has launched everything before the clock starts
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main(words: list[str]) -> int:
    if not torch.cuda.is_available():
        print("kernel_timings: needs a GPU", file=sys.stderr)
        return 1
    cases = {n: case for n, case in collected().items() if all(word in n for word in words)}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'case':<60} {'us':>9} {'GB/s':>8}")
    for name, (setup, size) in cases.items():
        try:
            time = microseconds(setup())
            print(f"{name:<60} {time:>9.1f} {size / time / 1000:>8.0f}", flush=True)
        except Exception as error:  # one broken case must not hide the others' times
            print(f"{name:<60} failed: {type(error).__name__}: {error}", flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
