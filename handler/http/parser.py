"""Reads the heads and bodies of requests from the bytes of a connection, within limits against hostile clients."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, Protocol

import httptools

from handler.core.errors import BadRequest
from handler.core.numbers import is_digits
from handler.http.urls import unquoted

MAX_FIELDS = 128  # maximum number of headers and trailers; Apache and gunicorn allow 100
MAX_HEAD = 1 << 16  # maximum size of request line, headers and trailers, in bytes; SageMaker sends a few hundred
_MAX_LINE = 1 << 13  # maximum size of the request line, in bytes, as in nginx and Apache
_LINE_OVERHEAD = len("  HTTP/1.1")  # bytes of the request line besides the method and the target

log = logging.getLogger("uvicorn.error")


class HeadTooLarge(BadRequest):
    """The request line, headers and trailers are too long or too many."""

    status = 431

    def __init__(self) -> None:
        limits = f"at most {MAX_HEAD} bytes and {MAX_FIELDS} fields"
        super().__init__(f"the request's headers or trailers are too long or too many: {limits}")


class LineTooLong(BadRequest):
    """The request line is too long."""

    status = 414

    def __init__(self) -> None:
        super().__init__(f"the request line, which contains the path and the query, has more than {_MAX_LINE} bytes")


class RequestHead(NamedTuple):
    """The head of a request.

    Attributes:
        path: path without percent-escapes.
        raw_path: path as it was sent.
        query: query string as it was sent, without the question mark.
        headers: names in lower case and values, in order.
        version: HTTP version, such as "1.1".
        keep_alive: whether the connection may stay open after the response.
        expects_continue: whether the client sends the body only after a response with status 100.
        length: value of Content-Length, or 0 if the header is missing.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    version: str
    keep_alive: bool
    expects_continue: bool
    length: int


class RequestReceiver(Protocol):
    """What a connection does with the parts of its requests."""

    def on_begin(self) -> None:
        """A head begins."""

    def on_head(self, head: RequestHead) -> None:
        """A head is complete."""

    def on_body(self, part: bytes) -> None:
        """Bytes of the body have been received."""

    def on_end(self) -> None:
        """The body is complete."""


class RequestParser:
    """Parses requests, ignoring offers to upgrade the protocol. Trailers are counted like headers, and discarded.

    Args:
        receiver: connection that receives the parts of the requests.

    Attributes:
        in_head: whether the newest request's head has begun, and is not complete.
        in_body: whether the newest request's head is complete, and its body or its trailers are not.
        head_size: number of parsed bytes of the newest request's line, headers and trailers.
        num_left: number of bytes of the newest request's body that are not parsed yet, if its head has the length.
        num_parts: number of parts of bodies that have been parsed.
    """

    def __init__(self, receiver: RequestReceiver) -> None:
        self._receiver = receiver
        self._parser = self._new_parser()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_fields = 0  # number of headers and trailers that were parsed
        self._unparsed = 0  # bytes received since the last callback
        self.in_head = False
        self.in_body = False
        self.head_size = 0
        self.num_left = 0
        self.num_parts = 0

    def feed(self, data: bytes | bytearray) -> None:
        """Parse bytes, and pass what they contain to the receiver.

        Raises:
            HeadTooLarge: the head or the trailers are too long, or have too many fields.
            LineTooLong: the request line is too long.
            BadRequest: the bytes are not a valid HTTP request.
        """
        self._unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if self._line_size() > _MAX_LINE:
                raise LineTooLong from None
            if self.head_size <= MAX_HEAD:
                log.warning("Invalid HTTP request received.")
                raise BadRequest("this is not a valid HTTP request") from None
        if self.head_size + self._unparsed > MAX_HEAD:
            raise HeadTooLarge

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
        return parser

    def _parse(self, data: bytes | bytearray) -> None:
        """Parse bytes, ignoring offers to upgrade the protocol.

        The parser always stops after a head that contains such an offer. A new parser then reads the same head without
        the offer, because the old parser would accept no more data after `Connection: close`.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT") from None
                data = self._head_without_upgrade() + data[offer.args[0] :]
                self._parser = self._new_parser()

    def _head_without_upgrade(self) -> bytes:
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self._headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _line_size(self) -> int:
        return len(self._parser.get_method()) + len(self._url) + _LINE_OVERHEAD if self._url else 0

    def _count(self, size: int) -> None:
        self._unparsed = 0
        self.head_size += size
        if self.head_size > MAX_HEAD:
            raise httptools.HttpParserError("the head is too large")

    # -- callbacks of httptools ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._num_fields = self._unparsed = 0
        self.in_head = True
        self.head_size = 0
        self._receiver.on_begin()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))
        if self._line_size() > _MAX_LINE:
            raise httptools.HttpParserError("the request line is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        size = len(name) + len(value) + 4  # including colon, space and line end
        self._count(size if self._num_fields <= MAX_FIELDS else MAX_HEAD)
        if self.in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            return
        version = parser.get_http_version()
        is_current = version >= "1.1"
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"  # it is missing from an absolute URL without a path
        fields = dict(self._headers)
        length = fields.get(b"content-length", b"")
        self.num_left = int(length) if is_digits(length) else 0
        self.in_head = False
        self.in_body = True
        head = RequestHead(
            method=parser.get_method().decode(),
            path=unquoted(raw_path) if b"%" in self._url else raw_path.decode("ascii"),
            raw_path=raw_path,
            query=url.query or b"",
            headers=self._headers,
            version=version,
            keep_alive=is_current and parser.should_keep_alive(),
            expects_continue=is_current and fields.get(b"expect", b"").lower() == b"100-continue",
            length=self.num_left,
        )
        self._receiver.on_head(head)

    def on_body(self, part: bytes) -> None:
        self._unparsed = 0
        self.num_parts += 1
        self.num_left = max(0, self.num_left - len(part))
        self._receiver.on_body(part)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        self.in_body = False
        self.num_left = 0
        self._receiver.on_end()
