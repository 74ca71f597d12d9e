"""Graph safety, static: the rules held against the source of functions of a decode step."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from sglang_dsv4.graph_safety_calls import rule_of
from sglang_dsv4.graph_safety_kinds import (
    DEVICE,
    Kind,
    Kinds,
    dotted,
    hinted_tensors,
    of_annotation,
)
from sglang_dsv4.graph_safety_rules import Finding

Function = ast.FunctionDef | ast.AsyncFunctionDef
PDL_KERNEL = "sglang_dsv4.kernels_triton_launch.pdl_kernel"


@dataclass(frozen=True)
class Observed:
    """What a traced run saw in a function: kinds of names at its entry, and over its whole run."""

    entry: Mapping[str, Kind] = field(default_factory=dict)
    names: Mapping[str, Kind] = field(default_factory=dict)


class Source:
    """A parsed file: its functions by qualified name, its imports, its device code."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.tree = ast.parse(text)
        self.functions: dict[str, Function] = dict(_functions(self.tree.body, ""))
        self.aliases = _imports(self.tree)
        self.globals = {
            target.id: Kind.HOST
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant | ast.BinOp)
        }

    def is_device_code(self, name: str) -> bool:
        """Whether the function is compiled for the device (`@triton.jit`, `@pdl_kernel`): no host
        runs it."""
        decorators = [
            node.func if isinstance(node, ast.Call) else node
            for node in self.functions[name].decorator_list
        ]
        full = [Kinds({}, {}, {}, self.aliases).full_name(node) for node in decorators]
        return any(
            name == PDL_KERNEL or (name.startswith("triton.") and name.endswith(".jit"))
            for name in full
        )

    def called(self, name: str) -> Iterator[str]:
        """Full names of what a function mentions: its file's functions, and imported ones."""
        own = name.rpartition(".")[0]
        for node in ast.walk(self.functions[name]):
            mentioned = dotted(node)
            if mentioned in self.functions:
                yield mentioned
            elif mentioned.startswith("self.") and f"{own}.{mentioned[5:]}" in self.functions:
                yield f"{own}.{mentioned[5:]}"
            elif mentioned:
                first, dot, rest = mentioned.partition(".")
                if first in self.aliases:
                    yield self.aliases[first] + dot + rest


def check(
    source: Source, name: str, observed: Observed, returns: Mapping[str, Kind]
) -> list[Finding]:
    """Findings in one function, by line. returns: kinds of results of functions, by last name."""
    function = source.functions[name]
    own = {
        other.rpartition(".")[2]: of_annotation(node.returns)
        for other, node in source.functions.items()
        if of_annotation(node.returns)
    }
    kinds = Kinds(dict(source.globals), observed.names, {**own, **returns}, source.aliases)
    walker = _Walker(source.file, name, kinds)
    walker.parameters(function, observed.entry)
    walker.block(function.body)
    return sorted(walker.found)


def _functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions([*node.body, *node.orelse], prefix)


def _imports(tree: ast.Module) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


class _Walker:
    """Walks a function in the order of its statements, binding names and reporting."""

    def __init__(self, file: str, function: str, kinds: Kinds) -> None:
        self.file, self.function, self.kinds = file, function, kinds
        self.found: set[Finding] = set()

    def report(self, node: ast.AST, rule: str) -> None:
        text = ast.unparse(node).partition("\n")[0]
        line = getattr(node, "lineno", 0)
        self.found.add(Finding(self.file, line, rule, "static", self.function, text))

    def parameters(self, function: Function | ast.Lambda, entry: Mapping[str, Kind]) -> None:
        arguments, hinted = function.args, hinted_tensors(function)
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in every:
            name = argument.arg
            kind = entry.get(name) or of_annotation(argument.annotation)
            if not kind and name in hinted and name not in ("self", "cls"):
                kind = Kind.TENSOR
            self.kinds.names[name] = kind

    # ---- statements ----

    def block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            handler = getattr(self, f"_{type(statement).__name__.lower()}", self._plain)
            handler(statement)

    def _plain(self, node: ast.AST) -> None:
        """Any other statement: its expressions, then the blocks in it."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.expression(child)
            elif isinstance(child, ast.stmt):
                self.block([child])
            else:
                self._plain(child)

    def _functiondef(self, node: Function) -> None:
        outer = self.kinds
        self.kinds = outer.copy()
        self.parameters(node, {})
        self.block(node.body)
        self.kinds = outer

    _asyncfunctiondef = _functiondef

    def _branches(self, *bodies: Sequence[ast.stmt]) -> None:
        ends = []
        start = self.kinds
        for body in bodies:
            self.kinds = start.copy()
            self.block(body)
            ends.append(self.kinds)
        self.kinds = ends[0]
        self.kinds.join(*ends[1:])

    def _if(self, node: ast.If) -> None:
        self.test(node.test)
        self._branches(node.body, node.orelse)

    def _while(self, node: ast.While) -> None:
        self.test(node.test)
        self._loop_body(node.body, node.orelse)

    def _for(self, node: ast.For) -> None:
        self._iterate(node.target, node.iter)
        self._loop_body(node.body, node.orelse)

    def _loop_body(self, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt]) -> None:
        """Twice, since the second pass reads what the first one left."""
        for _ in range(2):
            self._branches(body, [])
        self.block(orelse)

    def _assert(self, node: ast.Assert) -> None:
        self.test(node.test)
        if node.msg is not None:
            self.expression(node.msg)

    def _match(self, node: ast.Match) -> None:
        self.test(node.subject)
        self._branches(*[case.body for case in node.cases], [])

    def _assign(self, node: ast.Assign) -> None:
        self.expression(node.value)
        for target in node.targets:
            self._store(target, node.value)

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.expression(node.value)
            self._store(node.target, node.value)

    def _augassign(self, node: ast.AugAssign) -> None:
        self.expression(node.value)
        self._state(node.target)
        if isinstance(node.target, ast.Name):
            both = ast.BinOp(ast.Name(node.target.id), node.op, node.value)
            self.kinds.bind(node.target, self.kinds.of(both))

    def _global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.report(node, "host-state")

    _nonlocal = _global

    def _store(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._store(one, its)
            return
        self._state(target, value)
        self.kinds.bind(target, self.kinds.of(value))

    def _state(self, target: ast.expr, value: ast.expr | None = None) -> None:
        """Stores into objects outlive the step; into tensors they are part of it."""
        if isinstance(target, ast.Attribute):
            # In place on a tensor (x.weight += y) is the device's work.
            if value is not None or not self.kinds.is_device(target):
                self.report(target, "host-state")
        elif isinstance(target, ast.Subscript):
            base = self.kinds.of(target.value)
            if isinstance(target.value, ast.Attribute) and base in (Kind.HOST, Kind.SERIES):
                self.report(target, "host-state")
            scalar = value is not None and self.kinds.of(value) is Kind.HOST
            self._index(target, masks_allowed=scalar)  # x[mask] = number is a masked fill
            self.expression(target.value)
            self.expression(target.slice)

    # ---- expressions ----

    def test(self, node: ast.expr) -> None:
        """An expression whose truth the host asks for."""
        if self.kinds.is_device(node) and not isinstance(node, ast.BoolOp):
            self.report(node, "branch")
        self.expression(node)

    def expression(self, node: ast.AST) -> None:
        handler: Callable[[ast.AST], None] | None = {
            ast.Call: self._call,
            ast.Subscript: self._index,
            ast.Compare: self._compare,
            ast.Attribute: self._environment,
            ast.FormattedValue: partial(self._on_tensor, "format"),
        }.get(type(node))  # type: ignore[assignment]
        if handler is not None:
            handler(node)
        if isinstance(node, ast.Lambda):
            self._lambda(node)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            self._comprehension(node)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                self.test(value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.test(node.operand)
        elif isinstance(node, ast.IfExp):
            self.test(node.test)
            self.expression(node.body)
            self.expression(node.orelse)
        else:
            for child in ast.iter_child_nodes(node):
                self.expression(child)
        if isinstance(node, ast.NamedExpr):
            self.kinds.bind(node.target, self.kinds.of(node.value))

    def _lambda(self, node: ast.Lambda) -> None:
        outer = self.kinds
        self.kinds = outer.copy()
        self.parameters(node, {})
        self.expression(node.body)
        self.kinds = outer

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        outer = self.kinds
        self.kinds = outer.copy()
        for generator in node.generators:
            self._iterate(generator.target, generator.iter)
            for condition in generator.ifs:
                self.test(condition)
        values = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        for value in values:
            self.expression(value)
        self.kinds = outer

    def _iterate(self, target: ast.expr, iterated: ast.expr) -> None:
        if self.kinds.is_device(iterated):
            self.report(iterated, "loop")
        self.expression(iterated)
        self.kinds.bind(target, self.kinds.element(iterated))

    def _on_tensor(self, rule: str, node: ast.FormattedValue) -> None:
        if self.kinds.of(node.value) in (Kind.SERIES, *DEVICE):
            self.report(node.value, rule)

    def _compare(self, node: ast.Compare) -> None:
        parts = [node.left, *node.comparators]
        searches = any(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
        if (searches or len(parts) > 2) and any(map(self.kinds.is_device, parts)):
            self.report(node, "branch")

    def _environment(self, node: ast.Attribute) -> None:
        if self.kinds.full_name(node) == "os.environ":
            self.report(node, "environment")

    def _index(self, node: ast.Subscript, masks_allowed: bool = False) -> None:
        base = self.kinds.of(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            kind = self.kinds.of(part)
            if isinstance(part, ast.Slice):
                bounds = [bound for bound in (part.lower, part.upper, part.step) if bound]
                if any(map(self.kinds.is_device, bounds)):
                    self.report(node, "device-shape")
            elif kind in DEVICE and base in (Kind.HOST, Kind.SERIES):
                self.report(node, "scalar")
            elif kind is Kind.MASK and not masks_allowed:
                self.report(node, "mask-index")

    def _call(self, node: ast.Call) -> None:
        rule = rule_of(node, self.kinds)
        if rule is not None:
            self.report(node, rule)
