"""JSON schemas as grammars that leave no room for white space, for xgrammar's EBNF.

GenAI has xgrammar take white space of any length between JSON's marks, and offers no other way. A small model often
goes on with nothing else until its tokens are spent. Here answers are written as Python's `json.dumps` does it, and
numbers have no more digits than a double can tell apart. What this does not know is left to xgrammar's own converter.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from handler.engines.structured_output.number_grammar import integers, numbers

_NOTES = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "discriminator",
    )
)
"""Keywords that say nothing of what is valid."""

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")

# A string's rest calls itself, and says what comes after it, as xgrammar is much faster then: `char*`, with a rule for
# a character, took 18 ms a token of computing, and this takes less than 1.
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


class Unknown(Exception):
    """The schema has a keyword, or a value of one, that has no rule here."""


def json_grammar(schema: Any) -> str | None:
    """The grammar of a decoded schema, with the rule `root`; None where the schema is beyond what is known here."""
    try:
        return _Grammar(schema).text
    except (Unknown, RecursionError):
        return None


def literal(text: str) -> str:
    """A string in EBNF: what is not plain is escaped by its code point."""
    plain = (c if c.isascii() and c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return '"' + "".join(plain) + '"'


def one_of(texts: Iterable[str]) -> str:
    """Any of these, as one element. No two branches begin with the same character: where a dozen do, GenAI's xgrammar
    takes some for others, and allows what is none of them."""
    branches = []
    for _, group in itertools.groupby(sorted(set(texts)), lambda text: text[:1]):
        several = list(group)
        shared = _shared(several[0], several[-1])
        rests = [text[len(shared) :] for text in several]
        branches.append(f"{literal(shared)} {one_of(rests)}" if len(rests) > 1 else literal(shared))
    return branches[0] if len(branches) == 1 else _either(branches)


def _shared(first: str, last: str) -> str:
    """What both begin with, and so all that come between them."""
    length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


class _Grammar:
    def __init__(self, schema: Any) -> None:
        self._whole = schema
        self._rules: list[str] = []
        self._referred: dict[str, str] = {}  # $ref -> rule
        root = self._expression(schema)
        self.text = "\n".join([f"root ::= {root}", *self._rules]) + _COMMON

    def _rule(self, expression: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name} ::= {expression}")
        return name

    def _expression(self, schema: Any) -> str:
        """What stands for the schema: one element, which may be repeated or follow others."""
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            raise Unknown
        said = {name: value for name, value in schema.items() if name not in _NOTES}
        if not said:
            return "value"
        for name, make in _BY_KEYWORD.items():
            if name in said:
                if not said.keys() <= {name, "type"}:
                    raise Unknown
                return make(self, said[name])
        types = said.get("type")
        if not isinstance(types, list):
            return self._of_type(types, said)
        keywords = said.keys() - {"type"}
        own = {one: keywords & set(_KEYWORDS.get(str(one), ())) for one in map(str, types)}
        if not types or keywords != set().union(*own.values()):
            raise Unknown
        return _either([self._of_type(one, {"type": one, **{name: said[name] for name in own[one]}}) for one in own])

    def _of_type(self, kind: Any, said: Mapping[str, Any]) -> str:
        if kind not in _TYPES or not said.keys() <= {"type", *_KEYWORDS.get(kind, ())}:
            raise Unknown
        if kind == "string" and len(said) > 1:
            # No escapes: they would take a rule, and that is slow.
            return self._rule(f'"\\"" [^"\\\\\\x00-\\x1f]{_times(said, "Length")} "\\""')
        if kind in _RANGES and len(said) > 1:
            found = _RANGES[kind]({name: value for name, value in said.items() if name != "type"})
            if found is None:
                raise Unknown
            return found
        if kind == "array":
            return self._array(said)
        if kind == "object":
            return self._object(said)
        return str(kind)

    def _array(self, said: Mapping[str, Any]) -> str:
        if len(said) == 1:
            return "any_array"
        least, most = _limits(said, "Items")
        item = self._expression(said.get("items", True))
        filled = f'"[" {item}' + _more(f'", " {item}', max(least, 1) - 1, None if most is None else most - 1) + ' "]"'
        if most == 0:
            return '"[]"'
        return self._rule(filled if least else f'"[]" | {filled}')

    def _object(self, said: Mapping[str, Any]) -> str:
        properties, required = said.get("properties", {}), said.get("required", [])
        others = said.get("additionalProperties", False)
        # That others are allowed is no more than where nothing is said of them: they do not come beside named ones.
        if not isinstance(properties, dict) or not (
            others is False or (properties and (others is True or others == {}))
        ):
            raise Unknown
        if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
            raise Unknown
        if not properties:
            return '"{}"' if "additionalProperties" in said else "any_object"
        # What may come after each property, from the last one back: when it is the first to be written, or not.
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
            raise Unknown
        if path not in self._referred:
            target = self._whole
            for part in path[1:].split("/")[1:]:
                if not isinstance(target, dict) or part not in target:
                    raise Unknown
                target = target[part]
            name = self._referred[path] = f"ref{len(self._referred)}"
            self._rules.append(f"{name} ::= {self._expression(target)}")
        return self._referred[path]

    def _any_of(self, schemas: Any) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise Unknown
        return _either([self._expression(schema) for schema in schemas])

    def _values(self, values: Any) -> str:
        if not isinstance(values, list) or not values:
            raise Unknown
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


def _either(expressions: Sequence[str]) -> str:
    return f"({' | '.join(expressions)})"


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unknown
    return value


def _limits(said: Mapping[str, Any], of: str) -> tuple[int, int | None]:
    least = _whole(said.get(f"min{of}", 0))
    most = _whole(said[f"max{of}"]) if f"max{of}" in said else None
    if least < 0 or (most is not None and most < least):
        raise Unknown
    return least, most


def _times(said: Mapping[str, Any], of: str) -> str:
    least, most = _limits(said, of)
    return f"{{{least},{'' if most is None else most}}}"


def _more(expression: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    return f" ({expression}){{{least},{'' if most is None else most}}}"
