"""What an expression of a decode step is, for graph safety: a device value or a host one.

Kinds come from what a traced run saw in each name, from annotations, and from the expression.
Anything that stays UNKNOWN raises no alarm in rules that depend on kinds.
"""

import ast
import dataclasses
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import nn


class Kind(IntEnum):
    """Ordered: where two ways meet, the larger wins."""

    UNKNOWN = 0
    HOST = 1  # a Python value: its truth and size cost nothing
    SERIES = 2  # a Python sequence or mapping of tensors
    TENSOR = 3
    MASK = 4  # a tensor of booleans


DEVICE = (Kind.TENSOR, Kind.MASK)

# Attributes and methods of a tensor that describe it and read no value.
_DESCRIBES = {
    *("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "is_cuda", "is_meta"),
    *("requires_grad", "size", "dim", "numel", "nelement", "stride", "element_size", "data_ptr"),
    *("is_contiguous", "is_floating_point", "is_complex", "get_device", "storage_offset"),
    *("item", "tolist", "equal", "allclose", "is_nonzero", "untyped_storage"),
}
_VIEWS = {
    *("unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "flatten", "unflatten"),
    *("transpose", "permute", "t", "repeat", "clone", "contiguous", "gather", "index_select"),
    *("T", "mT", "movedim", "narrow", "select", "__and__", "__or__", "__invert__"),
}
_MASKS = {
    *("bool", "isnan", "isinf", "isfinite", "logical_and", "logical_or", "logical_not"),
    *("eq", "ne", "lt", "le", "gt", "ge", "isin", "logical_xor", "isclose", "any", "all"),
}
# A name that is asked for one of these is taken for a tensor where nothing else is known of it.
_TENSOR_HINTS = {*("shape", "dtype", "device", "ndim", "masked_fill", "masked_fill_"), *_VIEWS}
_HOST_TORCH = {
    *("torch.finfo", "torch.iinfo", "torch.device", "torch.Size", "torch.is_tensor"),
    *("torch.is_floating_point", "torch.numel", "torch.equal", "torch.allclose"),
    *("torch.is_nonzero", "torch.get_default_dtype", "torch.no_grad", "torch.inference_mode"),
}
_SCALARS = {"int", "float", "str", "bool", "bytes", "None", "torch.dtype", "torch.device"}
_SERIES = ("tuple[", "list[", "Sequence[")
_HOST_CALLS = {
    *("len", "int", "float", "bool", "str", "repr", "range", "isinstance", "hasattr", "type"),
    *("format", "divmod", "pow", "abs", "round", "id"),
}


def kind_of(value: Any) -> Kind:
    """The kind of a live value."""
    if isinstance(value, torch.Tensor):
        return Kind.MASK if value.dtype is torch.bool else Kind.TENSOR
    if value is None:
        return Kind.UNKNOWN
    if isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | range):
        return Kind.HOST
    if isinstance(value, list | tuple | set | dict):
        items = list(value.values()) if isinstance(value, dict) else list(value)
        if items and all(isinstance(item, torch.Tensor) for item in items):
            return Kind.SERIES
        return Kind.HOST if all(kind_of(item) is Kind.HOST for item in items) else Kind.UNKNOWN
    return Kind.UNKNOWN


def kinds_in(name: str, value: Any, depth: int = 2) -> dict[str, Kind]:
    """Kinds of a variable and of what hangs on it by name: `meta`, `meta.csa.row`, `self.eps`."""
    found = {name: kind_of(value)}
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, nn.Module):
        inside = [*vars(value).items(), *value._parameters.items(), *value._buffers.items()]
        inside += value._modules.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if depth:
        for attribute, item in inside:
            if attribute.isidentifier() and not attribute.startswith("_"):
                found |= kinds_in(f"{name}.{attribute}", item, depth - 1)
    return found


def of_annotation(annotation: ast.expr | None) -> Kind:
    """The kind that an annotation promises; a union with None counts as the other type."""
    if annotation is None:
        return Kind.UNKNOWN
    parts = [part.strip() for part in ast.unparse(annotation).strip("'\"").split("|")]
    if any(part in ("torch.Tensor", "Tensor") for part in parts):
        return Kind.TENSOR
    if all(part in _SCALARS for part in parts):
        return Kind.HOST
    if any(part.startswith(_SERIES) and "Tensor" in part for part in parts):
        return Kind.SERIES
    return Kind.UNKNOWN


def dotted(node: ast.AST) -> str:
    """`meta.csa.row` for that expression; empty for anything that is not plain names."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def hinted_tensors(function: ast.AST) -> set[str]:
    """Names that the function asks for what only tensors have."""
    return {
        node.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and node.attr in _TENSOR_HINTS
        and isinstance(node.value, ast.Name)
    }


class Kinds:
    """Kinds of expressions at one point of a function.

    names: of variables and dotted names, as bound so far; observed: as a traced run left them;
    returns: of functions and ops, by their last name; aliases: import names, spelled out.
    """

    def __init__(
        self,
        names: dict[str, Kind],
        observed: Mapping[str, Kind],
        returns: Mapping[str, Kind],
        aliases: Mapping[str, str],
    ) -> None:
        self.names, self.observed, self.returns, self.aliases = names, observed, returns, aliases

    def copy(self) -> "Kinds":
        return Kinds(dict(self.names), self.observed, self.returns, self.aliases)

    def join(self, *others: "Kinds") -> None:
        """What holds where several ways meet."""
        for other in others:
            for name, kind in other.names.items():
                self.names[name] = max(kind, self.names.get(name, Kind.UNKNOWN))

    def bind(self, target: ast.expr, kind: Kind) -> None:
        """A variable gets a value; a name that is not understood falls back on the traced run."""
        if isinstance(target, ast.Tuple | ast.List):
            inner = Kind.TENSOR if kind in (Kind.SERIES, *DEVICE) else kind
            for element in target.elts:
                self.bind(element, inner)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, Kind.SERIES if kind in DEVICE else kind)
        elif isinstance(target, ast.Name):
            name = target.id
            self.names[name] = kind or self.observed.get(name, Kind.UNKNOWN)

    def full_name(self, node: ast.AST) -> str:
        """The dotted name with its import spelled out: `torch.nn.functional.linear`."""
        name = dotted(node)
        first, dot, rest = name.partition(".")
        return self.aliases.get(first, first) + dot + rest if name else ""

    def is_device(self, node: ast.AST) -> bool:
        return self.of(node) in DEVICE

    def of(self, node: ast.AST) -> Kind:
        """The kind of an expression."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        return method(node) if method else Kind.UNKNOWN

    def _constant(self, node: ast.Constant) -> Kind:
        return Kind.HOST

    def _joinedstr(self, node: ast.JoinedStr) -> Kind:
        return Kind.HOST

    def _name(self, node: ast.Name) -> Kind:
        return self.names.get(node.id, Kind.UNKNOWN)

    def _starred(self, node: ast.Starred) -> Kind:
        return self._element(self.of(node.value))

    def _namedexpr(self, node: ast.NamedExpr) -> Kind:
        return self.of(node.value)

    def _attribute(self, node: ast.Attribute) -> Kind:
        name = dotted(node)
        for known in (self.names, self.observed):
            if known.get(name):
                return known[name]
        if node.attr in ("shape", "dtype", "device", "ndim"):
            return Kind.HOST
        base = self.of(node.value)
        if base in DEVICE:
            if node.attr in _DESCRIBES:
                return Kind.HOST
            return base if node.attr in _VIEWS else Kind.TENSOR
        return Kind.UNKNOWN

    def _compare(self, node: ast.Compare) -> Kind:
        if any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
            return Kind.HOST
        kind = self._mixed([node.left, *node.comparators])
        return Kind.MASK if kind in DEVICE else kind

    def _boolop(self, node: ast.BoolOp) -> Kind:
        return self._mixed(node.values)

    def _binop(self, node: ast.BinOp) -> Kind:
        kind = self._mixed([node.left, node.right])
        logical = isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
        return Kind.TENSOR if kind is Kind.MASK and not logical else kind

    def _unaryop(self, node: ast.UnaryOp) -> Kind:
        kind = self.of(node.operand)
        return Kind.HOST if isinstance(node.op, ast.Not) else kind

    def _ifexp(self, node: ast.IfExp) -> Kind:
        return max(self.of(node.body), self.of(node.orelse))

    def _tuple(self, node: ast.Tuple | ast.List) -> Kind:
        kinds = {self.of(element) for element in node.elts}
        if kinds and kinds <= set(DEVICE):
            return Kind.SERIES
        return Kind.HOST if kinds <= {Kind.HOST} else Kind.UNKNOWN

    _list = _tuple

    def _subscript(self, node: ast.Subscript) -> Kind:
        base = self.of(node.value)
        return base if base in (Kind.HOST, *DEVICE) else self._element(base)

    def _call(self, node: ast.Call) -> Kind:
        name = self.full_name(node.func)
        last = name.rpartition(".")[2]
        if isinstance(node.func, ast.Attribute) and self.of(node.func.value) in DEVICE:
            return self._method(node.func)
        if name in ("max", "min", "sum"):
            return self._mixed(node.args)
        if name in _HOST_CALLS or name in _HOST_TORCH or name.startswith("math."):
            return Kind.HOST
        if name.startswith(("torch.cuda.", "torch.distributed.")):  # streams, events, groups
            return Kind.UNKNOWN
        if name.startswith("torch."):
            return Kind.MASK if last in _MASKS else Kind.TENSOR
        if isinstance(node.func, ast.Attribute):
            last = node.func.attr
        return self.returns.get(last, Kind.UNKNOWN)

    def _method(self, function: ast.Attribute) -> Kind:
        if function.attr in _DESCRIBES:
            return Kind.HOST
        if function.attr in ("split", "chunk", "unbind", "tensor_split"):
            return Kind.SERIES
        if function.attr in _MASKS:
            return Kind.MASK
        return self.of(function.value) if function.attr in _VIEWS else Kind.TENSOR

    def _mixed(self, nodes: Iterable[ast.expr]) -> Kind:
        """Of an operation on several values: a tensor makes it one, host values alone do not."""
        kinds = [self.of(node) for node in nodes]
        device = [kind for kind in kinds if kind in DEVICE]
        if device:
            return min(device)
        return Kind.HOST if kinds and set(kinds) == {Kind.HOST} else Kind.UNKNOWN

    @staticmethod
    def _element(kind: Kind) -> Kind:
        if kind is Kind.SERIES or kind in DEVICE:
            return Kind.TENSOR
        return kind

    def element(self, node: ast.expr) -> Kind:
        """The kind of what iterating over an expression gives."""
        return self._element(self.of(node))
