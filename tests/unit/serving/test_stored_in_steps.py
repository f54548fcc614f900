"""Stored responses where a host steps the event loop, as DJL Serving does: by `route`, with a client's own key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from handler.djl.batches import Item
from handler.serving.stored_responses import ResponseDatabase, ResponseStore
from tests.stepped import Bench, benches

__all__ = ["benches"]

KEY = {"authorization": "Bearer ann"}


@pytest.fixture
def bench() -> Bench:
    most = 1 << 20
    database = ResponseDatabase(None, lifetime=100, most=100, most_bytes=most, total_bytes=most, most_recalled=most)
    return Bench(store=ResponseStore(database))


def send(bench: Bench, body: Any, route: str = "/v1/responses", headers: dict[str, str] = KEY) -> Any:
    item = Item(json.dumps(body).encode(), {"route": route, **headers})
    pieces: Sequence[Any] = bench.batch.step(1, {0: item})
    (whole,) = bench.finish([*pieces])
    return json.loads(whole)


def test_a_conversation_goes_on_by_its_id(bench: Bench) -> None:
    first = send(bench, {"input": "one two", "max_output_tokens": 2})
    assert first["store"] is True
    second = send(bench, {"input": "three", "max_output_tokens": 2, "previous_response_id": first["id"]})
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_another_key_finds_nothing(bench: Bench) -> None:
    first = send(bench, {"input": "one two", "max_output_tokens": 2})
    again = {"input": "three", "previous_response_id": first["id"]}
    found = send(bench, again, headers={"authorization": "Bearer bob"})
    assert found["error"]["code"] == "previous_response_not_found"


def test_a_thread_goes_on_by_its_id(bench: Bench) -> None:
    asked = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 2}
    first = send(bench, {**asked, "thread": {"type": "create"}}, "/v1/messages")
    more = {"thread": {"type": "continue", "previous_message_id": first["id"]}}
    second = send(bench, {**asked, **more}, "/v1/messages")
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
