"""The device's share of a decode step, or of a prompt, from a profile that SGLang's server takes of
itself.

A client's times hold the host's loop; these do not: kernels, copies and fills of the device, by
torch's profiler, while a whole batch decodes, or from a prompt's begin to its first token.
"""

import gzip
import json
import statistics
import tempfile
import time
import urllib.error
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import bench_measure as measure
from bench_measure import MeasureError

STEPS = 12  # that are asked for
TOKENS = 256  # of each answer: the profile must have begun and ended before the first answer has
ACTIVITIES = ("GPU",)
TRACES = "*.trace.json*"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events
UNEVEN = 1.5  # how many times as many launches as another step one step may have
MOST = 12  # kernels that are named
NAME = 80  # characters of each


class Event(NamedTuple):
    """Something that the device did. start, end: microseconds."""

    start: float
    end: float
    name: str


# ---- the server ----


def profile(
    server: measure.Server, prompts: Sequence[Sequence[int]], folder: Path
) -> dict[str, Any]:
    """What `step` finds while all prompts decode at once. The trace lies in `folder` meanwhile.

    SGLang's scheduler writes the trace between two steps, so it is whole before the next tokens
    come. Raises MeasureError where the server takes no profile, or an answer ends before it.
    """
    with temporary(folder) as place, ThreadPoolExecutor(1) as pool:
        begun: list[Future[None]] = []
        try:
            streams, _ = measure.stream(
                *(server, prompts, TOKENS + 1),
                lambda: begun.append(pool.submit(start, server, place, num_steps=STEPS)),
            )
        except Exception:
            stop(server)
            raise
        first_end = min(each[-1][0] for each in streams) + time.time() - time.perf_counter()
        begun[0].result()
        traces = list(Path(place).glob(TRACES))
        if not traces:
            stop(server)
        if not traces or traces[0].stat().st_mtime > first_end:
            raise MeasureError(f"an answer of {TOKENS} tokens ended before {STEPS} steps were seen")
        return step(device_events(traces[0]), STEPS)


def profile_prefill(server: measure.Server, prompt: Sequence[int], folder: Path) -> dict[str, Any]:
    """All that the device does for one token after a new prompt: `totals`, and its span_ms.

    Where SGLang runs ahead of itself (overlap), that includes one decode step, which the prompt's
    request no longer needs. Raises MeasureError where the server takes no profile.
    """
    with temporary(folder) as place:
        start(server, place)
        try:
            measure.prefill(server, prompt)
        finally:
            stop(server)  # which writes the trace
        traces = list(Path(place).glob(TRACES))
        found = device_events(traces[0]) if traces else []
        if not found:
            raise MeasureError("the profile of a prompt has no events of the device")
        span = max(one.end for one in found) - found[0].start
        return {**totals(found, 1), "span_ms": span / 1000}


def temporary(folder: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True)


def stop(server: measure.Server) -> None:
    """Or the next profile would find this one under way."""
    with suppress(urllib.error.HTTPError):
        server.request("/stop_profile", {})


def start(server: measure.Server, place: str, **limits: int) -> None:
    body: dict[str, Any] = {"output_dir": place, "activities": list(ACTIVITIES), **limits}
    body |= {"with_stack": False, "record_shapes": False}
    try:
        server.request("/start_profile", body)
    except urllib.error.HTTPError as error:
        told = error.read()[:200].decode(errors="replace").strip()
        raise MeasureError(
            f"/start_profile: HTTP {error.code}: {told}; see {server.log.name}"
        ) from None


# ---- its trace ----


def device_events(file: Path) -> list[Event]:
    """The device's events of a trace in Chrome's JSON, in the order in which they began."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8", errors="replace") as text:
        found = json.load(text)["traceEvents"]
    return sorted(
        Event(one["ts"], one["ts"] + one["dur"], one["name"])
        for one in found
        if one.get("ph") == "X" and one.get("cat") in DEVICE
    )


def step(found: Sequence[Event], asked: int) -> dict[str, Any]:
    """Averages of the whole steps among events of about `asked` steps, begun ones at both ends.

    Those of `totals`, and span_ms: median from the begin of a step's first launch to the end of its
    last, without the longest pause between steps. fewest, most: launches of a step. Raises
    MeasureError where steps cannot be told apart.
    """
    cuts = boundaries(found, asked)
    steps = [found[begin:end] for begin, end in pairwise(cuts)]
    spans = [max(one.end for one in each) - each[0].start for each in steps]
    return {
        **totals(found[cuts[0] : cuts[-1]], len(steps)),
        "span_ms": statistics.median(spans) / 1000,
        "fewest": min(map(len, steps)),
        "most": max(map(len, steps)),
        "steps": len(steps),
    }


def totals(found: Sequence[Event], steps: int) -> dict[str, Any]:
    """Of events of so many steps, for one of them.

    busy_ms: while the device did anything; what runs side by side counts once. launches: copies and
    fills included. kernels: the MOST that take longest, by name.
    """
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for one in found:
        by_name[one.name].append(one.end - one.start)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:MOST]
    return {
        "busy_ms": busy(found) / steps / 1000,
        "launches": len(found) / steps,
        "kernels": [
            {"name": name[:NAME], "launches": len(times) / steps, "us": sum(times) / steps}
            for name, times in longest
        ],
    }


def busy(found: Sequence[Event]) -> float:
    """Microseconds in which at least one of these events, ordered by their begin, ran."""
    total, until = 0.0, float("-inf")
    for one in found:
        total += max(0.0, one.end - max(one.start, until))
        until = max(until, one.end)
    return total


def boundaries(found: Sequence[Event], asked: int) -> list[int]:
    """Where steps begin: indices of `found`, of which each two neighbours hold one whole step.

    A kernel that runs once a step tells steps apart: one with about as many launches as steps were
    asked for, from the trace's one end to the other, at the most even distances. Where these are
    all the same, the cuts move to the step's longest pause, which is where the host made the device
    wait; else to the kernel of that sort with the longest pause before it.
    """
    if not found:
        raise MeasureError("the trace has no events of the device")
    places: defaultdict[str, list[int]] = defaultdict(list)
    for index, one in enumerate(found):
        places[one.name].append(index)
    once = [
        where
        for where in places.values()
        if asked - 1 <= len(where) <= asked + 2 and where[-1] - where[0] >= 0.75 * len(found)
    ]
    if not once:
        raise MeasureError(f"no kernel of {len(found)} launches runs once in each of {asked} steps")
    best = min(once, key=lambda where: max(distances(where)) - min(distances(where)))
    sizes, pauses = distances(best), before(found)
    if max(sizes) > UNEVEN * min(sizes):
        raise MeasureError(f"steps of {min(sizes)} to {max(sizes)} launches cannot be told apart")
    if len(set(sizes)) > 1:
        even = [each for each in once if max(distances(each)) <= UNEVEN * min(distances(each))]
        return max(even, key=lambda where: statistics.median(pauses[one] for one in where[1:]))
    shift = max(
        range(sizes[0]),
        key=lambda ahead: statistics.median(pauses[one + ahead] for one in best[:-1]),
    )
    return [one + shift for one in best if one + shift <= len(found)]


def distances(where: Sequence[int]) -> list[int]:
    return [after - index for index, after in pairwise(where)]


def before(found: Sequence[Event]) -> list[float]:
    """Microseconds in which nothing ran before each event."""
    pauses, until = [], found[0].start
    for one in found:
        pauses.append(one.start - until)
        until = max(until, one.end)
    return pauses
