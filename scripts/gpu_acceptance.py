#!/usr/bin/env python3
"""Everything that only a GPU can show, in one command: python scripts/gpu_acceptance.py --help

Each part is a process of its own with a time limit; the next one runs whatever became of it.
"""

import argparse
import compileall
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAILED, USAGE = 1, 2
GRACE = 30.0  # seconds that a part has to stop its servers

DESCRIPTION = """\
Runs the parts below in order, prints a table of each, and writes OUT/PART.json, OUT/PART.log and
OUT/summary.json. Together they take longer than one run of ten minutes: choose with --parts.
"""
EPILOG = """\
on a GPU host without a network, where SGLang and its requirements lie in /tmp/site:

  export PYTHONPATH=/tmp/site:$PWD CUDA_HOME=/usr/local/cuda HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
  python scripts/gpu_acceptance.py --install /tmp/site
  python scripts/gpu_acceptance.py --out $OUT --parts kernels
  python scripts/gpu_acceptance.py --out $OUT --parts graph,profile
  python scripts/gpu_acceptance.py --out $OUT --parts prefill,roof
  python scripts/gpu_acceptance.py --out $OUT --parts timings
  python scripts/gpu_acceptance.py --out $OUT --parts agreement
  python scripts/gpu_acceptance.py --out $OUT --parts nano
  python scripts/gpu_acceptance.py --out $OUT --parts dummy
  python scripts/gpu_acceptance.py --out $OUT --parts load
  python scripts/gpu_acceptance.py --out $OUT --parts sanitizer
  python scripts/gpu_acceptance.py --out $OUT --parts flashinfer
  python scripts/gpu_acceptance.py --out $OUT --parts nano,load,sanitizer,flashinfer --at-once 4

--install copies the package in its installed shape into a folder of PYTHONPATH, with the entry
point that SGLang looks for, and compiles the bytecode of all that lies there, as pip does: without
it every process of a server spends half a minute on that. It needs no pip; where pip works,
`pip install --no-deps .` does too.

on a machine without a GPU, the same code with reference ops and a tiny model:

  python scripts/gpu_acceptance.py --device cpu --out /tmp/acceptance

exit codes: 0 all parts are content, 1 one is not or ran out of time, 2 the command line is wrong
"""


@dataclass(frozen=True)
class Run:
    """What a part gets: "cuda" or "cpu", and a folder for whatever it leaves."""

    device: str
    out: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def command(
        self, name: str, command: Sequence[str], output: Path | None = None, **environment: str
    ) -> int:
        """Runs a command in the repository: its exit status. What it prints goes into this part's
        log, or into `output`.

        `python -m` would look into the repository first, where the package has not its installed
        shape.
        """
        print(f"==> {name}: {' '.join(command)}", flush=True)
        if "-m" in command:
            environment = {"PYTHONSAFEPATH": "1", **environment}
        changed = {**os.environ, **environment}
        if output is None:
            return subprocess.run(command, cwd=ROOT, env=changed).returncode
        with output.open("wb") as file:
            return subprocess.run(command, cwd=ROOT, env=changed, stdout=file).returncode


@dataclass(frozen=True)
class Part:
    """A part: what it shows, its limit in seconds, and the function that runs it.

    function: "module:name" in this folder; it takes a Run and returns a result: "ok", "table" (rows
    of text, the first of them headings), and whatever else is worth keeping. alone: it tells times,
    so that nothing may run beside it.
    """

    what: str
    limit: int
    function: str
    alone: bool = False


PARTS = {
    "kernels": Part("every kernel against its reference, and replayed", 540, "gpu_checks:kernels"),
    "graph": Part("a captured step equals eager, batch 1 3 8 64", 300, "gpu_checks:graph"),
    "profile": Part(
        "launches and time of a decode step by layer kind", 200, "gpu_profile:profile_part", True
    ),
    "prefill": Part(
        "launches and time of a prefill by layer kind", 200, "gpu_profile:prefill_part", True
    ),
    "roof": Part("each op of a step beside the bytes it must move", 240, "gpu_checks:roof", True),
    "timings": Part("each kernel alone, with a cold L2", 480, "gpu_checks:timings", True),
    "agreement": Part(
        "layers, formats and answers against transformers and the CPU",
        400,
        "gpu_agreement:agreement",
    ),
    "nano": Part("the trained model served: answers, paths, start", 560, "gpu_serving:nano"),
    "dummy": Part("Flash (4 layers) and Pro (2 layers) served", 580, "gpu_serving:dummy"),
    "load": Part("2,000 requests at once, batches, a long prompt", 300, "gpu_load:load"),
    "sanitizer": Part("compute-sanitizer on small shapes", 580, "gpu_checks:sanitizer"),
    "flashinfer": Part("tests and timings of FlashInfer", 580, "gpu_checks:flashinfer"),
}


# ---- a part, in a process of its own ----


def run_child(name: str, run: Run) -> int:
    """Runs a part here and writes its result."""
    # So that `with Server(...)` stops its server when the limit is reached.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]
    module, _, function = PARTS[name].function.partition(":")
    part: Callable[[Run], dict[str, Any]] = getattr(importlib.import_module(module), function)
    result = part(run)
    write_json(run.out / f"{name}.json", result)
    return 0 if result["ok"] else FAILED


def run_part(name: str, run: Run, limit: float) -> dict[str, Any]:
    """Runs a part as a child: its result, with "status" and "seconds"."""
    log, answer = run.out / f"{name}.log", run.out / f"{name}.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", name, "--device", run.device]
    start = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            [*command, "--out", str(run.out)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait(limit)
            status = "ok" if child.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            end(child)
    result = json.loads(answer.read_text()) if answer.exists() else {"ok": False, "table": []}
    if status == "ok" and not result["ok"]:
        status = "failed"
    return result | {"status": status, "seconds": round(time.monotonic() - start, 1)}


def end(child: "subprocess.Popen[bytes]") -> None:
    """Ask the child to end, then end what is left of its process group."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


# ---- the package, where a server finds it ----


def install(site: Path) -> None:
    """The package in its installed shape, and the metadata of an installed distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    target = site / "sglang_dsv4"
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for package, folder in sorted(packages["package-dir"].items()):
        place = site.joinpath(*package.split("."))
        shutil.copytree(ROOT / folder, place, ignore=ignored, dirs_exist_ok=True)
    for old in site.glob("sglang_dsv4-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"sglang_dsv4-{project['version']}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Requires-Dist: {each}" for each in project["dependencies"]]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "RECORD").write_text("")
    groups = {**project["entry-points"], "console_scripts": project["scripts"]}
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in groups.items()
        )
    )
    compileall.compile_dir(site, quiet=2, workers=0)  # some files are for other Pythons
    print(f"sglang-dsv4 {project['version']} is in {site}: PYTHONPATH={site}:$PWD")


# ---- the command ----


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def rendered(table: Sequence[Sequence[Any]]) -> str:
    """Rows as text, numbers to the right."""
    rows = [[str(cell) for cell in row] for row in table]
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row, cells in zip(table, rows, strict=True):
        pairs = zip(row, cells, widths, strict=True)
        lines.append("  ".join(
            text.rjust(width) if isinstance(cell, int | float) else text.ljust(width)
            for cell, text, width in pairs
        ).rstrip())  # fmt: skip
    return "\n".join(lines)


def chosen_parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(PARTS)}")
    return names


def parser() -> argparse.ArgumentParser:
    parts = "".join(f"  {name:<11} {one.limit:>4} s  {one.what}\n" for name, one in PARTS.items())
    made = argparse.ArgumentParser(
        description=f"{DESCRIPTION}\nparts, and their limits:\n{parts}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--parts", type=chosen_parts, default=None, metavar="A,B,...",
                      help="run these alone (default: all)")  # fmt: skip
    made.add_argument("--out", type=Path, default=Path("acceptance"), help="(default: acceptance)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: cuda)")
    made.add_argument("--limit", type=float, default=None, metavar="SECONDS",
                      help="for all parts together, beside each one's own")  # fmt: skip
    made.add_argument("--at-once", type=int, default=1, metavar="N", choices=range(1, len(PARTS)),
                      help="so many parts beside each other, but for those that tell times; of"
                      " the others, times are upper bounds then (default: 1)")  # fmt: skip
    made.add_argument(
        "--install",
        type=Path,
        metavar="SITE",
        help="copy the package there; without --parts, only that",
    )
    made.add_argument("--child", choices=tuple(PARTS), help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.install is not None:
        install(arguments.install)
        if arguments.parts is None:
            return 0
    run = Run(arguments.device, arguments.out.resolve())
    if arguments.child:
        return run_child(arguments.child, run)
    if run.on_gpu:
        import torch

        if not torch.cuda.is_available():
            print("gpu_acceptance: no CUDA GPU here; use --device cpu", file=sys.stderr)
            return USAGE
    run.out.mkdir(parents=True, exist_ok=True)
    return run_all(run, arguments.parts or list(PARTS), arguments.limit, arguments.at_once)


def run_all(run: Run, names: Sequence[str], limit: float | None, at_once: int = 1) -> int:
    """Every part, its table, and the summary: first those that can run beside others."""
    begin, printing = time.monotonic(), Lock()
    summary: dict[str, dict[str, Any]] = dict.fromkeys(names, {})

    def one(name: str) -> None:
        left = PARTS[name].limit
        if limit is not None:
            left = min(left, int(limit - (time.monotonic() - begin)))
        if left < 1:
            summary[name] = {"status": "not run: no time left", "seconds": 0.0}
            return
        print(f"\n==> {name}: {PARTS[name].what} (at most {left} s)", flush=True)
        result = run_part(name, run, left)
        with printing:
            if at_once > 1:
                print(f"\n==> {name}: {result['status']}")
            print(rendered(result.get("table", [])), flush=True)
            if result["status"] != "ok":
                print((run.out / f"{name}.log").read_text(errors="replace")[-3000:])
            summary[name] = {key: result[key] for key in ("status", "seconds")}
            done = {name: row for name, row in summary.items() if row}
            write_json(run.out / "summary.json", done)

    last = [name for name in names if at_once > 1 and PARTS[name].alone]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, [name for name in names if name not in last]))
    for name in last:
        one(name)
    print("\n==> summary")
    rows = [[name, one["status"], one["seconds"]] for name, one in summary.items()]
    print(rendered([["part", "status", "seconds"], *rows]))
    return 0 if all(one["status"] == "ok" for one in summary.values()) else FAILED


if __name__ == "__main__":
    sys.exit(main())
