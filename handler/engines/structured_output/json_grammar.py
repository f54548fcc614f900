"""Converts JSON schemas to xgrammar's EBNF without free white space.

GenAI lets xgrammar accept white space of any length, with no option against it, and a small model often generates
nothing else. These grammars follow Python's `json.dumps`, with numbers of at most a double's digits. A schema with
unsupported keywords is left to xgrammar's own converter.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from handler.engines.structured_output.number_grammar import either, integers, numbers

_ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$comment", "$defs", "definitions", "discriminator",
))  # fmt: skip
"""Keywords without effect on validity."""

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")

# A string's rest is recursive and has a look-ahead, as xgrammar is much faster then: less than 1 ms a token, against 18
# for `char*` with a rule for a character.
_COMMON = r"""
value ::= string | number | boolean | null | any_array | any_object
string ::= "\"" string_rest
string_rest ::= ("\"" | [^"\\\x00-\x1f] string_rest | "\\" escape string_rest) (= [,}\]:])
escape ::= ["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]
integer ::= "-"? ("0" | [1-9] [0-9]{0,18})
number ::= "-"? ("0" | [1-9] [0-9]{0,18}) ("." [0-9]{1,17})? ([eE] [+-]? [0-9]{1,3})?
boolean ::= "true" | "false"
null ::= "null"
any_array ::= "[]" | "[" value (", " value)* "]"
any_object ::= "{}" | "{" string ": " value (", " string ": " value)* "}"
"""


_MAX_DEPTH = 64  # of subschemas; the same in the engine as in its check, whatever the stack holds there
_MAX_RANGES = 1 << 16  # characters that all ranges of numbers take


class Unsupported(Exception):
    """The schema has an unsupported keyword, or value of one."""


def json_grammar(schema: Any) -> str | None:
    """Convert a decoded schema to a grammar with the rule `root`; None where it is not supported."""
    try:
        return _Grammar(schema).text
    except Unsupported:
        return None


def literal(text: str) -> str:
    """Write a string in EBNF; other than printable ASCII is escaped by code point."""
    plain = (c if c.isascii() and c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return '"' + "".join(plain) + '"'


def one_of(texts: Iterable[str]) -> str:
    """Write alternatives as one element, in which no two branches begin with the same character.

    With a dozen that do, GenAI's xgrammar confuses them, and allows other texts.
    """
    branches = []
    for _, group in itertools.groupby(sorted(set(texts)), lambda text: text[:1]):
        members = list(group)
        prefix = _common_prefix(members[0], members[-1])
        rests = [text[len(prefix) :] for text in members]
        branches.append(f"{literal(prefix)} {one_of(rests)}" if len(rests) > 1 else literal(prefix))
    return branches[0] if len(branches) == 1 else either(branches)


def _common_prefix(first: str, last: str) -> str:
    """Return the common start of two texts, and so of all that are sorted between them."""
    length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


class _Grammar:
    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._rules: list[str] = []
        self._references: dict[str, str] = {}  # $ref -> rule
        self._depth = 0
        self._num_ranges = 0  # characters
        root = self._expression(schema)
        self.text = "\n".join([f"root ::= {root}", *self._rules]) + _COMMON

    def _rule(self, expression: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name} ::= {expression}")
        return name

    def _expression(self, schema: Any) -> str:
        """Convert a subschema to one element, which may be repeated or follow others."""
        if self._depth == _MAX_DEPTH:
            raise Unsupported
        self._depth += 1
        found = self._of_schema(schema)
        self._depth -= 1
        return found

    def _of_schema(self, schema: Any) -> str:
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            raise Unsupported
        schema = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        if not schema:
            return "value"
        for name, make in _BY_KEYWORD.items():
            if name in schema:
                if not schema.keys() <= {name, "type"}:
                    raise Unsupported
                return make(self, schema[name])
        types = schema.get("type", "object" if "properties" in schema else None)  # xgrammar assumes so too
        if not isinstance(types, list):
            return self._of_type(types, schema)
        keywords = schema.keys() - {"type"}
        own = {kind: keywords & set(_KEYWORDS.get(kind, ())) for kind in map(str, types)}
        if not types or keywords != set().union(*own.values()):
            raise Unsupported
        return either(
            [self._of_type(kind, {"type": kind, **{name: schema[name] for name in own[kind]}}) for kind in own]
        )

    def _of_type(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind not in _TYPES or not schema.keys() <= {"type", *_KEYWORDS.get(kind, ())}:
            raise Unsupported
        if kind == "string" and len(schema) > 1:
            # Without escapes, which would need a slow rule.
            return self._rule(f'"\\"" [^"\\\\\\x00-\\x1f]{_times(schema, "Length")} "\\""')
        if kind in _RANGES and len(schema) > 1:
            element = _RANGES[kind]({name: value for name, value in schema.items() if name != "type"})
            if element is None:
                raise Unsupported
            self._num_ranges += len(element)
            if self._num_ranges > _MAX_RANGES:
                raise Unsupported
            return element
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        return str(kind)

    def _array(self, schema: Mapping[str, Any]) -> str:
        if len(schema) == 1:
            return "any_array"
        low, high = _limits(schema, "Items")
        item = self._expression(schema.get("items", True))
        filled = f'"[" {item}' + _more(f'", " {item}', max(low, 1) - 1, None if high is None else high - 1) + ' "]"'
        if high == 0:
            return '"[]"'
        return self._rule(filled if low else f'"[]" | {filled}')

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", False)
        # As without the keyword, no others come beside named properties where they are allowed.
        closed = others is False or (properties and (others is True or others == {}))
        if not isinstance(properties, dict) or not closed:
            raise Unsupported
        if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
            raise Unsupported
        if not properties:
            return '"{}"' if "additionalProperties" in schema else "any_object"
        # The rest after each property, from the last one back: where it is the first in the object, or a later one.
        first = later = '"}"'
        for name, schema in reversed(properties.items()):
            pair = f"{literal(json.dumps(name, ensure_ascii=False) + ': ')} {self._expression(schema)} {later}"
            first_with, later_with = pair, f'", " {pair}'
            if name in required:
                first, later = self._rule(first_with), self._rule(later_with)
            else:
                first, later = self._rule(f"{first_with} | {first}"), self._rule(f"{later_with} | {later}")
        return self._rule(f'"{{" {first}')

    def _reference(self, path: Any) -> str:
        if not isinstance(path, str) or not path.startswith("#") or "~" in path or "%" in path:
            raise Unsupported
        if path not in self._references:
            target = self._root
            for part in path[1:].split("/")[1:]:
                if not isinstance(target, dict) or part not in target:
                    raise Unsupported
                target = target[part]
            name = self._references[path] = f"ref{len(self._references)}"
            self._rules.append(f"{name} ::= {self._expression(target)}")
        return self._references[path]

    def _any_of(self, schemas: Any) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise Unsupported
        return either([self._expression(schema) for schema in schemas])

    def _values(self, values: Any) -> str:
        if not isinstance(values, list) or not values:
            raise Unsupported
        return one_of(json.dumps(value, ensure_ascii=False) for value in values)

    def _constant(self, value: Any) -> str:
        return self._values([value])


_BY_KEYWORD: Mapping[str, Callable[[_Grammar, Any], str]] = {
    "$ref": _Grammar._reference,
    "enum": _Grammar._values,
    "const": _Grammar._constant,
    "anyOf": _Grammar._any_of,
    "oneOf": _Grammar._any_of,
}

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_RANGES = {"integer": integers, "number": numbers}

_KEYWORDS = {
    "string": ("minLength", "maxLength"),
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unsupported
    return value


def _limits(schema: Mapping[str, Any], of: str) -> tuple[int, int | None]:
    low = _integer(schema.get(f"min{of}", 0))
    high = _integer(schema[f"max{of}"]) if f"max{of}" in schema else None
    if low < 0 or (high is not None and high < low):
        raise Unsupported
    return low, high


def _times(schema: Mapping[str, Any], of: str) -> str:
    low, high = _limits(schema, of)
    return f"{{{low},{'' if high is None else high}}}"


def _more(expression: str, low: int, high: int | None) -> str:
    if high == 0:
        return ""
    return f" ({expression}){{{low},{'' if high is None else high}}}"
