"""Conversations over HTTP: their routes and owners, responses in them, and the turn that a response takes in one."""

from __future__ import annotations

import contextlib
import gzip
import json
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.serving import stored_responses
from tests.app.server import BY_KEY, serve
from tests.servers import LiveServer, wait_for
from tests.servers import serve as serve_process

PATH, RESPONSES = "/v1/conversations", "/v1/responses"
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
ANN, BOB = {"authorization": "Bearer ann"}, {"x-api-key": "bob"}
STORE = ("--engine", "echo", *BY_KEY, "-o", "option.responses_store=memory")


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
    told: dict[str, Any] = {"role": "assistant", "type": "message", "status": "completed"}
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
    whole = ask(server, [user("two"), item, user("three")], store=False, max_output_tokens=400).json()
    assert (text(later), later["usage"]) == (text(whole), whole["usage"])


def test_a_conversation_is_summarized_at_a_threshold(server: LiveServer) -> None:
    id = create(server, user("one"), {"role": "assistant", "content": "one " * 1200})
    managed: dict[str, Any] = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
    found = ask(server, "two", conversation=id, max_output_tokens=8, **managed).json()
    assert [item["type"] for item in found["output"]] == ["compaction", "message"]
    types = ["message", "message", "message", "compaction", "message"]
    assert [item["type"] for item in items(server, id)] == types
    assert ask(server, "three", conversation=id, max_output_tokens=8).status_code == 200


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
    calls: list[tuple[str, str, Any]] = [
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
        ({"items": [{"role": "user", "content": [IMAGE]}]}, 400, "items[0].content[0].image_url: it is not"),
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
    assert "continue it with 'conversation'" in error(found)[1]


# -- the turn of a response in its conversation ------------------------------------------------------------------------


SLOW = ("--engine", "echo", *BY_KEY, "-o", "option.echo_tokens_per_second=20", "-o", "option.echo_cues=true")
LOCKED = "Another process is currently operating on this conversation. Please retry in a few seconds."


@pytest.fixture(scope="module")
def slow() -> Iterator[LiveServer]:
    with serve(*SLOW, "-o", "option.responses_store=memory") as server:
        yield server


@contextlib.contextmanager
def answering(server: LiveServer, id: str, **more: Any) -> Iterator[Iterator[str]]:
    """A stream in a conversation, which has begun and lasts for long."""
    body = {"input": "one two", "conversation": id, "stream": True, "max_output_tokens": 4000, **more}
    with httpx.stream("POST", server.url + RESPONSES, json=body, headers=ANN, timeout=60) as response:
        lines = response.iter_lines()
        assert response.status_code == 200, response.read()
        assert "response.created" in next(lines)
        yield lines


def is_locked(server: LiveServer, id: str) -> bool:
    """Whether another response is refused. The request for one ends before it is appended."""
    found = ask(server, [{"role": "user", "content": 7}], conversation=id)
    assert found.status_code in (400, 409), found.text
    return found.status_code == 409


def test_one_response_at_a_time(slow: LiveServer) -> None:
    id, other = create(slow), create(slow)
    with answering(slow, id):
        others: list[dict[str, Any]] = [{}, {"stream": True}, {"store": False}]
        for more in others:
            refused = ask(slow, "b", conversation=id, **more)
            assert error(refused) == (409, LOCKED, None, "conversation_locked")
            assert 1000 <= int(refused.headers["retry-after-ms"]) <= 1000 * int(refused.headers["retry-after"]) <= 4000
        assert ask(slow, "b", conversation=other, max_output_tokens=1).status_code == 200
        counted = slow.post({"input": "b", "conversation": id}, f"{RESPONSES}/input_tokens", headers=ANN)
        assert counted.status_code == 200, "a count needs no turn"
        assert add(slow, id, user("meanwhile")).status_code == 200
    wait_for(lambda: not is_locked(slow, id), 10, "the turn of a client that has gone")
    assert said(items(slow, id)) == ["meanwhile"]
    assert ask(slow, "c", conversation=id, max_output_tokens=1).status_code == 200


def test_what_is_added_meanwhile_stands_before_the_block_of_a_response(slow: LiveServer) -> None:
    id = create(slow)
    with answering(slow, id, max_output_tokens=30) as lines:
        assert add(slow, id, user("meanwhile")).status_code == 200
        answer = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
    assert said(items(slow, id)) == ["meanwhile", "one two", text(answer["response"])]


def test_a_conversation_that_is_deleted_while_it_answers(slow: LiveServer) -> None:
    id = create(slow, user("zero"))
    with answering(slow, id, max_output_tokens=30) as lines:
        assert call(slow, "DELETE", f"/{id}").status_code == 200
        last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
    assert (last["type"], last["response"]["conversation"]) == ("response.incomplete", {"id": id})
    assert call(slow, "GET", f"/{id}").status_code == 404
    assert error(ask(slow, "a", conversation=id))[0] == 404


@pytest.mark.parametrize("store", ["memory", "directory"])
def test_a_conversation_does_not_expire_while_it_answers(store: str, tmp_path: Path) -> None:
    """The response is longer than the lifetime. Its conversation expires after it."""
    place = ("-o", f"option.responses_store={store if store == 'memory' else tmp_path}")
    with serve(*SLOW, *place, "-o", "option.responses_expiration=3") as server:
        id = create(server, user("zero"))
        with answering(server, id, max_output_tokens=90) as lines:
            time.sleep(3.5)
            assert call(server, "GET", f"/{id}").status_code == 200
            create(server)  # this deletes what has expired
            last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
        assert said(items(server, id)) == ["zero", "one two", text(last["response"])]
        wait_for(lambda: call(server, "GET", f"/{id}").status_code == 404, 10, "the conversation has not expired")


@pytest.mark.parametrize(
    "more",
    [
        {"input": [{"role": "user", "content": 7}]},
        {"temperature": -1},
        {"input": "<refuse>"},
        {"input": "a <raise> b"},
        {"input": "a <raise> b", "stream": True},
        {"input": "a " * 100_000},
        {"tools": [{"type": "file_search"}]},
        {"input": [{"type": "item_reference", "id": "none"}]},
        {"max_output_tokens": 1, "store": False},
    ],
    ids=["item", "parameter", "engine", "failure", "failed stream", "too long", "tool", "reference", "completed"],
)
def test_a_turn_ends_with_its_response(slow: LiveServer, more: dict[str, Any]) -> None:
    id = create(slow, user("zero"))
    ask(slow, more.pop("input", "a"), conversation=id, **more)
    assert ask(slow, "b", conversation=id, max_output_tokens=1).status_code == 200, "the turn has ended"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the thread that dies
def test_a_turn_ends_with_its_engine() -> None:
    with serve(*STORE, "-o", "option.echo_cues=true") as server:
        id = create(server, user("zero"))
        assert ask(server, "a <die> b", conversation=id).status_code >= 500
        server.wait_ready()
        assert ask(server, "b", conversation=id, max_output_tokens=1).status_code == 200
        assert len(items(server, id)) == 3


def test_clients_of_one_conversation_lose_nothing(server: LiveServer) -> None:
    """Each of many repeats a request that gets 409: its block is whole, and in the conversation once."""
    id = create(server)

    def say(number: int) -> str:
        while (found := ask(server, f"word{number}", conversation=id, max_output_tokens=4)).status_code == 409:
            time.sleep(0.01)
        assert found.status_code == 200, found.text
        return text(found.json())

    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip([f"word{number}" for number in range(24)], pool.map(say, range(24)), strict=True))
    found = said(items(server, id))
    assert len(found) == 48
    assert dict(zip(found[::2], found[1::2], strict=True)) == answers


def state(server: LiveServer, response: str) -> str:
    found: str = httpx.get(f"{server.url}{RESPONSES}/{response}", headers=ANN).json()["status"]
    return found


@pytest.mark.parametrize("how", ["ended", "unstored", "cancelled", "deleted"])
def test_a_background_response_in_a_conversation(slow: LiveServer, how: str) -> None:
    id = create(slow, user("zero"))
    long: dict[str, Any] = {
        "max_output_tokens": 30 if how in ("ended", "unstored") else 4000,
        "store": how != "unstored",
    }
    made = ask(slow, "one two", **{"conversation": id, "background": True, **long}).json()
    assert made["conversation"] == {"id": id}
    wait_for(lambda: state(slow, made["id"]) == "in_progress", 10, "the response has not begun")
    assert is_locked(slow, id)
    path = f"{slow.url}{RESPONSES}/{made['id']}"
    if how == "cancelled":
        assert httpx.post(f"{path}/cancel", headers=ANN).json()["status"] == "cancelled"
    elif how == "deleted":
        assert httpx.delete(path, headers=ANN).status_code == 200
    else:
        wait_for(lambda: state(slow, made["id"]) == "incomplete", 20, "the response has not ended")
        assert said(items(slow, id))[:2] == ["zero", "one two"]
    wait_for(lambda: not is_locked(slow, id), 10, "the turn of a response that has ended")
    assert len(items(slow, id)) == (3 if how in ("ended", "unstored") else 1)


# -- several servers on one store --------------------------------------------------------------------------------------


def test_servers_on_one_store_share_conversations_and_turns(tmp_path: Path) -> None:
    store = ("-o", f"option.responses_store={tmp_path}")
    with serve(*SLOW, *store) as one, serve("--engine", "echo", *BY_KEY, *store) as other:
        id = create(one, user("zero"))
        with answering(one, id, max_output_tokens=40) as lines:
            assert error(ask(other, "b", conversation=id))[3] == "conversation_locked"
            last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
        assert ask(other, "b", conversation=id, max_output_tokens=1).status_code == 200
        found = said(items(other, id))
        assert found[:4] == ["zero", "one two", text(last["response"]), "b"]
        assert found == said(items(one, id))
    with serve("--engine", "echo", *BY_KEY, *store) as again:
        assert said(items(again, id)) == found, "a restart loses nothing"


def test_a_turn_does_not_survive_its_process(tmp_path: Path) -> None:
    store = ("-o", f"option.responses_store={tmp_path}")
    with serve_process(*SLOW, *store) as one, serve("--engine", "echo", *BY_KEY, *store) as other:
        id = create(one, user("zero"))
        with answering(one, id), contextlib.suppress(httpx.HTTPError):
            assert is_locked(other, id)
            one.send_signal(signal.SIGKILL)
            one.wait(10)
            assert not is_locked(other, id)
        assert said(items(other, id)) == ["zero"]
        assert ask(other, "b", conversation=id, max_output_tokens=1).status_code == 200


def test_a_turn_ends_with_its_server(tmp_path: Path) -> None:
    store = ("-o", f"option.responses_store={tmp_path}")
    with (
        serve_process(*SLOW, *store, "-o", "option.drain_timeout=1") as one,
        serve("--engine", "echo", *BY_KEY, *store) as other,
    ):
        id = create(one, user("zero"))
        with answering(one, id), contextlib.suppress(httpx.HTTPError):
            one.send_signal(signal.SIGTERM)
            wait_for(lambda: not is_locked(other, id), 20, "the turn of a server that has been stopped")
        assert said(items(other, id))[0] == "zero"


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_response_that_cannot_be_appended_fails(tmp_path: Path) -> None:
    """What is said to be in the conversation is there: here, a response that finds no room."""
    limits = ("-o", "option.responses_max_bytes=1048576", "-o", f"option.responses_store={tmp_path}")
    with serve("--engine", "echo", *BY_KEY, *limits) as server:
        id = create(server, user("a " * 250_000), user("b " * 250_000))
        refused = ask(server, "c " * 30_000, conversation=id)
        assert error(refused)[0] == 400
        assert "at most 1048576 are stored (option.responses_max_bytes)" in error(refused)[1]
        before = [item["id"] for item in items(server, id)]
        full = add(server, id, user("d " * 30_000))
        assert (full.status_code, "more than an API key may store" in error(full)[1]) == (503, True)
        assert [item["id"] for item in items(server, id)] == before


def test_what_frees_room_needs_none(tmp_path: Path) -> None:
    """Here, the limit is lower than what is stored. Nothing is deleted to make room for a deletion."""
    store = ("--engine", "echo", *BY_KEY, "-o", f"option.responses_store={tmp_path}")
    with serve(*store) as server:
        kept, other = create(server), create(server, user("a"))
        for number in range(3):
            assert add(server, kept, {**user("a " * 300_000), "id": f"msg_{number}"}).status_code == 200
    with serve(*store, "-o", "option.responses_max_bytes=1048576") as server:
        assert call(server, "DELETE", f"/{kept}/items/msg_0").status_code == 200
        assert [item["id"] for item in items(server, kept)] == ["msg_1", "msg_2"]
        assert said(items(server, other)) == ["a"]
        assert call(server, "DELETE", f"/{other}").status_code == 200
        assert call(server, "GET", f"/{kept}").status_code == 200


def test_a_stream_that_cannot_be_appended_fails(tmp_path: Path) -> None:
    """As on a full disk: here, another process holds the file when the response ends."""
    with (
        mock.patch.object(stored_responses, "BUSY_SECONDS", 0.2),
        serve(*SLOW, "-o", f"option.responses_store={tmp_path}") as server,
    ):
        id = create(server, user("zero"))
        for streams in (True, False):
            with contextlib.closing(sqlite3.connect(tmp_path / "responses.sqlite3", isolation_level=None)) as other:
                if streams:
                    with answering(server, id, max_output_tokens=30) as lines:
                        other.execute("BEGIN IMMEDIATE")
                        told = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
                    assert (told["type"], told["response"]["error"]["code"]) == ("response.failed", "server_error")
                else:
                    with ThreadPoolExecutor(1) as pool:
                        asking = pool.submit(ask, server, "one two", conversation=id, max_output_tokens=80)
                        time.sleep(1)  # of the 4 s that it takes; a request that looks would take the turn
                        other.execute("BEGIN IMMEDIATE")
                        assert asking.result(30).status_code == 503
            assert said(items(server, id)) == ["zero"]
            assert not is_locked(server, id)


def test_the_least_recently_used_of_a_key_go_first() -> None:
    with serve(*STORE, "-o", "option.responses_max=3") as server:
        first, second = create(server), create(server)
        response = ask(server, "a", max_output_tokens=1).json()["id"]
        assert add(server, first, user("a")).status_code == 200
        third = create(server)
        assert call(server, "GET", f"/{second}").status_code == 404
        for id in (first, third):
            assert call(server, "GET", f"/{id}").status_code == 200
        assert httpx.get(f"{server.url}{RESPONSES}/{response}", headers=ANN).status_code == 200
        assert call(server, "POST", headers=BOB).status_code == 200
        assert call(server, "GET", f"/{first}").status_code == 200


def test_where_no_conversations_are_stored(echo_server: LiveServer, server: LiveServer) -> None:
    for method, path in (("POST", ""), ("GET", "/conv_0"), ("GET", "/conv_0/items")):
        status, message, _, _ = error(call(echo_server, method, path))
        assert (status, message) == (404, "conversations are not stored on this server (option.responses_store)")
    route = {"x-amzn-sagemaker-custom-attributes": "route=/v1/responses"}
    body = {"input": "a", "conversation": "conv_0"}
    for path, headers in ((RESPONSES, {}), ("/invocations", route)):
        found = echo_server.post(body, path, headers=headers)
        assert (found.status_code, "conversations are not stored" in found.text) == (400, True), found.text
    found = server.post(body, headers={**ANN, **route})
    assert error(found) == (404, "Conversation with id 'conv_0' not found.", "conversation", None)


@pytest.mark.parametrize("coding", ["gzip", ""])
def test_large_items(server: LiveServer, coding: str) -> None:
    body = json.dumps({"items": [user("word " * 300_000)]}).encode()
    headers = {**ANN, "content-type": "application/json", **({"content-encoding": coding} if coding else {})}
    made = call(server, "POST", content=gzip.compress(body) if coding else body, headers=headers)
    assert made.status_code == 200, made.text
    (item,) = items(server, made.json()["id"])
    assert len(item["content"][0]["text"]) == 1_500_000
