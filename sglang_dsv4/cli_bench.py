"""`sglang-dsv4 bench`: times our ops, by each provider, and a decode step on this machine."""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsv4 import precision
from sglang_dsv4.nano_demo_plot import require_matplotlib
from sglang_dsv4.settings import Settings, SettingsError

if TYPE_CHECKING:
    from sglang_dsv4.backends import Machine, Ops
    from sglang_dsv4.config import DSV4Config

OP_FAILED = 1
PRESETS = ("flash", "pro", "tiny")
GROUPS = {"bf16": None, "mxfp4": 32, "nvfp4": 16}  # values that share a scale
PACKAGES = ("sglang-dsv4", "torch", "triton", "sgl-flash-mla", "flashinfer-python", "sglang")

_DESCRIPTION = """\
Runs a decode step of a cut of the model (a layer of each kind at the preset's widths, random
weights, BF16 rows), notes what each op is called with, and times every provider of every op with
just that, and the whole step as one CUDA graph. Nothing is downloaded and no server is started.

Times are medians of 30 replays; an op finds a cold L2. MB are what a call has to move at least,
GB/s what that makes of its time, and roof is the share of a copy's bandwidth, measured first.

presets: flash (SWA CSA HCA, 256 experts a layer: 41 GB), pro (CSA HCA, 384 experts: 106 GB), tiny.
Attention and the shared expert are in FP8 on a GPU, as in the release, unless
SGLANG_DSV4_PRECISION=linears=... says bf16 or fp4; the routed experts are as --format says.
Without a GPU it times the tiny preset's step by the reference ops, which shows that it runs and
nothing about speed. scripts/bench_vs_builtin.py measures servers.

exit codes: 0 all was timed, 1 a provider failed (its row says how), 2 bad command line
"""
_EXAMPLES = """\
examples:
  sglang-dsv4 bench --preset flash --batch 1 8 64 --context 16384 --plot ops.png
  sglang-dsv4 bench --preset flash --format nvfp4       experts in four bits
  sglang-dsv4 bench --preset pro --experts 128          on a smaller GPU
  sglang-dsv4 bench --without flashinfer                its modules take minutes to build, once
  sglang-dsv4 bench --only sparse_attention --json
  SGLANG_DSV4_OPS=sparse_attention=triton sglang-dsv4 bench     another choice of providers
"""


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "bench",
        help="time our ops and a decode step on this machine",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="(default: flash; without a GPU, tiny)")
    add("--batch", type=positive, nargs="+", metavar="N", help="(default: 1 64; no GPU: 1 4)")
    add("--context", type=positive, metavar="N", help="tokens (default: 4096; no GPU: 300)")
    add("--experts", type=positive, metavar="N", help="of each layer (default: the model's)")
    add("--format", choices=GROUPS, default="bf16", help="of the routed experts (default: bf16)")
    add("--only", metavar="OP", nargs="+", help="time these ops alone, and the step")
    add("--without", metavar="PROVIDER", nargs="+", default=[], help="do not time these")
    add("--reference", action="store_true", help="on a GPU the reference ops, too (slow, large)")
    add("--device", choices=("cpu", "cuda"), help="where to run (default: what there is)")
    add("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    return parser


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        require_matplotlib()
    from sglang_dsv4 import bench_table
    from sglang_dsv4.backends import Machine, choose

    machine = Machine.probe(arguments.device)
    check(arguments, machine)
    settings = Settings.read()
    result = measured(arguments, choose(machine, settings.ops), settings)
    if arguments.plot is not None:
        bench_table.plot(result, arguments.plot)
    if arguments.json:
        print(json.dumps(result))
    else:
        bench_table.show(result)
    return OP_FAILED if any(one["error"] for one in result["ops"]) else 0


def check(arguments: argparse.Namespace, machine: "Machine") -> None:
    """Fills in what depends on the machine; raises SettingsError for what it cannot run."""
    from sglang_dsv4.backends import PROVIDERS
    from sglang_dsv4.bench_step import preset_config

    on_gpu = machine.device == "cuda"
    arguments.preset = arguments.preset or ("flash" if on_gpu else "tiny")
    arguments.batch = arguments.batch or ([1, 64] if on_gpu else [1, 4])
    arguments.context = arguments.context or (4096 if on_gpu else 300)
    if arguments.preset != "tiny" and not on_gpu:
        raise SettingsError(f"--preset {arguments.preset} needs a GPU; without one, take tiny")
    unknown = [op for op in arguments.only or () if op not in PROVIDERS]
    if unknown:
        raise SettingsError(f"--only {unknown[0]}: the ops are {', '.join(PROVIDERS)}")
    names = {one.name for every in PROVIDERS.values() for one in every}
    strangers = [name for name in arguments.without if name not in names]
    if strangers:
        raise SettingsError(
            f"--without {strangers[0]}: the providers are {', '.join(sorted(names))}"
        )
    config = preset_config(arguments.preset)
    most, least = config.n_routed_experts, config.num_experts_per_tok
    if arguments.experts is not None and not least <= arguments.experts <= most:
        raise SettingsError(f"--experts {arguments.experts}: {least} to {most} for this preset")
    if arguments.context >= config.max_position_embeddings:
        longest = config.max_position_embeddings - 1
        raise SettingsError(f"--context {arguments.context}: the model has at most {longest}")


def measured(arguments: argparse.Namespace, ops: "Ops", settings: Settings) -> dict[str, Any]:
    """Everything that is told, ready for JSON."""
    from sglang_dsv4 import bench_ops, bench_timer
    from sglang_dsv4.bench_step import preset_config

    machine, chosen = ops.machine, precision.parse(settings.precision)
    config = preset_config(arguments.preset, arguments.experts)
    copy = bench_timer.copy_bandwidth(machine.device)
    steps: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for batch in arguments.batch:
        group = GROUPS[arguments.format]
        step, calls = bench_ops.record(config, ops, chosen, batch, arguments.context, group)
        milliseconds = bench_ops.time_step(step, machine.device)
        wanted = [call for call in calls if not arguments.only or call.op in arguments.only]
        timings = _timed(wanted, ops, arguments, copy)
        whole = bench_ops.whole_step(
            config,
            milliseconds,
            (batch, arguments.context),
            bench_ops.shared_weights(step),
            (calls, timings),
            copy,
        )
        steps.append(asdict(whole))
        rows += [{"batch": batch, **asdict(timing)} for timing in timings]
        del step, calls, wanted
        gc.collect()  # the next step's weights take this one's memory
    on_gpu = machine.device == "cuda"
    return {
        "command": ["sglang-dsv4", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "device": machine.name,
        "preset": arguments.preset,
        "format": arguments.format,
        "linears": linears_held(config, chosen.linears, machine.device),
        "how": "CUDA graphs" if on_gpu else "reference ops, which say nothing about a GPU's speed",
        "copy_bandwidth": copy,
        "steps": steps,
        "ops": rows,
    }


def linears_held(config: "DSV4Config", chosen: str, device: str) -> str:
    """In which form attention and the shared expert lie in memory, as far as they can."""
    from sglang_dsv4.bench_step import stored_linears

    forms = set(stored_linears(config, chosen, device).weights.values())
    return forms.pop() if forms else precision.DENSE


def _timed(
    calls: Sequence[Any], ops: "Ops", arguments: argparse.Namespace, copy: float
) -> list[Any]:
    from tqdm import tqdm

    from sglang_dsv4 import bench_ops

    pairs = [
        (call, provider)
        for call in calls
        for provider in bench_ops.providers(
            call.op, ops.machine, arguments.reference, arguments.without
        )
    ]
    found = []
    # tqdm hides itself where stderr is not a terminal.
    with tqdm(pairs, unit="op", disable=True if arguments.json else None) as progress:
        for call, provider in progress:
            progress.set_postfix_str(f"{call.op} {provider}")
            found.append(bench_ops.timed(call, ops, provider, copy))
    return found


def versions() -> dict[str, str]:
    """Of what is installed of PACKAGES."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
