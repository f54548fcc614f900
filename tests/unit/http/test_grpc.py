"""Triton's gRPC service on an application of the test: what becomes of its messages, and of a bug."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import pytest
from tritonclient.grpc import service_pb2

from handler.core.errors import ConfigError, InvalidPayload
from handler.http import grpc as triton
from handler.http.exchange import EXCHANGE
from handler.http.grpc import INFER, SERVICE, STREAM, GrpcServer
from handler.http.security import Access
from handler.protocols.triton.grpc import FRAMES, failure, framed
from handler.protocols.triton.infer import HEADER
from tests.one_test import in_one_test

FRAMED = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", FRAMES.encode())]}
JSON = {"type": "http.response.start", "status": 418, "headers": [(b"content-type", b"application/json")]}
FULL = 1 << 16
"""The number of bytes of a stream that may wait to be sent."""


class Context:
    """The context of a call, as grpc.aio passes it to a method."""

    def __init__(self, received: Sequence[bytes] = (), metadata: Sequence[tuple[str, Any]] = ()) -> None:
        self._received = list(received)
        self._metadata = metadata

    async def abort(self, code: grpc.StatusCode, words: str) -> None:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), words)

    async def read(self) -> Any:
        return self._received.pop(0) if self._received else grpc.aio.EOF

    def invocation_metadata(self) -> Any:
        return self._metadata or None


class Client:
    """Calls the methods that a server registers with grpc.aio, without a connection.

    Args:
        handlers: the registered methods, by their paths.
    """

    def __init__(self, handlers: Mapping[str, Any]) -> None:
        self._handlers = handlers

    async def unary(self, name: str, request: Any = None, metadata: Sequence[tuple[str, Any]] = ()) -> Any:
        """Call a method of the service with a message, or with the bytes of one, and return its response."""
        if request is None:
            request = getattr(service_pb2, f"{name}Request")()
        data = request if isinstance(request, bytes) else request.SerializeToString()
        handler = self._handlers[f"/{SERVICE}/{name}"]
        response = await handler.unary_unary(data, Context(metadata=metadata))
        return getattr(service_pb2, f"{name}Response").FromString(handler.response_serializer(response))

    async def check(self) -> Any:
        return await self._handlers["/grpc.health.v1.Health/Check"].stream_unary(None, Context())

    def stream(self, *sent: bytes) -> Any:
        return self._handlers[STREAM].stream_stream(None, Context(sent))

    async def messages(self, *sent: bytes) -> list[bytes]:
        return [message async for message in self.stream(*sent)]


def run(app: Any, story: Callable[[Client], Awaitable[None]], patience: float = 30.0) -> None:
    """Run a story with a client of a server whose application is `app`."""
    registered: dict[str, Any] = {}

    def register(service: str, handlers: Mapping[str, Any]) -> None:
        registered.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def server(options: Any, interceptors: Any) -> Any:
        return SimpleNamespace(add_registered_method_handlers=register)

    async def main() -> None:
        with mock.patch.object(grpc.aio, "server", server):
            GrpcServer(app, Access(), patience=patience, max_bytes=100, max_calls=3)
        await story(Client(registered))

    asyncio.run(asyncio.wait_for(main(), 60))


async def refusal(call: Awaitable[Any]) -> tuple[str, str]:
    """Return the code and the message with which a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code().name, refused.value.details()


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def request(id: str = "7", **fields: Any) -> Any:
    return service_pb2.ModelInferRequest(id=id, model_name="m", **fields)


ASKED = request().SerializeToString()


async def good(scope: Any, receive: Any, send: Any) -> None:
    await send(FRAMED)
    await send(body(framed(service_pb2.ModelStreamInferResponse().SerializeToString())))


async def broken(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("a bug")


def state(status: int, text: bytes = b"") -> tuple[Any, list[Any]]:
    """Return an application with one response, and the list of the methods and paths that it is asked for."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append((scope["method"], scope["path"]))
        await send({**JSON, "status": status})
        await send(body(text))

    asked: list[Any] = []
    return app, asked


# -- words -------------------------------------------------------------------------------------------------------------


@in_one_test(
    ("status", "body", "words"),
    [
        (400, b'{"error": "no such model"}', "no such model"),
        (400, b'{"error": "", "message": "told here"}', "told here"),
        (400, b'{"message": "told here"}', "told here"),
        (400, b'{"other": 1}', '{"other": 1}'),
        (400, b"[1]", "[1]"),
        (502, b"plain \xff", "plain \ufffd"),
        (502, b"", "status 502"),
    ],
)
def test_an_errors_words_are_those_of_its_body(status: int, body: bytes, words: str) -> None:
    async def story(client: Client) -> None:
        for call in (
            client.unary("ModelInfer", request()),
            client.unary("ServerMetadata"),
        ):
            assert await refusal(call) == ("INVALID_ARGUMENT", words)

    run(state(status, body)[0], story)


@in_one_test(
    ("name", "version", "path"),
    [
        ("m", "", "/v2/models/m/versions/1"),
        ("m", "2", "/v2/models/m/versions/2"),
        ("a/b/c", "", "/v2/models/a%2Fb%2Fc/versions/1"),
        ("", "", "/v2/models/ /versions/1"),
    ],
)
def test_a_models_path_is_its_own(name: str, version: str, path: str) -> None:
    app, asked = state(200, b"{}")

    async def story(client: Client) -> None:
        await client.unary("ModelMetadata", service_pb2.ModelMetadataRequest(name=name, version=version))

    run(app, story)
    assert asked == [("GET", path)]


def test_a_calls_metadata_are_headers_but_for_those_of_the_transport() -> None:
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await good(scope, receive, send)

    metadata = (
        ("authorization", "Bearer k"),
        ("origin", "https://evil.example"),
        ("content-length", "9"),
        ("grpc-timeout", "1S"),
        ("content-type", "application/grpc"),
        ("host", "evil.example"),
        ("trace-bin", b"\0"),
        ("x-request-id", "7"),
    )

    async def story(client: Client) -> None:
        await client.unary("ModelInfer", request(), metadata=metadata)
        await client.unary("ModelInfer", request())

    run(app, story)
    scope, bare = scopes
    (host, *sizes), passed = scope["headers"][:3], scope["headers"][3:]
    assert host == (b"host", b"localhost")
    assert [name for name, _ in sizes] == [HEADER.encode(), b"content-length"]
    assert dict(sizes)[b"content-length"] != b"9"
    assert passed == [(b"authorization", b"Bearer k"), (b"x-request-id", b"7")]
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", f"{INFER}/m", b"")
    assert bare["headers"] == [host, *sizes], "a call without metadata"


# -- what is to be sent ------------------------------------------------------------------------------------------------


def test_frames_are_passed_on_as_they_come() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope["extensions"][EXCHANGE]
        assert (exchange.is_paused, exchange.status) == (True, 0)
        exchange.resume()
        assert not exchange.write_chunk(framed(b"early")), "the response has not begun"
        await send(FRAMED)
        exchange.resume()
        assert exchange.write_chunk(framed(b"one"))
        await send(body(framed(b"two") + framed(b"") + framed(b"three"), more=True))
        assert exchange.num_unsent == 11
        await send(body(framed(b"four")))
        assert (exchange.is_over, exchange.status, exchange.num_unsent) == (True, 200, 15)
        exchange.resume()
        assert not exchange.write_chunk(framed(b"late"))
        await send(body(framed(b"late")))
        ended.append(exchange)

    async def story(client: Client) -> None:
        assert await client.messages(ASKED) == [b"one", b"two", b"", b"three", b"four"]

    ended: list[Any] = []
    run(app, story)
    assert [exchange.num_unsent for exchange in ended] == [0]


def test_a_response_that_is_not_framed_is_an_error_in_one_message() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope["extensions"][EXCHANGE]
        await send(JSON)
        exchange.resume()
        assert not exchange.write_chunk(b"{")
        await send(body(b'{"error": ', more=True))
        assert exchange.num_unsent == 0
        await send(body(b'"no"}'))
        ended.append(exchange.status)

    async def story(client: Client) -> None:
        assert await client.messages(ASKED) == [failure("7", "no")]

    ended: list[int] = []
    run(app, story)
    assert ended == [418]


# -- clients that read slowly: a stream's messages are read only when the story asks for the next one ------------------


class Paused:
    """An application whose first message is read, and whose second one waits for the client.

    Args:
        waiting: number of bytes of the message that waits.
    """

    def __init__(self, waiting: int) -> None:
        self._waiting = waiting
        self.exchange: Any = None
        self.sending: asyncio.Future[None] | None = None
        self.is_full = asyncio.Event()
        self.error: BaseException | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.exchange = scope["extensions"][EXCHANGE]
        await send(FRAMED)
        await send(body(framed(b"first") + framed(bytes(self._waiting)), more=True))
        self.exchange.resume()
        assert self.exchange.write_chunk(framed(b"")) == (self._waiting + len("first") <= FULL)
        self.sending = asyncio.ensure_future(send(body(framed(b"x"))))
        self.is_full.set()
        try:
            await self.sending
        except OSError as error:
            self.error = error
            raise

    async def begin(self, client: Client) -> Any:
        """Return a stream whose first message is read, while the last part is being sent."""
        stream = client.stream(ASKED)
        assert await anext(stream) == b"first"
        await self.is_full.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        return stream


def test_a_part_waits_until_the_client_has_read() -> None:
    async def story(client: Client) -> None:
        stream = await app.begin(client)
        assert app.sending is not None
        assert not app.sending.done()
        assert app.exchange.num_unsent == FULL + 1
        assert [len(message) async for message in stream] == [FULL + 1, 1]
        assert app.sending.done()
        assert app.exchange.num_unsent == 0

    app = Paused(FULL + 1)
    run(app, story)


@in_one_test(("waiting", "chunks"), [(FULL - len("first"), [0]), (FULL, [])])
def test_a_part_does_not_wait_while_little_is_unread(waiting: int, chunks: list[int]) -> None:
    async def story(client: Client) -> None:
        stream = await app.begin(client)
        assert app.sending is not None
        assert app.sending.done()
        assert [len(message) async for message in stream] == [waiting, *chunks, 1]

    app = Paused(waiting)
    run(app, story)


def test_a_client_that_leaves_its_stream_unread_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def story(client: Client) -> None:
        reading = asyncio.ensure_future(left_unread(client))
        await asyncio.wait([reading])
        assert reading.cancelled(), "the call itself is ended"
        assert str(app.error) == "the client reads too slowly"
        assert app.exchange.is_over

    async def left_unread(client: Client) -> None:
        async for _ in client.stream(ASKED):
            await asyncio.get_running_loop().create_future()

    app = Paused(FULL + 1)
    run(app, story, patience=0.001)
    assert "request '7' failed" in caplog.messages


def test_nothing_is_sent_for_a_client_that_left_meanwhile() -> None:
    async def story(client: Client) -> None:
        stream = await asyncio.ensure_future(app.begin(client))  # its task is the call, which has then ended
        app.exchange.drop()
        assert len(await anext(stream)) == FULL + 1
        assert app.sending is not None
        await app.sending
        assert app.exchange.num_unsent == 0
        await stream.aclose()

    app = Paused(FULL + 1)
    run(app, story)


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_call_is_a_request_to_the_models_own_path() -> None:
    asked: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        asked.append((scope["path"], dict(scope["headers"])[b"content-length"] == b"%d" % len(message["body"])))
        await good(scope, receive, send)

    async def story(client: Client) -> None:
        for version in ("", "1"):
            await client.unary("ModelInfer", request(model_version=version))
        await client.messages(ASKED)

    run(app, story)
    assert asked == [(f"{INFER}/m", True), (f"{INFER}/m/versions/1", True), (f"{STREAM}/m", True)]


def test_a_bug_in_a_call_is_that_calls_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    async def story(client: Client) -> None:
        assert await client.messages(ASKED) == [failure("7", "internal error")]
        assert await refusal(client.unary("ModelInfer", request())) == ("INTERNAL", "internal error")

    run(broken, story)
    assert caplog.messages.count("request '7' failed") == 2


def test_an_input_that_cannot_be_read_is_refused_before_the_application() -> None:
    wrong = request()
    wrong.inputs.add(name="text_input", datatype="NONE", shape=[1])
    app, asked = state(200)

    async def story(client: Client) -> None:
        (data,) = await client.messages(wrong.SerializeToString())
        message = service_pb2.ModelStreamInferResponse.FromString(data)
        assert message.error_message
        assert message.infer_response.id == "7"
        assert await refusal(client.unary("ModelInfer", wrong)) == ("INVALID_ARGUMENT", message.error_message)

    run(app, story)
    assert asked == []


CODES = {
    401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED", 429: "UNAVAILABLE",
    500: "INTERNAL", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 400: "INVALID_ARGUMENT", 424: "INVALID_ARGUMENT",
}  # fmt: skip


def test_a_refused_call_has_the_code_of_its_status() -> None:
    statuses = iter(CODES)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**JSON, "status": next(statuses)})
        await send(body(b'{"error": "no such model"}'))

    async def story(client: Client) -> None:
        refusals = [await refusal(client.unary("ModelInfer", request())) for _ in CODES]
        assert refusals == [(code, "no such model") for code in CODES.values()]

    run(app, story)


def test_bytes_that_are_no_message_end_their_call() -> None:
    async def story(client: Client) -> None:
        for call in (client.unary("ModelReady", b"\xff"), client.messages(b"\xff")):
            assert await refusal(call) == ("INTERNAL", "Unable to parse request")

    run(good, story)


def test_a_message_with_a_wrong_field_is_an_invalid_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: bytes) -> None:
        raise InvalidPayload("inputs: too many dimensions")

    monkeypatch.setattr(triton, "check_fields", refuse)

    async def story(client: Client) -> None:
        assert await refusal(client.unary("ModelInfer", request())) == (
            "INVALID_ARGUMENT",
            "inputs: too many dimensions",
        )
        assert await client.messages(ASKED) == [failure("", "inputs: too many dimensions")]

    run(good, story)


def test_a_streams_end_ends_its_requests() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(FRAMED)
        await send(body(framed(b"first"), more=True))
        with contextlib.closing(SimpleNamespace(close=ended.set)):
            await asyncio.get_running_loop().create_future()

    async def story(client: Client) -> None:
        stream = client.stream(ASKED)
        assert await anext(stream) == b"first"
        await stream.aclose()
        await ended.wait()

    run(app, story)


def test_a_client_that_is_dropped_loses_its_stream() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"][EXCHANGE].drop()

    async def story(client: Client) -> None:
        reading = asyncio.ensure_future(client.messages(ASKED))
        await asyncio.wait([reading])
        assert reading.cancelled()

    run(app, story)


def test_a_call_without_a_message_is_answered_empty() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(FRAMED)
        await send(body(b""))

    async def story(client: Client) -> None:
        assert (await client.unary("ModelInfer", request())).outputs == []

    run(app, story)


def test_a_stream_runs_as_many_requests_at_once_as_it_may() -> None:
    counts, running, full = list[int](), [0], asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        running[0] += 1
        counts.append(running[0])
        if running[0] == 128:
            for _ in range(2000):
                await asyncio.sleep(0)
            full.set()
        await full.wait()
        running[0] -= 1
        await good(scope, receive, send)

    async def story(client: Client) -> None:
        assert len(await client.messages(*[request(str(number)).SerializeToString() for number in range(150)])) == 150

    run(app, story)
    assert max(counts) == 128


# -- calls about the state ---------------------------------------------------------------------------------------------


def test_a_health_check_says_whether_the_model_is_ready() -> None:
    for status, answer in ((200, b"\x08\x01"), (503, b"\x08\x02")):
        app, asked = state(status)

        async def story(client: Client, answer: bytes = answer) -> None:
            assert await client.check() == answer

        run(app, story)
        assert asked == [("GET", "/health")]


@in_one_test(
    ("method", "status", "text", "result"),
    [
        ("ServerReady", 200, b"", {"ready": True}),
        ("ServerLive", 503, b"", {"live": False}),
        (
            "ModelConfig",
            200,
            b'{"name": "m"}',
            {"config": service_pb2.ModelConfigResponse(config={"name": "m"}).config},
        ),
        ("ServerMetadata", 200, b'{"name": "t"}', {"name": "t"}),
        ("ServerMetadata", 200, b"[]", {"name": ""}),
        ("ServerMetadata", 399, b"", {"name": ""}),
        ("ServerReady", 401, b'{"error": "no key"}', ("UNAUTHENTICATED", "no key")),
        ("ServerLive", 403, b'{"error": "no"}', ("PERMISSION_DENIED", "no")),
        ("ModelConfig", 400, b'{"error": "no"}', ("INVALID_ARGUMENT", "no")),
    ],
)
def test_a_state_is_a_field_and_a_refusal_is_an_error(method: str, status: int, text: bytes, result: Any) -> None:
    async def story(client: Client) -> None:
        call = client.unary(method)
        if isinstance(result, tuple):
            assert await refusal(call) == result
        else:
            response = await call
            assert {name: getattr(response, name) for name in result} == result

    run(state(status, text)[0], story)


@in_one_test(
    ("call", "path", "method"),
    [
        ("RepositoryIndex", "/v2/repository/index", "POST"),
        ("SystemSharedMemoryRegister", "/v2/systemsharedmemory/region/-/register", "POST"),
        ("ServerMetadata", "/v2", "GET"),
    ],
)
def test_a_call_has_the_method_of_its_route(call: str, path: str, method: str) -> None:
    app, asked = state(200, b"[]")

    async def story(client: Client) -> None:
        await client.unary(call)

    run(app, story)
    assert asked == [(method, path)]


def test_a_messages_size_and_the_calls_of_a_connection_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, int]] = []

    def server(options: Any, interceptors: Any) -> Any:
        found.append(dict(options))
        return SimpleNamespace(add_registered_method_handlers=lambda *arguments: None)

    monkeypatch.setattr(grpc.aio, "server", server)
    for size, limit in ((100, 100), (1 << 30, 1 << 24)):
        GrpcServer(good, Access(), patience=1.0, max_bytes=size, max_calls=3)
        assert found.pop() == {
            "grpc.max_receive_message_length": limit + (1 << 16),
            "grpc.max_send_message_length": -1,
            "grpc.so_reuseport": 0,
            "grpc.max_concurrent_streams": 3,
        }


def test_an_address_that_cannot_be_listened_on_is_named() -> None:
    async def main() -> None:
        server = GrpcServer(good, Access(), patience=1.0, max_bytes=100, max_calls=3)
        for host, told in (("203.0.113.1", "203.0.113.1:1"), ("2001:db8::1", r"\[2001:db8::1\]:1")):
            with pytest.raises(ConfigError, match=rf"^cannot listen on {told} \(option.grpc_port\)$"):
                await server.start(host, 1)
        await server.stop()

    asyncio.run(main())


def test_tensors_of_a_call_are_its_body() -> None:
    bodies: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = int(dict(scope["headers"])[HEADER.encode()])
        bodies.append(json.loads((await receive())["body"][:length]))
        await good(scope, receive, send)

    asked = request()
    asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a b")

    async def story(client: Client) -> None:
        assert (await client.unary("ModelInfer", asked)).id == ""

    run(app, story)
    assert bodies[0]["inputs"][0]["name"] == "text_input"
