"""Anthropic's routes over real sockets: framing, pings, keys, `route=`, Bedrock's body, routes that are not there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.server import impatient, serve
from tests.app.serving.test_between_calls import Stepped
from tests.one_test import in_one_test
from tests.servers import LiveServer, http, options
from tests.stepped import item

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
RESPONSE_COUNT = "/v1/responses/input_tokens"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "a ü"}], "max_tokens": 3}
NAMED = "X-Amzn-SageMaker-Custom-Attributes"


@pytest.fixture(scope="module")
def short() -> Iterator[LiveServer]:
    """A model of 8 tokens, with a key."""
    with serve("--engine", "echo", "--api-key", "k", *options("option.max_model_len=8")) as server:
        server.wait_ready()
        yield server


def names(body: str) -> list[str]:
    """A stream's events by name, each held against its value's type."""
    *events, rest = body.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value["type"])
    return found


def test_a_message_is_whole_or_events(echo_server: LiveServer) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    whole = http.post(f"{echo_server.url}{MESSAGES}?beta=true", json=ASK, headers=headers).json()
    assert whole["content"] == [{"type": "text", "text": " user: a ü"}]
    streamed = http.post(echo_server.url + MESSAGES, json={**ASK, "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream"
    deltas = ["content_block_delta"] * 3
    assert names(streamed.text) == [
        "message_start", "content_block_start", *deltas, "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


@pytest.mark.parametrize("route", [MESSAGES, COUNT])
def test_invocations_take_them_by_route(echo_server: LiveServer, route: str) -> None:
    direct = http.post(echo_server.url + route, json=ASK).json()
    named = echo_server.post(ASK, headers={NAMED: f"route={route}"}).json()
    assert {**direct, "id": ""} == {**named, "id": ""}


def test_invocations_take_a_response_by_route(echo_server: LiveServer) -> None:
    asked = {"input": "a ü", "max_output_tokens": 3}
    whole = echo_server.post(asked, headers={NAMED: "route=/v1/responses"}).json()
    assert whole["output"][0]["content"][0]["text"] == " user: a ü"
    streamed = http.post(echo_server.url + "/v1/responses", json={**asked, "stream": True})
    assert names(streamed.text)[-1] == "response.incomplete"


@pytest.mark.parametrize(
    ("route", "asked", "last"),
    [
        (MESSAGES, {**ASK, "stream": True}, b'data: {"type":"message_stop"}\n\n'),
        (COUNT, ASK, b'{"input_tokens":4}'),
        ("/v1/responses", {"input": "a", "store": True}, b'"param":"store","code":null}}'),
        (RESPONSE_COUNT, {"input": "a ü"}, b'{"object":"response.input_tokens","input_tokens":4}'),
    ],
)
def test_a_rolling_batch_of_djls_takes_them_by_route(route: str, asked: dict[str, Any], last: bytes) -> None:
    stepped = Stepped(lambda seconds: None)
    try:
        (piece,) = stepped.batch.step(1, {0: item(asked, route=route)})
        assert stepped.until_ended(piece).endswith(last)
    finally:
        stepped.close()


def test_bedrocks_body_is_a_message_anywhere(echo_server: LiveServer) -> None:
    found = echo_server.post({**ASK, "anthropic_version": "bedrock-2023-05-31"}).json()
    assert (found["type"], found["usage"]["output_tokens"]) == ("message", 3)


def test_a_count_is_no_matter_of_the_models_limit(short: LiveServer) -> None:
    key = {"x-api-key": "k"}
    long = {**ASK, "messages": [{"role": "user", "content": "a " * 20}]}
    assert http.post(short.url + COUNT, json=long, headers=key).json() == {"input_tokens": 22}
    found = http.post(short.url + MESSAGES, json=long, headers=key)
    assert found.status_code == 400
    assert found.json()["error"]["message"] == "prompt is too long: 22 tokens > 7 maximum"
    found = http.post(short.url + MESSAGES, json={**ASK, "max_tokens": 100}, headers=key)
    assert found.json()["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_who_has_no_key_is_told_so_in_its_form(short: LiveServer, path: str) -> None:
    found = http.post(short.url + path, json=ASK)
    assert (found.status_code, found.json()["error"]["type"]) == (401, "authentication_error")


@in_one_test(
    ("path", "kind"),
    [
        ("/v1/messages/batches", "not_found_error"),
        ("/v1/complete", "not_found_error"),
        ("/v1/moderations", "invalid_request_error"),
        ("/v1/responses/resp_0/cancel", "invalid_request_error"),
        ("/v1/embeddings/batches", "invalid_request_error"),
    ],
)
def test_routes_that_are_not_served_say_so_in_their_form(echo_server: LiveServer, path: str, kind: str) -> None:
    found = http.post(echo_server.url + path, json={})
    assert found.status_code == 404
    assert found.json()["error"] | {"param": None, "code": None} == {
        "type": kind,
        "message": f"{path} is not served here; /docs lists the routes that are",
        "param": None,
        "code": None,
    }
    assert ("type" in found.json()) is (kind == "not_found_error")


@pytest.mark.parametrize(
    ("path", "words"),
    [("/v1/responses/compact", "no input is summarized"), ("/v1/embeddings", "it is for option.task=text-embedding")],
)
def test_a_path_that_is_not_served_is_not_another_route(echo_server: LiveServer, path: str, words: str) -> None:
    """The first one looks like that of a stored response, which has no POST."""
    found = http.post(echo_server.url + path, json={"input": "a"})
    assert found.status_code == 404
    assert found.json()["error"]["message"].startswith(f"{path} is not served here: {words}")


def test_what_generates_is_not_served_by_a_model_of_another_task() -> None:
    with serve("--engine", "echo", *options("option.task=text-embedding")) as server:
        server.wait_ready()
        found = http.post(f"{server.url}/v1/responses/input_tokens", json={"input": "a"})
    assert found.status_code == 404
    assert "it is for option.task=text-generation" in found.json()["error"]["message"]


def test_a_silent_stream_pings() -> None:
    slow = options("option.echo_tokens_per_second=0.2")  # a busy machine may stand still for seconds
    body = {**ASK, "max_tokens": 2, "stream": True}
    with impatient(*slow) as server, http.stream("POST", server.url + MESSAGES, json=body) as stream:
        found = itertools.dropwhile(lambda line: line != "event: content_block_delta", stream.iter_lines())
        later = [line for line in itertools.takewhile(lambda line: line != "event: ping", found) if "event: " in line]
    assert later == ["event: content_block_delta"], "the client has left before the second token"
