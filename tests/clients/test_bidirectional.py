"""AWS's SDK for bidirectional streams, in two versions, before `lmi deploy local` and a container."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from websockets.sync.client import connect

from tests.clients.driver import Driver, Outcome, python_client, skipped_without
from tests.deploy.local.servers import local_process
from tests.servers import LiveServer, options, serve, wait_for

pytestmark = pytest.mark.clients

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}
TEXT = {"data_type": "UTF8", "completion_state": "COMPLETE"}
SETTINGS = ("option.echo_tokens_per_second=500", "option.websockets_max=16")
_READY = re.compile(r"bidirectional streams are at (\S+); .* SSL_CERT_FILE=(\S+)")
_MODELS = "aws_sdk_sagemaker_runtime_http2.models"


def prompt(words: str, tokens: int = 3) -> dict[str, Any]:
    return {"inputs": words, "parameters": {"max_new_tokens": tokens}, "stream": True}


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def part(data: bytes, **members: str) -> dict[str, str]:
    return {"data": base64.b64encode(data).decode(), **members}


class Endpoint(NamedTuple):
    """An emulated endpoint and its container."""

    container: LiveServer
    url: str
    certificate: str


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with serve("--engine", "echo", *options(*SETTINGS)) as container:
        container.wait_ready()
        arguments = ("--container", container.url, "--bidirectional-port", "0")
        with local_process(*arguments, variables=KEYS) as local:
            wait_for(lambda: _READY.search(local.log), 0, "there is no port for bidirectional streams")
            ready = _READY.search(local.log)
            assert ready is not None
            yield Endpoint(container, ready[1], ready[2])


Part = dict[str, str]


class Client:
    """The SDK, whose streams are read to their end.

    Args:
        driver: the script with one version of the SDK.
    """

    def __init__(self, driver: Driver, endpoint: Endpoint) -> None:
        self._driver = driver
        self.endpoint = endpoint

    def call(self, *streams: Sequence[Part], **more: Any) -> Outcome:
        settings = {"certificate": self.endpoint.certificate, "streams": streams, **more}
        return self._driver.call("generate", self.endpoint.url, "", **settings)

    def read(self, *parts: Part, **more: Any) -> Any:
        """The parts of one stream."""
        [stream] = self.read_several(parts, **more)
        return stream

    def read_several(self, *streams: Sequence[Part], **more: Any) -> Any:
        outcome = self.call(*streams, **more)
        assert outcome.error is None, f"{outcome.error}: {outcome.message}"
        return outcome.answer


@pytest.fixture(scope="module", params=["bidirectional", pytest.param("bidirectional-2025", marks=pytest.mark.nightly)])
def client(request: pytest.FixtureRequest, endpoint: Endpoint) -> Client:
    with skipped_without():
        return Client(python_client(request.param, "drive_bidirectional", "async"), endpoint)
    raise AssertionError


CUT = encoded(prompt("a wörld b")).index("ö".encode()) + 1  # inside the character


@pytest.mark.parametrize(
    "parts",
    [
        [part(encoded(prompt("a wörld b")), **TEXT)],
        [part(encoded(prompt("a wörld b")))],
        [
            part(encoded(prompt("a wörld b"))[:CUT], data_type="UTF8", completion_state="PARTIAL"),
            part(encoded(prompt("a wörld b"))[CUT:], **TEXT),
        ],
    ],
    ids=["text", "binary", "partial"],
)
def test_each_event_is_a_part(client: Client, parts: list[dict[str, str]]) -> None:
    received = client.read(*parts, events=3)
    expected = client.endpoint.container.post(prompt("a wörld b")).text.splitlines()
    assert [json.loads(text) for *_, text in received] == [json.loads(line) for line in expected]
    assert {(kind, state) for kind, state, _ in received} == {("UTF8", "COMPLETE")}


def test_responses_by_the_path(client: Client) -> None:
    create = {"type": "response.create", "model": "model", "input": "a", "max_output_tokens": 2}
    received = client.read(part(encoded(create), **TEXT), path="v1/responses", events=10)
    kinds = [json.loads(text)["type"] for *_, text in received]
    assert (kinds[0], kinds[-1], len(kinds)) == ("response.created", "response.incomplete", 10)


def test_streams_at_once_are_not_crossed(client: Client) -> None:
    """Eight streams send five requests each, which bring the lines of the same requests over HTTP."""
    bodies = [[prompt(f"stream{stream} request{number}", 6) for number in range(5)] for stream in range(8)]
    streams = [[part(encoded(body), **TEXT) for body in requests] for requests in bodies]
    received = client.read_several(*streams, events=30)
    texts = [[json.loads(text) for *_, text in parts] for parts in received]
    post = client.endpoint.container.post
    expected = [[json.loads(line) for body in requests for line in post(body).text.splitlines()] for requests in bodies]
    assert texts == expected


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"path": "no/such"}, "ModelError", "404"),
        ({"path": "/v1/responses"}, "InputValidationError", "ModelInvocationPath"),
        ({"query": "no query"}, "InputValidationError", "ModelQueryString"),
        ({"secret": "another"}, "ModelStreamError", "signature of an event"),
    ],
)
def test_a_stream_is_refused(client: Client, more: Any, error: str, text: str) -> None:
    outcome = client.call([part(encoded(prompt("a")), **TEXT)], **more)
    assert outcome.error == f"{_MODELS}.{error}"
    assert text in outcome.message


def test_a_container_without_room_is_a_model_error(client: Client) -> None:
    container = client.endpoint.container
    wait_for(lambda: not container.metric("lmi_websockets"), 0, "streams of other tests go on")
    with contextlib.ExitStack() as sockets:
        for _ in range(16):
            sockets.enter_context(connect(container.url.replace("http", "ws", 1) + "/v1/responses"))
        outcome = client.call([part(encoded(prompt("a")), **TEXT)])
    assert outcome.error == f"{_MODELS}.ModelError"
    assert "Received server error (503) from primary" in outcome.message


def test_the_containers_close_frame_is_an_error(client: Client) -> None:
    outcome = client.call([part(b"\xff", **TEXT)])
    assert outcome.error == f"{_MODELS}.ModelStreamError"


def test_a_refused_request_is_an_event(client: Client) -> None:
    [[_, _, text]] = client.read(part(encoded(prompt("a", -1)), **TEXT), events=1)
    assert json.loads(text)["status"] == 424


def test_a_client_that_vanishes_ends_its_request(client: Client) -> None:
    container = client.endpoint.container
    before = container.log.count("outcome=cancelled")
    with pytest.raises(AssertionError, match="ended with status 3"):
        client.call([part(encoded(prompt("a b", 100_000)), **TEXT)], vanishes=True)
    wait_for(lambda: container.log.count("outcome=cancelled") == before + 1, 0, "the request goes on")
