"""The acceptance run's own machinery, and its parts as far as a CPU goes."""

import importlib
import importlib.metadata
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from serving import Reply, Server
from sglang_dsv4.config import DSV4Config

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
acceptance = importlib.import_module("gpu_acceptance")
checks = importlib.import_module("gpu_checks")
serving_parts = importlib.import_module("gpu_serving")
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
    for name in ("_says_who_serves", "_answers", "_paths", "_dummy_paths", "step_ms"):
        monkeypatch.setattr(serving_parts, name, lambda *_: 0.0)
    monkeypatch.setattr(serving_parts, "_long_prompt", lambda _: [1])
    monkeypatch.setattr(Server, "generate", lambda *_: reply("a"))
    monkeypatch.setattr(Server, "stop", lambda _: None)
    assert serving_parts.nano(run)["ok"] and serving_parts.dummy(run)["ok"]
    assert [command[1:3] for command in commands] == [["-m", "sglang.launch_server"]] * 3
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


def test_launches_of_a_layer_are_a_difference() -> None:
    counted = profile_part.Counted
    more = counted({"a": 3.0, "b": 1.0}, {"a": 30.0, "b": 5.0})
    less = counted({"a": 1.0, "b": 1.0}, {"a": 10.0, "b": 5.0})
    assert (more - less) == counted({"a": 2.0}, {"a": 20.0})
