"""The routes of WebSockets."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.frames import CloseCode

from handler.config.config import Config
from handler.core.errors import BadRequest, Overloaded, ServingError, Unavailable, UpgradeRequired
from handler.core.fair_queue import FairQueue
from handler.core.values import Task
from handler.http.exchange import EXCHANGE, Exchange
from handler.http.inference import Endpoint, Handle, send_error
from handler.http.security import Checks
from handler.http.sockets.asgi import AsgiHandshake
from handler.http.sockets.base import Socket, SocketLimits
from handler.http.sockets.connection import CompressedWebSocket, WebSocket
from handler.http.sockets.handshake import shake_hands
from handler.http.sockets.readers import INVOKE_SOCKET, REALTIME, reader_at
from handler.http.sockets.requests import request_scope
from handler.http.sockets.session import LoadingReceiver, ReaderFactory, SocketSession
from handler.http.urls import query_of
from handler.protocols.registry import routes
from handler.serving.admission import memory_quota
from handler.serving.head import owner_of
from handler.serving.model import ServedModel

_MAX_MESSAGE = 1 << 24  # maximum size of a message, in bytes


class Sockets:
    """Opens WebSockets. They can be opened before the model is loaded, and their messages are refused until then.

    Attributes:
        num_open: number of open connections.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._model: ServedModel | None = None
        self._app: ASGIApp | None = None
        self._memory = memory_quota(config)  # until a model has been loaded
        self._loading = set[LoadingReceiver]()
        self._sockets = FairQueue[Socket](config.websockets_max)
        self.num_open = 0

    def serve(self, model: ServedModel, app: ASGIApp) -> None:
        """Serve the open and the later connections.

        Args:
            app: application that has the routes of the requests.
        """
        self._model = model
        self._app = app
        self._memory = model.admission.memory
        model.metrics.websockets.set_function(lambda: self.num_open)
        for receiver in self._loading:
            receiver.over.set()

    def at(self, path: str) -> Handle:
        """Return the handler of requests that open a WebSocket at a path."""

        async def open_socket(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                query = dict(query_of(scope))
                socket = await self._open(scope, compresses=path != INVOKE_SOCKET)
            except ServingError as error:
                return await send_error(scope, send, error)
            self.num_open += 1
            owner = owner_of(scope["headers_by_name"])
            self._make_room(socket, owner)
            try:
                await self._run(socket, request_scope(scope, query.get("adapter")), reader_at(path, query))
            finally:
                self._sockets.discard(id(socket), owner)
                self.num_open -= 1

        return open_socket

    def _make_room(self, socket: Socket, owner: str) -> None:
        """Close the newest WebSocket of the owner that has more of them than others, if this one exceeds the limit."""
        removed = self._sockets.put(id(socket), socket, owner)
        if removed is not None:
            reason = "another client needs this connection (option.websockets_max)"
            asyncio.get_running_loop().call_soon(removed.close, CloseCode.TRY_AGAIN_LATER, reason)  # it is served then

    async def _open(self, scope: Scope, *, compresses: bool) -> Socket:
        """Accept a WebSocket.

        Args:
            compresses: whether messages may be compressed, if the option allows it.

        Raises:
            ServingError: the WebSocket is refused.
        """
        if not self._config.websockets_max:
            raise UpgradeRequired("WebSockets are turned off on this server (option.websockets_max=0)")
        if not self._sockets.has_room(self._config.websockets_max, owner_of(scope["headers_by_name"])):
            raise Overloaded(f"{self.num_open} WebSockets are open (option.websockets_max)")
        limits = SocketLimits(min(self._config.max_request_size, _MAX_MESSAGE), self._config.websockets_seconds)
        exchange = scope["extensions"][EXCHANGE]
        if isinstance(exchange, AsgiHandshake):
            return await exchange.accept(limits)
        if not isinstance(exchange, Exchange):
            raise BadRequest("this server has no WebSockets")
        handshake = shake_hands(scope, compresses=compresses and self._config.websockets_compression)
        if handshake.response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            raise BadRequest(handshake.response.body.decode().partition("\n")[0])
        kind = CompressedWebSocket if handshake.extensions else WebSocket
        socket = kind(handshake, exchange.turns, self._memory.of(owner_of(scope["headers_by_name"])), limits)
        exchange.switch(socket)
        return socket

    async def _run(self, socket: Socket, scope: Scope, read_with: ReaderFactory) -> None:
        """Serve a connection until it is closed."""
        if self._model is None:
            await self._wait(socket)
        if self._model is None or self._app is None or not socket.is_open:
            return
        session = SocketSession(self._model, self._app, scope, read_with, socket)
        socket.serve(session, self._memory.of(session.owner))
        await session.run()

    async def _wait(self, socket: Socket) -> None:
        """Refuse the messages of a connection until there is a model, or the connection is closed."""
        receiver = LoadingReceiver(socket, Unavailable(f"Model is not ready: {self._config.name}"))
        socket.serve(receiver, self._memory)
        self._loading.add(receiver)
        try:
            await receiver.over.wait()
        finally:
            self._loading.discard(receiver)


class EarlySockets:
    """An ASGI application that opens WebSockets while the model loads, on all paths that accept them for any model.

    Args:
        checks: checks of the heads of requests.
        refuse: application for requests that open no WebSocket.
    """

    def __init__(self, config: Config, sockets: Sockets, checks: Checks, refuse: ASGIApp) -> None:
        dialects = {path: dialect for task in Task for path, dialect in routes(config.root_schema, task).items()}
        self._checks = checks
        self._routes = [
            *[Route(path, Endpoint({}, socket=sockets.at(path))) for path in (INVOKE_SOCKET, REALTIME)],
            *[Route(path, Endpoint({}, dialect.errors, sockets.at(path))) for path, dialect in dialects.items()],
        ]
        self._router = Router(self._routes, default=refuse, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._checks.refusal(scope)
        if error is not None:
            return await send_error(scope, send, error)
        if self._checks.keys.admits(scope) or not await self._checks.keys.refuse(scope, send, self._routes):
            await self._router(scope, receive, send)
