"""Split an answer's bytes into values: JSON values, server-sent events, or plain text.

SageMaker cuts PayloadParts anywhere: within a character, or after several events. So bytes are kept until a value is
complete, and only then decoded. All readers have `feed(data)` and `flush()`, which return complete values.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, Protocol

_OPENING = b"{["
_BLANK = re.compile(rb"\s*")
_OUTSIDE = re.compile(rb'["{}\[\]]')
_INSIDE = re.compile(rb'["\\]')
_END_OF_LINE = re.compile(rb"\r\n|\n|\r")
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class Truncated(Exception):
    """The answer ended within a value, which begins with `rest`."""

    def __init__(self, rest: bytes) -> None:
        super().__init__(rest)
        self.rest = rest


class Reader(Protocol):
    def feed(self, data: bytes) -> list[Any]:
        """Return the values that are complete now."""

    def flush(self) -> list[Any]:
        """Return the values that the end completes.

        Raises:
            Truncated: the answer ended within a value.
        """


class JsonValues:
    """Reads JSON values: one a line, over several lines, or without line ends.

    An object or array ends with its last bracket, any other value with its line. A value that is not JSON is its text.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()  # from the first byte of a value on
        self._scanned = 0  # bytes of the buffer that were scanned
        self._depth = 0
        self._in_string = False

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        results: list[Any] = []
        while (end := self._end()) is not None:
            results.append(_parse(bytes(self._buffer[:end]).strip()))
            del self._buffer[:end]
            self._scanned = 0
        return results

    def flush(self) -> list[Any]:
        if self._depth:
            raise Truncated(bytes(self._buffer))
        value = bytes(self._buffer).strip()
        self._buffer.clear()
        return [_parse(value)] if value else []

    def _end(self) -> int | None:
        """Return the end of the first value; None: it is not complete."""
        if not self._scanned:
            del self._buffer[: _BLANK.match(self._buffer).end()]  # type: ignore[union-attr]  # matches always
        if not self._buffer:
            return None
        if self._buffer[0] not in _OPENING:
            at = self._buffer.find(b"\n", self._scanned)
            self._scanned = len(self._buffer)
            return None if at < 0 else at
        while (sign := (_INSIDE if self._in_string else _OUTSIDE).search(self._buffer, self._scanned)) is not None:
            if sign[0] == b"\\":
                if sign.end() == len(self._buffer):  # the escaped character is in the next piece
                    self._scanned = sign.start()
                    return None
                self._scanned = sign.end() + 1
                continue
            self._scanned = sign.end()
            if sign[0] == b'"':
                self._in_string = not self._in_string
                continue
            self._depth += 1 if sign[0] in b"{[" else -1
            if not self._depth:
                return self._scanned
        self._scanned = len(self._buffer)
        return None


class ServerSentEvents:
    """Reads server-sent events by the HTML standard's rules. Comments, which keep a connection open, are dropped."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0  # bytes of the buffer without a line end
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        return self._lines(last=False)

    def flush(self) -> list[Any]:
        results = self._lines(last=True)
        if self._buffer:  # the last line has no end
            self._line(bytes(self._buffer))
            self._buffer.clear()
        return results + self._event()

    def _lines(self, *, last: bool) -> list[Any]:
        results: list[Any] = []
        start = 0
        for end in _END_OF_LINE.finditer(self._buffer, self._scanned):
            if end[0] == b"\r" and end.end() == len(self._buffer) and not last:
                break  # a line feed may follow in the next piece; this is the last line end
            line = bytes(self._buffer[start : end.start()])
            start = end.end()
            if line:
                self._line(line)
                continue
            try:
                results += self._event()
            except Truncated as cut:  # within an event with a proper end
                results.append(cut.rest.decode("utf-8", "replace"))
        del self._buffer[:start]
        self._scanned = len(self._buffer) - self._buffer.endswith(b"\r")
        return results

    def _line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))

    def _event(self) -> list[Any]:
        """Return the values of an event; `[DONE]` is none. Several, if a server omits the empty line between events."""
        data, self._data = b"\n".join(self._data), []
        values = JsonValues()
        results = values.feed(data)
        results += values.flush()
        return [value for value in results if value != "[DONE]"]


class PlainText:
    """Reads text, in whole characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> list[Any]:
        return [text] if (text := self._decoder.decode(data)) else []

    def flush(self) -> list[Any]:
        return [text] if (text := self._decoder.decode(b"", final=True)) else []


def reader_for(content_type: str, beginning: bytes) -> Reader | None:
    """Return the reader for an answer that begins so; None: the beginning is too short to decide.

    The beginning decides, as a proxy may have changed the content type. If it fits several, the content type decides.

    Args:
        beginning: without a byte order mark.
    """
    kind = content_type.partition(";")[0].strip().lower()
    events = kind == "text/event-stream"
    start = beginning.lstrip()
    if kind.startswith("text/") and not events:
        return PlainText()
    if start.startswith((b"{", b"[")):
        return JsonValues()
    if start.startswith(_FIELDS) or (events and start):
        return ServerSentEvents()
    if not start or any(field.startswith(start) for field in _FIELDS):
        return None
    return JsonValues() if "json" in kind else PlainText()


def _parse(value: bytes) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # nested deeper than Python's limit
        return value.decode("utf-8", "replace")
