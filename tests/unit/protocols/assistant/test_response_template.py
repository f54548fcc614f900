"""Answers are read by a model's own response template, in any cutting, as transformers reads them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from handler.core.text import Vocabulary
from handler.core.values import LMI_NAMES, Delta, Finish, Request, Sampling, StructuredOutput, Token
from handler.protocols.assistant.answer import describe_parsers, reasoning_family, response_form
from handler.protocols.assistant.events import Arguments, CallStart, Event
from handler.protocols.assistant.response_template.parsing import ResponseParser
from handler.protocols.assistant.response_template.pattern import Attempt, Pattern
from handler.protocols.assistant.response_template.template import read_response_template
from handler.protocols.assistant.tools.parsing import HF, CheckedCalls
from handler.protocols.assistant.tools.request import Tools, choose_format
from handler.protocols.kernel.context import ServerContext
from tests.one_test import in_one_test
from tests.unit.protocols.answers import NAMED, TOOLS, chat, choices, events, saying, with_options
from tests.unit.protocols.assistant.response_templates import TEMPLATES, Answer, answers
from tests.unit.protocols.assistant.test_reasoning import parts

ANSWERS = answers()
READ = {name: read_response_template(template) for name, template in TEMPLATES.items()}


def read(
    template: str, prompt: str, pieces: Iterable[str], tools: Sequence[Any] | None = (), finish: Finish = Finish.EOS
) -> tuple[str, str, list[tuple[str, Any]]]:
    parser, checked = ResponseParser(READ[template], READ[template].begun(prompt), tools), CheckedCalls()
    found: list[Event] = []
    for piece in pieces:
        found += checked.read(parser.feed(piece))
    return parts([*found, *checked.end(parser.flush(), finish)])


def test_arguments_of_a_call_that_its_mark_names_come_before_its_end() -> None:
    parser = ResponseParser(READ["channels"], READ["channels"].begun("<|start|>assistant"), ())
    found = parser.feed('<|channel|>commentary to=functions.f json<|message|>{"a": "some wor')
    assert [*map(type, found)] == [CallStart, Arguments]


def loaded(calls: Iterable[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@in_one_test("answer", ANSWERS, ids=lambda answer: f"{answer.template}: {answer.text[:20]!r}")
def test_an_answer_has_its_parts_in_any_cutting(answer: Answer) -> None:
    wanted = answer.thoughts, answer.content, answer.calls
    for cut in range(len(answer.text) + 1):
        for pieces in ((answer.text[:cut], answer.text[cut:]), (answer.text[:cut], *answer.text[cut:])):
            thoughts, content, calls = read(answer.template, answer.prompt, pieces)
            assert (thoughts, content, loaded(calls)) == wanted


OTHERWISE = {"hermes", "tags"}
"""Without `repeats`, transformers has the last of several texts, and without `content` none; here it is as in vLLM."""


@in_one_test(
    "answer", [answer for answer in ANSWERS if answer.template not in OTHERWISE], ids=lambda answer: answer.text[:20]
)
def test_transformers_reads_the_same(answer: Answer) -> None:
    from transformers.utils.chat_parsing import parse_response  # a second, which no other worker needs

    message = parse_response(answer.text, TEMPLATES[answer.template], prefix=answer.prompt)
    calls = message.get("tool_calls", [])
    functions = [call["function"] for call in (calls if isinstance(calls, list) else [calls])]
    named = [(function["name"], function["arguments"]) for function in functions]
    assert (message.get("thinking", ""), message.get("content", ""), named) == answer[3:]


MARKS = sorted({*'<|> \n{}"a:,=', *re.findall(r"<[^<>]*>|\w+", json.dumps(TEMPLATES)), *(one.text for one in ANSWERS)})


@settings(deadline=None)
@given(st.sampled_from(sorted(READ)), st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=8), st.data())
def test_any_cutting_of_anything_gives_the_same_parts_in_response_template(
    template: str, words: list[str], data: st.DataObject
) -> None:
    answer = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=5)))
    pieces = [answer[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    tools = data.draw(st.sampled_from([None, TOOLS]))
    assert read(template, "", pieces, tools) == read(template, "", [answer], tools)


def test_arguments_get_the_types_of_the_tools_schema() -> None:
    properties = {
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "b": {"type": ["boolean", "null"]},
        "l": {"type": "array"},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    body = "<call:f>\nn=7\ns=7\nb=true\nl=[1]\nx=1\n</call>"
    wanted = {"n": 7, "s": "7", "b": True, "l": [1], "x": "1"}
    assert loaded(read("lines", "<bot>", [f"</think>{body}"], [tool])[2]) == [("f", wanted)]


def test_arguments_are_streamed_where_the_template_allows_it() -> None:
    parser = ResponseParser(READ["channels"], "", [])
    head = "<|channel|>commentary to=functions.f<|message|>"
    assert len(parser.feed(head + "{")) == 2, "the call, and the first of its arguments"
    assert len(parser.feed('"a": ')) == 1


@in_one_test(
    ("template", "text", "finish", "call"),
    [
        ("channels", '<|channel|>commentary to=functions.f<|message|>{"a": "b', Finish.EOS, ("f", '{"a": "b"}')),
        ("channels", '<|channel|>commentary to=functions.f<|message|>{"a": "b', Finish.LENGTH, ("f", '{"a": "b')),
        ("tags", "<tool_call><function=f><parameter=a>1</parameter><para", Finish.LENGTH, ("f", '{"a": 1')),
        ("tags", "<tool_call><function=f><parameter=a>b</parameter>", Finish.EOS, ("f", '{"a": "b"}')),
        ("tags", "<tool_call><function=f>", Finish.EOS, ("f", "{}")),
        ("own strings", "<|tool_call>call:f{a:1}", Finish.LENGTH, ("f", '{"a": 1}')),
    ],
)
def test_a_call_that_breaks_off_stays_as_far_as_it_came(
    template: str, text: str, finish: Finish, call: tuple[str, str]
) -> None:
    assert read(template, "", [text], [], finish)[2] == [call]


@in_one_test(
    ("template", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 10_000}}}}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>'),
        ("tags", "<tool_call><function=f>ls -la</function></tool_call>"),
        ("tags", "<tool_call><function=f><command>ls</command></function></tool_call>"),
        ("own strings", '<|tool_call>call:f{a:<|"|>b}<tool_call|>'),
    ],
)
def test_what_is_no_call_stays_text(template: str, text: str) -> None:
    assert read(template, "", [text, " So."]) == ("", f"{text} So.", [])


def test_text_after_the_arguments_of_a_call_is_text() -> None:
    text = '<|channel|>commentary to=functions.f<|message|>{"a": 1} zork<|call|>'
    for pieces in ([text], text):
        assert read("channels", "", pieces) == ("", "zork", [("f", '{"a": 1}')])


def test_without_tools_calls_and_unwanted_reasoning_stay_in_the_text() -> None:
    text = '<think>Hm.</think><tool_call>{"name": "f"}</tool_call>'
    assert read("hermes", "", [text], None) == ("Hm.", text.removeprefix("<think>Hm.</think>"), [])
    parser = ResponseParser(READ["hermes"], "", separates=False)
    assert parts([*parser.feed(text), *parser.flush()]) == ("", text, [])


def test_what_a_prompt_has_of_the_answer_is_not_shown_again() -> None:
    anchor = "<|im_start|>assistant\n"
    assert read("hermes", f"{anchor}<think>Hm. <", ["/think>Yes."])[:2] == ("", "Yes.")
    assert read("hermes", f"{anchor}<think>Hm. <", ["b>So.</think>"])[:2] == ("b>So.", "")
    assert read("hermes", f"{anchor}Well ", [" so."])[1] == " so."


# -- broken templates --------------------------------------------------------------------------------------------------


def broken(**changes: Any) -> dict[str, Any]:
    """A template with another field of calls."""
    fields = TEMPLATES["tags"]["fields"]
    return {**TEMPLATES["tags"], "fields": {**fields, "tool_calls": {**fields["tool_calls"], **changes}}}


CALLS = "response_template.fields.tool_calls"


@in_one_test(
    ("template", "message"),
    [
        ([], "response_template: must be an object"),
        ({"version": 2, "fields": {"content": {}}, "start_anchor": "a"}, "template.version: must be 1 (given: 2)"),
        ({"fields": {}, "start_anchor": "a"}, "response_template.fields: must have at least one of thinking"),
        ({"fields": {"citation": {"open": "a"}}, "start_anchor": "a"}, "template.fields: 'citation' is not one of"),
        ({"fields": {"content": {}, "thinking": {}}, "start_anchor": "a"}, "fields: has 2 fields without 'open'"),
        ({"fields": {"content": {}}}, "response_template: start_anchor or start_anchor_pattern is required"),
        ({"fields": {"content": {"x-regex": "a"}}, "start_anchor": "a"}, "content.x-regex: unknown name"),
        ({"fields": {"content": {"open": ""}}, "start_anchor": "a"}, "fields.content.open: must be a string of 1 to"),
        ({"fields": {"content": {"content": "json"}}, "start_anchor": "a"}, "fields.content: must have the content"),
        (broken(content="yaml"), f"{CALLS}.content: 'yaml' is not one of text, int"),
        (broken(content_args={}), f"{CALLS}.content_args.tag_pattern: is required"),
        (broken(content_args={"tag_pattern": "(?P<k>a)"}), f"{CALLS}.content_args.tag_pattern: has no group 'key'"),
        (broken(content_args={"tag_pattern": r"<(?P<key>\w+)></\1>"}), r"has '\\1', which is not supported"),
        (broken(content_args={"tag_pattern": "(?P<key>a)", "x": 1}), f"{CALLS}.content_args.x: is unknown"),
        (
            broken(content_args={"tag_pattern": "(?P<key>a)", "value_parser": {"name": "yaml"}}),
            f"{CALLS}.content_args.value_parser: ",
        ),
        (broken(open="a"), f"{CALLS}.open: cannot be combined with open_pattern"),
        (broken(open_pattern="(a"), f"{CALLS}.open_pattern: '(a' cannot be read: a bracket is not closed"),
        (broken(open_pattern="a)"), "cannot be read: a bracket is closed that is not open"),
        (broken(open_pattern="[a"), "has a '[' that does not begin a set"),
        (broken(open_pattern="a*"), "can match the empty string anywhere"),
        (broken(open_pattern="a**"), "a repetition of a repetition is not supported"),
        (broken(open_pattern="a{2}{3}"), "a repetition of a repetition is not supported"),
        (broken(open_pattern="(?<=a)b"), "has '(?<=': only the groups"),
        (broken(open_pattern="a(?=b)c"), "has a lookahead that is not at the end"),
        (broken(open_pattern="(((a{50}){50}){50})"), "is too complex"),
        (broken(open_pattern="a{9999}"), "more than 256 repetitions"),
        (broken(open_pattern="(" * 20 + "a" + ")" * 20), "more than 16 nested groups"),
        (broken(open_pattern="a" * 2000), "has more than 1024 characters"),
        (broken(open_pattern=1), f"{CALLS}.open_pattern: '1' must be a string"),
        (broken(transform={"name": "{nom}"}), f"{CALLS}.transform: {{nom}} is neither content nor a group"),
        (broken(transform={"name": "a {name}"}), f"{CALLS}.transform: 'a {{name}}' has text next to a placeholder"),
        (broken(transform=None), f"{CALLS}.transform: is required"),
        (broken(join=","), f"{CALLS}.join: must be a string"),
        (broken(repeats=1), f"{CALLS}.repeats: must be true or false"),
    ],
)  # fmt: skip
def test_a_broken_template_is_named_with_its_place(template: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_response_template(template)


TAG = r"<(?P<key>\w+)>(?P<value>[^<]*)</\w+>"


@in_one_test(
    ("changes", "text", "found"),
    [
        ({"value_parser": {"name": "int"}}, "<a> 7 </a>", {"a": 7}),
        ({"value_parser": {"name": "float"}}, "<a> 7 </a>", {"a": 7.0}),
        ({"value_parser": {"name": "bool"}}, "<a> True</a><b>no</b>", {"a": True, "b": False}),
        ({"value_parser": {"name": "float"}}, "<a>x</a>", None),
        ({"transform": {"name": "{name}", "arguments": "{content.b}"}}, "<a>1</a>", None),
    ],
)
def test_a_value_is_what_its_parser_reads_and_else_the_call_is_text(
    changes: dict[str, Any], text: str, found: dict[str, Any] | None
) -> None:
    more = {key: value for key, value in changes.items() if key == "transform"}
    others = {key: value for key, value in changes.items() if key != "transform"}
    template = read_response_template(broken(content_args={"tag_pattern": TAG, **others}, **more))
    parser, answer = ResponseParser(template, "", []), f"<tool_call><function=f>{text}</tool_call>"
    _, content, calls = parts([*parser.feed(answer), *parser.flush()])
    assert (content, repr(loaded(calls))) == (("", repr([("f", found)])) if found else (answer, "[]"))


# -- patterns ----------------------------------------------------------------------------------------------------------

_ATOMS = st.sampled_from(["a", "b", "[^a]", "[ab]", ".", r"\w", r"\s", "<", "^", "$", r"\b", "(?:a|ab)", "(?:|b)"])
_ONES = st.sampled_from(["a", "b", "[^a]", ".", r"\w", "(?:ab)", "(?:a|bb)"])
_TIMES = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{0,3}?", "{1,}"])
_PARTS = st.lists(_ATOMS | st.tuples(_ONES, _TIMES).map("".join), min_size=1, max_size=4).map("".join)
PATTERNS = (
    _PARTS | st.tuples(_PARTS, _PARTS).map("|".join) | st.tuples(_PARTS, _PARTS).map("(?P<x>{0[0]})(?:{0[1]})".format)
)


@settings(deadline=None, max_examples=150)
@given(PATTERNS, st.text(alphabet="ab <", max_size=8))
def test_a_pattern_matches_what_pythons_matches(source: str, text: str) -> None:
    pattern = None
    with contextlib.suppress(ValueError):  # it may match the empty string anywhere
        pattern = Pattern(source)
    assume(pattern is not None)
    assert pattern is not None
    attempt = Attempt(pattern, before="")
    for character in text:
        attempt.feed(character)
    attempt.feed("", final=True)
    found, wanted = attempt.match(text), re.match(source, text, re.DOTALL)
    groups = {name: value for name, value in wanted.groupdict().items() if value is not None} if wanted else {}
    assert (found and (found.size, found.groups)) == (wanted and (wanted.end(), groups))


def test_a_look_ahead_ends_a_pattern_before_what_it_sees() -> None:
    pattern = Pattern(r"<a>(?P<v>.*?)(?:</a>|(?=<a>))")
    for text, size in (("<a>x</a>", 8), ("<a>x<a>y", 4), ("<a>x", None)):
        attempt = Attempt(pattern, before="")
        attempt.feed(text, final=True)
        match = attempt.match(text)
        assert (match and match.size) == size


# -- requests ----------------------------------------------------------------------------------------------------------

OWN = replace(NAMED, response_template=READ["hermes"], chat_template="{{ tools }} [THINK] <tool_call>")
TEXT = '<think>Hm.</think>Well. <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call><|im_end|>'


def test_it_is_autos_first_choice_for_both() -> None:
    family = reasoning_family(OWN)
    assert (family and family.name, choose_format(OWN)) == ("hf", HF)
    assert describe_parsers(OWN).count("hf, according to the model's response template") == 2
    off = with_options(OWN, reasoning_parser="none", tool_call_parser="none")
    assert (reasoning_family(off), choose_format(off)) == (None, None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_read_by_it(stream: bool) -> None:
    found = chat({"tools": TOOLS, "stream": stream}, saying(TEXT), OWN)
    if stream:
        deltas = [one["delta"] for one in choices(events(found))]
        message: Any = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")}
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        arguments = "".join(call["arguments"] for call in calls)
    else:
        (choice,) = json.loads(found.body)["choices"]
        message, arguments = choice["message"], choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning"], message["content"], arguments) == ("Hm.", "Well.", '{"city": "Paris"}')


def test_with_reasoning_off_thoughts_stay_in_the_text() -> None:
    off = with_options(OWN, reasoning_parser="none")
    message = json.loads(chat({"tools": TOOLS}, saying(TEXT), off).body)["choices"][0]["message"]
    assert message["content"] == "<think>Hm.</think>Well."
    assert len(message["tool_calls"]) == 1
    message = json.loads(chat({}, saying(TEXT), off).body)["choices"][0]["message"]
    assert message["content"] == TEXT


CONTENT_ALONE = replace(
    OWN,
    response_template=read_response_template(
        {"start_anchor": "a", "fields": {"content": TEMPLATES["blocks"]["fields"]["content"]}}
    ),
)


def test_a_template_without_thoughts_reads_texts() -> None:
    parsers = (
        "reasoning: none, according to the model's response template; "
        "tool calls: hermes, according to the chat template"
    )
    assert describe_parsers(CONTENT_ALONE) == parsers
    for body, text in (({}, "<|SAY|>Yes.<|/SAY|><|END|>"), ({"tools": TOOLS}, "Yes.")):
        message = json.loads(chat(body, saying(text), CONTENT_ALONE).body)["choices"][0]["message"]
        assert message["content"] == "Yes."


BYTES = Vocabulary([bytes([byte]) for byte in range(128)])
GUIDED = Sampling(structured_output=StructuredOutput("json", "{}"))


@pytest.mark.parametrize(
    ("context", "prompt", "text", "wanted"),
    [
        (OWN, "<|im_start|>assistant\n<think>\n", 'Hm.</think>{"a": 1}', ("Hm.", '{"a": 1}', [])),
        (OWN, "<|im_start|>assistant\n", '<think>Hm.</think>{"a": 1}', ("Hm.", '{"a": 1}', [])),
        (CONTENT_ALONE, "a", '{"a": "<|SAY|>"}', ("", '{"a": "<|SAY|>"}', [])),
    ],
)
def test_structured_output_has_none_of_the_templates_marks(
    context: ServerContext, prompt: str, text: str, wanted: Any
) -> None:
    form = response_form(Tools(), replace(context, vocabulary=BYTES))
    assert form.thinking is not None
    thoughts = form.thinking.read_prompt(Request("", GUIDED), prompt).sampling.thoughts
    if wanted[0]:
        assert thoughts is not None
        assert (thoughts.is_open, bytes(thoughts.closing)) == (prompt.endswith("<think>\n"), b"</think>")
    reader = form.reader()
    assert reader is not None
    assert parts(reader.read([Token(1, text, None, False)], Finish.EOS)[0]) == wanted


def test_special_tokens_in_its_marks_are_shown_and_no_others() -> None:
    vocabulary = Vocabulary([b"<think>", b"</think>", b"<|im_end|>", b"<s>"], special={0, 1, 2, 3})
    context = replace(OWN, vocabulary=vocabulary)
    assert response_form(Tools(), context).sampling(Sampling(), context, LMI_NAMES).marks == {
        "<think>",
        "</think>",
        "<|im_end|>",
    }
    rule = Sampling(structured_output=StructuredOutput("json", "{}"))
    assert response_form(Tools(), context).sampling(rule, context, LMI_NAMES).marks == {"<think>", "</think>"}


def test_thoughts_tokens_are_counted() -> None:
    words = ("<think>", "Hm.", " So", "</think>", "Yes.")
    script = [Delta(1, 0, (Token(id, text, -0.5, False),)) for id, text in enumerate(words)]
    script[-1] = script[-1]._replace(finish=Finish.EOS)
    usage = json.loads(chat({}, script, OWN).body)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}
