"""Conversion to NVFP4: values by arithmetic of their own, interruption, and what is refused."""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoint_files import FakeModel, Tensors, assert_same, dense_twin, read, shapes_of, write
from sglang_dsv4 import cli_make_tiny, convert_files, quantise
from sglang_dsv4 import convert as convert_module
from sglang_dsv4.cli import main
from sglang_dsv4.cli_make_tiny import write_checkpoint
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.convert import convert
from sglang_dsv4.convert_plan import Options
from sglang_dsv4.tensor_table import expected_tensors
from sglang_dsv4.weights import CheckpointError, check, load

RAW = cli_make_tiny.shipped_config("tiny", "bfloat16")
RAW |= {"num_hidden_layers": 4, "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 4, 0]}
CONFIG = DSV4Config.from_dict(RAW)
FLOOR = r"(^|\.)(head|ffn\.gate|compressor\.(wkv|wgate)|weights_proj)\.weight$"
EXPERTS = r"ffn\.experts\."

# ---- NVFP4 by its bits ----

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_BYTES = np.arange(127)  # of E4M3, finite and positive
E4M3 = np.where(_BYTES < 8, _BYTES * 2.0**-9, (1 + _BYTES % 8 / 8) * 2.0 ** (_BYTES // 8 - 7.0))


def nearest(numbers: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The index of the nearest of `grid`; of two that are equally near, the even one."""
    order = np.concatenate([np.arange(0, len(grid), 2), np.arange(1, len(grid), 2)])
    distance = np.abs(numbers[..., None].astype(np.float64) - grid[order])
    return order[distance.argmin(-1)]


def by_hand(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """values [N, K] in NVFP4 as ModelOpt rounds: codes, scales, factor. All but the choice of the
    nearest is FP32."""
    groups = values.float().numpy().reshape(len(values), -1, 16)
    largest = np.abs(groups).max(-1)
    factor = np.float32(largest.max() / np.float32(6 * 448) if largest.any() else 1)
    scale = np.where(largest == 0, 1, largest / (np.float32(6) * factor)).astype(np.float32)
    stored = np.maximum(nearest(scale, E4M3), 1)
    quotient = groups / (E4M3[stored].astype(np.float32) * factor)[..., None]
    codes = nearest(np.abs(quotient), E2M1) + 8 * np.signbit(quotient)
    codes = codes.reshape(len(values), -1)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    scales = torch.from_numpy(stored.astype(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(packed), scales, torch.tensor(factor)


def test_rounding_is_that_of_modelopt() -> None:
    """Ties, signs, zeros, blocks too small for any scale, a matrix of zeros, rows that are many."""
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(700, 2048, generator=draw).bfloat16()  # more than one chunk
    values[3] *= 1e-6
    values[5, :32] = 0
    values[7, :16] = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2) * values.abs().max()
    values[9] = -values[7]
    zeros = torch.zeros(4, 32), torch.full((1, 16), -0.0)
    for matrix in (values, values.float() * 1.3, -values[:9].abs(), *zeros):
        for found, expected in zip(quantise.nvfp4(matrix), by_hand(matrix), strict=True):
            assert found.dtype == expected.dtype and found.shape == expected.shape
            same = (tensor.reshape(-1).view(torch.uint8) for tensor in (found, expected))
            assert torch.equal(*same)


# ---- MXFP4 to NVFP4 ----


def numbers(codes: Tensor, factors: np.ndarray) -> np.ndarray:
    """Values of packed codes in double precision, factors [N, groups]."""
    byte = codes.view(torch.uint8).numpy()
    code = np.stack([byte & 15, byte >> 4], axis=-1).reshape(len(byte), -1)
    values = np.concatenate([E2M1, -E2M1])[code]
    return values * np.repeat(factors, values.shape[1] // factors.shape[1], axis=1)


def recoded(codes: Tensor, exponents: Tensor) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """Values before and after, the codes after, and what is said to be lossy."""
    scale = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    found, scales, factor, lossy = quantise.nvfp4_from_mxfp4(codes.view(torch.int8), scale)
    assert (found.dtype, scales.dtype) == (torch.uint8, torch.float8_e4m3fn)
    assert scales.shape == (len(codes), codes.shape[1] // 8) and factor.shape == ()
    assert np.log2(float(factor)) % 1 == 0 and float(factor) >= 2.0**-126
    before = numbers(codes, 2.0 ** exponents.double().numpy())
    after = numbers(found, E4M3[scales.view(torch.uint8).numpy()] * float(factor))
    return before, after, found, lossy


def every_code(blocks: int) -> Tensor:
    """[16, 16 * blocks] bytes: all 256 in each column of blocks, so every code in both places."""
    return torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, blocks)


@pytest.mark.parametrize("base", [-127, -40, 0, 109])
@pytest.mark.parametrize("spread", [0, 1, 16, 17])
def test_scales_up_to_2_17_apart_are_exact(spread: int, base: int) -> None:
    codes = every_code(spread + 1)
    exponents = torch.arange(base, base + spread + 1).repeat(16, 1)
    before, after, found, lossy = recoded(codes, exponents)
    assert torch.equal(found, codes) and not lossy.any()
    assert np.array_equal(before, after) and np.array_equal(np.signbit(before), np.signbit(after))


@pytest.mark.parametrize(
    ("spread", "exact"), [(18, {0, 2, 4, 5, 6, 7}), (19, {0, 4, 6, 7}), (40, {0})]
)
def test_blocks_beyond_are_rounded_and_told_of(spread: int, exact: set[int]) -> None:
    """Their codes go to the nearest multiple of the smallest scale, zeros stay, others are exact.

    exact: the codes, without sign, that lose nothing; a block of these is not called lossy.
    """
    codes = torch.cat([every_code(2), torch.tensor([min(exact - {0}, default=0)] * 32)[None]])
    codes = codes.to(torch.uint8)
    exponents = torch.tensor([[-3, -3 - spread]]).repeat(17, 1)
    before, after, _, lossy = recoded(codes, exponents)
    wide = [array.reshape(17, 2, 32) for array in (before, after)]
    assert np.array_equal(wide[0][:, 0], wide[1][:, 0]) and not lossy[:, 0].any()
    changed = (wide[0] != wide[1]).any(-1)
    assert np.array_equal(changed, lossy.numpy())
    assert changed[:16, 1].all() and not changed[16].any()
    smallest = 2.0**-9 * 2.0 ** (-3 - 8)
    wanted = E2M1[nearest(np.abs(wide[0][:, 1]) / smallest, E2M1)] * smallest
    assert np.array_equal(np.abs(wide[1][:, 1]), wanted)
    code = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(17, 2, 32)[:, 1] % 8
    same = (wide[0] == wide[1])[:, 1]
    assert {int(c) for c in np.unique(code) if same[code == c].all()} == exact


def test_blocks_of_zeros_ask_for_no_scale() -> None:
    """Neither a large scale nor a small one of such a block makes others lossy; signs stay."""
    codes = torch.full((1, 16 * 4), 0x21, dtype=torch.uint8)
    codes[0, :16], codes[0, 16:32] = 0x80, 0
    before, after, found, lossy = recoded(codes, torch.tensor([[120, -127, 0, -17]]))
    assert np.array_equal(before, after) and not lossy.any() and torch.equal(found, codes)
    assert np.array_equal(np.signbit(before), np.signbit(after))
    before, after, *_, lossy = recoded(codes * 0, torch.tensor([[120, -127, 0, -17]]))
    assert not after.any() and not lossy.any()


# ---- whole checkpoints ----


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> "Made":
    return Made(tmp_path_factory.mktemp("sources"))


class Made(dict[str, Path]):
    """Format (with "hf" before it: names of transformers) -> a checkpoint of CONFIG in 3 files."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> Path:
        *names, form = name.split()
        patch = pytest.MonkeyPatch()
        patch.setattr(cli_make_tiny, "shipped_config", lambda *_: dict(RAW))
        folder = self.root / name.replace(" ", "-")
        write_checkpoint(folder, preset="tiny", format=form, names=(names or [None])[0])
        patch.undo()
        tensors = dict(read(folder))
        (folder / "model.safetensors").unlink()
        write(folder, tensors, shards=3)
        self[name] = folder
        return folder


def loaded(tensors: Mapping[str, Tensor]) -> Tensors:
    model = FakeModel(shapes_of(CONFIG), torch.bfloat16)
    load(model, tensors.items(), CONFIG, rank=0, size=1)
    return model.values()


def rounded(tensors: Tensors, pattern: str) -> tuple[Tensors, Tensors]:
    """The weights whose names match in NVFP4 by hand: as tensors of a file, and dense in BF16."""
    stored: Tensors = {}
    for name, values in tensors.items():
        if re.search(pattern, name):
            module = name.removesuffix("weight")
            parts = (f"{module}weight", f"{module}weight_scale", f"{module}weight_scale_2")
            stored |= dict(zip(parts, by_hand(values), strict=True))
    return stored, dense_twin(stored.items(), torch.bfloat16)


def assert_bytes(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        same = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(*same), name


def vendor_linear(weights: str) -> str:
    """A pattern of the vendor's names of what is rounded."""
    if weights == "experts":
        return EXPERTS
    return r"(?<!compressor)\.(wq_a|wq_b|wkv|wo_a|wo_b|w1|w2|w3)\.weight$"


@pytest.mark.parametrize("weights", ["experts", "all"])
def test_dense_weights_are_rounded_to_nearest(weights: str, made: Made, tmp_path: Path) -> None:
    """What was chosen by codes, scales and factors; all else byte for byte; and as it is loaded."""
    source = dict(read(made["bf16"]))
    report = convert(made["bf16"], tmp_path / "out", Options(weights))
    stored, twin = rounded(source, vendor_linear(weights))
    rest = {name: t for name, t in source.items() if name not in twin}
    assert all(re.search(r"indexer\.wq_b", name) is None for name in rest) == (weights == "all")
    assert any(re.search(FLOOR, name) for name in rest)
    found = dict(read(tmp_path / "out"))
    assert_bytes(found, rest | stored)
    assert_same(loaded(found), loaded(rest | twin))
    assert report.ways == {"as it is": len(rest), "rounded to NVFP4": len(twin)}
    assert report.contradictions == [] and report.below_the_floor == []
    factors = [found[f"layers.0.ffn.experts.0.{part}.weight_scale_2"] for part in ("w1", "w3")]
    assert factors[0] != factors[1]  # gate and up have their own


def test_loading_does_not_depend_on_the_default_dtype(made: Made, tmp_path: Path) -> None:
    """SGLang loads while torch's default is the model's dtype. In a process that never did."""
    code = (
        "import sys, torch; from pathlib import Path; from test_convert import loaded, read\n"
        "tensors = dict(read(Path(sys.argv[1])))\n"
        "torch.set_default_dtype(torch.bfloat16)\n"
        "torch.save(loaded(tensors), sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(made["vendor"]), str(tmp_path / "loaded.pt")]
    subprocess.run(command, check=True, cwd=Path(__file__).parent)
    found = torch.load(tmp_path / "loaded.pt")
    assert_same(found, loaded(dict(read(made["vendor"]))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_names(dtype: torch.dtype, made: Made, tmp_path: Path) -> None:
    """From transformers' names and dtypes; stacked experts come apart; the floor becomes BF16."""
    source = {n: t.to(dtype) if t.is_floating_point() else t for n, t in read(made["hf bf16"])}
    folder = tmp_path / "source"
    shutil.copytree(made["hf bf16"], folder, ignore=shutil.ignore_patterns("model*"))
    write(folder, source, shards=2)
    for name in [name for name in source if "experts." in name and "_proj" in name]:
        if "shared" not in name:
            prefix, _, part = name.rpartition(".")
            parts = part.removesuffix("_proj").split("_")
            for expert, stack in enumerate(source.pop(name)):
                for piece, values in zip(parts, stack.chunk(len(parts)), strict=True):
                    source[f"{prefix}.{expert}.{piece}_proj.weight"] = values
    assert sum(".experts.7." in name for name in source) == 4 * 3
    report = convert(folder, tmp_path / "out", Options("all"))
    floor = r"(lm_head|mlp\.gate|compressor\.(indexer\.)?(kv|gate)_proj|weights_proj)\.weight$"
    linear = r"(?<!compressor)(?<!indexer)\.(q_a|q_b|kv|o_a|o_b|gate|up|down)_proj\.weight$"
    linear += r"|indexer\.q_b_proj\.weight$"
    stored, twin = rounded(source, linear)
    rest = {n: t.bfloat16() if re.search(floor, n) else t for n, t in source.items()}
    rest = {name: tensor for name, tensor in rest.items() if name not in twin}
    found = dict(read(tmp_path / "out"))
    assert_bytes(found, rest | stored)
    assert_same(loaded(found), loaded(rest | twin))
    assert report.ways["in BF16"] == sum(bool(re.search(floor, name)) for name in source)
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert said["quantization_config"]["quant_algo"] == "NVFP4"
    assert "model.layers.*.mlp.gate" in said["quantization_config"]["ignore"]


@pytest.mark.parametrize("weights", ["experts", "all"])
def test_the_released_format(weights: str, made: Made, tmp_path: Path) -> None:
    """Experts in MXFP4 keep their codes and every value; FP8 stays, or is rounded from its values.
    Draft blocks are copied."""
    source, folder = dict(read(made["vendor"])), tmp_path / "source"
    drafts = {"mtp.0.ffn.experts.0.w1.weight": source["layers.0.ffn.experts.0.w1.weight"].clone()}
    drafts |= {"mtp.0.ffn.experts.0.w1.scale": source["layers.0.ffn.experts.0.w1.scale"].clone()}
    shutil.copytree(made["vendor"], folder, ignore=shutil.ignore_patterns("model*"))
    write(folder, source | drafts, shards=4)
    report = convert(folder, tmp_path / "out", Options(weights))
    found, values = dict(read(tmp_path / "out")), dense_twin(source.items(), torch.float32)
    experts = [name for name in values if re.search(EXPERTS, name)]
    assert len(experts) == 4 * 8 * 3
    for name in experts:
        factor = found[f"{name}_scale_2"]
        assert torch.equal(found[name], source[name].view(torch.uint8))
        scale = source[name.replace("weight", "scale")].float().repeat_interleave(2, dim=1)
        assert torch.equal(found[f"{name}_scale"].float() * factor, scale)
    twin = dense_twin(found.items(), torch.float32)
    assert_same({n: twin[n] for n in experts}, {n: values[n] for n in experts})
    assert report.recoded_blocks == sum(values[name].numel() // 32 for name in experts)
    assert report.lossy_blocks == 0 and report.lossy == [] and report.contradictions == []
    others = {n: t for n, t in (source | drafts).items() if not re.match(r"layers.*experts\.\d", n)}
    if weights == "all":
        fp8 = [n for n, t in source.items() if t.dtype is torch.float8_e4m3fn]
        stored, _ = rounded({name: values[name] for name in fp8}, "")
        others = {n: t for n, t in others.items() if n not in fp8 and not is_scale_of(n, fp8)}
        others |= stored
    assert_bytes(
        {n: t for n, t in found.items() if not re.match(r"layers.*experts\.\d", n)}, others
    )


def is_scale_of(name: str, weights: list[str]) -> bool:
    return name.endswith(".scale") and name.replace(".scale", ".weight") in weights


def test_what_is_nvfp4_stays_and_the_floor_rises(made: Made, tmp_path: Path) -> None:
    """The rest of a mixture follows; scales of activations go with the formats they belong to."""
    source = dict(read(made["nvfp4-experts"]))
    source |= {"layers.0.attn.wkv.input_scale": torch.tensor(0.5)}
    gate = source["layers.1.ffn.gate.weight"]
    parts = ("weight", "weight_scale", "weight_scale_2")
    low = {f"layers.1.ffn.gate.{p}": t for p, t in zip(parts, by_hand(gate), strict=True)}
    folder = tmp_path / "source"
    shutil.copytree(made["nvfp4-experts"], folder, ignore=shutil.ignore_patterns("model*"))
    write(folder, source | low)
    report = convert(folder, tmp_path / "out", Options("all"))
    found = dict(read(tmp_path / "out"))
    experts = {name: t for name, t in source.items() if re.search(EXPERTS, name)}
    assert sum(name.endswith("input_scale") for name in experts) == 4 * 8 * 3
    assert_bytes({name: found[name] for name in experts}, experts)
    assert "layers.0.attn.wkv.input_scale" not in found and report.dropped == 1
    twin = dense_twin(low.items(), torch.bfloat16)["layers.1.ffn.gate.weight"]
    assert torch.equal(found["layers.1.ffn.gate.weight"], twin)
    assert len(report.below_the_floor) == 1 and "ffn.gate: NVFP4" in report.below_the_floor[0]
    assert check(tmp_path / "out", CONFIG).below_the_floor == []


def test_bf16_by_name(made: Made, tmp_path: Path) -> None:
    patterns = ("layers.2.attn.wo_?.weight", "*.attn.compressor.ape", "layers.1.ffn.experts.3.*")
    report = convert(made["bf16"], tmp_path / "out", Options("all", patterns))
    found, source = dict(read(tmp_path / "out")), dict(read(made["bf16"]))
    for name in ("layers.2.attn.wo_a.weight", "layers.1.ffn.experts.3.w1.weight"):
        assert torch.equal(found[name], source[name])
    for name in ("layers.1.attn.wo_a.weight", "layers.1.ffn.experts.2.w1.weight"):
        assert found[name].dtype is torch.uint8
    apes = [name for name in source if name.endswith("attn.compressor.ape")]
    assert len(apes) == 3 and report.ways["in BF16"] == 3
    assert all(torch.equal(found[name], source[name].bfloat16()) for name in apes)
    ignored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"][
        "ignore"
    ]
    assert {"layers.2.attn.wo_a", "layers.1.ffn.experts.3.w2", "head"} <= set(ignored)
    assert not {"layers.*.attn.wo_a", "layers.2.attn.wq_a"} & set(ignored)
    assert report.contradictions == []


# ---- the folder ----


def test_files_and_their_index(made: Made, tmp_path: Path) -> None:
    """Names of files stay; what lies in other files than its weight is found there; a file whose
    tensors all went elsewhere is gone. Small files are copied, other weights are not."""
    folder, tensors = tmp_path / "source", dict(read(made["vendor"]))
    shutil.copytree(made["vendor"], folder, ignore=shutil.ignore_patterns("model*"))
    scales = {
        n: t for n, t in tensors.items() if n.startswith("layers.0.ffn.experts") and "scale" in n
    }
    rest = {n: t for n, t in tensors.items() if n not in scales}
    index = write(folder, rest, shards=2)
    (folder / "more").mkdir()
    write(folder / "more", scales)
    (folder / "more/model.safetensors").rename(folder / "scales.safetensors")
    index |= dict.fromkeys(scales, "scales.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name in ("more/chat.py", "pytorch_model.bin", ".gitattributes"):
        (folder / name).write_text(name)
    report = convert(folder, tmp_path / "out", Options())
    out = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*")}
    shards = {"model-00001.safetensors", "model-00002.safetensors"}
    assert set(report.files) == shards and out == shards | {
        *("config.json", "hf_quant_config.json", "generation_config.json", "more/chat.py"),
        *("tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"),
    }
    written = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found = dict(read(tmp_path / "out"))
    assert written["weight_map"].keys() == found.keys()
    assert written["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    for name, file in written["weight_map"].items():
        if name in index:
            assert file == index[name]
    sizes = [sum((f / s).stat().st_size for s in shards) for f in (folder, tmp_path / "out")]
    sizes[0] += (folder / "scales.safetensors").stat().st_size
    assert [report.bytes_before, report.bytes_after] == sizes
    assert all((tmp_path / "out" / shard).stat().st_mode & 0o777 == 0o644 for shard in shards)


@pytest.mark.parametrize(("name", "weights"), [("vendor", "experts"), ("fp8-base", "experts")])
def test_config_of_a_mixture(name: str, weights: str, made: Made, tmp_path: Path) -> None:
    """As NVIDIA's releases: FP8 with NVFP4 experts, and what it makes NVFP4 is so."""
    assert convert(made[name], tmp_path / "out", Options(weights)).contradictions == []
    said = json.loads((tmp_path / "out/config.json").read_text())
    before = json.loads((made[name] / "config.json").read_text())
    section = said.pop("quantization_config")
    assert section.items() >= before.pop("quantization_config").items()
    assert said == before | {"expert_dtype": "fp4"}
    wanted = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}
    assert section.items() >= wanted.items()
    tensors = dict(read(tmp_path / "out"))
    modules = {n.removesuffix(".weight_scale_2") for n in tensors if n.endswith("weight_scale_2")}
    targets = section["config_groups"]["group_0"]["targets"]
    dense = {n.removesuffix(".weight") for n, t in tensors.items() if t.ndim == 2} - modules
    for module in modules | dense:
        assert any(re.match(t.removeprefix("re:"), module) for t in targets) == (module in modules)
    beside = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    assert beside["exclude_modules"] == section["ignore"]
    assert set(beside["quantized_layers"]) == {f"layers.{n}.ffn.experts" for n in range(4)}


# ---- interruption ----


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


KILLED = """
import os, signal, sys
from pathlib import Path
from sglang_dsv4 import convert
from sglang_dsv4.convert_plan import Options

save = convert.save_file
def save_and_die(tensors, path, **rest):
    save(tensors, path, **rest)
    if "00002" in path.name:
        os.truncate(path, 5000)
        os.kill(os.getpid(), signal.SIGKILL)

convert.save_file = save_and_die
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), Options("all"))
"""


def test_killed_and_resumed_gives_the_same_bytes(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    convert(made["vendor"], whole, Options("all"))
    command = [sys.executable, "-c", KILLED, str(made["vendor"]), str(out)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    left = {path.name for path in out.iterdir()}
    assert left == {"conversion.json", "model-00001.safetensors", "model-00002.safetensors.part"}
    first = (out / "model-00001.safetensors").stat()
    arguments = ["convert", str(made["vendor"]), str(out), "--weights", "all"]
    assert main(arguments) == 2
    assert "add --resume" in capsys.readouterr().err
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main([*arguments, "--resume"]) == 0
    assert "3 file(s), 1 of them from before" in capsys.readouterr().out
    shown = [int(percent) for percent in re.findall(r"convert: +(\d+)%", terminal.getvalue())]
    assert shown[0] > 20 and shown[-1] == 100  # what was done before counts
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d, .*B/s\]", terminal.getvalue())
    again = (out / "model-00001.safetensors").stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert digests(out) == digests(whole) and len(digests(out)) == 9


def interrupted(source: Path, out: Path) -> None:
    """Leaves two of three files finished."""
    calls = []

    def stop(*arguments: Any, **rest: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        save(*arguments, **rest)

    save = convert_module.save_file
    patch = pytest.MonkeyPatch()
    patch.setattr(convert_module, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, Options())
    patch.undo()


def test_what_was_begun_otherwise_is_not_resumed(made: Made, tmp_path: Path) -> None:
    source, out = shutil.copytree(made["bf16"], tmp_path / "source"), tmp_path / "out"
    interrupted(source, out)
    before = digests(out)

    def refused(told: str, options: Options) -> None:
        with pytest.raises(FileExistsError, match=told):
            convert(source, out, options, resume=True)
        assert digests(out) == before

    refused("with another options", Options("all"))
    refused("with another options", Options(bf16=("layers.0.ffn.experts.0.w1",)))
    shard = source / "model-00003.safetensors"
    times = shard.stat()
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    refused("with another source", Options())
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    state = (out / convert_files.STATE_FILE).read_text()
    (out / convert_files.STATE_FILE).write_text(state[:-9])
    before = digests(out)
    refused("is damaged", Options())
    (out / convert_files.STATE_FILE).write_text(state)
    finished = out / "model-00001.safetensors"
    content = finished.read_bytes()
    finished.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="expected .* bytes by its header"):
        convert(source, out, Options(), resume=True)
    finished.write_bytes(content)
    assert convert(source, out, Options(), resume=True).resumed == 2


# ---- refusals ----


def refusal(source: Path, out: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says; that it wrote nothing is checked."""
    before = sorted(out.rglob("*"))
    assert main(["convert", str(source), str(out), *arguments]) == 2
    assert sorted(out.rglob("*")) == before
    said = capsys.readouterr().err
    assert said.startswith("sglang-dsv4: error: ") or "\nsglang-dsv4: error: " in said
    return said


def test_folders_that_are_refused(
    made: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = made["bf16"]
    assert "is not empty" in refusal(source, source, capsys=capsys)
    assert "is not empty" in refusal(source, source, "--resume", capsys=capsys)
    assert "lies in" in refusal(source, source / "nvfp4", capsys=capsys)
    (tmp_path / "file").touch()
    assert "is not a folder" in refusal(source, tmp_path / "file", capsys=capsys)
    assert "config.json" in refusal(tmp_path / "none", tmp_path / "out", capsys=capsys)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    said = refusal(source, tmp_path / "out", capsys=capsys)
    assert re.search(r"0\.0 GB are needed and 0\.0 GB are free: make room", said)


def test_checkpoints_that_are_refused(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(name: str, change: Mapping[str, Tensor | None], *arguments: str) -> str:
        folder = tmp_path / "source"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made[name], folder, ignore=shutil.ignore_patterns("model*"))
        tensors = dict(read(made[name])) | change
        write(folder, {n: t for n, t in tensors.items() if t is not None})
        return refusal(folder, tmp_path / "out", *arguments, capsys=capsys)

    name = "layers.1.ffn.experts.2.w2.weight"
    assert f"1 missing tensors (by the vendor's names):\n  {name}" in said("bf16", {name: None})
    assert "needs a scale of blocks" in said("vendor", {name.replace("weight", "scale"): None})
    assert "no weight has such a name" in said("bf16", {}, "--bf16", "model.layers.0.*")
    assert "compressed-tensors" in said("compressed-tensors-w4a4", {})
    assert "nothing is left to convert" in said("nvfp4-experts", {})


def test_values_that_are_refused(made: Made, tmp_path: Path) -> None:
    """NaN in whatever is rounded, or in a scale; the name is told, and the file is not written."""
    name = "layers.1.ffn.experts.2.w2"
    cases: dict[str, tuple[str, torch.dtype]] = {
        "bf16": (f"{name}.weight", torch.bfloat16),
        "vendor": (f"{name}.scale", torch.uint8),
        "fp8-base": (f"{name}.weight", torch.uint8),
    }
    for form, (part, dtype) in cases.items():
        folder = shutil.copytree(made[form], tmp_path / form)
        tensors = {n: t.clone() for n, t in read(folder)}
        for file in folder.glob("model*"):
            file.unlink()
        wrong = {"bf16": torch.nan, "vendor": 255, "fp8-base": 127}[form]
        tensors[part].view(dtype)[3, 1] = wrong
        write(folder, tensors)
        with pytest.raises(CheckpointError, match=f"{re.escape(part)}: some .*NaN.*damaged"):
            convert(folder, tmp_path / f"{form}-out", Options())
        assert {p.name for p in (tmp_path / f"{form}-out").iterdir()} == {"conversion.json"}


def test_inputs_that_no_group_of_16_divides(tmp_path: Path, made: Made) -> None:
    raw = json.loads((made["bf16"] / "config.json").read_text()) | {"moe_intermediate_size": 24}
    config, folder = DSV4Config.from_dict(raw), tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {name: torch.ones(slot.shape) for name, slot in expected_tensors(config).items()}
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].long()
    write(folder, tensors)
    with pytest.raises(CheckpointError) as stop:
        convert(folder, tmp_path / "out", Options())
    assert "layers.0.ffn.experts.0.w2.weight: 24" in str(stop.value)
    assert "keep such weights with --bf16" in str(stop.value)
    report = convert(folder, tmp_path / "out", Options(bf16=("*.experts.*.w2",)))
    assert report.contradictions == []


# ---- the command ----


def test_lossy_blocks_are_told_of(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(made["vendor"], tmp_path / "source")
    tensors = {name: tensor.clone() for name, tensor in read(folder)}
    for file in folder.glob("model*"):
        file.unlink()
    name = "layers.2.ffn.experts.1.w3"
    tensors[f"{name}.weight"][4] = 0x33  # 1.5, twice in a byte
    tensors[f"{name}.scale"].view(torch.uint8)[4, :3] = 60
    write(folder, tensors)
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 0
    out, blocks = capsys.readouterr().out, 4 * 8 * 3 * 64 * 128 // 32
    assert f"MXFP4: 3 of {blocks:,} blocks lossy\n    {name}.weight: 3 of 256 blocks lossy" in out
    assert main(["convert", str(folder), str(tmp_path / "more"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["lossy"] == [{"name": f"{name}.weight", "blocks": 3, "of": 256}]
    assert (said["lossy_blocks"], said["recoded_blocks"]) == (3, blocks)


def test_an_interruption_says_how_to_go_on(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "save_file", stop)
    assert main(["convert", str(made["bf16"]), str(tmp_path / "out")]) == 130
    assert f"{tmp_path / 'out'} is not complete: go on with --resume" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["convert", "--help"])
    text = capsys.readouterr().out
    assert "  sglang-dsv4 convert /models/v4 /models/v4-nvfp4 --resume" in text and "--json" in text
