"""The events of an assistant's answer, and the protocol of their parsers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol


class CallStart(NamedTuple):
    """The start of a call; `number` counts calls from 0."""

    number: int
    name: str


class Arguments(NamedTuple):
    """A piece of the JSON text of a call's arguments."""

    number: int
    text: str


class Ending(Enum):
    """The end of a call.

    WHOLE: with its arguments complete. OPEN: cut off by the answer's end; only closing brackets of its arguments are
    missing. BROKEN: otherwise.
    """

    WHOLE = 0
    OPEN = 1
    BROKEN = 2


class CallEnd(NamedTuple):
    """The end of a call. It comes once per call, at the latest at the answer's end.

    A parser says how the call seems to end; `AnswerReader` says WHOLE or BROKEN, after it has looked at the arguments.
    """

    number: int
    ending: Ending = Ending.WHOLE

    @property
    def whole(self) -> bool:
        return self.ending is Ending.WHOLE


class Reasoning(NamedTuple):
    """A piece of the model's thoughts; without the marks around it."""

    text: str


Event = str | Reasoning | CallStart | Arguments | CallEnd
"""A piece of an answer; a string is text outside of reasoning and calls."""


class Parser(Protocol):
    """An incremental parser of one answer's text. However a text is split into pieces, its events form the same
    answer.
    """

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""

    def flush(self) -> list[Event]:
        """Return the rest at the answer's end."""


class PlainText(Parser):
    """Parses nothing: the whole answer is text."""

    def feed(self, text: str) -> list[Event]:
        return [text] if text else []

    def flush(self) -> list[Event]:
        return []


_PIECE = 1024  # characters


def pieces(text: str) -> Sequence[str]:
    """Split a long text, for parsers whose steps cost time proportional to the text that they keep."""
    if len(text) <= _PIECE:
        return (text,) if text else ()
    return [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]


# -- white space at the ends of texts ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Ends:
    """The ends of one text.

    Attributes:
        begun: the text has begun: space at its beginning is part of it.
        space: white space that is shown only if more of the text follows.
    """

    begun: bool = False
    space: list[str] = field(default_factory=list)

    def trim(self, text: str) -> str:
        """Return what can be shown now; each character is looked at once."""
        if not self.begun:
            text = text.lstrip()
        shown = text.rstrip()
        rest = text[len(shown) :]
        if not shown:
            self.space += [rest] if rest else []
            return ""
        before, self.space, self.begun = "".join(self.space), [rest] if rest else [], True
        return before + shown


class Trimmed:
    """Trims one answer: all its text as one, whatever comes in between, and all its reasoning as one."""

    __slots__ = ("_reasoning", "_text")

    def __init__(self) -> None:
        self._text = Ends()
        self._reasoning = Ends()

    def read(self, events: Iterable[Event]) -> list[Event]:
        """Return the events without leading white space, and without white space that may turn out to be trailing."""
        shown: list[Event] = []
        for event in events:
            if isinstance(event, str):
                shown += [text] if (text := self._text.trim(event)) else []
            elif isinstance(event, Reasoning):
                shown += [Reasoning(text)] if (text := self._reasoning.trim(event.text)) else []
            else:
                shown.append(event)
        return shown
