#!/usr/bin/env python3
"""How much of a decode step programmatic dependent launch saves: python scripts/experiment_pdl.py

One process builds 8 layers at Flash's widths, captures whole steps and cuts of them in each variant
of the kernels, compares what replays compute bit for bit, and times replays end to end with events.
Kernels are not edited: the variants are made of the PTX that Triton emits.

  now       as it is
  wait      griddepcontrol.wait first; launched with the attribute
  early     griddepcontrol.launch_dependents, then the wait: the next grid starts when the last
            block of this one has started, and so may those after it
  late      the wait, then launch_dependents: the next grid starts when all blocks of this one have
            started and the one before has ended
  prefetch  as early; in between, FP8 linears and mHC's projection ask the L2 for their weights
"""

import argparse
import copy
import ctypes
import functools
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

BEGIN = time.monotonic()
WAIT, LAUNCH = "\tgriddepcontrol.wait;\n", "\tgriddepcontrol.launch_dependents;\n"
VARIANTS = ("now", "wait", "early", "late", "prefetch")
RATIOS, HASHED = (0, 0, 0, 4, 128, 4, 128, 4), 1
# Cuts of the model by layer number; a kind of layer is the difference of two.
CUTS = {"base": (1,), "SWA": (1, 2), "CSA": (1, 3), "HCA": (1, 4), "step of 8": tuple(range(8))}
CONTEXT = 1060  # of captures and times
COMPARED_FROM, COMPARED = 1000, 50  # lengths 1000...1049: windows of CSA and HCA close, a page ends


# ---- what Triton compiles ----

PREFETCH_LINEAR = """\
	{
	.reg .pred %pf_p;
	.reg .b32 %pf_t, %pf_a, %pf_b, %pf_begin, %pf_end, %pf_depth;
	.reg .b64 %pf_at, %pf_more;
	mov.u32 %pf_t, %tid.x;
	setp.ge.u32 %pf_p, %pf_t, TILES;
	@%pf_p bra $PF_DONE;
	ld.param.u32 %pf_a, [NAME_param_5];
	mov.u32 %pf_b, %ctaid.x;
	div.u32 %pf_b, %pf_b, %pf_a;
	mad.lo.u32 %pf_t, %pf_b, TILES, %pf_t;
	ld.param.u32 %pf_a, [NAME_param_6];
	shr.u32 %pf_a, %pf_a, 4;
	setp.ge.u32 %pf_p, %pf_t, %pf_a;
	@%pf_p bra $PF_DONE;
	ld.param.u32 %pf_depth, [NAME_param_7];
	ld.param.u32 %pf_a, [NAME_param_9];
	mov.u32 %pf_b, %ctaid.y;
	mul.lo.u32 %pf_begin, %pf_a, %pf_b;
	add.u32 %pf_end, %pf_begin, %pf_a;
	min.u32 %pf_end, %pf_end, %pf_depth;
	sub.u32 %pf_end, %pf_end, %pf_begin;
	shl.b32 %pf_end, %pf_end, 4;
	mul.wide.u32 %pf_at, %pf_t, %pf_depth;
	cvt.u64.u32 %pf_more, %pf_begin;
	add.u64 %pf_at, %pf_at, %pf_more;
	shl.b64 %pf_at, %pf_at, 4;
	ld.param.u64 %pf_more, [NAME_param_1];
	add.u64 %pf_at, %pf_at, %pf_more;
	cp.async.bulk.prefetch.L2.global [%pf_at], %pf_end;
$PF_DONE:
	}
"""  # a program's rows are TILES runs of 16 x inputs bytes, one run a thread

PREFETCH_MHC = """\
	{
	.reg .pred %pf_p;
	.reg .b32 %pf_t, %pf_a, %pf_begin, %pf_end, %pf_hidden;
	.reg .b64 %pf_at, %pf_more;
	mov.u32 %pf_t, %tid.x;
	setp.ge.u32 %pf_p, %pf_t, 96;
	@%pf_p bra $PF_DONE;
	ld.param.u32 %pf_hidden, [NAME_param_8];
	ld.param.u32 %pf_end, [NAME_param_9];
	mov.u32 %pf_a, %ctaid.x;
	mul.lo.u32 %pf_begin, %pf_a, %pf_end;
	setp.ge.u32 %pf_p, %pf_begin, %pf_hidden;
	@%pf_p bra $PF_DONE;
	add.u32 %pf_end, %pf_begin, %pf_end;
	min.u32 %pf_end, %pf_end, %pf_hidden;
	sub.u32 %pf_end, %pf_end, %pf_begin;
	shl.b32 %pf_end, %pf_end, 2;
	mul.wide.u32 %pf_at, %pf_t, %pf_hidden;
	cvt.u64.u32 %pf_more, %pf_begin;
	add.u64 %pf_at, %pf_at, %pf_more;
	shl.b64 %pf_at, %pf_at, 2;
	ld.param.u64 %pf_more, [NAME_param_4];
	add.u64 %pf_at, %pf_at, %pf_more;
	cp.async.bulk.prefetch.L2.global [%pf_at], %pf_end;
$PF_DONE:
	}
"""  # 24 rows of 4 streams, one run of a slice's channels a thread


def prefetched(name: str, ptx: str) -> str:
    """PTX that asks the L2 for the constant weights of a program, or nothing."""
    parameters = ptx.count(f".param .u64 .ptr .global .align 1 {name}_param_")
    threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
    if name == "_linear_kernel":
        return PREFETCH_LINEAR.replace("TILES", str(threads // 32)).replace("NAME", name)
    if name in ("_post_project_token_kernel", "_post_project_tile_kernel") and parameters == 9:
        assert threads >= 96
        return PREFETCH_MHC.replace("NAME", name)
    return ""  # without y, mHC's parameters are others: one launch a step


def changed(ptx: str, variant: str) -> str:
    """The PTX with what the variant begins with as its first instructions."""
    name = re.search(r"\.visible \.entry (\w+)\(", ptx)[1]
    first = {
        "wait": WAIT,
        "early": LAUNCH + WAIT,
        "late": WAIT + LAUNCH,
        "prefetch": LAUNCH + prefetched(name, ptx) + WAIT,
    }[variant]
    assert ptx.count("// %bb.0:") == 1, name
    return re.sub(r"(// %bb\.0:.*\n)", lambda match: match[1] + first, ptx)


def use(variant: str) -> None:
    """Kernels that are launched from now on are of this variant."""
    from triton import knobs

    key = f"pdl {variant} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"

    def hook(*arguments: Any) -> Any:
        if not arguments:  # what tells variants apart in Triton's caches
            return key, hash(key)
        stages = arguments[1]
        emit = stages["ptx"]

        def stage(source: Any, metadata: dict[str, Any]) -> str:
            metadata["launch_pdl"] = True  # what the launcher reads
            return changed(emit(source, metadata), variant)

        stages["ptx"] = stage

    knobs.runtime.add_stages_inspection_hook = None if variant == "now" else hook


def machine_and_config() -> tuple[Any, Any, Any]:
    from sglang_dsv4.backends import Machine, choose
    from sglang_dsv4.cli_make_tiny import shipped_config
    from sglang_dsv4.config import DSV4Config
    from sglang_dsv4.graph_safety_device import provider_names
    from sglang_dsv4.precision import parse
    from sglang_dsv4.settings import Settings

    raw = shipped_config("flash-2l", "bfloat16") | {
        "num_hidden_layers": len(RATIOS),
        "num_hash_layers": HASHED,
        "compress_ratios": [*RATIOS, 0],
        "n_routed_experts": 256,
        "vocab_size": 1024,
    }
    settings, machine = Settings.read(), Machine.probe("cuda")
    ops = choose(machine, provider_names(machine, settings.ops))
    return ops, DSV4Config.from_dict(raw), parse(settings.precision)


def compile_variant(variant: str, batches: Sequence[int]) -> None:
    """Into Triton's cache, so that the process which times finds it there."""
    import torch

    from sglang_dsv4 import warmup
    from sglang_dsv4.bench_step import stored_linears
    from sglang_dsv4.dequant import MXFP4_GROUP
    from sglang_dsv4.parallel import Parallel

    use(variant)
    ops, config, precision = machine_and_config()
    target = warmup.Target(
        config=config,
        ops=ops,
        precision=precision,
        parallel=Parallel(),
        context=CONTEXT + 1,
        dtype=torch.bfloat16,
        expert_groups=dict.fromkeys(range(config.num_hidden_layers), MXFP4_GROUP),
        linears=stored_linears(config, precision.linears, "cuda").anywhere,
    )
    builders = warmup._builders_of(warmup.launches(target, decodes=batches, prefills=()))
    failed = warmup.build_all(builders, lambda name: None)
    print(f"{variant}: {len(builders)} kernels, {time.monotonic() - BEGIN:.0f} s", *failed)


# ---- steps ----


class Captured:
    """A step as a graph, of one variant."""

    def __init__(self, step: Any) -> None:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.graph):
            self.logits = step.run()
        self.graph.instantiate()

    def edges(self) -> str:
        """`programmatic of all` edges of the graph."""
        try:
            count, graph = ctypes.c_size_t(0), ctypes.c_void_p(self.graph.raw_cuda_graph())
            edges = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
            assert edges(graph, None, None, None, ctypes.byref(count)) == 0
            ends = [(ctypes.c_void_p * count.value)() for _ in range(2)]
            data = (ctypes.c_uint8 * (8 * count.value))()
            assert edges(graph, *ends, data, ctypes.byref(count)) == 0
            return f"{sum(data[2::8])} of {count.value}"  # from port, to port, type, reserved
        except Exception as error:
            return f"? ({type(error).__name__} {error})"


def cut(lm: Any, layers: Sequence[int]) -> Any:
    """The same model with some of its layers; weights are shared."""
    from torch import nn

    short, body = copy.copy(lm), copy.copy(lm.model)
    short._modules, body._modules = dict(lm._modules), dict(lm.model._modules)
    body._modules["layers"] = nn.ModuleList([lm.model.layers[i] for i in layers])
    short._modules["model"] = body
    return short


def steps_of(lm: Any, made: Any) -> dict[str, Any]:
    """Cut -> step, on the caches of the whole step."""
    from sglang_dsv4.bench_step import _batch
    from sglang_dsv4.graph_safety_step import DecodeStep

    found = {}
    for name, layers in CUTS.items():
        caches = tuple(made.caches[i] for i in layers)
        batch = _batch(made.ids.shape[0], CONTEXT, 1)
        found[name] = DecodeStep(cut(lm, layers), made.window, caches, batch, "cuda")
        found[name].ids.copy_(made.ids)
    return found


# ---- comparison and times ----


def states(step: Any) -> list[Any]:
    """All that a step leaves behind."""
    import torch

    kept = [t for cache in step.caches for t in vars(cache).values() if torch.is_tensor(t)]
    return kept + [buffer for name, buffer in step.lm.named_buffers() if "nan" in name]


def inputs(step: Any) -> list[Callable[[], None]]:
    """Calls that put one input after the other in place, device to device."""
    import torch

    from sglang_dsv4.graph_safety_step import to_device

    generator, calls = torch.Generator().manual_seed(2), []
    for number in range(COMPARED):
        batch = copy.copy(step.batch)
        batch = to_device(batch, "cuda")
        ids = torch.randint(0, 1024, step.ids.shape, generator=generator).cuda()
        batch.positions.fill_(COMPARED_FROM + number)
        batch.prefix_lens.fill_(COMPARED_FROM + number)
        calls.append(functools.partial(put, step, ids, batch))
    return calls


def put(step: Any, ids: Any, batch: Any) -> None:
    step.ids.copy_(ids)
    for field in ("positions", "prefix_lens"):
        getattr(step.batch, field).copy_(getattr(batch, field))


def bits(tensor: Any) -> Any:
    """NaN equals NaN, and 0 is not -0."""
    import torch

    return tensor.flatten().view(torch.uint8)


def outcome(step: Any, captured: Captured, before: list[Any], calls: list[Any]) -> list[Any]:
    """All logits of replays one after the other, with changing inputs and then in a row,
    and of what they leave; nothing waits in between."""
    import torch

    for state, value in zip(states(step), before, strict=True):
        state.copy_(value)
    logits = []
    for call in calls:
        call()
        captured.graph.replay()
        logits.append(captured.logits.clone())
    for _ in range(20):
        captured.graph.replay()
    logits.append(captured.logits.clone())
    found = [torch.stack(logits), *(state.clone() for state in states(step))]
    torch.cuda.synchronize()
    return found


def compared(step: Any, found: dict[str, Captured]) -> dict[str, str]:
    """Variant -> whether it computes the same bits as the first one does."""
    import torch

    before, calls = [state.clone() for state in states(step)], inputs(step)
    first = next(iter(found))
    wanted = outcome(step, found[first], before, calls)
    said = {}
    for variant, captured in found.items():  # the first again: whether it agrees with itself
        got = outcome(step, captured, before, calls)
        pairs = zip(wanted, got, strict=True)
        wrong = [i for i, pair in enumerate(pairs) if not torch.equal(*map(bits, pair))]
        said[variant] = f"DIFFERS in {wrong}" if wrong else "equal"
    logits = wanted[0]
    distinct = len({tuple(row.tolist()) for row in logits[:COMPARED, 0, :4]})
    print(
        f"   logits finite: {bool(logits.isfinite().all())}, {distinct} of {COMPARED} distinct,"
        f" {len(wanted)} tensors compared"
    )
    for state, value in zip(states(step), before, strict=True):
        state.copy_(value)
    for field in fields(step.batch):
        value = getattr(step.batch, field.name)
        if field.name in ("positions", "prefix_lens"):
            value.fill_(CONTEXT)
    return said


def microseconds(captured: Captured, replays: int) -> tuple[float, float]:
    """Of a replay among others in a row: on the device, and of the host."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(4_000_000)  # the host has launched everything before the clock starts
    captured.graph.replay()
    start.record()
    begin = time.perf_counter()
    for _ in range(replays):
        captured.graph.replay()
    host = time.perf_counter() - begin
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / replays, host * 1e6 / replays


def timed(graphs: dict[str, dict[str, Captured]], rounds: int, replays: int) -> dict[str, Any]:
    """Cut -> variant -> (microseconds of the device, of the host), medians of rounds in turns."""
    raw: dict[str, dict[str, list[Any]]] = {}
    for _ in range(rounds):
        for name, by_variant in graphs.items():
            for variant, captured in by_variant.items():
                one = microseconds(captured, replays)
                raw.setdefault(name, {}).setdefault(variant, []).append(one)
    return {
        name: {
            variant: tuple(statistics.median(column) for column in zip(*rows, strict=True))
            for variant, rows in by_variant.items()
        }
        for name, by_variant in raw.items()
    }


# ---- the command ----


def shown(table: list[list[Any]]) -> str:
    lines = (f"{row[0]!s:>5}  {row[1]:<20}" + "".join(f"{c:>14}" for c in row[2:]) for row in table)
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> None:
    import torch

    from sglang_dsv4 import bench_step
    from sglang_dsv4.dequant import MXFP4_GROUP

    batches = ("--batches", *map(str, arguments.batches))
    children = [
        subprocess.Popen([sys.executable, __file__, "--compile", variant, *batches])
        for variant in arguments.variants
    ]
    ops, config, precision = machine_and_config()
    use("now")
    lm = bench_step._model(config, ops, precision, "cuda", MXFP4_GROUP)
    bench_step._model = lambda *_: lm
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", end=", ")
    print(f"model after {time.monotonic() - BEGIN:.0f} s", flush=True)
    for child in children:
        child.wait()
    print(f"kernels after {time.monotonic() - BEGIN:.0f} s", flush=True)
    table: list[list[Any]] = [["batch", "what", *arguments.variants]]
    ok = True
    for batch in arguments.batches:
        made = bench_step.make_step(config, ops, precision, batch, CONTEXT, MXFP4_GROUP)
        steps = steps_of(lm, made)
        graphs: dict[str, dict[str, Captured]] = {name: {} for name in steps}
        for variant in list(arguments.variants):
            use(variant)
            try:
                made_now = {name: Captured(step) for name, step in steps.items()}
            except Exception as error:  # the others may still tell something
                print(f"{variant}: {type(error).__name__} {error}", flush=True)
                ok, table[0] = False, [cell for cell in table[0] if cell != variant]
                arguments.variants = [one for one in arguments.variants if one != variant]
                continue
            for name, captured in made_now.items():
                graphs[name][variant] = captured
        print(f"batch {batch}: captured after {time.monotonic() - BEGIN:.0f} s", flush=True)
        whole = list(CUTS)[-1]
        said = compared(steps[whole], graphs[whole])
        ok &= all(value == "equal" for value in said.values())
        edges = {variant: one.edges() for variant, one in graphs[whole].items()}
        table.append([batch, "50 + 20 replays", *said.values()])
        table.append([batch, "programmatic edges", *edges.values()])
        replays = 20 if batch < 16 else 8
        times = timed(graphs, arguments.rounds, replays)
        base = times["base"]
        for name, by_variant in times.items():
            layer = name in ("SWA", "CSA", "HCA")
            us = [one[0] - (base[v][0] if layer else 0) for v, one in by_variant.items()]
            label = name + (" layer, us" if layer else ", us")
            table.append([batch, label, *(f"{one:.1f}" for one in us)])
        host = [f"{one[1]:.0f}" for one in times[whole].values()]
        table.append([batch, "host, us a step of 8", *host])
        print(f"batch {batch}: done after {time.monotonic() - BEGIN:.0f} s")
        print(shown(table), flush=True)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(table, indent=1))
        del graphs, steps, made
    print(f"{'all equal' if ok else 'NOT EQUAL'}, {time.monotonic() - BEGIN:.0f} s")
    sys.exit(0 if ok else 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default=None, help="the table as JSON")
    parser.add_argument("--compile", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.compile:
        compile_variant(arguments.compile, arguments.batches)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
