"""Bursts of many connections: what each has the event loop do before it has its turn is bounded."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.attacks.test_standstill import CHAT, INVOCATIONS, chat, parameters
from tests.attacks.watch import Watch, answering
from tests.servers import PATIENCE, ServerProcess, options, post_bytes, serve, wait_for

GET = b"GET /%b HTTP/1.1\r\nhost: 127.0.0.1\r\n"
CHUNKED = b"POST /invocations HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
BURSTS: dict[str, tuple[int, bytes, bytes]] = {
    "pipelined requests": (300, (GET % b"ping" + b"a:b\r\n" * 90 + b"\r\n") * 110, b"200"),
    "pipelined pages": (300, (GET % b"metrics" + b"\r\n") * 1000, b"200"),
    "many headers": (300, GET % b"ping" + b"a:b\r\n" * 12_000 + b"\r\n", b"431"),
    "a path of percent signs": (300, b"GET /" + b"%" * 60_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", b"414"),
    "a path of escapes": (600, b"GET /v2/models/" + b"%ff" * 2_700 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", b"404"),
    "a query of escapes": (
        600,
        b"GET /adapters?a=" + b"a%ff" * 2_000 + b" HTTP/1.1\r\n" + b"host: 127.0.0.1\r\n\r\n",
        b"4",
    ),
    "metrics": (600, GET % b"metrics" + b"\r\n", b"200"),
    "the API document": (600, GET % b"api-doc/openapi.json" + b"\r\n", b"200"),
    "many trailers": (300, CHUNKED + b"1\r\n1\r\n0\r\n" + b"a:b\r\n" * 12_000 + b"\r\n", b"4"),
    "small chunks": (300, CHUNKED + b"1\r\n \r\n" * 20_000, b""),
    "requests after a body": (300, CHUNKED + b"1\r\n1\r\n0\r\n\r\n" + (GET % b"nothing" + b"\r\n") * 1000, b"4"),
    "streams": (1024, post_bytes(chat("a b c d", stream=True, max_tokens=2), CHAT), b"200"),
    "whole answers": (1024, post_bytes(parameters(max_new_tokens=2), INVOCATIONS), b"200"),
    "invalid requests": (1024, b"GET\r\n\r\n" * 1000, b"400"),
}
"""Number of connections, the bytes of each, and how the status of the first answer begins."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    own = ("option.max_rolling_batch_size=1024", "job_queue_size=2048")
    with serve("--engine", "echo", *options(*own)) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("name", BURSTS)
def test_a_burst_leaves_a_neighbour_its_turn(server: ServerProcess, name: str) -> None:
    number, data, status = BURSTS[name]
    neighbours = set[int]()

    def ask() -> None:
        neighbours.add(server.post(chat("a"), CHAT).status_code)

    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE))
            for _ in range(number)
        ]
        with Watch(ask), answering(server):
            for connection in connections:
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    connection.send(data)
            for connection in connections:
                connection.settimeout(PATIENCE)
                assert not status or connection.recv(12)[9:].startswith(status)
    assert neighbours == {200}
    wait_for(lambda: server.metric("lmi_active_sequences") == 0, PATIENCE, "a request goes on")


def test_small_requests_pass_beside_a_large_body_that_is_read(server: ServerProcess) -> None:
    body = b'{"inputs":"a","x":[' + b"0," * (4 << 20) + b"0]}"
    neighbours = set[int]()

    def ask() -> None:
        neighbours.add(server.post(parameters()).status_code)

    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    with connection, Watch(ask), answering(server):
        connection.sendall(post_bytes(body))
        assert b"413" in connection.recv(12)
    assert neighbours == {200}
