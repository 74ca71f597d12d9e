"""One place chooses: what each machine gets, what may be named, and what is refused in words."""

import importlib
import re
from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace

import pytest

from sglang_dsv4 import backends
from sglang_dsv4.backends import PROVIDERS, Machine, Ops, Provider, choose
from sglang_dsv4.settings import SettingsError

CPU = Machine("cpu", "CPU", None)
GPU = Machine("cuda", "NVIDIA H200", (9, 0))


def needs_blackwell(machine: Machine) -> str | None:
    fits = machine.capability is not None and machine.capability >= (10, 0)
    return None if fits else f"needs compute capability 10.0, this is {machine.capability}"


def needs_a_gpu(machine: Machine) -> str | None:
    return None if machine.device == "cuda" else "needs a GPU"


@pytest.fixture
def two_ops(monkeypatch):
    """Two ops: `fast` has a kernel for any GPU and a better one for Blackwell, `plain` has none."""

    def op(name):
        return SimpleNamespace(**{name: lambda: name})

    reference = Provider("reference", "plain_module", lambda machine: None)
    table = {
        "fast": (
            Provider("newest", "newest_module", needs_blackwell),
            Provider("kernel", "kernel_module", needs_a_gpu),
            reference,
        ),
        "plain": (reference,),
    }
    module = SimpleNamespace(**vars(op("fast")), **vars(op("plain")))
    monkeypatch.setattr(backends, "PROVIDERS", table)
    monkeypatch.setattr(backends, "Ops", lambda **fields: SimpleNamespace(**fields))
    monkeypatch.setattr(backends, "importlib", SimpleNamespace(import_module=lambda name: module))
    return table


# ---- the shipped table ----


def test_every_op_has_a_field_a_reference_and_a_function():
    assert {field.name for field in fields(Ops)} == {*PROVIDERS, "machine", "providers"}
    for op, providers in PROVIDERS.items():
        assert providers[-1].name == "reference", f"{op}: the reference must come last"
        assert len({provider.name for provider in providers}) == len(providers), op
        reference = importlib.import_module(providers[-1].module)
        assert getattr(reference, op).__module__ == providers[-1].module


def test_on_a_cpu_everything_is_the_reference():
    ops = choose(CPU)
    assert ops.machine is CPU
    for op in PROVIDERS:
        assert ops.providers[op] == "reference"
        module = importlib.import_module(PROVIDERS[op][-1].module)
        assert getattr(ops, op) is getattr(module, op)


def test_describe_has_one_line_for_each_op():
    lines = choose(CPU).describe()
    assert lines == [f"{op}: reference" for op in PROVIDERS]


def test_the_choice_is_frozen():
    ops = choose(CPU)
    with pytest.raises(FrozenInstanceError):
        ops.swiglu = print
    with pytest.raises(TypeError):
        ops.providers["swiglu"] = "other"
    with pytest.raises(TypeError):
        PROVIDERS["swiglu"] = ()


def test_on_a_gpu_the_reference_must_be_named():
    ops = choose(GPU, "all=reference")
    assert set(ops.providers.values()) == {"reference"}
    assert ops.machine is GPU


def test_other_kernels_serve_only_where_they_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: name)
    op, kernels = "routed_experts_fp4", "sglang_dsv4.moe.kernels_"
    for named, provider, module in (("", "triton", "triton_fp4"), ("humming",) * 3):
        ops = choose(GPU, named and f"{op}={named}")
        assert (ops.providers[op], ops.routed_experts_fp4.__module__) == (
            provider,
            kernels + module,
        )


def test_each_op_may_be_named():
    named = ", ".join(f"{op} = reference" for op in PROVIDERS)
    assert choose(GPU, named).providers == choose(GPU, "all=reference").providers


@pytest.mark.parametrize("named", ["swigloo=reference", "=reference", "swiglu", "swiglu="])
def test_unknown_ops_and_broken_items_are_refused(named):
    with pytest.raises(SettingsError, match="SGLANG_DSV4_OPS") as error:
        choose(CPU, named)
    if "=reference" in named and not named.startswith("="):
        assert "swigloo" in str(error.value) and "swiglu" in str(error.value)


@pytest.mark.parametrize("named", ["swiglu=fastest", "all=fastest"])
def test_unknown_providers_are_refused(named):
    with pytest.raises(SettingsError, match="'fastest' is refused: must be .*reference"):
        choose(CPU, named)


# ---- the rules, on a table with kernels ----


def test_the_best_provider_that_runs_is_taken(two_ops):
    assert choose(CPU).providers == {"fast": "reference", "plain": "reference"}
    named = "plain=reference"
    assert choose(GPU, named).providers == {"fast": "kernel", "plain": "reference"}
    blackwell = Machine("cuda", "NVIDIA B200", (10, 0))
    assert choose(blackwell, named).providers == {"fast": "newest", "plain": "reference"}


def test_a_gpu_without_a_kernel_is_told_how_to_get_the_reference(two_ops):
    message = "no provider of plain for NVIDIA H200: reference: .*SGLANG_DSV4_OPS=plain=reference"
    with pytest.raises(RuntimeError, match=message):
        choose(GPU)


def test_every_reason_is_given(two_ops):
    two_ops["fast"] = (
        Provider("newest", "newest_module", needs_blackwell),
        Provider("other", "other_module", lambda machine: "is not installed"),
    )
    with pytest.raises(RuntimeError) as error:
        choose(GPU, "plain=reference")
    assert str(error.value) == (
        "no provider of fast for NVIDIA H200: newest: needs compute capability 10.0, "
        "this is (9, 0); other: is not installed"
    )


def test_a_named_provider_that_cannot_run_is_an_error(two_ops):
    expected = "fast: provider newest cannot run on NVIDIA H200: needs compute capability 10.0"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        choose(GPU, "fast=newest,plain=reference")
    with pytest.raises(RuntimeError, match="fast: provider kernel cannot run on CPU: needs a GPU"):
        choose(CPU, "fast=kernel")


def test_all_stands_for_the_ops_that_are_not_named(two_ops):
    expected = {"fast": "kernel", "plain": "reference"}
    assert choose(GPU, "all=reference,fast=kernel").providers == expected
    assert choose(GPU, "fast=kernel, all=reference").providers == expected


def test_all_is_refused_where_an_op_has_no_such_provider(two_ops):
    with pytest.raises(ValueError, match="plain has no provider 'kernel'; known: reference"):
        choose(GPU, "all=kernel")


def test_humming_is_there_where_its_package_is_and_only_where_it_is_named(monkeypatch):
    (humming,) = (one for one in PROVIDERS["routed_experts_fp4"] if one.name == "humming")
    found = {"sgl_kernel", "triton"}
    util = SimpleNamespace(find_spec=lambda name: name if name in found else None)
    monkeypatch.setattr(backends.importlib, "util", util)
    assert humming.refuses(GPU) == "humming-kernels is not installed"
    found.add("humming")
    assert humming.refuses(GPU) is None
    assert humming.refuses(CPU) == "needs a GPU of compute capability 8.0, this is None"
    found.remove("sgl_kernel")
    assert humming.refuses(GPU) == "sglang-kernel is not installed"
    assert PROVIDERS["routed_experts_fp4"][0].name == "triton"


# ---- the machine ----


def test_probe_on_a_cpu():
    assert Machine.probe("cpu") == CPU


def test_probe_asks_torch(monkeypatch):
    cuda = SimpleNamespace(
        is_available=lambda: True,
        get_device_name=lambda: "NVIDIA H200",
        get_device_capability=lambda: (9, 0),
    )
    monkeypatch.setattr(backends.torch, "cuda", cuda)
    assert Machine.probe() == Machine.probe("cuda") == GPU
    assert Machine.probe("cpu") == CPU
    cuda.is_available = lambda: False
    assert Machine.probe() == CPU
