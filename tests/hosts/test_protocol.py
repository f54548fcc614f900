"""How long a connection may take to say what it wants."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn

from handler.hosts import protocol


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.6)  # longer than a head may take
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def _served(sent: bytes) -> bytes:
    """All that comes for what is sent, until the server closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(_app, http=protocol.Protocol, lifespan="off", ws="none", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(sent)
        found = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return found
    finally:
        server.should_exit = True
        await serving


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:"])
def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    assert asyncio.run(_served(sent)) == b""


def test_an_answer_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    found = asyncio.run(_served(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert found.startswith(b"HTTP/1.1 200 OK")
    assert found.endswith(b"ok")
