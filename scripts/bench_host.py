"""What bench_vs_builtin.py tells of the machine, and of a server that did not start."""

import importlib.metadata
import platform
import re
import shutil
import site
import subprocess
from pathlib import Path
from typing import Any

from gpu_serving import caches

PACKAGES = (
    *("sglang-dsv4", "sglang", "torch", "triton", "flashinfer-python", "sgl-kernel"),
    *("sgl-flash-mla", "sgl-deep-gemm", "transformers"),
)
TAIL = 15  # lines of a log that a failed variant's row keeps


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device(kind: str) -> dict[str, Any]:
    """Name, driver and bytes of memory of the first GPU; asked of the driver, so that this process
    takes none of its memory."""
    if kind == "cpu":
        return {"name": platform.machine(), "memory": 0}
    if shutil.which("nvidia-smi") is None:
        raise ValueError(
            "no NVIDIA GPU is here (nvidia-smi is not found): --device cpu measures a tiny model"
        )
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
    told = subprocess.run(
        [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    )
    name, driver, mebibytes = (each.strip() for each in told.stdout.splitlines()[0].split(","))
    return {"name": name, "driver": driver, "memory": int(float(mebibytes) * 2**20)}


def own_caches(home: Path) -> dict[str, str]:
    """A home of its own, where Triton, SGLang, FlashInfer, DeepGEMM and others keep what they have
    compiled; packages in the user's own folder are still found."""
    changed = caches(home) | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    return changed | {"PYTHONUSERBASE": site.getuserbase()}


_REASON = re.compile(
    r"^\s*[\w.]*(Error|Exception|Interrupt)(:|$)|cannot start|cannot be served|does not fit"
)


def failure(log: str, prefix: str = "") -> dict[str, Any]:
    """A row's status, reason and end of the log."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    found = [number for number, line in enumerate(lines) if _REASON.search(line)]
    why = lines[found[-1]].strip() if found else lines[-1] if lines else "the log is empty"
    if found and ":" not in why:  # as of a bare assertion: the line of code says more
        code = [line.strip() for line in lines[max(0, found[-1] - 3) : found[-1]]]
        why = f"{why}: {next((line for line in reversed(code) if line.strip('^~ ')), '')}"
    return {"status": "failed", "why": prefix + why[:400], "log_tail": lines[-TAIL:]}
