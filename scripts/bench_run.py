"""One call of bench_vs_builtin.py: starts servers, measures each in turn, writes what it finds."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bench_host as host
import bench_measure as measure
import bench_profile
import bench_report
import bench_traffic as traffic
import bench_variants as plan
from bench_variants import Point, Variant

import serving

SCRIPTS = Path(__file__).resolve().parent
LEAST_START = 30  # seconds: with less left, no server is started
NO_TIME = "no time left to start it"
# What is found at a point: metric, unit.
METRICS = {
    "decode": (("step", "ms"),),
    "prefill": (("first token", "ms"),),
    "kernels": (("device busy", "ms"), ("launches", "a step")),
    "prefill-kernels": (("device busy", "ms"), ("launches", "a prompt")),
}


def turns(
    names: Iterable[str], points: Sequence[Point], numbers: Iterable[int]
) -> Iterator[tuple[int, Point, str]]:
    """Number, point and name: every point on each in turn, in the other order each round."""
    for number in numbers:
        order = list(names)[:: 1 if number % 2 else -1]
        yield from ((number, point, name) for point in points for name in order)


class Bench:
    """One call: its servers, its results, and the file in which they are from the first on."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.limit
        self.raw = plan.raw_config(arguments.preset, arguments.layers)
        self.points = plan.points(
            *(arguments.measure, arguments.batch, arguments.context, arguments.prefill),
            arguments.concurrency,
        )
        now = datetime.now(UTC)
        self.work = arguments.out / f"{arguments.preset}_{now:%Y%m%d_%H%M%S}"
        self.work.mkdir(parents=True)
        self.file = arguments.out / f"bench_{self.work.name}.json"
        self.result: dict[str, Any] = {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "date": now.isoformat(timespec="seconds"),
            "versions": host.versions(),
            "device": host.device(arguments.device),
            "preset": arguments.preset,
            "layers": self.raw["num_hidden_layers"],
            "rounds": arguments.rounds,
            "serving_rounds": arguments.serving_rounds,
            "variants": {},
            "measured": [],
        }

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def save(self) -> None:
        self.file.write_text(json.dumps(self.result, indent=1) + "\n")

    def add(self, variant: str, key: Mapping[str, Any], number: int, **found: Any) -> None:
        """One measurement, or why there is none. number: of the round, 0 for the warm-up."""
        row = {**key, "variant": variant, "round": number, **found}
        self.result["measured"].append(row)
        self.save()
        print(bench_report.one_line(row), flush=True)

    # ---- servers ----

    def pool(self) -> int:
        least = 1 << 14 if self.arguments.device == "cpu" else plan.LEAST_POOL
        return plan.pool_tokens(self.points, self.arguments.steps, least)

    def options(self) -> dict[str, str | None]:
        """The tests' options are taken out: everything is SGLang's default but what is here."""
        named: dict[str, str | None] = dict.fromkeys(serving.DEFAULT_OPTIONS)
        named |= {
            "--load-format": "dummy",
            "--max-total-tokens": str(self.pool()),
            "--context-length": str(plan.CONTEXT),
        }
        if self.arguments.device == "cpu":
            named |= {"--device": "cpu", "--context-length": "4096", "--sleep-on-idle": ""}
            named |= {"--swa-full-tokens-ratio": "0.5"}
        return named

    def made(self, name: str, log: str, **environment: str) -> measure.Server:
        variant = plan.VARIANTS[name]
        folder = self.work / name
        plan.write_folder(folder, self.raw, variant)
        changed = plan.environment(variant) | environment
        return measure.Server(folder, self.work / log, options=self.options(), env=changed)

    def too_late(self, name: str) -> bool:
        """Whether no time is left to start a server, which its row then says."""
        if self.left() >= LEAST_START:
            return False
        about = self.result["variants"].setdefault(name, {})
        about["status"] = "failed"
        about["why"] = "; ".join(filter(None, [about.get("why"), NO_TIME]))
        self.save()
        print(f"{name}: {NO_TIME}", flush=True)
        return True

    def start(self, name: str, server: measure.Server) -> float | None:
        """Seconds until it answers; None, and a row that says why, where it does not."""
        limit = min(self.arguments.start_limit, self.left())
        server.start_limit = limit
        about = self.result["variants"].setdefault(name, {})
        command = [part.replace(f"{SCRIPTS.parent}/", "") for part in server.command()]
        about |= {"command": command, "environment": server.env}
        begin, clock = time.monotonic(), time.time()
        try:
            server.__enter__()
        except (RuntimeError, OSError):
            seconds = time.monotonic() - begin
            late = f"did not answer within {limit:.0f} s: " if seconds >= limit else ""
            about |= host.failure(server.tail(20_000), late)
            print(f"{name}: failed: {about['why']}", flush=True)
        else:
            about |= {"status": "ok", "ready_s": round(time.monotonic() - begin, 1)}
            print(f"{name}: ready after {about['ready_s']} s", flush=True)
        about["stages"] = measure.stages(server.log.read_text(errors="replace"), clock)
        return about.get("ready_s")

    def ready(self, name: str) -> None:
        """Two starts of a variant with compilation caches of its own: empty, then full."""
        key = {"kind": "ready", "batch": 0, "context": 0, "unit": "s", "better": "less"}
        with tempfile.TemporaryDirectory() as home:
            for what in ("cold", "warm"):
                key |= {"what": what, "metric": "ready"}
                if self.too_late(name):
                    self.add(name, key, 1, error=NO_TIME)
                    continue
                self.result["variants"][name] = {"started_with": [name]}
                server = self.made(name, f"{name}_{what}.log", **host.own_caches(Path(home)))
                try:
                    seconds = self.start(name, server)
                    self.save()
                    if seconds is None:
                        self.add(name, key, 1, error=self.result["variants"][name]["why"])
                        return
                    self.check(name, server)
                    self.add(name, key, 1, value=seconds)
                finally:
                    server.stop()

    def check(self, name: str, server: measure.Server) -> None:
        """Who serves, whether answers are finite, what memory is taken, what the log says."""
        variant, about = plan.VARIANTS[name], self.result["variants"][name]
        checks: dict[str, tuple[bool, str]] = {}
        try:
            info = server.request("/server_info")
            checks["served"] = measure.served(info, variant.ours)
            prompt = measure.random_ids("check", 300, self.raw["vocab_size"])
            checks["finite"] = measure.finite(server, prompt)
            log = server.log.read_text(errors="replace")
            about["memory"] = measure.memory(info, log)
            alone = len(about["started_with"]) == 1
            checks["weights"] = self.weights_as_planned(variant, about["memory"], alone)
            checks["dummies"] = ("dummy weights are filled" in log, "by bench_server.py")
        except Exception as error:  # a server that broke is a row, too
            checks["answers"] = (False, f"{type(error).__name__}: {error}"[:300])
        error_line = measure.log_error(server.log.read_text(errors="replace"))
        checks["log"] = (error_line is None, error_line or "no error")
        about["checks"] = {key: list(value) for key, value in checks.items()}
        if not all(right for right, _ in checks.values()):
            about["status"] = "suspect"
            wrong = [f"{key}: {found}" for key, (right, found) in checks.items() if not right]
            about["why"] = "; ".join(wrong)
            print(f"{name}: {about['why']}", flush=True)
        self.save()

    def weights_as_planned(
        self, variant: Variant, memory: Mapping[str, Any], alone: bool
    ) -> tuple[bool, str]:
        """That experts lie in memory in the format that the variant's name says.

        alone: whether no other server was starting then. What neighbours took can be in a figure
        that SGLang made of free memory, which then tells only whether there is enough.
        """
        held, planned = memory["weights"], plan.weight_bytes(self.raw, variant) / 2**30
        if not held or self.arguments.device == "cpu":  # whose memory SGLang cannot tell apart
            return True, f"not told; about {planned:.1f} GB expected"
        told = f"{held:.1f} GB, about {planned:.1f} expected"
        own = alone or "weights" not in memory["by_free_memory"]
        if held < 0.7 * planned or (own and held > 1.15 * planned + 1):
            return False, told
        return True, told if own else f"{told}, with what neighbours took meanwhile"

    # ---- measurements ----

    def wave(self, names: Sequence[str]) -> None:
        """Start these at the same moment, measure every point on each in turn, stop them."""
        names = [name for name in names if not self.too_late(name)]
        if not names:
            return
        running = {name: self.made(name, f"{name}.log") for name in names}
        self.result["variants"] |= {name: {"started_with": names} for name in names}
        with ThreadPoolExecutor(len(names)) as pool:
            try:
                started = list(pool.map(self.start, names, list(running.values())))
                self.save()
                for name, seconds in zip(names, started, strict=True):
                    if seconds is None:
                        running.pop(name).stop()
                for name in running:
                    self.result["variants"][name]["beside"] = list(running)
                self.rounds(running)
                self.traffic(running)
                self.kernels(running)
                for name, server in running.items():
                    self.check(name, server)
            finally:  # before the pool waits for those that still start
                for server in running.values():
                    server.stop()

    def rounds(self, running: Mapping[str, measure.Server]) -> None:
        """Round 0 compiles, tunes and fills the prefix cache, and counts for nothing."""
        quick = [point for point in self.points if point.kind in ("decode", "prefill")]
        for number, point, name in turns(running, quick, range(self.arguments.rounds + 1)):
            self.one(name, running[name], point, number)

    def kernels(self, running: Mapping[str, measure.Server]) -> None:
        """Profiles of each server in turn. After all else: a profiler may leave a server slower."""
        profiled = [point for point in self.points if point.kind.endswith("kernels")]
        numbers = range(1, max(1, self.arguments.rounds // 2) + 1)
        for number, point, name in turns(running, profiled, numbers):
            self.one(name, running[name], point, number)

    def one(self, name: str, server: measure.Server, point: Point, number: int) -> None:
        keys = [
            {**point.key, "metric": metric, "unit": unit, "better": "less"}
            for metric, unit in METRICS[point.kind]
        ]
        found: list[dict[str, Any]] = [{"error": "no time left"}] * len(keys)
        if self.left() >= 5:
            try:
                found = self.asked(server, point, number)
            except Exception as error:  # one broken point must not hide the others
                why = f"{type(error).__name__}: {error}"[:300]
                found = [{"error": why}] * len(keys)
        for key, each in zip(keys, found, strict=True):
            self.add(name, key, number, **each)

    def asked(self, server: measure.Server, point: Point, number: int) -> list[dict[str, Any]]:
        """What is found for each of METRICS."""

        def prompt(seed: str) -> list[int]:
            return measure.random_ids(seed, point.context, self.raw["vocab_size"])

        if point.kind == "prefill":
            return [measure.prefill(server, prompt(f"prefill {point.context} {number}"))]
        if point.kind == "prefill-kernels":
            new = prompt(f"profiled {point.context} {number}")
            return self.profiled(bench_profile.profile_prefill(server, new, self.work))
        # The same prompts each time: from the second on a hit.
        prompts = [prompt(f"decode {each}") for each in range(point.batch)]
        if point.kind == "decode":
            return [measure.decode(server, prompts, self.arguments.steps)]
        return self.profiled(bench_profile.profile(server, prompts, self.work))

    @staticmethod
    def profiled(found: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"value": found["busy_ms"], **found}, {"value": found["launches"]}]

    def traffic(self, running: Mapping[str, measure.Server]) -> None:
        """SGLang's own serving benchmark, each data set and concurrency on each server in turn."""
        busy = [point for point in self.points if point.kind == "serving"]
        if not busy or not running:
            return
        runs, numbers = [], range(1, self.arguments.serving_rounds + 1)
        for number, point, name in turns(running, busy, numbers):
            file = self.work / f"serving_{name}_{point.what}_{point.batch}_{number}.jsonl"
            runs.append((name, point, number, file))
        listed = self.work / "runs.json"
        commands = [
            traffic.command_of(running[name], point, number, file)
            for name, point, number, file in runs
        ]
        listed.write_text(json.dumps(commands))
        command = [sys.executable, str(SCRIPTS / "bench_traffic.py"), str(listed)]
        log = self.work / "serving.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=self.work
            )
            try:
                child.wait(max(1.0, self.left() - 10))
            except subprocess.TimeoutExpired:
                pass
            finally:
                child.kill()
                child.wait()
        for name, point, number, file in runs:
            for key, found in traffic.rows_of(point, file, log):
                self.add(name, key, number, **found)
