"""`sglang-dsv4 graph-check`: proves that a decode step can be captured as one CUDA graph."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang_dsv4.settings import Settings, SettingsError

if TYPE_CHECKING:
    from sglang_dsv4.graph_safety import Report

CHECK_FAILED = 1
MOST_REQUESTS = 256  # each has a cache of 1,024 tokens

_DESCRIPTION = """\
Proves that a decode step makes the host wait for nothing, decides nothing on the host by a value
of the device, and has fixed shapes, so that it can be captured as one CUDA graph. A small random
model of ours with every kind of layer is run; nothing has to be downloaded.

  static    the source of every function that the step reaches, and of every provider of its ops
  dispatch  the operators that the step runs on the CPU: at different lengths they must be the
            same, and on tensors without values they must still run
  device    on a GPU: the step where every host sync is an error, its capture, and 300 replays that
            equal the step run eagerly, bit for bit; in BF16 and in fp32, for each --batch

Prints what was covered, what is allowed and why, and each finding with file, line, rule and fix.
Exit code 1 if there is a finding. SGLANG_DSV4_OPS names the providers that a GPU runs.
"""
_EXAMPLES = """\
examples:
  sglang-dsv4 graph-check                 all that this machine can check
  sglang-dsv4 graph-check --static-only   the source alone
  sglang-dsv4 graph-check --device cpu    without the capture, also where there is a GPU
  sglang-dsv4 graph-check --batch 1 3 8 64
  sglang-dsv4 graph-check --json | python -m json.tool
"""


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "graph-check",
        help="prove that a decode step can be one CUDA graph",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to check (default: what there is)"
    )
    parser.add_argument("--static-only", action="store_true", help="check the source alone")
    parser.add_argument(
        "--batch",
        type=batch_size,
        nargs="+",
        default=[4],
        metavar="N",
        help="batch sizes to capture on a GPU, 1 to 256 (default: 4)",
    )
    return parser


def batch_size(text: str) -> int:
    """A positive integer that the small model's cache has room for."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_REQUESTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_REQUESTS}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    from sglang_dsv4 import graph_safety
    from sglang_dsv4.backends import Machine
    from sglang_dsv4.cli_make_tiny import shipped_config
    from sglang_dsv4.config import DSV4Config

    machine = Machine.probe()
    if arguments.device == "cpu":
        machine = Machine.probe("cpu")
    elif arguments.device == "cuda" and machine.device != "cuda":
        raise SettingsError("--device cuda: torch finds no CUDA GPU here; leave the option out")
    report = graph_safety.check(
        DSV4Config.from_dict(shipped_config("tiny", "float32")),
        machine,
        named=Settings.read().ops,
        static_only=arguments.static_only,
        batches=arguments.batch,
    )
    print(json.dumps(as_json(report)) if arguments.json else render(report))
    return CHECK_FAILED if report.findings else 0


def as_json(report: "Report") -> dict[str, Any]:
    """The report for machines; findings carry their rule's why and fix."""
    from sglang_dsv4.graph_safety_rules import RULES

    return {
        "ok": not report.findings,
        "checks": [asdict(check) for check in report.checks],
        "findings": [asdict(one) | asdict(RULES[one.rule]) for one in report.findings],
        "allowed": [asdict(entry) | {"matches": count} for entry, count in report.allowed],
        "outside": dict(report.outside),
        "functions": [asdict(item) for item in report.covered],
        "lines": report.lines,
    }


def render(report: "Report") -> str:
    """The report as text."""
    from sglang_dsv4.graph_safety_rules import RULES

    lines = ["covered:"]
    files = dict.fromkeys(item.file for item in report.covered)
    for file in files:
        items = sorted(
            (item for item in report.covered if item.file == file), key=lambda item: item.line
        )
        named = (
            item.function if item.how == "ran" else f"{item.function} ({item.how})"
            for item in items
        )
        lines.append(f"  {file}: {', '.join(named)}")
    lines.append("outside the graph, not checked:")
    lines += [f"  {name}: {reason}" for name, reason in report.outside.items()]
    lines.append("allowed exceptions:" if report.allowed else "allowed exceptions: none")
    for entry, count in report.allowed:
        place = f"{entry.file} {entry.function}"
        lines.append(f"  {place}: {entry.rule}, {count} found: {entry.reason}")
    lines.append("checks:")
    lines += [f"  {one.name:<8}  {one.status:<7}  {one.detail}" for one in report.checks]
    if report.findings:
        lines.append(f"findings: {len(report.findings)}")
    for finding in report.findings:
        rule = RULES[finding.rule]
        place = f"{finding.file}:{finding.line}" if finding.line else finding.file or "(no line)"
        lines.append(f"  {place}  {finding.rule} ({finding.check})  {finding.text}")
        lines += [f"      why: {rule.why}", f"      fix: {rule.fix}"]
    return "\n".join(lines)
