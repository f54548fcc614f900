"""Compaction on /v1/responses: the trigger at the end of an input, summaries in later requests, and /compact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.server import BY_KEY, refused_start, serve
from tests.servers import LiveServer, http, options

RESPONSES, COMPACT = "/v1/responses", "/v1/responses/compact"
CALL = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"}
HISTORY: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "remember 42"},
    CALL,
    {"type": "function_call_output", "call_id": "c", "output": "noon"},
]
TRIGGER = {"type": "compaction_trigger"}
TOOLS = [{"type": "function", "name": "clock", "parameters": {"type": "object"}}]
AS_CODEX: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto", "store": False, "max_output_tokens": 8}
ANN, BOB = {"x-api-key": "ann"}, {"x-api-key": "bob"}


@pytest.fixture(scope="module")
def storing() -> Iterator[LiveServer]:
    with serve("--engine", "echo", *BY_KEY, "-o", "option.responses_store=memory") as server:
        yield server


def ask(server: LiveServer, input: Any, path: str = RESPONSES, key: dict[str, str] = ANN, **more: Any) -> Any:
    body = {"model": "model", "input": input, "max_output_tokens": 24, **more}
    response = server.post({name: value for name, value in body.items() if value is not None}, path, headers=key)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(server: LiveServer, input: Any, path: str = RESPONSES, key: dict[str, str] = ANN, **more: Any) -> str:
    response = server.post({"model": "model", "input": input, **more}, path, headers=key)
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


def lines_of(server: LiveServer, body: Any) -> list[str]:
    text = server.post(body, RESPONSES, headers=ANN).text
    return [line for line in text.splitlines() if line.startswith("data: {")]


def text_of(response: Any) -> str:
    text: str = response["output"][0]["content"][0]["text"]
    return text


def test_the_trigger_is_responded_to_with_a_summary_alone(echo_server: LiveServer) -> None:
    response = ask(echo_server, [*HISTORY, TRIGGER], **AS_CODEX)
    [item] = response["output"]
    assert (response["status"], item["type"], item["id"][:4]) == ("completed", "compaction", "cmp_")
    assert response["usage"]["output_tokens"] == 8
    assert "remember" not in item["encrypted_content"]


def test_the_summary_stands_for_what_it_replaced(echo_server: LiveServer) -> None:
    [item] = ask(echo_server, [*HISTORY, TRIGGER])["output"]
    response = ask(echo_server, [HISTORY[1], item, {"role": "user", "content": "go on"}], max_output_tokens=60)
    prompt = text_of(response)
    summary = "Summary of the earlier conversation, which it replaces:"
    assert prompt.index("remember 42") < prompt.index(summary) < prompt.index("Be brief.") < prompt.index("go on")


def test_a_streamed_summary_comes_whole_at_its_end(echo_server: LiveServer) -> None:
    body = {"model": "model", "input": [*HISTORY, TRIGGER], "stream": True, **AS_CODEX}
    events = [json.loads(line[6:]) for line in lines_of(echo_server, body)]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "compaction.compacting", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == [*range(6)]
    added, compacting, done, completed = events[2:]
    assert added["item"] == {"id": compacting["item_id"], "type": "compaction", "encrypted_content": ""}
    assert completed["response"]["output"] == [done["item"]]
    assert done["item"]["id"] == added["item"]["id"]
    assert ask(echo_server, [done["item"], HISTORY[1]])["output"]


def test_what_would_shape_an_ordinary_response_does_not_shape_the_summary(echo_server: LiveServer) -> None:
    format = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    more: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "text": {"format": format}}
    assert ask(echo_server, [*HISTORY, TRIGGER], **more)["output"][0]["type"] == "compaction"


@pytest.mark.parametrize(
    ("input", "message"),
    [
        ([TRIGGER, *HISTORY], "input[0]: 'input' has nothing to summarize"),
        ([HISTORY[0], TRIGGER], "'input' has nothing to summarize"),
        ([*HISTORY, TRIGGER, HISTORY[1]], "input[5]: compaction_trigger must be the last item"),
        ([{"type": "compaction", "encrypted_content": "gAAAAABk"}], "input[0].encrypted_content: cannot be read"),
        ([{"type": "compaction"}], "input[0].encrypted_content: cannot be read"),
        ([{"type": "compaction", "encrypted_content": 5}], "input[0].encrypted_content: cannot be read"),
    ],
)
def test_what_cannot_be_compacted_or_read_is_refused(echo_server: LiveServer, input: Any, message: str) -> None:
    assert message.removeprefix("input[0]: ") in refusal(echo_server, input)


def test_a_summary_is_read_only_for_the_key_that_asked_for_it(storing: LiveServer) -> None:
    [item] = ask(storing, [*HISTORY, TRIGGER])["output"]
    assert "for another API key" in refusal(storing, [item, HISTORY[1]], key=BOB)
    changed = {**item, "encrypted_content": item["encrypted_content"][:-4] + "AAAA"}
    assert "cannot be read" in refusal(storing, [changed, HISTORY[1]])


def test_servers_with_one_key_file_read_each_other_s_summaries(tmp_path: Path, echo_server: LiveServer) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    arguments = ("--engine", "echo", *BY_KEY, *options(f"option.compaction_key_file={key}"))
    with serve(*arguments) as first:
        [item] = ask(first, [*HISTORY, TRIGGER])["output"]
    with serve(*arguments) as second:
        assert ask(second, [item, HISTORY[1]])["output"]
    assert "option.compaction_key_file" in refusal(echo_server, [item, HISTORY[1]])
    key.write_text("short")
    assert "at least 32 bytes" in refused_start(*arguments)


def test_compact_returns_the_items_of_the_next_request(echo_server: LiveServer) -> None:
    response = ask(echo_server, HISTORY, COMPACT)
    assert response["object"] == "response.compaction"
    message, item = response["output"]
    assert (message["role"], message["content"]) == ("user", [{"type": "input_text", "text": "remember 42"}])
    assert (message["id"][:4], item["type"]) == ("msg_", "compaction")
    assert response["usage"]["input_tokens"] > 0
    assert ask(echo_server, [*response["output"], {"role": "user", "content": "go on"}])["output"]
    assert "stream: is not supported" in refusal(echo_server, HISTORY, COMPACT, stream=True)
    assert "must be a non-empty" in refusal(echo_server, 5, COMPACT)


def test_a_stored_conversation_goes_on_after_its_compaction(storing: LiveServer) -> None:
    first = ask(storing, HISTORY)
    compacted = ask(storing, [{"role": "user", "content": "and 43"}, TRIGGER], previous_response_id=first["id"])
    assert compacted["output"][0]["type"] == "compaction"
    response = ask(storing, "go on", previous_response_id=compacted["id"], max_output_tokens=70)
    prompt = text_of(response)
    before, summary = prompt.split("Summary of the earlier")[:2]
    assert "and 43" in before
    assert "remember 42" in summary, "the earlier messages of the user are not read besides the summary"
    assert "remember 42" not in before
    assert "tool_response" not in before
    window = ask(storing, None, COMPACT, previous_response_id=first["id"])
    assert [item["type"] for item in window["output"]] == ["message", "compaction"]
    listed = http.get(f"{storing.url}{RESPONSES}/{compacted['id']}/input_items", headers=ANN).json()["data"]
    assert [item["type"] for item in listed] == ["compaction_trigger", "message"]


def test_tokens_of_a_summary_are_counted(echo_server: LiveServer) -> None:
    [item] = ask(echo_server, [*HISTORY, TRIGGER])["output"]
    counts = [
        ask(echo_server, input, f"{RESPONSES}/input_tokens")["input_tokens"]
        for input in ([HISTORY[1]], [HISTORY[1], item], [*HISTORY, TRIGGER])
    ]
    assert counts[0] + 24 < counts[1]
    assert counts[0] + 50 < counts[2]
