"""Loads a user-defined tool call parser: a file with `make_parser`, `MARKS` and `NOTATION` (docs/models.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType

from handler.core.errors import ConfigError
from handler.plugins.functions import import_file
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Event, EventParser
from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.parsing import Format, Tool

log = logging.getLogger("handler.formatters")

_EVENTS = (str, CallStart, Arguments, CallEnd)


class UsersParser:
    """A user-defined parser for one response. If it fails, the error is logged, and the rest is plain text."""

    def __init__(self, make: Callable[[Sequence[Tool]], EventParser], tools: Sequence[Tool]) -> None:
        self._parser: EventParser | None = None
        self._events("make_parser", lambda: self._start(make, tools))

    def feed(self, text: str) -> list[Event]:
        parser = self._parser
        calls = None if parser is None else self._events("feed", lambda: parser.feed(text))
        return [text] if calls is None else calls

    def flush(self) -> list[Event]:
        parser = self._parser
        return [] if parser is None else self._events("flush", parser.flush) or []

    def _start(self, make: Callable[[Sequence[Tool]], EventParser], tools: Sequence[Tool]) -> list[Event]:
        parser = make(tools)
        if not (callable(parser.feed) and callable(parser.flush)):
            raise TypeError("make_parser must return an object with the methods feed and flush")
        self._parser = parser
        return []

    def _events(self, name: str, call: Callable[[], list[Event]]) -> list[Event] | None:
        """Call the user code, and return its events, or None if it fails."""
        try:
            events = list(call())
            wrong = next((event for event in events if not isinstance(event, _EVENTS)), None)
            if wrong is None:
                return events
            log.error("option.tool_parser_plugin: %s returned a %s, which is not an event", name, type(wrong).__name__)
        except Exception:
            log.exception("option.tool_parser_plugin: %s failed; the rest of the response is plain text", name)
        self._parser = None
        return None


def find_tool_parser(params: str, homes: Iterable[Path | None]) -> Path:
    """Find the file of option.tool_parser_plugin in one of the directories.

    Raises:
        ConfigError: if the file does not exist.
    """
    path = next((home / params for home in homes if home is not None and (home / params).is_file()), None)
    if path is None:
        raise ConfigError(f"option.tool_parser_plugin={params[:200]}: there is no such file")
    return path


def load_tool_format(value: str, homes: Iterable[Path | None]) -> Format:
    """Load a user-defined tool call format from a file in one of the directories.

    Raises:
        ConfigError: if the file does not exist, cannot be imported, or does not define a parser.
    """
    module = import_file(find_tool_parser(value, homes))
    try:
        return _format(module)
    except ValueError as error:
        raise ConfigError(f"option.tool_parser_plugin={value[:200]}: {error}") from None


def _format(module: ModuleType) -> Format:
    make, markers = getattr(module, "make_parser", None), getattr(module, "MARKS", ())
    if not callable(make):
        raise ValueError("the file must define a function make_parser(tools)")
    if isinstance(markers, str) or not all(isinstance(marker, str) and marker for marker in markers):
        raise ValueError("MARKS must be a list of strings")
    notation = getattr(module, "NOTATION", None)
    if not isinstance(notation, Notation | None):
        raise ValueError("NOTATION must be a Notation")
    notations = {} if notation is None else {"": notation}
    return Format("tool_parser_plugin", lambda tools: UsersParser(make, tools), tuple(markers), notations=notations)
