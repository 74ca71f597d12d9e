"""What a checkpoint's config says of its formats, held against what its tensors are.

Formats are decided from the tensors. A config that says otherwise changes nothing, but is told of:
other programs believe it.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import regex

from sglang_dsv4.census import Census
from sglang_dsv4.formats import TensorFormat

CONFIG, MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
# A regular expression may take for ever: seconds for all of a config's, characters of one, which
# bound the time that it takes to compile.
MATCHING, LONGEST_PATTERN = 5.0, 1000

_FP8 = TensorFormat.FP8.value
_MXFP4 = TensorFormat.MXFP4.value
_NVFP4 = (TensorFormat.NVFP4.value, TensorFormat.COMPRESSED_TENSORS.value)

# By either names.
_AN_EXPERT = ("layers.0.ffn.experts.0.w1", "model.layers.0.mlp.experts.0.gate_proj")
_A_LINEAR = (
    *("layers.0.attn.wq_b", "layers.0.attn.wo_a", "layers.0.ffn.shared_experts.w1"),
    *("model.layers.0.self_attn.q_b_proj", "model.layers.0.self_attn.o_a_proj"),
    "model.layers.0.mlp.shared_experts.gate_proj",
)


def contradictions(folder: Path, census: Census) -> list[str]:
    """One line for each thing that the config files in `folder` say and the tensors deny."""
    found = census.quantised()
    quantisation = read(folder / CONFIG).get("quantization_config") or {}
    expert_dtype = read(folder / CONFIG).get("expert_dtype")
    modelopt = read(folder / MODELOPT_CONFIG).get("quantization") or {}
    if not isinstance(quantisation, dict) or not isinstance(modelopt, dict):
        return [f"{CONFIG}: quantization_config is no object; what it says is not compared"]
    lines = list(_about_experts(expert_dtype, census))
    if not quantisation and not modelopt:
        if found:
            lines.append(f"{CONFIG} says nothing of quantisation, the tensors are {_list(found)}")
        return lines
    for file, said in ((CONFIG, quantisation), (MODELOPT_CONFIG, modelopt)):
        if said:
            lines += [f"{file}: {line}" for line in _about(said, found, census)]
    return lines


def experts(raw: Mapping[str, Any]) -> TensorFormat | None:
    """The format of the routed experts by a config.json alone; None where it names none."""
    said = _mapping(raw, "quantization_config")
    end = time.monotonic() + MATCHING
    ignored = _texts(said.get("ignore"))
    spared = any(_matches_in_time(pattern, name, end) for pattern in ignored for name in _AN_EXPERT)
    if "NVFP4" in _algorithms(said, _groups(said)) and not spared:
        return TensorFormat.COMPRESSED_TENSORS if _is_packed(said) else TensorFormat.NVFP4
    by_dtype = {"fp4": TensorFormat.MXFP4, "fp8": TensorFormat.FP8}
    return by_dtype.get(str(raw.get("expert_dtype")))


def linears(raw: Mapping[str, Any]) -> TensorFormat | None:
    """The format of attention and the shared expert by a config.json alone: that of the release, or
    NVFP4 where it says so of every linear layer and leaves none of theirs out; else None."""
    said = _mapping(raw, "quantization_config")
    method, end = str(said.get("quant_method")), time.monotonic() + MATCHING
    if method == "fp8":
        return TensorFormat.FP8
    targets = {target for group in _groups(said) for target in _texts(group.get("targets"))}
    ignored = _texts(said.get("ignore"))
    spared = any(_matches_in_time(pattern, name, end) for pattern in ignored for name in _A_LINEAR)
    if "NVFP4" not in _algorithms(said, _groups(said)) or targets - {"Linear"} or spared:
        return None
    return TensorFormat.COMPRESSED_TENSORS if _is_packed(said) else TensorFormat.NVFP4


def _is_packed(said: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors wrote it."""
    return str(said.get("quant_method")).startswith("compressed")


def read(path: Path) -> dict[str, Any]:
    """The content of a config file; empty where it is none, which is for others to tell."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _list(formats: set[str]) -> str:
    return " and ".join(sorted(formats))


def _about_experts(dtype: Any, census: Census) -> Iterator[str]:
    claimed = {"fp4": {_MXFP4, *_NVFP4}, "fp8": {_FP8}}.get(str(dtype))
    held = {held for what, held in census.examples if what.startswith("ffn.experts.")}
    if claimed is not None and held - claimed:
        yield f"{CONFIG}: expert_dtype is {dtype}, the experts are {_list(held)}"


def _about(said: Mapping[str, Any], found: set[str], census: Census) -> Iterator[str]:
    """The contradictions of one quantisation section."""
    groups = _groups(said)
    words = _algorithms(said, groups)
    if "NVFP4" in words and not found.intersection(_NVFP4):
        yield f"it says NVFP4, no tensor is ({_list(found) or 'none is quantised'})"
    if "FP8" in words and _FP8 not in found:
        yield f"it says FP8, no tensor is ({_list(found) or 'none is quantised'})"
    # In the release, quant_method fp8 means FP8 with MXFP4 experts.
    unsaid = found.intersection(_NVFP4) if words and "NVFP4" not in words else set()
    if unsaid:
        yield f"it says {' and '.join(sorted(words))}, some tensors are {_list(unsaid)}"
    yield from _about_sizes(said, groups, found)
    yield from _about_ignored(said, census)
    targets = {target for group in groups for target in _texts(group.get("targets"))}
    others = {held for held in found if held not in _NVFP4}
    if "Linear" in targets and "NVFP4" in words and others:
        yield f"it makes every Linear NVFP4, some are {_list(others)}"


def _groups(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [group for group in _mapping(said, "config_groups").values() if isinstance(group, dict)]


def _mapping(said: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = said.get(key)
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _algorithms(said: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> set[str]:
    """NVFP4 and FP8, as far as the section names them as formats of weights."""
    layers = _mapping(said, "quantized_layers").values()
    texts = [said.get(key) for key in ("quant_method", "quant_algo", "moe_quant_algo", "format")]
    texts += [layer.get("quant_algo") for layer in layers if isinstance(layer, dict)]
    for group in groups:
        weights = _mapping(group, "weights")
        texts.append(group.get("format"))
        if weights.get("type") == "float":
            texts += [{"4": "nvfp4", "8": "fp8"}.get(str(weights.get("num_bits")))]
    upper = [str(text).upper() for text in texts if text]
    return {name for name in ("NVFP4", "FP8") if any(name in text for text in upper)}


def _about_sizes(
    said: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], found: set[str]
) -> Iterator[str]:
    block = said.get("weight_block_size")
    if block is not None and _FP8 in found and block != [128, 128]:
        yield f"weight_block_size is {block}, blocks are 128x128"
    scale = said.get("scale_fmt")
    if scale is not None and _FP8 in found and scale != "ue8m0":
        yield f"scale_fmt is {scale}; scales are read by their own dtype"
    sizes = [said.get("group_size"), *(_mapping(g, "weights").get("group_size") for g in groups)]
    for size in sizes:
        if size is not None and found.intersection(_NVFP4) and size != 16:
            yield f"group_size is {size}, groups of NVFP4 are of 16"


def _about_ignored(said: Mapping[str, Any], census: Census) -> Iterator[str]:
    """Modules that the section leaves unquantised, and that are not."""
    quantised = {name: held for (_, held), name in sorted(census.examples.items())}
    quantised = {name: held for name, held in quantised.items() if held in _NVFP4}
    left_out: dict[str, str] = {}  # name -> the first pattern that matches it
    unchecked = []
    end = time.monotonic() + MATCHING
    for pattern in [*_texts(said.get("ignore")), *_texts(said.get("exclude_modules"))]:
        try:
            for name in quantised.keys() - left_out.keys():
                if _matches(pattern, name.removesuffix(".weight"), end):
                    left_out[name] = pattern
        except TimeoutError:
            unchecked.append(pattern[:60])
    for name, held in quantised.items():
        if name in left_out:
            yield f"it leaves {left_out[name]} unquantised, {name} is {held}"
    if unchecked:
        others = f" and {len(unchecked) - 1} more" if len(unchecked) > 1 else ""
        yield f"what {unchecked[0]}{others} would leave unquantised takes too long: not checked"


def _matches_in_time(pattern: str, module: str, end: float) -> bool:
    """`_matches`, or False for what takes too long."""
    try:
        return _matches(pattern, module, end)
    except TimeoutError:
        return False


def _matches(pattern: str, module: str, end: float) -> bool:
    """Whether a name, a glob, or a regular expression after "re:" is for a module.

    end: of the time for regular expressions, as time.monotonic() has it. Raises TimeoutError.
    """
    if not pattern.startswith("re:"):
        return fnmatch(module.removeprefix("model."), pattern.removeprefix("model."))
    left = end - time.monotonic()
    if left <= 0 or len(pattern) > LONGEST_PATTERN:
        raise TimeoutError
    try:
        return regex.match(pattern[3:], module, timeout=left) is not None
    except (regex.error, OverflowError, RecursionError):
        return False
