"""Linear weights that stay in FP8: which do, what lies in memory, and that logits are the same."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint_files import read, write
from inprocess import Runner
from sglang_dsv4 import (
    cli_make_tiny,
    cli_warm,
    host,
    linear_storage,
    precision,
    tiny_weights,
    weights,
)
from sglang_dsv4.backends import Machine, choose
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import TensorFormat
from sglang_dsv4.fp8 import FP8Matrix
from sglang_dsv4.graph_safety_step import SmallLM
from sglang_dsv4.inspection import Deployment, Inspection
from sglang_dsv4.memory_plan import weight_bytes
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import default_dtype
from sglang_dsv4.precision import Precision
from sglang_dsv4.served.deepseek_v4 import DeepseekV4ForCausalLM
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.tensor_table import expected_tensors
from sglang_dsv4.tiny_formats import RECIPES
from sglang_dsv4.weights import CheckpointError

# Every matrix of whole blocks: the released model's proportions, but far smaller.
WIDE = cli_make_tiny.shipped_config("tiny", "bfloat16") | {
    "compress_ratios": [4, 128, 0],
    "num_hidden_layers": 2,
    "num_hash_layers": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "moe_intermediate_size": 256,
}
CONFIG = DSV4Config.from_dict(WIDE)
ALL = frozenset(linear_storage.HOLDERS.values())
INDEXER = frozenset({"attn.indexer.wq_b"})


def decide(config: DSV4Config = CONFIG, ranks: int = 1, **other: TensorFormat):
    """In FP8, but for what is named: attn_wq_a=..."""
    slots = expected_tensors(config)
    formats = linear_storage.from_claims({"quantization_config": {"quant_method": "fp8"}}, slots)
    for name, form in other.items():
        formats[f"layers.0.{name.replace('_', '.', 1)}.weight"] = form
    return linear_storage.decide(config, slots, formats, chosen="fp8", ranks=ranks)


# ---- which stay ----


def test_all_of_the_released_model_stay() -> None:
    for preset, ranks in (("flash-2l", 1), ("flash-2l", 8), ("pro-2l", 8), ("pro-2l", 16)):
        config = DSV4Config.from_dict(cli_make_tiny.shipped_config(preset, "bfloat16"))
        kept = decide(config, ranks).fp8
        whole = preset != "pro-2l" or ranks < 16  # there 3072 / 16 is no multiple of 128
        shared = frozenset() if whole else {n for n in ALL if n.startswith("ffn")}
        assert kept == {0: ALL - shared, 1: ALL - INDEXER - shared}


def test_what_is_multiplied_as_one_stays_as_one() -> None:
    kept = decide(attn_wkv=TensorFormat.DENSE, attn_wq_b=TensorFormat.NVFP4)
    assert kept.fp8[0] == ALL - {"attn.inputs", "attn.wq_b"}
    assert "layers.0.attn.wq_a.weight" not in kept.weights
    assert "layers.1.attn.wq_a.weight" in kept.weights


def test_shares_begin_with_a_block() -> None:
    """Two ranks: q_lora of 128 is not divided, wo_b's 256 columns and w13's 256 rows are."""
    assert decide(ranks=2).fp8 == {0: ALL, 1: ALL - INDEXER}
    narrow = DSV4Config.from_dict(WIDE | {"o_lora_rank": 64, "moe_intermediate_size": 192})
    assert decide(narrow, 1).fp8[1] == {"attn.inputs", "attn.wq_b", "attn.wo_b"} | {
        "ffn.shared_experts.w2"
    }
    assert decide(narrow, 2).fp8[1] == {"attn.inputs", "attn.wq_b"}


def test_nothing_stays_unless_asked_for() -> None:
    slots = expected_tensors(CONFIG)
    formats = dict.fromkeys(slots, TensorFormat.FP8)
    stays = linear_storage.decide(CONFIG, slots, formats, chosen="bf16", ranks=1)
    assert not stays.fp8 and not stays.weights
    with pytest.raises(SettingsError, match="linears=fp8 .*nothing can stay so"):
        linear_storage.decide(CONFIG, slots, {}, chosen="fp8", ranks=1)


# ---- the model ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the released format."""
    folder = tmp_path_factory.mktemp("fp8")
    cli_make_tiny.write_config(folder, WIDE)
    tensors = {}
    for entry in tiny_weights.quantised_entries(CONFIG, RECIPES["vendor"], "vendor"):
        tensors |= tiny_weights.tensors(entry, torch.bfloat16, seed=0)
    write(folder, tensors)
    return folder


def logits(runner: Runner) -> torch.Tensor:
    """Of a prefill and a decode."""
    tokens = torch.randint(16, 384, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    request = runner.open()
    return torch.cat([runner.run(request, tokens[:-1]), runner.run(request, tokens[-1:])])


def test_logits_are_those_of_dequantised_weights(folder: Path) -> None:
    small = {"pages": 4, "slots": 3}
    kept, dense = Runner(folder, linears="fp8", **small), Runner(folder, **small)
    assert kept.linears.fp8 == {0: ALL, 1: ALL - INDEXER}
    held = [one for one in kept.lm.modules() if isinstance(one, FP8Matrix)]
    assert len(held) == 2 * len(ALL) - 1
    assert not [one for one in dense.lm.modules() if isinstance(one, FP8Matrix)]
    assert "attn.wkv: FP8 in the checkpoint -> FP8, kept, 2 layers" in kept.report.components
    found, expected = logits(kept), logits(dense)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_share(folder: Path, rank: int) -> None:
    """Codes and scales of two ranks are halves of the whole's."""
    parallel = Parallel(rank=rank, size=2, all_reduce=lambda x: x)
    options = {"linears": "fp8", "pages": 4, "slots": 3}
    whole, part = Runner(folder, **options), Runner(folder, parallel=parallel, **options)
    for layer in (0, 1):
        for name, cut in (("wq_b", 0), ("wo_a", 0), ("wo_b", 1)):
            full, own = (getattr(r.lm.model.layers[layer].attn, name) for r in (whole, part))
            for tensor in ("codes", "scales"):
                expected = getattr(full, tensor).chunk(2, cut)[rank]
                assert torch.equal(getattr(own, tensor), expected), (name, tensor)
        full, own = (r.lm.model.layers[layer].ffn.shared_experts for r in (whole, part))
        for tensor in ("codes", "scales"):
            halves = [each.chunk(2)[rank] for each in getattr(full.w13, tensor).chunk(2)]
            assert torch.equal(getattr(own.w13, tensor), torch.cat(halves))
            assert torch.equal(getattr(own.w2, tensor), getattr(full.w2, tensor).chunk(2, 1)[rank])


@pytest.mark.parametrize("size", [1, 2])
def test_the_plan_counts_what_lies_in_memory(size: int) -> None:
    kept, ops = decide(ranks=size), choose(Machine.probe("cpu"))
    parallel = Parallel(rank=0, size=size, all_reduce=lambda x: x)
    with default_dtype(torch.bfloat16):
        model = SmallLM(CONFIG, ops, Precision(), parallel, {}, kept.fp8)
    held = sum(parameter.nbytes for parameter in model.parameters())
    held += sum(table.nbytes for name, table in model.named_buffers() if "tid2eid" in name)
    slots = expected_tensors(CONFIG)
    assert weight_bytes(slots, torch.bfloat16, size, {}, kept.weights) == held
    assert held < weight_bytes(slots, torch.bfloat16, size)


def test_inspect_and_warm_follow(folder: Path) -> None:
    found = Inspection(folder, Deployment(linears="fp8"))
    fp8 = [row for row in found.holdings if row.held == "FP8"]
    assert [row.component for row in fp8] == ["attention", "indexer", "shared expert"]
    assert {row.run for row in fp8} == {"FP8"} and not any("FP8" in c for c in found.conversions)
    assert all(row.memory == row.values + row.values // 4096 for row in fp8)
    assert found.plan.weights < Inspection(folder, Deployment()).plan.weights
    arguments = Namespace(checkpoint=folder, config=None, tp_size=1)
    assert cli_warm.modules_in_fp8(CONFIG, "fp8", arguments) == ALL
    assert not cli_warm.modules_in_fp8(CONFIG, "bf16", arguments)
    flash = Namespace(checkpoint=None, config="flash", tp_size=8)
    config = cli_warm.chosen_config(None, "flash")
    assert cli_warm.modules_in_fp8(config, "fp8", flash) == ALL


@pytest.mark.parametrize("headers", [True, False])
def test_the_served_model_is_built_for_what_is_there(
    headers: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json says nothing of FP8 in the one case, or there is nothing else in the other."""
    monkeypatch.setattr(host, "has_headers", lambda: headers)
    monkeypatch.setattr(host, "checkpoint_folder", lambda: folder)
    raw = {} if headers else {"quantization_config": {"quant_method": "fp8"}}
    for value, expected in (("fp8", {0: ALL, 1: ALL - INDEXER}), ("bf16", {})):
        made: Any = SimpleNamespace(
            config=CONFIG, chosen=precision.parse(f"linears={value}"), parallel=Parallel()
        )
        assert DeepseekV4ForCausalLM._linear_storage(made, raw).fp8 == expected


def test_inspect_refuses_what_cannot_stay(tmp_path: Path) -> None:
    cli_make_tiny.write_config(tmp_path, WIDE)
    found = Inspection(tmp_path, Deployment(linears="fp8"), headers=False)
    (reason,) = found.refused["linears"]
    assert "linears=fp8" in reason and reason in found.refusals
    assert not Inspection(tmp_path, Deployment(), headers=False).refusals


# ---- what is refused ----


def load(folder: Path, name: str, change) -> None:
    tensors = dict(read(folder))
    tensors[name] = change(tensors[name].clone())
    with default_dtype(torch.bfloat16):
        model = SmallLM(CONFIG, choose(Machine.probe("cpu")), Precision(), Parallel(), {}, FP8)
    weights.load(model, tensors.items(), CONFIG, rank=0, size=1)


FP8 = {0: ALL, 1: ALL - INDEXER}


def nan(values: torch.Tensor) -> torch.Tensor:
    values.view(torch.uint8)[-1, -1] = 0xFF  # in E4M3 and UE8M0
    return values


@pytest.mark.parametrize("part", ["weight", "scale"])
@pytest.mark.parametrize("name", ["attn.wkv", "ffn.shared_experts.w3", "attn.indexer.wq_b"])
def test_nan_is_refused(folder: Path, name: str, part: str) -> None:
    with pytest.raises(CheckpointError, match=rf"layers.0.{name}.{part}: 1 of .* NaN or infinite"):
        load(folder, f"layers.0.{name}.{part}", nan)


def test_another_format_is_refused(folder: Path, tmp_path: Path) -> None:
    """Where the model was built by what config.json says."""
    tensors = dict(read(folder))
    del tensors["layers.1.attn.wo_b.scale"]
    shape = tensors["layers.1.attn.wo_b.weight"].shape
    tensors["layers.1.attn.wo_b.weight"] = torch.zeros(shape, dtype=torch.bfloat16)
    with default_dtype(torch.bfloat16):
        model = SmallLM(CONFIG, choose(Machine.probe("cpu")), Precision(), Parallel(), {}, FP8)
    with pytest.raises(
        CheckpointError, match=r"linears=bf16[\s\S]*layers.1.attn.wo_b.weight: BF16"
    ):
        weights.load(model, tensors.items(), CONFIG, rank=0, size=1)
