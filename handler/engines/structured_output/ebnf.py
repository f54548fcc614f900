"""Reads xgrammar's EBNF, as far as it must be known which rules call which.

A matcher follows all derivations of an answer at once. There is no end of them where a rule can derive itself alone, so
such rules are refused. And a costly rule may come after any number of harmless tokens, where no trial gets to. So
`later_parts` gives each part that loops as a grammar of its own, which begins with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)
    | (?P<text>"(?:\\.|[^"\\\r\n])*") | (?P<characters>\[(?:\\.|[^\]\\\r\n])*\])
    | (?P<name>[A-Za-z_.-][A-Za-z0-9_.-]*) | (?P<number>\+?\d+) | (?P<sign>::=|\(=|[(){}|,*+?=])""",
    re.VERBOSE,
)
_MACROS = frozenset(("TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch", "Regex", "Substring"))
_MAX_NESTING = 100  # brackets within brackets
_MANY = 50  # repetitions of one character that may cost something


class Unreadable(ValueError):
    """The text is no grammar in this notation."""


class _Token(NamedTuple):
    kind: str
    text: str


class _Element(NamedTuple):
    """A part of a sequence: a rule, where it has a name, or a terminal."""

    name: str = ""
    is_empty: bool = False  # whatever the rule derives


_Choices = Sequence[Sequence[_Element]]


class Grammar:
    """A grammar's rules. Each bracket is a rule too, with a name that no other has.

    Raises:
        Unreadable: it is no grammar in this notation.
    """

    def __init__(self, text: str) -> None:
        parser = _Parser(text)
        self._tokens, self._spans, self._loops = parser.tokens, parser.spans, parser.loops
        self._rules: Mapping[str, _Choices] = parser.rules
        self._calls = {name: _calls(choices) for name, choices in self._rules.items()}
        if missing := set().union(*self._calls.values()) - self._rules.keys():
            raise Unreadable(f"EBNF: the rule {min(missing)!r} is not defined")
        self._nullable = self._find_nullable()

    def cycle(self) -> Sequence[str]:
        """Find rules that derive one another alone; none where there are no such rules."""
        units = {name: set(self._units(choices)) for name, choices in self._rules.items()}
        return next(_cycles(units), ())

    def later_parts(self) -> Iterator[str]:
        """Give each part that loops as a grammar that begins with it: rules that call themselves, and repetitions."""
        recursive = {name for group in _cycles(self._calls) for name in group}
        parts = [([_Token("name", name)], {name}) for name in self._spans if name in recursive and name != "root"]
        for start, end in self._loops:
            tokens = self._tokens[start:end]
            parts.append((tokens, {token.text for token in tokens if token.kind == "name"} & self._spans.keys()))
        yield from dict.fromkeys(self._beginning_with(tokens, names) for tokens, names in parts)

    def _beginning_with(self, tokens: Sequence[_Token], names: Set[str]) -> str:
        root = next(name for number in range(len(self._rules) + 1) if (name := f"root-{number}") not in self._rules)

        def line(tokens: Sequence[_Token]) -> str:
            return " ".join(root if token == ("name", "root") else token.text for token in tokens)

        reachable = _reachable(names, self._calls)
        rules = [line(self._tokens[start:end]) for name, (start, end) in self._spans.items() if name in reachable]
        return "\n".join([f"root ::= {line(tokens)}", *rules])

    # -- what derives nothing, and what derives one rule alone ------------------------------------------------------

    def _find_nullable(self) -> Set[str]:
        """Find the rules that may derive nothing."""
        callers: dict[str, list[str]] = {}
        for name, called in self._calls.items():
            for other in called:
                callers.setdefault(other, []).append(name)
        found: set[str] = set()
        waiting = list(self._rules)
        while waiting:
            name = waiting.pop()
            if name not in found and any(all(_is_empty(e, found) for e in sequence) for sequence in self._rules[name]):
                found.add(name)
                waiting.extend(callers.get(name, ()))
        return found

    def _units(self, choices: _Choices) -> Iterator[str]:
        """Find the rules that may be all that is derived: everything beside them may be empty."""
        for sequence in choices:
            filled = [element for element in sequence if not _is_empty(element, self._nullable)]
            if len(filled) < 2:
                yield from (element.name for element in filled or sequence if element.name)


def _is_empty(element: _Element, nullable: Set[str]) -> bool:
    return element.is_empty or element.name in nullable


def later_parts(text: str) -> Sequence[str]:
    """Refuse a grammar in which a rule can derive itself alone; return `Grammar.later_parts` of any other.

    Raises:
        ValueError: it is such a grammar, or (`Unreadable`) none.
    """
    grammar = Grammar(text)
    if cycle := grammar.cycle():
        name = next((name for name in cycle if not name.startswith("(")), cycle[0])
        raise ValueError(f"the rule {name!r} is cyclic: it can derive itself alone, without any text beside it")
    return list(grammar.later_parts())


# -- reading -----------------------------------------------------------------------------------------------------------


def _tokens(text: str) -> list[_Token]:
    found, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable(f"EBNF: unexpected {text[at]!r} in line {text.count(chr(10), 0, at) + 1}")
        if match.lastgroup != "space":
            found.append(_Token(str(match.lastgroup), match[0]))
        at = match.end()
    return found


class _Parser:
    """Reads a grammar.

    Attributes:
        rules: by name, those of brackets too.
        spans: where each rule of the text has its tokens: the first, and the one after the last.
        loops: where repeated elements have theirs.
    """

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.rules: dict[str, _Choices] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        self.loops: list[tuple[int, int]] = []
        self._at = 0
        self._depth = 0
        while self._at < len(self.tokens):
            self._rule()

    def _rule(self) -> None:
        start, name = self._at, self._text()
        if not self._begins_rule():
            raise Unreadable(f"EBNF: a rule is expected, not {name!r}")
        if name in self.rules:
            raise Unreadable(f"EBNF: the rule {name!r} is defined twice")
        if self._text(1) != "::=":  # attributes change nothing here, and must follow a name without a space
            del self.tokens[start + 1]
        self._at += 2
        self.rules[name] = self._choices()
        if self._text() == "(=":  # a look-ahead derives nothing
            self._skip_bracket()
        self.spans[name] = (start, self._at)

    def _text(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self.tokens[at].text if at < len(self.tokens) else ""

    def _kind(self) -> str:
        return self.tokens[self._at].kind if self._at < len(self.tokens) else ""

    def _begins_rule(self) -> bool:
        """A name and its `::=`, perhaps with attributes in square brackets between them."""
        return self._kind() == "name" and (
            self._text(1) == "::=" or (self._text(1).startswith("[") and self._text(2) == "::=")
        )

    def _choices(self) -> _Choices:
        choices = [self._sequence()]
        while self._text() == "|":
            self._at += 1
            choices.append(self._sequence())
        return choices

    def _sequence(self) -> Sequence[_Element]:
        elements = []
        while self._kind() and self._text() not in ("|", ")", "(=") and not self._begins_rule():
            start = self._at
            elements.append(self._repeated(start, self._element()))
        return elements

    def _element(self) -> _Element:
        kind, text = self._kind(), self._text()
        self._at += 1
        if kind == "characters":
            return _Element()
        if kind == "text":
            return _Element(is_empty=text == '""')
        if kind == "name" and text in _MACROS and self._text() == "(":
            return self._bracket([[], *([_Element(name)] for name in self._skip_bracket())])
        if kind == "name":
            return _Element(text)
        if text != "(":
            raise Unreadable(f"EBNF: unexpected {text!r}")
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise Unreadable(f"EBNF: more than {_MAX_NESTING} brackets within brackets")
        choices = self._choices()
        self._depth -= 1
        if self._text() != ")":
            raise Unreadable("EBNF: a bracket is not closed")
        self._at += 1
        return self._bracket(choices)

    def _bracket(self, choices: _Choices) -> _Element:
        name = f"({len(self.rules)})"  # no rule of the text can have it
        self.rules[name] = choices
        return _Element(name)

    def _repeated(self, start: int, element: _Element) -> _Element:
        sign, least, most = self._text(), 1, 1
        if sign in ("*", "+", "?"):
            self._at += 1
            least, most = int(sign == "+"), (1 if sign == "?" else _MANY)
        elif sign == "{":
            counts = []
            while self._text() not in ("}", ""):
                self._at += 1
                counts.append(self._text())
            self._at += 1
            least, most = _bounds(counts[:-1])
        if most > 1 and (element.name or (sign == "{" and most >= _MANY)):
            self.loops.append((start, self._at))
        return element._replace(is_empty=element.is_empty or least == 0)

    def _skip_bracket(self) -> Sequence[str]:
        """Skip a bracket; return the names in it that are no arguments' names."""
        names, depth = [], 0
        while self._kind():
            depth += (self._text() in ("(", "(=")) - (self._text() == ")")
            if self._kind() == "name" and self._text(1) != "=" and self._text() not in ("true", "false"):
                names.append(self._text())
            self._at += 1
            if not depth:
                break
        return [name for name in names if name not in _MACROS]


def _bounds(counts: Sequence[str]) -> tuple[int, int]:
    """Read what is in braces: a number, or two with a comma, or one with a comma and no limit."""
    numbers = [min(int(count), _MANY) if len(count) < 20 else _MANY for count in counts if count[-1:].isdigit()]
    if not numbers:
        raise Unreadable("EBNF: a repetition without a number")
    return numbers[0], numbers[-1] if len(numbers) > 1 or "," not in counts else _MANY


# -- graphs of names ---------------------------------------------------------------------------------------------------


def _calls(choices: _Choices) -> Set[str]:
    return {element.name for sequence in choices for element in sequence if element.name}


def _reachable(names: Set[str], calls: Mapping[str, Set[str]]) -> Set[str]:
    found, waiting = set(names), list(names)
    while waiting:
        new = calls[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def _cycles(edges: Mapping[str, Set[str]]) -> Iterator[Sequence[str]]:
    """Find the names that reach themselves, those that reach each other together (Tarjan's components, iteratively)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    on_path: set[str] = set()
    for start in edges:
        if start in numbers:
            continue
        work = [(start, iter(sorted(edges[start])))]
        numbers[start] = lowest[start] = len(numbers)
        path.append(start)
        on_path.add(start)
        while work:
            name, following = work[-1]
            other = next(following, None)
            if other is None:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[name])
                if lowest[name] == numbers[name]:
                    group = [path.pop()]
                    while group[-1] != name:
                        group.append(path.pop())
                    group.reverse()
                    on_path.difference_update(group)
                    if len(group) > 1 or name in edges[name]:
                        yield group
            elif other not in numbers:
                numbers[other] = lowest[other] = len(numbers)
                path.append(other)
                on_path.add(other)
                work.append((other, iter(sorted(edges[other]))))
            elif other in on_path:
                lowest[name] = min(lowest[name], numbers[other])
