"""Times of ops and of a whole decode step, at the shapes that a model's step really has.

The step runs once with ops that note what they are called with; each provider of an op is then
timed with those arguments. So a new op needs nothing here, and no shape is written down twice.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import wraps
from typing import Any

import torch

from sglang_dsv4 import bench_bytes, bench_timer
from sglang_dsv4.attention.metadata import EntryTable, IndexList
from sglang_dsv4.backends import PROVIDERS, Machine, Op, Ops, choose, prepare_attention
from sglang_dsv4.bench_step import make_step
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.graph_safety_device import provider_names
from sglang_dsv4.graph_safety_step import DecodeStep, capture
from sglang_dsv4.precision import Precision


@dataclass
class Called:
    """One sort of call within a step. arguments: by name, of the first of `count` such calls;
    moved: bytes that it must move at least."""

    op: str
    label: str
    arguments: Mapping[str, Any]
    moved: int
    count: int = 0


@dataclass(frozen=True)
class Timing:
    """A call by one provider. microseconds: None where it failed, and error says how.

    chosen: whether it is the provider that serves. count: such calls in the step.
    bandwidth: bytes a second that must be moved; roof: its share of the measured copy bandwidth.
    """

    op: str
    label: str
    provider: str
    chosen: bool
    count: int
    moved: int
    microseconds: float | None
    bandwidth: float | None
    roof: float | None
    error: str


@dataclass(frozen=True)
class StepTime:
    """A captured step (on a CPU: run eagerly). ops: milliseconds of its ops by the providers that
    serve, None where one failed. moved: bytes of its ops and of the weights that all tokens use."""

    batch: int
    context: int
    layers: Sequence[str]
    milliseconds: float
    ops: float | None
    moved: int
    roof: float


Progress = Callable[[str], None]


def record(
    config: DSV4Config,
    ops: Ops,
    precision: Precision,
    batch: int,
    context: int,
    group: int | None = None,
) -> tuple[DecodeStep, list[Called]]:
    """The step of `make_step`, run once, and every sort of call that it made."""
    calls: dict[tuple[str, str], Called] = {}
    noting = True

    def noted(op: str, function: Op) -> Op:
        signature = inspect.signature(function)

        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            if noting:
                given = signature.bind(*args, **options).arguments
                label = described(given)
                if (op, label) not in calls:
                    moved = bench_bytes.moved(op, given, result)
                    calls[op, label] = Called(op, label, given, moved)
                calls[op, label].count += 1
            return result

        return run

    wrapped: dict[str, Any] = {op: noted(op, getattr(ops, op)) for op in PROVIDERS}
    watched = replace(ops, **wrapped)
    step = make_step(config, watched, precision, batch, context, group)
    step.run()
    noting = False
    order = list(PROVIDERS)
    return step, sorted(calls.values(), key=lambda call: order.index(call.op))


def described(arguments: Mapping[str, Any]) -> str:
    """What tells calls of an op apart: the first tensor's shape, and the width of a list or table
    that goes with it."""
    values = list(arguments.values())
    parts = [str(list(next(_tensors(values)).shape))]
    parts += [f"K {one.rows.shape[1]}" for one in values if isinstance(one, IndexList)]
    parts += [f"entries {one.width}" for one in values if isinstance(one, EntryTable)]
    return ", ".join(parts)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors, and those that are fields of dataclasses."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(vars(value).values())


def timed(call: Called, ops: Ops, provider: str, copy: float) -> Timing:
    """One call by one provider; a provider that fails does not hide the others' times."""
    machine = ops.machine
    error, taken = "", None
    try:
        named = choose(machine, provider_names(machine, f"{call.op}={provider}"))
        if call.op == "sparse_attention":
            _prepare(named, call.arguments)
        function = getattr(named, call.op)
        taken = bench_timer.microseconds(lambda: _invoke(function, call), machine.device)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"[:300]
    bandwidth = call.moved / taken * 1e6 if taken else None
    return Timing(
        op=call.op,
        label=call.label,
        provider=provider,
        chosen=ops.providers[call.op] == provider,
        count=call.count,
        moved=call.moved,
        microseconds=taken,
        bandwidth=bandwidth,
        roof=bandwidth / copy if bandwidth is not None else None,
        error=error,
    )


def _invoke(function: Op, call: Called) -> Any:
    """By position as far as the signature takes it so."""
    bound = inspect.signature(function).bind(**call.arguments)
    return function(*bound.args, **bound.kwargs)


def _prepare(ops: Ops, given: Mapping[str, Any]) -> None:
    q, rows = given["q"], given["keys"].rows
    prepare_attention(
        ops,
        tokens=q.shape[0],
        heads=q.shape[1],
        width=rows.shape[1],
        scale=given["scale"],
        device=ops.machine.device,
    )


def providers(op: str, machine: Machine, reference: bool, without: Sequence[str] = ()) -> list[str]:
    """Those that this machine can run, but for those named in `without`. reference: also on a GPU,
    where it serves nobody."""
    return [
        one.name
        for one in PROVIDERS[op]
        if one.refuses(machine) is None
        and one.name not in without
        and (one.name != "reference" or reference or machine.device == "cpu")
    ]


def time_step(step: DecodeStep, device: str) -> float:
    """Milliseconds."""
    if device == "cpu":
        return bench_timer.microseconds(step.run, device) / 1000
    return bench_timer.replay_ms(capture(step)[0])


def whole_step(
    config: DSV4Config,
    milliseconds: float,
    sizes: tuple[int, int],
    weights: int,
    found: tuple[Sequence[Called], Sequence[Timing]],
    copy: float,
) -> StepTime:
    """sizes: batch and context. weights: bytes that every step reads beside its ops."""
    calls, timings = found
    served = [one for one in timings if one.chosen]
    times = [one.count * one.microseconds for one in served if one.microseconds is not None]
    moved = weights + sum(call.count * call.moved for call in calls)
    return StepTime(
        batch=sizes[0],
        context=sizes[1],
        layers=[kind.name for kind in config.layer_kinds],
        milliseconds=milliseconds,
        ops=sum(times) / 1000 if len(times) == len(calls) else None,
        moved=moved,
        roof=moved / (milliseconds / 1000) / copy,
    )


def shared_weights(step: DecodeStep) -> int:
    """Bytes of the matrices that all tokens use and no op reads: no routed experts, no embedding,
    of which a token reads one row, and none of what mHC and norms take as arguments."""
    return sum(
        bench_bytes.size(parameter)
        for name, parameter in step.lm.named_parameters()
        if parameter.ndim == 2
        and not any(word in name for word in (".experts.", "embed", "hc_", ".ape"))
    )
