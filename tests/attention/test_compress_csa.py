"""compress_csa against entries pooled by definition from the whole sequence, in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from inprocess import Host, Request
from naive_attention import EPS, Inputs, assert_stays_on_device, e2m1_blocks, metadata, sylvester
from op_checks import MACHINE, implementations, randn
from sglang_dsv4.attention.cache import PAGE, RING
from tolerance import assert_close

PAGES = 8
WINDOW_ROWS = PAGES * PAGE
PER_PAGE = PAGE // 4
CHUNKS = [1, 3, 5, 127, 129, 1000]
FREQUENCIES = randn(32, seed=5).abs()
Op = Callable[..., None]
Part = tuple[Request, int, Inputs]  # a request, how many new tokens, and what they bring


@pytest.fixture(params=implementations("compress_csa"))
def run(request):
    return partial(request.param, eps=EPS)


def inputs(tokens: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs(
        kv=randn(tokens, 2 * width, seed=seed + 1),
        gate=randn(tokens, 2 * width, seed=seed + 2) * 2,
        ape=randn(4, 2 * width, seed=3),
        weight=randn(width, seed=4, dtype=dtype),
        frequencies=FREQUENCIES,
    )


@dataclass
class Layer:
    """A layer's memory, NaN but for its null rows; `main` tells entries from index keys."""

    cache: torch.Tensor
    state: torch.Tensor
    main: bool

    @classmethod
    def fresh(cls, width: int, *, main: bool = True, dtype: torch.dtype = torch.float32) -> "Layer":
        rows = WINDOW_ROWS * main + PAGES * PER_PAGE
        cache = torch.full((rows, width), math.nan, dtype=dtype, device=MACHINE.device)
        state = torch.full((PAGES * RING, 4 * width), math.nan, device=MACHINE.device)
        cache[0], state[0] = 0, 0
        return cls(cache, state, main)

    def step(self, run: Op, host: Host, *parts: Part, padding: int = 0) -> None:
        """Run `count` new tokens of each request; what padding carries is NaN."""
        new = [slice(r.length, r.length + count) for r, count, _ in parts]
        nobody = torch.full((padding, self.state.shape[1] // 2), math.nan, device=MACHINE.device)
        kv = torch.cat([i.kv[s] for s, (_, _, i) in zip(new, parts, strict=True)] + [nobody])
        gate = torch.cat([i.gate[s] for s, (_, _, i) in zip(new, parts, strict=True)] + [nobody])
        tokens = [(request, [1] * count) for request, count, _ in parts]
        plan = metadata(host, *tokens, window_rows=WINDOW_ROWS, padding=padding).csa
        rows, one = plan.row if self.main else plan.entry, parts[0][2]
        run(kv, gate, one.ape, one.weight, FREQUENCIES, plan, rows, self.state, self.cache)

    def feed(self, run: Op, host: Host, request: Request, given: Inputs, chunk: int) -> None:
        while request.length < len(given.kv):
            self.step(run, host, (request, min(chunk, len(given.kv) - request.length), given))

    def assert_holds(self, *given: tuple[Request, Inputs]) -> None:
        """All complete entries of these requests, at their places, and nothing else."""
        expected = torch.full(self.cache.shape, math.nan, dtype=torch.float64)
        expected[0] = 0
        for request, values in given:
            for entry in range(request.length // 4):
                row = request.pages[entry // PER_PAGE] * PER_PAGE + entry % PER_PAGE
                expected[WINDOW_ROWS * self.main + row] = values.entry(entry)
        assert_close(self.cache, expected)
        assert (self.state[0] == 0).all()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("main", [True, False])
def test_any_chunking_equals_the_definition(run, chunk, main):
    """More than a page, with an open window at the end."""
    layer, host, given = Layer.fresh(128, main=main), Host(pages=PAGES), inputs(303, 128)
    request = host.open()
    layer.feed(run, host, request, given, chunk)
    layer.assert_holds((request, given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 61])
def test_full_width(run, dtype, tokens):
    layer, host = Layer.fresh(512, dtype=dtype), Host(pages=PAGES)
    given, request = inputs(tokens, 512, dtype=dtype), host.open()
    layer.feed(run, host, request, given, 1000)
    layer.assert_holds((request, given))


def test_requests_and_padding_do_not_mix(run):
    """Three requests out of step with each other, beside two padding requests of NaN."""
    layer, host = Layer.fresh(128), Host(pages=PAGES)
    given = [inputs(length, 128, seed=10 * length) for length in (270, 37, 140)]
    requests = [host.open() for _ in given]
    for counts in ((255, 1, 6), (1, 2, 130), (6, 9, 1), (8, 25, 3)):
        parts = list(zip(requests, counts, given, strict=True))
        layer.step(run, host, *parts, padding=2)
    assert [request.length for request in requests] == [270, 37, 140]
    layer.assert_holds(*zip(requests, given, strict=True))


@pytest.mark.parametrize("chunk", [1, 5, 129])
def test_the_rings_of_others_stay_as_they_are(run, chunk):
    layer, host = Layer.fresh(128), Host(pages=PAGES)
    other, one = host.open(), host.open()
    layer.feed(run, host, other, inputs(270, 128), 1000)
    rings = [page * RING + slot for page in other.window_pages for slot in range(RING)]
    before = layer.state[rings].clone()
    layer.feed(run, host, one, inputs(300, 128, seed=50), chunk)
    assert_close(layer.state[rings], before)


def test_the_ring_keeps_the_last_tokens_of_every_page(run):
    """Values, then scores with their bias, for 8 tokens each."""
    layer, host, given = Layer.fresh(128), Host(pages=PAGES), inputs(261, 128)
    request = host.open()
    layer.feed(run, host, request, given, 1000)
    for positions, page in ((range(248, 256), 0), (range(256, 261), 1)):
        for position in positions:
            row = request.window_pages[page] * RING + position % RING
            biased = given.gate[position].double() + given.ape[position % 4].double()
            assert_close(layer.state[row], torch.cat([given.kv[position].double(), biased]))


def test_a_prefix_hit_continues_from_the_donors_ring(run):
    layer, host, given = Layer.fresh(128), Host(pages=PAGES), inputs(290, 128)
    donor = host.open()
    layer.feed(run, host, donor, given, 1000)
    # The same first page, then other tokens.
    later = inputs(280, 128, seed=90)
    later.kv[:256], later.gate[:256] = given.kv[:256], given.gate[:256]
    for chunk in (1, 7, 1000):
        hit = host.open(donor, 256)
        layer.feed(run, host, hit, later, chunk)
        layer.assert_holds((donor, given), (hit, later))
        host.close(hit, keep=1)
        layer.cache[WINDOW_ROWS + hit.pages[1] * PER_PAGE :][:PER_PAGE] = math.nan


def test_no_new_tokens_change_nothing(run):
    layer, host, given = Layer.fresh(128), Host(pages=PAGES), inputs(30, 128)
    request = host.open()
    layer.feed(run, host, request, given, 7)
    before = layer.state.clone()
    layer.step(run, host, (request, 0, given))
    assert_close(layer.state, before)
    layer.assert_holds((request, given))


@pytest.mark.parametrize("factor", [80.0, 10000.0])
def test_large_scores(run, factor):
    """Far beyond what exp holds; multiples of 1/8, so that adding the bias is exact."""
    layer, host, given = Layer.fresh(128), Host(pages=PAGES), inputs(64, 128)
    given.gate = (given.gate * factor * 8).round() / 8
    given.ape = (given.ape * 8).round() / 8
    request = host.open()
    layer.feed(run, host, request, given, 9)
    layer.assert_holds((request, given))


def test_equal_scores_average(run):
    """Entry 0 averages its 4 tokens, not 8 of which 4 are missing."""
    layer, host, given = Layer.fresh(128), Host(pages=PAGES), inputs(8, 128)
    given.gate, given.ape = torch.zeros_like(given.gate), torch.zeros_like(given.ape)
    request = host.open()
    layer.feed(run, host, request, given, 8)
    layer.assert_holds((request, given))
    own = given.kv[:4, 128:].double().mean(dim=0)
    normed = own * torch.rsqrt(own.square().mean() + EPS) * given.weight.double()
    assert_close(layer.cache[WINDOW_ROWS + request.pages[0] * PER_PAGE], normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp4_puts_the_entry_on_the_indexers_grid(run, dtype):
    """Every value is the nearest one of its block's grid, as far as float32 can tell."""
    layer, host = Layer.fresh(128, main=False, dtype=dtype), Host(pages=PAGES)
    given, request = inputs(120, 128, dtype=dtype), host.open()
    layer.feed(partial(run, fp4=True), host, request, given, 1000)
    for entry in range(30):
        row = request.pages[0] * PER_PAGE + entry
        stored = layer.cache[row].cpu().double()
        exact = sylvester(128) @ given.entry(entry) / math.sqrt(128)
        assert stored.tolist() == e2m1_blocks(stored.tolist()), "not on a grid"
        for block in range(4):
            part = slice(32 * block, 32 * block + 32)
            amax = float(exact[part].abs().max())
            scale = 2.0 ** math.ceil(math.log2(amax / 6))
            error = (stored[part] - exact[part]).abs() / scale
            magnitude = exact[part].abs() / scale
            step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
            assert (error <= step / 2 + 1e-5).all()


@pytest.mark.parametrize("fp4", [False, True])
def test_stays_on_device(run, fp4):
    layer, host, given = Layer.fresh(128), Host(pages=PAGES), inputs(9, 128)
    plan = metadata(host, (host.open(), [1] * 9), window_rows=WINDOW_ROWS).csa
    arguments = (given.kv, given.gate, given.ape, given.weight, FREQUENCIES, plan, plan.row)
    assert_stays_on_device(run, *arguments, layer.state, layer.cache, fp4=fp4)
