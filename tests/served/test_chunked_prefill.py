"""A prompt that the server prefills in chunks gives what it gives whole."""

from collections.abc import Callable
from pathlib import Path

import pytest

import oracle
from agreement import Comparison, ties
from serving import Server

LENGTHS = (700, 1000, 1400)
COUNT = 24


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[oracle.Generation]:
    """The reference's answers to prompts of several chunks, which share nothing."""
    model = oracle.load(checkpoint, indexer_fp4=False)
    source = oracle.prompts(seed=5)[11] + oracle.prompts(seed=6)[11]
    return [oracle.greedy(model, source[length - 1 :: -1], COUNT) for length in LENGTHS]


@pytest.mark.parametrize("chunk", [256, 512, 768])
def test_chunked_prefill_equals_the_reference(
    serve: Callable[..., Server], checkpoint: Path, wanted: list[oracle.Generation], chunk: int
) -> None:
    """With whole index queries and keys: over thousands of tokens some value lies so near a border
    of the FP4 grid that the last digit decides its code."""
    comparison = Comparison()
    env = {"SGLANG_DSV4_PRECISION": "indexer_qk=full"}
    options = {"chunked_prefill_size": str(chunk), "max_prefill_tokens": str(chunk)}
    with serve(checkpoint, env=env, dtype="float32", **options) as server:
        replies = server.generate_all([generation.prompt for generation in wanted], COUNT)
        assert server.log.read_text().count("Prefill batch") >= sum(LENGTHS) // chunk
    for reply, generation in zip(replies, wanted, strict=True):
        comparison.add(f"chunks of {chunk}", reply, generation, ties(generation))
    comparison.check()
