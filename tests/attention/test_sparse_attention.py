"""sparse_attention against one token and one head at a time in float64."""

import math
from functools import partial

import pytest
import torch

from naive_attention import assert_stays_on_device, rope
from op_checks import MACHINE, implementations, randn
from sglang_dsv4.attention import reference
from sglang_dsv4.attention.metadata import IndexList
from tolerance import assert_close, assert_close_by_norm

FREQUENCIES = randn(32, seed=5).abs()
SCALE = 512**-0.5
CACHE_ROWS = 200


@pytest.fixture(params=implementations("sparse_attention"))
def run(request):
    return partial(request.param, scale=SCALE)


def integers(values):
    return torch.tensor(values, dtype=torch.int64, device=MACHINE.device)


def inputs(lengths, keys, heads=3, dtype=torch.float32, seed=0):
    """q, cache, index list, sinks, positions, frequencies.

    Rows of the cache that nobody attends to are NaN, and every list goes on with such rows beyond
    its length.
    """
    generator = torch.Generator().manual_seed(seed)
    used = torch.randperm(CACHE_ROWS - 1, generator=generator)[: CACHE_ROWS // 2] + 1
    unused = sorted(set(range(1, CACHE_ROWS)) - set(used.tolist()))
    rows = used[torch.randint(len(used), (len(lengths), keys), generator=generator)]
    cache = randn(CACHE_ROWS, 512, seed=seed + 1, dtype=dtype)
    cache[0], cache[unused] = 0, math.nan
    for token, length in enumerate(lengths):
        rows[token, length:] = unused[token % len(unused)]
    index = IndexList(rows.to(MACHINE.device), integers(lengths))
    positions = integers([(token * 37) % 5000 for token in range(len(lengths))])
    q = randn(len(lengths), heads, 512, seed=seed + 2, dtype=dtype) * 2
    return q, cache, index, randn(heads, seed=seed + 3), positions, FREQUENCIES


def by_loop(q, cache, keys, sink, positions, frequencies, scale=SCALE):
    result = torch.zeros(q.shape, dtype=torch.float64)
    cache, q = cache.cpu().double(), q.cpu().double()
    for token, length in enumerate(keys.lengths.tolist()):
        rows = [cache[row] for row in keys.rows[token, :length].tolist()]
        for head in range(q.shape[1]):
            logits = [scale * float(q[token, head] @ row) for row in rows]
            sink_logit = float(sink[head])
            peak = max([*logits, sink_logit if math.isfinite(sink_logit) else -math.inf, -1e308])
            weights = [math.exp(logit - peak) for logit in logits]
            total = sum(weights) + (0 if sink_logit == -math.inf else
                                    math.inf if sink_logit == math.inf else
                                    math.exp(sink_logit - peak))
            mixed = torch.zeros(512, dtype=torch.float64)
            for weight, row in zip(weights, rows, strict=True):
                mixed += row * (weight / total)
            result[token, head] = rope(mixed, -int(positions[token]), frequencies)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_rows", [1, 150, 1 << 16])
@pytest.mark.parametrize(
    ("lengths", "keys"),
    [
        ((1,), 1),
        ((61, 1, 0, 17), 61),
        ((69, 0, 3, 42, 69, 68, 1), 69),
        ((128, 100), 136),
        ((), 128),
        ((0, 0), 7),
    ],
)
def test_equals_the_loop(run, monkeypatch, dtype, lengths, keys, block_rows):
    monkeypatch.setattr(reference, "ATTENTION_BLOCK_ROWS", block_rows)
    arguments = inputs(lengths, keys, dtype=dtype)
    result = run(*arguments)
    assert result.dtype is dtype
    # Kernels multiply BF16 rows by weights in BF16.
    exact = dtype is torch.float32 or run.func is reference.sparse_attention
    (assert_close if exact else assert_close_by_norm)(result, by_loop(*arguments))


@pytest.mark.parametrize("heads", [1, 8, 64])
def test_numbers_of_heads(run, heads):
    arguments = inputs((5, 0, 9), 9, heads=heads)
    assert_close(run(*arguments), by_loop(*arguments))


@pytest.mark.parametrize("sink", [math.inf, -math.inf, 1e30, -1e30, 1e4, -1e4, 0.0])
def test_sinks(run, sink):
    """+inf takes everything, -inf is no sink at all; tokens without rows get zeros with either."""
    q, cache, keys, sinks, positions, frequencies = inputs((7, 0, 33), 33)
    sinks[1] = sink
    arguments = (q, cache, keys, sinks, positions, frequencies)
    result = run(*arguments)
    assert_close(result, by_loop(*arguments))
    assert (result[1] == 0).all()
    if sink > 1e3:
        assert (result[:, 1] == 0).all()


def test_without_a_sink_the_weights_add_up_to_one(run):
    """Equal rows come back as they are, whatever the logits."""
    q, cache, keys, sinks, positions, frequencies = inputs((9, 3), 9)
    cache[1:] = cache[keys.rows[0, 0]].clone()
    result = run(q, cache, keys, torch.full_like(sinks, -math.inf), positions * 0, frequencies)
    assert_close(result, cache[1].expand_as(result))


def test_a_sink_equal_to_the_only_logit_halves(run):
    q, cache, keys, _, positions, frequencies = inputs((1,), 1)
    row = cache[keys.rows[0, 0]]
    logits = (q[0] @ row) * SCALE
    result = run(q, cache, keys, logits, positions * 0, frequencies)
    assert_close(result[0], (row / 2).expand_as(result[0]))


def test_a_row_may_occur_twice(run):
    """It then counts twice: nothing is taken out of a list."""
    q, cache, keys, *rest = inputs((4, 4), 4)
    keys.rows[0, 1] = keys.rows[0, 0]
    assert_close(run(q, cache, keys, *rest), by_loop(q, cache, keys, *rest))


@pytest.mark.parametrize("factor", [8, 64])
def test_large_logits(run, factor):
    """Far beyond what exp holds; integers, so that the logits are exact in float32."""
    q, cache, keys, sinks, positions, frequencies = inputs((50, 3, 20), 50)
    q, cache, scale = (q * factor).round(), (cache * 8).round(), 1 / 16
    arguments = (q, cache, keys, sinks, positions, frequencies)
    assert float((q.nan_to_num() @ cache.nan_to_num().T).abs().max()) * scale > 500
    result = run(*arguments, scale=scale)
    assert_close(result / 8, by_loop(*arguments, scale=scale) / 8)


def test_only_the_rotated_channels_are_turned_back(run):
    q, cache, keys, sinks, positions, frequencies = inputs((5,), 5)
    here = run(q, cache, keys, sinks, positions * 0, frequencies)
    there = run(q, cache, keys, sinks, positions * 0 + 1048575, frequencies)
    assert_close(there[..., :448], here[..., :448])
    assert not torch.allclose(there[..., 448:], here[..., 448:], atol=0.01)


def test_tokens_and_heads_do_not_mix(run):
    q, cache, keys, sinks, positions, frequencies = inputs((9, 0, 33, 5, 33), 33)
    whole = run(q, cache, keys, sinks, positions, frequencies)
    order = torch.tensor([4, 2, 0, 3, 1], device=q.device)
    shuffled = IndexList(keys.rows[order], keys.lengths[order])
    result = run(q[order], cache, shuffled, sinks, positions[order], frequencies)
    assert_close(result, whole[order])
    alone = IndexList(keys.rows[2:3], keys.lengths[2:3])
    assert_close(run(q[2:3], cache, alone, sinks, positions[2:3], frequencies), whole[2:3])
    poisoned = q.clone()
    poisoned[2, 1] = math.nan
    result = run(poisoned, cache, keys, sinks, positions, frequencies)
    result[2, 1] = whole[2, 1]
    assert_close(result, whole)


def test_the_cache_is_only_read(run):
    q, cache, keys, *rest = inputs((9, 0, 33), 33)
    before = cache.clone()
    run(q, cache, keys, *rest)
    assert_close(cache, before)


def test_inputs_need_not_be_contiguous(run):
    q, cache, keys, *rest = inputs((9, 0, 33), 33)
    expected = run(q, cache, keys, *rest)
    wide = torch.cat([cache, cache], dim=1)[:, :512]
    strided = IndexList(keys.rows.T.contiguous().T, keys.lengths.repeat_interleave(2)[::2])
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(run(q, wide, strided, *rest), expected)


def test_stays_on_device(run):
    assert_stays_on_device(run, *inputs((9, 0, 33), 33))
