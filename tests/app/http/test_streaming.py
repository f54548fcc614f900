"""The writer that steps ASGI's send by hand: order, waiting, and never two sends at once."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from handler.core.errors import Overloaded
from handler.http import inference
from handler.http.inference import BodyWriter, Writing
from tests.app.server import serve
from tests.servers import PATIENCE, wait_for
from tests.unit.http.connection import settle


class Answer:
    """A request with one piece to send."""

    def __init__(self, data: bytes, *, last: bool = False) -> None:
        self._data = data
        self.finished = last

    def take(self) -> bytes:
        return self._data


class Short:
    """A short way to the socket."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.chunks: list[bytes] = []
        self.is_open = is_open
        self.is_paused = True
        self.written_at = 0.0
        self.num_unsent = 0

    def wake(self) -> None:
        pass

    def resume(self) -> None:
        self.is_paused = not self.is_open

    def write_chunk(self, data: bytes) -> bool:
        if self.is_paused:
            return False
        self.chunks.append(data)
        return True


def answer(data: bytes, *, last: bool = False) -> Any:
    return Answer(data, last=last)


class Socket:
    """A `send` that waits while it is full, as uvicorn's does."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bool]] = []
        self.room = asyncio.Event()
        self.room.set()
        self.inside = 0

    async def send(self, message: Any) -> None:
        self.inside += 1
        assert self.inside == 1, "two sends at once"
        await self.room.wait()
        self.sent.append((message["body"], message["more_body"]))
        self.inside -= 1


def writer_to(socket: Socket, short: Any, *hold: Callable[[int], object]) -> BodyWriter:
    return BodyWriter(socket.send, short, *hold)


def test_chunks_go_out_at_once_while_there_is_room() -> None:
    async def story() -> None:
        socket = Socket()
        writer = writer_to(socket, Short(is_open=False))
        writer.write(b"a")
        writer.write(b"b", last=True)
        assert socket.sent == [(b"a", True), (b"b", False)]  # before the event loop ran at all

    asyncio.run(story())


def test_what_comes_while_the_socket_is_full_is_joined_and_sent_in_order() -> None:
    async def story() -> None:
        socket = Socket()
        writer = writer_to(socket, Short(is_open=False))
        socket.room.clear()
        for chunk in (b"a", b"b", b"c"):
            writer.write(chunk)
        await asyncio.sleep(0)
        assert socket.sent == []
        socket.room.set()
        await settle()
        assert socket.sent == [(b"a", True), (b"bc", True)]
        writer.write(b"d", last=True)
        assert socket.sent[-1] == (b"d", False)

    asyncio.run(story())


def test_the_last_chunk_ends_the_response_even_when_it_had_to_wait() -> None:
    async def story() -> None:
        socket = Socket()
        writer = writer_to(socket, Short(is_open=False))
        socket.room.clear()
        writer.write(b"a")
        writer.write(b"b", last=True)
        socket.room.set()
        await settle()
        assert socket.sent == [(b"a", True), (b"b", False)]

    asyncio.run(story())


def test_the_short_way_is_taken_while_it_is_open_and_never_for_the_end() -> None:
    async def story() -> None:
        socket, short = Socket(), Short()
        writer = writer_to(socket, short)
        for chunk in (b"a", b"b"):  # nothing has begun the answer before the first one
            writer.pull(answer(chunk))
        short.is_paused = True  # as a full socket has it
        for chunk in (b"c", b"d"):
            writer.pull(answer(chunk))
        writer.pull(answer(b"e", last=True))
        assert (short.chunks, socket.sent) == ([b"b", b"d"], [(b"a", True), (b"c", True), (b"e", False)])
        assert short.is_paused  # nothing comes after the end

    asyncio.run(story())


def test_the_short_way_is_closed_while_what_came_before_waits() -> None:
    async def story() -> None:
        socket, short = Socket(), Short()
        writer = writer_to(socket, short)
        socket.room.clear()
        writer.write(b"a")
        assert short.is_paused
        writer.pull(answer(b"b"))
        socket.room.set()
        await settle()
        assert (short.chunks, socket.sent) == ([], [(b"a", True), (b"b", True)])
        writer.pull(answer(b"c"))
        assert short.chunks == [b"c"]

    asyncio.run(story())


def test_unread_bytes_are_counted_and_dropped_where_all_clients_keep_much() -> None:
    async def story() -> None:
        socket, short, held = Socket(), Short(is_open=False), list[int]()

        def hold(size: int) -> None:
            held.append(size)
            if size > 10:
                raise Overloaded("full")

        writer = writer_to(socket, short, hold)
        short.num_unsent = 1  # in the socket's own buffer
        writer.write(b"a")
        socket.room.clear()
        for chunk in (b"bb", b"ccc"):
            writer.write(chunk)
        socket.room.set()
        await settle()
        assert held == [1, 3, 6, 4, 1]
        socket.room.clear()
        for chunk in (b"dddd", b"eeeeee"):
            writer.write(chunk)
        assert (held[5:], writer.phase) == ([5, 11], Writing.OVERFLOWED)
        writer.write(b"f")
        socket.room.set()
        await settle()
        assert b"".join(body for body, _ in socket.sent) == b"abbcccdddd"

    asyncio.run(story())


def test_a_short_way_that_is_cut_ends_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        def cut(data: bytes) -> bool:
            raise RuntimeError("the transport is closed")

        socket, short = Socket(), Short()
        monkeypatch.setattr(short, "write_chunk", cut)
        writer = writer_to(socket, short)
        writer.pull(answer(b"a"))
        assert writer.phase is Writing.BROKEN
        assert short.is_paused
        writer.pull(answer(b"b", last=True))
        assert socket.sent == []

    asyncio.run(story())


def test_a_client_that_reads_too_slowly_is_dropped_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "_MAX_BACKLOG", 1 << 10)
    words = ("word" * 200 + " ") * 8000
    body = json.dumps({"inputs": words, "parameters": {"max_new_tokens": 8000}, "stream": True}).encode()
    with serve("--engine", "echo") as server, socket.socket() as client:
        server.wait_ready()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.connect(("127.0.0.1", server.port))
        head = f"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        wait_for(lambda: "reads too slowly" in server.log, PATIENCE, "the client is not dropped")
        wait_for(lambda: server.metric('lmi_requests_total{outcome="cancelled"}') == 1, PATIENCE, "it goes on")
        assert "ASGI" not in server.log
