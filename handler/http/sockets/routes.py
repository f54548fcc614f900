"""The routes of WebSockets."""

from __future__ import annotations

from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from handler.core.errors import BadRequest
from handler.http.exchange import EXCHANGE, Exchange
from handler.http.inference import Handle, send_error
from handler.http.sockets.connection import Limits, WebSocket, handshake
from handler.http.sockets.realtime import RealtimeReader
from handler.http.sockets.responses import ResponsesReader
from handler.http.sockets.session import MessageReader, RouteReader, Session
from handler.serving.model import ServedModel

INVOKE_SOCKET = "/invocations-bidirectional-stream"
"""Path on which SageMaker opens a WebSocket, unless the caller of the endpoint names another one."""

REALTIME = "/v1/realtime"

_MAX_MESSAGE = 1 << 24  # maximum size of a message, in bytes
_MAX_SECONDS = 3600.0  # maximum lifetime of a connection, as in OpenAI's API


class FirstReader:
    """Reads the first message of SageMaker's WebSocket, which decides what all messages mean."""

    def begin(self, session: Session) -> None:
        """Do nothing, because the client speaks first."""

    async def read(self, session: Session, message: bytes) -> None:
        kind = None
        if b'"type"' in message:
            kind = (await session.decode(message)).get("type")
        session.reader = _reader_of(kind)
        session.reader.begin(session)
        await session.reader.read(session, message)

    def expire(self, session: Session) -> None:
        """Do nothing, because the client has not sent anything."""


class Sockets:
    """Opens the WebSockets of a served model.

    Args:
        app: application that has the routes of the requests.
    """

    def __init__(self, model: ServedModel, app: ASGIApp) -> None:
        self._model = model
        self._app = app

    def at(self, path: str) -> Handle:
        """Return the handler of requests that open a WebSocket at a path."""

        async def open_socket(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = scope["extensions"][EXCHANGE]
            response = handshake(scope)
            if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS or not isinstance(exchange, Exchange):
                return await send_error(scope, send, BadRequest(response.body.decode().partition("\n")[0]))
            limits = Limits(min(self._model.config.max_request_size, _MAX_MESSAGE), _MAX_SECONDS)
            try:
                session = Session(self._model, self._app, scope, reader_at(path))
                turns, memory = exchange.turns, self._model.admission.memory
                session.socket = WebSocket(response, session, turns, memory, limits)
                exchange.switch(session.socket)
            except BadRequest as error:
                return await send_error(scope, send, error)
            session.reader.begin(session)
            await session.run()

        return open_socket


_REALTIME = ("session.", "conversation.", "input_audio_buffer.")


def _reader_of(kind: object) -> MessageReader:
    """Return the reader for clients whose first message is an event of a type."""
    if isinstance(kind, str) and kind.startswith(_REALTIME):
        return RealtimeReader()
    if isinstance(kind, str) and kind.startswith("response."):
        return ResponsesReader()
    return RouteReader("/invocations")


def reader_at(path: str) -> MessageReader:
    """Return a reader of the messages that clients send to a path."""
    if path == INVOKE_SOCKET:
        return FirstReader()
    if path == REALTIME:
        return RealtimeReader()
    return ResponsesReader() if path == "/v1/responses" else RouteReader(path)
