"""The part `load` of gpu_acceptance.py: one small server, and everything at once.

A model in BF16 adds in another order in another batch. So under load an
answer may part from the one that the idle server gave only where there the two best tokens were
less than TIE = 0.6 apart in their logits, and everything after such a step goes unchecked. At the
same composition of a batch not one bit may differ.
"""

import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import gpu_serving
from gpu_acceptance import Run
from gpu_load_cases import (
    LONGEST,
    PAGE,
    Case,
    Job,
    Tally,
    cases,
    far_prompt,
    identical,
    jobs,
    pages,
    spread,
)
from gpu_serving import TIE, Checks, compared, started, user_server

from serving import Reply, Server
from sglang_dsv4.config import DSV4Config

RUNS_ON = 512  # tokens that a request asks for beyond those compared, if it is to be aborted
CHECKED = 0.9  # of all tokens that were answered at least these come before a near tie
CSA_RATIO = 4  # tokens in an entry among which the indexer chooses


@dataclass(frozen=True)
class Scale:
    """How much is asked. pool, chunk, far: tokens; batches: sizes for the spread."""

    distinct: int
    requests: int
    in_flight: int
    pool: int
    chunk: int
    repeated: int
    batches: tuple[int, ...]
    far: int


# What is in flight, some two pages each, wants more than the pool, and so do all prompts together.
ON_GPU = Scale(200, 2000, 64, 20480, 512, 32, tuple(range(1, 21)), 7700)
ON_CPU = Scale(14, 56, 12, 2048, 512, 4, (1, 3), 1400)


# ---- requests ----


def body(prompts: Any, count: int, **more: Any) -> dict[str, Any]:
    """Of a greedy request, or of several at once."""
    return {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        **more,
    }


def reply_of(answer: dict[str, Any]) -> Reply:
    """An answer of /generate, or of its stream up to there."""
    meta = answer["meta_info"]
    return Reply(
        tokens=tuple(answer["output_ids"]),
        logprobs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
        gaps=tuple(best[0] - second[0] for best, second in meta["output_top_logprobs"]),
        cached=meta.get("cached_tokens", 0),  # not told of a request that was aborted in the queue
        meta=meta,
    )


def together(server: Server, prompts: Sequence[Sequence[int]], count: int) -> list[Reply]:
    """Prompts that one forward batch after the other computes together.

    SGLang hands the scheduler a list of token ids as one message, and the scheduler queues all of
    it before it looks for a batch: on an idle server with an empty cache, which has room for all,
    chunks and batches follow from the list alone. (Lists of text are sent one by one.)
    """
    listed = [list(prompt) for prompt in prompts]
    return [reply_of(answer) for answer in server.request("/generate", body(listed, count))]


def cut_short(server: Server, case: Case, job: Job, name: str) -> Reply:
    """What a stream said until it was aborted."""
    wanted = body(list(case.prompt), case.count + RUNS_ON, rid=name, stream=True)
    request = urllib.request.Request(
        server.url + "/generate", json.dumps(wanted).encode(), {"Content-Type": "application/json"}
    )
    last: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=300) as stream:
        aborted = False
        for event in events(stream):
            last = event
            if aborted or len(event["output_ids"]) < job.stop:
                continue
            if job.how == "client":
                break  # closes the connection
            server.request("/abort_request", {"rid": name})
            aborted = True
    return reply_of(last)


def events(stream: Any) -> Iterator[dict[str, Any]]:
    for line in stream:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def flush(server: Server) -> None:
    """Empty the cache once the last request has ended."""
    server.request("/flush_cache?timeout=30", {})


def idle(server: Server) -> dict[str, Any]:
    """The scheduler's load once it has nothing in hand, or after a minute."""
    deadline = time.monotonic() + 60
    while True:
        (load,) = server.request("/v1/loads")["loads"]
        if not load["num_running_reqs"] + load["num_waiting_reqs"] or time.monotonic() > deadline:
            return dict(load)
        time.sleep(0.1)


# ---- what is shown ----


class Load:
    """One server, what it was asked alone, and the rows."""

    def __init__(self, trained: Any, scale: Scale, server: Server) -> None:
        self.trained, self.scale, self.server = trained, scale, server
        self.checks = Checks()
        self.details: dict[str, Any] = {"scale": asdict(scale), "tie": TIE}
        self.cases = cases(trained, scale.distinct, seed=1)

    def alone(self, case: Case, count: int | None = None) -> Reply:
        """With nothing else in the server and nothing in its cache."""
        flush(self.server)
        return self.server.generate(case.prompt, count or case.count)

    def mixed(self) -> None:
        """Requests of all kinds, some aborted, through a pool that is too small for them."""
        begin = time.monotonic()
        alone = [self.alone(case) for case in self.cases]
        self.checks.add(
            "answers of the idle server",
            all(one.cached == 0 for one in alone),
            f"{len(alone)} prompts in {time.monotonic() - begin:.0f} s, none cached",
        )
        flush(self.server)
        asked = jobs(self.cases, self.scale.requests, self.scale.in_flight, seed=2)
        begin = time.monotonic()
        with ThreadPoolExecutor(self.scale.in_flight) as pool:
            said = list(pool.map(self._said, range(len(asked)), asked))
        seconds, tally = time.monotonic() - begin, Tally()
        for job, answer in zip(asked, said, strict=True):
            tally.add(self.cases[job.case], job, answer, alone[job.case])
        self.details["load"] = asdict(tally) | {"seconds": seconds}
        self._judge(tally, seconds)
        self._pressure(asked, said, alone)
        self._aborts(asked, said)
        self._nothing_is_left(alone)

    def _said(self, number: int, job: Job) -> Reply | str:
        """The answer, or the error: one must not hide the others."""
        case = self.cases[job.case]
        try:
            if job.how:
                # With a full stop: /abort_request aborts all whose names begin with the one given.
                return cut_short(self.server, case, job, f"load {number}.")
            return self.server.generate(case.prompt, case.count)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]

    def _judge(self, tally: Tally, seconds: float) -> None:
        self.checks.add(
            f"under load = idle, but where the idle gap is below {TIE}",
            tally.answers == self.scale.requests and not tally.wrong,
            f"{tally.answers} requests, {self.scale.in_flight} in flight, {seconds:.0f} s:"
            f" {tally.equal} equal token for token, {len(tally.ties)} parted at a near tie,"
            f" {len(tally.wrong)} wrong; smallest gap {tally.smallest_gap()};"
            f" log-probabilities before within {tally.logprob:.5f}",
        )
        for one in tally.wrong[:20]:
            self.checks.add("wrong", False, json.dumps(one))
        self.checks.add(
            "tokens compared",
            tally.checked >= CHECKED * tally.tokens > 0,
            f"{tally.checked} of {tally.tokens}; the others come after a parting",
        )

    def _pressure(
        self, asked: Sequence[Job], said: Sequence[Reply | str], alone: Sequence[Reply]
    ) -> None:
        """Hits and retractions are told with each answer. Evictions follow: the cache takes all
        whole pages of a request that ended by itself, and has no more of them than the pool."""
        replies = [one for one in said if isinstance(one, Reply)]
        hits = sum(one.cached > 0 for one in replies)
        retracted = sum(one.meta.get("num_retractions", 0) for one in replies)
        ended = {job.case for job, one in zip(asked, said, strict=True)
                 if not job.how and isinstance(one, Reply)}  # fmt: skip
        whole = pages([*self.cases[at].prompt, *alone[at].tokens[:-1]] for at in ended)
        inserted, room = len(whole), self.scale.pool // PAGE
        self.details["pressure"] = {"hits": hits, "retractions": retracted, "inserted": inserted}
        self.checks.add("answers from cached prefixes", hits > 0, f"{hits} of {len(said)}")
        self.checks.add("retractions", retracted > 0, f"{retracted}")
        self.checks.add(
            "more pages than there is room for",
            inserted > room,
            f"{inserted} distinct pages were to be cached, room for {room}",
        )

    def _aborts(self, asked: Sequence[Job], said: Sequence[Reply | str]) -> None:
        """Those by /abort_request say so; the others' clients went while the answer came."""
        ends = Counter(
            (job.how, (one.meta["finish_reason"] or {"type": "streaming"})["type"])
            for job, one in zip(asked, said, strict=True)
            if job.how and isinstance(one, Reply)
        )
        wanted = {("client", "streaming"), ("abort_request", "abort")}
        found = ", ".join(f"{count} by {how}: {end}" for (how, end), count in sorted(ends.items()))
        self.checks.add("aborted in mid-stream", set(ends) == wanted, found)

    def _nothing_is_left(self, alone: Sequence[Reply]) -> None:
        """Before a flush, which would hide a leak: what the cache may evict does not count."""
        load = idle(self.server)
        found = [load[f"num_{name}"] for name in ("running_reqs", "waiting_reqs", "used_tokens")]
        self.checks.add("idle after the load", not any(found), f"running, waiting, used: {found}")
        flush(self.server)
        used = idle(self.server)["num_used_tokens"]
        self.checks.add("flushed after the load", used == 0, f"{used} tokens used")
        longest = max(range(len(self.cases)), key=lambda at: len(self.cases[at].prompt))
        for name, at in (("longest prompt", longest), ("first prompt", 0)):
            again = self.alone(self.cases[at])
            same = identical([again], [alone[at]])
            self.checks.add(f"the idle server's answer again, {name}", same, "bit for bit")

    def _some(self, count: int) -> list[Case]:
        """Cases that fit into the pool together, whatever they are: two pages each."""
        return [case for case in self.cases if len(case.prompt) + LONGEST <= 2 * PAGE][:count]

    def repeated(self) -> None:
        """The same batch three times."""
        batch = [case.prompt for case in self._some(self.scale.repeated)]
        runs = []
        for _ in range(3):
            flush(self.server)
            runs.append(together(self.server, batch, 32))
        same = [identical(one, runs[0]) for one in runs]
        self.checks.add(
            "the same batch three times: identical",
            all(same) and len(batch) == self.scale.repeated,
            f"{len(batch)} prompts of {min(map(len, batch))} to {max(map(len, batch))} tokens, 32"
            " tokens each: ids and log-probabilities bit for bit",
        )

    def spreads(self) -> None:
        """The same prompt alone, among its copies, and among others."""
        largest = max(self.scale.batches)
        some = self._some(largest)
        assert len(some) == largest, (len(some), largest)
        alone = [self.alone(case, 32) for case in some]
        self.details["spread"] = {}
        for name, ones in (("copies", [len(some) // 2] * largest), ("others", range(len(some)))):
            found = {}
            for size in self.scale.batches:
                flush(self.server)
                members = list(ones)[:size]
                prompts = [some[at].prompt for at in members]
                said = together(self.server, prompts, 32)
                found[size] = spread(said, [alone[at] for at in members])
            self.details["spread"][name] = found
            sums = {key: sum(one[key] for one in found.values()) for key in ("alike", "answers")}
            self.checks.add(
                f"alone = in batches of {self.scale.batches[0]}..{largest} ({name})",
                all(one["ok"] for one in found.values()),
                f"{sums['alike']} of {sums['answers']} token for token, log-probabilities within"
                f" {max(one['logprob'] for one in found.values())}",
            )

    def far(self) -> None:
        """A prompt far longer than a chunk, and than what the indexer can choose whole; cold, and
        three times more with another request in between."""
        raw = json.loads((self.trained.FOLDER / "config.json").read_text())
        chosen = DSV4Config.from_dict(raw).index_topk * CSA_RATIO
        prompt = far_prompt(self.trained, self.scale.far)
        flush(self.server)
        cold, turns = self.server.generate(prompt, 48), []
        for turn in range(3):
            self.server.generate(self.cases[turn].prompt, 8)
            turns.append(self.server.generate(prompt, 48))
        cached = [one.cached for one in turns]
        worst = max(compared(one, cold)["logprob"] for one in turns)
        self.details["far"] = {"cached": cached, "logprob": worst, "gaps": cold.gaps}
        self.checks.add(
            f"{len(prompt)} tokens cold = three times more",
            all(one.tokens == cold.tokens for one in turns),
            f"48 tokens, log-probabilities within {worst}",
        )
        self.checks.add("cached tokens of these", cold.cached == 0 < min(cached), str(cached))
        self.checks.add(
            "decoding behind a cached prefix longer than index_topk * 4",
            len(prompt) > min(cached) > chosen,
            f"{min(cached)} tokens > {chosen}; graphs are captured with requests of one token",
        )


def _ways(checks: Checks, server: Server, on_gpu: bool) -> None:
    """That it was served as this part says."""
    said = server.request("/server_info")
    off = [name for name in ("overlap_schedule", "radix_cache") if said[f"disable_{name}"]]
    found = f"chunks of {said['chunked_prefill_size']} tokens; disabled: {', '.join(off) or 'none'}"
    checks.add("overlap scheduling, radix cache", not off, found)
    log = server.log.read_text(errors="replace")
    graphs = Counter(re.findall(r"Decode batch.* graph: (True|False)", log))
    checks.add("decoding by graphs", graphs["True"] > 0 or not on_gpu, f"as logged: {dict(graphs)}")
    checks.add("the scheduler is still well", "hit an exception" not in log, server.log.name)


def load(run: Run) -> dict[str, Any]:
    """Requests under load, batches repeated, the spread of batches, and a long prompt again."""
    import nano as trained

    scale = ON_GPU if run.on_gpu else ON_CPU
    server = user_server(
        run,
        trained.FOLDER,
        "load_server.log",
        # nano's config says 4,096 positions; nothing in the model ends there.
        env={"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
        context_length=str(max(scale.far + RUNS_ON, 2048)),
        max_running_requests=str(scale.in_flight),
        max_total_tokens=str(scale.pool),
        swa_full_tokens_ratio="0.8",
        chunked_prefill_size=str(scale.chunk),
    )
    shown = Load(trained, scale, server)
    parts: tuple[Callable[[], None], ...] = (shown.mixed, shown.repeated, shown.spreads, shown.far)
    try:
        shown.checks.add("time to ready", True, f"{started(server)} s")
        gpu_serving._says_who_serves(shown.checks, server, run.on_gpu)
        for part in parts:
            try:
                part()
            except Exception as error:  # one must not hide the others
                shown.checks.add(part.__name__, False, f"{type(error).__name__}: {error}"[:300])
        _ways(shown.checks, server, run.on_gpu)
    finally:
        server.stop()
    return shown.checks.result() | {"details": shown.details}
