"""A WebSocket's time: pings, a client that is silent, the end of its life; the memory that it holds, and its frames."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from handler.http.protocol import LINGER_SECONDS, LoopTurns
from handler.http.sockets.base import FIRST_SECONDS, SocketLimits
from handler.http.sockets.connection import PING_SECONDS, WebSocket
from handler.http.sockets.exchange import MessageExchange, PlainEventSender
from handler.http.sockets.handshake import Handshake
from handler.serving.quota import BODY_MEMORY, Quota
from tests.app.sockets.client import frame
from tests.unit.http.connection import Clock, settle

PONG, CLOSE, PING = 0x8A, 0x88, 0x89


class Transport(asyncio.Transport):
    """Keeps what is written, and when it is closed tells its protocol, as a real one does."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = ""
        self.is_half_closed = False
        self.is_read = True
        self.socket: WebSocket | None = None

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self._end("closed")

    def abort(self) -> None:
        self._end("aborted")

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_half_closed = True

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def _end(self, how: str) -> None:
        if not self.ended and self.socket is not None:
            self.ended = how
            self.socket.connection_lost(None)

    def frames(self) -> list[tuple[int, bytes]]:
        """The frames since the last call."""
        frames, data = [], self.written
        while data:
            size = data[1]
            frames.append((data[0], data[2 : 2 + size]))
            data = data[2 + size :]
        self.written = b""
        return frames


def quota(most: int) -> Quota:
    return Quota(most, 0, most, "too much")


class Receiver:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def on_message(self, message: bytes) -> None:
        self.heard.append(message)

    def on_expiry(self) -> None:
        self.heard.append("expiry")

    def on_drain(self) -> None:
        self.heard.append("drain")

    def on_close(self) -> None:
        self.heard.append("close")


class Opened:
    """A connection that has been opened at time 0."""

    def __init__(self, seconds: float = 1000.0, memory: Quota | None = None, turns: LoopTurns | None = None) -> None:
        self.clock, self.receiver, self.transport = Clock(), Receiver(), Transport()
        self.memory = memory or quota(1 << 20)
        loop: Any = self.clock
        handshake = Handshake(Response(101, "Switching Protocols", Headers()), ())
        self.socket = WebSocket(handshake, turns or LoopTurns(), self.memory, SocketLimits(1 << 16, seconds), loop)
        self.socket.serve(self.receiver, self.memory)
        self.socket.forget = lambda: self.receiver.heard.append("forgotten")
        self.transport.socket = self.socket
        self.socket.connection_made(self.transport)
        assert self.transport.written.startswith(b"HTTP/1.1 101 ")
        self.transport.written = b""

    async def receive(self, opcode: int, data: bytes, first: int = 0x80) -> None:
        assert len(data) < 126
        self.socket.data_received(bytes([first | opcode, 0x80 | len(data)]) + bytes(4) + data)
        await settle()


def story(tell: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(tell())  # type: ignore[arg-type]


def test_a_client_that_sends_nothing_is_closed() -> None:
    async def tell() -> None:
        opened = Opened()
        opened.clock.advance(FIRST_SECONDS - 1)
        assert opened.transport.frames() == []
        opened.clock.advance(1)
        ((first, data),) = opened.transport.frames()
        assert (first, struct.unpack("!H", data[:2])) == (CLOSE, (1008,))
        opened.clock.advance(10)  # it does not answer
        assert opened.transport.ended == "aborted"
        assert opened.receiver.heard.count("forgotten") == 1

    story(tell)


def test_clients_that_leave_together_are_closed_in_turns() -> None:
    async def tell() -> None:
        turns = LoopTurns()
        all_opened = [Opened(turns=turns) for _ in range(66)]
        assert [opened.socket.eof_received() for opened in all_opened] == [False] * 64 + [True] * 2
        assert not any(opened.transport.ended for opened in all_opened)
        turns._turn(all_opened[0].clock)  # type: ignore[arg-type]
        assert [opened.transport.ended for opened in all_opened[64:]] == ["closed"] * 2

    story(tell)


def test_a_client_that_answers_pings_stays() -> None:
    async def tell() -> None:
        opened = Opened()
        await opened.receive(1, b"hello")
        opened.clock.advance(FIRST_SECONDS)
        for _ in range(20):
            assert [first for first, _ in opened.transport.frames()] == [PING]
            await opened.receive(10, b"")
            opened.clock.advance(PING_SECONDS)
        assert opened.transport.ended == ""
        assert opened.receiver.heard == [b"hello"]

    story(tell)


def test_a_client_that_is_gone_is_noticed_by_its_pongs() -> None:
    async def tell() -> None:
        opened = Opened()
        await opened.receive(1, b"hello")
        opened.clock.advance(FIRST_SECONDS + 1.5 * PING_SECONDS)
        assert [first for first, _ in opened.transport.frames()] == [PING, PING]
        assert opened.transport.ended == ""
        opened.clock.advance(PING_SECONDS)
        assert opened.transport.ended == "aborted"
        assert "close" in opened.receiver.heard

    story(tell)


def test_the_life_of_a_connection_ends() -> None:
    async def tell() -> None:
        opened = Opened(seconds=100.0)
        await opened.receive(1, b"hello")
        opened.clock.advance(99)
        assert "expiry" not in opened.receiver.heard
        opened.clock.advance(1)
        assert opened.receiver.heard.count("expiry") == 1

    story(tell)


def test_a_receiver_that_does_not_close_in_time_is_closed() -> None:
    async def tell() -> None:
        opened = Opened(seconds=100.0)
        await opened.receive(1, b"hello")
        opened.clock.advance(100)
        opened.clock.advance(1000)
        assert opened.transport.ended != ""
        assert opened.receiver.heard.count("expiry") == 1

    story(tell)


def test_fragments_hold_memory_until_the_message_is_complete() -> None:
    async def tell() -> None:
        opened = Opened()
        await opened.receive(1, b"x" * 100, first=0)
        assert opened.memory.taken >= 100 * BODY_MEMORY
        await opened.receive(0, b"y")
        assert opened.memory.taken == 0
        assert opened.receiver.heard == [b"x" * 100 + b"y"]
        await opened.receive(1, b"x" * 100, first=0)
        opened.transport.abort()
        assert opened.memory.taken == 0

    story(tell)


def test_a_message_without_room_closes_the_connection_and_gives_its_memory_back() -> None:
    async def tell() -> None:
        memory = quota(400)
        opened = Opened(memory=memory)
        await opened.receive(1, b"x" * 100, first=0)
        await opened.receive(0, b"x" * 100, first=0)
        ((first, data),) = opened.transport.frames()
        assert (first, struct.unpack("!H", data[:2])) == (CLOSE, (1013,))
        assert memory.taken == 0

    story(tell)


def test_pings_hold_no_memory() -> None:
    async def tell() -> None:
        opened = Opened()
        for _ in range(100):
            await opened.receive(9, b"x" * 125)
        assert opened.memory.taken == 0
        await opened.receive(1, b"x" * 10, first=0)
        for _ in range(100):
            await opened.receive(9, b"x" * 125)
        assert opened.memory.taken == 10 * BODY_MEMORY

    story(tell)


def test_a_client_that_does_not_read_is_not_read_and_gets_no_pings() -> None:
    async def tell() -> None:
        opened = Opened()
        await opened.receive(1, b"hello")
        opened.socket.pause_writing()
        assert not opened.transport.is_read
        opened.clock.advance(FIRST_SECONDS + 10 * PING_SECONDS)
        assert (opened.transport.frames(), opened.transport.ended) == ([], "")
        opened.socket.resume_writing()
        assert opened.transport.is_read
        opened.clock.advance(PING_SECONDS)
        assert [first for first, _ in opened.transport.frames()] == [PING]

    story(tell)


def test_a_refused_client_can_read_the_close_frame_while_it_sends() -> None:
    async def tell() -> None:
        opened = Opened()
        opened.socket.data_received(b"\x81\xff" + (1 << 40).to_bytes(8, "big") + bytes(4))
        await settle()
        assert [first for first, _ in opened.transport.frames()] == [CLOSE]
        assert opened.transport.is_half_closed
        for _ in range(100):
            opened.socket.data_received(bytes(1 << 16))
            assert opened.transport.is_read
        assert opened.transport.ended == ""
        opened.clock.advance(LINGER_SECONDS)
        assert opened.transport.ended == "aborted"
        assert opened.receiver.heard == ["close", "forgotten"]

    story(tell)


def test_a_client_that_goes_on_after_the_close_frame_is_cut_off() -> None:
    async def tell() -> None:
        opened = Opened()
        await opened.receive(1, b"hello")
        opened.socket.close(1001, "")
        for _ in range(4):
            opened.clock.advance(LINGER_SECONDS / 2)
            await opened.receive(9, b"")
        assert opened.transport.ended == "aborted"

    story(tell)


def read_by_the_library(data: bytes) -> list[str]:
    """The text messages that a client of the library reads."""
    client = ClientProtocol(parse_uri("ws://localhost"), state=State.OPEN, max_size=None)
    client.receive_data(data)
    frames = [frame for frame in client.events_received() if isinstance(frame, Frame)]
    assert all(frame.opcode is Opcode.TEXT and frame.fin for frame in frames)
    return [bytes(frame.data).decode() for frame in frames]


def test_messages_of_each_size_are_frames() -> None:
    async def tell() -> None:
        opened = Opened()
        texts = ["x" * size for size in (0, 1, 125, 126, 1023, 1024, 65535, 65536, 70000)]
        for text in texts:
            opened.socket.send_text(text.encode())
        opened.socket.send_texts([text.encode() for text in texts])
        opened.socket.send_texts([text.encode() for text in texts[:5]])
        assert read_by_the_library(opened.transport.written) == [*texts, *texts, *texts[:5]]

    story(tell)


def test_each_message_takes_a_turn_of_its_own() -> None:
    async def tell() -> None:
        opened = Opened()
        opened.socket.data_received(frame(1, b"{}") * 100)
        assert opened.receiver.heard == [b"{}"]
        for count in range(2, 101):
            await asyncio.sleep(0)
            assert opened.receiver.heard == [b"{}"] * count
        assert opened.memory.taken == 0

    story(tell)


STREAMS: dict[str, tuple[str, bytes, list[str]]] = {
    "events": (
        "text/event-stream; charset=utf-8",
        b'data: {"a": 1}\n\ndata: {"b": "}\\n"}\n\ndata: [3]\n\ndata: [DONE]\n\n',
        ['{"a": 1}', '{"b": "}\\n"}', "[3]"],
    ),
    "one event": ("text/event-stream", b'data: {"a": 1}\n\n', ['{"a": 1}']),
    "only the end": ("text/event-stream", b"data: [DONE]\n\n", []),
    "named events": (
        "text/event-stream",
        b': hello\n\nevent: a\ndata: {"a": 1}\n\ndata:{"b": 2}\nid: 7\n\ndata: {"c": 3} \n\n',
        ['{"a": 1}', '{"b": 2}\nid: 7', '{"c": 3}'],
    ),
    "line ends of Windows": (
        "text/event-stream",
        b'data: {"a": 1}\r\n\r\ndata: {"b": 2}\r\n\r\n',
        ['{"a": 1}', '{"b": 2}'],
    ),
    "no last end": ("text/event-stream", b'data: {"a": 1}\n\ndata: {"b": 2}', ['{"a": 1}', '{"b": 2}']),
    "lines": ("application/jsonlines", b'{"a": 1}\n\n[2]\n{"b": 3}', ['{"a": 1}', "[2]", '{"b": 3}']),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_is_the_same_messages_however_it_is_cut(kind: str, size: int) -> None:
    content_type, data, messages = STREAMS[kind]

    async def tell() -> None:
        opened = Opened()
        exchange = MessageExchange(opened.socket, b"", PlainEventSender(opened.socket))
        headers = [(b"content-type", content_type.encode())]
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        exchange.resume()
        for start in range(0, len(data), size):
            assert exchange.write_chunk(data[start : start + size])
        await exchange.send({"type": "http.response.body", "body": b""})
        assert read_by_the_library(opened.transport.written) == messages

    story(tell)


def test_messages_of_a_lost_connection_are_dropped() -> None:
    async def tell() -> None:
        opened = Opened()
        opened.socket.data_received(frame(1, b"{}") * 100)
        opened.transport.abort()
        await settle()
        assert opened.receiver.heard == [b"{}", "forgotten", "close"]
        assert opened.memory.taken == 0

    story(tell)
