"""The table of components: defaults are the floor, and only allowed values are taken."""

import dataclasses

import pytest

from sglang_dsv4.precision import COMPONENTS, Precision, floor_component, parse
from sglang_dsv4.settings import SettingsError

FLOOR = ("lm_head", "router_gate", "compressor", "indexer_compressor", "indexer_weights")


def test_default_is_the_floor() -> None:
    precision = parse("")
    assert precision == Precision()
    assert precision.indexer_qk == "fp4"
    assert {getattr(precision, name) for name in FLOOR} == {"bf16"}


def test_every_component_has_a_row() -> None:
    assert [field.name for field in dataclasses.fields(Precision)] == list(COMPONENTS)


def test_indexer_without_the_grid() -> None:
    assert parse("indexer_qk=full") == dataclasses.replace(Precision(), indexer_qk="full")


@pytest.mark.parametrize("name", FLOOR)
def test_floor_may_be_named(name: str) -> None:
    assert parse(f"{name}=bf16") == Precision()


@pytest.mark.parametrize("name", FLOOR)
@pytest.mark.parametrize("value", ["nvfp4", "fp8", "fp4"])
def test_below_the_floor_is_refused(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        parse(f"{name}={value}")
    expected = f"SGLANG_DSV4_PRECISION: {name}='{value}' is refused: must be bf16"
    assert str(refusal.value) == expected


def test_unknown_component_lists_the_known_ones() -> None:
    with pytest.raises(SettingsError) as refusal:
        parse("attention=fp8")
    assert all(name in str(refusal.value) for name in COMPONENTS)


def test_description_has_a_line_for_each_component() -> None:
    lines = parse("indexer_qk=full").describe().splitlines()
    assert [line.split()[0] for line in lines] == list(COMPONENTS)
    assert lines[0].split()[:3] == ["indexer_qk", "full", "changed"]
    assert all(line.split()[1:3] == ["bf16", "default"] for line in lines[1:])


@pytest.mark.parametrize(
    ("tensor", "component"),
    [
        ("head", "lm_head"),
        ("ffn.gate", "router_gate"),
        ("attn.compressor.wkv", "compressor"),
        ("attn.compressor.wgate", "compressor"),
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
