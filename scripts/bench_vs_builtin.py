#!/usr/bin/env python3
"""SGLang with our model against SGLang with its built-in one, on the same GPU, in turn.

python scripts/bench_vs_builtin.py --help has what is measured, how, and the calls in order.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

import bench_measure as measure  # noqa: E402
import bench_report  # noqa: E402
import bench_variants as plan  # noqa: E402
from bench_run import Bench  # noqa: E402

FAILED, USAGE = 1, 2
MEASURES = ("decode", "prefill", "serving", "ready", "kernels", "prefill-kernels")
DESCRIPTION = """\
The same SGLang, shapes and dummy weights, with the plugin on and off. Servers that fit into the
GPU's memory together start at the same moment and run beside each other, and every point is
measured on each of them in turn, in a new order each round: `in turn` in the table. What does not
fit is measured after it.

variants: built-in with all its defaults, ours with all of ours; the format of the routed experts
  builtin-fp4   as released, FP8 with MXFP4 experts      builtin-fp8   FP8 experts
  ours-mxfp4    MXFP4, and attention and shared expert in FP8, all kept in memory: our defaults
  ours-mxfp4-bf16  MXFP4 kept in memory, all else in BF16    ours-bf16   BF16
  ours-nvfp4    NVFP4, and all that is FP8 kept in memory
  ours-nvfp4-all  every linear weight in NVFP4 but the head, those outside the floor kept in memory
presets: flash, 8 layers SWA SWA CSA HCA CSA HCA CSA HCA; pro, 4 layers HCA HCA CSA HCA; tiny
measures:
  decode    ms of a step at each --batch and --context: the batch is asked for --steps tokens in one
            request, and timed by its stream while all of it decodes
  prefill   ms to the first token of one new prompt of each --prefill tokens
  serving   sglang.benchmark.serving, random-ids (1,024 in, 128 out) and generated-shared-prefix
            (2,048 shared, 128 in, 128 out), at each --concurrency
  ready     seconds from the start to /health, with empty caches of compiled code, then full ones
  kernels   ms of a decode step in which the device is busy, and its launches, at each --batch and
            the first --context, from a profile of 12 steps in each of half as many rounds; where
            the host is slower than the GPU, decode tells of the host and this of the model. Last of
            all, since a profiler may leave a server slower. The JSON has the step from its first
            launch to its last, and the 12 kernels that take longest. On a GPU only
  prefill-kernels   the same of one new prompt of each --prefill tokens, and its first token
and always memory and checks: who serves, finite log-probabilities, token counts, errors in logs.

Every server has --load-format dummy, --max-total-tokens, --context-length 133120, a port and
--enable-cache-report, and no other option; dummy weights route as a trained model's would
(scripts/bench_server.py).
"""
EPILOG = """\
calls for one GPU of 141 GB, in order, each ended by --limit; expected time of each: not measured.
The first start compiles; where that takes longer than a call, the same call goes on from there.

  # on a host without a network, where SGLang and its requirements lie in /tmp/site, first:
  export PYTHONPATH=/tmp/site:$PWD CUDA_HOME=/usr/local/cuda HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
  python scripts/gpu_acceptance.py --install /tmp/site

  R='python scripts/bench_vs_builtin.py --out bench'
  $R --measure ready --variants ours-mxfp4,builtin-fp4
  $R --measure decode,prefill --batch 1 8 16 64 128 --context 1024
  $R --measure decode --batch 1 8 16 64 128 --context 16384 --variants builtin-fp4,ours-mxfp4
  $R --measure decode --batch 1 --context 131072
  $R --measure kernels,prefill-kernels --batch 1 8 16 64 128
  $R --measure serving --variants builtin-fp4,ours-mxfp4
  $R --measure decode,prefill --variants builtin-fp4,ours-mxfp4,ours-mxfp4-bf16
  $R --measure decode,prefill --variants builtin-fp8,builtin-fp4
  $R --measure decode,prefill --variants builtin-fp4,ours-bf16 --layers 6
  $R --preset pro --variants builtin-fp4,ours-mxfp4
  python scripts/bench_vs_builtin.py --report bench      # tables and plot of all calls, from JSON

on a CPU, the same code with the tiny preset and reference ops (the built-in model does not start):
  python scripts/bench_vs_builtin.py --device cpu --out /tmp/bench

output: OUT/bench_*.json of each call (command, versions, date, every single measurement), OUT/
bench.md, OUT/bench.png. exit codes: 0 all was measured and every check holds, 1 not all (the rows
say why), 2 the command line cannot be used
"""


# ---- the command ----


def names_of(text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(known)}, each once")
    return names


def of(known: Sequence[str]) -> Callable[[str], list[str]]:
    return lambda text: names_of(text, known)


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def enough_steps(text: str) -> int:
    least = 3 * measure.INTERVAL
    if positive(text) < least:
        raise argparse.ArgumentTypeError(f"{text}: at least {least}, to be timed by a stream")
    return int(text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--out", type=Path, default=Path("bench"), help="a folder (default: bench)")
    add("--report", type=Path, metavar="FOLDER", help="make table and plot from its JSON, only")
    add("--preset", choices=tuple(plan.PRESETS), help="(default: flash; on a CPU, tiny)")
    add("--layers", type=positive, metavar="N", help="only the first N of the preset's layers")
    add("--variants", type=of(tuple(plan.VARIANTS)), metavar="A,B,...",
        help="(default: builtin-fp4,ours-mxfp4,ours-nvfp4)")  # fmt: skip
    add("--measure", type=of(MEASURES), default=["decode", "prefill"], metavar="A,B,...",
        help="(default: decode,prefill)")  # fmt: skip
    add("--batch", type=positive, nargs="+", metavar="N", help="(default: 1 8 16 64 128)")
    add("--context", type=positive, nargs="+", metavar="N", help="(default: 1024)")
    add("--prefill", type=positive, nargs="+", metavar="N", help="(default: 1024 8192 32768)")
    add("--concurrency", type=positive, nargs="+", metavar="N", help="(default: 1 16 64)")
    add("--steps", type=enough_steps, default=128, metavar="N", help="to decode (default: 128)")
    add("--rounds", type=positive, default=5, metavar="N", help="beside a first (default: 5)")
    add("--serving-rounds", type=positive, default=3, metavar="N", help="(default: 3)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="(default: cuda)")
    add("--limit", type=float, default=570, metavar="SECONDS", help="of the call (default: 570)")
    add("--start-limit", type=float, default=420, metavar="SECONDS",
        help="of a server's start (default: 420)")  # fmt: skip
    return made


# (a GPU's, a CPU's)
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "preset": ("flash", "tiny"),
    "variants": (
        ["builtin-fp4", "ours-mxfp4", "ours-nvfp4"],
        ["builtin-fp4", "ours-mxfp4", "ours-bf16"],
    ),
    "batch": ([1, 8, 16, 64, 128], [1, 4]),
    "context": ([1024], [300]),
    "prefill": ([1024, 8192, 32768], [600]),
    "concurrency": ([1, 16, 64], [1, 4]),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.report is not None:
        code = bench_report.remake(arguments.report)
        if code == 0:
            print((arguments.report / "bench.md").read_text())
        return code
    for name, defaults in DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, defaults[arguments.device == "cpu"])
    profiles = [name for name in arguments.measure if name.endswith("kernels")]
    if arguments.device == "cpu" and profiles:
        print(
            f"bench_vs_builtin: --measure {profiles[0]} needs the events of a GPU, which"
            " --device cpu has none of: leave it out, or take --device cuda",
            file=sys.stderr,
        )
        return USAGE
    arguments.out = arguments.out.resolve()
    # So that every server is stopped when the call is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        bench = Bench(arguments)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"bench_vs_builtin: {error}", file=sys.stderr)
        return USAGE
    run(bench)
    print(bench_report.markdown(bench.result))
    bench_report.remake(arguments.out)
    return 0 if bench_report.complete(bench.result) else FAILED


def run(bench: Bench) -> None:
    """Each wave of variants that fit beside each other."""
    arguments = bench.arguments
    cache = plan.cache_bytes(bench.raw, bench.pool())
    needed = {
        name: cache + plan.weight_bytes(bench.raw, plan.VARIANTS[name])
        for name in arguments.variants
    }
    groups, refused = plan.waves(needed, bench.result["device"]["memory"] or float("inf"))
    for name, why in refused.items():
        bench.result["variants"][name] = {"status": "refused", "why": why, "log_tail": []}
        print(f"{name}: {why}", flush=True)
    bench.save()
    if "ready" in arguments.measure:
        for name in (name for group in groups for name in group):
            bench.ready(name)
    if bench.points:
        for group in groups:
            bench.wave(group)


if __name__ == "__main__":
    sys.exit(main())
