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

from handler.core.errors import BadRequest
from handler.http import custom
from handler.http.exchange import EXCHANGE
from handler.http.inference import AS_IT_COMES, SHARED
from handler.plugins.handle import Answer, Broken
from handler.serving.request.life import Life
from tests.one_test import in_one_test


class Leaving:
    """An exchange whose client disconnects when the work has begun."""

    def __init__(self) -> None:
        self.is_over = False
        self.begun = asyncio.Event()

    def wake(self) -> None: ...

    async def wait(self) -> None:
        await self.begun.wait()
        self.is_over = True


def test_work_for_a_client_that_disconnects_is_cancelled() -> None:
    async def run() -> None:
        client: Any = Leaving()
        cancelled = asyncio.Event()

        async def work() -> str:
            client.begun.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.set()
            return "never"

        assert await custom._unless_gone(work(), client) is None
        await asyncio.wait_for(cancelled.wait(), 20)  # the end of `run` would cancel it too

    asyncio.run(run())


def test_parts_that_arrive_after_the_client_has_left_are_closed() -> None:
    closed: list[str] = []

    async def run() -> None:
        client: Any = Leaving()
        client.send_whole = bool

        async def handle(contents: Any, properties: Any, life: Life, owner: str) -> Answer:
            client.begun.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
            life.hold(lambda: closed.append("parts"))
            return Answer(200)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"x"}

        model: Any = SimpleNamespace(
            config=SimpleNamespace(name="m", model_name=["m"]),
            availability=SimpleNamespace(state="ready"),
            check_room=bool,
        )
        scope = {
            "type": "http", "method": "POST", "path": "/invocations", "query_string": b"", "headers_by_name": {},
            "headers": [], "request_id": "1", "extensions": {EXCHANGE: client},
        }  # fmt: skip
        await custom.HandleRoutes(handle, model, None)(scope, receive, None)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert closed == ["parts"]


def test_a_handlers_result_is_sent_as_json() -> None:
    request: Any = None
    response = asyncio.run(custom._answer(lambda: {"a": 1}, request))
    assert (response.status_code, bytes(response.body)) == (200, b'{"a":1}')


def test_the_answer_to_head_has_the_length_that_custom_code_declares() -> None:
    sent: list[Any] = []

    async def run() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        framed = custom._Framed({"method": "HEAD"}, send)
        await framed.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await framed.send({"type": "http.response.body", "body": b"hello"})

    asyncio.run(run())
    start, body = sent
    assert (start["headers"], body["body"]) == ([(b"content-length", b"5")], b"")


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
    found = json.loads(bytes(custom._Json({"value": value}).body))["value"]
    assert (found, type(found)) == (shown, type(shown))


def test_a_value_that_is_no_json_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"^Object of type Slotted is not JSON serializable$"):
        custom._Json(Slotted())
    with pytest.raises(ValueError, match="Out of range float"):
        custom._Json(float("nan"))
    assert bytes(custom._Json({"ä": [1, 2]}).body) == '{"ä":[1,2]}'.encode()


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

    request: Any = None
    response = asyncio.run(custom._answer(handle, request))
    message, kind, code = told
    assert response.status_code == status
    expected = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    assert json.loads(bytes(response.body)) == expected


def test_a_long_error_of_custom_code_is_cut() -> None:
    assert len(custom._shown(ValueError("x" * 900))) == 500
    assert custom._shown(custom._Ended("SystemExit: 1")) == "SystemExit: 1"


def test_a_refusal_of_custom_code_keeps_its_headers() -> None:
    for status in (401, 599):
        response = custom._refused(HTTPException(status, "no", {"x-own": "1"}))
        assert response.headers["x-own"] == "1"


def test_handlers_are_called_however_they_are_written() -> None:
    class Callable:
        async def __call__(self, request: Any) -> str:
            return f"object {request}"

    async def coroutine(request: Any) -> str:
        return f"coroutine {request}"

    def plain(request: Any) -> str:
        return f"function {request} on {threading.current_thread() is not threading.main_thread()}"

    def late(request: Any) -> Any:
        return coroutine(request)

    for function, answer in (
        (Callable(), "object 1"),
        (coroutine, "coroutine 1"),
        (plain, "function 1 on True"),
        (late, "coroutine 1"),
        (lambda: "no request", "no request"),
    ):
        request: Any = 1
        response = asyncio.run(custom._answer(function, request))
        assert json.loads(bytes(response.body)) == answer


# -- responses of custom code ------------------------------------------------------------------------------------------


def framed(*messages: Any, method: str = "POST") -> tuple[list[Any], list[str]]:
    """Return what is sent for these messages, and what the exchange is told."""
    sent: list[Any] = []
    told: list[str] = []
    exchange = SimpleNamespace(send_head=lambda: told.append("head"))

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        scope = {"method": method, "request_id": "7", "extensions": {EXCHANGE: exchange}}
        response = custom._Framed(scope, send)
        assert not response.begun
        for message in messages:
            await response.send(message)
        assert response.begun == bool(sent)

    asyncio.run(run())
    return sent, told


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


def test_a_long_response_is_kept_back_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "_MOST_HELD", 4)
    sent, told = framed(start(content_length="9"), part(b"four", more=True))
    assert (sent, told) == ([], [])
    sent, told = framed(start(content_length="9"), part(b"four", more=True), part(b"5", more=True), part(b"rest"))
    assert [message.get("body") for message in sent] == [None, b"four5", b"rest"]
    assert sent[0]["headers"] == [(b"content-length", b"9")]
    sent, told = framed(start(content_length="3"), part(b"four", more=True), part(b"5", more=True))
    assert (sent[0]["headers"], told) == ([], ["head"]), "it is known to be wrong"


@pytest.mark.parametrize("status", [204, 304])
def test_a_response_that_has_no_body_gets_none(status: int) -> None:
    sent, told = framed(start(status, content_length="5"), part(b"hello"))
    assert (sent[0]["headers"], sent[1]["body"], told) == ([], b"", [])


@pytest.mark.parametrize(("declared", "kept"), [("5", True), ("-5", False), ("9" * 19, False), ("9" * 18, True)])
def test_the_answer_to_head_has_a_valid_length_only(declared: str, kept: bool) -> None:
    sent, _ = framed(start(content_length=declared), part(b"hello"), method="HEAD")
    assert sent[0]["headers"] == ([(b"content-length", declared.encode())] if kept else [])
    assert sent[1]["body"] == b""


def test_two_lengths_are_none() -> None:
    two = start(content_length="5")
    two["headers"] *= 2
    sent, _ = framed(two, part(b"hello"), method="HEAD")
    assert sent[0]["headers"] == []


@pytest.mark.parametrize("status", [199, 600, "200"])
def test_a_status_that_no_client_can_read_is_custom_codes_error(status: Any) -> None:
    with pytest.raises(ValueError, match=f"response status {status} is not valid: it must be 200 to 599"):
        framed(start(status))
    for fine in (200, 599):
        framed(start(fine))


@pytest.mark.parametrize("header", [(b"a b", b"c"), (b"", b"c"), (b"a", b"c\r\nd: e"), (b"a", b"\x00")])
def test_a_header_that_would_break_the_response_is_custom_codes_error(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="has an invalid name or value"):
        framed({"type": "http.response.start", "status": 200, "headers": [header]})
    framed(start(a="tab\tis fine"))


def test_the_servers_headers_are_added_where_custom_code_has_none() -> None:
    scope = {"request_id": "7", SHARED: [(b"vary", b"origin")]}
    sized = [(b"content-length", b"5"), (b"X-Request-Id", b"own")]
    assert custom._with_own(scope, sized, is_sized=True) == [*sized, (b"vary", b"origin")]
    assert custom._with_own(scope, [], is_sized=False) == [(b"x-request-id", b"7"), (b"vary", b"origin"), AS_IT_COMES]


def test_a_form_has_a_limit_of_fields() -> None:
    assert custom._fields("a=1&b=") == {"a": b"1", "b": b""}
    assert custom._fields("a=%ff") == {"a": b"\xff"}
    assert custom._fields("a=1&" * 9_999 + "b=2") == {"a": b"1", "b": b"2"}
    with pytest.raises(BadRequest, match=r"^the form has more than 10000 fields$"):
        custom._fields("a=1&" * 10_000 + "b=2")


# -- what `handle` of model.py answers ---------------------------------------------------------------------------------


class Parts:
    """Parts of a streamed body, one after another."""

    def __init__(self, *parts: Any) -> None:
        self._parts = list(parts)

    async def next(self) -> Any:
        await asyncio.sleep(0)
        return self._parts.pop(0) if self._parts else None


class Staying:
    """An exchange whose client stays until it is told to go."""

    def __init__(self) -> None:
        self.is_over = False
        self.event = asyncio.Event()

    def wake(self) -> None:
        self.event.set()

    async def wait(self) -> None:
        await self.event.wait()
        self.event.clear()


def answered(answer: Answer, *, leaves: bool = False) -> list[Any]:
    sent: list[Any] = []

    async def run() -> None:
        client: Any = Staying()

        async def send(message: Any) -> None:
            sent.append(message)
            client.is_over = leaves and message["type"] == "http.response.body"

        await custom._send({"request_id": "7", SHARED: [(b"vary", b"origin")]}, send, answer, client)

    asyncio.run(run())
    return sent


def test_a_whole_answer_of_handle_has_its_length() -> None:
    begun, body = answered(Answer(201, [("x-request-id", "own")], b"hello"))
    assert (begun["status"], body["body"]) == (201, b"hello")
    assert begun["headers"] == [(b"x-request-id", b"own"), (b"vary", b"origin"), (b"content-length", b"5")]


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
