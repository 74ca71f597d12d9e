"""Proves that a decode step can be one CUDA graph: no host sync, no host decision, fixed shapes.

Three checks, each of what the one before cannot see: the source of every function that a step
reaches (static), the operators that it runs (dispatch), and a capture whose replay equals the step
run eagerly, bit for bit (device). `graph_safety_rules` says what is forbidden and why.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path

from sglang_dsv4.backends import PROVIDERS, Machine, choose
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.graph_safety_device import BATCHES, check_device
from sglang_dsv4.graph_safety_kinds import Kind
from sglang_dsv4.graph_safety_rules import Allowed, Finding, apply_allowed
from sglang_dsv4.graph_safety_static import Observed, Source
from sglang_dsv4.graph_safety_static import check as check_function
from sglang_dsv4.graph_safety_step import DecodeStep, decode_batch, described, make_step
from sglang_dsv4.graph_safety_trace import Sources, Trace, Watch, compare, trace, watch

# Our packages, and how reports call their folders: as in the repository, wherever they lie.
PACKAGES = {
    "sglang_dsv4": "sglang_dsv4",
    "sglang_dsv4.attention": "attention",
    "sglang_dsv4.moe": "moe",
    "sglang_dsv4.served": "sglang_dsv4/served",
}

# Findings that are no fault. At most five; one that matches nothing is reported.
ALLOWED: tuple[Allowed, ...] = (
    Allowed(
        "attention/backend.py",
        "DSV4Backend.init_forward_metadata_in_graph",
        "host-state",
        "hands the layers of the same capture their tensors; a replay rewrites these in place",
    ),
)

# Captured, but not reached by the step that is run here, since it needs SGLang around it. What is
# called *_in_graph, SGLang's name for metadata that is built during the capture, is added.
IN_GRAPH = (
    "sglang_dsv4.served.deepseek_v4:DeepseekV4ForCausalLM.forward",
    "sglang_dsv4.attention.kernels_flashinfer:FlashInferPlan.run",  # through what it planned
)

# Host code of ours around the graph: it may do what a step may not.
OUTSIDE: Mapping[str, str] = {
    "sglang_dsv4.attention.cache:allocate": "start-up: makes the caches",
    "sglang_dsv4.attention.rope:rope_frequencies": "start-up: a table of each layer",
    "sglang_dsv4.backends:choose": "start-up: picks the ops",
    "sglang_dsv4.host_slots:DecodeSlots.__call__": "before each step: places its tokens",
    "sglang_dsv4.served.deepseek_v4:DeepseekV4ForCausalLM.load_weights": "start-up: loading",
    "sglang_dsv4.weights:load": "start-up: loading",
}

# Tokens before the new one, None for a padding row. The second closes an entry of every kind in
# every request, the third is what a graph is captured with.
LENGTHS: tuple[tuple[int | None, ...], ...] = (
    (1, 120, 250, 600, None),
    (3, 127, 255, 1023, None),
    (None, None, None, None, None),
)


@dataclass(frozen=True)
class Covered:
    """A function that is held to the rules.

    how: "ran" (a traced step entered it), "called" (by one that did), "provider" (of an op, for
    another machine), "in graph" (captured by the server alone) or "device code" (not checked).
    """

    file: str
    line: int
    function: str
    lines: int
    how: str


@dataclass(frozen=True)
class Check:
    """The outcome of one check: "ok", "failed" or "skipped", and what it looked at or why not."""

    name: str
    status: str
    detail: str


@dataclass(frozen=True)
class Report:
    """All that was checked and found."""

    checks: list[Check]
    findings: list[Finding]
    covered: list[Covered]
    allowed: list[tuple[Allowed, int]]
    outside: Mapping[str, str]

    @property
    def lines(self) -> int:
        return sum(item.lines for item in held_to_the_rules(self.covered))


def held_to_the_rules(covered: Sequence[Covered]) -> list[Covered]:
    """Without device code, which no host runs."""
    return [item for item in covered if item.how != "device code"]


class Package:
    """Our package as source, by module."""

    def __init__(self) -> None:
        self.folders = {name: _folder(name) for name in PACKAGES}
        shown = {folder: PACKAGES[name] for name, folder in self.folders.items()}
        self.sources = Sources(shown)

    @cached_property
    def modules(self) -> dict[str, Source]:
        """Parsed files by module name."""
        found = {}
        for package, folder in self.folders.items():
            for path in sorted(folder.glob("*.py")):
                file = self.sources.shown(str(path))
                if file is not None:
                    found[f"{package}.{path.stem}"] = Source(file, path.read_text())
        return found

    def locate(self, name: str) -> tuple[str, str] | None:
        """Module and function of a full name such as `sglang_dsv4.model.Model.forward`."""
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            module, function = ".".join(parts[:cut]), ".".join(parts[cut:])
            if module in self.modules:
                return (module, function) if function in self.modules[module].functions else None
        return None


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def check(
    config: DSV4Config,
    machine: Machine,
    *,
    named: str = "",
    static_only: bool = False,
    batches: Sequence[int] = BATCHES,
) -> Report:
    """Run every check that the machine can.

    config: of a model small enough for a CPU, with every kind of layer. named: providers to use on
    a GPU, as `backends.choose` reads them. batches: sizes that are captured there.
    """
    package = Package()
    step = make_step(config, choose(Machine("cpu", "CPU", None)), LENGTHS[0], "cpu")
    seen = trace(step.run, package.sources)
    covered = list(cover(package, seen))
    found = check_source(package, seen, covered) + check_tables(package, seen)
    checked = held_to_the_rules(covered)
    lines = sum(item.lines for item in checked)
    checks = [_outcome("static", found, f"{len(checked)} functions, {lines} lines")]
    skipped = "only the source was asked for" if static_only else ""
    on_device = partial(check_device, named=named, batches=batches)
    for name, run in (("dispatch", check_dispatch), ("device", on_device)):
        if not skipped and name == "device" and machine.device != "cuda":
            skipped = "a capture needs a CUDA GPU: none found, or --device cpu"
        if skipped:
            checks.append(Check(name, "skipped", skipped))
            continue
        findings, detail = run(config, machine, package.sources)
        checks.append(_outcome(name, findings, detail))
        found += findings
    left, allowed = apply_allowed(found, ALLOWED, "sglang_dsv4/graph_safety.py")
    return Report(checks, sorted(set(left)), covered, allowed, OUTSIDE)


def _outcome(name: str, findings: Sequence[Finding], detail: str) -> Check:
    count = sum(not any(entry.covers(finding) for entry in ALLOWED) for finding in findings)
    return Check(name, "failed" if count else "ok", f"{detail}; {count} findings")


# ---- static ----


def cover(package: Package, seen: Trace) -> Iterator[Covered]:
    """What a step reaches, what that calls by name, and the ops of every provider."""
    by_file = {source.file: name for name, source in package.modules.items()}
    waiting = [(by_file[file], function, "ran") for file, function in seen.functions]
    waiting += [(provider.module, op, "provider") for op in PROVIDERS for provider in PROVIDERS[op]]
    waiting += [(*name.split(":"), "in graph") for name in IN_GRAPH]  # type: ignore[misc]
    waiting += [
        (module, function, "in graph")
        for module, source in package.modules.items()
        for function in source.functions
        if function.endswith("_in_graph")
    ]
    done = set()
    while waiting:
        module, function, how = waiting.pop(0)
        source = package.modules.get(module)
        if source is None or (module, function) in done or function not in source.functions:
            continue
        done.add((module, function))
        node = source.functions[function]
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines = (node.end_lineno or first) - first + 1
        device_code = source.is_device_code(function)
        how = "device code" if device_code else how
        yield Covered(source.file, first, function, lines, how)
        if not device_code:
            waiting += _callees(package, module, function, how)


def _callees(package: Package, module: str, function: str, how: str) -> list[tuple[str, str, str]]:
    source = package.modules[module]
    found = []
    for name in source.called(function):
        place = (module, name) if name in source.functions else package.locate(name)
        if place is not None and f"{place[0]}:{place[1]}" not in OUTSIDE:
            found.append((*place, how if how == "provider" else "called"))
    return found


def check_source(package: Package, seen: Trace, covered: Sequence[Covered]) -> list[Finding]:
    """Findings in the source of covered functions."""
    by_file = {source.file: source for source in package.modules.values()}
    found = []
    for item in held_to_the_rules(covered):
        observed = observed_in(seen, item.file, item.function)
        found += check_function(by_file[item.file], item.function, observed, seen.returns)
    return found


def observed_in(seen: Trace, file: str, function: str) -> Observed:
    """What the trace saw in a function. A provider that did not run takes the arguments of the one
    that did, since all of them share a signature."""
    if (file, function) in seen.functions:
        return seen.functions[file, function]
    for (_, other), observed in seen.functions.items():
        if other == function and function in PROVIDERS:
            names: dict[str, Kind] = {
                name: kind
                for name, kind in observed.names.items()
                if name.partition(".")[0] in observed.entry
            }
            return Observed(observed.entry, names)
    return Observed()


def check_tables(package: Package, seen: Trace) -> list[Finding]:
    """The tables name what exists, in our source; and what they put outside a step is not in it."""
    ran = set(seen.functions)
    providers = [f"{one.module}:{op}" for op in PROVIDERS for one in PROVIDERS[op]]
    found = []
    for name in (*OUTSIDE, *IN_GRAPH, *providers):
        module, _, function = name.partition(":")
        source = package.modules.get(module)
        fault = None
        if source is None or function not in source.functions:
            fault = f"{name} does not exist"
        elif name in OUTSIDE and (source.file, function) in ran:
            fault = f"{name} stands in OUTSIDE, and a decode step runs it"
        if fault is not None:
            found.append(
                Finding("sglang_dsv4/graph_safety.py", 0, "table", "static", function, fault)
            )
    assert len(ALLOWED) <= 5
    return found


# ---- dispatch ----


def check_dispatch(
    config: DSV4Config, machine: Machine, sources: Sources
) -> tuple[list[Finding], str]:
    """Run the step on the CPU with each of LENGTHS and once without any values at all."""
    ops = choose(Machine("cpu", "CPU", None))
    cpu, meta = (make_step(config, ops, LENGTHS[0], device) for device in ("cpu", "meta"))
    return watch_steps(cpu, meta, sources)


def watch_steps(
    step: DecodeStep, valueless: DecodeStep, sources: Sources
) -> tuple[list[Finding], str]:
    """Findings of a step on the CPU at LENGTHS, and of the same step on the meta device.

    Nothing can be read from a meta tensor, and the other tensors of that run are the host's: it
    shows what moves between the two.
    """
    runs: list[Watch] = []
    for lengths in LENGTHS:
        step.fill(_token_ids(lengths), decode_batch(lengths))
        runs.append(watch(step.run, sources))
    found = [finding for run in runs for finding in run.findings]
    lines = {(finding.file, finding.line) for finding in found}
    moved = watch(valueless.run, sources).findings
    found += [one for one in moved if (one.file, one.line) not in lines]
    for lengths, run in zip(LENGTHS[1:], runs[1:], strict=True):
        found += compare(runs[0], run, (described(LENGTHS[0]), described(lengths)))
    detail = f"{len(runs[0].operations)} operators of one step, at lengths "
    return sorted(set(found)), detail + " / ".join(map(described, LENGTHS)) + ", and on meta"


def _token_ids(lengths: Sequence[int | None]) -> list[int]:
    """Other tokens for other lengths, so that a decision on a token shows as well."""
    return [7 * row + (length or 0) % 31 for row, length in enumerate(lengths)]
