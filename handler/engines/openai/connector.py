"""A pool of HTTP connections that are reused only if nothing has arrived on them since their last response."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from handler.core.loop import has_unread


class CleanConnector(aiohttp.TCPConnector):
    """A connector that closes an idle connection when bytes arrive on it.

    Such bytes answer no request. aiohttp would keep them, and return them as the response to the next request.
    """

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            if _begin(connection):
                return connection
            connection.close()


def _begin(connection: Connection) -> bool:
    """Prepare a connection for a request. Return false if the connection is not clean."""
    protocol, transport = connection.protocol, connection.transport
    if protocol is None or transport is None:  # it was closed just now, which aiohttp reports
        return True
    if isinstance(transport.get_protocol(), _Idle):
        if protocol.should_close or has_unread(transport):
            return False
        transport.set_protocol(protocol)
    connection.add_callback(lambda: transport.set_protocol(_Idle(protocol)))
    return True


class _Idle(asyncio.Protocol):
    """The protocol of an idle connection. It closes the connection when bytes arrive.

    Args:
        protocol: aiohttp's protocol, which is used again for the next request.
    """

    def __init__(self, protocol: ResponseHandler) -> None:
        self._protocol = protocol

    def data_received(self, data: bytes) -> None:
        self._protocol.close()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._protocol.connection_lost(error)
