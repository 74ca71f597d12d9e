"""Graph safety, static: which rule a call breaks, by its name and by the kinds of its arguments."""

import ast
from collections.abc import Mapping, Sequence

from sglang_dsv4.graph_safety_kinds import DEVICE, Kind, Kinds, dotted

# Methods whose names say enough, whatever they are called on.
METHODS = {
    "item": "item",
    "tolist": "tolist",
    **dict.fromkeys(("cpu", "numpy", "__array__"), "to-host"),
    **dict.fromkeys(("cuda", "pin_memory"), "move"),
    **dict.fromkeys(("nonzero", "argwhere", "masked_select", "unique"), "data-shape"),
    **dict.fromkeys(("unique_consecutive", "bincount", "histc"), "data-shape"),
    **dict.fromkeys(("equal", "allclose", "is_nonzero"), "compare"),
    "new_tensor": "host-data",
    **dict.fromkeys(("synchronize", "elapsed_time", "query"), "synchronize"),
}
# Functions by full name; an entry that ends in a dot stands for all of that module.
FUNCTIONS = {
    **dict.fromkeys(("torch.tensor", "torch.as_tensor", "torch.asarray"), "host-data"),
    **dict.fromkeys(("torch.from_numpy", "torch.frombuffer"), "host-data"),
    **dict.fromkeys(("torch.nonzero", "torch.argwhere", "torch.masked_select"), "data-shape"),
    **dict.fromkeys(("torch.unique", "torch.unique_consecutive"), "data-shape"),
    **dict.fromkeys(("torch.bincount", "torch.histc", "torch.histogram"), "data-shape"),
    **dict.fromkeys(("torch.equal", "torch.allclose", "torch.is_nonzero"), "compare"),
    **dict.fromkeys(("torch.cuda.synchronize", "torch.cuda.empty_cache"), "synchronize"),
    **dict.fromkeys(("torch.distributed.barrier", "torch.accelerator.synchronize"), "synchronize"),
    **dict.fromkeys(("time.", "random.", "datetime.", "secrets.", "uuid."), "clock"),
    **dict.fromkeys(("numpy.random.", "os.urandom"), "clock"),
    **dict.fromkeys(("os.getenv", "os.environ", "os.environ."), "environment"),
}
# What is done with a tensor that is given to these as an argument.
_ON_TENSORS = {
    **dict.fromkeys(("int", "float", "bool", "complex", "round", "operator.index"), "scalar"),
    "math.": "scalar",
    **dict.fromkeys(("print", "str", "repr", "format"), "format"),
    **dict.fromkeys(("list", "tuple", "set", "sorted", "sum", "min", "max", "any"), "loop"),
    **dict.fromkeys(("all", "zip", "enumerate", "iter", "map", "filter", "reversed"), "loop"),
    "range": "device-shape",
    "numpy.": "to-host",
}
_LOG_METHODS = {*("debug", "info", "warning", "error", "exception", "critical", "log", "format")}
_SIZED = {
    *("torch.empty", "torch.zeros", "torch.ones", "torch.full", "torch.arange", "torch.linspace"),
    *("torch.eye", "torch.rand", "torch.randn", "torch.narrow", "torch.split"),
}
_SIZED_METHODS = {
    *("new_empty", "new_zeros", "new_ones", "new_full", "view", "reshape", "expand", "repeat"),
    *("unflatten", "narrow", "split", "tile", "resize_", "as_strided", "chunk", "tensor_split"),
}
_MUTATORS = {"append", "extend", "insert", "pop", "popitem", "setdefault", "update", "clear"}


def rule_of(node: ast.Call, kinds: Kinds) -> str | None:
    """The id of the rule that a call breaks, or None."""
    name = kinds.full_name(node.func)
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    rule = _named(name, FUNCTIONS) or _by_size(node, name, kinds)
    on_tensors = _named(name, _ON_TENSORS)
    if rule is None and on_tensors is not None and _takes_tensor(given, on_tensors, kinds):
        rule = on_tensors
    if rule is None and isinstance(node.func, ast.Attribute):
        rule = _by_method(node, node.func, given, kinds)
    return rule


def _named(name: str, table: Mapping[str, str]) -> str | None:
    """The table's rule for a full name, or for the module that an entry with a dot names."""
    if name in table:
        return table[name]
    return next((table[key] for key in table if key.endswith(".") and name.startswith(key)), None)


def _takes_tensor(given: Sequence[ast.expr], rule: str, kinds: Kinds) -> bool:
    """Printing a list of tensors reads them too; looping over it does not."""
    wanted = (Kind.SERIES, *DEVICE) if rule == "format" else DEVICE
    return any(kinds.of(argument) in wanted for argument in given)


def _by_size(node: ast.Call, name: str, kinds: Kinds) -> str | None:
    """Sizes from the device, and results whose size only the values know."""
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    sizes = [*node.args, *(word.value for word in node.keywords if word.arg == "size")]
    inner = [part for size in sizes for part in getattr(size, "elts", [size])]
    # torch.narrow(x, ...) and torch.split(x, ...) take the tensor first.
    inner = inner[1:] if name in ("torch.narrow", "torch.split") else inner
    sized = name in _SIZED or (method in _SIZED_METHODS and not name.startswith("torch."))
    if sized and any(map(kinds.is_device, inner)):
        return "device-shape"
    words = {word.arg for word in node.keywords}
    if name == "torch.where" and len(node.args) + len(node.keywords) == 1:
        return "data-shape"
    if name == "torch.repeat_interleave" or method == "repeat_interleave":
        named = [word.value for word in node.keywords if word.arg == "repeats"]
        counts = node.args[-1:] + named
        fixed = any(kinds.of(count) is Kind.HOST for count in counts)
        return None if fixed or "output_size" in words else "data-shape"
    return None


def _by_method(
    node: ast.Call, function: ast.Attribute, given: Sequence[ast.expr], kinds: Kinds
) -> str | None:
    base, method = kinds.of(function.value), function.attr
    if method in _LOG_METHODS and base not in DEVICE:
        return "format" if _takes_tensor(given, "format", kinds) else None
    if method in _MUTATORS and _outlives(function.value):
        return "host-state"
    if method == "to":
        return _destination(node, kinds)
    return METHODS.get(method)


def _outlives(node: ast.expr) -> bool:
    """Whether a container belongs to an object or a module, not to the call."""
    if isinstance(node, ast.Attribute):
        return dotted(node).startswith("self.")
    return isinstance(node, ast.Name) and node.id.lstrip("_").isupper()


def _destination(node: ast.Call, kinds: Kinds) -> str | None:
    """What `.to(...)` moves to, where it names a device."""
    named = [word.value for word in node.keywords if word.arg == "device"]
    for argument in [*node.args, *named]:
        text = argument.value if isinstance(argument, ast.Constant) else None
        device = (
            argument in named
            or isinstance(text, str)
            or dotted(argument).rpartition(".")[2] == "device"
            or kinds.full_name(getattr(argument, "func", argument)) == "torch.device"
        )
        if device:
            return "to-host" if str(text).startswith("cpu") else "move"
    return None
