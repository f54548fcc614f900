"""Hostile clients of a WebSocket: nothing of a neighbour is lost, and the connection goes on or says how it ends."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.app.server import serve
from tests.app.sockets.client import SECONDS, Wire, offer, open_socket, receive, send, until
from tests.servers import ANSWER_LIMIT, LiveServer, wait_for

INVOKE, RESPONSES, REALTIME, CHAT = (
    "/invocations-bidirectional-stream", "/v1/responses", "/v1/realtime", "/v1/chat/completions",
)  # fmt: skip
ONE = {"inputs": "x", "parameters": {"max_new_tokens": 1}}


# -- the handshake -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (["Content-Length: 5"], b"hello"),
        (["Transfer-Encoding: chunked"], b"0\r\n\r\n"),
    ],
)
def test_a_handshake_with_a_body_is_refused(echo_server: LiveServer, headers: list[str], body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", echo_server.port), SECONDS) as client:
        client.sendall(offer(RESPONSES, headers) + body)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("head", ["Upgrade: websocket", "Upgrade: h2c", "Sec-WebSocket-Version: 13"])
def test_a_repeated_header_of_the_handshake_is_refused(echo_server: LiveServer, head: str) -> None:
    with socket.create_connection(("127.0.0.1", echo_server.port), SECONDS) as client:
        client.sendall(offer(RESPONSES, [head]))
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 40")


def test_a_connection_upgrades_with_its_third_request(echo_server: LiveServer) -> None:
    ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", echo_server.port), SECONDS) as client:
        for request in (ping, ping, offer(INVOKE)):
            client.sendall(request)
            answer = client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 101 ")
        opened = Wire(client)
        opened.frame(1, json.dumps(ONE).encode())
        assert json.loads(opened.read()[1]) == {"generated_text": " x"}


def test_a_pipelined_request_before_the_handshake_is_answered_first(echo_server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", echo_server.port), SECONDS) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" + offer(INVOKE))
        answers = b""
        while answers.count(b"HTTP/1.1 ") < 2:
            answers += client.recv(1 << 16)
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 101 " in answers


# -- messages that must not end the work of others ---------------------------------------------------------------------


LONE = rb"\ud800"
WIDE = b"9" * 30
INVALID = {
    "a lone surrogate in a response": (RESPONSES, b'{"type": "response.create", "input": "' + LONE + b'"}'),
    "a lone surrogate in a lane": (
        CHAT, b'{"stream_id": "a", "messages": [{"role": "user", "content": "' + LONE + b'"}]}'
    ),
    "NaN in a lane": (CHAT, b'{"stream_id": "a", "max_tokens": NaN, "messages": []}'),
    "a lone surrogate in an id": (REALTIME, b'{"type": "none", "event_id": "' + LONE + b'"}'),
    "a lone surrogate in an item": (
        REALTIME, b'{"type": "conversation.item.create", "item": {"type": "function_call", "name": "' + LONE + b'"}}'
    ),
    "a wide integer as metadata": (REALTIME, b'{"type": "response.create", "response": {"metadata": ' + WIDE + b"}}"),
    "a wide limit": (REALTIME, b'{"type": "session.update", "session": {"max_output_tokens": ' + WIDE + b"}}"),
    "a list as an id": (REALTIME, b'{"type": "conversation.item.delete", "item_id": []}'),
    "a list before an item": (
        REALTIME,
        b'{"type": "conversation.item.create", "previous_item_id": [], '
        b'"item": {"type": "message", "role": "user", "content": []}}',
    ),
    "a deep message": (REALTIME, b'{"type": "x", "a": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_message_gets_an_error_and_the_next_one_a_response(echo_server: LiveServer, name: str) -> None:
    path, message = INVALID[name]
    log = echo_server.log
    with open_socket(echo_server, path) as client:
        if path == REALTIME:
            receive(client)
        for _ in range(2):  # the second one shows that the lane goes on
            client.send(message)
            event = receive(client)
            while event["type"] == "response.created":
                event = until(client, "response.done")[-1]
            assert event["type"] in ("error", "response.done"), event
            assert event["type"] == "error" or event["response"]["status"] == "failed"
    assert "a bug in the server" not in echo_server.log.removeprefix(log)


def test_a_wide_integer_comes_back_as_it_was_sent(echo_server: LiveServer) -> None:
    with open_socket(echo_server, RESPONSES) as client:
        client.send(b'{"type": "response.steer", "input": %b}' % WIDE)
        assert receive(client)["steer"] == {"input": int(WIDE)}
    with open_socket(echo_server, REALTIME) as client:
        item = b'{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "n": %b}' % WIDE
        client.send(b'{"type": "conversation.item.create", "item": %b}' % item)
        assert until(client, "conversation.item.done")[-1]["item"]["n"] == int(WIDE)


def test_a_wide_integer_that_would_be_repeated_is_refused_also_in_a_continuation(echo_server: LiveServer) -> None:
    wide = {"type": "function", "name": "f", "parameters": {"maximum": int(WIDE)}}
    widest = {"type": "function", "name": "f", "parameters": {"maximum": (1 << 64) - 1}}
    request = {"type": "response.create", "store": False, "input": "x", "max_output_tokens": 1}
    with open_socket(echo_server, RESPONSES) as client:
        previous: dict[str, str] = {}
        for _ in range(2):
            send(client, {**request, **previous, "tools": [widest]})
            events = until(client, "response.incomplete", "error")
            assert [event["response"]["tools"][0]["parameters"] for event in events if "response" in event] == [
                widest["parameters"]
            ] * 3
            previous = {"previous_response_id": events[-1]["response"]["id"]}
        send(client, {**request, **previous, "tools": [wide]})
        refused = receive(client)
        assert (refused["status"], refused["error"]["param"]) == (400, "tools")


# -- memory ------------------------------------------------------------------------------------------------------------


MIB = 1 << 20


@pytest.fixture(scope="module")
def small_server() -> Iterator[LiveServer]:
    with serve("--engine", "echo", "-o", f"option.requests_total_bytes={8 * MIB}") as server:
        yield server


def is_refused(event: Any) -> bool:
    return event.get("type") == "error" and "this connection" in str(event["error"]["message"])


def test_waiting_messages_hold_memory(small_server: LiveServer) -> None:
    busy = {"inputs": "y", "parameters": {"max_new_tokens": 100_000}, "stream": True, "stream_id": "a"}
    with open_socket(small_server, INVOKE) as client:
        send(client, busy)
        receive(client)
        send(client, *[{"inputs": "x" * (MIB // 16), "stream_id": "a"}] * 100)  # they wait for the lane
        while not is_refused(receive(client)):
            pass
        assert small_server.post(ONE).status_code == 200


def test_a_conversation_holds_memory(small_server: LiveServer) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * (MIB // 16)}]}
    with open_socket(small_server, REALTIME) as client:
        receive(client)
        num_items = 0
        event: dict[str, Any] = {}
        while not is_refused(event):
            assert num_items < 100
            num_items += 1
            send(client, {"type": "conversation.item.create", "item": item})
            event = until(client, "conversation.item.done", "error")[-1]
        assert small_server.post(ONE).status_code == 200
    wait_for(lambda: small_server.post({"inputs": "x" * MIB}).status_code < 500, 10, "its memory is not given back")


def test_a_client_that_sends_too_much_reads_the_close_code(echo_server: LiveServer) -> None:
    with open_socket(echo_server, CHAT) as client:
        with contextlib.suppress(ConnectionClosed):
            client.send("x" * (20 * MIB))
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(ANSWER_LIMIT)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
