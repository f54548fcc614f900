"""Grammars as trees, which are read from regular expressions and EBNF, and written in both.

The EBNF is what xgrammar and llama.cpp have in common, and rules and macros of xgrammar.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from handler.core.expressions import Alternatives, Repeat, Series, choice
from handler.engines.structured_output.characters import Range, character_class, literal, num_common


@dataclass(frozen=True)
class Text:
    """A string."""

    text: str


@dataclass(frozen=True)
class CharacterSet:
    """One character of a set. `listed` contains those that a regular expression names one by one."""

    ranges: Sequence[Range]
    listed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Anchor:
    """The beginning or the end of the text."""

    at_start: bool


@dataclass(frozen=True)
class RuleName:
    """What the rule with this name derives."""

    name: str


@dataclass(frozen=True)
class Opaque:
    """A part that is written as it was read, such as a macro. `meaning` derives at least what the part does."""

    text: str
    meaning: Node


Node = Text | CharacterSet | Anchor | RuleName | Opaque | Series | Alternatives | Repeat


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it."""
    waiting = [node]
    while waiting:
        yield (node := waiting.pop())
        match node:
            case Series(parts) | Alternatives(parts):
                waiting += parts
            case Repeat(part) | Opaque(_, part):
                waiting.append(part)


def mapped(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return a tree in which `change` has replaced every node, those below a node first."""
    match node:
        case Series(parts):
            node = Series([mapped(part, change) for part in parts])
        case Alternatives(branches):
            node = Alternatives([mapped(branch, change) for branch in branches])
        case Repeat(part, minimum, maximum):
            node = Repeat(mapped(part, change), minimum, maximum)
    return change(node)


def least(node: Node, lengths: Mapping[str, int]) -> int:
    """Return the minimum number of characters that a node derives.

    Args:
        lengths: the numbers of the rules, by name.
    """
    match node:
        case Text(text):
            return len(text)
        case RuleName(name):
            return lengths[name]
        case Repeat(part, minimum):
            return minimum * least(part, lengths)
        case Alternatives(parts) | Series(parts):
            return (min if isinstance(node, Alternatives) else sum)(least(part, lengths) for part in parts)
        case Opaque(_, meaning):
            return least(meaning, lengths)
    return int(isinstance(node, CharacterSet))


def text_of(node: Node) -> str | None:
    """Return the only text that a node derives, or None if it derives others or is a series of series."""
    if isinstance(node, Series):
        texts = [None if isinstance(part, Series) else text_of(part) for part in node.parts]
        return None if None in texts else "".join(map(str, texts))
    match node:
        case Text(text):
            return text
        case Anchor():
            return ""
        case CharacterSet([(first, last)]) if first == last:
            return chr(first)
    return None


def tree_of(texts: Iterable[str]) -> Node:
    """Return a choice of texts in which no two branches begin with the same character.

    If a dozen branches began with the same character, GenAI's xgrammar would confuse them and allow other strings.
    """
    branches: list[Node] = []
    for _, group in itertools.groupby(sorted(set(texts)), lambda text: text[:1]):
        members = list(group)
        prefix = members[0][: num_common(members[0], members[-1])]  # of all, because they are sorted
        rests = [text[len(prefix) :] for text in members]
        branches.append(Series([Text(prefix), tree_of(rests)]) if len(rests) > 1 else Text(prefix))
    return choice(branches)


# -- writing -----------------------------------------------------------------------------------------------------------


def choice_of(texts: Iterable[str]) -> str:
    """Return the EBNF element for one of several strings."""
    return element(tree_of(texts))


def either(expressions: Iterable[str]) -> str:
    """Join alternatives into one EBNF element."""
    return f"({' | '.join(expressions)})"


def element(node: Node) -> str:
    """Return an EBNF element that can be repeated or combined with others."""
    if (text := text_of(node)) is not None:
        return literal(text)
    match node:
        case CharacterSet(ranges):
            return character_class(ranges)
        case RuleName(text) | Opaque(text):
            return text
        case Repeat(part, minimum, maximum):
            return _repetition(element(part), minimum, maximum)
        case Alternatives(branches):
            return either(map(element, branches))
        case Series(parts):
            return f"({' '.join(_elements(parts))})"
    raise TypeError(node)


def _elements(parts: Sequence[Node]) -> Iterator[str]:
    """Yield the elements of a series. Adjacent texts share a literal."""
    for is_text, run in itertools.groupby(parts, lambda part: text_of(part) is not None):
        group = list(run)
        yield from map(element, [Text("".join(map(str, map(text_of, group))))] if is_text else group)


def _repetition(element: str, minimum: int, maximum: int | None) -> str:
    match minimum, maximum:
        case 0, None:
            return f"({element}*)"
        case 1, None:
            return f"({element}+)"
        case 0, 1:
            return f"({element}?)"
        case _, 0:
            return '""'  # xgrammar reads {0,0} as an unlimited repetition
    return f"({element}{counts(minimum, maximum)})"


def counts(minimum: int, maximum: int | None) -> str:
    """Return the sign after a repeated part, in EBNF and in regular expressions."""
    return f"{{{minimum},{'' if maximum is None else maximum}}}"
