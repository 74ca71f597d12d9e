"""compress_hca against entries pooled by definition from the whole sequence, in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from inprocess import Host, Request
from naive_attention import EPS, Inputs, assert_stays_on_device, metadata
from op_checks import MACHINE, implementations, randn
from sglang_dsv4.attention.cache import PAGE
from tolerance import assert_close

PAGES, SLOTS, WIDTH = 8, 6, 512
WINDOW_ROWS = PAGES * PAGE
PER_PAGE = PAGE // 128
CHUNKS = [1, 3, 5, 127, 128, 129, 1000]
FREQUENCIES = randn(32, seed=5).abs()
Op = Callable[..., None]
Part = tuple[Request, int, Inputs]  # a request, how many new tokens, and what they bring


@pytest.fixture(params=implementations("compress_hca"))
def run(request):
    return partial(request.param, eps=EPS)


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs(
        kv=randn(tokens, WIDTH, seed=seed + 1),
        gate=randn(tokens, WIDTH, seed=seed + 2) * 2,
        ape=randn(128, WIDTH, seed=3),
        weight=randn(WIDTH, seed=4, dtype=dtype),
        frequencies=FREQUENCIES,
    )


@dataclass
class Layer:
    """A layer's memory, NaN but for the null row."""

    cache: torch.Tensor
    state: torch.Tensor

    @classmethod
    def fresh(cls, dtype: torch.dtype = torch.float32) -> "Layer":
        rows = WINDOW_ROWS + PAGES * PER_PAGE
        cache = torch.full((rows, WIDTH), math.nan, dtype=dtype, device=MACHINE.device)
        cache[0] = 0
        return cls(cache, torch.full((SLOTS, 3 * WIDTH), math.nan, device=MACHINE.device))

    def step(self, run: Op, host: Host, *parts: Part, padding: int = 0) -> None:
        """Run `count` new tokens of each request; what padding carries is NaN."""
        new = [slice(r.length, r.length + count) for r, count, _ in parts]
        nobody = torch.full((padding, WIDTH), math.nan, device=MACHINE.device)
        kv = torch.cat([i.kv[s] for s, (_, _, i) in zip(new, parts, strict=True)] + [nobody])
        gate = torch.cat([i.gate[s] for s, (_, _, i) in zip(new, parts, strict=True)] + [nobody])
        tokens = [(request, [1] * count) for request, count, _ in parts]
        meta, one = metadata(host, *tokens, window_rows=WINDOW_ROWS, padding=padding), parts[0][2]
        where = (meta.hca, meta.positions, self.state, self.cache)
        run(kv, gate, one.ape, one.weight, FREQUENCIES, *where)

    def feed(self, run: Op, host: Host, request: Request, given: Inputs, chunk: int) -> None:
        while request.length < len(given.kv):
            self.step(run, host, (request, min(chunk, len(given.kv) - request.length), given))

    def assert_holds(self, *given: tuple[Request, Inputs]) -> None:
        """All complete entries of these requests, at their places, and nothing else."""
        expected = torch.full(self.cache.shape, math.nan, dtype=torch.float64)
        expected[0] = 0
        for request, values in given:
            for entry in range(request.length // 128):
                row = request.pages[entry // PER_PAGE] * PER_PAGE + entry % PER_PAGE
                expected[WINDOW_ROWS + row] = values.entry(entry)
        assert_close(self.cache, expected)


def fresh_host() -> Host:
    return Host(pages=PAGES, slots=SLOTS)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_any_chunking_equals_the_definition(run, chunk):
    layer, host, given = Layer.fresh(), fresh_host(), inputs(387)
    request = host.open()
    layer.feed(run, host, request, given, chunk)
    layer.assert_holds((request, given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 256])
def test_lengths_and_dtypes(run, dtype, tokens):
    layer, host, given = Layer.fresh(dtype), fresh_host(), inputs(tokens, dtype=dtype)
    request = host.open()
    layer.feed(run, host, request, given, 100)
    layer.assert_holds((request, given))


def test_requests_and_padding_do_not_mix(run):
    """Three requests out of step with each other, beside two padding requests of NaN."""
    layer, host = Layer.fresh(), fresh_host()
    given = [inputs(length, seed=10 * length) for length in (270, 37, 140)]
    requests = [host.open() for _ in given]
    for counts in ((127, 1, 6), (1, 2, 130), (6, 9, 1), (128, 25, 3), (8, 0, 0)):
        parts = list(zip(requests, counts, given, strict=True))
        layer.step(run, host, *parts, padding=2)
    assert [request.length for request in requests] == [270, 37, 140]
    layer.assert_holds(*zip(requests, given, strict=True))


@pytest.mark.parametrize("chunk", [1, 5, 129])
def test_the_state_of_others_stays_as_it_is(run, chunk):
    layer, host = Layer.fresh(), fresh_host()
    other, one = host.open(), host.open()
    layer.feed(run, host, other, inputs(70), 1000)
    before = layer.state.clone()
    layer.feed(run, host, one, inputs(300, seed=50), chunk)
    kept = [slot for slot in range(SLOTS) if slot != one.slot]
    assert_close(layer.state[kept], before[kept])
    assert layer.state[one.slot].isfinite().all()


@pytest.mark.parametrize("left", [1, 70, 127, 128, 129])
@pytest.mark.parametrize("chunk", [1, 1000])
def test_a_reused_slot_forgets(run, left, chunk):
    """Whatever a finished request left in the slot, with scores that would dominate."""
    layer, host = Layer.fresh(), fresh_host()
    first, given = host.open(), inputs(left)
    given.gate += 1000
    layer.feed(run, host, first, given, 1000)
    host.close(first)
    layer.cache[1:] = math.nan
    second, later = host.open(), inputs(130, seed=70)
    assert second.slot == first.slot
    layer.feed(run, host, second, later, chunk)
    layer.assert_holds((second, later))


def test_a_prefix_hit_starts_without_state(run):
    layer, host, given = Layer.fresh(), fresh_host(), inputs(384)
    donor = host.open()
    layer.feed(run, host, donor, given, 1000)
    later = inputs(390, seed=90)
    later.kv[:256], later.gate[:256] = given.kv[:256], given.gate[:256]
    hit = host.open(donor, 256)
    layer.feed(run, host, hit, later, 61)
    layer.assert_holds((donor, given), (hit, later))


@pytest.mark.parametrize("before", [30, 127])
def test_no_new_tokens_change_nothing(run, before):
    layer, host, given = Layer.fresh(), fresh_host(), inputs(before + 100)
    request = host.open()
    layer.step(run, host, (request, before, given))
    state = layer.state[request.slot].clone()
    layer.step(run, host, (request, 0, given))
    assert_close(layer.state[request.slot], state)
    layer.feed(run, host, request, given, 1000)
    layer.assert_holds((request, given))


@pytest.mark.parametrize("chunk", [1, 50, 1000])
@pytest.mark.parametrize("factor", [80.0, 10000.0])
def test_large_scores(run, factor, chunk):
    """Far beyond what exp holds; multiples of 1/8, so that adding the bias is exact."""
    layer, host, given = Layer.fresh(), fresh_host(), inputs(256)
    given.gate = (given.gate * factor * 8).round() / 8
    given.ape = (given.ape * 8).round() / 8
    request = host.open()
    layer.feed(run, host, request, given, chunk)
    layer.assert_holds((request, given))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_peak_may_come_last_or_first(run, sign):
    """Rising scores rescale the running sums at every token; falling ones never."""
    layer, host, given = Layer.fresh(), fresh_host(), inputs(128)
    given.gate = sign * torch.arange(128.0, device=MACHINE.device).unsqueeze(1).expand(-1, WIDTH)
    request = host.open()
    layer.feed(run, host, request, given, 7)
    layer.assert_holds((request, given))


def test_equal_scores_average(run):
    layer, host, given = Layer.fresh(), fresh_host(), inputs(128)
    given.gate, given.ape = torch.zeros_like(given.gate), torch.zeros_like(given.ape)
    request = host.open()
    layer.feed(run, host, request, given, 10)
    mean = given.kv.double().mean(dim=0)
    normed = mean * torch.rsqrt(mean.square().mean() + EPS) * given.weight.double()
    assert_close(layer.cache[WINDOW_ROWS + request.pages[0] * PER_PAGE], normed)


def test_stays_on_device(run):
    layer, host, given = Layer.fresh(), fresh_host(), inputs(9)
    meta = metadata(host, (host.open(), [1] * 9), window_rows=WINDOW_ROWS)
    arguments = (given.kv, given.gate, given.ape, given.weight, FREQUENCIES, meta.hca)
    assert_stays_on_device(run, *arguments, meta.positions, layer.state, layer.cache)
