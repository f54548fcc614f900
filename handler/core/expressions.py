"""Reads the structure of regular expressions: alternatives, series, groups and repetitions.

Which characters an expression matches is a matter of its dialect, such as Python's or ECMAScript's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

_Node = TypeVar("_Node")


@dataclass(frozen=True)
class Series:
    """One part after the other."""

    parts: Sequence[Any]


@dataclass(frozen=True)
class Alternatives:
    """One of several branches."""

    branches: Sequence[Any]


@dataclass(frozen=True)
class Repeat:
    """Repetitions of a part; without a limit if the maximum is None."""

    part: Any
    minimum: int
    maximum: int | None
    is_lazy: bool = False


def series(parts: Sequence[_Node]) -> _Node | Series:
    return parts[0] if len(parts) == 1 else Series(parts)


def choice(branches: Sequence[_Node]) -> _Node | Alternatives:
    return branches[0] if len(branches) == 1 else Alternatives(branches)


_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class ExpressionReader:
    """A reader of one expression. The class of a dialect defines `atom` and `error`.

    Attributes:
        quantifier: matches a repetition; its groups are the minimum, a comma and the maximum.
        max_depth: limit of nested groups.
        max_repetitions: a greater number of repetitions is taken for this one.
        anchors: types of nodes that cannot be repeated.
    """

    quantifier = re.compile(r"[*+?]|\{([0-9]+)(,?)([0-9]*)\}")
    max_depth = 64
    max_repetitions = 1 << 20
    anchors: tuple[type, ...] = ()

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._depth = 0

    def read(self) -> Any:
        """Return the tree of the expression.

        Raises:
            ValueError: the expression is invalid.
        """
        node = self._choice()
        if self.at < len(self.text):
            self.error("a bracket is closed that is not open")
        return node

    def error(self, words: str) -> NoReturn:
        """Raise ValueError for the character that is read next."""
        raise NotImplementedError

    def atom(self, character: str) -> Any:
        """Return the node of a character that has just been read, and of those that belong to it."""
        raise NotImplementedError

    def next(self, text: str) -> bool:
        """Skip `text` and return True if it comes next."""
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Skip the text that a pattern matches."""
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def take(self) -> str:
        """Return the next character."""
        if self.at == len(self.text):
            self.error("it is not complete")
        self.at += 1
        return self.text[self.at - 1]

    def group(self) -> Any:
        """Return the node of a group, up to its end. Its beginning has been read."""
        self._depth += 1
        if self._depth > self.max_depth:
            self.error(f"more than {self.max_depth} nested groups")
        node = self._choice()
        self._depth -= 1
        if not self.next(")"):
            self.error("a bracket is not closed")
        return node

    def _choice(self) -> Any:
        branches = [self._series()]
        while self.next("|"):
            branches.append(self._series())
        return choice(branches)

    def _series(self) -> Any:
        parts = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            character = self.take()
            if character in _SIGNS:
                self.error(f"there is nothing to repeat before {character!r}")
            parts.append(self._repeated(self.atom(character)))
        return series(parts)

    def _repeated(self, part: Any) -> Any:
        match = self.match(self.quantifier)
        if match is None:
            return part
        minimum, maximum = _SIGNS.get(match[0]) or (self._count(match[1]), None)
        if match[0] not in _SIGNS and (match[3] or not match[2]):
            maximum = self._count(match[3] or match[1])
        if maximum is not None and maximum < minimum:
            self.error("a repetition whose maximum is less than its minimum")
        if isinstance(part, self.anchors):
            self.error("a repetition of an anchor is not supported")
        is_lazy = self.next("?")
        if self.quantifier.match(self.text, self.at):
            self.error("a repetition of a repetition is not supported")
        return Repeat(part, minimum, maximum, is_lazy)

    def _count(self, digits: str) -> int:
        return min(int(digits.lstrip("0")[:9] or 0), self.max_repetitions)
