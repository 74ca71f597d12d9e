"""The kernels of RMS norm and mHC beyond their ops' tests: tiles, exactness, real shapes."""

import math
from unittest import mock

import pytest
import torch
from triton.runtime.jit import KernelInterface

from op_checks import implementations, randn, thorough
from sglang_dsv4 import kernels_triton, kernels_triton_mhc, reference
from tolerance import assert_close

EPS = {"norm_eps": 1e-6, "hc_eps": 1e-6}
FLASH, PRO = 4096, 7168
# One of each kind of tile, and on either side of where they change.
TOKENS = (1, 17, 32, 33, 256, 257, 2050)


def site(tokens: int, hidden: int, dtype=torch.float32, m: int = 4):
    """streams, fn, base and scale of mhc_pre."""
    rows = (2 + m) * m
    fn = randn(rows, m * hidden, seed=1) / math.sqrt(m * hidden)
    scale = randn(3, seed=3).abs() + 0.5
    return randn(tokens, m, hidden, dtype=dtype) * 2, fn, randn(rows, seed=2), scale


def head(streams, fn, base, scale):
    """The same for mhc_head."""
    m = streams.shape[1]
    return streams, fn[:m], base[:m], scale[:1]


def between(tokens: int, hidden: int, dtype=torch.float32, m: int = 4):
    """The arguments of mhc_post_pre_norm."""
    streams, *parameters = site(tokens, hidden, dtype, m)
    comb = randn(tokens, m, m, seed=7).softmax(2)
    written = randn(tokens, hidden, seed=5), streams, randn(tokens, m, seed=6).sigmoid() * 2, comb
    return *written, *parameters, randn(hidden, seed=8, dtype=dtype)


def assert_fused_equals(results, arguments, iterations: int) -> None:
    """x against the reference on the streams that were returned, with one rounding before."""
    y, streams, post, comb, *projection, weight = arguments
    assert_close(results[0], reference.mhc_post(y, streams.float(), post, comb), "streams")
    options = {"iterations": iterations, **EPS}
    x, *expected = exact("mhc_pre", results[0], *projection, **options)
    for name, ours, theirs in zip(("post", "comb"), results[2:], expected, strict=True):
        assert_close(ours, theirs, name)
    normed = reference.rms_norm(x, weight, eps=EPS["norm_eps"])
    if streams.dtype is torch.bfloat16:
        assert ((results[1] - normed).abs() <= 2**-7 * normed.abs() + 1e-5).all()
    else:
        assert_close(results[1], normed, "x")


def exact(op, streams, *parameters, **options):
    """The reference on the same values, without its last rounding."""
    return getattr(reference, op)(streams.float(), *parameters, **options)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("tokens", "hidden", "dtype"),
    [
        (2, 1100, torch.float32),
        (2, 1100, torch.bfloat16),
        (33, 72, torch.float32),
        thorough(258, 40, torch.bfloat16),
    ],
)
def test_every_tile(tokens, hidden, dtype):
    """Two streams and one Sinkhorn round: at stake is which token and channel goes where."""
    arguments, options = site(tokens, hidden, dtype, m=2), {"iterations": 1, **EPS}
    results = kernels_triton.mhc_pre(*arguments, **options)
    for name, ours, theirs in zip(
        ("x", "post", "comb"), results, exact("mhc_pre", *arguments, **options), strict=True
    ):
        assert_close(ours, theirs, name)
    arguments = head(*arguments)
    assert_close(kernels_triton.mhc_head(*arguments, **EPS), exact("mhc_head", *arguments, **EPS))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("tokens", "hidden", "dtype"),
    [
        (2, 72, torch.float32),
        (2, 4200, torch.bfloat16),
        (5, 4200, torch.bfloat16),
        (32, 72, torch.float32),
        thorough(18, 4200, torch.float32),
    ],
)
def test_every_tile_of_the_fused_kernels(tokens, hidden, dtype):
    """Channels that fill no tile and more than one of a slice; tokens that fill no tile."""
    arguments = between(tokens, hidden, dtype, m=2)
    op = kernels_triton_mhc.mhc_post_pre_norm
    assert_fused_equals(op(*arguments, iterations=1, **EPS), arguments, 1)


@pytest.mark.kernels
@pytest.mark.parametrize("tokens", [1, 5, 32])
def test_fused_projection_loses_nothing_of_fn(tokens):
    """As below, with the sums of the streams as they were written."""
    y, streams, post, comb, fn, *_ = between(tokens, 40, torch.bfloat16)
    new, sums = kernels_triton_mhc._post_and_project(y, streams, post, comb, fn)
    flat, sums = new.flatten(1).double(), sums.double().sum(0)
    size = flat.abs() @ fn.double().abs().T
    assert ((sums[:, :-1] - flat @ fn.double().T).abs() / size).max() < 2**-21
    assert_close(sums[:, -1].float(), flat.square().sum(1))


@pytest.mark.kernels
@pytest.mark.parametrize("tokens", [1, 257])
def test_projection_of_bfloat16_streams_loses_nothing_of_fn(tokens):
    """Relative to the sum of its terms' sizes the error is that of fp32 sums: two thirds of fn's
    24 bits would leave 2^-17, and TF32 2^-12."""
    streams, fn, _, _ = site(tokens, 40, torch.bfloat16)
    tiles = kernels_triton._tiles(tokens)
    sums = kernels_triton._project(streams, fn, tiles).double().sum(0)
    flat = streams.flatten(1).double()
    size = flat.abs() @ fn.double().abs().T
    assert ((sums[:, :-1] - flat @ fn.double().T).abs() / size).max() < 2**-21
    assert_close(sums[:, -1].float(), flat.square().sum(1))


@pytest.mark.kernels
def test_streams_may_be_strided():
    streams, *parameters = site(3, 40)
    strided = streams.transpose(0, 2).contiguous().transpose(0, 2)
    results = [
        kernels_triton.mhc_pre(each, *parameters, iterations=1, **EPS)
        for each in (streams, strided)
    ]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    y, post, comb = randn(40, 3).T, randn(4, 3).T, randn(4, 4, 3).permute(2, 0, 1)
    expected = reference.mhc_post(y, streams, post, comb)
    assert_close(kernels_triton.mhc_post(y, strided, post, comb), expected)
    arguments = (y, strided, post, comb, *parameters, randn(80)[::2])
    results = kernels_triton_mhc.mhc_post_pre_norm(*arguments, iterations=1, **EPS)
    assert_fused_equals(results, arguments, 1)


def test_three_streams_are_an_error():
    streams = torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match="power of two, found 3"):
        kernels_triton.mhc_post(streams[:, 0], streams, torch.ones(2, 3), torch.ones(2, 3, 3))
    with pytest.raises(ValueError, match="power of two, found 3"):
        kernels_triton_mhc.mhc_post_pre_norm(*between(2, 8, m=3), iterations=1, **EPS)


@pytest.mark.parametrize(("tokens", "written", "first"), [(1, 2, 2), (32, 2, 2), (33, 4, 3)])
def test_few_tokens_take_two_launches_instead_of_four(tokens, written, first):
    """Counted where a launch is only noted; at the first site there is nothing to write."""
    op, arguments = kernels_triton_mhc.mhc_post_pre_norm, between(tokens, 64)
    assert launches(op, arguments) == written
    assert launches(op, (None, arguments[1], None, None, *arguments[4:])) == first


def launches(op, arguments) -> int:
    """How many kernels the op launches."""
    found = []

    def launch(kernel, grid):
        return lambda *_, **__: found.append(kernel.__name__)

    with mock.patch.object(KernelInterface, "__getitem__", launch):
        op(*arguments, iterations=20, **EPS)
    return len(found)


# ---- on a GPU, at the model's shapes ----


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("mhc_post_pre_norm"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [FLASH, PRO])
@pytest.mark.parametrize("tokens", (1, 4, 5, *TOKENS[1:], 8192))
def test_mhc_post_pre_norm_at_real_shapes(op, dtype, tokens, hidden):
    arguments = between(tokens, hidden, dtype)
    assert_fused_equals(op(*arguments, iterations=20, **EPS), arguments, 20)


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("mhc_pre", "mhc_post"))
@pytest.mark.parametrize("hidden", [FLASH, PRO])
@pytest.mark.parametrize("tokens", TOKENS)
def test_mhc_pre_at_real_shapes(op, tokens, hidden):
    arguments, options = site(tokens, hidden, torch.bfloat16), {"iterations": 20, **EPS}
    results = op(*arguments, **options)
    for name, ours, theirs in zip(
        ("x", "post", "comb"), results, exact("mhc_pre", *arguments, **options), strict=True
    ):
        assert_close(ours, theirs, name)


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("mhc_head"))
@pytest.mark.parametrize("hidden", [FLASH, PRO])
@pytest.mark.parametrize("tokens", TOKENS)
def test_mhc_head_at_real_shapes(op, tokens, hidden):
    arguments = head(*site(tokens, hidden, torch.bfloat16))
    assert_close(op(*arguments, **EPS), exact("mhc_head", *arguments, **EPS))


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("mhc_post"))
@pytest.mark.parametrize("hidden", [FLASH, PRO])
@pytest.mark.parametrize("tokens", TOKENS)
def test_mhc_post_at_real_shapes(op, tokens, hidden):
    streams, y = site(tokens, hidden, torch.bfloat16)[0], randn(tokens, hidden, seed=5)
    y, post = y.bfloat16(), randn(tokens, 4, seed=6).sigmoid() * 2
    comb = randn(tokens, 4, 4, seed=7).softmax(2)
    expected = reference.mhc_post(y, streams.float(), post, comb)
    assert_close(op(y, streams, post, comb), expected)


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("rms_norm"))
@pytest.mark.parametrize("width", [512, 1024, 1536, FLASH, PRO])
@pytest.mark.parametrize("tokens", TOKENS)
def test_rms_norm_at_real_shapes(op, tokens, width):
    x, weight = (randn(*s, dtype=torch.bfloat16) for s in ((tokens, width), (width,)))
    expected = reference.rms_norm(x.float(), weight, eps=EPS["norm_eps"])
    assert_close(op(x, weight, eps=EPS["norm_eps"]), expected)


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("tokens", [1, 20, 40, 300])
def test_a_replayed_layer_site_equals_eager(tokens):
    """What is between two sub-layers, and the head, in one graph, replayed on other values, bit for
    bit."""
    static = between(tokens, FLASH, torch.bfloat16)

    def run():
        results = kernels_triton_mhc.mhc_post_pre_norm(*static, iterations=20, **EPS)
        return *results, kernels_triton.mhc_head(*head(results[0], *static[4:7]), **EPS)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        static[0].copy_(randn(tokens, FLASH, seed=20 + seed))
        static[1].copy_(randn(tokens, 4, FLASH, seed=10 + seed))
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(captured, run(), strict=True))
