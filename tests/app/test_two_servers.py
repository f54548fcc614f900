"""Two servers with one directory: what is deleted or cancelled by one of them is so at once on both."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.app.server import serve
from tests.servers import LiveServer, http, options, wait_for

LONG = {"input": "one", "max_output_tokens": 4000, "background": True}
CANCELLED = {"cancelled", "cancelling", "canceling"}
PACE = options("option.echo_tokens_per_second=20", "option.background_max=64")
TIMES = 4


class Pair(NamedTuple):
    """The server that makes something, and the one that ends it."""

    maker: LiveServer
    other: LiveServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, LiveServer]]:
    root = tmp_path_factory.mktemp("shared")
    stores = options(*(f"option.{name}_store={root / name}" for name in ("responses", "batches")))
    with serve("--engine", "echo", *PACE, *stores) as one, serve("--engine", "echo", *PACE, *stores) as other:
        yield one, other


@pytest.fixture(params=["by the other", "by the same"])
def pair(servers: tuple[LiveServer, LiveServer], request: pytest.FixtureRequest) -> Pair:
    one, other = servers
    return Pair(one, other if request.param == "by the other" else one)


def call(server: LiveServer, method: str, path: str, **more: Any) -> Any:
    found = http.request(method, server.url + path, timeout=30, **more)
    assert found.status_code == 200, (path, found.text)
    return found.json()


def statuses(servers: tuple[LiveServer, LiveServer], path: str) -> set[int]:
    return {http.get(server.url + path, timeout=30).status_code for server in servers}


def response(server: LiveServer, **more: Any) -> str:
    return f"/v1/responses/{call(server, 'POST', '/v1/responses', json={'input': 'a', **more})['id']}"


def streamed(server: LiveServer) -> str:
    """The path of a background response whose stream its client has left."""
    with httpx.stream("POST", f"{server.url}/v1/responses", json={**LONG, "stream": True}, timeout=30) as answer:
        data = next(line for line in answer.iter_lines() if line.startswith("data:"))
        return f"/v1/responses/{json.loads(data[5:])['response']['id']}"


def conversation(server: LiveServer) -> str:
    items = [{"id": "msg_1", "role": "user", "content": "a"}]
    return f"/v1/conversations/{call(server, 'POST', '/v1/conversations', json={'items': items})['id']}"


def uploaded(server: LiveServer, number: int = 1) -> str:
    body = {"prompt": "a", "max_tokens": 400}
    lines = [{"custom_id": str(id), "method": "POST", "url": "/v1/completions", "body": body} for id in range(number)]
    content = "\n".join(map(json.dumps, lines)).encode()
    form = {"files": {"file": ("a.jsonl", content)}, "data": {"purpose": "batch"}}
    id: str = call(server, "POST", "/v1/files", **form)["id"]
    return id


def batch(server: LiveServer) -> str:
    body = {"input_file_id": uploaded(server, 50), "endpoint": "/v1/completions", "completion_window": "24h"}
    return f"/v1/batches/{call(server, 'POST', '/v1/batches', json=body)['id']}"


def message_batch(server: LiveServer) -> str:
    message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400}
    requests = [{"custom_id": str(id), "params": message} for id in range(50)]
    return f"/v1/messages/batches/{call(server, 'POST', '/v1/messages/batches', json={'requests': requests})['id']}"


DELETED: dict[str, Callable[[LiveServer], str]] = {
    "response": lambda server: response(server, max_output_tokens=1),
    "queued": lambda server: response(server, **LONG),
    "background": lambda server: response(server, **LONG),
    "stream": streamed,
    "conversation": conversation,
    "item": lambda server: f"{conversation(server)}/items/msg_1",
    "file": lambda server: f"/v1/files/{uploaded(server)}",
}


@pytest.mark.parametrize("kind", DELETED)
def test_a_deletion_is_seen_at_once(servers: tuple[LiveServer, LiveServer], pair: Pair, kind: str) -> None:
    for turn in range(TIMES):
        path = DELETED[kind](pair.maker)
        if kind in ("background", "stream"):
            time.sleep(0.1 * turn)  # in all phases
        call(pair.other, "DELETE", path)
        assert statuses(servers, path) == {404}
        if kind == "stream":
            assert statuses(servers, f"{path}?stream=true") == {404}


CANCELLABLE: dict[str, Callable[[LiveServer], str]] = {
    "queued": lambda server: response(server, **LONG),
    "background": lambda server: response(server, **LONG),
    "stream": streamed,
    "batch": batch,
    "message batch": message_batch,
}


@pytest.mark.parametrize("kind", CANCELLABLE)
def test_a_cancellation_is_seen_at_once(servers: tuple[LiveServer, LiveServer], pair: Pair, kind: str) -> None:
    for turn in range(TIMES):
        path = CANCELLABLE[kind](pair.maker)
        if kind != "queued":
            time.sleep(0.1 * turn)
        cancelled = status(call(pair.other, "POST", f"{path}/cancel"))
        assert cancelled in CANCELLED
        for _ in range(3):
            assert {status(call(server, "GET", path)) for server in servers} <= {*CANCELLED, "ended"}
        if kind == "message batch":
            wait_for(lambda: status(call(pair.maker, "GET", path)) == "ended", 60, "the batch does not end")  # noqa: B023
            call(pair.other, "DELETE", path)
            assert statuses(servers, path) == statuses(servers, f"{path}/results") == {404}


def status(value: Any) -> Any:
    return value.get("status") or value["processing_status"]
