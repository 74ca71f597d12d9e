"""The script that measures loading, and by it the bound on the memory that loading takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

MEGABYTE = 1e6


def test_loading_needs_one_file_and_little_more(repository: Path, tmp_path: Path) -> None:
    """0.3 GB in six files, FP8 and MXFP4, of V4-Flash's widths."""
    command = [sys.executable, str(repository / "scripts" / "measure_loading.py"), "--json"]
    command += ["--format", "vendor", "--gigabytes", "0.3", "--shards", "6", "--sink"]
    command += ["--cache-gigabytes", "0"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
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
    assert not list(tmp_path.iterdir())
