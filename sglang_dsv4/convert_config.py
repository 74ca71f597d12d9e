"""What the config files of a converted checkpoint say of its formats: what its tensors are.

The fields are those by which SGLang and ModelOpt's tools know an NVFP4 checkpoint: NVIDIA's mixture
of FP8 and NVFP4 experts where weights stay FP8, plain NVFP4 elsewhere.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dsv4 import __version__
from sglang_dsv4.convert_plan import Plan
from sglang_dsv4.dequant import FP8_BLOCK, NVFP4_GROUP

_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}
_PRODUCER = {"name": "sglang-dsv4", "version": __version__}
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
}


def config(raw: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """config.json of the copy; raw: that of the source."""
    section: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    targets = ["Linear"]
    if plan.fp8:
        before = raw.get("quantization_config")
        kept = before if isinstance(before, dict) and before.get("quant_method") == "fp8" else _FP8
        section = {**kept, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}
        targets = [f"re:{_regex(pattern)}$" for pattern in patterns(plan.nvfp4, plan.dense)]
    section |= {
        "group_size": NVFP4_GROUP,
        "ignore": left_alone(plan),
        "config_groups": {"group_0": {"weights": _WEIGHTS, "targets": targets}},
        "producer": _PRODUCER,
    }
    written = {**raw, "quantization_config": section}
    if "expert_dtype" in raw:
        written["expert_dtype"] = "fp4"  # which stands for both formats of four bits
        if any(".experts." in module for module in plan.dense):
            del written["expert_dtype"]
    return written


def modelopt_config(plan: Plan) -> dict[str, Any]:
    """hf_quant_config.json of the copy."""
    section: dict[str, Any] = {
        "quant_algo": "MIXED_PRECISION" if plan.fp8 else "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": NVFP4_GROUP,
        "exclude_modules": left_alone(plan),
    }
    if plan.fp8:
        how = {"quant_algo": "NVFP4", "group_size": NVFP4_GROUP}
        # All experts of a layer count as one module.
        modules = [re.sub(r"(\.experts)\.\d+\.\w+$", r"\1", module) for module in plan.nvfp4]
        section["quantized_layers"] = {module: how for module in modules}
    return {"producer": _PRODUCER, "quantization": section}


def left_alone(plan: Plan) -> list[str]:
    """Patterns of all linear modules that are not NVFP4."""
    return [*patterns(plan.dense, plan.nvfp4), *sorted(plan.drafts)]


def patterns(modules: Sequence[str], others: Sequence[str]) -> list[str]:
    """Few names, numbers replaced by stars, that fit all of `modules` and none of `others`."""
    taken = {_starred(module) for module in others}
    groups = defaultdict(list)
    for module in modules:
        groups[_starred(module)].append(module)
    found = []
    for starred, members in groups.items():
        found += members if starred in taken else [starred]
    return found


def _starred(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", module)


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"\d+")
