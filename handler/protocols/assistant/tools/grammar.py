"""Rules for answers with tool calls in a format's own notation, as structural tags (xgrammar's documentation)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from handler.protocols.assistant.tools.json_text import dumps

Tag = Mapping[str, Any]

_NAME, _NUMBER = "NAME", "NUMBER"
_DIGITS = {"type": "regex", "pattern": "[0-9]{1,4}"}
_ANY_OBJECT = {"type": "object"}


class Notation(NamedTuple):
    """The text around calls, as the models' chat templates write it.

    Attributes:
        call: before a call's arguments and after them; NAME stands for the tool's name, NUMBER for digits.
        block: before the first call and after the last one.
        between: from one call to the next.
        mark: the beginning that no other text has, "" where there is none.
        style: xgrammar's name for the form of the arguments.
        several: an answer may have several calls.
    """

    call: tuple[str, str]
    block: tuple[str, str] = ("", "")
    between: str = ""
    mark: str = ""
    style: str = "json"
    several: bool = True


def write_json(notation: Notation, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Write calls, of which each is a name and its arguments, in a notation whose arguments are JSON."""
    before, after = notation.call
    written = (f"{before.replace(_NAME, name)}{dumps(arguments)}{after}" for name, arguments in calls)
    return f"{notation.block[0]}{notation.between.join(written)}{notation.block[1]}"


def calls(notation: Notation, tools: Iterable[Mapping[str, Any]], *, single: bool) -> Tag:
    """Return the rule that an answer is calls of these tools: at least one, by their schemas.

    Args:
        tools: in OpenAI's form.
        single: at most one call.
    """
    tags = [_tag(notation, tool["function"]["name"], tool["function"]["parameters"]) for tool in tools]
    return _block(notation, tags, single=single)


def calls_in_text(
    notation: Notation, tools: Iterable[Mapping[str, Any]], strict: Collection[str], *, single: bool
) -> Tag:
    """Return the rule that each call in an answer's text is of one of these tools.

    Args:
        strict: names of the tools whose schemas count; arguments of the others are any object.
        single: the answer ends with its first call.
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
    # A tool's own name may hold the word NUMBER.
    begin, number, rest = (part.replace(_NAME, name) for part in before.partition(_NUMBER))
    arguments: Tag = {"type": "json_schema", "json_schema": schema}
    if notation.style != "json":
        arguments = {**arguments, "style": notation.style}
    if number:
        elements = [_DIGITS, {"type": "const_string", "value": rest}, arguments]
        arguments = {"type": "sequence", "elements": elements}
    return {"type": "tag", "begin": begin, "content": arguments, "end": after.replace(_NAME, name)}
