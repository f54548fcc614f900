"""OpenAI's responses: what a body becomes for the chat's readers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.core.values import StructuredOutput
from handler.protocols.kernel.dialect import ParsedRequest
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, DIALECTS, answer
from tests.unit.protocols.openai.requests import CITY, saying
from tests.unit.protocols.responses.golden import ASK, TOOLS, WEATHER, body

HERMES = replace(CAPABLE, chat_template="{{ tools, tool_calls, message.reasoning, reasoning_effort }} <tool_call>")


def parse(asked: dict[str, Any], context: Any = HERMES) -> ParsedRequest:
    return DIALECTS["openai_responses"].parse(json.loads(json.dumps(asked)), context)


def call(**more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Köln"}', **more}


def output(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "call_1", "output": content, **more}


def said(role: str, *texts: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


def test_items_become_the_messages_of_a_chat() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    items = [
        said("developer", "A"), said("user", "B", "C"), said("developer", "D"), thought, said("assistant", "So."),
        call(id="fc_1", status="completed"), output([{"type": "input_text", "text": "12"}]), said("user", "E"),
    ]  # fmt: skip
    parsed = parse({"input": items, "instructions": "Be brief.", "tools": [WEATHER]})
    (request,) = parsed.requests
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    thoughts = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "Hm.")
    assert request.messages == (
        {"role": "system", "content": "Be brief.\nA"},
        {"role": "user", "content": "B\nC\n<system>\nD\n</system>"},
        {
            "role": "assistant",
            "content": "So.",
            **thoughts,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "12", "tool_call_id": "call_1"},
        {"role": "user", "content": "E"},
    )
    shown = {"name": "weather", "description": "The weather.", "parameters": CITY}
    assert request.tools == ({"type": "function", "function": shown},)
    assert parsed.ignored == ["tools[].strict"], "the engine has no structural tags"


def test_parameters() -> None:
    schema = {"type": "object"}
    format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    (request,) = parse(
        body(max_output_tokens=5, temperature=0.5, top_p=0.9, text={"format": format}, reasoning={"effort": "low"})
    ).requests
    sampling = request.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.do_sample) == (5, 0.5, 0.9, True)
    assert sampling.structured_output == StructuredOutput("json_schema", json.dumps(schema))
    assert dict(request.template.arguments) == {"reasoning_effort": "low"}
    assert parse(ASK).requests[0].fill_context


def test_allowed_tools_alone_are_shown() -> None:
    other = {"type": "function", "name": "other"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [other]}
    (request,) = parse(body(tools=[WEATHER, other], tool_choice=choice)).requests
    assert [tool["function"]["name"] for tool in request.tools] == ["other"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_that_is_not_allowed_is_text(stream: bool) -> None:
    other = {"type": "function", "name": "other"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [other]}
    said = '<tool_call>[{"name": "weather", "arguments": {"a": 1}}, {"name": "other", "arguments": {}}]</tool_call>'
    asked = body(tools=[WEATHER, other], tool_choice=choice, stream=stream)
    found = answer(DIALECTS["openai_responses"], asked, saying(said), HERMES).body
    last = found.decode().rstrip().rpartition("\ndata: ")[2] if stream else found
    message, made = (json.loads(last)["response"] if stream else json.loads(last))["output"]
    assert message["content"][0]["text"] == 'weather {"a": 1}'
    assert (made["type"], made["name"], made["status"]) == ("function_call", "other", "completed")


@in_one_test(
    ("more", "listed"),
    [
        ({"store": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"]}, []),
        ({"metadata": {"a": "b"}, "prompt_cache_key": "k"}, ["metadata", "prompt_cache_key"]),
        ({"seed": 1, "input": [{"role": "user", "content": "a", "name": "b"}]}, ["seed", "input[].name"]),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, []),
        ({"tools": [{**WEATHER, "output_schema": {}}]}, ["tools[].output_schema", "tools[].strict"]),
    ],
)
def test_names_without_effect_are_listed(more: dict[str, Any], listed: list[str]) -> None:
    assert parse(body(**more)).ignored == listed


@in_one_test(
    ("asked", "message", "param"),
    [
        ({}, "'input' must be a non-empty string or list of items", "input"),
        (body(store=True), "store=true: is not supported: nothing is kept", "store"),
        (body(previous_response_id="resp_1"), "previous_response_id=", "previous_response_id"),
        (body(conversation="c"), "conversation=", "conversation"),
        (body(background=True), "background=true: is not supported", "background"),
        (body(truncation="auto"), "truncation=", "truncation"),
        (body(include=["message.output_text.logprobs"]), "include=", "include"),
        (body(messages=[]), "messages: is not supported: write input", "messages"),
        (body(max_tokens=3), "max_tokens=3: is not supported: write max_output_tokens", "max_tokens"),
        (body(reasoning={"effort": "huge"}), "'effort' must be one of none, minimal", "reasoning"),
        (body(reasoning="much"), "reasoning=", "reasoning"),
        (body(tools=[{**WEATHER, "name": "a b"}]), "tools[0].name: must be 1 to 64 letters", None),
        (body(text="x"), "text=", "text"),
        (body(tools=[{"type": "web_search"}]), 'tools[0].type="web_search": is not supported: hosted tools', None),
        (body(tools=[{"type": "custom", "name": "a"}]), 'tools[0].type="custom": is not supported: it must be', None),
        (body(tools=TOOLS, tool_choice={"type": "function", "name": "x"}), "tool_choice=", "tool_choice"),
        (body(tools=TOOLS, tool_choice={"type": "allowed_tools"}), "tool_choice.allowed_tools=", None),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "'item_reference' is not supported: nothing is kept",
            None,
        ),
        ({"input": [output("x")]}, 'input[0].call_id="call_1": no function_call before it', None),
        ({"input": [call(arguments="[" * 1_048_577)]}, "input[0].arguments has 1048577 characters; at most", None),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]: ", None),
    ],
)
def test_refusals_name_what_is_wrong(asked: dict[str, Any], message: str, param: str | None) -> None:
    found = answer("openai_responses", asked, context=HERMES)
    error = json.loads(found.body)["error"]
    assert (found.status, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]
    assert param is None or error["param"] == param


@in_one_test("stream", [True, False])
@in_one_test("levels", [190, 200, 248, 254, 400])
def test_what_is_too_deep_to_be_repeated_is_refused_at_once(levels: int, stream: bool) -> None:
    deep: Any = {}
    for _ in range(levels):
        deep = {"a": deep}
    tool = {"type": "function", "name": "f", "parameters": deep}
    found = answer("openai_responses", body(tools=[tool], stream=stream), context=HERMES)
    assert found.status == (200 if levels == 190 else 400)
    assert levels == 190 or "nested too deeply" in json.loads(found.body)["error"]["message"]
