"""The console command: help, exit codes, the checkpoints it writes, and what doctor finds."""

import compileall
import hashlib
import importlib.metadata
import json
import resource
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sglang_dsv4 import (
    cli_doctor,
    cli_make_tiny,
    dequant,
    doctor_checkpoint,
    tiny_weights,
    weights,
)
from sglang_dsv4.cli import main
from sglang_dsv4.cli_doctor import Row
from sglang_dsv4.cli_make_tiny import write_checkpoint
from sglang_dsv4.config import DSV4Config, LayerKind
from sglang_dsv4.precision import COMPONENTS

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
COMMANDS = (
    *("demo", "make-tiny", "convert", "doctor", "graph-check", "bench"),
    *("inspect", "precision", "warm"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """A tiny checkpoint in each spelling and dtype."""
    folders = {}
    for names in ("vendor", "hf"):
        for dtype in ("float32", "bfloat16"):
            folders[names, dtype] = tmp_path_factory.mktemp("tiny") / f"{names}-{dtype}"
            write_checkpoint(folders[names, dtype], preset="tiny", names=names, dtype=dtype, seed=3)
    return folders


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dict
                part = tensors.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


# ---- the command ----


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_dsv4.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sglang_dsv4.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'sglang', 'transformers', 'tokenizers', 'safetensors'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    # Processor time, which other processes on the machine do not lengthen much.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    for text in ("examples:", "exit codes:", "sglang-dsv4 make-tiny /tmp/tiny", *COMMANDS):
        assert text in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"  sglang-dsv4 {command} " in text
    assert "--json" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    expected = f"sglang-dsv4 {importlib.metadata.version('sglang-dsv4')}\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["make"],
        ["make-tiny"],
        ["make-tiny", "x", "--preset", "huge"],
        ["make-tiny", "x", "--names", "sglang"],
        ["make-tiny", "x", "--dtype", "float8"],
        ["make-tiny", "x", "--format", "int4"],
        ["make-tiny", "x", "--seed", "one"],
        ["make-tiny", "x", "--pres", "tiny"],
        ["doctor", "x", "y"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: sglang-dsv4" in capsys.readouterr().err


def test_bad_input_is_a_sentence_and_no_traceback(tmp_path: Path) -> None:
    result = run_command("doctor", str(tmp_path / "nowhere"))
    assert result.returncode == 2
    assert result.stdout == ""
    expected = (
        f"sglang-dsv4: error: {tmp_path / 'nowhere'} is no folder: name that of a checkpoint\n"
    )
    assert result.stderr == expected


def test_bad_input_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").touch()
    assert main(["make-tiny", str(tmp_path), "--json"]) == 2
    shown = capsys.readouterr()
    assert "is not empty" in json.loads(shown.out)["error"]
    assert "is not empty" in shown.err


def test_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_make_tiny, "write_checkpoint", interrupted)
    assert main(["make-tiny", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "sglang-dsv4: interrupted\n"


# ---- make-tiny: the folder ----


def test_make_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-tiny", str(tmp_path / "a" / "b")]) == 0
    assert "layers SWA SWA CSA HCA CSA HCA CSA" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "a" / "b").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_make_tiny_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-tiny", str(tmp_path / "out"), "--json", "--seed", "7"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    summary = json.loads(shown.out)
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0 < size - summary.pop("bytes") < 100_000  # the header
    assert summary == {
        "path": str(tmp_path / "out"),
        "preset": "tiny",
        "names": "vendor",
        "format": "bf16",
        "dtype": "bfloat16",
        "seed": 7,
        "layers": ["SWA", "SWA", "CSA", "HCA", "CSA", "HCA", "CSA"],
        "parameters": 7126167,
        "files": ["model.safetensors"],
    }


def test_folder_that_is_not_empty_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("mine")
    assert main(["make-tiny", str(tmp_path)]) == 2
    assert "is not empty: name another folder, or add --force" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "mine"


def test_file_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").touch()
    assert main(["make-tiny", str(tmp_path / "out"), "--force"]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_force_replaces_an_older_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, preset="tiny", shard_bytes=3_000_000)
    (tmp_path / "notes.txt").write_text("mine")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    write_checkpoint(tmp_path, preset="tiny", force=True)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "old", preset="tiny")
    usage = types.SimpleNamespace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert main(["make-tiny", str(tmp_path / "new" / "deep")]) == 2
    assert "0.0 GB are needed" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    # What --force frees counts, and is kept where that is still too little.
    assert main(["make-tiny", str(tmp_path / "old"), "--force", "--dtype", "float32"]) == 2
    weights.check(tmp_path / "old", DSV4Config.from_checkpoint(tmp_path / "old"))
    assert main(["make-tiny", str(tmp_path / "old"), "--force"]) == 0


def test_config_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    write_checkpoint(tmp_path, preset="tiny")
    monkeypatch.setattr(cli_make_tiny, "_write_shards", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, preset="tiny", force=True)
    assert not (tmp_path / "config.json").exists()


def test_shards_and_their_index(tmp_path: Path, made: dict[tuple[str, str], Path]) -> None:
    summary = write_checkpoint(
        tmp_path, preset="tiny", dtype="float32", seed=3, shard_bytes=5_000_000
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == summary["bytes"]
    assert set(index["weight_map"].values()) == set(summary["files"])
    count = len(summary["files"])
    assert summary["files"][0] == f"model-00001-of-{count:05}.safetensors"
    assert count > 5
    whole = load_file(made["vendor", "float32"] / "model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    for file in summary["files"]:
        tensors = load_file(tmp_path / file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 5_000_000
        for name, tensor in tensors.items():
            assert index["weight_map"][name] == file
            assert torch.equal(tensor, whole[name])


# ---- make-tiny: the tensors ----


def test_same_seed_same_bytes(tmp_path: Path, made: dict[tuple[str, str], Path]) -> None:
    for (names, dtype), folder in made.items():
        again = tmp_path / names / dtype
        write_checkpoint(again, preset="tiny", names=names, dtype=dtype, seed=3)
        assert digests(again) == digests(folder)


def test_another_seed_changes_every_tensor(
    tmp_path: Path, made: dict[tuple[str, str], Path]
) -> None:
    write_checkpoint(tmp_path, preset="tiny", dtype="float32", seed=4)
    other = load_file(tmp_path / "model.safetensors")
    tensors = load_file(made["vendor", "float32"] / "model.safetensors")
    assert not [name for name in tensors if torch.equal(tensors[name], other[name])]


def test_bfloat16_is_float32_rounded(made: dict[tuple[str, str], Path]) -> None:
    wide = load_file(made["vendor", "float32"] / "model.safetensors")
    narrow = load_file(made["vendor", "bfloat16"] / "model.safetensors")
    assert all(torch.equal(narrow[name], wide[name].to(narrow[name].dtype)) for name in wide)


@pytest.mark.parametrize("names", ["vendor", "hf"])
def test_weights_are_what_the_model_needs(names: str, made: dict[tuple[str, str], Path]) -> None:
    for dtype in ("float32", "bfloat16"):
        folder = made[names, dtype]
        summary = weights.check(folder, DSV4Config.from_checkpoint(folder))
        assert summary.values == 7126167 + 3 * 384 * 2
        assert not summary.skipped


def test_vendor_names_and_formats(made: dict[tuple[str, str], Path]) -> None:
    found = headers(made["vendor", "bfloat16"])
    layer = {
        name.removeprefix("layers.2."): header
        for name, header in found.items()
        if name.startswith("layers.2.") and ".experts." not in name
    }
    assert layer == {
        "attn_norm.weight": ("BF16", (128,)),
        "ffn_norm.weight": ("BF16", (128,)),
        "hc_attn_fn": ("F32", (24, 512)),
        "hc_attn_base": ("F32", (24,)),
        "hc_attn_scale": ("F32", (3,)),
        "hc_ffn_fn": ("F32", (24, 512)),
        "hc_ffn_base": ("F32", (24,)),
        "hc_ffn_scale": ("F32", (3,)),
        "attn.attn_sink": ("F32", (8,)),
        "attn.wq_a.weight": ("BF16", (64, 128)),
        "attn.q_norm.weight": ("BF16", (64,)),
        "attn.wq_b.weight": ("BF16", (4096, 64)),
        "attn.wkv.weight": ("BF16", (512, 128)),
        "attn.kv_norm.weight": ("BF16", (512,)),
        "attn.wo_a.weight": ("BF16", (256, 512)),
        "attn.wo_b.weight": ("BF16", (128, 256)),
        "attn.compressor.wkv.weight": ("BF16", (1024, 128)),
        "attn.compressor.wgate.weight": ("BF16", (1024, 128)),
        "attn.compressor.ape": ("F32", (4, 1024)),
        "attn.compressor.norm.weight": ("BF16", (512,)),
        "attn.indexer.wq_b.weight": ("BF16", (2048, 64)),
        "attn.indexer.weights_proj.weight": ("BF16", (16, 128)),
        "attn.indexer.compressor.wkv.weight": ("BF16", (256, 128)),
        "attn.indexer.compressor.wgate.weight": ("BF16", (256, 128)),
        "attn.indexer.compressor.ape": ("F32", (4, 256)),
        "attn.indexer.compressor.norm.weight": ("BF16", (128,)),
        "ffn.gate.weight": ("BF16", (8, 128)),
        "ffn.gate.tid2eid": ("I64", (384, 2)),
        "ffn.shared_experts.w1.weight": ("BF16", (64, 128)),
        "ffn.shared_experts.w3.weight": ("BF16", (64, 128)),
        "ffn.shared_experts.w2.weight": ("BF16", (128, 64)),
    }
    assert found["layers.3.ffn.gate.bias"] == ("F32", (8,))
    assert found["layers.3.attn.compressor.ape"] == ("F32", (128, 512))
    assert found["layers.6.ffn.experts.7.w2.weight"] == ("BF16", (128, 64))
    assert {name for name in found if not name.startswith("layers.")} == {
        *("embed.weight", "head.weight", "norm.weight"),
        *("hc_head_fn", "hc_head_base", "hc_head_scale"),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_both_spellings_as_one_model(
    dtype: str, made: dict[tuple[str, str], Path]
) -> None:
    from transformers import DeepseekV4ForCausalLM

    states = []
    for names in ("hf", "vendor"):
        model, report = DeepseekV4ForCausalLM.from_pretrained(
            made[names, dtype], output_loading_info=True, dtype=getattr(torch, dtype)
        )
        assert not any(report.values()), report
        states.append(model.state_dict())
    # Under transformers' names nothing is renamed on the way, so these are the file's names.
    assert headers(made["hf", dtype]).keys() == states[0].keys()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_values_keep_activations_near_one(made: dict[tuple[str, str], Path]) -> None:
    tensors = load_file(made["vendor", "float32"] / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert not [name for name, tensor in tensors.items() if (tensor == 0).all()]
    assert tensors["layers.4.attn.wq_b.weight"].std().item() == pytest.approx(1 / 8, rel=0.02)
    assert tensors["layers.4.attn_norm.weight"].mean().item() == pytest.approx(1, abs=0.05)
    normal = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    w1, w3, w2 = (tensors[f"layers.4.ffn.shared_experts.w{n}.weight"] for n in (1, 3, 2))
    gate, up = normal @ w1.T, normal @ w3.T
    hidden = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    assert 0.5 < (hidden @ w2.T).std().item() < 2
    assert 0.001 < (up.abs() > 10).float().mean().item() < 0.05  # the clamp is met, but seldom


def test_hash_tables_give_distinct_experts(made: dict[tuple[str, str], Path]) -> None:
    tensors = load_file(made["vendor", "float32"] / "model.safetensors")
    for layer in range(3):
        table = tensors[f"layers.{layer}.ffn.gate.tid2eid"]
        assert (table[:, 0] != table[:, 1]).all()
        assert table.unique().tolist() == list(range(8))


# ---- make-tiny: formats ----

NVFP4_LINEAR = {
    "weight": ("U8", (4096, 32)),
    "weight_scale": ("F8_E4M3", (4096, 4)),
    "weight_scale_2": ("F32", ()),
    "input_scale": ("F32", ()),
}
FORMATS: dict[str, tuple[str, dict[str, dict[str, tuple[str, tuple[int, ...]]]]]] = {
    "vendor": (
        "ue8m0",
        {
            "layers.2.attn.wq_b": {
                "weight": ("F8_E4M3", (4096, 64)),
                "scale": ("F8_E8M0", (32, 1)),
            },
            "layers.2.ffn.experts.7.w1": {
                "weight": ("I8", (64, 64)),
                "scale": ("F8_E8M0", (64, 4)),
            },
            "layers.2.attn.compressor.wkv": {"weight": ("BF16", (1024, 128))},
        },
    ),
    "fp8-base": (
        "ue8m0",
        {
            "layers.2.ffn.experts.7.w1": {
                "weight": ("F8_E4M3", (64, 128)),
                "scale": ("F8_E8M0", (1, 1)),
            }
        },
    ),
    "nvfp4-experts": (
        "MIXED_PRECISION",
        {
            "layers.2.ffn.experts.7.w1": {
                "weight": ("U8", (64, 64)),
                "weight_scale": ("F8_E4M3", (64, 8)),
                "weight_scale_2": ("F32", ()),
                "input_scale": ("F32", ()),
            },
            "layers.2.ffn.shared_experts.w1": {
                "weight": ("F8_E4M3", (64, 128)),
                "scale": ("F8_E8M0", (1, 1)),
            },
        },
    ),
    "nvfp4-all": (
        "modelopt",
        {
            "model.layers.2.self_attn.q_b_proj": NVFP4_LINEAR,
            "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj": {
                "weight": ("U8", (16, 64)),
                "weight_scale": ("F8_E4M3", (16, 8)),
                "weight_scale_2": ("F32", ()),
                "input_scale": ("F32", ()),
            },
            "lm_head": {"weight": ("BF16", (384, 128))},
        },
    ),
    "compressed-tensors-w4a4": (
        "mixed-precision",
        {
            "layers.2.ffn.experts.7.w2": {
                "weight_packed": ("U8", (128, 32)),
                "weight_scale": ("F8_E4M3", (128, 4)),
                "weight_global_scale": ("F32", (1,)),
                "input_global_scale": ("F32", (1,)),
            },
            "layers.2.attn.wq_b": {
                "weight": ("F8_E4M3", (4096, 64)),
                "weight_scale": ("F32", (32, 1)),
            },
        },
    ),
    "compressed-tensors-w4a16": (
        "nvfp4-pack-quantized",
        {
            "model.layers.2.mlp.experts.7.down_proj": {
                "weight_packed": ("U8", (128, 32)),
                "weight_scale": ("F8_E4M3", (128, 4)),
                "weight_global_scale": ("F32", (1,)),
            }
        },
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-tiny", str(tmp_path), "--format", name, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    said, modules = FORMATS[name]
    assert summary["format"] == name
    assert summary["names"] == ("hf" if next(iter(modules)).startswith("model.") else "vendor")
    file = tmp_path / "model.safetensors"
    assert 0 < file.stat().st_size - summary["bytes"] < 150_000  # the header
    found = headers(tmp_path)
    for module, tensors in modules.items():
        beside = {n: h for n, h in found.items() if n.startswith(module + ".")}
        assert beside == {f"{module}.{suffix}": header for suffix, header in tensors.items()}
    raw = json.loads((tmp_path / "config.json").read_text())
    assert said in json.dumps(raw["quantization_config"])
    assert DSV4Config.from_dict(raw).n_routed_experts == 8
    assert (tmp_path / "hf_quant_config.json").exists() == name.startswith("nvfp4")
    # Another format in its place leaves nothing of it.
    assert main(["make-tiny", str(tmp_path), "--force"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not (tmp_path / "hf_quant_config.json").exists()


def test_formats_hold_the_same_model_rounded(
    tmp_path: Path, made: dict[tuple[str, str], Path]
) -> None:
    dense = load_file(made["vendor", "float32"] / "model.safetensors")
    write_checkpoint(tmp_path, preset="tiny", format="vendor", seed=3)
    name = "layers.4.ffn.experts.1.w2"
    codes, scale = (
        load_file(tmp_path / "model.safetensors")[f"{name}.{s}"] for s in ("weight", "scale")
    )
    values = dequant.mxfp4(codes, scale)
    assert 0 < (values - dense[f"{name}.weight"]).abs().mean() < 0.15 * values.abs().mean()


# ---- make-tiny: config.json and the tokenizer ----


def test_dialects_of_the_config(made: dict[tuple[str, str], Path]) -> None:
    shipped = json.loads((made["vendor", "float32"] / "config.json").read_text())
    saved = json.loads((made["hf", "float32"] / "config.json").read_text())
    assert shipped["compress_ratios"] == [0, 0, 4, 128, 4, 128, 4, 0]
    assert shipped["torch_dtype"] == saved["dtype"] == "float32"
    assert "compress_ratios" not in saved
    assert saved["layer_types"][2] == "compressed_sparse_attention"
    assert saved["mlp_layer_types"] == ["hash_moe"] * 3 + ["moe"] * 4
    config = DSV4Config.from_dict(shipped)
    assert config == DSV4Config.from_dict(saved)
    assert config.index_topk == 8 and config.index_n_heads == 16
    assert config.yarn is not None and config.yarn.factor == 16
    for size in (1, 2, 4, 8):
        config.check_tensor_parallel(size)


@pytest.mark.parametrize(
    ("preset", "hidden", "heads", "groups", "gigabytes"),
    [("flash-2l", 4096, 64, 8, 4.3), ("pro-2l", 7168, 128, 16, 9.5)],
)
def test_presets_of_real_widths(
    preset: str, hidden: int, heads: int, groups: int, gigabytes: float
) -> None:
    config = DSV4Config.from_dict(cli_make_tiny.shipped_config(preset, "bfloat16"))
    assert config.layer_kinds == (LayerKind.CSA, LayerKind.HCA)
    assert config.num_hash_layers == 1 and config.n_routed_experts == 16
    sizes = (config.hidden_size, config.num_attention_heads, config.o_groups)
    assert sizes == (hidden, heads, groups)
    for entries in (tiny_weights.vendor_entries(config), tiny_weights.hf_entries(config)):
        assert sum(entry.bytes(2) for entry in entries) / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert f"{gigabytes} GB" in " ".join(cli_make_tiny._DESCRIPTION.split())


def test_tokenizer(made: dict[tuple[str, str], Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made["vendor", "float32"])
    assert len(tokenizer) == 384
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 1)
    text = "Grüße,\n  「世界」 🙂\x00 <｜User｜>x</think>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("word word")) == 9  # one token per byte, and none added
    assert tokenizer.decode([0, *ids, 1], skip_special_tokens=True) == text
    words = [tokenizer.decode([number]) for number in range(272, 384)]
    assert len(set(words)) == len(words) and words[0] == " t272"


def test_chat_encoding_of_deepseek_accepts_the_tokenizer(made: dict[tuple[str, str], Path]) -> None:
    import deepseek_recipe

    raw = (made["vendor", "float32"] / "tokenizer.json").read_text()
    ids = {token["content"]: token["id"] for token in json.loads(raw)["added_tokens"]}
    encoding = deepseek_recipe.DeepseekV4Encoding().with_tokenizer(
        deepseek_recipe.Tokenizer.from_str(raw)
    )
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "ab"}],
        "thinking": {"type": "disabled"},
    }
    request = deepseek_recipe.ChatCompletionRequest(body)
    encoded = encoding.encode(request.convert(deepseek_recipe.ConversionOptions()).conversation)
    start, user, assistant, end = (
        ids[token] for token in (BOS, "<｜User｜>", "<｜Assistant｜>", "</think>")
    )
    letters = [encoded[1], *encoded[3:5]]
    assert encoded == [start, letters[0], user, *letters[1:], assistant, end]
    assert ids[BOS] == 0 and ids[EOS] == 1
    assert set(doctor_checkpoint.CHAT_TOKENS) <= ids.keys()


# ---- doctor ----


@pytest.fixture
def fake_hooks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Replaces the import of the plugin, which takes many seconds and is tested elsewhere."""

    def install(results: Any) -> None:
        def self_check() -> list[tuple[str, bool, str]]:
            if isinstance(results, Exception):
                raise results
            return results

        plugin = types.SimpleNamespace(self_check=self_check)
        importer = types.SimpleNamespace(import_module=lambda _: plugin)
        monkeypatch.setattr(cli_doctor, "importlib", importer)

    return install


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


def test_doctor_is_content_here(
    made: dict[tuple[str, str], Path],
    fake_hooks: Callable[[Any], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_hooks([("model_class", True, "fits")])
    assert main(["doctor", str(made["hf", "float32"]), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is True
    rows = {row["name"]: row for row in shown["rows"]}
    assert all(
        row.keys() == {"name", "status", "found", "expected", "remedy"} for row in rows.values()
    )
    assert {row["status"] for row in rows.values()} <= {"ok", "warn"}
    assert rows["sglang"]["found"] == importlib.metadata.version("sglang")
    assert rows["plugin entry point"]["found"] == "sglang_dsv4.plugin:register"
    assert rows["hook model_class"]["status"] == "ok"
    assert "op sparse_attention" in rows
    assert rows["precision indexer_qk"]["found"] == "fp4"
    config = "7 layers (2 SWA, 3 CSA, 2 HCA), 8 experts; transformers'"
    assert rows["config.json"]["found"] == config
    assert "205 tensors" in rows["weights"]["found"]
    assert rows["draft head"]["found"] == "none"
    assert rows["tensor parallel"]["found"] == "1; sizes that work: 1, 2, 4, 8"
    assert "at most" in rows["memory"]["found"]
    parsers = "--tool-call-parser deepseekv4 --reasoning-parser deepseek-v4"
    assert rows["parsers"]["found"].endswith(parsers)
    assert "auto or bf16 or bfloat16" in rows["--kv-cache-dtype"]["found"]
    assert rows["tokenizer"]["found"] == "384 tokens"


@pytest.mark.parametrize(
    ("package", "found", "status"),
    [
        ("sglang", "0.5.17", "fail"),
        ("sglang", None, "fail"),
        ("transformers", "4.57.1", "warn"),
        ("xgrammar", None, "fail"),
        ("torch", "2.9.1", "warn"),
        ("torch", "2.13.0+cpu", "ok"),
        ("deepseek-recipe", None, "fail"),
    ],
)
def test_versions(
    package: str, found: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name != package:
            return real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(cli_doctor, "version", version)
    row = by_name(cli_doctor.check_versions())[package]
    assert (row.status, row.found) == (status, found or "not installed")
    if status != "ok":
        pin = cli_doctor._pins("sglang-dsv4" if package == "sglang" else "sglang")[package]
        assert (row.expected, row.remedy) == (pin, f"pip install {package}=={pin}")


def test_pins_are_read_from_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["A.b==1.2", "c[x,y] == 2.0+cu1; sys_platform == 'linux'", "d>=3", 'e==4; extra == "t"']
    monkeypatch.setattr(cli_doctor, "requires", lambda _: lines)
    assert cli_doctor._pins("any") == {"a.b": "1.2", "c": "2.0+cu1"}


def test_plugin_that_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "entry_points", lambda group: [])
    (row,) = cli_doctor.check_plugin()
    assert (row.status, row.found) == ("fail", "not registered")
    assert row.expected == "sglang_dsv4.plugin:register" and "pip install" in row.remedy


def test_plugin_that_cannot_be_imported(fake_hooks: Callable[[Any], None]) -> None:
    fake_hooks(ImportError("no module named x"))
    row = by_name(cli_doctor.check_plugin())["plugin import"]
    assert (row.status, row.found) == ("fail", "ImportError: no module named x")


def test_hook_that_does_not_fit(
    fake_hooks: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hooks([("kv_pool", False, "TypeError: takes 3"), ("model_class", True, "fits")])
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("fail")]
    assert len(failed) == 1 and failed[0].split() == [
        "fail",
        "hook",
        "kv_pool",
        "TypeError:",
        *"takes 3".split(),
    ]
    assert "-> pip install sglang==" in lines[lines.index(failed[0]) + 1]
    assert lines[-1].endswith(" 1 failed")


@pytest.mark.parametrize(
    ("variable", "value", "row"),
    [
        ("SGLANG_DSV4_OPS", "rms_norm=magic", "ops"),
        ("SGLANG_DSV4_OPS", "rms_norm", "ops"),
        ("SGLANG_DSV4_PRECISION", "lm_head=fp8", "precision"),
    ],
)
def test_switch_that_cannot_be_read(
    variable: str, value: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    rows = by_name(cli_doctor.check_ops() + cli_doctor.check_precision())
    assert rows[row].status == "fail"
    assert variable in rows[row].found and variable in rows[row].remedy


def test_doctor_refuses_a_provider_of_all_experts_as_the_server_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether or not this machine could run it."""
    monkeypatch.setenv("SGLANG_DSV4_OPS", "routed_experts_fp4=marlin")
    row = by_name(cli_doctor.check_all(None, 2, 2))["ops"]
    assert (row.status, row.found[-12:]) == ("fail", "or --ep-size")


def test_changed_precision_shows_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4_PRECISION", "indexer_qk=full")
    rows = cli_doctor.check_precision()
    assert [row.name for row in rows] == [f"precision {name}" for name in COMPONENTS]
    assert (rows[0].status, rows[0].found, rows[0].expected) == ("ok", "full", "fp4")


def test_device_of_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dsv4.backends import Machine

    monkeypatch.setattr(Machine, "probe", lambda: Machine("cuda", "NVIDIA H200", (9, 0)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 141 * 2**30))
    expected = "NVIDIA H200, compute capability 9.0, 141 GiB"
    assert cli_doctor.check_device() == [Row("device", "ok", expected)]


def test_broken_check_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, fake_hooks: Callable[[Any], None]
) -> None:
    def broken() -> list[Row]:
        raise RuntimeError("no driver")

    fake_hooks([])
    monkeypatch.setattr(cli_doctor, "check_device", broken)
    rows = by_name(cli_doctor.check_all(None))
    assert (rows["device"].status, rows["device"].found) == ("fail", "RuntimeError: no driver")
    assert "python" in rows and "precision lm_head" in rows


def test_checkpoint_with_a_refused_config(
    tmp_path: Path, fake_hooks: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_hooks([])
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v41"}')
    assert main(["doctor", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "this is DeepSeek-V4.1" in text
    assert "no tokenizer.json" in text


def test_checkpoint_without_a_tensor(made: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = shutil.copytree(made["vendor", "bfloat16"], tmp_path / "cut")
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.3.attn.attn_sink"]
    save_file(tensors, folder / "model.safetensors")
    config, found, *others = cli_doctor.check_checkpoint(folder)
    assert (config.status, found.status) == ("ok", "fail")
    assert {row.status for row in others} == {"ok"}
    assert "layers.3.attn.attn_sink" in found.found and found.remedy


def test_tokenizer_without_the_chat_tokens(
    made: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    raw = (made["vendor", "bfloat16"] / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(raw.replace("<think>", "<thought>"))
    (row,) = cli_doctor.check_tokenizer(tmp_path)
    assert (row.status, row.found) == ("fail", "no <think>")


def test_render_indents_what_takes_several_lines() -> None:
    rows = [Row("a", "ok", "1"), Row("long", "fail", "x\ny", "z", "do it")]
    assert cli_doctor.render(rows).splitlines() == [
        "ok    a     1",
        "fail  long  x",
        "            y  (expected: z)",
        "            -> do it",
        "1 ok, 0 warnings, 1 failed",
    ]


def test_doctor_sees_that_the_plugin_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "__none__")
    (row,) = cli_doctor.check_plugin()
    assert row.status == "fail" and "__none__" in row.found and "dsv4" in row.remedy


def test_doctor_sees_what_python_compiles_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package whose files have bytecode, and one, in another folder, where most have none."""
    for folder, package in (("a", "quick"), ("b", "slow")):
        place = tmp_path / folder / package
        place.mkdir(parents=True)
        for number in range(9):
            (place / f"m{number}.py").write_text("")
        (place / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    compileall.compile_dir(tmp_path / "a", quiet=2)
    monkeypatch.setattr(cli_doctor, "_SLOW_IMPORTS", ("quick",))
    (row,) = cli_doctor.check_bytecode()
    assert (row.status, row.found) == ("ok", "10 of 10 files of quick are compiled")
    monkeypatch.setattr(cli_doctor, "_SLOW_IMPORTS", ("quick", "slow", "absent_package"))
    (row,) = cli_doctor.check_bytecode()
    assert (row.status, row.found[:8]) == ("warn", "10 of 20")
    assert f"-m compileall -qq -j 0 {tmp_path / 'a'} {tmp_path / 'b'}" in row.remedy


def test_a_reader_may_have_seen_enough() -> None:
    """As `| head` has, which closes the pipe."""
    nano = Path(cli_doctor.__file__).parent / "nano"
    command = f"set -o pipefail; {sys.executable} -m sglang_dsv4.cli inspect {nano} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
