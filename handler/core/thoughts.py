"""The first thought of a reasoning model's answer: its marks, and where it ends in the text."""

from __future__ import annotations

from typing import NamedTuple


class Thoughts(NamedTuple):
    """A reasoning model's first thought: its marks, and the state in which the prompt leaves it.

    Attributes:
        is_open: the answer begins within it.
        calls: those marks in `end` that begin a call.
        closing: ids of the mark that ends a thought in the model's place; empty where none does.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    is_open: bool
    calls: tuple[str, ...] = ()
    closing: tuple[int, ...] = ()


class AnswerStart:
    """Finds the end of an answer's first thought, in which nothing is looked for.

    Attributes:
        is_open: the thought has begun.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self.is_open = thoughts.is_open
        self._held = ""
        self._space: list[str] = []  # before the first word

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text up to the thought's end, and what follows it; None while it has not ended."""
        self._held += text
        if not self.is_open:
            start = self._held.lstrip()
            self._space.append(self._held[: len(self._held) - len(start)])
            self._held = start
            if not start.startswith(self._thoughts.begin):
                undecided = any(mark.startswith(start) for mark in self._thoughts.begin)
                return "", None if undecided else self.flush()
            self.is_open = True
            text = self._held = "".join([*self._space, start])
        ends = [at + len(mark) for mark in self._thoughts.end if (at := self._held.find(mark)) >= 0]
        if not ends:
            self._held = self._held[1 - max(map(len, self._thoughts.end)) :]
            return text, None
        cut = len(text) - len(self._held) + min(ends)
        return text[: max(cut, 0)], text[max(cut, 0) :]

    def flush(self) -> str:
        """Return the text that was held back."""
        return "" if self.is_open else "".join([*self._space, self._held])
