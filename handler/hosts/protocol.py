"""uvicorn's HTTP protocol with two corrections, heads have a limit and an offer to upgrade to HTTP/2 is passed over,
and with one extension: a streamed chunk's short way to the socket.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

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
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
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
