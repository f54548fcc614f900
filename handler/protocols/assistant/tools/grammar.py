"""Notations of tool calls, used to write calls into prompts and to enforce calls with xgrammar's structural tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from handler.core.json_pointer import target_of
from handler.core.values import StructuredOutput
from handler.protocols.assistant.tools.json_text import dumps

Tag = Mapping[str, Any]

_NAME, _NUMBER = "NAME", "NUMBER"
_DIGITS = {"type": "regex", "pattern": "[0-9]{1,4}"}
_ANY_OBJECT = {"type": "object"}


class Notation(NamedTuple):
    """The text around tool calls, as chat templates write it.

    Attributes:
        call: the text before and after the arguments of a call. NAME is replaced by the name of the tool, and NUMBER by
            the index of the call.
        block: the text before the first call and the text after the last call.
        between: the text between two calls.
        mark: the text at the start of calls if it occurs nowhere else in responses, or else "".
        style: xgrammar's name for the notation of arguments, or "" if xgrammar does not support it.
        several: whether a response may have several calls.
        arguments: writes the arguments of a call.
    """

    call: tuple[str, str]
    block: tuple[str, str] = ("", "")
    between: str = ""
    mark: str = ""
    style: str = "json"
    several: bool = True
    arguments: Callable[[Mapping[str, Any]], str] = dumps

    @property
    def begin(self) -> str:
        """The text at the start of every response that consists of tool calls."""
        return self.block[0] or self.call[0].partition(_NAME)[0].partition(_NUMBER)[0]


def pairs(begin: str, middle: str, end: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that writes the name and value of each argument. Strings are written as plain text.

    Args:
        begin: the text before the name.
        middle: the text between name and value. STRING is replaced by true if the value is a string, or else by false.
        end: the text after the value.
    """

    def write(arguments: Mapping[str, Any]) -> str:
        written = list[str]()
        for name, value in arguments.items():
            is_string = isinstance(value, str)
            between = middle.replace("STRING", str(is_string).lower())
            written += [begin, name, between, value if is_string else dumps(value), end]
        return "".join(written)

    return write


def write_calls(notation: Notation, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Write tool calls in a notation.

    Args:
        calls: the name and the arguments of each call.
    """
    before, after = notation.call
    written = (
        f"{before.replace(_NUMBER, str(number)).replace(_NAME, name)}{notation.arguments(arguments)}{after}"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"{notation.block[0]}{notation.between.join(written)}{notation.block[1]}"


def calls(notation: Notation, tools: Iterable[Mapping[str, Any]], *, single: bool) -> Tag:
    """Return the structural tag for a response of at least one tool call, with arguments that match the schemas.

    Args:
        tools: the tools in OpenAI's format.
        single: whether only one call is allowed.
    """
    tags = [_tag(notation, tool["function"]["name"], tool["function"]["parameters"]) for tool in tools]
    return _block(notation, tags, single=single)


def calls_or_response(
    notation: Notation, tools: Iterable[Mapping[str, Any]], rule: StructuredOutput, *, single: bool
) -> Tag:
    """Return the structural tag for a response that consists of tool calls, or else matches other structured output.

    Args:
        tools: the tools in OpenAI's format.
        rule: the structured output of a response without calls.
        single: whether only one call is allowed.
    """
    return {"type": "or", "elements": [calls(notation, tools, single=single), _text_format(rule)]}


def _text_format(rule: StructuredOutput) -> Tag:
    match rule.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": _ANY_OBJECT}
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(rule.value)}
        case "regex":
            return {"type": "regex", "pattern": rule.value}
        case "choice":
            texts = json.loads(rule.value)
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
        case _:
            return {"type": "grammar", "grammar": rule.value}


def calls_in_text(
    notation: Notation, tools: Iterable[Mapping[str, Any]], strict: Collection[str], *, single: bool
) -> Tag:
    """Return the structural tag for text that may contain tool calls.

    Args:
        tools: the tools in OpenAI's format.
        strict: the names of the tools whose schemas are enforced. The arguments of other tools may be any object.
        single: whether the response ends with its first call.
    """
    functions = [tool["function"] for tool in tools]
    schemas = {tool["name"]: tool["parameters"] if tool["name"] in strict else _ANY_OBJECT for tool in functions}
    tags = [_tag(notation, name, schema) for name, schema in schemas.items()]
    if any(notation.block):
        tags = [_block(notation, tags, single=single)]
    return {
        "type": "triggered_tags",
        "triggers": [notation.mark],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": single or not notation.several,
    }


def _block(notation: Notation, tags: list[Tag], *, single: bool) -> Tag:
    begin, end = notation.block
    sequence = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": notation.between,
        "at_least_one": True,
        "stop_after_first": single or not notation.several,
    }
    return {"type": "tag", "begin": begin, "content": sequence, "end": end} if any(notation.block) else sequence


def _tag(notation: Notation, name: str, schema: Mapping[str, Any]) -> Tag:
    before, after = notation.call
    # A tool's name may contain the word NUMBER.
    begin, number, suffix = (part.replace(_NAME, name) for part in before.partition(_NUMBER))
    arguments: Tag = {"type": "json_schema", "json_schema": schema}
    if notation.style != "json":
        arguments = {**arguments, "style": notation.style}
    if number:
        elements = [_DIGITS, {"type": "const_string", "value": suffix}, arguments]
        arguments = {"type": "sequence", "elements": elements}
    return {"type": "tag", "begin": begin, "content": arguments, "end": after.replace(_NAME, name)}


# -- the types of parameters in a tool's JSON schema -------------------------------------------------------------------


ANY = frozenset({"any"})
"""The types of a value that may have any type: JSON is left unchanged, and other text is converted to a string."""

_MEMBERS = 4096  # schemas that are read to find the types of one tool's parameters in one response
_CHAIN = 16  # references that are followed one after another

_ALIASES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("bool",), "boolean"),
    **dict.fromkeys(("dict",), "object"),
    **dict.fromkeys(("arr", "list", "sequence", "tuple"), "array"),
}
"""Other names that clients use for JSON Schema types."""

_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


class ToolSchema:
    """The schema of a tool's arguments, which resolves references (`$ref`).

    A client's schema may be cyclic, and a few lines can refer to exponentially many schemas. Therefore the types of
    each schema are determined only once, and at most 4,096 schemas are read. Further schemas allow any type.

    Args:
        root: the schema of the arguments, against which references are resolved.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self._left = _MEMBERS
        # The keys are the ids of schemas, which stay valid because the root refers to all of them.
        self._types: dict[int, frozenset[str]] = {}
        self._own: dict[int, frozenset[str]] = {}
        self._targets: dict[str, Any] = {}

    def property(self, schema: Any, name: str) -> Any:
        """Return the schema of an object property, or None if there is none."""
        properties = self._get(schema, "properties")
        return properties.get(name) if isinstance(properties, Mapping) else None

    def items(self, schema: Any) -> Any:
        """Return the schema of list items, or None if there is none."""
        return self._get(schema, "items")

    def types(self, schema: Any) -> frozenset[str]:
        """Return the types that a schema within the root allows, or an empty set if it specifies no type."""
        if not isinstance(schema, Mapping):
            return frozenset()
        if id(schema) not in self._types:
            self._types[id(schema)] = self._find(schema)
        return self._types[id(schema)]

    def _find(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """Return the types of a schema and of all schemas that it refers to by $ref, anyOf, oneOf and allOf."""
        kinds: set[str] = set()
        visited: set[int] = set()
        waiting: list[Any] = [schema]
        while waiting:
            if not self._left:
                return ANY.union(kinds)
            self._left -= 1
            member = waiting.pop()
            if not isinstance(member, Mapping) or id(member) in visited:
                continue
            visited.add(id(member))
            kinds |= self._named(member)
            waiting.append(self._target(member))
            for keyword in ("anyOf", "oneOf", "allOf"):
                members = member.get(keyword)
                if isinstance(members, list):
                    waiting += members[: self._left + 1]
        return frozenset(kinds)

    def _named(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """Return the types that a schema states directly, without following references."""
        if id(schema) not in self._own:
            kinds, values = schema.get("type"), schema.get("enum")
            kinds = kinds if isinstance(kinds, list) else [kinds]
            names = {kind.strip().lower() for kind in kinds if isinstance(kind, str)}
            classes = {type(value) for value in (values if isinstance(values, list) else ())}
            if "const" in schema:
                classes.add(type(schema["const"]))
            types = {_TYPES.get(value, "object") for value in classes}
            self._own[id(schema)] = frozenset({_ALIASES.get(name, name) for name in names} | types)
        return self._own[id(schema)]

    def _get(self, schema: Any, key: str) -> Any:
        """Return the value of a key in a schema. If the key is missing, search the schema that the schema refers to."""
        for _ in range(_CHAIN):
            if not isinstance(schema, Mapping):
                return None
            if key in schema:
                return schema[key]
            schema = self._target(schema)
        return None

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """Return the schema that a schema refers to, or None if it contains no reference."""
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return None
        if reference not in self._targets:
            self._targets[reference] = target_of(reference, self.root)
        return self._targets[reference]
