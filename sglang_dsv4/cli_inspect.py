"""`sglang-dsv4 inspect`: what a checkpoint holds, what it needs, and whether it can be served."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsv4.nano_demo_plot import require_matplotlib
from sglang_dsv4.settings import Settings

if TYPE_CHECKING:  # torch is slow to import, and --help needs none of it
    from sglang_dsv4.inspection import Deployment, Held, Inspection
    from sglang_dsv4.memory_plan import Plan

REFUSED = 1

_DESCRIPTION = """\
Reads config.json and the headers of the safetensors in CKPT, no values, and tells what the
checkpoint holds of each component, what it runs in, every tensor that is missing, unknown or
wrong, what one rank needs of its device's memory, and whether it can be served. The server makes
the same check when it starts. Needs no GPU.

On a GPU routed experts in MXFP4 or NVFP4 stay in four bits, and attention and the shared expert in
FP8 or NVFP4 if the model runs in bfloat16; the verdict says what is kept and what becomes dense.
SGLANG_DSV4_PRECISION=routed_experts=bf16,linears=bf16 shows what it takes to keep none.

The memory of a device is that of --gpu, or --memory-gib; without either nothing is judged by it.
What fits beside the weights is by arithmetic and an upper bound: SGLang's own limits may be lower.
"""
_EXAMPLES = """\
examples:
  sglang-dsv4 inspect /models/DeepSeek-V4-Flash
  sglang-dsv4 inspect /models/DeepSeek-V4-Flash --tp 8 --gpu H200 --context 131072
  sglang-dsv4 inspect /models/DeepSeek-V4-Flash --tp 8 --gpu H200 --plot memory.png
  sglang-dsv4 inspect /models/mine --json | python -m json.tool

exit codes:
  0    it can be served
  1    it is refused; every reason is listed
  2    the command line or what it names cannot be used
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "inspect",
        help="what a checkpoint holds, what it needs, whether it can be served",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", type=Path, help="folder of a checkpoint")
    add("--tp", metavar="N", type=_positive, default=1, help="tensor-parallel ranks (default: 1)")
    add("--ep", metavar="N", type=_positive, default=1, help="expert-parallel ranks (default: 1)")
    device = parser.add_mutually_exclusive_group()
    device.add_argument(
        "--gpu",
        metavar="NAME",
        type=str.upper,
        help="device of each rank: A100-40, A100-80, L40S, H100, H200 or B200",
    )
    device.add_argument(
        "--memory-gib", metavar="X", type=_above_zero, help="memory of each rank's device"
    )
    add(
        "--mem-fraction",
        metavar="F",
        type=_fraction,
        default=0.9,
        help="share of it for weights and cache, as SGLang's --mem-fraction-static (default: 0.9)",
    )
    add(
        "--context",
        metavar="L",
        type=_positive,
        help="tokens of a request (default: 32768, or as many as the model was made for)",
    )
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="in which the model runs (default: bfloat16)",
    )
    add("--plot", metavar="FILE.png", type=_png, help="draw bytes and memory (matplotlib)")
    return parser


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return number


def _fraction(text: str) -> float:
    number = _above_zero(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1, found {text!r}")
    return number


def _png(text: str) -> Path:
    path = Path(text)
    writable = path if path.exists() else path.parent
    if path.suffix != ".png" or path.is_dir() or not os.access(writable, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a .png in a writable folder, found {text!r}")
    return path


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        require_matplotlib()
    if sys.stderr.isatty():
        print("reading headers ...", file=sys.stderr)
    from sglang_dsv4.inspection import Inspection, Verdict

    found = Inspection(arguments.checkpoint, _deployment(arguments))
    if arguments.plot is not None:
        from sglang_dsv4 import inspect_plot

        inspect_plot.draw(arguments.plot, found)
    if arguments.json:
        print(json.dumps(report(found) | _drawn(arguments)))
    else:
        print(render(found))
        if arguments.plot is not None:
            print(f"\nPicture: {arguments.plot}")
    return REFUSED if found.verdict is Verdict.REFUSED else 0


def _drawn(arguments: argparse.Namespace) -> dict[str, str]:
    return {} if arguments.plot is None else {"plot": str(arguments.plot)}


def _deployment(arguments: argparse.Namespace) -> "Deployment":
    import torch

    from sglang_dsv4 import precision
    from sglang_dsv4.inspection import Deployment
    from sglang_dsv4.memory_plan import GIB, GPUS
    from sglang_dsv4.nano_demo_server import UsageError

    gibibytes, name = arguments.memory_gib, "a device"
    if arguments.gpu is not None:
        if arguments.gpu not in GPUS:
            raise UsageError(
                f"--gpu {arguments.gpu} is not known: use one of {', '.join(GPUS)}, or --memory-gib"
            )
        gibibytes, name = GPUS[arguments.gpu], f"a {arguments.gpu}"
    chosen = precision.parse(Settings.read().precision)
    return Deployment(
        tensor_parallel=arguments.tp,
        expert_parallel=arguments.ep,
        run=getattr(torch, arguments.dtype),
        device=None if gibibytes is None else int(gibibytes * GIB),
        device_name=name,
        fraction=arguments.mem_fraction,
        context=arguments.context,
        routed_experts=chosen.routed_experts,
        linears=chosen.linears,
    )


# ------------------------------------------------------------------------------------------ JSON


def report(found: "Inspection") -> dict[str, Any]:
    """All that is known, ready for JSON; what needs a config that can be read is left out."""
    from sglang_dsv4.inspection import Verdict, config_dialect
    from sglang_dsv4.parallel import expert_parallel_sizes, tensor_parallel_sizes

    said: dict[str, Any] = {
        "path": str(found.folder),
        "ok": found.verdict is not Verdict.REFUSED,
        "verdict": found.verdict.value,
        "refusals": found.refusals,
        "conversions": found.conversions,
        "kept": found.kept,
        "warnings": found.warnings,
        "config": config_dialect(found.folder),
    }
    if found.config is not None:
        total, active = found.parameters
        said |= {"parameters": total, "active_parameters": active}
        ranks = found.deployment.tensor_parallel
        said["tensor_parallel_sizes"] = tensor_parallel_sizes(found.config)
        said["expert_parallel_sizes"] = expert_parallel_sizes(found.config, ranks)
    if found.survey is not None:
        said |= _holds(found)
    if found.plan is not None:
        said["memory"] = _memory(found.plan, found.deployment)
    return said


def _holds(found: "Inspection") -> dict[str, Any]:
    from sglang_dsv4.checkpoint import LISTED_AT_MOST

    survey = found.survey
    assert survey is not None
    draft = survey.draft
    return {
        "files": survey.files,
        "tensors": survey.tensors,
        "used": survey.used,
        "skipped": dict(survey.skipped),
        "bytes": survey.bytes,
        "names": dict(survey.names),
        "scale_names": dict(survey.scale_names),
        "formats": dict(survey.held),
        "components": [row._asdict() for row in found.holdings],
        "below_the_floor": survey.below_the_floor,
        "contradictions": survey.contradictions,
        "draft_head": {
            "kind": draft.kind.value,
            "blocks": len(draft.blocks),
            "tensors": draft.tensors,
            "bytes": draft.bytes,
            "dtypes": dict(draft.dtypes),
        },
        "faults": {
            kind: {"count": len(faults), "first": sorted(faults)[:LISTED_AT_MOST]}
            for kind, faults in survey.faults.items()
        },
    }


def _memory(plan: "Plan", deployment: "Deployment") -> dict[str, Any]:
    """Bytes of one rank; what fits is null where the device is unknown."""
    fits: dict[str, int | None] = dict.fromkeys(("pool_tokens", "requests", "cache_bytes"))
    if plan.device is not None:
        fits = {
            "pool_tokens": plan.pool_tokens,
            "requests": plan.requests,
            "cache_bytes": plan.cache_bytes if plan.pages else 0,
        }
    return {
        "tensor_parallel": deployment.tensor_parallel,
        "expert_parallel": deployment.expert_parallel,
        "device_bytes": plan.device,
        "usable_bytes": plan.usable if plan.device is not None else None,
        "weight_bytes": plan.weights,
        "bytes_per_request": plan.cache.request,
        "bytes_per_context_token": plan.cache.token,
        "context": plan.context,
        **fits,
    }


# ------------------------------------------------------------------------------------------ text


def render(found: "Inspection") -> str:
    """The same for people: the verdict first, then what it rests on."""
    blocks = [_block(f"{found.folder}: {found.verdict.value}", found.reasons)]
    if found.warnings:
        blocks.append(_block("warnings", found.warnings))
    blocks.append(_block("checkpoint", _table(_checkpoint(found))))
    if found.survey is not None and found.holdings:
        blocks.append("\n".join(_holdings(found.holdings)))
    if found.plan is not None:
        blocks.append(_block(_device(found.plan, found.deployment), _table(_needs(found.plan))))
    return "\n\n".join(blocks)


def _block(title: str, lines: list[str]) -> str:
    indented = ("  " + line.replace("\n", "\n  ") for line in lines)
    return "\n".join([title, *indented])


def _table(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def _checkpoint(found: "Inspection") -> dict[str, str]:
    from sglang_dsv4.inspection import config_dialect
    from sglang_dsv4.ledger import counted
    from sglang_dsv4.parallel import expert_parallel_sizes, tensor_parallel_sizes

    rows = {"config.json": config_dialect(found.folder)}
    survey = found.survey
    if survey is not None:
        rows |= {
            "names": survey.dialect() or "none that is known",
            "scales": ", ".join(survey.scale_names) or "none",
            "files": f"{survey.files:,}, with {survey.tensors:,} tensors",
            "used": f"{survey.used:,} tensors, {survey.bytes:,} bytes",
            "left out": counted(survey.skipped),
            "draft head": str(survey.draft),
        }
    if found.config is not None:
        total, active = found.parameters
        rows["parameters"] = f"{total:,}, of which a token uses {active:,}"
        rows["sizes of --tp"] = ", ".join(map(str, tensor_parallel_sizes(found.config)))
        ranks = found.deployment.tensor_parallel
        groups = ", ".join(map(str, expert_parallel_sizes(found.config, ranks))) or "none"
        rows["sizes of --ep"] = f"{groups} with --tp {ranks}, which it divides"
    return rows


def _holdings(rows: list["Held"]) -> list[str]:
    heads = ("component", "stored as", "runs as", "layers", "weights", "bytes in the files")
    cells = [
        (row.component, row.held, row.run, str(row.layers or ""), *_numbers(row.weights, row.bytes))
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if place < 3 else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (heads, *cells)
    ]


def _numbers(*numbers: int) -> list[str]:
    return [f"{number:,}" for number in numbers]


def _device(plan: "Plan", deployment: "Deployment") -> str:
    from sglang_dsv4.memory_plan import GIB

    ranks, groups = deployment.tensor_parallel, deployment.expert_parallel
    whose = f"memory of one of {ranks} ranks" if ranks > 1 else "memory of the one rank"
    if groups > 1:
        whose += f", experts in {groups} groups"
    if plan.device is None:
        return f"{whose} (of which device? --gpu NAME, or --memory-gib X)"
    there = f"{deployment.device_name}, {plan.device / GIB:.1f} GiB"
    return f"{whose} ({there}, {plan.fraction:g} of it for weights and cache)"


def _needs(plan: "Plan") -> dict[str, str]:
    from sglang_dsv4.memory_plan import GIB

    rows = {
        "weights": f"{plan.weights:,} bytes ({plan.weights / GIB:.2f} GiB)",
        "cache, fixed per request": f"{plan.cache.request:,} bytes",
        "cache, per context token": f"{plan.cache.token:,.10g} bytes",
    }
    if plan.device is not None:
        left = max(0, plan.room)
        rows["room for the cache"] = f"{left:,} bytes ({left / GIB:.2f} GiB)"
        rows["context that fits"] = f"{plan.pool_tokens:,} tokens in all"
        rows[f"requests of {plan.context:,} tokens"] = f"{plan.requests:,} at once, at most"
    return rows
