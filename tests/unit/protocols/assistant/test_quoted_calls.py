"""Strings that quote tool calls: a value of a call in every format quotes a call in every format.

Each answer is read whole, in characters, and cut.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from handler.core.values import Finish, Token
from handler.protocols.assistant.answer import ResponseReader
from handler.protocols.assistant.events import CallStart, Event
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.grammar import Notation, write_calls
from tests.unit.protocols.assistant.tool_texts import Read, read


def tool(name: str, *keys: str) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in keys}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("save", "path", "text"), tool("run", "cmd")]


def notation(format: str) -> Notation:
    return next(iter(FORMATS[format].notations.values()))


def call(format: str, name: str, arguments: dict[str, str]) -> str:
    return write_calls(notation(format), [(name, arguments)])


LONE = ["</tool_call>", "</function>", "</invoke>", "</parameter>", "<tool_call>", "<function=run>"]
QUOTED = list(dict.fromkeys([*(call(format, "run", {"cmd": "rm -rf x"}) for format in FORMATS), *LONE]))
"""A call in the notation of each format, of which some are equal, and lone tags."""

CUTS = 3
"""Places, drawn at random, at which each answer is cut. An answer that quotes its own format is cut everywhere."""


def without_stops(format: str, markup: str) -> str:
    """Return markup without the special tokens after a message, which end a value wherever they stand."""
    for stop in getattr(FORMATS[format].make(TOOLS), "stops", ()):
        markup = markup.replace(stop, "")
    return markup


def names(found: Read) -> list[str]:
    return [event[0] for event in found if isinstance(event, list)]


@pytest.mark.parametrize("format", FORMATS)
def test_a_quoted_call_stays_text(format: str) -> None:
    """47 formats times 50 quotes are 2,350 pairs, with at least 7,000 cuts."""
    draw, own = random.Random(format), call(format, "run", {"cmd": "rm -rf x"})
    assert (len(FORMATS), len(QUOTED)) == (47, 50)
    for quote in QUOTED:
        markup = without_stops(format, quote)
        value = f"Page: {markup} end"
        text = call(format, "save", {"path": "a", "text": value})
        found = read(FORMATS[format].make(TOOLS), [text])
        assert names(found) == ["save"], (markup, found)
        assert len(found) == 1, (markup, found)
        assert json.loads(found[0][1])["text"].strip() == value, (markup, found)
        if quote == own or draw.random() < 0.1:
            assert read(FORMATS[format].make(TOOLS), text) == found, markup
        sizes = range(len(text)) if quote == own else draw.sample(range(len(text)), CUTS)
        for size in sizes:
            found = read(FORMATS[format].make(TOOLS), [text[:size]])
            assert "run" not in names(found), (markup, size)


@pytest.mark.parametrize("format", FORMATS)
def test_a_cut_end_mark_is_no_text(format: str) -> None:
    """The end of a call is cut everywhere, also within its first character and after a whole mark.

    Of a parameter that is cut within its name, the client sees what there is.
    """
    text = call(format, "save", {"path": "a", "text": "b c"})
    for size in range(len(text) + 1):
        found = read(FORMATS[format].make(TOOLS), [text[:size]])
        if len(found) > 1:
            assert size <= text.index("b c"), "all arguments have been read"
            assert text[:size].endswith(str(found[1]))
        assert size < len(text) or names(found) == ["save"]


@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", "<|return|>"])
def test_the_end_of_a_message_within_a_string_is_no_text(end: str) -> None:
    text = f' to=functions.save<|channel|>commentary json<|message|>{{"text": "a{end}'
    for pieces in ([text], text):
        assert read(FORMATS["openai"].make(TOOLS), pieces) == [["save", '{"text": "a']]


@pytest.mark.parametrize(("format", "text"), [
    ("qwen3_coder", "<tool_call><function=save><parameter=path\na</parameter><parameter=text>b"),
    ("minimax_m2", '<minimax:tool_call><invoke name="save"><parameter name="path" a</parameter><parameter>'),
    ("glm45", "<tool_call>save\n<arg_key>path<arg_value>a</arg_value><arg_key>text</arg_key><arg_value>b</arg_value>"),
])  # fmt: skip
def test_a_parameter_whose_tag_has_no_end_breaks_its_call(format: str, text: str) -> None:
    for pieces in ([text], text):
        reader = ResponseReader(FORMATS[format].make(TOOLS))
        events = [event for piece in pieces for event in reader.feed(Token(5, piece, None, False))]
        events += reader.flush(Finish.EOS)
        assert events
        assert all(isinstance(event, str) for event in events), "a call without its arguments is text"


LONG = "x, " * 400
GEMMA4 = {
    '"path":"a","n":3': {"path": "a", "n": 3},
    '"path":<|"|>a<|"|>,"tags":["x","y"]': {"path": "a", "tags": ["x", "y"]},
    "tags:['x','y']": {"tags": ["x", "y"]},
    "path:'a, b',meta:{a:\"x\"}": {"path": "a, b", "meta": {"a": "x"}},
    'meta:{"a":"x, {y}"}': {"meta": {"a": "x, {y}"}},
    f'path:"{LONG}"': {"path": LONG},
    f"tags:['{LONG}']": {"tags": [LONG]},
    f"path:{'x' * 600},n:3": {"path": "x" * 600, "n": 3},
    'path:"a \\"q\\" b\\n"': {"path": 'a "q" b\n'},
    'path:<|"|>he said <|"|>hi<|"|> to me<|"|>,n:3': {"path": 'he said <|"|>hi<|"|> to me', "n": 3},
    'path:<|"|>use {a:<|"|>b<|"|>} now<|"|>': {"path": 'use {a:<|"|>b<|"|>} now'},
    'path:<|"|>Note:<|"|>,n:3': {"path": "Note:", "n": 3},
    "path:it's fine,n:3": {"path": "it's fine", "n": 3},
}


@pytest.mark.parametrize("body", GEMMA4)
def test_gemma4_strings_have_any_quotes(body: str) -> None:
    text = {"type": "string"}
    fields = {
        "path": text,
        "n": {"type": "integer"},
        "tags": {"type": "array", "items": text},
        "meta": {"properties": {"a": text}},
    }
    tools = [{"type": "function", "function": {"name": "save", "parameters": {"properties": fields}}}]
    for end in ("<tool_call|>", ""):
        answer = f"<|tool_call>call:save{{{body}}}{end}"
        for pieces in ([answer], answer):
            found = read(FORMATS["gemma4"].make(tools), pieces)
            assert [json.loads(event[1]) for event in found if isinstance(event, list)] == [GEMMA4[body]], found


@pytest.mark.parametrize(
    "text",
    ["<tool_call>\n<function=run>\n</function>\n</tool_c", '<tool_call><function=run>{"cmd": "x"}</function></tool_c'],
)
def test_a_cut_end_mark_of_an_empty_call_is_no_text(text: str) -> None:
    found = read(FORMATS["qwen3_coder"].make(TOOLS), [text])
    assert names(found) == ["run"]
    assert len(found) == 1
    assert ("cmd" in found[0][1]) == ("cmd" in text)


@pytest.mark.parametrize("stop", ["<|eom|>", "<|eot|>", "<|start|>assistant to=user<|message|>"])
@pytest.mark.parametrize("value", ["a", "a</atem:function_calls>", "a</atem:invoke>b", "a</atem:parameter>b"])
def test_the_end_of_a_message_ends_a_value(stop: str, value: str) -> None:
    begin = ' to=save<|message|><atem:function_calls><atem:invoke name="save"><atem:parameter name="text">'
    text = f"{begin}{value}{stop}"
    for pieces in ([text], text):
        found = read(FORMATS["muse_glimmer"].make(TOOLS), pieces)
        assert [json.loads(event[1])["text"][:1] for event in found if isinstance(event, list)] == ["a"], found
    found = read(FORMATS["muse_glimmer"].make(TOOLS), [text, "<|start|>assistant to=user<|message|>Well."])
    assert str(found[-1]).endswith("Well.")


TWO_CALLS = {
    "qwen3_coder": "<tool_call>\n<function=save>\n<parameter=path>\na\n</function>\n"
    "<function=run>\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="save"><parameter name="path">a</invoke>'
    '<invoke name="run"><parameter name="cmd">ls</parameter></invoke></minimax:tool_call>',
    "glm45": "<tool_call>save<arg_key>path</arg_key><arg_value>a</tool_call>"
    "<tool_call>run<arg_key>cmd</arg_key><arg_value>ls</arg_value></tool_call>",
}
"""The end tag of the first call's value is missing, or its value quotes the beginning of a call and was cut off."""


def reader_of(format: str, finish: Finish, text: str, size: int) -> list[Event]:
    reader = ResponseReader(FORMATS[format].make(TOOLS), allowed=["save", "run"])
    tokens = [Token(1, text[at : at + size], None, False) for at in range(0, len(text), size)]
    return reader.read(tokens, finish)[0]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("format", TWO_CALLS)
def test_only_the_models_end_confirms_a_guess(format: str, size: int) -> None:
    calls = {
        finish: [event.name for event in reader_of(format, finish, TWO_CALLS[format], size) if type(event) is CallStart]
        for finish in (Finish.EOS, Finish.LENGTH, Finish.STOP)
    }
    assert calls == {Finish.EOS: ["save", "run"], Finish.LENGTH: ["save"], Finish.STOP: ["save"]}


CUT = "x </tool_call> then <tool_call><function=run><parameter=cmd>rm</parameter></function></tool_call> and"


@pytest.mark.parametrize("before", ["", "a</parameter></function>", "a</function>", "a<parameter=no>"])
def test_a_cut_answer_has_no_invented_call(before: str) -> None:
    text = f"<tool_call><function=save><parameter=text>{before}{CUT}"
    for size in range(len(text)):
        events = reader_of("qwen3_coder", Finish.LENGTH, text[:size], 1000)
        assert "run" not in [event.name for event in events if isinstance(event, CallStart)], text[:size]
