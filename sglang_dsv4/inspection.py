"""Whether a checkpoint can be served, judged before anything is loaded or allocated.

The server's start, `sglang-dsv4 inspect` and `sglang-dsv4 doctor` all ask here.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_dsv4 import expert_storage, format_claims, linear_storage, parallel
from sglang_dsv4.census import QUANTISED
from sglang_dsv4.components import EXPERTS, NAMES
from sglang_dsv4.config import ConfigError, DSV4Config
from sglang_dsv4.expert_storage import ExpertStorage, HeldByLayer
from sglang_dsv4.formats import DTYPE_NAMES
from sglang_dsv4.linear_storage import LinearStorage
from sglang_dsv4.linears import ALL_DENSE
from sglang_dsv4.memory_plan import (
    GIB,
    CacheSizes,
    Plan,
    four_bit_bytes,
    memory_dtype,
    parameter_counts,
    weight_bytes,
)
from sglang_dsv4.precision import AUTO
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.survey import Survey
from sglang_dsv4.tensor_table import Kept, Slot, expected_tensors

CONTEXT = 32768  # tokens of a request where nobody says otherwise, if the model was made for more


class Verdict(Enum):
    SERVES = "serves"
    CONVERTS = "serves with these conversions"
    REFUSED = "refused"


@dataclass(frozen=True)
class Deployment:
    """How and where a checkpoint is to be served.

    tensor_parallel: number of ranks. expert_parallel: of groups of them that the experts are
    divided over. run: dtype in which the model runs.
    device: bytes of a device's memory, None if unknown. device_name: for messages.
    shared: it is a CPU, whose memory all ranks share; too little of it is warned of, not refused.
    fraction: of the device, for weights and cache. context: tokens of a request, None for CONTEXT.
    routed_experts, linears: values of the components, of `precision`; shared says where "auto"
    runs.
    """

    tensor_parallel: int = 1
    expert_parallel: int = 1
    run: torch.dtype = torch.bfloat16
    device: int | None = None
    device_name: str = "the device"
    shared: bool = False
    fraction: float = 0.9
    context: int | None = None
    routed_experts: str = AUTO
    linears: str = AUTO

    @property
    def kind(self) -> str:
        """Of the device, as torch calls it."""
        return "cpu" if self.shared else "cuda"


class Held(NamedTuple):
    """Weights of a component in one format, and what they run in; if they are quantised and run in
    the same format, they stay in its bits.

    bytes: in the files, with their scales. memory: in the memory of all ranks together, each rank's
    copy of what ranks do not share counted once.
    """

    component: str
    held: str
    run: str
    weights: int
    layers: int
    values: int
    bytes: int
    memory: int


class Inspection:
    """Everything about a checkpoint and a way of serving it.

    config: None where config.json cannot be served. survey: None without a config, or where the
        headers were not read. plan: None where the ranks cannot share the model.
    refused: why it cannot be served, by subject: config, ranks, weights, experts, linears, memory.
    warned: what should be known though it serves, by the same.
    """

    def __init__(
        self,
        folder: str | Path,
        deployment: Deployment,
        *,
        overrides: Mapping[str, Any] | None = None,
        headers: bool = True,
    ) -> None:
        """overrides: of fields of config.json. headers: whether to look at the weights at all; if
        not, what config.json says of their formats is believed.

        Raises NotADirectoryError where `folder` is none.
        """
        self.folder, self.deployment = Path(folder), deployment
        self._overrides = dict(overrides or {})
        if not self.folder.is_dir():
            raise NotADirectoryError(f"{folder} is no folder: name that of a checkpoint")
        self.refused: dict[str, list[str]] = {}
        self.warned: dict[str, list[str]] = {}
        self.config: DSV4Config | None = None
        self.survey: Survey | None = None
        self.plan: Plan | None = None
        try:
            self.config = DSV4Config.from_checkpoint(self.folder, overrides)
        except ConfigError as error:
            self.refused["config"] = [str(error)]
            return
        if headers:
            self.survey = Survey(self.folder, self.config)
        self._judge_ranks(self.config)
        self._judge_weights()
        self._judge_experts(self.config)
        self._judge_memory(self.config)

    # ---- what it says ----

    @property
    def refusals(self) -> list[str]:
        return [reason for reasons in self.refused.values() for reason in reasons]

    @property
    def warnings(self) -> list[str]:
        return [line for lines in self.warned.values() for line in lines]

    @property
    def verdict(self) -> Verdict:
        if self.refusals:
            return Verdict.REFUSED
        return Verdict.CONVERTS if self.conversions else Verdict.SERVES

    @property
    def kept(self) -> list[str]:
        """A line for each format that stays in memory as it is stored, though it is quantised."""
        rows = [row for row in self.holdings if row.held == row.run and row.held in QUANTISED]
        where = "kept" if self.deployment.kind == "cpu" else "kept on a GPU"
        return [f"{row.held} {where}: {row.weights:,} weights ({row.component})" for row in rows]

    @property
    def conversions(self) -> list[str]:
        """A line for each format that does not run as it is stored."""
        changed: dict[tuple[str, str], list[Held]] = {}
        for row in self.holdings:
            if row.held != row.run:
                changed.setdefault((row.held, row.run), []).append(row)
        return [
            f"{held} to {run}: {sum(row.weights for row in rows):,} weights"
            f" ({', '.join(dict.fromkeys(row.component for row in rows))})"
            for (held, run), rows in sorted(changed.items())
        ]

    @property
    def reasons(self) -> list[str]:
        """What the verdict rests on."""
        return self.refusals or [*self.conversions, *self.kept]

    def told(self) -> str:
        """The verdict and its reasons, for a log or a refusal."""
        verdict = f"{self.folder}: {self.verdict.value}"
        reasons = self.reasons
        return "\n".join([verdict, *reasons]) if reasons else verdict

    @cached_property
    def slots(self) -> Mapping[str, Slot]:
        """Every tensor that the model needs, by the vendor's names; empty without a config."""
        if self.survey is not None:
            return self.survey.ledger.owed
        return {} if self.config is None else expected_tensors(self.config)

    @property
    def holdings(self) -> list[Held]:
        """What there is of each component, in the model's order and by format."""
        sums: defaultdict[tuple[str, str, Kept, str], Counter[str]] = defaultdict(Counter)
        layers: defaultdict[tuple[str, str, Kept, str], set[int]] = defaultdict(set)
        ranks = self.deployment.tensor_parallel
        groups, linears = self._storage(ranks).groups, self._linears(ranks).layers
        holdings = self.survey.holdings if self.survey else {}
        for (component, held, kept, layer, holder), found in holdings.items():
            dtype = memory_dtype(kept, self.deployment.run)
            run, memory = DTYPE_NAMES[dtype], found.values * dtype.itemsize
            group = None if layer is None or component != EXPERTS else groups.get(layer)
            if group is not None:
                run, memory = held, four_bit_bytes(found.values, group, found.weights)
            linear = ALL_DENSE if layer is None else linears.get(layer, ALL_DENSE)
            if form := linear_storage.form_in_memory(linear, holder, held):
                run, memory = held, linear_storage.bytes_of(form, found.values, found.rows)
            key = component, held, kept, run
            layers[key].update(() if layer is None else (layer,))
            sums[key].update(
                weights=found.weights,
                values=found.values,
                bytes=found.bytes,
                memory=memory,
            )
        rows = [
            Held(key[0], key[1], key[3], layers=len(layers[key]), **sum_)
            for key, sum_ in sums.items()
        ]
        return sorted(rows, key=lambda row: (NAMES.index(row.component), row.held, row.run))

    @property
    def parameters(self) -> tuple[int, int]:
        """(those of the model, those that a token uses), by its config."""
        assert self.config is not None
        return parameter_counts(self.slots, self.config)

    def weights_of_a_rank(self, ranks: int) -> int:
        """Bytes in memory, as this version holds weights."""
        groups, linears = self._storage(ranks).groups, self._linears(ranks).weights
        run, expert_parallel = self.deployment.run, self.deployment.expert_parallel
        return weight_bytes(self.slots, run, ranks, groups, linears, expert_parallel)

    # ---- how it judges ----

    def _judge_ranks(self, config: DSV4Config) -> None:
        size = self.deployment.tensor_parallel
        works = parallel.tensor_parallel_sizes(config)
        if size in works:
            works = parallel.expert_parallel_sizes(config, size)
        self.refused["ranks"] = []
        try:
            parallel.check(config, size, self.deployment.expert_parallel)
        except ConfigError as error:
            sizes = ", ".join(map(str, works))
            self.refused["ranks"] = [f"{error}. Sizes that work: {sizes}."]

    def _judge_weights(self) -> None:
        if self.survey is not None:
            self.refused["weights"] = self.survey.fault_lists()
            self.warned["weights"] = [*self.survey.below_the_floor, *self.survey.contradictions]

    def _judge_experts(self, config: DSV4Config) -> None:
        if self.refused["ranks"]:
            return
        try:
            notes = self._decided(config, self.deployment.tensor_parallel).notes
        except SettingsError as error:
            self.refused["experts"] = [str(error)]
        else:
            self.warned["experts"] = list(notes)
        try:
            self._decided_linears(config, self.deployment.tensor_parallel)
        except SettingsError as error:
            self.refused["linears"] = [str(error)]

    def _linears(self, ranks: int) -> LinearStorage:
        """What else so many ranks keep as it is stored; nothing where that is refused."""
        try:
            return LinearStorage() if not self.config else self._decided_linears(self.config, ranks)
        except SettingsError:
            return LinearStorage()

    def _decided_linears(self, config: DSV4Config, ranks: int) -> LinearStorage:
        if self.survey is not None:
            formats = self.survey.formats
        else:
            raw = format_claims.read(self.folder / format_claims.CONFIG) | self._overrides
            formats = linear_storage.from_claims(raw, self.slots)
        return linear_storage.decide(
            config,
            self.slots,
            formats,
            chosen=self.deployment.linears,
            device=self.deployment.kind,
            run=self.deployment.run,
            ranks=ranks,
        )

    def _storage(self, ranks: int) -> ExpertStorage:
        """What so many ranks keep in four bits; nothing where that is refused."""
        try:
            return ExpertStorage() if self.config is None else self._decided(self.config, ranks)
        except SettingsError:
            return ExpertStorage()

    def _decided(self, config: DSV4Config, ranks: int) -> ExpertStorage:
        wanted = self.deployment
        return expert_storage.decide(
            config,
            self._expert_formats,
            chosen=wanted.routed_experts,
            device=wanted.kind,
            ranks=max(1, ranks // wanted.expert_parallel),  # 0 is refused elsewhere
        )

    @cached_property
    def _expert_formats(self) -> HeldByLayer:
        if self.survey is not None:
            return expert_storage.from_formats(self.survey.formats)
        assert self.config is not None
        raw = format_claims.read(self.folder / format_claims.CONFIG) | self._overrides
        return expert_storage.from_claims(raw, self.config)

    def _judge_memory(self, config: DSV4Config) -> None:
        wanted = self.deployment
        if self.refused["ranks"]:
            return
        self.plan = self.plan_for(wanted.tensor_parallel)
        warned = self.warned.setdefault("memory", [])
        context, longest = self.plan.context, config.max_position_embeddings
        if context > longest:
            warned.append(f"a request of {context:,} tokens: the model was made for {longest:,}")
        fault = self._memory_fault(self.plan)
        if fault is not None and wanted.shared:
            warned.append(fault)
        elif fault is not None:
            self.refused["memory"] = [fault]
        elif self.plan.device is not None and not self.plan.requests:
            warned.append(
                f"no request of {context:,} tokens fits: the cache has room for"
                f" {self.plan.pool_tokens:,}"
            )

    def plan_for(self, ranks: int, device: int | None = None) -> Plan:
        """The memory of one of so many ranks. device: its bytes, where not those asked for."""
        assert self.config is not None
        wanted = self.deployment
        device = device or wanted.device
        if wanted.shared and device is not None:
            device //= ranks
        item = torch.float32.itemsize if wanted.run is torch.float32 else torch.bfloat16.itemsize
        return Plan(
            weights=self.weights_of_a_rank(ranks),
            cache=CacheSizes(self.config, item),
            context=wanted.context or min(CONTEXT, self.config.max_position_embeddings),
            device=device,
            fraction=wanted.fraction,
        )

    def _memory_fault(self, plan: Plan) -> str | None:
        wanted = self.deployment
        if plan.device is None or plan.pages:
            return None
        share = "" if plan.fraction == 1 else f", of which {plan.fraction:g} for weights and cache"
        has = "has for each" if wanted.shared and wanted.tensor_parallel > 1 else "has"
        there = f"{wanted.device_name} {has} {plan.device / GIB:.1f} GiB{share}"
        ranks = f"one of {wanted.tensor_parallel} ranks" if wanted.tensor_parallel > 1 else "a rank"
        need = f"the weights of {ranks} take {plan.weights / GIB:.1f} GiB in memory"
        if plan.room >= 0:
            need += " and leave no room for the cache"
        return f"{need}; {there}. {self._enough_ranks()}"

    def _enough_ranks(self) -> str:
        assert self.config is not None
        if self.deployment.shared:
            return "Ranks on one machine share its memory: use a machine with more."
        for ranks in parallel.tensor_parallel_sizes(self.config, self.deployment.expert_parallel):
            plan = self.plan_for(ranks)
            if ranks > self.deployment.tensor_parallel and plan.pages:
                return f"--tp-size {ranks} would do: {plan.weights / GIB:.1f} GiB each."
        return "No number of ranks that can share this model is enough: use larger devices."


def config_dialect(folder: Path) -> str:
    """Whose fields config.json has; what it lacks is for `DSV4Config` to say."""
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return "unreadable"
    fields = raw if isinstance(raw, dict) else {}
    signs = {
        "as shipped": "compress_ratios" in fields,
        "transformers'": "layer_types" in fields,
        "early transformers'": "compress_rope_parameters" in fields,
    }
    return ", ".join(name for name, found in signs.items() if found) or "not known"
