"""The arguments of calls: made JSON where that is plain, and never said to be whole where they are not."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.values import Finish, Token
from handler.protocols.assistant.answer import ResponseReader
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Ending, Event, EventParser
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.parsing import ArgumentsText, CheckedCalls, NamedCall
from tests.doubles.steps import steps
from tests.one_test import in_one_test
from tests.unit.protocols.assistant.tool_texts import TOOLS, golden

Call = tuple[str, str, bool]
"""A call's name, its arguments' text, and whether it is said to be whole."""


def read(
    parser: EventParser, pieces: Sequence[str], finish: Finish, allowed: Collection[str] | None = None
) -> list[str | Call]:
    """The text and the calls of an answer; the parts of a stream and of a whole answer are the same."""
    tokens = [Token(1, piece, None, False) for piece in pieces]
    reader = ResponseReader(parser, allowed=allowed)
    return joined([*(event for token in tokens for event in reader.feed(token)), *reader.flush(finish)])


def joined(events: Sequence[Event]) -> list[str | Call]:
    found: list[str | Call] = []
    count = 0
    for event in events:
        if isinstance(event, str):
            found[-1:] = [found[-1] + event] if found and isinstance(found[-1], str) else [*found[-1:], event]
        elif isinstance(event, CallStart):
            assert event.number == count, "no number is left out"
            count += 1
            found.append((event.name, "", False))
        elif isinstance(event, Arguments | CallEnd):
            call = found[-1]
            assert isinstance(call, tuple)
            name, text, _ = call
            assert event.number == count - 1
            found[-1] = (name, text + event.text, False) if isinstance(event, Arguments) else (name, text, event.whole)
    return found


def calls(format: str, text: str, finish: Finish = Finish.EOS) -> list[Call]:
    found = read(FORMATS[format].make(TOOLS), text, finish)
    assert found == read(FORMATS[format].make(TOOLS), [text], finish), "however it comes"
    return [item for item in found if isinstance(item, tuple)]


def load(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


# -- escapes -----------------------------------------------------------------------------------------------------

RAW = "a\nb\tc\rd\x00e\x1ff\x7f\u2028"
JSON_FORMATS = {
    "hermes": '<tool_call>{"name": "write", "arguments": %s}</tool_call>',
    "smollm2": '<tool_call>[{"arguments": %s, "name": "write"}]</tool_call>',
    "granite": '<|tool_call|>[{"name": "write", "arguments": %s}]',
    "llama3_json": '{"name": "write", "parameters": %s}',
    "phi4_mini_json": 'functools[{"name": "write", "arguments": %s}]',
    "mistral": "[TOOL_CALLS]write[ARGS]%s",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "jamba": '<tool_calls>[{"name": "write", "arguments": %s}]</tool_calls>',
    "nemotron_json": '<TOOLCALL>[{"name": "write", "arguments": %s}]</TOOLCALL>',
    "longcat": '<longcat_tool_call>{"name": "write", "arguments": %s}</longcat_tool_call>',
    "granite-20b-fc": '<function_call> {"name": "write", "arguments": %s}',
    "gigachat3": '<|function_call|>{"name": "write", "arguments": %s}',
    "internlm": '<|action_start|><|plugin|>{"name": "write", "parameters": %s}<|action_end|>',
    "inkling": '<|content_invoke_tool_json|>{"name": "write", "args": %s}<|end_message|>',
    "apertus": '<|tools_prefix|>[{"write": %s}]<|tools_suffix|>',
    "cohere_command3": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "write", "parameters": %s}]<|END_ACTION|>',
    "xlam": '[{"name": "write", "arguments": %s}]',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|><|open|>json type="object"<|sep|>%s'
    "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "dots": '<dots_function_call>{"name": "write", "arguments": %s}</dots_function_call>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n%s\n```",
    "openai": "<|channel|>commentary to=functions.write <|constrain|>json<|message|>%s<|call|>",
}


V32_WRITE = '<｜DSML｜function_calls><｜DSML｜invoke name="write">'
K3_WRITE = '<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|>'
M3_WRITE = ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="write">'


@in_one_test("format", JSON_FORMATS)
def test_control_characters_in_strings_are_escaped(format: str) -> None:
    (call,) = calls(format, JSON_FORMATS[format] % ('{\n\t"text": "' + RAW + '", "path": "\\"\\\\"\n}'))
    assert (call[0], call[2]) == ("write", True)
    assert load(call[1]) == {"text": RAW, "path": '"\\'}


def test_they_are_escaped_as_they_stream() -> None:
    text = ArgumentsText()
    assert [text.feed(piece) for piece in ('{"a":\n', '"b\n', "c\\", "\n", "\n", '\\"\n"', "\n", "}")] == [
        '{"a":\n', '"b\\n', "c\\", "\n", "\\n", '\\"\\n"', "\n", "}",
    ]  # fmt: skip
    assert not text.is_whole()  # a backslash before a line end is no escape of JSON


def test_an_objects_parameter_may_have_them_too() -> None:
    said = '<tool_call><function=weather><parameter=place>{"name": "a\nb"}</parameter></function></tool_call>'
    assert calls("qwen3_coder", said) == [("weather", '{"place": {"name": "a\\nb"}}', True)]


# -- what is open at the end ---------------------------------------------------------------------------------------


@in_one_test(
    ("begun", "rest"),
    [
        ('{"a": "b', '"}'),
        ('{"a": ["b', '"]}'),
        ('{"a": ["b"', "]}"),
        ('{"a": {"b": "c"', "}}"),
        ('{"a": 1 ', "}"),
        ('{"a": true', "}"),
        ('{"a": "}]\\"', '"}'),
        ("{", "}"),
        ("", "{}"),
        ('{"a": 1}', ""),
        ('{"a": 1', None),
        ('{"a": [1', None),
        ('{"a": -', None),
        ('{"a": tru', None),
        ('{"a": "b"]', None),
        ('{"a": 1, ', None),
        ('{"a', None),
        ('{"a"', None),
        ('{"a": ', None),
        ('{"a": "\\', None),
        ('{"a": "\\u00', None),
        ('{"a": "\\x', None),
        ("{'a': 'b", None),
        ('{"a": NaN ', None),
        ("[1, 2", None),
        ('"a', None),
        ('{"a": 1} x', None),
        ('{"a": ' + "[" * 100_000, None),
    ],
)
def test_what_is_open_is_closed_where_nothing_else_could_come(begun: str, rest: str | None) -> None:
    text = ArgumentsText()
    text.feed(begun)
    assert text.closing() == rest


@in_one_test("format", JSON_FORMATS)
@in_one_test("finish", [Finish.EOS, Finish.LENGTH, Finish.STOP, Finish.ERROR])
def test_only_the_models_own_end_closes(format: str, finish: Finish) -> None:
    if format == "smollm2":  # the name comes last
        return
    begun = '{"text": "ab'
    (call,) = calls(format, (JSON_FORMATS[format] % begun).split(begun)[0] + begun, finish)
    assert call == (("write", '{"text": "ab"}', True) if finish is Finish.EOS else ("write", begun, False))


@in_one_test(
    ("format", "text", "said"),
    [
        ("qwen3_coder", "<tool_call><function=write><parameter=text>\nab\n", ("write", '{"text": "ab"}', True)),
        ("qwen3_coder", "<tool_call><function=write><parameter=text>ab</par", ("write", '{"text": "ab', False)),
        ("qwen3_coder", "<function=write><parameter=text>ab</parameter>", ("write", '{"text": "ab"}', True)),
        ("qwen3_coder", "<function=write><parameter=text>ab</parameter><parameter=",
         ("write", '{"text": "ab"', False)),
        ("qwen3_coder", "<tool_call><function=weather><parameter=days>3", ("weather", '{"days": ', False)),
        ("qwen3_coder", "<tool_call><function=time>", ("time", "{}", True)),
        ("minimax_m2", '<invoke name="write"><parameter name="text">ab', ("write", '{"text": "ab"}', True)),
        ("glm45", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>ab", ("write", '{"text": "ab"}', True)),
        ("glm45", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>ab</arg_value>\n<arg_key>pa",
         ("write", '{"text": "ab"', False)),
        ("deepseek_v32", f'{V32_WRITE}<｜DSML｜parameter name="input" string="true">{{"path": "a", "te',
         ("write", '{"input": "{\\"path\\": \\"a\\", \\"te', False)),
        ("deepseek_v32", f'{V32_WRITE}<｜DSML｜parameter name="path" string="true">a',
         ("write", '{"path": "a"}', True)),
        ("hy_v3", "<tool_calls:x><tool_call:x>write<arg_key:x>text</arg_key:x><arg_value:x>ab",
         ("write", '{"text": "ab"}', True)),
        ("hy_v3", "<tool_calls:x><tool_call:x>write<arg_key:x>text</arg_key:x><arg_value:x>ab</arg",
         ("write", '{"text": "ab', False)),
        ("kimi_k3", f'{K3_WRITE}<|open|>argument key="text" type="string"<|sep|>ab',
         ("write", '{"text": "ab"}', True)),
        ("kimi_k3", f'{K3_WRITE}<|open|>argument key="text" type="number"<|sep|>3',
         ("write", '{"text": ', False)),
        ("minimax_m3", f"{M3_WRITE}]<]minimax[>[<text>ab", ("write", '{"text": "ab"}', True)),
        ("minimax_m3", f"{M3_WRITE}]<]minimax[>[<text>ab]<]mini", ("write", '{"text": "ab', False)),
        ("minimax_m3", f"{M3_WRITE}]<]minimax[>[<other>]<]minimax[>[<a>ab]<]minimax[>[</a>",
         ("write", '{"other": ', False)),
        ("minimax_m3", f"{M3_WRITE}]<]minimax[>[<other>]<]minimax[>[<item>ab",
         ("write", '{"other": ["ab"]}', True)),
        ("lfm2", "<|tool_call_start|>[write(text='ab", ("write", '{"text": "ab"}', True)),
        ("olmo3", "<function_calls>weather(days=3", ("weather", '{"days": ', False)),
        ("minicpm5", '<function name="write"><param name="text"><![CDATA[ab', ("write", '{"text": "ab"}', True)),
        ("step3", '<｜tool_calls_begin｜><steptml:invoke name="write"><steptml:parameter name="text">ab',
         ("write", '{"text": "ab"}', True)),
        ("gemma4", '<|tool_call>call:write{text:<|"|>ab', ("write", '{"text": "ab"}', True)),
        ("gemma4", "<|tool_call>call:weather{days:3", ("weather", '{"days": ', False)),
        ("pythonic", "[write(text='ab", ("write", '{"text": "ab"}', True)),
        ("pythonic", "[write(text='ab\\", ("write", '{"text": "ab', False)),
        ("pythonic", "[write(text='ab\\x4", ("write", '{"text": "ab', False)),
        ("pythonic", "[weather(days=3", ("weather", '{"days": ', False)),
        ("hermes", '<tool_call>{"name": "time", "arguments": {}', ("time", "{}", True)),
        ("hermes", '<tool_call>{"name": "time", "arguments": {}}</tool_', ("time", "{}", True)),
        ("openai", "<|channel|>commentary to=functions.time<|message|><|call|>", ("time", "{}", True)),
        ("openai", "<|channel|>commentary to=python<|message|>print(1)<|call|>", ("python", "print(1)", False)),
        ("openai", '<|channel|>analysis to=functions.time<|message|>{} so<|call|>', ("time", "{} so", False)),
    ],
)  # fmt: skip
def test_what_other_forms_leave_open(format: str, text: str, said: Call) -> None:
    assert calls(format, text) == [said]
    name, _, whole = said
    (cut,) = calls(format, text, Finish.LENGTH) or [(name, "", False)]
    done = format in ("openai", "hermes")
    assert cut == (said if done and whole else (name, cut[1], False))


def test_a_call_without_a_character_of_arguments_is_text() -> None:
    for format, text in (
        ("glm45", "<tool_call>time\n<arg_key>"),
        ("qwen3_coder", "<tool_call><function=time>"),
        ("hermes", '<tool_call>{"name": "time", "arguments": {'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>"),
    ):
        for pieces in ([text], text):
            assert read(FORMATS[format].make(TOOLS), pieces, Finish.LENGTH) == [text]
    rest = "<tool_call>time\n<arg_key>" + "x" * 600 + "<tool_call>time</tool_call>"
    assert read(FORMATS["glm45"].make(TOOLS), rest, Finish.EOS)[-1] == ("time", "{}", True)


# -- what is not JSON ---------------------------------------------------------------------------------------------

WRONG = {
    "an invalid escape": '{"text": "\\x41"}',
    "single quotes": "{'text': 'a'}",
    "NaN": '{"text": NaN}',
    "infinity": '{"text": -Infinity}',
    "a trailing comma": '{"text": "a",}',
    "no quotes": '{text: "a"}',
    "too deep": '{"text": ' + "[" * 10_000 + "]" * 10_000 + "}",
    "a number too long": '{"text": 1' + "0" * 5000 + "}",
    "an end too early": '{"text": "a"]}',
}


@in_one_test("wrong", WRONG.values(), ids=WRONG)
@in_one_test("format", JSON_FORMATS)
def test_what_is_no_json_is_never_whole(format: str, wrong: str) -> None:
    text = JSON_FORMATS[format] % wrong
    for finish in (Finish.EOS, Finish.LENGTH):
        found = read(FORMATS[format].make(TOOLS), [text], finish)
        assert found
        assert not any(item[2] for item in found if isinstance(item, tuple))


def test_a_doubled_key_is_json_and_text_after_the_object_is_none_of_it() -> None:
    doubled = '{"text": "a", "text": "b"}'
    assert calls("hermes", JSON_FORMATS["hermes"] % doubled) == [("write", doubled, True)]
    assert calls("mistral", "[TOOL_CALLS]write[ARGS]{} so") == [("write", "{}", True)]


def test_arguments_as_text_that_is_no_object_are_text() -> None:
    text = '<tool_call>{"name": "write", "arguments": "Paris"}</tool_call>'
    assert read(FORMATS["hermes"].make(TOOLS), text, Finish.EOS) == [text]
    text = '<tool_call>{"name": "write", "arguments": "{\\"text\\": \\"a\nb\\"}"}</tool_call>'
    assert calls("hermes", text) == [("write", '{"text": "a\\nb"}', True)]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"text": "\\ud800"}, "name": "write"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("pythonic", "[write(text='\\ud800')]"),
    ],
)
def test_half_a_surrogate_pair_can_be_sent(format: str, text: str) -> None:
    for item in read(FORMATS[format].make(TOOLS), text, Finish.EOS):
        "".join(item if isinstance(item, str) else item[:2]).encode()


# -- all formats ---------------------------------------------------------------------------------------------------


def begins(part: Any, whole: Any) -> bool:
    """Whether a value is another one that broke off: in a string, a list or an object, never amid a number."""
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    if isinstance(part, dict) and isinstance(whole, dict):
        return [*part] == [*whole][: len(part)] and begins([*part.values()], [*whole.values()])
    if isinstance(part, list) and isinstance(whole, list):
        pairs = [*zip(part, whole, strict=False)]
        return len(part) <= len(whole) and all(a == b for a, b in pairs[:-1]) and all(begins(*p) for p in pairs[-1:])
    return bool(part == whole) and type(part) is type(whole)


ANSWERS = [(format, case["text"]) for format in FORMATS for case in golden(format).values()]


@given(answer=st.sampled_from(ANSWERS), data=st.data())
def test_a_call_that_is_said_to_be_whole_is_what_the_model_wrote(answer: tuple[str, str], data: st.DataObject) -> None:
    format, text = answer
    cut = data.draw(st.integers(0, len(text)))
    finish = data.draw(st.sampled_from([Finish.EOS, Finish.LENGTH, Finish.STOP]))
    for (name, part, whole), (same, said, complete) in zip(
        calls(format, text[:cut], finish), calls(format, text), strict=False
    ):
        if whole and complete:
            closed = begins(load(part), load(said)) and finish is Finish.EOS
            assert name == same
            assert closed or load(part) == load(said)


@given(answer=st.sampled_from(ANSWERS), data=st.data())
def test_whatever_a_model_writes_what_is_whole_is_an_object(answer: tuple[str, str], data: st.DataObject) -> None:
    format, text = answer
    for _ in range(data.draw(st.integers(0, 4))):
        at, size = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 3))
        put = data.draw(st.sampled_from(["", "\n", "\\", '"', "'", "{", "}", "]", ",", ":", "\x00", "NaN", "\\x", "<"]))
        text = text[:at] + put + text[at + size :]
    for _, arguments, whole in calls(format, text, data.draw(st.sampled_from([Finish.EOS, Finish.LENGTH]))):
        assert not whole or isinstance(load(arguments), dict)


# -- calls of tools that are not allowed -----------------------------------------------------------------------------


@in_one_test(("format", "text"), ANSWERS)
def test_a_call_that_is_not_allowed_is_text_and_those_beside_it_stay(format: str, text: str) -> None:
    found = read(FORMATS[format].make(TOOLS), [text], Finish.EOS)
    names = {item[0] for item in found if isinstance(item, tuple)}
    for allowed in ({"other"}, *({name} for name in names)):
        whole = read(FORMATS[format].make(TOOLS), [text], Finish.EOS, allowed)
        assert whole == read(FORMATS[format].make(TOOLS), text, Finish.EOS, allowed), "however it comes"
        assert [item for item in whole if isinstance(item, tuple)] == [
            item for item in found if isinstance(item, tuple) and item[0] in allowed
        ]
        words = "".join(item for item in whole if isinstance(item, str))
        for item in found:
            said = item if isinstance(item, str) else item[0] if item[0] not in allowed else ""
            assert said in words


def test_what_is_given_back_is_the_name_and_the_arguments() -> None:
    said: list[Event] = [CallStart(0, "time"), Arguments(0, '{"zone'), Arguments(0, '": "CET"}'), CallEnd(0)]
    calls = CheckedCalls({"weather"})
    said += [CallStart(1, "weather"), Arguments(1, "{}"), CallEnd(1), CallStart(2, "time")]
    events = calls.read(said)
    assert events == [
        "time", ' {"zone', '": "CET"}', CallStart(0, "weather"), Arguments(0, "{}"), CallEnd(0), "\ntime",
    ]  # fmt: skip
    assert calls.end([CallEnd(2, Ending.OPEN)], Finish.EOS) == []


# -- other parsers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finish", [Finish.EOS, Finish.LENGTH])
def test_a_named_call_in_arguments(finish: Finish) -> None:
    assert read(NamedCall("f"), ['{"a": "b\n', 'c"}'], finish) == [("f", '{"a": "b\\nc"}', True)]
    assert read(NamedCall("f"), ['{"a": "b'], finish) == [
        ("f", '{"a": "b"}', True) if finish is Finish.EOS else ("f", '{"a": "b', False)
    ]


def test_a_users_parser_is_checked_too() -> None:
    """It knows of no endings: what it leaves open is not closed, and what it does not end is ended."""
    checked = CheckedCalls()
    events = checked.read([CallStart(0, "f"), Arguments(0, '{"a'), Arguments(0, '": "'), Arguments(7, "x")])
    assert events == [CallStart(0, "f"), Arguments(0, '{"a'), Arguments(0, '": "')]
    assert checked.end(["so"], Finish.EOS) == ["so", CallEnd(0, Ending.BROKEN)]
    checked = CheckedCalls()
    events = [*checked.read([CallStart(0, "f"), Arguments(0, '{"a": "')]), *checked.end([CallEnd(0)], Finish.EOS)]
    assert events[-1] == CallEnd(0, Ending.BROKEN)


def test_the_work_is_linear_in_arguments() -> None:
    def read(size: int) -> None:
        text = '{"a": "' + '\n\\"{[' * size
        one = ArgumentsText()
        for at in range(0, len(text), 7):
            one.feed(text[at : at + 7])
        assert one.closing() == '"}'

    assert steps(lambda: read(2_000)) < 5 * steps(lambda: read(500))


def test_a_call_that_lacks_only_its_end_is_whole_after_its_last_value() -> None:
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>Bonn</arg_value>"
    assert read(FORMATS["glm45"].make(TOOLS), [text], Finish.EOS) == [("weather", '{"city": "Bonn"}', True)]
    assert read(FORMATS["glm45"].make(TOOLS), [text + "\n<arg_"], Finish.EOS) == [("weather", '{"city": "Bonn"', False)]
    assert read(FORMATS["glm45"].make(TOOLS), [text], Finish.LENGTH) == [("weather", '{"city": "Bonn"', False)]
