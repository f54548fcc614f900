"""WebSockets of the server under test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.http11 import Response as Handshake

from proof.bench.client import refused_key
from proof.conform.exchange import Response, excerpt
from proof.conform.rule import Failed, skip
from proof.conform.server import Server

_SWITCHING = 101
_MISSING = (404, 405)
"""Status with which a server refuses the handshake on a route that it does not have."""

_MAX_BYTES = 8 << 20

Ends = Callable[[Any], object]
"""A function that returns whether the JSON value of a frame is the last one of a response."""


class _Connect(connect):
    """Opens a connection, and follows no redirect, because the key is for this server only."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class WebSocket:
    """A WebSocket of the server under test.

    Args:
        seconds: the time limit of a response.
    """

    def __init__(self, connection: ClientConnection, path: str, seconds: float) -> None:
        self._connection = connection
        self._label = f"WebSocket {path}"
        self._seconds = seconds

    async def ask(self, *messages: Any, ends: Ends, times: int = 1) -> Response:
        """Send messages, and receive events until `times` of them end a response.

        Args:
            messages: objects to be sent as JSON, or bytes to be sent as binary frames.

        Returns:
            The events, one a line. If the connection is closed early, the response has a `failure`.

        Raises:
            Failed: a frame of the server is not a text frame with JSON.
        """
        texts = [message if isinstance(message, bytes) else json.dumps(message) for message in messages]
        label = " ".join([self._label, *map(excerpt, texts)])
        with contextlib.suppress(ConnectionClosed):  # the reason is found below
            for text in texts:
                await self._connection.send(text)
        return await self._receive(label, ends, times)

    async def send_text(self, data: bytes) -> Response:
        """Send bytes as a text frame, and receive until the connection is closed."""
        with contextlib.suppress(ConnectionClosed):
            await self._connection.send(data, text=True)
        return await self._receive(f"{self._label} {data!r}", lambda event: False, 1)

    async def ping(self, seconds: float) -> bool:
        """Send a ping, and return whether its pong arrives within a time limit."""
        with contextlib.suppress(ConnectionClosed, asyncio.TimeoutError):
            await asyncio.wait_for(await self._connection.ping(), seconds)
            return True
        return False

    @property
    def close_code(self) -> int | None:
        """The code of the server's close frame, or None if there is none."""
        frame = self._connection.protocol.close_rcvd
        return None if frame is None else int(frame.code)

    async def _receive(self, label: str, ends: Ends, times: int) -> Response:
        start, frames = time.monotonic(), list[str]()
        failure = ""
        try:
            while times:
                frame = await asyncio.wait_for(self._connection.recv(), start + self._seconds - time.monotonic())
                frames.append(frame if isinstance(frame, str) else repr(frame))
                times -= bool(ends(_value_in(frame, self._response(label, frames))))
        except ConnectionClosed:
            failure = f"closed with code {self.close_code}"
        except asyncio.TimeoutError:
            failure = "timeout"
        return self._response(label, frames, failure=failure, seconds=time.monotonic() - start)

    def _response(self, label: str, frames: list[str], failure: str = "", seconds: float = 0.0) -> Response:
        body = "\n".join(frames).encode("utf-8", "surrogatepass")
        return Response(
            label,
            status=_SWITCHING,
            headers={"content-type": "WebSocket"},
            body=body,
            failure=failure,
            seconds=seconds,
            late=failure == "timeout",
        )


def _value_in(frame: str | bytes, response: Response) -> Any:
    try:
        if isinstance(frame, str):
            return json.loads(frame)
    except (ValueError, RecursionError):
        pass
    raise Failed("a text frame with JSON", response)


@contextlib.asynccontextmanager
async def open_websocket(server: Server, path: str) -> AsyncIterator[WebSocket]:
    """Open a WebSocket.

    Raises:
        NotAsked: the server has no such route.
        Failed: the server refuses the handshake.
    """
    asking = server.asking
    headers = {"Authorization": f"Bearer {asking.key}"} if asking.key else {}
    url = f"ws{asking.url.removeprefix('http').rstrip('/')}{path}"
    options: dict[str, Any] = {
        "additional_headers": headers,
        "proxy": None,
        "ping_interval": None,
        "max_size": _MAX_BYTES,
    }
    opening = _Connect(url, open_timeout=server.limits.response, close_timeout=server.limits.ping, **options)
    async with contextlib.AsyncExitStack() as stack:
        try:
            connection = await stack.enter_async_context(opening)
        except InvalidStatus as error:
            _refused(server, path, error.response)
        except (InvalidHandshake, EOFError) as error:
            raise Failed("a WebSocket", request=f"WebSocket {path}", got=str(error)) from None
        yield WebSocket(connection, path, server.limits.response)


def _refused(server: Server, path: str, handshake: Handshake) -> NoReturn:
    status = handshake.status_code
    if status == 401 and not server.asking.key:
        raise refused_key(server.asking.url, "")
    if status in _MISSING:
        skip(f"the server has no WebSocket at {path}")
    content_type = {"content-type": handshake.headers.get("content-type", "")}
    response = Response(f"WebSocket {path}", status, content_type, bytes(handshake.body or b""))
    raise Failed("a WebSocket, which status 101 opens", response)
