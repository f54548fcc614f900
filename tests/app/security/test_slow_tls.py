"""A server behind TLS and uvloop, with a hundred connections that send slowly beside a client that does not."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import trustme

from tests.app.server import serve
from tests.servers import PATIENCE, LiveServer, http

NUM_SLOW = 100
CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
CONTEXT.check_hostname = False
CONTEXT.verify_mode = ssl.CERT_NONE
BODY = b'{"inputs": "a b", "parameters": {"max_new_tokens": 3}}'
REQUEST = (
    b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    pem = tmp_path_factory.mktemp("certificate") / "both.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(pem))
    with serve("--engine", "echo", "--ssl-certfile", str(pem)) as server:
        server.wait_ready()
        yield server


def connect(server: LiveServer) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=PATIENCE)


def encrypted(connection: socket.socket) -> ssl.SSLSocket:
    return CONTEXT.wrap_socket(connection)


def read_all(connection: ssl.SSLSocket) -> bytes:
    parts = list[bytes]()
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def check_neighbour(server: LiveServer) -> None:
    assert http.get(server.url + "/ping").status_code == 200
    answer = http.post(server.url + "/invocations", content=BODY, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("cut", [1, REQUEST.index(BODY), len(REQUEST) - 3])
def test_requests_that_arrive_slowly_are_answered_and_hold_up_nobody(server: LiveServer, cut: int) -> None:
    with contextlib.ExitStack() as opened:
        slow = [opened.enter_context(encrypted(connect(server))) for _ in range(NUM_SLOW)]
        for connection in slow:
            connection.sendall(REQUEST[:cut])
        check_neighbour(server)
        for byte in REQUEST[cut : cut + 3]:
            for connection in slow:
                connection.sendall(bytes([byte]))
            check_neighbour(server)
        for connection in slow:
            connection.sendall(REQUEST[cut + 3 :])
        for connection in slow:
            assert read_all(connection).startswith(b"HTTP/1.1 200 OK\r\n")


def test_handshakes_that_do_not_begin_hold_up_nobody(server: LiveServer) -> None:
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(connect(server)) for _ in range(NUM_SLOW)]
        check_neighbour(server)
        late = opened.enter_context(encrypted(silent.pop()))
        late.sendall(REQUEST)
        assert read_all(late).startswith(b"HTTP/1.1 200 OK\r\n")
        check_neighbour(server)


def test_clients_that_leave_in_the_middle_hold_up_nobody(server: LiveServer) -> None:
    for cut in (0, 1, len(REQUEST) - 1, len(REQUEST)):
        for _ in range(NUM_SLOW // 4):
            with encrypted(connect(server)) as connection:
                connection.sendall(REQUEST[:cut])
        check_neighbour(server)
