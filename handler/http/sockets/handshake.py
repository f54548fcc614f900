"""The handshake that opens a WebSocket."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from starlette.types import Scope
from websockets.datastructures import Headers
from websockets.extensions import Extension
from websockets.extensions.permessage_deflate import ServerPerMessageDeflateFactory
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

_REALTIME = Subprotocol("realtime")
"""The subprotocol that browsers offer for realtime sessions, beside one that holds their key."""

library_log = logging.getLogger("handler.websocket.library")
library_log.setLevel(logging.WARNING)  # it logs the end of each connection


class Handshake(NamedTuple):
    """The response to a request that opens a WebSocket.

    Attributes:
        response: response with status 101, or a refusal.
        extensions: extensions that the client and the server both support.
    """

    response: Response
    extensions: Sequence[Extension]


def shake_hands(scope: Scope, *, compresses: bool = False) -> Handshake:
    """Return the response to a request that opens a WebSocket. See RFC 6455, section 4.2.

    Args:
        compresses: whether messages may be compressed, if the client offers it (RFC 7692).
    """
    headers = Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    if "transfer-encoding" in headers or headers.get_all("content-length") not in ([], ["0"]):
        refusal = Response(400, "Bad Request", Headers(), b"a request that opens a WebSocket must not have a body")
        return Handshake(refusal, [])
    target = (scope["raw_path"] + b"?" + scope["query_string"]).decode("latin-1")
    extensions = [_COMPRESSION] if compresses else None
    protocol = ServerProtocol(extensions=extensions, select_subprotocol=_select, logger=library_log)
    return Handshake(protocol.accept(Request(target, headers)), protocol.extensions)


_COMPRESSION = ServerPerMessageDeflateFactory(
    server_max_window_bits=12, client_max_window_bits=12, compress_settings={"memLevel": 5}
)
"""Compression with small windows, which needs 64 KiB of memory per connection, as in the library's own server."""


def choose_subprotocol(offered: Iterable[str]) -> Subprotocol | None:
    """Return the subprotocol to use. A client's key must not be repeated."""
    return _REALTIME if _REALTIME in offered else None


def _select(protocol: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return choose_subprotocol(offered)
