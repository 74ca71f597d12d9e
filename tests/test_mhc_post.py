"""mhc_post against a loop over Python floats and the decoder layer of transformers."""

import math

import pytest
import torch

from op_checks import assert_stays_on_device, implementations, randn
from tolerance import assert_close


def inputs(tokens: int, m: int, hidden: int, dtype: torch.dtype = torch.float32):
    """y, streams, post, comb; comb is far from symmetric."""
    comb = (randn(tokens, m, m, seed=3) * 2).softmax(2)
    return (
        randn(tokens, hidden, dtype=dtype),
        randn(tokens, m, hidden, seed=1, dtype=dtype),
        randn(tokens, m, seed=2).sigmoid() * 2,
        comb,
    )


def by_loop(y, streams, post, comb):
    result = torch.zeros(streams.shape, dtype=torch.float64)
    for t, k in torch.cartesian_prod(*(torch.arange(n) for n in streams.shape[:2])).tolist():
        result[t, k] = float(post[t, k]) * y[t].double().cpu()
        for source in range(streams.shape[1]):
            result[t, k] += float(comb[t, source, k]) * streams[t, source].double().cpu()
    return result


@pytest.mark.parametrize("op", implementations("mhc_post"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4, 64), (61, 4, 128), (3, 2, 48), (0, 4, 64)])
def test_equals_the_loop(op, dtype, shape):
    arguments = inputs(*shape, dtype)
    result = op(*arguments)
    assert result.dtype is dtype
    assert_close(result, by_loop(*arguments))


@pytest.mark.parametrize("op", implementations("mhc_post"))
def test_equals_transformers(op):
    """The last line of transformers' DeepseekV4DecoderLayer.forward, in fp32."""
    y, streams, post, comb = inputs(9, 4, 128)
    theirs = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
    assert_close(op(y, streams, post, comb), theirs)


@pytest.mark.parametrize("op", implementations("mhc_post"))
def test_comb_goes_from_source_to_destination(op):
    y, streams, post, comb = inputs(1, 4, 8)
    comb.zero_()
    comb[0, 1, 2] = 1
    expected = torch.zeros_like(streams)
    expected[0, 2] = streams[0, 1]
    assert_close(op(torch.zeros_like(y), streams, post, comb), expected)


@pytest.mark.parametrize("op", implementations("mhc_post"))
def test_tokens_do_not_mix(op):
    arguments = inputs(8, 4, 128)
    whole = op(*arguments)
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4], device=whole.device)
    assert_close(op(*(a[order] for a in arguments)), whole[order])
    assert_close(op(*(a[6:7] for a in arguments)), whole[6:7])
    for argument in arguments:
        argument[3] = math.nan
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert_close(op(*arguments)[kept], whole[kept])


@pytest.mark.parametrize("op", implementations("mhc_post"))
def test_stays_on_device(op):
    assert_stays_on_device(op, *inputs(3, 4, 64))
