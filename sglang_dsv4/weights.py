"""From a checkpoint to the model's parameters: a check of the headers, and one stream.

Which tensors there are, how they may be called and where they go stands in `tensor_table`. Each
must come exactly once, and each that comes must be used or be skipped by name.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sglang_dsv4.config import DSV4Config
from sglang_dsv4.tensor_table import (
    Kept,
    Slot,
    expected_tensors,
    is_known,
    skip_reason,
    vendor_names,
    why_unknown,
)

INDEX_FILE = "model.safetensors.index.json"
LISTED_AT_MOST = 20
UNSUPPORTED = "unsupported formats (this version loads BF16, FP16 and FP32 only)"


class CheckpointError(ValueError):
    """The checkpoint cannot fill this model; the message says which tensors or files, and why."""


# -------------------------------------------------------------------------- one tensor's format


class TensorFormat(Enum):
    """How a tensor's values are stored; decided for each tensor by itself."""

    DENSE = "BF16, FP16 or FP32"
    INTEGER = "integer"
    FP8 = "FP8"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"
    COMPRESSED_TENSORS = "compressed-tensors"
    OTHER = "format not known"


def tensor_format(dtype: str, companions: Mapping[str, str]) -> TensorFormat:
    """The format of a weight of safetensors dtype `dtype`.

    companions: suffix -> dtype of what is stored beside it, e.g. {"weight_scale": "F8_E4M3"}.
    """
    if "weight_packed" in companions:
        return TensorFormat.COMPRESSED_TENSORS
    if dtype in ("BF16", "F16", "F32"):
        return TensorFormat.DENSE
    if dtype in ("I64", "I32"):
        return TensorFormat.INTEGER
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return TensorFormat.FP8
    if dtype not in ("U8", "I8") or not companions:
        return TensorFormat.OTHER
    nvfp4 = "weight_scale_2" in companions or companions.get("weight_scale") == "F8_E4M3"
    return TensorFormat.NVFP4 if nvfp4 else TensorFormat.MXFP4


# A quantised weight X.weight keeps its scales beside it as X.<suffix>; a stacked X as X_<suffix>.
_COMPANION = re.compile(
    r"(?P<module>.+?)(?P<joint>\.|_(?=weight|input))(?P<suffix>scale|weight_scale|weight_scale_inv"
    r"|weight_scale_2|weight_packed|weight_global_scale|input_scale|input_global_scale)"
)


class Header(NamedTuple):
    """A tensor as its file announces it: safetensors dtype and shape."""

    dtype: str
    shape: tuple[int, ...]


def _companions(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Name of a weight -> {suffix: name of the tensor stored beside it}."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = _COMPANION.fullmatch(name)
        if match and not is_known(name):
            weight = match["module"] + (".weight" if match["joint"] == "." else "")
            found.setdefault(weight, {})[match["suffix"]] = name
    return found


# ---------------------------------------------------------------------------------- the accounts


class _Ledger:
    """Which tensors are owed, which came and what is wrong; `check` and `load` both book here."""

    def __init__(self, config: DSV4Config) -> None:
        self.config = config
        self.owed = expected_tensors(config)
        self.came: dict[str, str] = {}  # vendor name -> the name it came under
        self.skipped: Counter[str] = Counter()
        self.problems: dict[str, list[str]] = {}

    def book(self, name: str, header: Header, companions: Mapping[str, str]) -> list[str]:
        """The vendor names that tensor `name` supplies, in the order of its memory.

        Empty if the tensor is skipped, or is faulty: then `problems` says so.
        """
        if reason := skip_reason(name, self.config):
            self.skipped[reason] += 1
            return []
        supplied = vendor_names(name, self.config.n_routed_experts)
        if not supplied or not all(known in self.owed for known in supplied):
            self.note("unknown tensors", name + why_unknown(name, self.config))
            return []
        twice = [known for known in supplied if known in self.came]
        for known in twice:
            self.note("tensors that come twice", f"{known} as {self.came[known]} and as {name}")
        for known in supplied:
            self.came.setdefault(known, name)
        if not self._has_format(name, header.dtype, companions, self.owed[supplied[0]]):
            return []
        if not self._has_shape(name, header.shape, supplied):
            return []
        return [] if twice else supplied

    def _has_format(
        self, name: str, dtype: str, companions: Mapping[str, str], slot: Slot
    ) -> bool:
        integer = slot.row.kept is Kept.INT64
        found = tensor_format(dtype, companions)
        if found is (TensorFormat.INTEGER if integer else TensorFormat.DENSE):
            return True
        stored = ", ".join(sorted(companions)) or dtype
        kind = "tables that are not I64 or I32" if integer else UNSUPPORTED
        self.note(kind, f"{name}: {found.value} ({stored})")
        return False

    def _has_shape(self, name: str, found: tuple[int, ...], supplied: Sequence[str]) -> bool:
        expected = self.owed[supplied[0]].shape
        if len(supplied) > 1:  # stacked
            experts = self.config.n_routed_experts
            expected = (experts, len(supplied) // experts * expected[0], *expected[1:])
        if found != expected:
            self.note("wrong shapes", f"{name}: expected {list(expected)}, found {list(found)}")
        return found == expected

    def note(self, kind: str, fault: str) -> None:
        self.problems.setdefault(kind, []).append(fault)

    def settle(self, source: str) -> None:
        """Raises CheckpointError if anything was noted or a tensor never came."""
        for known in self.owed.keys() - self.came.keys():
            self.note("missing tensors (by the vendor's names)", known)
        if self.problems:
            lists = [_listed(kind, faults) for kind, faults in self.problems.items()]
            raise CheckpointError("\n".join([f"{source} does not fit this model", *lists]))


def _listed(kind: str, faults: Sequence[str]) -> str:
    lines = [f"{len(faults)} {kind}:", *(f"  {fault}" for fault in sorted(faults)[:LISTED_AT_MOST])]
    if len(faults) > LISTED_AT_MOST:
        lines.append(f"  and {len(faults) - LISTED_AT_MOST} more")
    return "\n".join(lines)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"


# ---------------------------------------------------------------------- check, from headers alone


@dataclass(frozen=True)
class CheckpointSummary:
    """What a sound checkpoint holds: files, used tensors, their values and dtypes, skipped ones."""

    shards: int
    tensors: int
    values: int
    dtypes: Mapping[str, int]
    skipped: Mapping[str, int]

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors ({_counted(self.dtypes)}) of {self.values:,} values in"
            f" {self.shards} files; skipped: {_counted(self.skipped)}"
        )


def check(folder: str | Path, config: DSV4Config) -> CheckpointSummary:
    """Reads the headers in `folder`, no tensor, and tells whether they make the model of `config`.

    Raises CheckpointError, with every fault found: files that are absent, cut short or not
    safetensors; else tensors that are unknown, missing, there twice, of another shape or format.
    """
    folder = Path(folder)
    index = _read_index(folder)
    files = sorted(set(index.values())) or sorted(f.name for f in folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors file: name a checkpoint's folder")
    shards = _read_shards(folder, files)
    ledger = _Ledger(config)
    for name, file in index.items():
        if name not in shards[file]:
            ledger.note("tensors that the index names but their file lacks", f"{name} in {file}")
    used: dict[str, Header] = {}
    for name, header, companions in _weights_of(shards, ledger):
        if ledger.book(name, header, companions):
            used[name] = header
    ledger.settle(str(folder))
    return CheckpointSummary(
        shards=len(files),
        tensors=len(used),
        values=sum(math.prod(header.shape) for header in used.values()),
        dtypes=Counter(header.dtype for header in used.values()),
        skipped=ledger.skipped,
    )


def _weights_of(
    shards: Mapping[str, Mapping[str, Header]], ledger: _Ledger
) -> Iterator[tuple[str, Header, dict[str, str]]]:
    """(name, header, {suffix: dtype of what is stored beside it}) of every weight.

    A packed weight goes by the name that it has unpacked. What lies beside a dense weight, or
    beside none, comes as a weight of its own.
    """
    tensors: dict[str, Header] = {}
    for file, headers in shards.items():
        for name in headers.keys() & tensors.keys():
            ledger.note("tensors that come twice", f"{name}, again in {file}")
        tensors |= headers
    beside = _companions(name for name in tensors if not skip_reason(name, ledger.config))
    for weight, names in beside.items():
        companions = {suffix: tensors[name].dtype for suffix, name in names.items()}
        header = tensors.get(names.get("weight_packed", weight))
        if header is None or tensor_format(header.dtype, companions) is TensorFormat.DENSE:
            continue
        for name in (weight, *names.values()):
            tensors.pop(name, None)
        yield weight, header, companions
    for name, header in tensors.items():
        yield name, header, {}


def _read_index(folder: Path) -> Mapping[str, str]:
    """Tensor name -> file name, by the index; empty where there is none."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: download the checkpoint, name its folder")
    path = folder / INDEX_FILE
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_bytes())["weight_map"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is no index of shards ({error!r}): download it again") from error


def _read_shards(folder: Path, files: Sequence[str]) -> dict[str, dict[str, Header]]:
    shards, faults = {}, []
    for file in files:
        try:
            shards[file] = read_headers(folder / file)
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        kind = f"of {len(files)} files in {folder} cannot be read; download them again"
        raise CheckpointError(_listed(kind, faults))
    return shards


def read_headers(file: Path) -> dict[str, Header]:
    """Tensor name -> header, for one safetensors file; CheckpointError if it is not a whole one."""
    try:
        found = file.stat().st_size
        with file.open("rb") as stream:
            # A safetensors file: 8 bytes with the length of a JSON text, that text, the values.
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            text = stream.read(min(length, found))
    except OSError as error:
        raise CheckpointError(f"{file.name}: {error.strerror}") from error
    if prefix == b"version ":
        raise CheckpointError(f"{file.name}: a Git LFS pointer in place of the file (git lfs pull)")
    if len(text) < length and text[:1] in (b"{", b""):
        raise CheckpointError(
            f"{file.name}: cut short: expected at least {8 + length} bytes, found {found}"
        )
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        headers = {n: Header(e["dtype"], tuple(e["shape"])) for n, e in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file.name}: not a safetensors file ({error!r})") from error
    if found != 8 + length + end:
        raise CheckpointError(f"{file.name}: expected {8 + length + end} bytes, found {found}")
    return headers


# ------------------------------------------------------------------------------- load, a stream


@dataclass(frozen=True)
class LoadReport:
    """What one rank loaded: tensors used, those whose dtype was converted, those skipped."""

    tensors: int
    converted: Mapping[str, int]
    skipped: Mapping[str, int]

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors loaded; converted: {_counted(self.converted)};"
            f" skipped: {_counted(self.skipped)}"
        )


_DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def load(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    config: DSV4Config,
    *,
    rank: int,
    size: int,
) -> LoadReport:
    """Copies every tensor of the stream to its place in `model`, one at a time.

    model: has uninitialised parameters of the names and shapes of `expected_parameters`.
    tensors: (name in any spelling, full tensor) in any order, each needed only until the next.
    rank, size: this process among those that share the model.

    Raises CheckpointError for a value that is NaN, infinite or no expert's number at once; for all
    else (unknown, missing, repeated, misshaped, of another format) after the stream, in one list.
    """
    ledger = _Ledger(config)
    targets = _targets(model, ledger.owed, size)
    used = 0
    converted: Counter[str] = Counter()
    with torch.no_grad():
        for name, tensor in tensors:
            dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
            supplied = ledger.book(name, Header(dtype, tuple(tensor.shape)), {})
            for known, values in zip(supplied, _parts(tensor, len(supplied)), strict=True):
                slot = ledger.owed[known]
                target = targets[slot.parameter]
                region = _copy(values, target, slot, rank, size)
                _check_values(name, known, values, region, config)
            if supplied:
                used += 1
                if tensor.dtype != target.dtype:
                    converted[f"{dtype} to {_DTYPE_NAMES[target.dtype]}"] += 1
    ledger.settle("The checkpoint")
    return LoadReport(used, converted, ledger.skipped)
