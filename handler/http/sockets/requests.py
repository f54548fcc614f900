"""The requests and the memory of a WebSocket."""

from __future__ import annotations

import re
import weakref
from urllib.parse import urlencode

from starlette.types import ASGIApp, Scope

from handler.core.errors import Overloaded
from handler.http.inference import OVER_SOCKET
from handler.http.sockets.base import Socket
from handler.http.sockets.exchange import EventSender, MessageExchange
from handler.serving.quota import Quota, Share

_OF_HANDSHAKE = re.compile(r"upgrade|connection|content-.*|transfer-encoding|expect|sec-websocket-.*")
JSON = "application/json"


class SocketMemory:
    """The memory that a WebSocket holds.

    Args:
        quota: quota that all connections and requests share.
    """

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._shares = weakref.WeakSet[Share]()

    def hold(self, size: int) -> Share:
        """Return a share of the quota. It is closed with the memory, or earlier by the caller.

        Each message and each value that a reader keeps has a share of its own, because a share may grow while others
        are small. Together they hold at most half of the quota, so that the rest is left for other connections.

        Raises:
            Overloaded: there is not enough memory.
        """
        share = Share(self._quota)
        self.set(share, size)
        self._shares.add(share)
        return share

    def set(self, share: Share, size: int) -> None:
        """Set the size of a share.

        Raises:
            Overloaded: there is not enough memory.
        """
        others = sum(other.size for other in self._shares if other is not share)
        if size > share.size and size + others > max(self._quota.most // 2, size):
            raise Overloaded("the messages and items on this connection need too much memory in total")
        share.set(size)

    def close(self) -> None:
        for share in [*self._shares]:
            share.close()


class SocketRequests:
    """Sends requests to the application, as if they had come over HTTP.

    Args:
        app: application that has the routes of the requests.
        scope: scope of the requests (see `request_scope`).
    """

    def __init__(self, app: ASGIApp, scope: Scope, socket: Socket) -> None:
        self._app = app
        self._scope = scope
        self._socket = socket
        self._exchanges = set[MessageExchange]()
        self._num_requests = 0

    async def respond(self, path: str, body: bytes, output: EventSender, content_type: str) -> None:
        """Send a request to the route with a path, and the events of its response to an output."""
        exchange = MessageExchange(self._socket, body, output)
        output.connect(exchange)
        self._exchanges.add(exchange)
        self._socket.num_running = len(self._exchanges)
        self._num_requests += 1
        id = f"{self._scope['request_id']}-{self._num_requests}"
        try:
            scope = {**_with_type(self._scope, content_type), "path": path, "request_id": id}
            await exchange.run(self._app, scope)
        finally:
            self._exchanges.discard(exchange)
            self._socket.num_running = len(self._exchanges)

    def disconnect(self) -> None:
        """End all requests as if their client had disconnected."""
        for exchange in self._exchanges:
            exchange.disconnect()


def request_scope(scope: Scope, adapter: str | None) -> Scope:
    """Return the scope of the requests that come as messages, without the headers of the handshake.

    Args:
        scope: scope of the handshake, after the checks of its head.
        adapter: value of `adapter` in the query string. The rest of the query string is dropped, because it may contain
            a key.
    """
    headers = [(name, value) for name, value in scope["headers"] if not _OF_HANDSHAKE.fullmatch(name.decode("latin-1"))]
    by_name = {name: value for name, value in scope["headers_by_name"].items() if not _OF_HANDSHAKE.fullmatch(name)}
    return {
        **scope,
        "method": "POST",
        OVER_SOCKET: True,
        "query_string": urlencode({"adapter": adapter}).encode() if adapter else b"",
        "headers": headers,
        "headers_by_name": by_name,
    }


def _with_type(scope: Scope, content_type: str) -> Scope:
    """Return the scope of a request whose body has a content type."""
    return {
        **scope,
        "headers": [*scope["headers"], (b"content-type", content_type.encode())],
        "headers_by_name": {**scope["headers_by_name"], "content-type": content_type},
    }
