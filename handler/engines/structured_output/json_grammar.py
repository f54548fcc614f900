"""Converts JSON schemas to xgrammar's EBNF, without arbitrary whitespace.

xgrammar in GenAI always accepts any amount of whitespace, and small models often generate nothing else. These grammars
allow only the whitespace that Python's `json.dumps` writes, and numbers with a limited number of digits. Schemas with
unsupported keywords are converted by xgrammar itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from handler.core.json_pointer import target_of
from handler.engines.structured_output.characters import literal
from handler.engines.structured_output.formats import FORMATS
from handler.engines.structured_output.nodes import choice_of, counts, either
from handler.engines.structured_output.regex import regex_grammar

# Ranges of numbers are converted here, because GenAI's xgrammar accepts numbers outside a range. Exponents are not
# allowed. A number with decimals is treated as an integer in units of its last decimal, so ranges of integers suffice.

_DIGITS = 19  # digits before the point, if there is no bound
_DECIMALS = 6
_EXACT = 15  # digits that a double represents exactly, so that no number is rounded to an exclusive bound


def integers(limits: Mapping[str, Any]) -> str | None:
    """Convert a range of integers.

    Args:
        limits: values of `minimum`, `exclusiveMinimum`, `maximum` and `exclusiveMaximum`.

    Returns:
        An EBNF element, or None if a limit is not a number or there is no integer between the limits.
    """
    return _between(limits, 0)


def numbers(limits: Mapping[str, Any]) -> str | None:
    """Convert a range of numbers with decimals, as `integers` does. Also return None if a limit has too many digits."""
    bounds = [value for value in limits.values() if _is_number(value)]
    available = _EXACT - max((len(str(math.floor(abs(value)))) for value in bounds), default=0)
    needed = max(map(_decimals, bounds), default=0)
    return _between(limits, max(needed, min(_DECIMALS, available))) if needed <= available else None


def _between(limits: Mapping[str, Any], decimals: int) -> str | None:
    bounds = _bounds(limits, decimals)
    return None if bounds is None else either(_signed(*bounds, decimals))


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _decimals(value: float) -> int:
    exponent = Decimal(str(value)).normalize().as_tuple().exponent
    return max(0, -int(exponent))


def _bounds(limits: Mapping[str, Any], decimals: int) -> tuple[int, int] | None:
    """Return the smallest and largest number in units of the last decimal; None if a limit is invalid or none fits."""
    if not all(map(_is_number, limits.values())):
        return None
    units = {name: Decimal(str(value)).scaleb(decimals) for name, value in limits.items()}
    low, high = 1 - 10 ** (_DIGITS + decimals), 10 ** (_DIGITS + decimals) - 1
    for name, value in units.items():
        if name == "minimum":
            low = max(low, math.ceil(value))
        elif name == "exclusiveMinimum":
            low = max(low, math.floor(value) + 1)
        elif name == "maximum":
            high = min(high, math.floor(value))
        else:
            high = min(high, math.ceil(value) - 1)
    return (low, high) if low <= high else None


def _signed(low: int, high: int, decimals: int) -> Iterator[str]:
    if low < 0:
        yield f'"-" {_Range(max(1, -high), -low, decimals).grammar}'
    if high >= 0:
        yield _Range(max(0, low), high, decimals).grammar


class _Range:
    """A grammar for a range of non-negative numbers, built digit by digit.

    No two branches begin with the same digit. Otherwise, GenAI's xgrammar would sometimes allow other numbers.

    Args:
        low: the smallest number, in units of the last decimal.
        high: the largest number, in units of the last decimal.
        decimals: number of decimals.
    """

    def __init__(self, low: int, high: int, decimals: int) -> None:
        self._decimals = decimals
        self._unit = 10**decimals
        self._low, self._high = low, high
        self._digits = len(str(high // self._unit))
        zero = self._fraction(0)
        branches = _branches(lambda digit: self._more(digit, 1), least=1)
        self.grammar = either(branches if zero is None else [f'"0" {zero}', *branches])

    def _more(self, value: int, length: int) -> str | None:
        """Return the grammar for the text after the first `length` digits, which are `value`.

        Return None if no number in the range begins with these digits.
        """
        inside = [self._contains(value, more, self._unit) for more in range(self._digits - length + 1)]
        if None in inside:
            end = self._fraction(value)
            branches = _branches(lambda digit: self._more(value * 10 + digit, length + 1)) if len(inside) > 1 else []
            return either([*([] if end is None else [end]), *branches])
        counts = [more for more, is_inside in enumerate(inside) if is_inside]
        return f"{_any(counts[0], counts[-1])} {self._fraction(value * 10 ** counts[0])}" if counts else None

    def _fraction(self, value: int, num_decimals: int = 0) -> str | None:
        """Return the grammar for the text after `value`, or None if no number in the range begins with it.

        Trailing zeros are optional, as is the point before them.

        Args:
            num_decimals: number of decimals in `value`, which has no point. If it is 0, the point may follow.
        """
        more = self._decimals - num_decimals
        is_inside = self._contains(value, more)
        if is_inside and (num_decimals or not more):
            return _any(0, more)
        if is_inside is False:
            return None
        branches = _branches(lambda digit: self._fraction(value * 10 + digit, num_decimals + 1))
        if not num_decimals:
            branches = [f'"." {either(branches)}']
        return either(['""', *branches] if self._contains(value * 10**more, 0) else branches)

    def _contains(self, value: int, more: int, unit: int = 1) -> bool | None:
        """Return whether the range contains all numbers that are `value` followed by `more` digits, in this unit.

        Return None if only some of these numbers are in the range.
        """
        least = value * 10**more * unit
        most = (value + 1) * 10**more * unit - 1
        if self._low <= least and most <= self._high:
            return True
        return False if most < self._low or least > self._high else None


def _branches(follows: Callable[[int], str | None], least: int = 0) -> list[str]:
    """Return a branch for each digit with its continuation. Adjacent digits with equal continuations share a branch."""
    groups: list[tuple[int, int, str]] = []
    for digit in range(least, 10):
        after = follows(digit)
        if after is not None and groups and groups[-1][1:] == (digit - 1, after):
            groups[-1] = (groups[-1][0], digit, after)
        elif after is not None:
            groups.append((digit, digit, after))
    return [f"[{first}-{last}] {after}" for first, last, after in groups]


def _any(low: int, high: int) -> str:
    """Return the grammar for `low` to `high` digits. Avoid {0,0}, which xgrammar reads as an unlimited repetition."""
    return f"[0-9]{counts(low, high)}" if high else '""'


_ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$comment", "$defs", "definitions", "discriminator",
))  # fmt: skip
"""Keywords that do not affect validity."""

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")

# `string_rest` is recursive and has a look-ahead, which makes xgrammar much faster: a token takes less than 1 ms,
# compared with 18 ms for `char*` with a rule for a character.
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


_MAX_DEPTH = 64  # of nested subschemas; a fixed limit, so that the engine and its check give the same result
_MAX_RANGES = 1 << 16  # total characters of all ranges of numbers in a grammar


class UnsupportedSchema(Exception):
    """The schema contains an unsupported keyword, or an unsupported value of a keyword."""


def json_grammar(schema: Any) -> str | None:
    """Convert a decoded schema to a grammar with the rule `root`, or return None if the schema is not supported."""
    try:
        return _Grammar(schema).text
    except UnsupportedSchema:
        return None


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
        """Convert a subschema to a single EBNF element, which can be repeated or combined with others."""
        if self._depth == _MAX_DEPTH:
            raise UnsupportedSchema
        self._depth += 1
        expression = self._of_schema(schema)
        self._depth -= 1
        return expression

    def _of_schema(self, schema: Any) -> str:
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            raise UnsupportedSchema
        schema = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        if not schema:
            return "value"
        for name, make in _BY_KEYWORD.items():
            if name in schema:
                if not schema.keys() <= {name, "type"}:
                    raise UnsupportedSchema
                return make(self, schema[name])
        types = schema.get("type", "object" if "properties" in schema else None)  # as xgrammar assumes
        if not isinstance(types, list):
            return self._of_type(types, schema)
        keywords = schema.keys() - {"type"}
        by_type = {kind: keywords & set(_KEYWORDS.get(kind, ())) for kind in map(str, types)}
        if not types or keywords != set().union(*by_type.values()):
            raise UnsupportedSchema
        return either(
            [self._of_type(kind, {"type": kind, **{name: schema[name] for name in by_type[kind]}}) for kind in by_type]
        )

    def _of_type(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind not in _TYPES or not schema.keys() <= {"type", *_KEYWORDS.get(kind, ())}:
            raise UnsupportedSchema
        if kind == "string" and len(schema) > 1:
            return self._string(schema)
        if kind in _RANGES and len(schema) > 1:
            element = _RANGES[kind]({name: value for name, value in schema.items() if name != "type"})
            if element is None:
                raise UnsupportedSchema
            self._num_ranges += len(element)
            if self._num_ranges > _MAX_RANGES:
                raise UnsupportedSchema
            return element
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        return str(kind)

    def _string(self, schema: Mapping[str, Any]) -> str:
        """Convert a string with a pattern, a known format, or limits of its length."""
        expression = schema.get("pattern", FORMATS.get(str(schema.get("format"))))
        if len(schema) == 2 and isinstance(expression, str):
            return self._rule(f'"\\"" {regex_grammar(expression, in_json=True)} "\\""')
        if not schema.keys() <= {"type", "minLength", "maxLength"}:
            raise UnsupportedSchema
        # Escapes are not allowed, because they would need a slow rule.
        return self._rule(f'"\\"" [^"\\\\\\x00-\\x1f]{counts(*_limits(schema, "Length"))} "\\""')

    def _array(self, schema: Mapping[str, Any]) -> str:
        if len(schema) == 1:
            return "any_array"
        item = self._expression(schema.get("items", True))
        return self._repeated("[", item, "]", *_limits(schema, "Items"))

    def _repeated(self, begin: str, item: str, end: str, low: int, high: int | None) -> str:
        """Return the element for `low` to `high` items between brackets, separated by commas."""
        if high == 0:
            return f'"{begin}{end}"'
        more = "" if high == 1 else f' (", " {item}){counts(max(low, 1) - 1, None if high is None else high - 1)}'
        filled = f'"{begin}" {item}{more} "{end}"'
        return self._rule(filled if low else f'"{begin}{end}" | {filled}')

    def _object(self, schema: Mapping[str, Any]) -> str:
        if not schema.get("properties") and (schema.keys() & _NAMES or _is_open(schema.get("additionalProperties"))):
            return self._open_object(schema)
        if schema.keys() & _NAMES:
            raise UnsupportedSchema
        properties, required = schema.get("properties", {}), schema.get("required", [])
        additional = schema.get("additionalProperties", False)
        # If a schema names properties, no others are generated, even if it allows them, as if the keyword were missing.
        if not isinstance(properties, dict) or not (
            additional is False or (properties and (additional is True or additional == {}))
        ):
            raise UnsupportedSchema
        if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
            raise UnsupportedSchema
        if not properties:
            return '"{}"' if "additionalProperties" in schema else "any_object"
        # The rest of the object from each property on, built backwards. `first` is used if no property precedes the
        # rest, and `later` if a property does.
        first = later = '"}"'
        for name, schema in reversed(properties.items()):
            pair = f"{literal(json.dumps(name, ensure_ascii=False) + ': ')} {self._expression(schema)} {later}"
            ends = ("", "") if name in required else (f" | {first}", f" | {later}")
            first, later = self._rule(pair + ends[0]), self._rule(f'", " {pair}{ends[1]}')
        return self._rule(f'"{{" {first}')

    def _open_object(self, schema: Mapping[str, Any]) -> str:
        """Convert an object whose names are not fixed."""
        low, high = _limits(schema, "Properties")
        patterns, additional = schema.get("patternProperties"), schema.get("additionalProperties", True)
        if low > 1 or schema.get("required") or (patterns is not None and "propertyNames" in schema):
            raise UnsupportedSchema  # a name may be repeated, so the number of names is not the number of properties
        name, value = self._expression({"type": "string", **_mapping(schema.get("propertyNames", {}))}), additional
        if patterns is not None:
            if len(_mapping(patterns)) != 1:
                raise UnsupportedSchema
            [(pattern, value)] = patterns.items()
            name = self._expression({"type": "string", "pattern": pattern})
        if value is False:
            raise UnsupportedSchema
        return self._repeated("{", f'{name} ": " {self._expression(value)}', "}", low, high)

    def _reference(self, path: Any) -> str:
        if not isinstance(path, str) or not path.startswith("#") or "~" in path or "%" in path:
            raise UnsupportedSchema
        if path not in self._references:
            target = target_of(path, self._root)
            name = self._references[path] = f"ref{len(self._references)}"
            self._rules.append(f"{name} ::= {self._expression(target)}")
        return self._references[path]

    def _any_of(self, schemas: Any) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise UnsupportedSchema
        return either([self._expression(schema) for schema in schemas])

    def _values(self, values: Any) -> str:
        if not isinstance(values, list) or not values:
            raise UnsupportedSchema
        return choice_of(json.dumps(value, ensure_ascii=False) for value in values)


_BY_KEYWORD: Mapping[str, Callable[[_Grammar, Any], str]] = {
    "$ref": _Grammar._reference,
    "enum": _Grammar._values,
    "const": lambda grammar, value: grammar._values([value]),
    "anyOf": _Grammar._any_of,
    "oneOf": _Grammar._any_of,
}

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_RANGES = {"integer": integers, "number": numbers}

_KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "array": ("items", "minItems", "maxItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties",
    ),
}  # fmt: skip

_NAMES = frozenset(("patternProperties", "propertyNames", "minProperties", "maxProperties"))
"""Keywords that are supported only in objects without `properties`."""


def _is_open(additional: Any) -> bool:
    return isinstance(additional, dict) and bool(additional)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UnsupportedSchema
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedSchema
    return value


def _limits(schema: Mapping[str, Any], of: str) -> tuple[int, int | None]:
    low = _integer(schema.get(f"min{of}", 0))
    high = _integer(schema[f"max{of}"]) if f"max{of}" in schema else None
    if low < 0 or (high is not None and high < low):
        raise UnsupportedSchema
    return low, high
