"""`sglang-dsv4 doctor`: what is installed, what fits, what is missing and how to get it."""

import argparse
import contextlib
import importlib
import io
import json
import os
import platform
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from sglang_dsv4 import __version__, precision
from sglang_dsv4.doctor_checkpoint import (
    Row,
    check_checkpoint,
    check_options,
    check_tokenizer,
    machine_memory,
)
from sglang_dsv4.settings import Settings, SettingsError

CHECK_FAILED = 1

_DESCRIPTION = """\
Checks versions against pins, the plugin and its hooks into SGLang, the device, the providers of
the ops, the switches in the environment and, where CKPT is given, a checkpoint: its config.json,
the headers of its safetensors, its draft head, its tokenizer, the memory that it needs on this
machine, and the options with which to serve it. Loads no weights and starts no server.

A row is ok, warn (works, but look at it) or fail (cannot serve). Exit code 1 if a row fails.
"""
_EXAMPLES = """\
examples:
  sglang-dsv4 doctor
  sglang-dsv4 doctor /models/DeepSeek-V4-Flash --tp 8
  sglang-dsv4 doctor --json | python -m json.tool
"""

_PLUGIN_GROUP, _PLUGIN_NAME = "sglang.srt.plugins", "dsv4"
_PLUGIN_TARGET = "sglang_dsv4.plugin:register"
_REINSTALL = "install the plugin in this environment: pip install --no-deps . in its repository"
# Most of what a server imports; of these, nearly all: some files are for other Pythons.
_SLOW_IMPORTS, _MOSTLY = ("sglang", "torch", "transformers"), 0.9
# Packages whose version SGLang pins and whose behaviour ours depends on.
_HOST_PINNED = ("torch", "transformers", "tokenizers", "xgrammar", "deepseek-recipe")


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "doctor",
        help="check the installation, and a checkpoint",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", type=Path, nargs="?", help="folder of a checkpoint to check"
    )
    parser.add_argument(
        "--tp", metavar="N", type=_positive, default=1, help="tensor-parallel ranks (default: 1)"
    )
    parser.add_argument(
        "--ep", metavar="N", type=_positive, default=1, help="expert-parallel ranks (default: 1)"
    )
    return parser


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    if arguments.checkpoint is not None and not arguments.checkpoint.is_dir():
        raise NotADirectoryError(f"{arguments.checkpoint} is no folder: name that of a checkpoint")
    if sys.stderr.isatty():
        print("checking, this can take half a minute ...", file=sys.stderr)
    # Imports of SGLang log and warn; here they would bury the answer.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        rows = check_all(arguments.checkpoint, arguments.tp, arguments.ep)
    failed = any(row.status == "fail" for row in rows)
    if arguments.json:
        print(json.dumps({"ok": not failed, "rows": [asdict(row) for row in rows]}))
    else:
        print(render(rows))
    return CHECK_FAILED if failed else 0


def check_all(checkpoint: Path | None, ranks: int = 1, expert_parallel: int = 1) -> list[Row]:
    """Every check in order; one that breaks down is a failed row, not the end of the others."""
    checks: list[tuple[str, Callable[[], list[Row]]]] = [
        ("versions", check_versions),
        ("device", check_device),
        ("plugin", check_plugin),
        ("ops", lambda: check_ops(expert_parallel)),
        ("precision", check_precision),
        ("kernel caches", check_kernel_caches),
        ("bytecode", check_bytecode),
    ]
    if checkpoint is not None:
        checks += [
            ("checkpoint", lambda: check_checkpoint(checkpoint, ranks, expert_parallel)),
            ("tokenizer", lambda: check_tokenizer(checkpoint)),
            ("options", check_options),
        ]
    rows: list[Row] = []
    for name, check in checks:
        try:
            rows += check()
        except Exception as error:
            rows.append(Row(name, "fail", f"{type(error).__name__}: {error}"))
    return rows


def check_versions() -> list[Row]:
    """Our pin of SGLang, and SGLang's pins of what we depend on."""
    rows = [Row("python", "ok", platform.python_version()), Row("sglang-dsv4", "ok", __version__)]
    rows.append(_version_row("safetensors", "", "fail"))
    sglang = _version_row("sglang", _pins("sglang-dsv4").get("sglang", ""), "fail")
    pins = _pins("sglang") if sglang.found != "not installed" else {}
    return [
        *rows,
        sglang,
        *(_version_row(name, pins.get(name, ""), "warn") for name in _HOST_PINNED),
    ]


def _pins(package: str) -> dict[str, str]:
    """Requirement -> version, for those that `package` pins exactly."""
    exact = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*==\s*([\w.+!]+)")
    found = (exact.match(line) for line in requires(package) or [] if "extra ==" not in line)
    return {match[1].lower(): match[2] for match in found if match}


def _version_row(package: str, pin: str, when_different: str) -> Row:
    target = f"{package}=={pin}" if pin else package
    remedy = f"pip install {target}"
    try:
        found = version(package)
    except PackageNotFoundError:
        return Row(package, "fail", "not installed", pin, remedy)
    public, _, build = found.partition("+")
    # SGLang pins a torch for GPUs; on a CPU another one does as well.
    fits = not pin or public == pin or (package == "torch" and build == "cpu")
    return Row(package, "ok", found) if fits else Row(package, when_different, found, pin, remedy)


def check_device() -> list[Row]:
    from sglang_dsv4.backends import Machine

    machine = Machine.probe()
    memory = machine_memory(machine) / 2**30
    if machine.capability is not None:
        capability = ".".join(map(str, machine.capability))
        found = f"{machine.name}, compute capability {capability}, {memory:.0f} GiB"
        return [Row("device", "ok", found)]
    found = f"CPU, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"
    if Path("/proc/driver/nvidia/version").exists():
        remedy = "an NVIDIA driver is there: install a torch built for CUDA"
        return [Row("device", "warn", found, "the GPU", remedy)]
    return [Row("device", "ok", found)]


def check_plugin() -> list[Row]:
    """Whether SGLang will find our plugin, and whether its hooks fit the installed SGLang."""
    ours = [e for e in entry_points(group=_PLUGIN_GROUP) if e.name == _PLUGIN_NAME]
    found = ", ".join(entry.value for entry in ours) or "not registered"
    if [entry.value for entry in ours] != [_PLUGIN_TARGET]:
        return [Row("plugin entry point", "fail", found, _PLUGIN_TARGET, _REINSTALL)]
    chosen = Settings.read().plugins
    if chosen and _PLUGIN_NAME not in [name.strip() for name in chosen.split(",")]:
        remedy = f"unset SGLANG_PLUGINS, or add {_PLUGIN_NAME} to it"
        found = f"SGLANG_PLUGINS={chosen} leaves {_PLUGIN_NAME} out"
        return [Row("plugin entry point", "fail", found, "the plugin is loaded", remedy)]
    return [Row("plugin entry point", "ok", found), *_hook_rows(ours[0])]


def _hook_rows(entry: EntryPoint) -> list[Row]:
    try:
        results = importlib.import_module(entry.module).self_check()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        return [Row("plugin import", "fail", found, f"imports {entry.module}", _REINSTALL)]
    pin = _pins("sglang-dsv4").get("sglang", "")
    remedy = f"pip install sglang=={pin}"
    return [
        Row(f"hook {name}", "ok", reason)
        if fits
        else Row(f"hook {name}", "fail", reason, "", remedy)
        for name, fits, reason in results
    ]


def check_ops(expert_parallel: int = 1) -> list[Row]:
    """The provider chosen for each op on this machine."""
    from sglang_dsv4.backends import Machine, choose

    try:
        ops = choose(Machine.probe(), Settings.read().ops, expert_parallel=expert_parallel)
    except (ValueError, RuntimeError) as error:
        return [Row("ops", "fail", str(error), remedy="see SGLANG_DSV4_OPS in the README")]
    return [Row(f"op {op}", "ok", provider) for op, provider in ops.providers.items()]


def check_precision() -> list[Row]:
    try:
        chosen = precision.parse(Settings.read().precision)
    except SettingsError as error:
        remedy = f"unset or correct {precision.VARIABLE}"
        return [Row("precision", "fail", str(error), remedy=remedy)]
    rows = []
    for name, component in precision.COMPONENTS.items():
        value, default = getattr(chosen, name), component.values[0]
        rows.append(Row(f"precision {name}", "ok", value, "" if value == default else default))
    return rows


def check_kernel_caches() -> list[Row]:
    """Whether a server will have to compile while it starts; see `sglang-dsv4 warm`."""
    from sglang_dsv4.warmup import caches_row

    return [Row(*caches_row())]


def check_bytecode() -> list[Row]:
    """Whether Python has to compile what a server imports, in each of its processes.

    pip compiles what it installs; uv and many container images do not, and some forbid it later.
    """
    compiled, sources, sites = 0, 0, set()
    for package in _SLOW_IMPORTS:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            sites.add(str(Path(folder).parent))
            for source in Path(folder).rglob("*.py"):
                sources += 1
                compiled += Path(cache_from_source(str(source))).exists()
    found = f"{compiled:,} of {sources:,} files of {', '.join(_SLOW_IMPORTS)} are compiled"
    if compiled >= _MOSTLY * sources:
        return [Row("bytecode", "ok", found)]
    remedy = shlex.join([sys.executable, *"-m compileall -qq -j 0".split(), *sorted(sites)])
    return [Row("bytecode", "warn", found, "nearly all", f"for quicker starts: {remedy}")]


def render(rows: list[Row]) -> str:
    """The rows as text: one line each, more where something is to be done."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        found = textwrap.indent(row.found, " " * (width + 8)).strip()
        expected = f"  (expected: {row.expected})" if row.expected else ""
        lines.append(f"{row.status:<4}  {row.name:<{width}}  {found}{expected}")
        if row.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  -> {row.remedy}")
    counts = [sum(row.status == status for row in rows) for status in ("ok", "warn", "fail")]
    return "\n".join([*lines, "{} ok, {} warnings, {} failed".format(*counts)])
