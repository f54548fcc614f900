"""Calls in Python: literals are read as Python reads them, and what is none stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.one_test import in_one_test
from tests.unit.protocols.assistant.test_nothing_vanishes import read

SHAPES = {
    "lfm2": "<|tool_call_start|>[%s]<|tool_call_end|>",
    "llama4_pythonic": "<|python_start|>[%s]<|python_end|>",
    "pythonic": "[%s]",
    "olmo3": "<function_calls>\n%s\n</function_calls>",
}

LITERALS: dict[str, Any] = {
    "{'x', 'y'}": ["x", "y"],
    "{'t': {'x', (1), ('a', 2)}}": {"t": ["x", 1, ["a", 2]]},
    "{1: 2, None: [3,], 'b': {}}": {"1": 2, "null": [3], "b": {}},
    "()": [],
    "(5)": 5,
    "('x')": "x",
    "((-1.5),)": [-1.5],
    "(1, 2)": [1, 2],
    ".5": 0.5,
    "5.": 5.0,
    "-.5e1": -5.0,
    "1_000": 1000,
    "0x1f": 31,
    "-0b11": -3,
    "+5": 5,
    "007": 7,
    "-74.0": -74.0,
    "true": True,
    "None": None,
    "r'\\d+\\''": "\\d+\\'",
    "R'a\\d'": "a\\d",
    "u'a'": "a",
    "f'a{{b}}'": "a{b}",
    "'\\101\\0'": "A\0",
    "'grep ' 'x'": "grep x",
    "'a' r'\\b' \"c\"": "a\\bc",
    "'''it's'''": "it's",
    "''": "",
    "'sed -n '360,450p' a.py'": "sed -n '360,450p' a.py",
    '"say "hi" now"': 'say "hi" now',
    "'python3 -c 'print(\"a\", 'b')''": "python3 -c 'print(\"a\", 'b')'",
    "['say 'hi' now', 'x']": ["say 'hi' now", "x"],
}


@in_one_test("literal", LITERALS)
@pytest.mark.parametrize("format", SHAPES)
def test_literals_are_read_as_python_reads_them(format: str, literal: str) -> None:
    for call, arguments in (
        (f"erase(a={literal})", {"a": LITERALS[literal]}),
        (f"erase(b=1, a={literal}, c='d')", {"b": 1, "a": LITERALS[literal], "c": "d"}),
    ):
        text = SHAPES[format] % call
        answer = read(format, [text])
        assert read(format, text) == answer
        ((name, written, whole),) = answer.calls
        assert (name, json.dumps(json.loads(written)), whole) == ("erase", json.dumps(arguments), True)
        assert answer.text.strip() == ""


NO_LITERALS = ["zork", "b'x'", "f'{x}'", "5j", "1 + 2", "f(3)", "'\\x4'", "{'k': 1, 'k': 2}", "{[1]: 2}", "*a"]


@in_one_test("value", NO_LITERALS)
@pytest.mark.parametrize("format", SHAPES)
def test_what_is_no_literal_is_text(format: str, value: str) -> None:
    text = SHAPES[format] % f"erase(a={value})"
    answer = read(format, [text])
    assert answer == read(format, text)
    assert answer.text.strip() == text.strip()
    assert not any(whole for *_, whole in answer.calls)


def test_a_string_that_quotes_and_never_ends_makes_no_call_whole() -> None:
    for text in ("<|tool_call_start|>[erase(a='x'<|tool_call_end|>", "<|tool_call_start|>[erase(a='say 'hi' now"):
        answer = read("lfm2", text)
        assert answer == read("lfm2", [text])
        assert not any(whole for *_, whole in answer.calls)


def test_a_comma_and_a_comment_may_follow_the_last_call() -> None:
    whole = ("erase", '{"a": 1}', True)
    assert read("lfm2", "<|tool_call_start|>[erase(a=1),]<|tool_call_end|>") == ("", [whole])
    assert read("lfm2", "<|tool_call_start|>[erase(a=1)  # all\n]<|tool_call_end|>") == ("# all", [whole])


TWICE = {
    "qwen3_coder": "<tool_call>\n<function=erase>\n<parameter=a>\nx\n</parameter>\n<parameter=a>\ny\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call>erase\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>a</arg_key>\n"
    "<arg_value>y</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:erase{a:<|"|>x<|"|>,a:<|"|>y<|"|>}<tool_call|>',
    "minimax_m3": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="erase">]<]minimax[>[<a>x]<]minimax[>[</a>'
    "]<]minimax[>[<a>y]<]minimax[>[</a>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="erase" index="0"<|sep|><|open|>argument key="a" type="string"'
    '<|sep|>x<|close|>argument<|sep|><|open|>argument key="a" type="string"<|sep|>y<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "lfm2": "<|tool_call_start|>[erase(a='x', a='y')]<|tool_call_end|>",
}


@in_one_test("format", TWICE)
def test_a_parameter_given_twice_is_one_member_of_no_whole_call(format: str) -> None:
    text = TWICE[format]
    answer = read(format, [text])
    assert answer == read(format, text)
    ((_, arguments, whole),) = answer.calls
    assert (arguments.replace(" ", ""), whole) == ('{"a":"x"}', False)
    assert answer.text == text


WITHOUT = {
    "hermes": '<tool_call>{"name": "clock", "arguments": null}</tool_call>',
    "llama3_json": '{"name": "clock", "parameters": null}',
    "granite": '<|tool_call|>[{"name": "clock", "arguments": ""}]',
    "cohere_command3": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "clock", "parameters": null}]'
    "<|END_ACTION|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜><｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n\n```"
    "<｜tool▁call▁end｜>",
    "mistral": "[TOOL_CALLS]clock",
}


@in_one_test("format", WITHOUT)
def test_a_call_without_arguments_has_none(format: str) -> None:
    for pieces in ([WITHOUT[format]], WITHOUT[format]):
        assert read(format, pieces) == ("", [("clock", "{}", True)])


@pytest.mark.parametrize("format", ["qwen3_coder", "minimax_m2", "kimi_k3"])
def test_text_beside_the_parameters_of_a_call_is_shown_after_it(format: str) -> None:
    shapes = {
        "qwen3_coder": "<tool_call><function=erase>%s<parameter=a>x</parameter></function></tool_call>",
        "minimax_m2": '<minimax:tool_call><invoke name="erase">%s<parameter name="a">x</parameter></invoke>'
        "</minimax:tool_call>",
        "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="erase" index="0"<|sep|>%s<|open|>argument key="a" '
        'type="string"<|sep|>x<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    }
    for pieces in ([shapes[format] % " zork "], shapes[format] % " zork "):
        assert read(format, pieces) == ("zork", [("erase", '{"a": "x"}', True)])


def test_members_beside_the_arguments_are_shown_unless_no_client_needs_them() -> None:
    call = '<tool_call>{"name": "erase", "arguments": {"a": 1}, %s}</tool_call>'
    whole = ("erase", '{"a": 1}', True)
    assert read("hermes", call % '"id": "c1"') == ("", [whole])
    assert read("hermes", call % '"why": "zork"') == ('{"why": "zork"}', [whole])
    broken = call % '"arguments": {"b": 2}'
    assert read("hermes", broken) == (broken, [("erase", '{"a": 1}', False)])
