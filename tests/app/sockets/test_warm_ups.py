"""Warm-ups of Responses over a WebSocket: they are refused as the responses are, in the same words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.server import serve
from tests.app.sockets.client import open_socket, send, until
from tests.servers import LiveServer

PATH = "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
REQUEST = {"type": "response.create", "store": False, "input": "one two", "max_output_tokens": 2}
OUTPUT = {"type": "function_call_output", "call_id": "none", "output": "x"}
MANY = "word " * 20_000

REFUSED: list[dict[str, Any]] = [
    {"input": []}, {"input": ""}, {"input": None}, {"input": 5}, {"input": [5]}, {"input": ["a"]}, {"input": [OUTPUT]},
    {"input": [{"type": "compaction_trigger"}]}, {"input": MANY},
    {"model": "other"}, {"tools": 5}, {"tool_choice": "required"}, {"reasoning": 5}, {"metadata": {"a": 5}},
    {"store": 5}, {"temperature": -1}, {"truncation": "auto"}, {"background": True}, {"text": {"format": 5}},
    {"max_output_tokens": "x"}, {"max_output_tokens": 0}, {"max_output_tokens": -1}, {"max_output_tokens": 1 << 40},
    {"previous_response_id": "resp_0"}, {"previous_response_id": 5}, {"stream_id": "?"},
]  # fmt: skip


@pytest.fixture(scope="module", params=["", "memory"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    store = ("-o", f"option.responses_store={request.param}") if request.param else ()
    with serve("--engine", "echo", "-o", "option.max_model_len=2000", *store) as server:
        yield server


def last(server: LiveServer, *requests: Any) -> list[Any]:
    """The last event for each of some requests on a connection."""
    with open_socket(server, PATH) as client:
        events = []
        for request in requests:
            send(client, request)
            events.append(until(client, *ENDS)[-1])
        return events


@pytest.mark.parametrize("fields", REFUSED, ids=lambda fields: str(fields)[:60])
def test_a_warm_up_is_refused_as_its_response_is(server: LiveServer, fields: dict[str, Any]) -> None:
    log = server.log
    request = {**REQUEST, **fields}
    first, warmed, after = last(server, request, {**request, "generate": False}, REQUEST)
    assert first == warmed
    assert (first["type"], first["status"] in (400, 404)) == ("error", True), first
    assert after["type"] == "response.incomplete", "the connection goes on"
    assert "a bug in the server" not in server.log.removeprefix(log)


def test_a_warm_up_in_a_lane_is_refused_in_it(server: LiveServer) -> None:
    (refused,) = last(server, {**REQUEST, "generate": False, "input": [], "stream_id": "a"})
    assert (refused["status"], refused["stream_id"]) == (400, "a")
