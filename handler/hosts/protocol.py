"""uvicorn's HTTP protocol with two corrections: heads have a limit, an offer to upgrade to HTTP/2 is passed over."""

from __future__ import annotations

import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD = 1 << 16  # bytes of request line and headers; SageMaker's are a few hundred
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b"
)
_BODY = b'{"code":431,"type":"BadRequestException","message":"the request\'s headers are too long"}'


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
