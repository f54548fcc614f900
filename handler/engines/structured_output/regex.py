"""Converts regular expressions to xgrammar's EBNF, for whole responses and for the contents of JSON strings.

GenAI's xgrammar has a converter, but it misreads character classes with Latin-1 letters (`characters.py`), takes `\\A`
and `\\Z` as letters, ignores anchors within an expression, and writes quotes and line breaks into JSON strings without
escaping them. The syntax is what ECMAScript and Python have in common, with the character classes of ECMAScript.
An expression must match the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from handler.engines.structured_output.characters import (
    LAST,
    LAST_EXCLUDED,
    Range,
    character_class,
    choice_of,
    complement,
    either,
    joined,
    literal,
    without,
)

_MAX_DEPTH = 64  # of nested groups
_MAX_REPETITIONS = 1 << 20


@dataclass(frozen=True)
class _Characters:
    """One character of a set. `listed` contains those that the expression names one by one."""

    ranges: Sequence[Range]
    listed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Anchor:
    at_start: bool


@dataclass(frozen=True)
class _Sequence:
    parts: Sequence[_Node]


@dataclass(frozen=True)
class _Choice:
    branches: Sequence[_Node]


@dataclass(frozen=True)
class _Repetition:
    part: _Node
    minimum: int
    maximum: int | None


_Node = _Characters | _Anchor | _Sequence | _Choice | _Repetition


def regex_grammar(expression: str, *, in_json: bool = False) -> str:
    """Convert a regular expression to an EBNF element.

    Args:
        in_json: whether the text is the content of a JSON string. Quotes, backslashes and control characters are then
            escaped if the expression names them. If they are only part of a range, or of a class such as `.`, they are
            not allowed.

    Raises:
        ValueError: the expression is invalid, or contains an assertion, a backreference or a flag.
    """
    node = _Parser(expression).parse()
    _check_anchors(node, is_first=True, is_last=True)
    return _Writer(in_json).element(node)


def is_written_unescaped(expression: str) -> bool:
    """Return whether an expression allows characters that a JSON string must not contain unescaped.

    Raises:
        ValueError: the expression is not supported, see `regex_grammar`.
    """
    waiting = [_Parser(expression).parse()]
    while waiting:
        match waiting.pop():
            case _Characters() as characters:
                if without(characters.ranges, _ESCAPED_IN_JSON) != joined(characters.ranges):
                    return True
            case _Sequence(parts) | _Choice(parts):
                waiting += parts
            case _Repetition(part):
                waiting.append(part)
    return False


# -- reading -----------------------------------------------------------------------------------------------------------


_DIGIT = [(0x30, 0x39)]
_WORD = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE = [
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_CATEGORIES: Mapping[str, Sequence[Range]] = {
    "d": _DIGIT, "D": complement(_DIGIT), "w": _WORD, "W": complement(_WORD), "s": _SPACE, "S": complement(_SPACE),
}  # fmt: skip
_ANY = complement([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])

_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
_CODE = re.compile(
    r"x(?P<x>[0-9a-fA-F]{2})|u\{(?P<braces>[0-9a-fA-F]{1,6})\}|u(?P<high>[dD][89abAB][0-9a-fA-F]{2})"
    r"\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<wide>[0-9a-fA-F]{8})|c(?P<control>[a-zA-Z])"
    r"|(?P<nul>0)(?![0-9])"
)
_COUNTS = re.compile(r"\{([0-9]+)(,?)([0-9]*)\}")
_GROUP_NAME = re.compile(r"\?P?<[^\W\d]\w*>")
_NO_GROUPS = {
    "?=": "Lookahead", "?!": "Lookahead", "?<=": "Lookbehind", "?<!": "Lookbehind", "?P=": "Backreference",
    "?>": "Atomic group", "?(": "Conditional group",
}  # fmt: skip
_NO_ESCAPES = {
    **dict.fromkeys("123456789k", "Backreference"),
    **dict.fromkeys("pP", "Unicode character class"),
    **dict.fromkeys("bB", "Word boundary"),
}


class _Parser:
    def __init__(self, expression: str) -> None:
        self._text = expression
        self._at = 0
        self._depth = 0

    def parse(self) -> _Node:
        if any("\ud800" <= character <= "\udfff" for character in self._text):
            raise self._error("half of a surrogate pair")
        node = self._choice()
        if self._at < len(self._text):
            raise self._error("a bracket is closed that is not open")
        return node

    def _error(self, words: str) -> ValueError:
        return ValueError(f"regular expression: {words} (at character {self._at + 1})")

    def _unsupported(self, feature: str) -> ValueError:
        return self._error(f"{feature} is not supported")

    def _next(self, text: str) -> bool:
        """Skip `text` and return True if it comes next."""
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _take(self) -> str:
        if self._at == len(self._text):
            raise self._error("it is not complete")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self) -> _Node:
        branches = [self._sequence()]
        while self._next("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _Choice(branches)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else _Sequence(parts)

    def _atom(self) -> _Node:
        character = self._take()
        match character:
            case "^" | "$":
                return _Anchor(character == "^")
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return _Characters(_ANY)
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise self._error(f"there is nothing to repeat before {character!r}")
        return _single(ord(character))

    def _group(self) -> _Node:
        if self._text.startswith("?", self._at) and not self._next("?:") and self._match(_GROUP_NAME) is None:
            start = self._text[self._at : self._at + 3]
            features = (feature for prefix, feature in _NO_GROUPS.items() if start.startswith(prefix))
            raise self._unsupported(next(features, "Group modifier flag"))
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} nested groups")
        node = self._choice()
        self._depth -= 1
        if not self._next(")"):
            raise self._error("a bracket is not closed")
        return node

    def _escape(self) -> _Node:
        if self._next("A"):
            return _Anchor(at_start=True)
        if self._next("Z") or self._next("z"):
            return _Anchor(at_start=False)
        return self._escaped(_NO_ESCAPES)

    def _escaped(self, unsupported: Mapping[str, str]) -> _Characters:
        """Read the characters that an escape stands for, after its backslash."""
        if (match := self._match(_CODE)) is not None:
            return _single(self._code(match))
        character = self._take()
        if character in _CATEGORIES:
            return _Characters(_CATEGORIES[character])
        if character in _CONTROLS:
            return _single(_CONTROLS[character])
        if character in unsupported:
            raise self._unsupported(unsupported[character])
        if character.isascii() and character.isalnum():
            raise self._unsupported(f"the escape \\{character}")
        return _single(ord(character))

    def _code(self, match: re.Match[str]) -> int:
        if match["nul"]:
            return 0
        if match["control"]:
            return ord(match["control"]) % 32
        if match["high"]:
            return 0x10000 + ((int(match["high"], 16) - 0xD800) << 10) + int(match["low"], 16) - 0xDC00
        code = int(match["x"] or match["braces"] or match["u"] or match["wide"], 16)
        if code > LAST or 0xD800 <= code < 0xE000:
            raise self._error("an escape of a character that does not exist")
        return code

    def _class(self) -> _Node:
        is_negated = self._next("^")
        ranges: list[Range] = []
        listed = set[int]()
        is_first = True
        while is_first or not self._next("]"):
            is_first = False
            members = self._member()
            start = min(members.listed, default=None)
            if start is not None and self._is_range():
                self._at += 1
                end = min(self._member().listed, default=-1)
                if end < start:
                    raise self._error("a range in a class whose end is not after its beginning")
                ranges.append((start, end))
            else:
                ranges += members.ranges
                listed |= members.listed
        if is_negated:
            ranges, listed = complement(ranges), set()
        if not ranges:
            raise self._error("a class that contains no character")
        return _Characters(joined(ranges), frozenset(listed))

    def _is_range(self) -> bool:
        """Return whether a minus and the end of a range follow."""
        return self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at)

    def _member(self) -> _Characters:
        character = self._take()
        if character != "\\":
            return _single(ord(character))
        if self._next("b"):
            return _single(0x08)
        return self._escaped(_NO_ESCAPES)

    def _repeated(self, part: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return part
        if isinstance(part, _Anchor):
            raise self._unsupported("a repetition of an anchor")
        self._next("?")  # lazy repetitions match the same texts
        if self._at < len(self._text) and (self._text[self._at] in "*+?" or _COUNTS.match(self._text, self._at)):
            raise self._unsupported("a repetition of a repetition")
        return _Repetition(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for quantifier, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._next(quantifier):
                return bounds
        match = self._match(_COUNTS)
        if match is None:
            return None
        minimum = min(int(match[1][:9]), _MAX_REPETITIONS)
        maximum: int | None = minimum
        if match[2]:
            maximum = min(int(match[3][:9]), _MAX_REPETITIONS) if match[3] else None
        if maximum is not None and maximum < minimum:
            raise self._error("a repetition whose maximum is less than its minimum")
        return minimum, maximum


def _single(code: int) -> _Characters:
    return _Characters([(code, code)], frozenset((code,)))


# -- anchors -----------------------------------------------------------------------------------------------------------


def _check_anchors(node: _Node, *, is_first: bool, is_last: bool) -> None:
    """Raise ValueError for an anchor that is neither at the beginning nor at the end, where it would match nothing.

    Args:
        is_first: whether no character precedes the node.
        is_last: whether no character follows the node.
    """
    match node:
        case _Anchor():
            if not (is_first if node.at_start else is_last):
                raise ValueError("regular expression: an anchor within an expression is not supported")
        case _Choice():
            for branch in node.branches:
                _check_anchors(branch, is_first=is_first, is_last=is_last)
        case _Repetition():
            is_once = node.maximum == 1
            _check_anchors(node.part, is_first=is_first and is_once, is_last=is_last and is_once)
        case _Sequence():
            _check_sequence(node, is_first, is_last)


def _check_sequence(sequence: _Sequence, is_first: bool, is_last: bool) -> None:
    filled = [number for number, part in enumerate(sequence.parts) if not isinstance(part, _Anchor)]
    first, last = (filled[0], filled[-1]) if filled else (len(sequence.parts), -1)
    for number, part in enumerate(sequence.parts):
        _check_anchors(part, is_first=is_first and number <= first, is_last=is_last and number >= last)


# -- writing -----------------------------------------------------------------------------------------------------------


_ESCAPED_IN_JSON = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]


class _Writer:
    def __init__(self, in_json: bool) -> None:
        self._in_json = in_json

    def element(self, node: _Node) -> str:
        """Return an EBNF element that can be repeated or combined with others."""
        match node:
            case _Anchor():
                return '""'
            case _Characters():
                return self._characters(node)
            case _Repetition():
                return self._repetition(node)
            case _Choice():
                return self._choice(node)
            case _Sequence():
                return f"({' '.join(self._parts(node))})" if node.parts else '""'

    def _parts(self, sequence: _Sequence) -> Iterable[str]:
        """Yield the elements of a sequence. Adjacent single characters share a literal."""
        run = ""
        for part in sequence.parts:
            if (text := _text(part)) is not None:
                run += text
                continue
            if run:
                yield self._literal(run)
            run = ""
            yield self.element(part)
        if run or not sequence.parts:
            yield self._literal(run)

    def _choice(self, choice: _Choice) -> str:
        texts = [self._only_text(branch) for branch in choice.branches]
        if None not in texts:
            return choice_of(self._written(str(text)) for text in texts)
        return either(map(self.element, choice.branches))

    def _only_text(self, node: _Node) -> str | None:
        parts = [_text(part) for part in (node.parts if isinstance(node, _Sequence) else [node])]
        return None if None in parts else "".join(map(str, parts))

    def _repetition(self, repetition: _Repetition) -> str:
        element = self.element(repetition.part)
        match repetition.minimum, repetition.maximum:
            case 0, None:
                return f"({element}*)"
            case 1, None:
                return f"({element}+)"
            case 0, 1:
                return f"({element}?)"
            case _, 0:
                return '""'  # xgrammar reads {0,0} as an unlimited repetition
            case minimum, maximum:
                return f"({element}{{{minimum},{'' if maximum is None else maximum}}})"

    def _literal(self, text: str) -> str:
        return literal(self._written(text))

    def _written(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)[1:-1] if self._in_json else text

    def _characters(self, characters: _Characters) -> str:
        if not self._in_json:
            return _class_or_literal(characters.ranges)
        plain, single = _plain_and_single(characters)
        escaped = [self._literal(chr(code)) for code in single]
        elements = [*([_class_or_literal(plain)] if plain else []), *escaped]
        return elements[0] if len(elements) == 1 else either(elements)


def _class_or_literal(ranges: Sequence[Range]) -> str:
    [(first, last), *following] = ranges
    return literal(chr(first)) if first == last and not following else character_class(ranges)


def _text(node: _Node) -> str | None:
    """Return the only text that a node matches if it is a single character or an anchor, and otherwise None."""
    if isinstance(node, _Anchor):
        return ""
    if isinstance(node, _Characters) and len(node.listed) == 1 and node.ranges == [(min(node.listed),) * 2]:
        return chr(min(node.listed))
    return None


# -- rewriting ---------------------------------------------------------------------------------------------------------


def rewritten(expression: str, *, in_json: bool = False) -> str:
    """Return an expression with the same meaning that contains nothing that xgrammar's own converter misreads.

    Args:
        in_json: as in `regex_grammar`.

    Raises:
        ValueError: the expression is not supported, see `regex_grammar`.
    """
    node = _Parser(expression).parse()
    _check_anchors(node, is_first=True, is_last=True)
    return _Rewriter(in_json).expression(node)


class _Rewriter:
    def __init__(self, in_json: bool) -> None:
        self._in_json = in_json

    def expression(self, node: _Node) -> str:
        match node:
            case _Anchor():
                return ""
            case _Characters():
                return self._characters(node)
            case _Repetition(part, minimum, maximum):
                element = self.expression(part)
                return (
                    f"(?:{element}){{{minimum},{'' if maximum is None else maximum}}}"
                    if element and maximum != 0
                    else ""
                )
            case _Choice(branches):
                return self._choice([self.expression(branch) for branch in branches])
            case _Sequence(parts):
                return "".join(map(self.expression, parts))

    def _choice(self, branches: Sequence[str]) -> str:
        filled = "|".join(branch for branch in branches if branch)
        return f"(?:{filled})" + "?" * (not all(branches)) if filled else ""

    def _characters(self, characters: _Characters) -> str:
        plain, single = _plain_and_single(characters) if self._in_json else (characters.ranges, ())
        texts = [json.dumps(chr(code))[1:-1] for code in single]
        escaped = ["".join(_regex_character(ord(character)) for character in text) for text in texts]
        return self._choice([*([_regex_class(plain)] if plain else []), *escaped])


def _plain_and_single(characters: _Characters) -> tuple[Sequence[Range], Sequence[int]]:
    """Return the ranges of characters that may be unescaped in a JSON string, and the characters to escape."""
    plain = without(characters.ranges, _ESCAPED_IN_JSON)
    single = {code for code in characters.listed if any(first <= code <= last for first, last in _ESCAPED_IN_JSON)}
    if not plain and not single:
        single = {code for first, last in characters.ranges for code in range(first, last + 1)}
    return plain, sorted(single)


def _regex_class(ranges: Sequence[Range]) -> str:
    excluded = complement(ranges)
    is_negated = bool(excluded) and excluded[-1][1] <= LAST_EXCLUDED
    listed = "".join(
        _regex_character(first) + (f"-{_regex_character(last)}" if last > first else "")
        for first, last in (excluded if is_negated else ranges)
    )
    return f"[{'^' * is_negated}{listed}]"


def _regex_character(code: int) -> str:
    character = chr(code)
    if (character.isascii() and character.isalnum()) or code > 0xFFFF:
        return character
    return f"\\u{code:04x}"
