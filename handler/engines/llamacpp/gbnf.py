"""Reads grammars in llama.cpp's notation, GBNF, into the same rules as llama.cpp (`src/llama-grammar.cpp`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_MAX_CHARACTERS = 1 << 18
_MAX_NESTED = 200
_MAX_ELEMENTS = 1 << 17  # elements of all rules, after the repetitions are written out
_MAX_REPETITIONS = 2000  # llama.cpp's limit of the rules that a repetition adds
_LAST = 0x10FFFF

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9-]+")
_CHARACTER = re.compile(
    r'\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([trn\\"\[\]-]))|([^\\])', re.DOTALL
)
_COUNTS = re.compile(r"\{[ \t\r\n]*([0-9]+)[ \t\r\n]*(?:(,)[ \t\r\n]*([0-9]*)[ \t\r\n]*)?\}")
_TOKEN = re.compile(r"!?<[^>]*>")
_CONTROLS = {"t": "\t", "r": "\r", "n": "\n"}


class Characters(NamedTuple):
    """One character of a set, as ranges of code points."""

    ranges: Sequence[tuple[int, int]]
    is_negated: bool = False

    def matches(self, code: int) -> bool:
        return any(first <= code <= last for first, last in self.ranges) != self.is_negated


ANY = Characters(((0, _LAST),))

Element = Characters | int
"""A character, or the number of a rule."""


class Rules:
    """The rules of a grammar. Those that llama.cpp makes from groups and repetitions are included.

    The elements of all alternatives are in one list, in which None follows the last element of an alternative.

    Attributes:
        elements: the elements of all rules.
        starts: the index of each alternative's first element, by the number of the rule.
        root: number of the rule at which a response begins.
    """

    def __init__(self, rules: Sequence[Sequence[Sequence[Element]]], root: int) -> None:
        self.elements: list[Element | None] = []
        self.starts: list[list[int]] = []
        self.root = root
        for alternatives in rules:
            self.starts.append([])
            for alternative in alternatives:
                self.starts[-1].append(len(self.elements))
                self.elements += [*alternative, None]


def read(text: str) -> Rules:
    """Read a grammar.

    Raises:
        ValueError: the grammar is too large, is nested too deeply, or has a syntax error or an undefined rule.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"a grammar for llama-server must not exceed {_MAX_CHARACTERS:,} characters")
    if "\0" in text:
        raise ValueError("a grammar for llama-server must not contain NUL characters, because llama.cpp ends there")
    return _Reader(text).rules()


class _Symbol(NamedTuple):
    """The last symbol of a sequence, which a repetition repeats."""

    start: int  # index of its first element
    num_rules: int  # rules that llama.cpp counts for it


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._numbers: dict[str, int] = {}
        self._rules: list[list[list[Element]] | None] = []
        self._num_elements = 0
        self._depth = 0

    def rules(self) -> Rules:
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            self._rule()
            self._skip(_SPACE_AND_LINES)
        missing = [name for name, number in self._numbers.items() if self._rules[number] is None]
        if missing or "root" not in self._numbers:
            raise ValueError(f"the grammar does not define the rule {(*missing, 'root')[0]!r}")
        return Rules([rule or [] for rule in self._rules], self._numbers["root"])

    def _error(self, expected: str) -> ValueError:
        actual = repr(self._text[self._at : self._at + 20]) if self._at < len(self._text) else "the end"
        return ValueError(f"the grammar has {actual} where llama.cpp expects {expected}")

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match is not None else self._at

    def _take(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._error(expected)
        self._at = match.end()
        return match

    def _begins(self, character: str) -> bool:
        return self._text.startswith(character, self._at)

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = self._new_rule()
        return self._numbers[name]

    def _new_rule(self) -> int:
        self._rules.append(None)
        return len(self._rules) - 1

    def _add(self, number: int, alternatives: list[list[Element]]) -> None:
        self._rules[number] = alternatives
        self._count(sum(len(alternative) + 1 for alternative in alternatives))

    def _count(self, num_elements: int) -> None:
        self._num_elements += num_elements
        if self._num_elements > _MAX_ELEMENTS:
            raise ValueError("the grammar becomes too large when its repetitions are written out")

    def _rule(self) -> None:
        number = self._number(self._take(_NAME, "a rule's name")[0])
        self._skip(_SPACE)
        self._take(re.compile("::="), "'::='")
        self._skip(_SPACE_AND_LINES)
        self._add(number, self._alternatives(_SPACE))
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            raise self._error("the end of a line")

    def _alternatives(self, space: re.Pattern[str]) -> list[list[Element]]:
        alternatives = [self._sequence(space)]
        while self._begins("|"):
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            alternatives.append(self._sequence(space))
        return alternatives

    def _sequence(self, space: re.Pattern[str]) -> list[Element]:
        elements: list[Element] = []
        symbol = _Symbol(0, 1)
        while (character := self._text[self._at : self._at + 1]) and character not in "|)\r\n":
            if character in "*+?{":
                minimum, maximum = self._counts(character)
                symbol = self._repeat(elements, symbol, minimum, maximum)
            else:
                symbol = self._symbol(elements, character)
            self._skip(space)
        return elements

    def _symbol(self, elements: list[Element], character: str) -> _Symbol:
        """Read a symbol that is not a repetition, and append its elements."""
        start, before = len(elements), len(self._rules)
        if character == '"':
            elements += [Characters(((code, code),)) for code in self._literal()]
        elif character == "[":
            elements.append(self._class())
        elif character == ".":
            self._at += 1
            elements.append(ANY)
        elif character == "(":
            elements.append(self._group())
            return _Symbol(start, len(self._rules) - before)
        elif character in "<!":
            self._take(_TOKEN, "a token")
            raise ValueError("a grammar for llama-server must not contain tokens in angle brackets, such as <think>")
        else:
            elements.append(self._number(self._take(_NAME, "an element")[0]))
        return _Symbol(start, 1)

    def _group(self) -> int:
        self._depth += 1
        if self._depth > _MAX_NESTED:  # llama.cpp reads groups by recursion, and 20,000 brackets crash it
            raise ValueError(f"a grammar for llama-server must not have more than {_MAX_NESTED} nested groups")
        self._at += 1
        self._skip(_SPACE_AND_LINES)
        number = self._new_rule()
        self._add(number, self._alternatives(_SPACE_AND_LINES))
        if not self._begins(")"):
            raise self._error("')'")
        self._at += 1
        self._depth -= 1
        return number

    def _character(self) -> int:
        match = self._take(_CHARACTER, "a character")
        digits = match[1] or match[2] or match[3]
        return int(digits, 16) if digits else ord(_CONTROLS.get(match[4], match[4]) if match[4] else match[5])

    def _literal(self) -> list[int]:
        self._at += 1
        codes = []
        while not self._begins('"'):
            codes.append(self._character())
        self._at += 1
        self._count(len(codes))
        return codes

    def _class(self) -> Characters:
        self._at += 1
        is_negated = self._begins("^")
        self._at += is_negated
        ranges = []
        while not self._begins("]"):
            first = last = self._character()
            if self._begins("-") and not self._text.startswith("]", self._at + 1):
                self._at += 1
                last = self._character()
            ranges.append((first, last))
        self._at += 1
        if not ranges:
            raise ValueError("the grammar has an empty class of characters: []")
        return Characters(tuple(ranges), is_negated)

    def _counts(self, character: str) -> tuple[int, int | None]:
        """Read a repetition, and return its minimum and maximum."""
        if character != "{":
            self._at += 1
            return int(character == "+"), 1 if character == "?" else None
        match = self._take(_COUNTS, "a number of repetitions")
        minimum = int(match[1][:9])
        maximum = minimum if match[2] is None else int(match[3][:9]) if match[3] else None
        if minimum > _MAX_REPETITIONS:
            raise ValueError(
                f"the grammar repeats an element more than {_MAX_REPETITIONS} times, which llama.cpp does not allow"
            )
        if maximum is not None and maximum < minimum:
            raise ValueError("the grammar has a repetition whose maximum is less than its minimum")
        return minimum, None if maximum is not None and maximum > _MAX_REPETITIONS else maximum

    def _repeat(self, elements: list[Element], symbol: _Symbol, minimum: int, maximum: int | None) -> _Symbol:
        """Replace the last symbol by its repetition, with the rules that llama.cpp makes for it."""
        repeated = elements[symbol.start :]
        if not repeated:
            raise self._error("something to repeat before it")
        num_rules = symbol.num_rules * ((maximum or minimum) or 1)
        if num_rules > _MAX_REPETITIONS:
            raise ValueError(
                f"the grammar has a repetition of more than {_MAX_REPETITIONS} rules, which llama.cpp does not allow"
            )
        self._count(len(repeated) * minimum)
        elements[symbol.start :] = repeated * minimum
        following: list[Element] = []
        for _ in range(1 if maximum is None else maximum - minimum):
            number = self._new_rule()
            self._add(number, [[*repeated, *([number] if maximum is None else following)], []])
            following = [number]
        elements += following
        return _Symbol(symbol.start, num_rules)
