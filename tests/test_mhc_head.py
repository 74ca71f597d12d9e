"""mhc_head against a loop over Python floats and against transformers."""

import math
from functools import partial

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead

from op_checks import assert_stays_on_device, implementations, randn
from tolerance import assert_close

EPS = {"norm_eps": 1e-2, "hc_eps": 1e-3}  # large enough that each place where they are added shows


@pytest.fixture(params=implementations("mhc_head"))
def mhc_head(request):
    return partial(request.param, **EPS)


def head(m: int, hidden: int):
    fn = randn(m, m * hidden, seed=1) / math.sqrt(m * hidden)
    return fn, randn(m, seed=2), randn(1, seed=3).abs() + 0.5


def by_loop(streams, fn, base, scale):
    tokens, m, hidden = streams.shape
    result = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t, token in enumerate(streams.double().tolist()):
        flat = [value for stream in token for value in stream]
        root = math.sqrt(sum(value * value for value in flat) / len(flat) + EPS["norm_eps"])
        for i, row in enumerate(fn.double().tolist()):
            mix = math.fsum(f * v for f, v in zip(row, flat, strict=True)) / root
            weight = 1 / (1 + math.exp(-mix * float(scale) - float(base[i]))) + EPS["hc_eps"]
            result[t] += weight * torch.tensor(token[i], dtype=torch.float64)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4, 64), (9, 4, 128), (3, 2, 48), (0, 4, 64)])
def test_equals_the_loop(mhc_head, dtype, shape):
    streams = randn(*shape, dtype=dtype) * 2
    result = mhc_head(streams, *head(*shape[1:]))
    assert result.dtype is dtype
    assert_close(result, by_loop(streams, *head(*shape[1:])))


def test_equals_transformers(mhc_head):
    config = DeepseekV4Config(
        hidden_size=128, hc_mult=4, rms_norm_eps=EPS["norm_eps"], hc_eps=EPS["hc_eps"]
    )
    streams, parameters = randn(33, 4, 128), head(4, 128)
    theirs = DeepseekV4HyperHead(config).to(streams.device)
    mine = theirs.hc_fn, theirs.hc_base, theirs.hc_scale
    for parameter, value in zip(mine, parameters, strict=True):
        parameter.data.copy_(value)
    assert_close(mhc_head(streams, *parameters), theirs(streams[None])[0])


def test_tokens_do_not_mix(mhc_head):
    streams, parameters = randn(8, 4, 128), head(4, 128)
    whole = mhc_head(streams, *parameters)
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4], device=streams.device)
    assert_close(mhc_head(streams[order], *parameters), whole[order])
    assert_close(mhc_head(streams[6:7], *parameters), whole[6:7])
    streams[3] = math.nan
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert_close(mhc_head(streams, *parameters)[kept], whole[kept])


def test_stays_on_device(mhc_head):
    assert_stays_on_device(mhc_head, randn(3, 4, 64), *head(4, 64))
