"""Kernels of a server that compile while its weights load.

Nothing is compiled here, but for what stands for a kernel: that needs a GPU.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import nn

from sglang_dsv4 import ahead, cli_warm, precision, warmup, weights
from sglang_dsv4.ahead import Ahead
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.linears import ALL_DENSE
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.warmup import Launch, Target
from test_warm import ops_by, target


@pytest.fixture(scope="module")
def flash() -> DSV4Config:
    return cli_warm.chosen_config(None, "flash")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


@pytest.fixture
def weights_came() -> Iterator[threading.Event]:
    """Set at the latest at the end of the test, so that no compiler waits any longer."""
    event = threading.Event()
    yield event
    event.set()


class Compiler:
    """A kernel that compiles in the background where Triton is told to, once `may` is set, and
    fails with `error` if there is one."""

    def __init__(
        self,
        error: Exception | None = None,
        may: threading.Event | None = None,
        name: str = "_kernel",
    ) -> None:
        self.__name__, self.error, self.may = name, error, may
        self.device_caches: dict[int, Any] = {0: ({}, None)}
        self.compiled = 0

    def warmup(self, *arguments: Any, grid: Any) -> Any:
        """As Triton's JITFunction._do_compile."""

        def compile_it() -> str:
            if self.may:
                assert self.may.wait(30)
            self.compiled += 1
            if self.error:
                raise self.error
            return "code"

        cache = self.device_caches[0][0]
        mode = triton.runtime._async_compile.active_mode.get()
        if mode is None:
            return cache.setdefault("key", compile_it())
        kernel = mode.submit(id(self), compile_it, lambda done: cache.update(key=done))
        return cache.setdefault("key", kernel)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What a model launches; a test fills it."""
    launches: list[Launch] = []
    monkeypatch.setattr(warmup, "launches", lambda made: launches)
    return launches


def test_kernels_are_built_beside_each_other_and_failures_forgotten(
    flash: DSV4Config, found: list[Launch]
) -> None:
    """Triton keeps what failed, and raises its error at every later launch."""
    well, broken = Compiler(), Compiler(OSError("killed"))
    found += [Launch(well, (), {}), Launch(broken, (), {}), Launch(broken, (), {})]
    done = Ahead(target(flash)).finish()
    assert done.built == 1 and list(done.failed) == [("kernel", "OSError: killed")] * 2
    assert well.device_caches[0][0] == {"key": "code"} and broken.device_caches[0][0] == {}
    assert warmup.remembered() == {}


def test_all_is_remembered_as_by_the_command(flash: DSV4Config, found: list[Launch]) -> None:
    found.append(Launch(Compiler(), (), {}))
    done = Ahead(target(flash), [("nvcc", lambda: None)]).finish()
    assert warmup.remembered()[target(flash).key()]["built"] == done.built == 2


def test_the_beginning_waits_for_nothing(
    flash: DSV4Config, found: list[Launch], weights_came: threading.Event
) -> None:
    slow = Compiler(may=weights_came)
    found.append(Launch(slow, (), {}))
    begun = Ahead(target(flash), [("nvcc", lambda: weights_came.wait(30))])
    assert slow.compiled == 0  # it began, and weights can be read
    weights_came.set()
    assert begun.finish().built == 2 and slow.device_caches[0][0] == {"key": "code"}


def test_other_kernels_compile_at_their_launch_meanwhile(
    flash: DSV4Config, found: list[Launch], weights_came: threading.Event
) -> None:
    """Those of packing, say: as if nothing went on."""
    found.append(Launch(Compiler(may=weights_came), (), {}))
    begun = Ahead(target(flash))
    assert Compiler().warmup(grid=(1,)) == "code"
    weights_came.set()
    begun.finish()


def test_a_launch_meanwhile_waits_for_its_kernel(
    flash: DSV4Config, found: list[Launch], weights_came: threading.Event
) -> None:
    kernel = Compiler(may=weights_came)
    found.append(Launch(kernel, (), {}))
    begun = Ahead(target(flash))
    threading.Timer(0.1, weights_came.set).start()
    assert kernel.device_caches[0][0]["key"].upper() == "CODE"  # as a launch asks a kernel
    assert begun.finish().built == kernel.compiled == 1


def test_loading_takes_no_part_in_the_seconds(
    flash: DSV4Config, found: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(ahead, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found.append(Launch(Compiler(), (), {}))
    begun = Ahead(target(flash))
    begun.pool.shutdown()  # all is built
    now[0] = 600.0
    assert begun.finish().seconds == begun.waited == 0.0


def test_what_has_not_begun_never_does_after_a_stop(
    flash: DSV4Config, found: list[Launch], weights_came: threading.Event
) -> None:
    kernels = [Compiler(may=weights_came) for _ in range(200)]  # more than threads
    found += [Launch(kernel, (), {}) for kernel in kernels]
    begun = Ahead(target(flash))
    begun.stop()
    weights_came.set()
    begun.pool.shutdown()
    assert sum(kernel.compiled for kernel in kernels) < 100
    assert all(kernel.device_caches[0][0] == {} for kernel in kernels)  # a launch compiles it


def test_a_module_is_built_on_the_device_of_the_server(
    flash: DSV4Config, found: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread begins on the first GPU."""
    local = threading.local()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        local.index = index
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", device)
    on: list[int] = []
    assert Ahead(target(flash), [("nvcc", lambda: on.append(local.index))]).finish().built == 1
    assert on == [3]


def test_launches_are_found_as_without_a_default_device(
    flash: DSV4Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host builds its models with the GPU as the default."""
    asked: list[torch.device] = []
    monkeypatch.setattr(warmup, "launches", lambda made: asked.append(torch.empty(0).device) or [])
    with torch.device("meta"):
        Ahead(target(flash)).finish()
    assert asked == [torch.device("cpu")]


# ---- in a server ----


def served(monkeypatch: pytest.MonkeyPatch, flash: DSV4Config, **changes: Any) -> Any:
    """A served model, but for what is in it, as the end of its construction leaves it."""
    from sglang_dsv4 import host
    from sglang_dsv4.served import deepseek_v4

    monkeypatch.setattr(host, "context_length", lambda: None)
    monkeypatch.setattr(host, "checkpoint_folder", lambda: Path())
    monkeypatch.setattr(deepseek_v4.checkpoint, "total_bytes", lambda folder: 0)
    monkeypatch.setattr(deepseek_v4, "pack_weights", lambda *_: None)
    monkeypatch.setattr(host, "loads_dummies", lambda: True)
    ops = ops_by("triton")
    model: Any = deepseek_v4.DeepseekV4ForCausalLM.__new__(deepseek_v4.DeepseekV4ForCausalLM)
    nn.Module.__init__(model)
    model.config, model.filled, model.chosen = flash, False, precision.parse("")
    machine = replace(ops.machine, device=changes.pop("device", "cuda"))
    providers = {**ops.providers, **changes.pop("providers", {})}
    model.ops = replace(ops, machine=machine, providers=providers)
    model.parallel = Parallel(**changes)
    model.model, model.kept = None, ({0: 32, 2: 16}, (ALL_DENSE,))
    model.head = SimpleNamespace(weight=torch.empty(0, dtype=torch.bfloat16))
    model.ahead = model._begin_kernels()
    return model


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what a served model began to build."""
    from sglang_dsv4 import host

    names: list[str] = []

    def compile(launch: Launch) -> None:
        names.append(launch.kernel.__name__)
        if launch.kernel.__name__ == "_attention_kernel":
            raise RuntimeError("too large")

    launches = warmup.launches

    def on_cpu(made: Target) -> list[Launch]:  # tensors without values lie there here
        return launches(replace(made, ops=ops_by("triton")), decodes=(1,), prefills=(128,))

    monkeypatch.setattr(warmup, "launches", on_cpu)
    monkeypatch.setattr(Launch, "compile", compile)
    positions = ("SGLang positions", lambda: names.append("SGLang positions"))
    monkeypatch.setattr(host, "just_in_time", lambda: [positions])
    return names


def from_checkpoint(model: Any) -> None:
    model.load_weights(iter(()))


def as_dummies(model: Any) -> None:
    model.post_load_weights()


@pytest.mark.parametrize("load", [from_checkpoint, as_dummies])
def test_a_server_compiles_while_it_loads(
    load: Callable[[Any], None],
    begun: list[str],
    flash: DSV4Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(weights, "load", lambda *_, **__: "report")
    model = served(monkeypatch, flash)
    assert {"_attention_kernel", "_grouped_product_fp4_kernel"} <= set(begun)
    assert "ready in" not in caplog.text
    load(model)
    assert "SGLang positions" in begun
    failed = begun.count("_attention_kernel")
    assert f"{len(begun) - failed} kernel variants and modules ready in" in caplog.text
    told = "attention_kernel compiles when it is needed: RuntimeError: too large"
    assert caplog.text.count(told) == failed > 0
    count = len(begun)
    load(model)  # again while it serves
    assert caplog.text.count("ready in") == 1 and len(begun) == count


@pytest.mark.parametrize("error", [weights.CheckpointError("a hole"), OSError("gone")])
def test_weights_that_do_not_come_stop_the_compiler(
    error: Exception, begun: list[str], flash: DSV4Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(weights, "load", fail)
    model = served(monkeypatch, flash)
    pool = model.ahead.pool
    with pytest.raises(type(error), match=str(error)):
        model.load_weights(iter(()))
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(print)
    assert model.ahead is None and not model.filled


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device": "cpu"}, ""),
        ({"rank": 1, "size": 2}, ""),
        (
            {"providers": {"swiglu": "reference"}},
            "when they are needed, not ahead: reference cannot",
        ),
    ],
)
def test_where_a_server_compiles_nothing_ahead(
    flash: DSV4Config,
    changes: dict[str, Any],
    told: str,
    begun: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    model = served(monkeypatch, flash, **changes)
    assert model.ahead is None and told in caplog.text
    as_dummies(model)
    assert begun == [] and "ready in" not in caplog.text


def test_a_server_that_cannot_compile_ahead_goes_on(
    flash: DSV4Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(made: Target) -> list[Launch]:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(warmup, "launches", fail)
    as_dummies(served(monkeypatch, flash))
    assert "kernels compile when they are needed" in caplog.text and "no compiler" in caplog.text
