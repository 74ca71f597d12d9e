"""What a conversion to NVFP4 does with each tensor of a checkpoint, decided from headers alone."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from sglang_dsv4.census import component
from sglang_dsv4.checkpoint import CheckpointError, Header, listed, read_index, read_shards
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.dequant import NVFP4_GROUP
from sglang_dsv4.formats import LAYOUTS, Found, Part, TensorFormat, part_of
from sglang_dsv4.ledger import Delivery, Ledger, is_matrix
from sglang_dsv4.precision import floor_component
from sglang_dsv4.tensor_table import is_stacked, skip_reason

EXPERTS, ALL = "experts", "all"


class Way(Enum):
    """How a tensor gets into the copy; the value is how messages call it."""

    COPY = "as it is"
    BF16 = "in BF16"
    ROUND = "rounded to NVFP4"
    RECODE = "MXFP4 re-coded as NVFP4"


TO_NVFP4 = (Way.ROUND, Way.RECODE)


@dataclass(frozen=True)
class Options:
    """weights: EXPERTS, the routed ones alone, or ALL linear weights that the floor allows.

    bf16: patterns of vendor names ("layers.0.attn.*") of weights that go to BF16 instead.
    """

    weights: str = EXPERTS
    bf16: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One weight with all its parts, or one tensor that is copied.

    parts: the tensors read. modules: names of the matrices written, without ".weight"; one, or for
    a stack all of it in memory's order. shape: [N, K] of each matrix, or of what is copied.
    """

    way: Way
    name: str
    parts: Mapping[Part, Found]
    modules: Sequence[str]
    shape: tuple[int, ...]
    format: TensorFormat

    @property
    def bytes_read(self) -> int:
        return sum(found.header.bytes for found in self.parts.values())

    @property
    def values(self) -> int:
        return len(self.modules) * math.prod(self.shape)

    def outputs(self) -> dict[str, Header]:
        """Name -> header of what it writes."""
        if self.way is Way.COPY:
            return {self.name: self.parts[Part.WEIGHT].header}
        if self.way is Way.BF16:
            return {self.name: Header("BF16", self.whole_shape())}
        rows, columns = self.shape
        made = {}
        for module in self.modules:
            made[f"{module}.weight"] = Header("U8", (rows, columns // 2))
            made[f"{module}.weight_scale"] = Header("F8_E4M3", (rows, columns // NVFP4_GROUP))
            made[f"{module}.weight_scale_2"] = Header("F32", ())
        return made

    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the values of all its matrices, as they lie in a dense checkpoint."""
        if is_stacked(self.name):
            experts = self.parts[Part.WEIGHT].header.shape[0]
            rows, columns = self.shape
            return (experts, len(self.modules) // experts * rows, columns)
        return self.shape


@dataclass
class Plan:
    """All steps, by the file of the source that holds the weight, in the order of the files.

    index: whether the source has one. file_of: of each tensor of the source. dropped: tensors that
    have no place in the copy: activation scales of weights that change their format. dense: modules
    that are linear and not NVFP4 in the copy. nvfp4: those that are. fp8: whether any weight of
    the model stays FP8. drafts: patterns of what belongs to draft blocks.
    """

    index: bool
    files: dict[str, list[Step]] = field(default_factory=dict)
    file_of: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    dense: list[str] = field(default_factory=list)
    nvfp4: list[str] = field(default_factory=list)
    fp8: bool = False
    drafts: set[str] = field(default_factory=set)

    def steps(self) -> Iterator[Step]:
        for steps in self.files.values():
            yield from steps

    def bytes_read(self) -> int:
        return sum(step.bytes_read for step in self.steps())


def make(folder: Path, config: DSV4Config, options: Options) -> Plan:
    """The plan for the checkpoint in `folder`, which `weights.check` found sound.

    Raises CheckpointError where nothing is to be converted, where a weight cannot be NVFP4, and for
    a pattern of `options.bf16` that fits no weight.
    """
    index = read_index(folder)
    shards = read_shards(folder, index)
    plan, ledger, deliveries = Plan(bool(index)), Ledger(config), list[Delivery]()
    headers: dict[str, Header] = {}
    for file, found in shards.items():
        plan.files[file] = []
        for name, header in found.items():
            headers[name], plan.file_of[name] = header, file
            delivery = ledger.receive(Found(name, header))
            if delivery is not None:
                deliveries.append(delivery)
    _refuse_request(options, deliveries)
    changed: set[str] = set()  # names of weights
    for delivery in deliveries:
        step = _step(delivery, ledger, options)
        _book(plan, step, delivery, ledger)
        if step.way is not Way.COPY:
            plan.files[plan.file_of[step.parts[Part.WEIGHT].name]].append(step)
            changed.add(step.name)
            for part in step.parts.values():
                del headers[part.name]
    for name, header in headers.items():
        _copy(plan, name, header, changed, config)
    _refuse_plan(plan)
    return plan


def _copy(plan: Plan, name: str, header: Header, changed: set[str], config: DSV4Config) -> None:
    owner = part_of(name)
    if owner is not None and owner[0] in changed:
        plan.dropped.append(name)
        return
    if skip_reason(name, config) in ("MTP", "NextN layer"):
        prefix = re.match(r"(model\.)?(mtp|layers\.\d+)\.", name)
        plan.drafts |= {f"{prefix[0]}*"} if prefix else set()
    parts = {Part.WEIGHT: Found(name, header)}
    step = Step(Way.COPY, name, parts, (), header.shape, TensorFormat.OTHER)
    plan.files[plan.file_of[name]].append(step)


def _step(delivery: Delivery, ledger: Ledger, options: Options) -> Step:
    stored, supplied = delivery
    slot = ledger.owed[supplied[0]]
    layout = LAYOUTS.get(stored.format)
    needed = layout.parts if layout else (Part.WEIGHT,)
    way = _way(delivery, ledger, options)
    return Step(
        *(way, stored.name, {part: stored.parts[part] for part in needed}),
        *(_modules(stored.name, supplied), slot.shape, stored.format),
    )


def _way(delivery: Delivery, ledger: Ledger, options: Options) -> Way:
    stored, (first, *_) = delivery
    row = ledger.owed[first].row
    if stored.format is TensorFormat.INTEGER:
        return Way.COPY
    to_bf16 = Way.COPY if stored.header.dtype == "BF16" else Way.BF16
    if any(_fits(first, pattern) for pattern in options.bf16):
        return to_bf16
    what = component(row.vendor_name)
    if not is_matrix(ledger.owed[first]) or what == "embed":
        return Way.COPY
    if floor_component(what) is not None:
        return to_bf16
    wanted = options.weights == ALL or what.startswith("ffn.experts.")
    if not wanted or stored.format in (TensorFormat.NVFP4, TensorFormat.COMPRESSED_TENSORS):
        return Way.COPY
    return Way.RECODE if stored.format is TensorFormat.MXFP4 else Way.ROUND


def _fits(vendor_name: str, pattern: str) -> bool:
    return any(fnmatchcase(n, pattern) for n in (vendor_name, vendor_name.removesuffix(".weight")))


_OF_A_STACK = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _modules(name: str, supplied: Sequence[str]) -> list[str]:
    """What the matrices of a weight are called apart; experts of a stack as transformers does."""
    if not is_stacked(name):
        return [name.removesuffix(".weight")]
    experts = name.rpartition(".")[0]
    numbered = [known.removesuffix(".weight").split(".")[-2:] for known in supplied]
    return [f"{experts}.{expert}.{_OF_A_STACK[part]}" for expert, part in numbered]


def _book(plan: Plan, step: Step, delivery: Delivery, ledger: Ledger) -> None:
    """What the copy's config has to say of a linear weight."""
    row = ledger.owed[delivery.supplied[0]].row
    if not is_matrix(ledger.owed[delivery.supplied[0]]) or row.vendor_name == "embed.weight":
        return
    stays = step.format if step.way is Way.COPY else None
    if step.way in TO_NVFP4 or stays is TensorFormat.NVFP4:
        plan.nvfp4 += step.modules
        return
    plan.dense += step.modules
    plan.fp8 = plan.fp8 or stays is TensorFormat.FP8


# ------------------------------------------------------------------------------------- refusals


def _refuse_request(options: Options, deliveries: Sequence[Delivery]) -> None:
    floats = [d.supplied[0] for d in deliveries if d.stored.format is not TensorFormat.INTEGER]
    unused = [p for p in options.bf16 if not any(_fits(name, p) for name in floats)]
    if unused:
        raise CheckpointError(
            f"--bf16 {unused[0]}: no weight has such a name: name weights as the vendor does, for"
            " example layers.0.attn.wq_a, with a star for any text"
        )
    packed = TensorFormat.COMPRESSED_TENSORS
    if names := [d.stored.name for d in deliveries if d.stored.format is packed]:
        raise CheckpointError(
            listed("weights are NVFP4 of compressed-tensors, which convert does not read", names)
            + "\nname a checkpoint in BF16, FP8, MXFP4 or ModelOpt's NVFP4"
        )


def _refuse_plan(plan: Plan) -> None:
    rounded = [step for step in plan.steps() if step.way in TO_NVFP4]
    if not rounded:
        raise CheckpointError(
            "nothing is left to convert: what was asked for is NVFP4 already, or kept by --bf16;"
            " --weights all converts more than --weights experts"
        )
    misfits = [f"{step.name}: {step.shape[1]}" for step in rounded if step.shape[1] % NVFP4_GROUP]
    if misfits:
        raise CheckpointError(
            listed(f"weights whose inputs are no multiple of {NVFP4_GROUP}", misfits)
            + "\nNVFP4 shares a scale among 16 inputs: keep such weights with --bf16 NAME"
        )
