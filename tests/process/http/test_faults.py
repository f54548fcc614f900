"""Servers that are stopped or killed: processes where their end or the signal itself is what is tested."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.app.server import serve as serve_here
from tests.app.test_engine_failures import ASK, ECHO, ISOLATED, long, stream
from tests.servers import PATIENCE, serve, wait_for


def test_an_engine_process_ends_with_its_server() -> None:
    with serve(*ECHO, *ISOLATED) as server:
        pid = server.engine_pid()
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), 5, "the engine outlives its server")


def test_sigterm_lets_streams_finish_refuses_new_work_and_exits_0() -> None:
    with serve_here(*ECHO) as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, server, {"inputs": "a b", "parameters": {"max_new_tokens": 250}})
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ping() == 503, 5, "the ping still says 200")
        refused = server.post(ASK)
        assert (refused.status_code, "stopping" in refused.json()["message"]) == (503, True)
        assert len(running.result()) == 250
        assert server.stop() == 0


def test_a_request_whose_body_is_under_way_at_sigterm_is_told() -> None:
    data = json.dumps(ASK).encode()
    with (
        serve_here(*ECHO) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection,
    ):
        head = b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % len(data))
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")  # it waits for the body
        connection.sendall(data[:5])
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ping() == 503, 5, "the ping still says 200")
        connection.sendall(data[5:])
        assert b"503" in connection.recv(4096).split(b"\r\n")[0]
        assert server.stop() == 0


@pytest.mark.parametrize("path", ["/invocations", "/adapters"])
def test_a_request_whose_body_never_comes_is_told_at_the_end(path: str) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc" % path.encode()
    adapters = ("-o", "option.enable_lora=true")
    with (
        serve_here(*ECHO, *adapters) as server,
        socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection,
    ):
        connection.sendall(head)
        server.ping()  # it has read the head
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ended or "SIGTERM" in server.log, 5, "it does not hear the signal")
        server.send_signal(signal.SIGTERM)
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"the server is stopping" in answer
        assert server.wait(15) == 0
        assert "Traceback" not in server.log


@pytest.mark.model
def test_sigterm_before_it_serves_exits_0_as_well(demo_model: Path) -> None:
    command = [sys.executable, "-m", "handler", "serve", str(demo_model), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "loading" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_sigterm_when_idle_exits_0_at_once() -> None:
    with serve(*ECHO) as server:
        server.send_signal(signal.SIGTERM)
        assert server.wait(15) == 0  # answers under way would have had 20 seconds


def test_a_second_signal_does_not_wait() -> None:
    with serve(*ECHO) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, long())
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: server.ping() == 503, 5, "the ping still says 200")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(15) == 0  # the stream would take 40 s, and had 20
        assert "the server stopped" in running.result()[-1]["error"]
