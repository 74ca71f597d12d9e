"""`sglang-dsv4 inspect`: what it counts, every verdict, every fault, and how it says so."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from checkpoint_files import SIZES, Headers, headers_of, write_holes
from sglang_dsv4 import cli_inspect, cli_make_tiny, doctor_checkpoint, inspect_plot, nano_demo_plot
from sglang_dsv4.backends import Machine
from sglang_dsv4.cli import main
from sglang_dsv4.cli_make_tiny import write_checkpoint
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.inspection import Deployment, Inspection, Verdict
from sglang_dsv4.memory_plan import GIB, GPUS, weight_bytes
from sglang_dsv4.parallel import tensor_parallel_sizes
from sglang_dsv4.survey import DraftHead, Survey
from sglang_dsv4.tiny_formats import RECIPES

RAW = cli_make_tiny.shipped_config("tiny", "bfloat16")
TINY = DSV4Config.from_dict(RAW)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}
FLASH = cli_make_tiny.shipped_config("flash-2l", "bfloat16") | {
    "num_hidden_layers": 43,
    "n_routed_experts": 256,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "num_hash_layers": 3,
    "quantization_config": FP8,
}


def holes(
    folder: Path, headers: Headers, raw: dict[str, Any] = RAW, shards: int = 1
) -> dict[str, str]:
    """A checkpoint of these headers; name -> file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    files = {name: f"part-{number % shards}" for number, name in enumerate(headers)}
    write_holes(folder, headers, files.__getitem__)
    return files


def vendor(raw: dict[str, Any] = RAW) -> dict[str, tuple[str, tuple[int, ...]]]:
    return headers_of(DSV4Config.from_dict(raw), RECIPES["vendor"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the released format, from headers alone."""
    folder = tmp_path_factory.mktemp("inspect") / "tiny"
    holes(folder, vendor(), RAW | {"quantization_config": FP8})
    return folder


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config alone, for what needs no header."""
    folder = tmp_path_factory.mktemp("flash")
    (folder / "config.json").write_text(json.dumps(FLASH))
    return folder


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["inspect", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


# ---- what is counted ----


@pytest.mark.parametrize(
    ("recipe", "gigabytes", "in_four_bits"),
    [
        ("vendor", (3.560, 3.590, 3.569), 1 / 2 + 1 / 32),
        ("nvfp4-experts", (3.761, 3.791, 3.770), 1 / 2 + 1 / 16),
        ("bf16", (13.154, 13.193, 13.163), None),
    ],
)
def test_published_bytes_of_a_layer(
    recipe: str, gigabytes: tuple[float, ...], in_four_bits: float | None, tmp_path: Path
) -> None:
    """An SWA, a CSA and an HCA layer of Flash, one checkpoint each, less what is outside layers.

    in_four_bits: bytes in memory of a value of a routed expert.
    """
    for ratio, expected in zip((0, 4, 128), gigabytes, strict=True):
        raw = FLASH | {"num_hidden_layers": 1, "compress_ratios": [ratio], "num_hash_layers": 0}
        headers = headers_of(DSV4Config.from_dict(raw), RECIPES[recipe])
        holes(tmp_path, headers, raw)
        found = Inspection(tmp_path, Deployment())
        rows = [row for row in found.holdings if row.layers]
        assert sum(row.bytes for row in rows) / 1e9 == pytest.approx(expected, abs=0.001)
        assert found.survey and found.survey.bytes == sum(
            SIZES[dtype] * torch.Size(shape).numel()
            for name, (dtype, shape) in headers.items()
            if "input_scale" not in name
        )
        assert sum(row.bytes for row in found.holdings) == found.survey.bytes
        in_memory = {row.component: row.memory for row in rows if row.component != "mHC"}
        factors = 768 * 4 if in_four_bits else 0
        assert in_memory["routed experts"] == 6_442_450_944 * (in_four_bits or 2) + factors
        values = 25_165_824  # of the shared expert, in BF16 or FP8 with a scale for each block
        shared = values * 2 if recipe == "bf16" else values + values // 128**2 * 4
        assert in_memory["shared expert"] == shared
        assert not found.refusals


def test_what_a_checkpoint_holds(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = shown(capsys, str(tiny))
    assert status == 0 and said["ok"] and said["verdict"] == "serves with these conversions"
    # As far as this small model is made of whole blocks.
    assert said["conversions"] == ["FP8 to BF16: 35 weights (attention, shared expert)"]
    assert said["kept"] == [
        "FP8 kept on a GPU: 14 weights (attention)",
        "FP8 kept on a GPU: 3 weights (indexer)",
        "MXFP4 kept on a GPU: 168 weights (routed experts)",
        "FP8 kept on a GPU: 7 weights (shared expert)",
    ]
    assert (said["files"], said["tensors"], said["used"]) == (1, 359 + 227, 359 + 227)
    assert (said["parameters"], said["names"]) == (7_126_167, {"vendor's": 358})
    assert said["config"] == "as shipped" and said["scale_names"] == {"scale": 227}
    assert said["tensor_parallel_sizes"] == [1, 2, 4, 8]
    assert said["warnings"] == said["contradictions"] == said["below_the_floor"] == []
    assert said["draft_head"]["kind"] == "none" and said["faults"] == {}
    experts = next(row for row in said["components"] if row["held"] == "MXFP4")
    assert (experts["component"], experts["run"]) == ("routed experts", "MXFP4")
    assert (experts["layers"], experts["weights"]) == (7, 168)
    assert experts["values"] == 168 * 64 * 128
    assert experts["bytes"] == experts["values"] // 2 + experts["values"] // 32
    assert experts["memory"] == experts["bytes"] + 168 * 4  # and a factor for each matrix
    memory = said["memory"]
    assert memory["device_bytes"] is memory["requests"] is memory["pool_tokens"] is None
    assert memory["bytes_per_context_token"] == 976


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (Deployment(), True),
        (Deployment(run=torch.float32), True),
        (Deployment(shared=True), False),
        (Deployment(routed_experts="bf16"), False),
        (Deployment(shared=True, routed_experts="fp4"), True),
    ],
)
def test_experts_in_four_bits_or_dense(wanted: Deployment, kept: bool, tiny: Path) -> None:
    found = Inspection(tiny, replace(wanted, linears="bf16"))
    weights = "168 weights (routed experts)"
    converted = [line for line in found.conversions if line.startswith("MXFP4")]
    assert converted == ([] if kept else [f"MXFP4 to BF16: {weights}"])
    where = "" if wanted.kind == "cpu" else " on a GPU"
    assert found.kept == ([f"MXFP4 kept{where}: {weights}"] if kept else [])
    assert found.verdict is Verdict.CONVERTS and not found.warnings  # FP8 is converted
    assert found.told().splitlines()[1:] == [*found.conversions, *found.kept]
    assert found.plan is not None
    saved = weight_bytes(found.slots, wanted.run, 1) - found.plan.weights
    values = 168 * 64 * 128
    in_four_bits = values // 2 + values // 32 + 168 * 4  # codes, scales, factors
    assert saved == (values * wanted.run.itemsize - in_four_bits if kept else 0)


def test_the_switch_counts_here_too(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_DSV4_PRECISION", "routed_experts=bf16,linears=bf16")
    status, said = shown(capsys, str(tiny))
    assert status == 0 and said["kept"] == []
    assert said["conversions"] == [
        "FP8 to BF16: 59 weights (attention, indexer, shared expert)",
        "MXFP4 to BF16: 168 weights (routed experts)",
    ]
    rows = {row.name: row for row in doctor_checkpoint.check_checkpoint(tiny)}
    assert rows["routed experts"].found == "MXFP4 -> BF16, 7 layers"
    assert rows["linear weights"].found == "FP8 -> BF16 (attention, indexer, shared expert)"
    monkeypatch.setenv("SGLANG_DSV4_PRECISION", "routed_experts=fp4,linears=fp8")
    rows = {row.name: row for row in doctor_checkpoint.check_checkpoint(tiny)}
    assert rows["routed experts"].found == "MXFP4 -> MXFP4, 7 layers"
    assert "FP8 -> FP8 (attention" in rows["linear weights"].found


def test_doctor_fails_where_linears_are_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in FP8, where NVFP4 is asked for; as a server and `inspect` would."""
    monkeypatch.setenv("SGLANG_DSV4_PRECISION", "linears=fp4")
    (refusal,) = Inspection(tiny, Deployment(linears="fp4")).refusals
    failed = [row for row in doctor_checkpoint.check_checkpoint(tiny) if row.status == "fail"]
    assert [row.found for row in failed] == [refusal] and "linears=fp4" in refusal


def test_layers_that_cannot_stay_in_four_bits_are_told(tiny: Path) -> None:
    """With 4 ranks an expert has 16 inputs on each: all layers are dense, and planned so."""
    found = Inspection(tiny, Deployment(tensor_parallel=4, linears="bf16"))
    (line,) = found.warnings
    assert line.startswith("the routed experts of layers 0 to 6 are dequantised at load")
    assert found.verdict is Verdict.CONVERTS and not found.kept
    assert found.plan is not None
    assert found.plan.weights == weight_bytes(found.slots, torch.bfloat16, 4)
    two = weight_bytes(found.slots, torch.bfloat16, 2, dict.fromkeys(range(7), 32))
    assert found.weights_of_a_rank(2) == two
    forced = Inspection(tiny, Deployment(tensor_parallel=4, routed_experts="fp4"))
    (reason,) = forced.refusals
    assert "no layer can stay so:\nthe routed experts of layers 0 to 6" in reason


def test_one_layer_of_another_format_is_dense(tmp_path: Path) -> None:
    headers = vendor()
    for name in [name for name in headers if name.startswith("layers.2.ffn.experts.5.w3.")]:
        del headers[name]
    headers["layers.2.ffn.experts.5.w3.weight"] = ("BF16", (64, 128))
    holes(tmp_path, headers, RAW | {"quantization_config": FP8})
    found = Inspection(tmp_path, Deployment(linears="bf16"))
    rows = [row for row in found.holdings if row.component == "routed experts"]
    assert [(row.held, row.run, row.weights, row.layers) for row in rows] == [
        *[("BF16", "BF16", 1, 1), ("MXFP4", "BF16", 23, 1), ("MXFP4", "MXFP4", 144, 6)],
    ]
    assert "MXFP4 to BF16: 23 weights (routed experts)" in found.conversions
    assert found.kept == ["MXFP4 kept on a GPU: 144 weights (routed experts)"]
    assert found.warnings == [
        "the routed experts of layer 2 are dequantised at load, not kept in four bits: they are"
        " BF16, FP16 or FP32 and MXFP4"
    ]


@pytest.mark.parametrize("headers", [True, False])
def test_four_bits_that_are_not_there_are_refused(tmp_path: Path, headers: bool) -> None:
    """By the headers, and by config.json where nothing else is there."""
    holes(tmp_path, headers_of(TINY, RECIPES["fp8-base"]), RAW | {"expert_dtype": "fp8"})
    found = Inspection(tmp_path, Deployment(routed_experts="fp4"), headers=headers)
    assert found.verdict is Verdict.REFUSED
    (reason,) = found.refusals
    assert reason.startswith("SGLANG_DSV4_PRECISION: routed_experts=fp4") and "but FP8" in reason
    row = next(r for r in rows_of(tmp_path, "fp4") if r.name == "routed experts")
    assert row.status == "fail" and row.found == reason


def rows_of(folder: Path, routed_experts: str) -> list[doctor_checkpoint.Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_DSV4_PRECISION", f"routed_experts={routed_experts}")
        return doctor_checkpoint.check_checkpoint(folder)


def test_a_config_is_believed_where_there_are_no_weights(flash: Path) -> None:
    """As for --load-format dummy."""
    dense, kept = (
        Inspection(flash, Deployment(), overrides={"expert_dtype": dtype}, headers=False)
        for dtype in ("fp8", "fp4")
    )
    assert dense.plan is not None and kept.plan is not None
    values, matrices = 43 * 256 * 3 * 4096 * 2048, 43 * 256 * 3
    saved = dense.plan.weights - kept.plan.weights
    assert saved == values * (2 - 1 / 2 - 1 / 32) - 4 * matrices
    assert kept.plan.weights / GIB == pytest.approx(145, abs=1)
    plain = Inspection(flash, Deployment(linears="bf16"), headers=False).plan
    assert plain is not None and plain.weights > kept.plan.weights + 5 * GIB


@pytest.mark.parametrize(
    ("format", "names", "dialect", "config"),
    [
        ("bf16", "vendor", "vendor's", "as shipped"),
        ("bf16", "hf", "transformers'", "transformers'"),
        ("nvfp4-all", "hf", "transformers'", "transformers'"),
    ],
)
def test_dialects_and_verdicts(
    format: str, names: str, dialect: str, config: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, preset="tiny", format=format, names=names)
    found = Inspection(tmp_path, Deployment())
    assert found.survey is not None and found.survey.dialect() == dialect
    assert cli_inspect.report(found)["config"] == config
    assert found.verdict is (Verdict.SERVES if format == "bf16" else Verdict.CONVERTS)
    assert bool(found.warnings) == (format == "nvfp4-all")
    text = cli_inspect.render(found)
    assert all(line in text for line in found.warnings)
    if format == "bf16":
        assert found.told() == f"{tmp_path}: serves"


def test_a_mixture_of_names_is_told(tmp_path: Path) -> None:
    headers = vendor()
    names = {"embed.weight": "model.embed_tokens.weight", "layers.0.attn.wq_a.weight": "x"}
    names["layers.0.attn.wq_a.weight"] = "model.layers.0.self_attn.q_a_proj.weight"
    names["layers.0.attn.wq_a.scale"] = "model.layers.0.self_attn.q_a_proj.weight_scale_inv"
    holes(tmp_path, {names.get(name, name): header for name, header in headers.items()})
    survey = Survey(tmp_path, TINY)
    assert survey.dialect() == "2 transformers', 356 vendor's"
    assert survey.scale_names == {"scale": 226, "weight_scale_inv": 1}
    assert not survey.faults


def test_config_that_contradicts_is_warned_of(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "copy")
    (folder / "config.json").write_text(json.dumps(RAW))
    status, said = shown(capsys, str(folder))
    line = "config.json says nothing of quantisation, the tensors are FP8 and MXFP4"
    assert status == 0 and said["warnings"] == said["contradictions"] == [line]


# ---- draft heads ----

DRAFTS: dict[str, tuple[list[str], DraftHead, int]] = {
    "none": ([], DraftHead.NONE, 0),
    "MTP": (["mtp.0.enorm.weight", "mtp.0.hnorm.weight", "mtp.0.norm.weight"], DraftHead.MTP, 1),
    "NextN": (["model.layers.7.enorm.weight", "model.layers.7.hnorm.weight"], DraftHead.MTP, 1),
    "DSpark": (
        [f"mtp.{block}.attn.wq_a.weight" for block in range(3)]
        + ["mtp.2.markov_head.weight", "mtp.2.confidence_head.weight"],
        DraftHead.DSPARK,
        3,
    ),
    "neither": (["mtp.0.attn.wq_a.weight"], DraftHead.UNKNOWN, 1),
    "half": (["mtp.0.attn.wq_a.weight", "mtp.0.enorm.weight"], DraftHead.UNKNOWN, 1),
}


@pytest.mark.parametrize(("names", "kind", "blocks"), DRAFTS.values(), ids=DRAFTS)
def test_draft_heads(
    names: list[str],
    kind: DraftHead,
    blocks: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spark = {"dspark_block_size": 5, "compress_ratios": RAW["compress_ratios"] + [0, 0]}
    raw = RAW | {"quantization_config": FP8} | (spark if kind is DraftHead.DSPARK else {})
    holes(tmp_path, vendor() | {name: ("BF16", (4, 8)) for name in names}, raw)
    status, said = shown(capsys, str(tmp_path))
    draft = said["draft_head"]
    assert status == 0 and not said["warnings"]
    assert (draft["kind"], draft["blocks"]) == (kind.value, blocks)
    assert (draft["tensors"], draft["bytes"]) == (len(names), 64 * len(names))
    assert sum(said["skipped"].values()) == len(names)
    row = {row.name: row for row in doctor_checkpoint.check_checkpoint(tmp_path)}["draft head"]
    assert row.found.startswith(kind.value)
    assert ("left out: no speculation" in row.found) == bool(names)


@pytest.mark.parametrize("said", [True, False])
def test_a_config_of_another_draft_head_is_warned_of(said: bool, tmp_path: Path) -> None:
    names = ["mtp.0.enorm.weight", "mtp.0.hnorm.weight"] if said else ["mtp.0.markov_head.weight"]
    raw = RAW | {"quantization_config": FP8} | ({"dspark_block_size": 5} if said else {})
    holes(tmp_path, vendor() | {name: ("BF16", (8,)) for name in names}, raw)
    (line,) = Inspection(tmp_path, Deployment()).warnings
    assert "dspark_block_size" in line


# ---- faults ----


def test_every_fault_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    headers = vendor()
    lost = [name for name in headers if name.startswith("layers.5.ffn.experts.")][:30]
    for name in (*lost, "layers.0.attn.wq_a.scale"):
        del headers[name]
    headers |= {f"layers.1.mystery_{number}.weight": ("BF16", (2,)) for number in range(25)}
    headers["norm.weight"] = ("BF16", (7,))
    headers["layers.2.ffn.gate.weight"] = ("F8_E5M2", (8, 128))
    SIZES["F8_E5M2"] = 1
    files = holes(tmp_path, headers, RAW, shards=4)
    broken = tmp_path / "part-3.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    status, said = shown(capsys, str(tmp_path), "--tp", "3", "--ep", "2", "--memory-gib", "1")
    faults = said["faults"]
    assert status == 1 and said["verdict"] == "refused"
    unread = {name for name, file in files.items() if file == "part-3"}
    assert faults[next(kind for kind in faults if "cannot be used" in kind)]["count"] == 1
    unknown = faults["unknown tensors"]
    mysteries = [name for name in headers if "mystery" in name and name not in unread]
    assert unknown["count"] == len(mysteries) and set(unknown["first"]) <= set(mysteries)
    missing = faults["missing tensors (by the vendor's names)"]
    weights = [name for name in lost if name.endswith(".weight")]
    assert missing["count"] == len(weights), "what is in a broken file is no further fault"
    assert missing["first"] == sorted(weights)
    scales = [name for name in lost if name.endswith(".scale")]
    assert len(weights) == len(scales) == 15
    wrong = [("norm.weight", "wrong shapes"), ("layers.2.ffn.gate.weight", "unsupported formats")]
    wrong.append(("layers.0.attn.wq_a.weight", "quantised weights whose scales are missing"))
    for name, kind in wrong:
        (found,) = [entry for entry in faults if entry.startswith(kind)] or [None]
        assert (found is not None) == (name not in unread), name
    assert sum(name in unread for name, _ in wrong) < 3
    told = "\n".join(said["refusals"])
    assert "tensor parallel size = 3 is refused" in told and "Sizes that work: 1, 2, 4, 8" in told
    assert main(["inspect", str(tmp_path)]) == 1
    assert all(reason.split("\n")[0] in capsys.readouterr().out for reason in said["refusals"][2:3])


def test_at_most_twenty_of_a_kind_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strangers = {f"stranger.{number:03}": ("BF16", (2,)) for number in range(123)}
    holes(tmp_path, vendor() | strangers)
    status, said = shown(capsys, str(tmp_path))
    unknown = said["faults"]["unknown tensors"]
    assert status == 1 and unknown["count"] == 123
    assert unknown["first"] == sorted(strangers)[:20]
    assert main(["inspect", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "123 unknown tensors:" in text and "and 103 more" in text
    assert "stranger.019" in text and "stranger.020" not in text


def damaged_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damaged_index, "is no index of shards"),
        (no_weights, "has no *.safetensors file"),
        (lambda folder: (folder / "part-0.safetensors").write_bytes(b""), "part-0.safetensors"),
    ],
)
def test_files_that_are_damaged(
    damage: Callable[[Path], None],
    told: str,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "copy")
    damage(folder)
    status, said = shown(capsys, str(folder))
    assert status == 1 and told in "\n".join(said["refusals"])
    assert not [kind for kind in said["faults"] if "missing" in kind]


# ---- verdicts of config, ranks and memory ----


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"model_type": "deepseek_v41"}', "this is DeepSeek-V4.1"),
        ("{", "cannot be read as JSON"),
        (json.dumps(RAW | {"sliding_window": 64}), "sliding_window = 64 is refused"),
    ],
)
def test_config_that_cannot_be_served(
    content: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    status, said = shown(capsys, str(tmp_path), "--tp", "3")
    assert status == 1 and len(said["refusals"]) == 1 and told in said["refusals"][0]
    assert main(["inspect", str(tmp_path)]) == 1
    assert f"{tmp_path}: refused" in capsys.readouterr().out


def test_sizes_of_tensor_parallelism(flash: Path) -> None:
    assert tensor_parallel_sizes(DSV4Config.from_dict(FLASH)) == [1, 2, 4, 8]
    pro = cli_make_tiny.shipped_config("pro-2l", "bfloat16")
    assert tensor_parallel_sizes(DSV4Config.from_dict(pro)) == [1, 2, 4, 8, 16]
    refused = Inspection(flash, Deployment(tensor_parallel=6), headers=False)
    assert refused.verdict is Verdict.REFUSED and refused.plan is None
    assert refused.refusals[0].endswith("Sizes that work: 1, 2, 4, 8.")


@pytest.mark.parametrize(("size", "groups"), [(4, 3), (1, 2), (8, 16)])
def test_sizes_of_expert_parallelism(
    size: int, groups: int, flash: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Deployment(tensor_parallel=size, expert_parallel=groups)
    refused = Inspection(flash, wanted, headers=False)
    assert refused.verdict is Verdict.REFUSED and refused.plan is None
    works = ", ".join(str(divisor) for divisor in (1, 2, 4, 8) if divisor <= size)
    assert refused.refusals[0].startswith(f"expert parallel size = {groups} is refused: must be")
    assert refused.refusals[0].endswith(f"Sizes that work: {works}.")
    doctor = doctor_checkpoint.check_checkpoint(flash, size, groups)
    assert any(row.status == "fail" and refused.refusals[0] == row.found for row in doctor)


def test_a_rank_with_whole_experts(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same bytes but for factors, of experts that stay in four bits where slices could not."""
    said = {}
    for groups in ("1", "8"):
        arguments = (str(tiny), "--tp", "8", "--ep", groups, "--gpu", "H100")
        status, said[groups] = shown(capsys, *arguments)
        assert status == 0 and said[groups]["expert_parallel_sizes"] == [1, 2, 4, 8]
        assert said[groups]["memory"]["expert_parallel"] == int(groups)
    assert any("dequantised at load" in line for line in said["1"]["warnings"])
    assert not any("dequantised at load" in line for line in said["8"]["warnings"])
    assert said["8"]["memory"]["weight_bytes"] < said["1"]["memory"]["weight_bytes"]
    assert main(["inspect", str(tiny), "--tp", "4", "--ep", "2"]) == 0
    text = capsys.readouterr().out
    assert "memory of one of 4 ranks, experts in 2 groups" in text
    assert re.search(r"sizes of --ep +1, 2, 4 with --tp 4", text)


def test_more_ranks_with_as_many_groups_are_proposed(flash: Path) -> None:
    small = Deployment(tensor_parallel=2, expert_parallel=2, device=100 * GIB, fraction=1)
    (refusal,) = Inspection(flash, small, headers=False).refused["memory"]
    assert "--tp-size 8 would do: 66.6 GiB each" in refusal


@pytest.mark.parametrize(
    ("ranks", "gpu", "told"),
    [
        (1, "H200", "a rank take 524.2 GiB in memory; a H200 has 139.0 GiB, of which 0.9"),
        (1, "H200", "--tp-size 8 would do: 66.6 GiB each."),
        (8, "A100-40", "No number of ranks that can share this model is enough"),
        (4, "H200", "one of 4 ranks take 132."),
        (8, "H200", ""),
    ],
)
def test_memory_of_flash(ranks: int, gpu: str, told: str, flash: Path) -> None:
    wanted = Deployment(tensor_parallel=ranks, device=GPUS[gpu] * GIB, device_name=f"a {gpu}")
    found = Inspection(flash, wanted, headers=False)
    assert bool(found.refusals) == bool(told)
    assert told in "".join(found.refusals)
    assert found.plan is not None and bool(found.plan.requests) != bool(told)


def test_weights_that_fit_and_leave_no_room(flash: Path) -> None:
    found = Inspection(flash, Deployment(tensor_parallel=8), headers=False)
    assert found.plan is not None and found.verdict is Verdict.SERVES
    device = int(found.plan.weights / 0.9) + (1 << 20)
    tight = Deployment(tensor_parallel=8, device=device)
    (line,) = Inspection(flash, tight, headers=False).refusals
    assert "and leave no room for the cache" in line


def test_memory_of_a_cpu_is_warned_of(flash: Path) -> None:
    wanted = Deployment(tensor_parallel=2, device=64 * GIB, device_name="here", shared=True)
    found = Inspection(flash, wanted, headers=False)
    assert found.verdict is Verdict.SERVES
    assert "here has for each 32.0 GiB" in found.warnings[0]


def test_a_request_that_is_too_long(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = shown(capsys, str(tiny), "--memory-gib", "0.112", "--context", "20000")
    assert status == 0 and said["memory"]["requests"] == 0
    made, fits = said["warnings"]
    assert made == "a request of 20,000 tokens: the model was made for 8,192"
    assert fits.startswith("no request of 20,000 tokens fits: the cache has room for ")


def test_memory_for_people(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", str(tiny), "--tp", "2", "--gpu", "h200", "--context", "4096"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    device = "memory of one of 2 ranks (a H200, 139.0 GiB, 0.9 of it for weights and cache)"
    assert device in text and "requests of 4,096 tokens" in text
    assert "cache, per context token  976 bytes" in text
    assert main(["inspect", str(tiny)]) == 0
    assert "(of which device? --gpu NAME, or --memory-gib X)" in capsys.readouterr().out


# ---- usage ----


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x", "--tp", "0"],
        ["x", "--context", "many"],
        ["x", "--memory-gib", "-1"],
        ["x", "--mem-fraction", "1.5"],
        ["x", "--gpu", "H100", "--memory-gib", "80"],
        ["x", "--plot", "picture.pdf"],
        ["x", "--plot", "/nowhere/picture.png"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["inspect", *arguments])
    assert stop.value.code == 2
    assert "usage: sglang-dsv4 inspect" in capsys.readouterr().err


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["inspect", "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "exit codes:" in text and "--json" in text
    assert "  sglang-dsv4 inspect /models/DeepSeek-V4-Flash --tp 8 --gpu H200" in text
    assert all(name in text for name in GPUS)


def test_what_is_named_must_be_known(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tiny), "--gpu", "H300"]) == 2
    assert "use one of A100-40, A100-80, L40S, H100, H200, B200" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err


# ---- the picture ----


def test_plot(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.png"
    status, said = shown(capsys, str(tiny), "--plot", str(path), "--memory-gib", "0.1")
    assert status == 0 and said["plot"] == str(path)
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.size == inspect_plot.SIZE
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}

    def rgb(text: str) -> tuple[int, ...]:
        return tuple(bytes.fromhex(text[1:]))

    drawn = [inspect_plot.COLOURS[kind] for kind in ("BF16", "F32", "FP8", "MXFP4")]
    drawn += [inspect_plot.WEIGHTS, inspect_plot.CACHE, inspect_plot.FREE]
    assert {rgb(colour) for colour in drawn} <= colours
    assert rgb(inspect_plot.COLOURS["NVFP4"]) not in colours
    found = Inspection(tiny, Deployment())
    assert found.survey is not None
    sizes = inspect_plot.part_sizes(found)
    assert sum(sum(formats.values()) for formats in sizes.values()) == found.survey.bytes


def test_plot_of_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v41"}')
    path = tmp_path / "memory.png"
    assert main(["inspect", str(tmp_path), "--plot", str(path)]) == 1
    assert path.stat().st_size > 1000


def test_plot_without_matplotlib_is_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = nano_demo_plot.importlib.util.find_spec
    hidden = lambda name: None if name == "matplotlib" else find_spec(name)  # noqa: E731
    monkeypatch.setattr(nano_demo_plot.importlib.util, "find_spec", hidden)
    assert main(["inspect", str(tmp_path), "--plot", str(tmp_path / "x.png")]) == 2
    assert f"not installed: {sys.executable} -m pip install matplotlib" in capsys.readouterr().err


# ---- the same for doctor ----


def test_doctor_tells_of_ranks_and_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(ranks: int = 1) -> dict[str, doctor_checkpoint.Row]:
        return {row.name: row for row in doctor_checkpoint.check_checkpoint(tiny, ranks)}

    assert rows()["tensor parallel"].found == "1; sizes that work: 1, 2, 4, 8"
    three = rows(3)
    assert three["tensor parallel"].status == "fail" and "memory" not in three
    assert "Sizes that work: 1, 2, 4, 8" in three["tensor parallel"].found
    monkeypatch.setattr(doctor_checkpoint, "machine_memory", lambda _: 8 << 20)
    assert rows()["memory"].status == "warn"
    monkeypatch.setattr(Machine, "probe", lambda: Machine("cuda", "NVIDIA H200", (9, 0)))
    few = rows()["memory"]
    assert few.status == "fail" and "this machine's NVIDIA H200 has 0.0 GiB" in few.found


def test_options_that_doctor_names() -> None:
    parsers, rows = doctor_checkpoint.check_options()
    assert parsers.found.endswith("--tool-call-parser deepseekv4 --reasoning-parser deepseek-v4")
    assert "auto or bf16 or bfloat16; others are refused" in rows.found
