"""The events of an assistant's answer, and the protocol of their parsers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class CallStart(NamedTuple):
    """A call begins; `number` counts calls from 0."""

    number: int
    name: str


class Arguments(NamedTuple):
    """A piece of the JSON text of a call's arguments."""

    number: int
    text: str


class Ending(Enum):
    """How a call ended.

    WHOLE: with its arguments complete. OPEN: with the answer, within its arguments; nothing lacks but what closes them.
    BROKEN: otherwise.
    """

    WHOLE = 0
    OPEN = 1
    BROKEN = 2


class CallEnd(NamedTuple):
    """A call ends. It comes once a call, at the latest at the answer's end.

    A parser says how the call seems to end; `AnswerReader` says WHOLE or BROKEN, after it has looked at the arguments.
    """

    number: int
    ending: Ending = Ending.WHOLE

    @property
    def whole(self) -> bool:
        return self.ending is Ending.WHOLE


class Reasoning(NamedTuple):
    """A piece of the model's thoughts; the marks around them are in no event."""

    text: str


Event = str | Reasoning | CallStart | Arguments | CallEnd
"""A piece of an answer; a string is text beside the thoughts and the calls."""


class Parser(Protocol):
    """An incremental parser of one answer's text. The events of any cutting of a text join to the same answer."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""

    def flush(self) -> list[Event]:
        """Return the rest at the answer's end."""


class PlainText(Parser):
    """Leaves all of an answer text."""

    def feed(self, text: str) -> list[Event]:
        return [text] if text else []

    def flush(self) -> list[Event]:
        return []


_PIECE = 1024  # characters


def pieces(text: str) -> Sequence[str]:
    """Cut a long text, for parsers whose steps cost as much as the text that they hold is long."""
    if len(text) <= _PIECE:
        return (text,) if text else ()
    return [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
