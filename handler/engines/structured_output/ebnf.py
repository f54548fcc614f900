"""Reads grammars in xgrammar's EBNF, finds rules that derive themselves, and abridges grammars for short trials.

A matcher follows all derivations of a response at once. If a rule can derive itself without any text, there are
infinitely many derivations, so such rules are refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from handler.core.expressions import Alternatives, Repeat, Series, choice, series
from handler.core.numbers import is_digits
from handler.engines.structured_output.abridged import LONG, abridged
from handler.engines.structured_output.characters import LAST, LAST_EXCLUDED, Range, complement, is_misread, joined
from handler.engines.structured_output.nodes import (
    CharacterSet,
    Node,
    Opaque,
    RuleName,
    Text,
    element,
    least,
    walk,
)

_SPACE = r"(?:[ \t\r\n]|\#[^\r\n]*(?=[\r\n]|\Z))*"
_NAME = "[A-Za-z_.-][A-Za-z0-9_.-]*"
_CLASS = r"\[(?:\\.|[^\]\\\r\n])*\]"
_TOKEN = re.compile(
    rf"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)
    | (?P<text>"(?:\\.|[^"\\\r\n])*") | (?P<characters>{_CLASS})
    | (?P<rule>{_NAME}{_SPACE}(?:{_CLASS}{_SPACE})?::=) | (?P<name>{_NAME})
    | (?P<number>[+-]?[0-9]+) | (?P<sign>::=|\(=|[()|,*+?={{}}])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(
    r"\\x(?P<hex>[0-9a-fA-F]+)|\\u(?P<four>[0-9a-fA-F]{4})|\\U(?P<eight>[0-9a-fA-F]{8})|\\(?P<letter>.)|(?P<plain>.)",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "e": "\x1b"}
_MACROS = frozenset(("TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch", "Regex", "Substring"))
_MAX_NESTING = 100  # levels of nested brackets
_MAX_DIGITS = 18  # of a number of repetitions


class InvalidGrammar(ValueError):
    """The grammar has a syntax error or an undefined rule."""


class _Lexeme(NamedTuple):
    """A token of a grammar. Its kind is the name of a group in `_TOKEN`, or "" at the end."""

    kind: str
    text: str


class Grammar:
    """A parsed grammar.

    Raises:
        InvalidGrammar: the grammar has a syntax error or an undefined rule.
    """

    def __init__(self, text: str) -> None:
        reader = _Reader(text)
        self._rules, self._endings = reader.rules, reader.endings
        self._calls = {name: _calls(rule) for name, rule in self._rules.items()}
        if missing := set().union(*self._calls.values()) - self._rules.keys():
            raise InvalidGrammar(f"EBNF: the rule {min(missing)!r} is not defined")
        self._lengths = self._least_lengths()

    def cycle(self) -> Sequence[str]:
        """Return rules that can derive one another without any text, or an empty sequence if there are none."""
        units = {name: set(self._units(rule)) for name, rule in self._rules.items()}
        return next(cycles(units), ())

    def abridged(self) -> Sequence[str]:
        """Return two versions of the grammar, with `MARKER` as an alternative to each part that can be long.

        In the first version, these parts are long literals, unlimited repetitions and recursive rules. The second
        version leaves recursive rules unchanged: their depth may be costly, and a marker would end the recursion. It is
        omitted if it equals the first version.
        """
        recursive = {name for group in cycles(self._calls) for name in group}
        return list(dict.fromkeys(self._with_markers(names) for names in (recursive, frozenset[str]())))

    def _with_markers(self, names: Set[str]) -> str:
        return "\n".join(
            f"{name} ::= {element(abridged(rule, self._lengths, names))}{self._endings[name]}"
            for name, rule in self._rules.items()
        )

    def _least_lengths(self) -> Mapping[str, int]:
        """Return the minimum number of characters derived by each rule, up to `LONG`."""
        callers: dict[str, list[str]] = {}
        for name, called in self._calls.items():
            for other in called:
                callers.setdefault(other, []).append(name)
        lengths = dict.fromkeys(self._rules, LONG)
        waiting = list(self._rules)
        while waiting:  # a rule is visited again when the minimum of a rule that it calls has decreased
            name = waiting.pop()
            length = least(self._rules[name], lengths)
            if length < lengths[name]:
                lengths[name] = length
                waiting.extend(callers.get(name, ()))
        return lengths

    def _units(self, node: Node) -> Iterator[str]:
        """Yield each rule that a node can derive alone, because all else can be empty."""
        match node:
            case RuleName(name):
                yield name
            case Repeat(part) | Opaque(_, part):
                yield from self._units(part)
            case Alternatives(parts):
                for part in parts:
                    yield from self._units(part)
            case Series(parts):
                filled = [part for part in parts if least(part, self._lengths)]
                if len(filled) < 2:
                    for part in filled or parts:
                        yield from self._units(part)


def _calls(node: Node) -> Set[str]:
    return {below.name for below in walk(node) if isinstance(below, RuleName)}


def acyclic(text: str) -> Grammar:
    """Parse a grammar.

    Raises:
        ValueError: a rule can derive itself without any text.
        InvalidGrammar: the grammar has a syntax error or an undefined rule.
    """
    grammar = Grammar(text)
    if cycle := grammar.cycle():
        raise ValueError(f"the rule {cycle[0]!r} is cyclic: it can derive itself without any text")
    return grammar


def respelled(grammar: str) -> str:
    """Rewrite the literals and classes in a grammar that xgrammar would print and read again as others.

    Args:
        grammar: a client's grammar. With a syntax error it is returned unchanged, because xgrammar reports the error.

    Raises:
        ValueError: a string in a macro may have to be rewritten.
    """
    try:
        tokens = list(_scan(grammar))
    except InvalidGrammar:
        return grammar
    rewritten = "".join(_respelled(token) for token in tokens)
    if rewritten != grammar and any(token.text in _MACROS for token in tokens):
        raise ValueError("the grammar cannot contain both a macro and a Latin-1 letter before a hexadecimal digit")
    return rewritten


def _respelled(token: _Lexeme) -> str:
    if token.kind not in ("text", "characters"):
        return token.text
    is_negated = token.text.startswith("[^")
    characters = "".join(character or "" for _, character in _characters(token.text[1 + is_negated : -1]))
    is_beyond = is_negated and max(characters, default="") > chr(LAST_EXCLUDED)
    return element(_terminal(token)) if is_misread(characters) or is_beyond else token.text


# -- reading -----------------------------------------------------------------------------------------------------------


def _scan(text: str) -> Iterator[_Lexeme]:
    """Yield the tokens of a grammar, including spaces and comments.

    Raises:
        InvalidGrammar: a character begins no token.
    """
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise InvalidGrammar(f"EBNF: unexpected character {text[at]!r} in line {text.count(chr(10), 0, at) + 1}")
        yield _Lexeme(str(match.lastgroup), match[0])
        at = match.end()


def _characters(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield each character of a literal or class as it is written and as xgrammar reads it; None if it is invalid."""
    for match in _ESCAPE.finditer(text):
        digits = match["hex"] or match["four"] or match["eight"]
        if digits is None:
            yield match[0], match["plain"] or _CONTROLS.get(match["letter"], match["letter"])
        else:
            yield match[0], chr(number) if (number := int(digits, 16)) <= LAST else None


def _terminal(token: _Lexeme) -> Node:
    """Return the node of a literal or class. One that xgrammar refuses is left to it."""
    is_negated = token.text.startswith("[^")
    pieces = list(_characters(token.text[1 + is_negated : -1]))
    invalid = Opaque(token.text, CharacterSet([(0, LAST)]))
    if any(character is None for _, character in pieces):
        return invalid
    if token.kind == "text":
        return Text("".join(str(character) for _, character in pieces))
    ranges: list[Range] = []
    while pieces:
        width = 3 if len(pieces) > 2 and pieces[1][0] == "-" else 1
        first, last = (ord(str(pieces[at][1])) for at in (0, width - 1))
        if last < first:
            return invalid
        ranges.append((first, last))
        del pieces[:width]
    return CharacterSet(complement(ranges) if is_negated else joined(ranges))


class _Reader:
    """A reader of one grammar.

    Attributes:
        rules: the rules by name.
        endings: the text after each rule: a look-ahead, or "". It derives nothing.
    """

    def __init__(self, text: str) -> None:
        self._tokens = [token for token in _scan(text) if token.kind != "space"]
        self._tokens.append(_Lexeme("", ""))
        self.rules: dict[str, Node] = {}
        self.endings: dict[str, str] = {}
        self._at = 0
        self._depth = 0
        while self._kind():
            self._rule()

    def _rule(self) -> None:
        kind, name = self._tokens[self._at]
        if kind != "rule":
            raise InvalidGrammar(f"EBNF: expected a rule, not {name!r}")
        name = re.split(r"[^A-Za-z0-9_.-]", name, maxsplit=1)[0]  # without attributes, which change nothing here
        if name in self.rules:
            raise InvalidGrammar(f"EBNF: the rule {name!r} is defined twice")
        self._at += 1
        self.rules[name] = self._choice()
        self.endings[name] = f" {self._bracket()}" if self._text() == "(=" else ""

    def _text(self) -> str:
        return self._tokens[self._at].text

    def _kind(self) -> str:
        return self._tokens[self._at].kind

    def _choice(self) -> Node:
        branches = [self._series()]
        while self._text() == "|":
            self._at += 1
            branches.append(self._series())
        return choice(branches)

    def _series(self) -> Node:
        parts = []
        while self._kind() not in ("", "rule") and self._text() not in ("|", ")", "(="):
            parts.append(self._repeated(self._part()))
        return series(parts)

    def _part(self) -> Node:
        token = self._tokens[self._at]
        kind, text = token
        self._at += 1
        if kind in ("text", "characters"):
            return _terminal(token)
        if kind == "name" and text in _MACROS and self._text() == "(":
            start = self._at
            written = f"{text} {self._bracket()}"
            return Opaque(written, Alternatives([Series([]), *map(RuleName, self._names(start))]))
        if kind == "name":
            return RuleName(text)
        if text != "(":
            raise InvalidGrammar(f"EBNF: unexpected {text!r}")
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise InvalidGrammar(f"EBNF: more than {_MAX_NESTING} nested brackets")
        node = self._choice()
        self._depth -= 1
        if self._text() != ")":
            raise InvalidGrammar("EBNF: a bracket is not closed")
        self._at += 1
        return node

    def _repeated(self, part: Node) -> Node:
        sign = self._text()
        if sign in ("*", "+", "?"):
            self._at += 1
            return Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
        if sign != "{":
            return part
        counts = []
        while self._text() not in ("}", ""):
            self._at += 1
            counts.append(self._text())
        self._at += 1
        return Repeat(part, *_bounds(counts[:-1]))

    def _bracket(self) -> str:
        """Skip a pair of brackets, and return its tokens."""
        start, depth = self._at, 0
        while self._kind():
            depth += (self._text() in ("(", "(=")) - (self._text() == ")")
            self._at += 1
            if not depth:
                break
        return " ".join(token.text for token in self._tokens[start : self._at])

    def _names(self, start: int) -> Iterator[str]:
        """Yield the names of the rules in a macro's brackets, which have been skipped."""
        for token, following in itertools.pairwise(self._tokens[start : self._at]):
            if token.kind == "name" and following.text != "=" and token.text not in ("true", "false", *_MACROS):
                yield token.text


def _bounds(counts: Sequence[str]) -> tuple[int, int | None]:
    """Return the minimum and maximum number of repetitions, from the tokens inside `{n}`, `{min,}` or `{min,max}`."""
    numbers = [None if count == "-1" else int(count[:_MAX_DIGITS]) for count in counts if is_digits(count[-1:])]
    if not numbers:
        raise InvalidGrammar("EBNF: a repetition without a number")
    return numbers[0] or 0, numbers[-1] if len(numbers) > 1 or "," not in counts else None


# -- graphs of names ---------------------------------------------------------------------------------------------------


def cycles(edges: Mapping[str, Set[str]]) -> Iterator[Sequence[str]]:
    """Yield each group of names that all reach themselves and each other (Tarjan's algorithm, without recursion)."""
    numbers: dict[str, int] = {}  # in the order of visits; when a group is complete, a number that lowers no other
    lowest = {"": 0}
    path: list[str] = []
    work = [("", iter(edges))]  # the walk begins at a name before all others
    while work:
        name, following = work[-1]
        other = next(following, None)
        if other is None:
            work.pop()
            if not work:
                return
            lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[name])
            if lowest[name] == numbers[name]:
                group = [path.pop()]
                while group[-1] != name:
                    group.append(path.pop())
                group.reverse()
                numbers |= dict.fromkeys(group, len(edges))
                if len(group) > 1 or name in edges[name]:
                    yield group
        elif other not in numbers:
            numbers[other] = lowest[other] = len(numbers)
            path.append(other)
            work.append((other, iter(sorted(edges[other]))))
        else:
            lowest[name] = min(lowest[name], numbers[other])
