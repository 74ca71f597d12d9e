"""Parts of gpu_acceptance.py that run tests and commands: kernels, graphs, timings, sanitizer."""

import json
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

from gpu_acceptance import Run

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
# Tests of ops and kernels. Those of FlashInfer build its modules first, which takes minutes.
KERNEL_TESTS = (
    "tests/attention", "tests/moe", "tests/test_linear_fp32.py", "tests/test_linear_fp8.py",
    "tests/test_linear_fp4.py", "tests/test_rms_norm.py",
    "tests/test_mhc_pre.py", "tests/test_mhc_post.py", "tests/test_mhc_post_pre_norm.py",
    "tests/test_mhc_head.py", "tests/test_kernels_mhc.py", "tests/test_graph_capture.py",
    "tests/test_gpu_paths.py", "tests/test_decode_slots.py",
)  # fmt: skip
WORKERS = 14  # compiling takes a core each
SANITIZER_TESTS = (
    "tests/test_kernels_mhc.py", "tests/attention/test_kernels_index.py",
    "tests/attention/test_kernels_compress.py", "tests/moe/test_kernels_moe.py",
    "tests/attention/test_kernels_attention.py", "tests/attention/test_kernels_metadata.py",
    "tests/test_linear_fp8.py", "tests/test_linear_fp4.py",
)  # fmt: skip
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZED = 6  # at a time
BATCHES = ("1", "3", "8", "64")


def kernels(run: Run) -> dict[str, Any]:
    """Every op's tests by every provider that compiles in seconds, and the kernels' own."""
    tests = KERNEL_TESTS if run.on_gpu else ("tests/test_rms_norm.py",)
    named = "not flashinfer and not marlin and not humming"  # built in minutes
    return tested(run, "kernels", *tests, "-k", named, workers=WORKERS)


def flashinfer(run: Run) -> dict[str, Any]:
    """Its tests, then its timings; both build its modules where no cache has them."""
    files = ("test_kernels_attention.py", "test_sparse_attention.py")
    tests = [f"tests/attention/{file}" for file in files]
    result = tested(run, "flashinfer", *tests, "-k", "flashinfer")
    timed: dict[str, Any] = {"ok": True, "table": []}
    if run.on_gpu:
        timed = timings(run, "flashinfer", without=())
    return result | {
        "ok": result["ok"] and timed["ok"],
        "table": result["table"] + [[*row, ""][:3] for row in timed["table"]],
        "timings": timed,
    }


def tested(run: Run, name: str, *arguments: str, workers: int = 0) -> dict[str, Any]:
    """Counts and failures of a pytest run."""
    report = run.out / f"{name}.xml"
    report.unlink(missing_ok=True)
    spread = ("-n", str(workers), "--dist", "worksteal") if workers and run.on_gpu else ()
    options = (f"--junitxml={report}", "--durations=15", *spread)
    code = run.command(name, [*PYTEST, *options, *arguments])
    if not report.exists():
        return {"ok": False, "code": code, "table": []}
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    table: list[list[Any]] = [["tests", "failed", "skipped"], [len(cases), len(failed), skipped]]
    table += [[name, "failed", ""] for name in failed[:40]]
    return {"ok": code == 0, "code": code, "table": table, "failed": failed}


def graph(run: Run) -> dict[str, Any]:
    """`sglang-dsv4 graph-check` with the check on the device."""
    report = run.out / "graph_check.json"
    command = [sys.executable, "-m", "sglang_dsv4.cli", "graph-check", "--json"]
    command += ["--device", run.device, "--batch", *BATCHES]
    code = run.command("graph-check", command, report)
    content = json.loads(report.read_text())
    table = [["check", "status", "detail"]]
    table += [[one["name"], one["status"], one["detail"]] for one in content["checks"]]
    table += [
        [one["check"], one["rule"], f"{one['file']}:{one['line']} {one['text']}"]
        for one in content["findings"]
    ]
    wanted = "ok" if run.on_gpu else "skipped"
    device = next(one["status"] for one in content["checks"] if one["name"] == "device")
    return {"ok": code == 0 and device == wanted, "table": table}


def timings(
    run: Run, *words: str, without: tuple[str, ...] = ("flashinfer", "8192 tokens")
) -> dict[str, Any]:
    """Each kernel alone; what FlashInfer's modules and the largest shapes take is left out."""
    report = run.out / "timings_raw.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "tests/kernel_timings.py", "--json", str(report)]
    for word in without:
        command += ["--without", word]
    if not run.on_gpu:  # that the cases can be made is all that a CPU can show
        command.append("--list")
    code = run.command("timings", [*command, *words])
    rows = json.loads(report.read_text()) if report.exists() else []
    table: list[list[Any]] = [["case", "us", "GB/s"]]
    table += [[one["case"], one.get("us", one.get("error", "")), one.get("gbps", "")]
              for one in rows]  # fmt: skip
    failed = [one["case"] for one in rows if "error" in one]
    return {"ok": code == 0 and bool(rows) and not failed, "table": table, "failed": failed}


def roof(run: Run) -> dict[str, Any]:
    """`sglang-dsv4 bench`: each op of a decode step beside the bytes that it must move."""
    report = run.out / "roof_raw.json"
    command = [sys.executable, "-m", "sglang_dsv4.cli", "bench", "--json", "--device", run.device]
    if run.on_gpu:
        command += ["--preset", "flash", "--format", "mxfp4", "--context", "1024"]
        command += ["--batch", "1", "16", "64"]
        command += ["--without", "flashinfer", "marlin", "humming", "reference"]
    code = run.command("bench", command, report)
    found = json.loads(report.read_text()) if code in (0, 1) else {"steps": [], "ops": []}
    table: list[list[Any]] = [["batch", "op", "provider", "calls", "us", "MB", "roof"]]
    table += [
        [one["batch"], "whole step", "", 1, round(1000 * one["milliseconds"], 1),
         round(one["moved"] / 1e6, 1), f"{one['roof']:.0%}"]
        for one in found["steps"]
    ]  # fmt: skip
    table += [
        [one["batch"], f"{one['op']} {one['label']}", one["provider"], one["count"],
         one["error"] or round(one["microseconds"], 1), round(one["moved"] / 1e6, 1),
         "" if one["error"] else f"{one['roof']:.0%}"]
        for one in found["ops"]
    ]  # fmt: skip
    return {"ok": code == 0 and len(table) > 1, "table": table}


def sanitizer(run: Run) -> dict[str, Any]:
    """The kernels' own small tests under each of its tools, a few at a time; allocations are not
    pooled, so that it sees them. What is known so far survives the limit."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return {"ok": True, "table": [["tool", "result"], ["compute-sanitizer", "not there"]]}
    table: list[list[Any]] = [["tool", "tests", "exit code"]]

    def checked(name: str, test: str) -> list[Any]:
        options = ["--tool", name, "--error-exitcode", "9", "--print-limit", "20"]
        selected = [test, "-m", "kernels and not gpu and not thorough", "-x"]
        others = "not flashinfer and not flashmla and not humming"
        code = run.command(
            f"{name} {test}",
            [tool, *options, *PYTEST, *selected, "-k", others],
            run.out / f"{name}_{Path(test).stem}.log",
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )
        return [name, test, code]

    with ThreadPoolExecutor(SANITIZED) as pool:
        pairs = product(SANITIZER_TOOLS, SANITIZER_TESTS)
        for done in as_completed([pool.submit(checked, *pair) for pair in pairs]):
            table.append(done.result())  # here alone: threads would write over each other's file
            (run.out / "sanitizer_rows.json").write_text(json.dumps(table))
    return {"ok": all(row[2] == 0 for row in table[1:]), "table": table}
