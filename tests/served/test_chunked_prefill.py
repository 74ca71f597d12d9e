"""A prompt that the server prefills in chunks gives what it gives whole."""

from collections.abc import Callable
from pathlib import Path

import pytest

import oracle
from agreement import Comparison, ties
from serving import Server

LENGTHS = (700, 1001, 1400)
COUNT = 16


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[oracle.Generation]:
    """The reference's answers to prompts of several chunks."""
    model = oracle.load(checkpoint, indexer_fp4=True)
    return [oracle.greedy(model, oracle.story()[:length], COUNT) for length in LENGTHS]


@pytest.mark.parametrize("chunk", [256, 512, 768])
def test_chunked_prefill_equals_the_reference(
    serve: Callable[..., Server], checkpoint: Path, wanted: list[oracle.Generation], chunk: int
) -> None:
    """Without the radix cache: the prompts begin alike, and all of each shall be computed."""
    comparison = Comparison()
    options = {"chunked_prefill_size": str(chunk), "max_prefill_tokens": str(chunk)}
    with serve(checkpoint, dtype="float32", disable_radix_cache="", **options) as server:
        replies = server.generate_all([generation.prompt for generation in wanted], COUNT)
        assert server.log.read_text().count("Prefill batch") >= sum(LENGTHS) // chunk
    for reply, generation in zip(replies, wanted, strict=True):
        assert reply.cached == 0
        comparison.add(f"chunks of {chunk}", reply, generation, ties(generation))
    comparison.check()
