"""White space at the ends of an answer's text and reasoning, removed while they stream (`option.trim_answers`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from handler.protocols.assistant.events import Event, Parser, Reasoning


class PlainText(Parser):
    """Reads an answer that is nothing but text."""

    def feed(self, text: str) -> list[Event]:
        return [text] if text else []

    def flush(self) -> list[Event]:
        return []


@dataclass(slots=True)
class _Ends:
    """One text: `space` is white space that is shown only if more of the text follows."""

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
    """Trims one answer. Its text is one, whatever stands in between, and so is its reasoning."""

    __slots__ = ("_reasoning", "_text")

    def __init__(self) -> None:
        self._text = _Ends()
        self._reasoning = _Ends()

    def read(self, events: Iterable[Event]) -> list[Event]:
        """Return the events without the white space that begins or may end a text."""
        shown: list[Event] = []
        for event in events:
            if isinstance(event, str):
                shown += [text] if (text := self._text.trim(event)) else []
            elif isinstance(event, Reasoning):
                shown += [Reasoning(text)] if (text := self._reasoning.trim(event.text)) else []
            else:
                shown.append(event)
        return shown
