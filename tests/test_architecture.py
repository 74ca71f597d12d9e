"""The rules of architecture.py hold in the repository, and each of them finds what is planted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from architecture import RULES, modules, pairing

ROOT = Path(__file__).parents[1]

EXPECTED_MODULES = {
    "sglang_dsv4": {
        *("plugin", "host", "config", "settings", "backends", "model", "weights"),
        *("precision", "cli", "reference"),
    },
    "sglang_dsv4.attention": {
        *("layer", "compressor", "indexer", "cache", "metadata", "backend", "reference"),
    },
    "sglang_dsv4.moe": {"layer", "reference"},
    "sglang_dsv4.served": {"deepseek_v4"},
}

# rule -> planted files -> the beginning of the only violation that must be found, or None for none.
PLANTED: list[tuple[str, dict[str, str], str | None]] = [
    (
        "sglang_stays_at_the_seam",
        {"attention/backend.py": "def build():\n    from sglang.srt import layers\n"},
        "attention/backend.py: imports sglang",
    ),
    (
        "sglang_stays_at_the_seam",
        {"sglang_dsv4/served/deepseek_v4.py": "import torch, sglang.srt\n"},
        "sglang_dsv4/served/deepseek_v4.py: imports sglang",
    ),
    (
        "sglang_stays_at_the_seam",
        {
            "sglang_dsv4/host.py": "import sglang\n",
            "sglang_dsv4/plugin.py": "from sglang.srt import plugins\n",
            "sglang_dsv4/model.py": "import sglang_dsv4\n",
        },
        None,
    ),
    (
        "imports_point_down",
        {"attention/layer.py": "from sglang_dsv4.moe.layer import MoE\n", "moe/layer.py": ""},
        "attention/layer.py: imports sglang_dsv4.moe.layer: it is not in a layer below",
    ),
    (
        "imports_point_down",
        {"sglang_dsv4/cli.py": "from sglang_dsv4 import plugin\n", "sglang_dsv4/plugin.py": ""},
        "sglang_dsv4/cli.py: imports sglang_dsv4.plugin: it is not in a layer below",
    ),
    (
        "imports_point_down",
        {"attention/cache.py": "from sglang_dsv4.attention.layer import A\n"},
        "attention/cache.py: imports sglang_dsv4.attention.layer: it is not in a layer below",
    ),
    (
        "imports_point_down",
        {"sglang_dsv4/settings.py": "import sglang_dsv4.config\n"},
        "sglang_dsv4/settings.py: imports sglang_dsv4.config: it imports nothing of ours",
    ),
    (
        "imports_point_down",
        {"attention/layer.py": "from sglang_dsv4.attention.kernels_triton import attend\n"},
        "attention/layer.py: imports sglang_dsv4.attention.kernels_triton: only backends.py",
    ),
    (
        "imports_point_down",
        {"moe/layer.py": "from sglang_dsv4.moe import reference\n", "moe/reference.py": ""},
        "moe/layer.py: imports sglang_dsv4.moe.reference: only backends.py",
    ),
    (  # not those of another package, ...
        "imports_point_down",
        {"moe/kernels_x.py": "from sglang_dsv4.attention import kernels_y\n",
         "attention/kernels_y.py": ""},
        "moe/kernels_x.py: imports sglang_dsv4.attention.kernels_y: only backends.py",
    ),
    (  # ... nor those of a package within, ...
        "imports_point_down",
        {"sglang_dsv4/kernels_triton.py": "from sglang_dsv4.moe.kernels_x import turn\n",
         "moe/kernels_x.py": ""},
        "sglang_dsv4/kernels_triton.py: imports sglang_dsv4.moe.kernels_x: only backends.py",
    ),
    (  # ... nor the reference, ...
        "imports_point_down",
        {"attention/kernels_x.py": "from sglang_dsv4.attention import reference\n",
         "attention/reference.py": ""},
        "attention/kernels_x.py: imports sglang_dsv4.attention.reference: only backends.py",
    ),
    (  # ... nor a part of it, ...
        "imports_point_down",
        {"attention/layer.py": "from sglang_dsv4.attention import reference_metadata\n",
         "attention/reference_metadata.py": ""},
        "attention/layer.py: imports sglang_dsv4.attention.reference_metadata: only backends.py",
    ),
    (  # ... nor in a function, ...
        "imports_point_down",
        {"attention/backend.py": "def f():\n  import sglang_dsv4.attention.kernels_flashinfer\n"},
        "attention/backend.py: imports sglang_dsv4.attention.kernels_flashinfer: only backends.py",
    ),
    (  # ... nor from where kernels are only built.
        "imports_point_down",
        {"sglang_dsv4/warmup.py": "from sglang_dsv4 import kernels_triton\n",
         "sglang_dsv4/kernels_triton.py": ""},
        "sglang_dsv4/warmup.py: imports sglang_dsv4.kernels_triton: only backends.py",
    ),
    (
        "imports_point_down",
        {
            "attention/kernels_x.py": "from sglang_dsv4.attention.kernels_y import turn\n",
            "attention/kernels_y.py": "from sglang_dsv4.attention.cache import PAGE\n"
            "from sglang_dsv4.kernels_triton import turn\n",
            "sglang_dsv4/kernels_triton.py": "",
            "attention/cache.py": "",
            "sglang_dsv4/backends.py": "from sglang_dsv4.attention import kernels_x\n",
        },
        None,
    ),
    ("imports_point_down", {"sglang_dsv4/new.py": ""}, "sglang_dsv4/new.py: has no place"),
    (
        "imports_point_down",
        {
            "sglang_dsv4/__init__.py": "",
            "sglang_dsv4/host.py": "from sglang_dsv4.attention.cache import PAGE\n",
            "sglang_dsv4/model.py": "from sglang_dsv4 import __version__, host\n",
            "attention/cache.py": "from sglang_dsv4.config import DSV4Config\n",
            "attention/backend.py": "from sglang_dsv4 import host\n",
            "attention/layer.py": "from sglang_dsv4.attention.backend import A\n",
            "attention/reference.py": "from sglang_dsv4.config import DSV4Config\n",
        },
        None,
    ),
    (
        "environment_is_left_to_settings",
        {"sglang_dsv4/model.py": "import os\nFLAG = os.environ.get('FLAG')\n"},
        "sglang_dsv4/model.py:2: the environment",
    ),
    (
        "environment_is_left_to_settings",
        {"moe/layer.py": "from os import getenv\n"},
        "moe/layer.py:1: the environment",
    ),
    (
        "environment_is_left_to_settings",
        {"sglang_dsv4/settings.py": "import os\n\nos.environ['A'] = 'b'\n"},
        None,
    ),
    (
        "hardware_is_asked_in_backends",
        {"attention/layer.py": "import torch\n\nif torch.cuda.is_available():\n    pass\n"},
        "attention/layer.py:3: torch.cuda.is_available",
    ),
    (
        "hardware_is_asked_in_backends",
        {"sglang_dsv4/backends.py": "import torch\n\ntorch.cuda.is_available()\n"},
        None,
    ),
    ("budgets", {"moe/layer.py": "x = 1\n" * 401}, "moe/layer.py: 401 lines"),
    ("budgets", {"moe/kernels_x.py": "x = 1\n" * 601}, "moe/kernels_x.py: 601 lines"),
    ("budgets", {"moe/layer.py": "def f():\n" + "    x = 1\n" * 60}, "moe/layer.py: f: 61 lines"),
    (
        "budgets",
        {"moe/layer.py": "def f(x):\n" + "".join("    " * n + "if x:\n" for n in range(1, 6))
         + "    " * 6 + "pass\n"},
        "moe/layer.py: f: nested 5 deep",
    ),
    (
        "budgets",
        {
            "moe/layer.py": "x = 1\n" * 340 + "def f():\n" + "    x = 1\n" * 59,
            "moe/kernels_x.py": "x = 1\n" * 450 + "def f():\n" + "    x = 1\n" * 149,
            "moe/router.py": "def f(x):\n    if x == 0:\n        pass\n"
            + "".join(f"    elif x == {n}:\n        pass\n" for n in range(1, 9)),
        },
        None,
    ),
    ("layout", {"sglang_dsv4/utils.py": ""}, "sglang_dsv4/utils.py: name it"),
    ("layout", {"attention/gpu/layer.py": ""}, "attention/gpu/layer.py: a folder"),
    ("layout", {"tests/moe/__init__.py": ""}, "tests/moe/__init__.py: tests must not"),
    ("layout", {"attention/layer.py": "", "tests/attention/test_layer.py": ""}, None),
    ("wording", {"docs/a.md": "one\n" + "TO" + "DO: later\n"}, "docs/a.md:2: 'TO" + "DO'"),
    ("wording", {"README.md": "see issue" + " 12\n"}, "README.md:1: 'issue" + " 12'"),
    ("wording", {"moe/layer.py": "# as in #" + "12\n"}, "moe/layer.py:1: '#" + "12'"),
    ("wording", {"scripts/a.sh": "cd /wo" + "rk/main\n"}, "scripts/a.sh:1: '/wo" + "rk/'"),
    ("wording", {".ci/run": "pip --index" + "-url x\n"}, ".ci/run:1: 'index" + "-url'"),
    (
        "wording",
        {
            "README.md": "a host's report: sglang#36179, `${x#0}`, an issue of style\n",
            ".venv/lib/other.py": "# TO" + "DO: not ours\n",
        },
        None,
    ),
]

OP = 'def op(x: Tensor, *, y: float = 1.0) -> int:\n    """Adds to x [tokens, 8] fp32."""\n'
OP_TEST = {"tests/moe/test_op.py": "def test(): op()\n"}
PROVIDERS = {"op": ["sglang_dsv4.moe.reference", "sglang_dsv4.moe.kernels_x"]}
PLANTED_PAIRS: list[tuple[dict[str, str], str | None]] = [
    ({"moe/reference.py": OP, "moe/kernels_x.py": OP, **OP_TEST}, None),
    ({"moe/reference.py": OP, "moe/kernels_x.py": OP}, "op: no tests"),
    ({"moe/reference.py": OP, **OP_TEST}, "op: its provider sglang_dsv4.moe.kernels_x does not"),
    (
        {"moe/reference.py": OP, "moe/kernels_x.py": "", **OP_TEST},
        "op: moe/kernels_x.py has no function",
    ),
    (
        {"moe/reference.py": OP, "moe/kernels_x.py": OP.replace("1.0", "2.0"), **OP_TEST},
        "op: signature or documented shapes differ",
    ),
    (
        {"moe/reference.py": OP, "moe/kernels_x.py": OP.replace("[tokens, 8]", "[8]"), **OP_TEST},
        "op: signature or documented shapes differ",
    ),
]


def plant(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def assert_found(violations: list[str], expected: str | None) -> None:
    assert len(violations) == (expected is not None), violations
    if expected is not None:
        assert violations[0].startswith(expected), violations[0]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_repository_keeps(rule: Callable[[Path], list[str]]) -> None:
    violations = rule(ROOT)
    assert not violations, "\n".join(violations)


def test_repository_keeps_pairing() -> None:
    from sglang_dsv4.backends import PROVIDERS as SHIPPED

    named = {op: [provider.module for provider in providers] for op, providers in SHIPPED.items()}
    assert named, "backends.PROVIDERS is empty: this test would check nothing"
    violations = pairing(ROOT, named)
    assert not violations, "\n".join(violations)


def test_expected_modules_exist() -> None:
    """The rules look at what exists; this keeps them from looking at nothing."""
    found = {module.name for module in modules(ROOT)}
    missing = [
        f"{package}.{name}"
        for package, names in EXPECTED_MODULES.items()
        for name in sorted(names)
        if f"{package}.{name}" not in found
    ]
    assert not missing, f"missing: {', '.join(missing)}"


@pytest.mark.parametrize(("name", "files", "expected"), PLANTED)
def test_rule_finds(name: str, files: dict[str, str], expected: str | None, tmp_path: Path) -> None:
    plant(tmp_path, files)
    assert_found(RULES[name](tmp_path), expected)


@pytest.mark.parametrize(("files", "expected"), PLANTED_PAIRS)
def test_pairing_finds(files: dict[str, str], expected: str | None, tmp_path: Path) -> None:
    plant(tmp_path, files)
    assert_found(pairing(tmp_path, PROVIDERS), expected)


def test_every_rule_has_planted_cases() -> None:
    for name in RULES:
        assert {expected is None for rule, _, expected in PLANTED if rule == name} == {True, False}
