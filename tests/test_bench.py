"""`sglang-dsv4 bench`: what it notes of a step, bytes that must move, its tables. Times of a CPU
say nothing and are not looked at."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dsv4 import (
    bench_bytes,
    bench_ops,
    bench_step,
    bench_table,
    bench_timer,
    cli_bench,
    precision,
)
from sglang_dsv4.attention.metadata import IndexList
from sglang_dsv4.backends import PROVIDERS, Machine, Ops, choose
from sglang_dsv4.bench_ops import Called
from sglang_dsv4.cli import main
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.graph_safety_step import DecodeStep

BATCH, CONTEXT = 2, 259  # the new token closes a CSA entry
Recorded = tuple[DecodeStep, list[Called]]


@pytest.fixture(scope="module")
def config() -> DSV4Config:
    return bench_step.preset_config("tiny")


@pytest.fixture(scope="module")
def ops() -> Ops:
    return choose(Machine.probe("cpu"))


@pytest.fixture(scope="module")
def recorded(config: DSV4Config, ops: Ops) -> Recorded:
    return bench_ops.record(config, ops, precision.parse(""), BATCH, CONTEXT)


@pytest.fixture(scope="module")
def by_op(recorded: Recorded) -> dict[str, list[Called]]:
    found: dict[str, list[Called]] = {}
    for call in recorded[1]:
        found.setdefault(call.op, []).append(call)
    return found


def test_every_op_that_a_step_calls_is_noted(by_op: dict[str, list[Called]], ops: Ops) -> None:
    """Of a hash-routed SWA layer, a CSA layer and an HCA layer."""
    assert list(by_op) == [op for op in PROVIDERS if op in by_op]  # in the table's order
    unused = {op for op in PROVIDERS if op not in by_op}
    # Of experts in four bits, and of linear weights in FP8 or NVFP4, alone; and before a step.
    assert unused <= {"routed_experts_fp4", "linear_fp8", "linear_fp4", "decode_slots"}
    counts = {op: sum(call.count for call in calls) for op, calls in by_op.items()}
    wanted = {
        "linear_fp32": 9, "rms_norm": 4, "mhc_post_pre_norm": 6, "mhc_post": 1, "mhc_head": 1,
        "build_metadata": 1, "query_norm_rope": 3,
        "kv_norm_rope_store": 3, "compress_csa": 2, "compress_hca": 1, "index_query": 1,
        "select_entries": 1, "csa_index_list": 1, "sparse_attention": 3, "route_scored": 2,
        "route_hashed": 1, "routed_experts": 3, "swiglu": 3,
    }  # fmt: skip
    assert counts == wanted
    labels = [call.label for call in by_op["sparse_attention"]]
    assert labels == ["[2, 8, 512], K 128", "[2, 8, 512], K 136", "[2, 8, 512], K 130"]


def test_the_step_runs_at_its_context_and_spreads_its_tokens(
    recorded: Recorded, by_op: dict[str, list[Called]], config: DSV4Config
) -> None:
    step, _ = recorded
    before = sum(call.count for call in recorded[1])
    logits = step.run()
    assert logits.shape == (BATCH, config.vocab_size) and logits.isfinite().all()
    assert not torch.equal(logits[0], logits[1])
    assert sum(call.count for call in recorded[1]) == before  # noted once
    (listed,) = (one for one in by_op["csa_index_list"])
    assert (listed.arguments["table"].visible == (CONTEXT + 1) // 4).all()
    table = step.batch.page_table
    assert table.unique().numel() == table.numel() == BATCH * 2 and table.min() == 1
    hashed = by_op["route_hashed"][0].arguments["tid2eid"]
    assert hashed.unique().numel() == config.n_routed_experts


def test_bytes_of_ops_that_look_things_up(by_op: dict[str, list[Called]]) -> None:
    """By hand: BF16 rows of 512, FP32 states, int64 indices."""
    row, tokens = 512 * 2, BATCH

    def moved(op: str, place: int = 0) -> int:
        return by_op[op][place].moved

    heads = tokens * 8 * row
    assert moved("sparse_attention") == 2 * heads + tokens * 128 * row
    assert moved("sparse_attention", 1) == 2 * heads + tokens * (128 + 8) * row
    assert moved("sparse_attention", 2) == 2 * heads + tokens * (128 + 2) * row
    assert moved("kv_norm_rope_store") == 2 * tokens * row + row
    state = 4 * 512 * 4
    assert moved("compress_csa") == tokens * (2 * 1024 * 4 + 8 * state + row)
    assert moved("compress_hca") == tokens * (2 * 512 * 4 + 2 * 3 * 512 * 4)
    query, keys = tokens * 16 * 128 * 2, tokens * 65 * 128 * 2
    assert moved("select_entries") == query + tokens * 16 * 4 + keys + tokens * 8 * 8
    lists = tokens * (8 + 128 + 1 + 136 + 1) * 8
    assert moved("csa_index_list") == lists
    # The batch's positions, requests, slots, lengths and pages; lists; plans; 2 segments a token.
    given, lists = 1 + 1 + 1 + 2 + 2, (128 + 1) + (128 + 2 + 1) + 128
    plans, flags = 3 * 8 + 3 + 4 + 2, 8 + 2
    written = 1 + 1  # window_store, visible
    plans -= 1  # hca.request_slots is the batch's
    assert moved("build_metadata") == tokens * (8 * (given + lists + plans + written) + flags)
    experts = by_op["routed_experts"][0]
    used = experts.arguments["experts"].unique().numel()
    assert 2 <= used <= 4
    weights = used * 3 * 64 * 128 * 2
    assert experts.moved == tokens * 128 * 2 + tokens * 2 * 12 + weights + tokens * 128 * 4
    assert moved("route_hashed") == tokens * (8 * 4 + 8 + 2 * 8 + 2 * 12)


def test_bytes_of_other_ops_are_arguments_and_results(by_op: dict[str, list[Called]]) -> None:
    assert by_op["rms_norm"][-1].moved == 2 * BATCH * 128 * 2 + 128 * 2
    first, others = by_op["mhc_post_pre_norm"]  # before the first sub-layer nothing is written
    assert (first.label, others.label) == ("[2, 4, 128]", "[2, 128]")
    assert (first.count, others.count) == (1, 5)
    mixes, states = BATCH * (4 + 16) * 4, BATCH * 128 * 2
    site = (24 * 4 * 128 + 24 + 3) * 4 + 128 * 2
    assert first.moved == (4 + 4 + 1) * states + site + mixes
    assert others.moved == first.moved + states + mixes
    assert by_op["swiglu"][0].moved == BATCH * 3 * 64 * 4
    pair = IndexList(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    assert bench_bytes.size((pair, None, 3.0)) == 8 * 8
    assert bench_bytes.size(torch.nn.Linear(3, 2, bias=False)) == 24
    assert bench_bytes.size(torch.zeros(4)[None].expand(8, 4)) == 128


def test_bytes_follow_the_indices(by_op: dict[str, list[Called]]) -> None:
    """Half the valid rows, and one expert for all, move so much less."""
    attention = by_op["sparse_attention"][0]
    keys = attention.arguments["keys"]
    short = IndexList(keys.rows, keys.lengths // 2)
    result = attention.arguments["q"]
    given = dict(attention.arguments) | {"keys": short}
    saved = BATCH * 64 * 512 * 2
    assert bench_bytes.moved("sparse_attention", given, result) == attention.moved - saved
    experts = by_op["routed_experts"][0]
    chosen = torch.zeros_like(experts.arguments["experts"])
    given = dict(experts.arguments) | {"experts": chosen}
    weights = 3 * 64 * 128 * 2
    rest = BATCH * 128 * 2 + BATCH * 2 * 12
    assert bench_bytes.moved("routed_experts", given, None) == weights + rest


def test_padding_and_open_windows_move_nothing(by_op: dict[str, list[Called]]) -> None:
    call = by_op["compress_csa"][0]
    given = dict(call.arguments) | {"rows": torch.zeros_like(call.arguments["rows"])}
    state = 4 * 512 * 4
    assert bench_bytes.moved("compress_csa", given, None) == BATCH * (2 * 1024 * 4 + state)


def test_weights_of_a_step_leave_out_what_ops_read(recorded: Recorded) -> None:
    step, _ = recorded
    held = {name: one for name, one in step.lm.named_parameters()}
    matrices = {name for name, one in held.items() if one.ndim == 2}
    ours = {name for name in matrices if name.endswith("weight") or "shared_experts" in name}
    ours -= {"model.embed.weight"}
    assert len(ours) > 20 and not any("hc_" in name or name.endswith("ape") for name in ours)
    counted = bench_bytes.size(tuple(held[name] for name in ours))
    assert bench_ops.shared_weights(step) == counted


# ---- times ----


def test_a_provider_that_fails_hides_no_other(
    by_op: dict[str, list[Called]], ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_timer, "microseconds", lambda call, device: (call(), 50.0)[1])
    (call,) = by_op["swiglu"]
    fine = bench_ops.timed(call, ops, "reference", copy=1e9)
    assert (fine.microseconds, fine.chosen, fine.error, fine.count) == (50.0, True, "", 3)
    assert fine.bandwidth == pytest.approx(call.moved / 50e-6)
    assert fine.roof == pytest.approx(call.moved / 50e-6 / 1e9)
    broken = bench_ops.timed(call, ops, "triton", copy=1e9)
    assert broken.microseconds is None and not broken.chosen
    assert "provider triton cannot run on CPU" in broken.error


def test_providers_are_those_that_can_run() -> None:
    cpu = Machine.probe("cpu")
    assert bench_ops.providers("swiglu", cpu, reference=False) == ["reference"]
    gpu = Machine("cuda", "a GPU", (9, 0))
    assert bench_ops.providers("swiglu", gpu, reference=False) == ["triton"]
    assert bench_ops.providers("swiglu", gpu, reference=True) == ["triton", "reference"]
    assert bench_ops.providers("swiglu", gpu, True, without=["triton"]) == ["reference"]


def test_a_step_is_the_sum_of_its_parts(config: DSV4Config) -> None:
    calls = [Called("swiglu", "a", {}, 100, count=2), Called("swiglu", "b", {}, 50, count=1)]

    def timing(call: Called, microseconds: float | None, chosen: bool = True) -> Any:
        return SimpleNamespace(chosen=chosen, count=call.count, microseconds=microseconds)

    good = [timing(calls[0], 10.0), timing(calls[0], 99.0, False), timing(calls[1], 5.0)]
    whole = bench_ops.whole_step(config, 2.0, (4, 300), 1000, (calls, good), copy=1e9)
    assert whole.ops == pytest.approx(0.025) and whole.moved == 1250
    assert whole.roof == pytest.approx(1250 / 0.002 / 1e9)
    failed = [good[0], timing(calls[1], None)]
    assert bench_ops.whole_step(config, 2.0, (4, 300), 0, (calls, failed), 1e9).ops is None


def test_the_clock_takes_a_median(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 1, 10, 11, 20, 29, 30, 31, 40, 41])
    monkeypatch.setattr(bench_timer.time, "perf_counter", lambda: float(next(ticks)))
    calls: list[int] = []
    assert bench_timer.microseconds(lambda: calls.append(1), "cpu") == 1e6
    assert len(calls) == bench_timer.CPU_CALLS + 1


def test_a_copy_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_timer, "COPIED_BYTES", {"cpu": 1000})
    monkeypatch.setattr(bench_timer, "microseconds", lambda call, device: (call(), 4.0)[1])
    assert bench_timer.copy_bandwidth("cpu") == pytest.approx(2000 / 4e-6)


# ---- presets ----


def test_presets_have_the_models_widths() -> None:
    flash, pro = (bench_step.preset_config(name) for name in ("flash", "pro"))
    assert [kind.name for kind in flash.layer_kinds] == ["SWA", "CSA", "HCA"]
    assert [kind.name for kind in pro.layer_kinds] == ["CSA", "HCA"]
    assert (flash.n_routed_experts, pro.n_routed_experts) == (256, 384)
    assert (flash.hidden_size, pro.hidden_size) == (4096, 7168)
    assert bench_step.preset_config("pro", 128).n_routed_experts == 128


# ---- the command ----


@pytest.fixture
def quick(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's step instead of one for each batch, and calls that run once."""
    calls = [replace(call) for call in recorded[1]]
    monkeypatch.setattr(bench_ops, "record", lambda *_: (recorded[0], calls))
    monkeypatch.setattr(bench_ops, "shared_weights", lambda step: 1000)
    monkeypatch.setattr(bench_timer, "microseconds", lambda call, device: (call(), 50.0)[1])


@pytest.mark.usefixtures("quick")
def test_the_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "ops.png"
    assert main(["bench", "--device", "cpu", "--json", "--plot", str(picture)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["device"], result["preset"], result["linears"]) == ("CPU", "tiny", "bf16")
    assert [one["batch"] for one in result["steps"]] == [1, 4]
    others = {"routed_experts_fp4", "linear_fp8", "linear_fp4", "decode_slots"}
    assert {one["op"] for one in result["ops"]} >= set(PROVIDERS) - others
    assert all(one["chosen"] and one["error"] == "" for one in result["ops"])
    assert {"torch", "sglang", "sglang-dsv4"} <= result["versions"].keys()
    assert "say nothing" in result["how"] and result["date"].endswith("+00:00")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("form", "weight"),
    [("fp8", 4096 * 64 + 4 * 32), ("fp4", 4096 * 64 * 9 // 16 + 4 * 4096 // 16)],
)
def test_linears_as_they_are_stored(
    form: str, weight: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Timed by their own op, and counted by the bytes that they take: wq_b of all layers."""
    monkeypatch.setenv("SGLANG_DSV4_PRECISION", f"linears={form}")
    options = ["--only", f"linear_{form}", "--batch", "4"]
    assert main(["bench", "--device", "cpu", "--json", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = result["ops"]
    assert {row["op"] for row in rows} == {f"linear_{form}"} and result["linears"] == form
    assert weight + 4 * 2 * (64 + 4096) in [row["moved"] for row in rows]


@pytest.mark.parametrize(
    ("chosen", "device", "form"),
    [("auto", "cuda", "fp8"), ("auto", "cpu", "bf16"), ("bf16", "cuda", "bf16")]
    + [("fp4", "cuda", "fp4"), ("fp8", "cpu", "fp8")],
)
def test_linears_are_those_of_the_release(chosen: str, device: str, form: str) -> None:
    """Where nobody says otherwise, on a GPU: no checkpoint says in what they are."""
    for preset in ("flash", "tiny"):
        config = bench_step.preset_config(preset)
        assert cli_bench.linears_held(config, chosen, device) == form
    kept = bench_step.stored_linears(bench_step.preset_config("flash"), chosen, device).layers
    assert len(kept) == (0 if form == "bf16" else 3)


@pytest.mark.parametrize(("name", "group"), [("mxfp4", 32), ("nvfp4", 16)])
def test_experts_in_four_bits(
    name: str, group: int, config: DSV4Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Timed by their own op, and counted by the bytes that they take."""
    options = ["--format", name, "--only", "routed_experts_fp4", "--batch", "64"]
    assert main(["bench", "--device", "cpu", "--json", *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["ops"]
    assert row["op"] == "routed_experts_fp4" and row["microseconds"] > 0
    values = 3 * config.moe_intermediate_size * config.hidden_size * config.n_routed_experts
    weights = values // 2 + values // group + 3 * 4 * config.n_routed_experts
    tokens = 64 * (6 * config.hidden_size + 12 * config.num_experts_per_tok)  # BF16 in, FP32 out
    assert row["moved"] == weights + tokens


@pytest.mark.usefixtures("quick")
def test_tables_show_steps_ops_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--only", "swiglu", "--batch", "2"]) == 0
    text = capsys.readouterr().out
    assert "swiglu" in text and "reference *" in text and "rms_norm" not in text
    assert "tiny, experts in bf16, attention in bf16, on CPU" in text
    assert "SWA CSA HCA" in text and "reference ops, which say nothing" in text
    row = {"batch": 1, "op": "swiglu", "label": "[1]", "provider": "triton", "chosen": False,
           "count": 1, "moved": 10, "bandwidth": None, "roof": None}  # fmt: skip
    failed = bench_table._op_cells(row | {"microseconds": None, "error": "RuntimeError: no"})
    assert failed[3:6] == ["triton", "1", "failed: RuntimeError: no"]
    tiny = bench_table._op_cells(row | {"microseconds": 0.0, "error": ""})
    assert tiny[5] == "below launch"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--preset", "flash"], "--preset flash needs a GPU"),
        (["--only", "gone"], "--only gone: the ops are linear_fp32"),
        (["--without", "gone"], "--without gone: the providers are cublas"),
        (["--experts", "9"], "--experts 9: 2 to 8"),
        (["--context", "8192"], "--context 8192: the model has at most 8191"),
    ],
)
def test_what_cannot_run_is_refused(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--device", "cpu", *options]) == 2
    assert why in capsys.readouterr().err


def test_a_failed_op_is_told_by_the_exit_code(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [call for call in recorded[1] if call.op == "swiglu"]
    broken = [replace(call, arguments={"gate_up": "no tensor", "limit": 1.0}) for call in calls]
    monkeypatch.setattr(bench_ops, "record", lambda *_: (recorded[0], broken))
    monkeypatch.setattr(bench_ops, "time_step", lambda step, device: 1.0)
    monkeypatch.setattr(bench_ops, "shared_weights", lambda step: 0)
    monkeypatch.setattr(bench_timer, "copy_bandwidth", lambda device: 1e9)
    assert main(["bench", "--device", "cpu", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ops"][0]["microseconds"] is None and result["ops"][0]["error"]
    assert result["steps"][0]["ops"] is None
