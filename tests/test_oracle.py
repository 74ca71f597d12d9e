"""The oracle is worth trusting: its patch is right, its cache is exact, its model is sensitive."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4ForCausalLM, DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

import oracle


def prompt_of(length: int) -> list[int]:
    return next(prompt for prompt in oracle.prompts() if len(prompt) == length)


# The patch of the indexer -------------------------------------------------------------------------


def test_hadamard_of_four_points() -> None:
    result = oracle.hadamard(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert result.tolist() == [5.0, -1.0, -2.0, 0.0]


def test_hadamard_is_its_own_inverse() -> None:
    x = torch.randn(3, 128, dtype=torch.float64)
    torch.testing.assert_close(oracle.hadamard(oracle.hadamard(x)), x)


def test_fp4_grid_of_a_block_whose_largest_value_is_11() -> None:
    block = torch.zeros(32)
    block[:7] = torch.tensor([0.3, -1.1, 2.2, 5.9, -11.0, 0.05, 11.0])
    assert oracle.fp4_grid(block)[:7].tolist() == [0.0, -1.0, 2.0, 6.0, -12.0, 0.0, 12.0]


def test_fp4_grid_breaks_ties_to_the_even_code() -> None:
    block = torch.zeros(32)
    block[:8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    assert oracle.fp4_grid(block)[:8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


def test_fp4_grid_scales_each_block_by_itself_and_keeps_zeros() -> None:
    x = torch.zeros(128)
    x[32], x[64], x[65] = 6.0, 96.0, 5.0
    rounded = oracle.fp4_grid(x)  # 5 is below half of the smallest step, 8
    assert rounded.nonzero().flatten().tolist() == [32, 64, 65]
    assert (rounded[32], rounded[64], rounded[65]) == (6.0, 96.0, 8.0)


def test_indexer_fp4_changes_what_is_selected(checkpoint: Path) -> None:
    prompt = prompt_of(129)
    full = oracle.record(oracle.load(checkpoint, indexer_fp4=False), prompt)
    grid = oracle.record(oracle.load(checkpoint, indexer_fp4=True), prompt)
    changed = full.layers[2].selected.sort().values != grid.layers[2].selected.sort().values
    assert changed.any(dim=1).sum() > 20


# The oracle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("indexer_fp4", [False, True])
@pytest.mark.parametrize("length", [1, 127, 257])
def test_decode_through_the_cache_equals_one_forward(
    checkpoint: Path, length: int, indexer_fp4: bool
) -> None:
    model = oracle.load(checkpoint, indexer_fp4)
    generation = oracle.greedy(model, prompt_of(length))
    torch.testing.assert_close(
        forced_logprobs(model, generation),
        torch.tensor(generation.logprobs, dtype=torch.float64),
        atol=5e-5,
        rtol=0,
    )


def test_selection_bites(checkpoint: Path) -> None:
    trace = oracle.record(oracle.load(checkpoint, indexer_fp4=False), prompt_of(129))
    for number in (2, 4, 6):
        layer = trace.layers[number]
        chosen = (layer.selected >= 0).sum(dim=1)
        visible = (torch.arange(129) + 1) // 4
        assert chosen.tolist() == visible.clamp(max=8).tolist()
        assert layer.index_gap.isinf().tolist() == (visible <= 8).tolist()


def test_half_of_the_expert_activations_meet_the_clamp(checkpoint: Path) -> None:
    model = oracle.load(checkpoint, indexer_fp4=False)
    seen: list[torch.Tensor] = []
    up_proj = model.model.layers[3].mlp.shared_experts.up_proj
    up_proj.register_forward_hook(lambda _, __, up: seen.append(up))
    oracle.record(model, prompt_of(129))
    clamped = (seen[0].abs() > model.config.swiglu_limit).float().mean()
    assert 0.3 < clamped < 0.7


def test_generations_are_varied_and_free_of_ties(
    expected: tuple[oracle.Generation, ...],
) -> None:
    assert len(expected) >= 20
    for generation in expected:
        assert len(set(generation.tokens)) >= 8
        assert not set(generation.tokens) & set(range(len(oracle.SPECIAL_TOKENS)))
        assert min(generation.logit_gaps) > 1e-3
        assert min(generation.index_gaps) > 5e-6
        assert min(generation.router_gaps) > 2e-6


@pytest.mark.parametrize("indexer_fp4", [False, True])
def test_the_story_is_free_of_ties(checkpoint: Path, indexer_fp4: bool) -> None:
    trace = oracle.record(oracle.load(checkpoint, indexer_fp4), oracle.story())
    gaps = [gap for layer in trace.layers if (gap := layer.index_gap) is not None]
    assert torch.stack(gaps).min() > 5e-6
    gaps = [gap for layer in trace.layers if (gap := layer.router_gap) is not None]
    assert torch.stack(gaps).min() > 2e-6


# Sensitivity --------------------------------------------------------------------------------------
# Each of these mistakes, made in the oracle itself, has to show in the generated tokens. A test
# that compares with the oracle can then find the same mistake in an implementation.


def forced_logprobs(
    model: DeepseekV4ForCausalLM,
    generation: oracle.Generation,
    prepare: Callable[[DynamicCache], None] | None = None,
    split: int = 0,
) -> torch.Tensor:
    """Log-probabilities [count] of a generation's tokens, float64, without generating.

    `prepare` may spoil the cache after the first `split` tokens.
    """
    ids = torch.tensor([generation.prompt + generation.tokens[:-1]])
    cache = DynamicCache(config=model.config)
    run = functools.partial(model, past_key_values=cache, use_cache=True)
    with torch.no_grad():
        parts = [run(input_ids=ids[:, :split]).logits[0]] if split else []
        if prepare:
            prepare(cache)
        parts.append(run(input_ids=ids[:, split:]).logits[0])
    logits = torch.cat(parts)[len(generation.prompt) - 1 :].double()
    return logits.log_softmax(dim=-1)[torch.arange(len(logits)), list(generation.tokens)]


def largest_change(
    checkpoint: Path, length: int, mistake: Callable[[DeepseekV4ForCausalLM], None]
) -> float:
    generation = generation_of(checkpoint, length)
    wrong = oracle.load(checkpoint, indexer_fp4=False)
    with torch.no_grad():
        mistake(wrong)
    right = torch.tensor(generation.logprobs, dtype=torch.float64)
    return float((forced_logprobs(wrong, generation) - right).abs().max())


@functools.cache
def generation_of(checkpoint: Path, length: int) -> oracle.Generation:
    return oracle.greedy(oracle.load(checkpoint, indexer_fp4=False), prompt_of(length))


def sink_dropped(model: DeepseekV4ForCausalLM) -> None:
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-1e9)


def window_127(model: DeepseekV4ForCausalLM) -> None:
    model.config.sliding_window = 127


def window_129(model: DeepseekV4ForCausalLM) -> None:
    model.config.sliding_window = 129


def yarn_on_swa_layers(model: DeepseekV4ForCausalLM) -> None:
    """The scaling of the compressed layers, with the base of the others."""

    def full_turns_channel(turns: float) -> float:
        return 64 * math.log(65536 / (2 * math.pi * turns)) / (2 * math.log(10000))

    low, high = math.floor(full_turns_channel(32)), math.ceil(full_turns_channel(1))
    ramp = ((torch.arange(32) - low) / (high - low)).clamp(0, 1)
    model.model.rotary_emb.main_inv_freq.mul_(1 - ramp + ramp / 16)


def overlap_lost(model: DeepseekV4ForCausalLM) -> None:
    for layer in oracle.indexers(model):  # no weight for the series of the window before
        compressor = model.model.layers[layer].self_attn.compressor
        compressor.position_bias[:, : compressor.head_dim] = -1e9


def clamp_off(model: DeepseekV4ForCausalLM) -> None:
    for module in model.modules():
        if hasattr(module, "limit"):
            module.limit = float("inf")


def hash_table_off_by_one(model: DeepseekV4ForCausalLM) -> None:
    for layer in model.model.layers:
        if layer.mlp.is_hash:
            layer.mlp.gate.tid2eid.copy_(layer.mlp.gate.tid2eid.roll(1, dims=0))


def hca_reset_forgotten(model: DeepseekV4ForCausalLM) -> None:
    """An entry pools all tokens so far, as running sums do when nobody clears them."""
    for layer in model.model.layers:
        if isinstance(layer.self_attn.compressor, hf.DeepseekV4HCACompressor):
            compressor = layer.self_attn.compressor
            compressor.forward = functools.partial(_hca_without_reset, compressor)


def _hca_without_reset(
    compressor: Any, hidden: torch.Tensor, _: Any, position_ids: torch.Tensor, *__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    kv, gate = compressor.kv_proj(hidden), compressor.gate_proj(hidden)
    count = kv.shape[1] // 128
    bias = compressor.position_bias.repeat(count, 1)
    pooled = [
        (kv[:, :end] * (gate[:, :end] + bias[:end]).softmax(dim=1)).sum(dim=1)
        for end in range(128, 128 * count + 1, 128)
    ]
    entries = compressor.kv_norm(torch.stack(pooled, dim=1))
    positions = 128 * torch.arange(count)[None]
    cos, sin = compressor.rotary_emb(entries, position_ids=positions, layer_type="compress")
    entries = hf.apply_rotary_pos_emb(entries[:, None], cos, sin)
    hidden_entries = torch.arange(count) >= ((position_ids + 1) // 128)[:, None, :, None]
    return entries, torch.zeros(hidden_entries.shape).masked_fill(hidden_entries, float("-inf"))


@pytest.mark.parametrize(
    ("mistake", "length"),
    [
        (sink_dropped, 5),
        (sink_dropped, 257),
        (window_127, 127),
        (window_129, 127),
        (window_127, 257),
        (window_129, 257),
        (yarn_on_swa_layers, 127),
        (yarn_on_swa_layers, 257),
        (overlap_lost, 5),
        (overlap_lost, 257),
        (clamp_off, 5),
        (clamp_off, 257),
        (hash_table_off_by_one, 5),
        (hash_table_off_by_one, 257),
        (hca_reset_forgotten, 257),
    ],
)
def test_a_mistake_in_the_maths_shows(
    checkpoint: Path, mistake: Callable[[DeepseekV4ForCausalLM], None], length: int
) -> None:
    assert largest_change(checkpoint, length, mistake) > 1e-2


def _overlapping(cache: DynamicCache) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, hf.DeepseekV4CSACache)]


def test_a_lost_overlap_at_a_boundary_shows(checkpoint: Path) -> None:
    def lose(cache: DynamicCache) -> None:
        for layer in _overlapping(cache):
            layer.overlap_kv = dict.fromkeys(layer.overlap_kv)
            layer.overlap_gate = dict.fromkeys(layer.overlap_gate)

    model = oracle.load(checkpoint, indexer_fp4=False)
    generation = generation_of(checkpoint, 257)
    kept = forced_logprobs(model, generation, split=256)
    lost = forced_logprobs(model, generation, lose, split=256)
    assert (lost - kept).abs().max() > 1e-2


def test_an_overlap_left_by_another_request_shows(checkpoint: Path) -> None:
    model = oracle.load(checkpoint, indexer_fp4=False)
    donor = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([prompt_of(90)]), past_key_values=donor, use_cache=True)

    def inherit(cache: DynamicCache) -> None:
        for layer, old in zip(_overlapping(cache), _overlapping(donor), strict=True):
            layer.overlap_kv = dict(old.overlap_kv)
            layer.overlap_gate = dict(old.overlap_gate)

    generation = generation_of(checkpoint, 257)
    clean = forced_logprobs(model, generation)
    stale = forced_logprobs(model, generation, inherit)
    assert (stale - clean).abs().max() > 1e-2
