"""However a token is computed, alone, batched, after a prefix hit, step by step, it is the same."""

import json
import threading
import urllib.request
from pathlib import Path

import pytest

import oracle
from agreement import Comparison, ties
from serving import Reply, Server

COUNT = 24
PAGE = 256


@pytest.fixture
def server(fp32_server: Server) -> Server:
    return fp32_server


@pytest.fixture(scope="module")
def story() -> list[int]:
    """Long enough for every test. Compared are only answers to its beginnings, of lengths whose
    generations are known to be free of near ties; other requests are made from other parts."""
    return oracle.story()


def cold(server: Server, prompt: list[int], count: int = COUNT) -> Reply:
    """A request with nothing in the cache."""
    server.flush()
    reply = server.generate(prompt, count)
    assert reply.cached == 0
    return reply


def same(found: Reply, wanted: Reply, name: str) -> None:
    comparison = Comparison()
    comparison.add(name, found, wanted, wanted.gaps)
    comparison.check()


@pytest.mark.parametrize(("shared", "length"), [(256, 301), (512, 600)])
def test_prefix_hit_equals_cold(
    server: Server, story: list[int], shared: int, length: int
) -> None:
    """The donor has ended and its slots are used by others before the prefix is hit."""
    prompt = story[:length]
    wanted = cold(server, prompt)
    server.flush()
    server.generate(story[:shared] + story[900:1000])  # the donor, which goes on differently
    server.generate_all([story[i : i + 150] for i in range(700, 1000, 60)], 8)  # take its slots
    found = server.generate(prompt, COUNT)
    assert found.cached == shared
    same(found, wanted, f"hit of {shared}")


@pytest.mark.parametrize("shared", [129, 200, 255, 256, 257])
def test_prefix_is_shared_only_at_pages(server: Server, story: list[int], shared: int) -> None:
    """A shared prefix may end inside a window or a page; reuse ends at the page before."""
    prompt = story[:301]
    wanted = cold(server, prompt)
    server.flush()
    server.generate(story[:shared] + story[1000:1100], 4)
    found = server.generate(prompt, COUNT)
    assert found.cached == shared // PAGE * PAGE
    same(found, wanted, f"{shared} shared")


def test_a_donor_that_went_on_for_long(server: Server, story: list[int]) -> None:
    """The host frees window rows behind a running request, so a prefix far back cannot be hit any
    more: it must be computed again, never read from rows that are gone."""
    prompt = story[:301]
    wanted = cold(server, prompt)
    server.flush()
    server.generate(story[:290] + story[600:1200], 4)
    found = server.generate(prompt, COUNT)
    assert found.cached in (0, PAGE)
    same(found, wanted, f"{found.cached} cached")


def test_the_same_long_prompt_again(server: Server, story: list[int]) -> None:
    """Cold, then three times more with another request in between: one answer, all pages cached."""
    prompt = story[:1400]
    wanted = cold(server, prompt)
    for turn in range(3):
        server.generate(story[50 * turn : 50 * turn + 400], 4)
        found = server.generate(prompt, COUNT)
        assert found.cached == 1400 // PAGE * PAGE
        same(found, wanted, f"turn {turn}")


def test_batched_equals_alone(server: Server, story: list[int]) -> None:
    """Requests of very different lengths that run together."""
    prompts = [story[:length] for length in (5, 3, 700, 129, 257, 127)]
    wanted = [cold(server, prompt) for prompt in prompts]
    server.flush()
    comparison = Comparison()
    for prompt, found, alone in zip(
        prompts, server.generate_all(prompts, COUNT), wanted, strict=True
    ):
        comparison.add(f"prompt of {len(prompt)}", found, alone, alone.gaps)
    comparison.check()


def test_decode_equals_prefill_at_every_step(server: Server, story: list[int]) -> None:
    """Greedy decoding against a fresh prefill of everything so far, token by token."""
    prompt = story[:240]  # decoding passes 256
    wanted = cold(server, prompt, 24)
    for step in range(24):
        found = cold(server, prompt + list(wanted.tokens[:step]), 1)
        comparison = Comparison()
        single = Reply((wanted.tokens[step],), (wanted.logprobs[step],), (), 0, {})
        comparison.add(f"step {step}", found, single, (wanted.gaps[step],))
        comparison.check()


def test_decode_runs_through_whole_hca_windows(
    server: Server, checkpoint: Path, story: list[int]
) -> None:
    """Decoding from 120 to 270 closes an HCA window that a prompt began, and one all its own."""
    wanted = oracle.greedy(oracle.load(checkpoint, indexer_fp4=True), story[:120], 150)
    found = cold(server, story[:120], 150)
    comparison = Comparison()
    comparison.add("150 steps", found, wanted, ties(wanted))
    comparison.check()


def test_a_reused_slot_starts_clean(server: Server, checkpoint: Path) -> None:
    """One request after the other, so that each takes the slot, and the pages, that the one before
    left in the middle of a window."""
    prompts = [prompt for prompt in oracle.prompts() if 90 <= len(prompt) <= 300]
    assert len(prompts) >= 12
    model = oracle.load(checkpoint, indexer_fp4=True)
    server.flush()
    comparison = Comparison()
    for prompt in prompts:
        found, wanted = server.generate(prompt, 4), oracle.greedy(model, prompt, 4)
        comparison.add("reused slot", found, wanted, ties(wanted))
    comparison.check()


def test_an_aborted_stream_leaves_no_trace(server: Server, story: list[int]) -> None:
    """A client that goes away in mid-stream; then its slot and pages serve others."""
    prompt = story[:600]
    wanted = cold(server, prompt)
    server.flush()
    body = {
        "input_ids": story[700:1400],
        "sampling_params": {"max_new_tokens": 1000, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    request = urllib.request.Request(
        server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        for _ in range(6):
            assert stream.readline()
    server.flush()  # possible only once the scheduler has dropped the request
    same(server.generate(prompt, COUNT), wanted, "after an abort")


def test_many_at_once_keep_their_answers(server: Server, story: list[int]) -> None:
    """Shared prefixes from several clients, twice: everybody gets their own answer."""
    prompts = [story[:length] for length in (513, 257, 299, 700, 129, 512, 301, 200)]
    wanted = [cold(server, prompt, 10) for prompt in prompts]
    server.flush()
    comparison, lock = Comparison(), threading.Lock()
    for _ in range(2):
        for found, alone in zip(server.generate_all(prompts, 10), wanted, strict=True):
            with lock:
                comparison.add("concurrent", found, alone, alone.gaps)
    comparison.check()
