"""The events of an assistant's answer, and the protocol of their parsers."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class CallStart(NamedTuple):
    """A call begins; `number` counts calls from 0."""

    number: int
    name: str


class Arguments(NamedTuple):
    """A piece of the JSON text of a call's arguments."""

    number: int
    text: str


class CallEnd(NamedTuple):
    """A call's arguments are complete. It comes once a call, at the latest at the answer's end."""

    number: int


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
