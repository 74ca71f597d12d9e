"""The accounts of a checkpoint: which tensors are owed, which came, what is wrong with them.

Each tensor of the model must come exactly once, with the scales that its format needs, and each
that comes must be used or be skipped by name.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang_dsv4.checkpoint import CheckpointError, listed
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import LAYOUTS, Found, Part, Stored, TensorFormat, part_of
from sglang_dsv4.tensor_table import (
    Kept,
    Slot,
    expected_tensors,
    is_stacked,
    skip_reason,
    vendor_names,
    why_unknown,
)

UNSUPPORTED = "unsupported formats (dense, FP8, MXFP4 and NVFP4 weights can be loaded)"
NOT_QUANTISED = "quantised tensors that the model keeps dense"
INCOMPLETE = "quantised weights whose scales are missing"
MISFITS = "quantised weights whose scales do not fit"


class Delivery(NamedTuple):
    """A weight that is complete, and the vendor names of what it holds, in memory's order."""

    stored: Stored
    supplied: list[str]


ELSEWHERE = "of experts on other ranks"


class Ledger:
    """Which tensors are owed, which came and what is wrong; `check` and `load` both book here."""

    def __init__(self, config: DSV4Config, held: range | None = None) -> None:
        """held: the experts that are wanted, None for all. The others' tensors are owed like any,
        and skipped when they have come."""
        self.config = config
        self.held = range(config.n_routed_experts) if held is None else held
        self.owed = expected_tensors(config)
        self.came: dict[str, str] = {}  # vendor name -> the name it came under
        self.used = 0
        self.skipped: Counter[str] = Counter()
        self.problems: dict[str, list[str]] = {}
        self._open: dict[str, Stored] = {}  # by the name of the weight, which waits for more
        self._complete: dict[str, TensorFormat] = {}  # quantised weights that had all they need

    def receive(self, found: Found) -> Delivery | None:
        """Book a tensor; what it completes, if it completes a wanted weight without fault.

        What is skipped or at fault is counted or noted instead.
        """
        if reason := skip_reason(found.name, self.config):
            self.skipped[reason] += 1
            return None
        weight, part = found.name, Part.WEIGHT
        if not vendor_names(found.name, self.config.n_routed_experts):
            weight, part = part_of(found.name) or (weight, part)
        supplied = vendor_names(weight, self.config.n_routed_experts)
        if not supplied or not all(known in self.owed for known in supplied):
            self.note("unknown tensors", found.name + why_unknown(weight, self.config))
            return None
        if weight in self._complete and part is not Part.WEIGHT:
            self._late(weight, found, part)
            return None
        stored = self._open.setdefault(weight, Stored(weight))
        if part in stored.parts:
            both = f"{stored.parts[part].name} and {found.name}"
            self.note("tensors that come twice", f"{both}, each as {part.value} of {weight}")
            return None
        stored.add(part, found)
        if stored.waits():
            return None
        del self._open[weight]
        return self._book(stored, supplied)

    def _late(self, weight: str, found: Found, part: Part) -> None:
        """Account for what comes after a weight had all that it needs."""
        held = self._complete[weight]
        if part is Part.ACTIVATION:
            self.skipped[Part.ACTIVATION.value] += 1
        elif part in LAYOUTS[held].parts:
            self.note("tensors that come twice", f"{found.name}, one more {part.value}")
        else:
            self.note("unknown tensors", f"{found.name} ({weight} is {held.value} without it)")

    def _book(self, stored: Stored, supplied: list[str]) -> Delivery | None:
        for known in supplied:
            if known in self.came:
                fault = f"{known} as {self.came[known]} and as {stored.name}"
                self.note("tensors that come twice", fault)
            self.came.setdefault(known, stored.name)
        layout = LAYOUTS.get(stored.format)
        needed = layout.parts if layout else (Part.WEIGHT,)
        wanted = any(self.holds(self.owed[known]) for known in supplied)
        for part, found in stored.parts.items():
            if part in needed and wanted:
                self.used += 1
            elif part in needed:
                self.skipped[ELSEWHERE] += 1
            elif layout and part is Part.ACTIVATION:
                self.skipped[Part.ACTIVATION.value] += 1
            else:
                self.note("unknown tensors", f"{found.name} ({stored.name} is {stored.held()})")
        if layout:
            self._complete[stored.name] = stored.format
        sound = self._has_format(stored, self.owed[supplied[0]])
        sound = sound and self._has_shape(stored, supplied)
        return Delivery(stored, supplied) if sound and wanted else None

    def holds(self, slot: Slot) -> bool:
        """Whether the slot is wanted."""
        return slot.expert is None or slot.expert in self.held

    def _has_format(self, stored: Stored, slot: Slot) -> bool:
        found = stored.format
        integer = slot.row.kept is Kept.INT64
        if found is (TensorFormat.INTEGER if integer else TensorFormat.DENSE):
            return True
        if found in LAYOUTS and is_matrix(slot):
            return True
        kind = NOT_QUANTISED if found in LAYOUTS else UNSUPPORTED
        if integer:
            kind = "tables that are not I64 or I32"
        self.note(kind, f"{stored.name}: {found.value} ({stored.header.dtype})")
        return False

    def _has_shape(self, stored: Stored, supplied: Sequence[str]) -> bool:
        expected = self.owed[supplied[0]].shape
        if is_stacked(stored.name):
            experts = self.config.n_routed_experts
            expected = (experts, len(supplied) // experts * expected[0], *expected[1:])
        if stored.shape() != expected:
            layout = LAYOUTS.get(stored.format)
            packed = f", {layout.packed} in a byte" if layout and layout.packed > 1 else ""
            found = f"found {list(stored.shape())}{packed}"
            self.note("wrong shapes", f"{stored.name}: expected {list(expected)}, {found}")
            return False
        if stored.format in LAYOUTS:
            try:
                stored.check(len(supplied))
            except ValueError as error:
                self.note(MISFITS, f"{stored.name}: {error}")
                return False
        return True

    def note(self, kind: str, fault: str) -> None:
        self.problems.setdefault(kind, []).append(fault)

    def settle(self, source: str) -> None:
        """Raises CheckpointError if anything was noted or a tensor never came."""
        names = set(self.came.values())
        for stored in self._open.values():
            if Part.WEIGHT not in stored.parts:
                why = "is not quantised" if stored.name in names else "is not there"
                for found in stored.parts.values():
                    self.note("unknown tensors", f"{found.name} ({stored.name} {why})")
                continue
            self.note(INCOMPLETE, stored.missing())
            supplied = vendor_names(stored.name, self.config.n_routed_experts)
            self.came |= dict.fromkeys(supplied, stored.name)
        for known in self.owed.keys() - self.came.keys():
            self.note("missing tensors (by the vendor's names)", known)
        if self.problems:
            lists = [listed(kind, faults) for kind, faults in self.problems.items()]
            raise CheckpointError("\n".join([f"{source} does not fit this model", *lists]))


def is_matrix(slot: Slot) -> bool:
    """Whether it is a linear weight or a table of them: what checkpoints may quantise."""
    return slot.row.kept is Kept.MODEL_DTYPE and len(slot.shape) == 2


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"
