"""OpenAI's responses: what a body becomes, what is refused, and Open Responses' public cases."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.values import Delta, StructuredOutput
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.kernel.schema import COUNT, FLAG, NULL, NUMBER, TEXT, Shape, listing, nullable, record
from handler.protocols.responses.conversations import read_items
from handler.protocols.responses.stored import read_wanted, with_ids
from handler.serving.encoder import check_structured_output
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, CITY, CONTEXT, DIALECTS, answer, deltas, saying, with_options
from tests.unit.protocols.golden.responses import ASK, CALL, TOOLS, WEATHER, body

# -- OpenAI's responses: what a body becomes for the chat's readers, and what is refused -------------------------------


SEARCH = {"type": "web_search", "external_web_access": False}
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


def test_parameters_of_responses() -> None:
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
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, other]}
    (request,) = parse(body(tools=[WEATHER, {"type": "web_search"}, other], tool_choice=choice)).requests
    assert [tool["function"]["name"] for tool in request.tools] == ["other"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_that_is_not_allowed_is_text_in_responses(stream: bool) -> None:
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
        ({"metadata": {f"{number:064}": "v" * 512 for number in range(16)}}, ["metadata"]),
        ({"seeds": 1, "input": [{"role": "user", "content": "a", "name": "b"}]}, ["seeds", "input[].name"]),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, []),
        ({"reasoning": {"effort": "low", "mode": None}, "text": {"verbosity": "low", "style": None}}, []),
        ({"tools": [{**WEATHER, "output_schema": {}}]}, ["tools[].output_schema", "tools[].strict"]),
        ({"tools": [SEARCH], "tool_choice": "auto"}, ["tools[].type=web_search"]),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{**WEATHER, "strict": False, "a": 1}]}]},
            ["tools[].tools[].a"],
        ),
    ],
)
def test_names_without_effect_are_listed_in_responses(more: dict[str, Any], listed: list[str]) -> None:
    assert parse(body(**more)).ignored == listed


def test_tools_of_codex_that_are_no_functions_are_skipped() -> None:
    """The model is not told of them, and the response does not repeat them."""
    patch = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}}
    inside = {"type": "namespace", "name": "own", "description": "", "tools": [patch, PLAIN_TOOL]}
    asked = {"input": [user()], "tools": [SEARCH, PLAIN_TOOL, patch, inside], "tool_choice": "auto"}
    parsed = parse(asked)
    assert parsed.ignored == ["tools[].type=web_search", "tools[].format.syntax=lark"]
    [request] = parsed.requests
    assert (
        parse({**asked, "tools": [PLAIN_TOOL, {**inside, "tools": [PLAIN_TOOL]}]}).requests[0].prompt == request.prompt
    )
    found = json.loads(answer("openai_responses", asked, saying("a"), SEEING).body)
    assert [tool["name"] for tool in found["tools"]] == [PLAIN_TOOL["name"], "own"]
    assert [tool["name"] for tool in found["tools"][1]["tools"]] == [PLAIN_TOOL["name"]]


PATCH = {"type": "custom", "name": "patch", "description": "Changes a file."}
DIGITS = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+|x"}
LARK = {**PATCH, "format": {**DIGITS, "syntax": "lark"}}


def test_messages_between_agents_are_shown() -> None:
    """Codex sends what its sub-agents say (features.multi_agent_v2)."""
    said = {"type": "agent_message", "id": "amsg_1", "author": "/root", "recipient": "/root/child"}
    item = {**said, "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]}
    (request,), ignored = parse({"input": [item]}).requests, parse({"input": [item]}).ignored
    shown = '<agent_message author="/root" recipient="/root/child">\none\ntwo\n</agent_message>'
    assert [dict(message) for message in request.messages] == [{"role": "user", "content": shown}]
    assert ignored == []
    secret = {"type": "encrypted_content", "encrypted_content": "gAAAAA=="}
    for content, text in (([secret], "[encrypted]"), ([*item["content"], secret], "one\ntwo\n[encrypted]")):
        parsed = parse({"input": [{**said, "content": content}]})
        assert text in parsed.requests[0].messages[0]["content"]
        assert parsed.ignored == ["input[].content[].encrypted_content"]
        added = read_items({"items": [{**said, "content": content}]}, HERMES, "", {}, required=True)
        assert added.ignored == ["items[].content[].encrypted_content"]


@in_one_test(
    ("more", "stop"),
    [({"stop": ["a", "b"]}, ("a", "b")), ({"stop": "a"}, ("a",)), ({"stop": None}, ()), ({"stop": []}, ())],
)
def test_stop_strings_are_vllms(more: dict[str, Any], stop: tuple[str, ...]) -> None:
    parsed = parse(body(**more))
    assert (parsed.requests[0].sampling.stop, parsed.ignored) == (stop, [])


@in_one_test("reasoning", [{"effort": "low", "context": "auto"}, {"mode": "standard"}, {"mode": None, "context": None}])
def test_neutral_fields_of_reasoning_are_accepted(reasoning: dict[str, Any]) -> None:
    assert parse(body(reasoning=reasoning)).requests


OWN = {"type": "namespace", "name": "own", "description": ""}


def test_a_custom_tool_is_a_function_with_a_text() -> None:
    free, ruled = {**PATCH, "format": {"type": "text"}}, {**PATCH, "name": "ruled", "format": DIGITS}
    inside = {**OWN, "tools": [PATCH]}
    (request,) = parse(body(tools=[free, ruled, inside])).requests
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    expected = [{**text, "additionalProperties": False} for _ in range(3)]
    expected[1]["properties"] = {"input": {"type": "string", "pattern": "^(?:[0-9]+|x)$"}}
    assert [tool["function"]["parameters"] for tool in request.tools] == expected
    assert [tool["function"]["name"] for tool in request.tools] == ["patch", "ruled", "own.patch"]
    assert parse(body(tools=[free])).ignored == []
    assert parse(body(tools=[ruled])).ignored == ["tools[].format", "tools[].strict"], "the engine has no tags"
    assert parse(body(tools=[{**WEATHER, "format": {"a": 1}}])).ignored[0] == "tools[].format", "of a function"
    for choice in ({"type": "custom", "name": "ruled"}, {"type": "custom", "namespace": "own", "name": "patch"}):
        assert parse(body(tools=[free, ruled, inside], tool_choice=choice)).requests[0].sampling.structured_output
    names = [{"type": "custom", "name": name} for name in ("patch", "ruled")]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": names}
    (request,) = parse(body(tools=[LARK, ruled, WEATHER], tool_choice=allowed)).requests
    assert [tool["function"]["name"] for tool in request.tools] == ["ruled"]


DIAL = {"type": "custom", "name": "dial", "format": DIGITS}
LOOSE = {**WEATHER, "strict": False}
ONE = {"type": "custom", "name": "dial"}


@in_one_test(
    ("tools", "choice", "named"),
    [
        ([DIAL, PATCH, LOOSE], "auto", "tools: the format of dial"),
        ([DIAL, {**OWN, "tools": [DIAL]}], None, "tools: the format of dial or own.dial"),
        ([DIAL], "required", "tools: the format of dial"),
        ([DIAL, {**DIAL, "name": "other"}], ONE, "tools: the format of dial"),
        ([DIAL, WEATHER], ONE, "tools: the format of dial"),
        ([DIAL, WEATHER], {"type": "allowed_tools", "mode": "auto", "tools": [ONE]}, "tools: the format of dial"),
        ([DIAL, LOOSE], {"type": "allowed_tools", "mode": "required", "tools": [ONE]}, "tools: the format of dial"),
        ([DIAL, LOOSE], "required", "tools"),
        ([DIAL, WEATHER], "auto", "tools"),
    ],
)
def test_a_format_that_the_engine_refuses_is_named(tools: list[Any], choice: Any, named: str) -> None:
    """Where no other tool's schema can be the reason."""
    context = replace(HERMES, structural_tags=frozenset({"json"}))
    parsed = parse(body(tools=tools, tool_choice=choice), context)
    with pytest.raises(InvalidParameter) as caught:
        check_structured_output(parsed.requests[0], "no")
    assert str(caught.value) == f"{named}: the engine cannot apply it: no"
    assert json.loads(parsed.errors.whole(caught.value).body)["error"]["param"] == "tools"


@in_one_test(
    ("tools", "choice", "named"),
    [
        ([DIAL, PATCH], None, "tools: a schema or a format, or text"),
        ([DIAL, {**OWN, "tools": [DIAL]}], "auto", "tools: the format of dial or own.dial, or text"),
        ([DIAL], {"type": "allowed_tools", "mode": "auto", "tools": [ONE]}, "tools: the format of dial, or text"),
        ([DIAL], "required", "tools: the format of dial"),
        ([DIAL], "none", "text"),
        ([PATCH, WEATHER], "auto", "text"),
    ],
)
def test_a_format_that_the_engine_refuses_is_named_beside_text(tools: list[Any], choice: Any, named: str) -> None:
    context = replace(HERMES, structural_tags=frozenset({"json"}))
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    parsed = parse(body(tools=tools, tool_choice=choice, text={"format": schema}), context)
    with pytest.raises(InvalidParameter) as caught:
        check_structured_output(parsed.requests[0], "no")
    assert str(caught.value) == f"{named}: the engine cannot apply it: no"
    assert json.loads(parsed.errors.whole(caught.value).body)["error"]["param"] == named.partition(":")[0]
    without = with_options(context, tool_call_parser="none")
    (request,) = parse(body(tools=tools, text={"format": schema}), without).requests
    assert request.names.structured_output == "text", "calls stay in the text"


@in_one_test("stream", [False, True])
@in_one_test(
    ("arguments", "input", "status"),
    [
        ('{"input": "a\\n\\u00e9"}', "a\né", "completed"),
        ('{"patch": "a"}', '{"patch": "a"}', "completed"),
        ('{"input": "\\ud800"}', '{"input": "\\ud800"}', "incomplete"),
    ],
)
def test_a_call_of_a_custom_tool(arguments: str, input: str, status: str, stream: bool) -> None:
    said = saying(f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>')
    asked = body(tools=[PATCH, WEATHER], stream=stream)
    found = answer(DIALECTS["openai_responses"], asked, said, HERMES).body.decode()
    events = [json.loads(line[6:]) for line in found.splitlines() if line.startswith("data: ")]
    response = events[-1]["response"] if stream else json.loads(found)
    (item,) = response["output"]
    assert item.pop("id").startswith("ctc_")
    assert item.pop("call_id").startswith("call_")
    assert item == {"type": "custom_tool_call", "name": "patch", "input": input, "status": status}
    assert response["tools"][0] == {**PATCH, "format": {"type": "text"}}
    own = [event for event in events if "custom_tool_call_input" in event["type"]]
    if stream and status == "completed":
        assert [event["type"].rpartition(".")[2] for event in own] == ["delta", "done"]
        assert (own[0]["delta"], own[1]["input"]) == (input, input)
    else:
        assert own == [], "clients take the event for a call to make"


def test_a_custom_call_and_its_output_are_read() -> None:
    made = {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": "a\nb"}
    result = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
    (request,) = parse({"input": [user(), made, result], "tools": [PATCH]}).requests
    assert request.messages[1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "a\nb"}}
    assert request.messages[2]["content"] == "done"
    kept = with_ids([made, result])
    assert [item["id"].partition("_")[0] for item in kept] == ["ctc", "ctco"]


def test_items_are_read_as_they_are_stored() -> None:
    """Clients send them back with their ids and states, which have no effect and are not reported."""
    custom = {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "a"}
    result = output("two", type="custom_tool_call_output", call_id="call_2")
    items: list[dict[str, Any]] = [user(), call(), output("one"), custom, result]
    kept = with_ids(items)
    assert all(item.keys() > {"id", "status"} for item in kept)
    tools = [{**WEATHER, "strict": False}, PATCH]
    for given in (items, kept):
        parsed = parse({"input": given, "tools": tools})
        assert parsed.ignored == []
        results = [message["content"] for message in parsed.requests[0].messages if message["role"] == "tool"]
        assert results == ["one", "two"]


def test_an_input_may_refer_to_a_thousand_items() -> None:
    """An item that is referred to twice counts once."""
    references = [{"type": "item_reference", "id": f"msg_{number}"} for number in range(1001)]
    wanted = read_wanted({"input": [*references[:1000], references[0]]}, keeps=True)
    assert wanted is not None
    assert len(wanted.items) == 1000
    with pytest.raises(InvalidPayload, match="refers to 1001 stored items; the maximum is 1000"):
        read_wanted({"input": references}, keeps=True)


@in_one_test(
    ("asked", "message", "param"),
    [
        ({}, "'input' must be a non-empty string or list of items", "input"),
        (body(store=True), "store=true: is not supported: responses are not stored", "store"),
        (body(previous_response_id="resp_1"), "previous_response_id=", "previous_response_id"),
        (body(conversation="c"), "conversation=", "conversation"),
        (body(tools=7), "tools=7: must be a list of at most 1024 tools", "tools"),
        (body(background=True), "background=true: is not supported", "background"),
        (body(truncation="auto"), "truncation=", "truncation"),
        (body(include=["message.output_text.logprobs"]), "include=", "include"),
        (body(messages=[]), "messages: is not supported: use input", "messages"),
        (body(max_tokens=3), "max_tokens=3: is not supported: use max_output_tokens", "max_tokens"),
        (body(reasoning={"effort": "huge"}), "'effort' must be one of none, minimal", "reasoning"),
        (body(reasoning="much"), "reasoning=", "reasoning"),
        (body(reasoning={"context": "all_turns"}), "'context' must be auto, the only", "reasoning"),
        ({"input": [{"type": "agent_message", "content": "a"}]}, "input[0].author must be a string", None),
        (body(reasoning={"effort": "low", "mode": "pro"}), "'mode' must be standard, the only", "reasoning"),
        (body(text={"verbosity": "low", "style": "a"}), "has an unknown name 'style'; the names are", "text"),
        (body(tools=[{**WEATHER, "name": "a b"}]), "tools[0].name: must be 1 to 256 letters", None),
        (body(text="x"), "text=", "text"),
        (body(tools=[{"type": "mcp"}]), 'tools[0].type="mcp": is not supported: hosted tools', None),
        (
            body(tools=[{"type": "other", "name": "a"}]),
            'tools[0].type="other": is not supported: the type must be',
            None,
        ),
        (body(tools=[SEARCH], tool_choice="required"), "tool_choice", None),
        (body(tools=[SEARCH, {**WEATHER, "name": "a b"}]), "tools[1].name: must be 1 to 256 letters", None),
        (body(tools=[SEARCH, {**WEATHER, "strict": 1}]), "tools[1].strict: must be true or false", None),
        (body(tools=[{**OWN, "tools": [{**PATCH, "description": 1}]}]), "tools[0].tools[0].description: must be", None),
        (
            body(tools=[{"type": "namespace", "name": "n" * 200, "tools": [{**WEATHER, "name": "t" * 56}]}]),
            "tools[0].tools[0].name with its namespace: must be 1 to 256 letters",
            None,
        ),
        (body(tools=[{**OWN, "name": "", "tools": []}]), "tools[0].name: must be a non-empty string", None),
        (body(tools=[{**OWN, "name": 7, "tools": []}]), "tools[0].name: must be a non-empty string", None),
        (body(tools=[{"type": "namespace", "tools": []}]), "tools[0].name: must be a non-empty string", None),
        (body(tools=TOOLS, tool_choice={"type": "function", "name": "x"}), "tool_choice=", "tool_choice"),
        (body(tools=[LARK], tool_choice=LARK), "patch is omitted, because tools[].format.syntax=lark", "tool_choice"),
        (body(tools=[{**OWN, "tools": [LARK]}], tool_choice={**LARK, "namespace": "own"}), "own.patch is", None),
        (
            body(tools=TOOLS, tool_choice={"type": "allowed_tools"}),
            "allowed_tools\"}: must be an object with a 'mode'",
            None,
        ),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "'item_reference' is not supported: responses are not stored",
            None,
        ),
        (
            body(tools=[{**PATCH, "format": "grammar"}]),
            "tools[0].format=\"grammar\": must have 'type': 'text', or 'type': 'grammar'",
            None,
        ),
        (
            body(tools=[{**PATCH, "format": {"type": "grammar", "syntax": "regex"}}]),
            'syntax": "regex"}: must have',
            None,
        ),
        ({"input": [output("x", type="custom_tool_call_output")]}, "no earlier custom_tool_call has this id", None),
        ({"input": [output("x")]}, 'input[0].call_id="call_1": no earlier function_call has', None),
        ({"input": [call(arguments="[" * 1_048_577)]}, "input[0].arguments has 1048577 characters; the maximum", None),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]: ", None),
    ],
)
def test_refusals_name_what_is_wrong_in_responses(asked: dict[str, Any], message: str, param: str | None) -> None:
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


# -- open responses ----------------------------------------------------------------------------------------------------
# The cases of Open Responses' public compliance suite, and the fields that its schema requires of each response.
#
# Source: Open Responses' specification and OpenAPI document, read in November 2026. The words here are our own.


SEEING = replace(CAPABLE, no_media={"image": ""}, chat_template="{{ tools }} <tool_call>")
PNG = "data:image/png;base64,aQ=="

_TOOL = record(
    {"type": {"const": "function"}, "name": TEXT, "description": nullable(TEXT),
     "parameters": {"type": ["object", "null"]}, "strict": nullable(FLAG)}
)  # fmt: skip
_TEXT_PART = record(
    {"type": {"const": "output_text"}, "text": TEXT, "annotations": listing({}), "logprobs": listing({})}
)
_STATUS: Shape = {"enum": ["in_progress", "completed", "incomplete"]}
_ITEMS: list[Shape] = [
    record({"type": {"const": "message"}, "id": TEXT, "status": _STATUS, "role": {"const": "assistant"},
            "content": listing(_TEXT_PART)}),
    record({"type": {"const": "function_call"}, "id": TEXT, "call_id": TEXT, "name": TEXT, "arguments": TEXT,
            "status": _STATUS}),
    record({"type": {"const": "reasoning"}, "id": TEXT, "summary": listing({}), "content": listing({})}),
]  # fmt: skip
_USAGE = record(
    {"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT,
     "input_tokens_details": record({"cached_tokens": COUNT}),
     "output_tokens_details": record({"reasoning_tokens": COUNT})}
)  # fmt: skip
_FORMAT: Shape = {
    "oneOf": [
        record({"type": {"enum": ["text", "json_object"]}}),
        record(
            {
                "type": {"const": "json_schema"},
                "name": TEXT,
                "description": nullable(TEXT),
                "schema": {},
                "strict": FLAG,
            }
        ),
    ]
}
REQUIRED: dict[str, Shape] = {
    "id": TEXT, "object": {"const": "response"}, "created_at": COUNT, "completed_at": nullable(COUNT),
    "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
    "incomplete_details": {"anyOf": [record({"reason": TEXT}), NULL]}, "model": TEXT,
    "previous_response_id": nullable(TEXT), "instructions": nullable(TEXT), "output": listing({"anyOf": _ITEMS}),
    "error": {"anyOf": [record({"code": TEXT, "message": TEXT}), NULL]}, "tools": listing(_TOOL),
    "tool_choice": {
        "anyOf": [{"enum": ["none", "auto", "required"]}, record({"type": {"const": "function"}, "name": TEXT})]
    },
    "truncation": {"enum": ["auto", "disabled"]}, "parallel_tool_calls": FLAG,
    "text": record({"format": _FORMAT}), "top_p": NUMBER, "presence_penalty": NUMBER, "frequency_penalty": NUMBER,
    "top_logprobs": COUNT, "temperature": NUMBER,
    "reasoning": {"anyOf": [record({"effort": nullable(TEXT), "summary": nullable(TEXT)}), NULL]},
    "usage": {"anyOf": [_USAGE, NULL]}, "max_output_tokens": nullable(COUNT), "max_tool_calls": nullable(COUNT),
    "store": FLAG, "background": FLAG, "service_tier": TEXT, "metadata": {"type": "object"},
    "safety_identifier": nullable(TEXT), "prompt_cache_key": nullable(TEXT),
}  # fmt: skip
"""What Open Responses requires of a response."""

RESPONSE = Draft202012Validator(record(REQUIRED))


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def user(content: Any = "Say hello.") -> dict[str, Any]:
    return message("user", content)


SIGHT = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PNG}]
PLAIN_TOOL = {name: value for name, value in WEATHER.items() if name != "strict"}

CASES: dict[str, tuple[dict[str, Any], list[Delta] | None, list[str]]] = {
    "basic text": ({"input": [user()]}, None, ["message"]),
    "system prompt": ({"input": [message("system", "Be a pirate."), user()]}, None, ["message"]),
    "tools": ({"input": [user()], "tools": [PLAIN_TOOL]}, saying(CALL), ["message", "function_call"]),
    "images": ({"input": [user(SIGHT)]}, None, ["message"]),
    "multi-turn": ({"input": [user("I am Ann."), message("assistant", "Hello!"), user("Who?")]}, None, ["message"]),
    "instructions": ({"input": "Hello", "instructions": "Be brief."}, None, ["message"]),
    "include": ({"input": [user()], "include": ["reasoning.encrypted_content"]}, None, ["message"]),
    "truncation": ({"input": [user()], "truncation": "disabled"}, None, ["message"]),
    "schema": (
        {"input": [user()], "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
        None,
        ["message"],
    ),
    "everything": (
        {
            "input": [user()], "tools": [WEATHER], "max_tool_calls": 3, "metadata": {"a": "b"}, "presence_penalty": 0.5,
            "frequency_penalty": -0.5, "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "flex",
            "user": "u", "top_logprobs": 0, "background": False, "store": False, "max_output_tokens": 16,
        },
        None,
        ["message"],
    ),
}  # fmt: skip


def events(body: bytes) -> list[dict[str, Any]]:
    lines = (line for line in body.decode().splitlines() if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@in_one_test("stream", [False, True])
@in_one_test("name", CASES)
def test_every_response_has_what_is_required(name: str, stream: bool) -> None:
    asked, script, kinds = CASES[name]
    found = answer("openai_responses", {"model": "model", **asked, "stream": stream}, script, SEEING)
    assert found.status == 200, found.body
    if not stream:
        responses = [json.loads(found.body)]
    else:
        responses = [event["response"] for event in events(found.body) if "response" in event]
        assert [one["status"] for one in responses] == ["in_progress", "in_progress", "completed"]
    for response in responses:
        RESPONSE.validate(response)
    last = responses[-1]
    assert [item["type"] for item in last["output"]] == kinds
    assert last["created_at"] <= last["completed_at"] < last["created_at"] + 60
    assert all(one["completed_at"] is None for one in responses[:-1])


def test_a_streamed_call_has_all_its_events() -> None:
    asked = {"input": [user()], "tools": [PLAIN_TOOL], "stream": True}
    found = events(answer("openai_responses", asked, saying(CALL, 9), SEEING).body)
    of_calls = [
        one["type"] for one in found if one.get("item", {}).get("type") == "function_call" or "call" in one["type"]
    ]
    assert of_calls[0] == "response.output_item.added"
    assert of_calls[-2:] == ["response.function_call_arguments.done", "response.output_item.done"]
    assert set(of_calls[1:-2]) == {"response.function_call_arguments.delta"}
    arguments = "".join(one["delta"] for one in found if one["type"] == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"city": "Köln"}


def test_what_a_request_sets_is_repeated() -> None:
    asked = CASES["everything"][0]
    found = json.loads(answer("openai_responses", asked, context=SEEING).body)
    same = ("max_tool_calls", "metadata", "presence_penalty", "frequency_penalty", "prompt_cache_key", "user",
            "safety_identifier", "max_output_tokens")  # fmt: skip
    assert {name: found[name] for name in same} == {name: asked[name] for name in same}
    assert found["service_tier"] == "default", "there is one tier"


def test_strict_is_told_as_it_is_held() -> None:
    asked = {"input": "a", "tools": [WEATHER, {**WEATHER, "name": "other", "strict": None}]}
    held = replace(SEEING, structural_tags=frozenset({"json"}))
    for context, told in ((held, [True, False]), (SEEING, [False, False])):
        found = json.loads(answer("openai_responses", asked, deltas(), context).body)
        assert [tool["strict"] for tool in found["tools"]] == told


@in_one_test(("most", "kept"), [(None, 3), (1, 1), (2, 2), (5, 3)])
@in_one_test("stream", [False, True])
def test_calls_beyond_max_tool_calls_are_left_out(most: int | None, kept: int, stream: bool) -> None:
    call = '{"name": "weather", "arguments": {"city": "Köln"}}'
    said = saying(f"<tool_call>[{call}, {call}, {call}]</tool_call>", 7)
    asked = {"input": "a", "tools": [PLAIN_TOOL], "max_tool_calls": most, "stream": stream}
    found = answer("openai_responses", asked, said, SEEING)
    response = events(found.body)[-1]["response"] if stream else json.loads(found.body)
    assert [item["type"] for item in response["output"]] == ["function_call"] * kept
    assert response["max_tool_calls"] == most
    if stream:
        done = [one for one in events(found.body) if one["type"] == "response.function_call_arguments.done"]
        assert len(done) == kept


def test_penalties_reach_the_engine_or_are_refused_by_name() -> None:
    asked = {"input": "a", "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sampling = DIALECTS["openai_responses"].parse(asked, CAPABLE).requests[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    lacking = replace(CONTEXT, unsupported={"presence_penalty": "it has none"})
    found = json.loads(answer("openai_responses", asked, context=lacking).body)["error"]
    assert found["param"] == "presence_penalty"


@in_one_test(
    ("more", "words"),
    [
        ({"include": ["message.output_text.logprobs"]}, "use logprobs on /v1/chat/completions"),
        ({"include": ["everything"]}, "include=[\"everything\"]: must be a list of"),
        ({"include": "all"}, "include=\"all\": must be a list of"),
        ({"truncation": "auto"}, "truncation=\"auto\": is not supported: the input is never truncated"),
        ({"top_logprobs": 3}, "top_logprobs=3: is not supported"),
        ({"background": True}, "background=true: is not supported"),
        ({"max_tool_calls": 0}, "max_tool_calls=0: must be an integer from 1"),
        ({"max_tool_calls": "all"}, "max_tool_calls=\"all\": must be an integer from 1"),
        ({"metadata": ["a"]}, "metadata=[\"a\"]: must be an object of at most 16 pairs"),
        ({"metadata": {f"k{number}": "" for number in range(17)}}, "must be an object of at most 16 pairs"),
        ({"metadata": {"k" * 65: "v"}}, "must have keys of at most 64 characters"),
        ({"metadata": {"k": "v" * 513}}, "and string values of at most 512"),
        ({"metadata": {"k": 1}}, "and string values of at most 512"),
        ({"user": "u" * 65}, ": must have at most 64 characters"),
        ({"safety_identifier": "s" * 65}, ": must have at most 64 characters"),
        ({"prompt_cache_key": "p" * 65}, ": must have at most 64 characters"),
        ({"prompt_cache_key": 7}, "prompt_cache_key=7: must be a string"),
        ({"safety_identifier": {}}, "safety_identifier={}: must be a string"),
        ({"service_tier": 1}, "service_tier=1: must be a string"),
        ({"user": []}, "user=[]: must be a string"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(more: dict[str, Any], words: str) -> None:
    found = answer("openai_responses", {"input": "a", **more}, context=SEEING)
    error = json.loads(found.body)["error"]
    assert (found.status, error["param"]) == (400, next(iter(more)))
    assert words in error["message"]
