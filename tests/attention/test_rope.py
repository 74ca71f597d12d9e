"""Rotary frequencies against published numbers and transformers; the rotation against both."""

import math
from dataclasses import replace

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

import oracle
from naive_attention import rope
from op_checks import MACHINE, implementations, randn
from sglang_dsv4.attention.rope import rope_frequencies
from sglang_dsv4.config import DSV4Config, LayerKind, YarnScaling

CONFIG = DSV4Config.from_dict(oracle.tiny_config().to_dict())
PLAIN = {0: 1.0, 1: 7.498942093e-1, 8: 1.0e-1, 16: 1.0e-2, 31: 1.333521432e-4}
YARN = {
    0: 1.0,
    8: 5.0e-2,
    15: 3.635538584e-3,
    16: 2.265625e-3,
    17: 1.396801295e-3,
    18: 8.496897268e-4,
    19: 5.080819630e-4,
    20: 2.969777783e-4,
    21: 1.681799886e-4,
    22: 9.086784295e-5,
    23: 4.544423230e-5,
    24: 1.953125e-5,
    25: 5.372312671e-6,
    31: 5.680529037e-7,
}


def test_the_configuration_is_the_published_one():
    """The golden numbers below hold for these values only."""
    assert (CONFIG.rope_theta, CONFIG.compress_rope_theta) == (10000, 160000)
    assert CONFIG.qk_rope_head_dim == 64
    expected = YarnScaling(
        factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536
    )
    assert CONFIG.yarn == expected


@pytest.mark.parametrize(
    ("kind", "golden"),
    [(LayerKind.SWA, PLAIN), (LayerKind.CSA, YARN), (LayerKind.HCA, YARN)],
)
def test_golden_frequencies(kind, golden):
    frequencies = rope_frequencies(CONFIG, kind)
    assert frequencies.dtype is torch.float32 and frequencies.shape == (32,)
    for pair, expected in golden.items():
        # Half a unit in the last place of float32, and the last digit that is printed.
        assert math.isclose(float(frequencies[pair]), expected, rel_tol=6e-8 + 5e-10), pair


def test_yarn_leaves_fast_pairs_and_divides_slow_ones():
    base = rope_frequencies(replace(CONFIG, yarn=None), LayerKind.CSA)
    scaled = rope_frequencies(CONFIG, LayerKind.CSA)
    assert torch.equal(scaled[:16], base[:16])
    torch.testing.assert_close(scaled[25:], base[25:] / 16, rtol=1e-6, atol=0)
    between = scaled[16:25]
    assert (between < base[16:25]).all() and (between > base[16:25] / 16).all()


def test_a_layer_without_compressor_knows_no_yarn():
    plain = rope_frequencies(CONFIG, LayerKind.SWA)
    assert torch.equal(plain, rope_frequencies(replace(CONFIG, yarn=None), LayerKind.SWA))
    for factor in (1.0, 40.0):
        other = replace(CONFIG, yarn=replace(CONFIG.yarn, factor=factor))
        assert torch.equal(plain, rope_frequencies(other, LayerKind.SWA))


@pytest.mark.parametrize("factor", [1.0, 4.0, 16.0])
def test_equals_transformers(factor):
    group = dict(oracle.tiny_config().rope_parameters["compress"], factor=factor)
    group.pop("rope_theta", None)
    theirs = oracle.tiny_config(rope_parameters=group)
    rotary = DeepseekV4RotaryEmbedding(theirs)
    config = DSV4Config.from_dict(theirs.to_dict())
    assert config.yarn is not None and config.yarn.factor == factor
    for kind, layer_type in ((LayerKind.SWA, "main"), (LayerKind.HCA, "compress")):
        expected = getattr(rotary, f"{layer_type}_inv_freq")
        assert getattr(rotary, f"{layer_type}_attention_scaling") == 1.0
        torch.testing.assert_close(
            rope_frequencies(config, kind), expected.float(), rtol=1e-6, atol=3e-8
        )


@pytest.mark.parametrize("op", implementations("index_query"))
def test_golden_rotation(op):
    """index_query without its grid is the rotation alone."""
    q = torch.zeros(1, 1, 128, device=MACHINE.device)
    q[0, 0, 64] = 1
    frequencies = rope_frequencies(CONFIG, LayerKind.SWA).to(MACHINE.device)
    turned = op(q, torch.tensor([5], device=MACHINE.device), frequencies, fp4=False).cpu()
    expected = torch.zeros(128)
    expected[64], expected[65] = 0.2836622, -0.9589243
    torch.testing.assert_close(turned[0, 0], expected, rtol=0, atol=6e-8)


def test_the_naive_rotation_is_a_rotation():
    """What the ops are compared with: keeps lengths, adds up, undone by the opposite position."""
    frequencies = rope_frequencies(CONFIG, LayerKind.SWA)
    vector = randn(128).cpu().double()
    turned = rope(vector, 700, frequencies)
    torch.testing.assert_close(turned.norm(), vector.norm())
    torch.testing.assert_close(rope(turned, -700, frequencies), vector)
    twice = rope(rope(vector, 3, frequencies), 4, frequencies)
    torch.testing.assert_close(twice, rope(vector, 7, frequencies), rtol=1e-6, atol=1e-6)
