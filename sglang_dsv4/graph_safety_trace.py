"""Graph safety, dispatch: what a decode step runs, seen by interpreter and dispatcher.

`trace` names the functions that a step reaches and what their names held. `watch` runs a step while
every call of torch and every operator is looked at. `compare` sets two such runs side by side.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_dsv4.graph_safety_kinds import Kind, kind_of, kinds_in
from sglang_dsv4.graph_safety_rules import Finding
from sglang_dsv4.graph_safety_static import Observed

# Calls of torch by their Python name. On a CPU some of them, such as tolist, reach no operator.
_CALLS = {
    "item": "item",
    "tolist": "tolist",
    **dict.fromkeys(("cpu", "numpy", "__array__"), "to-host"),
    **dict.fromkeys(("cuda", "pin_memory"), "move"),
    **dict.fromkeys(("__bool__", "__contains__"), "branch"),
    **dict.fromkeys(("__int__", "__float__", "__complex__", "__index__"), "scalar"),
    **dict.fromkeys(("__repr__", "__str__", "__format__"), "format"),
    **dict.fromkeys(("equal", "allclose", "is_nonzero"), "compare"),
    **dict.fromkeys(("tensor", "as_tensor", "asarray", "from_numpy", "new_tensor"), "host-data"),
}
_COMPARES = {"aten.equal", "aten.allclose", "aten.is_nonzero"}
_INDEXING = {"aten.index", "aten.index_put_", "aten.index_put", "aten._index_put_impl_"}


class Sources:
    """The files that are held to the rules: those in some folders, but for the detector's own."""

    def __init__(self, folders: Mapping[Path, str]) -> None:
        """folders: each with the name under which reports show it."""
        self.folders = {folder.resolve(): name for folder, name in folders.items()}
        self._shown: dict[str, str | None] = {}

    def shown(self, filename: str) -> str | None:
        """The file's name in reports, or None if it is not ours."""
        if filename not in self._shown:
            path = Path(filename).resolve()
            folder = self.folders.get(path.parent)
            ours = folder is not None and not path.stem.startswith("graph_safety")
            self._shown[filename] = f"{folder}/{path.name}" if ours else None
        return self._shown[filename]

    def innermost(self, frames: Iterable[tuple[CodeType, int]]) -> tuple[str, int, str] | None:
        """File, line and function of the first of some frames that is ours."""
        for code, line in frames:
            file = self.shown(code.co_filename)
            if file is not None:
                return file, line, function_name(code)
        return None


def error_frames(error: BaseException) -> list[tuple[CodeType, int]]:
    """Code and line of every frame of an error's traceback, the innermost first."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return [(frame.f_code, line) for frame, line in reversed(frames)]


def message(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def function_name(code: CodeType) -> str:
    """The qualified name of the outermost function that the code is part of."""
    return code.co_qualname.partition(".<locals>")[0]


@dataclass
class Trace:
    """What one run reached: (file, function) -> what it saw there, and kinds of results by name."""

    functions: dict[tuple[str, str], Observed] = field(default_factory=dict)
    returns: dict[str, Kind] = field(default_factory=dict)


def trace(step: Callable[[], Any], sources: Sources) -> Trace:
    """Run a step and note every function of `sources` that it enters."""
    found = Trace()

    def note(frame: FrameType, event: str, value: Any) -> None:
        file = sources.shown(frame.f_code.co_filename) if event in ("call", "return") else None
        if file is None:
            return
        name = function_name(frame.f_code)
        observed = found.functions.setdefault((file, name), Observed({}, {}))
        inner = frame.f_code.co_qualname != name
        kinds: dict[str, Kind] = {}
        for variable, held in frame.f_locals.items():
            if variable.isidentifier():
                kinds |= kinds_in(variable, held)
        _join(observed.names, kinds)
        if event == "call" and not inner:
            _join(observed.entry, kinds)
        if event == "return" and not inner:
            _join(found.returns, {name.rpartition(".")[2]: kind_of(value)})

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(previous)
    return found


def _join(into: Mapping[str, Kind], kinds: Mapping[str, Kind]) -> None:
    assert isinstance(into, dict)
    for name, kind in kinds.items():
        into[name] = max(kind, into.get(name, Kind.UNKNOWN))


@dataclass(frozen=True)
class Operation:
    """One operator of a run: what must not depend on values, and where it was called."""

    name: str
    arguments: tuple[str, ...]  # of tensors dtype and shape, else the value
    results: tuple[str, ...]
    place: tuple[str, int, str] | None

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)}) -> {', '.join(self.results)}"


class Watch:
    """Findings and operators of one run of a step."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.findings: list[Finding] = []
        self.operations: list[Operation] = []

    def place(self) -> tuple[str, int, str] | None:
        return self.sources.innermost(_frames(sys._getframe(1)))

    def report(self, rule: str, text: str, place: tuple[str, int, str] | None = None) -> None:
        """One finding for a line: what comes after it there is its consequence."""
        file, line, function = place or self.place() or ("", 0, "")
        if not any((known.file, known.line) == (file, line) for known in self.findings):
            self.findings.append(Finding(file, line, rule, "dispatch", function, text))


def watch(step: Callable[[], Any], sources: Sources) -> Watch:
    """Run a step under observation. An error that it raises is a finding, at its line."""
    seen = Watch(sources)
    try:
        with _Operators(seen), _Calls(seen):
            step()
    except Exception as error:
        seen.report("failed", message(error), sources.innermost(error_frames(error)))
    return seen


def compare(first: Watch, second: Watch, described: tuple[str, str]) -> list[Finding]:
    """The first operator in which two runs of the same batch differ, if any.

    described: what distinguishes the runs, for the report.
    """
    pairs = list(zip(first.operations, second.operations, strict=False))
    difference = next(((one, other) for one, other in pairs if not _same(one, other)), None)
    if difference is None and len(first.operations) != len(second.operations):
        longer = max(first, second, key=lambda run: len(run.operations))
        difference = (longer.operations[len(pairs)],) * 2
    if difference is None:
        return []
    one, other = difference
    file, line, function = other.place or one.place or ("", 0, "")
    text = f"with {described[0]}: {one}; with {described[1]}: {other}"
    return [Finding(file, line, "host-decision", "dispatch", function, text)]


def _same(one: Operation, other: Operation) -> bool:
    return (one.name, one.arguments, one.results) == (other.name, other.arguments, other.results)


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


class _Calls(TorchFunctionMode):
    """Looks at calls of torch's Python functions and methods."""

    def __init__(self, seen: Watch) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        rule = _destination(args, kwargs) if name == "to" else _CALLS.get(name)
        if rule is not None:
            self.seen.report(rule, name)
        return function(*args, **kwargs)


def _destination(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The rule that `.to(...)` breaks, if it leaves the tensor's device."""
    named = [*args[1:2], kwargs.get("device")]
    for device in named:
        if isinstance(device, str | torch.device):
            target = torch.device(device).type
            if target != args[0].device.type:
                return "to-host" if target == "cpu" else "move"
    return None


class _Operators(TorchDispatchMode):
    """Looks at every operator, also at those that torch's own Python code calls."""

    def __init__(self, seen: Watch) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(function.overloadpacket)
        rule = _rule_of(function, name, args, kwargs)
        if rule is not None:
            self.seen.report(rule, name)
        result = function(*args, **kwargs)
        arguments = tuple(map(_described, tree_leaves((args, _without_device(kwargs)))))
        results = tuple(map(_described, tree_leaves(result)))
        self.seen.operations.append(Operation(name, arguments, results, self.seen.place()))
        return result


def _rule_of(
    function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name in _INDEXING:
        return _mask_index(args) or _between_devices(tensors, kwargs)
    if name in _COMPARES:
        return "compare"
    if torch.Tag.data_dependent_output in function.tags:
        return "scalar"
    if torch.Tag.dynamic_output_shape in function.tags and kwargs.get("output_size") is None:
        return "data-shape"
    return _between_devices(tensors, kwargs)


def _mask_index(args: Sequence[Any]) -> str | None:
    """x[mask]; but x[mask] = number is a masked fill."""
    masks = [index for index in args[1] if index is not None and index.dtype is torch.bool]
    fills = len(args) > 2 and args[2].ndim == 0
    return "mask-index" if masks and not fills else None


def _between_devices(tensors: Sequence[torch.Tensor], kwargs: Mapping[str, Any]) -> str | None:
    """Host and device in one operator; single host numbers travel with the launch."""
    types = {tensor.device.type for tensor in tensors if tensor.ndim or tensor.device.type != "cpu"}
    target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    if target is not None and types and types != {target}:
        return "to-host" if target == "cpu" else "move"
    return "move" if len(types) > 1 else None


def _without_device(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "device"}


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
