"""Options of WebSockets: their number, their life, and compression."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Iterator

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection

from tests.app.server import serve
from tests.app.sockets.client import open_socket, receive, send, wire
from tests.servers import LiveServer, wait_for

INVOKE = "/invocations-bidirectional-stream"
CHAT = {"messages": [{"role": "user", "content": "red " * 50}], "max_tokens": 5}
OFFER = "Sec-WebSocket-Extensions: permessage-deflate"


@pytest.fixture(scope="module")
def limited_server() -> Iterator[LiveServer]:
    options = ("websockets_max=2", "websockets_compression=true", "websockets_seconds=30")
    with serve("--engine", "echo", *(word for option in options for word in ("-o", f"option.{option}"))) as server:
        yield server


def is_compressed(client: ClientConnection) -> bool:
    return bool(client.protocol.extensions)


def test_the_number_of_sockets_is_limited(limited_server: LiveServer) -> None:
    with open_socket(limited_server, INVOKE), open_socket(limited_server, "/v1/realtime"):
        with pytest.raises(InvalidStatus) as refused:
            open_socket(limited_server, INVOKE).__enter__()
        assert refused.value.response.status_code == 503
        assert "retry-after" in refused.value.response.headers
        assert "lmi_websockets 2.0" in httpx.get(f"{limited_server.url}/metrics").text
    wait_for(lambda: "lmi_websockets 0.0" in httpx.get(f"{limited_server.url}/metrics").text, 10, "a socket is open")


@pytest.mark.parametrize("path", [INVOKE, "/v1/realtime", "/v1/responses"])
def test_a_server_without_sockets_says_so_at_once(path: str) -> None:
    with serve("--engine", "echo", "-o", "option.websockets_max=0") as server:
        with pytest.raises(InvalidStatus) as refused:
            open_socket(server, path).__enter__()
        response = refused.value.response
        assert response.status_code == 426
        assert b"option.websockets_max" in response.body
        assert "retry-after" not in response.headers


def test_messages_are_compressed_only_if_option_and_client_allow_it(
    echo_server: LiveServer, limited_server: LiveServer
) -> None:
    answers = []
    for server, compression in ((limited_server, "deflate"), (limited_server, None), (echo_server, "deflate")):
        with open_socket(server, "/v1/chat/completions", compression=compression) as client:
            assert is_compressed(client) == (server is limited_server and compression is not None)
            send(client, CHAT)
            answers.append(receive(client)["choices"])
    assert answers[0] == answers[1] == answers[2]
    with open_socket(limited_server, INVOKE) as client:
        assert not is_compressed(client)


def test_a_bomb_is_refused(limited_server: LiveServer) -> None:
    deflate = zlib.compressobj(wbits=-12)
    bomb = b"".join(deflate.compress(bytes(1 << 20)) for _ in range(32)) + deflate.flush(zlib.Z_SYNC_FLUSH)[:-4]
    with wire(limited_server, "/v1/chat/completions", [OFFER]) as client:
        client.frame(1, bomb, first=0xC0)
        assert client.close_code() == 1009
    assert limited_server.ping() == 200


def test_the_end_of_a_connection_tells_a_maximum_life_from_a_stop() -> None:
    with serve("--engine", "echo", "-o", "option.websockets_seconds=1") as server:
        with open_socket(server, "/v1/responses") as client:
            assert receive(client)["error"]["code"] == "websocket_connection_limit_reached"
            assert "option.websockets_seconds" in close_reason(client)
        for path in (INVOKE, "/v1/realtime", "/v1/chat/completions"):
            with open_socket(server, path) as client:
                assert "option.websockets_seconds" in close_reason(client)
    with serve("--engine", "echo") as server, open_socket(server, INVOKE) as client:
        server.send_signal(signal.SIGTERM)
        assert close_reason(client) == "the server is stopping"


def close_reason(client: ClientConnection) -> str:
    """Read until the end of a connection, which the server must close with code 1001. Return the reason."""
    for _ in client:
        pass
    assert client.close_code == 1001
    return client.close_reason or ""
