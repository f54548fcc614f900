"""Calls of tools by the demo model on OpenVINO, whose rules are in the format that its prompt shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import validate

from tests.servers import LiveServer, events

pytestmark = pytest.mark.model

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "kelvin"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
WRITTEN = '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_call>'
REPEAT = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {"role": "assistant", "content": WRITTEN},
    {"role": "user", "content": "Repeat that."},
]
"""The model does so, though `unit` is missing."""


def tool(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def ask(server: LiveServer, *messages: dict[str, Any], strict: bool = False, **more: Any) -> dict[str, Any]:
    tools = [tool("weather", PARAMETERS, strict=strict), tool("time", ZONE)]
    body = {"messages": messages or REPEAT[:1], "tools": tools, "temperature": 0, "max_tokens": 80, **more}
    answer = server.post(body, "/v1/chat/completions")
    assert "x-lmi-ignored-parameters" not in answer.headers
    (choice,) = answer.json()["choices"]
    return dict(choice)


def calls(choice: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in found]


def test_required_and_named_calls_follow_their_schemas(model_server: LiveServer) -> None:
    required = ask(model_server, tool_choice="required", parallel_tool_calls=False)
    ((name, arguments),) = calls(required)
    assert (required["finish_reason"], required["message"]["content"]) == ("tool_calls", None)
    assert arguments.keys() == ({"city", "unit"} if name == "weather" else {"zone"})
    named = ask(model_server, tool_choice={"type": "function", "function": {"name": "time"}})
    ((name, arguments),) = calls(named)
    assert (name, [*arguments], named["finish_reason"]) == ("time", ["zone"], "stop")


def test_a_strict_tools_call_follows_its_schema(model_server: LiveServer) -> None:
    assert calls(ask(model_server, *REPEAT)) == [("weather", {"city": "Paris"})]
    ((name, arguments),) = calls(ask(model_server, *REPEAT, strict=True))
    assert (name, arguments["city"]) == ("weather", "Paris")
    assert arguments["unit"] in ("celsius", "kelvin")


def test_a_strict_tool_leaves_the_text_as_it_is(model_server: LiveServer) -> None:
    free, ruled = (ask(model_server, strict=strict)["message"] for strict in (False, True))
    assert free == ruled
    assert free["content"]


def arguments_of(messages: list[Any]) -> str:
    return "".join(call["function"]["arguments"] for each in messages for call in each.get("tool_calls", ()))


SHORT = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
SCHEMA = {
    "type": "object",
    "properties": {"certain": {"type": "boolean"}},
    "required": ["certain"],
    "additionalProperties": False,
}
EITHER: dict[str, Any] = {
    "tools": [tool("weather", SHORT), tool("time", SHORT)],
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    "parallel_tool_calls": False,
    "temperature": 1,
}


def test_an_answer_is_a_call_by_its_schema_or_a_text_by_the_format(model_server: LiveServer) -> None:
    kinds = set()
    for seed in range(4):
        messages = [[{"role": "user", "content": 'Say {"certain": true}'}], REPEAT][seed % 2]
        choice = ask(model_server, *messages, **EITHER, seed=seed)
        kinds.add(choice["finish_reason"])
        for _, arguments in calls(choice):
            validate(arguments, SHORT)
        if choice["finish_reason"] == "stop":
            validate(json.loads(choice["message"]["content"]), SCHEMA)
        streamed = events(
            model_server,
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": 80, **EITHER, "seed": seed},
            end=("data: [DONE]",),
        )
        deltas = [choice["delta"] for event in streamed for choice in event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == (choice["message"]["content"] or "")
        assert arguments_of(deltas) == arguments_of([choice["message"]])
    assert kinds == {"stop", "tool_calls"}, "neither is forced"
