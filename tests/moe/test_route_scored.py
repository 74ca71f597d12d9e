"""route_scored against a loop over Python floats, golden numbers and transformers."""

import math

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

from op_checks import MACHINE, assert_stays_on_device, implementations, randn
from tolerance import assert_close

# ln(1 + exp(x)), then its square root
GOLDEN = {-4.0: 0.1347217, -1.0: 0.5596979, 0.0: 0.8325546, 1.0: 1.1459763, 4.0: 2.0045323}


@pytest.fixture(params=implementations("route_scored"))
def route(request):
    return request.param


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, device=MACHINE.device)


def by_loop(logits, bias, top_k, scale):
    weights, experts = [], []
    for row in logits.double().tolist():
        scores = [math.sqrt(math.log1p(math.exp(value))) for value in row]
        biased = [-score - float(b) for score, b in zip(scores, bias, strict=True)]
        chosen = sorted(range(len(row)), key=lambda e: (biased[e], e))[:top_k]
        total = sum(scores[e] for e in chosen)
        experts.append(chosen)
        weights.append([scores[e] / total * scale for e in chosen])
    shape = (logits.shape[0], top_k)
    return (
        torch.tensor(weights, dtype=torch.float64).reshape(shape),
        torch.tensor(experts, dtype=torch.int64).reshape(shape),
    )


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 8, 2), (61, 8, 2), (9, 256, 6), (5, 384, 6), (0, 8, 2)]
)
def test_equals_the_loop(route, tokens, experts, top_k):
    logits, bias = randn(tokens, experts) * 3, randn(experts, seed=1) * 0.3
    weights, chosen = route(logits, bias, top_k=top_k, scale=2.5)
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int64)
    expected_weights, expected = by_loop(logits, bias, top_k, 2.5)
    assert_close(chosen, expected, "experts")
    assert_close(weights, expected_weights, "weights")


def test_golden_scores(route):
    """With all experts chosen and the scale equal to the sum, the weights are the scores."""
    logits = tensor([list(GOLDEN)])
    weights, experts = route(
        logits, torch.zeros_like(logits[0]), top_k=5, scale=sum(GOLDEN.values())
    )
    expected = tensor(list(GOLDEN.values()))[experts]
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-7)


def test_equals_transformers(route):
    config = DeepseekV4Config(
        hidden_size=64, n_routed_experts=32, num_experts_per_tok=6, routed_scaling_factor=1.5
    )
    theirs = DeepseekV4TopKRouter(config).to(MACHINE.device)
    theirs.weight.data.copy_(randn(32, 64, seed=1))
    theirs.e_score_correction_bias.copy_(randn(32, seed=2))
    logits, their_weights, their_experts = theirs(randn(50, 64))
    weights, experts = route(logits, theirs.e_score_correction_bias, top_k=6, scale=1.5)
    ours, order = experts.sort(dim=1)
    their_experts, their_order = their_experts.sort(dim=1)
    assert_close(ours, their_experts, "experts")
    assert_close(weights.gather(1, order), their_weights.gather(1, their_order), "weights")


def test_bias_moves_the_choice_and_not_the_weights(route):
    logits, bias = tensor([[3.0, 2.0, 1.0, 0.0]]), tensor([0.0, 0.0, -9.0, 9.0])
    weights, experts = route(logits, bias, top_k=2, scale=1.0)
    assert experts.tolist() == [[3, 0]]
    low, high = (math.sqrt(math.log1p(math.exp(value))) for value in (0.0, 3.0))
    assert_close(weights.cpu(), torch.tensor([[low, high]]) / (low + high))


def test_the_lower_id_wins_a_tie(route):
    logits = torch.zeros(3, 256, device=MACHINE.device)
    logits[1, 100:] = 1
    logits[2, 255] = 1
    _, experts = route(logits, torch.zeros_like(logits[0]), top_k=6, scale=1.0)
    assert experts.tolist() == [[*range(6)], [*range(100, 106)], [255, *range(5)]]


def test_extreme_logits_stay_finite(route):
    """Scores that underflow to 0 give zero weights, large ones their square root."""
    logits = tensor([[-1e4] * 4, [1e4, 2.5e3, -1e4, -1e4]])
    weights, _ = route(logits, torch.zeros_like(logits[0]), top_k=2, scale=3.0)
    assert_close(weights.cpu(), torch.tensor([[0.0, 0.0], [2.0, 1.0]]))


def test_tokens_do_not_mix(route):
    logits, bias = randn(8, 32), randn(32, seed=1)
    whole = route(logits, bias, top_k=4, scale=1.0)
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4], device=logits.device)
    poisoned = logits.clone()
    poisoned[3] = math.nan
    kept = [0, 1, 2, 4, 5, 6, 7]
    for result, permuted, alone, beside_nan in zip(
        whole,
        route(logits[order], bias, top_k=4, scale=1.0),
        route(logits[6:7], bias, top_k=4, scale=1.0),
        route(poisoned, bias, top_k=4, scale=1.0),
        strict=True,
    ):
        assert_close(permuted, result[order])
        assert_close(alone, result[6:7])
        assert_close(beside_nan[kept], result[kept])


def test_experts_of_nan_are_in_range(route):
    """A padding row may hold anything; its experts index the weights all the same."""
    logits = torch.full((2, 8), math.nan, device=MACHINE.device)
    logits[1, :4] = torch.tensor([math.inf, -math.inf, 0.0, 1.0])
    _, experts = route(logits, torch.zeros_like(logits[0]), top_k=2, scale=1.0)
    assert experts.min() >= 0 and experts.max() < 8


def test_stays_on_device(route):
    assert_stays_on_device(route, randn(3, 8), randn(8), top_k=2, scale=1.0)
