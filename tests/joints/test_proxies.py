"""The server behind nginx and HAProxy: what passes piece by piece, what passes whole, and what ends early."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.emulator.endpoint import Endpoint
from deploy.emulator.runtime import RuntimeEmulator
from handler.core.framing import dumps
from handler.engines.echo.engine import Echo
from handler.http.protocol import Protocol
from tests.app.server import AppServer, impatient, serve
from tests.deploy.local.servers import Loop, client
from tests.joints.proxies import HAPROXY, NGINX, Proxies, in_front_of
from tests.one_test import in_one_test
from tests.servers import PATIENCE, http, options, post_bytes, wait_for
from tests.user_files import write_model

WORDS = "alpha beta gamma delta"
TOKENS = 4
CHAT = [{"role": "user", "content": WORDS}]
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", {"inputs": WORDS, "parameters": {"max_new_tokens": TOKENS}, "stream": True}),
    ("/generate_stream", {"inputs": WORDS, "parameters": {"max_new_tokens": TOKENS}}),
    ("/v1/completions", {"prompt": WORDS, "max_tokens": TOKENS, "stream": True}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": TOKENS, "stream": True}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": TOKENS, "stream": True}),
    ("/v1/responses", {"input": WORDS, "max_output_tokens": TOKENS, "stream": True}),
    ("/v2/models/model/generate_stream", {"text_input": WORDS, "max_tokens": TOKENS}),
]
LONG = {"inputs": WORDS, "parameters": {"max_new_tokens": 100_000}}
CANCELLED = 'lmi_requests_total{outcome="cancelled"}'
TOKENS_MADE = "lmi_generated_tokens_total"
ALL = [*NGINX, HAPROXY]
STREAMING = [name for name in ALL if name != "nginx, deaf"]
KEEPING = ["nginx, HTTP/1.1", HAPROXY]

HANDLERS = """
import threading
from fastapi.responses import StreamingResponse
import model_hosting_container_standards.sagemaker as standards

may_go_on = threading.Event()


@standards.custom_invocation_handler
async def invocations(request):
    asked = (await request.body()).decode()

    def parts():
        yield "one "
        may_go_on.wait()
        if asked == "break":
            raise RuntimeError("amid")
        yield "two"

    return StreamingResponse(parts(), media_type="text/plain")
"""


class Steps:
    """Lets echo make a token at a time."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)

    def allow(self, count: int = 1) -> None:
        self._allowed.release(count)

    def hold(self, step: Any) -> Any:
        def held(engine: Echo) -> Any:
            self._allowed.acquire()
            return step(engine)

        return held


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    steps = Steps()
    monkeypatch.setattr(Echo, "step", steps.hold(Echo.step))
    yield steps
    steps.allow(1 << 20)


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with serve("--engine", "echo", *options("max_request_size=3000000")) as server:
        yield server


Named = Callable[[str], Proxies]


@pytest.fixture(scope="module")
def named(server: AppServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Named]:
    with in_front_of(server.port, tmp_path_factory.mktemp("proxies")) as named:
        yield named


# -- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
def test_each_token_passes_before_the_next_is_made(
    server: AppServer, named: Named, steps: Steps, name: str, path: str, body: dict[str, Any]
) -> None:
    steps.allow(TOKENS)
    direct = http.post(server.url + path, json=body)
    steps.allow()
    with http.stream("POST", named(name).urls[name] + path, json=body) as found:
        pieces = found.iter_raw()
        data = next(pieces)  # it waits for ever where something keeps it
        for _ in range(TOKENS - 1):
            steps.allow()
            data += next(pieces)
        data += b"".join(pieces)
    assert found.headers["content-type"] == direct.headers["content-type"]
    assert _comparable(data) == _comparable(direct.content)


def test_a_proxy_that_keeps_a_stream_passes_it_whole(server: AppServer, named: Named) -> None:
    name, (path, body) = "nginx, deaf", STREAMS[0]
    assert (
        http.post(named(name).urls[name] + path, json=body).content == http.post(server.url + path, json=body).content
    )


@pytest.mark.parametrize("name", STREAMING)
def test_a_silent_stream_shows_that_it_is_there(steps: Steps, tmp_path: Path, name: str) -> None:
    path, body = STREAMS[2]
    with impatient(keep_alive=0.05) as server, in_front_of(server.port, tmp_path) as named:
        with http.stream("POST", named(name).urls[name] + path, json=body) as found:
            pieces = found.iter_raw()
            data = b""
            while data.count(b":\n\n") < 3:
                data += next(pieces)
            steps.allow(TOKENS)
            data += b"".join(pieces)
        assert data.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("name", STREAMING)
def test_a_reload_of_the_proxy_cuts_no_stream(server: AppServer, named: Named, steps: Steps, name: str) -> None:
    path, body = STREAMS[0]
    proxy = named(name)
    steps.allow(TOKENS)
    direct = http.post(server.url + path, json=body).content
    steps.allow()
    with http.stream("POST", proxy.urls[name] + path, json=body) as found:
        pieces = found.iter_raw()
        data = next(pieces)
        proxy.reload()
        steps.allow(TOKENS)
        data += b"".join(pieces)
    assert data == direct


@pytest.mark.parametrize("name", ["nginx", HAPROXY])
def test_a_client_of_http_1_0_behind_a_proxy_gets_its_stream(server: AppServer, named: Named, name: str) -> None:
    path, body = STREAMS[0]
    request = post_bytes(body, path).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with socket.create_connection(_address(named(name).urls[name]), timeout=PATIENCE) as client:
        client.sendall(request)
        head, _, found = b"".join(iter(lambda: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert found == http.post(server.url + path, json=body).content


@pytest.mark.parametrize("name", STREAMING)
def test_the_stream_of_a_users_handler_passes_part_by_part(
    custom: Named, may_go_on: threading.Event, name: str
) -> None:
    with http.stream("POST", custom(name).urls[name] + "/invocations", content=b"x") as found:
        pieces = found.iter_raw()
        assert next(pieces) == b"one "
        may_go_on.set()
        assert b"".join(pieces) == b"two"


@pytest.mark.parametrize("name", ["nginx, unbuffered", HAPROXY])
def test_the_emulators_event_stream_passes_message_by_message(
    server: AppServer, steps: Steps, tmp_path: Path, name: str
) -> None:
    """SageMaker asks no nginx to keep nothing, and its emulator does not either."""
    body = dumps(STREAMS[0][1])
    with (
        contextlib.closing(Loop()) as loop,
        loop.serving(RuntimeEmulator(Endpoint(server.url)).app()) as emulator,
        in_front_of(_address(emulator)[1], tmp_path) as named,
        contextlib.closing(client(named(name).urls[name])) as runtime,
    ):
        steps.allow()
        answer = runtime.invoke_endpoint_with_response_stream(EndpointName="local", Body=body)
        messages = iter(answer["Body"])
        data = next(messages)["PayloadPart"]["Bytes"]
        assert b"alpha" in data
        steps.allow(TOKENS)
        data += b"".join(message["PayloadPart"]["Bytes"] for message in messages)
    assert len(data.splitlines()) == TOKENS


# -- whole answers -----------------------------------------------------------------------------------------------

WHOLE: list[tuple[str, str, Any, int]] = [
    ("POST", "/invocations", {"inputs": WORDS, "parameters": {"max_new_tokens": 3, "temprature": 1}}, 200),
    ("POST", "/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}, 200),
    ("POST", "/invocations", {"inputs": WORDS, "padding": "x" * 2_500_000, "parameters": {"max_new_tokens": 3}}, 200),
    ("POST", "/invocations", {"inputs": "x" * 3_500_000}, 413),
    ("POST", "/invocations", [b"x" * 500_000] * 7, 413),
    ("POST", "/invocations", {"inputs": 1}, 424),
    ("POST", "/v1/chat/completions", {"messages": []}, 400),
    ("POST", "/v1/messages", {"messages": []}, 400),
    ("POST", "/nowhere", {}, 404),
    ("GET", "/v1/completions", None, 405),
    ("OPTIONS", "/v1/completions", None, 200),
    ("HEAD", "/ping", None, 200),
    ("GET", "/api-doc/openapi.json", None, 200),
]
OWN_HEADERS = ("content-type", "x-request-id", "x-lmi-ignored-parameters", "allow", "cache-control")


@pytest.mark.parametrize("name", ALL)
@in_one_test("case", WHOLE)
def test_answers_and_refusals_pass_as_they_are(server: AppServer, named: Named, name: str, case: Any) -> None:
    method, path, body, status = case
    found, direct = (
        http.request(
            method,
            url + path,
            headers={"x-request-id": "mine", "content-type": "application/json"},
            content=iter(body) if isinstance(body, list) else None if body is None else dumps(body),
        )
        for url in (named(name).urls[name], server.url)
    )
    assert (found.status_code, direct.status_code) == (status, status)
    assert _comparable(found.content) == _comparable(direct.content)
    for header in OWN_HEADERS:
        assert found.headers.get(header) == direct.headers.get(header), header


@pytest.mark.parametrize("name", ["nginx", HAPROXY])
def test_a_name_that_a_proxy_keeps_has_to_be_allowed(named: Named, name: str) -> None:
    found = http.post(named(name).urls[name] + "/public/invocations", json=STREAMS[0][1])
    assert (found.status_code, "--allow-host models.example.com" in found.text) == (403, True)


# -- connections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KEEPING)
def test_a_kept_connection_serves_many_and_its_end_fails_nobody(
    monkeypatch: pytest.MonkeyPatch, server: AppServer, named: Named, name: str
) -> None:
    kept: list[Protocol] = []
    made = Protocol.connection_made

    def count(protocol: Protocol, transport: Any) -> None:
        kept.append(protocol)
        made(protocol, transport)

    def ask() -> int:
        answers = [http.post(url, json=body) for body in (STREAMS[0][1], LONG | {"parameters": {"max_new_tokens": 3}})]
        return sum(answer.status_code == 200 for answer in answers)

    url = named(name).urls[name] + "/invocations"
    named(name).reload()  # without connections of other tests
    monkeypatch.setattr(Protocol, "connection_made", count)
    assert (ask(), ask()) == (2, 2)
    assert len(kept) < 4, "no connection was kept"
    opened = [(protocol, protocol.transport.get_extra_info("socket")) for protocol in kept]
    for protocol, _ in opened:
        protocol.loop.call_soon_threadsafe(protocol.timeout_keep_alive_handler)  # its time is over
    wait_for(lambda: all(connection.fileno() == -1 for _, connection in opened), PATIENCE, "a connection stays")
    assert ask() == 2
    assert len(kept) > len(opened)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_cancels_its_request(slow: AppServer, behind_slow: Named, name: str, stream: bool) -> None:
    tokens, cancelled = slow.metric(TOKENS_MADE), slow.metric(CANCELLED)
    with socket.create_connection(_address(behind_slow(name).urls[name])) as client:
        client.sendall(post_bytes({**LONG, "stream": stream}))
        wait_for(lambda: slow.metric(TOKENS_MADE) > tokens, PATIENCE, "the request has not come")
    wait_for(lambda: slow.metric(CANCELLED) > cancelled, PATIENCE, "the request goes on")


@pytest.mark.parametrize("name", ALL)
def test_a_stream_that_breaks_off_is_not_taken_for_a_whole_one(
    custom: Named, may_go_on: threading.Event, name: str
) -> None:
    if name not in STREAMING:
        may_go_on.set()  # it keeps the first part too
    with http.stream("POST", custom(name).urls[name] + "/invocations", content=b"break") as found:
        pieces = found.iter_raw()
        if name in STREAMING:
            assert next(pieces) == b"one "
            may_go_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            b"".join(pieces)


# -- servers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    with serve("--engine", "echo", *options("option.echo_tokens_per_second=50")) as server:
        yield server


@pytest.fixture(scope="module")
def behind_slow(slow: AppServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Named]:
    with in_front_of(slow.port, tmp_path_factory.mktemp("slow")) as named:
        yield named


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Named]:
    properties = write_model(tmp_path_factory.mktemp("model"), HANDLERS)
    with (
        serve("--engine", "echo", "--properties", str(properties)) as server,
        in_front_of(server.port, tmp_path_factory.mktemp("custom")) as named,
    ):
        yield named


@pytest.fixture
def may_go_on(custom: Named) -> threading.Event:
    event: threading.Event = sys.modules["model"].may_go_on
    event.clear()
    return event


def _address(url: str) -> tuple[str, int]:
    return "127.0.0.1", int(url.rpartition(":")[2])


def _comparable(data: bytes) -> bytes:
    """Without what differs between two answers to a request: times and ids, and a length that nginx gives a body."""
    data = re.sub(rb"the body has [^(]*", b"", data)
    return re.sub(rb'"(\w*id|created|\w+_at)":("[^"]*"|[\d.]+)', rb'"\1":?', data)
