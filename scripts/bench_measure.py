"""What bench_vs_builtin.py asks of a running server, and how it reads times and memory from it."""

import http.client
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import serving

LAUNCHER = str(Path(__file__).with_name("bench_server.py"))
INTERVAL = 8  # decode steps between two messages of a stream: 128 requests must not wait for HTTP
TIMEOUT = 300.0  # of a request, in seconds

Observation = tuple[float, int]  # when a message came, and how many tokens the request had then


class MeasureError(RuntimeError):
    """A measurement whose answer is not what was asked for."""


class Server(serving.Server):
    """Starts with bench_server.py, as users start SGLang: spawned processes, its own warm-up."""

    def command(self) -> list[str]:
        command = [sys.executable, LAUNCHER, "--model-path", str(self.checkpoint)]
        command += ["--port", str(self.port), "--enable-cache-report"]
        for option, value in self.options.items():
            if value is not None:
                command += [option, value] if value else [option]
        return command


def random_ids(seed: str, length: int, vocabulary: int) -> list[int]:
    """Token ids without those that begin, end and pad a text; the same for the same seed."""
    return random.Random(seed).choices(range(3, vocabulary), k=length)


# ---- decode ----


def decode(server: Server, prompts: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
    """Milliseconds of a decode step of all prompts at once, the average over about `steps` steps.

    Raises MeasureError where a request ends early, or the batch never decodes at its full size.
    """
    streams, cached = stream(server, prompts, steps + 1)
    found = step_time(streams)
    if found is None:
        raise MeasureError(
            f"the {len(prompts)} requests were never decoded all at once{why_not(server)}"
        )
    seconds, counted = found
    return {"value": 1000 * seconds, "steps": counted, "cached": cached}


def why_not(server: Server) -> str:
    """What the server says of how many requests it can decode at once; empty where it does not."""
    try:
        state = server.state()
        most = state.get("effective_max_running_requests_per_dp")
        window = state.get("memory_usage", {}).get("token_capacity_swa")
    except Exception:  # an error has been found; that of asking must not hide it
        return ""
    told = [] if most is None else [f"runs at most {most:,}"]
    if window is not None:
        told.append(f"has window rows for {window:,} tokens in pages of {state.get('page_size')}")
    return f": the server {' and '.join(told)}" if told else ""


def stream(
    server: Server,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    decoding: Callable[[], object] | None = None,
) -> tuple[list[list[Observation]], int]:
    """Observations of each prompt's greedy answer of `tokens` tokens, and how many of all prompts'
    tokens came from the cache. decoding: called once, when every answer has begun."""
    waiting = set(range(len(prompts)))
    seen: list[list[Observation]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    body = {"input_ids": list(map(list, prompts)), "stream": True}
    body["sampling_params"] = _sampling(tokens) | {"stream_interval": INTERVAL}
    for message in messages(server, body):
        meta, index = message["meta_info"], message["index"]
        seen[index].append((time.perf_counter(), meta["completion_tokens"]))
        cached[index] = meta.get("cached_tokens") or 0
        if waiting:
            waiting.discard(index)
            if not waiting and decoding is not None:
                decoding()
        _check_end(meta["finish_reason"])
    short = [index for index, each in enumerate(seen) if not each or each[-1][1] != tokens]
    if short:
        raise MeasureError(f"requests {short[:5]} did not answer with {tokens} tokens")
    return seen, sum(cached)


def step_time(streams: Sequence[Sequence[Observation]]) -> tuple[float, int] | None:
    """Seconds of a step while every request decodes, and over how many steps that was seen.

    That is after the last one's first token and until the first one's last. A request gets one
    token a step, so its messages in between tell both time and steps; the number returned is that
    of the request which was seen longest.
    """
    begin = max(each[0][0] for each in streams)
    end = min(each[-1][0] for each in streams)
    seconds, steps, most = 0.0, 0, 0
    for each in streams:
        inside = [one for one in each if begin < one[0] <= end]
        if len(inside) >= 2:
            (first, before), (last, after) = inside[0], inside[-1]
            seconds, steps, most = (
                seconds + last - first,
                steps + after - before,
                max(most, after - before),
            )
    return (seconds / steps, most) if steps else None


def messages(server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server-sent events of a streamed /generate."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/generate", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise MeasureError(f"HTTP {response.status}: {response.read()[:300]!r}")
        yield from events(response)
    finally:
        connection.close()


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Raises MeasureError for an event that is an error."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        text = line[len(b"data:") :].strip()
        if text == b"[DONE]":
            return
        message = json.loads(text)
        if "error" in message:
            raise MeasureError(str(message["error"])[:300])
        yield message


def _sampling(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _check_end(reason: dict[str, Any] | None) -> None:
    """A request may only end by its length; SGLang reports NaN logits as a stop."""
    if reason is not None and reason["type"] != "length":
        raise MeasureError(f"a request ended otherwise than asked for: {reason}")


# ---- prefill ----


def prefill(server: Server, prompt: Sequence[int]) -> dict[str, Any]:
    """Milliseconds from the request to the first token of a prompt that is not in the cache."""
    body = {"input_ids": list(prompt), "sampling_params": _sampling(1)}
    start = time.perf_counter()
    meta = server.request("/generate", body)["meta_info"]
    value = 1000 * (time.perf_counter() - start)
    _check_end(meta["finish_reason"])
    if meta["cached_tokens"] or meta["completion_tokens"] != 1:
        raise MeasureError(f"not a whole prefill: {meta}")
    return {"value": value, "tokens_per_second": 1000 * len(prompt) / value}


# ---- checks ----

# Of what SGLang, torch and CUDA write when something went wrong.
ERRORS = re.compile(
    r"Traceback \(most recent call last\)|hit an exception|CUDA error|out of memory|NaN happened"
    r"|Segmentation fault|device-side assert"
)


def log_error(text: str) -> str | None:
    """The first line of a log that tells of an error."""
    return next((line.strip()[:200] for line in text.splitlines() if ERRORS.search(line)), None)


def finite(server: Server, prompt: Sequence[int], tokens: int = 8) -> tuple[bool, str]:
    """Whether an answer has the right number of tokens, with finite log-probabilities."""
    body = {"input_ids": list(prompt), "sampling_params": _sampling(tokens), "return_logprob": True}
    meta = server.request("/generate", body)["meta_info"]
    found = [entry[0] for entry in meta["output_token_logprobs"]]
    good = [one for one in found if one is not None and abs(one) < 1e4]
    return len(good) == tokens, f"{len(good)} of {tokens} log-probabilities are finite"


def served(info: dict[str, Any], ours: bool) -> tuple[bool, str]:
    """Whether the class that should serve does, by what the scheduler says."""
    state = info["internal_states"][0].get("sglang_dsv4")
    if state is None:
        names = ("attention_backend", "moe_runner_backend", "kv_cache_dtype", "quantization")
        return not ours, "built-in, " + ", ".join(f"{name} {info.get(name)}" for name in names)
    right = ours and str(state.get("model_class", "")).startswith("sglang_dsv4.")
    providers = ", ".join(sorted(set(state.get("ops", {}).values())))
    return right, f"{state.get('model_class')}, rows {state.get('rows')}, ops by {providers}"


# ---- start ----

# What a start has behind it when SGLang's log has a line with this for the first time, in order.
STAGES = {
    "server imported": "server_args=",
    "scheduler imported": "Init parallel begin",
    "weights": "Load weight end",
    "cache": "Memory pool end",
    "graphs": "max_total_num_tokens=",
    "warm": "ready to roll",
}
_TIME = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.MULTILINE)


def stages(log: str, begin: float) -> dict[str, int]:
    """Whole seconds from `begin`, a time.time(), to each of STAGES that the log tells of."""
    found: dict[str, int] = {}
    for line in log.splitlines():
        match = _TIME.match(line)
        if match is None:
            continue
        for stage, text in STAGES.items():
            if stage not in found and text in line:
                then = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S"))
                found[stage] = max(0, round(then - begin))
    return found


# ---- memory ----

_PER_TOKEN = re.compile(r"bytes_per_full_token=([\d.]+)")
_GRAPHS = re.compile(r"Capture \S.*?CUDA graph end\..*?mem usage=([\d.]+) GB")
_ALLOCATED = re.compile(r"bench_server: weights take (\d+) bytes")


def memory(info: dict[str, Any], log: str) -> dict[str, Any]:
    """GB as SGLang counts them (2^30 bytes): weights, cache, graphs; and bytes of the cache for
    each token of context, window rows in their share included.

    by_free_memory: which of them SGLang takes for how much less of the GPU's memory was free
    afterwards, so that servers which start at the same moment change them.
    """
    held = info["internal_states"][0].get("memory_usage") or {}
    graph = held.get("graph")
    by_log = [float(value) for value in _GRAPHS.findall(log)]
    per_token, allocated = _PER_TOKEN.search(log), _ALLOCATED.search(log)
    return {
        "weights": int(allocated[1]) / 2**30 if allocated else held.get("weight"),
        "cache": held.get("kvcache"),
        "graphs": sum(graph.values()) if graph else (sum(by_log) if by_log else None),
        "bytes_per_token": float(per_token[1]) if per_token else None,
        "tokens": held.get("token_capacity"),
        "by_free_memory": ["graphs"] if allocated else ["weights", "graphs"],
    }
