"""A server that would drop its answers at SIGTERM, under the supervisor: real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
import urllib.response
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.djl.processes import group_members
from tests.ports import free_port
from tests.servers import wait_for

# It answers /SECONDS in two parts, so many seconds apart, and dies of SIGTERM at once. /orphan leaves a child behind.
_SERVER = """
import http.server, subprocess, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/orphan":
            subprocess.Popen(["sleep", "600"])
        seconds = 0 if self.path == "/orphan" else float(self.path[1:])
        self.send_response(200); self.end_headers()
        self.wfile.write(b"first "); time.sleep(seconds); self.wfile.write(b"second")
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
_SUPERVISE = """
import logging, os, sys
from handler.container.supervisor import supervise
logging.basicConfig(level="INFO", stream=sys.stderr)
port, drain, end = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
sys.exit(supervise(sys.argv[4:], os.environ, port, drain=drain, end=end))
"""


@contextmanager
def supervised(
    *, code: str = _SERVER, drain: float = 20, end: float = 28
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    command = [sys.executable, "-c", _SUPERVISE, str(port), str(drain), str(end), sys.executable, "-c", code, str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process, port
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def open_when_listening(port: int, path: str) -> urllib.response.addinfourl:
    found: list[urllib.response.addinfourl] = []

    def asked() -> bool:
        try:
            found.append(urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20))
        except OSError:
            return False
        return True

    wait_for(asked, 20, "the server does not listen")
    return found[0]


def group(process: subprocess.Popen[str]) -> int:
    """The server's process group, which it leads."""
    return int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()[0])


def test_answers_are_finished_before_the_server_is_told() -> None:
    with supervised() as (process, port):
        with open_when_listening(port, "/1.5") as answer:
            assert answer.read(6) == b"first "
            process.send_signal(signal.SIGTERM)
            assert answer.read() == b"second"
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "SIGTERM: stopping; answers to finish: 1" in process.stderr.read()


def test_an_answer_that_takes_too_long_is_cut_off() -> None:
    with supervised(drain=0.5) as (process, port):
        with open_when_listening(port, "/60") as answer:
            assert answer.read(6) == b"first "
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert process.stderr is not None
        assert "answers that are cut off after" in process.stderr.read()


def test_a_second_signal_ends_the_waiting() -> None:
    with supervised() as (process, port), open_when_listening(port, "/60"):
        assert process.stderr is not None
        process.send_signal(signal.SIGTERM)
        assert "answers to finish: 1" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_server_that_does_not_end_is_killed_in_time() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + _SERVER
    with supervised(code=deaf, end=1) as (process, port):
        open_when_listening(port, "/0").close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "the server did not end within" in process.stderr.read()


def test_nothing_is_left_of_its_group() -> None:
    with supervised() as (process, port):
        open_when_listening(port, "/orphan").close()
        server = group(process)
        assert len(group_members(server)) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        wait_for(lambda: not group_members(server), 5, "something is left")


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_server_s_own_end_is_the_container_s(code: str, status: int) -> None:
    with supervised(code=code) as (process, _):
        assert process.wait(30) == status
