"""mhc_pre against a loop over Python floats, golden numbers and transformers."""

import math
from functools import partial

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from op_checks import assert_stays_on_device, implementations, randn
from tolerance import assert_close

ITERATIONS = 20
NORM_EPS, HC_EPS = 1e-2, 1e-3  # large enough that each place where they are added shows
TRUE_EPS = 1e-6  # the model's value of both


@pytest.fixture(params=implementations("mhc_pre", "mhc_post"))
def mhc_pre(request):
    return partial(request.param, iterations=ITERATIONS, norm_eps=NORM_EPS, hc_eps=HC_EPS)


def site(m: int, hidden: int, spread: float = 1.0):
    """fn, base and scale of one sub-layer."""
    rows = (2 + m) * m
    fn = randn(rows, m * hidden, seed=1) / math.sqrt(m * hidden)
    return fn, randn(rows, seed=2) * spread, randn(3, seed=3).abs() + 0.5


def by_loop(streams, fn, base, scale, iterations=ITERATIONS):
    """The definition, one token and one number at a time."""
    tokens, m, hidden = streams.shape
    fn, base, scale = fn.double().tolist(), base.double().tolist(), scale.double().tolist()
    results = []
    for token in streams.double().tolist():
        flat = [value for stream in token for value in stream]
        factor = 1 / math.sqrt(sum(value * value for value in flat) / len(flat) + NORM_EPS)
        mix = [factor * math.fsum(f * v for f, v in zip(row, flat, strict=True)) for row in fn]
        pre = [sigmoid(mix[i] * scale[0] + base[i]) + HC_EPS for i in range(m)]
        post = [2 * sigmoid(mix[m + i] * scale[1] + base[m + i]) for i in range(m)]
        logits = [value * scale[2] + bias for value, bias in zip(mix, base, strict=True)][2 * m :]
        comb = doubly_stochastic([logits[i * m : (i + 1) * m] for i in range(m)], iterations)
        x = [sum(pre[i] * token[i][d] for i in range(m)) for d in range(hidden)]
        results.append((x, post, comb))
    shapes = (tokens, hidden), (tokens, m), (tokens, m, m)
    columns = zip(*results, strict=True) if results else ((), (), ())
    return [
        torch.tensor(column, dtype=torch.float64).reshape(shape)
        for column, shape in zip(columns, shapes, strict=True)
    ]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def doubly_stochastic(logits: list[list[float]], iterations: int) -> list[list[float]]:
    m = len(logits)
    matrix = []
    for row in logits:
        powers = [math.exp(value - max(row)) for value in row]
        matrix.append([power / sum(powers) + HC_EPS for power in powers])
    for iteration in range(iterations):
        if iteration > 0:
            matrix = [[value / (sum(row) + HC_EPS) for value in row] for row in matrix]
        sums = [sum(row[j] for row in matrix) for j in range(m)]
        matrix = [[row[j] / (sums[j] + HC_EPS) for j in range(m)] for row in matrix]
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "m", "hidden"), [(1, 4, 64), (9, 4, 128), (3, 2, 48), (0, 4, 64)]
)
def test_equals_the_loop(mhc_pre, dtype, tokens, m, hidden):
    streams = randn(tokens, m, hidden, dtype=dtype) * 2
    results = mhc_pre(streams, *site(m, hidden))
    assert [r.dtype for r in results] == [dtype, torch.float32, torch.float32]
    for name, ours, theirs in zip(
        ("x", "post", "comb"), results, by_loop(streams, *site(m, hidden)), strict=True
    ):
        assert_close(ours, theirs, name)


def test_golden_sinkhorn(mhc_pre):
    """With fn = 0 the base alone gives the logits; comb is indexed [source, destination]."""
    logits = [[1, 2, 3, 4], [4, 3, 2, 1], [0, 1, 0, 1], [2, 0, 2, 0]]
    golden = torch.tensor(
        [
            [0.024662, 0.118126, 0.259317, 0.597894],
            [0.526054, 0.341015, 0.101315, 0.031615],
            [0.095291, 0.456438, 0.135607, 0.312662],
            [0.353992, 0.084420, 0.503759, 0.057828],
        ]
    )
    base = torch.tensor([*[0.0] * 8, *(float(v) for row in logits for v in row)])
    streams = randn(1, 4, 8)
    arguments = (torch.zeros(24, 32), base, torch.ones(3))
    arguments = tuple(a.to(streams.device) for a in arguments)
    x, post, comb = mhc_pre(streams, *arguments, hc_eps=TRUE_EPS)
    torch.testing.assert_close(comb[0].cpu(), golden, rtol=0, atol=6e-7)
    assert_close(post.cpu(), torch.ones(1, 4))
    assert_close(x, streams.sum(1) * (0.5 + TRUE_EPS))


@pytest.mark.parametrize("eps", [(TRUE_EPS, TRUE_EPS), (NORM_EPS, HC_EPS)])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_equals_transformers(mhc_pre, spread, eps):
    """With spread 30, many elements of the softmax are 0 until eps is added."""
    config = DeepseekV4Config(
        hidden_size=128,
        hc_mult=4,
        hc_sinkhorn_iters=ITERATIONS,
        rms_norm_eps=eps[0],
        hc_eps=eps[1],
    )
    streams, parameters = randn(33, 4, 128), site(4, 128, spread)
    theirs = DeepseekV4HyperConnection(config).to(streams.device)
    for mine, value in zip((theirs.fn, theirs.base, theirs.scale), parameters, strict=True):
        mine.data.copy_(value)
    post, comb, collapsed = (value[0] for value in theirs(streams[None]))
    x, our_post, our_comb = mhc_pre(streams, *parameters, norm_eps=eps[0], hc_eps=eps[1])
    assert_close(x, collapsed, "x")
    assert_close(our_post, post, "post")
    assert_close(our_comb, comb, "comb")


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_iterations_are_counted(mhc_pre, iterations):
    streams, parameters = randn(5, 4, 64), site(4, 64)
    comb = mhc_pre(streams, *parameters, iterations=iterations)[2]
    assert_close(comb, by_loop(streams, *parameters, iterations)[2])


def test_tokens_do_not_mix(mhc_pre):
    streams, parameters = randn(8, 4, 128), site(4, 128)
    whole = mhc_pre(streams, *parameters)
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4], device=streams.device)
    poisoned = streams.clone()
    poisoned[3] = math.nan
    kept = [0, 1, 2, 4, 5, 6, 7]
    for result, permuted, alone, beside_nan in zip(
        whole,
        mhc_pre(streams[order], *parameters),
        mhc_pre(streams[6:7], *parameters),
        mhc_pre(poisoned, *parameters),
        strict=True,
    ):
        assert_close(permuted, result[order])
        assert_close(alone, result[6:7])
        assert_close(beside_nan[kept], result[kept])


def test_stays_on_device(mhc_pre):
    assert_stays_on_device(mhc_pre, randn(3, 4, 64), *site(4, 64))
