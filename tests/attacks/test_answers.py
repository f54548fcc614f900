"""The work of reading an answer: linear in its length, whatever the model writes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handler.core.text import StopMatcher
from handler.core.values import Thoughts
from handler.protocols.assistant.events import EventParser
from handler.protocols.assistant.reasoning import thinking_parser
from handler.protocols.assistant.reasoning_families import FAMILIES
from handler.protocols.assistant.response_template.parsing import ResponseParser
from handler.protocols.assistant.response_template.pattern import Attempt, Pattern
from handler.protocols.assistant.response_template.template import read_response_template
from handler.protocols.assistant.tools.formats import FORMATS
from tests.unit.protocols.assistant.response_templates import TEMPLATES, answers
from tests.unit.protocols.assistant.tool_texts import BEGUN, TOOLS, golden

LENGTH = 20_000  # characters, and four times as many
PIECES = (4, 1 << 20)  # characters; the second is the whole answer at once


def cpu_time(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def read(parser: Any, text: str, size: int) -> None:
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    parser.flush()


def assert_linear(make: Callable[[], Any], begin: str, unit: str, end: str = "") -> None:
    """Check that four times the text costs less than six times the time, of a few tries at the best."""
    for size in PIECES:
        for last in (False, False, False, True):
            once = cpu_time(functools.partial(read, make(), begin + unit * (LENGTH // len(unit)) + end, size))
            long = begin + unit * (4 * LENGTH // len(unit)) + end
            four = cpu_time(functools.partial(read, make(), long, size))
            if four < 6 * once or four < 0.05:
                break
            told = f"{four:.2f} s, a quarter of it {once:.2f} s, in pieces of {size}: {begin!r} and {unit!r}"
            assert not last, told


# -- answers -----------------------------------------------------------------------------------------------------------

CALLS = {name: golden(name)["parallel"]["text"] for name in FORMATS}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", ["calls", "arguments", "ends", "string", "other order", "space"])
def test_the_work_is_linear_in_the_answer(format: str, shape: str) -> None:
    begin, argument, partial = BEGUN[format]
    text = {
        "calls": ("", CALLS[format]),
        "arguments": (begin, argument),
        "ends": (begin + argument, partial),
        "string": (begin + argument.partition("1")[0] + '"', 'x\\"'),
        "other order": (begin.partition('"name"')[0] + '{"arguments": {', '"a": 1, '),
        "space": (CALLS[format], "\n"),
    }[shape]
    assert_linear(lambda: FORMATS[format].make(TOOLS), *text)


VALUES = {
    "qwen3_coder": (
        "<tool_call><function=write><parameter=text>",
        ("</parameter>", "<parameter=text>", "</tool_call>", "<function=time></function>", "</parameter></function>"),
        "</parameter></function></tool_call>",
    ),
    "glm45": (
        "<tool_call>write<arg_key>text</arg_key><arg_value>",
        ("</arg_value>", "<arg_value>", "</tool_call>", "<tool_call>time</tool_call>", "</arg_value><arg_key>"),
        "</arg_value></tool_call>",
    ),
    "muse_glimmer": (
        ' to=write<|message|><atem:function_calls><atem:invoke name="write"><atem:parameter name="text">',
        ("</atem:parameter>", '<atem:parameter name="text">', "</atem:function_calls>", '<atem:invoke name="time">'),
        "<|eom|>",
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|><|open|>argument key="text"<|sep|>',
        ("<|close|>argument<|sep|>", '<|open|>argument key="text"<|sep|>', "<|close|>tools<|sep|>"),
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "minimax_m3": (
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="write">]<]minimax[>[<text>',
        ("]<]minimax[>[<b>", "]<]minimax[>[<", "]<]minimax[>[<b>]<]minimax[>[</b>"),
        "]<]minimax[>[</text>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
    ),
    "gemma4": ('<|tool_call>call:write{text:<|"|>', ('<|"|>', '<|"|>}', '<|"|>,a', 'a:<|"|>'), '<|"|>}<tool_call|>'),
}
"""A call up to the text of a value, tags that the value may quote, and the end of the call."""


@pytest.mark.parametrize(("format", "unit"), [(name, unit) for name, (_, units, _) in VALUES.items() for unit in units])
def test_the_work_is_linear_in_the_tags_that_a_value_quotes(format: str, unit: str) -> None:
    begin, _, rest = VALUES[format]
    for end in ("", rest):
        assert_linear(lambda: FORMATS[format].make(TOOLS), begin, unit, end)


THOUGHTS = {
    "thought": "so it is; ",
    "marks": "{begin}a{end}b",
    "half marks": "{half}",
    "space": " \n",
    "calls": "{call}",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", THOUGHTS)
@pytest.mark.parametrize("thinking", [True, False])
def test_the_work_is_linear_in_the_thought(family: str, shape: str, thinking: bool) -> None:
    marks = FAMILIES[family]
    begin, end = next(iter((*marks.begin, *marks.others)), "<think>"), next(iter(marks.end), "</think>")
    unit = THOUGHTS[shape].format(begin=begin, end=end, half=end[:-1], call=next(iter(marks.calls), begin))
    assert_linear(lambda: thinking_parser(marks, FORMATS["hermes"].make(TOOLS), thinking=thinking), "", unit)


@pytest.mark.parametrize("unit", ["a", " ", "<th", "aab", "</thin"])
@pytest.mark.parametrize("thoughts", [None, Thoughts(("<think>",), ("</think>",), is_open=False)])
def test_the_work_is_linear_with_stop_strings(unit: str, thoughts: Thoughts | None) -> None:
    assert_linear(lambda: StopMatcher(["a" * 100 + "b", "</think>x", *"defg"], thoughts=thoughts), "", unit)


def draw_answers(parsers: dict[str, Callable[[], EventParser]], texts: dict[str, list[str]]) -> st.SearchStrategy[Any]:
    """Draw a parser's name, the beginning of one of its answers, and what the model repeats then."""

    def of(name: str) -> st.SearchStrategy[Any]:
        parts = st.sampled_from(texts[name]).flatmap(
            lambda text: st.tuples(st.integers(0, len(text)), st.integers(1, 40)).map(
                lambda place: (text[: place[0]], text[max(0, place[0] - place[1]) : place[0]] or text[:1])
            )
        )
        odd = st.sampled_from([*" \n;,:{}[]()\"'\\<|=", "<tool_call>", "a:1,", "a=1,", '"a":1,', "[[", "{{", '{"a":'])
        return st.tuples(st.just(name), parts.map(lambda part: part[0]), parts.map(lambda part: part[1]) | odd)

    return st.sampled_from([*parsers]).flatmap(of)


@settings(deadline=None)
@given(
    draw_answers(
        {name: (lambda format=format: format.make(TOOLS)) for name, format in FORMATS.items()},  # type: ignore[misc]
        {name: [case["text"] for case in golden(name).values()] for name in FORMATS},
    )
)
def test_whatever_a_model_repeats_the_work_is_linear(drawn: tuple[str, str, str]) -> None:
    name, begin, unit = drawn
    assert_linear(lambda: FORMATS[name].make(TOOLS), begin, unit)


# -- a model's own response template -----------------------------------------------------------------------------------

READ = {name: read_response_template(template) for name, template in TEMPLATES.items()}
HEAD = "<|channel|>commentary to=functions.f"


@pytest.mark.parametrize(
    ("template", "begin", "unit"),
    [
        *((name, "", unit) for name in READ for unit in ("so it is; ", " \n", "<", "<|", "<tool_call>", "<call:f>")),
        ("channels", "", HEAD),  # a mark that never ends, in each of which others begin
        ("channels", f"{HEAD}<|message|>", '{"a": "\\n'),
        ("channels", f'{HEAD}<|message|>{{"a": "', "<|call|>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x</tool_call>"),
        ("hermes", "<tool_call>", "[" * 10),
        ("tags", "<tool_call><function=f>", "<parameter=a>"),
        ("tags", "<tool_call><function=f><parameter=a>", " "),
        ("tags", "<tool_call><function=f>", "<parameter=a>1</parameter>"),
        ("own strings", "<|tool_call>call:f{", 'a:<|"|>b<|"|>,'),
        ("own strings", "<|tool_call>call:f{", '<|"|'),
        ("own strings", "<|tool_call>call:f{", '{"{'),
        ("own strings", "<|tool_call>call:f{", "{a"),
        ("lines", "</think><call:f>", "a=1\n"),
        ("messages", "", "a"),
        ("messages", "", "<|message|>a"),
    ],
)
def test_the_work_is_linear_by_a_response_template(template: str, begin: str, unit: str) -> None:
    assert_linear(lambda: ResponseParser(READ[template], "", TOOLS), begin, unit)


HOSTILE = [r"<(?:a+)+b>", r"<(?:a|a)+b>", r"<(?:a?){64}a{64}>", r"<.*.*.*.*b>", r"<(?:\w+\s?)+>", r"<[^b]*[^c]*[^d]*>"]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_the_work_of_a_hostile_template_is_linear(pattern: str) -> None:
    fields = {
        "thinking": {"open_pattern": pattern, "close_pattern": pattern},
        "content": {},
        "tool_calls": {
            "open": "{",
            "close": "}",
            "content": "xml-inline",
            "content_args": {"tag_pattern": f"(?P<key>{pattern})"},
            "transform": {"name": "f", "arguments": "{content}"},
        },
    }
    template = read_response_template({"start_anchor": "a", "fields": fields})
    for begin, unit in (("", "<a"), ("", "<" + "a" * 200), ("<", "a"), ("{", "<a"), ("{<", "a")):
        assert_linear(lambda: ResponseParser(template, "", TOOLS), begin, unit)


TAG = r"<(?P<key>\w+)=(?P<value>[^>]*)>"


def _calls(content: str = "xml-inline", **arguments: Any) -> dict[str, Any]:
    transform = {"name": "time", "arguments": "{content}"}
    return {"open": "{", "close": "}", "content": content, "content_args": arguments, "transform": transform}


def test_the_work_is_linear_in_tags_that_are_merged() -> None:
    fields = {"content": {}, "tool_calls": _calls(tag_pattern=TAG, merge_duplicates=True)}
    template = read_response_template({"start_anchor": "a", "fields": fields})
    assert_linear(lambda: ResponseParser(template, "", TOOLS), "{", "<a=1>", "}")
    events = ResponseParser(template, "", TOOLS).feed("{<a=1><a=2><a=3>}")
    assert '["1", "2", "3"]' in str(events)


def test_a_hostile_template_is_read_at_once() -> None:
    empty = "(?:)"
    for _ in range(6):
        empty = f"(?:{empty}{{256}})"
    assert cpu_time(lambda: Pattern(f"a{empty}b")) < 1
    attempt = Attempt(Pattern(f"a{empty}b"), before="")
    attempt.feed("ab", final=True)
    assert attempt.match("ab") is not None
    many = _calls("text")
    many["transform"] = {"name": "time", "arguments": {f"k{number}": "{content}" for number in range(1000)}}
    with pytest.raises(ValueError, match="has 1000 placeholders; the maximum is 64"):
        read_response_template({"start_anchor": "a", "fields": {"content": {}, "tool_calls": many}})


@pytest.mark.parametrize("pattern", ["a[^b]*b", "(?:a|a)+b", "(?:a|aa)+[^c]*c?b"])
def test_the_work_of_looking_for_an_answers_start_is_bounded(pattern: str) -> None:
    template = read_response_template({"start_anchor_pattern": pattern, "fields": {"content": {}}})
    assert cpu_time(lambda: template.begun("a" * 60_000)) < 1
    assert template.begun("a" * 60_000 + "abcd") == "cd"


@settings(deadline=None)
@given(
    draw_answers(
        {name: (lambda read=read: ResponseParser(read, "", TOOLS)) for name, read in READ.items()},  # type: ignore[misc]
        {name: [answer.text for answer in answers() if answer.template == name] for name in READ},
    )
)
def test_whatever_a_model_repeats_the_work_is_linear_by_its_template(drawn: tuple[str, str, str]) -> None:
    name, begin, unit = drawn
    assert_linear(lambda: ResponseParser(READ[name], "", TOOLS), begin, unit)
