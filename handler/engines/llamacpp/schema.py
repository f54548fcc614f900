"""Converts JSON schemas to GBNF in the same form as llama.cpp (common/json-schema-to-grammar.cpp of b11434).

The grammar shows how ambiguous a schema is. It is also sent instead of a schema with a regular expression or a format:
llama.cpp accepts any string where it does not support the expression, and ignores most formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from handler.core.numbers import is_digits
from handler.engines.structured_output.characters import choice_of, either
from handler.engines.structured_output.formats import FORMATS
from handler.engines.structured_output.json_grammar import integers
from handler.engines.structured_output.regex import regex_grammar

_MAX_DEPTH = 64  # of nested subschemas, which llama.cpp visits by recursion
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MANY_VALUES = 32  # of an enum; llama.cpp tries every token with each of them
_MANY_PROPERTIES = 16  # optional properties of an object
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


def schema_grammar(schema: Any) -> SchemaGrammar:
    """Convert a schema. If it would be slow in llama.cpp's own form, use a form with less white space.

    Raises:
        ValueError: a subschema is nested too deeply, or cannot be converted.
    """
    written = SchemaGrammar(schema)
    return written if written.is_native else SchemaGrammar(schema, is_compact=True)


class SchemaGrammar:
    """The grammar of a schema.

    Attributes:
        text: the grammar.
        is_native: whether llama.cpp itself would enforce all of the schema, and its grammar is not slow.
    """

    def __init__(self, schema: Any, *, is_compact: bool = False) -> None:
        self._is_compact = is_compact
        self._root = schema
        self._rules: list[str] = []
        self._references: dict[str, str] = {}  # $ref -> rule
        self._is_mixed = False  # whether an object may have other properties beside its `properties`
        self.is_native = True
        root = self._element(schema, 0)
        if self._is_mixed and is_compact:
            raise ValueError(
                "llama-server does not enforce 'pattern' or 'format' in a schema where an object has 'properties' and "
                "may have additional ones"
            )
        space = _COMPACT if is_compact else _SPACE
        self.text = "\n".join([f"root ::= {root}", *self._rules]) + space + _COMMON

    def _rule(self, expression: str) -> str:
        self._rules.append(f"r{len(self._rules)} ::= {expression}")
        return f"r{len(self._rules) - 1}"

    def _element(self, schema: Any, depth: int) -> str:
        """Return a GBNF element for a subschema, which can be repeated or combined with others."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"a schema for llama-server must not have more than {_MAX_DEPTH} nested subschemas")
        if not isinstance(schema, dict):
            raise ValueError("llama-server supports only objects as schemas")
        if "$ref" in schema:
            return self._reference(schema["$ref"], depth)
        for name in ("oneOf", "anyOf"):
            if name in schema:
                return either([self._element(part, depth + 1) for part in _list(schema, name)])
        kind = schema.get("type")
        if isinstance(kind, list):
            return either([self._element({**schema, "type": type}, depth + 1) for type in _list(schema, "type")])
        if "const" in schema:
            return _json(schema["const"])
        if "enum" in schema:
            return self._values(_list(schema, "enum"))
        return self._of_type(kind, schema, depth)

    def _of_type(self, kind: Any, schema: Mapping[str, Any], depth: int) -> str:
        has_properties = "properties" in schema or schema.get("additionalProperties", True) is not True
        if "allOf" in schema and kind in (None, "object", "string") and not (kind != "string" and has_properties):
            return self._all_of(_list(schema, "allOf"), depth)
        if kind == "object" or (kind is None and has_properties):
            return self._object(schema, depth)
        if kind == "array" or (kind is None and schema.keys() & {"items", "prefixItems"}):
            return self._array(schema, depth)
        if kind == "string" or (kind is None and schema.keys() & {"pattern", "format", "minLength", "maxLength"}):
            return self._string(schema)
        if kind == "integer":
            return integers({name: schema[name] for name in _BOUNDS if name in schema}) or "integer"
        return "value" if kind is None else str(kind)

    def _values(self, values: Sequence[Any]) -> str:
        self.is_native = self.is_native and len(values) <= _MANY_VALUES
        return choice_of(map(_text, values)) if self._is_compact else either(map(_json, values))

    def _string(self, schema: Mapping[str, Any]) -> str:
        pattern, format = schema.get("pattern"), schema.get("format")
        expression = pattern if isinstance(pattern, str) else FORMATS.get(str(format))
        if expression is None:
            minimum, maximum = schema.get("minLength", 0), schema.get("maxLength", "")
            return self._rule(f'"\\"" char{{{minimum},{maximum}}} "\\""') if minimum or maximum != "" else "string"
        self.is_native = self.is_native and pattern is None and format in _NATIVE
        beside = sorted(schema.keys() & {"minLength", "maxLength", *(("format",) if pattern is not None else ())})
        if beside:
            raise ValueError(f"llama-server does not enforce {beside[0]!r} beside a pattern or format")
        return self._rule(f'"\\"" {regex_grammar(expression, in_json=True)} "\\""')

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        items = schema.get("items", schema.get("prefixItems", {}))
        if isinstance(items, list):
            parts = ' "," gap '.join(self._element(item, depth + 1) for item in items)
            return self._rule(f'"[" space {parts} space "]"')
        item = self._element(items, depth + 1)
        minimum, maximum = int(schema.get("minItems", 0)), schema.get("maxItems")
        if maximum == 0:
            return '("[" space "]")'
        more = f'("," gap {item}){{{max(minimum - 1, 0)},{"" if maximum is None else int(maximum) - 1}}}'
        return self._rule(f'"[" space {f"{item} {more}" if minimum else f"({item} {more})?"} space "]"')

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        if "properties" not in schema and others in (None, True, {}):
            return "object"
        if not isinstance(properties, dict):
            raise ValueError("llama-server supports only an object as 'properties'")
        required = schema.get("required", ())
        pairs = [(name, part, name in required) for name, part in properties.items()]
        self._is_mixed = self._is_mixed or bool(properties and others)
        other = f'string ":" gap {self._element({} if others is True else others, depth + 1)}' if others else ""
        return self._pairs(pairs, other, depth)

    def _all_of(self, parts: Sequence[Any], depth: int) -> str:
        """Return the object with the properties of all parts. Those of an `anyOf` among them are optional."""
        values = [value for part in parts if isinstance(part, dict) for value in part.get("enum", ())]
        if values:
            return self._values(values)
        pairs: list[tuple[str, Any, bool]] = []
        for part in parts:
            branches = part.get("anyOf", part.get("oneOf")) if isinstance(part, dict) else None
            for branch in branches or [part]:
                target = self._resolved(branch)
                pairs += [(name, value, branches is None) for name, value in target.get("properties", {}).items()]
        return self._pairs(pairs, "", depth)

    def _pairs(self, pairs: Sequence[tuple[str, Any, bool]], other: str, depth: int) -> str:
        written = [(f'{_json(name)} ":" gap {self._element(part, depth + 1)}', is_required)
                   for name, part, is_required in pairs]  # fmt: skip
        required = ' "," gap '.join(self._rule(pair) for pair, is_required in written if is_required)
        optional = [self._rule(pair) for pair, is_required in written if not is_required]
        starts = list(self._optional(optional, other))
        self.is_native = self.is_native and len(starts) <= _MANY_PROPERTIES
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
        raise ValueError("llama-server supports only objects as schemas")

    def _reference(self, path: Any, depth: int) -> str:
        if path not in self._references:
            target = self._target(path)
            name = self._references[path] = f"ref{len(self._references)}"
            self._rules.append(f"{name} ::= {self._element(target, depth + 1)}")
        return self._references[path]

    def _target(self, path: Any) -> Any:
        target = self._root
        if not isinstance(path, str) or not path.startswith("#"):
            raise ValueError(f"llama-server does not support the $ref {str(path)[:100]!r}")
        for part in path[1:].split("/")[1:]:
            if isinstance(target, list) and is_digits(part) and int(part) < len(target):
                target = target[int(part)]
            elif isinstance(target, dict) and part in target:
                target = target[part]
            else:
                raise ValueError(f"the schema does not define the $ref {path[:100]!r}")
        return target


def _list(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    values = schema[name]
    if not isinstance(values, list) or not values:
        raise ValueError(f"llama-server supports only a list with elements as {name!r}")
    return values


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _json(value: Any) -> str:
    text = _text(value)
    for character, escape in (("\\", "\\\\"), ('"', '\\"'), ("\r", "\\r"), ("\n", "\\n")):
        text = text.replace(character, escape)
    return f'"{text}"'
