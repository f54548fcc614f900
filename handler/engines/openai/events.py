"""Server-sent events, as the bytes of a stream arrive (html.spec.whatwg.org, 9.2)."""

from __future__ import annotations

from typing import NamedTuple

_MOST = 1 << 24  # bytes of an event


class Event(NamedTuple):
    """One event. `comment` is what stood behind colons, where Dynamo writes an error's words."""

    name: bytes
    data: bytes
    comment: bytes


class EventReader:
    """Reads events; parts of them may come at any time. An event that the stream's end cuts off never comes."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []
        self._comments: list[bytes] = []

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that end in `data`.

        Raises:
            ValueError: an event has more than 16 MiB.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) + sum(map(len, self._data)) > _MOST:
            raise ValueError(f"an event has more than {_MOST} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data or self._name:
                    events.append(Event(self._name, b"\n".join(self._data), b" ".join(self._comments)))
                    self._name, self._data, self._comments = b"", [], []
                continue
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._name = value
            elif not field:
                self._comments.append(value)
        return events
