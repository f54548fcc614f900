"""Triton's gRPC service on an application of the test: what becomes of its messages, and of a bug."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from handler.core.errors import ConfigError, InvalidPayload
from handler.http import grpc as triton
from handler.http.exchange import EXCHANGE
from handler.http.grpc import GrpcServer, _error, _escaped, _Exchange, _Outbox, _parsed, _path, _scope
from handler.http.security import Access
from handler.protocols.triton.grpc import FRAMES, failure, framed
from handler.protocols.triton.infer import HEADER
from tests.one_test import in_one_test

FRAMED = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", FRAMES.encode())]}
JSON = {"type": "http.response.start", "status": 418, "headers": [(b"content-type", b"application/json")]}


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


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
    assert _error(status, body) == words


@in_one_test(
    ("name", "version", "path"),
    [
        ("m", "", "/v2/models/m/versions/1"),
        ("m", "2", "/v2/models/m/versions/2"),
        ("a/b", "", "/v2/models/a%2Fb/versions/1"),
        ("", "", "/v2/models/ /versions/1"),
    ],
)
def test_a_models_path_is_its_own(name: str, version: str, path: str) -> None:
    assert _path(SimpleNamespace(name=name, version=version)) == path


def test_a_name_cannot_leave_its_place_in_a_path() -> None:
    assert [_escaped("a/b/c"), _escaped("")] == ["a%2Fb%2Fc", " "]


def test_a_calls_metadata_are_headers_but_for_those_of_the_transport() -> None:
    metadata = [
        ("authorization", "Bearer k"),
        ("grpc-timeout", "1S"),
        ("content-type", "application/grpc"),
        ("host", "evil.example"),
        ("origin", "https://evil.example"),
        ("trace-bin", b"\0"),
        ("x-request-id", "7"),
    ]
    context = SimpleNamespace(invocation_metadata=lambda: metadata)
    exchange: Any = object()
    scope = _scope(context, exchange, "POST", "/v2", [("content-length", "3")])
    assert scope["headers"] == [
        (b"host", b"localhost"),
        (b"content-length", b"3"),
        (b"authorization", b"Bearer k"),
        (b"x-request-id", b"7"),
    ]
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/v2", b"")
    assert scope["extensions"][EXCHANGE] is exchange
    assert _scope(SimpleNamespace(invocation_metadata=lambda: None), exchange, "GET", "/")["headers"]


# -- what is to be sent ------------------------------------------------------------------------------------------------


def outbox_of(*parts: bytes) -> _Outbox:
    outbox = _Outbox()
    outbox.put(*parts)
    return outbox


def test_messages_wait_in_order_up_to_the_end() -> None:
    async def story() -> None:
        outbox = outbox_of(b"one", b"")
        outbox.put(b"three")
        assert outbox.size == 8
        outbox.end()
        assert [await outbox.take() for _ in range(4)] == [b"one", b"", b"three", None]
        assert outbox.size == 0

    run(story)


def test_a_full_outbox_has_room_again_when_little_is_left() -> None:
    async def story() -> None:
        outbox = outbox_of(bytes(1 << 16))
        await outbox.room()
        outbox.put(b"!")
        waiting = asyncio.ensure_future(outbox.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        await outbox.take()
        await waiting

    run(story)


def exchange_on(outbox: _Outbox, drop: Callable[[], object] = bool, patience: float = 30.0) -> _Exchange:
    return _Exchange("7", outbox, drop, patience)


def test_frames_are_passed_on_as_they_come() -> None:
    async def story() -> None:
        outbox = _Outbox()
        exchange = exchange_on(outbox)
        assert (exchange.is_paused, exchange.status) == (True, 0)
        exchange.resume()
        assert not exchange.write_chunk(framed(b"early")), "the response has not begun"
        await exchange.send(FRAMED)
        exchange.resume()
        assert exchange.write_chunk(framed(b"one"))
        await exchange.send(body(framed(b"two") + framed(b"three"), more=True))
        assert exchange.num_unsent == 11
        await exchange.send(body(framed(b"four")))
        assert (exchange.is_over, exchange.status) == (True, 200)
        assert [await outbox.take() for _ in range(4)] == [b"one", b"two", b"three", b"four"]
        exchange.resume()
        assert not exchange.write_chunk(framed(b"late"))
        await exchange.send(body(framed(b"late")))
        assert outbox.size == 0

    run(story)


def test_a_response_that_is_not_framed_is_an_error_in_one_message() -> None:
    async def story() -> None:
        outbox = _Outbox()
        exchange = exchange_on(outbox)
        await exchange.send(JSON)
        exchange.resume()
        assert not exchange.write_chunk(b"{")
        await exchange.send(body(b'{"error": ', more=True))
        assert outbox.size == 0
        await exchange.send(body(b'"no"}'))
        assert await outbox.take() == failure("7", "no")
        assert exchange.status == 418

    run(story)


def test_a_part_waits_until_the_outbox_has_room() -> None:
    async def story() -> None:
        outbox = outbox_of(bytes((1 << 16) + 1))
        exchange = exchange_on(outbox)
        await exchange.send(FRAMED)
        exchange.resume()
        assert not exchange.write_chunk(framed(b"x"))
        sending = asyncio.ensure_future(exchange.send(body(framed(b"x"))))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not sending.done()
        await outbox.take()
        await sending
        assert await outbox.take() == b"x"

    run(story)


def test_a_client_that_leaves_its_stream_unread_is_dropped() -> None:
    async def story() -> None:
        dropped: list[str] = []
        outbox = outbox_of(bytes((1 << 16) + 1))
        exchange = exchange_on(outbox, lambda: dropped.append("call"), 0.001)
        await exchange.send(FRAMED)
        with pytest.raises(OSError, match="the client reads too slowly"):
            await exchange.send(body(framed(b"x")))
        assert (dropped, exchange.is_over) == (["call"], True)

    run(story)


def test_nothing_is_sent_for_a_client_that_left_meanwhile() -> None:
    async def story() -> None:
        outbox = outbox_of(bytes((1 << 16) + 1))
        exchange = exchange_on(outbox)
        await exchange.send(FRAMED)
        sending = asyncio.ensure_future(exchange.send(body(framed(b"x"))))
        await asyncio.sleep(0)
        exchange.drop()
        await outbox.take()
        await sending
        assert outbox.size == 0

    run(story)


# -- requests ----------------------------------------------------------------------------------------------------------


class Aborted(Exception):
    pass


class Context:
    def __init__(self, *received: bytes) -> None:
        self.aborted: Any = None
        self.received = list(received)

    async def abort(self, code: grpc.StatusCode, words: str) -> None:
        self.aborted = code, words
        raise Aborted

    async def read(self) -> Any:
        return self.received.pop(0) if self.received else grpc.aio.EOF

    def invocation_metadata(self) -> Any:
        return [("x-own", "1")]


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def server_of(app: Any, monkeypatch: pytest.MonkeyPatch) -> GrpcServer:
    kinds: Any = lambda options, interceptors: SimpleNamespace(add_registered_method_handlers=lambda *arguments: None)  # noqa: E731
    monkeypatch.setattr(grpc.aio, "server", kinds)
    return GrpcServer(app, Access(), patience=1.0, max_bytes=100, max_calls=3)


async def good(scope: Any, receive: Any, send: Any) -> None:
    await send(FRAMED)
    await send(body(framed(service_pb2.ModelStreamInferResponse().SerializeToString())))


async def refusing(scope: Any, receive: Any, send: Any) -> None:
    await send({**JSON, "status": 404})
    await send(body(b'{"error": "no such model"}'))


async def broken(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("a bug")


def request(id: str = "7", **fields: Any) -> Any:
    return service_pb2.ModelInferRequest(id=id, model_name="m", **fields)


def test_a_call_is_a_request_to_the_models_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        asked.append((scope["path"], dict(scope["headers"])[b"content-length"] == b"%d" % len(message["body"])))
        await good(scope, receive, send)

    async def story() -> None:
        server = server_of(app, monkeypatch)
        for version in ("", "1"):
            status = await server._request("/infer", request(model_version=version), Context(), _Outbox(), bool)
            assert status == 200

    run(story)
    assert asked == [("/infer/m", True), ("/infer/m/versions/1", True)]


def test_a_bug_in_a_call_is_that_calls_internal_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        outbox, context = _Outbox(), Context()
        server = server_of(broken, monkeypatch)
        assert await server._request("/infer", request(), context, outbox, bool) == 500
        assert await outbox.take() == failure("7", "internal error")
        with pytest.raises(Aborted):
            await server._infer(request(), context)
        assert context.aborted == (grpc.StatusCode.INTERNAL, "internal error")

    run(story)
    assert "request '7' failed" in caplog.messages


def test_an_input_that_cannot_be_read_is_refused_before_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = request()
    wrong.inputs.add(name="text_input", datatype="NONE", shape=[1])

    async def story() -> None:
        outbox, context = _Outbox(), Context()
        server = server_of(good, monkeypatch)
        if await server._request("/infer", wrong, context, outbox, bool) == 400:
            message = service_pb2.ModelStreamInferResponse.FromString(await outbox.take() or b"")
            assert message.error_message
            assert message.infer_response.id == "7"
            with pytest.raises(Aborted):
                await server._infer(wrong, context)
            assert context.aborted == (grpc.StatusCode.INVALID_ARGUMENT, message.error_message)
        else:
            pytest.fail("it was accepted")

    run(story)


def test_a_refused_call_has_the_code_of_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        context = Context()
        with pytest.raises(Aborted):
            await server_of(refusing, monkeypatch)._infer(request(), context)
        assert context.aborted == (grpc.StatusCode.NOT_FOUND, "no such model")

    run(story)


CODES = {
    401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED", 429: "UNAVAILABLE",
    500: "INTERNAL", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 400: "INVALID_ARGUMENT", 424: "INVALID_ARGUMENT",
}  # fmt: skip


def test_each_status_has_grpcs_code() -> None:
    assert {status: triton._CODES[status].name for status in CODES} == CODES


def test_bytes_that_are_no_message_end_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        context = Context()
        with pytest.raises(Aborted):
            await _parsed(service_pb2.ModelReadyRequest, b"\xff", context)
        assert context.aborted == (grpc.StatusCode.INTERNAL, "Unable to parse request")
        assert (await _parsed(service_pb2.ModelInferRequest, request().SerializeToString(), context)).id == "7"

    run(story)


def test_a_message_with_a_wrong_field_is_an_invalid_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: bytes) -> None:
        raise InvalidPayload("inputs: too many dimensions")

    async def story() -> None:
        context = Context()
        monkeypatch.setattr(triton, "check_fields", refuse)
        handler: Any = server_of(good, monkeypatch)._handlers()["ModelInfer"]
        with pytest.raises(Aborted):
            await handler.unary_unary(b"", context)
        assert context.aborted == (grpc.StatusCode.INVALID_ARGUMENT, "inputs: too many dimensions")

    run(story)


def test_a_streams_end_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(FRAMED)
        await send(body(framed(b"first"), more=True))
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("request")

    async def story() -> None:
        stream = server_of(app, monkeypatch)._stream(None, Context(request().SerializeToString()))  # type: ignore[arg-type]
        assert await anext(stream) == b"first"
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    run(story)
    assert ended == ["request"]


def test_a_client_that_is_dropped_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"][EXCHANGE].drop()

    async def story() -> None:
        context = Context(request().SerializeToString())
        stream = server_of(app, monkeypatch)._stream(None, context)  # type: ignore[arg-type]

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.ensure_future(read())
        await asyncio.wait([reading])
        assert reading.cancelled()

    run(story)


def test_a_call_without_a_message_is_answered_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(FRAMED)
        await send(body(b""))

    async def story() -> None:
        assert (await server_of(app, monkeypatch)._infer(request(), Context())).outputs == []

    run(story)


def test_a_stream_runs_as_many_requests_at_once_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, running = list[int](), [0]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        running[0] += 1
        counts.append(running[0])
        for _ in range(400):
            await asyncio.sleep(0)
        running[0] -= 1
        await good(scope, receive, send)

    async def story() -> None:
        context = Context(*[request(str(number)).SerializeToString() for number in range(150)])
        server = server_of(app, monkeypatch)
        assert len([message async for message in server._stream(None, context)]) == 150  # type: ignore[arg-type]

    run(story)
    assert max(counts) == 128


# -- calls about the state ---------------------------------------------------------------------------------------------


def state(status: int, text: bytes = b"") -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append((scope["method"], scope["path"]))
        await send({**JSON, "status": status})
        await send(body(text))

    asked: list[Any] = []
    return app, asked


def test_a_health_check_says_whether_the_model_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        for status, answer in ((200, b"\x08\x01"), (503, b"\x08\x02")):
            app, asked = state(status)
            assert await server_of(app, monkeypatch)._check(nothing(), Context()) == answer
            assert asked == [("GET", "/health")]

    run(story)


def test_a_state_is_a_field_and_a_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        for field, status, text, found in (
            ("ready", 200, b"", {"ready": True}),
            ("live", 503, b"", {"live": False}),
            ("config", 200, b'{"a": 1}', {"config": {"a": 1}}),
            (None, 200, b'{"a": 1}', {"a": 1}),
            (None, 200, b"[]", {}),
            (None, 399, b"", {}),
            ("ready", 401, b'{"error": "no key"}', (grpc.StatusCode.UNAUTHENTICATED, "no key")),
            ("live", 403, b'{"error": "no"}', (grpc.StatusCode.PERMISSION_DENIED, "no")),
            ("config", 400, b'{"error": "no"}', (grpc.StatusCode.INVALID_ARGUMENT, "no")),
        ):
            app, _ = state(status, text)
            context = Context()
            reading = server_of(app, monkeypatch)._reader("/v2", field)(None, context)
            if isinstance(found, dict):
                assert await reading == found
            else:
                with pytest.raises(Aborted):
                    await reading
                assert context.aborted == found

    run(story)


@in_one_test(
    ("path", "method"),
    [("/v2/repository/index", "POST"), ("/v2/systemsharedmemory/region/-/register", "POST"), ("/v2", "GET")],
)
def test_a_call_has_the_method_of_its_route(path: str, method: str) -> None:
    app, asked = state(200, b"{}")

    async def story() -> None:
        with pytest.MonkeyPatch.context() as context:
            await server_of(app, context)._reader(path)(None, Context())

    run(story)
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
    async def story() -> None:
        server = GrpcServer(good, Access(), patience=1.0, max_bytes=100, max_calls=3)
        for host, told in (("203.0.113.1", "203.0.113.1:1"), ("2001:db8::1", r"\[2001:db8::1\]:1")):
            with pytest.raises(ConfigError, match=rf"^cannot listen on {told} \(option.grpc_port\)$"):
                await server.start(host, 1)
        await server.stop()

    run(story)


def test_tensors_of_a_call_are_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = int(dict(scope["headers"])[HEADER.encode()])
        bodies.append(json.loads((await receive())["body"][:length]))
        await good(scope, receive, send)

    asked = request()
    asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a b")

    async def story() -> None:
        assert (await server_of(app, monkeypatch)._infer(asked, Context())).id == ""

    run(story)
    assert bodies[0]["inputs"][0]["name"] == "text_input"
