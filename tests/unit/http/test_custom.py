"""Requests to a user's handlers: their results, and clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import threading
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from starlette.exceptions import HTTPException
from starlette.responses import Response

from handler.core.errors import BadRequest
from handler.http.custom import CustomCode, HandleRoutes
from handler.http.exchange import EXCHANGE
from handler.http.inference import SHARED
from handler.plugins.aws import Handlers
from handler.plugins.handle import Answer, Broken
from handler.serving.quota import Quota
from handler.serving.request.life import Life
from tests.one_test import in_one_test


class Client:
    """An exchange whose client stays until the test lets it disconnect.

    Attributes:
        told: what the exchange was told, in order.
    """

    def __init__(self, body: bytes = b"") -> None:
        self.is_over = False
        self.told: list[str] = []
        self._body = body
        self._event = asyncio.Event()

    def take_body(self) -> bytes:
        return self._body

    def send_whole(self) -> None: ...

    def send_head(self) -> None:
        self.told.append("head")

    def drop(self) -> None:
        self.told.append("drop")

    def leave(self) -> None:
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()


def scope_of(client: Client, method: str = "POST", **more: Any) -> dict[str, Any]:
    return {
        "type": "http", "method": method, "path": "/invocations", "query_string": b"", "headers_by_name": {},
        "headers": [], "request_id": "7", "http_version": "1.1", "extensions": {EXCHANGE: client}, **more,
    }  # fmt: skip


def model_of(handle: Any = None) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(name="m", model_name=["m"], max_request_size=1 << 20),
        availability=SimpleNamespace(state="ready"),
        check_room=lambda owner: None,
        adapters=SimpleNamespace(calls=contextlib.nullcontext()),
        admission=SimpleNamespace(memory=Quota(1 << 20, 0, 0, "full"), plan=SimpleNamespace(call=handle)),
    )


def served(handlers: Handlers, *, handle: Any = None, client: Client | None = None, **scope: Any) -> list[Any]:
    """Return the messages that the application with the custom code sends for a request."""
    sent: list[Any] = []
    client = client or Client()

    async def server(scope: Any, receive: Any, send: Any) -> None:
        pytest.fail("no request reaches the server's own routes")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()

    app = CustomCode(handlers, model_of(handle), server)
    asyncio.run(app(scope_of(client, **scope), receive, send))
    return sent


def json_of(invoke: Any) -> tuple[int, Any]:
    """Return the status and the JSON of the response for what a handler of /invocations does."""
    begun, body = served(Handlers(invoke))
    return begun["status"], json.loads(body["body"])


def handled(handle: Any, client: Client, send: Any) -> Any:
    """Return the call of a request that `handle` of model.py serves."""

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x"}

    return HandleRoutes(handle, model_of(), None)(scope_of(client), receive, send)  # type: ignore[arg-type]


def test_work_for_a_client_that_disconnects_is_cancelled() -> None:
    async def run() -> None:
        client = Client()
        cancelled = asyncio.Event()

        async def handle(contents: Any, properties: Any, life: Life, owner: str) -> Answer:
            client.leave()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.set()
            return Answer(200)

        await handled(handle, client, None)  # nothing is sent
        await asyncio.wait_for(cancelled.wait(), 20)  # the end of `run` would cancel it too

    asyncio.run(run())


def test_parts_that_arrive_after_the_client_has_left_are_closed() -> None:
    closed: list[str] = []

    async def run() -> None:
        client = Client()

        async def handle(contents: Any, properties: Any, life: Life, owner: str) -> Answer:
            client.leave()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
            life.hold(lambda: closed.append("parts"))
            return Answer(200)

        await handled(handle, client, None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert closed == ["parts"]


def test_a_handlers_result_is_sent_as_json() -> None:
    begun, body = served(Handlers(lambda: {"a": 1}))
    assert (begun["status"], body["body"]) == (200, b'{"a":1}')
    assert (b"content-length", b"7") in begun["headers"]


# -- what handlers return ----------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: int


class Dumped:
    def model_dump(self, mode: str) -> Any:
        return {"mode": mode}


class Slotted:
    __slots__ = ()


@in_one_test(
    ("value", "shown"),
    [
        (Dumped(), {"mode": "json"}),
        (b"bytes", "bytes"),
        ({1}, [1]),
        (frozenset({1}), [1]),
        (deque([1, 2]), [1, 2]),
        ((n for n in (1, 2)), [1, 2]),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (datetime.time(3, 4), "03:04:00"),
        (datetime.timedelta(minutes=1, milliseconds=500), 60.5),
        (Decimal("3"), 3),
        (Decimal("3.5"), 3.5),
        (Colour.RED, "red"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (PurePosixPath("/a"), "/a"),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (Point(1), {"x": 1}),
    ],
)
def test_a_handlers_values_become_json_as_with_fastapi(value: Any, shown: Any) -> None:
    status, result = json_of(lambda: {"value": value})
    assert (status, result["value"], type(result["value"])) == (200, shown, type(shown))


def test_a_value_that_is_no_json_is_the_handlers_error() -> None:
    def slotted() -> Any:
        return Slotted()

    def nan() -> float:
        return float("nan")

    for handler, message in (
        (slotted, "custom handler 'slotted' raised TypeError: Object of type Slotted is not JSON serializable"),
        (nan, "custom handler 'nan' raised ValueError: Out of range float values are not JSON compliant"),
    ):
        status, body = json_of(handler)
        assert status == 500
        assert body["error"]["message"].startswith(message)
    _, body = served(Handlers(lambda: {"ä": [1, 2]}))
    assert body["body"] == '{"ä":[1,2]}'.encode()


@in_one_test(
    ("error", "status", "told"),
    [
        (HTTPException(404, "no such thing"), 404, ("no such thing", "Not Found", 404)),
        (HTTPException(599, "own"), 599, ("own", "", 599)),
        (BadRequest("wrong"), 400, ("wrong", "Bad Request", 400)),
        (KeyError("a"), 500, ("custom handler 'handle' raised KeyError: 'a'", "InternalServerError", 500)),
        (SystemExit(3), 500, ("custom handler 'handle' raised SystemExit: 3", "InternalServerError", 500)),
    ],
)
def test_what_a_handler_raises_is_an_error_of_vllms_form(
    error: BaseException, status: int, told: tuple[str, str, int]
) -> None:
    def handle() -> Any:
        raise error

    message, kind, code = told
    expected = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    assert json_of(handle) == (status, expected)


def test_a_long_error_of_custom_code_is_cut() -> None:
    def handle() -> Any:
        raise ValueError("x" * 900)

    _, body = json_of(handle)
    assert body["error"]["message"] == "custom handler 'handle' raised " + f"ValueError: {'x' * 900}"[:500]


def test_a_refusal_of_custom_code_keeps_its_headers() -> None:
    def handle() -> Any:
        raise refusal

    for status in (401, 599):
        refusal = HTTPException(status, "no", {"x-own": "1"})
        begun, _ = served(Handlers(handle))
        assert (begun["status"], dict(begun["headers"])[b"x-own"]) == (status, b"1")


def test_handlers_are_called_however_they_are_written() -> None:
    class Callable:
        async def __call__(self, request: Any) -> str:
            return f"object {request.method}"

    async def coroutine(request: Any) -> str:
        return f"coroutine {request.method}"

    def plain(request: Any) -> str:
        return f"function {request.method} on {threading.current_thread() is not threading.main_thread()}"

    def late(request: Any) -> Any:
        return coroutine(request)

    for function, answer in (
        (Callable(), "object POST"),
        (coroutine, "coroutine POST"),
        (plain, "function POST on True"),
        (late, "coroutine POST"),
        (lambda: "no request", "no request"),
    ):
        assert json_of(function) == (200, answer)


# -- responses of custom code ------------------------------------------------------------------------------------------


def framed(*messages: Any, method: str = "POST") -> tuple[list[Any], list[str]]:
    """Return what is sent for these messages of a middleware, and what the exchange is told."""

    class Middleware:
        def __init__(self, app: Any) -> None: ...

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            for message in messages:
                await send(message)

    client = Client()
    return served(Handlers(throttle=Middleware), client=client, method=method), client.told


def start(status: int = 200, **headers: str) -> Any:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": named}


def part(data: bytes, *, more: bool = False) -> Any:
    return {"type": "http.response.body", "body": data, "more_body": more}


@pytest.mark.parametrize(
    ("declared", "length", "warned"), [("5", b"5", False), ("4", b"5", True), ("6", b"5", True), ("five", b"5", True)]
)
def test_a_whole_response_of_custom_code_has_its_true_length(
    caplog: pytest.LogCaptureFixture, declared: str, length: bytes, warned: bool
) -> None:
    sent, _ = framed(start(content_length=declared, a="b"), part(b"he", more=True), part(b"llo"))
    begun, body = sent
    assert begun["headers"] == [(b"a", b"b"), (b"content-length", length)]
    assert (body["body"], body["more_body"]) == (b"hello", False)
    assert ("request 7: custom code's Content-Length is wrong and is not sent" in caplog.messages) == warned


def test_a_response_without_a_length_is_sent_as_it_comes() -> None:
    sent, told = framed(start(transfer_encoding="chunked"), part(b"he", more=True), part(b"llo"))
    assert [message.get("body") for message in sent] == [None, b"he", b"llo"]
    assert sent[0]["headers"] == []
    assert told == ["head"], "before the first part, which may take long"


def test_a_long_response_is_kept_back_only_so_far() -> None:
    large = bytes(1 << 24)
    length = str(len(large) + 5)
    sent, told = framed(start(content_length=length), part(large, more=True))
    assert (sent, told) == ([], [])
    sent, told = framed(start(content_length=length), part(large, more=True), part(b"5", more=True), part(b"rest"))
    assert [len(message.get("body", b"")) for message in sent] == [0, len(large) + 1, 4]
    assert sent[0]["headers"] == [(b"content-length", length.encode())]
    sent, told = framed(start(content_length="3"), part(large, more=True), part(b"5", more=True))
    assert (sent[0]["headers"], told) == ([], ["head"]), "it is known to be wrong"


@pytest.mark.parametrize("status", [204, 304])
def test_a_response_that_has_no_body_gets_none(status: int) -> None:
    sent, told = framed(start(status, content_length="5"), part(b"hello"))
    assert (sent[0]["headers"], sent[1]["body"], told) == ([], b"", [])


@pytest.mark.parametrize(("declared", "kept"), [("5", True), ("-5", False), ("9" * 19, False), ("9" * 18, True)])
def test_the_answer_to_head_has_the_length_that_custom_code_declares(declared: str, kept: bool) -> None:
    sent, _ = framed(start(content_length=declared), part(b"hello"), method="HEAD")
    assert sent[0]["headers"] == ([(b"content-length", declared.encode())] if kept else [])
    assert sent[1]["body"] == b""


def test_two_lengths_are_none() -> None:
    two = start(content_length="5")
    two["headers"] *= 2
    sent, _ = framed(two, part(b"hello"), method="HEAD")
    assert sent[0]["headers"] == []


def error_of(sent: list[Any]) -> tuple[int, str]:
    begun, body = sent
    message: str = json.loads(body["body"])["message"]
    return begun["status"], message


@pytest.mark.parametrize("status", [199, 600, "200"])
def test_a_status_that_no_client_can_read_is_custom_codes_error(status: Any) -> None:
    sent, _ = framed(start(status))
    assert error_of(sent) == (
        500,
        f"custom code raised ValueError: response status {status} is not valid: it must be 200 to 599",
    )
    for fine in (200, 599):
        sent, _ = framed(start(fine))
        assert sent[0]["status"] == fine


@pytest.mark.parametrize("header", [(b"a b", b"c"), (b"", b"c"), (b"a", b"c\r\nd: e"), (b"a", b"\x00")])
def test_a_header_that_would_break_the_response_is_custom_codes_error(header: tuple[bytes, bytes]) -> None:
    sent, _ = framed({"type": "http.response.start", "status": 200, "headers": [header]})
    status, message = error_of(sent)
    assert (status, message.endswith("has an invalid name or value")) == (500, True)
    sent, _ = framed(start(a="tab\tis fine"))
    assert sent[0]["headers"] == [(b"a", b"tab\tis fine")]


def test_the_servers_headers_are_added_where_custom_code_has_none() -> None:
    def send(*headers: tuple[bytes, bytes]) -> list[Any]:
        response = Response(b"hello")
        response.raw_headers = [*headers]
        shared: dict[str, Any] = {SHARED: [(b"vary", b"origin")]}
        begun, *_ = served(Handlers(lambda: response), **shared)
        return list(begun["headers"])

    own = (b"X-Request-Id", b"own")
    assert send((b"content-length", b"5"), own) == [own, (b"vary", b"origin"), (b"content-length", b"5")]
    assert send() == [(b"x-request-id", b"7"), (b"vary", b"origin"), (b"x-accel-buffering", b"no")]


def test_a_form_has_a_limit_of_fields() -> None:
    def fields(form: bytes) -> Any:
        received: dict[str, bytes] = {}

        async def handle(contents: dict[str, bytes], properties: Any, life: Life, owner: str) -> Answer:
            received.update(contents)
            return Answer(200)

        headers = [(b"content-type", b"application/x-www-form-urlencoded")]
        begun, body = served(Handlers(), handle=handle, client=Client(form), headers=headers)
        return received if begun["status"] == 200 else json.loads(body["body"])

    assert fields(b"a=1&b=") == {"a": b"1", "b": b""}
    assert fields(b"a=%ff") == {"a": b"\xff"}
    assert fields(b"a=1&" * 9_999 + b"b=2") == {"a": b"1", "b": b"2"}
    assert fields(b"a=1&" * 10_000 + b"b=2")["message"] == "the form has more than 10000 fields"


# -- what `handle` of model.py answers ---------------------------------------------------------------------------------


class Parts:
    """Parts of a streamed body, one after another."""

    def __init__(self, *parts: Any) -> None:
        self._parts = list(parts)

    async def next(self) -> Any:
        await asyncio.sleep(0)
        return self._parts.pop(0) if self._parts else None


def answered(answer: Answer, *, leaves: bool = False) -> list[Any]:
    sent: list[Any] = []

    async def run() -> None:
        client = Client()

        async def handle(contents: Any, properties: Any, life: Life, owner: str) -> Answer:
            return answer

        async def send(message: Any) -> None:
            sent.append(message)
            client.is_over = leaves and message["type"] == "http.response.body"

        await handled(handle, client, send)

    asyncio.run(run())
    return sent


def test_a_whole_answer_of_handle_has_its_length() -> None:
    begun, body = answered(Answer(201, [("x-request-id", "own")], b"hello"))
    assert (begun["status"], body["body"]) == (201, b"hello")
    assert begun["headers"] == [(b"x-request-id", b"own"), (b"content-length", b"5")]


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("parts", [None, Parts(b"a")])
def test_an_answer_of_handle_that_has_no_body_gets_none(status: int, parts: Any) -> None:
    begun, body = answered(Answer(status, [], b"hello", parts))
    assert body["body"] == b""
    assert b"content-length" not in dict(begun["headers"])


def test_an_answer_of_handle_in_parts_is_sent_part_by_part() -> None:
    begun, *bodies = answered(Answer(200, parts=Parts(b"one", b"", b"two", Broken(b"failed"))))
    assert [(body["body"], body.get("more_body", False)) for body in bodies] == [
        (b"one", True), (b"two", True), (b"failed", True), (b"", False),
    ]  # fmt: skip
    assert dict(begun["headers"])[b"x-accel-buffering"] == b"no"


def test_a_client_that_leaves_gets_no_more_parts_of_handle() -> None:
    _, *bodies = answered(Answer(200, parts=Parts(b"one", b"two")), leaves=True)
    assert [body["body"] for body in bodies] == [b"one"]
