"""`sglang-dsv4 precision`: what each component costs when it is flipped to NVFP4."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Runs a checkpoint as it is, then with one component of its floor at a time flipped to NVFP4, with
all of them flipped, and with the indexer's queries and keys left whole; each reads the same
held-out texts in this process. Compared with transformers' DeepSeek-V4 in float32: hidden states by
layer, KL divergence, best next token, perplexity, the entries that the indexer selects, the
experts that the router chooses, answers to questions, and how long greedy text stays the same.
Everything has a 95 % interval.

CKPT is a folder that fits into this machine's memory, by default the small model of the package,
which brings its texts (held_out.json). A component that the checkpoint holds quantised cannot be
flipped, and is told. Weights are rounded as SGLANG_DSV4_PRECISION rounds them in a server.

float32 shows what rounding the weights costs; --dtype bfloat16 computes as servers do, which adds
noise of its own: `all floor` is then the noise alone.
"""
_EXAMPLES = """\
examples:
  sglang-dsv4 precision                       the package's small model, about 18 CPU minutes
  sglang-dsv4 precision --limit 8             a quick look
  sglang-dsv4 precision --only router_gate,compressor
  sglang-dsv4 precision --dtype bfloat16 --results p.json --markdown p.md --plot p.png
  sglang-dsv4 precision /models/v4 --texts held-out.txt --tokens 512
  sglang-dsv4 precision --json > p.json
"""


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "precision",
        help="what each component costs when it is flipped to NVFP4",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint",
        nargs="?",
        metavar="CKPT",
        help="folder of a checkpoint (default: the package's small model)",
    )
    parser.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="held-out text, one a line, or JSON: a list of texts, or"
        ' {"texts": [...], "questions": [{"kind", "prompt", "answer"}, ...]}',
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="COMPONENT,...",
        help="flip these alone, and nothing else",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="in which the model computes (default: float32)",
    )
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help="at most N texts, and N questions of a kind"
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=2048,
        metavar="N",
        help="cut longer texts (default: 2048)",
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="write the JSON of --json there, too"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a Markdown table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def run(arguments: argparse.Namespace) -> int:
    import torch
    import transformers

    from sglang_dsv4 import ablation, ablation_report, ablation_texts
    from sglang_dsv4.settings import SettingsError

    if arguments.plot:
        ablation_report.require_matplotlib()
    folder = Path(arguments.checkpoint or Path(__file__).parent / "nano")
    if not folder.is_dir():
        raise SettingsError(f"{folder} is no folder here: give that of a checkpoint on this disk")
    only = list(filter(None, (name.strip() for name in arguments.only.split(","))))
    ablation.configurations(only)  # refuses unknown names before anything is read
    material = ablation_texts.read(folder, arguments.texts, tokens=arguments.tokens)
    print(f"{folder.name}: many runs, which take minutes (--limit N: a look)", file=sys.stderr)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    result: dict[str, Any] = {"checkpoint": folder.name} | ablation.run(
        folder,
        material.limited(arguments.limit),
        dtype=getattr(torch, arguments.dtype),
        only=only,
    )
    as_json = json.dumps(result, indent=1, ensure_ascii=False)
    if arguments.results:
        arguments.results.write_text(as_json + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(ablation_report.markdown(result))
    if arguments.plot:
        ablation_report.plot(result, arguments.plot)
    print(as_json if arguments.json else ablation_report.table(result))
    return 0
