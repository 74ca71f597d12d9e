"""Checkpoints for tests: files of holes, models that only hold parameters, and twins by hand."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sglang_dsv4 import tiny_formats, tiny_weights
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import DTYPE_NAMES
from sglang_dsv4.tensor_table import Slot, expected_tensors

Tensors = dict[str, Tensor]

IN_FP32 = re.compile(r"(hc_\w+|attn_sink|ape|gate\.bias)$")
# What ranks divide: end of the parameter's name -> dimension; w13 is two blocks of rows.
DIVIDED = {
    "embed.weight": 0,
    "head.weight": 0,
    "attn.attn_sink": 0,
    "attn.wq_b.weight": 0,
    "attn.wo_a.weight": 0,
    "attn.wo_b.weight": 1,
    ".experts.w2": 2,
    "shared_experts.w2": 1,
}


class FakeModel(nn.Module):
    """Parameters (a buffer for tid2eid) of the given names and shapes, filled with NaN or -1."""

    def __init__(self, like: Tensors, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, values in like.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            if leaf == "tid2eid":
                owner.register_buffer(leaf, torch.full(values.shape, -1))
                continue
            kept = torch.float32 if IN_FP32.search(name) else dtype
            empty = torch.full(values.shape, torch.nan, dtype=kept)
            owner.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
        self.register_buffer("rope_table", torch.zeros(3), persistent=False)

    def values(self) -> Tensors:
        return {n: t for n, t in self.state_dict().items() if n != "rope_table"}


def shapes_of(config: DSV4Config, size: int = 1) -> Tensors:
    """Our parameters of one of `size` ranks, by name, on no device."""
    shapes = {}
    for slot in expected_tensors(config).values():
        experts = () if slot.expert is None else (config.n_routed_experts,)
        shape = (*experts, slot.shape[0] * slot.row.parts, *slot.shape[1:])
        shapes[slot.parameter] = torch.empty(shape, device="meta")
    return {name: share(name, values, 0, size) for name, values in shapes.items()}


def share(name: str, values: Tensor, rank: int, size: int = 2) -> Tensor:
    """What one of `size` ranks keeps of a parameter."""
    if name.endswith("w13"):
        first, second = values.chunk(2, dim=-2)
        return torch.cat([half.chunk(size, dim=-2)[rank] for half in (first, second)], dim=-2)
    dims = [dim for end, dim in DIVIDED.items() if name.endswith(end)]
    return values.chunk(size, dim=dims[0])[rank] if dims else values


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, different


# ---- files ----


def write(folder: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> dict[str, str]:
    """Writes a checkpoint and, where there are several shards, its index, which it returns."""
    if shards == 1:
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        return {}
    names = list(tensors)
    index = {name: f"model-{i % shards + 1:05}.safetensors" for i, name in enumerate(names)}
    for file in set(index.values()):
        own = {n: tensors[n].contiguous() for n in names if index[n] == file}
        save_file(own, folder / file)
    write_index(folder, index)
    return index


def write_index(folder: Path, index: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


SIZES = {"I64": 8, "F32": 4, "BF16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
Headers = Mapping[str, tuple[str, tuple[int, ...]]]


def write_holes(folder: Path, headers: Headers, file_of: Callable[[str], str]) -> None:
    """Writes a checkpoint of zeros as files with holes, which take no room on the disk.

    headers: name -> (dtype of safetensors, shape).
    """
    index = {name: f"{file_of(name)}.safetensors" for name in headers}
    files: dict[str, list[str]] = {}
    for name, file in index.items():
        files.setdefault(file, []).append(name)
    for file, names in files.items():
        entries, end = {}, 0
        for name in names:
            dtype, shape = headers[name]
            offsets = [end, end + SIZES[dtype] * math.prod(shape)]
            end = offsets[1]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.truncate(8 + len(header) + end)
    write_index(folder, index)


def dense_headers(slots: Mapping[str, Slot], dtype: str) -> Headers:
    """Those of the vendor's names, all of one dtype but for the tables of experts."""
    return {
        name: ("I64" if name.endswith("tid2eid") else dtype, slot.shape)
        for name, slot in slots.items()
    }


def headers_of(
    config: DSV4Config, recipe: tiny_formats.Recipe
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of a checkpoint in this format under the vendor's names."""
    dense = {"the model's dtype": "BF16", "float32": "F32", "int64": "I64"}
    made: dict[tuple[str, tuple[int, ...]], dict[str, tuple[str, tuple[int, ...]]]] = {}
    headers = {}
    for entry in tiny_weights.quantised_entries(config, recipe, "vendor"):
        if entry.stored is None:
            headers[entry.name] = (dense[entry.pieces[0].kept.value], entry.shape)
            continue
        key = entry.stored, entry.shape
        if key not in made:
            values = torch.empty(entry.shape, device="meta")
            tensors = tiny_formats.encode(entry.stored, "", values)
            made[key] = {n: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()}
        module = entry.name.removesuffix(".weight")
        headers |= {module + suffix: header for suffix, header in made[key].items()}
    return headers


def read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, a file after the other, as servers read it."""
    for shard in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                yield name, file.get_tensor(name)


# ---- quantised weights by hand: by their bits, in double precision ----

_SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1 = np.concatenate([_SIZES, -_SIZES])


def _float(byte: np.ndarray, exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """A small float without sign, from its bits."""
    mantissa = byte & (2**mantissa_bits - 1)
    exponent = (byte >> mantissa_bits & (2**exponent_bits - 1)).astype(int)
    normal = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, mantissa * 2.0 ** (1 - bias - mantissa_bits), normal)


def _numbers(tensor: Tensor) -> np.ndarray:
    if tensor.dtype is torch.float8_e8m0fnu:
        return 2.0 ** (tensor.view(torch.uint8).numpy().astype(int) - 127)
    if tensor.dtype is torch.float8_e4m3fn:
        byte = tensor.view(torch.uint8).numpy()
        return np.where(byte & 128, -1, 1) * _float(byte, 4, 3, 7)
    return tensor.double().numpy()


def _codes(packed: Tensor) -> np.ndarray:
    byte = packed.view(torch.uint8).numpy()
    return _E2M1[np.stack([byte & 15, byte >> 4], axis=-1)].reshape(byte.shape[0], -1)


_SCALE = re.compile(r"(?<!_hc)\.(weight_|input_)?(global_)?scale(_2)?$")


def dense_twin(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Tensors:
    """The same checkpoint with every quantised weight dense, by arithmetic of its own.

    Products in double precision are rounded to fp32 once, then to `dtype`.
    """
    held = dict(tensors)
    twin = {}
    for name, tensor in held.items():
        if _SCALE.search(name):
            continue
        module = name.removesuffix("_packed").removesuffix("weight")
        beside = {n.removeprefix(module): t for n, t in held.items() if n.startswith(module)}
        scale = beside.get("scale", beside.get("weight_scale"))
        if scale is None or not module.endswith("."):
            twin[name] = tensor
            continue
        factors = _numbers(scale)
        if tensor.dtype is torch.float8_e4m3fn:
            values = _numbers(tensor)
            blocks = np.kron(factors, np.ones((128, 128)))
            values = values * blocks[: values.shape[0], : values.shape[1]]
        else:
            values = _codes(tensor)
            values = values * np.repeat(factors, values.shape[1] // factors.shape[1], axis=1)
            values = values * float(beside.get("weight_scale_2", 1.0))
            values = values / float(beside.get("weight_global_scale", 1.0))
        twin[module + "weight"] = torch.from_numpy(values.astype(np.float32)).to(dtype)
    return twin
