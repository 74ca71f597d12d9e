"""How a weight is stored, told from the tensors that make it up, and its way into a parameter.

Nothing here looks at a config: dtypes, shapes and names in the safetensors headers decide, for each
weight by itself.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sglang_dsv4 import dequant
from sglang_dsv4.checkpoint import Header

# Values computed at a time, in FP32: what a CPU's cache holds, several times faster than more.
CHUNK = 1 << 18
# Where each operation is a launch: whole experts, in 256 MiB.
LARGE_CHUNK = 1 << 26


def chunk_of(device: torch.device) -> int:
    """How many values are computed at a time on a device."""
    return CHUNK if device.type == "cpu" else LARGE_CHUNK


class TensorFormat(Enum):
    """How a weight's values are stored."""

    DENSE = "BF16, FP16 or FP32"
    INTEGER = "integer"
    FP8 = "FP8"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"
    COMPRESSED_TENSORS = "compressed-tensors NVFP4"
    OTHER = "format not known"


class Part(Enum):
    """What a tensor of the file is to its weight; the value is how messages call it."""

    WEIGHT = "weight"
    SCALE = "scale of blocks"
    GLOBAL = "weight_scale_2"
    RECIPROCAL = "weight_global_scale"
    ACTIVATION = "activation scale"  # takes no part in the weight's values


_PARTS = {
    "weight_packed": Part.WEIGHT,
    "scale": Part.SCALE,
    "scale_inv": Part.SCALE,
    "weight_scale": Part.SCALE,
    "weight_scale_inv": Part.SCALE,
    "weight_scale_2": Part.GLOBAL,
    "weight_global_scale": Part.RECIPROCAL,
    "input_scale": Part.ACTIVATION,
    "input_global_scale": Part.ACTIVATION,
}
# Beside X.weight lie X.<suffix>; beside a stack X of all experts, X_<suffix>.
_PART = re.compile(rf"(?P<module>.+?)(?P<joint>[._])(?P<suffix>{'|'.join(_PARTS)})")


def part_of(name: str) -> tuple[str, Part] | None:
    """(name of a weight, what tensor `name` would be to it), by the name alone."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    return match["module"] + (".weight" if match["joint"] == "." else ""), _PARTS[match["suffix"]]


@dataclass(frozen=True)
class Layout:
    """A quantised format: the block that shares a scale, and how the parts become numbers.

    rows, columns: of a block, in values. packed: values in a byte.
    scale_dtype: of the scale of a block, where it lies in bytes. parts: what `check` and
    `dequantise` take, in their order.
    """

    rows: int
    columns: int
    packed: int
    scale_dtype: torch.dtype
    parts: tuple[Part, ...]
    check: Callable[..., None]
    dequantise: Callable[..., Tensor]


_BLOCK = (dequant.FP8_BLOCK, dequant.FP8_BLOCK, 1, torch.float8_e8m0fnu)
_GROUP_32 = (1, dequant.MXFP4_GROUP, 2, torch.float8_e8m0fnu)
_GROUP_16 = (1, dequant.NVFP4_GROUP, 2, torch.float8_e4m3fn)
_TWO = (Part.WEIGHT, Part.SCALE)
LAYOUTS = {
    TensorFormat.FP8: Layout(*_BLOCK, _TWO, dequant.check_fp8, dequant.fp8),
    TensorFormat.MXFP4: Layout(*_GROUP_32, _TWO, dequant.check_mxfp4, dequant.mxfp4),
    TensorFormat.NVFP4: Layout(
        *_GROUP_16, (*_TWO, Part.GLOBAL), dequant.check_nvfp4, dequant.nvfp4
    ),
    TensorFormat.COMPRESSED_TENSORS: Layout(
        *_GROUP_16, (*_TWO, Part.RECIPROCAL), dequant.check_nvfp4, dequant.nvfp4_reciprocal
    ),
}

# Format -> values that share a scale, of those with two codes in a byte.
FOUR_BITS = {form: layout.columns for form, layout in LAYOUTS.items() if layout.packed == 2}

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BYTES = ("U8", "I8")


def tensor_format(parts: Mapping[Part, Header]) -> TensorFormat:
    """The format of the weight that `parts`, its own tensor among them, make up."""
    weight, scale = parts[Part.WEIGHT], parts.get(Part.SCALE)
    if weight.dtype in ("BF16", "F16", "F32"):
        return TensorFormat.DENSE
    if weight.dtype in ("I64", "I32"):
        return TensorFormat.INTEGER
    if weight.dtype == "F8_E4M3":
        return TensorFormat.FP8
    if weight.dtype not in _BYTES:
        return TensorFormat.OTHER
    if Part.RECIPROCAL in parts:
        return TensorFormat.COMPRESSED_TENSORS
    if Part.GLOBAL in parts:
        return TensorFormat.NVFP4
    if scale is None:
        return TensorFormat.OTHER
    known = {"F8_E8M0": TensorFormat.MXFP4, "F8_E4M3": TensorFormat.NVFP4}
    if scale.dtype in known:
        return known[scale.dtype]
    # Bytes may hold either kind of scale, but groups differ in size. Other dtypes are at fault.
    values = 2 * weight.shape[-1] if weight.shape else 0
    groups = scale.shape[-1] if scale.shape else 0
    if values == groups * dequant.MXFP4_GROUP and scale.dtype in _BYTES:
        return TensorFormat.MXFP4
    return TensorFormat.NVFP4 if values == groups * dequant.NVFP4_GROUP else TensorFormat.OTHER


@dataclass(frozen=True)
class Found:
    """A tensor of the checkpoint: its name, its header and, while it is loaded, its values."""

    name: str
    header: Header
    tensor: Tensor | None = None


class Stored:
    """A weight, under the name that it has or would have unquantised, and what makes it up.

    parts: what there is of it; `add` adds to them. format: of the weight, OTHER before it is there.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: dict[Part, Found] = {}
        self.format = TensorFormat.OTHER

    def add(self, part: Part, found: Found) -> None:
        self.parts[part] = found
        if Part.WEIGHT in self.parts:
            self.format = tensor_format({p: found.header for p, found in self.parts.items()})

    @property
    def header(self) -> Header:
        return self.parts[Part.WEIGHT].header

    def waits(self) -> bool:
        """Whether parts are missing without which its values cannot be told."""
        if Part.WEIGHT not in self.parts:
            return True
        if self.format is TensorFormat.OTHER:
            return self.header.dtype in _BYTES and Part.SCALE not in self.parts
        layout = LAYOUTS.get(self.format)
        return layout is not None and not self.parts.keys() >= set(layout.parts)

    def tensor(self, part: Part = Part.WEIGHT) -> Tensor:
        """The values of a part; only while loading."""
        tensor = self.parts[part].tensor
        assert tensor is not None, "a header alone has no values"
        return tensor

    def numbers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, numbers) of each part that can be NaN or infinite: all but codes of four bits."""
        layout = LAYOUTS.get(self.format)
        for part in layout.parts if layout else (Part.WEIGHT,):
            tensor = self.tensor(part)
            if layout and layout.packed > 1 and part is Part.WEIGHT:
                continue
            if layout and part is Part.SCALE and tensor.dtype in (torch.uint8, torch.int8):
                tensor = tensor.view(layout.scale_dtype)
            yield self.parts[part].name, tensor.float()

    def bytes(self) -> int:
        """Size in the file of all that its values need."""
        layout = LAYOUTS.get(self.format)
        parts = layout.parts if layout else (Part.WEIGHT,)
        return sum(self.parts[part].header.bytes for part in parts)

    def missing(self) -> str:
        """What `waits` waits for, and what there is instead."""
        layout = LAYOUTS.get(self.format)
        wanted = [part.value for part in layout.parts if part not in self.parts] if layout else []
        if Part.GLOBAL.value in wanted:
            wanted = [f"{Part.GLOBAL.value} (or {Part.RECIPROCAL.value})"]
        kind = self.format.value if layout else f"{self.header.dtype}, {self.format.value}"
        beside = sorted(found.name for part, found in self.parts.items() if part is not Part.WEIGHT)
        return (
            f"{self.name} ({kind}): needs a {' and a '.join(wanted or ['scale of blocks'])};"
            f" has {', '.join(beside) or 'nothing'} beside it"
        )

    def held(self) -> str:
        """The format as told to users: that of dense tensors by its dtype."""
        return self.format.value if self.format in LAYOUTS else self.header.dtype

    def shape(self) -> tuple[int, ...]:
        """The shape of its values."""
        *others, width = self.header.shape or (1,)
        layout = LAYOUTS.get(self.format)
        return self.header.shape if layout is None else (*others, width * layout.packed)

    def check(self, matrices: int) -> None:
        """Raises ValueError unless its quantised parts fit together, judging by headers alone.

        matrices: how many of the model's it holds; more than 1 in a stack.
        """
        layout, parts = LAYOUTS[self.format], []
        for part in layout.parts:
            found = self.parts[part]
            if found.header.dtype not in DTYPES:
                raise ValueError(f"{found.name}: {found.header.dtype} is no dtype for it")
            shape = found.header.shape
            if part in _GLOBAL and math.prod(shape) in (self._stacked(), matrices):
                shape = (1,)
            dtype = DTYPES[found.header.dtype]
            parts.append(torch.empty(shape, dtype=dtype, device="meta"))
        layout.check(*parts)

    def _stacked(self) -> int:
        return self.header.shape[0] if len(self.header.shape) == 3 else 1

    def fill(
        self, region: Tensor, rows: range, columns: range, *, matrix: int, matrices: int
    ) -> None:
        """Copies values [rows, columns] of a quantised matrix to `region`, on region's device.

        matrix: which of the `matrices` that it holds, in the order of its memory. Only blocks with
        such values are read; one that reaches beyond them is cut after it is multiplied.
        """
        layout = LAYOUTS[self.format]
        tensors, first = self._matrix(layout, matrix, matrices)
        rows = range(first + rows.start, first + rows.stop)
        across = _blocks(columns, layout.columns)
        left = columns.start - across.start * layout.columns
        chunk_values = chunk_of(region.device)
        step = max(1, chunk_values // (len(across) * layout.columns * layout.rows)) * layout.rows
        for top in range(rows.start - rows.start % layout.rows, rows.stop, step):
            chunk = range(max(top, rows.start), min(top + step, rows.stop))
            down = _blocks(chunk, layout.rows)
            cut = [_cut(t, part, layout, down, across) for part, t in tensors.items()]
            values = layout.dequantise(*(t.contiguous().to(region.device) for t in cut))
            values = values[chunk.start - top :, left:][: len(chunk), : len(columns)]
            region[chunk.start - rows.start : chunk.stop - rows.start].copy_(values)

    def four_bits(
        self, rows: range, columns: range, *, matrix: int, matrices: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Views of a matrix [rows, columns] as it is stored: codes [rows, columns/2] and scales
        [rows, columns/group] as uint8, and what multiplies them all, one fp32 (1 in MXFP4).

        The format is one of FOUR_BITS, columns begin and end with a group; else as in `fill`.
        """
        layout = LAYOUTS[self.format]
        tensors, first = self._matrix(layout, matrix, matrices)
        down = range(first + rows.start, first + rows.stop)
        across = _blocks(columns, layout.columns)
        assert len(across) * layout.columns == len(columns), columns
        codes, scales = (
            _cut(tensors[part], part, layout, down, across).view(torch.uint8)
            for part in (Part.WEIGHT, Part.SCALE)
        )
        factor = tensors.get(Part.GLOBAL, torch.ones((), dtype=torch.float32))
        if Part.RECIPROCAL in tensors:
            factor = 1 / tensors[Part.RECIPROCAL]
        return codes, scales, factor.reshape(())

    def blocks(self, rows: range, columns: range) -> tuple[Tensor, Tensor]:
        """Values [rows, columns] of an FP8 matrix as they are stored: E4M3 codes as uint8, a view,
        and the fp32 scales of their blocks. rows and columns begin with a block."""
        layout = LAYOUTS[self.format]
        down, across = _blocks(rows, layout.rows), _blocks(columns, layout.columns)
        assert rows.start % layout.rows == columns.start % layout.columns == 0, (rows, columns)
        weight, scale = self.tensor(), self.tensor(Part.SCALE)
        codes = weight[rows.start : rows.stop, columns.start : columns.stop].view(torch.uint8)
        cut = scale[down.start : down.stop, across.start : across.stop]
        return codes, dequant.fp8_scales(cut.contiguous())

    def _matrix(self, layout: Layout, matrix: int, matrices: int) -> tuple[dict[Part, Tensor], int]:
        """The 2-dimensional parts that hold a matrix, and the row of them where it begins."""
        tensors = {}
        for part in layout.parts:
            tensor = self.tensor(part)
            tensors[part] = tensor.reshape(-1) if part in _GLOBAL else tensor
        stacked = self._stacked()
        if len(self.header.shape) < 3:
            return tensors, 0
        index, block = divmod(matrix, matrices // stacked)
        for part, tensor in tensors.items():
            if part not in _GLOBAL:
                tensors[part] = tensor[index]
            elif tensor.numel() > 1:
                tensors[part] = tensor[index if tensor.numel() == stacked else matrix]
        return tensors, self.header.shape[1] // (matrices // stacked) * block


_GLOBAL = (Part.GLOBAL, Part.RECIPROCAL)


def _blocks(values: range, size: int) -> range:
    """The blocks of `size` values that hold any of `values`."""
    return range(values.start // size, -(-values.stop // size))


def _cut(tensor: Tensor, part: Part, layout: Layout, down: range, across: range) -> Tensor:
    """The view of what of a part belongs to the given blocks."""
    if part in _GLOBAL:
        return tensor
    height, width = 1, 1
    if part is Part.WEIGHT:
        height, width = layout.rows, layout.columns // layout.packed
    return tensor[
        down.start * height : down.stop * height, across.start * width : across.stop * width
    ]
