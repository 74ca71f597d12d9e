"""The wheel and the editable install: the same import names, the same files, nothing beside them.

Both are installed into fresh environments whose only link to this one is a path that is looked at
last, for torch and SGLang.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
FOLDERS = PYPROJECT["tool"]["setuptools"]["package-dir"]  # installed name -> folder
VERSION = PYPROJECT["project"]["version"]
NANO_FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "held_out.json",
    "hf_quant_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}
NANO_LIMIT = 8_000_000  # bytes of model.safetensors: whoever installs the package downloads it

# Run inside an environment, with an argument for each module to import: where they come from.
REPORT = """
import importlib, importlib.metadata, importlib.util, json, sys

distribution = importlib.metadata.distribution("sglang-dsv4")
print(json.dumps({
    "files": {name: importlib.import_module(name).__file__ for name in sys.argv[1:]},
    "bare": [n for n in ("attention", "moe", "served") if importlib.util.find_spec(n)],
    "version": distribution.version,
    "metadata_in": str(distribution.locate_file("")),
    "plugins": {p.name: p.value for p in importlib.metadata.entry_points(
        group="sglang.srt.plugins", name="dsv4")},
    "register": callable(distribution.entry_points.select(name="dsv4")["dsv4"].load()),
}))
"""
MODULES = (
    "sglang_dsv4",
    "sglang_dsv4.attention",
    "sglang_dsv4.attention.reference",
    "sglang_dsv4.moe",
    "sglang_dsv4.moe.reference",
)


def run(command: list[str | Path], folder: Path) -> str:
    """Its output; a failure shows all of it. Nothing of this environment's paths leaks in."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=clean, text=True, capture_output=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def report(python: Path, folder: Path) -> dict:
    """REPORT of that environment, run from `folder`."""
    return json.loads(run([python, "-c", REPORT, *MODULES], folder))


def copy_sources(repository: Path, to: Path) -> Path:
    """What a build needs, without build leftovers: an old build/lib would ship deleted modules."""
    to.mkdir()
    for name in ("sglang_dsv4", "attention", "moe"):
        shutil.copytree(repository / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (repository / name).exists():
            shutil.copy(repository / name, to)
    return to


def make_environment(folder: Path, wheel: Path) -> Path:
    """A fresh environment with this wheel, then this environment's libraries behind it.

    Returns its Python. The order matters: pip must not see the install of this environment.
    """
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install"]
    run([*pip, "--quiet", "--no-deps", "--no-index", wheel], folder.parent)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run([python, "-c", where], folder.parent).strip())
    outer = run([sys.executable, "-c", where], folder.parent)
    # As plain text: a .pth in there, so also an editable install's hook, is not followed.
    (site / "outer.pth").write_text(outer)
    return python


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, so that both are complete."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = copy_sources(repository, folder / "sources")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist"]
    run([*build, sources], folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_python(wheel: Path) -> Path:
    return make_environment(wheel.parent / "environment", wheel)


@pytest.fixture(scope="module")
def editable(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An editable install of a copy of the sources: (its Python, the copy)."""
    folder = tmp_path_factory.mktemp("editable")
    sources = copy_sources(repository, folder / "sources")
    # What pip calls for `install -e --no-build-isolation`.
    hook = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    run([sys.executable, "-c", hook, folder], sources)
    (built,) = folder.glob("*.whl")
    return make_environment(folder / "environment", built), sources


def files_on_disk(repository: Path) -> set[str]:
    """Every file below the three folders, by its installed path."""
    found = set()
    for package, folder in FOLDERS.items():
        for file in (repository / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                inside = file.relative_to(repository / folder).as_posix()
                found.add(f"{package.replace('.', '/')}/{inside}")
    return found


def test_wheel_holds_every_file_and_nothing_else(wheel: Path, repository: Path) -> None:
    """A folder or data file that pyproject.toml does not list is silently missing from a wheel."""
    info = f"sglang_dsv4-{VERSION}.dist-info"
    names = set(zipfile.ZipFile(wheel).namelist())
    packaged = {name for name in names if not name.startswith(f"{info}/")}
    assert packaged == files_on_disk(repository)
    assert {name.split("/")[0] for name in packaged} == {"sglang_dsv4"}
    assert "sglang_dsv4/py.typed" in packaged
    assert f"{info}/licenses/LICENSE" in names


def test_wheel_holds_the_checkpoint_of_the_demo(wheel: Path, repository: Path) -> None:
    """Whole, byte for byte, and small."""
    archive = zipfile.ZipFile(wheel)
    folder = "sglang_dsv4/nano/"
    found = {name for name in archive.namelist() if name.startswith(folder)}
    assert found == {folder + name for name in NANO_FILES}
    assert archive.getinfo(folder + "model.safetensors").file_size <= NANO_LIMIT
    for name in found:
        assert archive.read(name) == (repository / name).read_bytes(), name


def test_demo_of_the_wheel_finds_its_checkpoint(wheel_python: Path, tmp_path: Path) -> None:
    statement = (
        "from sglang_dsv4 import cli_demo, weights; from sglang_dsv4.config import DSV4Config;"
        "print(weights.check(cli_demo.NANO, DSV4Config.from_checkpoint(cli_demo.NANO)));"
        "print(cli_demo.NANO)"
    )
    shown = run([wheel_python, "-c", statement], tmp_path)
    assert shown.splitlines()[-1].startswith(str(wheel_python.parents[1]))
    assert "--ask" in run([wheel_python.parent / "sglang-dsv4", "demo", "--help"], tmp_path)


def test_packages_are_the_folders_with_code(repository: Path) -> None:
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    on_disk = {name.rpartition("/")[0] for name in files_on_disk(repository) if name[-3:] == ".py"}
    assert listed == {name.replace("/", ".") for name in on_disk}


def test_wheel_imports_from_elsewhere(wheel_python: Path, tmp_path: Path) -> None:
    found = report(wheel_python, tmp_path)
    environment = str(wheel_python.parents[1])
    assert {name: file.startswith(environment) for name, file in found["files"].items()} == {
        name: True for name in MODULES
    }
    assert found["bare"] == []
    assert found["version"] == VERSION
    assert found["metadata_in"].startswith(environment)


def test_wheel_has_its_entry_points(wheel_python: Path, tmp_path: Path) -> None:
    found = report(wheel_python, tmp_path)
    assert found["plugins"] == {"dsv4": "sglang_dsv4.plugin:register"}
    assert found["register"] is True
    usage = run([wheel_python.parent / "sglang-dsv4", "--help"], tmp_path)
    assert "make-tiny" in usage


def test_editable_install_imports_from_anywhere(
    editable: tuple[Path, Path], tmp_path: Path
) -> None:
    python, sources = editable
    elsewhere, at_root = report(python, tmp_path), report(python, sources)
    assert {name: file.startswith(str(sources)) for name, file in elsewhere["files"].items()} == {
        name: True for name in MODULES
    }
    assert elsewhere["bare"] == []
    # There, Python itself finds attention/ beside the current folder; the modules stay the same.
    assert at_root["files"] == elsewhere["files"]
    assert elsewhere["plugins"] == {"dsv4": "sglang_dsv4.plugin:register"}


def test_editable_install_sees_new_files(editable: tuple[Path, Path], tmp_path: Path) -> None:
    python, sources = editable
    (sources / "attention" / "planted.py").write_text("answer = 42\n")
    statement = "from sglang_dsv4.attention.planted import answer; print(answer)"
    assert run([python, "-c", statement], tmp_path).strip() == "42"


def test_editable_install_works_in_spawned_processes(
    editable: tuple[Path, Path], tmp_path: Path
) -> None:
    """SGLang's schedulers are spawned, not forked."""
    python, _ = editable
    script = tmp_path / "spawn.py"
    script.write_text(
        "import multiprocessing\n\n\n"
        "def name(module):\n"
        "    return __import__(module, fromlist=['x']).__name__\n\n\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(name, ('sglang_dsv4.moe',)))\n"
    )
    assert run([python, script], tmp_path).strip() == "sglang_dsv4.moe"


def test_sglang_is_pinned_in_one_place(repository: Path) -> None:
    (pin,) = (line for line in PYPROJECT["project"]["dependencies"] if line.startswith("sglang"))
    version = re.fullmatch(r"sglang==([\d.]+)", pin)
    assert version, f"expected an exact pin of sglang, found {pin!r}"
    repeated = [
        file.relative_to(repository).as_posix()
        for folder in (*set(FOLDERS.values()), "scripts", ".ci")
        for file in sorted((repository / folder).rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
        # A checkpoint is no text, but bytes that are not UTF-8 hide no version either.
        for text in [file.read_text(errors="replace")]
        if version.group(1) in text or re.search(r"sglang==\d", text)
    ]
    assert not repeated, f"{repeated}: read the version from pyproject.toml or the metadata"
