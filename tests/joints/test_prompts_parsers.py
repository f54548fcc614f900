"""Prompts and parsers: calls as each prompt shows them are calls to the parser of the answers.

Formats, chat templates and dialects are crossed. The templates of widespread models are read in `tests/templates`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from handler.config.options.tables import TOOL_CALL_PARSERS
from handler.core.values import Request
from handler.protocols.assistant.answer import warn_of_unread_calls
from handler.protocols.assistant.events import Reasoning
from handler.protocols.assistant.reasoning import thinking_parser
from handler.protocols.assistant.reasoning_families import FAMILIES
from handler.protocols.assistant.tools.formats import FORMATS, get_format
from handler.protocols.assistant.tools.formats.json_calls import SMOLLM2
from handler.protocols.assistant.tools.grammar import Notation, calls, calls_in_text, write_calls
from handler.protocols.assistant.tools.parsing import HF, Format
from handler.protocols.assistant.tools.request import choose_format, read_tools
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.errors import HttpResponse
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, DIALECTS, answer, saying, with_options
from tests.unit.protocols.assistant.test_reasoning import COMPANIES
from tests.unit.protocols.assistant.test_response_template import READ
from tests.unit.protocols.assistant.tool_texts import TOOLS, read

Call = tuple[str, dict[str, Any]]

NAMES = [name for name in TOOL_CALL_PARSERS if name not in ("none", "hf")]
"""The option's values with a form of their own."""

TEMPLATES = {"no template": "", "no place for tools": "{% for message in messages %}{{ message.content }}{% endfor %}"}
WITH_TOOLS = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"
"""A place for tools, and none for calls."""

CALLS: dict[str, list[Call]] = {
    "one": [("weather", {"city": "Köln"})],
    "without arguments": [("time", {})],
    "parallel": [("weather", {"city": "Köln", "days": 3}), ("time", {}), ("weather", {"city": "Bonn"})],
    "nested": [("weather", {"place": {"lat": -50.25, "name": "Dom"}, "tags": ["a", "b, c", ""], "metric": True})],
    "quotes": [("write", {"path": "a \"b\" 'c' \\d", "text": '{"e": [1, "f"]}, }])'})],
    "lines": [("write", {"path": " a\tb ", "text": "\none\n\n  two\\n\n"})],
    "unicode": [("write", {"path": "😀 日本語 \u2028é", "text": "<b>&amp;</b> ｜▁"})],
    "of other types": [("weather", {"city": "5", "days": -3, "ratio": 2.5, "unit": "C", "note": None})],
    "words": [("write", {"path": "None", "text": "true"})],
    "of the format": [("write", {"path": "NAME", "text": "NUMBER STRING VALUE"})],
}
"""What is called, with arguments of TOOLS' schemas."""


def context_of(name: str, template: str) -> ServerContext:
    return with_options(replace(CAPABLE, chat_template=template), tool_call_parser=name)


def asked(name: str, template: str, history: Sequence[dict[str, Any]] = (), **body: Any) -> Request:
    messages = [{"role": "user", "content": "How is the weather?"}, *history]
    whole = {"model": "model", "messages": messages, "tools": TOOLS, **body}
    return DIALECTS["openai_chat"].parse(whole, context_of(name, template)).requests[0]


def example(request: Request) -> str:
    """Return the calls that the prompt shows."""
    told = request.messages[0]["content"]
    return str(told.rpartition(":\n")[2].partition("\nIf none")[0])


def filled(shown: str) -> str:
    return shown.replace("NAME", "weather").replace("ARGUMENT", "city").replace("VALUE", "Köln")


def history(told: Sequence[Call], text: str) -> list[dict[str, Any]]:
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in told]
    made = [{"id": f"c{n}", "type": "function", "function": function} for n, function in enumerate(functions)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in made]
    return [{"role": "assistant", "content": text, "tool_calls": made}, *results]


def cuts(text: str) -> Iterator[Sequence[str]]:
    """Cut a text everywhere: as a whole, in characters, and once at each place."""
    yield [text]
    yield text
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


def check(name: str, text: str, wanted: Sequence[Call], before: str = "", *, everywhere: bool = True) -> None:
    """Check that the parser finds these calls in a text, whichever way it comes, and the text before them."""
    for pieces in cuts(text) if everywhere else [[text]]:
        found = read(get_format(name).make(TOOLS), pieces)
        said = "".join(part for part in found if isinstance(part, str))
        got = [(part[0], json.loads(part[1])) for part in found if not isinstance(part, str)]
        assert (said.strip(), got) == (before, list(wanted)), pieces


def format_of(name: str) -> str:
    return "smollm2" if name == "auto" else name


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@in_one_test("name", NAMES)
def test_the_calls_that_a_prompt_teaches_are_read(name: str, template: str) -> None:
    shown = filled(example(asked(name, template)))
    check(format_of(name), shown, CALLS["one"])
    check(format_of(name), f"{shown}\n{shown}", CALLS["one"] * 2)


@pytest.mark.parametrize("template", [*TEMPLATES.values(), WITH_TOOLS], ids=[*TEMPLATES, "no place for calls"])
@pytest.mark.parametrize("text", ["", "Let me look."])
@in_one_test("name", NAMES)
def test_the_calls_of_a_history_are_read(name: str, text: str, template: str) -> None:
    if template == WITH_TOOLS and name == "auto":
        return  # such a template shows no form
    for case, told in CALLS.items():
        request = asked(name, template, history(told, text))
        (message,) = (message for message in request.messages if message["role"] == "assistant")
        assert "tool_calls" not in message
        everywhere = case in ("parallel", "quotes") and bool(text) and not template
        check(format_of(name), message["content"], told, text, everywhere=everywhere)


def test_results_of_calls_are_text_where_a_template_has_no_place_for_tools() -> None:
    messages = asked("deepseek_v3", "", history(CALLS["parallel"], "")).messages
    results = messages[messages.index(next(one for one in messages if one["role"] == "assistant")) + 1 :]
    assert results == ({"role": "user", "content": "<tool_response>\nsun\n</tool_response>"},) * 3


NOTATIONS = {f"{name} {text}".strip(): (name, text) for name in FORMATS for text in FORMATS[name].notations}


@in_one_test("place", NOTATIONS)
def test_each_notation_is_read(place: str) -> None:
    name, template = NOTATIONS[place]
    for case, told in CALLS.items():
        written = write_calls(FORMATS[name].notations[template], told)
        check(name, written, told, everywhere=case == "nested")


def spoken(rule: Any, notation: Notation, told: Sequence[Call]) -> str:
    """Return what a model says that a rule allows nothing but calls."""
    if rule["type"] == "triggered_tags":
        (rule,) = rule["tags"] if any(notation.block) else (rule,)
    begin, end = str(rule.get("begin", "")), str(rule.get("end", ""))
    rule = rule.get("content", rule)
    said = list[str]()
    for number, (name, arguments) in enumerate(told):
        tag = next(tag for tag in rule["tags"] if name in str(tag))
        inner = tag["content"]
        middle = f"{number}{inner['elements'][1]['value']}" if inner["type"] == "sequence" else ""
        said.append(f"{tag['begin']}{middle}{notation.arguments(arguments)}{tag['end']}")
    return begin + str(rule.get("separator", "\n")).join(said) + end


@in_one_test("place", NOTATIONS)
def test_calls_that_a_rule_makes_are_read(place: str) -> None:
    name, template = NOTATIONS[place]
    notation = FORMATS[name].notations[template]
    for told in CALLS.values():
        if notation.several or len(told) == 1:
            check(name, spoken(calls(notation, TOOLS, single=False), notation, told), told, everywhere=False)
            if notation.mark:
                rule = calls_in_text(notation, TOOLS, ["weather"], single=False)
                check(name, spoken(rule, notation, told), told, everywhere=False)


@pytest.mark.parametrize("styles", [frozenset(), frozenset({"json"}), frozenset({"json", "glm_xml", "deepseek_xml"})])
@in_one_test("name", NAMES)
def test_forced_calls_have_the_form_that_is_read(name: str, styles: frozenset[str]) -> None:
    """The engine has a rule for the format's own form, else for JSON, and the parser is that of the rule."""
    context = replace(context_of(name, ""), structural_tags=styles)
    for choice in ("required", "weather"):
        tools = read_tools({"tools": TOOLS, "tool_choice": choice}, context)
        told, rule, parser = CALLS["one"], tools.structured_output, tools.parser()
        assert rule is not None
        assert parser is not None
        if rule.kind == "structural_tag":
            notation = get_format(format_of(name)).notation("")
            assert notation is not None
            said = spoken(json.loads(rule.value)["format"], notation, told)
        else:
            value = told[0][1] if choice == "weather" else [{"name": told[0][0], "arguments": told[0][1]}]
            said = json.dumps(value)
        assert [(part[0], json.loads(part[1])) for part in read(parser, [said])] == told


@in_one_test("family", FAMILIES)
def test_calls_after_a_thought_are_read(family: str) -> None:
    """Each family beside each format that its models have, and beside all formats where the answer has no thought."""
    form, own = FAMILIES[family], COMPANIES.get(family)
    for name in FORMATS:
        notation = FORMATS[name].notation("")
        assert notation is not None
        written = write_calls(notation, CALLS["parallel"])
        thought = f"{form.begin[0]}Hm.{form.end[0]}" if form.begin else ""
        for text in (thought + written,) if name == own else (written,):
            for pieces in ([text], text):
                parser = thinking_parser(form, FORMATS[name].make(TOOLS), thinking=False)
                found = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
                assert "".join(event.text for event in found if isinstance(event, Reasoning)) == "Hm." * (
                    text != written
                )


_BODIES: dict[str, dict[str, Any]] = {
    "openai_chat": {"model": "model", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS},
    "lmi": {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS},
    "openai_responses": {
        "model": "model",
        "input": "?",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS],
    },
    "anthropic_messages": {
        "model": "model",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS],
    },
}


def called(dialect: str, found: HttpResponse) -> list[Call]:
    """Return the calls in an answer of a dialect, whole or streamed."""
    streams = found.content_type != "application/json"
    lines = [line.removeprefix("data:").strip() for line in found.body.decode().splitlines() if streams]
    values = [json.loads(line) for line in lines if line.startswith("{")] or [json.loads(found.body)]
    parts: dict[int, list[str]] = {}
    if dialect == "openai_responses":
        output = (values[-1].get("response") or values[-1])["output"]
        return [(item["name"], json.loads(item["arguments"])) for item in output]
    if dialect == "anthropic_messages":
        if not streams:
            return [(block["name"], block["input"]) for block in values[0]["content"]]
        for value in values:
            if value["type"] == "content_block_start":
                parts[value["index"]] = [value["content_block"]["name"], ""]
            elif value["type"] == "content_block_delta":
                parts[value["index"]][1] += value["delta"]["partial_json"]
    else:
        messages = [
            choice.get("delta") or choice.get("message") or {} for value in values for choice in value["choices"]
        ]
        assert not any(message.get("content") for message in messages)
        for index, call in enumerate(call for message in messages for call in message.get("tool_calls") or ()):
            name, arguments = parts.setdefault(call.get("index", index), ["", ""])
            function = call["function"]
            parts[call.get("index", index)] = [name + (function.get("name") or ""), arguments + function["arguments"]]
    return [(name, json.loads(arguments)) for name, arguments in parts.values()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", _BODIES)
@in_one_test("name", NAMES)
def test_every_dialect_teaches_and_reads_the_parsers_form(name: str, dialect: str, stream: bool) -> None:
    context, body = context_of(name, ""), {**_BODIES[dialect], "stream": stream}
    said = filled(example(DIALECTS[dialect].parse(body, context).requests[0]))
    assert called(dialect, answer(dialect, body, saying(said, 3), context)) == CALLS["one"]


def warnings(context: ServerContext, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "handler.template"):
        warn_of_unread_calls(context)
    return caplog.messages


def test_the_log_warns_of_a_parser_that_does_not_read_the_templates_calls(caplog: pytest.LogCaptureFixture) -> None:
    for name in NAMES:
        assert warnings(context_of(name, TEMPLATES["no place for tools"]), caplog) == []
    shown = WITH_TOOLS + "<tool_call>{{ message.tool_calls }}"
    found = {name for name in NAMES if warnings(context_of(name, shown), caplog)}
    assert {"auto", "hermes", "smollm2", "granite4", "qwen3_json", "ernie45", "xlam"}.isdisjoint(found)
    assert {"deepseek_v3", "mistral", "qwen3_coder", "glm45", "openai", "lfm2", "jamba"} <= found
    (told,) = warnings(context_of("deepseek_v3", shown), caplog)
    assert told.startswith("option.tool_call_parser=deepseek_v3 does not read the calls that the chat template shows")
    assert warnings(context_of("none", shown), caplog) == []


def test_a_plugin_that_says_how_calls_are_written_is_taught(caplog: pytest.LogCaptureFixture) -> None:
    own = Format(
        "plugin", FORMATS["hermes"].make, notations={"": Notation(('<tool_call>{"name": "NAME", "arguments": ', "}"))}
    )
    for format, said in (
        (own, '"arguments": {"ARGUMENT": "VALUE"}}'),
        (own._replace(notations={}), "<tool_call>[{"),
    ):
        context = replace(CAPABLE, tool_format=format)
        assert said in example(DIALECTS["openai_chat"].parse(_BODIES["openai_chat"], context).requests[0])
        assert bool(warnings(context, caplog)) is (format is not own)


def test_a_models_response_template_is_taught_by_its_chat_template_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its expressions read calls, and tell nobody how to write them."""
    context = replace(CAPABLE, response_template=READ["hermes"])
    for options, format in (({}, SMOLLM2), ({"tool_call_parser": "hf"}, HF)):
        asked = with_options(context, **options)
        assert choose_format(asked) is format
        assert bool(warnings(asked, caplog)) is (format is HF)
    assert choose_format(replace(context, chat_template=WITH_TOOLS)) is HF


@in_one_test("name", FORMATS)
def test_the_half_of_a_mark_that_is_cut_off_after_a_call_is_no_text(name: str) -> None:
    """Models that call on and on are cut off there."""
    notation = FORMATS[name].notation("")
    assert notation is not None
    written = write_calls(notation, CALLS["one"])
    for mark in FORMATS[name].make(TOOLS).begins:  # type: ignore[attr-defined]
        for size in range(2, len(mark)):
            check(name, f"{written}\n{mark[:size]}", CALLS["one"], everywhere=False)
            check(name, f"{written}\nSo {mark[:size]}", CALLS["one"], f"So {mark[:size]}".strip(), everywhere=False)
