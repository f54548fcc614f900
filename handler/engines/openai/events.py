"""Server-sent events, as the bytes of a stream arrive (html.spec.whatwg.org, 9.2)."""

from __future__ import annotations

from typing import NamedTuple

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MOST = 1 << 22  # bytes of an event


class Event(NamedTuple):
    """One event. `comment` is what stood behind colons, where Dynamo writes an error's words."""

    name: bytes
    data: bytes
    comment: bytes


class EventReader:
    """Reads events; parts of them may come at any time. An event that the stream's end cuts off never comes."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of a line, which later pieces continue
        self._name = b""
        self._data: list[bytes] = []
        self._comments: list[bytes] = []
        self._size = 0  # bytes of the event so far, in whole lines
        self._mark = _BYTE_ORDER_MARK  # with which the first line may begin

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that end in `data`.

        Raises:
            ValueError: an event has more than 4 MiB.
        """
        if (
            data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2
            and self._between_events()
        ):  # nearly all
            return [Event(b"", data[6:-2], b"")]
        first, *more = data.split(b"\n")
        self._rest += first
        if self._size + len(self._rest) > _MOST:
            raise ValueError(f"an event has more than {_MOST} bytes")
        if not more:
            return []
        lines, self._rest = [bytes(self._rest), *more[:-1]], bytearray(more[-1])
        events = []
        for line in lines:
            self._size += len(line) + 1
            line, self._mark = line.removesuffix(b"\r").removeprefix(self._mark), b""
            if not line:
                if self._data or self._name:
                    events.append(Event(self._name, b"\n".join(self._data), b" ".join(self._comments)))
                self._name, self._data, self._comments, self._size = b"", [], [], 0  # a comment alone keeps alive
                continue
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._name = value
            elif not field:
                self._comments.append(value)
        if self._size + len(self._rest) > _MOST:
            raise ValueError(f"an event has more than {_MOST} bytes")
        return events

    def _between_events(self) -> bool:
        return not (self._rest or self._data or self._name or self._comments)
