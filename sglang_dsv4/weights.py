"""From a checkpoint to the model's parameters: a check of the headers, and one stream.

Which tensors there are, how they may be called and where they go stands in `tensor_table`, how a
weight may be stored in `formats`. Each must come exactly once, and each that comes must be used or
be skipped by name: `ledger` keeps the account. Quantised weights become dense while they load, but
for routed experts in four bits and linear weights in FP8 or NVFP4 that the model holds so.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from sglang_dsv4 import dequant, quantise
from sglang_dsv4.census import Census, component
from sglang_dsv4.checkpoint import CheckpointError, Header
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.damaged_values import (
    check_factor,
    check_global_scales,
    check_values,
    may_overflow,
    may_overflow_fp8,
)
from sglang_dsv4.formats import (
    DTYPE_NAMES,
    FOUR_BITS,
    LAYOUTS,
    Found,
    Stored,
    TensorFormat,
    chunk_of,
)
from sglang_dsv4.fp4 import FP4Matrices, FP4Rows
from sglang_dsv4.fp8 import FP8Matrix, FP8Rows
from sglang_dsv4.ledger import Delivery, Ledger, counted, is_matrix
from sglang_dsv4.linears import named_rows
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import KeptMatrix, named_weights
from sglang_dsv4.precision import DENSE, VARIABLE, Precision
from sglang_dsv4.survey import Survey
from sglang_dsv4.tensor_table import Kept, Slot, layer_of

__all__ = ["CheckpointError", "CheckpointSummary", "LoadReport", "check", "load"]

logger = logging.getLogger(__name__)

OTHER_EXPERTS = (
    "routed experts in another format than the model was built for, by what config.json says:"
    f" correct it, or set {VARIABLE}=routed_experts={DENSE}"
)
OTHER_LINEARS = (
    "linear weights in another format than the model was built for, by what config.json says:"
    f" correct it, or set {VARIABLE}=linears={DENSE}"
)


# --------------------------------------------------------------------- check, from headers alone


@dataclass(frozen=True)
class CheckpointSummary:
    """What a sound checkpoint holds.

    tensors, bytes: of those that are used, scales among them. values: of weights. formats: how many
    weights are in which. below_the_floor, contradictions: lines of `Census` and `format_claims`.
    """

    shards: int
    tensors: int
    bytes: int
    values: int
    formats: Mapping[str, int]
    skipped: Mapping[str, int]
    below_the_floor: Sequence[str] = ()
    contradictions: Sequence[str] = ()

    def __str__(self) -> str:
        first = (
            f"{self.tensors} tensors ({counted(self.formats)}), {self.values:,} values,"
            f" {self.bytes:,} bytes in {self.shards} files; skipped: {counted(self.skipped)}"
        )
        return "\n".join([first, *self.below_the_floor, *self.contradictions])


def check(folder: str | Path, config: DSV4Config) -> CheckpointSummary:
    """Tells from the headers in `folder`, reading no tensor, whether they make `config`'s model.

    Raises CheckpointError with every fault found: files that are absent, cut short or not
    safetensors; tensors that are unknown, missing, there twice, of another shape or format, or
    without the scales that they need. Logs what the checkpoint holds below the floor, and what
    its config says that is not so.
    """
    found = Survey(folder, config)
    if found.faults:
        lists = "\n".join(found.fault_lists())
        raise CheckpointError(f"{folder} does not fit this model\n{lists}")
    floor, claims = found.below_the_floor, found.contradictions
    for line in (*floor, *claims):
        logger.warning("sglang-dsv4 checkpoint: %s", line)
    return CheckpointSummary(
        *(found.files, found.used, found.bytes, found.values, found.held, found.skipped),
        *(floor, claims),
    )


def _count(census: Census, delivery: Delivery, ledger: Ledger, run: str = "") -> None:
    stored = delivery.stored
    for known in delivery.supplied:
        slot = ledger.owed[known]
        if is_matrix(slot):
            census.add(slot.row, layer_of(known), stored.held(), stored.name, run)


# ------------------------------------------------------------------------------- load, a stream


@dataclass(frozen=True)
class LoadReport:
    """What one rank loaded.

    tensors: used, scales among them. converted, skipped: weights and tensors, counted by kind.
    components: a line for each, of what the checkpoint holds and what we run. quantised_floor:
    component of the floor -> the format in which the checkpoint holds some of it.
    """

    tensors: int
    converted: Mapping[str, int]
    skipped: Mapping[str, int]
    components: Sequence[str] = ()
    quantised_floor: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        first = (
            f"{self.tensors} tensors loaded; converted: {counted(self.converted)};"
            f" skipped: {counted(self.skipped)}"
        )
        return "\n".join([first, *self.components])


@torch.no_grad()
def load(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    config: DSV4Config,
    *,
    rank: int,
    size: int,
    expert_parallel: int = 1,
    total_bytes: int | None = None,
    chosen: Precision | None = None,
) -> LoadReport:
    """Copies each tensor of a stream into `model`, without holding on to it.

    A quantised weight is dequantised when the last of its scales has come, or copied as it is to
    what keeps it, so what is held at a time is the weights that wait. Of what ranks divide only
    this rank's blocks are read, and of other ranks' experts nothing.

    model: parameters (and integer buffers) as `tensor_table` says, this rank's share of each; in
    the place of experts' parameters FP4Matrices, not packed any more, of others what
    `linears.Linears` makes.
    tensors: (name in any spelling, full tensor), in any order; `check` has seen their headers.
    rank, size, expert_parallel: this process among those that share the model; see `Parallel`.
    total_bytes: of the stream, for a progress bar on a terminal; None shows none.
    chosen: says what to round to NVFP4 values, unless it is quantised already; None for nothing.

    Raises CheckpointError: at once for values that are NaN, infinite or not an expert's number;
    after the stream for tensors that are unknown, missing, repeated, misshaped, of no known format
    or without their scales.
    """
    parallel = Parallel(rank, size, expert_parallel=expert_parallel)
    ledger = Ledger(config, parallel.experts.of(config.n_routed_experts))
    targets = _targets(model, ledger, parallel)
    place = _Placing(targets, _holders(model), ledger, parallel, chosen or Precision())
    hidden = True if total_bytes is None else None  # None: hidden where there is no terminal
    with tqdm(
        total=total_bytes, unit="B", unit_scale=True, desc="weights", disable=hidden
    ) as progress:
        for name, tensor in tensors:
            dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
            delivery = ledger.receive(Found(name, Header(dtype, tuple(tensor.shape)), tensor))
            if delivery is not None:
                place.whole(delivery)
            progress.update(tensor.nbytes)
    ledger.settle("The checkpoint")
    census = place.census
    low = {floor: held for (_, held), floor in census.quantised_floor()}
    return LoadReport(ledger.used, place.converted, ledger.skipped, census.lines(), low)


Target = Tensor | FP4Matrices | FP4Rows | FP8Rows
Numbered = tuple[int, Slot]  # which of those that a stored weight holds, in memory's order


class _Placing:
    """Puts weights where they belong in one rank's parameters, and counts what it converted."""

    def __init__(
        self,
        targets: Mapping[str, Target],
        holders: Mapping[str, FP4Matrices | FP8Matrix],
        ledger: Ledger,
        parallel: Parallel,
        chosen: Precision,
    ) -> None:
        self.targets, self.holders, self.ledger = targets, holders, ledger
        self.parallel = parallel
        self.chosen = chosen
        self.census = Census()
        self.converted: Counter[str] = Counter()

    def whole(self, delivery: Delivery) -> None:
        """Place a stored weight: one matrix, or all of this rank's that a stack holds."""
        stored, supplied = delivery
        slots = [self.ledger.owed[known] for known in supplied]
        mine = [(number, slot) for number, slot in enumerate(slots) if self.ledger.holds(slot)]
        if stored.format in LAYOUTS:
            check_global_scales(stored)
        target = self.targets[slots[0].parameter]  # a stack's weights all lie there
        if slots[0].parameter in self.holders:
            self.holders[slots[0].parameter].packed = False
        if isinstance(target, FP4Matrices | FP4Rows):
            run = self._keep(target, stored, mine, len(slots))
        elif isinstance(target, FP8Rows):
            run = self._keep_fp8(target, stored, slots[0])
        else:
            run = self._fill(target, stored, mine, len(slots))
        if run is not None:
            _count(self.census, delivery, self.ledger, run)

    def _fill(self, target: Tensor, stored: Stored, mine: Sequence[Numbered], matrices: int) -> str:
        """Copy the values to a dense parameter; in words, what was made of them.

        mine: of the `matrices` that `stored` holds.
        """
        _, slot = mine[0]
        flips = is_matrix(slot) and self.chosen.flips(component(slot.row.vendor_name))
        quantised = stored.format in LAYOUTS
        for number, slot in mine:
            region = slot_view(target, slot, self.ledger.held.start)
            if quantised:
                rows, columns = _ranges(slot, self.parallel)
                stored.fill(region, rows, columns, matrix=number, matrices=matrices)
            elif flips:
                _fill_rounded(region, stored, *_ranges(slot, self.parallel))
            else:
                values = stored.tensor().reshape(-1, *slot.shape)[number]
                region.copy_(_share(values, slot, self.parallel))
            check_values(stored, slot, region, number, self.ledger.config)
        run = DTYPE_NAMES[target.dtype]
        if run != stored.held():
            self.converted[f"{stored.held()} to {run}"] += 1
        if not flips:
            return f"{run} at load"
        already = f"{run} at load, not flipped: quantised already"
        return already if quantised else "NVFP4 values (flipped)"

    def _keep(
        self,
        target: FP4Matrices | FP4Rows,
        stored: Stored,
        mine: Sequence[Numbered],
        matrices: int,
    ) -> str | None:
        """Copy codes, scales and factors as they are; None if they are not what the model holds.

        target: all experts of a layer, or one matrix.
        """
        if FOUR_BITS.get(stored.format) != target.group:
            other = OTHER_EXPERTS if isinstance(target, FP4Matrices) else OTHER_LINEARS
            self.ledger.note(other, f"{stored.name}: {stored.held()}")
            return None
        for number, slot in mine:
            rows, columns = _ranges(slot, self.parallel)
            place = {"matrix": number, "matrices": matrices}
            codes, scales, factor = stored.four_bits(rows, columns, **place)
            if may_overflow(scales, factor, LAYOUTS[stored.format].scale_dtype):
                values = torch.empty(len(rows), len(columns), dtype=torch.float32)
                stored.fill(values, rows, columns, **place)
                check_values(stored, slot, values, number, self.ledger.config)
                check_factor(stored, factor)
            whole = target
            if not isinstance(whole, FP4Rows):
                whole = whole.matrix((slot.expert or 0) - self.ledger.held.start)
            region = whole.part(slot.row.part, slot.row.parts)
            region.codes.copy_(codes)
            region.scales.copy_(scales)
            region.factors.copy_(factor)
        return f"{stored.held()}, kept"

    def _keep_fp8(self, target: FP8Rows, stored: Stored, slot: Slot) -> str | None:
        """Copy codes as they are, scales as fp32; None if they are not what the model holds."""
        if stored.format is not TensorFormat.FP8:
            self.ledger.note(OTHER_LINEARS, f"{stored.name}: {stored.held()}")
            return None
        rows, columns = _ranges(slot, self.parallel)
        codes, scales = stored.blocks(rows, columns)
        if may_overflow_fp8(codes, scales):
            values = torch.empty(len(rows), len(columns), dtype=torch.bfloat16)
            stored.fill(values, rows, columns, matrix=0, matrices=1)
            check_values(stored, slot, values, 0, self.ledger.config)
        region = target.part(slot.row.part, slot.row.parts)
        region.codes.copy_(codes)
        region.scales.copy_(scales)
        return f"{stored.held()}, kept"


def _fill_rounded(region: Tensor, stored: Stored, rows: range, columns: range) -> None:
    """Copies to `region` what an NVFP4 checkpoint would hold of a dense matrix [rows, columns].

    The factor of the whole matrix follows from its largest value. So the row that has it joins each
    chunk of rows: chunks, and ranks, round as the whole would be rounded at once.
    """
    values = stored.tensor()
    if values.shape[1] % dequant.NVFP4_GROUP:
        raise CheckpointError(
            f"{stored.name}: NVFP4 needs a multiple of {dequant.NVFP4_GROUP} inputs, found"
            f" {values.shape[1]}: leave its component at bf16 ({VARIABLE})"
        )
    low, high = torch.aminmax(values, dim=1)
    largest = values[torch.maximum(-low, high).argmax()].unsqueeze(0).to(region.device)
    step = max(1, chunk_of(region.device) // values.shape[1])
    for first in range(rows.start, rows.stop, step):
        chunk = values[first : min(first + step, rows.stop)].to(region.device)
        rounded = dequant.nvfp4(*quantise.nvfp4(torch.cat([chunk, largest])))[: len(chunk)]
        part = region[first - rows.start :][: len(chunk)]
        part.copy_(rounded[:, columns.start : columns.stop])


def _targets(model: nn.Module, ledger: Ledger, parallel: Parallel) -> dict[str, Target]:
    """Name -> parameter, integer buffer or what holds a parameter's matrices in four bits; asserts
    that the model is the one the table tells of."""
    shapes: dict[str, tuple[int, ...]] = {}
    kept: dict[str, Kept] = {}
    for slot in ledger.owed.values():
        shape = [len(kept) for kept in _kept(slot, parallel)]
        shape[0] *= slot.row.parts
        experts = () if slot.expert is None else (len(ledger.held),)
        shapes[slot.parameter] = (*experts, *shape)
        kept[slot.parameter] = slot.row.kept
    held = _holders(model)
    parts = {id(part) for one in held.values() for part in one.parameters()}
    rows: dict[str, Target] = {**named_rows(model)}
    found = {name: one for name, one in held.items() if isinstance(one, FP4Matrices)} | rows
    found |= {name: one for name, one in named_weights(model).items() if id(one) not in parts}
    found |= {name: buffer for name, buffer in model.named_buffers() if name in shapes}
    differ = sorted(found.keys() ^ shapes.keys())
    assert not differ, f"parameters in either the model or the table but not both: {differ}"
    dtypes = {Kept.FP32: torch.float32, Kept.INT64: torch.int64}
    for name, target in found.items():
        dtype = target.dtype if isinstance(target, Tensor) else None
        fits = tuple(target.shape) == shapes[name]
        fits = fits and dtype == dtypes.get(kept[name], dtype)
        assert fits, f"{name} is {dtype} {tuple(target.shape)}: expected {shapes[name]}"
    return found


def _holders(model: nn.Module) -> dict[str, FP4Matrices | FP8Matrix]:
    """Parameter -> the module that holds its matrices as they are stored."""
    found: dict[str, FP4Matrices | FP8Matrix] = {}
    for name, one in model.named_modules():
        if isinstance(one, FP4Matrices | FP8Matrix):
            names = one.matrices(name) if isinstance(one, KeptMatrix) else (name,)
            found |= dict.fromkeys(names, one)
    return found


def slot_view(parameter: Tensor, slot: Slot, first: int = 0) -> Tensor:
    """The view of `parameter` that `slot` fills: an expert's, and of that a block of rows.

    first: the number of the first expert that the parameter has.
    """
    region = parameter if slot.expert is None else parameter[slot.expert - first]
    rows = region.shape[0] // slot.row.parts
    return region.narrow(0, slot.row.part * rows, rows)


def _share(values: Tensor, slot: Slot, parallel: Parallel) -> Tensor:
    """The view of the full `values` that this rank keeps."""
    return values[tuple(slice(kept.start, kept.stop) for kept in _kept(slot, parallel))]


def _ranges(slot: Slot, parallel: Parallel) -> tuple[range, range]:
    """The rows and columns of a full matrix that this rank keeps."""
    rows, columns = _kept(slot, parallel)
    return rows, columns


def _kept(slot: Slot, parallel: Parallel) -> list[range]:
    """What this rank keeps in each dimension; of an expert, if it is among its own."""
    kept = [range(length) for length in slot.shape]
    if slot.row.cut is not None:
        share = parallel.share if slot.expert is None else parallel.expert_width
        kept[slot.row.cut] = share.of(slot.shape[slot.row.cut])
    return kept
