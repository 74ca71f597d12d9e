"""What a checkpoint holds and what is wrong with it, from the headers of its files alone.

Unlike `weights.load`, which needs a sound checkpoint, this goes on after a fault and tells of all.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from sglang_dsv4 import format_claims
from sglang_dsv4.census import Census
from sglang_dsv4.checkpoint import (
    BYTES,
    CheckpointError,
    Header,
    listed,
    read_headers,
    read_index,
)
from sglang_dsv4.components import component_of
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import Found, Part, TensorFormat, part_of
from sglang_dsv4.ledger import Delivery, Ledger, is_matrix
from sglang_dsv4.linears import holder_of
from sglang_dsv4.tensor_table import Kept, layer_of, skip_reason, vendor_names


class DraftHead(Enum):
    """What a checkpoint brings for speculation (spec 1.3)."""

    NONE = "none"
    MTP = "EAGLE-style MTP"
    DSPARK = "DSpark"
    UNKNOWN = "not known"


_DRAFT_REASONS = {"MTP", "DSpark head", "NextN layer"}
_BLOCK = re.compile(r"(?:mtp|layers)\.(\d+)\.")


@dataclass
class Draft:
    """The tensors of draft blocks, none of which is loaded. bytes: in the files."""

    tensors: int = 0
    bytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    blocks: set[int] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)

    def add(self, name: str, header: Header) -> None:
        self.tensors += 1
        self.bytes += _size(header)
        self.dtypes[header.dtype] += 1
        self.parts.update(name.split("."))
        if block := _BLOCK.search(name):
            self.blocks.add(int(block[1]))

    @property
    def kind(self) -> DraftHead:
        if not self.tensors:
            return DraftHead.NONE
        if "markov_head" in self.parts:
            return DraftHead.DSPARK
        return DraftHead.MTP if {"enorm", "hnorm"} <= self.parts else DraftHead.UNKNOWN

    def __str__(self) -> str:
        if not self.tensors:
            return self.kind.value
        blocks = f"{len(self.blocks)} block{'s' * (len(self.blocks) != 1)}"
        size = f"{self.tensors:,} tensors, {self.bytes:,} bytes"
        return f"{self.kind.value} ({blocks}, {size}); left out: no speculation in this version"


HoldingKey = tuple[str, str, Kept, int | None, str | None]


@dataclass
class Holding:
    """Weights of one component of a layer, in one format. rows: of all of them; bytes: in the
    files, with scales."""

    weights: int = 0
    values: int = 0
    rows: int = 0
    bytes: int = 0


class Survey:
    """All that the headers of a checkpoint say, held against the model of `config`.

    files, tensors: of those that could be read. bytes, values: of weights that are used, and
        their scales. formats: the format of each weight, by the vendor's names. held: weights
        counted by format. names: by whose names weights came.
    scale_names: what scales of blocks are called.
    holdings: by component, format as told to users, what their parameters want, layer, None outside
        them, and module, of those that `linears` may hold as they are stored.
    faults: every fault, by kind.
    """

    def __init__(self, folder: str | Path, config: DSV4Config) -> None:
        self.folder, self.config = Path(folder), config
        self.files = self.tensors = self.bytes = self.values = 0
        self.formats: dict[str, TensorFormat] = {}
        self.held: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.scale_names: Counter[str] = Counter()
        self.holdings: dict[HoldingKey, Holding] = {}
        self.census = Census()
        self.draft = Draft()
        self.ledger = Ledger(config)
        self._walk(*self._read())
        try:
            self.ledger.settle(str(self.folder))
        except CheckpointError:
            pass  # it noted every fault before it raised
        self.below_the_floor = self.census.below_the_floor()
        self.contradictions = [
            *format_claims.contradictions(self.folder, self.census),
            *_about_the_draft(config, self.draft.kind),
        ]

    @property
    def faults(self) -> Mapping[str, list[str]]:
        return self.ledger.problems

    @property
    def used(self) -> int:
        """Tensors that the model is made of, scales among them."""
        return self.ledger.used

    @property
    def skipped(self) -> Mapping[str, int]:
        return self.ledger.skipped

    def fault_lists(self) -> list[str]:
        """A text for each kind of fault: how many there are, and the first of them."""
        return [listed(kind, faults) for kind, faults in self.faults.items()]

    def dialect(self) -> str:
        """Whose names the weights have, of those that are called differently."""
        if len(self.names) != 1:
            return ", ".join(f"{count:,} {who}" for who, count in sorted(self.names.items()))
        return next(iter(self.names))

    def _read(self) -> tuple[Mapping[str, str], dict[str, dict[str, Header]]]:
        """The index, and the headers of each file that can be used; notes what cannot."""
        index: Mapping[str, str] = {}
        try:
            index = read_index(self.folder)
        except CheckpointError as error:
            self.ledger.note("index that cannot be used", str(error))
        found = sorted(file.name for file in self.folder.glob("*.safetensors"))
        files = sorted(set(index.values())) or found
        shards: dict[str, dict[str, Header]] = {}
        broken = f"of {len(files)} files in {self.folder} cannot be used, download them again"
        for file in files:
            try:
                shards[file] = read_headers(self.folder / file)
            except CheckpointError as error:
                self.ledger.note(broken, str(error))
        if not files:
            fault = f"{self.folder} has no *.safetensors file: name a checkpoint's folder"
            self.ledger.note("folder without weights", fault)
        self.files = len(shards)
        return index, shards

    def _walk(self, index: Mapping[str, str], shards: dict[str, dict[str, Header]]) -> None:
        lost = self._lost(index, shards)
        for name, file in index.items():
            if file in shards and name not in shards[file]:
                fault = f"{name} in {file}"
                self.ledger.note("tensors that the index names but their file lacks", fault)
        seen: set[str] = set()
        for file, headers in shards.items():
            for name, header in headers.items():
                if name in seen:
                    self.ledger.note("tensors that come twice", f"{name}, again in {file}")
                elif not lost or self._weight_of(name) not in lost:
                    self._receive(name, header)
                seen.add(name)
        self.tensors = len(seen)

    def _lost(self, index: Mapping[str, str], shards: Mapping[str, object]) -> set[str]:
        """Weights of which a part is in a file that cannot be used; they are no further fault."""
        if not index and self.faults:
            self.ledger.came = dict.fromkeys(self.ledger.owed, "")  # nobody knows what there was
        lost = {self._weight_of(name) for name, file in index.items() if file not in shards}
        for weight in lost:
            supplied = vendor_names(weight, self.config.n_routed_experts)
            self.ledger.came |= dict.fromkeys(supplied, weight)
        return lost

    def _weight_of(self, name: str) -> str:
        """The weight that a tensor is, or belongs to."""
        if vendor_names(name, self.config.n_routed_experts):
            return name
        return (part_of(name) or (name,))[0]

    def _receive(self, name: str, header: Header) -> None:
        skipped = self.ledger.skipped.total()
        delivery = self.ledger.receive(Found(name, header))
        if delivery is not None:
            self._book(delivery)
        elif self.ledger.skipped.total() > skipped:
            if skip_reason(name, self.config) in _DRAFT_REASONS:
                self.draft.add(name, header)

    def _book(self, delivery: Delivery) -> None:
        stored, supplied = delivery
        held, slots = stored.held(), [self.ledger.owed[known] for known in supplied]
        values, size = math.prod(stored.shape()), stored.bytes()
        self.held[held] += 1
        self.values += values
        self.bytes += size
        if found := stored.parts.get(Part.SCALE):
            self.scale_names[found.name.rpartition(".")[2]] += 1
        if "{" in slots[0].row.names:  # else all call it so
            vendor = supplied == [stored.name.removeprefix("model.")]
            self.names["vendor's" if vendor else "transformers'"] += 1
        layer = layer_of(supplied[0])
        kept, holder = slots[0].row.kept, holder_of(supplied[0])
        key = component_of(supplied[0]), held, kept, layer, holder
        holding = self.holdings.setdefault(key, Holding())
        holding.weights += len(supplied)
        holding.values += values
        holding.rows += sum(slot.shape[0] for slot in slots)
        holding.bytes += size
        for known, slot in zip(supplied, slots, strict=True):
            self.formats[known] = stored.format
            if is_matrix(slot):
                self.census.add(slot.row, layer, held, stored.name)


def _size(header: Header) -> int:
    return header.bytes if header.dtype in BYTES else 0


def _about_the_draft(config: DSV4Config, kind: DraftHead) -> list[str]:
    """What the config says of draft blocks and the tensors deny; that there are none is no news."""
    said = config.dspark_block_size is not None
    if said and kind not in (DraftHead.DSPARK, DraftHead.NONE):
        return [f"config.json: dspark_block_size is set, but the draft head is {kind.value}"]
    if not said and kind is DraftHead.DSPARK:
        return ["config.json has no dspark_block_size, but mtp.* holds a DSpark draft head"]
    return []
