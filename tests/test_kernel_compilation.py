"""Every kernel compiles for every architecture, without spilled registers, in its shared memory.

The cases are those of the timings_*.py files: kernels as they are launched at the model's shapes.
In every run each kernel is compiled for each architecture at least once; with all its tiles:
    python -m pytest tests/test_kernel_compilation.py --thorough
"""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from kernel_checks import (
    SHARED_MEMORY,
    CompileCase,
    assert_compiles_without_spills,
    assert_fits,
    compile_for,
    memory_before_wait,
    overwritten_operands,
)
from sglang_dsv4 import kernels_triton_fp4, kernels_triton_launch
from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel
from sglang_dsv4.warmup import recorded

CASES: list[CompileCase] = [
    case
    for file in sorted(Path(__file__).parent.glob("timings_*.py"))
    for case in importlib.import_module(file.stem).compile_cases()
]

PACKED = [case for case in CASES if "WGMMA" in case.constexprs and case.constexprs["BLOCK_K"] > 32]
# Beside FlashInfer's kernels, and beside SGLang's before a step.
LAUNCHED_AS_USUAL = {"_recut_kernel", "_fold_sink_kernel", "_decode_slots_kernel"}
EXCHANGED = "shfl.sync.idx"  # how Triton lets the threads of a warp exchange operands here


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    """Nothing is left behind, and nothing of an earlier run is found."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture(autouse=True)
def as_in_a_server(monkeypatch):
    """SGLang puts a plain function there, which kernels cannot call."""
    monkeypatch.setattr(triton, "next_power_of_2", lambda n: 1 << (n - 1).bit_length())


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        pytest.param(
            case,
            capability,
            id=f"{case.name}-sm_{capability}",
            marks=() if capability in case.usual else pytest.mark.thorough,
        )
        for case in CASES
        for capability in case.capabilities
    ],
)
def test_compiles_without_spills(case: CompileCase, capability: int, record_property) -> None:
    report = case.report(capability)
    record_property("report", str(report))
    print(report)
    assert_fits(report)
    assert not (capability == 90 and overwritten_operands(report.cubin))
    waits = capability >= 90 and case.kernel.__name__ not in LAUNCHED_AS_USUAL
    assert ("griddepcontrol" in report.ptx) is waits
    assert not (waits and memory_before_wait(report.cubin))
    # Blackwell's tensor cores take them from memory, and tiles of 32 inputs are for tiny models.
    if case in PACKED and capability != 100:
        assert EXCHANGED not in report.ptx


def test_packed_weights_in_another_order_are_exchanged() -> None:
    """They are packed in the order of fragments, so that threads multiply what they have read: the
    test above would see it if Triton's order were another one."""
    case = next(each for each in PACKED if 90 in each.capabilities)
    other = {**case.constexprs, "WGMMA": not case.constexprs["WGMMA"]}
    assert EXCHANGED in replace(case, constexprs=other).report(90).ptx


@triton.jit
def _left_under_way(total):
    """In the place of `finished`."""
    return total


@pytest.mark.parametrize("waited", [True, False])
def test_products_that_nothing_waits_for_are_found(waited: bool, monkeypatch) -> None:
    if not waited:
        monkeypatch.setattr(kernels_triton_fp4, "finished", _left_under_way)
    case = next(one for one in PACKED if "GROUP" in one.constexprs and 90 in one.capabilities)
    assert bool(overwritten_operands(case.report(90).cubin)) is not waited


@pdl_kernel
def _copy_kernel(x, out, EARLY: tl.constexpr, LATE: tl.constexpr):
    """Reads memory before it waits, or after, or does not wait at all."""
    if EARLY:
        tl.store(out, tl.load(x))
    if LATE:
        after_previous()
        tl.store(out, tl.load(x))


@pytest.mark.parametrize(
    ("early", "late", "found"),
    [(False, True, ""), (True, True, "LDG STG"), (True, False, "LDG STG EXIT")],
)
def test_memory_before_the_wait_is_found(early: bool, late: bool, found: str) -> None:
    constexprs = {"EARLY": early, "LATE": late}
    report = compile_for(90, _copy_kernel, {"x": "*fp32", "out": "*fp32"}, constexprs)
    touched = " ".join(memory_before_wait(report.cubin))
    assert bool(touched) is bool(found)
    assert all(name in touched for name in found.split())


@pytest.mark.parametrize(
    ("capability", "grid", "early"),
    [(80, (1,), False), (89, (1,), False), (90, (1,), True), (90, (64, 64), False)],
)
def test_short_kernels_start_early_where_a_gpu_can(capability, grid, early, monkeypatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(JITFunction, "run", lambda *_, **options: seen.update(options))
    monkeypatch.setattr(kernels_triton_launch, "compute_capability", lambda: capability)
    _copy_kernel[grid](None, None, EARLY=False, LATE=True)
    assert seen["launch_pdl"] is early
    with recorded() as found:  # what is compiled ahead is the same variant
        _copy_kernel[grid](None, None, EARLY=False, LATE=True)
    assert [launch.options["launch_pdl"] for launch in found.values()] == [early]


def test_every_run_compiles_each_kernel_for_each_architecture() -> None:
    """But for FlashMLA's neighbours, which run on Hopper alone."""
    found: dict[str, set[int]] = {}
    for case in CASES:
        usual = set(case.usual) & set(case.capabilities)
        found.setdefault(case.kernel.__name__, set()).update(usual)
    assert len(found) > 20
    for name, capabilities in found.items():
        hopper = name in ("_narrow_kernel", "_turn_back_kernel")
        assert capabilities == ({90} if hopper else set(SHARED_MEMORY)), name


@triton.jit
def _centred_kernel(x, out, SIZE: tl.constexpr):
    """All values are kept until their maximum is known."""
    place = tl.arange(0, SIZE)
    values = tl.load(x + place).to(tl.float32)
    tl.store(out + place, values - tl.max(values, axis=0))


SIGNATURE = {"x": "*bf16", "out": "*fp32"}


def test_spills_are_found() -> None:
    """One warp has registers for 8,160 values at most."""
    with pytest.raises(AssertionError, match="bytes spilled: smaller tiles"):
        assert_fits(compile_for(80, _centred_kernel, SIGNATURE, {"SIZE": 8192}, num_warps=1))


def test_too_much_shared_memory_is_found() -> None:
    report = compile_for(80, _centred_kernel, SIGNATURE, {"SIZE": 1024}, num_warps=4)
    assert report.shared > 0
    assert_fits(report)
    large = replace(report, shared=SHARED_MEMORY[80] + 1)
    with pytest.raises(AssertionError, match="at most 166912 are there"):
        assert_fits(large)


def test_a_signature_that_does_not_match_is_an_error() -> None:
    with pytest.raises(AssertionError, match="differ in .*out"):
        compile_for(80, _centred_kernel, {"x": "*bf16"}, {"SIZE": 1024})


def test_every_architecture_is_compiled_for() -> None:
    reports = assert_compiles_without_spills(_centred_kernel, SIGNATURE, {"SIZE": 1024})
    assert [report.capability for report in reports] == [80, 89, 90, 100, 120]
    for report in reports:
        assert f"sm_{report.capability}" in report.ptx
