"""A real SGLang server in a process of its own, and what tests ask of it."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_LIMIT = 300.0  # seconds; about 20 when the machine is idle
FORKED = str(Path(__file__).with_name("forked_server.py"))
DEFAULT_OPTIONS = {
    "--device": "cpu",
    "--max-total-tokens": "16384",
    "--swa-full-tokens-ratio": "0.5",
    "--context-length": "2300",
    "--max-running-requests": "8",
    "--chunked-prefill-size": "2048",
    "--sleep-on-idle": "",
}


@dataclass(frozen=True)
class Reply:
    """One request's greedy continuation.

    logprobs: of each token. gaps: between the logits of the two best tokens at each step.
    cached: prompt tokens that came from the radix cache.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]
    cached: int
    meta: dict[str, Any]


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now.

    Not one that the system hands out, which another process may get, even for a connection that it
    makes, in the seconds before a server listens.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("none of 100 ports is free")


class Server:
    """Starts on entry, stops on exit. `options` replace or extend DEFAULT_OPTIONS; a value of None
    removes an option, an empty one makes it a flag.

    forked: whether it starts as tests/forked_server.py says, instead of as users start it.
    """

    def __init__(
        self,
        checkpoint: Path,
        log: Path,
        *,
        options: dict[str, str | None] | None = None,
        env: dict[str, str] | None = None,
        forked: bool = True,
    ) -> None:
        self.checkpoint, self.log, self.forked = checkpoint, log, forked
        self.start_limit = START_LIMIT
        self.options = {**DEFAULT_OPTIONS, **(options or {})}
        self.env = env or {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        launcher = [FORKED] if self.forked else ["-m", "sglang.launch_server"]
        command = [sys.executable, *launcher, "--model-path", str(self.checkpoint)]
        command += ["--port", str(self.port), "--skip-server-warmup"]
        command += ["--enable-cache-report"]
        for option, value in self.options.items():
            if value is not None:
                command += [option, value] if value else [option]
        return command

    def launch(self) -> None:
        """Start the process without waiting."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | self.env
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.log.parent,
                start_new_session=True,
            )

    def __enter__(self) -> "Server":
        self.launch()
        try:
            self._wait_until_healthy()
        except BaseException:  # an interrupt, too: its process group is not ours
            self.stop()
            raise
        return self

    def _wait_until_healthy(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + self.start_limit
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.tail()}")
            time.sleep(0.3)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End its whole process group at once: asked to end, it would drain for seconds."""
        if self.process is None:  # never launched
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def exit_status(self) -> int:
        """Wait for a server that is expected to refuse to start."""
        self.launch()
        assert self.process is not None
        try:
            return self.process.wait(self.start_limit)
        finally:
            self.stop()

    def tail(self, size: int = 6000) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-size:]

    def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """GET, or POST where there is a body; the JSON answer, or the text."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            text = response.read().decode()
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def state(self) -> dict[str, Any]:
        """What the running scheduler says of itself."""
        (state,) = self.request("/server_info")["internal_states"]
        return state

    def flush(self) -> None:
        """Empty the radix cache; the server refuses while a request is still ending."""
        for _ in range(100):
            try:
                self.request("/flush_cache", {})
                return
            except urllib.error.HTTPError:
                time.sleep(0.1)
        raise RuntimeError("the cache could not be flushed")

    def generate(self, prompt: Sequence[int], count: int = 64, **sampling: Any) -> Reply:
        """Greedy continuation by exactly `count` tokens (more sampling parameters as given)."""
        parameters = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, **sampling}
        body = {
            "input_ids": list(prompt),
            "sampling_params": parameters,
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        answer = self.request("/generate", body)
        meta = answer["meta_info"]
        return Reply(
            tokens=tuple(answer["output_ids"]),
            logprobs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
            gaps=tuple(best[0] - second[0] for best, second in meta["output_top_logprobs"]),
            cached=meta["cached_tokens"],
            meta=meta,
        )

    def generate_all(
        self, prompts: Iterable[Sequence[int]], count: int = 64, concurrency: int = 8
    ) -> list[Reply]:
        """The same for many prompts at once, so that the scheduler batches them."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, count), prompts))

    def _healthy(self) -> bool:
        try:
            self.request("/health")
            return True
        except OSError:
            return False
