"""A connection: its limits, offers to upgrade, what follows a refusal, and what ends it early."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest
from uvicorn.server import ServerState

from handler.http import protocol
from handler.http.exchange import EXCHANGE, Exchange
from handler.http.parser import MAX_FIELDS, RawHeaders, RequestHead, RequestParser
from tests.one_test import in_one_test
from tests.unit.http.connection import (
    DEADLINE,
    Clock,
    Connection,
    answer,
    connected,
    exchange,
    mirror,
    settle,
    tcp_pair,
)

# -- upgrade -----------------------------------------------------------------------------------------------------------
# Offers to upgrade the protocol are ignored, in every head, however its bytes are cut; bodies are left as they are.


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\nUpgrade: h2c\r\n"
BODY = b"one\r\nUpgrade: x\r\ntwo\r\n\r\nPOST / HTTP/1.1\r\nUpgrade: y\r\n"
CHUNKS = b"5\r\none\r\n\r\nd\r\nUpgrade: x\r\nt\r\n2\r\nwo\r\n0\r\n\r\n"
REQUESTS = (
    b"POST /a HTTP/1.1\r\nHost: h\r\n" + OFFER + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    + b"POST /b HTTP/1.1\r\n" + OFFER + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS
    + b"GET /c HTTP/1.1\r\nuPGRADE:h2c\r\nA: b\r\nConnection: keep-alive, upgrade\r\n\r\n"
    + b"POST /d HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    + b"GET /e HTTP/1.1\r\n" + OFFER.replace(b"Connection: ", b"Connection: close, ") + b"\r\n"
)  # fmt: skip
ANSWERS = [
    b"POST /a connection,content-length,host,http2-settings,upgrade " + BODY,
    b"POST /b connection,http2-settings,transfer-encoding,upgrade one\r\nUpgrade: x\r\ntwo",
    b"GET /c a,connection,upgrade ",
    b"POST /d content-length " + BODY,
    b"GET /e connection,http2-settings,upgrade ",
]


def bodies(data: bytes) -> list[bytes]:
    """Those of answers that have a length each."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        found.append(data[: int(length[1])])
        data = data[int(length[1]) :]
    return found


def test_every_cut_gives_the_same_answers() -> None:
    async def story() -> None:
        for cut in range(1, len(REQUESTS)):
            assert bodies(await exchange(mirror, [REQUESTS[:cut], REQUESTS[cut:]])) == ANSWERS, REQUESTS[:cut]

    asyncio.run(story())


@in_one_test("size", [1, 2, 3, 7, 64])
def test_small_packets_give_the_same_answers(size: int) -> None:
    parts = [REQUESTS[start : start + size] for start in range(0, len(REQUESTS), size)]
    assert bodies(asyncio.run(exchange(mirror, parts))) == ANSWERS


def test_an_offer_in_a_request_that_waits_for_another_is_ignored() -> None:
    async def story() -> None:
        gate = asyncio.Event()

        async def app(scope: object, receive: object, send: object) -> None:
            await gate.wait()
            await mirror(scope, receive, send)

        async with connected(app) as connection:
            connection.receive(REQUESTS)
            gate.set()
            assert bodies(await connection.read_all()) == ANSWERS

    asyncio.run(story())


def test_a_websocket_is_refused_by_the_route_not_by_silence() -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        await answer(send, b"none here", 404)  # type: ignore[arg-type]

    request = b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    assert asyncio.run(exchange(app, [request], b"none here")).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("target", [b"example.com:443", b"/ping"])
def test_connect_is_400(target: bytes) -> None:
    found = asyncio.run(
        exchange(mirror, [b"CONNECT " + target + b" HTTP/1.1\r\nHost: h\r\n\r\nbytes of another protocol"])
    )
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1") == 1


# -- protocol ----------------------------------------------------------------------------------------------------------
# Limits on a connection: how long and how large a head may be, what follows a refusal, and what ends it early.


CHUNKED = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
GET = b"GET /b HTTP/1.1\r\n\r\n"
GARBAGE = b"\x00\xff no HTTP\r\n\r\n"


async def _late(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.4)
    await answer(send, b"ok")


async def _early(scope: Any, receive: Any, send: Any) -> None:
    """Answer before the body has come."""
    await answer(send, b"no", 401)


def _status(data: bytes) -> bytes:
    return data[9:12]


# -- writes ------------------------------------------------------------------------------------------------------


async def _stream(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"a", b"b", b""):
        await send({"type": "http.response.body", "body": part, "more_body": bool(part)})


async def _broken_off(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})


@pytest.mark.parametrize(
    ("app", "method", "ends"),
    [
        (mirror, b"POST", [b"POST /  "]),
        (_stream, b"GET", [b"\r\n\r\n1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"]),
        (_stream, b"HEAD", [b"\r\n\r\n"]),
        (_broken_off, b"GET", [b"\r\n\r\n"]),
    ],
)
def test_a_head_is_written_with_the_bytes_after_it(
    monkeypatch: pytest.MonkeyPatch, app: Any, method: bytes, ends: list[bytes]
) -> None:
    async def story() -> None:
        async with connected(app) as connection:
            writes = list[bytes]()
            monkeypatch.setattr(connection.protocol.transport, "write", writes.append)
            for number in range(1 if app is _broken_off else 2):
                connection.receive(b"%b / HTTP/1.1\r\n\r\n" % method)
                await settle()
                assert len(writes) == len(ends) * (number + 1)
            for written, end in zip(writes, ends * number + ends, strict=True):
                assert written.endswith(end)
            assert sum(written.startswith(b"HTTP/1.1 200 OK\r\n") for written in writes) == number + 1

    asyncio.run(story())


@pytest.mark.parametrize(
    "header",
    [
        (b"a", b"b\r\nset-cookie: c"),
        (b"a: b\r\nset-cookie", b"c"),
        (b"set-cookie: a", b"b"),
        (b"a", b"b\nc: d"),
        (b"a", b"b\r\n\r\nc"),
        (b"a b", b"c"),
        (b"a", b"\x00"),
    ],
)
def test_a_header_of_a_response_that_contains_another_is_not_sent(header: tuple[bytes, bytes]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(RuntimeError, match="characters that are not allowed"):
            await send({"type": "http.response.start", "status": 200, "headers": [header]})

    assert asyncio.run(exchange(app, [b"GET / HTTP/1.1\r\n\r\n"])) == b""


_START: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
_BODY: dict[str, Any] = {"type": "http.response.body", "body": b"ab"}
_PART: dict[str, Any] = {"type": "http.response.body", "body": b"a", "more_body": True}


@pytest.mark.parametrize(
    ("accepted", "refused", "body"),
    [
        ([], _BODY, b"Internal Server Error"),
        ([_START], _START, b""),
        ([_START, _PART], _START, b"a"),
        ([_START, _BODY], _START, b"ab"),
        ([_START, _BODY], _BODY, b"ab"),
    ],
)
def test_a_message_where_another_is_expected_is_refused_and_not_sent(
    accepted: list[dict[str, Any]], refused: dict[str, Any], body: bytes
) -> None:
    errors = list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in accepted:
            await send(message)
        try:
            await send(refused)
        except RuntimeError as error:
            errors.append(str(error))

    sent = asyncio.run(exchange(app, [b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"]))
    assert sent.partition(b"\r\n\r\n")[2] == body
    assert sent.count(b"HTTP/1.1 ") == 1
    assert len(errors) == 1
    assert errors[0].startswith(f"the application sent {refused['type']} where ")


@pytest.mark.parametrize("expect", ["100-continue", "100-Continue, other", "100-continue\r\nExpect: other"])
def test_a_leave_to_continue_does_not_wait(expect: str) -> None:
    async def story() -> None:
        async with connected(mirror) as connection:
            connection.receive(f"POST / HTTP/1.1\r\nExpect: {expect}\r\nContent-Length: 2\r\n\r\n".encode())
            assert await connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.receive(b"ab")
            assert (await connection.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")

    asyncio.run(story())


# -- HTTP/1.0 ----------------------------------------------------------------------------------------------------


def test_a_refused_request_gets_no_leave_to_continue(caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def story() -> None:
        async with connected(mirror) as connection:
            connection.receive(head + b"garbage")
            assert (await connection.read_all()).startswith(b"HTTP/1.1 400 ")
            await settle()

    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records] == ["Invalid HTTP request received."]


def test_a_stream_to_a_client_of_http_1_0_goes_out_as_it_comes() -> None:
    async def story() -> None:
        has_read = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await has_read.wait()
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            await send({"type": "http.response.body", "body": b"last"})

        async with connected(app) as connection:
            connection.receive(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            head = await connection.read_until(b"\r\n\r\n")
            assert head == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
            assert await connection.read(5) == b"first"
            has_read.set()
            assert await connection.read_all() == b"last"

    asyncio.run(story())


async def _chunked_by_itself(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"Transfer-Encoding", b"chunked")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ab"})


async def _without_body(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _too_long(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": b"ab"})


@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
@pytest.mark.parametrize(
    ("app", "method", "head", "body"),
    [
        (_stream, b"GET", b"200 OK\r\n", b"ab"),
        (_stream, b"HEAD", b"200 OK\r\n", b""),
        (_chunked_by_itself, b"GET", b"200 OK\r\n", b"ab"),
        (_without_body, b"GET", b"204 No Content\r\n", b""),
        (_early, b"GET", b"401 Unauthorized\r\ncontent-length: 2\r\n", b"no"),
        (_too_long, b"GET", b"200 OK\r\ncontent-length: 1\r\n", b""),
    ],
)
def test_no_client_of_http_1_0_gets_chunks_or_a_connection_that_stays(
    app: Any, method: bytes, head: bytes, body: bytes, version: bytes
) -> None:
    found = asyncio.run(exchange(app, [method + b" / HTTP/" + version + b"\r\nConnection: keep-alive\r\n\r\n"]))
    assert found == b"HTTP/1.1 " + head + b"connection: close\r\n\r\n" + body


@pytest.mark.parametrize("path", [b"/drop", b"/raise"])
def test_a_stream_that_breaks_off_does_not_end_like_a_whole_one(path: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        if scope["path"] == "/drop":
            scope["extensions"][EXCHANGE].drop()
        else:
            raise RuntimeError("as asked")  # uvicorn closes the connection

    async def story(version: bytes) -> bytes:
        async with connected(app, tcp_pair()) as connection:
            connection.receive(b"GET " + path + b" HTTP/" + version + b"\r\n\r\n")
            return await connection.read_all()

    assert asyncio.run(story(b"1.1")).endswith(b"\r\n5\r\nfirst\r\n")
    with pytest.raises(ConnectionResetError):
        asyncio.run(story(b"1.0"))


def test_a_client_of_http_1_0_that_has_gone_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            await _stream(scope, receive, send)
            done.set()

        done = asyncio.Event()
        async with connected(app) as connection:
            connection.receive(b"GET / HTTP/1.0\r\n\r\n")
            connection.protocol.transport.abort()
            await asyncio.wait_for(done.wait(), DEADLINE)

    asyncio.run(story())
    assert "Exception" not in caplog.text


def test_no_client_of_http_1_0_gets_a_leave_to_continue() -> None:
    request = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nab"
    assert asyncio.run(exchange(mirror, [request])).startswith(b"HTTP/1.1 200 OK\r\n")


# -- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:"])
def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    assert asyncio.run(exchange(mirror, [sent])) == b""


def test_an_answer_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    found = asyncio.run(exchange(_late, [b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"]))
    assert found.startswith(b"HTTP/1.1 200 OK")
    assert found.endswith(b"ok")


@pytest.mark.parametrize(("first", "drip"), [(b"\r\n", b"\r\n"), (b"GET /", b"x")])
def test_a_drip_between_requests_does_not_keep_the_connection(
    monkeypatch: pytest.MonkeyPatch, first: bytes, drip: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)

    async def story() -> None:
        async with connected(mirror) as connection:
            connection.protocol.timeout_keep_alive = 0.5
            connection.receive(GET)
            await connection.read_until(b"GET /b  ")
            connection.receive(first)
            await _drip(connection, drip)

    asyncio.run(story())


@pytest.mark.parametrize("head", [b"POST / HTTP/1.1\r\nContent-Length: 10000\r\n\r\n", CHUNKED + b"T: "])
def test_a_drip_after_an_early_answer_is_closed(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    assert protocol.LINGER_SECONDS <= 2, "it lingers twice"
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.3)

    async def story() -> None:
        async with connected(_early) as connection:
            connection.receive(head)
            await connection.read_until(b"no")
            await _drip(connection, b"x")

    asyncio.run(story())


async def _drip(connection: Connection, byte: bytes) -> None:
    """Until the server closes the connection, which it may have ended on its side before."""
    deadline = time.monotonic() + DEADLINE
    while not connection.protocol.transport.is_closing():
        assert time.monotonic() < deadline
        connection.writer.write(byte)
        await asyncio.sleep(0.1)
    assert await connection.read_all() == b""


def test_a_body_ending_after_its_early_response_keeps_the_connection() -> None:
    async def story() -> None:
        async with connected(_early) as connection:
            for _ in range(2):
                connection.receive(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\n")
                assert b"connection: close" not in await connection.read_until(b"no")
                connection.receive(b"abc")

    asyncio.run(story())


def _closes_after(connection: Connection, clock: Clock, seconds: float) -> bool:
    """Return whether the server closes the connection after this time, and not earlier."""
    transport = connection.protocol.transport
    clock.advance(seconds - 0.1)
    stays = not transport.is_closing()
    clock.advance(0.2)
    return stays and transport.is_closing()


@pytest.mark.parametrize(("sent", "seconds"), [(b"", 30), (GET[:5], 60)])
def test_a_head_has_a_minute(sent: bytes, seconds: float) -> None:
    async def story() -> None:
        clock = Clock()
        async with connected(mirror, clock=clock) as connection:
            clock.advance(30)
            connection.receive(sent)
            assert _closes_after(connection, clock, seconds), "from the connection's start, or the head's first byte"
        async with connected(mirror, clock=clock) as connection:
            connection.receive(GET)
            await connection.read_until(b"GET /b  ")
            clock.advance(4)
            connection.receive(GET[:5])
            assert _closes_after(connection, clock, 60), "from the first byte of the head"

    asyncio.run(story())


def test_an_idle_connection_has_its_own_time() -> None:
    async def story() -> None:
        clock = Clock()
        async with connected(mirror, clock=clock) as connection:
            connection.protocol.timeout_keep_alive = 7
            for _ in range(3):
                connection.receive(GET)
                await connection.read_until(b"GET /b  ")
                clock.advance(6)
                assert not connection.protocol.transport.is_closing()
            assert _closes_after(connection, clock, 1)

    asyncio.run(story())


def test_a_request_may_take_longer_than_a_connection_may_be_idle() -> None:
    async def story() -> None:
        clock, gate = Clock(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await gate.wait()
            await mirror(scope, receive, send)

        async with connected(app, clock=clock) as connection:
            for _ in range(2):
                connection.receive(GET)
                clock.advance(600)
                gate.set()
                await connection.read_until(b"GET /b  ")
                gate.clear()
            assert _closes_after(connection, clock, connection.protocol.timeout_keep_alive)

    asyncio.run(story())


def test_the_rest_of_a_refused_request_is_read_for_two_seconds() -> None:
    async def story() -> None:
        clock = Clock()
        async with connected(mirror, clock=clock) as connection:
            connection.receive(GARBAGE)
            assert _status(await connection.read_until(b"valid HTTP request")) == b"400"
            assert _closes_after(connection, clock, 2.0)

    asyncio.run(story())


@pytest.mark.parametrize("more", [b"", b"abc"])
def test_an_early_answers_body_is_read_for_two_seconds(more: bytes) -> None:
    async def story() -> None:
        clock = Clock()
        async with connected(_early, clock=clock) as connection:
            connection.protocol.timeout_keep_alive = 7
            connection.receive(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\n")
            await connection.read_until(b"no")
            connection.receive(more)
            if more:
                assert _closes_after(connection, clock, 7), "it is idle from then on"
            else:
                clock.advance(2)
                assert await connection.read_all() == b""

    asyncio.run(story())


def test_bytes_of_a_connection_that_is_lost_are_not_parsed() -> None:
    begun = list[object]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope)

    async def story() -> None:
        turns = protocol.LoopTurns()
        async with connected(app, turns=turns) as connection:
            turns.note_connection(asyncio.get_running_loop())
            connection.receive(POST_A)
            connection.protocol.connection_lost(None)
            await settle()

    asyncio.run(story())
    assert not begun


# -- size --------------------------------------------------------------------------------------------------------


@in_one_test("field", [b"a: b\r\n", b"a: " + b"b" * 1000 + b"\r\n", b"a: " + b"b" * 100_000])
@in_one_test("packet", [1 << 12, 1 << 18])
@in_one_test("before", [b"GET / HTTP/1.1\r\n", CHUNKED], ids=["headers", "trailers"])
def test_endless_heads_and_trailers_are_431(before: bytes, packet: int, field: bytes) -> None:
    data = before + field * (400_000 // len(field))
    parts = [data[start : start + packet] for start in range(0, len(data), packet)]
    found = asyncio.run(exchange(mirror, parts))
    assert _status(found) == b"431"
    assert b"connection: close" in found


@pytest.mark.parametrize(("more", "status"), [(0, b"200"), (1, b"431")])
def test_a_head_may_be_as_long_as_the_limit_to_the_byte(more: int, status: bytes) -> None:
    head = b"GET / HTTP/1.1\r\nConnection: close\r\n"  # "/" and 10 + 5 + 4 bytes, with ": " and the line's end
    value = b"b" * (65_536 - 1 - 19 - 5 + more)
    assert _status(asyncio.run(exchange(mirror, [head + b"a: " + value + b"\r\n\r\n"]))) == status


@in_one_test("packet", [1, 100, 1 << 14])
@in_one_test("target", [b"/%b", b"/?%b", b"/a?%%41=%b"])
def test_a_request_line_beyond_8_kib_is_414(target: bytes, packet: int) -> None:
    for more, status in ((0, b"200"), (1, b"414")):
        line = b"GET %b HTTP/1.1\r\n" % (target % (b"%" * (8192 - 13 - len(target % b"") + more)))
        assert len(line) == 8194 + more
        data = line + b"Connection: close\r\n\r\n"
        found = asyncio.run(exchange(mirror, [data[at : at + packet] for at in range(0, len(data), packet)]))
        assert _status(found) == status
        assert (b"has more than 8192 bytes" in found) == bool(more)


def test_requests_before_a_line_that_is_too_long_are_answered() -> None:
    found = asyncio.run(exchange(mirror, [GET + b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n"]))
    assert [found.count(words) for words in (b" 200 OK", b"HTTP/1.1 414 ")] == [1, 1]


@in_one_test(
    ("path", "meant"),
    [
        (b"/a%20b%2Fc%2f", "/a b/c/"),
        (b"/%C3%A4%c3", "/\xe4\ufffd"),
        (b"/%%41%4%zz%", "/%A%4%zz%"),
        (b"http://host/%41", "/A"),
        (b"http://host?%41", "/"),
    ],
)
def test_an_escaped_path_is_unquoted_once(path: bytes, meant: str) -> None:
    found: list[tuple[str, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append((scope["path"], scope["query_string"]))
        await mirror({**scope, "path": ""}, receive, send)

    query = b"" if b"?" in path else b"?%2541=+"
    asyncio.run(exchange(app, [b"GET %b%b HTTP/1.1\r\nConnection: close\r\n\r\n" % (path, query)]))
    assert found == [(meant, query[1:] or b"%41")]


def test_an_absolute_url_needs_no_path() -> None:
    found = asyncio.run(exchange(mirror, [b"GET http://host HTTP/1.1\r\nConnection: close\r\n\r\n"]))
    assert (_status(found), b"GET / " in found) == (b"200", True)


def test_long_heads_wait_for_other_connections_but_a_health_check_does_not() -> None:
    head = b"GET /%b HTTP/1.1\r\n\r\n" % (b"%" * 8000)

    async def story() -> list[int]:
        async with sharing_turns(101) as (connections, begun):
            await settle()
            for connection in connections[:100]:
                connection.receive(head)
            at_once = len(begun)
            connections[100].receive(b"GET /ping HTTP/1.1\r\n\r\n")
            await connections[100].read_until(b"GET /ping  ")
            before_ping = len(begun)
            for connection in connections[:100]:
                await connection.read_until(b"%%%  ")
            return [at_once, before_ping, len(begun)]

    at_once, before_ping, in_all = asyncio.run(story())
    assert (at_once, in_all) == (0, 101)
    assert before_ping < 20


@in_one_test(
    ("method", "length", "full", "opens"),
    [
        (b"GET", None, False, True),
        (b"GET", None, True, False),
        (b"GET", b"16", False, False),
        (b"HEAD", None, False, False),
    ],
)
def test_the_short_way_is_open_while_a_chunk_can_be_written(
    method: bytes, length: bytes | None, full: bool, opens: bool
) -> None:
    async def story() -> None:
        exchanges = list[Exchange]()
        gate, ends = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            exchanges.append(scope["extensions"][EXCHANGE])
            await gate.wait()
            headers = [] if length is None else [(b"content-length", length)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await ends.wait()

        async with connected(app) as connection:
            connection.receive(method + b" / HTTP/1.1\r\n\r\n")
            await settle()
            (way,) = exchanges
            way.resume()
            assert (way.is_paused, way.write_chunk(b"early")) == (True, False), "the response has not started"
            gate.set()
            await settle()
            if full:
                connection.protocol.pause_writing()
            way.resume()
            assert way.write_chunk(b"0123456789abcdef") == opens
            assert way.write_chunk(b"") == opens, "nothing to write"
            head, _, body = (await connection.read_until(b"\r\n\r\n" + b"10\r\n" * opens)).partition(b"\r\n\r\n")
            assert (_status(head), body) == (b"200", b"10\r\n" * opens)
            way.drop()
            assert (way.is_over, way.is_paused) == (True, True)
            ends.set()

    asyncio.run(story())


def test_a_refused_head_is_told_the_limits() -> None:
    found = asyncio.run(exchange(mirror, [b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 129 + b"\r\n"]))
    words = b"the request's headers or trailers are too long or too many: at most 65536 bytes and 128 fields"
    assert words in found
    assert found.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


@pytest.mark.parametrize("before", [b"GET / HTTP/1.1\r\n", CHUNKED], ids=["headers", "trailers"])
@pytest.mark.parametrize("more", [0, 1])
def test_headers_and_trailers_are_counted(before: bytes, more: int) -> None:
    fields = MAX_FIELDS - before.count(b":") + more
    found = asyncio.run(exchange(mirror, [before + b"a:b\r\n" * fields + b"\r\n"], b"431" if more else b" 200 OK"))
    assert found.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("before", [b"GET / HTTP/1.1\r\n", CHUNKED], ids=["headers", "trailers"])
def test_heads_and_trailers_up_to_the_limit_are_read(before: bytes) -> None:
    field = b"a: " + b"b" * 60_000 + b"\r\n"
    found = asyncio.run(exchange(mirror, [b"\r\n", before + field + b"\r\n" + GET], b"GET /b  "))
    assert found.count(b" 200 OK") == 2


def test_a_large_body_is_not_taken_for_a_head() -> None:
    body = b"x" * 1_000_000
    small = b"".join(b"1\r\nx\r\n" for _ in range(100_000))
    request = b"POST /a HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    chunked = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + small + b"0\r\nT: x\r\n\r\n"
    found = asyncio.run(exchange(mirror, [request + chunked + GET], b"GET /b  "))
    assert [len(body) for body in bodies(found)] == [1_000_023, 100_026, 8]


def test_a_chunk_extension_has_the_limit_too() -> None:
    request = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;" + b"x" * 300_000
    assert _status(asyncio.run(exchange(mirror, [request]))) == b"431"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_trailers_are_no_headers(size: int) -> None:
    request = CHUNKED + b"Authorization: Bearer one\r\nX-Request-Id: x\r\n\r\n"
    parts = [request[start : start + size] for start in range(0, len(request), size)]
    assert bodies(asyncio.run(exchange(mirror, parts, b"abc"))) == [b"POST /a transfer-encoding abc"]


# -- a head that comes again -------------------------------------------------------------------------------------


def _post(body: bytes, more: bytes = b"", path: bytes = b"/a") -> bytes:
    return b"POST %b HTTP/1.1\r\n%bcontent-Length: %d\r\nX: y\r\n\r\n%b" % (path, more, len(body), body)


REPEATED = (
    [_post(b"one")] * 3
    + [_post(b""), _post(b"x" * 70_000), _post(b"GET / HTTP/1.1\r\n\r\n"), _post(b"one", path=b"/b"), _post(b"1")]
    + [GET, GET, _post(b"two"), CHUNKED + b"\r\n", CHUNKED + b"\r\n", _post(b"two", b"Host: h\r\n")]
    + [GET.replace(b"\r\n\r\n", b"\r\nHost: h\r\n\r\n"), _post(b"two", OFFER), _post(b"three", OFFER), GET]
)


@pytest.mark.parametrize("size", [1, 3, 100, 1 << 20])
def test_a_head_that_comes_again_is_read_as_if_it_were_new(size: int) -> None:
    data = b"".join(REPEATED) + b"GET /end HTTP/1.1\r\nConnection: close\r\n\r\n"
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    alone = [bodies(asyncio.run(_last(request)))[0] for request in REPEATED]
    assert bodies(asyncio.run(exchange(mirror, parts)))[:-1] == alone


async def _last(request: bytes) -> bytes:
    """Return the response to a request that is the only one of its connection."""
    async with connected(mirror) as connection:
        connection.receive(request)
        connection.writer.write_eof()
        return await connection.read_all()


@pytest.mark.parametrize(
    ("second", "status"),
    [
        (_post(b"two"), b"200"),
        (_post(b"two").replace(b": 3", b": +3"), b"400"),
        (_post(b"two").replace(b": 3", b": "), b"400"),
        (_post(b"two").replace(b": 3", b": 3\r\nContent-Length: 3"), b"400"),
        (_post(b"two").replace(b": 3", b": 3\r\nTransfer-Encoding: chunked"), b"400"),
        (_post(b"two").replace(b": 3", b": " + b"9" * 30), b"400"),
        (_post(b"two").replace(b": 3", b": 3" + b"\r\na:b" * 127), b"431"),
    ],
)
def test_a_head_that_differs_only_near_its_length_is_parsed(second: bytes, status: bytes) -> None:
    found = asyncio.run(
        exchange(mirror, [_post(b"one"), second, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")])
    )
    assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:3]] == [b"200", status]


@pytest.mark.parametrize("field", [b":3", b":  3", b":\t3", b": 3 ", b": 003", b": " + b"3".zfill(16)])
def test_a_length_in_any_spelling_delimits_the_body_of_each_head(field: bytes) -> None:
    request = _post(b"one").replace(b": 3", field)
    end = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    responses = bodies(asyncio.run(exchange(mirror, [request * 3 + end])))
    assert responses[:-1] == [b"POST /a content-length,x one"] * 3


def test_requests_with_the_same_head_share_its_memo_and_no_others_do() -> None:
    memos = list[dict[str, Any] | None]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        memos.append(scope["extensions"][EXCHANGE].memo)
        names = [name for name, _ in scope["headers"]]
        scope["headers"].append((b"own", b"header of this request"))
        await answer(send, b",".join(names) + b" end")

    async def story() -> None:
        other = _post(b"one", path=b"/b")
        for _ in range(2):
            async with connected(app) as connection:
                for request in (_post(b"one"), _post(b"three"), _post(b"four"), other, _post(b"one"), _post(b"one")):
                    connection.receive(request)
                    assert (await connection.read_until(b" end")).endswith(b"\r\ncontent-length,x end")

    asyncio.run(story())
    first, same, again, other, back, last = memos[:6]
    assert (first, other, back) == (None, None, None)
    assert same is not None
    assert same is again
    assert not any(same is memo for memo in (last, *memos[6:]))


# -- what cannot be parsed ----

# -- what cannot be parsed ---------------------------------------------------------------------------------------


def _app(log: list[str]) -> Any:
    """/a streams three chunks, a tenth of a second each; others are mirrored. Disconnects are noted."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/a":
            return await mirror(scope, receive, send)
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            log.append("gone")
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope["extensions"][EXCHANGE].resume()
        for _ in range(3):
            await asyncio.sleep(0.1)
            assert scope["extensions"][EXCHANGE].write_chunk(b"abc")
        await send({"type": "http.response.body", "body": b""})

    return app


STREAM = b"3\r\nabc\r\n" * 3 + b"0\r\n\r\n"
CHUNKED_A = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
POST_A = b"POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\nab"


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_garbage_after_pipelined_requests_leaves_their_answers_whole(
    caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    """The last answer says that the bytes after it are none."""
    parts = [POST_A + GET + GARBAGE[:cut], GARBAGE[cut:]]
    first, _, rest = asyncio.run(exchange(_app([]), [part for part in parts if part])).partition(STREAM)
    assert _status(first) == b"200"
    second, third = rest.split(b"GET /b  ")
    assert (_status(second), _status(third)) == (b"200", b"400")
    assert b"connection: close" in third
    assert "Exception" not in caplog.text


def _heads(monkeypatch: pytest.MonkeyPatch) -> list[RequestHead]:
    """Return the list to which each head is added that a connection has parsed."""
    heads: list[RequestHead] = []
    on_head = protocol.Protocol.on_head

    def note(connection: protocol.Protocol, head: RequestHead, headers: RawHeaders) -> None:
        heads.append(head)
        on_head(connection, head, headers)

    monkeypatch.setattr(protocol.Protocol, "on_head", note)
    return heads


@pytest.mark.parametrize("size", [1 << 20, 1000])
def test_one_request_waits_behind_another_and_no_more_is_parsed(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A parsed request takes a hundred times its bytes of memory, and parsing takes time."""

    async def story() -> bytes:
        heads = _heads(monkeypatch)
        async with connected(_app([])) as connection:
            data = POST_A + GET * 500 + b"GET /last HTTP/1.1\r\n\r\n"
            connection.receive(*(data[start : start + size] for start in range(0, len(data), size)))
            assert len(heads) == 2
            found = await connection.read_until(b"GET /last  ")
            assert connection.protocol.transport.is_reading()
            return found

    first, _, rest = asyncio.run(story()).partition(STREAM)
    assert _status(first) == b"200"
    assert rest.count(b"HTTP/1.1 200 OK") == 501


def test_garbage_during_a_stream_does_not_get_into_it(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with connected(_app([])) as connection:
            connection.receive(POST_A)
            await connection.read_until(b"abc\r\n")
            connection.receive(GARBAGE)
            found = await connection.read_all()
            assert found.startswith(STREAM[8:] + b"HTTP/1.1 400 ")

    asyncio.run(story())
    assert "Exception" not in caplog.text


@pytest.mark.parametrize("before", [b"", POST_A])
def test_garbage_in_a_body_refuses_its_request_alone(before: bytes) -> None:
    log: list[str] = []
    found = asyncio.run(exchange(_app(log), [before, CHUNKED[:-3] + GARBAGE + GET]))
    answered = found.partition(STREAM)[2] if before else found
    assert (_status(answered), answered.count(b"HTTP/1.1")) == (b"400", 1)
    assert log == ["gone"]


@pytest.mark.parametrize("before", [b"", GET])
def test_a_body_that_has_not_come_when_the_server_ends_is_503(before: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")  # a server of this worker may have set INFO

    async def story() -> bytes:
        async with connected(mirror) as connection:
            connection.receive(before + b"POST /a HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc")
            connection.protocol.shutdown()
            return await connection.read_all()

    found = asyncio.run(story())
    assert found.count(b"HTTP/1.1 200") == bool(before)
    head, _, body = found[found.index(b"HTTP/1.1 503") :].partition(b"\r\n\r\n")
    assert {b"connection: close", b"content-length: %d" % len(body)} <= set(head.split(b"\r\n"))
    assert b"retry-after: " in head
    assert json.loads(body)["message"] == "the server is stopping"
    assert not caplog.records


def test_garbage_in_a_body_that_has_its_answer_gets_no_second_one() -> None:
    async def story() -> None:
        async with connected(_early) as connection:
            connection.receive(CHUNKED[:-3])
            await connection.read_until(b"no")
            connection.receive(GARBAGE)
            assert await connection.read_all() == b""

    asyncio.run(story())


def test_a_client_that_goes_away_is_heard_by_the_request_that_is_answered() -> None:
    """Also where another one waits behind it."""

    async def story() -> None:
        gone = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        async with connected(app) as connection:
            connection.receive(GET + GET)
            await asyncio.sleep(0)
            connection.protocol.transport.abort()
            await asyncio.wait_for(gone.wait(), DEADLINE)

    asyncio.run(story())


# -- a client that ends its own side -----------------------------------------------------------------------------


async def _half_closed(app: Any, *parts: bytes) -> bytes:
    async with connected(app) as connection:
        for part in parts:
            connection.writer.write(part)
            await asyncio.sleep(0.05)
        connection.writer.write_eof()
        return await connection.read_all()


@pytest.mark.parametrize("after", [b"", GARBAGE, b"POST /c HTTP/1.1\r\nContent-Length: 9\r\n\r\nab", b"GET"])
def test_a_half_closed_client_gets_its_stream(after: bytes) -> None:
    found = asyncio.run(_half_closed(_app([]), POST_A + after))
    assert found.partition(b"\r\n\r\n")[2].startswith(STREAM)
    assert found.count(b"HTTP/1.1") == 1 + (after == GARBAGE)


def test_a_half_closed_client_gets_what_it_asked_for_in_order() -> None:
    found = asyncio.run(_half_closed(_app([]), POST_A + GET + POST_A))
    first, second, third = (part for part in found.split(b"HTTP/1.1 200 OK\r\n") if part)
    assert (first.endswith(STREAM), second.endswith(b"GET /b  "), third.endswith(STREAM)) == (True, True, True)


@pytest.mark.parametrize("end", [b"", b"GET", POST_A[:-1]])
def test_a_half_closed_client_gets_what_waits_behind_a_pipelined_request(end: bytes) -> None:
    found = asyncio.run(_half_closed(_app([]), POST_A + GET * 100 + POST_A + end))
    first, *others, last = (part for part in found.split(b"HTTP/1.1 200 OK\r\n") if part)
    assert first.endswith(STREAM)
    assert [other[-8:] for other in others] == [b"GET /b  "] * 100
    assert last.endswith(STREAM)


@pytest.mark.parametrize("when", ["before", "after"])
def test_for_a_whole_answer_it_counts_as_gone(when: str) -> None:
    log: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if when == "after":
            await asyncio.sleep(0.3)  # the application learns what is asked for
        scope["extensions"][EXCHANGE].send_whole()
        while (message := await receive())["type"] != "http.disconnect":
            pass
        log.append(message["type"])

    assert asyncio.run(_half_closed(app, GET)) == b""
    assert log == ["http.disconnect"]


def test_only_the_response_that_is_sent_whole_needs_its_client_to_stay() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/b":
            scope["extensions"][EXCHANGE].send_whole()
            return await mirror(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await ends.wait()
        await send({"type": "http.response.body", "body": b"two"})

    async def story() -> None:
        async with connected(app) as connection:
            connection.receive(GET)
            await connection.read_until(b"GET /b  ")
            connection.receive(GET.replace(b"/b", b"/c"))
            await connection.read_until(b"one")
            connection.writer.write_eof()
            await settle()
            ends.set()
            assert b"two" in await connection.read_all()

    ends = asyncio.Event()
    asyncio.run(story())


def test_a_half_closed_connection_ends_with_its_last_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await ends.wait()
        await mirror(scope, receive, send)

    async def story() -> None:
        async with connected(app) as connection:
            connection.receive(GET)
            connection.writer.write_eof()
            await settle()
            ends.set()
            await connection.read_until(b"GET /b  ")
            assert connection.protocol.transport.is_closing(), "and not after its idle time"

    ends = asyncio.Event()
    asyncio.run(story())


def test_a_body_that_ends_early_is_a_client_that_is_gone() -> None:
    log: list[str] = []
    assert asyncio.run(_half_closed(_app(log), POST_A[:-1])) == b""
    assert log == ["gone"]


def test_a_client_that_closed_behind_its_request_is_noticed_by_a_write() -> None:
    async def story() -> None:
        written = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal written
            await send({"type": "http.response.start", "status": 200, "headers": []})
            scope["extensions"][EXCHANGE].resume()
            while written < 1000 and scope["extensions"][EXCHANGE].write_chunk(b"abc"):
                written += 1
                await asyncio.sleep(0.01)
            done.set()

        done = asyncio.Event()
        async with connected(app) as connection:
            connection.writer.write(GET)
            await asyncio.sleep(0.05)
            connection.writer.close()
            await asyncio.wait_for(done.wait(), DEADLINE)
        assert written < 50

    asyncio.run(story())


@pytest.mark.parametrize("parts", [[b"GET", b"GET"], [b"", b"GET", b"GET"], [b"", b"GETGET"]])
def test_a_client_that_pipelines_requests_and_leaves_is_noticed(parts: list[bytes]) -> None:
    async def story() -> None:
        waits, gone = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            exchange = scope["extensions"][EXCHANGE]
            exchange.send_whole()
            waits.set()
            while not exchange.is_over:
                await exchange.wait()
            gone.set()

        async with connected(app) as connection:
            first, *later = [part.replace(b"GET", GET) for part in parts]
            connection.writer.write(POST_A + first + (later.pop() if first else b""))
            await asyncio.wait_for(waits.wait(), DEADLINE)
            for part in later:
                connection.writer.write(part)
                await settle()
            connection.writer.close()
            await asyncio.wait_for(gone.wait(), 5)

    asyncio.run(story())


def test_few_bytes_are_read_ahead_of_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        answering = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await answering.wait()
            await mirror(scope, receive, send)

        async with connected(app) as connection:
            received = 0
            on_data = connection.protocol.data_received

            def count(data: bytes) -> None:
                nonlocal received
                received += len(data)
                on_data(data)

            monkeypatch.setattr(connection.protocol, "data_received", count)
            number, request = 1 << 9, b"GET /b HTTP/1.1\r\na: " + b"a" * (1 << 12) + b"\r\n\r\n"
            connection.writer.write(POST_A + request * number)
            for _ in range(20):
                await settle()
            ahead = received - len(POST_A + request)
            assert 1 << 16 < ahead <= (1 << 16) + (1 << 18), "64 KiB and what the loop reads at once"
            assert not connection.protocol.transport.is_reading()
            connection.writer.write_eof()
            answering.set()
            assert (await connection.read_all()).count(b"HTTP/1.1 200") == 1 + number

    asyncio.run(story())


# -- turns in the event loop -----------------------------------------------------------------------------------------


class Loop:
    """An event loop whose iterations the test runs."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call_soon(self, call: Any, *arguments: Any) -> None:
        self.calls.append((call, arguments))

    def iterate(self) -> None:
        calls, self.calls = self.calls, []
        for call, arguments in calls:
            call(*arguments)


def test_calls_take_turns_and_heads_of_new_connections_go_first() -> None:
    turns, done = protocol.LoopTurns(), list[str]()
    loop: Any = Loop()
    begin = functools.partial(turns.soon, loop)
    for number in range(100):
        turns.note_connection(loop)
        begin(functools.partial(done.append, f"slow {number}"))
    begun = len(done)
    assert 1 <= begun <= 16
    loop.iterate()
    assert len(done) == begun + 1, "many clients connect"
    loop.iterate()
    assert len(done) == begun + 17, "no client connects"
    begin(functools.partial(done.append, "quick"), quick=True)
    loop.iterate()
    assert done[begun + 17] == "quick"
    for _ in range(20):
        loop.iterate()
    assert sorted(done) == sorted([*(f"slow {number}" for number in range(100)), "quick"])
    loop.iterate()
    assert not loop.calls, "an idle loop sleeps"
    begin(functools.partial(done.append, "alone"))
    assert done[-1] == "alone"


def test_fewer_requests_begin_in_an_iteration_in_which_clients_connect() -> None:
    for new, quick, begun in (
        (0, False, 16),
        (0, True, 8),
        (3, False, 13),
        (3, True, 8),
        (12, True, 4),
        (99, False, 1),
    ):
        turns, done = protocol.LoopTurns(), list[int]()
        loop: Any = Loop()
        for _ in range(new):
            turns.note_connection(loop)
        for number in range(50):
            turns.soon(loop, functools.partial(done.append, number), quick=quick, later=True)
        assert done == []
        loop.iterate()
        assert done == list(range(begun))


def test_a_call_is_made_at_once_while_there_is_a_turn_and_none_waits() -> None:
    for quick, number in ((False, 16), (True, 8)):
        turns, done = protocol.LoopTurns(), list[int]()
        loop: Any = Loop()
        for call in range(30):
            turns.soon(loop, functools.partial(done.append, call), quick=quick)
        assert done == list(range(number))
        assert len(loop.calls) == 1, "for all of them"


def test_calls_that_had_nothing_to_do_are_limited_too() -> None:
    turns, calls = protocol.LoopTurns(), list[int]()
    loop: Any = Loop()

    def leave(number: int) -> bool:
        calls.append(number)
        return False

    for number in range(3000):
        turns.soon(loop, functools.partial(leave, number), later=True)
    loop.iterate()
    assert len(calls) == 1024
    loop.iterate()
    assert len(calls) == 2048


def test_few_connections_are_closed_in_an_iteration_in_which_many_clients_leave() -> None:
    turns, loop = protocol.LoopTurns(), Loop()
    transports = [mock.Mock() for _ in range(200)]

    def num_closed() -> int:
        return sum(transport.close.call_count for transport in transports)

    later = [turns.leave(loop, transport) for transport in transports]  # type: ignore[arg-type]
    assert later == [False] * 64 + [True] * 136
    assert num_closed() == 0, "the event loop closes those that need not wait"
    loop.iterate()
    assert num_closed() == 64
    assert turns.leave(loop, mock.Mock()), "this iteration has closed as many as it may"  # type: ignore[arg-type]
    loop.iterate()
    loop.iterate()
    assert [transport.close.call_count for transport in transports] == [0] * 64 + [1] * 136
    loop.iterate()
    assert not loop.calls, "an idle loop sleeps"
    assert not turns.leave(loop, mock.Mock())  # type: ignore[arg-type]


def test_connections_of_clients_that_leave_together_are_closed_in_turns() -> None:
    async def story() -> None:
        turns = protocol.LoopTurns()
        async with contextlib.AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(connected(mirror, turns=turns)) for _ in range(66)]
            await settle()
            assert [connection.protocol.eof_received() for connection in connections] == [False] * 64 + [True] * 2
            await settle()
            assert [connection.protocol.transport.is_closing() for connection in connections[64:]] == [True, True]

    asyncio.run(story())


def test_long_heads_share_the_bytes_of_an_iteration_and_each_kind_of_call_goes_on() -> None:
    turns, done = protocol.LoopTurns(), list[str]()
    loop: Any = Loop()

    def begin(name: str) -> None:
        turns.note_bytes(loop, 20_000)
        done.append(name)

    for number in range(9):
        turns.soon(loop, functools.partial(begin, f"quick {number}"), quick=True, later=True)
        turns.soon(loop, functools.partial(begin, f"other {number}"), later=True)
    loop.iterate()
    assert done == ["quick 0", "quick 1", "other 0"]
    loop.iterate()
    assert done[3:] == ["quick 2", "quick 3", "other 1"]
    assert turns.is_spent
    turns.soon(loop, functools.partial(begin, "late"))
    assert done[-1] == "other 1", "it waits although no other is waiting"


@contextlib.asynccontextmanager
async def sharing_turns(number: int) -> AsyncIterator[tuple[list[Connection], list[str]]]:
    """Connections that share the turns of a loop, and the paths of the requests that have begun."""
    turns, begun = protocol.LoopTurns(), list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        await mirror(scope, receive, send)

    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connected(app, turns=turns)) for _ in range(number)], begun


def test_a_ping_begins_before_requests_that_wait_for_their_turn() -> None:
    async def story() -> list[str]:
        async with sharing_turns(101) as (connections, begun):
            for connection in connections[1:]:
                connection.receive(POST_A)
            connections[0].receive(b"GET /ping HTTP/1.1\r\n\r\n")
            await connections[0].read_until(b"GET /ping  ")
            answered = list(begun)
            for connection in connections[1:]:
                await connection.read_until(b"ab")
            assert len(begun) == 101
            return answered

    with mock.patch.object(protocol, "_MAX_BEGUN", 4):
        assert len(asyncio.run(story())) < 50


def test_while_clients_connect_only_bodiless_requests_are_parsed_at_once() -> None:
    async def story() -> None:
        turns = protocol.LoopTurns()
        async with contextlib.AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(connected(mirror, turns=turns)) for _ in range(3)]
            await settle()
            turns.note_connection(asyncio.get_running_loop())
            with mock.patch.object(RequestParser, "feed", autospec=True, side_effect=RequestParser.feed) as receive:
                connections[0].receive(POST_A)
                connections[1].receive(POST_A[:20], POST_A[20:])
                assert not receive.called
                connections[2].receive(b"GET /ping HTTP/1.1\r\n\r\n")
                assert receive.call_count == 1
            for connection in connections[:2]:
                assert (await connection.read_until(b"ab")).startswith(b"HTTP/1.1 200")

    asyncio.run(story())


@pytest.mark.parametrize("end", ["shutdown", "timeout_keep_alive_handler"])
def test_a_waiting_request_is_answered_although_the_connection_ends(end: str) -> None:
    async def story() -> None:
        turns = protocol.LoopTurns()
        async with contextlib.AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(connected(mirror, turns=turns)) for _ in range(9)]
            await settle()
            for _ in range(100):
                turns.note_connection(asyncio.get_running_loop())
            for connection in connections:
                connection.receive(POST_A)
            for connection in connections:
                getattr(connection.protocol, end)()
            for connection in connections:
                assert (await connection.read_until(b"ab")).startswith(b"HTTP/1.1 200")

    asyncio.run(story())


def test_line_ends_that_wait_for_their_turn_do_not_keep_a_connection() -> None:
    async def story() -> None:
        turns = protocol.LoopTurns()
        async with connected(mirror, turns=turns) as connection:
            turns.note_connection(asyncio.get_running_loop())
            connection.receive(b"\r\n" * 9)
            connection.protocol.timeout_keep_alive_handler()
            assert await connection.read_all() == b""

    asyncio.run(story())


@pytest.mark.parametrize("before", [b"", b"1\r\nx\r\n"])
def test_small_chunks_are_parsed_in_turns(before: bytes) -> None:
    async def story() -> None:
        turns = protocol.LoopTurns()
        async with contextlib.AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(connected(mirror, turns=turns)) for _ in range(20)]
            with mock.patch.object(
                protocol.Protocol, "on_body", autospec=True, side_effect=protocol.Protocol.on_body
            ) as on_body:
                for connection in connections:
                    connection.receive(CHUNKED_A + before, b"1\r\nx\r\n" * 5_000 + b"0\r\n\r\n")
                assert on_body.call_count < 20 * 500
            for connection in connections:
                found = await connection.read_until(b"x" * (5_000 + bool(before)))
                assert found.startswith(b"HTTP/1.1 200")

    asyncio.run(story())


def test_a_request_whose_client_leaves_before_its_turn_does_not_begin() -> None:
    async def story() -> None:
        async with sharing_turns(40) as (connections, begun):
            for connection in connections:
                connection.receive(POST_A)
            waiting = len(connections) - len(begun)
            for connection in connections:
                connection.protocol.connection_lost(None)
            await settle()
            assert len(begun) < 40
            assert waiting > 0

    with mock.patch.object(protocol, "_MAX_BEGUN", 4):
        asyncio.run(story())


@pytest.mark.parametrize("quick", [True, False])
def test_calls_without_work_take_no_turns(quick: bool) -> None:
    turns, done = protocol.LoopTurns(), list[str]()
    loop: Any = Loop()
    dead = mock.Mock(return_value=False)
    begin = functools.partial(turns.soon, loop, quick=quick)
    for _ in range(16):
        turns.note_connection(loop)
    begin(dead)
    begin(functools.partial(done.append, "first"))
    for _ in range(200):
        begin(dead)
    begin(functools.partial(done.append, "second"))
    begin(functools.partial(done.append, "third"))
    assert done == ["first"], "as many clients connect, one begins"
    loop.iterate()
    assert done == ["first", "second"]
    for _ in range(10_000):
        begin(dead)
    dead.reset_mock()
    loop.iterate()
    assert 0 < dead.call_count < 2_000, "an iteration is bounded"
    for _ in range(20):
        loop.iterate()
    assert dead.call_count == 10_000
    assert not loop.calls


def test_a_request_does_not_wait_for_those_whose_clients_have_left() -> None:
    async def story() -> None:
        async with sharing_turns(40) as (connections, begun):
            for connection in connections:
                connection.receive(POST_A)
            for connection in connections[:-1]:
                connection.protocol.connection_lost(None)
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(begun) == 2, "the first one, and the last one"

    with mock.patch.object(protocol, "_MAX_BEGUN", 1):
        asyncio.run(story())


SEEN_BY = contextvars.ContextVar("SEEN_BY", default="")


def test_no_request_sees_the_context_variables_of_another() -> None:
    inherited = dict[str, str]()

    async def story() -> None:
        loop, turns = asyncio.get_running_loop(), protocol.LoopTurns()

        def connect_and_send() -> None:
            turns.note_connection(loop)  # so that the request begins only in the next turn
            other.receive(b"POST /other HTTP/1.1\r\nContent-Length: 0\r\n\r\n")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            path = scope["path"]
            inherited[path] = SEEN_BY.get()
            SEEN_BY.set(path)
            if path == "/a":
                loop.call_soon(connect_and_send, context=contextvars.Context())
            await answer(send, b"")

        async with connected(app, turns=turns) as first, connected(app, turns=turns) as other:
            await settle()
            first.receive(b"".join(b"POST /%c HTTP/1.1\r\nContent-Length: 0\r\n\r\n" % path for path in b"abc"))
            await settle()

    asyncio.run(story())
    assert inherited == dict.fromkeys(["/a", "/b", "/c", "/other"], "")


@pytest.mark.parametrize("chunk", [b"1\r\n[\r\n", b"4\r\n\r\n\r\n\r\n"])
def test_one_connection_parses_few_chunks_in_an_iteration(chunk: bytes) -> None:
    async def story() -> None:
        async with connected(mirror) as connection:
            with (
                mock.patch.object(RequestParser, "feed", autospec=True, side_effect=RequestParser.feed) as feed,
                mock.patch.object(
                    protocol.Protocol, "on_end", autospec=True, side_effect=protocol.Protocol.on_end
                ) as on_end,
            ):
                connection.receive(CHUNKED_A, chunk * 20_000 + b"0\r\n\r\n")
                number, turns = feed.call_count, 0
                assert number <= 2 * 64
                while not on_end.called:
                    await asyncio.sleep(0)
                    assert feed.call_count - number <= 2 * 64
                    number, turns = feed.call_count, turns + 1
                assert turns > 3
            body = chunk.partition(b"\r\n")[2][:-2] * 20_000
            assert (await connection.read_until(body)).startswith(b"HTTP/1.1 200")

    asyncio.run(story())


# -- tasks of the server: uvicorn waits for them when it stops ---------------------------------------------------------


@in_one_test(
    ("num_steps", "response"), [(0, b""), (1, b"HTTP/1.1 500 Internal Server Error")], ids=["not begun", "begun"]
)
def test_a_task_that_is_cancelled_is_forgotten_and_its_connection_closed(num_steps: int, response: bytes) -> None:
    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def story() -> None:
        state = ServerState()
        async with connected(waiting, state=state) as connection:
            connection.receive(b"GET /ping HTTP/1.1\r\nHost: h\r\n\r\n")
            (task,) = state.tasks
            for _ in range(num_steps):
                await asyncio.sleep(0)
            task.cancel()
            assert (await connection.read_all()).split(b"\r\n")[0] == response
            assert not state.tasks

    asyncio.run(story())


def test_a_task_is_forgotten_after_its_response() -> None:
    async def story() -> None:
        state = ServerState()
        async with connected(mirror, state=state) as connection:
            for _ in range(2):
                connection.receive(b"GET /ping HTTP/1.1\r\nHost: h\r\n\r\n")
                assert len(state.tasks) == 1
                await settle()
                assert not state.tasks

    asyncio.run(story())
