"""Many lanes of one WebSocket beside others: another owner has turns, and each capture has its own request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection

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


def finished(server: LiveServer) -> list[str]:
    """The ids of the finished requests, in order."""
    return re.findall(r" id=(\S+) outcome=ok", server.log)


def num_queued(server: LiveServer) -> int:
    metrics = httpx.get(f"{server.url}/metrics", headers=authorized("one")).text
    found = re.search(r"^lmi_queued_requests (\d+)", metrics, re.MULTILINE)
    return int(found[1]) if found else -1


def authorized(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def overtaking(server: LiveServer, key: str) -> list[int]:
    """How many requests of 16 lanes finish before each of four that a neighbour with this key sends."""
    counts = []
    with open_socket(server, INVOKE, additional_headers=authorized("one")) as client:
        for _ in range(PER_LANE):
            send(client, *(request("a b c", 5, lane) for lane in range(NUM_LANES)))
        wait_for(lambda: num_queued(server) == NUM_LANES - 1, 10, "the lanes do not wait")
        for number in range(4):
            headers = {**authorized(key), "X-Request-Id": f"neighbour-{number}"}
            before = len(finished(server))
            body = request("x", 1)
            assert httpx.post(f"{server.url}/invocations", json=body, headers=headers, timeout=60).status_code == 200
            wait_for(lambda id=headers["X-Request-Id"]: id in finished(server), 10, "it is not in the log")
            counts.append(finished(server).index(headers["X-Request-Id"]) - before)
        receive_all(client, NUM_LANES * PER_LANE)
    return counts


def receive_all(client: ClientConnection, number: int) -> list[Any]:
    return [receive(client) for _ in range(number)]


def test_another_owner_waits_for_no_lane_in_the_queue(narrow_server: LiveServer) -> None:
    """First ends the request that runs, then the oldest one if it has waited for long, and one whose turn it is."""
    assert max(overtaking(narrow_server, "two")) <= 6


def test_another_client_of_the_same_owner_waits_no_longer_than_the_lanes(narrow_server: LiveServer) -> None:
    """What waits in the lanes behind their first requests comes later."""
    assert max(overtaking(narrow_server, "one")) <= NUM_LANES + 4


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
