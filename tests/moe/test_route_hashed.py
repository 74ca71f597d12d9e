"""route_hashed against a loop over Python floats, golden numbers and transformers."""

import math

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

from op_checks import MACHINE, assert_stays_on_device, implementations, randn
from tolerance import assert_close

VOCAB = 97


@pytest.fixture(params=implementations("route_hashed"))
def route(request):
    return request.param


def table(experts: int, top_k: int) -> torch.Tensor:
    """[VOCAB, top_k]: distinct experts for every token id."""
    return randn(VOCAB, experts, seed=5).argsort(dim=1)[:, :top_k].contiguous()


def ids(tokens: int) -> torch.Tensor:
    """The last id of the vocabulary, then the first, then others; some repeat."""
    others = (torch.arange(tokens) * 7 + 90) % VOCAB
    return torch.cat((torch.tensor([VOCAB - 1, 0]), others))[:tokens].to(MACHINE.device)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 8, 2), (61, 8, 2), (9, 256, 6), (0, 8, 2)]
)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_equals_the_loop(route, tokens, experts, top_k, ids_dtype):
    logits, tid2eid, token_ids = randn(tokens, experts) * 3, table(experts, top_k), ids(tokens)
    weights, chosen = route(logits, token_ids.to(ids_dtype), tid2eid, scale=1.5)
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int64)
    assert weights.shape == chosen.shape == (tokens, top_k)
    for row, token_id, our_weights, our_experts in zip(
        logits.tolist(), token_ids.tolist(), weights, chosen.tolist(), strict=True
    ):
        assert our_experts == tid2eid[token_id].tolist()
        scores = [math.sqrt(math.log1p(math.exp(row[e]))) for e in our_experts]
        expected = torch.tensor([score / sum(scores) * 1.5 for score in scores])
        assert_close(our_weights.cpu(), expected)


def test_golden_scores(route):
    """With the scale equal to the sum of the scores, the weights are the scores."""
    logits = torch.tensor([[-4.0, -1.0, 0.0, 1.0, 4.0]], device=MACHINE.device)
    golden = torch.tensor([[0.1347217, 0.5596979, 0.8325546, 1.1459763, 2.0045323]])
    everyone = torch.arange(5, device=MACHINE.device).repeat(VOCAB, 1)
    weights, _ = route(logits, ids(1), everyone, scale=float(golden.sum()))
    torch.testing.assert_close(weights.cpu(), golden, rtol=0, atol=2e-7)


def test_equals_transformers(route):
    config = DeepseekV4Config(
        hidden_size=64,
        n_routed_experts=32,
        num_experts_per_tok=6,
        routed_scaling_factor=1.5,
        vocab_size=VOCAB,
    )
    theirs = DeepseekV4HashRouter(config).to(MACHINE.device)
    theirs.weight.data.copy_(randn(32, 64, seed=1))
    theirs.tid2eid.copy_(table(32, 6))
    logits, their_weights, their_experts = theirs(randn(50, 64), ids(50))
    weights, experts = route(logits, ids(50), table(32, 6), scale=1.5)
    assert_close(experts, their_experts, "experts")
    assert_close(weights, their_weights, "weights")


def test_scores_that_underflow_give_finite_weights(route):
    logits = torch.full((1, 8), -1e4, device=MACHINE.device)
    weights, _ = route(logits, ids(1), table(8, 2), scale=1.5)
    assert weights.tolist() == [[0.0, 0.0]]


def test_tokens_do_not_mix(route):
    logits, token_ids, tid2eid = randn(8, 32), ids(8), table(32, 4)
    whole = route(logits, token_ids, tid2eid, scale=1.0)
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4], device=logits.device)
    poisoned = logits.clone()
    poisoned[3] = math.nan
    kept = [0, 1, 2, 4, 5, 6, 7]
    for result, permuted, alone, beside_nan in zip(
        whole,
        route(logits[order], token_ids[order], tid2eid, scale=1.0),
        route(logits[6:7], token_ids[6:7], tid2eid, scale=1.0),
        route(poisoned, token_ids, tid2eid, scale=1.0),
        strict=True,
    ):
        assert_close(permuted, result[order])
        assert_close(alone, result[6:7])
        assert_close(beside_nan[kept], result[kept])


def test_stays_on_device(route):
    assert_stays_on_device(route, randn(3, 8), ids(3), table(8, 2), scale=1.0)
