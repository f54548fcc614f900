"""Converts regular expressions to xgrammar's EBNF, for whole responses and for the contents of JSON strings.

GenAI's xgrammar has a converter, but it misreads character classes with Latin-1 letters (`characters.py`), takes `\\A`
and `\\Z` as letters, ignores anchors within an expression, and writes quotes and line breaks into JSON strings without
escaping them. The syntax is what ECMAScript and Python have in common, with the character classes of ECMAScript.
An expression must match the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from handler.core.expressions import Alternatives, ExpressionReader, Repeat, Series, choice
from handler.engines.structured_output.characters import LAST, LAST_EXCLUDED, Range, complement, joined, without
from handler.engines.structured_output.nodes import (
    Anchor,
    CharacterSet,
    Node,
    Text,
    counts,
    element,
    mapped,
    text_of,
    tree_of,
    walk,
)


def regex_grammar(expression: str, *, in_json: bool = False) -> str:
    """Convert a regular expression to an EBNF element.

    Args:
        in_json: whether the text is the content of a JSON string. Quotes, backslashes and control characters are then
            escaped if the expression names them. If they are only part of a range, or of a class such as `.`, they are
            not allowed.

    Raises:
        ValueError: the expression is invalid, or contains an assertion, a backreference or a flag.
    """
    return element(mapped(parse(expression), _escaped_in_json if in_json else _merged))


def rewritten(expression: str, *, in_json: bool = False) -> str:
    """Return an expression with the same meaning that contains nothing that xgrammar's own converter misreads.

    Args:
        in_json: as in `regex_grammar`.

    Raises:
        ValueError: the expression is not supported, see `regex_grammar`.
    """
    node = parse(expression)
    return written(mapped(node, _escaped_in_json) if in_json else node)


def is_written_unescaped(expression: str) -> bool:
    """Return whether an expression allows characters that a JSON string must not contain unescaped.

    Raises:
        ValueError: the expression is not supported, see `regex_grammar`.
    """
    nodes = walk(_read(expression))
    return any(isinstance(node, CharacterSet) and _plain(node) != joined(node.ranges) for node in nodes)


def parse(expression: str) -> Node:
    """Return the tree of a regular expression that must match the whole text.

    Raises:
        ValueError: the expression is not supported, see `regex_grammar`.
    """
    node = _read(expression)
    if _is_misplaced(node, at_start=True) or _is_misplaced(node, at_start=False):
        raise ValueError("regular expression: an anchor within an expression is not supported")
    return node


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


def _read(expression: str) -> Node:
    reader = _Reader(expression)
    if any("\ud800" <= character <= "\udfff" for character in expression):
        reader.error("half of a surrogate pair")
    node: Node = reader.read()
    return node


class _Reader(ExpressionReader):
    anchors = (Anchor,)

    def error(self, words: str) -> NoReturn:
        raise ValueError(f"regular expression: {words} (at character {self.at + 1})")

    def _unsupported(self, feature: str) -> NoReturn:
        self.error(f"{feature} is not supported")

    def atom(self, character: str) -> Any:
        match character:
            case "^" | "$":
                return Anchor(character == "^")
            case "(":
                self._check_group()
                return self.group()
            case "[":
                return self._class()
            case ".":
                return CharacterSet(_ANY)
            case "\\":
                return self._escape()
        return _single(ord(character))

    def _check_group(self) -> None:
        if self.text.startswith("?", self.at) and not self.next("?:") and self.match(_GROUP_NAME) is None:
            start = self.text[self.at : self.at + 3]
            features = (feature for prefix, feature in _NO_GROUPS.items() if start.startswith(prefix))
            self._unsupported(next(features, "Group modifier flag"))

    def _escape(self) -> Node:
        if self.next("A"):
            return Anchor(at_start=True)
        if self.next("Z") or self.next("z"):
            return Anchor(at_start=False)
        return self._escaped(_NO_ESCAPES)

    def _escaped(self, unsupported: Mapping[str, str]) -> CharacterSet:
        """Read the characters that an escape stands for, after its backslash."""
        if (match := self.match(_CODE)) is not None:
            return _single(self._code(match))
        character = self.take()
        if character in _CATEGORIES:
            return CharacterSet(_CATEGORIES[character])
        if character in _CONTROLS:
            return _single(_CONTROLS[character])
        if character in unsupported:
            self._unsupported(unsupported[character])
        if character.isascii() and character.isalnum():
            self._unsupported(f"the escape \\{character}")
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
            self.error("an escape of a character that does not exist")
        return code

    def _class(self) -> Node:
        is_negated = self.next("^")
        ranges: list[Range] = []
        listed = set[int]()
        is_first = True
        while is_first or not self.next("]"):
            is_first = False
            members = self._member()
            start = min(members.listed, default=None)
            if start is not None and self._is_range():
                self.at += 1
                end = min(self._member().listed, default=-1)
                if end < start:
                    self.error("a range in a class whose end is not after its beginning")
                ranges.append((start, end))
            else:
                ranges += members.ranges
                listed |= members.listed
        if is_negated:
            ranges, listed = complement(ranges), set()
        if not ranges:
            self.error("a class that contains no character")
        return CharacterSet(joined(ranges), frozenset(listed))

    def _is_range(self) -> bool:
        """Return whether a minus and the end of a range follow."""
        return self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at)

    def _member(self) -> CharacterSet:
        character = self.take()
        if character != "\\":
            return _single(ord(character))
        if self.next("b"):
            return _single(0x08)
        return self._escaped(_NO_ESCAPES)


def _single(code: int) -> CharacterSet:
    return CharacterSet([(code, code)], frozenset((code,)))


# -- anchors -----------------------------------------------------------------------------------------------------------


def _is_misplaced(node: Node, *, at_start: bool, is_edge: bool = True) -> bool:
    """Return whether an anchor is not at the beginning or the end, where it would match nothing.

    Args:
        at_start: whether to look for anchors of the beginning.
        is_edge: whether no character is between the node and the beginning or the end.
    """
    look = partial(_is_misplaced, at_start=at_start)
    match node:
        case Anchor():
            return node.at_start is at_start and not is_edge
        case Alternatives(branches):
            return any(look(branch, is_edge=is_edge) for branch in branches)
        case Repeat(part, _, maximum):
            return look(part, is_edge=is_edge and maximum == 1)
        case Series(parts):
            for part in parts if at_start else reversed(parts):
                if look(part, is_edge=is_edge):
                    return True
                is_edge = is_edge and isinstance(part, Anchor)
    return False


# -- writing -----------------------------------------------------------------------------------------------------------


_ESCAPED_IN_JSON = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]


def _plain(characters: CharacterSet) -> Sequence[Range]:
    """Return the characters of a set that a JSON string may contain unescaped."""
    return without(characters.ranges, _ESCAPED_IN_JSON)


def _escaped_in_json(node: Node) -> Node:
    if not isinstance(node, CharacterSet):
        return _merged(node)
    plain = _plain(node)
    codes = {code for code in node.listed if not any(first <= code <= last for first, last in plain)}
    if not plain and not codes:
        codes = {code for first, last in node.ranges for code in range(first, last + 1)}
    escaped = [Text(json.dumps(chr(code))[1:-1]) for code in sorted(codes)]
    return _merged(choice([*([CharacterSet(plain)] if plain else []), *escaped]))


def _merged(node: Node) -> Node:
    """Merge the branches of a choice of texts that begin alike."""
    texts = [text_of(branch) for branch in node.branches] if isinstance(node, Alternatives) else [None]
    return node if None in texts else tree_of(map(str, texts))


def written(node: Node) -> str:
    """Return the regular expression for a tree without rules."""
    if (text := text_of(node)) is not None:
        return "".join(_character(ord(character)) for character in text)
    match node:
        case CharacterSet(ranges):
            return _class(ranges)
        case Repeat(part, minimum, maximum):
            inner = written(part) if maximum != 0 else ""
            return f"(?:{inner}){counts(minimum, maximum)}" if inner else ""
        case Alternatives(branches):
            texts = list(map(written, branches))
            filled = "|".join(filter(None, texts))
            return f"(?:{filled})" + "?" * ("" in texts) if filled else ""
        case Series(parts):
            return "".join(map(written, parts))
    raise TypeError(node)


def _class(ranges: Sequence[Range]) -> str:
    excluded = complement(ranges)
    is_negated = bool(excluded) and excluded[-1][1] <= LAST_EXCLUDED
    listed = "".join(
        _character(first) + (f"-{_character(last)}" if last > first else "")
        for first, last in (excluded if is_negated else ranges)
    )
    return f"[{'^' * is_negated}{listed}]"


def _character(code: int) -> str:
    character = chr(code)
    if (character.isascii() and character.isalnum()) or code > 0xFFFF:
        return character
    return f"\\u{code:04x}"
