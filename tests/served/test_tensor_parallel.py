"""Two ranks give the tokens of one, whichever way they divide the experts."""

from collections.abc import Callable
from pathlib import Path

import pytest

import oracle
from agreement import Comparison, ties
from serving import Server

COUNT = 12
LENGTHS = (3, 129, 301, 600)


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[oracle.Generation]:
    model = oracle.load(checkpoint, indexer_fp4=True)
    return [oracle.greedy(model, oracle.story()[:length], COUNT) for length in LENGTHS]


@pytest.mark.parametrize("groups", [1, 2])
def test_two_ranks_equal_the_reference(
    serve: Callable[..., Server], checkpoint: Path, wanted: list[oracle.Generation], groups: int
) -> None:
    """groups: of experts; in two, no expert is divided."""
    # The host wants one core list per rank; without it it counts NUMA nodes.
    options = {"dtype": "float32", "tp_size": "2", "ep_size": str(groups)}
    with serve(checkpoint, env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, **options) as server:
        state = server.state()
        assert (state["tp_size"], state["ep_size"]) == (2, groups)
        replies = server.generate_all([generation.prompt for generation in wanted], COUNT)
        log = server.log.read_text(errors="replace")
    comparison = Comparison()
    for reply, generation in zip(replies, wanted, strict=True):
        comparison.add(f"prompt of {len(generation.prompt)}", reply, generation, ties(generation))
    comparison.check()
    assert log.count("of experts on other ranks") == 2 * (groups > 1)
