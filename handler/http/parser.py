"""Reads the heads and bodies of requests from the bytes of a connection, within limits against hostile clients."""

from __future__ import annotations

import logging
import re
from typing import Any, NamedTuple, Protocol

import httptools

from handler.core.errors import BadRequest
from handler.core.numbers import is_digits
from handler.http.urls import unquoted

MAX_FIELDS = 128  # maximum number of headers and trailers; Apache and gunicorn allow 100
MAX_HEAD = 1 << 16  # maximum size of request line, headers and trailers, in bytes; SageMaker sends a few hundred
_MAX_LINE = 1 << 13  # maximum size of the request line, in bytes, as in nginx and Apache
_LINE_OVERHEAD = len("  HTTP/1.1")  # bytes of the request line besides the method and the target

_MAX_REPEATED = 1 << 11  # maximum size of a head that is remembered, in bytes
_MAX_DIGITS = 15  # maximum digits of its Content-Length
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % _MAX_DIGITS, re.IGNORECASE)

# A Host header is the host of a URI with an optional port (RFC 9110, section 7.2; RFC 3986, section 3.2.2).
_HOST = re.compile(rb"(?:\[[\w:.%~-]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
_AUTHORITY = re.compile(rb"[^/?#]*://([^/?#]*)")
_ASTERISK = b"*"  # the target of a request about the whole server

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


RawHeaders = list[tuple[bytes, bytes]]

# What the next byte of a connection belongs to, in order.
BETWEEN = 0  # a new head
HEAD = 1  # a head that has begun
BODY = 2  # a body or its trailers
PLAIN_BODY = 3  # the body of a head that has come again, which is not parsed either


class RequestHead(NamedTuple):
    """The head of a request, without its headers.

    Attributes:
        path: path without percent-escapes.
        raw_path: path as it was sent.
        query: query string as it was sent, without the question mark.
        version: the version of HTTP, such as "1.1".
        keep_alive: whether the connection may stay open after the response.
        expects_continue: whether the client sends the body only after a response with status 100.
        memo: values that follow from the head and its headers except Content-Length. The requests of a connection that
            repeat the last head share them. It is None for the first of them.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    version: str
    keep_alive: bool
    expects_continue: bool
    memo: dict[object, Any] | None = None


class RepeatedHead:
    """The head of a connection's last request, which most clients send again with another Content-Length.

    It is compared by its bytes. Parsing it again would take much longer.

    Args:
        headers: headers of the parsed head.
        data: bytes of the head. If it has a Content-Length, `_CONTENT_LENGTH` matches it.

    Attributes:
        head: the parsed head.
    """

    def __init__(self, head: RequestHead, headers: RawHeaders, data: bytes) -> None:
        self.head = head._replace(memo={})
        self._headers = headers.copy()
        self._before = data
        self._after = b""
        self._index: int | None = None  # of the Content-Length among the headers
        if match := _CONTENT_LENGTH.search(data):
            self._index = [name for name, _ in headers].index(b"content-length")
            self._before = data[: match.start(1)]
            self._after = data[match.end(1) :]

    def read(self, data: bytes) -> tuple[RawHeaders, int] | None:
        """Return the headers and the Content-Length if `data` consists of the bytes of the head with any
        Content-Length, or None otherwise.
        """
        if self._index is None:
            return (self._headers.copy(), 0) if data == self._before else None
        if not (data.startswith(self._before) and data.endswith(self._after)):
            return None
        digits = data[len(self._before) : len(data) - len(self._after)]
        if len(digits) > _MAX_DIGITS or not is_digits(digits):
            return None
        headers = self._headers.copy()
        headers[self._index] = (b"content-length", digits)
        return headers, int(digits)


def _expects_continue(field: tuple[bytes, bytes]) -> bool:
    """Return whether a header is Expect and contains 100-continue, possibly among other expectations."""
    name, value = field
    return name == b"expect" and b"100-continue" in map(bytes.strip, value.lower().split(b","))


def _parsed_target(method: bytes, target: bytes) -> Any:
    """Return the parts of a request's target, as httptools does.

    Raises:
        BadRequest: the target is neither a path nor a URL, nor the asterisk of OPTIONS (RFC 9112, section 3.2).
    """
    if not target.startswith(_ASTERISK) or (method == b"OPTIONS" and target == _ASTERISK):
        try:
            return httptools.parse_url(target)
        except httptools.HttpParserError:
            pass
    raise BadRequest("the request line must contain a path that begins with a slash, or a URL")


def _check_host(headers: RawHeaders) -> None:
    """Check the Host header, of which a proxy in front might use another one than this server (RFC 9112, section 3.2).

    It may be missing, as from programs that check a server's health.

    Raises:
        BadRequest: the header is repeated or malformed.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise BadRequest(f"the request has {len(hosts)} Host headers; send one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise BadRequest("the Host header must be a host with an optional port, such as 127.0.0.1:8080")


def _with_host(headers: RawHeaders, url: bytes) -> RawHeaders:
    """Return the headers with the host of the URL in the request line, which replaces that of the Host header.

    Raises:
        BadRequest: the URL's host is malformed, or has the name of a user before it.
    """
    match = _AUTHORITY.match(url)
    if match is None or not _HOST.fullmatch(match[1]):
        raise BadRequest("the URL in the request line must have a host with an optional port")
    return [*((name, value) for name, value in headers if name != b"host"), (b"host", match[1])]


class RequestReceiver(Protocol):
    """What a connection does with the parts of its requests."""

    def on_begin(self) -> None:
        """A head begins."""

    def on_head(self, head: RequestHead, headers: RawHeaders) -> None:
        """A head is complete. The names of its headers are in lower case."""

    def on_body(self, part: bytes) -> None:
        """Bytes of the body have been received."""

    def on_end(self) -> None:
        """The body is complete."""


class RequestParser:
    """Parses requests. Trailers are counted like headers, and discarded.

    A request that offers to upgrade the protocol is parsed like others. Its Upgrade header comes last.

    Args:
        receiver: connection that receives the parts of the requests.

    Attributes:
        phase: what the next byte belongs to.
        head_size: number of parsed bytes of the newest request's line, headers and trailers.
        num_left: number of bytes of the newest request's body that are not parsed yet, if its head has the length.
        num_parts: number of parts of bodies that have been parsed.
    """

    def __init__(self, receiver: RequestReceiver) -> None:
        self._receiver = receiver
        self._parser = self._new_parser()
        self._url = b""
        self._headers: RawHeaders = []
        self._offer = b""  # the Upgrade header of the newest head, which is parsed a second time without it
        self._num_fields = 0  # number of headers and trailers that were parsed
        self._unparsed = 0  # bytes received since the last callback
        self._repeated: RequestHead | RepeatedHead | None = None  # the last head; a `RepeatedHead` may come again
        self.phase = BETWEEN
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
        if self.phase == PLAIN_BODY:
            return self._take_body(bytes(data))
        is_first = self.phase == BETWEEN
        if is_first:
            if self._repeats(bytes(data)):
                return
            self._repeated = None
        self._unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            if self._line_size() > _MAX_LINE:
                raise LineTooLong from None
            if isinstance(error.__context__, BadRequest):
                raise error.__context__ from None
            if self.head_size <= MAX_HEAD:
                log.warning("Invalid HTTP request received.")
                raise BadRequest("this is not a valid HTTP request") from None
        if self.head_size + self._unparsed > MAX_HEAD:
            raise HeadTooLarge
        if is_first:
            self._remember(bytes(data))

    def _remember(self, data: bytes) -> None:
        """Remember the newest head if `data` consists of it, and if a Content-Length alone tells how its body ends."""
        head, self._repeated = self._repeated, None
        if not isinstance(head, RequestHead) or len(data) > _MAX_REPEATED or not data.endswith(b"\r\n\r\n"):
            return
        fields = dict(self._headers)
        if b"content-length" in fields and not _CONTENT_LENGTH.search(data):
            return
        length = int(fields.get(b"content-length", b"0"))
        is_plain = head.keep_alive and not head.expects_continue and b"transfer-encoding" not in fields
        if is_plain and self.num_left == length and self.phase == (BODY if length else BETWEEN):
            self._repeated = RepeatedHead(head, self._headers, data)

    def _repeats(self, data: bytes) -> bool:
        """Pass the head to the receiver if it is the last one again. Return whether it is."""
        repeated = self._repeated
        fields = repeated.read(data) if isinstance(repeated, RepeatedHead) else None
        if not isinstance(repeated, RepeatedHead) or fields is None:
            return False
        self.head_size = len(data)
        headers, self.num_left = fields
        self._receiver.on_begin()
        self.phase = PLAIN_BODY
        self._receiver.on_head(repeated.head, headers)
        if not self.num_left:
            self._end()
        return True

    def _take_body(self, part: bytes) -> None:
        self.num_parts += 1
        self.num_left -= len(part)
        self._receiver.on_body(part)
        if not self.num_left:
            self._end()

    def _end(self) -> None:
        self.phase = BETWEEN
        self.num_left = 0
        self._receiver.on_end()

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
        return parser

    def _parse(self, data: bytes | bytearray) -> None:
        """Parse bytes.

        The parser always stops after a head that offers to upgrade the protocol. A new parser then reads the same head
        without the offer, because the old parser would accept no more data after `Connection: close`.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT") from None
                data = self._head_without_upgrade() + data[offer.args[0] :]
                self._offer = b", ".join(value for name, value in self._headers if name == b"upgrade")
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
        self.phase = HEAD
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
        if self.phase == HEAD:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            return
        if self._offer:
            self._headers.append((b"upgrade", self._offer))
            self._offer = b""
        version = parser.get_http_version()
        is_current = version >= "1.1"
        method = parser.get_method()
        url = _parsed_target(method, self._url)
        raw_path = url.path or b"/"  # it is missing from an absolute URL without a path
        _check_host(self._headers)
        if url.schema:
            self._headers = _with_host(self._headers, self._url)
        fields = dict(self._headers)
        length = fields.get(b"content-length", b"")
        self.num_left = int(length) if is_digits(length) else 0
        self.phase = BODY
        head = RequestHead(
            method=method.decode(),
            path=unquoted(raw_path) if b"%" in self._url else raw_path.decode("ascii"),
            raw_path=raw_path,
            query=url.query or b"",
            version=version,
            keep_alive=is_current and parser.should_keep_alive(),
            expects_continue=is_current and b"expect" in fields and any(map(_expects_continue, self._headers)),
        )
        if not isinstance(self._repeated, RepeatedHead):
            self._repeated = head
        self._receiver.on_head(head, self._headers)

    def on_body(self, part: bytes) -> None:
        self._unparsed = 0
        self.num_parts += 1
        self.num_left = max(0, self.num_left - len(part))
        self._receiver.on_body(part)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        self._end()
