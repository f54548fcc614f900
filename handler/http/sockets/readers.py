"""The readers of messages, chosen by the path of a WebSocket or by its first message."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from handler.core.framing import dumps_decoded
from handler.http.sockets.exchange import UnchangedEventSender
from handler.http.sockets.lanes import lane_name
from handler.http.sockets.realtime import RealtimeReader
from handler.http.sockets.responses import ResponsesReader
from handler.http.sockets.session import MessageReader, ReaderFactory, SocketSession

INVOKE_SOCKET = "/invocations-bidirectional-stream"
"""Path on which SageMaker opens a WebSocket, unless the caller of the endpoint names another one."""

REALTIME = "/v1/realtime"

_LANE = b'"stream_id"'
_REALTIME = ("session.", "conversation.", "input_audio_buffer.")


class RouteReader(MessageReader):
    """Reads messages that are bodies of requests for one route. A message may name its lane.

    Args:
        path: path of the route.
    """

    def __init__(self, session: SocketSession, path: str) -> None:
        self._session = session
        self._path = path

    async def read(self, message: bytes) -> None:
        name, body = "", message
        if _LANE in message:
            value = await self._session.decode(message)
            name = lane_name(value)
            if name:
                body = await self._session.call(len(message), functools.partial(dumps_decoded, value))
        output = UnchangedEventSender(self._session.socket, name)
        self._session.start(name, len(message), functools.partial(self._session.respond, self._path, body, output))


class FirstReader(MessageReader):
    """Reads the first message of SageMaker's WebSocket, which determines the reader of all messages.

    Args:
        query: query string of the WebSocket.
    """

    def __init__(self, session: SocketSession, query: Mapping[str, str]) -> None:
        self._session = session
        self._query = query

    async def read(self, message: bytes) -> None:
        kind = None
        if b'"type"' in message:
            kind = (await self._session.decode(message)).get("type")
        reader = _reader_of(kind, self._query)(self._session)
        self._session.reader = reader
        reader.begin()
        await reader.read(message)


def _reader_of(kind: object, query: Mapping[str, str]) -> ReaderFactory:
    """Return the function that creates the reader, for clients whose first message has a type."""
    if isinstance(kind, str) and kind.startswith(_REALTIME):
        return functools.partial(RealtimeReader, query=query)
    if isinstance(kind, str) and kind.startswith("response."):
        return ResponsesReader
    return functools.partial(RouteReader, path="/invocations")


def reader_at(path: str, query: Mapping[str, str]) -> ReaderFactory:
    """Return the function that creates the reader of the messages that clients send to a path."""
    if path == INVOKE_SOCKET:
        return functools.partial(FirstReader, query=query)
    if path == REALTIME:
        return functools.partial(RealtimeReader, query=query)
    if path == "/v1/responses":
        return ResponsesReader
    return functools.partial(RouteReader, path=path)
