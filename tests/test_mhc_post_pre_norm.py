"""mhc_post_pre_norm against the ops that it stands for, each with its own tests, and where streams
cancel."""

import math
from functools import partial

import pytest
import torch

from op_checks import assert_stays_on_device, implementations, randn
from sglang_dsv4 import reference
from tolerance import assert_close

NORM_EPS, HC_EPS = 1e-2, 1e-3  # large enough that each place where they are added shows
NAMES = ("streams", "x", "post", "comb")
Arguments = tuple[torch.Tensor | None, ...]


@pytest.fixture(params=implementations("mhc_post_pre_norm"))
def op(request):
    return partial(request.param, iterations=3, norm_eps=NORM_EPS, hc_eps=HC_EPS)


def written(tokens: int, m: int, hidden: int, dtype: torch.dtype = torch.float32):
    """y (in fp32, as experts give it), streams, post and comb, which is far from symmetric."""
    comb = (randn(tokens, m, m, seed=3) * 2).softmax(2)
    streams = randn(tokens, m, hidden, seed=1, dtype=dtype) * 2
    return randn(tokens, hidden), streams, randn(tokens, m, seed=2).sigmoid() * 2, comb


def first(tokens: int, m: int, hidden: int, dtype: torch.dtype = torch.float32):
    """The same before the first sub-layer."""
    return None, written(tokens, m, hidden, dtype)[1], None, None


def site(m: int, hidden: int, dtype: torch.dtype = torch.float32):
    """fn, base, scale and the norm's weight."""
    rows = (2 + m) * m
    fn = randn(rows, m * hidden, seed=4) / math.sqrt(m * hidden)
    scale = randn(3, seed=6).abs() + 0.5
    return fn, randn(rows, seed=5), scale, randn(hidden, seed=7, dtype=dtype)


def assert_equals_the_ops(results, residual, parameters, *, iterations=3) -> None:
    """Each result against the ops that make it, from the streams that were returned; x is rounded
    twice, before its norm and after."""
    y, streams, post, comb = residual
    found, x, *mix_back = results
    eps = {"norm_eps": NORM_EPS, "hc_eps": HC_EPS}
    if y is None:
        assert torch.equal(found, streams)
    else:
        assert_close(found, reference.mhc_post(y, streams.float(), post, comb), "streams")
    *projection, weight = parameters
    wide = found.float()
    mixed, *expected = reference.mhc_pre(wide, *projection, iterations=iterations, **eps)
    for name, ours, theirs in zip(NAMES[2:], mix_back, expected, strict=True):
        assert_close(ours, theirs, name)
    normed = reference.rms_norm(mixed, weight, eps=NORM_EPS)
    if x.dtype is torch.bfloat16:
        assert ((x - normed).abs() <= 2**-7 * normed.abs() + 1e-5).all()
    else:
        assert_close(x, normed, "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4, 64), (9, 4, 96), (3, 2, 48), (0, 4, 64)])
@pytest.mark.parametrize("residual", [written, first])
def test_equals_the_ops(op, dtype, shape, residual):
    given, parameters = residual(*shape, dtype), site(*shape[1:], dtype)
    before = given[1].clone()
    results = op(*given, *parameters)
    assert [result.dtype for result in results] == [dtype, dtype, torch.float32, torch.float32]
    assert_equals_the_ops(results, given, parameters)
    assert torch.equal(given[1], before), "the streams that are read may be needed again"


@pytest.mark.parametrize("op", implementations("mhc_post_pre_norm"))
def test_twenty_iterations(op):
    """As many as the model has."""
    given, parameters = written(1, 4, 64), site(4, 64)
    results = op(*given, *parameters, iterations=20, norm_eps=NORM_EPS, hc_eps=HC_EPS)
    assert_equals_the_ops(results, given, parameters, iterations=20)
    # Columns, which come last, sum to one; rows nearly.
    assert (results[3].sum(1) - 1).abs().max() < 4 * HC_EPS


def test_the_output_may_be_bfloat16(op):
    """As attention gives it, beside streams of either dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        y, *others = written(3, 4, 64, dtype)
        parameters = site(4, 64, dtype)
        results = op(y.bfloat16(), *others, *parameters)
        expected = op(y.bfloat16().float(), *others, *parameters)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [2.0**-8, 2.0**-16, 0.0])
def test_streams_that_nearly_cancel(op, dtype, rest):
    """Their mix is `rest` of their size, and exact in fp32: all of a norm's digits are owed. By
    products of streams with streams it would have none left of 2^-16, and of 0 NaN.
    """
    m, hidden, size, hc_eps = 4, 64, 1024.0, 2.0**-10
    large = (randn(2, hidden) * 8).round() * size  # a few bits, so that sums are exact
    small = (randn(2, hidden, seed=1) * 8).round() * size * rest
    streams = torch.stack([large, -large, small, torch.zeros_like(small)], 1).to(dtype)
    fn, weight = torch.zeros(24, m * hidden), randn(hidden, seed=7, dtype=dtype)
    parameters = [part.to(streams.device) for part in (fn, torch.zeros(24), torch.ones(3))]
    streams, x, _, _ = op(
        *(None, streams, None, None), *parameters, weight, norm_eps=1e-12, hc_eps=hc_eps
    )
    mixed = (streams.double() * (0.5 + hc_eps)).sum(1).to(dtype).double()
    expected = mixed * (mixed.square().mean(1, keepdim=True) + 1e-12).rsqrt() * weight.double()
    assert x.isfinite().all()
    assert_close(x, expected)


def test_outliers_do_not_reach_the_norm(op):
    """One channel a thousand times as large as the others, as some tokens have."""
    y, streams, post, comb = written(2, 4, 64)
    streams[:, :, 5] *= 1000
    parameters = site(4, 64)
    assert_equals_the_ops(
        op(y, streams, post, comb, *parameters), (y, streams, post, comb), parameters
    )


@pytest.mark.parametrize("residual", [written, first])
def test_tokens_do_not_mix(op, residual):
    given, parameters = residual(8, 4, 64), site(4, 64)

    def of(tokens) -> Arguments:
        return tuple(part if part is None else part[tokens] for part in given)

    whole = op(*given, *parameters)
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4], device=given[1].device)
    for part in ("permuted", "alone"):
        tokens = order if part == "permuted" else slice(6, 7)
        for name, result, theirs in zip(NAMES, whole, op(*of(tokens), *parameters), strict=True):
            assert_close(theirs, result[tokens], f"{part}: {name}")
    for part in given:
        if part is not None:
            part[3] = math.nan
    kept = [0, 1, 2, 4, 5, 6, 7]
    for name, result, theirs in zip(NAMES, whole, op(*given, *parameters), strict=True):
        assert_close(theirs[kept], result[kept], name)


@pytest.mark.parametrize("residual", [written, first])
def test_stays_on_device(op, residual):
    assert_stays_on_device(op, *residual(3, 4, 64), *site(4, 64))
