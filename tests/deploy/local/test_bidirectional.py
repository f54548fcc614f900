"""InvokeEndpointWithBidirectionalStream in front of a container: frames, errors, and ends of either side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h2.events
import pytest

from deploy.emulator import bidirectional, container_socket
from deploy.emulator.bidirectional import listening
from deploy.emulator.endpoint import Endpoint, EndpointComponent, Status
from deploy.emulator.relay import BROKEN
from deploy.errors import DeployError
from tests.deploy.doubles.bidirectional import (
    AUTHORIZATION,
    HEADERS,
    KEY,
    PATH,
    SECRET,
    Caller,
    FakeContainer,
    Signing,
    closing,
    echo,
    message,
    part,
    vanish,
)
from tests.deploy.local.servers import Loop
from tests.servers import wait_for

SCRIPTS = {
    "/invocations-bidirectional-stream": echo,
    "/v1/responses": echo,
    "/vanish": vanish,
    "/fails": closing(1011, "engine failed"),
    "/ends": closing(1000, ""),
    "/closed": closing(1013, "full", at_once=True),
}


class Front:
    """The emulator with one container, on a loop of its own."""

    def __init__(self, loop: Loop, directory: Path, host: str = "127.0.0.1", **endpoint: Any) -> None:
        self._loop = loop
        self._stack = contextlib.AsyncExitStack()
        self.container = FakeContainer(SCRIPTS)
        self.url, self.certificate, self.endpoint = loop.run(self._start(directory, host, endpoint))

    async def _start(self, directory: Path, host: str, settings: dict[str, Any]) -> tuple[str, Path, Endpoint]:
        url = await self._stack.enter_async_context(self.container.listening())
        endpoint = Endpoint(**{"container": url, **settings})
        secret = {KEY: SECRET}.get
        streams = listening(endpoint, host, 0, directory, secret)
        return (*await self._stack.enter_async_context(streams), endpoint)

    def call(self) -> Caller:
        return Caller(self.url, self.certificate)

    def close(self) -> None:
        self._loop.run(self._stack.aclose())


@pytest.fixture
def front(loop: Loop, tmp_path: Path) -> Iterator[Front]:
    with contextlib.closing(Front(loop, tmp_path)) as front:
        yield front


@pytest.fixture
def caller(front: Front) -> Iterator[Caller]:
    with contextlib.closing(front.call()) as caller:
        yield caller


def at(path: str, query: str | None = None) -> dict[str, str]:
    headers = {**HEADERS, "x-amzn-sagemaker-model-invocation-path": path}
    return {**headers, "x-amzn-sagemaker-model-query-string": query} if query else headers


def exchange(caller: Caller, *parts: bytes, headers: dict[str, str] = HEADERS) -> Any:
    """What comes back for these parts, after which the client ends its stream."""
    stream, sign = caller.begin(headers), Signing()
    assert caller.response(stream)[0] == 200
    for item in parts:
        caller.send(stream, sign(item))
    caller.end(stream, sign)
    return caller.whole(stream)


def refusal(caller: Caller, headers: dict[str, str], path: str = PATH) -> tuple[int, str, Any]:
    stream = caller.begin(headers, path)
    status, fields = caller.response(stream)
    return status, fields["x-amzn-errortype"], json.loads(b"".join(caller.data(stream)))


# -- frames ---------------------------------------------------------------------------------------------------------


def test_each_part_is_one_frame_both_ways(front: Front, caller: Caller) -> None:
    parts, error = exchange(
        caller,
        part(b"whole"),
        part(b"\xff\x00", None),
        part(b"na\xc3", "UTF8", "PARTIAL"),
        part(b"\xaf", "UTF8", "PARTIAL"),
        part(b"ve", "UTF8", "COMPLETE"),
        part(b"", "BINARY", "COMPLETE"),
    )
    assert [(name.name, data, fin) for name, data, fin in front.container.frames] == [
        ("TEXT", b"whole", True),
        ("BINARY", b"\xff\x00", True),
        ("TEXT", b"na\xc3", False),
        ("CONT", b"\xaf", False),
        ("CONT", b"ve", True),
        ("BINARY", b"", True),
        ("CLOSE", b"\x03\xe8", True),
    ]
    assert parts == [
        (b"whole", "UTF8", "COMPLETE"),
        (b"\xff\x00", "BINARY", "COMPLETE"),
        (b"na\xc3", "UTF8", "PARTIAL"),
        (b"\xaf", "UTF8", "PARTIAL"),
        (b"ve", "UTF8", "COMPLETE"),
        (b"", "BINARY", "COMPLETE"),
    ]
    assert error is None


def test_the_container_gets_path_query_and_request_id(front: Front, caller: Caller) -> None:
    stream, sign = caller.begin(at("v1/responses", "a=b%20c&d="), f"{PATH}?"), Signing()
    status, fields = caller.response(stream)
    caller.end(stream, sign)
    assert caller.whole(stream) == ([], None)
    [request] = front.container.requests
    assert request.path == "/v1/responses?a=b%20c&d="
    assert (status, fields["x-amzn-invoked-production-variant"]) == (200, "AllTraffic")
    assert request.headers["X-Amzn-SageMaker-Request-Id"] == fields["x-amzn-requestid"]
    assert "Sec-WebSocket-Extensions" not in request.headers
    assert "Authorization" not in request.headers


def test_parts_come_back_before_the_next_is_sent(caller: Caller) -> None:
    stream, sign = caller.begin(), Signing()
    caller.response(stream)
    parts = caller.parts(stream)
    for text in (b"one", b"two"):
        caller.send(stream, sign(part(text)))
        assert next(parts).payload == text
    caller.end(stream, sign)
    assert list(parts) == []


def test_three_streams_of_a_connection_are_not_mixed(front: Front, caller: Caller) -> None:
    streams = {caller.begin(): Signing() for _ in range(3)}
    for index in range(8):
        for stream, sign in streams.items():
            caller.send(stream, sign(part(f"{stream}-{index}".encode())))
    for stream, sign in streams.items():
        caller.end(stream, sign)
        parts, error = caller.whole(stream)
        assert error is None
        assert [data.decode() for data, _, _ in parts] == [f"{stream}-{index}" for index in range(8)]
    assert len(front.container.requests) == 3


def test_a_large_part_passes(caller: Caller) -> None:
    data = bytes(range(256)) * 300
    parts, error = exchange(caller, part(data))
    assert error is None
    assert [item[0] for item in parts] == [data]


# -- ends of the container ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("fails", ("1011", "engine failed")),
        ("ends", ("1000", "")),
        ("vanish", ("StreamBroken", BROKEN)),
    ],
)
def test_an_end_by_the_container_is_an_error_of_the_stream(caller: Caller, path: str, error: tuple[str, str]) -> None:
    stream, sign = caller.begin(at(path)), Signing()
    caller.response(stream)
    caller.send(stream, sign(part(b"{}")))
    parts, raised = caller.whole(stream)
    assert parts == []
    assert raised == {"": "ModelStreamError", "ErrorCode": error[0], "Message": error[1]}


def test_a_container_that_closes_with_its_handshake_is_reported(caller: Caller) -> None:
    stream = caller.begin(at("closed"))
    assert caller.response(stream)[0] == 200
    assert caller.whole(stream) == ([], {"": "ModelStreamError", "ErrorCode": "1013", "Message": "full"})


def test_a_container_that_never_closes_is_left(front: Front, caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_socket, "CLOSE_SECONDS", 0.2)
    front.container.mute = True
    assert exchange(caller, part(b"{}")) == ([], None)


def test_a_container_that_is_not_there_is_a_model_error(loop: Loop, tmp_path: Path) -> None:
    with (
        contextlib.closing(Front(loop, tmp_path, container="http://127.0.0.1:9")) as front,
        contextlib.closing(front.call()) as caller,
    ):
        status, code, body = refusal(caller, HEADERS)
    assert (status, code, body["OriginalStatusCode"]) == (424, "ModelError", 0)
    assert "could not be opened" in body["OriginalMessage"]


def test_a_container_that_does_not_accept_is_a_model_error(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def silent() -> asyncio.Server:
        return await asyncio.start_server(leave, "127.0.0.1", 0)

    monkeypatch.setattr(bidirectional, "OPEN_SECONDS", 0.2)
    server = loop.run(silent())
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with contextlib.closing(Front(loop, tmp_path, container=url)) as front, contextlib.closing(front.call()) as caller:
        status, code, body = refusal(caller, HEADERS)
    server.close()
    assert (status, code, body["OriginalStatusCode"]) == (424, "ModelError", 0)
    assert "no response within 0.2 s" in body["OriginalMessage"]


def test_a_refused_path_is_a_model_error(caller: Caller) -> None:
    status, code, body = refusal(caller, at("no/such"))
    assert (status, code) == (424, "ModelError")
    assert (body["OriginalStatusCode"], body["OriginalMessage"]) == (404, "no such path\n")
    assert body["ErrorCode"] == "CLIENT_ERROR_FROM_MODEL"


def test_a_container_that_restarts_serves_the_next_stream(front: Front, caller: Caller) -> None:
    stream, sign = caller.begin(at("vanish")), Signing()
    caller.response(stream)
    caller.send(stream, sign(part(b"{}")))
    assert caller.whole(stream)[1] is not None
    assert exchange(caller, part(b"again")) == ([(b"again", "UTF8", "COMPLETE")], None)


# -- ends of the client ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reset", "vanish"])
def test_the_container_learns_that_the_client_has_gone(front: Front, caller: Caller, how: str) -> None:
    stream, sign = caller.begin(), Signing()
    caller.response(stream)
    caller.send(stream, sign(part(b"{}")))
    next(caller.parts(stream))
    if how == "reset":
        caller.h2.reset_stream(stream)
        caller.flush()
    else:
        caller.close()
    wait_for(front.container.gone.is_set, 20, "the container's socket stays open")


def test_the_end_of_the_emulator_ends_open_streams(front: Front, caller: Caller) -> None:
    stream, sign = caller.begin(), Signing()
    caller.response(stream)
    caller.send(stream, sign(part(b"{}")))
    next(caller.parts(stream))
    front.close()
    caller.wait(h2.events.ConnectionTerminated)
    assert front.container.gone.is_set()


@pytest.mark.parametrize(
    ("event", "code", "text"),
    [
        (Signing("another")(part(b"{}")), "InvalidSignatureException", "does not match"),
        (part(b"{}"), "IncompleteSignature", "no :date"),
        (Signing()(part(b"{}", "TEXT")), "ValidationError", "DataType UTF8 or BINARY"),
        (Signing()(b"no message"), "ValidationError", "event stream is invalid"),
        (b"\0\0\0\1", "ValidationError", "has 1 bytes"),
        (Signing()(message(b"\x01a\x0a")), "ValidationError", "event stream is invalid"),
    ],
)
def test_an_invalid_event_ends_the_stream_by_name(
    front: Front, caller: Caller, event: bytes, code: str, text: str
) -> None:
    stream = caller.begin()
    caller.response(stream)
    caller.send(stream, event)
    parts, error = caller.whole(stream)
    assert parts == []
    assert error is not None
    assert (error[""], error["ErrorCode"]) == ("ModelStreamError", code)
    assert text in error["Message"]
    assert [item[0].name for item in front.container.frames] == ["CLOSE"]


def test_a_stream_that_ends_within_an_event_is_refused(caller: Caller) -> None:
    stream = caller.begin()
    caller.response(stream)
    caller.send(stream, Signing()(part(b"{}"))[:-1], end=True)
    error = caller.whole(stream)[1]
    assert error is not None
    assert "ends within an event" in error["Message"]


# -- refused before the stream --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "code", "text"),
    [
        ({"authorization": ""}, 403, "MissingAuthenticationToken", "Missing"),
        ({"authorization": "Bearer x"}, 403, "IncompleteSignature", "Signature Version 4"),
        ({"authorization": AUTHORIZATION.replace("Credential=", "Key=")}, 403, "IncompleteSignature", "Version 4"),
        ({"authorization": AUTHORIZATION.partition(", Sig")[0]}, 403, "IncompleteSignature", "Version 4"),
        (
            {"authorization": AUTHORIZATION.replace("date,", "date,Credential=a,")},
            403,
            "IncompleteSignature",
            "Version",
        ),
        ({"authorization": AUTHORIZATION.replace("=ab", "=\u0663b")}, 403, "IncompleteSignature", "Version 4"),
        ({"authorization": AUTHORIZATION.replace("/aws4_request", "")}, 403, "InvalidSignatureException", "service"),
        ({"authorization": AUTHORIZATION.replace("/sagemaker/", "/s3/")}, 403, "InvalidSignatureException", "service"),
        ({"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}, 403, "IncompleteSignature", "EVENTS"),
        ({"x-amzn-sagemaker-model-invocation-path": "/v1/responses"}, 400, "InputValidationError", "leading slash"),
        ({"x-amzn-sagemaker-model-invocation-path": "a" * 101}, 400, "InputValidationError", "100 characters"),
        ({"x-amzn-sagemaker-model-query-string": "?a=b"}, 400, "InputValidationError", "ModelQueryString"),
        ({"x-amzn-sagemaker-model-query-string": "a=" + "b" * 2047}, 400, "InputValidationError", "ModelQueryString"),
        ({"x-amzn-sagemaker-target-variant": "other"}, 400, "InputValidationError", "Variant other"),
        ({"origin": "https://example.com"}, 403, "AccessDeniedException", "example.com"),
        ({"sec-fetch-site": "cross-site"}, 403, "AccessDeniedException", "other sites"),
    ],
)
def test_a_request_is_refused_by_name(
    front: Front, caller: Caller, headers: dict[str, str], status: int, code: str, text: str
) -> None:
    found, name, body = refusal(caller, {**HEADERS, **headers})
    assert (found, name) == (status, code)
    assert text in body["Message"]
    assert front.container.requests == []


@pytest.mark.parametrize("path", ["/endpoints/local/invocations", "/", f"{PATH}/x"])
def test_other_operations_are_not_here(caller: Caller, path: str) -> None:
    status, code, _ = refusal(caller, HEADERS, path)
    assert (status, code) == (404, "UnknownOperationException")


def test_another_endpoint_is_not_here(caller: Caller) -> None:
    status, code, body = refusal(caller, HEADERS, PATH.replace("local", "other"))
    assert (status, code, body["ErrorCode"]) == (400, "InputValidationError", "ValidationError")


def test_an_endpoint_that_is_unhealthy_is_unavailable(front: Front, caller: Caller) -> None:
    front.endpoint.status = Status.UNHEALTHY
    assert refusal(caller, HEADERS)[:2] == (503, "ServiceUnavailableError")


def test_components_cannot_be_called(loop: Loop, tmp_path: Path) -> None:
    """The operation has no InferenceComponentName."""
    components = {"base": EndpointComponent()}
    with (
        contextlib.closing(Front(loop, tmp_path, components=components)) as front,
        contextlib.closing(front.call()) as caller,
    ):
        status, code, body = refusal(caller, HEADERS)
    assert (status, code) == (400, "InputValidationError")
    assert "InferenceComponentName" in body["Message"]


# -- where it listens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "https://localhost:"), ("0.0.0.0", "https://localhost:"), ("localhost", "https://localhost:")],
)
def test_it_is_reached_at_its_url(loop: Loop, tmp_path: Path, host: str, url: str) -> None:
    with contextlib.closing(Front(loop, tmp_path, host)) as front:
        assert front.url.startswith(url)
        with contextlib.closing(front.call()) as caller:
            assert exchange(caller, part(b"x")) == ([(b"x", "UTF8", "COMPLETE")], None)


def test_it_is_reached_by_ipv6(loop: Loop, tmp_path: Path) -> None:
    with contextlib.closing(Front(loop, tmp_path, "::1")) as front:
        assert front.url.startswith("https://[::1]:")
        with contextlib.closing(front.call()) as caller:
            assert exchange(caller, part(b"x"))[0] == [(b"x", "UTF8", "COMPLETE")]


def test_a_host_that_names_another_machine_is_refused(caller: Caller) -> None:
    """As a page does that uses DNS rebinding."""
    stream = caller.h2.get_next_available_stream_id()
    fields = {":method": "POST", ":scheme": "https", ":authority": "attacker.example", ":path": PATH, **HEADERS}
    caller.h2.send_headers(stream, list(fields.items()))
    caller.flush()
    assert caller.response(stream)[0] == 403


def test_a_port_that_is_taken_is_refused_by_its_option(loop: Loop, front: Front, tmp_path: Path) -> None:
    port = int(front.url.rpartition(":")[2])

    def no_secret(key_id: str) -> str | None:
        return None

    async def listen() -> None:
        async with listening(front.endpoint, "127.0.0.1", port, tmp_path, no_secret):
            pass

    with pytest.raises(DeployError, match=f"cannot listen on 127.0.0.1:{port}") as raised:
        loop.run(listen())
    assert "--bidirectional-port 0" in raised.value.advice


def test_a_slow_container_is_warned_of(
    front: Front, caller: Caller, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bidirectional, "ACCEPT_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING, "deploy.emulator"):
        assert exchange(caller, part(b"x"))[1] is None
    assert "SageMaker allows 0.25 s" in caplog.text
