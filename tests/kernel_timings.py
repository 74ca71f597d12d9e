"""Times kernels on a GPU and prints one table: python tests/kernel_timings.py [WORD ...]

--help has what else it does. A case comes from `cases()` of a timings_*.py
file, as name -> (setup, bytes): setup() makes the inputs and returns a call without arguments;
bytes is what the call has to move at least, for the bandwidth that it reaches.

Each time is the median over replays of a CUDA graph in which every call finds a cold L2: the same
graph without the calls is subtracted.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_dsv4.backends import PROVIDERS, Machine
from sglang_dsv4.bench_timer import microseconds

Call = Callable[[], Any]
Cases = Mapping[str, tuple[Callable[[], Call], int]]


def collected() -> dict[str, tuple[Callable[[], Call], int]]:
    """The cases of every timings_*.py beside this file."""
    found: dict[str, tuple[Callable[[], Call], int]] = {}
    for file in sorted(Path(__file__).parent.glob("timings_*.py")):
        cases: Cases = importlib.import_module(file.stem).cases()
        repeated = found.keys() & cases.keys()
        assert not repeated, f"{file.name} repeats {sorted(repeated)}"
        found.update(cases)
    return found


def providers(op: str) -> dict[str, Any]:
    """The op by every provider that has kernels and can run here; without a GPU, by all of them."""
    machine = Machine.probe()
    return {
        provider.name: getattr(importlib.import_module(provider.module), op)
        for provider in PROVIDERS[op]
        if provider.name != "reference"
        and (machine.device == "cpu" or provider.refuses(machine) is None)
    }


def chosen(
    words: Sequence[str], without: Sequence[str]
) -> dict[str, tuple[Callable[[], Call], int]]:
    """Cases whose names contain every word, and none of `without`."""
    return {
        name: case
        for name, case in collected().items()
        if all(word in name for word in words) and not any(word in name for word in without)
    }


def timed(name: str, setup: Callable[[], Call], size: int) -> dict[str, Any]:
    """One case: its time in microseconds and its bandwidth, or the error."""
    try:
        time = microseconds(setup(), "cuda")
    except Exception as error:  # one broken case must not hide the others' times
        return {"case": name, "error": f"{type(error).__name__}: {error}"}
    return {"case": name, "us": round(time, 1), "gbps": round(size / time / 1000) if time else ""}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", metavar="WORD", nargs="*", help="cases with all of these")
    parser.add_argument("--without", metavar="WORD", action="append", default=[])
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results, as they come")
    parser.add_argument("--list", action="store_true", help="only name the cases")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available() and not arguments.list:
        print("kernel_timings: needs a GPU, but for --list", file=sys.stderr)
        return 1
    cases = chosen(arguments.words, arguments.without)
    if not arguments.list:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'case':<66} {'us':>9} {'GB/s':>8}")
    rows = []
    for name, (setup, size) in cases.items():
        row = {"case": name} if arguments.list else timed(name, setup, size)
        rows.append(row)
        failure = f"  failed: {row['error']}" if "error" in row else ""
        print(f"{name:<66} {row.get('us', ''):>9} {row.get('gbps', ''):>8}{failure}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows))
        if not arguments.list:
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
