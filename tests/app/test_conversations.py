"""Conversations over HTTP: their routes and owners, responses in them, and the turn that a response takes in one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.server import serve
from tests.servers import LiveServer, wait_for

PATH, RESPONSES = "/v1/conversations", "/v1/responses"
ANN, BOB = {"authorization": "Bearer ann"}, {"x-api-key": "bob"}
STORE = ("--engine", "echo", "-o", "option.responses_store=memory")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve(*STORE, "-o", "option.echo_cues=true") as server:
        yield server


def call(server: LiveServer, method: str, path: str = "", headers: dict[str, str] = ANN, **more: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}{PATH}{path}", headers=headers, timeout=30, **more)


def create(server: LiveServer, *items: Any, **more: Any) -> str:
    found = call(server, "POST", json={"items": [*items], **more})
    assert found.status_code == 200, found.text
    id: str = found.json()["id"]
    return id


def add(server: LiveServer, id: str, *items: Any) -> httpx.Response:
    return call(server, "POST", f"/{id}/items", json={"items": [*items]})


def items(server: LiveServer, id: str, **query: Any) -> list[Any]:
    found = call(server, "GET", f"/{id}/items", params={"order": "asc", "limit": 100, **query})
    assert found.status_code == 200, found.text
    data: list[Any] = found.json()["data"]
    return data


def ask(server: LiveServer, given: Any, headers: dict[str, str] = ANN, **more: Any) -> httpx.Response:
    return server.post({"input": given, "max_output_tokens": 64, **more}, RESPONSES, headers=headers)


def text(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def said(items: list[Any]) -> list[str]:
    return ["".join(part["text"] for part in item["content"]) for item in items]


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def error(found: httpx.Response) -> tuple[int, str, str | None, str | None]:
    value = found.json()["error"]
    return found.status_code, value["message"], value["param"], value["code"]


def test_create_show_update_and_delete(server: LiveServer) -> None:
    made = call(server, "POST", json={"metadata": {"topic": "demo"}}).json()
    assert made == {
        "id": made["id"], "object": "conversation", "created_at": made["created_at"], "metadata": {"topic": "demo"}
    }  # fmt: skip
    assert made["id"].startswith("conv_")
    assert call(server, "GET", f"/{made['id']}").json() == made
    changed = call(server, "POST", f"/{made['id']}", json={"metadata": {"a": "b"}}).json()
    assert changed == {**made, "metadata": {"a": "b"}}
    assert call(server, "GET", f"/{made['id']}").json() == changed
    deleted = call(server, "DELETE", f"/{made['id']}").json()
    assert deleted == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/items"), ("GET", "/items/msg_1")):
        found = call(server, method, f"/{made['id']}{path}")
        assert error(found) == (404, f"Conversation with id '{made['id']}' not found.", None, None)


def test_a_conversation_may_be_created_without_a_body(server: LiveServer) -> None:
    for body in (b"", b"{}"):
        made = call(server, "POST", content=body, headers={**ANN, "content-type": "application/json"}).json()
        assert made["metadata"] == {}
        assert items(server, made["id"]) == []


def test_items_are_stored_with_ids_and_parts(server: LiveServer) -> None:
    id = create(server, user("one"))
    told = {"role": "assistant", "type": "message", "status": "completed"}
    told["content"] = [{"type": "output_text", "text": "two", "annotations": []}]
    added = add(server, id, told, {**user("three"), "id": "msg_mine"}).json()
    assert (added["object"], added["has_more"], len(added["data"])) == ("list", False, 2)
    assert (added["first_id"], added["last_id"]) == (added["data"][0]["id"], "msg_mine")
    found = items(server, id)
    assert found[1:] == added["data"]
    assert found[0] == {
        "id": found[0]["id"], "type": "message", "role": "user", "status": "completed",
        "content": [{"type": "input_text", "text": "one"}],
    }  # fmt: skip
    assert said(found) == ["one", "two", "three"]
    assert call(server, "GET", f"/{id}/items/msg_mine").json() == found[2]
    again = add(server, id, {**user("four"), "id": "msg_mine"})
    assert error(again)[:2] == (
        400,
        "Duplicate item found with id msg_mine. Remove duplicate items from your input and try again.",
    )
    assert items(server, id) == found


def test_pages(server: LiveServer) -> None:
    id = create(server, *(user(str(number)) for number in range(5)))
    ids = [item["id"] for item in items(server, id)]
    first = call(server, "GET", f"/{id}/items?limit=2&include[]=reasoning.encrypted_content").json()
    assert ([item["id"] for item in first["data"]], first["has_more"]) == (ids[:2:-1], True)
    assert (first["first_id"], first["last_id"]) == (ids[4], ids[3])
    last = call(server, "GET", f"/{id}/items?limit=3&after={ids[3]}").json()
    assert ([item["id"] for item in last["data"]], last["has_more"]) == (ids[2::-1], False)
    assert [item["id"] for item in items(server, id, after=ids[1], limit=2)] == ids[2:4]
    conversation = call(server, "DELETE", f"/{id}/items/{ids[2]}").json()
    assert conversation == call(server, "GET", f"/{id}").json()
    assert [item["id"] for item in items(server, id)] == [*ids[:2], *ids[3:]]
    for found in (
        call(server, "GET", f"/{id}/items/{ids[2]}"),
        call(server, "DELETE", f"/{id}/items/{ids[2]}"),
        call(server, "GET", f"/{id}/items?after={ids[2]}"),
    ):
        assert error(found) == (404, f"Item with id '{ids[2]}' not found in conversation '{id}'.", None, None)


def test_a_response_reads_its_conversation_and_is_appended_to_it(server: LiveServer) -> None:
    id = create(server, user("one"))
    first = ask(server, "two", conversation=id, max_output_tokens=3).json()
    assert (first["conversation"], first["status"]) == ({"id": id}, "incomplete")
    second = ask(server, "three", conversation={"id": id}, store=False).json()
    assert second["store"] is False
    everything = [user("one"), user("two"), *first["output"], user("three")]
    whole = ask(server, everything, store=False).json()
    assert (text(second), second["usage"]) == (text(whole), whole["usage"])
    assert said(items(server, id)) == ["one", "two", text(first), "three", text(second)]
    assert items(server, id)[2] == first["output"][0]
    found = httpx.get(f"{server.url}{RESPONSES}/{first['id']}", headers=ANN).json()
    assert found == first
    assert httpx.get(f"{server.url}{RESPONSES}/{second['id']}", headers=ANN).status_code == 404


def test_a_stream_is_appended(server: LiveServer) -> None:
    id = create(server)
    body = {"input": "one two", "conversation": id, "stream": True, "max_output_tokens": 8}
    lines = server.post(body, RESPONSES, headers=ANN).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events[0]["response"]["conversation"] == {"id": id}
    last = events[-1]["response"]
    assert last["conversation"] == {"id": id}
    assert said(items(server, id)) == ["one two", text(last)]


def test_a_failed_response_is_not_appended(server: LiveServer) -> None:
    id = create(server, user("one"))
    body = {"input": "a b <raise>", "conversation": id, "max_output_tokens": 20}
    failing = server.post({**body, "stream": True}, RESPONSES, headers=ANN)
    assert json.loads(failing.text.splitlines()[-2].removeprefix("data: "))["response"]["status"] == "failed"
    assert server.post(body, RESPONSES, headers=ANN).status_code >= 500
    assert said(items(server, id)) == ["one"]
    assert ask(server, "two", conversation=id).status_code == 200, "its turn has ended"


def test_a_count_and_a_compaction_read_a_conversation(server: LiveServer) -> None:
    id = create(server, user("one two"))
    counted = server.post({"input": "three", "conversation": id}, f"{RESPONSES}/input_tokens", headers=ANN).json()
    compacted = server.post({"conversation": id, "max_output_tokens": 8}, f"{RESPONSES}/compact", headers=ANN).json()
    assert [item["type"] for item in compacted["output"]] == ["message", "compaction"]
    assert said(items(server, id)) == ["one two"]
    asked = ask(server, "three", conversation=id).json()
    assert counted["input_tokens"] == asked["usage"]["input_tokens"]


def test_a_compaction_replaces_what_is_before_it(server: LiveServer) -> None:
    id = create(server, user("one"), {"role": "assistant", "content": "secret"})
    trigger = {"type": "compaction_trigger"}
    compacted = ask(server, [user("two"), trigger], conversation=id, max_output_tokens=4).json()
    (item,) = compacted["output"]
    found = items(server, id)
    assert [one["type"] for one in found] == ["message", "message", "message", "compaction"]
    later = ask(server, "three", conversation=id, max_output_tokens=400).json()
    whole = ask(server, [user("one"), user("two"), item, user("three")], store=False, max_output_tokens=400).json()
    assert (text(later), later["usage"]) == (text(whole), whole["usage"])


def test_calls_and_outputs(server: LiveServer) -> None:
    made = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "seven"}
    id = create(server, user("one"), made)
    assert add(server, id, output).status_code == 200
    wrong = add(server, id, user("two"), {**output, "call_id": "call_2"})
    assert error(wrong)[:2] == (400, 'items[1].call_id="call_2": no earlier function_call has this id')
    recorded = {"type": "shell_call", "call_id": "sh_1", "action": {"commands": ["ls"]}}
    assert add(server, id, recorded).status_code == 200
    assert add(server, id, {"type": "shell_call_output", "call_id": "sh_1", "output": "a.txt"}).status_code == 200
    answer = ask(server, "three", conversation=id, max_output_tokens=400).json()
    assert "seven" in text(answer)
    assert "a.txt" in text(answer)
    assert [item["type"] for item in items(server, id)][1:5] == [
        "function_call", "function_call_output", "shell_call", "shell_call_output",
    ]  # fmt: skip


def test_a_reference_finds_an_item_of_a_conversation(server: LiveServer) -> None:
    id = create(server, {**user("one two"), "id": "msg_far"})
    by_id = ask(server, [{"type": "item_reference", "id": "msg_far"}, user("three")]).json()
    whole = ask(server, [user("one two"), user("three")], store=False).json()
    assert text(by_id) == text(whole)
    assert ask(server, [{"type": "item_reference", "id": "msg_far"}], headers=BOB).status_code == 404
    twice = ask(server, [{"type": "item_reference", "id": "msg_far"}], conversation=id)
    assert error(twice)[1].startswith("Duplicate item found with id msg_far.")


def test_a_conversation_belongs_to_its_key(server: LiveServer) -> None:
    id = create(server, {**user("one"), "id": "msg_1"})
    calls = [
        ("GET", "", None), ("POST", "", {"metadata": {}}), ("DELETE", "", None), ("GET", "/items", None),
        ("POST", "/items", {"items": [user("two")]}), ("GET", "/items/msg_1", None), ("DELETE", "/items/msg_1", None),
    ]  # fmt: skip
    for method, path, body in calls:
        for headers in (BOB, {}):
            found = call(server, method, f"/{id}{path}", headers, json=body)
            unknown = call(server, method, f"/conv_0{path}", headers, json=body)
            assert found.status_code == unknown.status_code == 404
            assert found.text.replace(id, "conv_0") == unknown.text
    for path in ("", "/input_tokens"):
        found = server.post({"input": "a", "conversation": id}, RESPONSES + path, headers=BOB)
        assert error(found) == (404, f"Conversation with id '{id}' not found.", "conversation", None)
    assert said(items(server, id)) == ["one"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ([], 400, "the body must be a JSON object"),
        ({"items": {}}, 400, "'items' must be a list"),
        ({"items": [user("a")] * 21}, 400, "'items' has 21 items; the maximum is 20"),
        ({"items": ["a"]}, 400, "items[0] must be an object"),
        ({"items": [user("a"), {"role": "user", "content": [{"type": "x"}]}]}, 400, "items[1].content[0]"),
        ({"items": [{"type": "compaction_trigger"}]}, 400, "items[0]: 'compaction_trigger' is not supported"),
        ({"items": [{"type": "item_reference", "id": "a"}]}, 400, "items[0]: 'item_reference' is not supported"),
        ({"items": [{"type": "compaction", "encrypted_content": "x"}]}, 400, "items[0].encrypted_content"),
        ({"items": [{"type": "strange"}]}, 400, "items[0]: 'strange' is not supported"),
        ({"items": [{**user("a"), "id": 7}]}, 400, "items[0].id=7: must have"),
        ({"items": [{**user("a"), "id": "a/b"}]}, 400, 'items[0].id="a/b": must have'),
        ({"items": [{**user("a"), "id": "b" * 65}]}, 400, "items[0].id="),
        ({"items": [{**user("a"), "id": "b"}] * 2}, 400, "Duplicate item found with id b."),
        ({"metadata": 7}, 400, "metadata=7: must be an object of at most 16 pairs"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "at most 16 pairs"),
        ({"metadata": {"a" * 65: ""}}, 400, "keys of at most 64 characters"),
        ({"metadata": {"a": "b" * 513}}, 400, "string values of at most 512"),
    ],
)
def test_wrong_bodies_for_conversations(server: LiveServer, body: Any, status: int, words: str) -> None:
    found = call(server, "POST", json=body)
    assert (found.status_code, words in found.json()["error"]["message"]) == (status, True), found.text[:500]
    if isinstance(body, dict) and isinstance(body.get("items"), list):
        id = create(server)
        assert words in add(server, id, *body["items"]).json()["error"]["message"]
        assert items(server, id) == []


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"conversation": 7}, 400, "conversation=7: must be the id of a conversation"),
        ({"conversation": ""}, 400, "conversation="),
        ({"conversation": {"id": "conv_0", "more": 1}}, 400, "conversation="),
        ({"conversation": "conv_0"}, 404, "Conversation with id 'conv_0' not found."),
        ({"conversation": "conv_0", "previous_response_id": "resp_0"}, 400, "cannot be combined with"),
    ],
)
def test_wrong_conversations_in_responses(server: LiveServer, fields: dict[str, Any], status: int, words: str) -> None:
    found = ask(server, "a", **fields)
    assert (found.status_code, words in found.json()["error"]["message"]) == (status, True), found.text[:500]


def test_a_response_in_a_conversation_is_not_continued_by_its_id(server: LiveServer) -> None:
    first = ask(server, "one", conversation=create(server)).json()
    found = ask(server, "two", previous_response_id=first["id"])
    assert error(found)[::2] == (400, "previous_response_id")
    assert "continue it by 'conversation'" in error(found)[1]


@contextlib.contextmanager
def answering(server: LiveServer, id: str) -> Iterator[Iterator[str]]:
    """A stream in a conversation that has begun."""
    body = {"input": "a b <hold> c", "conversation": id, "stream": True, "max_output_tokens": 2000}
    with httpx.stream("POST", server.url + RESPONSES, json=body, headers=ANN, timeout=60) as response:
        lines = response.iter_lines()
        assert "response.created" in next(lines)
        yield lines


def is_locked(server: LiveServer, id: str) -> bool:
    found = ask(server, "b", conversation=id, max_output_tokens=1)
    return found.status_code == 409
