"""Offers to upgrade the protocol are ignored, in every head, however its bytes are cut; bodies are left as they are."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.app.http.connection import answer, connected, exchange, mirror
from tests.one_test import in_one_test

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
    b"POST /a connection,content-length,host,http2-settings " + BODY,
    b"POST /b connection,http2-settings,transfer-encoding one\r\nUpgrade: x\r\ntwo",
    b"GET /c a,connection ",
    b"POST /d content-length " + BODY,
    b"GET /e connection,http2-settings ",
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
