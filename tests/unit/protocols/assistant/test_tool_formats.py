"""Every format of tool calls: the golden answers, however they are cut, and random ones.

`pytest tests/unit/protocols/assistant/test_tool_formats.py --update-golden` writes the events of the answers anew.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Ending, Event
from handler.protocols.assistant.tools.formats import FORMATS, find
from handler.protocols.assistant.tools.formats.json_calls import Hermes, List, Llama3
from handler.protocols.assistant.tools.grammar import ToolSchema
from handler.protocols.assistant.tools.json_text import JsonEnd, as_json
from handler.protocols.assistant.tools.parsing import CallParser, NamedCall
from tests.one_test import in_one_test
from tests.unit.protocols.assistant.tool_texts import GOLDEN, TOOLS, Read, golden, read


def parse(format: str, *pieces: str) -> Read:
    return read(FORMATS[format].make(TOOLS), pieces)


LONG = 40
"""Characters of a piece: more than a mark has, so that no mark is cut twice."""


@pytest.mark.parametrize("format", FORMATS)
def test_golden_answers_are_read_however_they_come(format: str, request: pytest.FixtureRequest) -> None:
    cases = golden(format)
    if request.config.getoption("--update-golden"):
        cases = {name: {"text": case["text"], "events": parse(format, case["text"])} for name, case in cases.items()}
        (GOLDEN / f"{format}.json").write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n")
    assert len(cases) >= 6
    for name, case in cases.items():
        text, events = case["text"], case["events"]
        assert parse(format, text) == events, name
        assert parse(format, *text) == events, name
        assert parse(format, *re.findall(r"\w+|\s+|.", text)) == events, name
        for first in range(1, LONG):  # together they cut everywhere
            pieces = [text[:first], *(text[start : start + LONG] for start in range(first, len(text), LONG))]
            assert parse(format, *pieces) == events, (name, first)


@in_one_test("format", FORMATS)
def test_a_name_has_up_to_256_letters(format: str) -> None:
    """Anthropic allows 128; a namespace and a tool of the Responses API have 64 each, and a dot between them."""
    case = golden(format)["one"]
    for size in (65, 128, 256):
        name = "mcp__plugin." + "n" * (size - 12)
        tools = [{**tool, "function": {**tool["function"], "name": name}} for tool in TOOLS[:1]]
        text, (expected,) = case["text"].replace("weather", name), [e for e in case["events"] if isinstance(e, list)]
        for pieces in ([text], [*text]):
            events = read(FORMATS[format].make(tools), pieces)
            assert [event for event in events if isinstance(event, list)] == [[name, expected[1]]], size


@in_one_test("format", FORMATS)
def test_golden_answers_call_the_tools_with_json(format: str) -> None:
    """Whatever a format writes, `weather` and `write` get the same arguments."""
    calls = {
        name: [event for event in case["events"] if isinstance(event, list)] for name, case in golden(format).items()
    }
    (weather,), (write,) = calls["one"], calls["odd strings"]
    assert (weather[0], json.loads(weather[1])) == ("weather", {"city": "Köln", "days": 3})
    assert (write[0], [*json.loads(write[1])]) == ("write", ["path", "text"])
    assert [name for name, _ in calls["parallel"]] == ["weather", "time"]
    assert calls["no call"] == []


def test_quotes_of_functiongemma_make_no_string_where_the_schema_has_none() -> None:
    values = ("city", "5"), ("days", "3"), ("metric", "True"), ("tags", "['a']"), ("unit", "C")
    given = ",".join(f"{name}:<escape>{value}<escape>" for name, value in values)
    (call,) = parse("functiongemma", f"<start_function_call>call:weather{{{given}}}<end_function_call>")
    assert json.loads(call[1]) == {"city": "5", "days": 3, "metric": True, "tags": ["a"], "unit": "C"}


FRAMED = ("openai", "kimi_k3", "inkling", "muse_glimmer")
"""Formats in which marks stand around text too."""


@functools.lru_cache
def nothing_between(format: str) -> re.Pattern[str]:
    """Return the pattern of marks with no call after them, which are no text."""
    begins = [mark for mark in FORMATS[format].make(TOOLS).begins if len(mark) > 1]  # type: ignore[attr-defined]
    first, others = ("|".join(map(re.escape, marks)) for marks in (begins, FORMATS[format].marks))
    return re.compile(rf"(?:{first})[\s,;]*(?:\[[\s,;]*\]|{others or '(?!)'})") if first else re.compile("(?!)")


@given(format=st.sampled_from([*FORMATS]), data=st.data())
def test_random_answers_are_read_however_they_come(format: str, data: st.DataObject) -> None:
    texts = [case["text"] for case in golden(format).values()]
    bits = sorted({bit for text in texts for bit in re.findall(r"<[^<>\n]*>|\[[A-Z_]+\]|\w+|.", text, re.DOTALL)})
    parts = data.draw(st.lists(st.sampled_from(bits) | st.sampled_from(texts) | st.text(max_size=3), max_size=12))
    text = "".join(parts).encode("utf-8", "replace").decode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(format, text)
    assert parse(format, *pieces) == whole
    assert parse(format, *text) == whole
    if any(isinstance(event, list) for event in whole) or format in FRAMED:
        return
    if not nothing_between(format).search(text):
        assert "".join(event for event in whole if isinstance(event, str)) == text


@given(format=st.sampled_from([*FORMATS]), before=st.text(max_size=20), after=st.text(max_size=20))
def test_a_call_is_found_in_any_company(format: str, before: str, after: str) -> None:
    begins = FORMATS[format].make(TOOLS).begins  # type: ignore[attr-defined]
    call = golden(format)["text before"]["text"].removeprefix("Let me look.\n") if begins else ""
    if format == "llama4_pythonic":
        call = golden(format)["marked"]["text"]
    elif format == "pythonic":
        call = golden(format)["one"]["text"]
    if not call or format == "openai":  # the whole answer is calls; messages one after another
        return
    found = parse(format, before.encode("utf-8", "replace").decode() + "|" + call + "|" + after)
    assert "weather" in [event[0] for event in found if isinstance(event, list)]


STREAMS = {
    "qwen3_coder": '<tool_call>\n<function=write>\n<parameter=text>\nab|c"|\n</par|ameter>\n</function>\n</tool_call>',
    "minimax_m2": '<minimax:tool_call><invoke name="write">'
    '<parameter name="text">ab|c"|</par|ameter></invoke></minimax:tool_call>',
    "deepseek_v32": '<｜DSML｜invoke name="write">'
    '<｜DSML｜parameter name="text" string="true">ab|c"|</｜|DSML｜parameter></｜DSML｜invoke>',
    "glm47": '<tool_call>write<arg_key>text</arg_key><arg_value>ab|c"|</arg|_value></tool_call>',
    "gemma4": '<|tool_call>call:write{text:<|"|>ab\0c"\0<|"\0|>}<tool_call|>',
    "pythonic": "[write(text='ab|c\"||')]",
    "lfm2": "<\x01tool_call_start\x01>[write(text='ab|c\"||')]",
    "olmo3": "<function_calls>write(text='ab|c\"||')",
    "hy_v3": "<tool_calls:a><tool_call:a>write<arg_key:a>text</arg_key:a>"
    '<arg_value:a>ab|c"|</arg|_value:a></tool_call:a></tool_calls:a>',
    "minimax_m3": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="write">]<]minimax[>[<text>'
    'ab|c"|]<]|minimax[>[</text>]<]minimax[>[</invoke>',
    "minicpm5": '<function name="write"><param name="text">ab|c"|</par|am></function>',
    "kimi_k3": '<\x01open\x01>tools<\x01sep\x01><\x01open\x01>call tool="write" index="1"<\x01sep\x01>'
    '<\x01open\x01>argument key="text" type="string"<\x01sep\x01>ab|c"|<\x01close|\x01>argument<\x01sep\x01>'
    "<\x01close\x01>call<\x01sep\x01><\x01close\x01>tools<\x01sep\x01>",
}


@in_one_test("format", STREAMS)
def test_strings_come_as_they_are_written(format: str) -> None:
    """Text before a mark is not held back."""
    parser, stream = FORMATS[format].make(TOOLS), STREAMS[format]
    first, second, third, last = (part.replace("\1", "|") for part in stream.split("\0" if "\0" in stream else "|"))
    assert parser.feed(first) == [CallStart(0, "write"), Arguments(0, '{"text": "ab')]
    assert parser.feed(second) == [Arguments(0, 'c\\"')]
    assert parser.feed(third) == []
    assert parser.feed(last) == [Arguments(0, '"}'), CallEnd(0)]
    assert parser.flush() == []


def test_values_too_deep_in_one_another_are_text() -> None:
    for depth, called in ((33, True), (34, False)):
        found = parse("pythonic", f"[weather(city={'[' * depth}{']' * depth})]")
        assert any(isinstance(event, str) for event in found) is not called


@in_one_test(
    ("text", "types", "wanted"),
    [
        ("5", "integer", "5"),
        (" 5 ", "integer", "5"),
        ("5.0", "integer", "5.0"),
        ("5", "number", "5"),
        ("05", "integer", '"05"'),
        ("1_0", "integer", '"1_0"'),
        ("inf", "number", '"inf"'),
        ("NaN", "object", '"NaN"'),
        ("True", "boolean", "true"),
        ("0", "boolean", "false"),
        ("yes", "boolean", '"yes"'),
        ("Null", "string null", "null"),
        ("5", "string integer", "5"),
        ("five", "string integer", '"five"'),
        ('{"a": 1}', "object", '{"a": 1}'),
        ("{'a': 1}", "object", '{"a": 1}'),
        (
            "['it\\'s', \"a\\x41 'b'\", '\\u00e9\\d', None, True]",
            "array",
            '["it\'s", "aA \'b\'", "é\\\\d", null, true]',
        ),
        ("['\\U00110000']", "array", '["\\\\U00110000"]'),
        ("{'a'", "object", "\"{'a'\""),
        ("[None]", "string", '"[None]"'),
        ("None", "string null", "null"),
        ("none", "string null", '"none"'),
        ("None", "string", '"None"'),
        ("[1]", "string array", "[1]"),
        ("true", "integer", "true"),
        ("x", "any", '"x"'),
    ],
)
def test_plain_text_becomes_json_by_its_types(text: str, types: str, wanted: str) -> None:
    assert as_json(text, frozenset(types.split())) == wanted


@in_one_test(
    ("schema", "types"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["integer", "null"]}, "integer null"),
        ({"type": "int"}, "integer"),
        ({"enum": [1, "a", None, True, 1.5, [], {}]}, "integer string null boolean number array object"),
        ({"const": "a"}, "string"),
        ({"anyOf": [{"type": "number"}, {"$ref": "#/$defs/A"}]}, "number object"),
        ({"$ref": "#/$defs/A"}, "object"),
        ({"$ref": "#/$defs/B"}, "object"),
        ({"$ref": "#/%24defs/A"}, "object"),
        ({"$ref": "#/$defs/loop/allOf/0"}, ""),
        ({"$ref": "#"}, "object"),
        ({"$ref": "#/$defs/none"}, ""),
        ({"$ref": "#/$defs/loop"}, ""),
        ({}, ""),
        (True, ""),
        (None, ""),
    ],
)
def test_types_are_those_of_the_schema(schema: Any, types: str) -> None:
    loop = {"allOf": [{"$ref": "#/$defs/loop"}]}
    root = {
        "type": "object",
        "properties": {"a": schema},
        "$defs": {"A": {"type": "object"}, "B": {"$ref": "#/$defs/A"}, "loop": loop},
    }
    found = ToolSchema(root)
    assert found.types(found.property(root, "a")) == frozenset(types.split())
    assert found.property(root, "b") is None


def test_auto_finds_the_format_that_a_template_shows() -> None:
    """The marks of a format's own calls stand in its templates; the rest is tested on the models' templates."""
    for name, format in FORMATS.items():
        if format.template:
            text = (
                golden(name)["parallel"]["text"] + "```json dictionary of argument name <|call|> <function= <｜DSML｜"
            )
            assert find(text) is not None
    assert find("{{ tools }}") is None


# -- calls of tools in an answer's text: whole, one character at a time, and what only looks like a call ---------------


ONE = '{"name": "f", "arguments": {"a": "x}]\\"</tool_call>", "b": [1, {"c": {}}]}}'
TWO = '{"name":"g_2","parameters":{}}'
OTHER_ORDER = '{"arguments": {"a": 1}, "name": "h"}'
WITH_ID = '{"name": "f", "arguments": {"a": 2}, "id": "c}1"}'
AS_TEXT = '{"name": "f", "arguments": "{\\"a\\": 3}"}'
NOTHING = '{"name": "f"}'


def parser(kind: str) -> CallParser:
    kinds: dict[str, type[CallParser]] = {"list": List, "hermes": Hermes, "llama3": Llama3}
    return kinds[kind]()


def parsed_read(kind: str, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
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
    "cut in the second's mark": ("hermes", f"<tool_call>{TWO}</tool_call>\n<t", "", [("g_2", "{}")]),
    "an escaped name": ("hermes", '<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    "a broken escape": (
        "hermes",
        '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>',
        [],
    ),
    "a name that no tool has": (
        "hermes",
        f'<tool_call>{{"name": "{"x" * 2100}", "arguments": {{}}}}</tool_call>',
        f'<tool_call>{{"name": "{"x" * 2100}", "arguments": {{}}}}</tool_call>',
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
    assert parsed_read(kind, text, size) == (shown, calls)


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
    one, text = parser("hermes"), "<tool_call>" + begun + ("x" if begun[-1] == '"' else " ") * 3000
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
