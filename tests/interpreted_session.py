"""Tests in Triton's interpreter: one process, which imports everything once, runs many selections.

Each line of stdin is a selection as JSON, {"file": ..., "select": ..., "marked": ...,
"options": [...]}; a line of stdout answers {"code": ..., "passed": ..., "skipped": ...,
"seconds": ..., "output": ...}.
TRITON_INTERPRET=1 must be set: Triton decides for the interpreter when it is imported.
"""

import contextlib
import io
import json
import sys
import time
from collections import Counter
from typing import Any

import pytest

OPTIONS = ("-q", "-p", "no:cacheprovider", "--durations=5", "--tb=short")


class Outcomes:
    """Counts what became of a session's tests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1


def run(selection: dict[str, Any]) -> dict[str, Any]:
    """One session over a selection."""
    outcomes, output, start = Outcomes(), io.StringIO(), time.monotonic()
    chosen = ["-k", selection["select"], "-m", selection["marked"], selection["file"]]
    options = [*OPTIONS, *selection["options"]]
    with contextlib.redirect_stdout(output):
        code = pytest.main([*options, *chosen], plugins=[outcomes])
    return {
        "code": int(code),
        "passed": outcomes.counts["passed"],
        "skipped": outcomes.counts["skipped"],
        "seconds": round(time.monotonic() - start, 1),
        "output": output.getvalue(),
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
