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


Event = str | CallStart | Arguments
"""A piece of an answer; a string is text beside the calls."""


class Parser(Protocol):
    """An incremental parser of one answer's text. The events of any cutting of a text join to the same answer."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""

    def flush(self) -> list[Event]:
        """Return the rest at the answer's end."""
