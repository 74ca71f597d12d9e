"""What a server's profile says of a decode step: from traces made here, of known steps."""

import ast
import gzip
import importlib
import io
import json
import os
import sys
import time
import urllib.error
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
measure = importlib.import_module("bench_measure")
profiles = importlib.import_module("bench_profile")

# A step: its launches, each after so many microseconds, for so many, on a stream. The embedding
# runs once, but not first; of `attend` and `expert`, 10 microseconds of 30 and 20 go side by side.
STEP = (
    ("Memcpy HtoD", "gpu_memcpy", 0, 2),
    ("embed", "kernel", 5, 10),
    ("attend", "kernel", 20, 30),
    ("expert", "kernel", 40, 20),
    ("attend", "kernel", 70, 30),
    ("expert", "kernel", 90, 20),
    ("Memset", "gpu_memset", 115, 5),
    ("sample" + 100 * "x", "kernel", 125, 15),
    ("Memcpy DtoH", "gpu_memcpy", 141, 1),
)
BUSY = 2 + 10 + 40 + 40 + 5 + 15 + 1
LENGTH, PAUSE = 142.0, 60.0
EVENTS = len(STEP)


def trace(
    steps: int = 14, first: int = 0, last: int = EVENTS, extra: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """So many steps with a pause between them; the first lacks the launches before `first`, the
    last those from `last` on. extra: steps which another kernel ends."""
    found: list[dict[str, Any]] = []
    for number in range(steps):
        begin = 1000.0 + number * (LENGTH + PAUSE)
        parts = STEP + ((("page", "kernel", 150, 4),) if number in extra else ())
        chosen = slice(first if number == 0 else 0, last if number == steps - 1 else None)
        for name, kind, after, length in parts[chosen]:
            one = {"ph": "X", "cat": kind, "name": name, "ts": begin + after, "dur": length}
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 3}
            found += [one, launch | {"ts": begin + after - 4}]
    noise = [
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": 0, "dur": 9000},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 1000, "id": 1},
    ]
    return [*noise, *reversed(found)]  # traces are in no order


def found_in(events: list[dict[str, Any]], folder: Path, name: str = "1-TP-0.trace.json.gz") -> Any:
    write(events, folder / name)
    return profiles.device_events(folder / name)


def write(events: list[dict[str, Any]], file: Path) -> None:
    text = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    file.write_bytes(gzip.compress(text, 1) if file.suffix == ".gz" else text)


@pytest.mark.parametrize("name", ["a.trace.json.gz", "a.trace.json"])
def test_only_what_the_device_did_counts(name: str, tmp_path: Path) -> None:
    events = found_in(trace(2), tmp_path, name)
    assert len(events) == 2 * EVENTS and events == sorted(events)
    assert events[1] == (1005.0, 1015.0, "embed")


@pytest.mark.parametrize(
    ("steps", "first", "last", "whole"),
    [
        (13, 0, EVENTS, 13),
        (13, 4, EVENTS, 12),
        (14, 4, 3, 12),
        (13, 8, 1, 11),
    ],
)
def test_a_step_is_whole_whatever_the_trace_begins_and_ends_with(
    steps: int, first: int, last: int, whole: int, tmp_path: Path
) -> None:
    found = profiles.step(found_in(trace(steps, first, last), tmp_path), 12)
    assert found["steps"] in (whole, whole - 1)  # the last may not be known to be whole
    assert found["busy_ms"] == pytest.approx(BUSY / 1000)
    assert found["span_ms"] == pytest.approx(LENGTH / 1000)  # without the pause between steps
    assert (found["launches"], found["fewest"], found["most"]) == (EVENTS, EVENTS, EVENTS)


def test_kernels_are_told_by_what_they_take(tmp_path: Path) -> None:
    kernels = profiles.step(found_in(trace(), tmp_path), 12)["kernels"]
    assert [one["name"][:6] for one in kernels[:4]] == ["attend", "expert", "sample", "embed"]
    assert kernels[0] == {"name": "attend", "launches": 2, "us": pytest.approx(60)}
    assert kernels[1]["us"] == pytest.approx(40) and len(kernels[2]["name"]) == profiles.NAME
    assert len(kernels) == len({name for name, *_ in STEP}) <= profiles.MOST


def test_no_more_kernels_than_asked_for_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "MOST", 2)
    kernels = profiles.step(found_in(trace(), tmp_path), 12)["kernels"]
    assert [one["name"] for one in kernels] == ["attend", "expert"]


def test_steps_need_not_be_alike(tmp_path: Path) -> None:
    """Two of them have a launch more; the cuts are still where the device waited."""
    found = profiles.step(found_in(trace(first=6, extra=(4, 9)), tmp_path), 12)
    assert (found["fewest"], found["most"]) == (EVENTS, EVENTS + 1)
    assert found["launches"] == pytest.approx(EVENTS + 2 / found["steps"])
    assert found["busy_ms"] == pytest.approx((BUSY + 8 / found["steps"]) / 1000)
    assert found["span_ms"] == pytest.approx(LENGTH / 1000)


def test_a_kernel_of_one_step_is_no_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve launches of one kernel, as evenly as can be, but all before the second step."""
    burst = [
        {"ph": "X", "cat": "kernel", "name": "load", "ts": 1150 + n, "dur": 0.5} for n in range(12)
    ]
    monkeypatch.setattr(profiles, "UNEVEN", 3)  # the steps of this trace are short
    found = profiles.step(found_in(trace() + burst, tmp_path), 12)
    assert found["steps"] == 13 and found["launches"] == EVENTS + 12 / 13


def test_steps_that_cannot_be_told_apart_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(measure.MeasureError, match="no events of the device"):
        profiles.step([], 12)
    with pytest.raises(measure.MeasureError, match="steps of 2 to 7 launches cannot be told"):
        profiles.step(found_in(trace(6), tmp_path), 12)  # some run twice a step
    with pytest.raises(measure.MeasureError, match="no kernel of 36 launches runs once in each of"):
        profiles.step(found_in(trace(4), tmp_path), 12)
    with pytest.raises(measure.MeasureError, match="no kernel of 180 launches runs once in each"):
        profiles.step(found_in(trace(20), tmp_path), 12)
    uneven = [profiles.Event(n, n + 1, "k" if n in (0, 1, 99) else f"{n}") for n in range(100)]
    with pytest.raises(measure.MeasureError, match="steps of 1 to 98 launches"):
        profiles.step(uneven, 3)


def test_what_runs_side_by_side_is_busy_once() -> None:
    events = [profiles.Event(*one, "k") for one in ((0, 10), (2, 4), (8, 15), (20, 21))]
    assert profiles.busy(events) == 16


# ---- the server ----


class Profiled:
    """Answers as SGLang's server does: a profile's trace is there before the next tokens are."""

    log = Path("ours.log")

    def __init__(self, late: float | None = -1.0, refuses: bool = False) -> None:
        self.late, self.refuses = late, refuses
        self.asked: list[tuple[str, Any]] = []
        self.place: Path | None = None

    def request(self, path: str, body: Any = None) -> Any:
        self.asked.append((path, body))
        if self.refuses:
            text = io.BytesIO(b"Internal Server Error")
            raise urllib.error.HTTPError(path, 500, "no", Message(), text)
        if path == "/generate":
            meta = {"finish_reason": None, "cached_tokens": 0, "completion_tokens": 1}
            return {"meta_info": meta}
        if path == "/start_profile" and "num_steps" not in body:
            self.place = Path(body["output_dir"])
        if path == "/stop_profile" and self.place is not None:
            write(trace(), self.place / "17.5-TP-0.trace.json.gz")
        if path == "/start_profile" and "num_steps" in body and self.late is not None:
            file = Path(body["output_dir"]) / "17.5-TP-0.trace.json.gz"
            write(trace(), file)
            os.utime(file, (time.time() + self.late,) * 2)
        return "Start profiling.\n"


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in for a batch that decodes: the tokens of its requests."""
    tokens: list[int] = []

    def stream(server: Any, prompts: Any, count: int, decoding: Any) -> Any:
        tokens.append(count)
        decoding()
        time.sleep(0.05)
        now = time.perf_counter()
        return [[(now - 1, 1), (now + later, count)] for later in (0.0, 0.5)], 0

    monkeypatch.setattr(measure, "stream", stream)
    return tokens


def test_a_batch_is_profiled_while_it_decodes(streamed: list[int], tmp_path: Path) -> None:
    server = Profiled()
    found = profiles.profile(server, [[7], [8]], tmp_path)
    assert found["busy_ms"] == pytest.approx(BUSY / 1000)
    ((path, body),) = server.asked
    assert path == "/start_profile" and streamed == [profiles.TOKENS + 1]
    assert body.pop("output_dir").startswith(str(tmp_path))
    assert body == {
        "num_steps": 12, "activities": ["GPU"], "with_stack": False, "record_shapes": False,
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []  # traces are large


def test_a_prompt_is_profiled_to_its_first_token(tmp_path: Path) -> None:
    """All events count; the trace is written when the profile is stopped."""
    server = Profiled()
    found = profiles.profile_prefill(server, [7, 8], tmp_path)
    events = found_in(trace(), tmp_path)
    assert found["launches"] == len(events) and found["kernels"][0]["name"] == "attend"
    assert found["busy_ms"] == pytest.approx(profiles.busy(events) / 1000)
    last = max(one.end for one in events)
    assert found["span_ms"] == pytest.approx((last - events[0].start) / 1000)
    assert [path for path, _ in server.asked] == ["/start_profile", "/generate", "/stop_profile"]
    assert server.asked[1][1]["input_ids"] == [7, 8]
    assert not list(tmp_path.glob("*/*.trace.json*"))


def test_a_prompt_whose_profile_is_not_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or that goes wrong: what was begun is stopped."""
    monkeypatch.setattr(profiles, "TRACES", "*.other")
    with pytest.raises(measure.MeasureError, match="no events of the device"):
        profiles.profile_prefill(Profiled(), [7], tmp_path)
    server = Profiled()
    with pytest.raises(measure.MeasureError, match="not a whole prefill"):
        server.request = cached(server.request)  # type: ignore[method-assign]
        profiles.profile_prefill(server, [7], tmp_path)
    assert [path for path, _ in server.asked] == ["/start_profile", "/generate", "/stop_profile"]


def cached(request: Callable[..., Any]) -> Callable[..., Any]:
    """The answers say that the prompt was in the cache."""

    def asked(path: str, body: Any = None) -> Any:
        answer = request(path, body)
        if path == "/generate":
            answer["meta_info"]["cached_tokens"] = 5
        return answer

    return asked


def test_the_servers_request_is_one_that_sglang_knows() -> None:
    """Read, not imported, which would take long."""
    (folder,) = importlib.import_module("sglang").__path__
    tree = ast.parse((Path(folder) / "srt/managers/io_struct.py").read_text())
    (asked,) = (
        one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "ProfileReq"
    )
    known = {ast.unparse(one.target) for one in asked.body if isinstance(one, ast.AnnAssign)}
    assert {"output_dir", "num_steps", "activities", "with_stack", "record_shapes"} <= known


@pytest.mark.parametrize(
    ("late", "paths"),
    [(0.25, ["/start_profile"]), (None, ["/start_profile", "/stop_profile"])],
)
def test_a_profile_that_outlasts_an_answer_is_an_error(
    late: float | None, paths: list[str], streamed: list[int], tmp_path: Path
) -> None:
    """Of two answers, one ends half a second after the other. What goes on is stopped."""
    server = Profiled(late)
    with pytest.raises(measure.MeasureError, match="256 tokens ended before 12 steps were seen"):
        profiles.profile(server, [[7], [8]], tmp_path)
    assert [path for path, _ in server.asked] == paths and list(tmp_path.iterdir()) == []


def test_a_server_without_profiles_says_so(streamed: list[int], tmp_path: Path) -> None:
    why = "/start_profile: HTTP 500: Internal Server Error; see ours.log"
    with pytest.raises(measure.MeasureError, match=why):
        profiles.profile(Profiled(refuses=True), [[7]], tmp_path)
    assert streamed == [profiles.TOKENS + 1]  # the batch has ended: the next server works alone
