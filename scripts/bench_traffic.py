"""SGLang's own serving benchmark: its command lines, its results, and a process that runs many.

One process, since its imports take seconds:

    python scripts/bench_traffic.py RUNS.json

RUNS.json: a list of argument lists of `python -m sglang.benchmark.serving`, run one after the
other; each names its --output-file. A run that fails does not keep the next ones from running.
"""

import importlib.util
import json
import sys
import traceback
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import bench_variants as plan
from bench_variants import Point

if TYPE_CHECKING:
    import serving


def prompts_of(point: Point) -> int:
    """Three times the concurrency, in four groups, and at least eight."""
    return 4 * -(-max(8, 3 * point.batch) // 4)


def command_of(server: "serving.Server", point: Point, number: int, file: Path) -> list[str]:
    """Arguments of `python -m sglang.benchmark.serving`; each round has prompts of its own."""
    count, folder = prompts_of(point), str(server.checkpoint)
    command = ["--backend", "sglang", "--base-url", server.url, "--model", folder]
    command += ["--tokenizer", folder, "--dataset-name", point.what, "--tokenize-prompt"]
    command += ["--num-prompts", str(count), "--max-concurrency", str(point.batch)]
    command += ["--output-file", str(file), "--seed", str(number), "--flush-cache"]
    command += ["--disable-tqdm"]
    if point.what == "random-ids":
        return command + [
            *("--random-input-len", str(plan.QUESTION), "--random-output-len", str(plan.ANSWER)),
            *("--random-range-ratio", "1.0"),
        ]
    return command + [
        *("--gsp-num-groups", "4", "--gsp-prompts-per-group", str(count // 4)),
        *("--gsp-system-prompt-len", str(plan.SHARED)),
        *("--gsp-question-len", str(plan.QUESTION // 8), "--gsp-output-len", str(plan.ANSWER)),
    ]


# Of a result: its field, what it is called here, its unit, and which is better.
METRICS = (
    ("output_throughput", "output", "tokens/s", "more"),
    ("median_ttft_ms", "first token", "ms", "less"),
    ("median_tpot_ms", "token", "ms", "less"),
)


def rows_of(point: Point, file: Path, log: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each metric of a run: what it is of, and its value or why there is none."""
    lines = file.read_text().splitlines() if file.exists() else []
    error = f"no result; see {log.name}"
    found: dict[str, Any] = {}
    if lines:
        found = json.loads(lines[-1])
        wanted = prompts_of(point)
        answered = (found.get("completed"), found.get("total_output_tokens"))
        error = ""
        if answered != (wanted, wanted * plan.ANSWER):
            error = f"{answered[0]} of {wanted} requests with {answered[1]} tokens in all"
    rows = []
    for field, metric, unit, better in METRICS:
        key = {**point.key, "metric": metric, "unit": unit, "better": better}
        rows.append((key, {"error": error} if error else {"value": found[field]}))
    return rows


def stand_in_for_datasets() -> None:
    """SGLang imports Hugging Face's package for data sets that are none of ours; where it is not
    installed, a module of its name takes its place, which can load nothing."""
    if importlib.util.find_spec("datasets") is None:
        empty: Any = ModuleType("datasets")
        empty.__spec__ = ModuleSpec("datasets", None)  # others look whether there is one
        empty.load_dataset = empty.Dataset = empty.DatasetDict = None
        sys.modules["datasets"] = empty


def main() -> int:
    stand_in_for_datasets()
    from sglang.benchmark import serving

    failures = 0
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        command = sys.argv
        sys.argv = ["sglang.benchmark.serving", *arguments]
        try:
            serving.cli_main()
        except (Exception, SystemExit):
            traceback.print_exc()
            failures += 1
        finally:
            sys.argv = command
        sys.stdout.flush()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
