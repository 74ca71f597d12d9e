"""config.json in every dialect gives the same config, and whatever cannot be served is named."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dsv4.config import ConfigError, DSV4Config, LayerKind, YarnScaling

YARN = {
    "type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
SHARED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}
FLASH: dict[str, Any] = SHARED | {
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "hidden_size": 4096,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_hidden_layers": 43,
    "o_groups": 8,
    "q_lora_rank": 1024,
    "routed_scaling_factor": 1.5,
}
PRO: dict[str, Any] = SHARED | {
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}
# The pre-trained models: nothing but the storage of the experts differs.
FLASH_BASE = {name: value for name, value in FLASH.items() if name != "expert_dtype"}
FLASH_DSPARK = FLASH | {
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
SHIPPED = {"flash": FLASH, "pro": PRO, "base": FLASH_BASE}


def saved_by_transformers(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    from transformers import DeepseekV4Config

    DeepseekV4Config(**copy.deepcopy(raw)).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def early_transformers(raw: dict[str, Any]) -> dict[str, Any]:
    """What builds of transformers before the release wrote."""
    early = {name: value for name, value in raw.items() if name != "rope_scaling"}
    rotary = YARN | {"rope_type": "yarn", "rope_theta": 10000, "partial_rotary_factor": 0.125}
    return early | {
        "compress_ratios": raw["compress_ratios"][: raw["num_hidden_layers"]],
        "partial_rotary_factor": 0.125,
        "rope_parameters": rotary,
        "compress_rope_parameters": rotary | {"rope_theta": 160000},
    }


def edited(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(raw) | changes


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in copy.deepcopy(raw).items() if name not in names}


# ---- what is read ----


def test_flash() -> None:
    config = DSV4Config.from_dict(FLASH)
    kinds = config.layer_kinds
    assert len(kinds) == config.num_hidden_layers == 43
    assert [kinds.count(kind) for kind in LayerKind] == [2, 21, 20]
    assert kinds[:4] == (LayerKind.SWA, LayerKind.SWA, LayerKind.CSA, LayerKind.HCA)
    assert kinds[-1] is LayerKind.CSA
    assert config.yarn == YarnScaling(16, 32, 1, 65536)
    assert (config.bos_token_id, config.eos_token_id) == (0, 1)
    assert (config.rope_theta, config.compress_rope_theta) == (10000, 160000)
    assert config.dspark_block_size is None
    same = {field.name for field in dataclasses.fields(config)} & FLASH.keys()
    assert {name: getattr(config, name) for name in same} == {name: FLASH[name] for name in same}


def test_pro() -> None:
    config = DSV4Config.from_dict(PRO)
    assert [config.layer_kinds.count(kind) for kind in LayerKind] == [0, 30, 31]
    assert config.layer_kinds[:3] == (LayerKind.HCA, LayerKind.HCA, LayerKind.CSA)
    assert (config.o_groups, config.index_topk, config.q_lora_rank) == (16, 1024, 1536)


def test_base_is_read_like_the_tuned_model() -> None:
    assert DSV4Config.from_dict(FLASH_BASE) == DSV4Config.from_dict(FLASH)


@pytest.mark.parametrize("drafts", [[], [0], [4]])
def test_entries_of_draft_layers_are_dropped(drafts: list[int]) -> None:
    main = FLASH["compress_ratios"][:43]
    raw = edited(FLASH, compress_ratios=main + drafts)
    assert DSV4Config.from_dict(raw) == DSV4Config.from_dict(FLASH)


def test_dspark() -> None:
    config = DSV4Config.from_dict(FLASH_DSPARK)
    assert config == dataclasses.replace(DSV4Config.from_dict(FLASH), dspark_block_size=5)


@pytest.mark.parametrize("name", SHIPPED)
def test_what_transformers_saves_gives_the_same_config(name: str, tmp_path: Path) -> None:
    saved = saved_by_transformers(SHIPPED[name], tmp_path)
    assert not {"compress_ratios", "num_hash_layers", "rope_scaling"} & saved.keys()
    assert DSV4Config.from_dict(saved) == DSV4Config.from_dict(SHIPPED[name])
    assert DSV4Config.from_checkpoint(tmp_path) == DSV4Config.from_dict(SHIPPED[name])


@pytest.mark.parametrize("name", SHIPPED)
def test_early_transformers_gives_the_same_config(name: str) -> None:
    early = early_transformers(SHIPPED[name])
    assert DSV4Config.from_dict(early) == DSV4Config.from_dict(SHIPPED[name])


def test_partial_rotary_factor_replaces_the_rotary_width(tmp_path: Path) -> None:
    saved = without(saved_by_transformers(FLASH, tmp_path), "qk_rope_head_dim")
    assert DSV4Config.from_dict(saved).qk_rope_head_dim == 64


def test_thetas_may_stand_in_rope_parameters_alone(tmp_path: Path) -> None:
    saved = saved_by_transformers(FLASH, tmp_path)
    bare = without(saved, "rope_theta", "compress_rope_theta")
    assert DSV4Config.from_dict(bare) == DSV4Config.from_dict(FLASH)


@pytest.mark.parametrize(
    "scaling", [None, {"type": "default"}, {"rope_type": "default", "rope_theta": 10000}]
)
def test_no_scaling(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    raw = edited(FLASH, rope_scaling=scaling)
    assert DSV4Config.from_dict(raw).yarn is None
    saved = saved_by_transformers(raw, tmp_path)
    assert DSV4Config.from_dict(saved) == DSV4Config.from_dict(raw)


@pytest.mark.parametrize("without", ["quantization_config", "scale_fmt"])
def test_quantization_config_decides_nothing(without: str) -> None:
    """Formats are read off the tensors: a checkpoint may say nothing, or not everything."""
    raw = copy.deepcopy(FLASH)
    (raw if without in raw else raw["quantization_config"]).pop(without)
    assert DSV4Config.from_dict(raw) == DSV4Config.from_dict(FLASH)


def test_several_ends_of_sentence() -> None:
    assert DSV4Config.from_dict(edited(FLASH, eos_token_id=[1, 128803])).eos_token_id == (1, 128803)


def test_config_is_frozen_and_hashable() -> None:
    config = DSV4Config.from_dict(FLASH)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]
    assert hash(config) == hash(DSV4Config.from_dict(FLASH))


def test_reading_leaves_the_raw_config_alone() -> None:
    raw = copy.deepcopy(FLASH)
    DSV4Config.from_dict(raw)
    assert raw == FLASH


# ---- what is refused ----

# field, value, what the message must hold besides both.
REFUSED: list[tuple[str, Any, str]] = [
    ("model_type", "deepseek_v3", '"deepseek_v4"'),
    ("n_shared_experts", 2, "must be 1"),
    ("n_shared_experts", True, "must be 1"),
    ("scoring_func", "softmax", '"sqrtsoftplus"'),
    ("tie_word_embeddings", True, "must be false"),
    ("num_key_value_heads", 8, "must be 1"),
    ("hidden_act", "gelu", '"silu"'),
    ("attention_bias", True, "must be false"),
    ("head_dim", 256, "must be 512"),
    ("qk_rope_head_dim", 32, "must be 64"),
    ("index_head_dim", 64, "must be 128"),
    ("sliding_window", 64, "must be 128"),
    ("swiglu_limit", 0, "above 0"),
    ("swiglu_limit", -10.0, "above 0"),
    ("swiglu_limit", float("inf"), "above 0"),
    ("swiglu_limit", float("nan"), "above 0"),
    ("swiglu_limit", "10", "above 0"),
    ("swiglu_limit", True, "above 0"),
    ("rms_norm_eps", 0.0, "above 0"),
    ("hc_eps", None, "above 0"),
    ("rope_theta", 0, "above 0"),
    ("compress_rope_theta", -1, "above 0"),
    ("routed_scaling_factor", [], "above 0"),
    ("vocab_size", 0, "at least 1"),
    ("hidden_size", 4096.0, "at least 1"),
    ("hidden_size", "4096", "at least 1"),
    ("num_hidden_layers", 0, "at least 1"),
    ("num_hidden_layers", None, "at least 1"),
    ("hc_mult", 0, "at least 1"),
    ("hc_sinkhorn_iters", 0, "at least 1"),
    ("index_topk", 0, "at least 1"),
    ("num_nextn_predict_layers", -1, "at least 0"),
    ("dspark_block_size", 0, "at least 1"),
    ("num_hash_layers", 44, "num_hidden_layers = 43"),
    ("num_hash_layers", -1, "at least 0"),
    ("o_groups", 7, "a divisor of num_attention_heads = 64"),
    ("num_experts_per_tok", 257, "n_routed_experts = 256"),
    ("bos_token_id", 129280, "vocab_size = 129280"),
    ("bos_token_id", None, "at least 0"),
    ("eos_token_id", -1, "at least 0"),
    ("eos_token_id", [], "a token id or a list"),
    ("compress_ratios", "0,4", "a list"),
    ("rope_scaling", "yarn", "an object"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), REFUSED)
def test_refusal_names_field_value_and_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        DSV4Config.from_dict(edited(FLASH, **{field: value}))
    message = str(refusal.value)
    assert message.startswith(f"{field} = {json.dumps(value)} is refused: must be ")
    assert allowed in message


REQUIRED = sorted(
    ({field.name for field in dataclasses.fields(DSV4Config)} & FLASH.keys())
    | {"model_type", "n_shared_experts", "scoring_func", "compress_ratios", "rope_scaling"}
)


@pytest.mark.parametrize("field", REQUIRED)
def test_missing_field_has_no_default(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}\b.* is missing"):
        DSV4Config.from_dict(without(FLASH, field))


def test_every_field_is_required_but_the_draft_block_size() -> None:
    fields = {field.name for field in dataclasses.fields(DSV4Config)}
    assert fields - set(REQUIRED) == {"layer_kinds", "yarn", "dspark_block_size"}


@pytest.mark.parametrize("field", ["layer_types", "compress_rates", "mlp_layer_types"])
def test_missing_field_of_transformers(field: str, tmp_path: Path) -> None:
    saved = without(saved_by_transformers(FLASH, tmp_path), field)
    with pytest.raises(ConfigError, match=f"{field}.* is missing"):
        DSV4Config.from_dict(saved)


@pytest.mark.parametrize("field", [name for name in YARN if name != "type"] + ["type"])
def test_missing_field_of_the_scaling(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rope_scaling\.{field}\b.* is missing"):
        DSV4Config.from_dict(edited(FLASH, rope_scaling=without(YARN, field)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"type": "linear"},
            'rope_scaling.type = "linear" is refused: must be "yarn" or "default"',
        ),
        ({"factor": 0}, "rope_scaling.factor = 0 is refused: must be a number above 0"),
        ({"beta_fast": 1}, "rope_scaling.beta_fast = 1 is refused: must be above beta_slow = 1"),
        ({"beta_slow": "1"}, 'rope_scaling.beta_slow = "1" is refused: must be a number above 0'),
        (
            {"original_max_position_embeddings": 1.5},
            "rope_scaling.original_max_position_embeddings = 1.5 is refused: must be an integer",
        ),
        (
            {"attention_factor": 1.277},
            "rope_scaling.attention_factor = 1.277 is refused: must be 1",
        ),
        ({"rope_type": "linear"}, "the two must agree"),
    ],
)
def test_refused_scaling(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        DSV4Config.from_dict(edited(FLASH, rope_scaling=YARN | changes))
    assert message in str(refusal.value)


@pytest.mark.parametrize("length", [0, 42, 45, 46])
def test_wrong_number_of_ratios(length: int) -> None:
    ratios = (FLASH["compress_ratios"] + [0, 0])[:length]
    with pytest.raises(ConfigError) as refusal:
        DSV4Config.from_dict(edited(FLASH, compress_ratios=ratios))
    expected = (
        f"the length of compress_ratios = {length} is refused: must be 43 or 44 for 43 layers"
    )
    assert str(refusal.value) == expected


@pytest.mark.parametrize("ratio", [8, "4", True, None, [4], 4.5])
def test_unknown_ratio(ratio: Any) -> None:
    ratios = list(FLASH["compress_ratios"])
    ratios[5] = ratio
    with pytest.raises(ConfigError) as refusal:
        DSV4Config.from_dict(edited(FLASH, compress_ratios=ratios))
    expected = f"compress_ratios[5] = {json.dumps(ratio)} is refused: must be one of 0, 4, 128"
    assert str(refusal.value) == expected


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layer_types", ["full_attention"] * 43, "sliding_attention, compressed_sparse_attention"),
        ("layer_types", ["sliding_attention"] * 42, "must be 43 for 43 layers"),
        ("compress_rates", {"compressed_sparse_attention": 8}, '"compressed_sparse_attention": 4'),
        ("mlp_layer_types", ["moe"] * 42, "one entry per layer"),
        ("mlp_layer_types", ["moe", "hash_moe"] + ["moe"] * 41, "hash_moe for the first layers"),
        ("mlp_layer_types", ["dense"] * 43, "hash_moe for the first layers"),
        ("mlp_bias", True, "must be false"),
        ("rope_parameters", [], "rope_parameters = [] is refused: must be an object or null"),
        ("rope_parameters", {}, "rope_scaling (or rope_parameters.compress) is missing"),
        ("rope_parameters", {"main": 1}, "main = 1 is refused: must be an object or null"),
        ("partial_rotary_factor", 0.25, "must agree"),
    ],
)
def test_refused_in_the_dialect_of_transformers(
    field: str, value: Any, message: str, tmp_path: Path
) -> None:
    saved = saved_by_transformers(FLASH, tmp_path) | {field: value}
    with pytest.raises(ConfigError) as refusal:
        DSV4Config.from_dict(saved)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": PRO["compress_ratios"][:43]}, "layer_types"),
        ({"num_hash_layers": 2}, "num_hash_layers gives 2, mlp_layer_types gives 3"),
        ({"rope_theta": 500}, "rope_theta gives 500, rope_parameters gives 10000"),
        ({"compress_rope_theta": 500}, "compress_rope_theta gives 500"),
        ({"rope_scaling": YARN | {"factor": 8}}, "factor=8"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim gives 32"),
    ],
)
def test_two_spellings_must_agree(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        DSV4Config.from_dict(saved_by_transformers(FLASH, tmp_path) | changes)
    assert message in str(refusal.value)
    assert str(refusal.value).endswith("the two must agree")


@pytest.mark.parametrize(
    "raw",
    [
        edited(FLASH, model_type="deepseek_v41"),
        edited(FLASH, kv_source_layer_ids=[1, 2]),
        edited(FLASH, engram_layer_ids=[1]),
        {"model_type": "deepseek_v41", "text_config": FLASH},
        {"model_type": "deepseek_v4", "text_config": FLASH},
    ],
    ids=["model_type", "kv sources", "engram", "nested", "nested without 1"],
)
def test_v41_is_refused_with_one_sentence(raw: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="^this is DeepSeek-V4.1 .* another architecture"
    ) as refusal:
        DSV4Config.from_dict(raw)
    assert "\n" not in str(refusal.value)


def test_direct_construction_is_checked_too() -> None:
    config = DSV4Config.from_dict(FLASH)
    with pytest.raises(ConfigError, match="^sliding_window = 64"):
        dataclasses.replace(config, sliding_window=64)
    with pytest.raises(ConfigError, match="^the number of layer kinds = 42"):
        dataclasses.replace(config, layer_kinds=config.layer_kinds[:-1])


# ---- files ----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "cannot be read as JSON"),
        (b'{"model_type": ', "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b"[1, 2]", "holds a JSON list: expected an object"),
        (b'{"model_type": "llama"}', 'model_type = "llama" is refused'),
    ],
)
def test_bad_file_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        DSV4Config.from_checkpoint(tmp_path)
    assert str(refusal.value).startswith(str(path))


# ---- what SGLang reads ----


def test_host_fields() -> None:
    assert DSV4Config.from_dict(FLASH).host_fields() == {
        "compress_ratios": FLASH["compress_ratios"][:43],
        "num_hash_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": YARN | {"rope_type": "yarn"},
    }


def test_host_fields_do_not_depend_on_the_dialect(tmp_path: Path) -> None:
    saved = DSV4Config.from_dict(saved_by_transformers(PRO, tmp_path))
    assert saved.host_fields() == DSV4Config.from_dict(PRO).host_fields()
    assert (
        DSV4Config.from_dict(edited(PRO, rope_scaling=None)).host_fields()["rope_scaling"] is None
    )


def test_host_fields_make_the_host_config_whole(tmp_path: Path) -> None:
    """What SGLang's model_config.py reads of this architecture, from either dialect."""
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

    host_class = _CONFIG_REGISTRY["deepseek_v4"]
    saved = saved_by_transformers(FLASH, tmp_path)
    fields = DSV4Config.from_dict(saved).host_fields()
    shipped = host_class.from_dict(copy.deepcopy(FLASH))
    completed = host_class.from_dict(saved | fields)
    read = ("head_dim", "qk_rope_head_dim", "index_head_dim", "sliding_window", "num_hash_layers")
    for name in (*read, "num_key_value_heads", "num_attention_heads", "hc_mult", "index_topk"):
        assert getattr(completed, name) == getattr(shipped, name), name
    assert completed.compress_ratios == shipped.compress_ratios[:43]
    assert shipped.rope_scaling.items() <= completed.rope_scaling.items()


# ---- tensor parallelism ----


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_tensor_parallel_sizes_of_flash(size: int) -> None:
    DSV4Config.from_dict(FLASH).check_tensor_parallel(size)


@pytest.mark.parametrize(
    ("size", "named", "not_named"),
    [
        (16, ["o_groups = 8"], ["num_attention_heads", "vocab_size"]),
        (3, ["num_attention_heads = 64", "o_groups = 8", "moe_intermediate_size = 2048"], []),
        (3, ["vocab_size = 129280"], []),
        (0, ["at least 1"], []),
    ],
)
def test_uneven_tensor_parallel_size(size: int, named: list[str], not_named: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^tensor parallel size = {size} is refused") as refusal:
        DSV4Config.from_dict(FLASH).check_tensor_parallel(size)
    assert all(text in str(refusal.value) for text in named)
    assert not any(text in str(refusal.value) for text in not_named)
