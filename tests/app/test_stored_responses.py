"""Stored responses over HTTP: conversations by id, owners, the routes of a response, restarts, what is in progress."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.serving import stored_responses
from handler.serving.database import open_database
from tests.app.server import BY_KEY, impatient, serve
from tests.servers import LiveServer, http, options, wait_for

PATH = "/v1/responses"
ANN, BOB = {"authorization": "Bearer ann"}, {"x-api-key": "bob"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve("--engine", "echo", *BY_KEY, "-o", "option.responses_store=memory") as server:
        yield server


def ask(server: LiveServer, given: Any, headers: dict[str, str] = ANN, **more: Any) -> Any:
    found = server.post({"input": given, "max_output_tokens": 64, **more}, PATH, headers=headers)
    return found.json()


def call(server: LiveServer, method: str, path: str, headers: dict[str, str] = ANN) -> httpx.Response:
    return httpx.request(method, f"{server.url}{PATH}/{path}", headers=headers, timeout=30)


def text(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def error(response: Any) -> tuple[str, str | None, str | None]:
    found = response["error"]
    return found["message"], found["param"], found["code"]


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def test_a_conversation_by_id_is_that_of_all_its_items(server: LiveServer) -> None:
    """The echo engine says its prompt: equal answers are to equal prompts. Instructions are each request's own."""
    first = ask(server, "one two", instructions="Be brief.", max_output_tokens=4)
    assert first["store"] is True
    second = ask(server, "three", previous_response_id=first["id"], instructions="Be long.", max_output_tokens=4)
    third = ask(server, [user("four")], previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    whole = ask(
        server, [user("one two"), *first["output"], user("three"), *second["output"], user("four")], store=False
    )
    assert whole["store"] is False
    assert text(third) == text(whole)
    assert third["usage"] == whole["usage"]
    assert "four" in text(third)


def test_a_stream_goes_on_and_is_stored(server: LiveServer) -> None:
    first = ask(server, "one two")
    body = {"input": "three", "previous_response_id": first["id"], "stream": True, "max_output_tokens": 64}
    lines = server.post(body, PATH, headers=ANN).text.splitlines()
    last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))["response"]
    assert call(server, "GET", last["id"]).json() == last
    assert "one" in text(ask(server, "four", previous_response_id=last["id"]))


def test_a_reference_stands_for_its_item(server: LiveServer) -> None:
    first = ask(server, "one two")
    (said,) = first["output"]
    for reference in ({"type": "item_reference", "id": said["id"]}, {"id": said["id"]}):
        by_id = ask(server, [user("one two"), reference, user("three")])
        whole = ask(server, [user("one two"), said, user("three")], store=False)
        assert (text(by_id), by_id["usage"]) == (text(whole), whole["usage"])
    assert [item["id"] for item in call(server, "GET", f"{by_id['id']}/input_items?order=asc").json()["data"]][
        1
    ] == said["id"]


def test_a_count_is_that_of_the_conversation_and_stores_nothing(server: LiveServer) -> None:
    first = ask(server, "one two", max_output_tokens=4)
    going_on = {"input": "three", "previous_response_id": first["id"], "instructions": "Be brief."}
    counted = server.post({**going_on, "stream": True}, f"{PATH}/input_tokens", headers=ANN).json()
    asked = ask(server, going_on.pop("input"), store=False, **going_on)
    assert counted == {"object": "response.input_tokens", "input_tokens": asked["usage"]["input_tokens"]}
    lacks = server.post({"input": "a", "previous_response_id": "resp_0"}, f"{PATH}/input_tokens", headers=ANN)
    assert (lacks.status_code, lacks.json()["error"]["code"]) == (404, "previous_response_not_found")
    assert call(server, "GET", "compact").status_code == 405, "no stored response has this id"


def test_retrieve_list_and_delete(server: LiveServer) -> None:
    made = ask(server, [user("one"), {"role": "assistant", "content": "two"}, user("three")], metadata={"a": "b"})
    assert call(server, "GET", made["id"]).json() == made
    items = call(server, "GET", f"{made['id']}/input_items").json()
    assert (items["object"], items["has_more"]) == ("list", False)
    assert [item["content"][0] for item in items["data"]] == [
        {"type": "input_text", "text": "three"},
        {"type": "output_text", "annotations": [], "text": "two"},
        {"type": "input_text", "text": "one"},
    ]
    assert (items["first_id"], items["last_id"]) == (items["data"][0]["id"], items["data"][2]["id"])
    page = call(server, "GET", f"{made['id']}/input_items?limit=1&after={items['first_id']}").json()
    assert (page["data"], page["has_more"]) == ([items["data"][1]], True)
    assert call(server, "DELETE", made["id"]).json() == {"id": made["id"], "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        found = call(server, method, made["id"] + path)
        assert (found.status_code, *error(found.json())) == (
            404,
            f"Response with id '{made['id']}' not found.",
            None,
            None,
        )
    gone = server.post({"input": "a", "previous_response_id": made["id"]}, PATH, headers=ANN)
    message, param, code = error(gone.json())
    assert (gone.status_code, param, code) == (404, "previous_response_id", "previous_response_not_found")
    assert "no such response is stored" in message


def test_a_response_belongs_to_its_key(server: LiveServer) -> None:
    made = ask(server, "one")
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        for headers in (BOB, {}):
            found = call(server, method, made["id"] + path, headers)
            unknown = call(server, method, "resp_0" + path, headers)
            assert found.status_code == unknown.status_code == 404
            assert found.text.replace(made["id"], "resp_0") == unknown.text
    for body in (
        {"input": "a", "previous_response_id": made["id"]},
        {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]},
    ):
        short = {**body, "max_output_tokens": 4}  # else the echo goes on to the end of its context
        assert server.post(short, PATH, headers=BOB).status_code == 404
        assert server.post(short, PATH, headers={"x-api-key": "ann"}).status_code == 200


def test_where_keys_are_checked_the_right_one_owns(tmp_path: Path) -> None:
    options = ("--api-key", "ann", "--api-key", "bob", "-o", "option.responses_store=memory")
    with serve("--engine", "echo", *BY_KEY, *options) as server:
        made = ask(server, "one")
        assert call(server, "GET", made["id"], {"x-api-key": "wrong", **ANN}).status_code == 200
        assert call(server, "GET", made["id"], BOB).status_code == 404
        assert call(server, "GET", made["id"], {}).status_code == 401
        assert (
            call(server, "DELETE", made["id"], {"authorization": "Bearer ann", "x-api-key": "bob"}).status_code == 404
        )


def test_a_response_is_not_stored_where_it_says_so(server: LiveServer) -> None:
    for no in (False, "no", 0):
        made = ask(server, "one", store=no)
        assert call(server, "GET", made["id"]).status_code == 404
    assert ask(server, "a", store="perhaps")["error"]["param"] == "store"


def test_a_directory_survives_a_restart_in_stored_responses(tmp_path: Path) -> None:
    options = ("--engine", "echo", *BY_KEY, "-o", f"option.responses_store={tmp_path / 'kept'}")
    with serve(*options) as server:
        made = ask(server, "one two")
    with serve(*options) as server:
        assert call(server, "GET", made["id"]).json() == made
        assert "one two" in text(ask(server, "three", previous_response_id=made["id"]))


def _head(lines: Iterator[str]) -> dict[str, Any]:
    """The response in a stream's first event."""
    line = next(line for line in lines if line.startswith("data: "))
    response: dict[str, Any] = json.loads(line.removeprefix("data: "))["response"]
    return response


def test_responses_that_are_in_progress_or_abandoned() -> None:
    options = ("-o", "option.echo_tokens_per_second=20", "-o", "option.responses_store=memory")
    with serve("--engine", "echo", *BY_KEY, *options) as server:
        body = {"input": "a b c d", "stream": True, "max_output_tokens": 4000}
        with httpx.stream("POST", server.url + PATH, json=body, headers=ANN, timeout=30) as sent:
            lines = sent.iter_lines()  # the stream is closed with it
            head = _head(lines)
            assert call(server, "GET", head["id"]).json() == head
            assert head["status"] == "in_progress"
            assert call(server, "GET", head["id"], BOB).status_code == 404
            assert call(server, "DELETE", head["id"]).status_code == 409
            assert call(server, "DELETE", head["id"], BOB).status_code == 404
            message, param, _ = error(ask(server, "b", previous_response_id=head["id"]))
            assert param == "previous_response_id"
            assert "this response is still in progress" in message
            next(lines)
        wait_for(lambda: call(server, "GET", head["id"]).status_code == 404, 10, "it is still there")


def test_a_response_that_failed() -> None:
    settings = options("option.echo_cues=true", "option.responses_store=memory")
    with serve("--engine", "echo", *settings) as server:
        failing = server.post({"input": "a b <raise>", "stream": True, "max_output_tokens": 20}, PATH, headers=ANN)
        failed = json.loads(failing.text.splitlines()[-2].removeprefix("data: "))["response"]
        assert failed["status"] == "failed"
        assert call(server, "GET", failed["id"]).json() == failed
        message, param, _ = error(ask(server, "b", previous_response_id=failed["id"]))
        assert param == "previous_response_id"
        assert "this response failed; continue from the response before it" in message


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "{id}?stream=true", 400, "created with background=true and stream=true"),
        ("GET", "{id}?starting_after=3", 400, "starting_after=\"3\""),
        ("GET", "{id}/input_items?limit=0", 400, "limit=\"0\": must be an integer from 1 to 100"),
        ("GET", "{id}/input_items?limit=101", 400, "limit=\"101\""),
        ("GET", "{id}/input_items?limit=9999999999999999999999", 400, "limit="),
        ("GET", "{id}/input_items?order=up", 400, "order=\"up\": must be asc or desc"),
        ("GET", "{id}/input_items?after=none", 404, "has no such item"),
        ("POST", "{id}/cancel", 400, "created with background=true can be cancelled"),
        ("PUT", "{id}", 405, "not allowed"),
    ],
)  # fmt: skip
def test_wrong_calls(server: LiveServer, method: str, path: str, status: int, words: str) -> None:
    found = call(server, method, path.format(id=ask(server, "one")["id"]))
    assert (found.status_code, words in found.json()["error"]["message"]) == (status, True), found.text


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"input": "a", "previous_response_id": 7}, 400, "previous_response_id=7: must be the id of a response"),
        ({"input": "a", "previous_response_id": "x" * 100_000}, 404, "no such response is stored"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 404, 'input[0].id="x": no item with this id is stored'),
        ({"input": [{"type": "item_reference", "id": 7}]}, 400, "'item_reference' is not supported"),
        (
            {"input": [{"id": f"i{number}"} for number in range(1001)]},
            400,
            "refers to 1001 stored items; the maximum is 1000",
        ),
        ({"input": "a", "conversation": "c"}, 404, "Conversation with id 'c' not found."),
        ({"input": "a", "background": "perhaps"}, 400, "background="),
    ],
)
def test_wrong_bodies_in_stored_responses(server: LiveServer, body: dict[str, Any], status: int, words: str) -> None:
    found = server.post(body, PATH, headers=ANN)
    assert (found.status_code, words in found.json()["error"]["message"]) == (status, True), found.text[:500]


def test_a_body_that_cannot_be_stored_is_refused(server: LiveServer) -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "a", "more": 10**30}]}
    assert "cannot be stored" in ask(server, [item])["error"]["message"]
    assert ask(server, [item], store=False)["status"] in ("completed", "incomplete")


def test_a_body_longer_than_the_store_is_refused() -> None:
    with serve(
        "--engine", "echo", *BY_KEY, "-o", "option.responses_store=memory", "-o", "option.responses_max_bytes=1048576"
    ) as server:
        message, _, _ = error(ask(server, "x" * (1 << 20)))
        assert "at most 1048576 are stored (option.responses_max_bytes)" in message
        found = ask(server, "x" * (1 << 20), store=False)
        assert "are stored" not in str(found.get("error"))


def test_half_a_call_is_left_out_of_what_follows(server: LiveServer) -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    broken = ask(server, '<tool_call>[{"name": "weather", "arguments": {"city": "Par', tools=[tool])
    kinds = [(item["type"], item["status"]) for item in broken["output"]]
    assert ("function_call", "incomplete") in kinds
    assert ask(server, "go on", previous_response_id=broken["id"])["status"] in ("completed", "incomplete")


def test_a_file_that_is_locked_holds_up_nobody_else(tmp_path: Path) -> None:
    options = ("-o", f"option.responses_store={tmp_path}", "-o", "option.responses_expiration=1000")
    with serve("--engine", "echo", *BY_KEY, *options) as server, ThreadPoolExecutor(1) as one:
        made = ask(server, "one")
        assert call(server, "GET", made["id"]).status_code == 200  # it is written
        with contextlib.closing(sqlite3.connect(tmp_path / "responses.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            waits = one.submit(ask, server, "two", previous_response_id=made["id"])
            began = time.monotonic()
            for _ in range(10):
                assert ask(server, "three", max_output_tokens=2, store=False)["status"] == "incomplete"
                assert server.ping() == 200
            seconds = time.monotonic() - began
            assert not waits.done()
            other.execute("ROLLBACK")
        assert waits.result(20)["previous_response_id"] == made["id"]
        assert seconds < 4


THREAD: dict[str, Any] = {"messages": [user("a")], "max_tokens": 4, "thread": {"type": "create"}}


@pytest.fixture
def no_patience() -> Iterator[None]:
    with mock.patch.object(stored_responses, "BUSY_SECONDS", 0.2):
        yield


@pytest.mark.usefixtures("no_patience")
def test_what_is_not_written_is_not_said_to_be_stored(tmp_path: Path) -> None:
    with serve("--engine", "echo", *BY_KEY, "-o", f"option.responses_store={tmp_path}") as server:
        with contextlib.closing(sqlite3.connect(tmp_path / "responses.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            whole = ask(server, "one")
            streamed = server.post({"input": "a", "max_output_tokens": 4, "stream": True}, PATH, headers=ANN).text
            thread = server.post(THREAD, "/v1/messages", headers=ANN)
            thread_streamed = server.post({**THREAD, "stream": True}, "/v1/messages", headers=ANN).text
            other.execute("ROLLBACK")
        last = json.loads([line for line in streamed.splitlines() if line.startswith("data: ")][-1][6:])["response"]
        assert (whole["store"], last["store"]) == (False, False)
        assert call(server, "GET", whole["id"]).status_code == call(server, "GET", last["id"]).status_code == 404
        assert (thread.status_code, thread.json()["error"]["type"]) == (503, "api_error")
        assert "could not be stored in its thread" in thread_streamed
        assert "message_stop" not in thread_streamed
        assert ask(server, "two")["store"] is True


def test_a_key_cannot_take_anothers_room() -> None:
    options = ("-o", "option.responses_max=3", "-o", "option.responses_total_bytes=1048576")
    with serve("--engine", "echo", *BY_KEY, "-o", "option.responses_store=memory", *options) as server:
        bobs = ask(server, "one", BOB)
        for _ in range(5):
            ask(server, "two")
        assert call(server, "GET", bobs["id"], BOB).status_code == 200
        long: dict[str, Any] = {"metadata": {}, "tools": [
            {"type": "function", "name": "f", "description": "x" * 250_000, "parameters": {}}
        ], "tool_choice": "none"}  # fmt: skip
        kept = [ask(server, "a", {"x-api-key": f"key {number}"}, **long).get("store") for number in range(9)]
        assert kept[0] is True
        refused = server.post({"input": "a", **long}, PATH, headers={"x-api-key": "one more"})
        assert (refused.status_code, "responses_total_bytes" in refused.text) == (503, True)
        assert ask(server, "a", {"x-api-key": "one more"}, **long, store=False)["store"] is False
        assert call(server, "GET", bobs["id"], BOB).status_code == 200
        assert ask(server, "two")["store"] is True


def test_ids_of_what_is_stored_cannot_be_guessed(server: LiveServer) -> None:
    """The random numbers of other ids follow from each other."""
    with mock.patch.object(random, "getrandbits", return_value=7):
        made = [ask(server, "one") for _ in range(2)]
        asked = {"messages": [user("one")], "max_tokens": 4, "thread": {"type": "create"}}
        threads = [server.post(asked, "/v1/messages", headers=ANN).json()["id"] for _ in range(2)]
    ids = [one["id"] for one in made] + [one["output"][0]["id"] for one in made] + threads
    ids += [call(server, "GET", f"{one['id']}/input_items").json()["first_id"] for one in made]
    assert len(set(ids)) == len(ids)


def test_where_nothing_is_stored(echo_server: LiveServer) -> None:
    for method, path in (("GET", "resp_1"), ("DELETE", "resp_1"), ("GET", "resp_1/input_items")):
        found = call(echo_server, method, path)
        assert (found.status_code, "option.responses_store" in found.text) == (404, True)
    for more in ({"store": True}, {"previous_response_id": "resp_1"}):
        assert "option.responses_store" in ask(echo_server, "a", **more)["error"]["message"]


def test_the_document_says_what_is_taken(server: LiveServer, echo_server: LiveServer) -> None:
    shapes = [
        httpx.get(f"{one.url}/api-doc/openapi.json").json()["components"]["schemas"]["OpenAiResponsesRequest"]
        for one in (server, echo_server)
    ]
    stored = [shape["properties"]["store"] for shape in shapes]
    assert stored[0] == {"type": ["boolean", "null"]}
    assert stored[1] != stored[0]


def test_only_the_thread_of_the_store_uses_the_database() -> None:
    """However a response ends: two threads would share one transaction."""
    threads = dict[str, str]()

    def opened(*arguments: Any, **more: Any) -> sqlite3.Connection:
        database = open_database(*arguments, **more)
        database.set_trace_callback(lambda statement: threads.update({threading.current_thread().name: statement}))
        return database

    pace = options("option.max_rolling_batch_size=1", "option.echo_tokens_per_second=20", "option.predict_timeout=1")
    store = options("option.responses_store=memory", "option.echo_cues=true", "option.background_timeout=2")
    with mock.patch.object(stored_responses, "open_database", opened), impatient(*pace, *store) as server:
        threads.clear()  # the database is opened on another thread
        conversation = http.post(f"{server.url}/v1/conversations", json={}, headers=ANN).json()["id"]
        long, short = {"input": "a b", "max_output_tokens": 4000}, {"input": "a b", "max_output_tokens": 2}
        with httpx.stream("POST", server.url + PATH, json={**long, "stream": True}, headers=ANN, timeout=30) as held:
            lines = held.iter_lines()  # the stream is closed with it
            next(lines)
            for more in ({}, {"conversation": conversation}):
                refused = server.post({**short, "stream": True, **more}, PATH, headers=ANN)
                assert refused.text.startswith(":\n\n")
                events = [json.loads(line[6:]) for line in refused.text.splitlines() if line.startswith("data: ")]
                kinds = [event["type"].removeprefix("response.") for event in events]
                assert kinds == ["created", "in_progress", "failed"]
                failed = events[-1]["response"]
                assert "waited 1 s for the engine" in failed["error"]["message"]
                assert failed["error"]["code"] == "rate_limit_exceeded"
                assert call(server, "GET", failed["id"]).json() == failed
            assert server.metric('lmi_requests_total{outcome="overloaded"}') == 2
            late = server.post({**short, "background": True, "stream": True}, PATH, headers=ANN)
            assert "option.background_timeout" in late.text
        for more in ({}, {"stream": True}, {"conversation": conversation}, {"background": True, "stream": True}):
            assert '"incomplete"' in server.post({**short, **more}, PATH, headers=ANN).text
        for prompt in ("a <raise>", "a"):
            server.wait_ready()
            thread = {"messages": [user(prompt)], "max_tokens": 3, "thread": {"type": "create"}, "stream": True}
            assert "event: " in server.post(thread, "/v1/messages", headers=ANN).text
        made = server.post({**long, "background": True}, PATH, headers=ANN).json()["id"]
        assert call(server, "POST", f"{made}/cancel").json()["status"] == "cancelled"
        assert call(server, "DELETE", made).json()["deleted"] is True
    assert {*threads} == {"responses"}, threads
