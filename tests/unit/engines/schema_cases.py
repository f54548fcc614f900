"""Cases for each keyword of a JSON schema: draft 2020-12's, and older ones that clients still send.

A case has an instance that the schema allows and one that it does not, or NONE where there is none to show. An engine
either takes the schema, and then the first instance and not the second, or refuses it by the name that stands here.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

STR, INT, NUM = {"type": "string"}, {"type": "integer"}, {"type": "number"}
ARR, OBJ = {"type": "array"}, {"type": "object"}
NONE: Any = object()


class Case(NamedTuple):
    """`lost` is what xgrammar does not follow, "" where it follows all; `lost_openvino` where that is another one."""

    schema: Any
    valid: Any
    invalid: Any
    lost: str = ""
    lost_openvino: str | None = None


class Text(str):
    """What an answer may be that no value is written as."""


def some(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def defined(defined: Any, **beside: Any) -> dict[str, Any]:
    return {"$defs": {"x": defined}, **beside}


ABC = {"a": INT, "b": INT, "c": INT}
REF = "#/$defs/x"

TYPES = [
    Case(STR, "a", 1),
    Case({"type": ["string", "null"]}, None, 1),
    Case({"type": ["string", "integer"], "maxLength": 2, "minimum": 3}, "ab", "abc"),
    Case({"type": ["string", "integer"], "maxLength": 2, "minimum": 3}, 3, 2),
    Case({"type": []}, NONE, 1, "type"),
    Case({"enum": [1, "a"]}, "a", "b"),
    Case({"const": "a"}, "a", "b"),
    Case({"type": "string", "enum": ["a", "b"]}, "a", "c"),
    Case({"type": "number", "const": 3}, 3, 4),
    Case({"type": "string", "enum": ["a", 1]}, "a", 1, "type beside enum"),
    Case({"type": "string", "const": 1}, NONE, 1, "type beside const"),
    Case({"enum": ["a", "abc"], "minLength": 2}, "abc", "a", "minLength beside enum"),
    Case({"enum": ["a", "b"], "const": "a"}, "a", "b", "enum beside const"),
    Case({}, 1, NONE),
    Case(
        {"title": "T", "description": "D", "default": 1, "examples": [2], "deprecated": True, "readOnly": True}, 3, NONE
    ),
    Case({**STR, "$comment": "C", "$id": "I", "$anchor": "A", "x-mine": {"not": {}}, "nullable": True}, "a", 1),
    Case({**STR, "contentEncoding": "base64", "contentMediaType": "text/plain"}, "?", 1),
]

NUMBERS = [
    *(
        case
        for kind in (INT, NUM)
        for case in (
            Case({**kind, "minimum": 3}, 3, 2),
            Case({**kind, "maximum": 3}, 3, 4),
            Case({**kind, "exclusiveMinimum": 3}, 4, 3),
            Case({**kind, "exclusiveMaximum": 3}, 2, 3),
            Case({**kind, "minimum": 3, "exclusiveMinimum": 5}, 6, 5),
            Case({**kind, "minimum": -100, "maximum": 2500}, -100, 2501),
            Case({**kind, "minimum": -100, "maximum": 2500}, 2500, -101),
            Case({**kind, "multipleOf": 5}, 5, 6, "multipleOf"),
        )
    ),
    Case({**NUM, "minimum": 0, "maximum": 1}, 0.5, 1.5),
    Case({**NUM, "exclusiveMinimum": 0}, 0.5, 0.0),
    Case({**NUM, "minimum": -1.5, "exclusiveMaximum": -0.5}, -1.5, -0.5),
    Case({**NUM, "multipleOf": 0.5}, 1.5, 1.2, "multipleOf"),
    Case({**INT, "format": "int32", "minLength": 3}, 5, "a"),
    Case({"minimum": 3}, 4, 2, "minimum without type"),
    Case({"multipleOf": 3}, 3, 2, "multipleOf without type"),
    Case(
        some(a={**INT, "minimum": 3}, b={**STR, "pattern": "^a$"}),
        {"a": 3, "b": "a"},
        {"a": 2, "b": "a"},
    ),
]

FORMATS = {
    "date": "2020-01-01",
    "time": "10:00:00Z",
    "date-time": "2020-01-01T10:00:00Z",
    "duration": "P1D",
    "email": "a@b.com",
    "hostname": "a.com",
    "ipv4": "1.2.3.4",
    "ipv6": "::1",
    "uri": "http://a.b/c",
    "uri-reference": "a/b",
    "uri-template": "a{b}",
    "uuid": "12345678-1234-1234-1234-123456789abc",
    "json-pointer": "/a",
    "relative-json-pointer": "0/a",
}
OTHER_FORMATS = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex", "color")

STRINGS = [
    Case({**STR, "minLength": 2}, "ab", "a"),
    Case({**STR, "maxLength": 2}, "ab", "abc"),
    Case({**STR, "minLength": 2, "maxLength": 3}, "abc", "abcd"),
    Case({**STR, "pattern": "^a+$"}, "aa", "b"),
    Case({**STR, "pattern": "^a+$", "maxLength": 2}, "aa", "aaa", "maxLength beside pattern"),
    Case({**STR, "pattern": "^a+$", "minLength": 2}, "aa", "a", "minLength beside pattern"),
    Case({**STR, "format": "email", "maxLength": 5}, "a@b.c", "aaaa@b.c", "maxLength beside format"),
    Case({**STR, "format": "date", "pattern": "^2"}, "2020-01-01", "1999-01-01", "pattern beside format"),
    *(Case({**STR, "format": name}, valid, "-x y{") for name, valid in FORMATS.items()),
    *(Case({**STR, "format": name}, "a", "-x y{", "format") for name in OTHER_FORMATS),
    Case({"minLength": 2}, "ab", "a", "minLength without type"),
    Case({"pattern": "^a+$"}, "aa", "b", "pattern without type"),
    Case({"format": "date"}, "2020-01-01", "x", "format without type"),
]

ARRAYS = [
    Case({**ARR, "items": INT}, [1], ["a"]),
    Case({"items": INT}, [1], ["a"]),
    Case({**ARR, "items": False}, [], [1]),
    Case({**ARR, "items": INT, "minItems": 2}, [1, 2], [1]),
    Case({**ARR, "items": INT, "maxItems": 2}, [1, 2], [1, 2, 3]),
    Case({**ARR, "prefixItems": [INT, STR]}, [1, "a"], ["a", 1]),
    Case({**ARR, "prefixItems": [INT, STR], "minItems": 2, "maxItems": 2}, [1, "a"], [1]),
    Case({**ARR, "prefixItems": [INT], "items": STR}, [1, "a"], [1, 2]),
    Case({**ARR, "prefixItems": [INT], "items": False}, [1], [1, 2]),
    Case({**ARR, "prefixItems": [INT], "items": STR, "minItems": 3}, [1, "a", "b"], [1, "a"]),
    Case({**ARR, "prefixItems": [INT], "items": STR, "maxItems": 2}, [1, "a"], [1, "a", "b"]),
    Case({**ARR, "prefixItems": [INT], "unevaluatedItems": False}, [1], [1, 2]),
    Case({**ARR, "prefixItems": [INT], "unevaluatedItems": STR}, [1, "a"], [1, 2]),
    Case({**ARR, "items": INT, "uniqueItems": True}, [1, 2], [1, 1], "uniqueItems"),
    Case({**ARR, "items": INT, "contains": {"const": 1}}, [1], [2], "contains"),
    Case({**ARR, "items": INT, "contains": {"const": 1}, "minContains": 2}, [1, 1], [1, 2], "contains"),
    Case({**ARR, "items": INT, "contains": {"const": 1}, "maxContains": 1}, [1], [1, 1], "contains"),
    Case({"minItems": 2}, [1, 2], [1], "minItems without type"),
    Case({"uniqueItems": True}, [1, 2], [1, 1], "uniqueItems without type"),
    Case({**ARR, "items": {**ARR, "items": {"not": STR}}}, [[1]], [["a"]], "items.items.not"),
]

OBJECTS = [
    Case(some(a=INT), {"a": 1}, {"a": "x"}),
    Case({"properties": {"a": INT}}, {"a": 1}, {"a": "x"}),
    Case(some(a=INT), {"a": 1}, {}),
    Case({**OBJ, "required": ["a"]}, {"a": 1}, {}, "required with names that are not in properties"),
    Case(
        {**OBJ, "properties": {"a": INT}, "required": ["b"]},
        NONE,
        {"a": 1},
        "required with names that are not in properties",
    ),
    Case({"required": ["a"]}, {"a": 1}, {}, "required without type"),
    Case({**some(a=INT), "additionalProperties": False}, {"a": 1}, {"a": 1, "b": 2}),
    Case({**OBJ, "additionalProperties": INT}, {"b": 2}, {"b": "x"}),
    Case({"additionalProperties": INT}, {"b": 2}, {"b": "x"}),
    Case({**some(a=INT), "additionalProperties": True}, {"a": 1}, {"a": "x"}),
    Case({**some(a=INT), "additionalProperties": {}}, {"a": 1}, {"a": "x"}),
    Case(
        {**some(a=INT), "additionalProperties": STR},
        {"a": 1, "b": "x"},
        {"a": 1, "b": 2},
        "",
        "additionalProperties beside properties",
    ),
    Case(
        {**OBJ, "properties": {"a": INT}, "additionalProperties": STR},
        {"a": 1},
        {"a": "x"},
        "",
        "additionalProperties beside properties",
    ),
    Case(
        {**OBJ, "properties": {"a": {**STR, "format": "date"}}, "additionalProperties": True},
        {"a": "2020-01-01"},
        {"a": "x"},
    ),
    Case({**some(a=INT), "unevaluatedProperties": False}, {"a": 1}, {"a": 1, "b": 1}),
    Case({**OBJ, "unevaluatedProperties": STR}, {"b": "x"}, {"b": 1}),
    Case(
        {**OBJ, "properties": {"a": INT}, "unevaluatedProperties": STR},
        {"a": 1},
        {"a": "x"},
        "",
        "unevaluatedProperties beside properties",
    ),
    Case({**OBJ, "patternProperties": {"^a": INT}}, {"a": 1}, {"a": "x"}),
    Case({**OBJ, "patternProperties": {"^a$": INT}, "additionalProperties": False}, {"a": 1}, {"b": "x"}),
    Case(
        {**OBJ, "patternProperties": {"^a+$": INT}, "minProperties": 1, "maxProperties": 1}, {"a": 1}, {"a": 1, "aa": 2}
    ),
    Case(
        {**OBJ, "properties": {"a": {}}, "patternProperties": {"^a$": INT}},
        {"a": 1},
        {"a": "x"},
        "patternProperties beside properties",
    ),
    Case(
        {**OBJ, "patternProperties": {"^a+$": {}, "^[ab]+$": STR}},
        {"a": "x"},
        {"a": 1},
        "patternProperties with several patterns",
    ),
    Case(
        {**OBJ, "patternProperties": {"^a+$": INT}, "required": ["a"]},
        {"a": 1},
        {},
        "required with names that are not in properties",
    ),
    Case({"patternProperties": {"^a": INT}}, {"a": 1}, {"a": "x"}, "patternProperties without type"),
    Case({**OBJ, "propertyNames": {"pattern": "^a+$"}}, {"a": 1}, {"b": 1}),
    Case({**OBJ, "propertyNames": {"enum": ["a"]}}, {"a": 1}, {"b": 1}),
    Case({**OBJ, "propertyNames": {"maxLength": 1}}, {"a": 1}, {"bb": 1}),
    Case({**OBJ, "propertyNames": {**STR, "pattern": "^a+$"}, "minProperties": 1}, {"a": 1}, {}),
    Case(
        {**OBJ, "propertyNames": {"pattern": "^a+$", "maxLength": 2}},
        {"a": 1},
        {"aaa": 1},
        "propertyNames.maxLength beside pattern",
    ),
    Case(
        {**OBJ, "propertyNames": {"pattern": "^a+$"}, "additionalProperties": INT},
        {"a": 1},
        {"a": "x"},
    ),
    Case(
        {**OBJ, "propertyNames": {"pattern": "^a+$"}, "additionalProperties": False},
        {},
        {"a": 1},
        "additionalProperties beside propertyNames",
    ),
    Case(
        {**OBJ, "properties": {"b": INT}, "propertyNames": {"pattern": "^a+$"}},
        NONE,
        {"b": 1},
        "propertyNames beside properties",
    ),
    Case(
        {**OBJ, "propertyNames": {"pattern": "^a+$"}, "patternProperties": {"^b": INT}},
        NONE,
        {"b": 1},
        "propertyNames beside patternProperties",
    ),
    Case({"propertyNames": {"pattern": "^a+$"}}, {"a": 1}, {"b": 1}, "propertyNames without type"),
    Case({**OBJ, "additionalProperties": INT, "minProperties": 1}, {"a": 1}, {}),
    Case({**OBJ, "additionalProperties": INT, "maxProperties": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}),
    Case(
        {**OBJ, "additionalProperties": INT, "minProperties": 2},
        {"a": 1, "b": 2},
        Text('{"a": 1, "a": 2}'),
        "minProperties with names that are not fixed",
    ),
    Case({**OBJ, "properties": ABC, "minProperties": 2}, {"a": 1, "c": 2}, {"a": 1}),
    Case({**OBJ, "properties": ABC, "maxProperties": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}),
    Case({**OBJ, "properties": ABC, "required": ["c"], "maxProperties": 2}, {"b": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}),
    Case(
        {**OBJ, "properties": ABC, "required": ["b"], "minProperties": 2, "maxProperties": 2},
        {"b": 1, "c": 2},
        {"b": 1},
    ),
    Case({"minProperties": 1}, {"a": 1}, {}, "minProperties without type"),
    Case(
        {**OBJ, "properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}},
        {"a": 1, "b": 1},
        {"a": 1},
        "dependentRequired",
    ),
    Case(
        {**OBJ, "properties": {"a": INT, "b": INT}, "dependentSchemas": {"a": {"required": ["b"]}}},
        {"b": 1},
        {"a": 1},
        "dependentSchemas",
    ),
    Case(
        {**OBJ, "properties": {"a": INT, "b": INT}, "dependencies": {"a": ["b"]}},
        {"a": 1, "b": 1},
        {"a": 1},
        "dependencies",
    ),
    Case(some(a=some(**{"not": STR})), {"a": {"not": "x"}}, {"a": {"not": 1}}),  # names of properties are no keywords
    Case(some(multipleOf=INT, **{"if": INT}), {"multipleOf": 1, "if": 2}, {"multipleOf": "x", "if": 2}),
    Case(some(a={**INT, "multipleOf": 5}), {"a": 5}, {"a": 6}, "properties.a.multipleOf"),
]

APPLICATORS = [
    Case({**INT, "not": {"const": 3}}, 4, 3, "not"),
    Case({**INT, "if": {"minimum": 3}, "then": {"const": 7}}, 7, 4, "if"),
    Case({**INT, "if": {"minimum": 3}, "else": {"const": 1}}, 1, 2, "if"),
    Case({"anyOf": [INT, STR]}, 1, None),
    Case({"anyOf": []}, NONE, Text(""), "anyOf"),
    Case({"anyOf": [INT, {"not": STR}]}, 1, "a", "anyOf.1.not"),
    Case({"type": "string", "anyOf": [{**STR, "minLength": 2}, {"const": "a"}]}, "a", "b"),
    Case({"type": "string", "anyOf": [STR, INT]}, "a", 1, "type beside anyOf"),
    Case({**some(a=INT), "anyOf": [{"required": ["a"]}]}, {"a": 1}, {"b": 1}, "type beside anyOf"),
    Case({"anyOf": [INT, STR], "oneOf": [STR, {"type": "null"}]}, "a", 1, "oneOf beside anyOf"),
    Case({"oneOf": [INT, STR]}, 1, None),
    Case(
        {"oneOf": [some(a={"const": 1}), some(a={"const": 2})], "discriminator": {"propertyName": "a"}},
        {"a": 2},
        {"a": 3},
    ),
    Case({"allOf": [INT]}, 1, "a"),
    Case({"allOf": [INT, {**INT, "maximum": 3}]}, 2, 4, "allOf"),
    Case(
        {"allOf": [some(a=INT)], "properties": {"b": STR}},
        {"a": 1, "b": "x"},
        {"a": 1, "b": 2},
        "properties beside allOf",
    ),
    Case(defined(INT, **{"$ref": REF}), 1, "a"),
    Case(defined(INT, **{"$ref": REF, "description": "D", "type": "number"}), 1, "a"),
    Case(defined(INT, **{"$ref": REF, "type": "string"}), NONE, 1, "type beside $ref"),
    Case(defined(INT, **{"$ref": REF, "maximum": 3}), 2, 4, "maximum beside $ref"),
    Case(defined({**INT, "multipleOf": 2}, **{"$ref": REF}), 2, 1, "$defs.x.multipleOf"),
    Case(defined({"not": STR}, **INT), 1, "a"),  # nothing refers to it
    Case({"x-mine": {"y": {"not": STR}}, "$ref": "#/x-mine/y"}, 1, "a", "x-mine.y.not"),
    Case({**OBJ, "properties": {"a": {"$ref": "#"}}}, {"a": {}}, {"a": 1}),
    Case(defined({"$anchor": "y", **INT}, **{"$ref": "#y"}), 1, "a", "$ref"),
    Case({"$ref": "https://example.com/x"}, NONE, "a", "$ref"),
    Case({"$defs": {"x/y": INT}, "$ref": "#/$defs/x~1y"}, 1, "a", "$ref", lost_openvino=""),
    Case({"$defs": {"x y": INT}, "$ref": "#/$defs/x%20y"}, 1, "a", "$ref", lost_openvino=""),
    Case(
        defined(INT, properties={"a": {"$id": "other", "$defs": {"x": STR}, "$ref": REF}}),
        {"a": "s"},
        {"a": 1},
        "properties.a.$ref",
    ),
    Case({"$defs": {"x": {"$dynamicAnchor": "y", **INT}}, "$dynamicRef": "#y"}, 1, "a", "$dynamicRef"),
    Case({**OBJ, "properties": {"a": {"$recursiveRef": "#"}}}, {"a": {}}, {"a": 1}, "properties.a.$recursiveRef"),
]

CASES = [*TYPES, *NUMBERS, *STRINGS, *ARRAYS, *OBJECTS, *APPLICATORS]


def written(instance: Any) -> str:
    return instance if isinstance(instance, Text) else json.dumps(instance, ensure_ascii=False)
