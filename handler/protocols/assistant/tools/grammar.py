"""How a format writes calls, in prompts and by rules for answers: structural tags (xgrammar's documentation)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
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
        style: xgrammar's name for the form of the arguments; "" where it has none.
        several: an answer may have several calls.
        arguments: writes a call's arguments.
    """

    call: tuple[str, str]
    block: tuple[str, str] = ("", "")
    between: str = ""
    mark: str = ""
    style: str = "json"
    several: bool = True
    arguments: Callable[[Mapping[str, Any]], str] = dumps


def pairs(begin: str, middle: str, end: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a writer of arguments: each is its name and its value, which is plain text where it is a string.

    Args:
        begin: before the name.
        middle: between name and value; STRING stands for whether the value is a string.
        end: after the value.
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
    """Write calls, of which each is a name and its arguments."""
    before, after = notation.call
    written = (
        f"{before.replace(_NUMBER, str(number)).replace(_NAME, name)}{notation.arguments(arguments)}{after}"
        for number, (name, arguments) in enumerate(calls)
    )
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
