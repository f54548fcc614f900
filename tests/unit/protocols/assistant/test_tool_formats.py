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

from handler.protocols.assistant.events import Arguments, CallEnd, CallStart
from handler.protocols.assistant.tools.formats import FORMATS, find
from handler.protocols.assistant.tools.grammar import ToolSchema
from handler.protocols.assistant.tools.json_text import as_json
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
    "minimax_m2": '<minimax:tool_call><invoke name="write"><parameter name="text">ab|c"|</par|ameter></invoke>',
    "deepseek_v32": '<｜DSML｜invoke name="write">'
    '<｜DSML｜parameter name="text" string="true">ab|c"|</｜|DSML｜parameter></｜DSML｜invoke>',
    "glm47": '<tool_call>write<arg_key>text</arg_key><arg_value>ab|c"|</arg|_value></tool_call>',
    "gemma4": '<|tool_call>call:write{text:<|"|>ab\0c"\0<|"\0|>}<tool_call|>',
    "pythonic": "[write(text='ab|c\"||')]",
    "lfm2": "<\x01tool_call_start\x01>[write(text='ab|c\"||')]",
    "olmo3": "<function_calls>write(text='ab|c\"||')",
    "hy_v3": "<tool_calls:a><tool_call:a>write<arg_key:a>text</arg_key:a>"
    '<arg_value:a>ab|c"|</arg|_value:a></tool_call:a>',
    "minimax_m3": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="write">]<]minimax[>[<text>'
    'ab|c"|]<]|minimax[>[</text>]<]minimax[>[</invoke>',
    "minicpm5": '<function name="write"><param name="text">ab|c"|</par|am></function>',
    "kimi_k3": '<\x01open\x01>tools<\x01sep\x01><\x01open\x01>call tool="write" index="1"<\x01sep\x01>'
    '<\x01open\x01>argument key="text" type="string"<\x01sep\x01>ab|c"|<\x01close|\x01>argument<\x01sep\x01>'
    "<\x01close\x01>call<\x01sep\x01>",
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
