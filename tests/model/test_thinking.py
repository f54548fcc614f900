"""Structured output after a thought, and a thought's budget, on the demo model with a template that opens thoughts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.server import serve
from tests.servers import LiveServer

pytestmark = pytest.mark.model  # vLLM's file, which has these tests too, has a mark of its own

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)
OPTIONS = ("-o", "option.reasoning_parser=qwen3", "-o", f"option.chat_template={TEMPLATE}")
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How old is the tower?"}],
    "temperature": 0,
    "max_tokens": 64,
}
FORMAT: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[LiveServer]:
    with serve(str(demo_model), *OPTIONS) as found:
        yield found


def answer(server: LiveServer, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    found = server.post({**ASK, **fields}, path)
    assert found.status_code == 200, found.text
    return found.json()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize("budget", [0, 6])
def test_a_schema_holds_after_a_thought_that_ends_at_its_budget(server: LiveServer, path: str, budget: int) -> None:
    found = answer(server, path, **FORMAT, thinking_token_budget=budget)
    message = found["choices"][0]["message"]
    assert set(json.loads(message["content"])) == {"age"}
    assert bool(message.get("reasoning")) == bool(budget)
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": budget}


def test_a_stream_shows_no_seam(server: LiveServer) -> None:
    body = {**FORMAT, "thinking_token_budget": 6, "logprobs": True}
    whole = answer(server, **body)["choices"][0]["message"]
    lines = server.post({**ASK, **body, "stream": True}, "/v1/chat/completions").text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole[name]


def test_without_a_thought_the_schema_holds_at_once(server: LiveServer) -> None:
    message = answer(server, **FORMAT, chat_template_kwargs={"enable_thinking": False})["choices"][0]["message"]
    assert set(json.loads(message["content"])) == {"age"}
    assert "reasoning" not in message


def test_a_required_call_follows_a_thought(server: LiveServer) -> None:
    message = answer(server, tools=[TOOL], tool_choice="required", thinking_token_budget=4)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], set(json.loads(call["function"]["arguments"]))) == ("look", {"age"})
    assert message["reasoning"]


def test_other_dialects_have_it_by_their_own_names(server: LiveServer) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    format = {"type": "json_schema", "schema": SCHEMA}
    message = answer(server, "/v1/messages", thinking=thinking, output_config={"format": format})
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert set(json.loads(message["content"][1]["text"])) == {"age"}
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 5}


def test_a_thought_without_an_end_has_the_whole_length(server: LiveServer) -> None:
    (choice,) = answer(server, **FORMAT, max_tokens=6)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert choice["message"]["reasoning"]
