"""Anthropic's messages: what a body becomes for the chat's readers, and what answers and refusals say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import InvalidParameter
from handler.core.framing import dumps
from handler.core.text import Vocabulary
from handler.core.values import Delta, Extras, Finish, Sampling, StructuredOutput, Token
from handler.protocols.anthropic.response import Blocks, gather
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Event, Reasoning
from handler.protocols.kernel.dialect import ParsedRequest
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, CITY, CONTEXT, DIALECTS, answer, deltas, saying, value, with_options
from tests.unit.protocols.golden.anthropic import ASK, CALL, TOOLS, body

HERMES = replace(CAPABLE, chat_template="{{ tools }} <tool_call> {{ tool_calls }}")
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}

THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def talk(*contents: Any, **more: Any) -> dict[str, Any]:
    """Messages of user and assistant in turns, the user's first."""
    roles = ["user", "assistant"] * len(contents)
    return body(messages=[{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)], **more)


def parse(asked: dict[str, Any], schema: str = "anthropic_messages", context: Any = HERMES) -> ParsedRequest:
    return DIALECTS[schema].parse(json.loads(json.dumps(asked)), context)


# -- requests ----------------------------------------------------------------------------------------------------


def test_blocks_become_the_messages_of_a_chat() -> None:
    asked = talk(
        [{**text("A"), "cache_control": {"type": "ephemeral"}}, text("B")],
        [text("So."), USE],
        [result([text("1"), text("2")]), text("Then?")],
        system=[text("Be brief."), {**text("Be kind."), "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        tools=TOOLS,
    )
    parsed = parse(asked)
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    assert parsed.requests[0].messages == (
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "A\nB"},
        {
            "role": "assistant",
            "content": "So.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "1\n2", "tool_call_id": "toolu_1", "name": "weather"},
        {"role": "user", "content": "Then?"},
    )
    shown = {"name": "weather", "description": "The weather.", "parameters": CITY}
    assert parsed.requests[0].tools == ({"type": "function", "function": shown},)
    assert parsed.ignored == []


def test_an_image_in_a_messages_last_result_follows_the_result() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    asked = talk("Look.", [USE], [result([image])], tools=TOOLS)
    (request,) = parse(asked, context=replace(HERMES, no_media={"image": ""})).requests
    assert [message["role"] for message in request.messages or ()] == ["user", "assistant", "tool", "user"]
    assert [medium.data for medium in request.media] == [b"x"]


def test_messages_of_one_role_in_a_row_are_joined() -> None:
    messages = [{"role": role, "content": role[0]} for role in ("user", "user", "assistant", "assistant", "user")]
    joined = [(message["role"], message["content"]) for message in parse(body(messages=messages)).requests[0].messages]
    assert joined == [("user", "u\nu"), ("assistant", "a\na"), ("user", "u")]


def test_many_blocks_take_no_more_time_each_than_few() -> None:
    """By adding one to another, these took minutes."""
    blocks = [text(f"{number:2000}") for number in range(10_000)]
    (message,) = parse(talk(blocks)).requests[0].messages
    assert message == {"role": "user", "content": "\n".join(block["text"] for block in blocks)}


def test_a_system_message_amid_the_others_is_the_users() -> None:
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "system", "assistant", "system")]
    found = parse(body(messages=messages, system="S")).requests[0].messages
    assert [tuple(message.values()) for message in found] == [
        ("system", "S\ns"),
        ("user", "u\n<system>\ns\n</system>"),
        ("assistant", "a"),
        ("user", "<system>\ns\n</system>"),
    ]


@in_one_test(
    ("template", "thinking", "arguments", "listed"),
    [
        ("{% if enable_thinking %}<think></think>", {"type": "disabled"}, {"enable_thinking": False}, []),
        ("{% if not thinking is defined %}", {"type": "disabled"}, {"thinking": False}, []),
        ("{% if enable_thinking %}", {"type": "adaptive"}, {}, []),
        ("<think></think>", {"type": "adaptive", "display": "omitted"}, {}, []),
        ("<think></think>", {"type": "adaptive", "display": "updates"}, {}, []),
        ("<think></think>", {"type": "disabled"}, {}, ["thinking"]),
        ("{{ message.thinking }}", {"type": "disabled"}, {}, []),
        ("", {"type": "enabled", "budget_tokens": 1024}, {}, ["thinking.budget_tokens", "thinking"]),
    ],
)
def test_thinking_is_the_templates_switch(
    template: str, thinking: dict[str, Any], arguments: dict[str, Any], listed: list[str]
) -> None:
    parsed = parse(body(thinking=thinking), context=replace(CAPABLE, chat_template=template))
    assert (dict(parsed.requests[0].template.arguments), parsed.ignored) == (arguments, listed)


def test_a_budget_of_thoughts_is_kept_where_it_can_be() -> None:
    asked = body(thinking={"type": "enabled", "budget_tokens": 1024})
    able = replace(CAPABLE, chat_template="<think></think>", vocabulary=Vocabulary([b"<"]))
    lacks = replace(able, unsupported={"thinking_token_budget": "no"})
    gpt = replace(able, chat_template="<|channel|>analysis")
    for context, budget in ((able, 1024), (lacks, None), (gpt, None), (replace(able, vocabulary=None), None)):
        parsed = parse(asked, context=context)
        assert parsed.requests[0].sampling.thinking_token_budget == budget
        assert parsed.ignored == ([] if budget else ["thinking.budget_tokens"])


def test_a_budget_of_one_token_is_the_smallest() -> None:
    able = replace(CAPABLE, chat_template="<think></think>", vocabulary=Vocabulary([b"<"]))
    parsed = parse(body(thinking={"type": "enabled", "budget_tokens": 1}), context=able)
    assert parsed.requests[0].sampling.thinking_token_budget == 1
    with pytest.raises(InvalidParameter, match="must be an integer of at least 1"):
        parse(body(thinking={"type": "enabled", "budget_tokens": 0}), context=able)


def test_thoughts_and_effort_go_to_the_template() -> None:
    asked = talk("a", [THOUGHT, text("b")], "c", output_config={"effort": "high"})
    parsed = parse(
        asked, context=replace(CAPABLE, chat_template="{{ tools, reasoning_effort, message.reasoning_content }}")
    )
    assert parsed.requests[0].messages[1]["reasoning_content"] == "Hm."
    assert (dict(parsed.requests[0].template.arguments), parsed.ignored) == ({"reasoning_effort": "high"}, [])
    names = ["output_config.effort", "messages[].content[].thinking"]
    assert sorted(parse(asked, context=CAPABLE).ignored) == sorted(names)


def test_an_answer_continues_the_assistants_last_message() -> None:
    (request,) = parse(talk("a", [text("So")])).requests
    assert (request.template.continue_final_message, request.messages[-1]["content"]) == (True, "So")
    assert not parse(ASK).requests[0].template.continue_final_message


def test_parameters_of_messages() -> None:
    schema = {"type": "object"}
    asked = body(
        temperature=0.5, top_k=3, top_p=0.9, stop_sequences=["x"],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )  # fmt: skip
    (request,) = parse(asked).requests
    sampling = request.sampling
    assert (sampling.max_new_tokens, sampling.do_sample, sampling.temperature) == (16, True, 0.5)
    assert (sampling.top_k, sampling.top_p, sampling.stop, sampling.include_stop) == (3, 0.9, ("x",), True)
    assert sampling.structured_output == StructuredOutput("json_schema", json.dumps(schema))
    assert request.min_free_tokens == 1
    assert not parse(body(temperature=0)).requests[0].sampling.do_sample


@in_one_test("stream", [False, True])
@in_one_test(
    "more",
    [
        {},
        {"stop_sequences": ["x"]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    ],
)
def test_without_tokens_the_prompt_is_read_and_the_answer_is_empty(more: dict[str, Any], stream: bool) -> None:
    """Engines make one token at least: it is not shown, nor counted. The prompt is that of the same request."""
    template = f"{HERMES.chat_template} {{{{ enable_thinking }}}}<think></think>"
    context = replace(HERMES, chat_template=template, vocabulary=Vocabulary([b"</think>"], {0}))
    asked = body(max_tokens=0, stream=stream, **more)
    (request,), (usual,) = (parse(one, context=context).requests for one in (asked, {**asked, "max_tokens": 2048}))
    assert (request.messages, request.tools, request.template) == (usual.messages, usual.tools, usual.template)
    assert (request.sampling, request.read_prompt) == (Sampling(max_new_tokens=1, logprobs=False), None)
    deltas = [
        Delta(1, 0, (Token(1, "No", -1.0, False),), extras=Extras(num_cached_tokens=1)),
        Delta(1, 0, (), Finish.STOP),
    ]
    found = answer("anthropic_messages", asked, deltas, context).body.decode()
    values = [json.loads(line.removeprefix("data: ")) for line in found.splitlines() if line[:1] in ("{", "d")]
    if stream:
        assert [value["type"] for value in values] == ["message_start", "message_delta", "message_stop"]
        values = [values[0]["message"] | values[1]["delta"] | {"usage": values[1]["usage"]}]
    (message,) = values
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], "max_tokens", None)
    counts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    assert [message["usage"][name] for name in counts] == [1, 0, 1, 0]


@in_one_test("stream", [False, True])
def test_an_answer_without_tokens_ends_with_the_engines(stream: bool) -> None:
    reply = parse(body(max_tokens=0, stream=stream)).reply
    assert (reply.feed(0, Delta(1, 0, (Token(1, "No", -1.0, False),))), reply.finished) == (b"", False)
    assert (reply.feed(0, Delta(1, 0, (), Finish.STOP)) > b"", reply.finished) == (True, True)


@in_one_test("limit", [0, -1, "many", None])
def test_a_count_does_not_read_the_limit_of_an_answer(limit: Any) -> None:
    assert value("anthropic_count", {"messages": ASK["messages"], "max_tokens": limit}, deltas()[:1]) == {
        "input_tokens": 2
    }


@in_one_test(
    ("more", "listed"),
    [
        ({"metadata": {"user_id": "u"}, "service_tier": "auto"}, ["metadata", "service_tier"]),
        ({"anthropic_version": "2023-06-01", "cache_control": {"type": "ephemeral"}, "speed": "standard"}, []),
        ({"seed": 1, "context_management": {"edits": []}}, ["seed"]),
        ({"tools": [{**TOOLS[0], "defer_loading": False, "strict": True}]}, ["tools[].strict"]),
        ({"tools": [{**TOOLS[0], "parameters": {"type": "object"}}]}, ["tools[].parameters"]),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 20_000, "remaining": 1}}},
         ["output_config.task_budget"]),
        ({"tools": [{**TOOLS[0], "allowed_callers": ["direct"], "cache_control": {}, "type": "custom"}]}, []),
        ({"messages": [{"role": "user", "content": [{**text("a"), "citations": [1]}], "name": "me"}]},
         ["messages[].name", "messages[].content[].citations"]),
        ({"messages": [ASK["messages"][0], {"role": "assistant", "content": [USE]},
                       {"role": "user", "content": [result(None, is_error=True)]}]},
         ["messages[].content[].is_error"]),
    ],
)  # fmt: skip
def test_names_without_effect_are_listed_in_anthropic(more: dict[str, Any], listed: list[str]) -> None:
    assert parse(body(**more)).ignored == listed


@in_one_test(
    ("asked", "message"),
    [
        ({"messages": ASK["messages"]}, "'max_tokens' is required"),
        (body(max_tokens=-1), "max_tokens=-1: must be an integer from 0"),
        (body(messages=[]), "'messages' must be a non-empty list"),
        (body(messages=[{"role": "tool", "content": ""}]), "messages[0].role must be one of user, assistant, system"),
        (talk({}), "messages[0].content must be a string or a list of blocks"),
        (talk([{"type": "text"}]), "messages[0].content[0].text must be a string"),
        (talk([{"type": "image", "source": {}}]), "messages[0].content[0]: 'image' is not supported: the engine"),
        (talk([{"type": "document"}]), "messages[0].content[0]: 'document' is not supported: send its text in a block"),
        (talk([{"type": "search_result"}]), "'search_result' is not supported: send its text in a block"),
        (
            talk([{"type": "sound"}]),
            "'sound' is not supported: the type must be text, image, tool_result or compaction",
        ),
        (
            talk([{"type": "redacted_thinking", "data": ""}]),
            "'redacted_thinking' is not supported: the type must be text, image, tool_result or compaction",
        ),
        (
            talk("a", [{"type": "server_tool_use"}]),
            "messages[1].content[0]: 'server_tool_use' is not supported: server",
        ),
        (talk("a", [{"type": "web_search_tool_result"}]), "'web_search_tool_result' is not supported: server tools"),
        (talk("a", [{**USE, "input": "x"}]), "messages[1].content[0].input must be an object"),
        (talk("a", [USE]), "messages[1]: the response continues this message, which must have text and no tool_use"),
        (talk([result("x")]), 'messages[0].content[0].tool_use_id="toolu_1": no earlier tool_use has'),
        (
            talk("a", [USE], [result([{"type": "image"}])]),
            "messages[2].content[0].content[0]: 'image' is not supported",
        ),
        (body(system=[{"type": "image"}]), "system[0]: 'image' is not supported"),
        (
            body(tools=[{"type": "web_search_20250305", "name": "s"}]),
            'tools[0].type="web_search_20250305": is not supp',
        ),
        (
            body(tools=[{"type": "bash_20250124", "name": "bash"}]),
            'tools[0].type="bash_20250124": is not supported: send',
        ),
        (body(tools=[{"name": "a b", "input_schema": {}}]), "tools[0].name: must be 1 to 256 letters"),
        (body(tools=[{"name": "a"}]), "tools[0].input_schema: must be a JSON schema"),
        (body(tool_choice={"type": "any"}), 'tool_choice={"type": "any"}: requires tools'),
        (body(tools=TOOLS, tool_choice={"type": "tool", "name": "x"}), "'name' must be the name of one of the tools"),
        (body(tools=TOOLS, tool_choice={"type": "required"}), "'type' that is auto, any, tool or none"),
        (body(thinking={"type": "enabled"}), "'budget_tokens' is required"),
        (
            body(thinking={"type": "adaptive", "display": "all"}),
            "'display' must be summarized, updates or omitted",
        ),
        (body(thinking={"type": "much"}), 'thinking={"type": "much"}: must be an object whose \'type\''),
        (body(output_config={"effort": "huge"}), "must have an 'effort' that is one of low"),
        (body(output_config={"effort": "low", "token_budget": 1}), "has an unknown name 'token_budget'; the names are"),
        (body(stop=["x"]), 'stop=["x"]: is not supported: use stop_sequences'),
        (body(mcp_servers=[{}]), "mcp_servers=[{}]: is not supported"),
        (body(context_management={"edits": [{"type": "trim"}]}), "the available edits are clear_thinking_20251015, "),
        (body(context_management={"edits": {}}), "must be an object with 'edits', a list of objects"),
        (body(context_management="x"), "must be an object with 'edits', a list of objects"),
        (body(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": 2}]}), "'keep' must be all"),
        (
            body(context_management={"edits": [{"type": "clear_thinking_20251015", "kept": "all"}]}),
            "has an unknown name 'kept'; the names are type, keep",
        ),
        (body(context_management={"edits": [], "edit": []}), "has an unknown name 'edit'; the names are edits"),
        (
            body(thinking={"type": "adaptive", "effort": "low"}),
            "has an unknown name 'effort'; the names are type, budget_tokens, display",
        ),
        (
            body(tools=TOOLS, tool_choice={"type": "auto", "x" * 99: 1}),
            f"has an unknown name {'x' * 64!r}; the names are type, name, disable_parallel_tool_use",
        ),
        (body(stream=2), "stream=2: must be true or false"),
    ],
)
def test_refusals_name_what_is_wrong_in_anthropic(asked: dict[str, Any], message: str) -> None:
    found = answer("anthropic_messages", asked, context=HERMES)
    value = json.loads(found.body)
    assert found.status == 400
    assert value["error"]["type"] == "invalid_request_error"
    assert message in value["error"]["message"]


@in_one_test("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
@in_one_test("schema", ["anthropic_messages", "anthropic_count"])
@in_one_test("stream", [True, False])
def test_a_thread_is_refused_as_anthropics_client_recovers_from(
    schema: str, thread: dict[str, Any], stream: bool
) -> None:
    found = answer(schema, body(thread=thread, stream=stream), context=HERMES)
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    message = "thread: is not supported: conversations are not stored (option.responses_store); send all messages"
    error = {"type": "invalid_request_error", "message": message, "details": details}
    assert (found.status, json.loads(found.body)) == (400, {"type": "error", "error": error})
    assert answer(schema, body(thread=None), context=HERMES).status == 200


def test_a_strict_server_refuses_unknown_names() -> None:
    strict = with_options(HERMES, unknown_parameters="refuse")
    assert parse(body(metadata={}), context=strict).ignored == ["metadata"]
    for more, name in (
        ({"seed": 1}, "seed"),
        ({"tools": [{**TOOLS[0], "examples": [1]}]}, "tools[].examples"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ):
        found = json.loads(answer("anthropic_messages", body(**more), context=strict).body)
        assert found["error"]["message"] == f"unknown names: {name} (option.unknown_parameters=refuse)"


def test_a_deferred_tool_is_shown_once_a_search_has_found_it() -> None:
    """Claude Code searches itself: its tool returns `tool_reference`, and each request repeats all definitions."""
    search, found, other, called = (
        {"name": name, "input_schema": {"type": "object"}, "defer_loading": name != "search"}
        for name in ("search", "found", "other", "called")
    )
    tools = [search, found, other, called]
    uses: list[dict[str, Any]] = [
        {"type": "tool_use", "id": name, "name": name, "input": {}} for name in ("search", "called")
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "search", "content": [{"type": "tool_reference", "tool_name": "found"}]},
        {"type": "tool_result", "tool_use_id": "called", "content": "b"},
    ]
    talking = [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    choice = {"tool_choice": {"type": "tool", "name": "other"}}
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["search"]),
        ({"messages": [*ASK["messages"], *talking]}, ["search", "found", "called"]),
        (choice, ["search", "other"]),
        ({"tools": [found]}, []),
    ]
    for more, names in cases:
        parsed = parse(body(**{"tools": tools, **more}), context=HERMES)
        (request,) = parsed.requests
        assert [tool["function"]["name"] for tool in request.tools or ()] == names
        assert parsed.ignored == []
        messages = more.get("messages", ASK["messages"])
        (counted,) = DIALECTS["anthropic_count"].parse({"messages": messages, "tools": tools, **more}, HERMES).requests
        assert [tool["function"]["name"] for tool in counted.tools or ()] == names
    (request,) = parse(body(messages=[*ASK["messages"], *talking], tools=tools), context=HERMES).requests
    assert [message["content"] for message in request.messages if message["role"] == "tool"] == ["found", "b"]


@in_one_test(
    ("more", "message"),
    [
        ({"tools": [{**TOOLS[0], "defer_loading": 3}]}, "tools[0].defer_loading=3: must be true or false"),
        ({"output_config": {"task_budget": 3}}, "must have a 'task_budget' with 'type': 'tokens' and 'total'"),
        ({"output_config": {"task_budget": {"type": "tokens"}}}, "output_config.task_budget.total=null: must be an"),
        (
            {"output_config": {"task_budget": {"type": "tokens", "total": 1, "remaining": "a"}}},
            'output_config.task_budget.remaining="a": must be an integer',
        ),
        (talk([{"type": "tool_reference", "tool_name": "a"}]), "it is allowed only in the results of tools"),
    ],
)
def test_hints_of_agents_are_checked(more: dict[str, Any], message: str) -> None:
    found = json.loads(answer("anthropic_messages", body(**more)).body)
    assert message in found["error"]["message"]


# -- changes of the tools in messages ----------------------------------------------------------------------------


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **more}


def change(kind: str, name: str) -> dict[str, Any]:
    return {"type": f"tool_{kind}", "tool": {"type": "tool_reference", "name": name}}


def definition(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool(name, **more)}}


def changing(*groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of which each group of blocks is a system message after the user's, before the assistant's."""
    messages: list[dict[str, Any]] = []
    for group in groups:
        turn: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "system", "content": group}]
        messages += [*turn, {"role": "assistant", "content": "b"}]
    return messages[:-1]


DECLARED = [tool("first"), tool("late", defer_loading=True)]


@in_one_test(
    ("groups", "names"),
    [
        ([[change("addition", "late")]], ["first", "late"]),
        ([[change("removal", "first")]], []),
        ([[change("removal", "first"), change("removal", "first")]], []),
        ([[change("addition", "first"), change("addition", "first")]], ["first"]),
        ([[change("removal", "first")], [change("addition", "first")]], ["first"]),
        ([[change("addition", "late")], [change("removal", "late")]], ["first"]),
        ([[change("removal", "late")]], ["first"]),
        ([[text("Now:"), change("addition", "late"), {"type": "text", "text": "."}]], ["first", "late"]),
        ([[{**change("addition", "late"), "cache_control": {"type": "ephemeral"}}]], ["first", "late"]),
        ([[definition("new")]], ["first", "new"]),
        ([[definition("new")], [change("removal", "new")]], ["first"]),
        ([[definition("new")], [change("removal", "new")], [definition("new")]], ["first", "new"]),
        ([[definition("new", defer_loading=True)]], ["first"]),
        ([[definition("new", defer_loading=True)], [change("addition", "new")]], ["first", "new"]),
        ([[definition("first", defer_loading=True)]], ["first"]),
        ([[definition("first", description="Other.", defer_loading=True)]], []),
    ],
)
def test_messages_change_the_tools_for_the_response(groups: list[Any], names: list[str]) -> None:
    """The rules are those of "Mid-conversation system messages and tool changes" in Anthropic's documentation."""
    asked = body(messages=changing(*groups), tools=DECLARED)
    for schema in ("anthropic_messages", "anthropic_count"):
        parsed = parse(
            {name: item for name, item in asked.items() if "count" not in schema or name != "max_tokens"}, schema
        )
        (request,) = parsed.requests
        assert [shown["function"]["name"] for shown in request.tools or ()] == names
        assert parsed.ignored == []


def test_a_change_of_tools_adds_no_text() -> None:
    (request,) = parse(body(messages=changing([change("removal", "first")]), tools=DECLARED)).requests
    assert request.messages == ({"role": "user", "content": "a"},)


def test_a_definition_in_a_message_replaces_an_earlier_one() -> None:
    groups = [[definition("first", description="B.")], [definition("first", description="C.")]]
    (request,) = parse(body(messages=changing(*groups), tools=DECLARED)).requests
    (shown,) = request.tools or ()
    assert shown["function"]["description"] == "C."


def test_a_removed_tool_that_the_model_still_calls_stays_removed() -> None:
    use = {"type": "tool_use", "id": "1", "name": "first", "input": {}}
    after = [
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "no such tool"}]},
    ]
    (request,) = parse(body(messages=[*changing([change("removal", "first")]), *after], tools=DECLARED)).requests
    assert not request.tools


def test_a_tool_of_a_message_can_be_chosen() -> None:
    choice = {"type": "tool", "name": "new"}
    (request,) = parse(body(messages=changing([definition("new")]), tools=DECLARED, tool_choice=choice)).requests
    assert [shown["function"]["name"] for shown in request.tools or ()] == ["first", "new"]


USER, SYSTEM, ASSISTANT = (
    {"role": "user", "content": "a"},
    {"role": "system", "content": [change("removal", "first")]},
    {"role": "assistant", "content": "b"},
)
OTHER_PLACES = "a system message that changes the tools must follow a message of the user"


@in_one_test(
    ("more", "message"),
    [
        ({"messages": [SYSTEM, USER]}, f"messages[0].content[0]: {OTHER_PLACES}"),
        ({"messages": [USER, SYSTEM, USER]}, f"messages[1].content[0]: {OTHER_PLACES}"),
        ({"messages": [USER, ASSISTANT, SYSTEM]}, f"messages[2].content[0]: {OTHER_PLACES}"),
        ({"messages": [USER, SYSTEM, {"role": "system", "content": "c"}, USER]}, "messages[1].content[0]: a system"),
        ({"messages": changing([change("addition", "gone")])}, 'messages[1].content[0].tool.name="gone": must be the'),
        ({"messages": changing([change("removal", "new")], [definition("new")])}, 'tool.name="new": must be the name'),
        ({"messages": changing([definition("new", type="web_search_20250305")])}, "tool.definition.type="),
        ({"messages": changing([definition("new", strict=3)])}, "[0].tool.definition.strict: must be true or false"),
        (
            {"messages": changing([{"type": "tool_removal", "tool": "first"}])},
            "[0].tool must be an object with a 'type'",
        ),
        (
            {"messages": changing([{**definition("new"), "type": "tool_removal"}])},
            "messages[1].content[0].tool must be an object with a 'type' that is tool_reference",
        ),
        (
            {"messages": changing([{"type": "tool_addition", "tool": {"type": "mcp_toolset_reference"}}])},
            'messages[1].content[0].tool.type="mcp_toolset_reference": is not supported',
        ),
        ({"messages": [{"role": "user", "content": [change("removal", "first")]}]}, "only in the system messages"),
        ({"system": [change("removal", "first")]}, "system[0]: 'tool_removal' is not supported: it is allowed only"),
        ({"tools": [tool("first"), tool("first", defer_loading=True)]}, "tools: two tools have the same name"),
        (
            {"messages": changing([change("removal", "first")]), "tool_choice": {"type": "tool", "name": "first"}},
            "'name' must be the name of a tool that no tool_removal has removed",
        ),
    ],
)
def test_wrong_changes_of_tools_are_refused(more: dict[str, Any], message: str) -> None:
    found = answer("anthropic_messages", body(**{"tools": DECLARED, **more}))
    error = json.loads(found.body)["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_the_error_of_an_unknown_tool_has_anthropics_code() -> None:
    found = answer("anthropic_messages", body(tools=DECLARED, messages=changing([change("addition", "gone")])))
    assert json.loads(found.body)["error"]["details"] == {"error_code": "tool_reference_unresolved"}


def test_only_tools_that_the_model_may_call_are_counted() -> None:
    many = [{**TOOLS[0], "name": f"tool_{number}", "defer_loading": number >= 1024} for number in range(1100)]
    assert len(parse(talk("a", tools=many)).requests[0].tools) == 1024
    with pytest.raises(InvalidParameter) as caught:
        parse(talk("a", tools=[{**tool, "defer_loading": False} for tool in many]))
    assert caught.value.message == "tools: the model may call 1100 tools; the maximum is 1024"


def test_a_tool_behind_a_deferred_one_is_named_by_its_index_in_the_request() -> None:
    found = answer("anthropic_messages", body(tools=[tool("late", defer_loading=True), tool("first", description=3)]))
    assert json.loads(found.body)["error"]["message"] == "tools[1].description: must be a string"


# -- answers -----------------------------------------------------------------------------------------------------

EVENTS: tuple[Event, ...] = (
    Reasoning("Hm"), Reasoning("."), "\n\n", "So", " it is", "\n", CallStart(0, "a"), Arguments(0, '{"b"'),
    Arguments(0, ": 1}"), CallEnd(0), "\n", CallStart(1, "c"), Arguments(1, "{}"), CallEnd(1), "Done",
)  # fmt: skip


def test_events_become_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.protocols.anthropic.response.tool_use_id", lambda: "toolu_0")
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "lmi"}
    calls = [{"type": "tool_use", "id": "toolu_0", "name": name, "input": input} for name, input in
             (("a", {"b": 1}), ("c", {}))]  # fmt: skip
    said = [text("\n\nSo it is\n"), calls[0], calls[1], text("Done")]
    for blocks, content in (
        (Blocks(), [thought, *said]),
        (Blocks(show_reasoning=False), [{**thought, "thinking": ""}, *said]),
        (Blocks(single=True), [thought, said[0], calls[0], text("\nDone")]),
        (Blocks(["Done"]), [thought, *said[:3]]),
    ):
        found = [*blocks.feed(EVENTS), *blocks.end()]
        assert json.loads(dumps(gather(found))) == content
        order = [(event["type"].removeprefix("content_block_"), event["index"]) for event in found]
        assert [index for kind, index in order if kind == "start"] == [*range(len(content))]
        assert order == sorted(order, key=lambda pair: (pair[1], ["start", "delta", "stop"].index(pair[0])))


def test_a_stop_string_is_held_back_within_its_block() -> None:
    blocks = Blocks(["ab"])
    assert gather([*blocks.feed(["xa", Reasoning("b"), "a"]), *blocks.end()]) == [
        text("xa"), {"type": "thinking", "thinking": "b", "signature": "lmi"}, text("a"),
    ]  # fmt: skip


@in_one_test(
    ("said", "finish", "stop", "which"),
    [
        ("One.", Finish.EOS, "end_turn", None),
        (CALL, Finish.EOS, "tool_use", None),
        ("One END", Finish.STOP, "stop_sequence", "END"),
        ("One XEND", Finish.STOP, "stop_sequence", "XEND"),
        (CALL, Finish.LENGTH, "model_context_window_exceeded", None),
    ],
)
@in_one_test("stream", [False, True])
def test_why_an_answer_ends(said: str, finish: Finish, stop: str, which: str | None, stream: bool) -> None:
    asked = body(tools=TOOLS, stop_sequences=["END", "XEND"], max_tokens=100, stream=stream)
    found = answer("anthropic_messages", asked, saying(said, 5, finish)).body.decode()
    if stream:
        (line,) = [line for line in found.splitlines() if line.startswith('data: {"type":"message_delta"')]
        value = json.loads(line.removeprefix("data: "))["delta"]
    else:
        value = json.loads(found)
    assert (value["stop_reason"], value["stop_sequence"]) == (stop, which)
    assert "END" not in found.replace('"stop_sequence":"XEND"', "").replace('"stop_sequence":"END"', "")


@in_one_test("city", ['"Kö', *("[" * depth + "]" * depth + "}}]</tool_call>" for depth in (250, 251, 252, 999))])
def test_arguments_that_are_cut_off_or_too_deep_are_text(city: str) -> None:
    said = f'<tool_call>[{{"name": "weather", "arguments": {{"city": {city}'
    asked = body(tools=TOOLS, max_tokens=4)
    value = json.loads(answer("anthropic_messages", asked, saying(said, 20, Finish.LENGTH), CONTEXT).body)
    assert [block["type"] for block in value["content"]] == ["text"]
    assert value["content"][0]["text"].startswith('weather {"city": ')
    assert value["stop_reason"] in ("max_tokens", "model_context_window_exceeded")


# -- fields of the betas that hold here without an effect --------------------------------------------------------


@in_one_test(
    "more",
    [
        {"thinking": {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}}},
        {"thinking": {"type": "adaptive", "block_binding": {}}},
        {"thinking": {"type": "adaptive", "block_binding": None}},
        {"tools": [tool("a", allowed_callers=["direct", "code_execution_20260120"])]},
        {"tools": [tool("a", allowed_callers=[])]},
    ],
)
def test_fields_that_ask_for_what_always_holds(more: dict[str, Any]) -> None:
    able = replace(HERMES, chat_template=f"<think></think>{HERMES.chat_template}")
    assert parse(body(**more), context=able).ignored == []


@in_one_test(
    ("more", "message"),
    [
        ({"thinking": {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "keep"}}},
         "'block_binding' must be an object whose 'prefix_mismatch_behavior' is error or drop_block"),
        ({"thinking": {"type": "adaptive", "block_binding": {"other": 1}}}, "has an unknown name 'other'"),
        ({"thinking": {"type": "adaptive", "block_binding": 3}}, "'block_binding' must be an object"),
        ({"tools": [tool("a", allowed_callers=["code_execution_20260120"])]},
         'tools[0].allowed_callers=["code_execution_20260120"]: must contain \'direct\''),
        ({"tools": [tool("a", allowed_callers="direct")]}, "tools[0].allowed_callers=\"direct\": must contain"),
    ],
)  # fmt: skip
def test_fields_that_ask_for_what_never_holds(more: dict[str, Any], message: str) -> None:
    assert message in value("anthropic_messages", body(**more))["error"]["message"]


@in_one_test(
    ("transformations", "message"),
    [
        (None, None),
        ({}, None),
        ({"oversized_image": "downsize"}, None),
        ({"oversized_image": "error"}, 'transformations.oversized_image="error": is not supported'),
        ({"other": 1}, "transformations must be an object with 'oversized_image'"),
        (3, "transformations must be an object with 'oversized_image'"),
    ],
)
def test_large_images_are_scaled_down(transformations: Any, message: str | None) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "eA=="}
    image = {"type": "image", "source": source, "transformations": transformations}
    for content in ([image], [result([image])]):
        asked = talk("a", [USE], content, tools=TOOLS)
        found = answer("anthropic_messages", asked, context=replace(HERMES, no_media={"image": ""}))
        error = json.loads(found.body).get("error", {}).get("message")
        assert (error is None) if message is None else message in error
