"""White space at the ends of texts, removed while they stream; those of a whole answer by `option.trim_answers`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from handler.protocols.assistant.events import Event, Reasoning


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
    """Trims one answer. Its text is one, whatever stands in between, and so is its reasoning."""

    __slots__ = ("_reasoning", "_text")

    def __init__(self) -> None:
        self._text = Ends()
        self._reasoning = Ends()

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
