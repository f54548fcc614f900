"""Abridges grammars and regular expressions for short trials.

A costly part may follow so many harmless tokens that a trial never reaches it. Therefore, a single character can
replace each part of an abridged grammar that may be long.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from handler.core.expressions import Alternatives, Repeat, Series
from handler.core.values import StructuredOutput
from handler.engines.structured_output.characters import without
from handler.engines.structured_output.nodes import CharacterSet, Node, Opaque, RuleName, Text, least
from handler.engines.structured_output.regex import parse, written

MARKER = "~"
"""The character that can replace a long part. Nearly every vocabulary contains it as a token."""

LONG = 32
"""The number of characters or repetitions from which a part is considered long."""

_EXPRESSION = re.compile(r'(?<=^Regex \( )"(?:\\.|[^"\\])*"')  # in a macro


def abridged(node: Node, lengths: Mapping[str, int], names: Set[str] = frozenset()) -> Node:
    """Return a tree with `MARKER` as an alternative to each part that can be long, and nowhere else.

    Args:
        lengths: the minimum number of characters derived by each rule.
        names: rules that are considered long.
    """

    def is_long(node: Node) -> bool:
        part = node.part if isinstance(node, Repeat) else node
        is_loop = isinstance(node, Repeat) and (node.maximum is None or node.maximum >= LONG)
        return is_loop or (isinstance(part, RuleName) and part.name in names) or least(node, lengths) >= LONG

    def whole(node: Node) -> Node:
        return Alternatives([inner(node), Text(MARKER)]) if is_long(node) else inner(node)

    def inner(node: Node) -> Node:
        match node:
            case CharacterSet(ranges):
                return CharacterSet(without(ranges, [(ord(MARKER),) * 2]) or ranges)
            case Series(parts):
                return Series(list(elements(parts)))
            case Alternatives(branches):
                return Alternatives([(inner if isinstance(branch, Series) else whole)(branch) for branch in branches])
            case Repeat(part, minimum, maximum):
                return Repeat((whole if isinstance(part, Repeat) else inner)(part), minimum, maximum)
            case Opaque(text, meaning):
                return Opaque(_EXPRESSION.sub(_abridged_macro, text), meaning)
        return node

    def elements(parts: Sequence[Node]) -> Iterator[Node]:
        for is_run, group in itertools.groupby(parts, lambda part: isinstance(part, CharacterSet | Text)):
            run = list(group)
            if is_run and least(Series(run), lengths) >= LONG:
                yield Alternatives([Series(list(map(inner, run))), Text(MARKER)])
            else:
                yield from map(whole, run)

    return (inner if isinstance(node, Series | Alternatives) else whole)(node)


def _abridged_macro(expression: re.Match[str]) -> str:
    """Abridge a quoted regular expression in a grammar. Leave it to xgrammar if it is not supported here."""
    try:
        return json.dumps(abridged_expression(json.loads(expression[0])), ensure_ascii=False)
    except ValueError:
        return expression[0]


def abridged_expression(expression: str) -> str:
    """Return a regular expression with `MARKER` as an alternative to each long repetition and each long literal.

    Raises:
        ValueError: the expression is not supported, see `regex_grammar`.
    """
    return written(abridged(parse(expression), {}))


def abridged_parts(structured_output: StructuredOutput) -> Sequence[StructuredOutput]:
    """Return abridged expressions for a regular expression, or for all patterns in a schema or structural tag."""
    match structured_output.kind:
        case "regex":
            expressions = [structured_output.value]
        case "json_schema" | "structural_tag":
            expressions = list(_patterns(json.loads(structured_output.value)))
        case _:
            return ()
    parts = dict[str, None]()
    for expression in expressions:
        with contextlib.suppress(ValueError):  # it only looks like a pattern, or is left to the engine
            parts[abridged_expression(expression)] = None
    return [StructuredOutput("regex", text) for text in parts]


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
