"""The table of components: the floor by default, joint names, and flips to NVFP4 at load."""

import dataclasses
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from checkpoint_files import FakeModel, Tensors, assert_same, shapes_of, share
from sglang_dsv4 import formats, tiny_formats, tiny_weights, weights
from sglang_dsv4.cli_make_tiny import shipped_config
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.precision import COMPONENTS, Precision, floor_component, keeps_stored, parse
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.weights import CheckpointError, LoadReport

FLOOR = (
    *("lm_head", "router_gate", "compressor_kv", "compressor_gate"),
    *("indexer_compressor", "indexer_weights"),
)
CONFIG = DSV4Config.from_dict(shipped_config("tiny", "bfloat16"))
# Component -> ends of its weights' vendor names, and how many the tiny model has of them.
TENSORS = {
    "lm_head": (r"^head", 1),
    "router_gate": (r"\.ffn\.gate", 7),
    "compressor_kv": (r"\.attn\.compressor\.wkv", 5),
    "compressor_gate": (r"\.attn\.compressor\.wgate", 5),
    "indexer_compressor": (r"\.attn\.indexer\.compressor\.(wkv|wgate)", 6),
    "indexer_weights": (r"\.attn\.indexer\.weights_proj", 3),
}


# ---- the table ----


def test_default_is_the_floor() -> None:
    precision = parse("")
    assert precision == Precision()
    assert precision.indexer_qk == "fp4"
    assert precision.routed_experts == precision.linears == "auto"
    assert {getattr(precision, name) for name in FLOOR} == {"bf16"}


def test_every_component_has_a_row() -> None:
    assert [field.name for field in dataclasses.fields(Precision)] == list(COMPONENTS)
    others = {"indexer_qk", "routed_experts", "linears"}
    assert set(COMPONENTS) == {*others, *FLOOR} == {*others, *TENSORS}


def test_indexer_without_the_grid() -> None:
    assert parse("indexer_qk=full") == dataclasses.replace(Precision(), indexer_qk="full")


@pytest.mark.parametrize("name", ["routed_experts", "linears"])
def test_auto_is_by_the_device(name: str) -> None:
    for value in COMPONENTS[name].values:
        on_gpu, on_cpu = value != "bf16", value not in ("auto", "bf16")
        assert (keeps_stored(value, "cuda"), keeps_stored(value, "cpu")) == (on_gpu, on_cpu)


@pytest.mark.parametrize("name", FLOOR)
def test_floor_may_be_named_and_flipped(name: str) -> None:
    assert parse(f"{name}=bf16") == Precision()
    assert parse(f"{name}=nvfp4") == dataclasses.replace(Precision(), **{name: "nvfp4"})


def test_a_joint_name_stands_for_its_parts() -> None:
    both = parse("compressor_kv=nvfp4,compressor_gate=nvfp4")
    assert parse("router_gate=nvfp4,compressor=nvfp4") == dataclasses.replace(
        both, router_gate="nvfp4"
    )
    assert parse("compressor=bf16") == Precision()


def test_a_part_that_is_named_itself_wins() -> None:
    expected = parse("compressor_gate=nvfp4")
    assert parse("compressor_kv=bf16,compressor=nvfp4") == expected
    assert parse("compressor=nvfp4,compressor_kv=bf16") == expected


@pytest.mark.parametrize("name", [*FLOOR, "compressor"])
@pytest.mark.parametrize("value", ["fp8", "fp4", "NVFP4"])
def test_other_values_are_refused(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        parse(f"{name}={value}")
    expected = f"SGLANG_DSV4_PRECISION: {name}='{value}' is refused: must be bf16 or nvfp4"
    assert str(refusal.value) == expected


def test_unknown_component_lists_the_known_ones() -> None:
    with pytest.raises(SettingsError) as refusal:
        parse("attention=fp8")
    assert all(name in str(refusal.value) for name in (*COMPONENTS, "compressor"))


def test_description_has_a_line_for_each_component() -> None:
    lines = parse("indexer_qk=full,router_gate=nvfp4").describe().splitlines()
    assert [line.split()[0] for line in lines] == list(COMPONENTS)
    values = {line.split()[0]: line.split()[1:3] for line in lines}
    assert values.pop("indexer_qk") == ["full", "changed"]
    assert values.pop("router_gate") == ["nvfp4", "changed"]
    assert values.pop("routed_experts") == values.pop("linears") == ["auto", "default"]
    assert all(value == ["bf16", "default"] for value in values.values())


@pytest.mark.parametrize(
    ("tensor", "component"),
    [
        ("head", "lm_head"),
        ("ffn.gate", "router_gate"),
        ("attn.compressor.wkv", "compressor_kv"),
        ("attn.compressor.wgate", "compressor_gate"),
        ("attn.indexer.compressor.wkv", "indexer_compressor"),
        ("attn.indexer.compressor.wgate", "indexer_compressor"),
        ("attn.indexer.weights_proj", "indexer_weights"),
        ("attn.indexer.wq_b", None),
        ("attn.wkv", None),
        ("attn.wq_b", None),
        ("ffn.experts.*.w1", None),
        ("ffn.shared_experts.w1", None),
        ("embed", None),
    ],
)
def test_the_floor_names_its_tensors(tensor: str, component: str | None) -> None:
    assert floor_component(tensor) == component
    assert parse(f"{component or 'lm_head'}=nvfp4").flips(tensor) == (component is not None)
    assert not Precision().flips(tensor)


# ---- flips at load ----


@pytest.fixture(scope="module")
def master() -> Tensors:
    """The tiny checkpoint in BF16; its head has its largest value in its last row."""
    tensors = {
        entry.name: tiny_weights.values(entry, torch.bfloat16, seed=0)
        for entry in tiny_weights.vendor_entries(CONFIG)
    }
    tensors["head.weight"][-1, 3] = -2.5
    return tensors


def stored_as_nvfp4(master: Tensors, component: str) -> Tensors:
    """The checkpoint with that component's weights in NVFP4."""
    pattern, count = TENSORS[component]
    names = [name for name in master if re.search(pattern + r"\.weight$", name)]
    assert len(names) == count
    encoded = [tiny_formats.encode("nvfp4", name, master[name].float()) for name in names]
    kept = {name: values for name, values in master.items() if name not in names}
    return kept | {name: tensor for tensors in encoded for name, tensor in tensors.items()}


def loaded(
    tensors: Tensors,
    chosen: str,
    rank: int = 0,
    size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensors, LoadReport]:
    model = FakeModel(shapes_of(CONFIG, size), dtype)
    precision = parse(chosen)
    report = weights.load(model, tensors.items(), CONFIG, rank=rank, size=size, chosen=precision)
    return model.values(), report


def changed(found: Tensors, before: Tensors) -> set[str]:
    return {name for name in found if not torch.equal(found[name], before[name])}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("component", FLOOR)
def test_a_flip_gives_what_an_nvfp4_checkpoint_would(
    component: str, dtype: torch.dtype, master: Tensors
) -> None:
    expected, _ = loaded(stored_as_nvfp4(master, component), "", dtype=dtype)
    found, _ = loaded(master, f"{component}=nvfp4", dtype=dtype)
    assert_same(found, expected)
    before, _ = loaded(master, "", dtype=dtype)
    pattern, count = TENSORS[component]
    names = changed(found, before)
    assert len(names) == count
    assert all(re.search(pattern + r"\.weight$", name) for name in names)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several chunks of rows in every matrix."""
    monkeypatch.setattr(formats, "CHUNK", formats.CHUNK >> 6)
    yield


@pytest.mark.parametrize("size", [1, 8])
def test_ranks_round_as_the_whole(size: int, master: Tensors, small_chunks: None) -> None:
    """The largest value of the head, which scales all of it, is in the last rank's share."""
    everything = ",".join(f"{name}=nvfp4" for name in FLOOR)
    tensors = master
    for name in FLOOR:
        tensors = stored_as_nvfp4(tensors, name) if name != "lm_head" else tensors
    whole, _ = loaded(stored_as_nvfp4(master, "lm_head"), "")
    for rank in {0, size // 2, size - 1}:
        found, _ = loaded(master, everything, rank, size)
        assert_same(
            {"head.weight": found["head.weight"]},
            {"head.weight": share("head.weight", whole["head.weight"], rank, size)},
        )
        expected, _ = loaded(tensors, "lm_head=nvfp4", rank, size)
        assert_same(found, expected)


def test_a_flip_is_told_once(master: Tensors) -> None:
    report = loaded(master, "router_gate=nvfp4,lm_head=nvfp4")[1]
    flipped = [line for line in report.components if "flipped" in line]
    assert flipped == [
        "ffn.gate: BF16 in the checkpoint -> NVFP4 values (flipped), 7 layers",
        "head: BF16 in the checkpoint -> NVFP4 values (flipped)",
    ]
    assert not any("flipped" in line for line in loaded(master, "")[1].components)


def test_what_is_quantised_already_is_not_flipped(master: Tensors) -> None:
    tensors = stored_as_nvfp4(master, "router_gate")
    expected, _ = loaded(tensors, "")
    found, report = loaded(tensors, "router_gate=nvfp4")
    assert_same(found, expected)
    (line,) = [line for line in report.components if line.startswith("ffn.gate")]
    assert line == (
        "ffn.gate: NVFP4 in the checkpoint -> BF16 at load, not flipped: quantised already,"
        " 7 layers (below the floor)"
    )


def test_a_damaged_master_is_refused_though_it_is_flipped(master: Tensors) -> None:
    head = master["head.weight"].clone()
    head[5, 7] = float("inf")
    with pytest.raises(CheckpointError, match="head.weight: 1 of .* NaN or infinite"):
        loaded(master | {"head.weight": head}, "lm_head=nvfp4")


def test_odd_widths_are_refused_in_words() -> None:
    narrow = DSV4Config.from_dict(shipped_config("tiny", "bfloat16") | {"hidden_size": 24})
    drawn: list[tuple[str, Tensor]] = [
        (entry.name, tiny_weights.values(entry, torch.bfloat16, seed=0))
        for entry in tiny_weights.vendor_entries(narrow)
    ]
    model = FakeModel(shapes_of(narrow), torch.bfloat16)
    with pytest.raises(CheckpointError, match="head.weight: NVFP4 needs a multiple of 16 inputs"):
        weights.load(model, drawn, narrow, rank=0, size=1, chosen=parse("lm_head=nvfp4"))
