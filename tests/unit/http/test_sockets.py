"""The parts of a WebSocket's session, and a WebSocket of another ASGI server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from handler.core.event_stream import EventReader
from handler.core.framing import KEEP_ALIVE, SSE, dumps, typed_event
from handler.http.sockets.asgi import AsgiHandshake
from handler.http.sockets.base import SocketLimits
from handler.http.sockets.exchange import EventSender, event_in, events_in
from handler.http.sockets.lanes import Lanes, LaneWork
from handler.http.sockets.requests import SocketRequests
from handler.serving.quota import Quota, Share

QUOTA = Quota(1 << 20, 0, 1 << 20, "too much")


PIECES = (
    b"data: {}",
    b"data: {x",
    b"data: [1]",
    b"event: a",
    b"event: data: {",
    b":",
    b"data:{}",
    b"\n",
    b"\n\n",
    b"x",
)


@pytest.mark.parametrize("length", range(6))
def test_one_event_is_read_as_the_standard_says(length: int) -> None:
    for pieces in itertools.product(PIECES, repeat=length):
        data = b"".join(pieces)
        if event := event_in(data):
            assert EventReader(1 << 10).feed(data)[0].data == event
            assert len(events_in(data)) == 1


@pytest.mark.parametrize("value", [{"type": "a"}, {"type": "a", "text": "data: {\n\ndata: {"}])
def test_each_event_of_this_server_is_read_at_once(value: dict[str, Any]) -> None:
    for data in (SSE.encode(value), typed_event(value)):
        assert event_in(data) == dumps(value)
        assert not event_in(data + data)
        assert not event_in(KEEP_ALIVE + data)


def work(do: Callable[[], Awaitable[None]]) -> LaneWork:
    memory = Share(QUOTA)
    memory.take(10)
    return LaneWork(do, memory)


def test_an_error_is_reported_for_its_lane_and_the_next_work_runs() -> None:
    reports: list[tuple[str, str]] = []
    done: list[str] = []

    async def fail() -> None:
        raise ValueError("broken")

    async def succeed() -> None:
        done.append("next")

    async def tell() -> None:
        lanes = Lanes(lambda error, lane: reports.append((str(error), lane)), lambda: done.append("idle"))
        lanes.add("a", work(fail))
        lanes.add("a", work(succeed))
        assert (lanes.num_waiting, QUOTA.taken) == (2, 20)
        await asyncio.wait(lanes.running)
        assert (lanes.running, QUOTA.taken) == ([], 0)

    asyncio.run(tell())
    assert reports == [("broken", "a")]
    assert done == ["next", "idle"]


class Client:
    """What another ASGI server passes to the application, and what it gets."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.received: list[MutableMapping[str, Any]] = []
        self.events: list[object] = []

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.received.append(message)

    def on_message(self, message: bytes) -> None:
        self.events.append(message)

    def on_expiry(self) -> None:
        self.events.append("expiry")

    def on_drain(self) -> None:
        self.events.append("drain")

    def on_close(self) -> None:
        self.events.append("close")


def test_a_socket_of_another_server_sends_in_order_and_shuts_down() -> None:
    async def tell() -> None:
        client = Client()
        handshake = AsgiHandshake({}, client.messages.get, client.send)
        socket = await handshake.accept(SocketLimits(100, 60.0))
        socket.serve(client, QUOTA)
        for number in range(3):
            socket.send_text(b"%d" % number)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await client.messages.put({"type": "websocket.receive", "text": "hello"})
        socket.send_message(b"\xff")
        while not client.events:
            await asyncio.sleep(0)
        socket.shutdown()
        socket.send_text(b"late")
        await handshake.finish()
        assert [message.get("text", message.get("bytes")) for message in client.received[1:-1]] == [
            "0", "1", "2", b"\xff",
        ]  # fmt: skip
        assert client.received[-1]["code"] == 1001
        assert (client.events, socket.num_unsent) == ([b"hello", "close"], 0)

    asyncio.run(tell())


def test_the_lifetime_of_a_socket_of_another_server_ends() -> None:
    async def tell() -> None:
        client = Client()
        handshake = AsgiHandshake({}, client.messages.get, client.send)
        socket = await handshake.accept(SocketLimits(100, 0.0))
        socket.serve(client, QUOTA)
        while not client.events:
            await asyncio.sleep(0)
        assert (client.events, socket.is_open) == (["expiry"], True)
        socket.abort()
        assert client.events == ["expiry", "close"]

    asyncio.run(tell())


def test_a_request_that_has_ended_no_longer_shares_the_buffer() -> None:
    shared: list[int] = []
    socket: Any = None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        shared.append(socket.num_running)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def tell() -> None:
        nonlocal socket
        client = Client()
        socket = await AsgiHandshake({}, client.messages.get, client.send).accept(SocketLimits(100, 60.0))
        socket.serve(client, QUOTA)
        requests = SocketRequests(app, {"request_id": "id", "headers": [], "headers_by_name": {}}, socket)
        for _ in range(2):
            await requests.respond("/x", b"", EventSender(socket), "application/json")
            assert socket.num_running == 0
        socket.abort()

    asyncio.run(tell())
    assert shared == [1, 1]


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
FAILED = {"message": "Internal Server Error", "type": "error", "status": 500, "stream_id": "a"}


@pytest.mark.parametrize(
    ("messages", "fails", "expected"),
    [
        ([], True, [FAILED]),
        ([], False, [FAILED]),  # it has forgotten its response
        ([START], True, [FAILED]),
        (
            [START, {"type": "http.response.body", "body": b'data: {"x":1}\n\ndata: {"x"', "more_body": True}],
            True,
            [{"stream_id": "a", "x": 1}, FAILED],
        ),
        ([START, {"type": "http.response.body", "body": b'data: {"x":1}\n\n'}], True, [{"stream_id": "a", "x": 1}]),
    ],
    ids=["at once", "no response", "after the head", "within an event", "after the end"],
)
def test_an_application_that_fails_is_an_event_of_its_lane(
    messages: list[Any], fails: bool, expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        if fails:
            raise ValueError("broken")

    client = Client()

    async def tell() -> None:
        socket = await AsgiHandshake({}, client.messages.get, client.send).accept(SocketLimits(100, 60.0))
        socket.serve(client, QUOTA)
        requests = SocketRequests(app, {"request_id": "id", "headers": [], "headers_by_name": {}}, socket)
        await requests.respond("/x", b"", EventSender(socket, "a"), "application/json")
        while socket.num_unsent:
            await asyncio.sleep(0)
        socket.abort()

    asyncio.run(tell())
    events = [json.loads(message["text"]) for message in client.received if message["type"] == "websocket.send"]
    assert events == expected
    assert ("broken" in caplog.text) == fails
