"""A prompt that the server prefills in chunks gives what it gives whole."""

from collections.abc import Callable
from pathlib import Path

import pytest

import oracle
from agreement import Comparison, ties
from serving import Server

LENGTHS = (700, 1001)
CHUNK = 256
COUNT = 16


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[oracle.Generation]:
    """The reference's answers to prompts of several chunks."""
    model = oracle.load(checkpoint, indexer_fp4=True)
    return [oracle.greedy(model, oracle.story()[:length], COUNT) for length in LENGTHS]


def test_chunked_prefill_equals_the_reference(
    serve: Callable[..., Server], checkpoint: Path, wanted: list[oracle.Generation]
) -> None:
    """Without the radix cache: the prompts begin alike, and all of each shall be computed. Other
    cuts are in tests/test_model.py."""
    comparison = Comparison()
    options = {"chunked_prefill_size": str(CHUNK), "max_prefill_tokens": str(CHUNK)}
    with serve(checkpoint, dtype="float32", disable_radix_cache="", **options) as server:
        replies = server.generate_all([generation.prompt for generation in wanted], COUNT)
        assert server.log.read_text().count("Prefill batch") >= sum(LENGTHS) // CHUNK
    for reply, generation in zip(replies, wanted, strict=True):
        assert reply.cached == 0
        comparison.add(f"prompt of {len(generation.prompt)}", reply, generation, ties(generation))
    comparison.check()
