"""The served model against transformers: the same tokens, the same log-probabilities."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import oracle
from agreement import Comparison, ties
from serving import Server

FEW = (1, 6, 10, 11)  # prompts of 3, 129, 300 and 700 tokens


@pytest.fixture(scope="module", params=["full", "fp4"])
def served(
    request: pytest.FixtureRequest, serve: Callable[..., Server], checkpoint: Path
) -> Iterator[tuple[Server, bool]]:
    """A server, and whether it keeps index queries and keys on the FP4 grid, as by default."""
    fp4 = request.param == "fp4"
    if fp4:
        yield request.getfixturevalue("fp32_server"), fp4
        return
    env = {"SGLANG_DSV4_PRECISION": "indexer_qk=full"}
    with serve(checkpoint, env=env, dtype="float32") as server:
        yield server, fp4


def compare(
    server: Server, wanted: list[oracle.Generation], concurrency: int = 8
) -> Comparison:
    comparison = Comparison()
    replies = server.generate_all([w.prompt for w in wanted], len(wanted[0].tokens), concurrency)
    for reply, generation in zip(replies, wanted, strict=True):
        comparison.add(f"prompt of {len(generation.prompt)}", reply, generation, ties(generation))
    return comparison


def test_a_few_prompts_equal_the_reference(served, checkpoint: Path) -> None:
    server, fp4 = served
    model = oracle.load(checkpoint, fp4)
    wanted = [oracle.greedy(model, oracle.prompts()[i], 8) for i in FEW]
    compare(server, wanted, concurrency=1).check()


def test_all_prompts_equal_the_reference(
    fp32_server: Server, expected: tuple[oracle.Generation, ...]
) -> None:
    """24 prompts of the lengths around every boundary, batched by the scheduler, 64 tokens each."""
    fp32_server.flush()
    assert {1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 300, 700} <= {
        len(generation.prompt) for generation in expected
    }
    compare(fp32_server, list(expected)).check()
    assert sum(len(set(generation.tokens)) > 2 for generation in expected) >= 10


def test_short_prompts_equal_the_reference(served, checkpoint: Path) -> None:
    """Prompt lengths on both sides of every window boundary (4, 128, 256)."""
    server, fp4 = served
    model = oracle.load(checkpoint, fp4)
    source = oracle.story()
    lengths = [*range(1, 10), 127, 128, 129, 255, 256, 257]
    wanted = [oracle.greedy(model, source[:length], 4) for length in lengths]
    server.flush()
    compare(server, wanted).check()


def test_our_classes_serve(served) -> None:
    state = served[0].state()["sglang_dsv4"]
    assert state["model_class"] == "sglang_dsv4.served.deepseek_v4.DeepseekV4ForCausalLM"
    assert state["attention_backend"] == "sglang_dsv4.attention.backend.DSV4Backend"
    assert state["kv_pool"] == "sglang_dsv4.host.KVPool"
    assert set(state["ops"].values()) == {"reference"}
    assert state["nan_index_scores"] == {}
