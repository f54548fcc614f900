"""The server's quota of memory × the dialects, the host's connections and the store: who is refused, and how."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from handler.serving import admission, request_log
from handler.serving.background import runs
from handler.serving.quota import Quota
from handler.serving.stored_responses import ResponseDatabase
from tests.app.server import AppServer, serve, short_drain
from tests.servers import PATIENCE, http, options, post_bytes, wait_for

MOST = 1 << 22  # bytes
SMALL = 1 << 10
LARGE = MOST // 2  # of a body, which takes three times as much while it comes
CHAT = "/v1/chat/completions"
ROUTES: dict[str, tuple[dict[str, Any], int, str]] = {
    "/invocations": ({"inputs": "a"}, 503, "code"),
    "/generate": ({"inputs": "a", "parameters": {"max_new_tokens": 4}}, 429, "error_type"),
    CHAT: ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}, 429, "error"),
    "/v1/responses": ({"input": "a", "max_output_tokens": 4}, 429, "error"),
    "/v1/messages": ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}, 529, "error"),
    "/v2/models/model/generate": ({"text_input": "a", "max_tokens": 4}, 503, "error"),
}
"""A body, the status of a refusal, and the name that tells it."""


QUOTAS: list[Quota] = []


class Noted(Quota):
    def __init__(self, *most: Any, **more: Any) -> None:
        super().__init__(*most, **more)
        QUOTAS.append(self)


@pytest.fixture(scope="module", params=["", "capture"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    own = [f"option.requests_total_bytes={MOST}", "option.responses_store=memory"]
    if request.param:
        own.append(f"option.capture_requests={tmp_path_factory.mktemp('captured')}")
    with mock.patch.object(admission, "Quota", Noted), serve("--engine", "echo", *options(*own)) as server:
        yield server


def wait_until_taken(least: int, most: int) -> None:
    wait_for(lambda: least <= QUOTAS[-1].taken <= most, PATIENCE, f"{QUOTAS[-1].taken} bytes are taken")


def with_name(body: dict[str, Any], size: int) -> dict[str, Any]:
    """Add a name that nobody knows, of so many bytes."""
    return {**body, "x": "a" * size}


@contextlib.contextmanager
def half_sent(server: AppServer, size: int) -> Iterator[socket.socket]:
    """A request whose body does not come whole: the server has as much of it."""
    request = post_bytes(with_name(ROUTES[CHAT][0], size), CHAT)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(request[:-1])
        wait_until_taken(3 * size, 4 * size)
        yield connection
        connection.sendall(request[-1:])
        assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("route", ROUTES)
def test_requests_without_memory_are_refused_and_small_ones_pass(server: AppServer, route: str) -> None:
    body, status, name = ROUTES[route]
    with half_sent(server, LARGE // 2):
        refused = server.post(with_name(body, LARGE), route)
        assert (refused.status_code, name in refused.json(), "retry-after" in refused.headers) == (status, True, True)
        assert "(option.requests_total_bytes)" in server.log
        assert server.post(with_name(body, SMALL), route).status_code == 200
    assert server.post(with_name(body, LARGE), route).status_code == 200
    wait_until_taken(0, 0)


def test_a_body_larger_than_all_of_the_memory_passes_beside_small_ones(server: AppServer) -> None:
    with half_sent(server, SMALL):
        assert server.post(with_name({"inputs": "a"}, 2 * MOST)).status_code == 200


@contextlib.contextmanager
def answering(server: AppServer, body: bytes, path: str = CHAT) -> Iterator[int]:
    """A request whose stream has begun, and lasts until its client leaves: the bytes that it takes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(post_bytes(body, path))
        found = b""
        while b"data:" not in found:
            found += connection.recv(4096)
        assert found.startswith(b"HTTP/1.1 200")
        yield QUOTAS[-1].taken
    wait_until_taken(0, 0)


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    own = [f"option.requests_total_bytes={MOST}", "option.echo_tokens_per_second=20", "option.max_model_len=2000000"]
    more = options(*own, "option.responses_store=memory", f"option.batches_store={tmp_path_factory.mktemp('batches')}")
    with mock.patch.object(admission, "Quota", Noted), serve("--engine", "echo", *more) as server:
        yield server


STREAM = b'"stream":true,"max_tokens":100000,"messages":[{"role":"user","content":"a%b"}]'
LISTS = b'{"x":[[]' + b",[]" * 60_000 + b"]," + STREAM % b"" + b"}"
"""It needs more than all of the memory, but for the part of small requests."""
MARKS: dict[str, tuple[bytes, int]] = {
    "a field that is ignored": (b'{"x":"' + b"[" * 300_000 + b'",' + STREAM % b"" + b"}", 400_000),
    "a prompt": (b"{" + STREAM % (b" " + b"[" * 300_000) + b"}", 400_000),
    "quoted marks": (b'{"x":"' + b'\\"[' * 100_000 + b'",' + STREAM % b"" + b"}", 400_000),
    "a large body": (b'{"x":"' + b"{" * (1 << 20) + b'",' + STREAM % b"" + b"}", 1_200_000),
    "numbers": (b'{"x":[0' + b",0" * 20_000 + b"]," + STREAM % b"" + b"}", 900_000),
}
"""Bodies whose marks look like many lists, and the most bytes that are kept of each."""


@pytest.mark.parametrize("route", ROUTES)
def test_small_requests_pass_while_a_large_one_is_answered(slow_server: AppServer, route: str) -> None:
    with answering(slow_server, LISTS) as taken:
        assert taken > 3 * MOST // 4
        assert slow_server.post(with_name(ROUTES[route][0], SMALL), route).status_code == 200


def test_small_requests_pass_while_a_large_line_of_a_batch_is_answered(slow_server: AppServer) -> None:
    body = {**json.loads(LISTS), "stream": False}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}).encode()
    files = {"file": ("requests.jsonl", line)}
    file = http.post(f"{slow_server.url}/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
    batch = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    id = slow_server.post(batch, "/v1/batches").json()["id"]
    wait_until_taken(3 * MOST // 4, 4 * MOST)
    assert slow_server.post(with_name(ROUTES[CHAT][0], SMALL), CHAT).status_code == 200
    slow_server.post({}, f"/v1/batches/{id}/cancel")
    wait_until_taken(0, 0)


@pytest.mark.parametrize("name", MARKS)
def test_a_request_keeps_the_memory_of_what_was_decoded(slow_server: AppServer, name: str) -> None:
    body, most = MARKS[name]
    with answering(slow_server, body) as taken:
        assert taken < most
        assert slow_server.post(with_name(ROUTES[CHAT][0], LARGE // 4), CHAT).status_code == 200


def test_stored_responses_that_a_request_continues_take_memory(slow_server: AppServer) -> None:
    stored = {"input": "a" * LARGE, "max_output_tokens": 1}
    id = slow_server.post(stored, "/v1/responses").json()["id"]
    body = {"input": "a", "stream": True, "max_output_tokens": 100_000, "previous_response_id": id}
    with answering(slow_server, json.dumps(body).encode(), "/v1/responses") as taken:
        assert LARGE <= taken < MOST


def test_stored_responses_are_not_read_without_memory_for_them(slow_server: AppServer) -> None:
    stored = {"input": "a" * LARGE, "max_output_tokens": 1}
    id = slow_server.post(stored, "/v1/responses").json()["id"]
    body = {"input": "a", "max_output_tokens": 1, "previous_response_id": id}
    with half_sent(slow_server, LARGE // 2), mock.patch.object(ResponseDatabase, "_items") as read:
        assert slow_server.post(body, "/v1/responses").status_code == 429
        assert not read.called
    assert slow_server.post(body, "/v1/responses").status_code == 200
    wait_until_taken(0, 0)


def test_a_stored_response_that_nobody_reads_takes_memory(server: AppServer) -> None:
    tools = [{"type": "function", "name": "f", "description": "a" * (2 * MOST), "parameters": {}}]
    id = server.post({"input": "a", "tools": tools, "max_output_tokens": 4}, "/v1/responses").json()["id"]
    path = f"{server.url}/v1/responses/{id}"
    wait_until_taken(0, 0)
    statuses = []
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(PATIENCE)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(f"GET /v1/responses/{id} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            statuses.append(connection.recv(12))
        assert {b"HTTP/1.1 200", b"HTTP/1.1 429"} == {*statuses}
    wait_until_taken(0, 0)
    assert http.get(path).status_code == 200


def test_captured_streams_in_progress_need_limited_memory(tmp_path: Path) -> None:
    kept, add = list[int](), request_log.Capture.add

    def noted(capture: request_log.Capture, data: bytes) -> None:
        add(capture, data)
        kept.append(sum(map(len, capture._pieces)))

    def counts() -> list[float]:
        return [capturing.metric(f'lmi_captured_requests_total{{outcome="{name}"}}') for name in ("written", "dropped")]

    body = {"inputs": "a", "stream": True, "parameters": {"max_new_tokens": 1_000}}
    with (
        mock.patch.object(request_log, "MAX_WAITING_BYTES", 20_000),
        mock.patch.object(request_log.Capture, "add", noted),
        serve(
            *("--engine", "echo"),  # at a pace, so that a piece of the stream is much smaller than the limit
            *options(f"option.capture_requests={tmp_path}", "option.echo_tokens_per_second=2000"),
        ) as capturing,
    ):
        assert len(capturing.post(body).content) > 40_000
        wait_for(lambda: counts() == [0, 1], PATIENCE, "the stream was captured")
        assert 10_000 < max(kept) <= 20_000
        for number in range(3):
            assert capturing.post({**body, "parameters": {"max_new_tokens": 100}}).status_code == 200
            wait_for(lambda: counts() == [number + 1, 1], PATIENCE, "the room was not given back")  # noqa: B023


# -- background responses ----------------------------------------------------------------------------------------------


def test_background_responses_are_refused_before_their_memory_is_spent() -> None:
    """What they hold is given back when they have been cancelled, deleted or refused."""
    own = options(f"option.requests_total_bytes={MOST}", "option.responses_store=memory")
    pace = options("option.echo_tokens_per_second=20", "option.max_model_len=2000000")
    body = {"input": "a " * (LARGE // 16), "background": True, "max_output_tokens": 10_000}
    with mock.patch.object(admission, "Quota", Noted), serve("--engine", "echo", *own, *pace) as server:
        url, begun = f"{server.url}/v1/responses", list[str]()
        while (answer := server.post(body, "/v1/responses")).status_code == 200:
            begun.append(answer.json()["id"])
            assert 0 < QUOTAS[-1].taken <= MOST
        assert (answer.status_code, len(begun) >= 2, "retry-after" in answer.headers) == (429, True, True)
        assert "(option.requests_total_bytes)" in answer.json()["error"]["message"]
        small = server.post({**body, "input": "a", "max_output_tokens": 1}, "/v1/responses")
        assert small.status_code == 200, "a part is reserved for small requests"
        for id in begun:
            assert http.post(f"{url}/{id}/cancel").json()["status"] == "cancelled"
        wait_until_taken(0, 0)
        last = server.post(body, "/v1/responses").json()
        assert last["status"] == "queued"
        assert http.delete(f"{url}/{last['id']}").status_code == 200
        wait_until_taken(0, 0)


def test_events_that_wait_to_be_written_take_memory_of_all_requests() -> None:
    """A response whose events cannot be written in time fails before they take more than there is."""
    own = options(f"option.requests_total_bytes={1 << 20}", "option.responses_store=memory")
    more = options("option.max_model_len=2000000", "option.background_max_bytes=100000000")
    body = {"input": "a b", "background": True, "stream": True, "max_output_tokens": 1_000_000}
    with (
        mock.patch.object(admission, "Quota", Noted),
        mock.patch.object(runs, "_FLUSH_SECONDS", 1000.0),
        short_drain(0.5),
        serve("--engine", "echo", *own, *more) as server,
        half_sent(server, 100_000),  # alone, a request may take more
        http.stream("POST", f"{server.url}/v1/responses", json=body) as stream,
    ):
        lines = stream.iter_lines()  # the stream is closed with it
        assert "response.created" in next(lines)
        wait_for(lambda: "need too much memory" in server.log, PATIENCE, "the response goes on")
        assert QUOTAS[-1].taken <= 1 << 20
        wait_for(lambda: server.metric("lmi_active_sequences") == 0, PATIENCE, "the engine goes on")
