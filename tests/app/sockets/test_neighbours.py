"""Many lanes of one WebSocket beside others: another owner has turns, and each capture has its own request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from websockets.sync.client import ClientConnection

from handler.serving.engine_driver import EngineDriver
from proof.replay.exchange import Request
from proof.replay.sources import open_requests
from tests.app.server import serve
from tests.app.sockets.client import open_socket, receive, send
from tests.servers import LiveServer, options, wait_for

INVOKE = "/invocations-bidirectional-stream"
NUM_LANES = 16  # that run at once
PER_LANE = 4


def request(words: str, tokens: int, lane: int | None = None) -> dict[str, Any]:
    body = {"inputs": words, "parameters": {"max_new_tokens": tokens}}
    return body if lane is None else {**body, "stream_id": f"lane{lane}"}


# -- turns of owners ---------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow_server() -> Iterator[LiveServer]:
    """One request runs at a time."""
    settings = ("option.max_rolling_batch_size=1", "option.echo_tokens_per_second=100")
    with serve("--engine", "echo", *options(*settings), env={"LMI_API_KEY": "one,two"}) as server:
        yield server


class Queue:
    """Counts, for each request of the neighbour's, the requests of the lanes that start while it waits.

    Counts begin in the server, as the neighbour may be slow to send.
    """

    def __init__(self) -> None:
        self._submit = EngineDriver.submit
        self._num_started = 0
        self.num_submitted = 0
        self.waits: list[int] = []

    def submit(self, driver: EngineDriver, request: Any, prompt: Any, sink: Any, *more: Any, **named: Any) -> int:
        is_neighbours = len(prompt.ids) == 1  # the word that it sends
        before = self._num_started
        on_start = more[0]

        def started() -> None:
            if is_neighbours:
                self.waits.append(self._num_started - before)
            else:
                self._num_started += 1
            on_start()

        self.num_submitted += not is_neighbours
        return self._submit(driver, request, prompt, sink, started, *more[1:], **named)


def waits(server: LiveServer, key: str) -> list[int]:
    """How many requests of 16 lanes start while each of four requests with this key waits."""
    queue = Queue()
    patch = mock.patch.object(
        EngineDriver, "submit", lambda driver, *given, **named: queue.submit(driver, *given, **named)
    )
    with patch, open_socket(server, INVOKE, additional_headers={"Authorization": "Bearer one"}) as client:
        for _ in range(PER_LANE):
            send(client, *(request("a b c", 5, lane) for lane in range(NUM_LANES)))
        wait_for(lambda: queue.num_submitted >= NUM_LANES, 10, "the lanes do not wait")
        for _ in range(4):
            headers = {"Authorization": f"Bearer {key}"}
            body = request("x", 1)
            assert httpx.post(f"{server.url}/invocations", json=body, headers=headers, timeout=60).status_code == 200
        receive_all(client, NUM_LANES * PER_LANE)
    return queue.waits


def receive_all(client: ClientConnection, number: int) -> list[Any]:
    return [receive(client) for _ in range(number)]


def test_another_owner_waits_for_no_lane_in_the_queue(narrow_server: LiveServer) -> None:
    """Before it come one whose turn it is, and the oldest one if it has waited for long."""
    counts = waits(narrow_server, "two")
    assert len(counts) == 4
    assert max(counts) <= 3


def test_another_client_of_the_same_owner_waits_for_the_lanes_before_it(narrow_server: LiveServer) -> None:
    """What waits in the lanes behind their first requests comes later."""
    counts = waits(narrow_server, "one")
    assert len(counts) == 4
    assert max(counts) <= NUM_LANES


# -- captures ----------------------------------------------------------------------------------------------------------


def test_captures_of_lanes_are_not_crossed(tmp_path: Path) -> None:
    with serve("--engine", "echo", *options(f"option.capture_requests={tmp_path}")) as server:
        with open_socket(server, INVOKE) as client:
            send(client, *(request(f"lane{lane} word", 2, lane) for lane in range(NUM_LANES)))
            responses = receive_all(client, NUM_LANES)
        assert server.post(request("over http", 2)).status_code == 200
    captured = [item for item in open_requests(str(tmp_path)) if isinstance(item, Request)]
    assert len({item.id for item in captured}) == NUM_LANES + 1
    texts = []
    for item in captured:
        body = json.loads(item.body)
        assert "stream_id" not in body  # so that the request can be sent over HTTP
        assert item.response is not None
        assert json.loads(item.response.body)["generated_text"] == f" {body['inputs']}"
        texts.append(body["inputs"])
    assert sorted(texts) == sorted(["over http", *(f"lane{lane} word" for lane in range(NUM_LANES))])
    assert {response["stream_id"]: response["generated_text"] for response in responses} == {
        f"lane{lane}": f" lane{lane} word" for lane in range(NUM_LANES)
    }
