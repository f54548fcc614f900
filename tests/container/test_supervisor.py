"""The supervisor: a server that would drop its answers at SIGTERM, and a worker that is lost."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
import urllib.response
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from handler.container import supervisor
from handler.container.supervisor import Connection, WorkerWatch, connections
from tests.djl.processes import group_members
from tests.servers import free_port, wait_for

# -- a server that would drop its answers at SIGTERM, under the supervisor: real processes -----------------------------


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
from handler.container.supervisor import Address, supervise
logging.basicConfig(level="INFO", stream=sys.stderr)
address = Address("127.0.0.1", int(sys.argv[1]), "llama")
drain, end, patience = map(float, sys.argv[2:5])
sys.exit(supervise(sys.argv[5:], os.environ, address, drain=drain, end=end, patience=patience))
"""


@contextmanager
def supervised(
    *, code: str = _SERVER, drain: float = 20, end: float = 28, patience: float = 6, arguments: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    numbers = map(str, (port, drain, end, patience))
    command = [sys.executable, "-c", _SUPERVISE, *numbers, sys.executable, "-c", code, str(port), *arguments]
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
        assert "SIGTERM: stopping; responses to finish: 1" in process.stderr.read()


def test_an_answer_that_takes_too_long_is_cut_off() -> None:
    with supervised(drain=0.5) as (process, port):
        with open_when_listening(port, "/60") as answer:
            assert answer.read(6) == b"first "
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert process.stderr is not None
        assert "responses cut off after" in process.stderr.read()


def test_a_second_signal_ends_the_waiting() -> None:
    with supervised() as (process, port), open_when_listening(port, "/60"):
        assert process.stderr is not None
        process.send_signal(signal.SIGTERM)
        assert "responses to finish: 1" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_server_that_does_not_end_is_killed_in_time() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + _SERVER
    with supervised(code=deaf, end=1) as (process, port):
        open_when_listening(port, "/0").close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "the server did not exit within" in process.stderr.read()


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


# -- a server that cannot load the model, or whose thread for the worker has ended: a double of Java ------------------


# Each start does what the next word of a file says: `fails` (the worker dies while it loads), `serves`, or it loads and
# then no thread calls the worker: `idles`, `forgets` (a minute later). Of two workers, `halves` loses a process, which
# its thread goes on calling, and `thins` a thread.
_JAVA = """
import http.server, json, pathlib, subprocess, sys, time
port, file, record = int(sys.argv[1]), pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
first, *rest = file.read_text().split()
file.write_text(" ".join(rest or [first]))
with record.open("a") as lines: lines.write(first + " ")
seconds = 1 if first == "fails" else 600
def start(seconds, place):
    sleep = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
    return subprocess.Popen([*sleep, "djl_python_" + "engine.py", "--sock-name", f"/tmp/djl_sock.{place}"])
worker = start(seconds, 0)
two = first in ("halves", "thins", "both")
if two:
    start(1 if first == "halves" else 600, 1)
    start(600, 0)  # one that is left behind, or replaces the first
if first == "fails":
    worker.wait(); time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = {"llama": {"status": "Healthy"}}
        if self.path == "/models/llama":
            status = "READY" if two or first == "serves" else "UNLOADING"
            workers = [] if first == "forgets" else [{"id": 1, "status": status}]
            if two: workers.append({"id": 2, "status": "UNLOADING" if first == "thins" else "READY"})
            least = 2 if two else 1
            body = [{"models": [{"workerGroups": [{"minWorkers": least, "maxWorkers": least, "workers": workers}]}]}]
        self.send_response(200); self.end_headers()
        if self.path == "/slow":
            for _ in range(16): self.wfile.write(b"."); time.sleep(0.5)
            return
        self.wfile.write(json.dumps(body).encode())
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Java:
    """The double under the supervisor: what each of its starts does, and what they were."""

    def __init__(self, directory: Path, starts: str) -> None:
        self._record = directory / "record"
        self._starts = directory / "starts"
        self._starts.write_text(starts)

    @property
    def arguments(self) -> list[str]:
        return [str(self._starts), str(self._record)]

    @property
    def started(self) -> list[str]:
        return self._record.read_text().split() if self._record.exists() else []


def test_a_model_that_was_never_loaded_ends_the_container(tmp_path: Path) -> None:
    java = Java(tmp_path, "fails")
    with supervised(code=_JAVA, patience=0.5, arguments=java.arguments) as (process, _):
        assert process.wait(60) == 1
        assert java.started == ["fails"]
        assert process.stderr is not None
        assert "cannot load the model: giving up; the lines above say why" in process.stderr.read()


@pytest.mark.parametrize("lost", ["idles", "forgets", "halves", "thins"])
def test_a_model_that_no_thread_of_java_serves_is_started_again(tmp_path: Path, lost: str) -> None:
    java = Java(tmp_path, f"{lost} {lost} serves")
    with supervised(code=_JAVA, patience=0.5, arguments=java.arguments) as (process, port):
        wait_for(lambda: len(java.started) == 3, 60, "it was not started again")
        open_when_listening(port, "/ping").close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert java.started == [lost, lost, "serves"]


def test_two_workers_with_a_thread_each_are_left_alone(tmp_path: Path) -> None:
    java = Java(tmp_path, "both")
    with supervised(code=_JAVA, patience=0.5, arguments=java.arguments) as (process, port):
        for _ in range(3):  # longer than a look at Java and at the workers, together with the patience
            open_when_listening(port, "/ping").close()
            time.sleep(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert java.started == ["both"]


def test_a_response_is_finished_before_half_of_the_workers_are_restarted(tmp_path: Path) -> None:
    """Its client has nothing to do with the worker that is lost."""
    java = Java(tmp_path, "thins both")
    with supervised(code=_JAVA, patience=0.5, arguments=java.arguments) as (process, port):
        open_when_listening(port, "/ping").close()
        with open_when_listening(port, "/slow") as answer:
            assert len(answer.read()) == 16
            assert java.started == ["thins"]
        wait_for(lambda: len(java.started) == 2, 60, "it was not started again")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_model_that_was_loaded_once_may_fail_twice_in_a_row_but_not_three_times(tmp_path: Path) -> None:
    java = Java(tmp_path, "idles fails fails idles fails fails fails")
    with supervised(code=_JAVA, patience=0.5, arguments=java.arguments) as (process, _):
        assert process.wait(90) == 1
    assert java.started == ["idles", "fails", "fails", "idles", "fails", "fails", "fails"]


# -- when DJL Serving's worker counts as lost --------------------------------------------------------------------------


def test_a_worker_is_lost_when_there_was_one_and_is_none_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    sleeps = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    worker = subprocess.Popen([*sleeps, "djl_python_engine.py"], start_new_session=True, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    watch = WorkerWatch(worker.pid, patience=6.0)
    try:
        with worker.stdout:
            worker.stdout.readline()  # it runs: its command line is there
        assert max(watch.seconds_lost()) < 0
        assert watch.seconds_lost(num_threads=2) == (-1.0, -6.0)
        now = 8.0
        assert watch.seconds_lost(num_threads=2) == (-1.0, 2.0)
        assert watch.seconds_lost(num_threads=1) == (-1.0, -1.0)
    finally:
        worker.kill()
        worker.wait()
    assert watch.seconds_lost()[0] == -6.0
    now = 14.1
    assert watch.seconds_lost()[0] == pytest.approx(0.1)


def test_a_server_that_has_not_started_one_has_lost_none() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        watch = WorkerWatch(other.pid, patience=-1)
        assert [watch.seconds_lost() for _ in range(3)] == [(-1.0, -1.0)] * 3
    finally:
        other.kill()
        other.wait()


# -- which connections wait for an answer: the kernel's own word, on real sockets --------------------------------------


QUIET = 50


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_request_waits_until_it_is_answered(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)) as client:
            server, _ = listener.accept()
            with server:
                assert [found.num_bytes for found in connections(port)] == [0]
                assert not any(found.waits(QUIET) for found in connections(port))  # has not asked anything
                client.sendall(b"ask")
                wait_for(lambda: any(found.waits(QUIET) for found in connections(port)), 5, "nothing waits")
                server.recv(10)
                server.sendall(b"answer")
                assert any(found.waits(10_000) for found in connections(port))  # more of it may come
                wait_for(lambda: not any(found.waits(QUIET) for found in connections(port)), 5, "it still waits")
        assert connections(port) == [] or not any(found.waits(QUIET) for found in connections(port))


@pytest.mark.parametrize(
    ("connection", "waits"),
    [
        (Connection(sent=900, received=100, num_bytes=9), True),
        (Connection(sent=100, received=900, num_bytes=9), False),
        (Connection(sent=10, received=900, num_bytes=9), True),
        (Connection(sent=900, received=100, num_bytes=0), False),
    ],
)
def test_what_waiting_means(connection: Connection, waits: bool) -> None:
    assert connection.waits(QUIET) is waits
