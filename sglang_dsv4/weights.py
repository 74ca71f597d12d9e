"""From a checkpoint to the model's parameters: a check of the headers, and one stream.

Which tensors there are, how they may be called and where they go stands in `tensor_table`. Each
must come exactly once, and each that comes must be used or be skipped by name.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sglang_dsv4.checkpoint import (
    CheckpointError,
    Header,
    TensorFormat,
    companions_of,
    listed,
    read_index,
    read_shards,
    tensor_format,
)
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.tensor_table import (
    Kept,
    Slot,
    expected_tensors,
    is_stacked,
    skip_reason,
    vendor_names,
    why_unknown,
)

__all__ = ["CheckpointError", "CheckpointSummary", "LoadReport", "check", "load"]

UNSUPPORTED = "unsupported formats (this version loads BF16, FP16 and FP32 only)"


# --------------------------------------------------------------------------------- the accounts


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

        Empty if the tensor is skipped, or is at fault: then `problems` says so.
        """
        if reason := skip_reason(name, self.config):
            self.skipped[reason] += 1
            return []
        supplied = vendor_names(name, self.config.n_routed_experts)
        if not supplied or not all(known in self.owed for known in supplied):
            self.note("unknown tensors", name + why_unknown(name, self.config))
            return []
        for known in supplied:
            if known in self.came:
                self.note("tensors that come twice", f"{known} as {self.came[known]} and as {name}")
            self.came.setdefault(known, name)
        sound = self._has_format(name, header.dtype, companions, self.owed[supplied[0]])
        sound = sound and self._has_shape(name, header.shape, supplied)
        return supplied if sound else []

    def _has_format(self, name: str, dtype: str, companions: Mapping[str, str], slot: Slot) -> bool:
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
        if is_stacked(name):
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
            lists = [listed(kind, faults) for kind, faults in self.problems.items()]
            raise CheckpointError("\n".join([f"{source} does not fit this model", *lists]))


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"


# --------------------------------------------------------------------- check, from headers alone


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
            f"{self.tensors} tensors ({_counted(self.dtypes)}), {self.values:,} values in"
            f" {self.shards} files; skipped: {_counted(self.skipped)}"
        )


def check(folder: str | Path, config: DSV4Config) -> CheckpointSummary:
    """Tells from the headers in `folder`, reading no tensor, whether they make `config`'s model.

    Raises CheckpointError with every fault found: files that are absent, cut short or not
    safetensors; else tensors that are unknown, missing, there twice, of another shape or format.
    """
    folder = Path(folder)
    index = read_index(folder)
    shards = read_shards(folder, index)
    ledger = _Ledger(config)
    for name, file in index.items():
        if name not in shards[file]:
            ledger.note("tensors that the index names but their file lacks", f"{name} in {file}")
    used: dict[str, Header] = {}
    for name, header, companions in _weights_in(shards, ledger):
        if ledger.book(name, header, companions):
            used[name] = header
    ledger.settle(str(folder))
    return CheckpointSummary(
        shards=len(shards),
        tensors=len(used),
        values=sum(math.prod(header.shape) for header in used.values()),
        dtypes=Counter(header.dtype for header in used.values()),
        skipped=ledger.skipped,
    )


def _weights_in(
    shards: Mapping[str, Mapping[str, Header]], ledger: _Ledger
) -> Iterator[tuple[str, Header, dict[str, str]]]:
    """(name, header, {suffix: dtype of what is stored beside it}) of every weight.

    A packed weight goes by the name that it would have unpacked. A scale without a quantised
    weight comes as a tensor by itself.
    """
    tensors: dict[str, Header] = {}
    for file, headers in shards.items():
        for name in headers.keys() & tensors.keys():
            ledger.note("tensors that come twice", f"{name}, again in {file}")
        tensors |= headers
    beside = companions_of(name for name in tensors if not skip_reason(name, ledger.config))
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


@torch.no_grad()
def load(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    config: DSV4Config,
    *,
    rank: int,
    size: int,
) -> LoadReport:
    """Copies each tensor of a stream into `model`, without holding on to it.

    model: parameters (and integer buffers) as `tensor_table` says, this rank's share of each.
    tensors: (name in any spelling, full tensor), in any order; `check` has seen their headers.
    rank, size: this process among those that share the model.

    Raises CheckpointError: at once for values that are NaN, infinite or not an expert's number;
    after the stream for tensors that are unknown, missing, repeated, misshaped or not dense.
    """
    ledger = _Ledger(config)
    parameters = _parameters(model, ledger, size)
    used = 0
    converted: Counter[str] = Counter()
    for name, tensor in tensors:
        dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        supplied = ledger.book(name, Header(dtype, tuple(tensor.shape)), {})
        if not supplied:
            continue
        slots = [ledger.owed[known] for known in supplied]
        for slot, values in zip(slots, tensor.reshape(-1, *slots[0].shape), strict=True):
            region = _region(parameters[slot.parameter], slot)
            region.copy_(_share(values, slot, rank, size))
            _check_values(name, slot, values, region, config)
        used += 1
        if region.dtype != tensor.dtype:
            converted[f"{dtype} to {_DTYPE_NAMES[region.dtype]}"] += 1
    ledger.settle("The checkpoint")
    return LoadReport(used, converted, ledger.skipped)


def _parameters(model: nn.Module, ledger: _Ledger, size: int) -> dict[str, Tensor]:
    """Name -> parameter or integer buffer; asserts that the model is the one the table tells of."""
    shapes: dict[str, tuple[int, ...]] = {}
    kept: dict[str, Kept] = {}
    for slot in ledger.owed.values():
        shape = list(slot.shape)
        if slot.row.cut is not None:
            assert shape[slot.row.cut] % size == 0, f"{slot} cannot be divided among {size} ranks"
            shape[slot.row.cut] //= size
        shape[0] *= slot.row.parts
        experts = () if slot.expert is None else (ledger.config.n_routed_experts,)
        shapes[slot.parameter] = (*experts, *shape)
        kept[slot.parameter] = slot.row.kept
    found: dict[str, Tensor] = dict(model.named_parameters())
    found |= {name: buffer for name, buffer in model.named_buffers() if name in shapes}
    differ = sorted(found.keys() ^ shapes.keys())
    assert not differ, f"parameters in either the model or the table but not both: {differ}"
    dtypes = {Kept.FP32: torch.float32, Kept.INT64: torch.int64}
    for name, parameter in found.items():
        fits = tuple(parameter.shape) == shapes[name]
        fits = fits and parameter.dtype == dtypes.get(kept[name], parameter.dtype)
        assert fits, f"{name} is {parameter.dtype} {parameter.shape}: expected {shapes[name]}"
    return found


def _region(parameter: Tensor, slot: Slot) -> Tensor:
    """The view of `parameter` that `slot` fills: an expert's, and of that a block of rows."""
    region = parameter if slot.expert is None else parameter[slot.expert]
    rows = region.shape[0] // slot.row.parts
    return region.narrow(0, slot.row.part * rows, rows)


def _share(values: Tensor, slot: Slot, rank: int, size: int) -> Tensor:
    """The view of the full `values` that this rank keeps."""
    if slot.row.cut is None:
        return values
    length = values.shape[slot.row.cut] // size
    return values.narrow(slot.row.cut, rank * length, length)


def _check_values(
    name: str, slot: Slot, values: Tensor, region: Tensor, config: DSV4Config
) -> None:
    """Refuses what was copied to `region` from the tensor `name`, whose full part is `values`."""
    # Unlike isfinite, aminmax needs no memory of its own, and it is ten times as fast on a CPU.
    low, high = (bound.item() for bound in torch.aminmax(region))
    experts = config.n_routed_experts
    if slot.row.kept is Kept.INT64:
        if low < 0 or high >= experts:
            raise CheckpointError(
                f"{name}: expected experts 0 to {experts - 1}, found {low} to {high}"
            )
        return
    if math.isfinite(low) and math.isfinite(high):
        return
    part = "" if slot.expert is None else f" (expert {slot.expert})"
    bad = values.numel() - int(values.isfinite().sum())
    if not bad:
        raise CheckpointError(f"{name}{part}: values too large for the model's {region.dtype}")
    raise CheckpointError(
        f"{name}{part}: {bad} of {values.numel()} values are NaN or infinite:"
        " the checkpoint is damaged, download it again"
    )
