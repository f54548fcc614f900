"""Converts JSON schemas to GBNF in the same form as llama.cpp (common/json-schema-to-grammar.cpp of b11434).

The grammar shows how ambiguous a schema is. It is also sent instead of a schema with a regular expression or a format:
llama.cpp accepts any string where it does not support the expression, and ignores most formats.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from handler.core.json_pointer import target_of
from handler.engines.structured_output.characters import literal
from handler.engines.structured_output.formats import FORMATS
from handler.engines.structured_output.json_grammar import integers, numbers
from handler.engines.structured_output.keywords import (
    BOUNDS,
    HEADS,
    LIMITING,
    NEVER,
    OF_TYPE,
    Types,
    is_idle,
    names_in,
)
from handler.engines.structured_output.nodes import choice_of, counts, either
from handler.engines.structured_output.regex import regex_grammar

_MAX_DEPTH = 64  # of nested subschemas, which llama.cpp visits by recursion
_MAX_BOUND = 1 << 53  # of integers; llama.cpp rounds larger ones, and takes 64 bits of them
_MANY_VALUES = 32  # of an enum; llama.cpp tries every token with each of them
_MANY_PROPERTIES = 16  # optional properties of an object
_MAX_REPEATED = 2000  # of an element; llama.cpp refuses more
_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_OF_OBJECT = ("properties", "required", "additionalProperties")
_NO_SCHEMA = "the schema, or a part of it, is neither an object nor `true`"
_NATIVE = ("date", "time", "date-time", "uuid")  # formats that llama.cpp enforces

_SPACE = r"""
space ::= | " " | "\n"{1,2} [ \t]{0,20}
gap ::= space
"""
_COMMON = r"""
boolean ::= "true" | "false"
integer ::= "-"? ([0] | [1-9] [0-9]{0,15})
number ::= integer ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,15})?
value ::= object | array | string | number | boolean | null
object ::= "{" space ( string ":" gap value ("," gap string ":" gap value)* )? space "}"
array ::= "[" space ( value ("," gap value)* )? space "]"
char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})
string ::= "\"" char* "\""
null ::= "null"
"""


_COMPACT = """
space ::= ""
gap ::= " "
"""


class Unconvertible(ValueError):
    """A subschema cannot be converted. The message says where it stands."""


def schema_grammar(schema: Any) -> SchemaGrammar:
    """Convert a schema. If it would be slow in llama.cpp's own form, use a form with less white space.

    Raises:
        ValueError: a subschema is nested too deeply, or cannot be converted.
    """
    written = SchemaGrammar(schema)
    return SchemaGrammar(schema, is_compact=True) if written.unenforced else written


class SchemaGrammar:
    """A grammar made from a schema. It enforces all keywords, including those that llama.cpp would ignore.

    Raises:
        ValueError: a keyword or a subschema cannot be converted.

    Attributes:
        text: the grammar.
        unenforced: the first keyword that llama.cpp ignores or is slow with when it converts the schema itself; "" if
            there is none.
    """

    def __init__(self, schema: Any, *, is_compact: bool = False) -> None:
        self._is_compact = is_compact
        self._root = schema
        self._rules: list[str] = []
        self._references: dict[str, str] = {}  # $ref -> rule
        self._types = Types(schema)
        self._is_mixed = False  # whether an object may have other properties beside its `properties`
        self.unenforced = ""
        root = self._element(schema, 0)
        if self._is_mixed and is_compact:
            raise ValueError(
                f"llama-server does not enforce {self.unenforced!r} in a schema with an object that has 'properties' "
                "but allows additional ones: set additionalProperties to false in that object"
            )
        space = _COMPACT if is_compact else _SPACE
        self.text = "\n".join([f"root ::= {root}", *self._rules]) + space + _COMMON

    def _convert(self, keyword: str) -> None:
        """Record a keyword for which the grammar is sent instead of the schema."""
        self.unenforced = self.unenforced or keyword

    def _rule(self, expression: str) -> str:
        self._rules.append(f"r{len(self._rules)} ::= {expression}")
        return f"r{len(self._rules) - 1}"

    def _element(self, schema: Any, depth: int) -> str:
        """Return a GBNF element for a subschema, which can be repeated or combined with others.

        Raises:
            Unconvertible: the subschema, or a part of it, cannot be converted.
        """
        try:
            return self._written(schema, depth)
        except Unconvertible:
            raise
        except ValueError as error:
            raise Unconvertible(f"{error}{_position(schema, self._root)}") from None

    def _written(self, schema: Any, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise ValueError(f"a schema for llama-server must not have more than {_MAX_DEPTH} nested subschemas")
        if schema is True:
            self._convert("true")
            return "value"
        if not isinstance(schema, dict):
            raise ValueError(_NO_SCHEMA)
        if "$ref" in schema:
            self._check_beside(schema, "$ref")
            return self._reference(schema["$ref"], depth)
        for name in ("oneOf", "anyOf"):
            if name in schema:
                self._check_beside(schema, name)
                return either([self._element(part, depth + 1) for part in _list(schema, name)])
        for name in ("const", "enum"):
            if name in schema:
                self._check_beside(schema, name)
                return _json(schema["const"]) if name == "const" else self._values(_list(schema, "enum"))
        kind = schema.get("type")
        if isinstance(kind, list):
            return either([self._written({**schema, "type": type}, depth + 1) for type in _list(schema, "type")])
        return self._of_type(kind, schema, depth)

    def _check_beside(self, schema: Mapping[str, Any], head: str) -> None:
        """Raise ValueError if a schema that has the keyword `head` also has keywords that llama.cpp then ignores."""
        for name in _limiting(schema):
            is_implied = name == "type" and self._types.are(schema[head], head, schema["type"])
            if name != head and not is_implied:
                raise ValueError(f"llama-server ignores {name!r} in a JSON schema with {head!r}: remove one of them")

    def _of_type(self, kind: Any, schema: Mapping[str, Any], depth: int) -> str:
        has_properties = "properties" in schema or schema.get("additionalProperties", True) is not True
        if "allOf" in schema and kind in (None, "object", "string") and not (kind != "string" and has_properties):
            return self._all_of(schema, depth)
        if kind == "object" or (kind is None and has_properties):
            return self._object(schema, depth)
        if kind == "array" or (kind is None and schema.keys() & {"items", "prefixItems"}):
            return self._array(schema, depth)
        if kind == "string" or (kind is None and schema.keys() & {"pattern", "format", "minLength", "maxLength"}):
            _check_of_type(schema, "string", OF_TYPE["string"])
            return self._string(schema)
        if kind in ("integer", "number"):
            return self._number(kind, schema)
        if kind is not None and kind not in _TYPES:
            raise ValueError(f"'type' in the schema must be one of {', '.join(_TYPES)}, or a list of them")
        if kind is None:
            if names := _limiting(schema):
                raise ValueError(f"llama-server ignores {names[0]!r} in a JSON schema without 'type': add the type")
            return "value"
        _check_of_type(schema, str(kind), ())
        return str(kind)

    def _number(self, kind: str, schema: Mapping[str, Any]) -> str:
        _check_of_type(schema, kind, BOUNDS)
        bounds = {name: schema[name] for name in BOUNDS if name in schema}
        if not bounds:
            return kind
        for name, bound in bounds.items():
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise ValueError(f"{name!r} in the schema must be a number")
        allowed = integers(bounds) if kind == "integer" else numbers(bounds)
        if allowed is None:
            raise ValueError(f"the schema has no {kind} within bounds that llama-server can enforce")
        has_two = {"minimum", "exclusiveMinimum"} <= bounds.keys() or {"maximum", "exclusiveMaximum"} <= bounds.keys()
        is_enforced = kind == "integer" and not has_two and all(abs(bound) < _MAX_BOUND for bound in bounds.values())
        if not is_enforced:
            self._convert(next(iter(bounds)))
        return allowed

    def _values(self, values: Sequence[Any]) -> str:
        if len(values) > _MANY_VALUES:
            self._convert("enum")
        return choice_of(map(_text, values)) if self._is_compact else either(map(_json, values))

    def _string(self, schema: Mapping[str, Any]) -> str:
        pattern, format = schema.get("pattern"), schema.get("format")
        if pattern is not None and not isinstance(pattern, str):
            raise ValueError("'pattern' in the schema must be a string")
        expression = pattern if isinstance(pattern, str) else FORMATS.get(str(format))
        if expression is None:
            minimum, maximum = _counts(schema, "minLength", "maxLength")
            if not minimum and maximum is None:
                return "string"
            return self._rule(f'"\\"" char{counts(minimum, maximum)} "\\""')
        if pattern is not None or format not in _NATIVE:
            self._convert("format" if pattern is None else "pattern")
        beside = sorted(schema.keys() & {"minLength", "maxLength", *(("format",) if pattern is not None else ())})
        if beside:
            raise ValueError(
                f"llama-server ignores {beside[0]!r} in a JSON schema with a pattern or format: remove one of them"
            )
        return self._rule(f'"\\"" {regex_grammar(expression, in_json=True)} "\\""')

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        read = ("items", "prefixItems", "minItems", "maxItems")
        _check_of_type(schema, "array", (*read, "unevaluatedItems") if schema.keys() & set(read[:2]) else read)
        minimum, maximum = _counts(schema, "minItems", "maxItems")
        items = schema.get("prefixItems", schema.get("items", {}))
        if schema.keys() >= {"items", "prefixItems"} or items is False:  # llama.cpp ignores prefixItems, refuses False
            self._convert("items")
        if items is False:
            items, maximum = {}, 0
        if isinstance(items, list):
            if minimum > len(items) or (maximum is not None and maximum < len(items)):
                raise ValueError(
                    f"llama-server generates exactly {len(items)} items for a list of {len(items)} schemas: change "
                    "'minItems' and 'maxItems' to allow this number"
                )
            parts = ' "," gap '.join(self._element(item, depth + 1) for item in items)
            return self._rule(f'"[" space {parts} space "]"')
        item = self._element(items, depth + 1)
        if maximum == 0:
            return '("[" space "]")'
        more = f'("," gap {item}){counts(max(minimum - 1, 0), None if maximum is None else maximum - 1)}'
        return self._rule(f'"[" space {f"{item} {more}" if minimum else f"({item} {more})?"} space "]"')

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        if not isinstance(properties, dict):
            raise ValueError("'properties' in the schema must be an object")
        is_closed = schema.keys() & {"properties", "additionalProperties"}
        _check_of_type(schema, "object", (*_OF_OBJECT, "unevaluatedProperties") if is_closed else _OF_OBJECT)
        required = _required(schema, properties)
        if "properties" not in schema and others in (None, True, {}):
            return "object"
        pairs = [(name, part, name in required) for name, part in properties.items()]
        self._is_mixed = self._is_mixed or bool(properties and others)
        other = f'string ":" gap {self._element({} if others is True else others, depth + 1)}' if others else ""
        return self._pairs(pairs, other, depth)

    def _all_of(self, schema: Mapping[str, Any], depth: int) -> str:
        """Return an element for all parts of an `allOf`: the values of all enums, or an object with all properties."""
        listed = _list(schema, "allOf")
        if len(listed) == 1 and {*_limiting(schema)} <= {"allOf", "type"}:
            self._check_beside(schema, "allOf")
            self._convert("allOf")
            return self._element(listed[0], depth + 1)
        parts = [self._resolved(part) for part in listed]
        if all("enum" in part for part in parts):
            self._check_beside(schema, "allOf")
            for part in parts:
                self._check_beside(part, "enum")
            return self._values(_common([_list(part, "enum") for part in parts]))
        return self._merged([{name: schema[name] for name in schema if name != "allOf"}, *parts], depth)

    def _merged(self, parts: Sequence[Mapping[str, Any]], depth: int) -> str:
        """Return an object with the properties of all parts. llama.cpp requires all of them."""
        pairs: list[tuple[str, Any, bool]] = []
        for part in parts:
            for name in _limiting(part):
                if name not in ("type", "properties", "required"):
                    raise ValueError(
                        f"llama-server ignores {name!r} with several schemas in 'allOf': merge the schemas"
                    )
            if part.get("type", "object") != "object" or not isinstance(part.get("properties", {}), dict):
                raise ValueError(
                    "llama-server supports several schemas in 'allOf' only if all are objects or enums: merge them"
                )
            pairs += [(name, value, True) for name, value in part.get("properties", {}).items()]
        names = {name for name, _, _ in pairs}
        if len(names) < len(pairs):
            raise ValueError(
                "llama-server does not support the same property in several schemas of 'allOf': merge them"
            )
        for part in parts:
            _required(part, names)
        return self._pairs(pairs, "", depth)

    def _pairs(self, pairs: Sequence[tuple[str, Any, bool]], other: str, depth: int) -> str:
        written = [(f'{_json(name)} ":" gap {self._element(part, depth + 1)}', is_required)
                   for name, part, is_required in pairs]  # fmt: skip
        required = ' "," gap '.join(self._rule(pair) for pair, is_required in written if is_required)
        optional = [self._rule(pair) for pair, is_required in written if not is_required]
        starts = list(self._optional(optional, other))
        if len(starts) > _MANY_PROPERTIES:
            self._convert("properties")
        if required and starts:
            required += f' ("," gap {either(starts)})?'
        elif starts:
            required = f"{either(starts)}?"
        return self._rule(f'"{{" space {required} space "}}"')

    def _optional(self, pairs: Sequence[str], other: str) -> Iterator[str]:
        """Yield an element for each optional property that may be the first one, followed by those after it."""
        rest, starts = "", []
        if other:
            name = self._rule(other)
            starts.append(f'{name} ("," gap {name})*')
            rest = self._rule(f'("," gap {name})*')
        for pair in reversed(pairs):
            starts.append(f"{pair} {rest}")
            rest = self._rule(f'("," gap {pair})? {rest}')
        yield from reversed(starts)

    def _resolved(self, part: Any) -> Mapping[str, Any]:
        for _ in range(_MAX_DEPTH):
            if not isinstance(part, dict):
                break
            if "$ref" not in part:
                return part
            part = self._target(part["$ref"])
        raise ValueError(_NO_SCHEMA)

    def _reference(self, path: Any, depth: int) -> str:
        target = self._target(path)
        if path == "#":
            self._convert("$ref")
        if path not in self._references:
            name = self._references[path] = f"ref{len(self._references)}"
            self._rules.append(f"{name} ::= {self._element(target, depth + 1)}")
        return self._references[path]

    def _target(self, path: Any) -> Any:
        if not isinstance(path, str) or not (path == "#" or path.startswith("#/")):
            raise ValueError(f"llama-server does not support the $ref {str(path)[:100]!r}")
        if (target := target_of(path, self._root)) is None:
            raise ValueError(f"the schema does not define the $ref {path[:100]!r}")
        return target


def _limiting(schema: Mapping[str, Any]) -> list[str]:
    """Return the keywords of a subschema that restrict its values."""
    return [name for name, value in schema.items() if name in LIMITING and not _is_neutral(name, value)]


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a keyword does not restrict values. An unknown `format` does not, according to JSON Schema."""
    is_open = name in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
    return is_idle(name, value) or (is_open and value in (True, {})) or (name == "format" and str(value) not in FORMATS)


def _check_of_type(schema: Mapping[str, Any], kind: str, enforced: Iterable[str]) -> None:
    """Raise ValueError if llama.cpp ignores a keyword that restricts values of a type."""
    ignored = {*HEADS, *NEVER, *OF_TYPE.get(kind, ())} - {*enforced}
    for name in _limiting(schema):
        if name in ignored:
            raise ValueError(f"llama-server does not enforce {name!r} in JSON schemas: remove it")


def _required(schema: Mapping[str, Any], properties: Container[str]) -> Sequence[str]:
    """Return the names of required properties.

    Raises:
        ValueError: they are not among the properties, so that llama.cpp ignores them.
    """
    required = names_in(schema.get("required", []))
    if not required and schema.get("required", []) != []:
        raise ValueError("'required' in the schema must be a list of names")
    for name in required:
        if name not in properties:
            raise ValueError(
                f"llama-server enforces 'required' only for names in 'properties': add {name!r} to 'properties'"
            )
    return required


def _counts(schema: Mapping[str, Any], lower: str, upper: str) -> tuple[int, int | None]:
    """Return the minimum and the maximum number of items or characters. 2.0 is a whole number, as in JSON Schema.

    Raises:
        ValueError: one is not a number of items, or too large for llama.cpp.
    """
    for name in (lower, upper):
        value = schema.get(name, 0)
        if type(value) not in (int, float) or value < 0 or value % 1:
            raise ValueError(f"{name!r} in the schema must be a whole number of at least 0")
    minimum, maximum = int(schema.get(lower, 0)), int(schema[upper]) if upper in schema else None
    if minimum > _MAX_REPEATED:
        raise ValueError(f"{lower!r} in the schema must be at most {_MAX_REPEATED} for llama-server")
    if maximum is not None and maximum < minimum:
        raise ValueError(f"{upper!r} in the schema is less than {lower!r}")
    return minimum, maximum


def _position(schema: Any, root: Any) -> str:
    """Return where a subschema stands in the schema, for an error message.

    Returns:
        "" if it is the schema itself, or if the same value, such as a number, occurs several times.
    """
    paths: list[str] = []
    waiting: list[tuple[Any, str]] = [(root, "")]
    while waiting:
        value, path = waiting.pop()
        if value is schema:
            paths.append(path.removeprefix("."))
        members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        waiting += [(item, f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]") for key, item in members]
    return f" (at {paths[0]})" if len(paths) == 1 and paths[0] else ""


def _common(lists: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Return the values that are in all lists."""
    others = [{_json(value) for value in values} for values in lists[1:]]
    common = [value for value in lists[0] if all(_json(value) in other for other in others)]
    if not common:
        raise ValueError("the enums in an 'allOf' of the schema have no common value")
    return common


def _list(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    values = schema[name]
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name!r} in the schema must be a list with at least one element")
    return values


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _json(value: Any) -> str:
    return literal(_text(value))
