"""Finds the end of a value between tags whose text may itself contain tags, such as a quoted tool call.

A value ends at its own end tag, if the tag of another parameter or the rest of the call follows. Tags within the value
that belong to quoted calls are text. If the response ends first, the last end tag that leaves a whole call counts, and
otherwise the first end tag of an enclosing element, which the quoted text did not open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from handler.protocols.assistant.events import Ending, Event, pieces
from handler.protocols.assistant.tools.parsing import CallParser, Steps


class Tags(NamedTuple):
    """The tags around a value.

    Attributes:
        value, end: the tags before and after a value.
        next: the tag that begins another parameter.
        call, call_end: the tags around a call.
        outer: the tags that must follow the end of a call, or an empty tuple if anything may.
        begins, block_end: the tags around all calls.
        stops: the special tokens after a message, which are never the text of a value.
    """

    value: str
    end: str
    next: str
    call: str
    call_end: str
    outer: tuple[str, ...]
    begins: tuple[str, ...]
    block_end: str
    stops: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self[:5], *self.outer, *self.begins, self.block_end, *self.stops)))


class _ResponseEnd(Exception):
    """Raised within the steps of a parser if the response ends while the end of a value is undecided."""


class _Undecided:
    """The text of a value from its first tag on, while the tag may be either text or the end of the value.

    Attributes:
        parts: the tags, each followed by the text after it.
        whole: the index of the last end tag that leaves a whole call.
        closer: the index of the first end tag of an enclosing element.
        quotes: whether the end tag at `whole` follows quoted tags, one of which has no end tag of its own.
    """

    def __init__(self, tags: Tags) -> None:
        self.parts: list[str] = []
        self.whole: int | None = None
        self.closer: int | None = None
        self.quotes = False
        self._tags = tags
        self._values = self._calls = self._blocks = 0  # elements that the text has opened
        self._candidate: int | None = None  # an end tag after which only the rest of the call may follow
        self._end = 0  # the index of the last end tag
        self._last = ""
        self._blank = True  # whether the text after the last tag is whitespace

    def write(self, text: str) -> None:
        self.parts.append(text)
        self._blank = self._blank and not text.strip()

    def add(self, tag: str) -> int | None:
        """Add a tag, and return the index of the value's end tag once it is certain."""
        tags, last = self._tags, self._last
        candidate = self._candidate if self._blank else None
        self._candidate = None
        certain = False
        if candidate is not None and last == tags.end:
            certain = tag == tags.next or (tag == tags.call_end and not tags.outer)
            if tag in (tags.call, tags.call_end) or (tag == tags.block_end and not self._blocks):
                self.whole = self._candidate = candidate
                self.quotes = False
        elif candidate is not None:
            certain = tag in tags.outer
        elif tag == tags.end and not self._values:
            self._candidate = len(self.parts)
        elif tag == tags.call_end and not self._calls and last == tags.end and self._blank:
            self.whole = self._candidate = self._end
            self.quotes = True
        self._count(tag)
        self._last, self._blank = tag, True
        self.parts.append(tag)
        return candidate if certain else None

    @property
    def last_end(self) -> int | None:
        """The index of the last end tag that leaves a whole call, or a call that lacks only its own end."""
        if self._candidate is not None and self._blank:
            return self._candidate
        return self.whole

    def _count(self, tag: str) -> None:
        tags = self._tags
        if tag == tags.end:
            self._end = len(self.parts)
            self._values = max(0, self._values - 1)
        elif tag in (tags.call_end, tags.block_end):
            self._close(tag)
        self._values += tag == tags.value
        self._calls += tag == tags.call
        self._blocks += tag in tags.begins and tag != tags.call

    def _close(self, tag: str) -> None:
        is_call = tag == self._tags.call_end
        opened = self._calls if is_call else self._blocks
        if not opened and self.closer is None:
            self.closer = len(self.parts)
        if is_call:
            self._calls = max(0, self._calls - 1)
        else:
            self._blocks = max(0, self._blocks - 1)


class OpenValues(CallParser):
    """Base class of parsers for calls whose values are text between tags.

    Attributes:
        unsure: whether the tag that ends the current value may also be the text of a value that was cut off.
    """

    unsure = False
    _undecided: _Undecided | None = None
    _rest = ""  # text that is read once more, after the end of a value has been decided
    _after = ""  # text that follows `_rest`
    _decided = False  # whether the first tag after a value ends it, because all of the text is known
    _at_end = False  # whether the response has ended

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in pieces(text):
            events += [*super().feed(piece), *self._read_again()]
        return events

    def flush(self) -> list[Event]:
        events: list[Event] = []
        self._at_end = True
        if self._undecided is not None and self._steps is not None:
            self._undecided.parts.append(self.advance(len(self.held)))  # the start of a tag, if anything
            self._steps.throw(_ResponseEnd())
            events = [*self.pop(), *self._read_again()]
        return [*events, *super().flush()]

    def end_values(self) -> None:
        """End a call whose values have been read.

        If the end of its values was guessed at the end of the response, the call is marked as open: what follows may
        belong to a value that was cut off.
        """
        if not self.unsure:  # otherwise the brackets are closed only if the model ended the response
            self.write("}" if self._keys else "{}")
        guessed = self.unsure or (self._decided and self._at_end)
        self.unsure = False
        self.end_call(Ending.OPEN if guessed else Ending.WHOLE)

    def read_value(self, write: Callable[[str], None], tags: Tags, is_parameter: Callable[[str], bool]) -> Steps[str]:
        """Pass the text of a value to `write`, and return the tag that ends it, which is consumed.

        Args:
            is_parameter: returns whether a text after `tags.value` begins with the name of a parameter.
        """
        tag = yield from self.stream_until(write, *tags.all)
        if self._decided or tag in tags.stops:
            return tag
        undecided = self._undecided = _Undecided(tags)
        stop = ""
        try:
            while not stop and (at := undecided.add(tag)) is None:
                tag = yield from self.stream_until(undecided.write, *tags.all)
                stop = tag if tag in tags.stops else ""
        except _ResponseEnd:
            at = None
        self._undecided = None
        parts = undecided.parts
        is_certain = at is not None
        if at is None:
            at = self._last_end(undecided, stop)
        lacks_end = undecided.quotes or (undecided.last_end is None and undecided.closer is not None)
        if lacks_end and parts[0] == tags.next == tags.value and is_parameter("".join(parts[1:])):
            at, is_certain, self.unsure = 0, False, False
        if at is None:
            write("".join(parts))
            while True:  # the value is open
                yield from self._open()
        write("".join(parts[:at]))
        remainder = "".join([*parts[at + 1 :], stop])
        if is_certain:
            self.put_back(remainder)
        else:
            self.forget(len(remainder))
            self._rest, self._after, self.held, self._decided = remainder, self.held, "", True
        return parts[at] if at < len(parts) else self._take_stop()

    def _last_end(self, undecided: _Undecided, stop: str) -> int | None:
        """Return the index of the tag that ends a value whose end is not certain, or None if the value is open.

        Args:
            stop: the token that ends the message, or "" if the response ended.
        """
        if undecided.last_end is not None:
            return undecided.last_end
        self.unsure = undecided.closer is not None and not stop
        if undecided.closer is None and stop:
            return len(undecided.parts)
        return undecided.closer

    def _take_stop(self) -> str:
        """Take back and return the token that ends the message, which also ends the value."""
        stop, after = self._rest, self._after
        self.held, self._rest, self._after, self._decided = stop + after, "", "", False
        return self.advance(len(stop))

    def _read_again(self) -> list[Event]:
        """Read the text after the end of a value once more, in pieces."""
        events: list[Event] = []
        while self._decided:
            text, after, self._rest, self._after = self._rest, self._after, "", ""
            for piece in pieces(text):
                events += super().feed(piece)
            if self._at_end:
                break
            self._decided = False
            events += super().feed(after)
        return events
