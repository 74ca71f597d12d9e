"""Parts of gpu_acceptance.py that count launches and device time by layer: of a decode step, and of
the prefill of a prompt.

A model of one kind of layer at Flash's widths, less the same model with one layer fewer, is that
layer: so its launches need no markers. Metadata, embedding, collapse and head are the rest.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_acceptance import Run
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from sglang_dsv4.backends import Machine, choose
from sglang_dsv4.bench_step import make_step
from sglang_dsv4.cli_make_tiny import shipped_config
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.dequant import MXFP4_GROUP
from sglang_dsv4.graph_safety_device import provider_names
from sglang_dsv4.graph_safety_step import DecodeStep
from sglang_dsv4.precision import parse
from sglang_dsv4.settings import Settings

LENGTH = 900  # tokens of each request that decodes
KINDS = {"SWA": 0, "CSA": 4, "HCA": 128}


@dataclass(frozen=True)
class Counted:
    """Launches of one step by kernel, and microseconds of device time by kernel."""

    launches: Mapping[str, float]
    time: Mapping[str, float]

    def __sub__(self, other: "Counted") -> "Counted":
        return Counted(
            _less(self.launches, other.launches),
            _less(self.time, other.time),
        )


def _less(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    names = sorted({*one, *other})
    found = {name: one.get(name, 0) - other.get(name, 0) for name in names}
    return {name: value for name, value in found.items() if abs(value) > 1e-6}


@dataclass(frozen=True)
class Size:
    """Requests with `context` tokens each and `new` more, and how often they run."""

    name: str
    requests: int
    context: int
    new: int
    runs: int


def profile_part(run: Run) -> dict[str, Any]:
    """Of a decode step, as a graph: see `by_layer`."""
    batches = (1, 16, 64) if run.on_gpu else (2,)
    return by_layer(run, [Size(f"batch {n}", n, LENGTH, 1, 20) for n in batches])


def prefill_part(run: Run) -> dict[str, Any]:
    """Of one new prompt, run eagerly as servers do: see `by_layer`."""
    lengths = (1024, 8192) if run.on_gpu else (64,)
    return by_layer(run, [Size(f"{n} tokens", 1, 0, n, 3) for n in lengths])


def by_layer(run: Run, sizes: Sequence[Size]) -> dict[str, Any]:
    """Rows: layer kind, size, launches, microseconds; then the kernels of each kind, those that
    take longest first."""
    table: list[list[Any]] = [["layer", "size", "launches", "us a layer"]]
    kernels: dict[str, Any] = {}
    for size in sizes:
        base = counted(run, [0], 0, size)
        found = {
            "SWA, hash-routed": counted(run, [0, 0], 2, size) - counted(run, [0], 1, size),
            **{
                f"{kind}, scored": counted(run, [0, ratio], 0, size) - base
                for kind, ratio in KINDS.items()
            },
        }
        found["all but the layers"] = base - found["SWA, scored"]
        for name, one in found.items():
            row = [name, size.name, sum(one.launches.values()), sum(one.time.values())]
            table.append([round(cell, 1) if isinstance(cell, float) else cell for cell in row])
            kernels[f"{name}, {size.name}"] = {
                kernel: [round(one.launches.get(kernel, 0), 2), round(time, 2)]
                for kernel, time in sorted(one.time.items(), key=lambda item: -item[1])
            }
    listed: list[list[Any]] = []
    for name, one in kernels.items():
        listed.append([f"-- {name}", "", "", ""])
        listed += [[f"   {kernel[:70]}", "", *row] for kernel, row in one.items()]
    ok = all(row[2] > 0 for row in table[1:])
    return {"ok": ok, "table": table + listed, "kernels": kernels}


def counted(run: Run, ratios: list[int], hashed: int, size: Size) -> Counted:
    """Of one step of a model with these layers, the average of all its runs but the first."""
    step = made_step(run, ratios, hashed, size)
    replay: Callable[[], Any] = step.run
    if run.on_gpu and size.new == 1:
        from sglang_dsv4.graph_safety_step import capture

        replay = capture(step)[0].replay
    replay()
    activity = ProfilerActivity.CUDA if run.on_gpu else ProfilerActivity.CPU
    steps = size.runs if run.on_gpu else 1
    with profile(activities=[activity]) as profiled, record_function("steps"):
        for _ in range(steps):
            replay()
        if run.on_gpu:
            torch.cuda.synchronize()
    launches: defaultdict[str, float] = defaultdict(float)
    time: defaultdict[str, float] = defaultdict(float)
    for event in profiled.events():
        on_device = event.device_type == DeviceType.CUDA
        if on_device == run.on_gpu and event.name != "steps":
            launches[event.name] += 1 / steps
            time[event.name] += (
                event.self_device_time_total if run.on_gpu else event.self_cpu_time_total
            ) / steps
    return Counted(launches, time)


def made_step(run: Run, ratios: list[int], hashed: int, size: Size) -> DecodeStep:
    """A step at Flash's widths with experts in MXFP4 and other matrices as the switch linears says,
    or on a CPU at the tiny model's in BF16, with random weights that spread tokens over experts."""
    raw = shipped_config("flash-2l" if run.on_gpu else "tiny", "bfloat16") | {
        "num_hidden_layers": len(ratios),
        "num_hash_layers": hashed,
        "compress_ratios": [*ratios, 0],
        "n_routed_experts": 256 if run.on_gpu else 8,
        "vocab_size": 1024,
    }
    settings, machine = Settings.read(), Machine.probe(run.device)
    ops = choose(machine, provider_names(machine, settings.ops))
    group = MXFP4_GROUP if run.on_gpu else None
    return make_step(
        DSV4Config.from_dict(raw),
        ops,
        parse(settings.precision),
        size.requests,
        size.context,
        group,
        size.new,
    )
