"""Every format in the real model, a layer in each: its values, and the clamp of its experts."""

from pathlib import Path

import pytest
import torch

from checkpoint_files import FakeModel, assert_same, dense_twin, read, shapes_of
from inprocess import Runner
from mixed_formats import FORMATS, write_mixed
from sglang_dsv4 import linear_storage, weights
from sglang_dsv4.parameters import named_weights
from tolerance import assert_close


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "checkpoint"
    write_mixed(folder)
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    """The model with these weights, in fp32."""
    return Runner(folder)


def test_parameters_are_those_of_the_dense_twin(runner: Runner, folder: Path) -> None:
    """Bit for bit; the twin comes from arithmetic of its own."""
    twin = FakeModel(shapes_of(runner.config))
    dense = dense_twin(read(folder), torch.float32)
    weights.load(twin, dense.items(), runner.config, rank=0, size=1)
    held = named_weights(runner.lm) | dict(runner.lm.named_buffers())
    assert_same({name: held[name] for name in twin.values()}, twin.values())


def test_experts_in_four_bits_give_the_logits_of_dense_ones(runner: Runner, folder: Path) -> None:
    """Every format of four bits in a layer; a prefill and a decode."""
    kept = Runner(folder, routed_experts="fp4")
    held = {"vendor": 32, "nvfp4-experts": 16, "nvfp4-all": 16}
    held |= {"compressed-tensors-w4a4": 16, "compressed-tensors-w4a16": 16}
    assert kept.storage.groups == {layer: held[f] for layer, f in enumerate(FORMATS) if f in held}
    assert len(kept.storage.groups) == len(held) and not kept.storage.notes
    lines = {line for line in kept.report.components if line.startswith("ffn.experts.*.w1")}
    assert "ffn.experts.*.w1: MXFP4 in the checkpoint -> MXFP4, kept, 1 layer" in lines
    assert "ffn.experts.*.w1: FP8 in the checkpoint -> F32 at load, 1 layer" in lines
    assert_same_logits(kept, runner)


KEPT = {  # value -> formats of layers, and a line of the report
    "fp8": (
        {"vendor", "fp8-base", "nvfp4-experts", "compressed-tensors-w4a4"},
        "attn.wq_b: FP8 in the checkpoint -> FP8, kept, 4 layers",
    ),
    "fp4": (
        {"nvfp4-all", "compressed-tensors-w4a16", "compressed-tensors-w4a4"},
        "attn.wq_b: NVFP4 in the checkpoint -> NVFP4, kept, 1 layer",
    ),
}


@pytest.mark.parametrize("value", KEPT)
def test_kept_linears_give_the_logits_of_dense_ones(
    value: str, runner: Runner, folder: Path
) -> None:
    """As far as this small model is made of whole blocks or tiles; scales in UE8M0, E4M3 and FP32.

    The shared experts of compressed-tensors-w4a4 are in NVFP4, its attention in FP8.
    """
    kept, (held, line) = Runner(folder, linears=value), KEPT[value]
    layers = kept.linears.layers
    assert {FORMATS[layer] for layer in layers} == held and len(layers) == len(held)
    for layer, one in layers.items():
        mixed = value == "fp4" and FORMATS[layer] == "compressed-tensors-w4a4"
        wanted = {"ffn.shared_experts.w13"} if mixed else {"attn.wq_b", "attn.wo_b"}
        assert wanted <= one.keys() and set(one.values()) == {value}
    assert line in kept.report.components
    assert_same_logits(kept, runner)


def test_auto_keeps_both_forms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As decided for a GPU, in BF16: compressed-tensors-w4a4 has both in one layer."""
    decide = linear_storage.decide
    on_gpu = {"device": "cuda"}
    monkeypatch.setattr(linear_storage, "decide", lambda *a, **said: decide(*a, **said | on_gpu))
    kept = Runner(folder, dtype=torch.bfloat16)
    layers = kept.linears.layers
    assert {FORMATS[layer] for layer in layers} == KEPT["fp8"][0] | KEPT["fp4"][0]
    both = layers[FORMATS.index("compressed-tensors-w4a4")]
    assert (both["attn.wq_b"], both["ffn.shared_experts.w13"]) == ("fp8", "fp4")
    assert {line for _, line in KEPT.values()} <= set(kept.report.components)
    dense = Runner(folder, linears="bf16", dtype=torch.bfloat16)
    tokens = list(range(20, 60))
    found, expected = (each.run(each.open(), tokens) for each in (kept, dense))
    distance = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0 < distance.median() < 2**-6 and expected.std() > 0.5


def assert_same_logits(one: Runner, other: Runner) -> None:
    """Of a prefill and a decode."""
    tokens = torch.randint(16, 384, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    found, expected = (
        torch.cat([each.run(request, tokens[:-1]), each.run(request, tokens[-1:])])
        for each in (one, other)
        for request in [each.open()]
    )
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layer", range(len(FORMATS)), ids=FORMATS)
@torch.no_grad()
def test_the_clamp_of_experts_is_honoured(runner: Runner, layer: int) -> None:
    """Activations far beyond the limit of 10, by a loop in double precision over the same values.

    Routed and shared experts; without the clamp the result would be another by far.
    """
    ffn, limit = runner.lm.model.layers[layer].ffn, runner.config.swiglu_limit
    draw = torch.Generator().manual_seed(2)
    x = 8 * torch.randn(24, runner.config.hidden_size, generator=draw)
    ids = torch.zeros(24, dtype=torch.int64)
    held = named_weights(ffn)
    shares, experts = ffn.gate(x @ held["gate.weight"].T, ids)

    def expert(row: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, most: float) -> torch.Tensor:
        gate, up = (w13.double() @ row).chunk(2)
        gate, up = gate.clamp(max=most), up.clamp(-most, most)
        return w2.double() @ (gate / (1 + (-gate).exp()) * up)

    def by_hand(most: float) -> torch.Tensor:
        rows = []
        for row, share, chosen in zip(x.double(), shares.double(), experts.tolist(), strict=True):
            shared = expert(row, held["shared_experts.w13"], ffn.shared_experts.w2, most)
            parts = [expert(row, ffn.experts.w13[e], ffn.experts.w2[e], most) for e in chosen]
            rows.append(shared + share @ torch.stack(parts))
        return torch.stack(rows)

    expected, found = by_hand(limit), ffn(x, ids)
    scale = expected.abs().max()
    assert_close(found / scale, expected / scale)
    assert (by_hand(torch.inf) - expected).abs().max() > scale
    beyond = torch.stack([(ffn.experts.w13[e] @ x.T).abs() > limit for e in range(8)])
    assert limit == 10 and 0.2 < beyond.float().mean() < 0.9
