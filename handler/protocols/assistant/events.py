"""The events of an assistant's response, and the protocol of the parsers that produce them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol


class CallStart(NamedTuple):
    """The start of a tool call. `number` is the index of the call in the response."""

    number: int
    name: str


class Arguments(NamedTuple):
    """A piece of the JSON arguments of a tool call."""

    number: int
    text: str


class Ending(Enum):
    """How a tool call ended.

    Attributes:
        WHOLE: its arguments are complete.
        OPEN: the response ended within the call, but its arguments lack only closing brackets and quotes.
        BROKEN: its arguments are incomplete or invalid.
    """

    WHOLE = 0
    OPEN = 1
    BROKEN = 2


class CallEnd(NamedTuple):
    """The end of a tool call. Each call has exactly one of these events, at the end of the response at the latest.

    A parser sets the ending that it detects. `ResponseReader` checks the arguments and changes the ending to WHOLE or
    BROKEN. `text` is what the model wrote, if the response ended before the call's arguments.
    """

    number: int
    ending: Ending = Ending.WHOLE
    text: str = ""

    @property
    def whole(self) -> bool:
        return self.ending is Ending.WHOLE


class Reasoning(NamedTuple):
    """A piece of reasoning, without the markers around it."""

    text: str


Event = str | Reasoning | CallStart | Arguments | CallEnd
"""An event of a response. A string is a piece of text outside of reasoning and tool calls."""


class EventParser(Protocol):
    """An incremental parser of one response's text. The result does not depend on the size of the pieces."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""

    def flush(self) -> list[Event]:
        """Return the remaining events at the end of the response."""


class PlainText(EventParser):
    """The parser of a response that is only text."""

    def feed(self, text: str) -> list[Event]:
        return [text] if text else []

    def flush(self) -> list[Event]:
        return []


_PIECE = 1024  # characters


def pieces(text: str) -> Sequence[str]:
    """Split a long text into pieces, for parsers whose steps take time proportional to the text in their buffer."""
    if len(text) <= _PIECE:
        return (text,) if text else ()
    return [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]


# -- whitespace at the ends of texts -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Ends:
    """Trims the whitespace at both ends of a text that arrives in pieces.

    Attributes:
        begun: whether the text has started, so that whitespace is part of the text.
        space: whitespace that is held back until more of the text follows.
    """

    begun: bool = False
    space: list[str] = field(default_factory=list)

    def trim(self, text: str) -> str:
        """Add a piece of the text, and return the text that can be shown now."""
        if not self.begun:
            text = text.lstrip()
        trimmed = text.rstrip()
        space = text[len(trimmed) :]
        if not trimmed:
            self.space += [space] if space else []
            return ""
        before, self.space, self.begun = "".join(self.space), [space] if space else [], True
        return before + trimmed


class Trimmed:
    """Trims leading and trailing whitespace from the text of a response, and from its reasoning.

    All pieces of text count as one text, and all pieces of reasoning as another, even if other events separate them.
    """

    __slots__ = ("_reasoning", "_text")

    def __init__(self) -> None:
        self._text = Ends()
        self._reasoning = Ends()

    def read(self, events: Iterable[Event]) -> list[Event]:
        """Return the events without leading whitespace. Hold back whitespace that may be trailing."""
        trimmed: list[Event] = []
        for event in events:
            if isinstance(event, str):
                trimmed += [text] if (text := self._text.trim(event)) else []
            elif isinstance(event, Reasoning):
                trimmed += [Reasoning(text)] if (text := self._reasoning.trim(event.text)) else []
            else:
                trimmed.append(event)
        return trimmed


class LeadingSpace:
    """Holds back the whitespace at the beginning of a response's text, in which tool calls may follow.

    A response that has tool calls and no other text than whitespace has no text.
    """

    __slots__ = ("_called", "_held")

    def __init__(self) -> None:
        self._called = False
        self._held: list[str] | None = []  # None once other text has followed

    def read(self, events: list[Event]) -> list[Event]:
        """Return the events that can be shown now."""
        if self._held is None:
            return events
        trimmed: list[Event] = []
        for event in events:
            self._called |= isinstance(event, CallStart)
            if self._held is None or not isinstance(event, str):
                trimmed.append(event)
                continue
            self._held.append(event)
            if event.strip():
                trimmed.append("".join(self._held))
                self._held = None
        return trimmed

    def flush(self) -> list[Event]:
        """Return the whitespace that was held back, if it is the text of a response without tool calls."""
        return ["".join(self._held)] if self._held and not self._called else []
