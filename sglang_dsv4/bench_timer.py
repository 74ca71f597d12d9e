"""Times of a call: on a GPU by replays of a CUDA graph with a cold L2, on a CPU by the clock."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]

REPLAYS = 30
CALLS = 10  # in a graph
FLUSHED_BYTES = 256 << 20  # several times the largest L2
CPU_CALLS = 5
COPIED_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}  # many times any cache


def microseconds(call: Call, device: str) -> float:
    """Of one call, the median of several; it is made once before the clock starts.

    On a GPU every call in the graph finds a cold L2: the same graph without the calls is
    subtracted. So a call that is shorter than a launch may come out as 0.
    """
    if device == "cpu":
        return _clock(call)
    buffer = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    with_calls = _graph(lambda: (buffer.zero_(), call()))
    without = _graph(buffer.zero_)
    difference = replay_ms(with_calls) - replay_ms(without)
    return max(0.0, difference * 1000 / CALLS)


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of a replay on the device, the median."""
    return _elapsed_ms(graph.replay)


def _elapsed_ms(call: Call) -> float:
    """Of a call on the device, the median."""
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the host has launched everything before the clock starts
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth(device: str) -> float:
    """Bytes a second of a large copy, read and written: what no call can be much faster than."""
    source = torch.empty(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    source.random_(0, 256)
    target = torch.empty_like(source)

    def copy() -> Any:
        return target.copy_(source)

    # Not in a graph: there a copy is a node of another kind, and slower.
    taken = microseconds(copy, device) if device == "cpu" else _elapsed_ms(copy) * 1000
    return 2 * source.nbytes / taken * 1e6


def _graph(step: Call) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            step()
    return graph


def _clock(call: Call) -> float:
    call()
    times = []
    for _ in range(CPU_CALLS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6
