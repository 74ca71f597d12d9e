"""Every kernel against its op's reference, in Triton's interpreter: one session for all of them.

Some minutes of interpreting are left out unless asked for:
    python -m pytest tests/test_kernels_interpreted.py --thorough
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SESSION = Path(__file__).parent / "interpreted_session.py"


@dataclass(frozen=True)
class Selection:
    """Tests of a file below tests/. select, thorough: pytest's -k expressions, for every run and
    for what the interpreter can do at all; marked: its -m expression."""

    file: str
    select: str = "triton"
    thorough: str = "triton"
    marked: str = ""

    @property
    def name(self) -> str:
        return Path(self.file).stem.removeprefix("test_")


def own_tests(file: str) -> Selection:
    """The tests of kernels that an op's own tests do not see."""
    return Selection(file, select="", thorough="", marked="kernels")


SELECTIONS = (
    Selection("test_rms_norm.py", select="triton and not shape1-True-dtype0 and not shape1-False"),
    # A token's Sinkhorn takes the interpreter 0.3 s, and the loop already is an oracle for it.
    Selection(
        "test_mhc_pre.py",
        select="triton and dtype1 or triton and counted and (5 or 1)",
        thorough="triton and not transformers",
    ),
    Selection("test_mhc_post.py"),
    Selection("test_mhc_post_pre_norm.py"),
    Selection(
        "test_linear_fp8.py",
        select="(triton or dequantised)",
        thorough="(triton or dequantised)",
    ),
    Selection(
        "test_linear_fp4.py",
        select="(triton or dequantised)",
        thorough="(triton or dequantised)",
    ),
    Selection("test_mhc_head.py", select="triton and not mix and not transformers"),
    Selection(
        "attention/test_build_metadata.py",
        select="triton and (triton-6 or triton-23 or stays or written or 64_bits)"
        " and not test_hca_plan",
        thorough="triton and not test_hca_plan",
    ),
    Selection(
        "test_decode_slots.py",
        select="triton and not gigabytes",
        thorough="triton and not gigabytes",
    ),
    Selection(
        "test_host_slots.py",
        select="triton and (hardly or memory or undone)",
        thorough="triton",
    ),
    Selection("attention/test_query_norm_rope.py", select="triton and not mix and not dtype0"),
    Selection("attention/test_kv_norm_rope_store.py"),
    Selection("attention/test_csa_index_list.py"),
    # The reference cuts its work into blocks, which is nothing to kernels.
    Selection(
        "attention/test_sparse_attention.py",
        select="triton and (equals_the_loop and not 150 and not 65536 or sinks or only or stays)",
        thorough="triton and not 150 and not 65536",
    ),
    Selection(
        "attention/test_compress_csa.py",
        select="triton and not any_chunking and not ring and not prefix_hit and not triton-80"
        " and not mix and not dtype1 and not large",
        thorough="triton and not any_chunking and not rings and not prefix_hit and not triton-80",
    ),
    Selection(
        "attention/test_compress_hca.py",
        select="triton and (any_chunking and 129 or peak or forgets and 1000-70)",
        thorough="triton and not (any_chunking and not 129) and not others and not prefix_hit"
        " and not (forgets and not 1000-70) and not triton-80 and not 10000.0-1]",
    ),
    Selection("attention/test_index_query.py", select="triton and not mix and not dtype0"),
    Selection(
        "attention/test_select_entries.py",
        select="triton and (ties or counted or equals_the_loop and 16 and dtype0)"
        " and not 262144 and not 300",
        thorough="triton and not 300 and not 262144 and not (200 and dtype1)",
    ),
    Selection("moe/test_route_scored.py", select="triton and not transformers and not 61"),
    Selection("moe/test_route_hashed.py"),
    Selection("moe/test_swiglu.py", select="triton and not dtype0"),
    Selection(
        "moe/test_routed_experts.py",
        select="triton and (equals_the_loop and not 61 and not 1024 and not 300 and not 256"
        " and not 8-8 or chosen_twice or parts or without or stays and not 100)",
        thorough="triton and not transformers and not every_split and not all_tokens"
        " and not 61 and not 100 and not 1024",
    ),
    Selection(
        "moe/test_routed_experts_fp4.py",
        select="triton and (dense_matrices and dtype1 and not 2-256 or exact or stays or either"
        " or base or parts)",
        thorough="triton",
    ),
    own_tests("test_kernels_mhc.py"),
    own_tests("attention/test_kernels_attention.py"),
    own_tests("attention/test_kernels_metadata.py"),
    own_tests("attention/test_kernels_compress.py"),
    own_tests("attention/test_kernels_index.py"),
    own_tests("moe/test_kernels_moe.py"),
    own_tests("moe/test_kernels_humming.py"),
)


@pytest.fixture(scope="module")
def session() -> Iterator[subprocess.Popen[str]]:
    """The process that interprets. Triton decides for the interpreter when it is imported, and
    imports take longer than most tests: hence one of its own for all."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_ADDOPTS", None)
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and loading takes time
    with subprocess.Popen(
        [sys.executable, SESSION],
        cwd=SESSION.parents[1],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def interpret(
    process: subprocess.Popen[str], file: str, select: str, marked: str = "", *options: str
) -> dict[str, Any]:
    """One selection, run by the process."""
    selection = {"file": file, "select": select, "marked": marked, "options": options}
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(selection), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, "the interpreting process has ended"
    return dict(json.loads(answer))


@pytest.mark.parametrize("selection", SELECTIONS, ids=[each.name for each in SELECTIONS])
def test_in_the_interpreter(
    session: subprocess.Popen[str], pytestconfig: pytest.Config, selection: Selection
) -> None:
    thorough = pytestconfig.getoption("--thorough")
    select, options = (selection.thorough, ["--thorough"]) if thorough else (selection.select, [])
    result = interpret(session, f"tests/{selection.file}", select, selection.marked, *options)
    print(f"{result['passed']} passed in {result['seconds']} s\n{result['output'][-8000:]}")
    assert result["code"] == 0 and result["passed"] > 0 and not result["skipped"]


def test_every_kernel_of_ours_is_interpreted() -> None:
    """Each op with a provider in Triton is among the selections, under the name of its tests."""
    from sglang_dsv4.backends import PROVIDERS

    names = {selection.name for selection in SELECTIONS}
    kernels = {
        op
        for op, known in PROVIDERS.items()
        if any("kernels_triton" in one.module for one in known)
    }
    assert kernels and kernels <= names


def test_a_failure_in_the_session_is_told(session: subprocess.Popen[str], tmp_path: Path) -> None:
    """A wrong result, and a selection without tests."""
    file = tmp_path / "test_wrong.py"
    file.write_text("def test_right(): pass\ndef test_wrong(): assert 1 == 2\n")
    result = interpret(session, str(file), "")
    assert (result["code"], result["passed"]) == (1, 1) and "assert 1 == 2" in result["output"]
    result = interpret(session, str(file), "right")
    assert (result["code"], result["passed"]) == (0, 1)
    assert interpret(session, str(file), "gone")["code"] == 5
