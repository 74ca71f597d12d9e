"""What every test shares: a quiet environment, poisoned uninitialised memory, GPU markers."""

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch starts its threads, and for the servers that tests start: tiny models run several
# times slower when OpenMP threads share cores, no test may reach a hub, and no switch that is set
# on this machine may change what is tested.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
for name in ("SGLANG_DSV4_PRECISION", "SGLANG_DSV4_OPS", "SGLANG_PLUGINS"):
    os.environ.pop(name, None)

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.utils._device  # noqa: E402
from filelock import FileLock  # noqa: E402

import serving  # noqa: E402


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """NaN, or the largest integer: an element that is read before it is written shows at once."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    """Everything that returns uninitialised memory returns poison, for the whole session."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **options: poison(make(*args, **options))

    # torch looks these up by name when `torch.device` is first entered: the real ones, please.
    torch.utils._device._device_constructors()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


def kernels_run() -> bool:
    """Whether Triton's kernels run in this process: on a GPU, or in the interpreter."""
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "kernels: launches Triton kernels; without a GPU, only in the session that"
        " test_kernels_interpreted.py starts in the interpreter",
    )
    config.addinivalue_line(
        "markers", "thorough: more than the interpreter has time for, unless --thorough is given"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the interpreted session runs: it is not skipped, it runs elsewhere. What is
    marked `thorough` runs where asked for, and on a GPU, which has the time."""
    left_out = () if kernels_run() else ("kernels",)
    if not (torch.cuda.is_available() or config.getoption("--thorough")):
        left_out = (*left_out, "thorough")
    elsewhere = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if not elsewhere:
        return
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item not in elsewhere]


@pytest.fixture(autouse=True, scope="session")
def kernels_under_test() -> Iterator[None]:
    """Launches on tensors without values do nothing; the interpreter computes as a GPU does."""
    if not kernels_run():
        yield
        return
    from kernel_checks import kernels_ready_for_tests

    with kernels_ready_for_tests():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a `gpu(capability)` test where there is no such GPU, saying what it needs."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needed: Any = marker.args[0] if marker.args else (8, 0)
    wanted = f"needs an NVIDIA GPU of compute capability {needed[0]}.{needed[1]}"
    if not torch.cuda.is_available():
        pytest.skip(wanted)
    if torch.cuda.get_device_capability() < needed:
        pytest.skip(f"{wanted}, this one has {torch.cuda.get_device_capability()}")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The oracle's small model with every kind of layer, written by transformers in fp32."""
    import oracle  # imports transformers, which most tests do without

    folder = tmp_path_factory.mktemp("checkpoint")
    oracle.write_checkpoint(folder, oracle.tiny_config(), oracle.CHECKPOINT_SEED)
    return folder


@pytest.fixture(scope="session")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """The oracle's Generations for all its prompts, index queries and keys on the FP4 grid;
    computed once for all processes of a test run."""
    import oracle

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # then each process has a folder within the run's
        shared = shared.parent

    file = shared / "expected.pickle"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_bytes(pickle.dumps(oracle.expected(checkpoint, indexer_fp4=True)))
    generations: tuple[Any, ...] = pickle.loads(file.read_bytes())
    return generations


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    return serving.free_port()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Served tests can run against servers with a planted fault; see mutants.py."""
    parser.addoption("--mutant", help="plant this fault in every server")
    parser.addoption(
        "--thorough", action="store_true", help="all that can be interpreted, and every compilation"
    )
