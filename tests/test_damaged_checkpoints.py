"""Damaged checkpoints are refused by the check of headers, by name; whatever passes it loads right.

`damage` has the catalogue. Each is judged in a worker process with a limit of time and of memory,
so that whatever hangs, crashes or reads where nothing is shows, and costs one worker.
"""

import json
import re
import resource
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import damage
from checkpoint_files import FakeModel, assert_same, dense_twin, shapes_of
from damage import ANY, AT_LOAD, HARMLESS, REFUSED, Case
from sglang_dsv4 import weights
from sglang_dsv4.checkpoint import read_index
from sglang_dsv4.config import DSV4Config

SECONDS = 20.0  # for one checkpoint, which takes some hundredths
MEMORY = 1 << 30  # bytes of address space beyond what the worker has when it is ready
RISE = 100  # MB by which its resident memory may grow over all checkpoints


# ---- the worker ----


def work() -> None:
    """Judges the folders named on standard input, one a line, and answers each with a line."""
    torch.set_num_threads(1)
    twins: dict[str, Any] = {}
    shapes = shapes_of(damage.CONFIG)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    for line in sys.stdin:
        name, folder = json.loads(line)
        model = FakeModel(shapes, torch.bfloat16)
        answer = judge(Path(folder), model)
        if answer["stage"] == "loaded":
            found = model.values()
            twin = twins.setdefault(name, found)
            answer["differ"] = [key for key in twin if not torch.equal(twin[key], found[key])]
        answer["peak"] = peak()
        print(json.dumps(answer), flush=True)


def peak() -> float:
    """MB that were resident at most. Unlike ru_maxrss it begins anew in a new program."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def judge(folder: Path, model: Any) -> dict[str, Any]:
    """What the server does with a checkpoint: at which stage it stops, and what it says."""
    stage = "check"
    try:
        config = DSV4Config.from_checkpoint(folder)
        weights.check(folder, config)
        stage = "load"
        weights.load(model, stream(folder), config, rank=0, size=1)
    except Exception as error:
        return {"stage": stage, "error": type(error).__name__, "says": str(error)}
    return {"stage": "loaded", "error": None, "says": ""}


def stream(folder: Path) -> Iterator[tuple[str, Any]]:
    """The files that the index names, or all, as SGLang reads them."""
    files = set(read_index(folder).values()) or {f.name for f in folder.glob("*.safetensors")}
    for file in sorted(files):
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                yield name, opened.get_tensor(name)


# ---- its keeper ----


class Keeper:
    """Starts workers, hands them folders, and says how it went; a worker that fails is replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worker: subprocess.Popen[str] | None = None
        self.peaks: list[float] = []

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.communicate()
        self.worker = None

    def start(self) -> None:
        self.worker = subprocess.Popen(
            [sys.executable, "-c", "import test_damaged_checkpoints as t; t.work()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parent,
        )
        for name in damage.TEMPLATES:  # what the others are compared with
            answer = self.ask(name, damage.template(name).files, 120.0)
            assert answer["stage"] == "loaded", answer
        self.peaks = self.peaks[-1:]

    def judge(self, case: Case) -> dict[str, Any]:
        if self.worker is None:
            self.start()
        return self.ask(case.template, case.make(), SECONDS)

    def ask(self, name: str, files: damage.Files, seconds: float) -> dict[str, Any]:
        damage.write(self.folder, files)
        assert self.worker is not None and self.worker.stdin and self.worker.stdout
        self.worker.stdin.write(json.dumps([name, str(self.folder)]) + "\n")
        self.worker.stdin.flush()
        if not select.select([self.worker.stdout], [], [], seconds)[0]:
            self.stop()
            return {"stage": f"hangs for {seconds} s", "error": None, "says": ""}
        line = self.worker.stdout.readline()
        if not line:
            status = self.worker.wait()
            self.stop()
            return {"stage": f"ends the process with {status}", "error": None, "says": ""}
        answer: dict[str, Any] = json.loads(line)
        self.peaks.append(answer["peak"])
        return answer


# ---- the verdict ----


def outcome(case: Case, answer: dict[str, Any]) -> tuple[str, str]:
    """(what came of it, what is wrong with that or "")."""
    stage, error, says = answer["stage"], answer["error"], answer["says"]
    if stage == "loaded":
        wrong = f"other values in {answer['differ']}" if answer["differ"] else ""
        return HARMLESS, wrong or expected(case, HARMLESS)
    if stage not in ("check", "load"):
        return stage, stage
    if error not in ("CheckpointError", "ConfigError"):
        return error, f"{stage} raises {error}: {says[:300]}"
    came = REFUSED if stage == "check" else AT_LOAD
    if case.told and not any(name in says for name in case.told):
        return came, f"does not name {case.told[:3]}: {says[:300]}"
    if not says.isascii() and not says.isprintable() and re.search(r"[\x00-\x09\x0b-\x1f]", says):
        return came, f"says what a terminal may not show: {says[:300]!r}"
    return came, expected(case, came)


def expected(case: Case, came: str) -> str:
    return "" if case.comes_to in (ANY, came) else f"{came}, expected: {case.comes_to}"


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[Case, str, str]], Keeper]:
    """(case, what came of it, what is wrong) for the whole catalogue."""
    with Keeper(tmp_path_factory.mktemp("damaged") / "checkpoint") as keeper:
        verdicts = [(case, *outcome(case, keeper.judge(case))) for case in damage.cases()]
    return verdicts, keeper


def test_every_damage_comes_to_what_it_should(
    judged: tuple[list[tuple[Case, str, str]], Keeper],
) -> None:
    verdicts, _ = judged
    counts: dict[str, Counter[str]] = {}
    for case, came, _ in verdicts:
        counts.setdefault(case.kind, Counter())[came] += 1
    for kind, count in counts.items():
        print(f"{kind:14}", ", ".join(f"{number} {came}" for came, number in sorted(count.items())))
    wrong = [f"{c.template}, {c.kind}, {c.what}: {fault}" for c, _, fault in verdicts if fault]
    assert not wrong, f"{len(wrong)} of {len(verdicts)}:\n" + "\n".join(wrong[:60])
    total = sum(counts.values(), Counter())
    assert len(verdicts) >= 500 and total[REFUSED] >= 400 and total[AT_LOAD] >= 50, total
    assert {case.template for case, _, _ in verdicts} == set(damage.TEMPLATES)


@pytest.mark.parametrize("name", damage.TEMPLATES)
def test_whole_checkpoints_of_three_experts_load(name: str, tmp_path: Path) -> None:
    """What the damaged ones are compared with is right itself: by arithmetic of its own."""
    damage.write(tmp_path / "whole", damage.template(name).files)
    found, twin = (FakeModel(shapes_of(damage.CONFIG), torch.bfloat16) for _ in range(2))
    weights.check(tmp_path / "whole", damage.CONFIG)
    weights.load(found, stream(tmp_path / "whole"), damage.CONFIG, rank=0, size=1)
    dense = dense_twin(stream(tmp_path / "whole"), torch.bfloat16)
    weights.load(twin, dense.items(), damage.CONFIG, rank=0, size=1)
    assert_same(found.values(), twin.values())


def test_memory_stays_where_it_was(judged: tuple[list[tuple[Case, str, str]], Keeper]) -> None:
    _, keeper = judged
    assert len(keeper.peaks) > 500
    assert keeper.peaks[-1] - keeper.peaks[0] < RISE
