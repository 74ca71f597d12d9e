"""kv_norm_rope_store against one token at a time in float64, in a cache full of NaN."""

import math
from functools import partial

import pytest
import torch

from naive_attention import EPS, rms, rope
from op_checks import MACHINE, assert_stays_on_device, implementations, randn
from tolerance import assert_close

FREQUENCIES = randn(32, seed=5).abs()
WEIGHT = randn(512, seed=6)


@pytest.fixture(params=implementations("kv_norm_rope_store"))
def run(request):
    return partial(request.param, eps=EPS)


def integers(*values):
    return torch.tensor(values, dtype=torch.int64, device=MACHINE.device)


def fresh_cache(rows=20, dtype=torch.float32):
    cache = torch.full((rows, 512), math.nan, dtype=dtype, device=MACHINE.device)
    cache[0] = 0
    return cache


def by_loop(kv, weight, positions, rows, cache):
    result = cache.cpu().double()
    for token, (position, row) in enumerate(zip(positions.tolist(), rows.tolist(), strict=True)):
        if row:
            normed = rms(kv[token].cpu().double()) * weight.cpu().double()
            result[row] = rope(normed, position, FREQUENCIES)
    return result


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("positions", "rows"),
    [
        ((), ()),
        ((0,), (19,)),
        ((5, 6, 7, 0, 1048575), (3, 4, 1, 18, 9)),
        ((5, 6, 7, 8), (0, 4, 0, 7)),
        ((0, 0, 0), (0, 0, 0)),
    ],
)
def test_equals_the_loop(run, dtype, cache_dtype, positions, rows):
    kv = randn(len(rows), 512, dtype=dtype) * 3
    positions, rows = integers(*positions), integers(*rows)
    cache, weight = fresh_cache(dtype=cache_dtype), WEIGHT.to(dtype)
    expected = by_loop(kv, weight, positions, rows, cache)
    run(kv, weight, positions, FREQUENCIES, rows, cache)
    assert_close(cache, expected)
    assert (cache[0] == 0).all()


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e15])
def test_extreme_values(run, scale):
    kv, positions, rows = randn(2, 512) * scale, integers(3, 4), integers(8, 2)
    cache = fresh_cache()
    expected = by_loop(kv, WEIGHT, positions, rows, cache)
    run(kv, WEIGHT, positions, FREQUENCIES, rows, cache)
    assert_close(cache, expected)


def test_tokens_do_not_mix_and_padding_leaves_no_trace(run):
    """NaN of a padding token (row 0) must not reach the null row; NaN of another stays in its."""
    kv, positions, rows = randn(5, 512), integers(0, 1, 2, 3, 4), integers(7, 0, 3, 0, 9)
    clean = fresh_cache()
    run(kv, WEIGHT, positions, FREQUENCIES, rows, clean)
    poisoned, cache = kv.clone(), fresh_cache()
    poisoned[1], poisoned[2], poisoned[3] = math.nan, math.nan, math.inf
    run(poisoned, WEIGHT, positions, FREQUENCIES, rows, cache)
    assert (cache[0] == 0).all()
    assert cache[3].isnan().all()
    cache[3] = clean[3]
    assert_close(cache, clean)
    alone = fresh_cache()
    run(kv[4:], WEIGHT, positions[4:], FREQUENCIES, rows[4:], alone)
    assert_close(alone[9], clean[9])


def test_what_was_stored_before_is_replaced(run):
    cache = fresh_cache()
    for seed in (1, 2):
        kv = randn(1, 512, seed=seed)
        run(kv, WEIGHT, integers(3), FREQUENCIES, integers(6), cache)
        expected = by_loop(kv, WEIGHT, integers(3), integers(6), cache)
        assert_close(cache[6], expected[6])


def test_the_cache_may_be_a_view(run):
    """The pool of a server hands out slices of one buffer."""
    buffer = torch.full((20, 640), math.nan, device=MACHINE.device)
    cache = buffer[:, :512]
    cache[0] = 0
    kv, positions, rows = randn(2, 512), integers(3, 4), integers(8, 2)
    expected = by_loop(kv, WEIGHT, positions, rows, cache)
    run(kv, WEIGHT, positions, FREQUENCIES, rows, cache)
    assert_close(cache, expected)
    assert buffer[:, 512:].isnan().all()


def test_stays_on_device(run):
    arguments = (randn(2, 512), WEIGHT, integers(1, 2), FREQUENCIES, integers(0, 5), fresh_cache())
    assert_stays_on_device(run, *arguments)
