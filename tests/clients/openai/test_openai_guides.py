"""openai's structured outputs and forced calls of tools, with the demo model: guides make its answers what they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.driver import Driver
from tests.clients.openai.test_openai import CITY, GREEDY, WEATHER
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

ZONE = {"type": "object", "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}}, "required": ["zone"]}
TIME = {"type": "function", "function": {"name": "time", "parameters": ZONE}}
ASK = "What is the weather in Paris?"
TOOLS: dict[str, Any] = {**GREEDY, "max_tokens": 80, "tools": [WEATHER, TIME]}


def message(openai: Driver, server: LiveServer, what: str, **options: Any) -> dict[str, Any]:
    """The one choice, whole or gathered from a stream by the client itself."""
    (choice,) = openai.generate(server.url, ASK, what=what, **options)["choices"]
    return {"finish_reason": choice["finish_reason"], **choice["message"]}


@pytest.mark.parametrize("what", ["chat", "gathered"])
def test_required_calls(openai: Driver, openai_server: LiveServer, what: str) -> None:
    found = message(openai, openai_server, what, **TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = found["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert (found["content"], found["finish_reason"]) == (None, "tool_calls")


@pytest.mark.parametrize("what", ["chat", "gathered"])
def test_a_named_call(openai: Driver, openai_server: LiveServer, what: str) -> None:
    choice = {"type": "function", "function": {"name": "time"}}
    found = message(openai, openai_server, what, **TOOLS, tool_choice=choice)
    (call,) = found["tool_calls"]
    assert call["function"]["name"] == "time"
    assert json.loads(call["function"]["arguments"])["zone"] in ("UTC", "CET")
    assert (found["content"], found["finish_reason"]) == (None, "stop")


def test_a_schema_of_pydantics(openai: Driver, openai_server: LiveServer) -> None:
    found = openai.generate(openai_server.url, "Name the capital of France, in JSON.", what="parse", **GREEDY)
    assert found.keys() == {"country", "city"}
    assert found["city"] == "Paris"


def test_any_object(openai: Driver, openai_server: LiveServer) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "response_format": {"type": "json_object"}}
    (choice,) = openai.generate(openai_server.url, "Describe Paris as a JSON object.", **options)["choices"]
    assert choice["message"]["content"].lstrip().startswith("{")


def test_huggingface_hubs_schema(chatting_hub: Driver, openai_server: LiveServer) -> None:
    """Its newer versions send OpenAI's form as TGI's."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": {**CITY, "additionalProperties": False}}}
    (choice,) = chatting_hub.generate(openai_server.url, ASK, **GREEDY, response_format=form)["choices"]
    assert json.loads(choice["message"]["content"]).keys() == {"city"}


def test_langchains_structured_output(langchain_openai: Driver, openai_server: LiveServer) -> None:
    found = langchain_openai.generate(openai_server.url, ASK, **TOOLS, tool_choice="weather")
    assert found["tool_calls"] == [{"name": "weather", "args": {"city": "Paris"}}]
