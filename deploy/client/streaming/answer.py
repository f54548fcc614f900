"""Read one streamed answer: bytes in, events out; at the end check that it is complete."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from deploy.client.errors import RequestFailed, StreamBroken
from deploy.client.streaming.events import Event, Finish, Token, events_of
from deploy.client.streaming.framing import JsonValues, PlainText, Reader, Truncated, reader_for


class AnswerReader:
    """Reads bytes in any pieces; events do not depend on the pieces (of plain text: the whole text does not).

    Args:
        content_type: the container's; empty: unknown.

    Attributes:
        arrived: the events so far.
    """

    def __init__(self, content_type: str = "") -> None:
        self._content_type = content_type
        self._beginning = b""
        self._reader: Reader | None = None
        self._open: set[int] = set()  # answers that have begun, in schemas that mark the end of each
        self.arrived: list[Event] = []

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events that are complete now.

        Raises:
            ModelFailed: the answer reports a failure, after the events before it.
        """
        if self._reader is None:
            self._beginning += data
            if codecs.BOM_UTF8.startswith(self._beginning):
                return  # nothing yet, or half a byte order mark
            data = self._beginning.removeprefix(codecs.BOM_UTF8)
            self._reader = reader_for(self._content_type, data)
            if self._reader is None:
                return
        yield from self._events(self._reader.feed(data))

    def finish(self) -> Iterator[Event]:
        """Yield the events that the end of the bytes completes.

        Raises:
            StreamBroken: the answer is not complete.
            ModelFailed: as `feed`.
        """
        values: list[object] = []
        if self._reader is None:
            self._reader = JsonValues() if "json" in self._content_type else PlainText()
            values = self._reader.feed(self._beginning.removeprefix(codecs.BOM_UTF8).strip())
        try:
            values += self._reader.flush()
        except Truncated as cut:
            yield from self._events(values)
            rest = cut.rest[:80].decode("utf-8", "replace")
            raise self.with_arrived(StreamBroken(f"the answer ended within a value: {rest}")) from None
        yield from self._events(values)
        if self._open:
            raise self.with_arrived(StreamBroken("the answer ended without saying that it does"))

    def with_arrived(self, error: RequestFailed) -> RequestFailed:
        """Return the error with the events before it."""
        error.arrived = tuple(self.arrived)
        return error

    def _events(self, values: list[object]) -> Iterator[Event]:
        for value in values:
            try:
                for event in events_of(value):
                    self._note(event)
                    yield event
            except RequestFailed as error:
                self._open.clear()
                raise self.with_arrived(error) from None

    def _note(self, event: Event) -> None:
        self.arrived.append(event)
        if isinstance(event, Token) and event.data.keys() & {"token", "choices"}:
            self._open.add(event.index)
        elif isinstance(event, Finish):
            self._open.discard(event.index)
