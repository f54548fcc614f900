"""Connections to a real server: bodies that are refused, trailers, half-closed clients, and idle time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from handler.config.loader import read_config
from handler.serving.large_bodies import MAX_VALUES
from tests.app.http.test_large_bodies import MIB, send
from tests.process_tree import descendants
from tests.servers import LiveServer, ServerProcess, http, post_bytes, raw, serve, wait_for

CANCELLED = 'lmi_requests_total{outcome="cancelled"}'
ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}


@pytest.fixture(scope="module")
def impatient_server() -> Iterator[LiveServer]:
    """Waits half a second for a body, of at most 100 bytes."""
    with serve("--engine", "echo", "-o", "option.client_timeout=0.5", "-o", "max_request_size=100") as server:
        yield server


def test_a_body_over_the_limit_is_413_however_it_comes(impatient_server: LiveServer) -> None:
    assert impatient_server.post({"inputs": "a" * 200}).status_code == 413
    pieces = (b"x" * 60 for _ in range(3))
    assert http.post(impatient_server.url + "/invocations", content=pieces).status_code == 413
    assert impatient_server.post(ASK).status_code == 200


def test_a_body_that_does_not_arrive_is_given_up(impatient_server: LiveServer) -> None:
    found = raw(impatient_server, b"POST /invocations HTTP/1.1\r\nContent-Length: 50\r\n\r\n{", until=b"}")
    assert b"408 Request Timeout" in found
    assert b"client_timeout" in found


@pytest.fixture(scope="module")
def slow_server() -> Iterator[LiveServer]:
    """Twenty tokens a second."""
    with serve("--engine", "echo", "-o", "option.echo_tokens_per_second=20") as server:
        yield server


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(("path", "status"), [(b"/nowhere", b"404"), (b"/generate", b"415"), (b"/ping", b"405")])
def test_an_early_answer_does_not_reset_a_client_that_asked_for_the_end(
    slow_server: LiveServer, path: bytes, status: bytes, version: bytes
) -> None:
    body = b"x" * (8 << 20)
    head = b"POST %b HTTP/%b\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", slow_server.port), timeout=60) as connection:
        connection.sendall(head % (path, version, len(body)) + body)
        found = b""
        while data := connection.recv(65536):
            found += data
    assert found[9:12] == status


@pytest.mark.parametrize(("length", "status"), [(50, b"408"), (1000, b"413")])
def test_a_body_that_is_refused_ends_the_connection_however_it_drips(
    impatient_server: LiveServer, length: int, status: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", impatient_server.port), timeout=60) as connection:
        connection.sendall(b"POST /invocations HTTP/1.1\r\nContent-Length: %d\r\n\r\n{" % length)
        found = receive(connection, b"}")
        assert found[9:12] == status
        assert b"connection: close" in found
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):  # as soon as the server has closed
            while time.monotonic() < began + 60:
                connection.sendall(b" ")
                time.sleep(0.1)
        assert time.monotonic() - began < 30


def test_who_sends_all_of_a_body_that_is_too_large_can_read_why(impatient_server: LiveServer) -> None:
    """Closing with unread bytes would reset the connection, and the answer would be lost."""
    body = b"x" * 20_000_000
    for framing in (
        b"Content-Length: 20000000\r\n\r\n" + body,
        b"Transfer-Encoding: chunked\r\n\r\n1312d00\r\n" + body,
    ):
        found = raw(impatient_server, b"POST /invocations HTTP/1.1\r\n" + framing, until=b"never")
        assert found[9:12] == b"413"
        assert found.endswith(b"}")


def test_a_sender_of_an_early_refused_body_can_read_why_and_is_closed(echo_server: LiveServer) -> None:
    """As Python's urllib does it: `connection: close` with each request."""
    head = b"POST /invocations HTTP/1.1\r\nConnection: close\r\nContent-Type: text/csv\r\n"
    found = raw(echo_server, head + b"Content-Length: 20000000\r\n\r\n" + b"x" * 20_000_000, until=b"never")
    assert found[9:12] == b"415"
    assert found.endswith(b"}")


def test_trailers_cost_no_memory(echo_server: ServerProcess) -> None:
    """Four clients, each with up to 50 MB in one trailer, without a length that could be refused before."""
    head = b"POST /invocations HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: "
    before = peak_memory(echo_server)
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", echo_server.port), timeout=60) as connection:
            connection.sendall(head)
            with contextlib.suppress(ConnectionError):
                for _ in range(50):
                    connection.sendall(b"x" * 1_000_000)
                assert connection.recv(65536)[9:12] == b"431"
    assert peak_memory(echo_server) - before < 20_000_000


def peak_memory(server: ServerProcess) -> int:
    """Bytes that the process has had in memory at most."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1000


def test_a_half_closed_client_gets_its_stream_and_no_whole_answer(slow_server: LiveServer) -> None:
    """A FIN alone does not say whether the client still reads; only where something is written will it show."""
    body = {"inputs": "a b", "stream": True, "parameters": {"max_new_tokens": 5}}
    assert half_closed(slow_server, post_bytes(body)).endswith(b'"generated_text":" a b a b a"}\n\r\n0\r\n\r\n')
    before = slow_server.metric(CANCELLED)
    assert half_closed(slow_server, post_bytes({**body, "stream": False})) == b""
    wait_for(lambda: slow_server.metric(CANCELLED) == before + 1, 5, "the request was not cancelled")
    assert b'"status":"Healthy"' in half_closed(slow_server, b"GET /ping HTTP/1.1\r\n\r\n")


def half_closed(server: LiveServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while data := connection.recv(65536):
            found += data
        return found


def receive(connection: socket.socket, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        data = connection.recv(65536)
        assert data, f"closed after {found!r}"
        found += data
    return found


def test_an_idle_connection_is_kept_as_long_as_it_is_told() -> None:
    """Load balancers keep theirs for 60 s and must be the ones to close."""
    assert read_config(environ={}).checked().keep_alive_timeout > 60
    with (
        serve("--engine", "echo", "-o", "option.keep_alive_timeout=1.5") as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection,
    ):
        for pause in (0.4, 0):
            began = time.monotonic()
            connection.sendall(b"GET /ping HTTP/1.1\r\n\r\n")
            receive(connection, b"}")
            time.sleep(pause)
        assert connection.recv(65536) == b""
        assert 1.5 <= time.monotonic() - began < 40


# -- large bodies are read by a process of their own, which holds up neither the server nor its end --------------------


def computed(pid: int) -> float:
    """Seconds that a process has computed, its children's aside."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def test_the_servers_process_does_not_parse_or_keep_large_bodies() -> None:
    """What it computes, it computes while it holds the GIL."""
    keys = b'{"inputs":"a"' + b"".join(b',"%06x":1' % number for number in range(400_000)) + b"}"
    with serve("--engine", "echo") as server:
        server.wait_ready()
        pid = server.process.pid
        send(server, keys)
        before, memory = computed(pid), resident(pid)
        for _ in range(3):
            found = send(server, keys)
            assert (found.status_code, found.json()["message"]) == (
                413,
                f"the body contains more than {MAX_VALUES} strings, names, lists and objects",
            )
        assert computed(pid) - before < 0.5, "to parse all of them takes more than a second"
        assert resident(pid) - memory < 24, "each of them has 5 MiB, and a hundred when it is parsed"
        assert server.post({"inputs": "a"}).status_code == 200


def test_the_process_ends_with_its_server() -> None:
    with serve("--engine", "echo") as server:
        server.wait_ready()
        assert send(server, b'{"inputs":"' + b"a" * MIB + b'"}').status_code == 200
        pids = [reader_pid(server)]
        server.process.kill()
        server.process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in pids), 10, "it lives on")


def test_a_large_body_that_is_being_read_at_sigterm_is_answered() -> None:
    body = b'{"inputs":"' + b"a" * MIB + b'"}'
    with serve("--engine", "echo") as server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        assert send(server, body).status_code == 200
        reader = reader_pid(server)
        os.kill(reader, signal.SIGSTOP)
        try:
            reading = pool.submit(send, server, body)
            time.sleep(0.5)  # the body has come whole
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "responses to finish: 1" in server.log, 10, "it is not counted")
        finally:
            os.kill(reader, signal.SIGCONT)
        assert reading.result().status_code == 200
        assert server.process.wait(10) == 0


def reader_pid(server: ServerProcess) -> int:
    """The process that reads large bodies."""
    readers = [pid for pid, command in descendants(server.process.pid).items() if "loop_watcher" not in command]
    (pid,) = readers  # echo has no process of its own
    return pid
