"""Routed experts in four bits: which layers keep them, what is loaded, what is refused."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from checkpoint_files import Tensors, headers_of, write_holes
from sglang_dsv4 import backends, dequant, tiny_formats, tiny_weights, weights
from sglang_dsv4.checkpoint import CheckpointError
from sglang_dsv4.cli_make_tiny import shipped_config
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.expert_storage import (
    ExpertStorage,
    decide,
    from_claims,
    from_formats,
    from_headers,
)
from sglang_dsv4.formats import FOUR_BITS, TensorFormat
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.graph_safety_step import SmallLM
from sglang_dsv4.moe import reference
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.precision import Precision
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.survey import Survey
from sglang_dsv4.tiny_formats import RECIPES

DENSE, FP8, MXFP4 = TensorFormat.DENSE, TensorFormat.FP8, TensorFormat.MXFP4
NVFP4, PACKED = TensorFormat.NVFP4, TensorFormat.COMPRESSED_TENSORS
RAW = shipped_config("tiny", "bfloat16")
TINY = DSV4Config.from_dict(RAW)  # 7 layers; experts of 64 inner channels
HIDDEN, WIDTH, EXPERTS = 32, 64, 2


def decided(
    *formats: set[TensorFormat], chosen: str = "auto", device: str = "cuda", ranks: int = 1
) -> ExpertStorage:
    return decide(TINY, dict(enumerate(formats)), chosen=chosen, device=device, ranks=ranks)


# ---- which layers ----


@pytest.mark.parametrize(
    ("chosen", "device", "kept"),
    [
        *[("auto", "cuda", True), ("auto", "cpu", False), ("fp4", "cuda", True)],
        *[("fp4", "cpu", True), ("bf16", "cuda", False), ("bf16", "cpu", False)],
    ],
)
def test_who_keeps_four_bits(chosen: str, device: str, kept: bool) -> None:
    found = decided({MXFP4}, {DENSE}, {NVFP4}, {FP8}, {PACKED}, chosen=chosen, device=device)
    assert found == ExpertStorage({0: 32, 2: 16, 4: 16} if kept else {})


def test_a_layer_in_several_formats_is_dense() -> None:
    """But for the two kinds of NVFP4, which differ in nothing that is left in memory."""
    found = decided({NVFP4, PACKED}, {MXFP4, NVFP4}, {FP8, DENSE}, {FP8, MXFP4}, {MXFP4, NVFP4})
    assert found.groups == {0: 16}
    assert found.notes == (
        "the routed experts of layers 1 and 4 are dequantised at load, not kept in four bits: they"
        " are MXFP4 and NVFP4",
        "the routed experts of layer 3 are dequantised at load, not kept in four bits: they are FP8"
        " and MXFP4",
    )


def test_shares_that_are_no_whole_tiles_are_dense() -> None:
    formats = [{MXFP4}, {NVFP4}, {NVFP4}, {DENSE}, {NVFP4}]
    assert decided(*formats, ranks=2).groups == {0: 32, 1: 16, 2: 16, 4: 16}
    assert decided(*formats, ranks=4) == ExpertStorage(
        {},
        (
            "the routed experts of layers 0 to 2 and 4 are dequantised at load, not kept in four"
            " bits: w2 has 16 inputs on a rank, no multiple of 32",
        ),
    )


@pytest.mark.parametrize(
    ("formats", "ranks", "told"),
    [
        ([{DENSE}, {FP8}], 1, r"holds none, but BF16, FP16 or FP32 and FP8\.\n.*auto"),
        ([], 1, "holds none, but nothing that is known"),
        ([{MXFP4, NVFP4}], 1, r"no layer can stay so:\n.* layer 0 .* MXFP4 and NVFP4"),
        ([{MXFP4}], 8, r"no layer can stay so:\n.* 8 inputs on a rank, no"),
    ],
)
def test_what_cannot_be_kept_at_all_is_refused(
    formats: list[set[TensorFormat]], ranks: int, told: str
) -> None:
    message = f"SGLANG_DSV4_PRECISION: routed_experts=fp4 .*{told}"
    with pytest.raises(SettingsError, match=re.compile(message, re.S)):
        decided(*formats, chosen="fp4", ranks=ranks)


@pytest.mark.parametrize("name", RECIPES)
def test_headers_and_config_say_the_same(name: str, tmp_path: Path) -> None:
    """For every format of make-tiny, by the vendor's names."""
    headers = headers_of(TINY, RECIPES[name])
    headers |= {"mtp.0.ffn.experts.0.w1.weight": ("I8", (64, 64))}
    headers |= {"mtp.0.ffn.experts.0.w1.scale": ("F8_E8M0", (64, 4))}
    write_holes(tmp_path, headers, lambda weight: f"part-{len(weight) % 2}")
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    found = from_headers(tmp_path)
    assert found == from_formats(Survey(tmp_path, TINY).formats)
    assert found.keys() == set(range(7)) and all(len(formats) == 1 for formats in found.values())
    claimed = from_claims(RAW | RECIPES[name].config, TINY)
    assert claimed == (found if RECIPES[name].stored else {})


@pytest.mark.parametrize(
    ("changes", "claimed"),
    [
        ({"expert_dtype": "bf16"}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_algo": "NVFP4", "ignore": ["*.experts.*"]}}, None),
        ({"quantization_config": {"quant_algo": "NVFP4", "ignore": ["re:.*mlp.*"]}}, None),
        ({"quantization_config": {"quant_algo": "NVFP4", "ignore": ["*.attn.*"]}}, NVFP4),
    ],
)
def test_what_a_config_says(changes: dict[str, object], claimed: TensorFormat | None) -> None:
    expected = {} if claimed is None else dict.fromkeys(range(7), {claimed})
    assert from_claims(RAW | changes, TINY) == expected


# ---- what is loaded: one layer of two experts ----

ONE_LAYER = DSV4Config.from_dict(
    RAW
    | {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0, "vocab_size": 16}
    | {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "hidden_size": HIDDEN}
    | {"moe_intermediate_size": WIDTH}
)
MATRIX = "layers.0.ffn.experts.{}.{}.weight"
SHAPES = {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "w3": (WIDTH, HIDDEN)}
CPU_OPS = backends.choose(backends.Machine("cpu", "CPU", None))


def values_of(expert: int, matrix: str) -> Tensor:
    draw = torch.Generator().manual_seed(10 * expert + int(matrix[1]))
    return torch.randn(SHAPES[matrix], generator=draw) * (1 + expert) * int(matrix[1])


def checkpoint(stored: str | None) -> Tensors:
    """Everything that the model needs, its experts stored so."""
    tensors: Tensors = {}
    for entry in tiny_weights.vendor_entries(ONE_LAYER):
        if ".ffn.experts." not in entry.name:
            tensors |= tiny_weights.tensors(entry, torch.float32, seed=0)
    for expert in range(EXPERTS):
        for matrix in SHAPES:
            name, values = MATRIX.format(expert, matrix), values_of(expert, matrix)
            encoded = {} if stored is None else tiny_formats.encode(stored, name, values)
            tensors |= encoded or {name: values}
    return tensors


def loaded(
    tensors: Mapping[str, Tensor], group: int | None, rank: int = 0, size: int = 1
) -> tuple[SmallLM, weights.LoadReport]:
    """The model with experts of this group, or dense ones, in FP32."""
    groups = {} if group is None else {0: group}
    parallel = Parallel(rank=rank, size=size, all_reduce=lambda x: x)
    lm = SmallLM(ONE_LAYER, CPU_OPS, Precision(), parallel, groups)
    report = weights.load(lm, tensors.items(), ONE_LAYER, rank=rank, size=size)
    return lm, report


def experts_of(lm: SmallLM) -> nn.Module:
    return lm.model.layers[0].ffn.experts


def dense(matrices: FP4Matrices) -> Tensor:
    """The values [E, N, K], each multiplied out by hand."""
    scale = {16: torch.float8_e4m3fn, 32: torch.float8_e8m0fnu}[matrices.group]
    numbers = torch.tensor([*dequant.E2M1, *(-value for value in dequant.E2M1)])
    codes = torch.stack([matrices.codes & 15, matrices.codes >> 4], dim=-1).flatten(2)
    scales = matrices.scales.view(scale).float().repeat_interleave(matrices.group, dim=2)
    rows = matrices.shape[1] // matrices.parts
    factors = matrices.factors.repeat_interleave(rows, dim=1)
    return numbers[codes.int()] * scales * factors[..., None]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stored", ["mxfp4", "nvfp4", "packed", "packed-a4"])
def test_what_is_kept_are_the_values_of_dense_experts(stored: str, size: int) -> None:
    """And the op's results are those of the dense op, of every rank."""
    tensors = checkpoint(stored)
    group = 32 if stored == "mxfp4" else 16
    held = {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}.get(stored, "compressed-tensors NVFP4")
    draw = torch.Generator().manual_seed(0)
    x, shares = torch.randn(5, HIDDEN, generator=draw), torch.rand(5, 2, generator=draw)
    routes = torch.tensor([[0, 1]] * 4 + [[1, 0]])
    for rank in range(size):
        twin, _ = loaded(tensors, None, rank, size)
        lm, report = loaded(tensors, group, rank, size)
        assert not report.converted
        line = f"ffn.experts.*.w2: {held} in the checkpoint -> {held}, kept, 1 layer"
        assert line in report.components
        kept, expected = experts_of(lm), experts_of(twin)
        assert kept.op is reference.routed_experts_fp4
        for name in ("w13", "w2"):
            found, wanted = dense(getattr(kept, name)), getattr(expected, name)
            if stored.startswith("packed"):  # a rounded reciprocal
                torch.testing.assert_close(found, wanted, rtol=3e-7, atol=0)
            else:
                assert torch.equal(found, wanted)
        result, wanted = kept(x, shares, routes), expected(x, shares, routes)
        torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


def stack(tensors: Tensors) -> Tensors:
    """The experts in two stacks with a factor for each matrix, under transformers' names."""
    kept = {name: tensor for name, tensor in tensors.items() if ".ffn.experts." not in name}
    for name, matrices in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
        whole = f"model.layers.0.mlp.experts.{name}"
        for suffix in ("weight", "weight_scale", "weight_scale_2"):
            ends = [
                [tensors[MATRIX.format(e, m).replace("weight", suffix)] for m in matrices]
                for e in range(EXPERTS)
            ]
            key = whole if suffix == "weight" else f"{whole}_{suffix}"
            scalars = suffix == "weight_scale_2"
            kept[key] = torch.stack([(torch.stack if scalars else torch.cat)(end) for end in ends])
    return kept


@pytest.mark.parametrize("rank", [0, 1])
def test_stacks_hold_the_same(rank: int) -> None:
    tensors = checkpoint("nvfp4")
    expected, _ = loaded(tensors, 16, rank, 2)
    found, _ = loaded(stack(tensors), 16, rank, 2)
    for (name, one), other in zip(
        found.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("stored", ["mxfp4", "nvfp4"])
def test_containers_and_order_do_not_matter(stored: str) -> None:
    tensors = checkpoint(stored)
    group = 32 if stored == "mxfp4" else 16
    expected = experts_of(loaded(tensors, group)[0]).state_dict()
    parts = ("codes", "scales", "factors")
    assert expected.keys() == {f"{name}.{part}" for name in ("w13", "w2") for part in parts}
    for container in (torch.uint8, torch.int8):
        as_bytes = {
            name: tensor.view(container) if tensor.itemsize == 1 else tensor
            for name, tensor in reversed(tensors.items())
        }
        found = experts_of(loaded(as_bytes, group)[0]).state_dict()
        assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_what_was_packed_is_loaded_anew() -> None:
    tensors = checkpoint("mxfp4")
    lm, _ = loaded(tensors, 32)
    w2 = experts_of(lm).w2
    expected, w2.packed = w2.codes.clone(), True
    w2.codes.zero_()
    weights.load(lm, tensors.items(), ONE_LAYER, rank=0, size=1)
    assert torch.equal(w2.codes, expected) and not w2.packed


# ---- what is refused ----

CODES, SCALE = MATRIX.format(1, "w2"), "layers.0.ffn.experts.1.w2.{}"


def poke(name: str, byte: int) -> Callable[[Tensors], None]:
    """Sets the last byte, which is of the last rank."""

    def change(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8).view(-1)[-1] = byte

    return change


def put(name: str, value: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.full_like(tensors[name], value)})


def without_codes(tensors: Tensors) -> None:
    """A factor that is infinite, and nothing that it multiplies."""
    tensors[CODES.replace("weight", "weight_packed")].zero_()
    put(SCALE.format("weight_global_scale"), 1e-45)(tensors)


def large_scale(tensors: Tensors) -> None:
    """6 times 2^127."""
    poke(SCALE.format("scale"), 254)(tensors)
    poke(CODES, 0x77)(tensors)


SPOILT: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "NaN among UE8M0 scales": (
        *("mxfp4", poke(SCALE.format("scale"), 255)),
        r"1\.w2\.scale \(expert 1\): 1 of 64 values are NaN or infinite",
    ),
    "NaN among E4M3 scales": (
        *("nvfp4", poke(SCALE.format("weight_scale"), 0xFF)),
        r"1\.w2\.weight_scale \(expert 1\): 1 of 128 values are NaN or infinite",
    ),
    "too large a scale": (
        *("mxfp4", large_scale),
        r"1\.w2\.weight \(expert 1\): values too large",
    ),
    "too large a factor": (
        *("nvfp4", put(SCALE.format("weight_scale_2"), 3e38)),
        r"1\.w2\.weight \(expert 1\): values too large",
    ),
    "NaN as factor": (
        *("nvfp4", put(SCALE.format("weight_scale_2"), torch.nan)),
        r"weight_scale_2: expected a positive number, found nan",
    ),
    "no reciprocal": (
        *("packed", put(SCALE.format("weight_global_scale"), 0.0)),
        r"weight_global_scale: expected a positive number, found 0\.0",
    ),
    "the reciprocal of next to nothing": (
        *("packed", without_codes),
        r"its weight_global_scale is too small",
    ),
}


@pytest.mark.parametrize(("stored", "spoil", "told"), SPOILT.values(), ids=SPOILT)
def test_values_that_are_not_finite_are_named(
    stored: str, spoil: Callable[[Tensors], None], told: str
) -> None:
    tensors = checkpoint(stored)
    spoil(tensors)
    with pytest.raises(CheckpointError, match=told):
        loaded(tensors, 32 if stored == "mxfp4" else 16, 1, 2)


def test_the_largest_scale_of_zeros_is_no_fault() -> None:
    """2^127 times 6 would be infinite; nothing here is."""
    tensors = checkpoint("mxfp4")
    tensors[CODES].view(torch.uint8).zero_()
    poke(SCALE.format("scale"), 254)(tensors)
    assert experts_of(loaded(tensors, 32)[0]).w2.scales[1].max() == 254


@pytest.mark.parametrize("stored", [None, "fp8", "nvfp4"])
def test_other_experts_than_the_config_says_are_refused(stored: str | None) -> None:
    held = {"fp8": "FP8", "nvfp4": "NVFP4"}.get(stored or "", "F32")
    with pytest.raises(CheckpointError) as refused:
        loaded(checkpoint(stored), 32)
    told = str(refused.value)
    assert "6 routed experts in another format than the model was built for" in told
    assert "SGLANG_DSV4_PRECISION=routed_experts=bf16" in told
    assert f"layers.0.ffn.experts.0.w1.weight: {held}" in told


# ---- packing ----


def test_every_stack_is_packed_by_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, _ = loaded(checkpoint("mxfp4"), 32)
    packed: list[FP4Matrices] = []
    module = SimpleNamespace(pack=packed.append)
    monkeypatch.setattr(backends, "importlib", SimpleNamespace(import_module=lambda name: module))
    backends.pack_weights(CPU_OPS, lm)
    experts = experts_of(lm)
    assert packed == [experts.w13, experts.w2]
    del module.pack
    backends.pack_weights(CPU_OPS, lm)  # the reference reads codes as they are


def test_four_bits_are_those_of_two_codes_in_a_byte() -> None:
    assert FOUR_BITS == {MXFP4: 32, NVFP4: 16, PACKED: 16}
