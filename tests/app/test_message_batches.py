"""Anthropic's message batches over HTTP: creation, results, lists, cancel, expiry, bad bodies, and their neighbours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.http import message_batch_routes
from handler.serving.batches import runner
from tests.app.server import BY_KEY, serve
from tests.servers import LiveServer, options, wait_for

ANN, BOB = {"authorization": "Bearer ann"}, {"x-api-key": "bob"}
BATCHES = "/v1/messages/batches"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = options("option.batches_max_lines=8", "option.batches_max_file_bytes=100000", "max_request_size=5000")
    store = options(f"option.batches_store={tmp_path_factory.mktemp('b')}")
    with mock.patch.object(runner, "LOOK_SECONDS", 0.05), serve("--engine", "echo", *BY_KEY, *store, *limits) as server:
        yield server


def call(server: LiveServer, method: str, path: str = "", key: dict[str, str] = ANN, **more: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}{BATCHES}{path}", headers=key, timeout=30, **more)


def request(id: Any, text: str = "one two", **params: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"custom_id": id, "params": {"model": "model", "max_tokens": 8, "messages": [message], **params}}


def create(server: LiveServer, *requests: Any, key: dict[str, str] = ANN) -> Any:
    response = call(server, "POST", key=key, json={"requests": requests})
    assert response.status_code == 200, response.text
    return response.json()


def until_ended(server: LiveServer, id: str) -> Any:
    def batch() -> Any:
        return call(server, "GET", f"/{id}").json()

    wait_for(lambda: batch()["processing_status"] == "ended", 30, "the batch does not end")
    return batch()


def results(server: LiveServer, id: str) -> dict[str, Any]:
    """Return the results by custom_id."""
    response = call(server, "GET", f"/{id}/results")
    assert response.headers["content-type"] == "application/x-jsonl"
    lines = [json.loads(line) for line in response.text.splitlines()]
    by_id = {line["custom_id"]: line["result"] for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def error(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    assert body["type"] == "error"
    return response.status_code, body["error"]["type"], body["error"]["message"]


def test_a_batch_from_its_creation_to_its_deletion(server: LiveServer) -> None:
    batch = create(server, request("a", "one"), request("b", "two", temperature=9), request("c", "three", stream=True))
    id = batch["id"]
    assert id.startswith("msgbatch_")
    assert batch | {"created_at": "", "expires_at": ""} == {
        "id": id,
        "type": "message_batch",
        "processing_status": "in_progress",
        "request_counts": {"processing": 3, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0},
        "created_at": "",
        "expires_at": "",
        "ended_at": None,
        "cancel_initiated_at": None,
        "archived_at": None,
        "results_url": None,
    }
    ended = until_ended(server, id)
    assert ended["request_counts"] == {"processing": 0, "succeeded": 1, "errored": 2, "canceled": 0, "expired": 0}
    assert ended["results_url"] == f"{BATCHES}/{id}/results"
    assert batch["created_at"] <= ended["ended_at"] <= ended["expires_at"]
    by_id = results(server, id)
    assert by_id["a"]["type"] == "succeeded"
    message = by_id["a"]["message"]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert "one" in message["content"][0]["text"]
    for name, word in (("b", "temperature"), ("c", "stream")):
        assert by_id[name]["type"] == "errored"
        assert by_id[name]["error"]["type"] == "error"
        assert by_id[name]["error"]["error"]["type"] == "invalid_request_error"
        assert word in by_id[name]["error"]["error"]["message"]
        assert by_id[name]["error"]["request_id"] is None
    assert call(server, "POST", f"/{id}/cancel", content=b"").json() == ended, "cancelling changes nothing any more"
    assert call(server, "DELETE", f"/{id}").json() == {"id": id, "type": "message_batch_deleted"}
    for method, path in (("GET", f"/{id}"), ("GET", f"/{id}/results"), ("POST", f"/{id}/cancel"), ("DELETE", f"/{id}")):
        assert error(call(server, method, path))[:2] == (404, "not_found_error")


def test_a_request_without_tokens_is_served_as_outside_of_batches(server: LiveServer) -> None:
    """It fills the prefix cache. Anthropic refuses it in batches, whose cache may be gone when they run."""
    wanted = request("a", max_tokens=0)
    batch = create(server, wanted)
    until_ended(server, batch["id"])
    result = results(server, batch["id"])["a"]
    single = server.post(wanted["params"], "/v1/messages", headers=ANN).json()
    assert (result["type"], result["message"]["content"]) == ("succeeded", [])
    for name in ("content", "stop_reason", "usage"):
        assert result["message"][name] == single[name]


def test_a_cancelled_batch_has_a_result_for_each_request(server: LiveServer) -> None:
    slow = {"max_tokens": 4000, "metadata": {}}
    requests = [request(str(index), "word " * 400, **slow) for index in range(8)]
    id = create(server, *requests)["id"]
    cancelled = call(server, "POST", f"/{id}/cancel").json()
    assert cancelled["processing_status"] in ("canceling", "ended")
    assert cancelled["cancel_initiated_at"] is not None
    assert call(server, "POST", f"/{id}/cancel").json()["cancel_initiated_at"] == cancelled["cancel_initiated_at"]
    counts = until_ended(server, id)["request_counts"]
    assert sum(counts.values()) == 8
    types = [result["type"] for result in results(server, id).values()]
    assert len(types) == 8
    assert counts["canceled"] > 0
    assert {kind: types.count(kind) for kind in ("succeeded", "errored", "canceled", "expired")} | {
        "processing": 0
    } == counts


def test_a_batch_that_has_not_ended_is_not_deleted_and_has_no_results(tmp_path: Path) -> None:
    store = options(f"option.batches_store={tmp_path}")

    async def run(self: runner.BatchRunner) -> None:
        await asyncio.Event().wait()

    with mock.patch.object(runner.BatchRunner, "run", run), serve("--engine", "echo", *BY_KEY, *store) as idle:
        id = create(idle, request("a"))["id"]
        assert error(call(idle, "DELETE", f"/{id}"))[:2] == (400, "invalid_request_error")
        assert error(call(idle, "GET", f"/{id}/results"))[:2] == (400, "invalid_request_error")
        assert call(idle, "GET", f"/{id}").json()["request_counts"]["processing"] == 1


def test_lists_go_both_ways_and_show_only_their_own(server: LiveServer) -> None:
    for batch in call(server, "GET", params={"limit": 1000}).json()["data"]:
        until_ended(server, batch["id"])
        call(server, "DELETE", f"/{batch['id']}")
    assert call(server, "GET").json() == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    ids = [create(server, request("a"))["id"] for _ in range(3)][::-1]
    page = call(server, "GET", params={"limit": 2}).json()
    assert [batch["id"] for batch in page["data"]] == ids[:2]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, ids[0], ids[1])
    page = call(server, "GET", params={"limit": 2, "after_id": page["last_id"]}).json()
    assert ([batch["id"] for batch in page["data"]], page["has_more"]) == (ids[2:], False)
    page = call(server, "GET", params={"limit": 1, "before_id": ids[2]}).json()
    assert ([batch["id"] for batch in page["data"]], page["has_more"]) == ([ids[1]], True)
    assert call(server, "GET", key=BOB).json()["data"] == []
    assert error(call(server, "GET", f"/{ids[0]}", key=BOB))[0] == 404
    assert error(call(server, "GET", params={"after_id": "msgbatch_0"}))[0] == 404
    assert error(call(server, "GET", params={"limit": 0}))[:2] == (400, "invalid_request_error")
    for path in ("/v1/batches", "/v1/files"):
        assert httpx.get(server.url + path, headers=ANN).json()["data"] == []
    assert httpx.get(f"{server.url}/v1/batches/{ids[0]}", headers=ANN).status_code == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b"[]", "must be a JSON object"),
        (b"{", "the body"),
        (b"{}", "'requests' must be a list"),
        (b'{"requests": []}', "'requests' must be a list"),
        (b'{"requests": {"a": {}}}', "requests[0].custom_id"),
        (b'{"requests": [0]}', "all its items must be objects"),
        (b'{"requests": [{"custom_id": "a", "params": {}}, 0]}', "all its items must be objects"),
        (b'{"requests": [{"custom_id": "a", "params": {}}', "the body"),
        (b'{"requests": [{"custom_id": "a", "params": {}}]} x', "the body"),
        (b'{"requests": [{"custom_id": "", "params": {}}]}', "requests[0].custom_id: must be a string"),
        (b'{"requests": [{"custom_id": 1, "params": {}}]}', "requests[0].custom_id: must be a string"),
        (b'{"requests": [{"params": {}}]}', "requests[0].custom_id: must be a string"),
        (b'{"requests": [{"custom_id": "a"}]}', "requests[0].params: must be an object"),
        (b'{"requests": [{"custom_id": "a", "params": {}, "betas": []}]}', "requests[0].betas: must be within"),
        (
            b'{"requests": [{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}]}',
            "requests[1].custom_id",
        ),
        (b'{"requests": [{"custom_id": "a", "params": {"x": NaN}}]}', "requests[0]: "),
        (b'{"requests": [{"custom_id": "a", "params": {"x": "\\ud800"}}]}', "requests[0]: "),
        (b'{"requests": [{"custom_id": "a", "params": {"x": ' + b"[" * 600 + b"]" * 600 + b"}}]}", "requests[0]: "),
        (b'{"requests": [' + b'{"custom_id": "a", "params": {}},' * 9 + b"]}", "requests[1].custom_id"),
    ],
)
def test_an_invalid_body_creates_nothing(server: LiveServer, body: bytes, message: str) -> None:
    status, kind, text = error(call(server, "POST", content=body))
    assert (status, kind) == (400, "invalid_request_error")
    assert message in text


@pytest.mark.parametrize("repeats", [False, True])
def test_a_large_request_is_read_as_a_small_one(server: LiveServer, repeats: bool) -> None:
    """A large one is decoded in the queue for large bodies."""
    large = json.dumps(request("a", "one " * 500)).encode()
    if repeats:
        large = large.replace(b"{", b'{"custom_id": "b", ', 1)
    with mock.patch.object(message_batch_routes, "LARGE", 1000):
        made = call(server, "POST", content=b'{"requests": [' + large + b"]}")
    if repeats:
        assert error(made)[:2] == (400, "invalid_request_error")
        assert "requests[0]: " in error(made)[2]
    else:
        assert made.status_code == 200, made.text
        until_ended(server, made.json()["id"])
        assert results(server, made.json()["id"])["a"]["type"] == "succeeded"


def test_limits_are_told_by_their_options(server: LiveServer) -> None:
    many = {"requests": [request(str(index)) for index in range(9)]}
    assert "more than 8 items (option.batches_max_lines)" in error(call(server, "POST", json=many))[2]
    large = error(call(server, "POST", json={"requests": [request("a", "x" * 6000)]}))
    assert large == (413, "request_too_large", "requests[0]: has more than 5000 bytes (max_request_size)")
    whole = error(call(server, "POST", content=b" " * 200_000))
    assert whole[:2] == (413, "request_too_large")
    assert "option.batches_max_file_bytes" in whole[2]


def test_a_server_without_a_store_names_the_option(echo_server: LiveServer) -> None:
    for method, path in (("POST", ""), ("GET", ""), ("GET", "/msgbatch_0"), ("GET", "/msgbatch_0/results")):
        status, kind, message = error(call(echo_server, method, path, json={} if method == "POST" else None))
        assert (status, kind) == (404, "not_found_error")
        assert "option.batches_store" in message
