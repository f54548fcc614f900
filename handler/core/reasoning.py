"""Detects the end of the reasoning at the beginning of a response."""

from __future__ import annotations

from handler.core.values import Thoughts


class AnswerStart:
    """Finds the end of the reasoning at the beginning of a response. The reasoning itself is not parsed.

    Attributes:
        is_open: whether the reasoning has begun.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self.is_open = thoughts.is_open
        self._held = ""
        self._space: list[str] = []  # before the first word

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the new text within the reasoning, and the text after the reasoning (None while it may continue)."""
        self._held += text
        if not self.is_open:
            start = self._held.lstrip()
            self._space.append(self._held[: len(self._held) - len(start)])
            self._held = start
            if not start.startswith(self._thoughts.begin):
                undecided = any(marker.startswith(start) for marker in self._thoughts.begin)
                return "", None if undecided else self.flush()
            self.is_open = True
            text = self._held = "".join([*self._space, start])
        ends = [at + len(marker) for marker in self._thoughts.end if (at := self._held.find(marker)) >= 0]
        if not ends:
            self._held = self._held[1 - max(map(len, self._thoughts.end)) :]
            return text, None
        cut = len(text) - len(self._held) + min(ends)
        return text[: max(cut, 0)], text[max(cut, 0) :]

    def flush(self) -> str:
        """Return the text that was held back."""
        return "" if self.is_open else "".join([*self._space, self._held])
