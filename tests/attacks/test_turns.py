"""The largest messages of all sockets, and the largest bodies of all routes: none makes another client wait.

What a client waits for is the CPU time of the server's process during its ping, which no other process changes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from handler.serving.large_bodies import MAX_NUMBERS, MAX_TEXT, MAX_VALUES
from tests.app.sockets.client import Wire, frame, wire
from tests.attacks.watch import answering
from tests.servers import PATIENCE, ServerProcess, http, options, serve

LONGEST = 0.25  # CPU seconds
MESSAGE, BODY = 1 << 24, 1 << 26  # maximum size of a message, and of a body (max_request_size)
TEXT = 1  # opcode

FILLS: dict[str, Callable[[int], bytes]] = {
    "names": lambda size: b"{" + b",".join([b'"%d":0' % number for number in range(size // 12)]) + b"}",
    "objects": lambda size: b"[" + b",".join([b"{}"] * (size // 3)) + b"]",
    "numbers": lambda size: b"[" + b",".join([b"1"] * (size // 2)) + b"]",
    "a text": lambda size: b'"' + b"a" * size + b'"',
    "as many texts as are read": lambda size: b"[" + b",".join([b'"a"'] * (MAX_VALUES - 50)) + b"]",
    "as long a text as is read": lambda size: b'"' + b"a" * MAX_TEXT + b'"',
    "as many numbers as are read": lambda size: b"[%d" % (1 << 80) + b",1" * (MAX_NUMBERS - 50) + b"]",
}
"""JSON of about a size, or as large as it may be."""

HEAVY = ("names", "as many numbers as are read")
"""The JSON that costs most when it is decoded, and when it has been."""
LIGHT = [name for name in FILLS if name not in HEAVY]

RESPONSES, REALTIME, INVOKE = "/v1/responses", "/v1/realtime", "/invocations-bidirectional-stream"
MESSAGES = {
    "a body": ("/v1/completions", b'{"prompt":%b}'),
    "a body for SageMaker": (INVOKE, b'{"inputs":%b}'),
    "a lane": ("/v1/chat/completions", b'{"stream_id":"a","messages":%b}'),
    "a type": (RESPONSES, b'{"type":%b}'),
    "an input": (RESPONSES, b'{"type":"response.create","input":%b}'),
    "tools": (RESPONSES, b'{"type":"response.create","input":"a","max_output_tokens":1,"tools":[%b]}'),
    "an earlier response": (RESPONSES, b'{"type":"response.create","input":"a","previous_response_id":%b}'),
    "a warm-up": (RESPONSES, b'{"type":"response.create","input":"a","generate":false,"metadata":%b}'),
    "what steers": (RESPONSES, b'{"type":"response.steer","input":%b}'),
    "a response for SageMaker": (INVOKE, b'{"type":"response.create","input":%b}'),
    "an event": (REALTIME, b'{"type":%b}'),
    "instructions": (REALTIME, b'{"type":"session.update","session":{"instructions":%b}}'),
    "settings of audio": (REALTIME, b'{"type":"session.update","session":{"audio":{"input":{"a":%b}}}}'),
    "an unknown setting": (REALTIME, b'{"type":"session.update","session":{"truncation":%b}}'),
    "an item": (REALTIME, b'{"type":"conversation.item.create","item":{"type":"function_call","call_id":"c","a":%b}}'),
    "the id of an item": (REALTIME, b'{"type":"conversation.item.retrieve","item_id":%b}'),
    "audio": (REALTIME, b'{"type":"input_audio_buffer.append","audio":%b}'),
    "a response": (REALTIME, b'{"type":"response.create","response":{"metadata":%b}}'),
    "an item for SageMaker": (INVOKE, b'{"type":"conversation.item.create","item":%b}'),
}
"""Path of a WebSocket, and a message for the JSON."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    memory = f"option.requests_total_bytes={1 << 32}"
    own = ("option.responses_store=memory", "option.enable_lora=true", memory)
    with serve("--engine", "echo", *options(*own)) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize(
    ("name", "fill"), [*((name, fill) for name in MESSAGES for fill in HEAVY), *(("an input", fill) for fill in LIGHT)]
)
def test_a_message_makes_nobody_wait(server: ServerProcess, name: str, fill: str) -> None:
    path, message = MESSAGES[name]
    data = message % FILLS[fill](MESSAGE - 1000)
    with answering(server, most=LONGEST), wire(server, path) as client:
        client.socket.settimeout(PATIENCE)
        assert len(data) <= MESSAGE
        client.frame(TEXT, data)
        client.frame(TEXT, b"[]")  # its refusal is the last event
        while b'"the message must be a JSON object"' not in (answer := client.read()[1]) and is_alone(path, answer):
            assert answer


def is_alone(path: str, answer: bytes) -> bool:
    """Return whether further events follow. A route refuses the message after this one in its own words."""
    return path not in ("/v1/completions", "/v1/chat/completions") and b'"code":424' not in answer


BODIES = {
    "/v1/conversations": b'{"items":%b}',
    "/v1/conversations/conv_1": b'{"metadata":{},"a":%b}',
    "/v1/conversations/conv_1/items": b'{"items":[%b]}',
    "/v1/messages/batches": b'{"requests":[{"custom_id":"a","params":%b}]}',
    "/v1/batches": b'{"endpoint":%b}',
    "/adapters": b'{"name":%b}',
    "/v1/responses": b'{"input":%b}',
    "/v1/completions": b'{"prompt":%b}',
    "/invocations": b'{"inputs":%b}',
}
"""A route for each way of reading a body, and a body for the JSON."""


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fill", HEAVY)
def test_a_body_makes_nobody_wait(server: ServerProcess, path: str, fill: str) -> None:
    body = BODIES[path] % FILLS[fill](BODY - 1000)
    headers = {"content-type": "application/json"}
    with answering(server):
        answer = http.post(server.url + path, content=body, headers=headers, timeout=PATIENCE)
    assert answer.status_code in (400, 404, 413, 424), answer.text[:200]


# -- a few bytes that ask for many -------------------------------------------------------------------------------------

LARGE = "a" * (6 << 20)
UPDATE = b'{"type":"session.update","session":{"type":"realtime"}}'
SETTINGS = {"type": "session.update", "session": {"type": "realtime", "instructions": LARGE}}
ITEM = {
    "type": "conversation.item.create",
    "item": {"type": "message", "id": "a", "role": "user", "content": [{"type": "input_text", "text": LARGE}]},
}
RETRIEVE = b'{"type":"conversation.item.retrieve","item_id":"a"}'
RESPOND = b'{"type":"response.create","response":{"conversation":"none","max_output_tokens":1}}'


@pytest.mark.parametrize(
    ("first", "small"),
    [(SETTINGS, UPDATE), (ITEM, RETRIEVE), (SETTINGS, RESPOND)],
    ids=["settings", "item", "response"],
)
def test_small_messages_with_large_answers_make_nobody_wait(
    server: ServerProcess, first: dict[str, Any], small: bytes
) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(wire(server, REALTIME)) for _ in range(20)]
        for client in clients:
            client.socket.settimeout(PATIENCE)
            client.frame(TEXT, json.dumps(first).encode())
            receive(client, b'"session.updated"', b'"conversation.item.done"')
        with answering(server, most=LONGEST):
            for _ in range(3):
                for client in clients:
                    client.socket.sendall(frame(TEXT, small))
                for client in clients:
                    receive(client, b'"session.updated"', b'"conversation.item.retrieved"', b'"response.done"')


def receive(client: Wire, *ends: bytes) -> None:
    """Receive the events up to one whose type is in `ends`, and all bytes that have arrived with it."""
    data = b""
    while not any(end in data for end in ends):
        data = data[-100:] + (part := client.socket.recv(1 << 20))
        assert part
        assert b'{"type":"error"' not in data, data[:500]
    left = len(LARGE) if b'"response.done"' not in data else 0
    while left > len(data):
        left -= len(client.socket.recv(1 << 20))
