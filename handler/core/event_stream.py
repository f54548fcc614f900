"""Reads lines and server-sent events from a stream that arrives in pieces of any size."""

from __future__ import annotations

from typing import NamedTuple

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineReader:
    """Reads lines that end with LF, CR LF or CR, as in the HTML standard. A byte order mark at the start is dropped.

    Args:
        maximum: maximum size of a line in bytes.

    Attributes:
        partial: the beginning of the last line, whose end has not arrived.
    """

    def __init__(self, maximum: int) -> None:
        self.partial = bytearray()
        self._maximum = maximum
        self._prefix = _BYTE_ORDER_MARK  # may precede the first line
        self._ends_with_cr = False  # a line feed at the start of the next piece belongs to the same line end

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without their line ends.

        Raises:
            ValueError: a line is larger than the maximum.
        """
        if self._ends_with_cr and data:
            data = data.removeprefix(b"\n")
            self._ends_with_cr = False
        if b"\r" in data:
            self._ends_with_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *more = data.split(b"\n")
        self.partial += first
        self._check(self.partial)
        if not more:
            return []
        lines = [bytes(self.partial).removeprefix(self._prefix), *more[:-1]]
        self.partial = bytearray(more[-1])
        self._prefix = b""
        for line in more:
            self._check(line)
        return lines

    def _check(self, line: bytes | bytearray) -> None:
        if len(line) > self._maximum:
            raise ValueError(f"a line has more than {self._maximum} bytes")


class StreamEvent(NamedTuple):
    """A server-sent event. `comment` contains the comment lines, which Dynamo uses for error messages."""

    name: bytes
    data: bytes
    comment: bytes


class EventReader:
    """Reads server-sent events, as in the HTML standard. An event is complete with the blank line that follows it.

    Args:
        maximum: maximum size of an event in bytes.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._lines = LineReader(maximum)
        self._name = b""
        self._data: list[bytes] = []
        self._comments: list[bytes] = []
        self._size = 0  # bytes of the event so far, in whole lines

    def feed(self, data: bytes) -> list[StreamEvent]:
        """Return the events that `data` completes.

        Raises:
            ValueError: an event is larger than the maximum.
        """
        if self._is_single_event(data):  # nearly always
            return [StreamEvent(b"", data[6:-2], b"")]
        try:
            lines = self._lines.feed(data)
        except ValueError:
            raise self._too_large() from None
        events = [event for line in lines if (event := self._read(line)) is not None]
        if self._size + len(self._lines.partial) > self._maximum:
            raise self._too_large()
        return events

    def _is_single_event(self, data: bytes) -> bool:
        """Return whether `data` is a single line of data with the blank line after it, and begins an event."""
        if self._size or self._lines.partial or len(data) > self._maximum or b"\r" in data:
            return False
        return data.startswith(b"data: ") and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2

    def _read(self, line: bytes) -> StreamEvent | None:
        """Read a line, and return the event that it ends, if any."""
        if not line:
            return self._end()
        self._size += len(line) + 1
        if self._size > self._maximum:
            raise self._too_large()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        elif not field:
            self._comments.append(value)
        return None

    def _end(self) -> StreamEvent | None:
        """Return the event that a blank line ends. A comment without data only keeps the connection open."""
        event = None
        if self._data or self._name:
            event = StreamEvent(self._name, b"\n".join(self._data), b" ".join(self._comments))
        self._name = b""
        self._data = []
        self._comments = []
        self._size = 0
        return event

    def _too_large(self) -> ValueError:
        return ValueError(f"an event has more than {self._maximum} bytes")
