"""Real `lmi serve` processes on loopback, ended by their own process id, and requests to any server."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import httpx

from tests.environment import clean_environment
from tests.ports import free_port as free_port  # most tests import it with the servers

logging.getLogger("httpx").setLevel(logging.WARNING)
PATIENCE = 100.0
"""Seconds that a test waits at least for what must happen: a busy machine is no fault."""

ANSWER_LIMIT = 120.0
"""Seconds for a whole answer of a model."""


class _OfThread(threading.local):
    """A client of each thread: the pool of a shared one may give a thread a connection that another is closing."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(verify=False, trust_env=False, timeout=PATIENCE, limits=limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


http = cast(httpx.Client, _OfThread())
"""For requests to loopback: `httpx.get` and its like read all certificates of the system each time, for 35 ms."""


class LiveServer:
    """One server on loopback. `log` is what it has written so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.url = ""

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def ended(self) -> bool:
        raise NotImplementedError

    def send_signal(self, number: signal.Signals) -> None:
        raise NotImplementedError

    def wait(self, seconds: float) -> int:
        """The exit status, once it has ended."""
        raise NotImplementedError

    def post(self, body: Any, path: str = "/invocations", **more: Any) -> httpx.Response:
        return http.post(self.url + path, json=body, timeout=ANSWER_LIMIT, **more)

    def ping(self) -> int:
        return http.get(self.url + "/ping").status_code

    def metric(self, name: str) -> float:
        """The value of one line of /metrics, labels included in the name."""
        text = http.get(self.url + "/metrics").text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, f"no metric {name}"
        return float(found[1])

    def wait_ready(self, seconds: float = 60) -> None:
        wait_for(lambda: self.ping() == 200, seconds, "the server is not ready")

    def wait_listening(self, seconds: float) -> None:
        def listening() -> bool:
            found = re.search(r"listening on (https?://\S+);", self.log)
            assert found or not self.ended, f"the server ended:\n{self.log}"
            self.url = found[1] if found else ""
            return bool(found)

        wait_for(listening, seconds, "the server does not listen")


class ServerProcess(LiveServer):
    """One `lmi serve` process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__()
        self.process = process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def engine_pid(self) -> int:
        """The engine process, a child of the server's."""
        children = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "handler.engines.process.engine_process"],
            capture_output=True,
            text=True,
        )
        return int(children.stdout.split()[0])

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if not self.ended:
            self.send_signal(signal.SIGTERM)
        try:
            self.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return self.process.returncode

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)


def wait_for(condition: Any, seconds: float, what: str) -> None:
    """Wait until `condition` holds, for `seconds` or PATIENCE."""
    seconds = max(seconds, PATIENCE)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} after {seconds} s"
        time.sleep(0.02)


def options(*pairs: str) -> list[str]:
    """Arguments of `lmi serve` for options as NAME=VALUE."""
    return [part for pair in pairs for part in ("-o", pair)]


_next_core = itertools.count(os.getpid())
"""Beside other runs of tests, each of which begins somewhere else."""


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Let what is started meanwhile compute on one core, the next start on the next one.

    Two engines with a thread on each of two cores wait for one another: a quarter of all CPU time.
    """
    cores = sorted(os.sched_getaffinity(0))
    own = cores[next(_next_core) % len(cores)]
    os.sched_setaffinity(0, {own})  # this thread's, which threads and processes inherit
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def cores_for(arguments: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Those of a server with these arguments: one for the demo model, all for other engines."""
    return contextlib.nullcontext() if "--engine" in arguments else one_core()


@contextlib.contextmanager
def serve(
    *arguments: str,
    env: dict[str, str] | None = None,
    seconds: float = 120,
    program: Sequence[str] = ("-m", "handler"),
    python: str = sys.executable,
    directory: Path | None = None,
) -> Iterator[ServerProcess]:
    """A server process on a free port, listening.

    Args:
        arguments: those of `lmi serve`.
        program: what Python runs as `lmi`.
        directory: where it runs, if not here.
    """
    command = [python, *program, "serve", "--port", "0", *arguments]
    environment = {**clean_environment(), **(env or {})}
    with cores_for(arguments):
        server = ServerProcess(
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=directory)
        )
    try:
        server.wait_listening(seconds)
        yield server
    finally:
        server.stop()


def post_bytes(body: dict[str, Any] | bytes, path: str = "/invocations", headers: str = "") -> bytes:
    """A request without a content type."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    return head.encode() + data


def ask(server: LiveServer, path: str, body: Any, status: int = 200) -> Any:
    """Post a JSON body, check the status of the response, and return its JSON."""
    found = http.post(server.url + path, json=body)
    assert found.status_code == status, found.text
    return found.json()


def raw(server: LiveServer, request: bytes, *, until: bytes = b"0\r\n\r\n", seconds: float = PATIENCE) -> bytes:
    """What the server sends for a request's bytes, as far as `until`."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(request)
        found = b""
        while until not in found and (data := connection.recv(65536)):
            found += data
        return found


def dechunked(body: bytes) -> bytes:
    """The content of a whole chunked body; a busy server joins what has waited, in one chunk."""
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        content, mark, body = content + body[:length], body[length : length + 2], body[length + 2 :]
        assert mark == b"\r\n", body
        if not length:
            assert not body, body
            return content
    raise AssertionError("it does not end")


def events(server: LiveServer, path: str, body: dict[str, Any], *, end: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A stream's values.

    Args:
        end: lines after them.
    """
    with http.stream("POST", server.url + path, json={**body, "stream": True}, timeout=ANSWER_LIMIT) as found:
        assert (found.status_code, found.headers["content-type"]) == (200, "text/event-stream")
        lines = [line for line in found.iter_lines() if line not in ("", ":")]
    count = len(lines) - len(end)
    assert lines[count:] == list(end)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:count]]
