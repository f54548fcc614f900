"""Calls of tools in an answer's text: whole, one character at a time, and what only looks like a call."""

from __future__ import annotations

import json

import pytest

from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Ending, Event
from handler.protocols.assistant.tools.formats.json_calls import Hermes, List, Llama3
from handler.protocols.assistant.tools.json_text import JsonEnd
from handler.protocols.assistant.tools.parsing import CallParser, NamedCall
from tests.one_test import in_one_test

ONE = '{"name": "f", "arguments": {"a": "x}]\\"</tool_call>", "b": [1, {"c": {}}]}}'
TWO = '{"name":"g_2","parameters":{}}'
OTHER_ORDER = '{"arguments": {"a": 1}, "name": "h"}'
WITH_ID = '{"name": "f", "arguments": {"a": 2}, "id": "c}1"}'
AS_TEXT = '{"name": "f", "arguments": "{\\"a\\": 3}"}'
NOTHING = '{"name": "f"}'


def parser(kind: str) -> CallParser:
    kinds: dict[str, type[CallParser]] = {"list": List, "hermes": Hermes, "llama3": Llama3}
    return kinds[kind]()


def read(kind: str, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """The text, and each call's name and arguments."""
    one = parser(kind)
    pieces: list[Event] = []
    for at in range(0, len(text), size):
        pieces += one.feed(text[at : at + size])
    pieces += one.flush()
    shown, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if isinstance(piece, str):
            shown += piece
        elif isinstance(piece, CallStart):
            assert piece.number == len(calls)
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            assert piece.number == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return shown, calls


F1 = ("f", '{"a": "x}]\\"</tool_call>", "b": [1, {"c": {}}]}')

CASES = {
    "text": ("hermes", "Just <b>text</b> with a < and {}", "Just <b>text</b> with a < and {}", []),
    "one": ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [F1]),
    "text before": ("hermes", f"Let me look.\n<tool_call>{ONE}</tool_call>", "Let me look.\n", [F1]),
    "text after": ("hermes", f"<tool_call>{TWO}</tool_call>\n so", "\n so", [("g_2", "{}")]),
    "two": ("hermes", f"<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>\n", "", [F1, ("g_2", "{}")]),
    "list": ("hermes", f"<tool_call>[{ONE}, {TWO}]</tool_call>", "", [F1, ("g_2", "{}")]),
    "no call in the list": ("hermes", "<tool_call>[]</tool_call>", "", []),
    "other order": ("hermes", f"<tool_call>{OTHER_ORDER}</tool_call>", "", [("h", '{"a": 1}')]),
    "an id": ("hermes", f"<tool_call>{WITH_ID}</tool_call>.", ".", [("f", '{"a": 2}')]),
    "arguments as text": ("hermes", f"<tool_call>{AS_TEXT}</tool_call>", "", [("f", '{"a": 3}')]),
    "no arguments": ("hermes", f"<tool_call>{NOTHING}</tool_call>", "", [("f", "{}")]),
    "no end mark": ("hermes", f"<tool_call>{ONE}", "", [F1]),
    "cut in its arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
    "cut in its name": ("hermes", 'x <tool_call>{"name": "f', 'x <tool_call>{"name": "f', []),
    "cut in its mark": ("hermes", "x <tool_ca", "x <tool_ca", []),
    "an escaped name": ("hermes", '<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    "a broken escape": (
        "hermes",
        '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>',
        [],
    ),
    "a name that no tool has": (
        "hermes",
        f'<tool_call>{{"name": "{"x" * 600}", "arguments": {{}}}}</tool_call>',
        f'<tool_call>{{"name": "{"x" * 600}", "arguments": {{}}}}</tool_call>',
        [],
    ),
    "the longest name, in escapes": (
        "hermes",
        '<tool_call>{"name": "%s", "arguments": {}}</tool_call>' % ("\\u0066" * 64),
        "",
        [("f" * 64, "{}")],
    ),
    "a call in an object that is none": (
        "hermes",
        f"<tool_call>{{<tool_call>{TWO}}}</tool_call>{ONE}",
        f"<tool_call>{{<tool_call>{TWO}}}</tool_call>{ONE}",
        [],
    ),
    "no object": ("hermes", "<tool_call> f(a=1) </tool_call>", "<tool_call> f(a=1) </tool_call>", []),
    "no name": ("hermes", '<tool_call>{"a": 1}</tool_call>!', '<tool_call>{"a": 1}</tool_call>!', []),
    "no JSON": ("hermes", "<tool_call>{'name': 1}</tool_call>!", "<tool_call>{'name': 1}</tool_call>!", []),
    "a call after what is none": (
        "hermes",
        f"<tool_call>no <tool_call>{TWO}</tool_call>",
        "<tool_call>no ",
        [("g_2", "{}")],
    ),
    "required": ("list", f"[{ONE},{TWO}]", "", [F1, ("g_2", "{}")]),
    "llama": ("llama3", f"\n{TWO}", "", [("g_2", "{}")]),
    "llama, marked": ("llama3", f"<|python_tag|>{TWO}; {ONE}", "", [("g_2", "{}"), F1]),
    "llama, text": ("llama3", " [1] Hello {you}", " [1] Hello {you}", []),
    "llama, other JSON": ("llama3", '{"answer": 3}', '{"answer": 3}', []),
}


@in_one_test("size", [1, 2, 3, 7, 1000])
@in_one_test("case", CASES)
def test_calls_are_read_however_the_text_comes(case: str, size: int) -> None:
    kind, text, shown, calls = CASES[case]
    assert read(kind, text, size) == (shown, calls)


def test_arguments_come_as_they_are_written() -> None:
    one = parser("hermes")
    assert one.feed('<tool_call>{"name": "f", "argum') == []
    assert one.feed('ents": {"a": ') == [CallStart(0, "f"), Arguments(0, '{"a": ')]
    assert one.feed('"xyz') == [Arguments(0, '"xyz')]
    assert one.feed('"}}</too') == [Arguments(0, '"}'), CallEnd(0)]
    assert one.feed("l_call>") == []
    assert one.flush() == []


def test_text_is_held_back_only_while_it_may_be_a_mark() -> None:
    one = parser("hermes")
    assert one.feed("a <tool") == ["a "]
    assert one.feed("box>") == ["<toolbox>"]


@pytest.mark.parametrize("begun", ['{"name": "', "{"])
def test_a_name_without_end_is_text_before_the_answers_end(begun: str) -> None:
    """What is held is looked through again with each piece."""
    one, text = parser("hermes"), "<tool_call>" + begun + ("x" if begun[-1] == '"' else " ") * 1000
    pieces = [piece for sign in text for piece in one.feed(sign)]
    assert "".join(map(str, pieces)) == text


def test_a_named_call_is_its_arguments() -> None:
    one = NamedCall("f")
    assert one.feed('{"a"') == [CallStart(0, "f"), Arguments(0, '{"a"')]
    assert one.feed(": 1}") == [Arguments(0, ": 1}")]
    assert one.flush() == [CallEnd(0, Ending.OPEN)]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_end_of_an_object(size: int) -> None:
    text = json.dumps({"a": ['}"\\', {"b": "]"}], "c\\": "{"})
    end = JsonEnd()
    found = [end.feed(text[at : at + size]) for at in range(0, len(text), size)]
    assert found[:-1] == [None] * (len(found) - 1)
    assert found[-1] == (len(text) - 1) % size + 1
