"""SGLang's own server as a process of the demo: started, waited for, spoken to, ended."""

import http.client
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sglang_dsv4.config import ConfigError, DSV4Config

HOST = "127.0.0.1"
STOP_LIMIT = 30.0  # seconds
REQUEST_LIMIT = 600.0
INFO_LIMIT = 30.0  # for what a server says of itself
REPORT_EVERY = 15  # seconds, where progress is no line that can be rewritten
LOG_LINES = 40


class UsageError(ValueError):
    """What the command line asks for cannot be done; the message says why, and what to do."""


class ServerError(RuntimeError):
    """The server did not start, ended, or did not answer as a server does.

    status: the HTTP status of the answer, None where there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Launch:
    """How to start the server.

    checkpoint: an absolute path. context: tokens. wait: seconds until it must be ready.
    """

    checkpoint: Path
    context: int
    device: str
    port: int
    log: Path
    wait: int

    def command(self) -> list[str]:
        # `env`: more OpenMP threads make a model this small many times slower; nothing of it is
        # on a hub; and whatever proxy this machine uses, the server reaches itself directly.
        variables = ("OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1")
        direct = (f"no_proxy={HOST}", f"NO_PROXY={HOST}")
        options = {
            "--model-path": str(self.checkpoint),
            "--host": HOST,
            "--port": str(self.port),
            "--device": self.device,
            "--tool-call-parser": "deepseekv4",
            "--reasoning-parser": "deepseek-v4",
            "--context-length": str(self.context),
            "--max-total-tokens": "16384",
            "--max-running-requests": "8",
            # The pool is small, so pages of a prompt would else lose their window rows early.
            "--swa-full-tokens-ratio": "0.5",
        }
        flags = ["--enable-cache-report", "--skip-server-warmup", "--sleep-on-idle"]
        words = [word for pair in options.items() for word in pair]
        server = [sys.executable, "-m", "sglang.launch_server", *words, *flags]
        return ["env", *variables, *direct, *server]


def choose_port(wanted: int | None) -> int:
    """`wanted`, or a free port; raises UsageError where another process listens on it.

    Nothing holds it: should somebody take it before the server does, the server says so.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, wanted or 0))
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"port {wanted} of {HOST} cannot be used ({reason}): choose another one with"
                " --port, or leave the option out for a free one"
            ) from None
        return int(listener.getsockname()[1])


class Progress:
    """What is waited for: one line that is rewritten on a terminal, elsewhere one in 15 seconds."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream, self.reported = stream, 0

    def say(self, text: str) -> None:
        if self.stream is not None:
            print(f"\r\033[K{text}" if self.stream.isatty() else text, file=self.stream, flush=True)

    def show(self, seconds: int, detail: str) -> None:
        if self.stream is None:
            return
        line = f"  waiting ... {seconds} s  {detail}"
        if self.stream.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", file=self.stream, flush=True)
        elif seconds >= self.reported + REPORT_EVERY:
            self.reported = seconds
            print(line[:160], file=self.stream, flush=True)


class Server:
    """A server and its whole process group.

    `with` starts it, waits until it is ready and ends it, unless `keep` was set to True.
    """

    def __init__(self, launch: Launch, progress: Progress) -> None:
        self.launch, self.progress, self.keep = launch, progress, False
        self.url = f"http://{HOST}:{launch.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        self.progress.say(f"Starting the server (log: {self.launch.log})")
        with self.launch.log.open("wb") as log:
            # A session of its own, hence a process group: Ctrl-C reaches this process only, which
            # then ends the group; and a kept server outlives the terminal.
            self.process = subprocess.Popen(
                self.launch.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        """Raises ServerError, with the end of the log, if it ends or takes too long."""
        assert self.process is not None
        client, started = Client(self.url), time.monotonic()
        while True:
            waited = int(time.monotonic() - started)
            status = self.process.poll()
            if status is not None:
                self.progress.say(f"  it ended after {waited} s")
                raise ServerError(f"the server ended with status {status}.\n{self._log_end()}")
            if client.is_ready():
                self.progress.say(f"  ready after {waited} s at {self.url}")
                return
            if waited >= self.launch.wait:
                self.progress.say(f"  not ready after {waited} s")
                raise ServerError(
                    f"the server was not ready within {self.launch.wait} s; a slower machine or a"
                    f" larger model needs more (--wait SECONDS).\n{self._log_end()}"
                )
            self.progress.show(waited, last_line(self.launch.log))
            time.sleep(0.5)

    def _log_end(self) -> str:
        lines = self.launch.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        shown = "\n".join(f"  | {line}" for line in lines) or "  | (empty)"
        return f"{shown}\nThe whole log is in {self.launch.log}"

    def stop(self) -> None:
        """Ask it to end, then end what is left of its group: a worker may have missed the signal"""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.progress.say("Stopping the server")
        try:
            self.process.terminate()
            self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()

    def __enter__(self) -> "Server":
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or not self.keep:
            self.stop()


def last_line(log: Path) -> str:
    """The log's last line that is neither blank nor indented, without control characters."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4000))
        text = stream.read().decode(errors="replace")
    lines = [line for line in text.replace("\r", "\n").split("\n") if line[:1].strip()]
    return printable(lines[-1]) if lines else ""


def printable(text: str) -> str:
    """`text` without what would move a terminal's cursor; models may say anything."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)


class Client:
    """Requests to one server; whatever goes wrong is a ServerError."""

    def __init__(self, url: str) -> None:
        self.url = url
        # A server of this machine is reached directly, whatever proxy is used for the rest.
        direct = [urllib.request.ProxyHandler({})] if _is_local(url) else []
        self.opener = urllib.request.build_opener(*direct)

    def is_ready(self) -> bool:
        try:
            with self.opener.open(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def json(
        self, path: str, body: dict[str, Any] | None = None, limit: float = REQUEST_LIMIT
    ) -> Any:
        """GET, or POST where there is a body: the answer's JSON, within `limit` seconds."""
        (line,) = self._lines(path, body, whole=True, limit=limit)
        try:
            return json.loads(line)
        except ValueError:
            message = f"{self.url}{path} answered with something else than JSON"
            raise ServerError(message, 200) from None

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST of a request with `stream`: the JSON of its server-sent events as they come."""
        for line in self._lines(path, body, whole=False):
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:
                raise ServerError(f"{self.url}{path}: an event that is not JSON") from None
            if "error" in event:
                raise ServerError(f"{self.url}{path}: {_message(data)}", 500)
            yield event

    def _lines(
        self,
        path: str,
        body: dict[str, Any] | None,
        *,
        whole: bool,
        limit: float = REQUEST_LIMIT,
    ) -> Iterator[bytes]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self.opener.open(request, timeout=limit) as response:
                yield from [response.read()] if whole else response
        except urllib.error.HTTPError as error:
            said = _message(error.read())
            raise ServerError(f"{self.url}{path}: HTTP {error.code}: {said}", error.code) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error or type(error).__name__
            raise ServerError(f"{self.url}{path} does not answer: {reason}") from None


@dataclass(frozen=True)
class Served:
    """What a server says of itself.

    state: our part of the scheduler's report, empty where there is none. page: tokens of a page.
    """

    state: dict[str, Any]
    model_path: str
    page: int

    @classmethod
    def read(cls, client: Client) -> "Served":
        info = client.json("/server_info", limit=INFO_LIMIT)
        try:
            state = dict(info["internal_states"][0].get("sglang_dsv4") or {})
            return cls(state, str(info["model_path"]), int(info["page_size"]))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            message = f"{client.url}/server_info is not that of SGLang ({error!r})"
            raise ServerError(message, 200) from None

    def serves(self, checkpoint: Path) -> bool:
        try:
            return Path(self.model_path).samefile(checkpoint)
        except OSError:
            return False

    def config(self) -> DSV4Config:
        """Raises UsageError where the checkpoint is not on this machine."""
        try:
            return DSV4Config.from_checkpoint(self.model_path)
        except ConfigError as error:
            raise UsageError(f"--plot needs the checkpoint's config.json here: {error}") from None

    def faults(self) -> list[str]:
        """Empty if a class of ours serves."""
        found = self.state.get("model_class", "no report of one")
        if found.startswith("sglang_dsv4."):
            return []
        return [
            f"expected a class of sglang_dsv4 to serve, found {found}; is the plugin installed"
            " where the server runs, and not switched off by SGLANG_PLUGINS? (sglang-dsv4 doctor)"
        ]


def _is_local(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _message(answer: bytes) -> str:
    """What an error says of itself: OpenAI nests it, SGLang does not."""
    try:
        said = json.loads(answer)
        said = said.get("error") if isinstance(said.get("error"), dict) else said
        return str(said["message"])
    except (ValueError, KeyError, AttributeError, TypeError):
        return answer.decode(errors="replace")[:300].strip()
