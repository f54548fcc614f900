"""Every type of input item in OpenAI's client 3.57: read as history, or refused with what to send instead."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import InvalidPayload
from handler.protocols.registry import ROUTES
from tests.unit.protocols.answers import CAPABLE

USER = {"role": "user", "content": "Hello"}
HERMES = replace(CAPABLE, chat_template="{{ tools }} <tool_call> {{ tool_calls }}")
NO_RESULT = "(The result is not part of the conversation.)"
IMAGE = "(An image, which is not part of the conversation.)"
RUN = {"type": "exec", "command": ["ls"], "env": {}}

# Each type, the items to send, and the calls (name and arguments) and outputs that the model reads; None is a refusal.
ITEMS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "tool_search_call": (
        [{"call_id": None, "execution": "server", "arguments": {"query": "q"}}],
        [("tool_search", {"query": "q"})],
    ),
    "tool_search_output": (
        [
            {"type": "tool_search_call", "call_id": None, "arguments": "q"},
            {"call_id": None, "execution": "server", "tools": [{"name": "f"}]},
        ],
        [("tool_search", {"arguments": "q"}), '[{"name":"f"}]'],
    ),
    "local_shell_call": ([{"call_id": "c", "action": RUN}], [("local_shell", {"action": RUN})]),
    "local_shell_call_output": (
        [{"type": "local_shell_call", "call_id": "c", "action": RUN}, {"id": "x", "output": "a.txt"}],
        [("local_shell", {"action": RUN}), "a.txt"],
    ),
    "shell_call": ([{"call_id": "c", "action": {"commands": ["ls"]}}], [("shell", {"action": {"commands": ["ls"]}})]),
    "shell_call_output": (
        [
            {"type": "shell_call", "call_id": "c", "action": {}},
            {"call_id": "c", "output": [{"stdout": "a"}], "max_output_length": 9},
        ],
        [("shell", {"action": {}}), '{"output":[{"stdout":"a"}],"max_output_length":9}'],
    ),
    "apply_patch_call": (
        [{"call_id": "c", "operation": {"type": "delete_file"}}],
        [("apply_patch", {"operation": {"type": "delete_file"}})],
    ),
    "apply_patch_call_output": (
        [
            {"type": "apply_patch_call", "call_id": "c", "operation": {}},
            {"call_id": "c", "status": "completed", "output": "ok"},
        ],
        [("apply_patch", {"operation": {}}), "ok"],
    ),
    "computer_call": (
        [{"id": "i", "call_id": "c", "action": {"type": "wait"}, "pending_safety_checks": []}],
        [("computer", {"action": {"type": "wait"}, "pending_safety_checks": []})],
    ),
    "computer_call_output": (
        [
            {"type": "computer_call", "call_id": "c"},
            {"call_id": "c", "output": {"type": "computer_screenshot", "image_url": "data:x"}},
        ],
        [("computer", {}), IMAGE],
    ),
    "program": ([{"id": "i", "call_id": "c", "code": "1", "fingerprint": "f"}], [("program", {"code": "1"})]),
    "program_output": (
        [{"type": "program", "call_id": "c", "code": "1"}, {"call_id": "c", "result": "1"}],
        [("program", {"code": "1"}), "1"],
    ),
    "mcp_approval_request": (
        [{"id": "m", "name": "f", "server_label": "s", "arguments": '{"a": 1}'}],
        [("mcp_approval", {"name": "f", "server_label": "s", "a": 1})],
    ),
    "mcp_approval_response": (
        [
            {"type": "mcp_approval_request", "id": "m", "name": "f", "arguments": "{}"},
            {"approval_request_id": "m", "approve": True},
        ],
        [("mcp_approval", {"name": "f"}), "true"],
    ),
    "mcp_call": (
        [{"id": "m", "name": "f", "server_label": "s", "arguments": "{}", "output": "12"}],
        [("mcp", {"name": "f", "server_label": "s"}), "12"],
    ),
    "mcp_list_tools": (
        [{"id": "m", "server_label": "s", "tools": []}],
        [("mcp_list_tools", {"server_label": "s", "tools": []}), NO_RESULT],
    ),
    "web_search_call": (
        [{"id": "w", "status": "completed", "action": {"type": "search", "query": "q"}}],
        [("web_search", {"action": {"type": "search", "query": "q"}}), NO_RESULT],
    ),
    "file_search_call": (
        [{"id": "f", "queries": ["q"], "results": [{"text": "t"}]}],
        [("file_search", {"queries": ["q"]}), '[{"text":"t"}]'],
    ),
    "code_interpreter_call": (
        [{"id": "c", "code": "1", "container_id": "x", "outputs": [{"type": "logs", "logs": "1"}]}],
        [("code_interpreter", {"code": "1", "container_id": "x"}), '[{"type":"logs","logs":"1"}]'],
    ),
    "image_generation_call": ([{"id": "i", "result": "aGk="}], [("image_generation", {}), IMAGE]),
    "additional_tools": ([{"role": "developer", "tools": []}], None),
    "configuration_update": ([{"reasoning": {"effort": "low"}}], None),
}


def read(items: list[dict[str, Any]]) -> list[Any]:
    """The calls and outputs in the messages for the template."""
    body = {"model": "model", "input": [USER, *items, {**USER, "content": "Go on."}]}
    [request] = ROUTES["/v1/responses"].parse(body, HERMES).requests
    found: list[Any] = []
    for message in request.messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            found.append((call["function"]["name"], json.loads(arguments) if isinstance(arguments, str) else arguments))
        if message["role"] == "tool":
            found.append(message["content"])
    assert request.messages[-1]["content"] == "Go on."
    return found


@pytest.mark.parametrize("kind", ITEMS)
def test_an_item_of_another_server_is_read_or_refused(kind: str) -> None:
    items, expected = ITEMS[kind]
    items = [*items[:-1], {"type": kind, **items[-1]}]
    if expected is None:
        with pytest.raises(InvalidPayload, match=rf"input\[1\]: '{kind}' is not supported: send"):
            read(items)
    else:
        assert read(items) == expected


@pytest.mark.parametrize("kind", [kind for kind in ITEMS if kind.endswith(("_output", "_response"))])
def test_an_output_without_its_call_is_refused(kind: str) -> None:
    items, _ = ITEMS[kind]
    with pytest.raises(InvalidPayload, match="has the id of this output"):
        read([{"type": kind, **items[-1]}])


def test_outputs_belong_to_the_calls_whose_ids_they_have() -> None:
    calls = [{"type": "shell_call", "call_id": id, "action": {"commands": [id]}} for id in ("a", "b")]
    outputs = [{"type": "shell_call_output", "call_id": id, "output": id} for id in ("b", "a")]
    body = {"model": "model", "input": [USER, *calls, *outputs]}
    [request] = ROUTES["/v1/responses"].parse(body, HERMES).requests
    outputs_by_id = {m["tool_call_id"]: m["content"] for m in request.messages if m["role"] == "tool"}
    assert outputs_by_id == {"a": "a", "b": "b"}
