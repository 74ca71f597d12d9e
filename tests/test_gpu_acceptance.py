"""The acceptance run's own machinery, and its parts as far as a CPU goes."""

import importlib
import importlib.metadata
import inspect
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import nano
from serving import Reply, Server
from sglang_dsv4.config import DSV4Config

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
acceptance = importlib.import_module("gpu_acceptance")
checks = importlib.import_module("gpu_checks")
serving_parts = importlib.import_module("gpu_serving")
load_part = importlib.import_module("gpu_load")
load_cases = importlib.import_module("gpu_load_cases")
profile_part = importlib.import_module("gpu_profile")


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return acceptance.Run("cpu", tmp_path)


# ---- the machinery ----


def test_every_part_has_a_function_that_takes_a_run() -> None:
    for part in acceptance.PARTS.values():
        module, _, name = part.function.partition(":")
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert next(iter(parameters)) == "run"
        assert part.limit <= 600


def test_help_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        acceptance.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in acceptance.PARTS)
    assert "--install /tmp/site" in text and "exit codes" in text


def test_parts_are_chosen_by_name() -> None:
    assert acceptance.chosen_parts("nano, graph") == ["nano", "graph"]
    for wrong in ("", "nano,gone"):
        with pytest.raises(Exception, match="choose from kernels"):
            acceptance.chosen_parts(wrong)


def test_a_part_that_takes_too_long_is_ended_and_the_next_one_runs(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"kernels": {"ok": True, "table": [["n"], [3]], "status": "ok", "seconds": 1.0}}
    one = acceptance.run_part

    def run_part(name: str, given: Any, limit: float) -> dict[str, Any]:
        return results.get(name) or one(name, given, 0.2)

    monkeypatch.setattr(acceptance, "run_part", run_part)
    assert acceptance.run_all(run, ["graph", "kernels"], None) == 1
    summary = json.loads((run.out / "summary.json").read_text())
    assert [part["status"] for part in summary.values()] == ["out of time", "ok"]
    assert "graph" in capsys.readouterr().out


def test_parts_run_at_once_and_those_that_tell_times_alone(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running: set[str] = set()
    beside: dict[str, set[str]] = {}
    met = threading.Barrier(2, timeout=20)

    def run_part(name: str, given: Any, limit: float) -> dict[str, Any]:
        running.add(name)
        if name in ("graph", "kernels"):
            met.wait()  # breaks unless both run
        beside[name] = running - {name}
        time.sleep(0.05)
        running.remove(name)
        return {"status": "ok", "seconds": 0.1, "table": [["of"], [name]]}

    monkeypatch.setattr(acceptance, "run_part", run_part)
    names = ["profile", "graph", "timings", "kernels"]
    assert acceptance.run_all(run, names, None, at_once=2) == 0
    assert beside["profile"] == beside["timings"] == set()
    assert list(beside)[2:] == ["profile", "timings"]
    summary = json.loads((run.out / "summary.json").read_text())
    assert list(summary) == names and capsys.readouterr().out.count("ok") == 2 * len(names)


def test_no_part_begins_after_the_limit_of_all(run: Any) -> None:
    assert acceptance.run_all(run, ["kernels"], 0.5) == 1
    assert not (run.out / "kernels.log").exists()


def test_tables_line_up() -> None:
    table = [["case", "us"], ["a long name", 3.5], ["b", 120]]
    assert acceptance.rendered(table).splitlines() == [
        "case         us", "a long name  3.5", "b            120",
    ]  # fmt: skip
    assert acceptance.rendered([]) == ""


def test_install_makes_what_sglang_looks_for(tmp_path: Path) -> None:
    """The installed shape, and a distribution with the entry point and the pin; twice is fine."""
    for _ in range(2):
        assert acceptance.main(["--install", str(tmp_path)]) == 0
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    ours = importlib.metadata.distribution("sglang-dsv4")
    assert (found.metadata["Name"], found.version) == ("sglang-dsv4", ours.version)
    (plugin,) = found.entry_points.select(group="sglang.srt.plugins")
    assert plugin.value == "sglang_dsv4.plugin:register"
    assert any(line.startswith("sglang==") for line in found.requires or [])
    for file in ("model.py", "attention/backend.py", "moe/layer.py", "served/deepseek_v4.py",
                 "nano/config.json", "py.typed"):  # fmt: skip
        assert (tmp_path / "sglang_dsv4" / file).is_file(), file
    assert list((tmp_path / "sglang_dsv4" / "__pycache__").glob("model.*.pyc"))


# ---- parts ----


def test_a_pytest_run_is_counted(run: Any) -> None:
    file = run.out / "test_some.py"
    file.write_text(
        "import pytest\ndef test_right(): pass\ndef test_wrong(): assert 0\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    result = checks.tested(run, "some", str(file))
    assert not result["ok"] and result["table"][:2] == [["tests", "failed", "skipped"], [3, 1, 1]]
    assert [name.rpartition("::")[2] for name in result["failed"]] == ["test_wrong"]
    assert checks.tested(run, "some", str(file), "-k", "right")["ok"]
    assert not checks.tested(run, "some", str(run.out / "gone.py"))["ok"]


def test_what_the_sanitizer_found_is_written_by_one_thread(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of tests run beside each other, and each row comes once."""
    dumps, writers = json.dumps, set()

    def watched(rows: Any) -> str:
        writers.add(threading.current_thread())
        return dumps(rows)

    monkeypatch.setattr(checks.shutil, "which", lambda name: sys.executable)
    monkeypatch.setattr(type(run), "command", lambda *_, **__: 0)
    monkeypatch.setattr(checks.json, "dumps", watched)
    result = checks.sanitizer(run)
    count = len(checks.SANITIZER_TOOLS) * len(checks.SANITIZER_TESTS)
    assert result["ok"] and len({tuple(row) for row in result["table"][1:]}) == count
    assert json.loads((run.out / "sanitizer_rows.json").read_text()) == result["table"]
    assert writers == {threading.main_thread()}


def test_timings_have_cases_for_every_op() -> None:
    from sglang_dsv4.backends import PROVIDERS

    timed = importlib.import_module("kernel_timings")
    cases = timed.chosen([], ["flashinfer", "8192 tokens"])
    assert {name.split()[0] for name in cases} == set(PROVIDERS)
    some = timed.chosen(["flashmla", " 32 tokens"], ["pro"])
    assert some and all("flashmla" in name and "pro" not in name for name in some)


def reply(tokens: str, logprobs: float = -1.0, gap: float = 2.0) -> Reply:
    count = len(tokens)
    ids = tuple(map(ord, tokens))
    return Reply(ids, (logprobs,) * count, (gap,) * count, cached=0, meta={})


@pytest.mark.parametrize(
    ("one", "other", "ok", "alike"),
    [
        (reply("abc"), reply("abc"), True, 3),
        (reply("abc"), reply("abc", logprobs=-1.2), True, 3),
        (reply("abc"), reply("abc", logprobs=-1.5), False, 3),
        (reply("abc"), reply("abd"), False, 2),
        (reply("abc"), reply("abd", gap=0.1), True, 2),
        (reply("abc"), reply("xbc", gap=0.1), True, 0),
    ],
)
def test_only_near_ties_let_tokens_part(one: Reply, other: Reply, ok: bool, alike: int) -> None:
    result = serving_parts.compared(one, other)
    assert (result["ok"], result["alike"]) == (ok, alike)


def test_servers_start_as_users_start_them(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is served in a run: a start is measured, and a GPU stands no fork."""
    commands = []

    def started(server: Server) -> float:
        commands.append(server.command())
        return 0.0

    monkeypatch.setattr(serving_parts, "started", started)
    named = ("_says_who_serves", "_says_what_is_served", "_answers", "_paths", "_dummy_paths")
    for name in (*named, "step_ms"):
        monkeypatch.setattr(serving_parts, name, lambda *_: 0.0)
    monkeypatch.setattr(serving_parts, "_long_prompt", lambda _: [1])
    monkeypatch.setattr(Server, "generate", lambda *_: reply("a"))
    monkeypatch.setattr(Server, "stop", lambda _: None)
    assert serving_parts.nano(run)["ok"] and serving_parts.dummy(run)["ok"]
    assert [command[1:3] for command in commands[:2]] == [["-m", "sglang.launch_server"]] * 2
    assert Path(commands[2][1]).name == "bench_server.py"  # as that, but for its dummies
    options = [dict(zip(command, command[1:], strict=False)) for command in commands]
    assert [one["--device"] for one in options] == ["cpu"] * 3
    assert options[0]["--max-running-requests"] == "32"
    assert options[1]["--chunked-prefill-size"] == "512"
    assert options[2]["--load-format"] == "dummy"


@pytest.mark.parametrize("name", [*serving_parts.SHAPES, *serving_parts.SMALL])
def test_shapes_have_configs(name: str) -> None:
    preset, changes = {**serving_parts.SHAPES, **serving_parts.SMALL}[name]
    config = DSV4Config.from_dict(serving_parts.shipped_config(preset, "bfloat16") | changes)
    assert {kind.name for kind in config.layer_kinds} >= {"CSA", "HCA"}
    layers = {"flash, 4 layers": 4, "pro, 2 layers": 2}.get(name, 7)
    assert config.num_hidden_layers == layers


def test_a_prompt_is_one_request_with_all_its_tokens_new(run: Any) -> None:
    ratios, size = [0, 4, 128], profile_part.Size("300 tokens", 1, 0, 300, 1)
    step = profile_part.made_step(run, ratios, 0, size)
    assert step.batch.positions.tolist() == list(range(300)) and step.ids.shape == (300,)
    logits = step.run()
    assert logits.shape == (300, 1024) and bool(logits.isfinite().all())
    # Its first token's, alone, are the same: it sees nothing that comes after it.
    alone = profile_part.made_step(run, ratios, 0, profile_part.Size("1 token", 1, 0, 1, 1))
    alone.ids.copy_(step.ids[:1])
    torch.testing.assert_close(alone.run()[0], logits[0], atol=0.02, rtol=0.02)


def test_the_prefill_is_counted_by_layer(run: Any) -> None:
    table = profile_part.prefill_part(run)["table"]
    kinds = [row[0] for row in table[1:6]]
    assert kinds[:4] == ["SWA, hash-routed", "SWA, scored", "CSA, scored", "HCA, scored"]
    assert {row[1] for row in table[1:6]} == {"64 tokens"} and all(row[2] > 0 for row in table[1:6])
    listed = [row for row in table[6:] if not row[0].startswith("--")]
    assert listed and table[6][0] == "-- SWA, hash-routed, 64 tokens"
    of_first = listed[: [row[0][:2] for row in table[7:]].index("--")]
    assert [row[3] for row in of_first] == sorted((row[3] for row in of_first), reverse=True)


def test_the_roof_has_a_row_for_each_op(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = checks.roof(run)
    assert result["ok"] and result["table"][1][1] == "whole step"
    ops = {row[1].split()[0] for row in result["table"][3:]}
    assert {"routed_experts", "sparse_attention", "mhc_post_pre_norm", "linear_fp32"} <= ops
    assert all(row[6].endswith("%") for row in result["table"][1:])
    monkeypatch.setattr(type(run), "command", lambda *_, **__: 2)
    assert not checks.roof(run)["ok"]


def test_launches_of_a_layer_are_a_difference() -> None:
    counted = profile_part.Counted
    more = counted({"a": 3.0, "b": 1.0}, {"a": 30.0, "b": 5.0})
    less = counted({"a": 1.0, "b": 1.0}, {"a": 10.0, "b": 5.0})
    assert (more - less) == counted({"a": 2.0}, {"a": 20.0})


# ---- the part `load` ----


def test_the_load_is_a_function_of_its_seed() -> None:
    asked = load_cases.cases(nano, 28, seed=1)
    assert asked == load_cases.cases(nano, 28, seed=1) != load_cases.cases(nano, 28, seed=2)
    assert len(set(asked)) == 28 and all(1 <= case.count <= 64 for case in asked)
    kinds = {case.kind for case in asked}
    assert kinds == {"fact", "chat", "recitation", "needle", "shared prefix", load_cases.BURST}
    shared = [case.prompt for case in asked if case.kind == "shared prefix"]
    assert len({prompt[:129] for prompt in shared}) < len(shared)  # beginnings of the same story
    given = load_cases.jobs(asked, 280, 20, seed=2)
    assert given == load_cases.jobs(asked, 280, 20, seed=2) != load_cases.jobs(asked, 280, 20, 3)
    assert {job.case for job in given} == set(range(28)) and len(given) == 280
    hows = [job.how for job in given if job.how]
    assert hows.count("client") == hows.count("abort_request") == 14
    assert all(1 <= job.stop <= asked[job.case].count for job in given if job.how)
    burst = [at for at, job in enumerate(given) if asked[job.case].kind == load_cases.BURST]
    assert burst == list(range(130, 150))
    for job in given[130:150]:  # let in with a page, and soon in need of another
        assert len(asked[job.case].prompt) < 256 < len(asked[job.case].prompt) + 64


def test_pages_count_with_all_that_comes_before_them() -> None:
    one, other = [1] * 512, [1] * 256 + [2] * 300
    assert len(load_cases.pages([one, other, one[:300], one[:255]])) == 3
    assert len(load_cases.pages([[3, *other], other])) == 4


@pytest.mark.parametrize("length", [1, 700])
def test_the_far_prompt_ends_with_a_question(length: int) -> None:
    prompt = load_cases.far_prompt(nano, length)
    assert len(prompt) == length and prompt[-1] == load_cases.far_prompt(nano, 2000)[-1]


@pytest.mark.parametrize(
    ("stop", "said", "gap", "kind"),
    [
        (0, reply("abcd"), 2.0, "equal"),
        (0, reply("abxy"), 0.5, "ties"),
        (0, reply("abxy", gap=0.1), 0.7, "wrong"),  # only the idle server's gap excuses
        (0, reply("abc"), 0.1, "wrong"),  # too short
        (0, "HTTPError: 500", 0.1, "wrong"),
        (2, reply("ab"), 2.0, "equal"),  # aborted
        (2, reply("abcdxyz"), 2.0, "equal"),  # went on beyond what is known
        (2, reply("ax"), 2.0, "wrong"),
        (2, reply("ax"), 0.5, "ties"),
        (2, reply("a"), 0.5, "wrong"),  # ended before it was aborted
    ],
)
def test_only_the_idle_servers_near_ties_excuse(
    stop: int, said: Reply | str, gap: float, kind: str
) -> None:
    tally = load_cases.Tally()
    job = load_cases.Job(0, "client" if stop else "", stop)
    tally.add(load_cases.Case("fact", (1,), 4), job, said, reply("abcd", gap=gap))
    found = {"equal": tally.equal, "ties": len(tally.ties), "wrong": len(tally.wrong)}
    assert found[kind] == 1 and tally.answers == 1
    if kind == "ties":
        assert found["wrong"] == 0 and tally.smallest_gap() == gap
        assert tally.ties[0]["step"] == tally.checked == len(set("ab") & set(map(chr, said.tokens)))


def test_differences_before_a_parting_are_told() -> None:
    tally, case = load_cases.Tally(), load_cases.Case("fact", (1,), 4)
    alone, said = reply("abcd"), reply("abxd", logprobs=-1.25)
    tally.add(case, load_cases.Job(0), said, alone)
    assert (tally.logprob, tally.checked, tally.tokens) == (0.25, 2, 4)
    assert load_cases.spread([reply("abcd", -1.25), alone], [alone] * 2) == {
        "ok": True, "answers": 2, "alike": 2, "logprob": 0.25
    }  # fmt: skip
    assert not load_cases.spread([said], [alone])["ok"]
    assert load_cases.identical([alone], [reply("abcd")])
    for other in ([], [said], [reply("abcd", -1.0000001)], [reply("abcd", gap=2.0000001)]):
        assert not load_cases.identical([alone], other)


class Streaming(BaseHTTPRequestHandler):
    """Says one token more with each event, until it is aborted; counts what it was asked."""

    aborted: list[str] = []
    events = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if self.path == "/abort_request":
            self.aborted.append(body["rid"])
            return
        for count in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            end = {"type": "abort"} if body["rid"] in self.aborted else None
            meta = {
                "output_token_logprobs": [[-1.0, 7, None]] * count,
                "output_top_logprobs": [[[-1.0, 7, None], [-3.0, 8, None]]] * count,
                "finish_reason": end,
            }
            event = {"output_ids": [7] * count, "meta_info": meta}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            type(self).events += 1
            time.sleep(0.002)
            if end:
                return

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("how", ["client", "abort_request"])
def test_a_stream_is_cut_short(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streaming, "aborted", [])
    monkeypatch.setattr(Streaming, "events", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Streaming) as listening:
        threading.Thread(target=listening.serve_forever).start()
        server = Server(Path("none"), Path("none"))
        server.url = f"http://127.0.0.1:{listening.server_port}"
        case, job = load_cases.Case("fact", (1, 2), 4), load_cases.Job(0, how, 3)
        said = load_part.cut_short(server, case, job, "one.")
        listening.shutdown()
    assert len(said.tokens) >= 3 and set(said.gaps) == {2.0} and said.cached == 0
    assert Streaming.events < case.count + load_part.RUNS_ON
    if how == "client":
        assert len(said.tokens) == 3 and not Streaming.aborted
    else:
        assert Streaming.aborted == ["one."] and said.meta["finish_reason"] == {"type": "abort"}


def test_one_failure_of_the_load_hides_no_other(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its server is started as users start it, with room for the long prompt."""
    servers, ran = [], []

    def fail(shown: Any) -> None:
        ran.append(shown)
        raise ValueError("lost")

    monkeypatch.setattr(load_part, "started", lambda server: servers.append(server) or 0.0)
    monkeypatch.setattr(load_part, "_ways", lambda *_: None)
    monkeypatch.setattr(serving_parts, "_says_who_serves", lambda *_: None)
    monkeypatch.setattr(Server, "stop", lambda _: None)
    for name in ("mixed", "repeated", "spreads", "far"):
        monkeypatch.setattr(load_part.Load, name, fail)
    result = load_part.load(run)
    assert not result["ok"] and len(ran) == 4
    assert sum("ValueError: lost" in str(row) for row in result["table"]) == 4
    (server,) = servers
    command = server.command()
    options = dict(zip(command, command[1:], strict=False))
    assert command[1:3] == ["-m", "sglang.launch_server"] and options["--device"] == "cpu"
    assert int(options["--context-length"]) >= load_part.ON_CPU.far + 48
    assert "--disable-radix-cache" not in command
    for scale in (load_part.ON_GPU, load_part.ON_CPU):
        assert scale.far + 48 < scale.pool
