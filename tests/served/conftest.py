"""Servers that the served tests share."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mutants import mutant_environment
from serving import Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies in this folder starts a server."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.served)


@pytest.fixture(scope="session", autouse=True)
def ended_by_signal() -> None:
    """A test run that is terminated ends its servers first; they are in groups of their own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@pytest.fixture(scope="session")
def serve(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[..., Server]:
    """Makes servers, to be entered by whoever needs one; with --mutant, each runs mutated code.

    Options are written as keywords: dtype="float32" is --dtype float32.
    """
    mutant = mutant_environment(request.config.getoption("--mutant"))

    def make(
        checkpoint: Path, *, env: dict[str, str] | None = None, forked: bool = True, **options
    ) -> Server:
        flags = {"--" + name.replace("_", "-"): value for name, value in options.items()}
        log = tmp_path_factory.mktemp("server") / "server.log"
        env = {**mutant, **(env or {})}
        return Server(checkpoint, log, options=flags, env=env, forked=forked)

    return make


@pytest.fixture(scope="session")
def fp32_server(serve: Callable[..., Server], checkpoint: Path) -> Iterator[Server]:
    """The checkpoint in FP32, all else as by default."""
    with serve(checkpoint, dtype="float32") as server:
        yield server
