"""The MoE layer against transformers, in both dtypes, and over tensor-parallel ranks."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

from op_checks import MACHINE, assert_stays_on_device, randn
from sglang_dsv4.backends import choose
from sglang_dsv4.moe.layer import MoE
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import default_dtype, named_weights
from tolerance import assert_close

VOCAB, HIDDEN, WIDTH, EXPERTS, TOP_K = 97, 64, 48, 8, 2
OPS = choose(MACHINE, "all=reference")
HASHED, SCORED = 0, 1  # layer ids
CONFIG = SimpleNamespace(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    moe_intermediate_size=WIDTH,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    routed_scaling_factor=1.5,
    swiglu_limit=1.0,  # low enough to bite
    num_hash_layers=1,
)


@pytest.fixture(params=[HASHED, SCORED], ids=["hashed", "scored"])
def layer_id(request):
    return request.param


def make(layer_id, parallel=None, dtype=torch.float32) -> MoE:
    """A layer with this rank's slice of random weights."""
    parallel = parallel or Parallel()
    with default_dtype(dtype):
        layer = MoE(CONFIG, layer_id, OPS, parallel).to(MACHINE.device)
    w13 = randn(EXPERTS + 1, 2, WIDTH, HIDDEN, seed=1) / math.sqrt(HIDDEN)
    w2 = randn(EXPERTS + 1, HIDDEN, WIDTH, seed=2) / math.sqrt(WIDTH)
    group, ranks = parallel.expert_parallel, parallel.size // parallel.expert_parallel
    held = slice(*(1 + EXPERTS // group * (parallel.rank // ranks + end) for end in (0, 1)))
    inner = slice(*(WIDTH // ranks * (parallel.rank % ranks + end) for end in (0, 1)))
    mine = slice(*(WIDTH // parallel.size * (parallel.rank + end) for end in (0, 1)))
    tensors = named_weights(layer)
    tensors["gate.weight"].copy_(randn(EXPERTS, HIDDEN, seed=3) / math.sqrt(HIDDEN))
    if layer_id == HASHED:
        layer.gate.tid2eid.copy_(randn(VOCAB, EXPERTS, seed=4).argsort(dim=1)[:, :TOP_K])
    else:
        layer.gate.bias.copy_(randn(EXPERTS, seed=5))
    layer.experts.w13.copy_(w13[held, :, inner].flatten(1, 2))
    layer.experts.w2.copy_(w2[held, :, inner])
    tensors["shared_experts.w13"].copy_(w13[0, :, mine].flatten(0, 1))
    layer.shared_experts.w2.copy_(w2[0, :, mine])
    return layer


def tokens(count: int, dtype: torch.dtype = torch.float32):
    return randn(count, HIDDEN, seed=6, dtype=dtype), (torch.arange(count) * 13 % VOCAB).to(
        MACHINE.device
    )


def by_transformers(layer: MoE, layer_id: int, x, token_ids) -> torch.Tensor:
    """Their block with our layer's weights, in fp32."""
    config = DeepseekV4Config(
        **{k: v for k, v in vars(CONFIG).items() if k != "num_hash_layers"},
        num_hidden_layers=2,
        mlp_layer_types=["hash_moe", "moe"],
    )
    config._experts_implementation = "eager"
    theirs = DeepseekV4SparseMoeBlock(config, layer_id).to(x.device)
    held = named_weights(layer)
    theirs.gate.weight.data.copy_(held["gate.weight"])
    if layer_id == HASHED:
        theirs.gate.tid2eid.copy_(layer.gate.tid2eid)
    else:
        theirs.gate.e_score_correction_bias.copy_(layer.gate.bias)
    theirs.experts.gate_up_proj.data.copy_(layer.experts.w13)
    theirs.experts.down_proj.data.copy_(layer.experts.w2)
    gate, up = held["shared_experts.w13"].chunk(2)
    theirs.shared_experts.gate_proj.weight.data.copy_(gate)
    theirs.shared_experts.up_proj.weight.data.copy_(up)
    theirs.shared_experts.down_proj.weight.data.copy_(layer.shared_experts.w2)
    return theirs(x.float()[None], input_ids=token_ids[None])[0]


def test_parameters_carry_the_checkpoint_names(layer_id):
    layer = make(layer_id, dtype=torch.bfloat16)
    tensors = named_weights(layer) | dict(layer.named_buffers())
    router = (
        {"gate.tid2eid": ((VOCAB, TOP_K), torch.int64)}
        if layer_id == HASHED
        else {"gate.bias": ((EXPERTS,), torch.float32)}
    )
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == router | {
        "gate.weight": ((EXPERTS, HIDDEN), torch.bfloat16),
        "experts.w13": ((EXPERTS, 2 * WIDTH, HIDDEN), torch.bfloat16),
        "experts.w2": ((EXPERTS, HIDDEN, WIDTH), torch.bfloat16),
        "shared_experts.w13": ((2 * WIDTH, HIDDEN), torch.bfloat16),
        "shared_experts.w2": ((HIDDEN, WIDTH), torch.bfloat16),
    }
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 8, 100])
def test_equals_transformers(layer_id, dtype, count):
    """In bfloat16 too: arithmetic in fp32 on the same weights, and no rounding."""
    layer, (x, token_ids) = make(layer_id, dtype=dtype), tokens(count, dtype)
    result = layer(x, token_ids)
    assert (result.dtype, result.shape) == (torch.float32, x.shape)
    if count > 0:
        assert_close(result, by_transformers(layer, layer_id, x, token_ids))


def test_shared_expert_is_clamped(layer_id):
    """With routed experts that give nothing, what is left is the shared expert, clamped."""
    layer, (x, token_ids) = make(layer_id), tokens(5)
    layer.experts.w2.zero_()
    gate, up = (x @ named_weights(layer)["shared_experts.w13"].t()).chunk(2, dim=1)
    limit = CONFIG.swiglu_limit
    assert gate.max() > limit and up.max() > limit and up.min() < -limit
    clamped = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    assert_close(layer(x, token_ids), clamped @ layer.shared_experts.w2.t())


def test_hashed_layers_follow_the_token_ids():
    layer, (x, token_ids) = make(HASHED), tokens(20)
    permuted = token_ids.roll(1)
    assert_close(layer(x, permuted), by_transformers(layer, HASHED, x, permuted))
    assert (layer(x, token_ids) - layer(x, permuted)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "groups"), [(2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (8, 8)])
def test_ranks_add_up(layer_id, dtype, size, groups):
    """The ranks' fp32 parts add up to the result of one rank, whichever way experts are divided."""
    parts = []

    def add(part: torch.Tensor) -> torch.Tensor:
        parts.append(part)
        return torch.stack(parts).sum(0)

    x, token_ids = tokens(30, dtype)
    for rank in range(size):
        layer = make(layer_id, Parallel(rank, size, add, groups), dtype)
        assert layer.experts.w2.shape == (EXPERTS // groups, HIDDEN, WIDTH // (size // groups))
        result = layer(x, token_ids)  # the last rank's is the sum of all
    assert all(part.dtype is torch.float32 for part in (*parts, result))
    exact = []
    make(layer_id, Parallel(all_reduce=lambda t: exact.append(t) or t), dtype)(x, token_ids)
    assert_close(result, exact[0])


def test_width_must_divide_by_the_ranks(layer_id):
    with pytest.raises(AssertionError):
        make(layer_id, Parallel(rank=0, size=5))
    with pytest.raises(AssertionError, match="8 cannot be divided by 3"):
        make(layer_id, Parallel(rank=0, size=3, expert_parallel=3))


def test_tokens_do_not_mix(layer_id):
    layer, (x, token_ids) = make(layer_id), tokens(40)
    whole = layer(x, token_ids)
    order = randn(40, seed=9).argsort()
    assert_close(layer(x[order], token_ids[order]), whole[order])
    assert_close(layer(x[6:7], token_ids[6:7]), whole[6:7])
    x[3] = math.nan
    kept = [token for token in range(40) if token != 3]
    assert_close(layer(x, token_ids)[kept], whole[kept])


def test_stays_on_device(layer_id):
    layer = make(layer_id)
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    names = list(tensors)

    def call(x, token_ids, *values):
        return torch.func.functional_call(
            layer, dict(zip(names, values, strict=True)), (x, token_ids)
        )

    assert_stays_on_device(call, *tokens(3), *tensors.values())
