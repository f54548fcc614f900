"""Which connections wait for an answer: the kernel's own word, on real sockets."""

from __future__ import annotations

import socket

import pytest

from handler.container.supervisor import Connection, connections
from tests.servers import wait_for

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
