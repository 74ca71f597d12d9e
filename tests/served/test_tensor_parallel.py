"""Two ranks give the tokens of one."""

from collections.abc import Callable
from pathlib import Path

import oracle
from agreement import Comparison, ties
from serving import Server

COUNT = 12
LENGTHS = (3, 129, 301, 600)


def test_two_ranks_equal_the_reference(serve: Callable[..., Server], checkpoint: Path) -> None:
    model = oracle.load(checkpoint, indexer_fp4=True)
    wanted = [oracle.greedy(model, oracle.story()[:length], COUNT) for length in LENGTHS]
    # The host wants one core list per rank; without it it counts NUMA nodes.
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with serve(checkpoint, env=env, dtype="float32", tp_size="2") as server:
        assert server.state()["tp_size"] == 2
        replies = server.generate_all([generation.prompt for generation in wanted], COUNT)
    comparison = Comparison()
    for reply, generation in zip(replies, wanted, strict=True):
        comparison.add(f"prompt of {len(generation.prompt)}", reply, generation, ties(generation))
    comparison.check()
