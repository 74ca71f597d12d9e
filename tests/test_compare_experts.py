"""The script that compares providers of the routed experts: all of it but a GPU's figures."""

import ast
import importlib
import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_dsv4.backends import Machine, choose
from sglang_dsv4.moe import reference
from timings_moe import Shape

CPU, GPU = Machine("cpu", "CPU", None), Machine("cuda", "NVIDIA H200", (9, 0))
SMALL = Shape(hidden=128, width=64, experts=4, top_k=2)
GOOD = {"prepare_s": 1.0, "first_s": 2.5, "copy": 4e12, "error": 1e-3, "replays": True}
GOOD |= {"us": 20.0, "bytes": 40_000_000}


@pytest.fixture
def script(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    return importlib.import_module("compare_experts")


@pytest.fixture
def fake_gpu(script, monkeypatch):
    """A GPU on which every provider could run; `children` says what each one's process does."""
    children = {}
    monkeypatch.setattr(script.Machine, "probe", lambda: GPU)
    monkeypatch.setattr(script, "refusal", lambda name, machine: None)

    def command(name, arguments, folder):
        lines = [{"provider": name, **row} for row in children[name]["rows"]]
        code = (
            f"import pathlib, time; pathlib.Path({str(folder / name)!r}).write_text("
            f"{''.join(json.dumps(line) + chr(10) for line in lines)!r}); "
            + children[name].get("then", "")
        )
        return [sys.executable, "-c", code]

    monkeypatch.setattr(script, "command", command)
    return children


def good(*tokens):
    return {"rows": [GOOD | {"tokens": count} for count in tokens]}


# ---- the command line ----


def test_says_that_it_needs_a_gpu(script, monkeypatch, capsys):
    monkeypatch.setattr(script.Machine, "probe", lambda: CPU)
    assert script.main([]) == script.USAGE == 2
    assert capsys.readouterr().err == "compare_experts: needs an NVIDIA GPU\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flash", Shape(4096, 2048, 256)),
        ("flash-tp8", Shape(4096, 256, 256)),
        ("pro", Shape(7168, 3072, 384)),
        ("pro-tp8", Shape(7168, 384, 384)),
    ],
)
def test_shapes(script, name, expected):
    assert script.shape(name) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "flash-tp7"], "do not divide among 7 ranks by multiples of 32"),
        (["--shape", "flash-tp128"], "do not divide among 128 ranks"),
        (["--shape", "flash-tp0"], "none of flash, pro, flash-tp8"),
        (["--shape", "mini"], "none of flash, pro, flash-tp8"),
        (["--format", "int4"], "invalid choice"),
        (["--tokens", "0"], "not a positive number"),
        (["--without", "reference"], "invalid choice"),
        (["--limit", "-1"], "not a positive number"),
    ],
)
def test_a_wrong_command_line_is_refused(script, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_help_has_examples_and_exit_codes(script, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and "exit codes: 0 " in told and "examples:" in told
    assert "--child" not in told


def test_a_process_gets_what_was_asked_for(script):
    arguments = script.parser().parse_args(["--shape", "pro-tp8", "--format", "nvfp4"])
    _, file, *given = script.command("marlin", arguments, Path("folder"))
    assert Path(file).name == "compare_experts.py"
    again = script.parser().parse_args(given)
    assert (again.child, again.folder) == ("marlin", Path("folder"))
    for name in ("shape", "format", "tokens"):
        assert getattr(again, name) == getattr(arguments, name)


def test_every_provider_takes_part_and_triton_is_first(script):
    assert script.candidates(()) == ["triton", "marlin", "humming", "bf16"]
    assert script.candidates(["marlin", "bf16"]) == ["triton", "humming"]
    assert script.refusal("bf16", CPU) == "needs a GPU (or TRITON_INTERPRET=1, for tests)"


# ---- rows ----


def test_what_all_did_is_told(script, fake_gpu, capsys, tmp_path):
    for name in script.candidates(()):
        fake_gpu[name] = good(1, 8)
    path = tmp_path / "rows.json"
    assert script.main(["--tokens", "1", "8", "--json", str(path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "NVIDIA H200, flash, mxfp4" and len(told) == 2 + 4 * 2
    line = "triton          1     1.0 s    2.50 s   1.0e-03       yes      20.0      40.0       50%"
    assert told[2] == line
    found = json.loads(path.read_text())
    assert [(row["provider"], row["tokens"]) for row in found["rows"]][:3] == [
        ("triton", 1),
        ("triton", 8),
        ("marlin", 1),
    ]
    assert found["rows"][0]["roof"] == 0.5 and found["device"] == "NVIDIA H200"
    assert (found["shape"], found["format"]) == ("flash", "mxfp4") and "torch" in found["versions"]


def test_a_provider_that_runs_out_of_time_keeps_its_rows(script, fake_gpu, capsys):
    """And the next one has its turn."""
    fake_gpu["triton"] = good(1, 8)
    fake_gpu["marlin"] = good(1) | {"then": "time.sleep(60)"}
    fake_gpu["humming"] = good(1, 8)
    begin = time.monotonic()
    arguments = ["--tokens", "1", "8", "--without", "bf16", "--limit", "2"]
    assert script.main(arguments) == script.FAILED
    assert time.monotonic() - begin < 30
    told = capsys.readouterr().out.splitlines()
    assert told[4].startswith("marlin          1     1.0 s")
    assert told[5] == "marlin          8  stopped after 2 s: --limit gives it more"
    assert told[7].startswith("humming         8     1.0 s")
    assert told[8:] == ["WRONG: marlin, 8 tokens: stopped after 2 s: --limit gives it more"]


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("raise ValueError('no such shape')", "ValueError: no such shape"),
        ("raise SystemExit(3)", "ended with 3"),
        ("", "wrote no result"),
    ],
)
def test_a_provider_that_fails_is_a_row_with_its_reason(script, fake_gpu, capsys, then, why):
    fake_gpu["triton"] = {"rows": [], "then": then}
    arguments = ["--tokens", "1", "--without", "marlin", "humming", "bf16"]
    assert script.main(arguments) == script.FAILED
    assert capsys.readouterr().out.splitlines()[2] == f"triton          1  {why}"


def test_a_failure_behind_the_results_is_one(script, fake_gpu, capsys):
    fake_gpu["triton"] = good(1) | {"then": "raise SystemExit(3)"}
    arguments = ["--tokens", "1", "--without", "marlin", "humming", "bf16"]
    assert script.main(arguments) == script.FAILED
    told = capsys.readouterr().out.splitlines()
    assert told[2].startswith("triton          1     1.0 s")
    assert told[3] == "triton        all  after its results: ended with 3"


def test_a_line_that_was_not_finished_is_left_out(script, fake_gpu, monkeypatch, tmp_path):
    begun = f"open({str(tmp_path / 'triton')!r}, 'w').write('{{'); raise SystemExit(3)"
    monkeypatch.setattr(script, "command", lambda *_: [sys.executable, "-c", begun])
    arguments = SimpleNamespace(tokens=[8], limit=20)
    (row,) = script.rows_of("triton", arguments, GPU, tmp_path)
    assert (row["tokens"], row["why"]) == (8, "ended with 3")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"error": 0.1}, "off by 1.0e-01"),
        ({"error": math.inf}, "off by inf"),
        ({"replays": False}, "a replay is not what an eager call is"),
        ({"why": "OutOfMemoryError"}, "OutOfMemoryError"),
        ({"refused": True, "why": "not installed"}, ""),
        ({}, ""),
    ],
)
def test_what_is_wrong_with_a_row(script, change, why):
    assert script.fault(GOOD | {"provider": "marlin", "tokens": 1} | change) == why


def test_what_a_machine_cannot_run_is_no_failure(script, fake_gpu, capsys, monkeypatch):
    fake_gpu["triton"] = good(1)
    absent = {"marlin": "sglang-kernel is not installed", "humming": "humming-kernels is not"}
    monkeypatch.setattr(script, "refusal", lambda name, machine: absent.get(name))
    fake_gpu["bf16"] = {"rows": [{"tokens": None, "refused": True, "why": "needs 47 GiB"}]}
    assert script.main(["--tokens", "1"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[3] == "marlin        all  sglang-kernel is not installed"
    assert told[5] == "bf16          all  needs 47 GiB"


def test_a_stopped_process_leaves_none_behind(script, tmp_path):
    """A compiler that it started is gone with it."""
    mark = tmp_path / "alive"
    late = f"import time, pathlib; time.sleep(3); pathlib.Path({str(mark)!r}).touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {late!r}])"
    why = script.supervised([sys.executable, "-c", code], tmp_path / "log", 1)
    assert why == "stopped after 1 s: --limit gives it more"
    time.sleep(3)
    assert not mark.exists()


# ---- what a process measures ----


@pytest.mark.parametrize("group", [16, 32])
def test_measures_on_this_machine(script, tmp_path, group, monkeypatch):
    """By the reference, which the name of Triton stands for, and by its dense twin."""
    monkeypatch.setattr(script.bench_timer, "CPU_CALLS", 1)
    ops = choose(CPU)
    for name in ("triton", "bf16"):
        script.measure(name, ops, SMALL, group, [1, 5], tmp_path)
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [row["tokens"] for row in rows] == [1, 5]
        for row in rows:
            assert row["error"] < 1e-5 and row["us"] > 0 and row["bytes"] > 0 and row["copy"] > 0
            assert "replays" not in row and not script.fault(row)
            assert len(script.cells(script.complete(row))) == len(script.COLUMNS)
    fp4, bf16 = (
        json.loads((tmp_path / name).read_text().splitlines()[1]) for name in ("triton", "bf16")
    )
    assert 2 < bf16["bytes"] / fp4["bytes"] < 4


@pytest.mark.parametrize("group", [16, 32])
def test_dense_twins_are_exact_and_of_a_sensible_size(script, group):
    w13, w2 = script.matrices(SMALL, group, "cpu")
    again, _ = script.matrices(SMALL, group, "cpu")
    assert torch.equal(w13.codes, again.codes) and torch.equal(w13.scales, again.scales)
    x, weights, experts = script.inputs(9, SMALL, "cpu")
    fp4 = reference.routed_experts_fp4(x, weights, experts, w13, w2, limit=10.0)
    pair = script.dense(w13), script.dense(w2)
    twin = reference.routed_experts(x, weights, experts, *pair, limit=10.0)
    torch.testing.assert_close(twin, fp4, rtol=1e-5, atol=1e-6)
    assert 0.05 < fp4.std() < 20
    assert (w13.factors[0, 0] == w13.factors[0, 1]) == (group == 32)  # apart, where there are two


def test_a_size_that_fails_does_not_hide_the_others(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script.bench_timer, "CPU_CALLS", 1)

    def op(x, *given, **options):
        if x.shape[0] == 5:
            raise RuntimeError("too many\ntokens")
        return reference.routed_experts_fp4(x, *given, **options)

    op.__name__ = "routed_experts_fp4"
    ops = SimpleNamespace(machine=CPU)
    monkeypatch.setattr(script, "prepared", lambda name, ops, fp4: (op, fp4))
    script.measure("humming", ops, SMALL, 32, [1, 5, 9], tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "humming").read_text().splitlines()]
    assert [row.get("why") for row in rows] == [None, "RuntimeError: too many", None]
    assert "error" not in rows[0]  # nothing to compare with


def test_no_room_for_bf16_is_a_row(script, tmp_path, monkeypatch):
    def no_room(*_):
        raise MemoryError("needs 47 GiB, 3 are free")

    monkeypatch.setattr(script, "prepared", no_room)
    script.measure("bf16", SimpleNamespace(machine=CPU), SMALL, 32, [1, 5], tmp_path)
    (row,) = map(json.loads, (tmp_path / "bf16").read_text().splitlines())
    assert row["refused"] and row["why"] == "needs 47 GiB, 3 are free"


def test_errors_are_those_of_the_worst_token(script):
    expected = torch.ones(3, 4)
    result = expected.clone()
    result[1] *= 1.5
    assert script.error_of(result, expected) == pytest.approx(0.5)
    result[2, 0] = math.nan
    assert script.error_of(result, expected) == math.inf


def test_scripts_need_no_test_tools() -> None:
    """What they import of the tests does not import pytest."""
    tests = Path(__file__).parent
    for file in (tests / "kernel_checks.py", tests / "kernel_timings.py", *tests.glob("timings_*")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "pytest" not in ast.unparse(node), file.name
