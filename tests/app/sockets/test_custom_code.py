"""Custom code and WebSockets: it is called for each message, and the handshake passes it by."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed

from tests.app.server import AppServer, serve
from tests.app.sockets.client import SECONDS, open_socket, receive, send
from tests.servers import LiveServer
from tests.user_files import write_model

INVOKE, CHAT = "/invocations-bidirectional-stream", "/v1/chat/completions"
BODY = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}

MIDDLEWARE = """
import model_hosting_container_standards.sagemaker as standards
from fastapi.responses import JSONResponse
from model_hosting_container_standards.common.fastapi.middleware import custom_middleware

paths = []


@custom_middleware("throttle")
async def throttle(request, call_next):
    paths.append((request.method, request.url.path))
    if len(paths) == 3:
        return JSONResponse({"error": {"message": "later"}}, 429, {"retry-after": "7"})
    return await call_next(request)


@standards.custom_invocation_handler
async def invoke(request):
    return {"paths": paths, "body": await request.json()}
"""

HANDLE = """
from djl_python import Output


def handle(inputs):
    output = Output()
    output.add_as_json({"body": inputs.get_as_json()})
    return output
"""


@pytest.fixture(scope="module")
def custom_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    properties = write_model(tmp_path_factory.mktemp("custom"), MIDDLEWARE)
    with serve("--engine", "echo", "--properties", str(properties)) as server:
        yield server


def test_middleware_and_handlers_are_called_for_each_message(custom_server: LiveServer) -> None:
    with open_socket(custom_server, INVOKE) as client:
        send(client, BODY)
        assert receive(client) == {"paths": [["POST", "/invocations"]], "body": BODY}
        with open_socket(custom_server, CHAT) as other:
            send(other, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True})
            assert receive(other)["object"] == "chat.completion.chunk"
        send(client, BODY)
        assert receive(client) == {
            "error": {"message": "later", "headers": {"retry-after": "7"}},
            "type": "error",
            "status": 429,
            "headers": {"retry-after": "7"},
        }
        send(client, BODY)
        assert receive(client)["paths"][-1] == ["POST", "/invocations"]


def test_handle_of_model_py_is_called_for_each_message(tmp_path: Path) -> None:
    with serve("--engine", "echo", "--properties", str(write_model(tmp_path, HANDLE))) as server:
        with open_socket(server, INVOKE) as client:
            for lane in ({}, {"stream_id": "a"}):
                send(client, {**BODY, **lane})
                assert receive(client) == {**lane, "body": BODY}
            server.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                client.recv(SECONDS)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        assert server.wait(SECONDS) == 0
