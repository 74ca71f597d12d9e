"""`sglang-dsv4 convert`: rewrites a checkpoint with weights in NVFP4."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsv4.nano_demo_server import UsageError

if TYPE_CHECKING:
    from sglang_dsv4.convert import Report

_DESCRIPTION = """\
Writes the checkpoint in SRC to OUT with weights in NVFP4, as ModelOpt stores it: codes of four
bits, an E4M3 scale for 16 of them, one FP32 factor for each matrix (gate and up have their own).

  BF16, FP16, FP32, FP8   rounded to nearest, by the scales that ModelOpt chooses
  MXFP4                   exact: codes stay, scales become E4M3. Where the scales of a matrix lie
                          further apart than 2^17, the smallest blocks cannot be exact; they are
                          rounded, and told of one by one
  NVFP4                   as it is

The head, the router, the compressors and the indexer's head weights stay, or become, BF16: the
floor below which quality is lost. Embeddings, norms and what the model keeps in FP32 are copied,
and so is what belongs to draft blocks. Nothing is said of activations: there is no input_scale.

SRC is checked before anything is written, OUT after. Memory for about one shard is needed. What
was interrupted goes on with --resume, from the first shard that was not finished.
"""
_EPILOG = """\
examples:
  sglang-dsv4 convert /models/v4 /models/v4-nvfp4                  the routed experts
  sglang-dsv4 convert /models/v4 /models/v4-nvfp4 --resume         go on after an interruption
  sglang-dsv4 convert /models/v4-bf16 /models/v4-nvfp4 --weights all --json
  sglang-dsv4 convert SRC OUT --weights all --bf16 '*.attn.wq_a' --bf16 'layers.0.attn.*'
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "convert",
        help="rewrite a checkpoint in NVFP4",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="the folder of a checkpoint")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write, new or empty")
    parser.add_argument(
        "--weights",
        choices=("experts", "all"),
        default="experts",
        help="what becomes NVFP4: the routed experts, or every linear weight that the floor allows"
        " (default: experts)",
    )
    parser.add_argument(
        "--bf16",
        metavar="PATTERN",
        action="append",
        default=[],
        help="weights that become BF16 instead, and tensors that the model keeps in FP32, by the"
        " vendor's names, with a star for any text; can be given several times",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the interrupted conversion in OUT"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    from sglang_dsv4.checkpoint import CheckpointError
    from sglang_dsv4.convert import convert
    from sglang_dsv4.convert_plan import Options

    try:
        report = convert(
            arguments.source,
            arguments.out,
            Options(arguments.weights, tuple(arguments.bf16)),
            resume=arguments.resume,
            show_progress=not arguments.json,
        )
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt:
        print(f"{arguments.out} is not complete: go on with --resume", file=sys.stderr)
        raise
    print(json.dumps(asdict(report)) if arguments.json else _summary(report))
    return 0


def _summary(report: "Report") -> str:
    before, after = report.bytes_before / 1e9, report.bytes_after / 1e9
    taken = f", {report.resumed} of them from before" if report.resumed else ""
    lines = [
        f"{report.path}: {len(report.files)} file(s){taken}, {before:,.3f} GB -> {after:,.3f} GB",
        *(f"  {count:,} tensors {how}" for how, count in report.ways.items()),
    ]
    if report.dropped:
        lines.append(f"  {report.dropped:,} activation scales of the former formats left out")
    if report.recoded_blocks:
        lines.append(f"  MXFP4: {report.lossy_blocks:,} of {report.recoded_blocks:,} blocks lossy")
    for item in report.lossy:
        lines.append(f"    {item.name}: {item.blocks:,} of {item.of:,} blocks lossy")
    lines += [f"  {line}" for line in (*report.below_the_floor, *report.contradictions)]
    return "\n".join(lines)
