"""The formats of random checkpoints: which weights are quantised how, and what the config says.

Each is a format in which DeepSeek-V4 circulates, tensor for tensor.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_ATTENTION = tuple(f"*.attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"))
_INDEX_QUERY = ("*.attn.indexer.wq_b.weight",)
_EXPERTS, _SHARED = ("*.ffn.experts.*",), ("*.ffn.shared_experts.*",)
_FLOOR = (
    *("*.compressor.wkv.weight", "*.compressor.wgate.weight"),
    *("*.attn.indexer.weights_proj.weight", "*.ffn.gate.weight"),
)
_VENDOR_FP8 = (*_ATTENTION, *_INDEX_QUERY, *_SHARED)

_FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
}
_NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}
_NOT_EXPERTS = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]


def _compressed_tensors(*, activations: bool, fp8: bool) -> dict[str, Any]:
    nvfp4: dict[str, Any] = {
        "format": "nvfp4-pack-quantized",
        "targets": ["re:.*ffn.*" if fp8 else "Linear"],
        "weights": _NVFP4_WEIGHTS | {"strategy": "tensor_group", "scale_dtype": "float8_e4m3fn"},
        "input_activations": {"dynamic": "local", **_NVFP4_WEIGHTS} if activations else None,
    }
    groups = {"group_0": nvfp4}
    if fp8:
        blocks = {
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "block_structure": [128, 128],
        }
        groups["group_1"] = {
            "format": "float-quantized",
            "targets": ["re:.*attn.*"],
            "weights": blocks,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if fp8 else "nvfp4-pack-quantized",
        "config_groups": groups,
        "ignore": [
            *("re:.*[.](compressor|indexer)[.](wkv|wgate|kv_proj|gate_proj)$", "re:.*weights_proj"),
            *("re:.*(ffn|mlp)[.]gate$", "head", "lm_head"),
        ],
    }


def _modelopt(algorithm: str, exclude: list[str], **more: Any) -> dict[str, Any]:
    """hf_quant_config.json."""
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16}
    return {
        "producer": {"name": "modelopt"},
        "quantization": quantization | {"exclude_modules": exclude} | more,
    }


@dataclass(frozen=True)
class Recipe:
    """A format of a whole checkpoint.

    stored: how a weight is stored -> patterns of the vendor's names of those that are so.
    names: the spelling of names in which the format circulates. config: fields for config.json.
    modelopt: content of hf_quant_config.json, or None.
    """

    stored: Mapping[str, tuple[str, ...]]
    names: str
    config: Mapping[str, Any]
    modelopt: Mapping[str, Any] | None = None

    def of(self, vendor_name: str) -> str | None:
        """How this weight is stored, a key of `ENCODERS`, or None if it is dense."""
        anywhere = re.sub(r"(?<=\.)\d+(?=\.)", "0", vendor_name)
        return next((s for s, patterns in self.stored.items() if _fits(anywhere, patterns)), None)


@cache
def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


RECIPES = {
    "bf16": Recipe({}, "vendor", {}),
    "vendor": Recipe(
        {"fp8": _VENDOR_FP8, "mxfp4": _EXPERTS},
        "vendor",
        {"quantization_config": _FP8_CONFIG, "expert_dtype": "fp4"},
    ),
    "fp8-base": Recipe(
        {"fp8": (*_VENDOR_FP8, *_EXPERTS)},
        "vendor",
        {"quantization_config": _FP8_CONFIG, "expert_dtype": "fp8"},
    ),
    "nvfp4-experts": Recipe(
        {"fp8": _VENDOR_FP8, "nvfp4": _EXPERTS},
        "vendor",
        {
            "quantization_config": _FP8_CONFIG
            | {
                "quant_algo": "MIXED_PRECISION",
                "moe_quant_algo": "NVFP4",
                "group_size": 16,
                "ignore": _NOT_EXPERTS,
                "config_groups": {"group_0": {"weights": _NVFP4_WEIGHTS, "targets": ["Linear"]}},
                "producer": {"name": "modelopt"},
            },
            "expert_dtype": "fp4",
        },
        _modelopt("MIXED_PRECISION", _NOT_EXPERTS),
    ),
    "nvfp4-all": Recipe(
        {"nvfp4": (*_VENDOR_FP8, *_EXPERTS, *_FLOOR)},
        "hf",
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", "*embed_tokens*"],
                "config_groups": {"group_0": {"weights": _NVFP4_WEIGHTS, "targets": ["Linear"]}},
            }
        },
        _modelopt("NVFP4", ["lm_head", "*embed_tokens*"]),
    ),
    "compressed-tensors-w4a4": Recipe(
        {"fp8-weight-scale": (*_ATTENTION, *_INDEX_QUERY), "packed-a4": (*_EXPERTS, *_SHARED)},
        "vendor",
        {"quantization_config": _compressed_tensors(activations=True, fp8=True)},
    ),
    "compressed-tensors-w4a16": Recipe(
        {"packed": (*_VENDOR_FP8, *_EXPERTS)},
        "hf",
        {"quantization_config": _compressed_tensors(activations=False, fp8=False)},
    ),
}


def encode(stored: str, weight: str, values: "Tensor") -> "dict[str, Tensor]":
    """The tensors beside each other in the file that make up `weight`, of values [N, K]."""
    return ENCODERS[stored](weight.removesuffix(".weight"), values)


def size(stored: str, shape: tuple[int, ...]) -> int:
    """Bytes in the file of a weight of this shape."""
    import torch

    values = torch.empty(shape, device="meta")  # a shape alone: nothing is computed
    return sum(tensor.nbytes for tensor in encode(stored, "x", values).values())


def _fp8(module: str, values: "Tensor", scale_name: str = "scale") -> "dict[str, Tensor]":
    from sglang_dsv4 import quantise

    codes, scale = quantise.fp8(values)
    return {f"{module}.weight": codes, f"{module}.{scale_name}": scale}


def _fp8_weight_scale(module: str, values: "Tensor") -> "dict[str, Tensor]":
    tensors = _fp8(module, values, "weight_scale")
    return tensors | {f"{module}.weight_scale": tensors[f"{module}.weight_scale"].float()}


def _mxfp4(module: str, values: "Tensor") -> "dict[str, Tensor]":
    from sglang_dsv4 import quantise

    codes, scale = quantise.mxfp4(values)
    return {f"{module}.weight": codes, f"{module}.scale": scale}


def _nvfp4(module: str, values: "Tensor") -> "dict[str, Tensor]":
    import torch

    from sglang_dsv4 import quantise

    codes, scale, global_scale = quantise.nvfp4(values)
    return {
        f"{module}.weight": codes,
        f"{module}.weight_scale": scale,
        f"{module}.weight_scale_2": global_scale,
        f"{module}.input_scale": torch.tensor(0.0625),  # of activations: no part of the weight
    }


def _packed(module: str, values: "Tensor") -> "dict[str, Tensor]":
    from sglang_dsv4 import quantise

    codes, scale, global_scale = quantise.nvfp4(values)
    return {
        f"{module}.weight_packed": codes,
        f"{module}.weight_scale": scale,
        f"{module}.weight_global_scale": 1 / global_scale.reshape(1),
    }


def _packed_a4(module: str, values: "Tensor") -> "dict[str, Tensor]":
    import torch

    return _packed(module, values) | {f"{module}.input_global_scale": torch.tensor([16.0])}


ENCODERS: "dict[str, Callable[[str, Tensor], dict[str, Tensor]]]" = {
    "fp8": _fp8,
    "fp8-weight-scale": _fp8_weight_scale,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "packed": _packed,
    "packed-a4": _packed_a4,
}
