"""Anthropic's context editing on /v1/messages and /v1/messages/count_tokens, with the server's own tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.app.server import serve
from tests.servers import LiveServer, options

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CLEARED = "[cleared to save context]"
LONG = "a long result of a tool " * 20


def conversation(*results: Any) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for number, content in enumerate(results):
        call = {"type": "tool_use", "id": f"t{number}", "name": "read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": content}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return messages


def editing(trigger: int, keep: int = 1, **more: Any) -> dict[str, Any]:
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": trigger}, **more}
    return {"context_management": {"edits": [{**edit, "keep": {"type": "tool_uses", "value": keep}}]}}


def ask(server: LiveServer, messages: list[Any], path: str = MESSAGES, **more: Any) -> Any:
    body = {"model": "model", "messages": messages, **more}
    if path == MESSAGES:
        body["max_tokens"] = 400
    response = server.post(body, path)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def counts(echo_server: LiveServer) -> tuple[int, int]:
    """The tokens of a conversation before and after its first two results are cleared, as counted without edits."""
    before = ask(echo_server, conversation(LONG, LONG, LONG), COUNT)
    after = ask(echo_server, conversation(CLEARED, CLEARED, LONG), COUNT)
    assert before.keys() == {"input_tokens"}
    return before["input_tokens"], after["input_tokens"]


def test_the_response_is_that_to_the_edited_conversation(echo_server: LiveServer, counts: tuple[int, int]) -> None:
    before, after = counts
    response = ask(echo_server, conversation(LONG, LONG, LONG), **editing(before - 1))
    expected = ask(echo_server, conversation(CLEARED, CLEARED, LONG))
    applied = {"type": "clear_tool_uses_20250919", "cleared_input_tokens": before - after, "cleared_tool_uses": 2}
    assert response["context_management"] == {"applied_edits": [applied]}
    assert response["usage"] == expected["usage"]
    assert response["usage"]["input_tokens"] == after
    assert response["content"] == expected["content"]
    unedited = ask(echo_server, conversation(LONG, LONG, LONG), **editing(before))
    assert unedited["context_management"] == {"applied_edits": []}
    assert unedited["usage"]["input_tokens"] == before
    assert "context_management" not in expected


def test_the_count_is_that_after_the_edits(echo_server: LiveServer, counts: tuple[int, int]) -> None:
    before, after = counts
    for trigger, expected in ((before - 1, after), (before, before)):
        count = ask(echo_server, conversation(LONG, LONG, LONG), COUNT, **editing(trigger))
        assert count == {"input_tokens": expected, "context_management": {"original_input_tokens": before}}


def test_a_conversation_beyond_the_context_is_edited_first() -> None:
    """Without the edit, its prompt is too long."""
    huge, too_long = "word " * 100, "prompt is too long:"
    with serve("--engine", "echo", *options("option.max_model_len=64")) as server:
        body = {"model": "model", "max_tokens": 4, "messages": conversation(huge, "b")}
        refused = server.post(body, MESSAGES)
        assert (refused.status_code, refused.json()["error"]["message"][:19]) == (400, too_long)
        response = server.post({**body, **editing(60)}, MESSAGES)
        assert response.status_code == 200, response.text
        [applied] = response.json()["context_management"]["applied_edits"]
        assert applied["cleared_input_tokens"] == 100 - len(CLEARED.split())
        for more in (editing(500), editing(60, keep=2)):
            refused = server.post({**body, **more}, MESSAGES)
            assert (refused.status_code, refused.json()["error"]["message"][:19]) == (400, too_long)


def test_a_stream_reports_its_edits_at_the_end(echo_server: LiveServer) -> None:
    body = {"model": "model", "max_tokens": 4, "messages": conversation(LONG, LONG), "stream": True, **editing(9)}
    lines = [line[6:] for line in echo_server.post(body, MESSAGES).text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    [told] = [event for event in events if "context_management" in event]
    assert told["type"] == "message_delta"
    assert [edit["cleared_tool_uses"] for edit in told["context_management"]["applied_edits"]] == [1]
