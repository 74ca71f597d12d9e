"""The script that measures loading, and by it the bound on the memory that loading takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

MEGABYTE = 1e6


def measured(repository: Path, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "scripts" / "measure_loading.py"), "--json"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    return subprocess.run([*command, *options], capture_output=True, text=True, env=environment)


def test_experts_may_stay_in_four_bits(repository: Path, tmp_path: Path) -> None:
    """All tensors are taken, or `weights.load` would have raised."""
    options = ["--format", "nvfp4-experts", "--gigabytes", "0.1", "--four-bit-experts"]
    done = measured(repository, tmp_path, *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["four_bit_experts"] and figures["load, cached"]["cpu_seconds"] > 0
    refused = measured(repository, tmp_path, *options, "--sink")
    assert refused.returncode == 2 and "leave out --sink" in refused.stderr


def test_loading_needs_one_file_and_little_more(repository: Path, tmp_path: Path) -> None:
    """0.3 GB in six files, FP8 and MXFP4, of V4-Flash's widths."""
    options = ["--format", "vendor", "--gigabytes", "0.3", "--shards", "6", "--sink"]
    done = measured(repository, tmp_path, *options, "--cache-gigabytes", "0")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["files"] == 6 and 0.25e9 < figures["bytes"] < 0.35e9
    assert figures["largest_file"] < 90 * MEGABYTE
    load = figures["load"]
    # Beside the parameters: chunks of values, and pages of the file that is read. A tensor
    # that ends one file and waits for its scale in the next keeps both files.
    assert load["anonymous_rise"] < 40 * MEGABYTE, load
    assert load["mapped_rise"] < 2 * figures["largest_file"] + 20 * MEGABYTE, load
    assert load["mapped_rise"] > 20 * MEGABYTE, load  # the measure sees what is read
    assert load["gigabytes_per_second"] > 0 and figures["disk alone"]["seconds"] > 0
    assert not list(tmp_path.glob("measure-loading-*"))  # what it is made in
