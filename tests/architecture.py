"""The architecture's rules, as checks of the source: import directions, budgets, pairing, wording.

Each rule takes the repository's root and returns its violations as `path: what is wrong`.
`test_architecture.py` runs them on the repository and on planted violations.
"""

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

# Where each installed package lies in the repository.
PACKAGES = {
    "sglang_dsv4": "sglang_dsv4",
    "sglang_dsv4.attention": "attention",
    "sglang_dsv4.moe": "moe",
    "sglang_dsv4.served": "sglang_dsv4/served",
}

# From the bottom up. A module imports from layers below its own, and from its own package's modules
# that are not above it. A new module needs a place here; a package stands for all its modules, but
# for those that are named on their own. `cli_*` are the subcommands.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        *("config", "settings", "options", "parameters", "checkpoint", "dequant", "components"),
        "json_files",
        *("graph_safety_rules", "graph_safety_kinds", "ablation_metrics"),
        *("bench_timer", "bench_bytes", "bench_table"),
    ),
    (
        *("precision", "tensor_table", "formats", "quantise", "graph_safety_calls", "parallel"),
        *("attention.cache", "attention.metadata", "fp4", "fp8"),
        *("ablation_oracle", "ablation_summary", "ablation_texts"),
    ),
    ("ablation_report", "reference", "kernels_triton_fp4", "kernels_triton_fragments"),
    ("memory_plan",),
    (
        *("host", "backends", "census", "ledger", "tiny_formats", "nano_demo_server"),
        *("graph_safety_static", "damaged_values"),
    ),
    ("kernels_triton_launch",),
    (
        *("format_claims", "tiny_weights", "convert_plan", "linears", "host_slots"),
        *("kernels_triton_linear", "kernels_triton_linear_fp4"),
    ),
    ("survey", "expert_storage"),
    ("linear_storage",),
    (
        *("attention", "moe", "weights", "nano_demo_plot", "nano_demo_questions"),
        *("graph_safety_trace", "convert_config", "inspection"),
    ),
    ("model", "convert_files"),
    ("warmup",),
    ("ahead",),
    (
        *("served", "cli_make_tiny", "graph_safety_step", "convert"),
        *("inspect_plot", "doctor_checkpoint"),
    ),
    ("graph_safety_device", "bench_step"),
    ("graph_safety", "ablation", "bench_ops"),
    ("cli_*",),
    ("cli", "plugin"),
)
IMPORTS_NOTHING_OF_OURS = {"config", "settings"}
MAY_IMPORT_SGLANG = {"host", "host_slots", "plugin"}

FILE_LINES, FUNCTION_LINES, NESTING = 400, 60, 4
KERNEL_FILE_LINES, KERNEL_FUNCTION_LINES = 600, 150

HARDWARE_QUESTIONS = {
    "torch.cuda.device_count",
    "torch.cuda.get_device_capability",
    "torch.cuda.get_device_name",
    "torch.cuda.get_device_properties",
    "torch.cuda.is_available",
    "torch.version.cuda",
    "torch.version.hip",
}

# The bracketed letters keep this file from matching itself.
FORBIDDEN_WORDS = {
    r"\b(T[O]DO|F[I]XME|X[X]X)\b": "finish it, or leave it out",
    r"(?i)\bissues?\s+#?\d+\b": "say what, not in which issue",
    r"(?<![\w&/])#\d+\b": "say what, not in which issue",
    r"/wor[k]/": "a path of one machine",
    r"pypi\.or[g]|python[h]osted|pytorch\.or[g]/whl|registry\.np[m]|index-ur[l]": "a registry",
}
TEXT_SUFFIXES = {"", ".cfg", ".ini", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
NOT_OURS = {".git", ".venv", ".demo", "build", "dist", "__pycache__"}


@dataclass(frozen=True)
class Module:
    """One file of the package: its installed name, its path in the repository, and its syntax."""

    name: str
    path: str
    tree: ast.Module
    lines: int

    @property
    def short(self) -> str:
        """Its name below sglang_dsv4: `model`, `attention.layer`; empty for sglang_dsv4 itself."""
        return self.name.removeprefix("sglang_dsv4").removeprefix(".")

    @property
    def layer(self) -> int | None:
        return layer_of(self.short)


def layer_of(short: str) -> int | None:
    """Its layer, or its package's, or None where neither has a place."""
    for name in (short, short.split(".")[0]):
        for number, names in enumerate(LAYERS):
            if name and any(fnmatch(name, pattern) for pattern in names):
                return number
    return None


def is_provider(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith(("reference", "kernels_"))


def modules(root: Path) -> list[Module]:
    found = []
    for package, folder in PACKAGES.items():
        for file in sorted((root / folder).glob("*.py")):
            name = package if file.stem == "__init__" else f"{package}.{file.stem}"
            source = file.read_text()
            path = file.relative_to(root).as_posix()
            found.append(Module(name, path, ast.parse(source), len(source.splitlines())))
    return found


def imported_names(module: Module, known: set[str]) -> Iterator[str]:
    """Every module it imports, in functions too; `from package import module` gives the module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module


def is_ours(name: str) -> bool:
    return name == "sglang_dsv4" or name.startswith("sglang_dsv4.")


def dotted(node: ast.AST) -> str:
    """`torch.cuda.is_available` for that expression; empty for anything that is not plain names."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


# ---- the rules ----


def sglang_stays_at_the_seam(root: Path) -> list[str]:
    """Whatever else may change there, it reaches us in these files."""
    return [
        f"{module.path}: imports sglang; only host*.py and plugin.py may"
        for module in modules(root)
        if module.short not in MAY_IMPORT_SGLANG
        and any(name.split(".")[0] == "sglang" for name in imported_names(module, set()))
    ]


def imports_point_down(root: Path) -> list[str]:
    """Each module imports from layers below its own; only backends knows providers."""
    found = []
    known = {module.name for module in modules(root)}
    for module in modules(root):
        if module.short and module.layer is None and not is_provider(module.name):
            found.append(f"{module.path}: has no place in LAYERS (tests/architecture.py)")
            continue
        for name in sorted(set(filter(is_ours, imported_names(module, known)))):
            reason = why_not(module, name)
            if reason:
                found.append(f"{module.path}: imports {name}: {reason}")
    return found


def why_not(module: Module, name: str) -> str | None:
    """What speaks against this import, or None."""
    if is_provider(name):
        # Kernels leave some shapes to others of their own package, and share what the package
        # around theirs has.
        kernels = all(".kernels_" in one for one in (module.name, name))
        shared = kernels and module.name.startswith(name.rpartition(".")[0] + ".")
        known = module.short == "backends" or shared
        return None if known else "only backends.py knows providers"
    if name == "sglang_dsv4":  # the version
        return None
    if module.short in IMPORTS_NOTHING_OF_OURS:
        return "it imports nothing of ours"
    target = name.removeprefix("sglang_dsv4.")
    # sglang_dsv4 itself and its reference.py have no place of their own: they are at the bottom.
    own, other = module.layer or 0, layer_of(target)
    if other is None:
        return f"{target} has no place in LAYERS (tests/architecture.py)"
    package, _, inside = target.partition(".")
    same_package = package == module.short.partition(".")[0]
    if other < own or (same_package and other == own):
        return None
    return "it is not in a layer below"


def environment_is_left_to_settings(root: Path) -> list[str]:
    """Only settings reads the environment, or sets what SGLang reads there."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = []
    for module in modules(root):
        for node in ast.walk(module.tree):
            touches = dotted(node) in {f"os.{name}" for name in names} or (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and bool(names.intersection(alias.name for alias in node.names))
            )
            if touches and module.short != "settings":
                line = getattr(node, "lineno", 0)
                found.append(f"{module.path}:{line}: the environment is for settings.py only")
    return found


def hardware_is_asked_in_backends(root: Path) -> list[str]:
    """Everything else gets a Machine, or what was chosen for it."""
    return [
        f"{module.path}:{node.lineno}: {dotted(node)}; only backends.py asks about hardware"
        for module in modules(root)
        if module.short != "backends"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and dotted(node) in HARDWARE_QUESTIONS
    ]


def budgets(root: Path) -> list[str]:
    """Lines of a file and of a function (docstring and signature included), depth of nesting."""
    found = []
    for module in modules(root):
        kernels = module.name.rpartition(".")[2].startswith("kernels_")
        file_limit = KERNEL_FILE_LINES if kernels else FILE_LINES
        function_limit = KERNEL_FUNCTION_LINES if kernels else FUNCTION_LINES
        if module.lines > file_limit:
            found.append(f"{module.path}: {module.lines} lines, at most {file_limit}")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines, depth = (node.end_lineno or 0) - node.lineno + 1, nesting(node.body)
            if lines > function_limit:
                found.append(f"{module.path}: {node.name}: {lines} lines, at most {function_limit}")
            if depth > NESTING:
                found.append(f"{module.path}: {node.name}: nested {depth} deep, at most {NESTING}")
    return found


BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def nesting(body: Sequence[ast.AST]) -> int:
    """Depth of blocks; an `elif` is no level, and a function inside counts for itself."""
    deepest = 0
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.If) and [type(other) for other in node.orelse] == [ast.If]:
            deepest = max(deepest, 1 + nesting(node.body), nesting(node.orelse))
            continue
        inside = nesting(list(ast.iter_child_nodes(node)))
        deepest = max(deepest, inside + isinstance(node, BLOCKS))
    return deepest


def layout(root: Path) -> list[str]:
    """Flat packages without drawers for odds and ends; tests are no package."""
    found = [
        f"{file.relative_to(root)}: tests must not be packages (two copies of a module would load)"
        for file in sorted((root / "tests").rglob("__init__.py"))
    ]
    folders = {root / folder for folder in PACKAGES.values()}
    for folder in sorted(folders):
        for file in sorted(folder.rglob("*.py")):
            path = file.relative_to(root)
            if file.parent not in folders:
                found.append(f"{path}: a folder that is no package of ours; keep packages flat")
            if file.stem in {"utils", "util", "helpers", "common", "misc"}:
                found.append(f"{path}: name it after what it does")
    return found


def pairing(root: Path, providers: Mapping[str, Sequence[str]]) -> list[str]:
    """Each op: one signature and one set of documented shapes everywhere, and a test naming it.

    `providers` gives, for each op, the modules that implement it. They are parsed, not imported, so
    kernels of absent libraries are compared too.
    """
    by_name = {module.name: module for module in modules(root)}
    tests = "\n".join(file.read_text() for file in sorted((root / "tests").rglob("test_*.py")))
    found = []
    for op, names in providers.items():
        if not re.search(rf"\b{op}\b", tests):
            found.append(f"{op}: no tests/**/test_*.py names it")
        contracts = {}
        for name in names:
            if name not in by_name:
                found.append(f"{op}: its provider {name} does not exist")
                continue
            contracts[name] = contract(by_name[name], op)
            if contracts[name] is None:
                found.append(f"{op}: {by_name[name].path} has no function of this name")
        if len({c for c in contracts.values() if c}) > 1:
            found.append(f"{op}: signature or documented shapes differ between {sorted(contracts)}")
    return found


def contract(module: Module, op: str) -> tuple[str, ...] | None:
    """The op's signature and the `name [shape]` pairs of its docstring."""
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == op:
            result = ast.unparse(node.returns) if node.returns else ""
            shapes = re.findall(r"\w+ \[[^\]]*\]", ast.get_docstring(node) or "")
            return (ast.unparse(node.args), result, *sorted(set(shapes)))
    return None


def wording(root: Path) -> list[str]:
    """Nothing unfinished, and nothing that means something only where it was written."""
    found = []
    for file in text_files(root):
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            for pattern, remedy in FORBIDDEN_WORDS.items():
                if match := re.search(pattern, line):
                    place = f"{file.relative_to(root)}:{number}"
                    found.append(f"{place}: {match.group()!r}: {remedy}")
    return found


def text_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in NOT_OURS and not name.endswith("_cache")
        )
        for name in sorted(files):
            if Path(name).suffix in TEXT_SUFFIXES and name not in NOT_OURS:
                yield Path(folder, name)


RULES = {
    rule.__name__: rule
    for rule in (
        sglang_stays_at_the_seam,
        imports_point_down,
        environment_is_left_to_settings,
        hardware_is_asked_in_backends,
        budgets,
        layout,
        wording,
    )
}
