"""The detector of what breaks a CUDA graph: clean on our tree, and every rule finds its fault.

Faults are planted in copies of functions that a decode step runs: the file's own text with one line
more.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang_dsv4 import graph_safety, graph_safety_device, graph_safety_step
from sglang_dsv4.attention.layer import Attention
from sglang_dsv4.backends import PROVIDERS, Machine, Provider, choose
from sglang_dsv4.cli import main
from sglang_dsv4.cli_make_tiny import shipped_config
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.graph_safety import LENGTHS, Package, Report
from sglang_dsv4.graph_safety_rules import RULES, Allowed, Finding, apply_allowed
from sglang_dsv4.graph_safety_static import Observed, Source, check
from sglang_dsv4.graph_safety_step import DecodeStep
from sglang_dsv4.graph_safety_trace import Sources, Trace, trace

CPU = Machine("cpu", "CPU", None)
LAYER, FORWARD = "attention/layer.py", "Attention.forward"
METADATA = "attention/reference_metadata.py"
AFTER = {  # the line that a fault follows, once in the file
    LAYER: "        q_lora, kv = self.inputs.apart(self.inputs(x))\n",
    METADATA: "    column = torch.arange(window, device=batch.positions.device)\n",
    "moe/reference.py": "    sorted_experts, order = experts.flatten().sort(stable=True)\n",
    "sglang_dsv4/model.py": "        elsewhere = (local < 0) | (local >= rows)\n",
}
FUNCTION = {
    LAYER: FORWARD,
    METADATA: "_window_list",
    "moe/reference.py": "_permutation",
    "sglang_dsv4/model.py": "Model._embed",
}

# rule -> lines to plant in Attention.forward
STATIC: dict[str, tuple[str, ...]] = {
    "item": ("peak = x.abs().max().item()", "peak = self.attn_sink[0].item()"),
    "tolist": ("lengths = meta.positions.tolist()", "n = len(meta.csa.row.tolist())"),
    "to-host": (
        "on_host = x.cpu()",
        "on_host = q_lora.numpy()",
        "on_host = x.to('cpu')",
        "on_host = numpy.asarray(x)",
    ),
    "scalar": (
        "first = int(meta.positions[0])",
        "total = float(x.sum())",
        "some = bool(x.any())",
        "width = (4, 128)[meta.positions[0]]",
        "root = math.sqrt(x[0, 0])",
    ),
    "branch": (
        "x = x if meta.positions.max() > 128 else x * 2",
        "assert x.isfinite().all()",
        "if x.sum() > 0: x = x + 1",
        "while meta.window.lengths.min() < 0: break",
        "some = self.heads > 1 and x.any()",
        "none = not x.any()",
        "there = 5 in meta.positions",
        "small = 0 < x.sum() < 5",
        "kept = [part for part in (x, q_lora) if part.any()]",
        "if self.attn_sink.max() > 4: x = x + 1",
    ),
    "compare": ("same = torch.equal(x, x)", "same = q_lora.allclose(q_lora)"),
    "format": (
        "print(x)",
        "text = f'{meta.positions}'",
        "text = str(q_lora)",
        "logger.info('x is %s', x)",
        "print([x, q_lora])",
    ),
    "data-shape": (
        "where = x.nonzero()",
        "where = torch.where(x > 0)",
        "ids = torch.unique(meta.positions)",
        "some = x.masked_select(x > 0)",
        "rows = x.repeat_interleave(meta.positions, dim=0)",
        "counts = torch.bincount(meta.window_store)",
    ),
    "mask-index": (
        "some = x[meta.positions > 3]",
        "some = x[~(meta.positions == 0)]",
        "some = x[meta.csa.is_new[:, 0]]",
        "x[x.isnan().any(dim=1)] = x",
    ),
    "device-shape": (
        "pad = torch.zeros(meta.positions.max(), 4)",
        "pad = x.new_zeros((meta.positions[0], 4))",
        "part = x[: meta.window.lengths[0]]",
        "for number in range(meta.positions[0]): pass",
        "wide = x.expand(meta.positions[0], -1)",
    ),
    "loop": (
        "for row in x: pass",
        "total = sum(x)",
        "largest = max(meta.positions)",
        "rows = [row for row in x]",
        "pairs = list(zip(x, q_lora))",
    ),
    "host-data": (
        "bias = torch.tensor([1, 2])",
        "bias = torch.as_tensor([1.0], device=x.device)",
        "bias = x.new_tensor([1.0])",
    ),
    "move": (
        "x = x.cuda()",
        "x = x.to(cache.kv.device)",
        "x = x.to(device='cuda')",
        "x = x.to('cuda', non_blocking=True)",
    ),
    "synchronize": (
        "torch.cuda.synchronize()",
        "torch.cuda.current_stream().synchronize()",
    ),
    "clock": ("now = time.time()", "dice = random.random()"),
    "environment": ("flag = os.environ['FLAG']", "flag = os.getenv('FLAG')"),
    "host-state": (
        "self.last = x",
        "self.calls += 1",
        "self.seen.append(x)",
        "global calls",
    ),
}
# Lines that read host values alone, or stay on the device.
HARMLESS = (
    "n = x.shape[0]",
    "if x.shape[0] > 4 and self.heads > 2: pass",
    "half = int(x.shape[1] / 2) + len(x) + x.numel() + q_lora.dim()",
    "low = float('-inf') * self.scale",
    "x = x.to(cache.kv.dtype).to(q_lora)",
    "print(x.shape, f'{x.dtype} {self.heads}')",
    "for number in range(x.shape[0]): pass",
    "pad = torch.zeros(x.shape[0], self.heads, device=x.device)",
    "pad = torch.full((2, 3), 0.5, device=x.device)",
    "x = torch.where(x > 0, x, 0)",
    "x = x[meta.positions * 0]",
    "x[meta.positions > 3] = 0",
    "cache.kv[meta.window_store * 0] = 0",
    "rows = x.repeat_interleave(2, dim=0)",
    "rows = x.repeat_interleave(meta.positions, dim=0, output_size=x.shape[0])",
    "root = math.sqrt(self.head_dim) + max(self.heads, 3) + sum((1, 2))",
    "parts = [x]; parts.append(q_lora); total = sum(parts) if parts else x",
    "for part in (x, q_lora): part = part + 1",
    "kinds = {'a': 1}.items()",
    "some = x is not None and self.indexer is None",
    "x, heads = x + 1, self.heads; wide = heads if heads > 2 else 0",
    "x.log(); q_lora.mul_(2)",
    "top = x.topk(2).indices[:, :1]",
)
# rule -> lines of Attention.forward that the dispatch check finds
DISPATCH: dict[str, tuple[str, ...]] = {
    "item": ("peak = x.abs().max().item()",),
    "tolist": ("lengths = meta.positions.tolist()",),
    "to-host": ("on_host = x.to('cpu')", "on_host = x.cpu()", "on_host = x.numpy()"),
    "scalar": ("total = float(x.sum())", "part = x[: meta.window.lengths[0]]"),
    "branch": ("x = x if x.sum() > 0 else x * 2",),
    "compare": ("same = torch.equal(x, x)",),
    "format": ("print(x)", "text = f'{meta.positions}'"),
    "data-shape": ("where = x.nonzero()", "ids = torch.unique(meta.positions)"),
    "mask-index": ("some = x[meta.positions > 3]",),
    "host-data": ("bias = torch.tensor([1, 2])",),
    "move": ("x = x + torch.ones(x.shape[-1], device='cpu')", "x.cuda()"),
    "host-decision": ("x = x + int(meta.positions[0]) * 0.5",),
    "failed": ("raise ValueError('planted')",),
}
# Rules whose faults are planted in a test of their own.
ELSEWHERE = {"replay", "table"}


Plant = Callable[[str], tuple[Sources, int]]


@dataclass(frozen=True)
class Steps:
    """A step on the CPU and one without values, with what tracing the first one saw."""

    cpu: DecodeStep
    meta: DecodeStep
    seen: Trace


@pytest.fixture(scope="module")
def config() -> DSV4Config:
    """Three layers, one of each kind, the first routed by token id."""
    layers = {"num_hidden_layers": 3, "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 0]}
    return DSV4Config.from_dict(shipped_config("tiny", "float32") | layers)


@pytest.fixture(scope="module")
def package() -> Package:
    return Package()


@pytest.fixture(scope="module")
def steps(config: DSV4Config, package: Package) -> Steps:
    cpu, meta = (
        graph_safety.make_step(config, choose(CPU), LENGTHS[0], device)
        for device in ("cpu", "meta")
    )
    return Steps(cpu, meta, trace(cpu.run, package.sources))


@pytest.fixture(scope="module")
def report(config: DSV4Config) -> Report:
    return graph_safety.check(config, CPU)


def planted(package: Package, file: str, line: str) -> tuple[str, int]:
    """The text of one of our files with a line more, and its number."""
    text = next(source.text for source in package.modules.values() if source.file == file)
    anchor = AFTER[file]
    assert text.count(anchor) == 1, f"{file} has changed: choose another line to follow"
    before, after = text.split(anchor)
    indent = anchor[: len(anchor) - len(anchor.lstrip())]
    return f"{before}{anchor}{indent}{line}\n{after}", before.count("\n") + 2


def static_findings(package: Package, steps: Steps, file: str, line: str) -> list[Finding]:
    """What the static check finds in a copy with a line more, at that line: nothing else is."""
    text, number = planted(package, file, line)
    observed = graph_safety.observed_in(steps.seen, file, FUNCTION[file])
    found = check(Source(file, text), FUNCTION[file], observed, steps.seen.returns)
    assert {finding.line for finding in found} <= {number}, found
    return found


# ---- our tree ----


def test_our_tree_has_no_finding(report: Report) -> None:
    assert report.findings == []
    outcomes = {check.name: check.status for check in report.checks}
    assert outcomes == {"static": "ok", "dispatch": "ok", "device": "skipped"}
    assert "a capture needs a CUDA GPU" in report.checks[2].detail
    # 2,192 when this was written: far fewer would be another step.
    operators = re.match(r"(\d+) operators", report.checks[1].detail)
    assert operators and int(operators[1]) > 1500


def test_coverage_names_what_a_step_must_reach(report: Report) -> None:
    ran = {(item.file, item.function) for item in report.covered if item.how == "ran"}
    modules = {
        "sglang_dsv4.reference": "sglang_dsv4/reference.py",
        "sglang_dsv4.attention.reference": "attention/reference.py",
        "sglang_dsv4.attention.reference_metadata": METADATA,
        "sglang_dsv4.moe.reference": "moe/reference.py",
    }
    ops = choose(CPU).providers
    for op, providers in PROVIDERS.items():
        if op == "decode_slots":  # before each step
            continue
        module = next(one.module for one in providers if one.name == ops[op])
        assert (modules[module], op) in ran
    for kind in ("CsaCompressor", "HcaCompressor", "IndexCompressor"):
        assert ("attention/compressor.py", f"{kind}.forward") in ran
    for name in ("Model.forward", "Model._embed", "DecoderLayer.forward"):
        assert ("sglang_dsv4/model.py", name) in ran
    for router in ("HashRouter", "ScoredRouter"):
        assert ("moe/layer.py", f"{router}.forward") in ran
    assert {(METADATA, "build_metadata"), (LAYER, FORWARD)} < ran
    assert ("attention/indexer.py", "Indexer.forward") in ran
    # Routed experts dense and in both kinds of four bits.
    assert {("sglang_dsv4/dequant.py", kind) for kind in ("mxfp4", "nvfp4")} < ran
    others = {item.function: item.how for item in report.covered if item.how != "ran"}
    assert others["DeepseekV4ForCausalLM.forward"] == "in graph"
    checked = [item.lines for item in report.covered if item.how != "device code"]
    assert report.lines == sum(checked) > 500
    assert not any("graph_safety" in item.file for item in report.covered)


# ---- static ----


@pytest.mark.parametrize(
    ("rule", "line"), [(rule, line) for rule, lines in STATIC.items() for line in lines]
)
def test_static_finds(package: Package, steps: Steps, rule: str, line: str) -> None:
    found = static_findings(package, steps, LAYER, line)
    assert rule in {finding.rule for finding in found}, found


@pytest.mark.parametrize("line", HARMLESS)
def test_static_raises_no_false_alarm(package: Package, steps: Steps, line: str) -> None:
    assert static_findings(package, steps, LAYER, line) == []


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        (METADATA, "if batch.positions.max() > 4: window = 4", "branch"),
        (METADATA, "lengths = lengths[lengths > 0]", "mask-index"),
        ("moe/reference.py", "order = order[: sorted_experts[-1]]", "device-shape"),
        ("moe/reference.py", "used = torch.unique(experts)", "data-shape"),
        ("sglang_dsv4/model.py", "elsewhere = elsewhere if elsewhere.any() else local", "branch"),
        ("sglang_dsv4/model.py", "rows = int(local.max())", "scalar"),
    ],
)
def test_static_finds_in_other_functions(
    package: Package, steps: Steps, file: str, line: str, rule: str
) -> None:
    assert [finding.rule for finding in static_findings(package, steps, file, line)] == [rule]


def test_every_rule_has_a_planted_fault() -> None:
    assert {*STATIC, *DISPATCH, *ELSEWHERE} == set(RULES)
    assert all(rule.why and rule.fix for rule in RULES.values())


@pytest.mark.parametrize("line", ["if y.sum() > 0:", "while y.any():", "for row in y:"])
def test_neither_annotations_nor_a_run_are_needed(line: str) -> None:
    text = f"def step(x, scale):\n    y = x.view(-1) * scale\n    {line}\n        pass\n"
    found = check(Source("a.py", text), "step", Observed(), {})
    assert [finding.line for finding in found] == [3]
    host = "def step(x, scale):\n    if scale > 0 and x.shape[0] > 2:\n        pass\n"
    assert check(Source("a.py", host), "step", Observed(), {}) == []


@pytest.mark.parametrize(("first", "second"), [("x", "1"), ("1", "x")])
def test_a_value_of_either_way_counts(first: str, second: str) -> None:
    text = (
        "def step(x: torch.Tensor, flag: bool):\n"
        f"    if flag:\n        y = {first}\n    else:\n        y = {second}\n"
        "    if y > 0:\n        pass\n"
        "    z = 1\n    for _ in range(2):\n        z = y if z else z\n"
    )
    found = check(Source("a.py", text), "step", Observed(), {})
    assert [(finding.line, finding.rule) for finding in found] == [(6, "branch"), (10, "branch")]


TRITON = """\
import torch
import triton
import triton.language as tl

from sglang_dsv4.kernels_triton_launch import pdl_kernel


@triton.autotune(configs=[], key=["n"])
@triton.jit
def _norm_kernel(x, out, n, BLOCK: tl.constexpr):
    if tl.load(x) > 0:
        tl.store(out, int(tl.load(x)))


def rms_norm(x, weight, *, eps):
    out = torch.empty_like(x)
    grid = lambda meta: (triton.cdiv(x.shape[0], meta["BLOCK"]),)
    _launch(x, out, grid)
    return out


def _launch(x, out, grid):
    _norm_kernel[grid](x, out, x.shape[0], BLOCK=128)


def unrelated(x):
    return x.item()
"""


@pytest.mark.parametrize("decorator", ["triton.jit", "pdl_kernel", 'pdl_kernel(version="1")'])
@pytest.mark.parametrize("fault", ["", "    factor = float(weight)\n"])
def test_wrappers_of_kernels_are_checked_and_kernels_are_not(
    fault: str, decorator: str, config: DSV4Config, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider for another machine: its op takes its arguments' kinds from the one that ran."""
    package = Package()
    text = TRITON.replace("    _launch(x", fault + "    _launch(x")
    text = text.replace("@triton.jit", f"@{decorator}")
    package.modules["sglang_dsv4.kernels_x"] = Source("sglang_dsv4/kernels_x.py", text)
    kernels = Provider("x", "sglang_dsv4.kernels_x", lambda machine: "needs another machine")
    monkeypatch.setattr(
        graph_safety, "PROVIDERS", {**PROVIDERS, "rms_norm": (kernels, *PROVIDERS["rms_norm"])}
    )
    covered = list(graph_safety.cover(package, steps.seen))
    how = {item.function: item.how for item in covered if item.file.endswith("kernels_x.py")}
    assert how == {"rms_norm": "provider", "_launch": "provider", "_norm_kernel": "device code"}
    found = graph_safety.check_source(package, steps.seen, covered)
    planted = [(one.rule, one.line) for one in found if one.file.endswith("kernels_x.py")]
    assert planted == ([("scalar", 18)] if fault else [])


def test_provider_without_source_is_told(
    package: Package, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Provider("x", "sglang_dsv4.kernels_x", lambda machine: None)
    monkeypatch.setattr(graph_safety, "PROVIDERS", {**PROVIDERS, "rms_norm": (gone,)})
    assert not any("kernels_x" in one.file for one in graph_safety.cover(package, steps.seen))
    (finding,) = graph_safety.check_tables(package, steps.seen)
    assert finding.rule == "table"
    assert finding.text == "sglang_dsv4.kernels_x:rms_norm does not exist"


# ---- dispatch ----


@pytest.fixture
def plant(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Puts a copy of Attention.forward with a line more in its place; gives Sources and line."""

    def put(line: str) -> tuple[Sources, int]:
        text, number = planted(package, LAYER, line)
        path = tmp_path / "layer.py"
        path.write_text(text)
        namespace: dict[str, object] = {"__name__": "planted"}
        exec(compile(text, str(path), "exec"), namespace)
        monkeypatch.setattr(Attention, "forward", vars(namespace["Attention"])["forward"])
        return Sources({**package.sources.folders, tmp_path: "planted"}), number

    return put


@pytest.mark.parametrize(
    ("rule", "line"), [(rule, line) for rule, lines in DISPATCH.items() for line in lines]
)
def test_dispatch_finds(steps: Steps, plant: Plant, rule: str, line: str) -> None:
    sources, number = plant(line)
    found, _ = graph_safety.watch_steps(steps.cpu, steps.meta, sources)
    assert {(finding.file, finding.line, finding.function) for finding in found} == {
        ("planted/layer.py", number, FORWARD)
    }
    assert rule in {finding.rule for finding in found}, found


def test_dispatch_finds_a_shape_decided_by_a_length(steps: Steps, plant: Plant) -> None:
    """Read past the dispatcher, so that the comparison of runs alone can see it."""
    length = "__import__('numpy').from_dlpack(meta.positions).max()"
    sources, number = plant(f"x = torch.cat([x, x.new_zeros(4 + {length}, x.shape[1])])[:5]")
    found, _ = graph_safety.watch_steps(steps.cpu, steps.meta, sources)
    decisions = [finding for finding in found if finding.rule == "host-decision"]
    assert {(finding.file, finding.line) for finding in decisions} == {("planted/layer.py", number)}
    assert "with 1 120 250 600 -: aten.new_zeros" in decisions[0].text
    assert "604" in decisions[0].text


def test_dispatch_finds_an_operator_too_many(steps: Steps, plant: Plant) -> None:
    length = "__import__('numpy').from_dlpack(meta.positions).max()"
    sources, number = plant(f"x = x + 0 if {length} > 700 else x")
    found, _ = graph_safety.watch_steps(steps.cpu, steps.meta, sources)
    places = {one.line for one in found if one.rule == "host-decision"}
    assert number in places


# ---- device ----


def test_difference_ignores_padding_and_nothing_else() -> None:
    wanted = torch.arange(6.0).view(3, 2)
    found = wanted.clone()
    found[1] = float("nan")
    assert graph_safety_device.difference(found, wanted, [4, None, 5]) is None
    found[2, 1] += 1e-6
    assert graph_safety_device.difference(found, wanted, [4, None, 5]) == (
        "logits differ at lengths 4 - 5"
    )
    wanted[2, 1] = float("nan")
    assert "not finite" in str(graph_safety_device.difference(wanted, wanted, [4, None, 5]))


def test_provider_names_add_the_reference_where_nothing_else_runs() -> None:
    gpu = Machine("cuda", "a GPU", (9, 0))
    names = graph_safety_device.provider_names(gpu, "")
    assert set(choose(gpu, names).providers) == set(PROVIDERS)
    assert graph_safety_device.provider_names(gpu, "all=reference") == "all=reference"


def test_requests_of_a_captured_batch_are_out_of_step() -> None:
    """They start at other tokens, with padding among them, and none outgrows its cache."""
    assert graph_safety_device.starts_of(1) == [1]
    assert graph_safety_device.starts_of(6) == [1, 120, 250, None, 8, 127]
    starts = [start for start in graph_safety_device.starts_of(256) if start is not None]
    assert len(set(starts)) > 100
    assert max(starts) + graph_safety_device.STEPS <= graph_safety_step.CONTEXT


class Replayed:
    """A graph without a GPU: a replay runs the step."""

    def __init__(self, step: DecodeStep, logits: torch.Tensor, fault: float) -> None:
        self.step, self.logits, self.fault = step, logits, fault

    def replay(self) -> None:
        self.logits.copy_(self.step.run() + self.fault)


@pytest.mark.parametrize("fault", [0.0, 1e-3])
def test_device_check_without_a_device(
    config: DSV4Config, package: Package, monkeypatch: pytest.MonkeyPatch, fault: float
) -> None:
    """All but the capture itself, in both dtypes."""

    def capture(step: DecodeStep) -> tuple[Replayed, torch.Tensor]:
        logits = step.run()
        return Replayed(step, logits, fault), logits

    monkeypatch.setattr(graph_safety_device, "capture", capture)
    monkeypatch.setattr(graph_safety_device, "STEPS", 2)
    found, detail = graph_safety.check_device(config, CPU, package.sources, "", batches=(1, 5))
    if fault:
        assert [finding.rule for finding in found] == ["replay"]
        assert found[0].text == "batch 1, torch.bfloat16: logits differ at lengths 1"
    else:
        assert found == [] and "2 replays equal eager bit for bit at batch 1 5" in detail


@pytest.mark.parametrize("size", ["0", "257", "-1", "some"])
def test_command_refuses_other_batch_sizes(capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["graph-check", "--batch", size])
    assert stop.value.code == 2
    assert "is not a number from 1 to 256" in capsys.readouterr().err


@pytest.mark.gpu((8, 0))
def test_device_check_is_content(config: DSV4Config, package: Package) -> None:
    found, detail = graph_safety.check_device(
        config, Machine.probe(), package.sources, "", batches=(1, 3, 8)
    )
    assert found == []
    assert "300 replays equal eager bit for bit at batch 1 3 8, in bfloat16 and float32" in detail


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("peak = x.abs().max().item()", "synchronize"),
        ("x = x + x.new_tensor([0.5])", "synchronize"),
        ("self.scale = self.scale * 1.01", "replay"),
    ],
)
def test_device_check_finds(config: DSV4Config, plant: Plant, line: str, rule: str) -> None:
    sources, number = plant(line)
    found, _ = graph_safety.check_device(config, Machine.probe(), sources, "")
    assert [finding.rule for finding in found] == [rule]
    assert rule == "replay" or (found[0].file, found[0].line) == ("planted/layer.py", number)


# ---- exceptions and tables ----


def test_exceptions_are_counted_and_unused_ones_reported() -> None:
    findings = [Finding("a.py", line, "item", "static", "step", "x.item()") for line in (3, 9)]
    other = Finding("a.py", 5, "loop", "static", "step", "for row in x")
    used = Allowed("a.py", "step", "item", "a reason")
    unused = Allowed("a.py", "gone", "item", "a reason")
    left, counted = apply_allowed([*findings, other], [used, unused], "table.py")
    assert counted == [(used, 2), (unused, 0)]
    assert [(one.file, one.rule) for one in left] == [("a.py", "loop"), ("table.py", "table")]


def test_tables_are_checked(
    config: DSV4Config, package: Package, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert graph_safety.check_tables(package, steps.seen) == []
    wrong = {
        "sglang_dsv4.model:Model.gone": "does not exist",
        "sglang_dsv4.attention.metadata:entry_rows": "and a decode step runs it",
    }
    monkeypatch.setattr(graph_safety, "OUTSIDE", wrong)
    found = graph_safety.check_tables(package, steps.seen)
    assert [finding.rule for finding in found] == ["table", "table"]
    for finding, (name, fault) in zip(found, wrong.items(), strict=True):
        assert name in finding.text and fault in finding.text


def test_small_step_closes_entries_of_every_kind() -> None:
    """What the chosen lengths are for: a boundary of 4, 128 and the page, in one batch."""
    after = [length + 1 for length in LENGTHS[1] if length is not None]
    assert all(end % 4 == 0 for end in after) and any(end % 128 == 0 for end in after)
    assert any(end % 256 == 0 for end in after)
    assert max(after) == graph_safety_step.CONTEXT


# ---- the command ----


def test_command_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["graph-check", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "  sglang-dsv4 graph-check --static-only " in text and "--json" in text


def test_command_prints_the_inventory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph-check", "--static-only"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  static +ok +\d+ functions, \d+ lines; 0 findings$", text, re.M)
    assert re.search(r"^  dispatch +skipped +only the source was asked for$", text, re.M)
    assert "  attention/layer.py: Attention.forward, Attention._keys, Attention._project" in text
    assert "DeepseekV4ForCausalLM.forward (in graph)" in text
    assert "  sglang_dsv4.weights:load: start-up: loading" in text
    assert "DSV4Backend.init_forward_metadata_in_graph: host-state, 1 found: " in text


def test_command_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = Allowed(LAYER, FORWARD, "item", "a reason")
    monkeypatch.setattr(graph_safety, "ALLOWED", (unused,))
    assert main(["graph-check", "--static-only", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is False
    assert content["allowed"] == [
        {"file": LAYER, "function": FORWARD, "rule": "item", "reason": "a reason", "matches": 0}
    ]
    (finding,) = [one for one in content["findings"] if one["rule"] != "host-state"]
    assert finding["rule"] == "table" and finding["fix"] and finding["why"]
    assert content["functions"] and content["lines"] > 500
    assert [check["status"] for check in content["checks"]] == ["failed", "skipped", "skipped"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_command_refuses_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph-check", "--device", "cuda"]) == 2
    assert "torch finds no CUDA GPU" in capsys.readouterr().err


def test_command_fails_on_a_planted_fault(
    repository: Path, package: Package, tmp_path: Path
) -> None:
    """A copy of the whole package, in the shape of a wheel, with one line more."""
    copy = tmp_path / "sglang_dsv4"
    for source, target in (("sglang_dsv4", copy), ("attention", copy / "attention")):
        shutil.copytree(repository / source, target, ignore=shutil.ignore_patterns("nano"))
    shutil.copytree(repository / "moe", copy / "moe")
    text, number = planted(package, LAYER, "peak = x.abs().max().item()")
    (copy / LAYER).write_text(text)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from sglang_dsv4.cli import main\n"
    command = [sys.executable, "-c", code + "sys.exit(main(sys.argv[1:]))", str(tmp_path)]
    result = subprocess.run(
        [*command, "graph-check", "--device", "cpu"], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 1, result.stderr
    place = f"{LAYER}:{number}"
    assert f"  {place}  item (static)  x.abs().max().item()" in result.stdout
    assert f"  {place}  item (dispatch)  item" in result.stdout
    assert f"      fix: {RULES['item'].fix}" in result.stdout
