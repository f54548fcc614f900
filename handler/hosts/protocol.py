"""uvicorn's HTTP protocol with two corrections, heads have limits and an offer to upgrade to HTTP/2 is passed over,
and with one extension: a streamed chunk's short way to the socket.
"""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 60.0  # that request line and headers may take, and a new connection until they come
_MAX_HEAD = 1 << 16  # bytes of request line and headers; SageMaker's are a few hundred
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b"
)
_BODY = b'{"code":431,"type":"BadRequestException","message":"the request\'s headers are too long"}'


CHUNK = "lmi.http.chunk"
"""Name of the ASGI extension: a call `(bytes) -> bool` that writes one chunk of a begun, unfinished response at once.

It is what `send` does with such a chunk, at a third of the cost; False says that `send` has to do it.
"""


class Protocol(HttpToolsProtocol):
    """Java's HttpClient offers `Upgrade: h2c` with its first request; the parser would take the body for HTTP/2."""

    _in_head = True
    _head_size = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes) -> None:
        if self._in_head and b"pgrade" in data:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head) + end + rest
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_size += len(data)
            if self._head_size > _MAX_HEAD:
                self.transport.write(_TOO_LARGE % (len(_BODY), _BODY))
                self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head, self._head_size = True, 0
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._end_head_timer()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # else it was turned away
            extensions: dict[Any, Any] = {CHUNK: functools.partial(_write_chunk, self.cycle)}
            self.scope["extensions"] = extensions


def _write_chunk(cycle: RequestResponseCycle, data: bytes) -> bool:
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    if data:  # an empty chunk would be the end
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True
