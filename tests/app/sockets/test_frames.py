"""Frames of a WebSocket: what RFC 6455 allows, what it forbids, and what would cost too much."""

from __future__ import annotations

import json
import socket

import pytest

from tests.app.sockets.client import SECONDS, offer, wire
from tests.servers import LiveServer

TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10
FIRST = 0x00  # a fragment that is not the last
BODY = json.dumps({"inputs": "a naïve question", "parameters": {"max_new_tokens": 2}}, ensure_ascii=False).encode()
ANSWER = {"generated_text": " a naïve"}


@pytest.mark.parametrize("opcode", [TEXT, BINARY])
@pytest.mark.parametrize("cut", [1, BODY.index("ï".encode()) + 1, len(BODY) - 1])
def test_fragments_are_joined(echo_server: LiveServer, opcode: int, cut: int) -> None:
    with wire(echo_server) as client:
        client.frame(opcode, BODY[:cut], first=FIRST)
        client.frame(PING, b"between")
        client.frame(CONTINUATION, b"", first=FIRST)
        client.frame(CONTINUATION, BODY[cut:])
        assert client.read() == (0x8A, b"between")
        first, data = client.read()
        assert (first, json.loads(data)) == (0x81, ANSWER)


def test_the_server_closes_as_the_client_does(echo_server: LiveServer) -> None:
    with wire(echo_server) as client:
        client.frame(CLOSE, (1000).to_bytes(2, "big") + b"done")
        assert client.close_code() == 1000


FORBIDDEN = {
    "no mask": (1002, [(TEXT, b"{}", 0x80, False)]),
    "reserved bit 1": (1002, [(TEXT, b"{}", 0xC0, True)]),
    "reserved bit 2": (1002, [(TEXT, b"{}", 0xA0, True)]),
    "reserved bit 3": (1002, [(TEXT, b"{}", 0x90, True)]),
    "unknown opcode": (1002, [(3, b"", 0x80, True)]),
    "unknown control opcode": (1002, [(11, b"", 0x80, True)]),
    "long ping": (1002, [(PING, bytes(126), 0x80, True)]),
    "fragmented ping": (1002, [(PING, b"", 0x00, True)]),
    "close code of one byte": (1002, [(CLOSE, b"\x03", 0x80, True)]),
    "reserved close code": (1002, [(CLOSE, (1005).to_bytes(2, "big"), 0x80, True)]),
    "continuation of nothing": (1002, [(CONTINUATION, b"", 0x80, True)]),
    "message within a message": (1002, [(TEXT, b"{", 0x00, True), (TEXT, b"}", 0x80, True)]),
    "text that is not UTF-8": (1007, [(TEXT, b'{"inputs": "\xff"}', 0x80, True)]),
    "half a character": (1007, [(TEXT, b'"\xc3', 0x00, True), (CONTINUATION, b'"', 0x80, True)]),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_forbidden_frame_closes_the_connection(echo_server: LiveServer, name: str) -> None:
    code, frames = FORBIDDEN[name]
    with wire(echo_server) as client:
        for opcode, data, first, masked in frames:
            client.frame(opcode, data, first=first, masked=masked)
        assert client.close_code() == code
    assert echo_server.ping() == 200


def test_a_message_that_announces_too_much_is_refused_at_once(echo_server: LiveServer) -> None:
    with wire(echo_server) as client:
        client.socket.sendall(b"\x81\xff" + (1 << 40).to_bytes(8, "big") + bytes(4))
        assert client.close_code() == 1009


def test_fragments_together_have_the_limit_of_a_message(echo_server: LiveServer) -> None:
    with wire(echo_server) as client:
        client.frame(TEXT, bytes(10 << 20), first=FIRST)
        client.socket.sendall(b"\x00\xff" + (10 << 20).to_bytes(8, "big") + bytes(4))
        assert client.close_code() == 1009


def test_a_message_has_a_limited_number_of_fragments(echo_server: LiveServer) -> None:
    with wire(echo_server) as client:
        client.frame(TEXT, BODY, first=FIRST)
        client.socket.sendall(b"\x00\x80\x00\x00\x00\x00" * 1022 + b"\x80\x80\x00\x00\x00\x00")
        assert client.read()[0] == 0x81
        client.frame(TEXT, BODY, first=FIRST)
        client.socket.sendall(b"\x00\x80\x00\x00\x00\x00" * 1023 + b"\x80\x80\x00\x00\x00\x00")
        assert client.close_code() == 1008
    with wire(echo_server) as client:
        client.frame(TEXT, b"", first=FIRST)
        client.socket.sendall(b"\x00\x80\x00\x00\x00\x00" * 2000)
        assert client.close_code() == 1008


def test_pings_are_answered_while_a_response_is_generated(echo_server: LiveServer) -> None:
    body = {"inputs": "word " * 50, "parameters": {"max_new_tokens": 20000}, "stream": True}
    with wire(echo_server) as client:
        client.frame(TEXT, json.dumps(body).encode())
        num_events = 0
        client.frame(PING, b"are you there")
        while True:
            first, data = client.read()
            if first == 0x8A:
                break
            num_events += 1
        assert data == b"are you there"
        assert num_events < 20000


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ("Sec-WebSocket-Version: 12", "Sec-WebSocket-Version"),
        ("Sec-WebSocket-Key: short", "Sec-WebSocket-Key"),
    ],
)
def test_a_wrong_handshake_is_refused(echo_server: LiveServer, header: str, word: str) -> None:
    with socket.create_connection(("127.0.0.1", echo_server.port), SECONDS) as client:
        client.sendall(offer("/v1/responses", [header]))
        answer = client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert word.encode() in answer


def test_bytes_before_the_handshake_is_answered_are_refused(echo_server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", echo_server.port), SECONDS) as client:
        client.sendall(offer("/v1/responses") + b"\x81\x80\x00\x00\x00\x00")
        assert b" 400 " in client.recv(1 << 16)
