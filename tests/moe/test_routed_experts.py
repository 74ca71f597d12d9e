"""routed_experts against a loop over tokens and choices, and against transformers."""

import itertools
import math
from functools import partial

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

from op_checks import MACHINE, assert_stays_on_device, implementations, randn, thorough
from sglang_dsv4.moe import reference
from tolerance import assert_close, assert_close_by_norm

LIMIT = 1.0  # low enough that the clamp bites in every case


@pytest.fixture(params=implementations("routed_experts"))
def run(request):
    return partial(request.param, limit=LIMIT)


def inputs(tokens, hidden, width, experts, top_k, dtype=torch.float32):
    """x, weights, experts, w13, w2; the first experts are chosen most often, some perhaps never."""
    popularity = torch.arange(experts, device=MACHINE.device) * (-4.0 / experts)
    chosen = (randn(tokens, experts, seed=1) + popularity).argsort(dim=1, descending=True)
    return (
        randn(tokens, hidden, dtype=dtype),
        randn(tokens, top_k, seed=2).abs(),
        chosen[:, :top_k].contiguous(),
        (randn(experts, 2 * width, hidden, seed=3) / math.sqrt(hidden)).to(dtype),
        (randn(experts, hidden, width, seed=4) / math.sqrt(width)).to(dtype),
    )


def by_loop(x, weights, experts, w13, w2, limit=LIMIT):
    result = torch.zeros(x.shape, dtype=torch.float64)
    width = w2.shape[2]
    for token, choices in enumerate(experts.tolist()):
        for choice, expert in enumerate(choices):
            up_and_gate = w13[expert].cpu().double() @ x[token].cpu().double()
            hidden = [
                g / (1 + math.exp(-g)) * max(-limit, min(u, limit))
                for g, u in (
                    (min(float(up_and_gate[i]), limit), float(up_and_gate[width + i]))
                    for i in range(width)
                )
            ]
            output = w2[expert].cpu().double() @ torch.tensor(hidden, dtype=torch.float64)
            result[token] += float(weights[token, choice]) * output
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "hidden", "width", "experts", "top_k"),
    [
        (0, 64, 32, 8, 2),
        (1, 64, 32, 8, 2),
        (8, 64, 32, 8, 2),
        (61, 64, 32, 8, 2),
        (3, 64, 32, 8, 8),
        (17, 48, 24, 1, 1),
        (9, 32, 16, 256, 6),
        (300, 32, 16, 4, 3),
        (5, 1024, 768, 8, 2),  # experts too large to be gathered together
    ],
)
def test_equals_the_loop(run, dtype, tokens, hidden, width, experts, top_k):
    arguments = inputs(tokens, hidden, width, experts, top_k, dtype)
    result = run(*arguments)
    assert result.dtype is torch.float32
    # Kernels multiply BF16 weights by an activation in BF16.
    exact = dtype is torch.float32 or run.func is reference.routed_experts
    (assert_close if exact else assert_close_by_norm)(result, by_loop(*arguments))


@pytest.mark.parametrize("tokens", [1, 7, 64, 129])
def test_equals_transformers(run, tokens):
    config = DeepseekV4Config(
        hidden_size=64, moe_intermediate_size=32, n_routed_experts=8, swiglu_limit=LIMIT
    )
    config._experts_implementation = "eager"
    x, weights, experts, w13, w2 = inputs(tokens, 64, 32, 8, 2)
    theirs = DeepseekV4Experts(config).to(x.device)
    theirs.gate_up_proj.data.copy_(w13)
    theirs.down_proj.data.copy_(w2)
    assert_close(run(x, weights, experts, w13, w2), theirs(x, experts, weights))


@pytest.mark.parametrize("tokens", [1, 2, 31, 64, 65, 200])
@pytest.mark.parametrize("expert", [0, 5, 7])
def test_all_tokens_may_choose_the_same_expert(run, tokens, expert):
    x, weights, experts, w13, w2 = inputs(tokens, 64, 32, 8, 1)
    experts.fill_(expert)
    assert_close(run(x, weights, experts, w13, w2), by_loop(x, weights, experts, w13, w2))


def test_every_split_over_two_experts(run):
    """All counts from 0 to T of one expert, so that block boundaries fall everywhere."""
    x, weights, experts, w13, w2 = inputs(40, 16, 8, 2, 1)
    whole = [by_loop(x, weights, torch.full_like(experts, e), w13, w2) for e in range(2)]
    for first in range(41):
        experts[:first], experts[first:] = 1, 0
        expected = torch.cat((whole[1][:first], whole[0][first:]))
        assert_close(run(x, weights, experts, w13, w2), expected, f"split at {first}")


def test_an_expert_chosen_twice_counts_twice(run):
    """A hash table may repeat an expert within a token."""
    x, weights, experts, w13, w2 = inputs(5, 64, 32, 8, 2)
    experts[2] = 3
    assert_close(run(x, weights, experts, w13, w2), by_loop(x, weights, experts, w13, w2))


@pytest.mark.parametrize("tokens", [8, 100])
def test_tokens_do_not_mix(run, tokens):
    x, weights, experts, w13, w2 = inputs(tokens, 64, 32, 8, 2)
    whole = run(x, weights, experts, w13, w2)
    order = randn(tokens, seed=9).argsort()
    assert_close(run(x[order], weights[order], experts[order], w13, w2), whole[order])
    assert_close(run(x[6:7], weights[6:7], experts[6:7], w13, w2), whole[6:7])
    for bad in (0, 3, tokens - 1):  # token 0 may also fill rows that nobody reads
        poisoned = x.clone()
        poisoned[bad] = math.nan
        result = run(poisoned, weights, experts, w13, w2)
        kept = [token for token in range(tokens) if token != bad]
        assert_close(result[kept], whole[kept])
        assert result[bad].isnan().all()


def test_weights_of_unused_experts_do_not_matter(run):
    x, weights, experts, w13, w2 = inputs(30, 64, 32, 8, 2)
    experts %= 6
    whole = run(x, weights, experts, w13, w2)
    w13[6:], w2[6:] = math.nan, math.nan
    assert_close(run(x, weights, experts, w13, w2), whole)


def test_inputs_need_not_be_contiguous(run):
    x, weights, experts, w13, w2 = inputs(20, 64, 32, 8, 2)
    expected = run(x, weights, experts, w13, w2)
    strided = x.t().contiguous().t(), weights.t().contiguous().t(), experts.t().contiguous().t()
    assert_close(run(*strided, w13.mT.contiguous().mT, w2.mT.contiguous().mT), expected)


@pytest.mark.parametrize("tokens", [1, 4, thorough(300)])
def test_parts_of_the_experts_add_up(run, tokens):
    """Each expert held alone, any two neighbours, ... : a part is what the others would not add,
    and what two parts add, one after the other, is the whole."""
    count = 5
    x, weights, experts, w13, w2 = inputs(tokens, 32, 16, count, 2)
    whole = run(x, weights, experts, w13, w2)
    for first, end in itertools.combinations(range(count + 1), 2):
        held, here = slice(first, end), (experts >= first) & (experts < end)
        part = run(x, weights, experts, w13[held], w2[held], first=first, total=count)
        assert_close(part, by_loop(x, weights * here, experts, w13, w2), f"{first} to {end}")
        assert not part[~here.any(dim=1)].any()
        if first == 0:
            rest = slice(end, count)
            options = {"first": end, "total": count, "base": part}
            if end < count:
                part = run(x, weights, experts, w13[rest], w2[rest], **options)
            assert_close(part, whole, f"cut at {end}")
    assert torch.equal(run(x, weights, experts, w13, w2, total=count), whole)


def test_tokens_without_an_expert_here_add_nothing(run):
    """Whatever they are, and whatever the experts that they choose would make of them."""
    x, weights, experts, w13, w2 = inputs(6, 32, 16, 4, 2)
    experts[:] = torch.tensor([0, 3])
    experts[4] = torch.tensor([2, 1])
    x[:4], weights[:4], base = math.inf, math.nan, randn(6, 32, seed=5)
    x[5] = math.nan
    part = run(x, weights, experts, w13[1:3], w2[1:3], first=1, total=4, base=base)
    others = [0, 1, 2, 3, 5]
    assert torch.equal(part[others], base[others]) and not torch.equal(part[4], base[4])


@pytest.mark.parametrize("part", [{}, {"first": 8, "total": 24}])
@pytest.mark.parametrize("tokens", [1, 100])
def test_stays_on_device(run, tokens, part):
    assert_stays_on_device(run, *inputs(tokens, 64, 32, 8, 2), **part)
