"""Requests that the scheduler retracts and runs again give the same answers."""

from collections.abc import Callable
from pathlib import Path

import oracle
from agreement import Comparison, ties
from serving import Server

COUNT = 20
LENGTHS = (5, 127, 299)


def test_retracted_requests_equal_the_reference(
    serve: Callable[..., Server], checkpoint: Path
) -> None:
    model = oracle.load(checkpoint, indexer_fp4=True)
    wanted = [oracle.greedy(model, oracle.story()[:length], COUNT) for length in LENGTHS]
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    with serve(checkpoint, env=env, dtype="float32") as server:
        replies = server.generate_all([generation.prompt for generation in wanted], COUNT)
    assert sum(reply.meta["num_retractions"] for reply in replies) > 0
    comparison = Comparison()
    for reply, generation in zip(replies, wanted, strict=True):
        name = f"prompt of {len(generation.prompt)}, {reply.meta['num_retractions']} retractions"
        comparison.add(name, reply, generation, ties(generation))
    comparison.check()
