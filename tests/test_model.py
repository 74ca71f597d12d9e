"""The model without a server: equal to transformers layer by layer, however its tokens arrive."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import oracle
from inprocess import Request, Runner
from sglang_dsv4.attention.cache import PAGE
from sglang_dsv4.parallel import Parallel

EXACT = 1e-4  # largest difference allowed in float32, of values up to 15
TIE = 1e-4  # scores closer than this may be ranked either way
LENGTH = 300  # two HCA windows and a page boundary lie within, and the index selects 8 of 75
BOUNDARIES = (2, 3, 4, 7, 8, 126, 127, 128, 129, 255, 256)
FP4 = {"full": False, "fp4": True}


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(15, oracle.VOCAB_SIZE, (length,), generator=generator).tolist()


PROMPT = prompt(LENGTH, seed=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by transformers."""
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    oracle.write_checkpoint(folder, oracle.tiny_config(), seed=0)
    return folder


@pytest.fixture(scope="module", params=FP4)
def indexer_qk(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def traces(checkpoint: Path) -> dict[str, oracle.Trace]:
    """What transformers computes for PROMPT, with the indexer in full precision and on the grid."""
    return {name: oracle.record(oracle.load(checkpoint, fp4), PROMPT) for name, fp4 in FP4.items()}


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Runner:
    """One model and one cache for all tests: what one leaves behind must not matter to the next."""
    return Runner(checkpoint, pages=40, slots=12)


@pytest.fixture
def runner(shared: Runner) -> Iterator[Runner]:
    """It takes back what the test did not close, as it is."""
    free = shared.free_slots, shared.free_pages, shared.free_window_pages
    before = [list(numbers) for numbers in free]
    yield shared
    for numbers, kept in zip(free, before, strict=True):
        numbers[:] = kept
    for cache in shared.caches:
        assert (cache.kv[0] == 0).all(), "the null row was written"


@pytest.fixture(scope="module")
def alone(shared: Runner) -> Callable[[Sequence[int]], torch.Tensor]:
    """Logits of a prompt that a request of its own runs in one forward."""
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def run(tokens: Sequence[int]) -> torch.Tensor:
        if tuple(tokens) not in known:
            request = shared.open()
            known[tuple(tokens)] = shared.run(request, tokens)
            shared.close(request)
        return known[tuple(tokens)]

    return run


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "logits") -> None:
    assert actual.isfinite().all(), f"{what}: not finite"
    difference = (actual - expected).abs()
    worst = int(difference.flatten(1).amax(dim=1).argmax())
    assert difference.max() <= EXACT, f"{what}: {difference.max()} apart at token {worst}"


# ---- layer by layer ----


@dataclass
class Seen:
    """What one of our layers did."""

    streams: torch.Tensor = torch.empty(0)
    attention: torch.Tensor = torch.empty(0)
    moe: torch.Tensor = torch.empty(0)
    selected: torch.Tensor | None = None


def watch(runner: Runner) -> tuple[list[Seen], list]:
    """What every layer gives in the next forward, and the hooks to remove after it."""
    seen = [Seen() for _ in runner.lm.model.layers]
    hooks = []

    def keep(found: Seen, name: str) -> Callable:
        return lambda module, arguments, result: setattr(found, name, result)

    for layer, found in zip(runner.lm.model.layers, seen, strict=True):
        watched = {"streams": layer, "attention": layer.attn, "moe": layer.ffn}
        if layer.attn.indexer is not None:
            watched["selected"] = layer.attn.indexer
        for name, module in watched.items():
            hooks.append(module.register_forward_hook(keep(found, name)))
    return seen, hooks


def test_every_layer_equals_transformers(checkpoint, traces, indexer_qk):
    """Streams, outputs of attention and of experts, selected entries, logits."""
    runner, trace = Runner(checkpoint, indexer_qk=indexer_qk), traces[indexer_qk]
    seen, _ = watch(runner)
    logits = runner.run(runner.open(), PROMPT)
    bites = 0
    for number, (ours, theirs) in enumerate(zip(seen, trace.layers, strict=True)):
        assert (ours.selected is None) == (theirs.selected is None)
        if ours.selected is not None:
            bites += assert_same_selection(ours.selected, theirs, f"layer {number}")
        for name in ("attention", "moe", "streams"):
            assert_equal(getattr(ours, name), getattr(theirs, name), f"layer {number}, {name}")
    assert bites > 700, "the index must have something to leave out"
    assert_equal(logits, trace.logits)


def assert_same_selection(ours: torch.Tensor, theirs: oracle.LayerTrace, what: str) -> int:
    """The same sets, but for ties; returns the number of tokens that had to leave entries out."""
    differ = (ours.sort().values != theirs.selected.sort().values).any(dim=1)
    wrong = differ & (theirs.index_gap >= TIE)
    tokens = wrong.nonzero().flatten().tolist()
    assert not tokens, f"{what}: other entries for tokens {tokens[:5]}"
    return int(theirs.index_gap.isfinite().sum())


def test_the_grid_makes_a_difference(traces):
    """Else the comparison with the plain oracle and the one with the patched would be the same."""
    full, fp4 = (traces[name].layers[2].selected.sort().values for name in FP4)
    assert (full != fp4).any(dim=1).sum() > 50
    assert (traces["full"].logits - traces["fp4"].logits).abs().max() > 0.1


def test_both_sides_of_every_boundary_equal_transformers(runner, traces):
    """One request whose forwards end just before and just after each boundary."""
    cuts = sorted({cut for t in BOUNDARIES for cut in (t, t + 1)} | {LENGTH})
    request = runner.open()
    for start, end in zip([0, *cuts], cuts, strict=False):
        (logits,) = runner.step((request, PROMPT[start:end]))
        assert_equal(logits, traces["fp4"].logits[start:end], f"tokens {start} to {end - 1}")
    runner.close(request)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_sequence_that_ends_at_a_boundary_equals_transformers(runner, traces, boundary):
    request = runner.open()
    logits = runner.run(request, PROMPT[: boundary + 1])
    assert_equal(logits, traces["fp4"].logits[: boundary + 1])
    runner.close(request)


# ---- however the tokens arrive ----


@pytest.mark.parametrize("chunk", [3, 5, 127, 129])
def test_chunked_prefill_equals_whole(runner, alone, chunk):
    request = runner.open()
    assert_equal(runner.run(request, PROMPT, chunk), alone(PROMPT))
    runner.close(request)


def test_decode_equals_prefill(runner, alone):
    """Chunks of one token: each forward has the shapes of a decode, window pages are evicted."""
    request, logits = runner.open(), []
    for token in PROMPT:
        logits += runner.step((request, [token]))
        runner.evict(request)
    assert_equal(torch.cat(logits), alone(PROMPT))
    runner.close(request)


def test_eviction_of_what_is_behind_the_window_changes_nothing(runner, alone):
    """Across three pages: nothing may be read from the window pages that are NaN by then."""
    tokens = prompt(640, seed=8)
    request, logits = runner.open(), []
    for start in range(0, len(tokens), 90):
        logits += runner.step((request, tokens[start : start + 90]))
        runner.evict(request)
    assert request.window_pages[0] == 0 != request.window_pages[-1]
    assert_equal(torch.cat(logits), alone(tokens))
    runner.close(request)


def test_batched_with_others_equals_alone(runner, alone):
    """Prefill, chunks and decodes of five requests in the same forwards, beside padding."""
    schedule = dict(
        enumerate(([130, 1, 1, 8], [1, 1, 1, 1], [3, 4, 121, 1], [127, 2, 1, 0], [0, 7, 1, 1]))
    )
    prompts = {key: prompt(sum(counts), seed=20 + key) for key, counts in schedule.items()}
    requests: dict[int, Request] = {key: runner.open() for key in schedule}
    logits: dict[int, list[torch.Tensor]] = {key: [] for key in schedule}
    for turn in range(4):
        parts = {
            key: (request, prompts[key][request.length : request.length + schedule[key][turn]])
            for key, request in requests.items()
            if schedule[key][turn]
        }
        results = runner.step(*parts.values(), padding=2)
        for key, result in zip(parts, results, strict=True):
            logits[key].append(result)
    for key, request in requests.items():
        assert_equal(torch.cat(logits[key]), alone(prompts[key]), f"request {key}")
        runner.close(request)


def test_decodes_of_many_equal_alone(runner, alone):
    """Requests at different phases of every window, one token each, beside padding."""
    lengths = (1, 3, 4, 7, 63, 126, 127, 255)
    prompts = [prompt(length + 6, seed=40 + length) for length in lengths]
    requests = [runner.open() for _ in prompts]
    for request, tokens, length in zip(requests, prompts, lengths, strict=True):
        runner.run(request, tokens[:length])
    results = []
    for _ in range(6):
        parts = [(r, [p[r.length]]) for r, p in zip(requests, prompts, strict=True)]
        results.append(runner.step(*parts, padding=1))
    for number, (request, tokens) in enumerate(zip(requests, prompts, strict=True)):
        logits = torch.cat([step[number] for step in results])
        assert_equal(logits, alone(tokens)[-6:], f"request {number}")
        runner.close(request)


# ---- what others left behind ----


@pytest.mark.parametrize("length", [PAGE, 2 * PAGE])
@pytest.mark.parametrize("chunk", [1, 1000])
def test_prefix_hit_equals_cold(runner, alone, length, chunk):
    """The donor is gone, and another request has its slot and the pages that are not shared."""
    donor_tokens = prompt(560, seed=60)
    tokens = donor_tokens[:length] + prompt(12, seed=61)
    donor = runner.open()
    runner.run(donor, donor_tokens, 280)
    runner.close(donor, keep=length // PAGE)
    other = runner.open()
    runner.run(other, prompt(290, seed=62))
    assert other.slot == donor.slot
    assert set(other.pages) & set(donor.pages[length // PAGE :])
    assert set(other.window_pages) & set(donor.window_pages[length // PAGE :])
    hit = runner.open(donor, length)
    assert_equal(runner.run(hit, tokens[length:], chunk), alone(tokens)[length:])
    runner.close(other)
    runner.close(hit)


def test_a_hit_needs_no_window_but_the_last(runner, alone):
    """At 512 the first page's window rows may be gone; and the donor goes on meanwhile."""
    donor_tokens = prompt(524, seed=63)
    donor = runner.open()
    runner.run(donor, donor_tokens[:520])
    assert runner.evict(donor)
    hit = runner.open(donor, 512)
    tokens = donor_tokens[:512] + prompt(5, seed=64)
    logits, going_on = [], []
    for step in range(4):
        one, two = runner.step(
            (hit, tokens[512 + step : 513 + step]), (donor, donor_tokens[520 + step : 521 + step])
        )
        logits.append(one)
        going_on.append(two)
    assert_equal(torch.cat(logits), alone(tokens)[512:516], "hit")
    assert_equal(torch.cat(going_on), alone(donor_tokens)[520:], "donor")
    runner.close(donor, keep=2)
    runner.close(hit)


@pytest.mark.parametrize("left", [100, 127, 130, 255])
def test_a_reused_slot_gives_what_a_fresh_one_gives(runner, checkpoint, left):
    """Whatever its last owner left: an open HCA window, a CSA overlap, a window of keys."""
    owner = runner.open()
    runner.run(owner, prompt(left, seed=70))
    runner.close(owner)
    request, tokens = runner.open(), prompt(135, seed=71)
    logits = runner.run(request, tokens, 45)
    assert (request.slot, request.pages) == (owner.slot, owner.pages)
    fresh = Runner(checkpoint)
    assert_equal(logits, fresh.run(fresh.open(), tokens, 45))
    runner.close(request)


def test_aborted_in_mid_prefill_leaves_no_trace(runner, alone):
    """Retracted after some chunks, then started again from nothing beside another request."""
    request = runner.open()
    runner.run(request, PROMPT[:200], 67)
    runner.close(request)
    other, again = runner.open(), runner.open()
    tokens = prompt(140, seed=80)
    one, two = runner.step((other, tokens), (again, PROMPT))
    assert_equal(one, alone(tokens), "the other")
    assert_equal(two, alone(PROMPT), "the same again")
    runner.close(other)
    runner.close(again)
