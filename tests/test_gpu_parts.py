"""What parts of the acceptance run would do on a GPU, as far as that shows without one."""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_dsv4 import cli, cli_bench
from sglang_dsv4.backends import Machine

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
acceptance = importlib.import_module("gpu_acceptance")
checks = importlib.import_module("gpu_checks")
variants = importlib.import_module("bench_variants")
serving_parts = importlib.import_module("gpu_serving")
profile_part = importlib.import_module("gpu_profile")

OURS = {"routed_experts": "reference", "routed_experts_fp4": "triton", "linear_fp8": "triton"}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of a part, instead of running them: all exit with 2."""
    found: list[list[str]] = []

    def command(_: Any, name: str, given: Sequence[str], *__: Any, **___: Any) -> int:
        found.append(list(given))
        return 2

    monkeypatch.setattr(acceptance.Run, "command", command)
    return found


def test_kernel_tests_leave_out_what_compiles_for_minutes(
    commands: list[list[str]], tmp_path: Path
) -> None:
    for device in ("cuda", "cpu"):
        checks.kernels(acceptance.Run(device, tmp_path))
    for one in commands:
        chosen = one[one.index("-k") + 1]
        assert all(f"not {name}" in chosen for name in ("flashinfer", "marlin", "humming"))


def test_the_roofs_command_is_one_that_bench_takes_on_a_gpu(
    commands: list[list[str]], tmp_path: Path
) -> None:
    assert not checks.roof(acceptance.Run("cuda", tmp_path))["ok"]
    ((_, _, _, *given),) = commands
    arguments = cli._parser().parse_args(given)
    cli_bench.check(arguments, Machine("cuda", "H200", (9, 0)))
    assert (given[0], arguments.preset, arguments.format) == ("bench", "flash", "mxfp4")
    assert (arguments.batch, arguments.context, arguments.json) == ([1, 16, 64], 1024, True)
    assert {"flashinfer", "marlin", "humming"} <= set(arguments.without)


def test_the_prefill_is_of_one_prompt_without_a_cached_prefix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(profile_part, "by_layer", lambda _, sizes: given.extend(sizes))
    for device in ("cuda", "cpu"):
        profile_part.prefill_part(acceptance.Run(device, tmp_path))
    assert [one.new for one in given] == [1024, 8192, 64]
    assert {(one.requests, one.context) for one in given} == {(1, 0)}


class Told(serving_parts.Server):  # type: ignore[misc,name-defined]
    """A server that does not run, and says what it is made to say."""

    def request(self, path: str, body: Any = None) -> Any:
        return {"internal_states": [{"sglang_dsv4": {"ops": OURS}, "memory_usage": {}}]}


@pytest.mark.parametrize("shape", serving_parts.SHAPES)
@pytest.mark.parametrize(
    ("device", "variant", "memory", "ok"),
    [
        ("cuda", "ours-mxfp4", "ours-mxfp4", True),
        ("cuda", "ours-mxfp4", "ours-bf16", False),  # experts were dequantised
        ("cuda", "ours-mxfp4", None, False),  # nobody told
        ("cuda", "ours-bf16", "ours-mxfp4", False),
        ("cuda", "ours-nvfp4", "ours-mxfp4", False),
        ("cpu", "ours-mxfp4", None, True),
        ("cpu", "ours-bf16", None, False),
    ],
)
def test_dummies_are_served_in_the_formats_of_the_release(
    shape: str, device: str, variant: str, memory: str | None, ok: bool, tmp_path: Path
) -> None:
    """By what config.json claims, and on a GPU by what the weights take."""
    preset, changes = serving_parts.SHAPES[shape]
    raw = serving_parts.shipped_config(preset, "bfloat16") | changes
    variants.write_folder(tmp_path, raw, variants.VARIANTS[variant])
    log, found = tmp_path / "log", serving_parts.Checks()
    taken = 0 if memory is None else int(variants.weight_bytes(raw, variants.VARIANTS[memory]))
    log.write_text(f"bench_server: weights take {taken} bytes\n" if taken else "")
    server = Told(tmp_path, log)
    serving_parts._says_what_is_served(found, server, acceptance.Run(device, tmp_path), shape)
    ((name, status, said),) = found.rows[1:]
    assert (name, status == "ok") == (f"{shape}: formats", ok)
    if ok:
        assert "MXFP4 experts, FP8 matrices" in said
        assert ("by triton" in said) == (device == "cuda") and "by " in said


def test_dummies_are_written_as_the_release_is_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the caller's switches are."""
    servers: list[Any] = []
    for name in ("_says_who_serves", "_says_what_is_served", "_dummy_paths", "step_ms"):
        monkeypatch.setattr(serving_parts, name, lambda *_: 0.0)
    monkeypatch.setattr(serving_parts, "started", lambda server: servers.append(server) or 0.0)
    monkeypatch.setattr(serving_parts.Server, "stop", lambda _: None)
    assert serving_parts.dummy(acceptance.Run("cuda", tmp_path))["ok"]
    for server in servers:
        raw = json.loads((server.checkpoint / "config.json").read_text())
        claims = raw["quantization_config"]["quant_method"], raw["expert_dtype"]
        assert claims == ("fp8", "fp4") and server.options["--device"] == "cuda"
        assert server.env["SGLANG_DSV4_PRECISION"] == ""
    assert len(servers) == len(serving_parts.SHAPES)
