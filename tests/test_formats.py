"""Every format that circulates gives the parameters of its dense twin, bit for bit."""

import contextlib
import json
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_files import (
    SIZES,
    FakeModel,
    Tensors,
    assert_same,
    dense_twin,
    headers_of,
    read,
    shapes_of,
    share,
    write,
    write_holes,
)
from sglang_dsv4 import cli_make_tiny, format_claims, formats, quantise, tiny_formats, weights
from sglang_dsv4.checkpoint import Header
from sglang_dsv4.cli_make_tiny import write_checkpoint
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import Found, Part, Stored, TensorFormat
from sglang_dsv4.tiny_formats import RECIPES
from sglang_dsv4.weights import CheckpointError, LoadReport, check, load

CONFIG = DSV4Config.from_dict(cli_make_tiny.shipped_config("tiny", "bfloat16"))
CONFIG_OF_PRO = DSV4Config.from_dict(cli_make_tiny.shipped_config("pro-2l", "bfloat16"))
FORMATS = [name for name in RECIPES if name != "bf16"]
E4M3, E8M0, BYTES = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8


class Made(dict[str, Path]):
    """Format -> folder of the tiny checkpoint in it, made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> Path:
        write_checkpoint(self.root / name, preset="tiny", format=name)
        self[name] = self.root / name
        return self[name]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("formats"))


@pytest.fixture(scope="module")
def vendor(made: Made) -> Tensors:
    return dict(read(made["vendor"]))


@pytest.fixture(scope="module")
def nvfp4(made: Made) -> Tensors:
    return dict(read(made["nvfp4-all"]))


def loaded(
    tensors: Mapping[str, Tensor],
    rank: int = 0,
    size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensors, LoadReport]:
    model = FakeModel(shapes_of(CONFIG, size), dtype)
    report = load(model, tensors.items(), CONFIG, rank=rank, size=size)
    return model.values(), report


def refusals(tensors: Mapping[str, Tensor], folder: Path) -> list[str]:
    """The messages with which `load` and `check` refuse the tensors."""
    write(folder, tensors)
    with pytest.raises(CheckpointError) as by_load:
        loaded(tensors)
    with pytest.raises(CheckpointError) as by_check:
        check(folder, CONFIG)
    return [str(by_load.value), str(by_check.value)]


# ---- whole checkpoints ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_gives_the_values_of_its_dense_twin(
    name: str, dtype: torch.dtype, made: Made
) -> None:
    tensors = dict(read(made[name]))
    twin = dense_twin(tensors.items(), dtype)
    assert len(twin) == 359 < len(tensors)
    expected, _ = loaded(twin, dtype=dtype)
    assert all(values.isfinite().all() for values in expected.values())
    found, report = loaded(tensors, dtype=dtype)
    assert_same(found, expected)
    unused = sum(bool(re.search(r"input_(global_)?scale$", tensor)) for tensor in tensors)
    assert report.tensors == len(tensors) - unused
    assert report.skipped == ({"activation scale": unused} if unused else {})
    summary = check(made[name], CONFIG)
    assert (summary.tensors, summary.skipped) == (report.tensors, report.skipped)
    assert summary.values == 7_128_471
    size = (made[name] / "model.safetensors").stat().st_size
    assert 0 < size - summary.bytes - 4 * unused < 200_000  # the header


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("name", ["vendor", "nvfp4-all", "compressed-tensors-w4a4"])
def test_ranks_hold_their_shares(name: str, size: int, made: Made) -> None:
    """With 8 ranks a share of an expert is 8 channels: blocks of 16, 32 and 128 are cut."""
    tensors = dict(read(made[name]))
    whole, _ = loaded(tensors)
    for rank in (0, size // 2, size - 1):
        found, _ = loaded(tensors, rank, size)
        assert_same(found, {n: share(n, values, rank, size) for n, values in whole.items()})


@pytest.mark.parametrize("name", ["vendor", "compressed-tensors-w4a4"])
def test_chunks_give_what_the_whole_gives(
    name: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's share of some matrices begins and ends within a block, and so do chunks of it."""
    tensors = dict(read(made[name]))
    expected, _ = loaded(tensors, 1, 8)
    monkeypatch.setattr(formats, "CHUNK", 1 << 12)
    assert_same(loaded(tensors, 1, 8)[0], expected)


def stored(*parts: tuple[Part, Tensor]) -> Stored:
    """A weight as it is while it loads."""
    weight = Stored("w.weight")
    for part, tensor in parts:
        header = Header(formats.DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        weight.add(part, Found(f"w.{part.name}", header, tensor))
    return weight


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 4), ("meta", 1)])
def test_chunks_are_of_the_size_for_the_device(
    device: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory stands for a GPU, which computes as much as it can at once."""
    seen: list[torch.device] = []

    def seen_by(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: seen.extend({t.device for t in given}) or function(*given)

    layout = formats.LAYOUTS[TensorFormat.FP8]
    watched = replace(layout, dequantise=seen_by(layout.dequantise))
    monkeypatch.setitem(formats.LAYOUTS, TensorFormat.FP8, watched)
    monkeypatch.setattr(quantise, "nvfp4", seen_by(quantise.nvfp4))
    rows, columns = range(512), range(2048)
    region = torch.empty(512, 2048, device=device)
    codes, scales = torch.ones(region.shape).to(E4M3), torch.ones(4, 16)
    fp8 = stored((Part.WEIGHT, codes), (Part.SCALE, scales))
    fp8.fill(region, rows, columns, matrix=0, matrices=1)
    assert seen == [torch.device(device)] * chunks
    seen.clear()
    dense = stored((Part.WEIGHT, torch.ones(region.shape)))
    weights._fill_rounded(region, dense, rows, columns)
    assert seen == [torch.device(device)] * chunks
    expert = CONFIG_OF_PRO.hidden_size * CONFIG_OF_PRO.moe_intermediate_size
    assert formats.chunk_of(torch.device("cuda")) >= expert > formats.chunk_of(torch.device("cpu"))


@pytest.mark.parametrize("name", ["vendor", "nvfp4-all"])
def test_the_order_of_tensors_does_not_matter(name: str, made: Made) -> None:
    tensors = list(read(made[name]))
    expected, report = loaded(dict(tensors))
    scales_first = sorted(tensors, key=lambda item: "scale" not in item[0])
    for order in (tensors[::-1], scales_first, scales_first[::-1]):
        found, again = loaded(dict(order))
        assert_same(found, expected)
        assert again == report
    random.Random(0).shuffle(tensors)
    assert_same(loaded(dict(tensors))[0], expected)


def test_parts_may_lie_in_different_files(made: Made, nvfp4: Tensors, tmp_path: Path) -> None:
    write(tmp_path, nvfp4, shards=7)
    summary = check(tmp_path, CONFIG)
    assert summary.shards == 7 and summary.tensors == len(nvfp4) - 253
    model = FakeModel(shapes_of(CONFIG), torch.bfloat16)
    load(model, read(tmp_path), CONFIG, rank=0, size=1)
    assert_same(model.values(), loaded(nvfp4)[0])


def test_gate_and_up_keep_their_own_global_scales(nvfp4: Tensors) -> None:
    """They lie in one parameter; a common factor would be wrong by the ratio of the two."""
    expert = "model.layers.4.mlp.experts.3"
    gate, up = f"{expert}.gate_proj.weight_scale_2", f"{expert}.up_proj.weight_scale_2"
    changed = nvfp4 | {gate: nvfp4[gate] * 3}
    assert changed[gate] != changed[up]
    before, after = loaded(nvfp4, dtype=torch.float32)[0], loaded(changed, dtype=torch.float32)[0]
    name = "model.layers.4.ffn.experts.w13"
    width = CONFIG.moe_intermediate_size
    ratio = after[name][3] / before[name][3]
    assert (ratio[:width].nan_to_num(3) - 3).abs().max() < 1e-6
    assert torch.equal(after[name][3, width:], before[name][3, width:])
    assert_same(*({n: t for n, t in v.items() if n != name} for v in (before, after)))


def test_scales_of_activations_change_nothing(nvfp4: Tensors) -> None:
    dummies = {n: torch.tensor(torch.nan) for n in nvfp4 if n.endswith("input_scale")}
    assert len(dummies) == 253
    assert_same(loaded(nvfp4 | dummies)[0], loaded(nvfp4)[0])
    without, report = loaded({n: t for n, t in nvfp4.items() if n not in dummies})
    assert_same(without, loaded(nvfp4)[0])
    assert not report.skipped


# ---- spellings and containers ----


def renamed(tensors: Tensors, pattern: str, to: str) -> Tensors:
    return {re.sub(pattern, to, name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("suffix", ["scale", "weight_scale", "weight_scale_inv", "scale_inv"])
def test_every_suffix_of_scales(suffix: str, vendor: Tensors, tmp_path: Path) -> None:
    tensors = renamed(vendor, r"\.scale$", f".{suffix}")
    assert_same(loaded(tensors)[0], loaded(vendor)[0])
    write(tmp_path, tensors)
    assert check(tmp_path, CONFIG).formats["MXFP4"] == 168


@pytest.mark.parametrize("container", [torch.uint8, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("name", ["vendor", "nvfp4-all", "compressed-tensors-w4a16"])
def test_containers_and_shapes_of_scalars(
    name: str, shape: tuple[int, ...], container: torch.dtype, made: Made, tmp_path: Path
) -> None:
    tensors = dict(read(made[name]))
    for key, tensor in tensors.items():
        if tensor.dtype in (torch.uint8, torch.int8, E8M0) or (
            tensor.dtype is E4M3 and key.endswith("scale")
        ):
            tensors[key] = tensor.view(container)
        elif key.endswith(("scale_2", "global_scale", "input_scale")):
            tensors[key] = tensor.reshape(shape)
    found, _ = loaded(tensors)
    assert_same(found, loaded(dict(read(made[name])))[0])
    write(tmp_path, tensors)
    assert check(tmp_path, CONFIG).formats == check(made[name], CONFIG).formats


def stacked(tensors: Tensors, of: tuple[int, ...] | None) -> Tensors:
    """The experts of a layer in two stacks; of: the shape of their global scales, all alike."""
    kept = {n: t for n, t in tensors.items() if ".mlp.experts." not in n}
    for layer in range(7):
        experts = f"model.layers.{layer}.mlp.experts"
        for stack, matrices in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj",) * 2):
            matrices = matrices if isinstance(matrices, tuple) else (matrices,)
            for suffix in ("weight", "weight_scale", "weight_scale_2"):
                parts = [
                    [tensors[f"{experts}.{e}.{m}.{suffix}"] for m in matrices] for e in range(8)
                ]
                name = f"{experts}.{stack}" + f"_{suffix}" * (suffix != "weight")
                if suffix != "weight_scale_2":
                    kept[name] = torch.stack([torch.cat(part) for part in parts])
                elif of is None:
                    kept[name] = torch.tensor(parts)
                else:
                    kept[name] = torch.full(of, 2.0**-9)
    return kept


def test_stacked_experts_with_a_factor_for_each_matrix(nvfp4: Tensors, tmp_path: Path) -> None:
    tensors = stacked(nvfp4, None)
    assert tensors["model.layers.0.mlp.experts.gate_up_proj_weight_scale_2"].shape == (8, 2)
    expected, _ = loaded(nvfp4)
    assert_same(loaded(tensors)[0], expected)
    for rank in range(2):
        found, _ = loaded(tensors, rank, 2)
        assert_same(found, {n: share(n, values, rank) for n, values in expected.items()})
    write(tmp_path, tensors)
    assert check(tmp_path, CONFIG).values == 7_128_471


@pytest.mark.parametrize("shape", [(), (1,), (8,), (8, 1, 1)])
def test_stacked_experts_with_fewer_factors(shape: tuple[int, ...], nvfp4: Tensors) -> None:
    alike = {
        n: torch.tensor(2.0**-9) if ".experts." in n and n.endswith("scale_2") else t
        for n, t in nvfp4.items()
    }
    assert_same(loaded(stacked(nvfp4, shape))[0], loaded(alike)[0])


def test_a_block_of_a_stack_may_reach_from_gate_to_up(nvfp4: Tensors, tmp_path: Path) -> None:
    """Each is of 64 rows, so that one FP8 block of 128 holds both."""
    tensors = stacked(nvfp4, None)
    name = "model.layers.3.mlp.experts.gate_up_proj"
    codes = torch.randn(8, 128, 128).to(E4M3)
    scale = torch.arange(8).exp2().reshape(8, 1, 1)
    kept = {n: t for n, t in tensors.items() if not n.startswith(name)}
    changed = kept | {name: codes, f"{name}_weight_scale_inv": scale}
    expected = codes.float() * scale
    found, _ = loaded(changed, dtype=torch.float32)
    assert torch.equal(found["model.layers.3.ffn.experts.w13"], expected)
    halves, _ = loaded(changed, 1, 2, dtype=torch.float32)
    parameter = "model.layers.3.ffn.experts.w13"
    assert torch.equal(halves[parameter], share(parameter, expected, 1))
    write(tmp_path, changed)
    assert check(tmp_path, CONFIG).formats["FP8"] == 1


def test_draft_blocks_may_have_another_format(nvfp4: Tensors, tmp_path: Path) -> None:
    draft = tiny_formats.encode("mxfp4", "mtp.0.ffn.experts.0.w1.weight", torch.randn(64, 128))
    draft |= {"model.layers.7.mlp.experts.0.up_proj.weight_packed": torch.zeros(64, 64).byte()}
    found, report = loaded(nvfp4 | draft)
    assert_same(found, loaded(nvfp4)[0])
    assert report.skipped == {"MTP": 2, "NextN layer": 1, "activation scale": 253}
    write(tmp_path, nvfp4 | draft)
    assert check(tmp_path, CONFIG).skipped == report.skipped


def test_formats_may_be_mixed_within_a_component(vendor: Tensors, tmp_path: Path) -> None:
    """The format is each weight's own: one layer's queries in NVFP4, one dense, others FP8."""
    values = torch.randn(4096, 64)
    first, second = "layers.0.attn.wq_b.weight", "layers.1.attn.wq_b.weight"
    kept = {n: t for n, t in vendor.items() if not n.startswith((first[:-7], second[:-7]))}
    mixed = kept | tiny_formats.encode("nvfp4", first, values) | {second: values.bfloat16()}
    found, report = loaded(mixed)
    assert torch.equal(found["model." + second], values.bfloat16())
    assert 0 < (found["model." + first] - values).abs().mean() < 0.1
    lines = [line for line in report.components if line.startswith("attn.wq_b:")]
    assert lines == [
        "attn.wq_b: BF16 in the checkpoint -> BF16 at load, 1 layer",
        "attn.wq_b: FP8 in the checkpoint -> BF16 at load, 5 layers",
        "attn.wq_b: NVFP4 in the checkpoint -> BF16 at load, 1 layer",
    ]
    write(tmp_path, mixed)
    assert check(tmp_path, CONFIG).formats["NVFP4"] == 1


def test_pruned_experts(vendor: Tensors, tmp_path: Path) -> None:
    """Five of eight experts, in a config that says so, and in one that does not."""
    raw = cli_make_tiny.shipped_config("tiny", "bfloat16") | {"n_routed_experts": 5}
    config = DSV4Config.from_dict(raw)
    pruned = {n: t for n, t in vendor.items() if not re.search(r"\.experts\.[567]\.", n)}
    for layer in range(7):
        gate = f"layers.{layer}.ffn.gate."
        pruned[gate + "weight"] = vendor[gate + "weight"][:5]
        if gate + "bias" in vendor:
            pruned[gate + "bias"] = vendor[gate + "bias"][:5]
        else:
            pruned[gate + "tid2eid"] = vendor[gate + "tid2eid"] % 5
    write(tmp_path, pruned)
    assert check(tmp_path, config).formats["MXFP4"] == 7 * 5 * 3
    model = FakeModel(shapes_of(config), torch.bfloat16)
    load(model, pruned.items(), config, rank=0, size=1)
    expected = loaded(vendor)[0]["model.layers.3.ffn.experts.w13"][:5]
    assert torch.equal(model.values()["model.layers.3.ffn.experts.w13"], expected)
    with pytest.raises(CheckpointError) as refused:
        check(tmp_path, CONFIG)
    assert "layers.0.ffn.gate.weight: expected [8, 128], found [5, 128]" in str(refused.value)
    assert "63 missing tensors" in str(refused.value)


# ---- faults ----

QUERY = "layers.0.attn.wq_a"  # FP8
EXPERT = "layers.4.ffn.experts.1.w2"  # MXFP4
GATE = "model.layers.4.mlp.experts.1.gate_proj"  # NVFP4


def drop(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


def change(name: str, by: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: by(tensors[name])}


def add(name: str, tensor: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensor}


ONE = torch.ones(1, 1)
FAULTS: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "FP8 without scale": (
        *("vendor", drop(f"{QUERY}.scale")),
        f"1 quantised weights whose scales are missing:\n  {QUERY}.weight (FP8): needs a scale of"
        " blocks; has nothing beside it",
    ),
    "MXFP4 without scale": (
        *("vendor", drop(f"{EXPERT}.scale")),
        f"{EXPERT}.weight (I8, format not known): needs a scale of blocks; has nothing beside it",
    ),
    "NVFP4 without its global scale": (
        *("nvfp4-all", drop(f"{GATE}.weight_scale_2")),
        f"{GATE}.weight (NVFP4): needs a weight_scale_2 (or weight_global_scale); has"
        f" {GATE}.input_scale, {GATE}.weight_scale beside it",
    ),
    "NVFP4 without scales of groups": (
        *("nvfp4-all", drop(f"{GATE}.weight_scale")),
        f"{GATE}.weight (NVFP4): needs a scale of blocks; has {GATE}.input_scale,"
        f" {GATE}.weight_scale_2 beside it",
    ),
    "scale without weight": (
        *("vendor", drop(f"{QUERY}.weight")),
        f"1 unknown tensors:\n  {QUERY}.scale ({QUERY}.weight is not there)",
    ),
    "two scales": (
        *("vendor", add(f"{QUERY}.weight_scale", torch.ones(1, 1))),
        "1 tensors that come twice",
    ),
    "FP8 scale cut short": (
        *("vendor", change("layers.0.attn.wq_b.scale", lambda t: t[:-1])),
        "layers.0.attn.wq_b.weight: FP8 scale of 128x128 blocks: needs float8_e8m0fnu or uint8 or"
        " int8 or float32 or bfloat16 or float16 [32, 1], contiguous; has float8_e8m0fnu [31, 1]",
    ),
    "FP8 scale of another dtype": (
        *("vendor", change(f"{QUERY}.scale", lambda t: torch.ones(1, 1, dtype=torch.int32))),
        f"{QUERY}.weight: FP8 scale of 128x128 blocks: needs",
    ),
    "MXFP4 scale of fewer groups": (
        *("vendor", change(f"{EXPERT}.scale", lambda t: t[:, :1].contiguous())),
        f"{EXPERT}.weight: MXFP4 scale of groups of 32: needs float8_e8m0fnu or uint8 or int8"
        " [128, 2], contiguous; has float8_e8m0fnu [128, 1]",
    ),
    "NVFP4 scale of fewer rows": (
        *("nvfp4-all", change(f"{GATE}.weight_scale", lambda t: t[1:])),
        f"{GATE}.weight: NVFP4 scale of groups of 16: needs float8_e4m3fn or uint8 or int8 [64, 8],"
        " contiguous; has float8_e4m3fn [63, 8]",
    ),
    "NVFP4 scale in FP32": (
        *("nvfp4-all", change(f"{GATE}.weight_scale", lambda t: t.float())),
        f"{GATE}.weight: NVFP4 scale of groups of 16: needs",
    ),
    "a global scale for each row": (
        *("nvfp4-all", change(f"{GATE}.weight_scale_2", lambda t: t.expand(64).contiguous())),
        f"{GATE}.weight: NVFP4 global scale: needs float32, 1 number; has float32 [64]",
    ),
    "codes cut short": (
        *("vendor", change(f"{EXPERT}.weight", lambda t: t[:, :-4].contiguous())),
        f"{EXPERT}.weight: expected [128, 64], found [128, 56], 2 in a byte",
    ),
    "not packed": (
        *("vendor", change(f"{EXPERT}.weight", lambda t: t.repeat(1, 2))),
        f"{EXPERT}.weight: expected [128, 64], found [128, 128], 2 in a byte",
    ),
    "a norm in FP8": (
        *("vendor", lambda t: t | {"norm.weight": t["norm.weight"].to(E4M3), "norm.scale": ONE}),
        "1 quantised tensors that the model keeps dense:\n  norm.weight: FP8 (F8_E4M3)",
    ),
    "hyper-connections in NVFP4": (
        *("vendor", lambda t: drop("hc_head_fn")(t) | {"hc_head_fn": torch.zeros(4, 256).byte()}),
        "hc_head_fn",
    ),
    "E5M2": (
        *("vendor", change(f"{QUERY}.weight", lambda t: t.float().to(torch.float8_e5m2))),
        f"1 unsupported formats (dense, FP8, MXFP4 and NVFP4 weights can be loaded):\n"
        f"  {QUERY}.weight: format not known (F8_E5M2)",
    ),
    "a table that is quantised": (
        *("vendor", change("layers.0.ffn.gate.tid2eid", lambda t: t.byte())),
        "layers.0.ffn.gate.tid2eid",
    ),
    "MXFP4 with a global scale": (
        *("vendor", add(f"{EXPERT}.weight_scale_2", torch.tensor(1.0))),
        f"{EXPERT}.weight",
    ),
    "scales of channels": (
        *("vendor", change(f"{EXPERT}.scale", lambda t: torch.ones(128, 1))),
        f"{EXPERT}.weight: format not known (I8)",
    ),
    "packed and not": (
        *("compressed-tensors-w4a16", add(f"{GATE}.weight", torch.ones(64, 128))),
        "1 tensors that come twice",
    ),
}


@pytest.mark.parametrize(("name", "damage", "told"), FAULTS.values(), ids=FAULTS)
def test_what_does_not_fit_is_told(
    name: str,
    damage: Callable[[Tensors], Tensors],
    told: str,
    made: Made,
    tmp_path: Path,
) -> None:
    for message in refusals(damage(dict(read(made[name]))), tmp_path):
        assert told in message
        assert name == "vendor" or "unknown tensors" not in message


def poke(name: str, byte: int) -> Callable[[Tensors], Tensors]:
    """Set the last element of a tensor of bytes."""

    def changed(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy.view(BYTES).view(-1)[-1] = byte
        return copy

    return change(name, changed)


SPOILT: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "NaN among FP8 codes": (
        *("vendor", poke(f"{QUERY}.weight", 0x7F)),
        f"{QUERY}.weight: 1 of 8192 values are NaN or infinite: the checkpoint is damaged",
    ),
    "NaN among UE8M0 scales": (
        *("vendor", poke(f"{EXPERT}.scale", 255)),
        f"{EXPERT}.scale (expert 1): 1 of 256 values are NaN or infinite",
    ),
    "NaN among E4M3 scales": (
        *("nvfp4-all", poke(f"{GATE}.weight_scale", 255)),
        f"{GATE}.weight_scale (expert 1): 1 of 512 values are NaN or infinite",
    ),
    "NaN as global scale": (
        *("nvfp4-all", change(f"{GATE}.weight_scale_2", lambda t: t * torch.nan)),
        f"{GATE}.weight_scale_2: expected a positive number, found nan",
    ),
    "negative global scale": (
        *("nvfp4-all", change(f"{GATE}.weight_scale_2", lambda t: t * 0 - 1)),
        f"{GATE}.weight_scale_2: expected a positive number, found -1.0",
    ),
    "reciprocal of 0": (
        *("compressed-tensors-w4a16", change(f"{GATE}.weight_global_scale", lambda t: t * 0)),
        f"{GATE}.weight_global_scale: expected a positive number, found 0.0",
    ),
    "values too large": (
        *("nvfp4-all", change(f"{GATE}.weight_scale_2", lambda t: t * 0 + 3e38)),
        f"{GATE}.weight (expert 1): values too large for the model's torch.bfloat16",
    ),
}


@pytest.mark.parametrize(("name", "damage", "told"), SPOILT.values(), ids=SPOILT)
def test_values_that_are_not_finite_are_named(
    name: str, damage: Callable[[Tensors], Tensors], told: str, made: Made
) -> None:
    tensors = damage(dict(read(made[name])))
    with pytest.raises(CheckpointError) as refused:
        loaded(tensors)
    assert told in str(refused.value)


def test_values_of_a_stack_that_are_not_finite_are_named(nvfp4: Tensors) -> None:
    tensors = stacked(nvfp4, None)
    name = "model.layers.4.mlp.experts.down_proj_weight_scale"
    tensors[name].view(BYTES)[5, 0, 0] = 255
    with pytest.raises(CheckpointError) as refused:
        loaded(tensors)
    assert f"{name} (expert 5): 1 of 4096 values are NaN or infinite" in str(refused.value)


# ---- what is told of a sound checkpoint ----

FLOOR = (
    *("attn.compressor.wgate", "attn.compressor.wkv", "attn.indexer.compressor.wgate"),
    *("attn.indexer.compressor.wkv", "attn.indexer.weights_proj", "ffn.gate"),
)


def test_each_component_has_a_line(made: Made, nvfp4: Tensors) -> None:
    report = loaded(nvfp4)[1]
    names = [line.partition(":")[0] for line in report.components]
    assert len(names) == len(set(names)) == 20
    quantised = "NVFP4 in the checkpoint -> BF16 at load"
    assert f"attn.compressor.wkv: {quantised}, 5 layers (below the floor)" in report.components
    assert f"attn.wkv: {quantised}, 7 layers" in report.components
    assert f"ffn.experts.*.w1: {quantised}, 7 layers" in report.components
    assert "head: BF16 in the checkpoint -> BF16 at load" in report.components
    assert all(line in str(report) for line in report.components)
    assert report.converted == {"NVFP4 to BF16": 253}
    in_fp32 = loaded(nvfp4, dtype=torch.float32)[1]
    assert f"attn.wkv: {quantised.replace('BF16', 'F32')}, 7 layers" in in_fp32.components


def test_violations_of_the_floor_are_reported(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    summary = check(made["nvfp4-all"], CONFIG)
    assert tuple(line.partition(":")[0] for line in summary.below_the_floor) == FLOOR
    assert "below the floor (compressor_kv: bf16)" in summary.below_the_floor[1]
    assert all(line in str(summary) and line in caplog.text for line in summary.below_the_floor)
    for name in set(FORMATS) - {"nvfp4-all"}:
        assert check(made[name], CONFIG).below_the_floor == []


def test_a_head_below_the_floor_is_reported(vendor: Tensors, tmp_path: Path) -> None:
    head = tiny_formats.encode("fp8", "head.weight", vendor["head.weight"])
    write(tmp_path, vendor | head)
    (line,) = check(tmp_path, CONFIG).below_the_floor
    assert line.startswith("head: FP8 in the checkpoint: below the floor (lm_head: bf16)")


def test_what_make_tiny_says_is_so(made: Made) -> None:
    for name in RECIPES:
        expected = []
        if name == "nvfp4-experts":  # as in NVIDIA's releases
            expected = ["config.json: it makes every Linear NVFP4, some are FP8"]
        assert check(made[name], CONFIG).contradictions == expected, name


Said = dict[str, Any]
CLAIMS: dict[str, tuple[str, Said, str]] = {
    "nothing said": ("vendor", {}, "says nothing of quantisation, the tensors are FP8 and MXFP4"),
    "no scale_fmt": ("vendor", {"quant_method": "fp8"}, ""),
    "all FP8": ("bf16", {"quant_method": "fp8"}, "it says FP8, no tensor is (none is quantised)"),
    "NVFP4 experts": (
        *("vendor", {"quant_method": "fp8", "moe_quant_algo": "NVFP4"}),
        "it says NVFP4, no tensor is (FP8 and MXFP4)",
    ),
    "only FP8": (
        *("nvfp4-experts", {"quant_method": "fp8"}),
        "it says FP8, some tensors are NVFP4",
    ),
    "blocks": (
        *("vendor", {"quant_method": "fp8", "weight_block_size": [64, 64]}),
        "weight_block_size is [64, 64], blocks are 128x128",
    ),
    "groups": (
        *("nvfp4-all", {"quant_algo": "NVFP4", "group_size": 32}),
        "group_size is 32, groups of NVFP4 are of 16",
    ),
    "ignored": (
        *("nvfp4-all", {"quant_algo": "NVFP4", "ignore": ["*.mlp.gate"]}),
        "it leaves *.mlp.gate unquantised, model.layers.0.mlp.gate.weight is NVFP4",
    ),
    "ignored by a regular expression": (
        *("nvfp4-all", {"quant_algo": "NVFP4", "ignore": [r"re:.*\.\d+\.mlp\.gate$"]}),
        r"it leaves re:.*\.\d+\.mlp\.gate$ unquantised, model.layers.0.mlp.gate.weight is NVFP4",
    ),
    "nonsense": ("vendor", {"quant_method": 3, "ignore": ["re:("], "config_groups": []}, ""),
}


@pytest.mark.parametrize(("name", "said", "told"), CLAIMS.values(), ids=CLAIMS)
def test_contradictions_of_the_config_are_told(
    name: str, said: Said, told: str, made: Made, tmp_path: Path
) -> None:
    folder = shutil.copytree(made[name], tmp_path / "copy")
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": said or None}))
    lines = check(folder, CONFIG).contradictions
    assert len(lines) == bool(told), lines
    assert not told or told in lines[0]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Fails what would go on for ever; matching looks for signals."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "pattern",
    [
        r"re:(?:.|.)*\.\d$",  # two ways to read every character
        r"re:(?:(?:.{0,99}){0,99}){0,99}\.\d$",
        "re:" + "a|" * 500,  # matched at once, but one of millions would be compiled for minutes
    ],
    ids=lambda pattern: pattern[:20],
)
def test_patterns_that_would_take_for_ever_are_told(
    pattern: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bounded time; what else is ignored is compared all the same."""
    monkeypatch.setattr(format_claims, "MATCHING", 0.2)
    folder = shutil.copytree(made["nvfp4-all"], tmp_path / "copy")
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    said = {"quant_algo": "NVFP4", "ignore": [pattern, "*.mlp.gate"]}
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": said}))
    with time_limit(20):
        ignored, unchecked = check(folder, CONFIG).contradictions
    assert "it leaves *.mlp.gate unquantised" in ignored
    assert unchecked == (
        f"config.json: what {pattern[:60]} would leave unquantised takes too long: not checked"
    )


def test_experts_of_another_dtype_than_said(made: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(made["fp8-base"], tmp_path / "copy")
    raw = json.loads((folder / "config.json").read_text()) | {"expert_dtype": "fp4"}
    (folder / "config.json").write_text(json.dumps(raw))
    assert check(folder, CONFIG).contradictions == [
        "config.json: expert_dtype is fp4, the experts are FP8"
    ]


# ---- the published sizes ----

FLASH, PRO = "flash-2l", "pro-2l"
PUBLISHED = {
    FLASH: (43, 256, [0, 0] + [4, 128] * 20 + [4, 0], 159_609_485_896, 69_187, 1_575),
    PRO: (61, 384, [128, 128] + [4, 128] * 29 + [4, 0], 864_704_792_696, 145_116, 2_343),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_tensors_and_bytes(preset: str, tmp_path: Path) -> None:
    """Headers of the whole release, from our table and our formats, and what `check` counts."""
    layers, experts, ratios, size, count, drafted = PUBLISHED[preset]
    raw = cli_make_tiny.shipped_config(preset, "bfloat16") | {
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "compress_ratios": ratios,
        "num_hash_layers": 3,
    }
    config = DSV4Config.from_dict(raw)
    headers = headers_of(config, RECIPES["vendor"])
    draft = DSV4Config.from_dict(
        raw | {"num_hidden_layers": 1, "compress_ratios": [0, 0]} | {"num_hash_layers": 0}
    )
    block = headers_of(draft, RECIPES["vendor"])
    block = {n.replace("layers.0.", "mtp.0."): h for n, h in block.items() if "layers.0." in n}
    hidden = config.hidden_size
    for name in ("e_proj", "h_proj"):
        block[f"mtp.0.{name}.weight"] = ("F8_E4M3", (hidden, hidden))
        block[f"mtp.0.{name}.scale"] = ("F8_E8M0", (hidden // 128, hidden // 128))
    block |= {f"mtp.0.{n}.weight": ("BF16", (hidden,)) for n in ("enorm", "hnorm", "norm")}
    block |= {f"mtp.0.{n}": h for n, h in headers.items() if n.startswith("hc_head_")}
    write_holes(tmp_path, headers | block, lambda name: (name + ".").split(".")[1])
    summary = check(tmp_path, config)
    assert len(block) == drafted and summary.skipped == {"MTP": drafted}
    assert summary.tensors == count - drafted
    aside = sum(SIZES[dtype] * torch.Size(shape).numel() for dtype, shape in block.values())
    assert summary.bytes + aside == size
    assert summary.contradictions == [
        "config.json says nothing of quantisation, the tensors are FP8 and MXFP4"
    ]
