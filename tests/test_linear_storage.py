"""Linear weights that stay in FP8 or NVFP4: which do, what lies in memory, and that logits are the
same."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
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
    expert_storage,
    format_claims,
    host,
    linear_storage,
    linears,
    precision,
    tiny_weights,
    weights,
)
from sglang_dsv4.backends import Machine, choose
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import TensorFormat
from sglang_dsv4.fp4 import FP4Matrix, FP4Rows
from sglang_dsv4.fp8 import FP8Matrix
from sglang_dsv4.graph_safety_step import SmallLM
from sglang_dsv4.inspection import Deployment, Inspection
from sglang_dsv4.linear_storage import LinearStorage
from sglang_dsv4.linears import ALL_DENSE, KeptLinears, KeptRows, named_rows
from sglang_dsv4.memory_plan import weight_bytes
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import KeptMatrix, default_dtype
from sglang_dsv4.precision import Precision
from sglang_dsv4.served.deepseek_v4 import DeepseekV4ForCausalLM
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.tensor_table import Slot, expected_tensors
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
ALL = frozenset(linears.HOLDERS.values())
INDEXER = frozenset({"attn.indexer.wq_b"})


def decide(
    config: DSV4Config = CONFIG, ranks: int = 1, chosen: str = "fp8", **other: TensorFormat
) -> LinearStorage:
    """In the format that stays, but for what is named: attn_wq_a=..."""
    slots = expected_tensors(config)
    usual = linear_storage.FORMATS.get(chosen, (TensorFormat.FP8,))[0]
    formats = dict.fromkeys(filter(linears.holder_of, slots), usual)
    for name, form in other.items():
        formats[f"layers.0.{name.replace('_', '.', 1)}.weight"] = form
    return decided(slots, formats, chosen, config=config, ranks=ranks)


def decided(
    slots: Mapping[str, Slot],
    formats: Mapping[str, TensorFormat],
    chosen: str,
    **changes: Any,
) -> LinearStorage:
    """On a GPU, in BF16, by one rank, unless said otherwise."""
    usual = {"config": CONFIG, "device": "cuda", "run": torch.bfloat16, "ranks": 1} | changes
    return linear_storage.decide(slots=slots, formats=formats, chosen=chosen, **usual)


def modules(kept: LinearStorage) -> dict[int, frozenset[str]]:
    return {layer: frozenset(one) for layer, one in kept.layers.items()}


# ---- which stay ----


def test_all_of_the_released_model_stay() -> None:
    for preset, ranks in (("flash-2l", 1), ("flash-2l", 8), ("pro-2l", 8), ("pro-2l", 16)):
        config = DSV4Config.from_dict(cli_make_tiny.shipped_config(preset, "bfloat16"))
        kept = modules(decide(config, ranks))
        whole = preset != "pro-2l" or ranks < 16  # there 3072 / 16 is no multiple of 128
        shared = frozenset() if whole else {n for n in ALL if n.startswith("ffn")}
        assert kept == {0: ALL - shared, 1: ALL - INDEXER - shared}


def test_what_is_multiplied_as_one_stays_as_one() -> None:
    kept = decide(attn_wkv=TensorFormat.DENSE, attn_wq_b=TensorFormat.NVFP4)
    assert modules(kept)[0] == ALL - {"attn.inputs", "attn.wq_b"}
    assert "layers.0.attn.wq_a.weight" not in kept.weights
    assert "layers.1.attn.wq_a.weight" in kept.weights


def test_shares_begin_with_a_block() -> None:
    """Two ranks: q_lora of 128 is not divided, wo_b's 256 columns and w13's 256 rows are."""
    assert modules(decide(ranks=2)) == {0: ALL, 1: ALL - INDEXER}
    narrow = DSV4Config.from_dict(WIDE | {"o_lora_rank": 64, "moe_intermediate_size": 192})
    assert modules(decide(narrow, 1))[1] == {"attn.inputs", "attn.wq_b", "attn.wo_b"} | {
        "ffn.shared_experts.w2"
    }
    assert modules(decide(narrow, 2))[1] == {"attn.inputs", "attn.wq_b"}


NOTHING = LinearStorage()


def test_nothing_stays_where_it_is_to_be_dense() -> None:
    slots = expected_tensors(CONFIG)
    assert decided(slots, dict.fromkeys(slots, TensorFormat.FP8), "bf16") == NOTHING
    assert NOTHING.anywhere == (ALL_DENSE,)
    for value, held in (("fp8", "FP8"), ("fp4", "NVFP4")):
        why = f"the checkpoint holds none of them in {held}"
        with pytest.raises(SettingsError, match=f"linears={value} .*: {why}. "):
            decided(slots, {}, value)


@pytest.mark.parametrize("form", linear_storage.FORMATS)
def test_auto_keeps_what_there_is_on_a_gpu(form: str) -> None:
    """As the explicit switch; on a CPU, or in FP32, nothing, where the switch still keeps it."""
    slots = expected_tensors(CONFIG)
    for held in linear_storage.FORMATS[form]:
        formats = dict.fromkeys(filter(linears.holder_of, slots), held)
        kept = decided(slots, formats, "auto")
        assert kept == decided(slots, formats, form)
        assert modules(kept) == {0: ALL, 1: ALL - INDEXER}
        assert kept.anywhere == (dict.fromkeys(ALL, form),)
        for change in ({"device": "cpu"}, {"run": torch.float32}):
            assert decided(slots, formats, "auto", **change) == NOTHING
            assert decided(slots, formats, form, **change) == kept


def test_auto_keeps_each_matrix_in_its_own_form() -> None:
    """And dense what is dense, MXFP4, or one above the other in both."""
    four, dense = TensorFormat.NVFP4, TensorFormat.DENSE
    other = {"attn_wq_b": four, "ffn_shared_experts.w2": four, "attn_wo_b": dense}
    kept = decide(chosen="auto", attn_wkv=four, attn_wo_a=TensorFormat.MXFP4, **other)
    assert kept.layers[0] == {
        **dict.fromkeys(("attn.wq_b", "ffn.shared_experts.w2"), "fp4"),
        **dict.fromkeys(("attn.indexer.wq_b", "ffn.shared_experts.w13"), "fp8"),
    }
    assert kept.layers[1] == dict.fromkeys(ALL - INDEXER, "fp8")
    assert kept.weights["layers.0.attn.wq_b.weight"] == "fp4"
    assert kept.weights["layers.1.attn.wq_b.weight"] == "fp8"
    assert "layers.0.attn.wq_a.weight" not in kept.weights
    one, two = kept.anywhere
    assert one.keys() == two.keys() == ALL
    for module in ALL:
        both = module in ("attn.wq_b", "ffn.shared_experts.w2")
        assert {one[module], two[module]} == ({"fp4", "fp8"} if both else {"fp8"})


def test_auto_is_dense_where_nothing_can_stay() -> None:
    slots = expected_tensors(CONFIG)
    for formats in ({}, dict.fromkeys(slots, TensorFormat.DENSE)):
        assert decided(slots, formats, "auto") == NOTHING
    odd = {"q_lora_rank": 40, "o_lora_rank": 40, "moe_intermediate_size": 40}
    narrow = DSV4Config.from_dict(WIDE | odd)
    assert decide(narrow, chosen="auto") == NOTHING
    with pytest.raises(SettingsError, match="linears=fp8 .*: none of them is made of whole"):
        decide(narrow, chosen="fp8")


def test_in_four_bits_whole_tiles_stay() -> None:
    """Of 16 rows and 32 inputs, of each group; NVFP4 of both kinds, also one below the other."""
    for preset, ranks in (("flash-2l", 1), ("flash-2l", 8), ("pro-2l", 8), ("pro-2l", 16)):
        config = DSV4Config.from_dict(cli_make_tiny.shipped_config(preset, "bfloat16"))
        assert modules(decide(config, ranks, "fp4")) == {0: ALL, 1: ALL - INDEXER}
    both = decide(
        chosen="fp4", attn_wkv=TensorFormat.COMPRESSED_TENSORS, attn_wq_b=TensorFormat.FP8
    )
    assert modules(both)[0] == ALL - {"attn.wq_b"} and both.anywhere == (dict.fromkeys(ALL, "fp4"),)
    assert both.weights["layers.0.attn.wkv.weight"] == "fp4"
    # 40 rows of each group, and of two ranks 24 inner channels of the shared expert.
    narrow = DSV4Config.from_dict(WIDE | {"o_lora_rank": 40, "moe_intermediate_size": 48})
    assert modules(decide(narrow, 1, "fp4"))[1] == ALL - INDEXER - {
        *("attn.wo_a", "attn.wo_b", "ffn.shared_experts.w2")
    }
    assert modules(decide(narrow, 2, "fp4"))[1] == {"attn.inputs", "attn.wq_b"}


# ---- the model ----


@dataclass(frozen=True)
class Held:
    """A checkpoint whose linear weights are all in one format. form: value of the component.
    name: of the format."""

    folder: Path
    form: str
    name: str


RECIPE_OF = {
    "vendor": ("fp8", "FP8"),
    "nvfp4-all": ("fp4", "NVFP4"),
    "compressed-tensors-w4a16": ("fp4", "compressed-tensors NVFP4"),
}


@pytest.fixture(scope="module", params=RECIPE_OF)
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Held:
    folder = tmp_path_factory.mktemp(request.param)
    cli_make_tiny.write_config(folder, WIDE)
    tensors = {}
    for entry in tiny_weights.quantised_entries(CONFIG, RECIPES[request.param], "vendor"):
        tensors |= tiny_weights.tensors(entry, torch.bfloat16, seed=0)
    write(folder, tensors)
    return Held(folder, *RECIPE_OF[request.param])


def logits(runner: Runner) -> torch.Tensor:
    """Of a prefill and a decode."""
    tokens = torch.randint(16, 384, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    request = runner.open()
    return torch.cat([runner.run(request, tokens[:-1]), runner.run(request, tokens[-1:])])


def test_logits_are_those_of_dequantised_weights(held: Held) -> None:
    small = {"pages": 4, "slots": 3}
    kept, dense = Runner(held.folder, linears=held.form, **small), Runner(held.folder, **small)
    assert modules(kept.linears) == {0: ALL, 1: ALL - INDEXER}
    kind = {"fp8": FP8Matrix, "fp4": FP4Matrix}[held.form]
    assert sum(isinstance(one, kind) for one in kept.lm.modules()) == 2 * len(ALL) - 1
    assert not [one for one in dense.lm.modules() if isinstance(one, KeptMatrix)]
    line = f"attn.wkv: {held.name} in the checkpoint -> {held.name}, kept, 2 layers"
    assert line in kept.report.components
    found, expected = logits(kept), logits(dense)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_auto_on_a_gpu_is_the_explicit_switch(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """As decided for a GPU, and computed here; bit for bit. On a CPU it is BF16."""
    small = {"pages": 4, "slots": 3, "dtype": torch.bfloat16}
    asked, dense = (Runner(held.folder, linears=value, **small) for value in (held.form, "bf16"))
    here = Runner(held.folder, **small)
    assert not here.linears.layers and torch.equal(logits(here), logits(dense))
    decide = linear_storage.decide
    monkeypatch.setattr(
        linear_storage, "decide", lambda *a, **known: decide(*a, **known | {"device": "cuda"})
    )
    found = Runner(held.folder, **small)
    assert found.linears == asked.linears and found.linears.layers
    assert found.report.components == asked.report.components
    assert torch.equal(logits(found), logits(asked))
    assert not Runner(held.folder, **small | {"dtype": torch.float32}).linears.layers


def shares(rows: KeptRows, cut: int) -> list[list[torch.Tensor]]:
    """Of two ranks: codes, scales and factors; the latter are of rows."""
    halves = [rows.codes.chunk(2, cut), rows.scales.chunk(2, cut)]
    if isinstance(rows, FP4Rows):
        halves.append(rows.factors.chunk(2) if cut == 0 else (rows.factors, rows.factors))
    return [list(part) for part in zip(*halves, strict=True)]


def parts(rows: KeptRows) -> list[torch.Tensor]:
    return [getattr(rows, field.name) for field in fields(rows)]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_share(held: Held, rank: int) -> None:
    """Codes, scales and factors of two ranks are halves of the whole's."""
    parallel = Parallel(rank=rank, size=2, all_reduce=lambda x: x)
    options = {"linears": held.form, "pages": 4, "slots": 3}
    whole, part = (
        named_rows(Runner(held.folder, **options, **more).lm)
        for more in ({}, {"parallel": parallel})
    )
    cuts = {"wq_b": 0, "wo_a": 0, "wo_b": 1, "w2": 1}
    assert whole.keys() == part.keys() and len(whole) == 2 * 8 - 1
    for name, rows in whole.items():
        own, last = part[name], name.removesuffix(".weight").rpartition(".")[2]
        if last == "w13":
            for number in (0, 1):  # gate, up
                expected = shares(rows.part(number, 2), 0)[rank]
                assert equal(parts(own.part(number, 2)), expected), name
        elif "indexer" in name or last not in cuts:
            assert equal(parts(own), parts(rows)), name
        else:
            assert equal(parts(own), shares(rows, cuts[last])[rank]), name


def test_four_bits_are_those_of_the_file(held: Held) -> None:
    """Bit for bit, with the factor of each matrix of a stack."""
    if held.form == "fp8":
        return
    tensors = dict(read(held.folder))
    rows = named_rows(Runner(held.folder, linears="fp4", pages=4, slots=3).lm)
    for name, stacked in (
        ("attn.wq_a", "attn.wq_a.weight"),
        ("attn.wkv", "attn.wkv.weight"),
        ("attn.indexer.wq_b", "attn.indexer.wq_b.weight"),
        ("ffn.shared_experts.w3", "ffn.shared_experts.w13"),
    ):
        found, name = rows[f"model.layers.0.{stacked}"], f"layers.0.{name}"
        if name.endswith("w3"):
            found = found.part(1, 2)
        packed = f"{name}.weight_packed"
        codes = tensors[packed if packed in tensors else f"{name}.weight"]
        assert torch.equal(found.codes, codes.view(torch.uint8))
        assert torch.equal(found.scales, tensors[f"{name}.weight_scale"].view(torch.uint8))
        if packed in tensors:
            factor = 1 / tensors[f"{name}.weight_global_scale"]
        else:
            factor = tensors[f"{name}.weight_scale_2"]
        assert (found.factors == factor).all() and factor != 1
    first, second = (rows[f"model.layers.0.attn.{name}.weight"] for name in ("wq_a", "wkv"))
    assert first.shape != second.shape and first.factors[0] != second.factors[0]


def test_what_was_packed_is_loaded_anew(held: Held) -> None:
    """As where a server's weights are updated."""
    runner = Runner(held.folder, linears=held.form, pages=4, slots=3)
    kept = [one for one in runner.lm.modules() if isinstance(one, FP8Matrix | FP4Matrix)]
    expected = [one.codes.clone() for one in kept]
    for one in kept:
        one.codes.zero_()
        one.packed = True
    weights.load(runner.lm, read(held.folder), CONFIG, rank=0, size=1)
    for one, codes in zip(kept, expected, strict=True):
        assert torch.equal(one.codes, codes) and not one.packed


def test_what_no_tensor_came_for_stays_packed(held: Held) -> None:
    """An update that is refused leaves the others as kernels read them."""
    lm = Runner(held.folder, linears=held.form, pages=4, slots=3).lm
    for one in (kept := [one for one in lm.modules() if isinstance(one, FP8Matrix | FP4Matrix)]):
        one.packed = True
    stream = [(name, tensor) for name, tensor in read(held.folder) if "layers.1.attn.wo_b" in name]
    with pytest.raises(CheckpointError, match="missing tensors"):
        weights.load(lm, stream, CONFIG, rank=0, size=1)
    assert [one for one in kept if not one.packed] == [lm.model.layers[1].attn.wo_b]


@pytest.mark.parametrize("chosen", ["fp8", "fp4"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_plan_counts_what_lies_in_memory(size: int, chosen: str) -> None:
    kept, ops = decide(ranks=size, chosen=chosen), choose(Machine.probe("cpu"))
    parallel = Parallel(rank=0, size=size, all_reduce=lambda x: x)
    with default_dtype(torch.bfloat16):
        model = SmallLM(CONFIG, ops, Precision(), parallel, {}, kept.layers)
    held = sum(parameter.nbytes for parameter in model.parameters())
    held += sum(table.nbytes for name, table in model.named_buffers() if "tid2eid" in name)
    slots = expected_tensors(CONFIG)
    assert weight_bytes(slots, torch.bfloat16, size, {}, kept.weights) == held
    assert held < weight_bytes(slots, torch.bfloat16, size)


def test_inspect_and_warm_follow(held: Held) -> None:
    found = Inspection(held.folder, Deployment())
    asked = Inspection(held.folder, Deployment(linears=held.form))
    assert found.holdings == asked.holdings and found.plan == asked.plan
    names = ["attention", "indexer", "shared expert"]
    kept = [row for row in found.holdings if row.run == held.name and row.component in names]
    assert [row.component for row in kept] == names and [row.layers for row in kept] == [2, 1, 2]
    modules = Runner(held.folder, linears=held.form, pages=4, slots=3).lm.modules()
    bytes_held = sum(
        parameter.nbytes
        for module in modules
        if isinstance(module, KeptMatrix)
        for parameter in module.parameters()
    )
    assert sum(row.memory for row in kept) == bytes_held
    # An indexer's other weights are of the floor: in nvfp4-all in NVFP4, too, but not kept.
    floor = [row for row in found.holdings if row.held == held.name and row not in kept]
    assert ("indexer" in [row.component for row in floor]) == (held.name == "NVFP4")
    assert all(row.run == "BF16" for row in floor if row.component != "routed experts")
    assert f"{held.name} kept on a GPU: 14 weights (attention)" not in found.conversions
    assert [line for line in found.kept if line.endswith("(shared expert)")] == [
        f"{held.name} kept on a GPU: 6 weights (shared expert)"
    ]
    dense = Inspection(held.folder, Deployment(linears="bf16"))
    assert found.plan.weights < dense.plan.weights and not dense.refusals
    for other in (Deployment(shared=True), Deployment(run=torch.float32)):
        elsewhere = Inspection(held.folder, other)
        assert all(row.run != held.name for row in elsewhere.holdings if row.component in names)
    assert warmed(held, "auto") == warmed(held, held.form) == (dict.fromkeys(ALL, held.form),)
    assert warmed(held, "bf16") == warmed(held, "auto", "float32") == (ALL_DENSE,)


def warmed(held: Held, value: str, dtype: str = "bfloat16") -> tuple[KeptLinears, ...]:
    """What `warm` takes it for on a GPU."""
    arguments = Namespace(checkpoint=held.folder, config=None, tp_size=1, dtype=dtype)
    return cli_warm.kept_linears(CONFIG, value, "cuda", arguments).anywhere


def test_released_models_are_warmed_up_in_fp8() -> None:
    flash = Namespace(checkpoint=None, config="flash", tp_size=8, dtype="bfloat16")
    config = cli_warm.chosen_config(None, "flash")
    for value in ("auto", "fp8"):
        kept = cli_warm.kept_linears(config, value, "cuda", flash)
        assert kept.anywhere == (dict.fromkeys(ALL, "fp8"),)
    with pytest.raises(SettingsError, match="linears=fp4"):
        cli_warm.kept_linears(config, "fp4", "cuda", flash)
    tiny = Namespace(checkpoint=None, config="tiny", tp_size=1, dtype="bfloat16")
    config = cli_warm.chosen_config(None, "tiny")
    assert cli_warm.kept_linears(config, "auto", "cuda", tiny) == NOTHING


@pytest.mark.parametrize("headers", [True, False])
def test_the_served_model_is_built_for_what_is_there(
    headers: bool, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json says nothing of formats in the one case, and nothing else does in the other."""
    monkeypatch.setattr(host, "has_headers", lambda: headers)
    monkeypatch.setattr(host, "checkpoint_folder", lambda: held.folder)
    (recipe,) = (recipe for recipe, two in RECIPE_OF.items() if two == (held.form, held.name))
    raw = {} if headers else dict(RECIPES[recipe].config)
    read_from: list[Path] = []
    stored = expert_storage.stored_formats

    def watched(folder: Path, wanted: Callable[[str], bool]) -> dict[str, TensorFormat]:
        read_from.append(folder)
        return stored(folder, wanted)

    monkeypatch.setattr(expert_storage, "stored_formats", watched)

    def kept(value: str, device: str, run: torch.dtype = torch.bfloat16) -> LinearStorage:
        made: Any = SimpleNamespace(
            config=CONFIG,
            chosen=precision.parse(f"linears={value}"),
            ops=SimpleNamespace(machine=Machine(device, device, None)),
            parallel=Parallel(),
        )
        with default_dtype(run):
            return DeepseekV4ForCausalLM._storage(made, raw)[1]

    all_of_them = {0: ALL, 1: ALL - INDEXER}
    assert modules(kept(held.form, "cpu")) == modules(kept("auto", "cuda")) == all_of_them
    assert read_from == [held.folder] * 2 * headers  # once for experts and all else
    for value, device, run in (
        ("bf16", "cuda", torch.bfloat16),
        ("auto", "cpu", torch.bfloat16),
        ("auto", "cuda", torch.float32),
    ):
        assert kept(value, device, run) == NOTHING


def test_inspect_refuses_what_cannot_stay(tmp_path: Path) -> None:
    cli_make_tiny.write_config(tmp_path, WIDE)
    found = Inspection(tmp_path, Deployment(linears="fp8"), headers=False)
    (reason,) = found.refused["linears"]
    assert "linears=fp8" in reason and reason in found.refusals
    automatic = Inspection(tmp_path, Deployment(), headers=False)
    assert not automatic.refusals and not automatic.conversions


CLAIMS: dict[str, TensorFormat | None] = {
    "vendor": TensorFormat.FP8,
    "nvfp4-experts": TensorFormat.FP8,
    "nvfp4-all": TensorFormat.NVFP4,
    "compressed-tensors-w4a16": TensorFormat.COMPRESSED_TENSORS,
    "compressed-tensors-w4a4": None,  # attention is in FP8
    "bf16": None,
}


@pytest.mark.parametrize("recipe", CLAIMS)
def test_what_a_config_says_of_linear_weights(recipe: str) -> None:
    assert format_claims.linears(RECIPES[recipe].config) is CLAIMS[recipe]


@pytest.mark.parametrize("ignored", ["re:.*self_attn.*", "*.shared_experts.*", "layers.*.attn.*"])
def test_what_it_leaves_out_is_not_claimed(ignored: str) -> None:
    said = dict(RECIPES["nvfp4-all"].config["quantization_config"])
    said["ignore"] = [*said["ignore"], ignored]
    assert format_claims.linears({"quantization_config": said}) is None


# ---- what is refused ----


def load(held: Held, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """With one tensor changed."""
    tensors = dict(read(held.folder))
    tensors[name] = change(tensors[name].clone())
    load_all(held, tensors)


def load_all(held: Held, tensors: dict[str, torch.Tensor]) -> None:
    kept = {layer: dict.fromkeys(one, held.form) for layer, one in modules(decide()).items()}
    with default_dtype(torch.bfloat16):
        model = SmallLM(CONFIG, choose(Machine.probe("cpu")), Precision(), Parallel(), {}, kept)
    weights.load(model, tensors.items(), CONFIG, rank=0, size=1)


def nan(values: torch.Tensor) -> torch.Tensor:
    values.view(torch.uint8)[-1, -1] = 0xFF  # in E4M3 and UE8M0
    return values


@pytest.mark.parametrize("part", ["weight", "scale"])
@pytest.mark.parametrize("name", ["attn.wkv", "ffn.shared_experts.w3", "attn.indexer.wq_b"])
def test_nan_is_refused(held: Held, name: str, part: str) -> None:
    if held.form == "fp4":  # no code is NaN
        part = "weight_scale"
    with pytest.raises(CheckpointError, match=rf"layers.0.{name}.{part}: 1 of .* NaN or infinite"):
        load(held, f"layers.0.{name}.{part}", nan)


def test_wrong_factors_are_refused(held: Held) -> None:
    names = {"NVFP4": "weight_scale_2", "compressed-tensors NVFP4": "weight_global_scale"}
    for value in (0.0, -1.0, torch.inf) if held.name in names else ():
        name = f"layers.0.attn.wkv.{names[held.name]}"
        with pytest.raises(CheckpointError, match=f"{name}: expected a positive number"):
            load(held, name, lambda factor, value=value: torch.full_like(factor, value))


def test_another_format_is_refused(held: Held) -> None:
    """Where the model was built by what config.json says."""
    tensors = dict(read(held.folder))
    name = "layers.1.attn.wo_b"
    for part in [part for part in tensors if part.startswith(name)]:
        del tensors[part]
    shape = CONFIG.hidden_size, CONFIG.o_groups * CONFIG.o_lora_rank
    tensors[f"{name}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"linears=bf16[\s\S]*layers.1.attn.wo_b.weight: BF16"
    ):
        load_all(held, tensors)
