"""The benchmark against the built-in model, as far as it needs neither a server nor a GPU."""

import argparse
import ast
import importlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sglang_dsv4.config import DSV4Config
from sglang_dsv4.inspection import Deployment, Inspection
from sglang_dsv4.linears import holder_of

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
command = importlib.import_module("bench_vs_builtin")
host = importlib.import_module("bench_host")
measure = importlib.import_module("bench_measure")
plan = importlib.import_module("bench_variants")
report = importlib.import_module("bench_report")
run_module = importlib.import_module("bench_run")
launcher = importlib.import_module("bench_server")
traffic = importlib.import_module("bench_traffic")

# ---- what is compared ----


def test_variants_run_beside_each_other_as_far_as_they_fit() -> None:
    needed = {"a": 30e9, "b": 30e9, "c": 100e9, "d": 200e9}
    groups, refused = plan.waves(needed, 150e9)
    assert groups == [["a", "b"], ["c"]]
    assert list(refused) == ["d"] and "--layers" in refused["d"] and "151" not in refused["d"]
    assert "needs 209 GB" in refused["d"] and "has 150" in refused["d"]
    assert plan.waves({"a": 69e9, "b": 63e9}, 150e9)[0] == [["a", "b"]]
    assert plan.waves({"a": 69e9, "b": 64e9}, 150e9)[0] == [["a"], ["b"]]


def test_presets_are_cut_to_their_first_layers() -> None:
    kinds = {
        "flash": "SWA SWA CSA HCA CSA HCA CSA HCA",
        "pro": "HCA HCA CSA HCA",
        "tiny": "SWA SWA CSA HCA CSA HCA CSA",
    }
    for preset, names in kinds.items():
        config = DSV4Config.from_dict(plan.raw_config(preset))
        assert " ".join(kind.name for kind in config.layer_kinds) == names
    cut = DSV4Config.from_dict(plan.raw_config("flash", 2))
    assert [kind.name for kind in cut.layer_kinds] == ["SWA", "SWA"]
    with pytest.raises(ValueError, match="flash has 1 to 8 layers here"):
        plan.raw_config("flash", 9)


def test_weights_are_those_of_the_format() -> None:
    """Eight layers of Flash: experts of 6.4 G values a layer, and 3.5 GB of all else in BF16."""
    raw = plan.raw_config("flash")
    sizes = {name: plan.weight_bytes(raw, one) / 1e9 for name, one in plan.VARIANTS.items()}
    values = 8 * 256 * 3 * 4096 * 2048 / 1e9
    rest = sizes["ours-bf16"] - 2 * values
    assert 3 < rest < 6
    assert sizes["ours-mxfp4"] == pytest.approx(rest + values * (0.5 + 1 / 32))
    assert sizes["ours-nvfp4"] == pytest.approx(rest + values * (0.5 + 1 / 16))
    assert sizes["builtin-fp8"] == pytest.approx(rest + values)


@pytest.mark.parametrize("name", list(plan.VARIANTS))
def test_a_variant_is_a_config_and_an_environment(name: str, tmp_path: Path) -> None:
    variant, raw = plan.VARIANTS[name], plan.raw_config("tiny")
    plan.write_folder(tmp_path, raw, variant)
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {"builtin-fp8": "fp8", "ours-bf16": None, "ours-nvfp4-all": None}.get(name, "fp4")
    assert config.get("expert_dtype") == wanted
    assert (tmp_path / "hf_quant_config.json").exists() == name.startswith("ours-nvfp4")
    assert (tmp_path / "tokenizer.json").exists() and config["vocab_size"] == raw["vocab_size"]
    changed = plan.environment(variant)
    assert changed["SGLANG_PLUGINS"] == ("" if name.startswith("ours") else "__none__")
    kept = {
        "ours-nvfp4": "routed_experts=fp4",
        "ours-mxfp4-bf16": "routed_experts=fp4,linears=bf16",
        "ours-nvfp4-all": "routed_experts=fp4,linears=fp4",
    }
    assert changed["SGLANG_DSV4_PRECISION"] == kept.get(name, "")


def test_our_defaults_keep_experts_and_matrices_as_released(tmp_path: Path) -> None:
    """By config.json alone, since dummies have no headers."""
    plan.write_folder(tmp_path, plan.raw_config("flash"), plan.VARIANTS["ours-mxfp4"])
    found = Inspection(tmp_path, Deployment(), headers=False)
    dense = Inspection(tmp_path, Deployment(linears="bf16"), headers=False)
    assert found.plan is not None and dense.plan is not None
    held = [name for name in found.slots if holder_of(name)]
    values = sum(math.prod(found.slots[name].shape) for name in held)
    blocks = values // 128**2
    assert dense.plan.weights - found.plan.weights == values - 4 * blocks


def test_points_and_their_pool() -> None:
    found = plan.points(["decode", "prefill"], [1, 8], [1024, 131072], [2048], [4])
    told = [(one.kind, one.batch, one.context) for one in found]
    assert told == [
        ("prefill", 1, 2048), ("decode", 1, 1024), ("decode", 8, 1024), ("decode", 1, 131072),
    ]  # fmt: skip
    tokens = plan.pool_tokens(found, 128, 0)
    wanted = (2048 + 384) + 8 * (1024 + 384) + (131072 + 384)
    assert 1.19 * wanted < tokens <= 1.2 * wanted and tokens % 256 == 0
    assert plan.pool_tokens(found, 128, 1 << 20) == 1 << 20
    served = plan.points(["serving"], [1], [1], [1], [16])
    assert [(one.what, one.context) for one in served] == [
        ("random-ids", 1024), ("generated-shared-prefix", 2176),
    ]  # fmt: skip
    decoded = plan.points(["decode"], [1, 8], [1024], [], [])
    both = plan.points(["decode", "kernels"], [1, 8], [1024, 2048], [], [])
    assert [(one.batch, one.context) for one in both if one.kind == "kernels"] == [
        (1, 1024), (8, 1024),
    ]  # fmt: skip
    assert len(both) == 6  # and they keep no more prompts
    assert [one.context for one in plan.points(["prefill-kernels"], [8], [1], [64, 128], [])] == [
        64, 128,
    ]  # fmt: skip
    profiled = plan.points(["decode", "kernels"], [1, 8], [1024], [], [])
    assert plan.pool_tokens(profiled, 128, 0) == plan.pool_tokens(decoded, 128, 0)


# ---- dummy weights ----


class Toy(nn.Module):
    """Parameters as our model and SGLang's name them."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in {
            "embed.weight": torch.zeros(64, 32),
            "gate.weight": torch.zeros(16, 32),
            "attn_norm.weight": torch.full((32,), 1e-3),
            "attn_sink": torch.full((4,), 1e-3),
            "ape": torch.full((4, 32), 1e-3),
            "wq.weight": torch.zeros(8, 32).to(torch.float8_e4m3fn),
            "wq.weight_scale_inv": torch.ones(1, 1),
            "wo.codes": torch.full((32, 16), 0x38, dtype=torch.uint8),
            "experts.w13_weight": torch.zeros(2, 8, 16, dtype=torch.int8),
            "experts.w13": torch.zeros(16, 8, 32, dtype=torch.bfloat16),
            "w2.codes": torch.zeros(2, 8, 16, dtype=torch.uint8),
            "w2.scales": torch.full((2, 8, 2), 0x38, dtype=torch.uint8),
            "w3.scales": torch.full((2, 8, 1), 0x7F, dtype=torch.uint8),
            "w2.factors": torch.full((2, 2), 1e-3),
            "topk.tid2eid": torch.zeros(64, 4, dtype=torch.int32),
        }.items():
            owner: nn.Module = self
            *path, last = f"layer.{name}".split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))


def test_dummy_weights_tell_tokens_apart_and_use_every_expert() -> None:
    toy = Toy()
    launcher.fill(toy)
    held = {name.removeprefix("layer."): one for name, one in toy.named_parameters()}
    assert held["embed.weight"].std() == pytest.approx(1, rel=0.1)
    assert held["gate.weight"].std() == pytest.approx(32**-0.5, rel=0.1)
    assert held["experts.w13"].float().std() == pytest.approx(32**-0.5, rel=0.1)
    assert (held["attn_norm.weight"] == 1).all()
    for name in ("attn_sink", "ape"):  # SGLang's
        assert (held[name] == 1e-3).all()
    for fp8 in (held["wq.weight"], held["wo.codes"].view(torch.float8_e4m3fn)):
        values = fp8.float()
        assert values.isfinite().all() and values.abs().max() < 2 and values.unique().numel() > 50
    assert (held["wq.weight_scale_inv"] == 2**-6).all() and (held["w2.factors"] == 1).all()
    assert (held["w2.scales"] == 0x08).all() and (held["w3.scales"] == 0x79).all()
    for name in ("experts.w13_weight", "w2.codes"):
        assert held[name].view(torch.uint8).unique().numel() > 80
    table = held["topk.tid2eid"]
    assert table.unique().numel() == 16 and all(len(set(row.tolist())) == 4 for row in table)


def test_only_filled_routers_spread_their_tokens() -> None:
    """64 tokens at Flash's width: with SGLang's dummies, numbers below 0.001, the bias decides for
    all of them; filled, they use most of 256."""
    from sglang_dsv4.moe.reference import route_scored

    generator = torch.Generator().manual_seed(0)
    layer = nn.Module()
    for path, shape in {"ffn_norm": (4096,), "gate": (256, 4096)}.items():
        layer.add_module(path, nn.Module())
        values = torch.empty(shape).uniform_(-1e-3, 1e-3, generator=generator)
        layer.get_submodule(path).weight = nn.Parameter(values, requires_grad=False)
    bias = torch.empty(256).uniform_(-1e-3, 1e-3, generator=generator)
    tokens = torch.randn(64, 4096, generator=generator)

    def used() -> int:
        parts = dict(layer.named_parameters())
        logits = (tokens * parts["ffn_norm.weight"]) @ parts["gate.weight"].T
        return route_scored(logits, bias, top_k=6, scale=1.5)[1].unique().numel()

    assert used() < 12
    whole = nn.Module()
    whole.layer = layer  # the names of a layer within a model
    launcher.fill(whole)
    assert used() > 180


def test_scale_codes_are_powers_of_two() -> None:
    e4m3 = torch.tensor([0x38, launcher.CODES[0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert e4m3.float().tolist() == [1.0, launcher.SMALL]
    assert 2.0 ** (launcher.CODES[0x7F] - 127) == launcher.SMALL


LOADER = """\
def initialize_dummy_weights(model, low=0):
    model.append(('native', low))

class DummyModelLoader:
    def load_model(self, *, model):
        initialize_dummy_weights(model, low=3)
        return model
"""


@pytest.mark.parametrize("taken", [0, 1 << 30])
def test_filling_follows_sglangs_own(
    taken: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "toy_loader.py").write_text(LOADER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(launcher, "LOADER", "toy_loader")
    monkeypatch.setattr(launcher, "fill", lambda model: model.append("ours"))
    monkeypatch.setattr(sys, "meta_path", [launcher.AfterImport(), *sys.meta_path])
    monkeypatch.setattr(launcher, "allocated", lambda: 7 + taken * len(calls) // 2)
    calls: list[Any] = []
    try:
        loader = importlib.import_module("toy_loader").DummyModelLoader()
        assert loader.load_model(model=calls) is calls
    finally:
        sys.modules.pop("toy_loader", None)
    assert calls == [("native", 3), "ours"]
    said = capsys.readouterr().out
    assert ("weights take" in said) == bool(taken)
    state = {"internal_states": [{"memory_usage": {"weight": 62.9}}]}
    assert measure.memory(state, said)["weights"] == (1.0 if taken else 62.9)


def test_sglangs_loader_has_what_is_followed() -> None:
    """Read, not imported, which would take long."""
    (folder,) = importlib.import_module("sglang").__path__
    file = Path(folder).joinpath(*launcher.LOADER.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(file.read_text())
    (loader,) = (
        one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == launcher.CLASS
    )
    (load,) = (
        one for one in loader.body if isinstance(one, ast.FunctionDef) and one.name == "load_model"
    )
    called = [node.func for node in ast.walk(load) if isinstance(node, ast.Call)]
    assert launcher.FUNCTION in [one.id for one in called if isinstance(one, ast.Name)]


# ---- measurements ----


def test_a_step_is_timed_while_every_request_decodes() -> None:
    """Two requests whose first tokens come at 0 and 1 s, then together a step each 10 ms; the
    second one goes on alone at twice the speed after the first has ended."""
    first = [(0.0, 1)] + [(1.0 + 0.08 * n, 1 + 8 * n) for n in range(1, 5)]
    second = [(1.0, 1)] + [(1.0 + 0.08 * n, 1 + 8 * n) for n in range(1, 5)]
    alone = [*second, (1.36, 41)]
    seconds, steps = measure.step_time([first, alone])
    assert seconds == pytest.approx(0.01) and steps == 24
    assert measure.step_time([[(0.0, 1), (0.5, 9)], [(1.0, 1), (1.5, 9)]]) is None


def lines_of(*messages: Any) -> list[bytes]:
    told = [b"data: " + json.dumps(message).encode() for message in messages]
    return [line for one in told for line in (one, b"\n")]


def test_events_end_at_done_and_errors_are_raised() -> None:
    assert list(measure.events([*lines_of({"a": 1}), b"data: [DONE]\n", b"data: {"])) == [{"a": 1}]
    with pytest.raises(measure.MeasureError, match="too long"):
        list(measure.events(lines_of({"error": {"message": "too long"}})))


def message(index: int, tokens: int, end: dict[str, Any] | None = None) -> dict[str, Any]:
    meta = {"completion_tokens": tokens, "finish_reason": end, "cached_tokens": 256}
    return {"index": index, "meta_info": meta}


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (message(0, 25, {"type": "length"}), None),
        (message(0, 24, {"type": "length"}), "did not answer with 25"),
        (message(0, 25, {"type": "stop", "matched": "NaN happened"}), "ended otherwise"),
        (message(0, 25, {"type": "abort"}), "ended otherwise"),
    ],
)
def test_answers_have_the_right_length(
    last: dict[str, Any], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def messages(server: Any, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert body["sampling_params"]["stream_interval"] == measure.INTERVAL
        assert body["sampling_params"]["max_new_tokens"] == 25 and body["input_ids"] == [[7, 8]]
        yield from (message(0, 1), message(0, 9), message(0, 17), last)

    monkeypatch.setattr(measure, "messages", messages)
    if why is None:
        found = measure.decode(None, [[7, 8]], 24)
        assert found["value"] > 0 and (found["steps"], found["cached"]) == (16, 256)
        return
    with pytest.raises(measure.MeasureError, match=why):
        measure.decode(None, [[7, 8]], 24)


class Tells:
    """A server that tells its state, or does not."""

    def __init__(self, **state: Any) -> None:
        self.told = state

    def state(self) -> dict[str, Any]:
        if not self.told:
            raise OSError("gone")
        return self.told


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({}, "all at once$"),
        (
            {
                "effective_max_running_requests_per_dp": 256,
                "memory_usage": {"token_capacity_swa": 26112},
                "page_size": 256,
            },
            "all at once: the server runs at most 256 and has window rows for 26,112 tokens in"
            " pages of 256$",
        ),
        ({"effective_max_running_requests_per_dp": 8}, "all at once: the server runs at most 8$"),
    ],
)
def test_a_batch_that_never_was_whole_says_why(
    state: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = [[(0.0, 1), (0.5, 9)], [(1.0, 1), (1.5, 9)]]
    monkeypatch.setattr(measure, "stream", lambda *_: (apart, 0))
    with pytest.raises(measure.MeasureError, match=why):
        measure.decode(Tells(**state), [[7], [8]], 24)


def test_a_batch_decodes_when_every_answer_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def messages(server: Any, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number, (index, tokens) in enumerate([(0, 1), (0, 9), (1, 1), (0, 17), (1, 9)]):
            told.append(number)
            yield message(index, tokens)
        yield from (message(0, 25, {"type": "length"}), message(1, 25, {"type": "length"}))

    begun: list[int] = []
    monkeypatch.setattr(measure, "messages", messages)
    measure.stream(None, [[7], [8]], 25, lambda: begun.append(told[-1]))
    assert begun == [2]


class Answers:
    """A server that answers every request with the same."""

    def __init__(self, **meta: Any) -> None:
        self.meta = meta

    def request(self, path: str, body: Any = None) -> dict[str, Any]:
        return {"meta_info": {"finish_reason": {"type": "length"}, **self.meta}}


def test_a_prefill_is_whole() -> None:
    found = measure.prefill(Answers(cached_tokens=0, completion_tokens=1), [3] * 50)
    assert found["tokens_per_second"] == pytest.approx(50_000 / found["value"])
    for cached, tokens in ((256, 1), (0, 2)):
        with pytest.raises(measure.MeasureError, match="not a whole prefill"):
            measure.prefill(Answers(cached_tokens=cached, completion_tokens=tokens), [3] * 50)


@pytest.mark.parametrize(("bad", "ok"), [(-2.5, True), (math.nan, False), (None, False)])
def test_log_probabilities_must_be_finite(bad: float | None, ok: bool) -> None:
    entries = [[-1.0, 5, None]] * 7 + [[bad, 5, None]]
    assert measure.finite(Answers(output_token_logprobs=entries), [3])[0] is ok


def test_who_serves() -> None:
    def info(**state: Any) -> dict[str, Any]:
        return {"internal_states": [state], "attention_backend": "dsv4"}

    own = {"model_class": "sglang_dsv4.served.deepseek_v4.DeepseekV4ForCausalLM", "ops": {}}
    assert measure.served(info(sglang_dsv4=own), True)[0]
    assert not measure.served(info(sglang_dsv4=own), False)[0]
    assert not measure.served(info(), True)[0]
    right, told = measure.served(info(), False)
    assert right and "dsv4" in told


LOG = """\
[2026] DSV4 memory calculation: unified=False, bytes_per_full_token=1899.50, full_token=10
[2026] Capture target decode CUDA graph end. elapsed=9.10 s, mem usage=1.25 GB, avail mem=2.00 GB.
"""


def test_memory_is_read_from_state_and_log() -> None:
    state = {"weight": 30.5, "kvcache": 4.0, "token_capacity": 1024, "graph": {"decode": 1.5}}
    found = measure.memory({"internal_states": [{"memory_usage": state}]}, LOG)
    assert found == {
        "weights": 30.5, "cache": 4.0, "graphs": 1.5, "bytes_per_token": 1899.5, "tokens": 1024,
        "by_free_memory": ["weights", "graphs"],
    }  # fmt: skip
    counted = LOG + f"bench_server: weights take {20 << 30} bytes\n"
    own = measure.memory({"internal_states": [{"memory_usage": state}]}, counted)
    assert own == found | {"weights": 20.0, "by_free_memory": ["graphs"]}
    bare = measure.memory({"internal_states": [{}]}, LOG)
    assert (bare["weights"], bare["graphs"]) == (None, 1.25)
    assert measure.memory({"internal_states": [{}]}, "")["bytes_per_token"] is None


def test_logs_tell_of_errors() -> None:
    assert measure.log_error(LOG) is None
    told = measure.log_error(LOG + "[2026] Scheduler hit an exception: Traceback\n")
    assert told is not None and told.startswith("[2026] Scheduler hit")


def test_a_failed_start_says_why() -> None:
    crash = (
        "  File x\n    assert rope is not None\n           ^^^^^^^\nAssertionError\n[1] killed\n"
    )
    found = host.failure(crash)
    assert found["why"] == "AssertionError: assert rope is not None"
    assert found["log_tail"][-1] == "[1] killed" and found["status"] == "failed"
    named = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate\n[1] killed\n"
    assert host.failure(named)["why"].startswith("torch.OutOfMemoryError: CUDA out of memory")
    refusal = "sglang-dsv4 0.1.0 cannot start: no\n"
    assert host.failure(refusal, "late: ")["why"] == "late: sglang-dsv4 0.1.0 cannot start: no"
    assert host.failure("")["why"] == "the log is empty"


# ---- SGLang's serving benchmark ----


def test_serving_results_are_counted(tmp_path: Path) -> None:
    point, file = plan.Point("serving", 16, 1024, "random-ids"), tmp_path / "r.jsonl"
    log = tmp_path / "serving.log"
    (missing, *_) = traffic.rows_of(point, file, log)
    assert missing[1]["error"] == "no result; see serving.log"
    result = {"completed": 48, "total_output_tokens": 48 * 128, "output_throughput": 900.0,
              "median_ttft_ms": 20.0, "median_tpot_ms": 3.0}  # fmt: skip
    file.write_text(json.dumps(result) + "\n")
    rows = traffic.rows_of(point, file, log)
    assert [(key["metric"], key["better"], found["value"]) for key, found in rows] == [
        ("output", "more", 900.0), ("first token", "less", 20.0), ("token", "less", 3.0),
    ]  # fmt: skip
    file.write_text(json.dumps(result | {"total_output_tokens": 48 * 128 - 1}) + "\n")
    assert "48 of 48 requests with 6143" in traffic.rows_of(point, file, log)[0][1]["error"]


# ---- a whole call, with servers that are none ----


def test_stages_of_a_start_are_read_from_its_log() -> None:
    begin = time.mktime(time.strptime("2026-12-01 04:13:00", "%Y-%m-%d %H:%M:%S"))
    log = (
        "Init parallel begin, but without a time\n"
        "[2026-12-01 04:13:09] server_args={}\n[2026-12-01 04:13:30 TP0] Init parallel begin.\n"
        "[2026-12-01 04:13:31] Init parallel begin.\n[2026-12-01 04:13:40] Memory pool end. avail\n"
    )
    expected = {"server imported": 9, "scheduler imported": 30, "cache": 40}
    assert measure.stages(log, begin + 0.2) == expected and measure.stages("", begin) == {}
    result = {"variants": {"a": {"stages": expected}, "b": {"status": "failed"}}}
    text = "\n".join(report._starts(result))
    assert "| variant | server imported | scheduler imported | cache |" in text
    assert "| a | 9.0 | 30.0 | 40.0 |\n| b | - | - | - |" in text
    assert report._starts({"variants": {"b": {}}}) == []


class NoServer(measure.Server):
    """Fails to start where its variant is builtin-fp8, and answers nothing."""

    started: list[str] = []
    stopped: list[str] = []

    def __enter__(self) -> "NoServer":
        NoServer.started.append(self.checkpoint.name)
        self.log.write_text("bench_server: dummy weights are filled\n")
        if self.checkpoint.name == "builtin-fp8":
            self.log.write_text("ValueError: no such kernel\n")
            raise RuntimeError("the server did not start")
        return self

    def stop(self) -> None:
        NoServer.stopped.append(self.checkpoint.name)

    def request(self, path: str, body: Any = None) -> Any:
        own = {"model_class": "sglang_dsv4.X"} if "ours" in self.checkpoint.name else None
        state = {"sglang_dsv4": own} if own else {}
        meta = {"output_token_logprobs": [[-1.0, 1, None]] * 8}
        return {"internal_states": [state], "meta_info": meta}


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Path, list[str]]:
    """A call for three variants: its exit code, its folder, and who was measured in which order."""
    order: list[str] = []

    def decode(server: Any, prompts: Sequence[Any], steps: int) -> dict[str, Any]:
        name = server.checkpoint.name
        order.append(name)
        if len(prompts) == 4 and name == "ours-bf16" and len(order) > 8:
            raise measure.MeasureError("it broke")
        return {"value": {"builtin-fp4": 4.0, "ours-bf16": 2.0}[name] * len(prompts)}

    NoServer.started, NoServer.stopped = [], []
    monkeypatch.setattr(measure, "Server", NoServer)
    monkeypatch.setattr(measure, "decode", decode)
    code = command.main([
        "--device", "cpu", "--out", str(tmp_path), "--measure", "decode", "--rounds", "3",
        "--variants", "builtin-fp8,builtin-fp4,ours-bf16",
    ])  # fmt: skip
    return code, tmp_path, order


def test_a_call_measures_in_turn_and_omits_nothing(called: tuple[int, Path, list[str]]) -> None:
    code, folder, order = called
    assert code == 1
    assert sorted(NoServer.started) == ["builtin-fp4", "builtin-fp8", "ours-bf16"]
    assert set(NoServer.stopped) == set(NoServer.started)
    pair = ["builtin-fp4", "ours-bf16"]
    assert order == [*pair[::-1] * 2, *pair * 2, *pair[::-1] * 2, *pair * 2]
    (file,) = folder.glob("bench_*.json")
    result = json.loads(file.read_text())
    status = {name: about["status"] for name, about in result["variants"].items()}
    assert status == {"builtin-fp8": "failed", "builtin-fp4": "ok", "ours-bf16": "ok"}
    assert result["variants"]["builtin-fp8"]["why"] == "ValueError: no such kernel"
    assert result["variants"]["ours-bf16"]["beside"] == pair
    assert len(result["measured"]) == 2 * 2 * 4
    assert result["versions"]["sglang"] and result["date"].endswith("+00:00")
    text = (folder / "bench.md").read_text()
    assert "ValueError: no such kernel" in text and "MeasureError: it broke" in text
    assert "2 (2 to 2)" in text and "in turn" in text
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_reports_are_made_again_from_json(
    called: tuple[int, Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = called[1]
    before = (folder / "bench.md").read_text()
    for file in (folder / "bench.md", folder / "bench.png"):
        file.unlink()
    assert command.main(["--report", str(folder)]) == 0
    assert (folder / "bench.md").read_text() == before and (folder / "bench.png").exists()
    assert before in capsys.readouterr().out
    assert command.main(["--report", str(folder / "nothing")]) == 2


def test_no_measurement_begins_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NoServer.started, NoServer.stopped = [], []
    monkeypatch.setattr(measure, "Server", NoServer)
    monkeypatch.setattr(run_module, "LEAST_START", 0)
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--variants", "ours-bf16"]
    assert command.main([*arguments, "--measure", "decode", "--limit", "4", "--rounds", "1"]) == 1
    (file,) = tmp_path.glob("bench_*.json")
    measured = json.loads(file.read_text())["measured"]
    assert len(measured) == 4 and {row["error"] for row in measured} == {"no time left"}


def test_no_server_starts_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    NoServer.started, NoServer.stopped = [], []
    monkeypatch.setattr(measure, "Server", NoServer)
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--variants", "ours-bf16"]
    assert command.main([*arguments, "--measure", "ready,decode", "--limit", "29"]) == 1
    (file,) = tmp_path.glob("bench_*.json")
    result = json.loads(file.read_text())
    assert NoServer.started == [] and NoServer.stopped == []
    assert result["variants"]["ours-bf16"]["status"] == "failed"
    assert "failed: no time left to start it" in capsys.readouterr().out
    assert [row["error"] for row in result["measured"]] == ["no time left to start it"] * 2


def test_a_variant_that_was_started_once_keeps_what_is_known(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "--limit", "29")
    bench.result["variants"]["ours-bf16"] = {"status": "suspect", "why": "a", "ready_s": 5.0}
    assert bench.too_late("ours-bf16")
    about = bench.result["variants"]["ours-bf16"]
    assert (about["status"], about["ready_s"]) == ("failed", 5.0)
    assert about["why"] == "a; no time left to start it" and not report.complete(bench.result)
    assert not bench_of(tmp_path / "more", "--limit", "40").too_late("ours-bf16")


def bench_of(folder: Path, *more: str) -> Any:
    """A call that has not begun."""
    arguments = command.parser().parse_args(["--device", "cpu", "--out", str(folder), *more])
    for name, (_, small) in command.DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, small)
    return run_module.Bench(arguments)


@pytest.mark.parametrize(
    ("share", "by", "alone", "right"),
    [
        (1.0, ["graphs"], False, True),
        (2.1, ["graphs"], False, False),  # the process's own count
        (0.5, ["graphs"], False, False),
        (2.1, ["weights", "graphs"], False, True),  # a neighbour's weights
        (0.5, ["weights", "graphs"], False, False),  # nobody gives memory
        (2.1, ["weights", "graphs"], True, False),
    ],
)
def test_weights_are_judged_by_what_neighbours_cannot_change(
    share: float, by: list[str], alone: bool, right: bool, tmp_path: Path
) -> None:
    bench, variant = bench_of(tmp_path), plan.VARIANTS["ours-mxfp4"]
    bench.raw, bench.arguments.device = plan.raw_config("flash"), "cuda"
    held = share * plan.weight_bytes(bench.raw, variant) / 2**30
    found, told = bench.weights_as_planned(variant, {"weights": held, "by_free_memory": by}, alone)
    assert found is right and f"{held:.1f} GB, about 29.6 expected" in told
    assert ("neighbours" in told) == (share > 2 and right)


def test_profiles_are_taken_one_by_one_after_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int]] = []
    prompts: list[tuple[int, ...]] = []

    def profile(server: Any, prompts: Sequence[Any], folder: Path) -> dict[str, Any]:
        name = server.checkpoint.name
        order.append((name, len(prompts)))
        if (name, len(prompts)) == ("ours-bf16", 4):
            raise measure.MeasureError("/start_profile: HTTP 500")
        return {"busy_ms": 8.0 if "builtin" in name else 2.0, "launches": 60.0, "kernels": ["k"]}

    def profile_prefill(server: Any, prompt: Sequence[int], folder: Path) -> dict[str, Any]:
        prompts.append(tuple(prompt))
        return {"busy_ms": 9.0, "launches": 70.0, "kernels": []}

    def decode(*_: Any) -> dict[str, Any]:
        order.append(("decode", 0))
        return {"value": 1.0}

    NoServer.started, NoServer.stopped = [], []
    monkeypatch.setattr(measure, "Server", NoServer)
    monkeypatch.setattr(measure, "decode", decode)
    monkeypatch.setattr(run_module.bench_profile, "profile", profile)
    monkeypatch.setattr(run_module.bench_profile, "profile_prefill", profile_prefill)
    monkeypatch.setattr(run_module.Bench, "traffic", lambda *_: order.append(("serving", 0)))
    monkeypatch.setattr(host, "device", lambda kind: {"name": "toy", "memory": 0})
    code = command.main([
        "--preset", "tiny", "--out", str(tmp_path), "--measure",
        "kernels,decode,prefill-kernels", "--rounds", "5", "--variants", "builtin-fp4,ours-bf16",
        "--batch", "1", "4", "--prefill", "32",
    ])  # fmt: skip
    assert code == 1
    pair = ["builtin-fp4", "ours-bf16"]
    assert [name for name, _ in order[:25]] == ["decode"] * 24 + ["serving"]
    assert order[25:] == [
        (name, n) for names in (pair, pair[::-1]) for n in (1, 4) for name in names
    ]
    (file,) = tmp_path.glob("bench_*.json")
    result = json.loads(file.read_text())
    rows = [row for row in result["measured"] if row["kind"] == "kernels"]
    assert len(rows) == 16 and {row["round"] for row in rows} == {1, 2}
    assert rows[0]["kernels"] == ["k"] and (rows[0]["value"], rows[1]["value"]) == (8.0, 60.0)
    text = (tmp_path / "bench.md").read_text()
    assert (
        "| kernels, batch 1, context 1,024: device busy | ms | 8 (8 to 8) | 2 (2 to 2) | 4 ("
        in text
    )
    assert "kernels, batch 1, context 1,024: launches | a step | 60 (60 to 60)" in text
    assert "prefill-kernels, context 32: launches | a prompt | 70 (70 to 70)" in text
    # Each server is given the same two prompts, which it has not seen.
    assert [len(prompt) for prompt in prompts] == [32] * 4 and len(set(prompts)) == 2
    assert "MeasureError: /start_profile: HTTP 500" in text
    assert result["variants"]["ours-bf16"]["started_with"] == pair


# ---- tables ----


def result_of(*rows: tuple[str, int, float | None], better: str = "less") -> dict[str, Any]:
    """A result with one point: variant, round, value."""
    key = {"kind": "decode", "what": "", "batch": 1, "context": 64, "metric": "step"}
    key |= {"unit": "ms", "better": better}
    measured = [
        {**key, "variant": name, "round": number}
        | ({"error": "late"} if value is None else {"value": value})
        for name, number, value in rows
    ]
    names = dict.fromkeys(row["variant"] for row in measured)
    variants = {name: {"status": "ok", "beside": list(names)} for name in names}
    return {"variants": variants, "measured": measured}


def test_ratios_are_taken_within_rounds() -> None:
    result = result_of(
        *(("builtin-fp4", 0, 100.0), ("ours-bf16", 0, 1.0)),  # a warm-up counts for nothing
        *(("builtin-fp4", 1, 4.0), ("ours-bf16", 1, 2.0)),
        *(("builtin-fp4", 2, 9.0), ("ours-bf16", 2, 3.0)),
        *(("builtin-fp4", 3, 5.0), ("ours-bf16", 3, 5.0)),
        *(("builtin-fp4", 4, 5.0), ("ours-bf16", 4, None)),
    )
    (line,) = report.lines(result)
    assert line.values["builtin-fp4"] == report.Spread(5.0, 4.0, 9.0, 4)
    assert line.ratios == {"ours-bf16": report.Spread(2.0, 1.0, 3.0, 3)}
    assert line.errors == {"ours-bf16": "late"}
    assert not report.complete(result) and report.in_turn(result, "ours-bf16")


def test_more_tokens_a_second_are_faster() -> None:
    result = result_of(("builtin-fp8", 1, 10.0), ("ours-bf16", 1, 25.0), better="more")
    assert report.lines(result)[0].ratios["ours-bf16"].median == 2.5
    assert report.complete(result)
    result["variants"]["ours-bf16"]["status"] = "suspect"
    assert not report.complete(result)


def test_without_a_built_in_there_is_no_ratio() -> None:
    result = result_of(("builtin-fp4", 1, None), ("ours-bf16", 1, 2.0))
    assert report.baseline(result) is None
    assert report.lines(result)[0].ratios["ours-bf16"] is None
    assert report.lines(result)[0].values["builtin-fp4"] is None


def test_memory_that_neighbours_changed_is_in_brackets() -> None:
    memory = {"weights": 29.64, "graphs": 34.4, "by_free_memory": ["graphs"]}
    alone: dict[str, Any] = {"memory": memory, "started_with": ["a"]}
    beside = alone | {"started_with": ["a", "b"]}
    assert report._memory(alone, "graphs") == "34.4"
    assert report._memory(beside, "graphs") == "(34.4)"
    assert report._memory(beside, "weights") == "29.6"
    assert report._memory(beside | {"memory": memory | {"graphs": None}}, "graphs") == "-"
    assert report._memory({}, "weights") == "-"


def test_numbers_as_they_are_shown() -> None:
    assert report.shown(report.Spread(3.14159, 3.0, 12345.6, 5)) == "3.142 (3 to 12,346)"
    assert report.shown(report.Spread(2.0, 2.0, 2.0, 1)) == "2" and report.shown(None) == "-"
    assert report.table(["a"], [["x|y\nz"]])[-1] == "| x/y z |"


# ---- the command line ----


def test_help_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in (*plan.VARIANTS, *command.MEASURES, "not measured", "exit codes", "--report"):
        assert word in text


@pytest.mark.parametrize("text", ["", "ours-bf16,gone", "ours-bf16,ours-bf16"])
def test_variants_are_chosen_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="choose from builtin-fp4"):
        command.names_of(text, tuple(plan.VARIANTS))


def test_wrong_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--batch", "0"], ["--steps", "10"], ["--measure", "speed"]):
        with pytest.raises(SystemExit) as stop:
            command.main(["--out", str(tmp_path), *wrong])
        assert stop.value.code == 2
    assert command.main(["--device", "cpu", "--out", str(tmp_path), "--layers", "8"]) == 2
    assert "tiny has 1 to 7 layers" in capsys.readouterr().err
    assert command.main(["--device", "cpu", "--out", str(tmp_path), "--measure", "kernels"]) == 2
    assert "--measure kernels needs the events of a GPU" in capsys.readouterr().err
    assert list(tmp_path.glob("bench_*.json")) == []


def test_starts_with_own_caches_find_nothing_of_others(tmp_path: Path) -> None:
    found = host.own_caches(tmp_path)
    assert all(str(tmp_path) in found[name] for name in found if name != "PYTHONUSERBASE")
    assert {"HOME", "TRITON_CACHE_DIR"} <= found.keys()
