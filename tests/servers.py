"""Starts real `lmi serve` processes on loopback for tests, and ends them by their own process id."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from tests.environment import clean_environment


class LiveServer:
    """One `lmi serve` process. `log` is what it has written so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def engine_pid(self) -> int:
        """The engine process, a child of the server's."""
        children = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "handler.engines.process.engine_process"],
            capture_output=True,
            text=True,
        )
        return int(children.stdout.split()[0])

    def post(self, body: Any, path: str = "/invocations", **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **more)

    def ping(self) -> int:
        return httpx.get(self.url + "/ping", timeout=5).status_code

    def metric(self, name: str) -> float:
        """The value of one line of /metrics, labels included in the name."""
        text = httpx.get(self.url + "/metrics", timeout=5).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, f"no metric {name}"
        return float(found[1])

    def wait_ready(self, seconds: float = 60) -> None:
        wait_for(lambda: self.ping() == 200, seconds, "the server is not ready")

    def wait_listening(self, seconds: float) -> None:
        def listening() -> bool:
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            found = re.search(r"listening on (https?://\S+);", self.log)
            self.url = found[1] if found else ""
            return bool(found)

        wait_for(listening, seconds, "the server does not listen")

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(35)
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
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} after {seconds} s"
        time.sleep(0.05)


def options(*pairs: str) -> list[str]:
    """Arguments of `lmi serve` for options as NAME=VALUE."""
    return [part for pair in pairs for part in ("-o", pair)]


@contextlib.contextmanager
def serve(
    *arguments: str,
    env: dict[str, str] | None = None,
    seconds: float = 120,
    program: Sequence[str] = ("-m", "handler"),
) -> Iterator[LiveServer]:
    """A server on a free port, listening.

    Args:
        arguments: those of `lmi serve`.
        program: what Python runs as `lmi`.
    """
    command = [sys.executable, *program, "serve", "--port", "0", *arguments]
    environment = {**clean_environment(), **(env or {})}
    server = LiveServer(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
    try:
        server.wait_listening(seconds)
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def impatient(*arguments: str, keep_alive: float = 0.2) -> Iterator[LiveServer]:
    """An echo server whose streams say after so many seconds of silence that they are there."""
    code = (
        f"import sys, handler.http.routes.inference as i; i.KEEP_ALIVE = {keep_alive}; "
        "from handler.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    with serve("--engine", "echo", *arguments, program=("-c", code)) as server:
        server.wait_ready()
        yield server


def post_bytes(body: dict[str, Any] | bytes, path: str = "/invocations", headers: str = "") -> bytes:
    """A request without a content type."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    return head.encode() + data


def raw(server: LiveServer, request: bytes, *, until: bytes = b"0\r\n\r\n", seconds: float = 10) -> bytes:
    """What the server sends for a request's bytes, as far as `until`."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(request)
        found = b""
        while until not in found and (data := connection.recv(65536)):
            found += data
        return found


def events(server: LiveServer, path: str, body: dict[str, Any], *, end: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A stream's values.

    Args:
        end: lines after them.
    """
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=60) as found:
        assert (found.status_code, found.headers["content-type"]) == (200, "text/event-stream")
        lines = [line for line in found.iter_lines() if line not in ("", ":")]
    count = len(lines) - len(end)
    assert lines[count:] == list(end)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:count]]
