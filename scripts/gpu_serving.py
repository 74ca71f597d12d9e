"""Parts of gpu_acceptance.py that serve: the trained model, and large shapes with dummy weights."""

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_measure
import torch
from bench_variants import VARIANTS, environment, weight_bytes, write_folder
from gpu_acceptance import Run

from serving import Reply, Server
from sglang_dsv4 import expert_storage, linear_storage
from sglang_dsv4.cli_make_tiny import shipped_config
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import TensorFormat
from sglang_dsv4.precision import AUTO
from sglang_dsv4.tensor_table import expected_tensors

START_LIMIT = 500.0  # the first start compiles

# In BF16 another batch or another cut of a prompt adds in another order; docs/nano-quality.md has
# what that amounted to on a CPU, and the same bound.
LOGPROB = 0.3
# Tokens may differ only where the two best were this close.
TIE = 2 * LOGPROB
Steps = list[list[Any]]


def options(run: Run, **changed: str | None) -> dict[str, str | None]:
    """Of the tests' servers, on the run's device: its defaults, so CUDA graphs and overlap."""
    named = {"--" + name.replace("_", "-"): value for name, value in changed.items()}
    return {"--device": run.device, "--sleep-on-idle": None, **named}


def user_server(
    run: Run, folder: Path, log: str, env: dict[str, str] | None = None, **changed: str | None
) -> Server:
    """One that starts as users start it: its start is measured, and no process that has begun to
    use a GPU may be forked."""
    return Server(folder, run.out / log, options=options(run, **changed), env=env, forked=False)


def started(server: Server) -> float:
    """Seconds until the server answers."""
    server.start_limit = START_LIMIT
    start = time.monotonic()
    server.__enter__()
    return round(time.monotonic() - start, 1)


def compared(one: Reply, other: Reply) -> dict[str, Any]:
    """Tokens alike up to where a near tie let them part, and the largest difference until there."""
    pairs = zip(one.tokens, other.tokens, strict=True)
    alike = next((step for step, (a, b) in enumerate(pairs) if a != b), len(one.tokens))
    worst = max(
        (abs(a - b) for a, b in zip(one.logprobs[:alike], other.logprobs[:alike], strict=True)),
        default=0.0,
    )
    tie = alike == len(one.tokens) or min(one.gaps[alike], other.gaps[alike]) <= TIE
    return {
        "ok": tie and worst <= LOGPROB,
        "alike": alike,
        "tokens": len(one.tokens),
        "logprob": round(worst, 5),
    }


class Checks:
    """A part's rows: what was asked, whether it is right, and what was found."""

    def __init__(self) -> None:
        self.rows: Steps = [["check", "ok", "found"]]

    def add(self, name: str, ok: bool, found: Any) -> None:
        self.rows.append([name, "ok" if ok else "FAILED", found])
        print(*self.rows[-1], sep="  ", flush=True)

    def compare(self, name: str, one: Reply, other: Reply) -> None:
        result = compared(one, other)
        self.add(
            name,
            result["ok"],
            f"{result['alike']} of {result['tokens']} tokens alike, log-probabilities within"
            f" {result['logprob']}",
        )

    def result(self) -> dict[str, Any]:
        return {"ok": all(row[1] == "ok" for row in self.rows[1:]), "table": self.rows}


def caches(folder: Path) -> dict[str, str]:
    """Empty just-in-time caches of our own: Triton's, SGLang's, FlashInfer's."""
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "SGLANG_JIT_CACHE_DIR": str(folder / "sglang"),
        "FLASHINFER_WORKSPACE_BASE": str(folder / "flashinfer"),
    }


# ---- the trained model ----


def nano(run: Run) -> dict[str, Any]:
    """Answers; batches, prefix hits and chunks alike; time to ready, cold and warm."""
    import nano as trained

    checks, cold = Checks(), caches(run.out / "cold_caches")
    whole = user_server(run, trained.FOLDER, "nano_cold.log", cold, max_running_requests="32")
    try:
        checks.add("time to ready, cold", True, f"{started(whole)} s")
        _says_who_serves(checks, whole, run.on_gpu)
        _answers(run, checks, trained, whole)
        prompt = _long_prompt(trained)
        direct = whole.generate(prompt, 48)
        _paths(checks, whole, prompt, direct)
    finally:
        whole.stop()
    chunked = user_server(run, trained.FOLDER, "nano_warm.log", cold, chunked_prefill_size="512")
    try:
        checks.add("time to ready, warm", True, f"{started(chunked)} s")
        checks.compare("chunks of 512 tokens = whole", chunked.generate(prompt, 48), direct)
    finally:
        chunked.stop()
    return checks.result()


def _says_who_serves(checks: Checks, server: Server, on_gpu: bool) -> None:
    """Ours serves, and with kernels where there is a GPU."""
    state = server.state().get("sglang_dsv4", {})
    ours = str(state.get("model_class", "")).startswith("sglang_dsv4.")
    names = sorted(set(state.get("ops", {}).values()))
    checks.add("our model serves", ours, f"rows {state.get('rows')}, ops by {', '.join(names)}")
    log = server.log.read_text(errors="replace")
    checks.add("the scheduler is well", "hit an exception" not in log, f"log {server.log.name}")
    captures = re.findall(r"Capture .*CUDA graph end.*", log)
    checks.add("CUDA graphs", bool(captures) or not on_gpu, (captures or ["none"])[-1][-90:])


def _answers(run: Run, checks: Checks, trained: Any, server: Server) -> None:
    text = trained.nano_text
    few = 0 if run.on_gpu else 1
    for name, questions, least in (
        ("held-out facts", text.fact_questions("phrasing", 4 if few else 60, seed=1), 0.9),
        ("chats", text.chat_questions(1 if few else 10, thinking=True, seed=1), 0.8),
        ("tool calls", text.tool_questions(1 if few else 5, seed=1), 0.8),
        ("needles 1,024 tokens back", text.needle_questions(1024, 1 if few else 5, seed=1), 0.8),
        ("recitations", text.recitation_questions()[:1] if few else text.recitation_questions(), 1),
    ):
        share = trained.share_right(server, questions, 0)
        checks.add(name, share >= least, f"{share:.2f} of {len(questions)} right")
    questions = text.fact_questions("phrasing", 4 if few else 32, seed=2)
    alone = [server.generate(trained.ids(one.prompt), 8) for one in questions]
    server.flush()
    together = server.generate_all([trained.ids(one.prompt) for one in questions], 8, 16)
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        result = compared(one, other)
        if not result["ok"]:
            checks.add(f"batched = alone, question {number}", False, str(result))
    checks.add("batched = alone", True, f"{len(questions)} questions, 16 at a time")


def _long_prompt(trained: Any) -> list[int]:
    """Some 1,500 tokens of a story that the model can go on with."""
    prompt: list[int] = []
    for question in trained.nano_text.needle_questions(1024, 4, seed=3):
        prompt += trained.ids(question.prompt)
        if len(prompt) >= 1500:
            break
    return prompt[:1500]


def _paths(checks: Checks, server: Server, prompt: Sequence[int], cold: Reply) -> None:
    """A prefix hit, and a second cold run, equal the first one."""
    hit = server.generate(prompt, len(cold.tokens))
    wanted = len(prompt) // 256 * 256 - (256 if len(prompt) % 256 == 0 else 0)
    checks.add("cached tokens of the second", hit.cached >= wanted - 256, hit.cached)
    checks.compare("prefix hit = cold", hit, cold)
    server.flush()
    again = server.generate(prompt, len(cold.tokens))
    checks.add("flushed", again.cached == 0, f"{again.cached} cached")
    checks.compare("cold again = cold", again, cold)


# ---- large shapes, dummy weights ----

# name -> preset of make-tiny, what is changed in its config, tokens of the pool
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "flash, 4 layers": (
        "flash-2l",
        {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], "n_routed_experts": 256},
    ),
    "pro, 2 layers": ("pro-2l", {"n_routed_experts": 384}),
}
SMALL = {"tiny": ("tiny", {"vocab_size": 1024})}
CHUNK = 2048
RELEASE = VARIANTS["ours-mxfp4"]  # what the vendor's config.json claims, and our defaults


def dummy(run: Run) -> dict[str, Any]:
    """Each shape served with --load-format dummy, as a checkpoint that is stored as the vendor's is
    (FP8, MXFP4 experts): paths alike, finite, and the time of a step."""
    checks = Checks()
    timed: Steps = [["model", "batch", "ms a step"]]
    for name, (preset, changes) in (SHAPES if run.on_gpu else SMALL).items():
        folder = run.out / f"dummy_{preset}"
        raw = shipped_config(preset, "bfloat16") | changes
        folder.mkdir(exist_ok=True)
        write_folder(folder, raw, RELEASE)
        limits = options(
            run,
            load_format="dummy",
            context_length="16384" if run.on_gpu else "4096",
            max_total_tokens="131072" if run.on_gpu else "16384",
            max_running_requests="64" if run.on_gpu else "8",
            chunked_prefill_size=str(CHUNK),
        )
        log = run.out / f"dummy_{preset}.log"
        # Its dummies are plausible; the caller's switches do not change what is served.
        server = bench_measure.Server(folder, log, options=limits, env=environment(RELEASE))
        try:
            checks.add(f"{name}: time to ready", True, f"{started(server)} s")
            _says_who_serves(checks, server, run.on_gpu)
            _says_what_is_served(checks, server, run, name)
            _dummy_paths(checks, server, DSV4Config.from_dict(raw), name)
            for batch in (1, 16, 64) if run.on_gpu else (1, 4):
                step = step_ms(server, batch, 1024 if run.on_gpu else 64, raw["vocab_size"])
                timed.append([name, batch, step])
                print(*timed[-1], sep="  ", flush=True)
        except Exception as error:  # one shape must not hide the other
            checks.add(name, False, f"{type(error).__name__}: {error}"[:300])
        finally:
            server.stop()
        (run.out / "dummy_steps.json").write_text(json.dumps(timed))
    result = checks.result()
    return result | {"steps": timed, "table": result["table"] + timed}


def _says_what_is_served(checks: Checks, server: Server, run: Run, name: str) -> None:
    """config.json claims the release's formats, a GPU keeps them in every layer, and what the
    weights take there agrees: in BF16 the experts alone would take three times as much."""
    raw = json.loads((server.checkpoint / "config.json").read_text())
    config = DSV4Config.from_dict(raw)
    layers, slots = set(range(config.num_hidden_layers)), expected_tensors(config)
    held, formats = expert_storage.from_claims(raw, config), linear_storage.from_claims(raw, slots)
    claimed = sorted({one.value for each in held.values() for one in each})
    others = sorted({one.value for one in formats.values()})
    right = claimed == [TensorFormat.MXFP4.value] and others == [TensorFormat.FP8.value]
    stored = f"{'/'.join(claimed) or 'BF16'} experts, {'/'.join(others) or 'BF16'} matrices"
    ops = server.state()["sglang_dsv4"]["ops"]
    experts = expert_storage.decide(config, held, chosen=AUTO, device=run.device, ranks=1)
    linears = linear_storage.decide(
        config, slots, formats, chosen=AUTO, device=run.device, run=torch.bfloat16, ranks=1
    )
    kept = set(experts.groups) == set(linears.layers) == layers
    if not run.on_gpu:  # where all is dequantised, and SGLang cannot tell memory apart
        found = f"stored: {stored}; in memory: BF16, experts by {ops['routed_experts']}"
        checks.add(f"{name}: formats", right and not kept, found)
        return
    log = server.log.read_text(errors="replace")
    taken = bench_measure.memory(server.request("/server_info"), log)["weights"]
    planned = weight_bytes(raw, RELEASE) / 2**30  # with other matrices in BF16: more than there is
    fits = bool(taken) and taken <= 1.15 * planned + 1
    found = (
        f"{stored}, kept; experts by {ops['routed_experts_fp4']}, FP8 by {ops['linear_fp8']};"
        f" weights {taken or 0:.1f} GB, at most about {planned:.1f} expected"
    )
    checks.add(f"{name}: formats", right and kept and fits, found)


def _dummy_paths(checks: Checks, server: Server, config: DSV4Config, name: str) -> None:
    """Whole, in chunks, from a cached prefix, alone and together."""
    rng = random.Random(0)
    prompts = [random_ids(rng, length, config.vocab_size) for length in (CHUNK + 952, 600, 130, 1)]
    alone = [server.generate(prompt, 16) for prompt in prompts]
    finite = all(abs(logprob) < 1e4 for reply in alone for logprob in reply.logprobs)
    checks.add(f"{name}: log-probabilities are finite", finite, f"{len(prompts)} prompts")
    hit = server.generate(prompts[0], 16)
    checks.add(f"{name}: cached tokens", hit.cached >= CHUNK, hit.cached)
    checks.compare(f"{name}: prefix hit = in chunks, cold", hit, alone[0])
    server.flush()
    for prompt, one in zip(server.generate_all(prompts, 16), alone, strict=True):
        checks.compare(f"{name}: together = alone", prompt, one)


def random_ids(rng: random.Random, length: int, vocabulary: int) -> list[int]:
    """Token ids without the two that begin and end a text."""
    return [rng.randrange(2, vocabulary) for _ in range(length)]


def step_ms(server: Server, batch: int, length: int, vocabulary: int) -> float:
    """Milliseconds of a decode step: requests of 65 tokens less requests of 1, over 64 steps."""
    rng = random.Random(batch)
    prompts = [random_ids(rng, length, vocabulary) for _ in range(batch)]

    def seconds(count: int) -> float:
        server.flush()
        body = {"input_ids": prompts, "sampling_params": _greedy(count)}
        start = time.monotonic()
        server.request("/generate", body)
        return time.monotonic() - start

    seconds(2)
    short, long = (min(_repeated(seconds, count)) for count in (1, 65))
    return round((long - short) / 64 * 1000, 2)


def _repeated(function: Callable[[int], float], count: int) -> list[float]:
    return [function(count) for _ in range(3)]


def _greedy(count: int) -> dict[str, Any]:
    return {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
