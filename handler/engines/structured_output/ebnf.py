"""A parser for grammars in xgrammar's EBNF, which also abridges grammars and regular expressions for short trials.

A matcher follows all derivations of a response at once. If a rule can derive itself without any text, there are
infinitely many derivations, so such rules are refused. A costly part may also follow so many harmless tokens that a
trial never reaches it. `abridged` therefore returns grammars in which a single character can replace each part that may
be long.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from handler.core.numbers import is_digits
from handler.core.values import StructuredOutput

MARKER = "~"
"""The character that can replace a long part. Nearly every vocabulary contains it as a token."""

LONG = 32
"""The number of characters or repetitions from which a part is considered long."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)
    | (?P<text>"(?:\\.|[^"\\\r\n])*") | (?P<characters>\[(?:\\.|[^\]\\\r\n])*\])
    | (?P<name>[A-Za-z_.-][A-Za-z0-9_.-]*) | (?P<number>[+-]?[0-9]+) | (?P<sign>::=|\(=|[(){}|,*+?=])""",
    re.VERBOSE,
)
MACROS = frozenset(("TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch", "Regex", "Substring"))
_MAX_NESTING = 100  # levels of nested brackets
_MANY = LONG  # number of repetitions that is considered unlimited


class Unreadable(ValueError):
    """The grammar has a syntax error or an undefined rule."""


class Lexeme(NamedTuple):
    """A token of a grammar. Its kind is the name of a group in `_TOKEN`."""

    kind: str
    text: str


class _Element(NamedTuple):
    """An element of a sequence: a rule if `name` is set, otherwise a terminal."""

    name: str = ""
    least: int = 1  # minimum number of repetitions, or of a literal's characters; 0 if it can derive nothing


class _Span(NamedTuple):
    """The tokens of an element and its repetition."""

    start: int  # index of the first token
    end: int  # index after the last token
    element: _Element
    is_loop: bool  # whether the number of repetitions is unlimited


_Choices = Sequence[Sequence[_Element]]


class Grammar:
    """A parsed grammar. Each pair of brackets is parsed as a rule with a generated name.

    Raises:
        Unreadable: the grammar has a syntax error or an undefined rule.
    """

    def __init__(self, text: str) -> None:
        parser = _Parser(text)
        self._tokens, self._spans = parser.tokens, parser.spans
        self._rules: Mapping[str, _Choices] = parser.rules
        self._calls = {name: _calls(choices) for name, choices in self._rules.items()}
        if missing := set().union(*self._calls.values()) - self._rules.keys():
            raise Unreadable(f"EBNF: the rule {min(missing)!r} is not defined")
        self._lengths = self._least_lengths()

    def cycle(self) -> Sequence[str]:
        """Return rules that can derive one another without any text, or an empty sequence if there are none."""
        units = {name: set(self._units(choices)) for name, choices in self._rules.items()}
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
        opening, closing = Counter[int](), Counter[int]()
        for span in self._spans:
            if span.is_loop or span.element.name in names or _length(span.element, self._lengths) >= LONG:
                opening[span.start] += 1
                closing[span.end - 1] += 1
        parts = []
        for number in range(len(self._tokens)):
            beginning = "\n" * self._begins_rule(number) + "(" * opening[number]
            parts.append(beginning + self._abridged(number) + f' | "{MARKER}")' * closing[number])
        return " ".join(parts)

    def _abridged(self, number: int) -> str:
        token = self._tokens[number]
        if number > 1 and [token.text for token in self._tokens[number - 2 : number]] == ["Regex", "("]:
            return _abridged_macro(token.text)
        return without_marker(token.text) if token.kind == "characters" else token.text

    def _begins_rule(self, number: int) -> bool:
        return number > 0 and [token.text for token in self._tokens[number + 1 : number + 2]] == ["::="]

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
            least = min(sum(_length(element, lengths) for element in sequence) for sequence in self._rules[name])
            if least < lengths[name]:
                lengths[name] = least
                waiting.extend(callers.get(name, ()))
        return lengths

    def _units(self, choices: _Choices) -> Iterator[str]:
        """Yield each rule that can form a whole sequence alone, because all other elements can be empty."""
        for sequence in choices:
            filled = [element for element in sequence if _length(element, self._lengths)]
            if len(filled) < 2:
                yield from (element.name for element in filled or sequence if element.name)


def _length(element: _Element, lengths: Mapping[str, int]) -> int:
    """Return the minimum number of characters derived by an element."""
    return element.least * lengths.get(element.name, 1)


def acyclic(text: str) -> Grammar:
    """Parse a grammar, and check that no rule can derive itself without any text.

    Raises:
        ValueError: a rule can derive itself without any text.
        Unreadable: the grammar has a syntax error or an undefined rule.
    """
    grammar = Grammar(text)
    if cycle := grammar.cycle():
        name = next((name for name in cycle if not name.startswith("(")), cycle[0])
        raise ValueError(f"the rule {name!r} is cyclic: it can derive itself without any text")
    return grammar


def _abridged_macro(text: str) -> str:
    """Abridge a quoted regular expression in a grammar. Return it unchanged if it is not a JSON string."""
    try:
        return json.dumps(abridged_expression(json.loads(text)), ensure_ascii=False)
    except ValueError:
        return text


# -- reading -----------------------------------------------------------------------------------------------------------


def scan(text: str) -> Iterator[Lexeme]:
    """Yield the tokens of a grammar, including spaces and comments.

    Raises:
        Unreadable: a character begins no token.
    """
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable(f"EBNF: unexpected character {text[at]!r} in line {text.count(chr(10), 0, at) + 1}")
        yield Lexeme(str(match.lastgroup), match[0])
        at = match.end()


class _Parser:
    """A parser of one grammar.

    Attributes:
        tokens: the grammar's tokens, excluding the attributes of rules.
        rules: the rules by name, including the rules made from brackets.
        spans: the spans of all elements. Elements within brackets come before the brackets.
    """

    def __init__(self, text: str) -> None:
        self.tokens = [token for token in scan(text) if token.kind != "space"]
        self.rules: dict[str, _Choices] = {}
        self.spans: list[_Span] = []
        self._at = 0
        self._depth = 0
        while self._at < len(self.tokens):
            self._rule()

    def _rule(self) -> None:
        start, name = self._at, self._text()
        if not self._begins_rule():
            raise Unreadable(f"EBNF: expected a rule, not {name!r}")
        if name in self.rules:
            raise Unreadable(f"EBNF: the rule {name!r} is defined twice")
        if self._text(1) != "::=":  # remove attributes, which change nothing here and must not follow a space
            del self.tokens[start + 1]
        self._at += 2
        self.rules[name] = self._choices()
        if self._text() == "(=":  # a look-ahead derives nothing
            self._skip_bracket()

    def _text(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self.tokens[at].text if at < len(self.tokens) else ""

    def _kind(self) -> str:
        return self.tokens[self._at].kind if self._at < len(self.tokens) else ""

    def _begins_rule(self) -> bool:
        """Return whether a name and `::=` follow, perhaps with attributes in square brackets between them."""
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
            return _Element(least=len(text) - 2)
        if kind == "name" and text in MACROS and self._text() == "(":
            return self._bracket([[], *([_Element(name)] for name in self._skip_bracket())])
        if kind == "name":
            return _Element(text)
        if text != "(":
            raise Unreadable(f"EBNF: unexpected {text!r}")
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise Unreadable(f"EBNF: more than {_MAX_NESTING} nested brackets")
        choices = self._choices()
        self._depth -= 1
        if self._text() != ")":
            raise Unreadable("EBNF: a bracket is not closed")
        self._at += 1
        return self._bracket(choices)

    def _bracket(self, choices: _Choices) -> _Element:
        name = f"({len(self.rules)})"  # no rule of the grammar can have this name
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
        repeated = element._replace(least=least * element.least)
        self.spans.append(_Span(start, self._at, repeated, most >= _MANY))
        return repeated

    def _skip_bracket(self) -> Sequence[str]:
        """Skip a pair of brackets, and return the names of the rules between them."""
        names, depth = [], 0
        while self._kind():
            depth += (self._text() in ("(", "(=")) - (self._text() == ")")
            if self._kind() == "name" and self._text(1) != "=" and self._text() not in ("true", "false"):
                names.append(self._text())
            self._at += 1
            if not depth:
                break
        return [name for name in names if name not in MACROS]


def _bounds(counts: Sequence[str]) -> tuple[int, int]:
    """Return the minimum and maximum number of repetitions, from the tokens inside `{n}`, `{min,}` or `{min,max}`."""
    numbers = [
        min(int(count), _MANY) if len(count) < 20 and count != "-1" else _MANY
        for count in counts
        if is_digits(count[-1:])
    ]
    if not numbers:
        raise Unreadable("EBNF: a repetition without a number")
    return numbers[0], numbers[-1] if len(numbers) > 1 or "," not in counts else _MANY


# -- graphs of names ---------------------------------------------------------------------------------------------------


def _calls(choices: _Choices) -> Set[str]:
    return {element.name for sequence in choices for element in sequence if element.name}


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


# -- regular expressions -----------------------------------------------------------------------------------------------


_PIECE = re.compile(
    r"(?P<open>\((?:\?(?:P?<\w+>|[:=!]|<[=!]))?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<item>\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.)",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(?P<counts>[0-9, ]*)\})[?+]?")
_ANY = rf"[^\n\r{MARKER}]"
_ANCHORS = ("^", "$")


_RANGE = re.compile(r"(?!^)([ -}])-([~-\U0010ffff])")  # a range of characters that contains the marker
_LISTED = re.compile(rf"(\\[^{MARKER}])|(?<![^[]-)\\?{MARKER}(?!-[^\]])")  # an escape to keep, or the marker by itself


def without_marker(characters: str) -> str:
    """Exclude the marker from a class, such as `[^a]`, `[ -~]` or `[~a]`, to reserve it for long parts.

    A class that contains only the marker is not changed.
    """
    if characters.startswith("[^"):
        return f"{characters[:-1]}{MARKER}]"
    ranges = _RANGE.sub(lambda range: f"{range[1]}-}}" + f"\x7f-{range[2]}" * (range[2] > "\x7f"), characters)
    remaining = _LISTED.sub(r"\1", ranges)
    return remaining if len(remaining) > len("[]") else characters


def abridged_expression(expression: str) -> str:
    """Return a regular expression with `MARKER` as an alternative to each long repetition and each long literal."""
    levels: list[list[str]] = [[]]  # the parts of each open bracket so far
    run: list[str] = []  # consecutive items without repetitions

    def end_run() -> None:
        levels[-1].append(_optional("".join(run)) if len(run) >= LONG else "".join(run))
        run.clear()

    at = 0
    while at < len(expression):
        piece = _PIECE.match(expression, at)
        assert piece is not None, "the pattern matches any character"
        at = piece.end()
        if piece["open"]:
            end_run()
            levels.append([piece[0]])
            continue
        if piece["bar"] or piece[0] in _ANCHORS or (piece["close"] and len(levels) == 1):
            end_run()
            levels[-1].append(piece[0])
            continue
        quantifier = _QUANTIFIER.match(expression, at)
        item = _ANY if piece[0] == "." else without_marker(piece[0]) if piece[0][0] == "[" else piece[0]
        if piece["close"]:
            end_run()
            item = "".join(levels.pop()) + item
        elif quantifier is None:
            run.append(item)
            continue
        end_run()
        if quantifier is not None:
            at = quantifier.end()
            item += quantifier[0]
        levels[-1].append(_optional(item) if quantifier is not None and _is_long(quantifier) else item)
    end_run()
    return "".join(part for level in levels for part in level)


def abridged_parts(structured_output: StructuredOutput) -> Sequence[StructuredOutput]:
    """Return abridged expressions for a regular expression, or for all patterns in a schema or structural tag."""
    if structured_output.kind == "regex":
        expressions = [structured_output.value]
    elif structured_output.kind in ("json_schema", "structural_tag"):
        expressions = list(_patterns(json.loads(structured_output.value)))
    else:
        return ()
    return [StructuredOutput("regex", text) for text in dict.fromkeys(map(abridged_expression, expressions))]


def _optional(part: str) -> str:
    return f"(?:{part}|{MARKER})"


def _is_long(quantifier: re.Match[str]) -> bool:
    if quantifier["counts"] is None:
        return quantifier[0][0] != "?"
    last = quantifier["counts"].split(",")[-1].strip()
    return not last or int(last) >= LONG


def _patterns(schema: Any) -> Iterator[str]:
    """Yield all strings that may be patterns, including values that merely look like patterns."""
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case dict() as node:
                if isinstance(pattern := node.get("pattern"), str):
                    yield pattern
                if isinstance(patterns := node.get("patternProperties"), dict):
                    yield from patterns
                waiting += node.values()
            case list() as node:
                waiting += node
