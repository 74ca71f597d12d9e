"""DeepSeek-V4's config.json, read once: one frozen, complete, checked object for all our code.

config.json comes in several dialects. The shipped one has `compress_ratios`, `num_hash_layers`,
`rope_scaling` and two thetas; the one that transformers writes has `layer_types`,
`compress_rates`, `mlp_layer_types` and nested `rope_parameters`; early transformers builds wrote
`compress_rope_parameters` beside a flat `rope_parameters`. Where a file spells one thing in
several ways, the spellings must agree. Nothing that the model needs has a default.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A config.json that cannot be served: names the field, its value and what is allowed."""


class LayerKind(Enum):
    """What a layer attends to besides its window; the value is the compression ratio."""

    SWA = 0
    CSA = 4
    HCA = 128


@dataclass(frozen=True)
class YarnScaling:
    """Frequency scaling of the layers that have a compressor (no magnitude scaling in V4)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        where = "rope_scaling."
        for name in ("factor", "beta_fast", "beta_slow"):
            _check_positive(where + name, getattr(self, name))
        length = self.original_max_position_embeddings
        _check_integer(where + "original_max_position_embeddings", length, at_least=1)
        if self.beta_fast <= self.beta_slow:
            allowed = f"above beta_slow = {self.beta_slow}"
            raise _refusal(where + "beta_fast", self.beta_fast, allowed)


@dataclass(frozen=True)
class DSV4Config:
    """The model's sizes and constants, under the names of the shipped config.json.

    Sizes are in elements, lengths and positions in tokens. `layer_kinds` covers the main layers
    only: entries for draft layers (multi-token prediction) are dropped.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int
    layer_kinds: tuple[LayerKind, ...]
    num_hash_layers: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling | None
    max_position_embeddings: int
    num_nextn_predict_layers: int
    dspark_block_size: int | None
    bos_token_id: int
    eos_token_id: int | tuple[int, ...]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                _check_integer(field.name, value, at_least=0 if field.name in _MAY_BE_0 else 1)
            elif field.type is float:
                _check_positive(field.name, value)
        for name, (allowed, why) in _FIXED_SIZES.items():
            if getattr(self, name) != allowed:
                raise _refusal(name, getattr(self, name), f"{allowed}, {why}")
        if self.dspark_block_size is not None:
            _check_integer("dspark_block_size", self.dspark_block_size, at_least=1)
        self._check_relations()

    def _check_relations(self) -> None:
        layers = self.num_hidden_layers
        if len(self.layer_kinds) != layers:
            allowed = f"num_hidden_layers = {layers}"
            raise _refusal("the number of layer kinds", len(self.layer_kinds), allowed)
        if self.num_hash_layers > layers:
            allowed = f"at most num_hidden_layers = {layers}"
            raise _refusal("num_hash_layers", self.num_hash_layers, allowed)
        if self.num_attention_heads % self.o_groups:
            allowed = f"a divisor of num_attention_heads = {self.num_attention_heads}"
            raise _refusal("o_groups", self.o_groups, allowed)
        if self.num_experts_per_tok > self.n_routed_experts:
            allowed = f"at most n_routed_experts = {self.n_routed_experts}"
            raise _refusal("num_experts_per_tok", self.num_experts_per_tok, allowed)
        self._check_tokens("bos_token_id", (self.bos_token_id,))
        eos = self.eos_token_id
        self._check_tokens("eos_token_id", eos if isinstance(eos, tuple) else (eos,))

    def _check_tokens(self, field: str, tokens: tuple[int, ...]) -> None:
        if not tokens:
            raise _refusal(field, [], "a token id or a list of token ids")
        for token in tokens:
            _check_integer(field, token, at_least=0)
            if token >= self.vocab_size:
                raise _refusal(field, token, f"below vocab_size = {self.vocab_size}")

    @classmethod
    def from_checkpoint(
        cls, folder: str | Path, overrides: Mapping[str, Any] | None = None
    ) -> "DSV4Config":
        """Reads `folder`/config.json, changed by `overrides`; ConfigErrors name the file."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist: name the folder of a checkpoint") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} holds a JSON {type(raw).__name__}: expected an object")
        try:
            return cls.from_dict(raw | dict(overrides or {}))
        except (ConfigError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DSV4Config":
        """Reads the content of a config.json, in any dialect; raises ConfigError."""
        _refuse_other_models(raw)
        _refuse_other_variants(raw)
        rope_theta, compress_rope_theta, yarn = _read_rope(raw)
        eos = _required(raw, "eos_token_id")
        read: dict[str, Any] = {
            "layer_kinds": _read_layer_kinds(raw),
            "num_hash_layers": _read_num_hash_layers(raw),
            "qk_rope_head_dim": _read_qk_rope_head_dim(raw),
            "rope_theta": rope_theta,
            "compress_rope_theta": compress_rope_theta,
            "yarn": yarn,
            # Only the checkpoints with a DSpark draft head have it.
            "dspark_block_size": raw.get("dspark_block_size"),
            "eos_token_id": tuple(eos) if isinstance(eos, list) else eos,
        }
        same = {f.name: _required(raw, f.name) for f in fields(cls) if f.name not in read}
        return cls(**read, **same)

    def host_fields(self) -> dict[str, Any]:
        """What SGLang reads from a config.json of the shipped dialect, whatever the dialect was.

        Meant to override the fields of the Hugging Face config that SGLang builds: the dialect
        that transformers writes lacks `compress_ratios`, `num_hash_layers` and `rope_scaling`.
        `compress_ratios` has one entry per main layer.
        """
        scaling = None
        if self.yarn is not None:
            scaling = {"type": "yarn", "rope_type": "yarn", **vars(self.yarn)}
        return {
            "compress_ratios": [kind.value for kind in self.layer_kinds],
            "num_hash_layers": self.num_hash_layers,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "sliding_window": self.sliding_window,
            "index_n_heads": self.index_n_heads,
            "index_head_dim": self.index_head_dim,
            "index_topk": self.index_topk,
            "rope_theta": self.rope_theta,
            "compress_rope_theta": self.compress_rope_theta,
            "rope_scaling": scaling,
        }

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ConfigError naming everything that `size` ranks cannot share evenly."""
        _check_integer("tensor parallel size", size, at_least=1)
        shared = ("num_attention_heads", "o_groups", "moe_intermediate_size", "vocab_size")
        sizes = {name: getattr(self, name) for name in shared}
        uneven = ", ".join(f"{name} = {value}" for name, value in sizes.items() if value % size)
        if uneven:
            raise _refusal("tensor parallel size", size, f"a divisor of {uneven}")


_MAY_BE_0 = ("num_hash_layers", "num_nextn_predict_layers", "bos_token_id")
# Sizes that the cache layout and the kernels are made for -> (the one allowed value, why).
_FIXED_SIZES = {
    "head_dim": (512, "the width of a cache row"),
    "qk_rope_head_dim": (64, "a cache row is 448 channels without and 64 with rotation"),
    "index_head_dim": (128, "the width of an indexer key"),
    "sliding_window": (128, "the cache keeps a window of 128 tokens"),
}
# Fields that would select another variant of the model -> (the one allowed value, is it required).
# The optional ones are left out by some writers; the architecture then allows no other value.
_FIXED_CHOICES: dict[str, tuple[Any, bool]] = {
    "n_shared_experts": (1, True),
    "scoring_func": ("sqrtsoftplus", True),
    "tie_word_embeddings": (False, False),
    "num_key_value_heads": (1, False),
    "hidden_act": ("silu", False),
    "attention_bias": (False, False),
    "mlp_bias": (False, False),
}
_KIND_OF_RATIO = {kind.value: kind for kind in LayerKind}
_KIND_OF_LAYER_TYPE = {
    "sliding_attention": LayerKind.SWA,
    "compressed_sparse_attention": LayerKind.CSA,
    "heavily_compressed_attention": LayerKind.HCA,
}


def _refusal(field: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{field} = {json.dumps(value, default=repr)} is refused: must be {allowed}")


def _check_integer(field: str, value: object, *, at_least: int) -> None:
    at_most = 1 << 14 if field == "n_routed_experts" else (1 << 31) - 1  # what a damaged file says
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise _refusal(field, value, f"an integer of at least {at_least} and at most {at_most}")


def _check_positive(field: str, value: object) -> None:
    number = 0.0 if isinstance(value, bool) or not isinstance(value, int | float) else value
    if not 0 < number <= sys.float_info.max:  # inf, NaN, and integers that no float can hold
        raise _refusal(field, value, "a number above 0 that a float can hold")


def _required(raw: Mapping[str, Any], field: str, group: str = "") -> Any:
    if field not in raw:
        raise ConfigError(f"{group}{field} is missing: config.json must have it")
    return raw[field]


def _agreed(spellings: dict[str, Any], *, missing: str) -> Any:
    """The value that all spellings found in the file give; `missing` names the spellings known."""
    if not spellings:
        raise ConfigError(f"{missing} is missing: config.json must have it")
    (first, value), *others = spellings.items()
    for other, other_value in others:
        if other_value != value:
            both = f"{first} gives {value!r}, {other} gives {other_value!r}"
            raise ConfigError(f"{both}: the two must agree")
    return value


def _refuse_other_models(raw: Mapping[str, Any]) -> None:
    model_type = _required(raw, "model_type")
    found = [f for f in ("text_config", "kv_source_layer_ids", "engram_layer_ids") if raw.get(f)]
    if str(model_type).startswith("deepseek_v41") or (model_type == "deepseek_v4" and found):
        signs = [f"model_type = {json.dumps(model_type)}", *(f"it has {field}" for field in found)]
        raise ConfigError(
            f"this is DeepSeek-V4.1 ({', '.join(signs)}), another architecture:"
            " only DeepSeek-V4 (model_type deepseek_v4, no text_config) can be served"
        )
    if model_type != "deepseek_v4":
        raise _refusal("model_type", model_type, '"deepseek_v4"')


def _refuse_other_variants(raw: Mapping[str, Any]) -> None:
    for field, (allowed, needed) in _FIXED_CHOICES.items():
        value = _required(raw, field) if needed else raw.get(field, allowed)
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            raise _refusal(field, value, json.dumps(allowed))


def _read_list(raw: Mapping[str, Any], field: str) -> Sequence[Any]:
    if not isinstance(raw[field], list):
        raise _refusal(field, raw[field], "a list with one entry per layer")
    return raw[field]


def _read_layer_kinds(raw: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    layers = _required(raw, "num_hidden_layers")
    _check_integer("num_hidden_layers", layers, at_least=1)
    spellings = {}
    if "compress_ratios" in raw:
        # Draft layers follow the main ones, one (multi-token prediction) or three (DSpark). They
        # never compress, and the main model does without them.
        lengths = [layers, layers + 1] + [layers + 3] * ("dspark_block_size" in raw)
        spellings["compress_ratios"] = _kinds(raw, "compress_ratios", _KIND_OF_RATIO, lengths)
    if "layer_types" in raw:
        rates = _required(raw, "compress_rates")
        expected = {name: kind.value for name, kind in _KIND_OF_LAYER_TYPE.items() if kind.value}
        if rates != expected:
            raise _refusal("compress_rates", rates, json.dumps(expected))
        spellings["layer_types"] = _kinds(raw, "layer_types", _KIND_OF_LAYER_TYPE, [layers])
    return _agreed(spellings, missing="compress_ratios (or layer_types and compress_rates)")


def _kinds(
    raw: Mapping[str, Any], field: str, known: Mapping[Any, LayerKind], lengths: list[int]
) -> tuple[LayerKind, ...]:
    entries = _read_list(raw, field)
    if len(entries) not in lengths:
        allowed = f"{' or '.join(map(str, lengths))} for {lengths[0]} layers"
        raise _refusal(f"the length of {field}", len(entries), allowed)
    for index, entry in enumerate(entries):
        if not isinstance(entry, int | str) or isinstance(entry, bool) or entry not in known:
            raise _refusal(f"{field}[{index}]", entry, f"one of {', '.join(map(str, known))}")
    return tuple(known[entry] for entry in entries[: lengths[0]])


def _read_num_hash_layers(raw: Mapping[str, Any]) -> int:
    spellings = {}
    if "num_hash_layers" in raw:
        spellings["num_hash_layers"] = raw["num_hash_layers"]
    if "mlp_layer_types" in raw:
        types = _read_list(raw, "mlp_layer_types")
        count = types.count("hash_moe")
        expected = ["hash_moe"] * count + ["moe"] * (len(types) - count)
        if types != expected or len(types) != raw["num_hidden_layers"]:
            allowed = "one entry per layer, hash_moe for the first layers and moe for the others"
            raise _refusal("mlp_layer_types", types, allowed)
        spellings["mlp_layer_types"] = count
    return _agreed(spellings, missing="num_hash_layers (or mlp_layer_types)")


def _read_qk_rope_head_dim(raw: Mapping[str, Any]) -> int:
    spellings = {}
    if "qk_rope_head_dim" in raw:
        spellings["qk_rope_head_dim"] = raw["qk_rope_head_dim"]
    if raw.get("partial_rotary_factor") is not None:
        factor, head_dim = raw["partial_rotary_factor"], _required(raw, "head_dim")
        _check_positive("partial_rotary_factor", factor)
        _check_integer("head_dim", head_dim, at_least=1)
        spellings["partial_rotary_factor * head_dim"] = round(factor * head_dim)
    return _agreed(spellings, missing="qk_rope_head_dim (or partial_rotary_factor)")


def _read_rope(raw: Mapping[str, Any]) -> tuple[float, float, YarnScaling | None]:
    """(theta of layers without a compressor, theta of those with one, scaling of the latter)."""
    plain = {name: raw[name] for name in raw if name == "rope_theta"}
    compressed = {name: raw[name] for name in raw if name == "compress_rope_theta"}
    scalings: dict[str, YarnScaling | None] = {}
    nested = _group(raw, "rope_parameters") or {}
    if "main" in nested or "compress" in nested:
        main, compress = _group(nested, "main"), _group(nested, "compress")
    else:  # One group, of the layers without a compressor; its scaling is that of the others too.
        main, compress = nested or None, _group(raw, "compress_rope_parameters")
        if main:
            scalings["rope_parameters"] = _read_yarn("rope_parameters", main)
    if main and "rope_theta" in main:
        plain["rope_parameters"] = main["rope_theta"]
    if compress:
        scalings["the compress rope parameters"] = _read_yarn("rope_parameters.compress", compress)
        if "rope_theta" in compress:
            compressed["the compress rope parameters"] = compress["rope_theta"]
    # A null beside rope_parameters says nothing: transformers reads it as absent.
    if "rope_scaling" in raw and not (raw["rope_scaling"] is None and scalings):
        scalings["rope_scaling"] = _read_yarn("rope_scaling", _group(raw, "rope_scaling"))
    return (
        _agreed(plain, missing="rope_theta (or rope_parameters.main)"),
        _agreed(compressed, missing="compress_rope_theta (or rope_parameters.compress)"),
        _agreed(scalings, missing="rope_scaling (or rope_parameters.compress)"),
    )


def _group(raw: Mapping[str, Any], field: str) -> Mapping[str, Any] | None:
    group = raw.get(field)
    if group is not None and not isinstance(group, dict):
        raise _refusal(field, group, "an object or null")
    return group


def _read_yarn(field: str, group: Mapping[str, Any] | None) -> YarnScaling | None:
    """None where the file says that nothing is scaled."""
    if group is None:
        return None
    kinds = {f"{field}.{key}": group[key] for key in ("type", "rope_type") if key in group}
    kind = _agreed(kinds, missing=f"{field}.type (or rope_type)")
    if kind == "default":
        return None
    if kind != "yarn":
        raise _refusal(f"{field}.type", kind, '"yarn" or "default"')
    if (factor := group.get("attention_factor")) not in (None, 1):
        raise _refusal(f"{field}.attention_factor", factor, "1: V4 does not scale the rotation")
    names = (key.name for key in fields(YarnScaling))
    return YarnScaling(**{name: _required(group, name, f"{field}.") for name in names})
