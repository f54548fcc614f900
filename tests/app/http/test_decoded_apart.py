"""Where bodies are decoded: each is measured first, and none that is large is decoded in the server's process."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import orjson
import pytest

from handler.protocols.kernel import body as bodies
from handler.serving import large_bodies, preprocessor
from handler.serving.large_bodies import LARGE
from handler.serving.request.stages import PARSE_INLINE
from tests.app.server import serve
from tests.app.sockets.client import open_socket, receive, send
from tests.servers import LiveServer, http, options

SERVER = "server"  # name of the thread with the event loop
SIZES = (PARSE_INLINE + 1, LARGE + 1)


class Step(NamedTuple):
    """A step that handles a body: "measure" or "decode"."""

    kind: str
    size: int
    thread: str


@contextlib.contextmanager
def recorded(size: int) -> Iterator[list[Step]]:
    """Record what the server's process does with each body of about `size` bytes.

    The server may still be reading the body of the test before, which has another size.
    """
    steps: list[Step] = []
    measure, read_text = bodies.decoded_size, bodies.decode_text

    def note(kind: str, body: bytes | memoryview) -> None:
        if size * 0.9 <= len(body) < size * 2:
            steps.append(Step(kind, len(body), threading.current_thread().name))

    def decoded_size(body: bytes, *given: Any) -> int:
        note("measure", body)
        return measure(body, *given)

    def loads(body: bytes) -> Any:
        note("decode", body)
        return orjson.loads(body)

    def decode_text(body: bytes | memoryview, *given: str) -> str:
        note("decode", body)
        return read_text(body, *given)

    fast = SimpleNamespace(loads=loads, JSONDecodeError=orjson.JSONDecodeError)
    with (
        mock.patch.object(bodies, "orjson", fast),
        mock.patch.object(bodies, "decode_text", decode_text),
        mock.patch.object(preprocessor, "decoded_size", decoded_size),
        mock.patch.object(large_bodies, "decoded_size", decoded_size),
    ):
        yield steps


def check(steps: list[Step], size: int) -> None:
    """Check how a body of about `size` bytes has been handled."""
    assert steps
    assert steps[0].kind == "measure"
    assert {step.thread for step in steps}.isdisjoint({SERVER})
    if size >= LARGE:
        assert {step.kind for step in steps} == {"measure"}, "it is decoded in another process"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve("--engine", "echo", *options("option.responses_store=memory", "option.enable_lora=true")) as server:
        yield server


def text_of(size: int) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a" * size}]}


MESSAGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "responses": ("/v1/responses", lambda text: {"type": "response.steer", "input": [text]}),
    "an unknown event": ("/v1/responses", lambda text: {"type": text}),
    "realtime": ("/v1/realtime", lambda text: {"type": "conversation.item.create", "item": text}),
    "settings": ("/v1/realtime", lambda text: {"type": "session.update", "session": {"instructions": str(text)}}),
    "SageMaker's stream": ("/invocations-bidirectional-stream", lambda text: {"type": "response.steer", "input": text}),
    "a realtime stream of SageMaker's": (
        "/invocations-bidirectional-stream", lambda text: {"type": "conversation.item.create", "item": text}
    ),
    "a lane": ("/v1/chat/completions", lambda text: {"stream_id": "a", "messages": 5, "x": text}),
    "a body": ("/v1/completions", lambda text: {"prompt": text}),
}  # fmt: skip
"""Path of a WebSocket, and a message that contains an item."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MESSAGES)
def test_a_message(server: LiveServer, name: str, size: int) -> None:
    path, message = MESSAGES[name]
    with recorded(size) as steps, open_socket(server, path) as client:
        if path == "/v1/realtime":
            receive(client)
        send(client, message(text_of(size)))
        receive(client)
    check(steps, size)


ROUTES: dict[str, Callable[[Any], Any]] = {
    "/v1/conversations": lambda text: {"items": [text]},
    "/v1/conversations/conv_1": lambda text: {"metadata": {}, "x": text},
    "/v1/conversations/conv_1/items": lambda text: {"items": [text]},
    "/adapters": lambda text: {"name": "a", "src": text["content"][0]["text"][: LARGE - 100]},
    "/v1/responses": lambda text: {"input": text},
    "/invocations": lambda text: {"inputs": text["content"][0]["text"], "parameters": {"max_new_tokens": 1}},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", ROUTES)
def test_a_body(server: LiveServer, path: str, size: int) -> None:
    body = json.dumps(ROUTES[path](text_of(size))).encode()
    with recorded(size) as steps:
        answer = http.post(server.url + path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text[:200]
    check(steps, len(body))
