"""Guides in every dialect's words: what they come to, and what is refused before an engine sees it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import InvalidParameter
from handler.core.values import StructuredOutput
from handler.protocols.registry import INVOCATIONS
from handler.serving.encoder import check_structured_output
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, DIALECTS

SCHEMA = {"type": "object", "properties": {"\u00fc": {"type": "integer"}}}
TEXT = '{"type": "object", "properties": {"\u00fc": {"type": "integer"}}}'
AS_SCHEMA, ANY = StructuredOutput("json_schema", TEXT), StructuredOutput("json_object", "")


def guide(name: str, given: Any, **others: Any) -> StructuredOutput | None:
    body: dict[str, Any] = {"inputs": "a", "parameters": {name: given, **others}}
    if name == "response_format":
        body = {"messages": [{"role": "user", "content": "a"}], name: given}
    return INVOCATIONS["lmi"].parse(body, CAPABLE).requests[0].sampling.structured_output


@in_one_test(
    ("name", "given", "wanted"),
    [
        ("guided_json", SCHEMA, AS_SCHEMA),
        ("guided_json", TEXT, AS_SCHEMA),
        ("guided_json_object", True, ANY),
        ("guided_json_object", False, None),
        ("guided_regex", r"\d+", StructuredOutput("regex", r"\d+")),
        ("guided_regex", r"\p{Lu}[\P{N}x]*", StructuredOutput("regex", r"\p{Lu}[\P{N}x]*")),
        ("guided_choice", ["yes", "n\u00f6"], StructuredOutput("choice", '["yes", "n\u00f6"]')),
        ("guided_grammar", 'root ::= "a"', StructuredOutput("grammar", 'root ::= "a"')),
        ("grammar", {"type": "json", "value": SCHEMA}, AS_SCHEMA),
        ("grammar", {"type": "json", "value": TEXT}, AS_SCHEMA),
        ("grammar", {"type": "json_object", "value": SCHEMA}, AS_SCHEMA),
        ("grammar", {"type": "json_object"}, ANY),
        ("grammar", {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, AS_SCHEMA),
        ("grammar", {"type": "regex", "value": "a|b"}, StructuredOutput("regex", "a|b")),
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, ANY),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            AS_SCHEMA,
        ),
    ],
)
def test_what_it_comes_to(name: str, given: Any, wanted: StructuredOutput | None) -> None:
    assert guide(name, given) == wanted


@in_one_test(
    ("name", "given", "wanted"),
    [
        ("guided_json", [], "a JSON schema object"),
        ("guided_json", "[1]", "a JSON schema object"),
        ("guided_json", "{", "its text is not JSON"),
        ("guided_json", '{"a": NaN}', "its text is not JSON"),
        ("guided_json", "[" * 16_000, "its text is not JSON"),
        ("guided_json", '{"a": "\\ud800"}', "without lone surrogates"),
        ("guided_json", {"a": "x" * 70_000}, "at most 16384 characters; it has 70009"),
        ("guided_json_object", 2, "true or false"),
        ("response_format", {"type": "json_object", "json_schema": {}}, "has an unknown name 'json_schema'"),
        ("guided_regex", "", "non-empty"),
        ("guided_regex", "x" * 16_385, "at most 16384 characters"),
        ("guided_regex", 5, "a regular expression"),
        ("guided_choice", [], "a list of 1 to 256 strings"),
        ("guided_choice", ["a"] * 257, "a list of 1 to 256 strings"),
        ("guided_choice", ["a", ""], "non-empty strings"),
        ("guided_choice", "yes", "a list of 1 to 256 strings"),
        ("guided_grammar", "x" * 65_537, "at most 16384 characters"),
        ("grammar", "json", "an object with 'type' and 'value'"),
        ("grammar", {"value": {}}, "a 'type' that is"),
        ("grammar", {"type": "json"}, "a JSON schema"),
        ("grammar", {"type": "json_schema", "value": SCHEMA}, "a 'value' with 'schema'"),
        ("grammar", {"type": "regex", "value": ""}, "a regular expression"),
        ("grammar", {"type": "json", "value": {}, "values": 1}, "an unknown name 'values'"),
        ("response_format", {"type": "json_schema"}, "a 'json_schema' with an object as its 'schema'"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": "{}"}}, "with an object as its 'schema'"),
        ("response_format", {"type": "text", "x": 1}, "an unknown name 'x'"),
    ],
)
def test_what_is_refused_in_structured_output(name: str, given: Any, wanted: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        guide(name, given)
    prefix = "" if name == "response_format" else "parameters."
    assert str(caught.value).startswith(f"{prefix}{name}=")
    assert wanted in str(caught.value)


_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
_CHAT = {"messages": [{"role": "user", "content": "a"}]}
_FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


@in_one_test(
    ("dialect", "body", "wanted"),
    [
        ("lmi", {"inputs": "a", "parameters": {"guided_regex": "a"}}, "parameters.guided_regex"),
        ("lmi", {**_CHAT, "response_format": _FORMAT}, "response_format"),
        ("tgi", {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "a"}}}, "parameters.grammar"),
        ("openai_chat", {**_CHAT, "response_format": _FORMAT}, "response_format"),
        ("openai_chat", {**_CHAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("openai_chat", {**_CHAT, "guided_choice": ["a"]}, "guided_choice"),
        ("openai_chat", {**_CHAT, "tools": [_TOOL], "tool_choice": "required"}, "tools"),
        ("openai_completions", {"prompt": "a", "response_format": _FORMAT}, "response_format"),
        ("openai_completions", {"prompt": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            "triton_generate",
            {"text_input": "a", "guided_decoding_guide_type": "regex", "guided_decoding_guide": "a"},
            "guided_decoding_guide",
        ),
    ],
)
def test_what_cannot_be_followed_is_named_as_the_client_has_it(dialect: str, body: dict[str, Any], wanted: str) -> None:
    call = DIALECTS[dialect].parse(body, CAPABLE)
    (request,) = call.requests
    assert request.sampling.structured_output is not None
    with pytest.raises(InvalidParameter) as caught:
        check_structured_output(request, "no")
    assert str(caught.value) == f"{wanted}: the engine cannot apply it: no"
    if dialect.startswith("openai"):
        assert json.loads(call.errors.whole(caught.value).body)["error"]["param"] == wanted


_CALLED: dict[str, dict[str, Any]] = {
    "openai_chat": {**_CHAT, "tools": [_TOOL], "tool_choice": "required"},
    "lmi": {**_CHAT, "tools": [_TOOL], "tool_choice": "required"},
    "openai_responses": {
        "input": "a",
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "tool_choice": "required",
    },
    "anthropic_messages": {
        **_CHAT,
        "max_tokens": 5,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}
"""Bodies by dialect that force a call. No tool is strict."""


@pytest.mark.parametrize("dialect", _CALLED)
def test_a_forced_call_is_refused_by_the_field_that_forces_it(dialect: str) -> None:
    unable = replace(CAPABLE, unsupported={"structured_output": "no"})
    with pytest.raises(InvalidParameter, match=r"^tool_choice="):
        DIALECTS[dialect].parse(_CALLED[dialect], unable)


@pytest.mark.parametrize("dialect", ["openai_chat", "lmi", "openai_responses"])  # Anthropic's has no `ignore_eos`
def test_what_contradicts_a_forced_call_names_the_field_that_forces_it(dialect: str) -> None:
    with pytest.raises(InvalidParameter, match=r"omit tool_choice$"):
        DIALECTS[dialect].parse({**_CALLED[dialect], "ignore_eos": True}, CAPABLE)


@pytest.mark.parametrize("text", ["(", "(" * 16_000, "(?i)" + "[a-\U0010ffff]" * 800])
def test_a_clients_expression_is_not_compiled_where_all_clients_wait(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def compile(*arguments: Any) -> None:
        raise AssertionError("it may take seconds")

    for name in ("compile", "match", "search", "fullmatch", "sub"):
        monkeypatch.setattr(re, name, compile)
    assert guide("guided_regex", text) == StructuredOutput("regex", text)
    assert guide("grammar", {"type": "regex", "value": text}) == StructuredOutput("regex", text)


def test_there_is_one_guide() -> None:
    with pytest.raises(InvalidParameter, match=r'^parameters.guided_regex="a" contradicts parameters.guided_json'):
        guide("guided_json", SCHEMA, guided_regex="a")
    assert guide("guided_json", SCHEMA, grammar={"type": "json", "value": SCHEMA}) == AS_SCHEMA
    assert guide("guided_json_object", False, guided_json=SCHEMA) == AS_SCHEMA


@pytest.mark.parametrize(("name", "given"), [("min_length", 1), ("ignore_eos_token", True)])
def test_structured_output_decides_where_an_answer_ends(name: str, given: Any) -> None:
    why = "structured output decides where the response ends; omit parameters.guided_regex$"
    with pytest.raises(InvalidParameter, match=rf"^parameters.{name}=.*: {why}"):
        guide("guided_regex", "a", **{name: given})


@pytest.mark.parametrize(
    ("name", "given"), [("grammar", {"type": "regex", "value": "a"}), ("response_format", {"type": "json_object"})]
)
def test_an_engine_that_follows_none_refuses_in_the_clients_words(name: str, given: Any) -> None:
    context = replace(CAPABLE, unsupported={"structured_output": "it follows no guide"})
    body: dict[str, Any] = {"inputs": "a", "parameters": {name: given}}
    prefix = "parameters."
    if name == "response_format":
        body, prefix = {"messages": [{"role": "user", "content": "a"}], name: given}, ""
    with pytest.raises(InvalidParameter, match="the engine able does not support it: it follows no guide") as caught:
        INVOCATIONS["lmi"].parse(body, context)
    assert str(caught.value).startswith(f'{prefix}{name}={{"type": ')
