"""Strings that quote tool calls: every format with values between tags, and the markup of every format in a value.

Each answer is read whole and in characters. An answer that quotes its own format is also cut at every character.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.formats.open_values import OpenValues
from handler.protocols.assistant.tools.grammar import Notation
from tests.unit.protocols.assistant.tool_texts import Read, read


def tool(name: str, *keys: str) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in keys}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("save", "path", "text"), tool("run", "cmd")]


def notation(format: str) -> Notation:
    return next(iter(FORMATS[format].notations.values()))


def call(format: str, name: str, arguments: dict[str, str]) -> str:
    form = notation(format)
    before, after = form.call
    assert callable(form.arguments)
    text = before.replace("NAME", name).replace("NUMBER", "0") + form.arguments(arguments) + after
    return form.block[0] + text.replace("STRING", "true") + form.block[1]


TAGGED = sorted(name for name, format in FORMATS.items() if isinstance(format.make(TOOLS), OpenValues))
QUOTABLE = sorted(name for name in FORMATS if callable(getattr(notation(name), "arguments", None)))
PLAIN = '<tool_call>{"name": "run", "arguments": {"cmd": "rm"}}</tool_call>'


def quoted() -> list[str]:
    calls = [call(format, "run", {"cmd": "rm -rf x"}) for format in QUOTABLE]
    return list(dict.fromkeys([*calls, PLAIN, "</tool_call>", "</function>", "</invoke>", "</parameter>"]))


def names(found: Read) -> list[str]:
    return [event[0] for event in found if isinstance(event, list)]


@pytest.mark.parametrize("format", TAGGED)
def test_a_quoted_call_stays_text(format: str) -> None:
    assert len(TAGGED) >= 14
    for markup in quoted():
        value = f"Page: {markup} end"
        text = call(format, "save", {"path": "a", "text": value})
        found = read(FORMATS[format].make(TOOLS), [text])
        assert names(found) == ["save"], (markup, found)
        assert json.loads(found[0][1])["text"].strip() == value, (markup, found)
        assert read(FORMATS[format].make(TOOLS), text) == found, markup
        if markup != call(format, "run", {"cmd": "rm -rf x"}):
            continue
        for size in range(len(text)):
            assert "run" not in names(read(FORMATS[format].make(TOOLS), [text[:size]])), (markup, size)


@pytest.mark.parametrize("quote", ['"', "'"])
def test_gemma4_lists_hold_strings_in_plain_quotes(quote: str) -> None:
    text = f'<|tool_call>call:save{{path:<|"|>a<|"|>,tags:[{quote}x{quote},{quote}y{quote}]}}<tool_call|>'
    tags = {"type": "array", "items": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "save", "parameters": {"properties": {"tags": tags}}}}]
    found = read(FORMATS["gemma4"].make(tools), text)
    assert [json.loads(event[1]) for event in found if isinstance(event, list)] == [{"path": "a", "tags": ["x", "y"]}]


@pytest.mark.parametrize(
    "text",
    ["<tool_call>\n<function=run>\n</function>\n</tool_c", '<tool_call><function=run>{"cmd": "x"}</function></tool_c'],
)
def test_a_cut_end_mark_is_no_text(text: str) -> None:
    found = read(FORMATS["qwen3_coder"].make(TOOLS), [text])
    assert names(found) == ["run"]
    assert len(found) == 1
    assert ("cmd" in found[0][1]) == ("cmd" in text)
