"""Bodies as they are received, headers of answers, and the sender of a stream, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from handler.core.errors import NotFound, Overloaded, TooLarge, TooSlow
from handler.http import inference
from handler.http.exchange import EXCHANGE, AsgiExchange
from handler.http.inference import (
    BodyWriter,
    Endpoint,
    Writing,
    _end_of,
    again,
    declared_length,
    headers_by_name,
    path_of,
    read_body,
    send_answer,
    send_error,
    send_json,
    shows,
)
from handler.protocols.kernel.errors import SERVER, HttpResponse
from handler.serving.quota import BODY_MEMORY, Quota, Share
from tests.one_test import in_one_test


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))


class Sent:
    """What an application sends."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])


def scope_of(method: str = "POST", path: str = "/a", **headers: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return {
        "method": method,
        "path": path,
        "request_id": "7",
        "headers_by_name": named,
        "query_string": b"",
        "extensions": {EXCHANGE: AsgiExchange(parts(), Sent().send, "1.1")},
    }


# -- bodies ------------------------------------------------------------------------------------------------------------


class Model:
    """What receiving a body needs of a model."""

    def __init__(self, memory: int = 10_000, client_timeout: float = 30.0) -> None:
        self.quota = Quota(memory, 0, 0, "too many bodies")
        self.admission = SimpleNamespace(memory=self.quota)
        self.config = SimpleNamespace(client_timeout=client_timeout, max_request_size=3)
        self.num_receiving = 0

    @property
    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        self.num_receiving += 1
        yield
        self.num_receiving -= 1


def parts(*bodies: bytes, end: bool = True, waits: bool = False) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Return a `receive` for a body in parts; the client disconnects after them unless they are its end."""
    left = list(bodies)

    async def receive() -> Any:
        if waits:
            await asyncio.sleep(0)
        if not left:
            if not end:
                return {"type": "http.disconnect"}
            await asyncio.get_running_loop().create_future()
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left) or not end}

    return receive


@pytest.mark.parametrize("waits", [False, True])
def test_a_body_is_joined_from_its_parts(waits: bool) -> None:
    async def story() -> None:
        model: Any = Model()
        assert await read_body(scope_of(), parts(b"a", b"", b"bc", waits=waits), 3, model) == b"abc"
        assert model.num_receiving == 0
        with Share(model.quota) as memory:
            await read_body(scope_of(), parts(b"a", b"bc", waits=waits), 3, model, memory)
            assert memory.size == BODY_MEMORY * 3

    run(story)


def test_a_client_that_leaves_during_its_body_gets_nothing() -> None:
    async def story() -> None:
        model: Any = Model()
        with pytest.raises(ClientDisconnect):
            await read_body(scope_of(), parts(b"a", end=False), 9, model)

    run(story)


def test_a_body_beyond_the_limit_is_refused_as_soon_as_it_is_seen() -> None:
    async def story() -> None:
        model: Any = Model()
        for body, given_up in ((parts(b"abc", b"d"), False), (parts(b"abcd", b"e"), True)):
            scope = scope_of()
            with Share(model.quota) as memory:
                with pytest.raises(TooLarge, match=r"^the body has more than 3 bytes \(max_request_size\)$"):
                    await read_body(scope, body, 3, model, memory)
                assert memory.size == 0, "another request may use it"
            assert (inference.GIVEN_UP in scope) == given_up

    run(story)


def test_a_length_beyond_the_limit_is_refused_before_the_body() -> None:
    async def receive() -> Any:
        raise AssertionError("the body is not read")

    async def story() -> None:
        model: Any = Model()
        scope = scope_of(content_length="4")
        told = r"^the body has 4 bytes; at most 3 are allowed \(max_request_size\)$"
        with pytest.raises(TooLarge, match=told):
            await read_body(scope, receive, 3, model)
        assert scope[inference.GIVEN_UP] is True
        with pytest.raises(TooLarge, match=r"^the body has 4 bytes; at most 2 are allowed$"):
            await read_body(scope, receive, 2, model)  # a limit of the route's own
        assert await read_body(scope_of(content_length="3"), parts(b"abc"), 3, model) == b"abc"

    run(story)


def test_a_body_for_which_there_is_no_memory_is_refused() -> None:
    async def story() -> None:
        model: Any = Model(BODY_MEMORY * 4)
        assert await read_body(scope_of(), parts(b"abcd"), 9, model) == b"abcd"
        assert await read_body(scope_of(), parts(b"abcd"), 9, model) == b"abcd", "it was given back"
        scope = scope_of()
        with pytest.raises(Overloaded):
            await read_body(scope, parts(b"abcd", b"e", b"f"), 9, model)
        assert scope[inference.GIVEN_UP] is True

    run(story)


def test_a_body_that_comes_too_slowly_is_given_up() -> None:
    async def story() -> None:
        model: Any = Model(client_timeout=0.01)
        scope = scope_of()

        async def receive() -> Any:
            await asyncio.get_running_loop().create_future()

        with pytest.raises(TooSlow, match=r"^the body did not arrive within 0.01 s \(option.client_timeout\)$"):
            await read_body(scope, receive, 9, model)
        assert scope[inference.GIVEN_UP] is True

    run(story)


@in_one_test(
    ("header", "length"),
    [
        ("", 0),
        ("0", 0),
        ("007", 7),
        ("12", 12),
        ("-1", 0),
        ("1.5", 0),
        ("1" + "0" * 17, 10**17),
        ("9" * 40, 10**18 - 1),
    ],
)
def test_a_declared_length_is_read_up_to_any_size(header: str, length: int) -> None:
    assert declared_length(scope_of(content_length=header)) == length
    assert declared_length(scope_of()) == 0


def test_a_body_can_be_read_again_and_then_what_follows() -> None:
    async def story() -> None:
        receive = again(b"body", parts(b"next"))
        assert await receive() == {"type": "http.request", "body": b"body", "more_body": False}
        assert (await receive())["body"] == b"next"

    run(story)


def test_the_first_of_several_headers_with_a_name_counts() -> None:
    scope = {"headers": [(b"a", b"1"), (b"b", b"\xe9"), (b"a", b"2")]}
    assert headers_by_name(scope) == {"a": "1", "b": "é"}


def test_the_values_of_a_list_are_joined() -> None:
    lists = [
        (b"content-encoding", b"gzip"), (b"accept", b"text/html"), (b"x-amzn-sagemaker-custom-attributes", b"a=1,b=2"),
        (b"content-encoding", b"identity"), (b"x-amzn-sagemaker-custom-attributes", b"adapter=x"), (b"host", b"a"),
        (b"accept", b"*/*"), (b"host", b"b"),
    ]  # fmt: skip
    assert headers_by_name({"headers": lists}) == {
        "content-encoding": "gzip, identity",
        "accept": "text/html, */*",
        "x-amzn-sagemaker-custom-attributes": "a=1,b=2;adapter=x",
        "host": "a",
    }


def test_the_path_of_a_request_has_its_query() -> None:
    assert path_of({"path": "/a", "query_string": b"b=c"}) == "/a?b=c"
    assert path_of({"path": "/a", "query_string": b""}) == "/a"


# -- answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_has_its_length_its_id_and_the_shared_headers() -> None:
    async def story() -> None:
        sent = Sent()
        scope = scope_of() | {inference.SHARED: [(b"vary", b"origin")]}
        await send_answer(scope, sent.send, HttpResponse(200, "a/b", b"body"), [(b"x-extra", b"1")])
        start, body = sent.messages
        assert (start["status"], body["body"]) == (200, b"body")
        assert sent.headers == {
            b"content-type": b"a/b",
            b"x-request-id": b"7",
            b"vary": b"origin",
            b"content-length": b"4",
            b"x-extra": b"1",
        }

    run(story)


def test_after_a_body_that_was_given_up_the_connection_is_closed() -> None:
    async def story() -> None:
        for given_up in (True, False):
            sent, scope = Sent(), scope_of()
            if given_up:
                scope[inference.GIVEN_UP] = True
            await send_json(scope, sent.send, 200, {"a": 1})
            assert (sent.headers.get(b"connection") == b"close") == given_up

    run(story)


def test_a_refusal_is_logged_with_the_beginning_of_its_path(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sent = Sent()

    async def story() -> None:
        await send_error(scope_of(path="/" + "x" * 300), sent.send, NotFound("no such thing"))

    run(story)
    assert caplog.messages == [f"id=7 status=404 method=POST path={'/' + 'x' * 199!r}"]
    assert caplog.records[0].fields["status"] == 404  # type: ignore[attr-defined]
    assert sent.messages[0]["status"] == 404
    assert b"no such thing" in sent.messages[1]["body"]


def test_an_endpoint_answers_its_methods_and_names_them_to_others() -> None:
    async def story() -> None:
        for methods, method, status, allow in (
            (("GET", "POST"), "GET", 200, None),
            (("GET", "POST"), "HEAD", 200, None),
            (("GET", "POST"), "OPTIONS", 200, None),
            (("GET", "POST"), "DELETE", 405, b"GET, HEAD, POST"),
            (("POST",), "HEAD", 405, b"POST"),
        ):
            sent = Sent()
            endpoint = Endpoint(dict.fromkeys(methods, shows(lambda scope: scope["method"])))
            await endpoint(scope_of(method), again(b"", parts()), sent.send)
            assert (sent.messages[0]["status"], sent.headers.get(b"allow")) == (status, allow)
        assert sent.messages[1]["body"].strip().startswith(b"{")

    run(story)


def test_an_endpoint_is_not_changed_once_it_is_made() -> None:
    endpoint = Endpoint({})
    assert endpoint.errors is None
    with pytest.raises(FrozenInstanceError):
        endpoint.errors = SERVER  # type: ignore[misc]


# -- streams -----------------------------------------------------------------------------------------------------------


class Channel:
    """An exchange that accepts chunks as told."""

    is_over = False

    def __init__(self) -> None:
        self.is_paused = False
        self.written_at, self.num_unsent = 0.0, 0
        self.calls: list[str] = []
        self.waits: list[float | None] = []

    def wake(self) -> None:
        self.calls.append("wake")

    def resume(self) -> None:
        self.calls.append("resume")

    def write_chunk(self, data: bytes) -> bool:
        raise OSError("closed")

    async def wait(self, seconds: float | None = None) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0)


def test_phases_of_a_writer_are_in_order() -> None:
    assert Writing.OPEN < Writing.ENDED < Writing.BROKEN < Writing.OVERFLOWED


def test_a_stream_to_a_closed_connection_is_broken() -> None:
    num_sent = [0]

    async def closed(message: Any) -> None:
        num_sent[0] += 1
        raise OSError("closed")

    async def story() -> None:
        for last in (False, True):
            channel: Any = Channel()
            writer = BodyWriter(closed, channel)
            writer.write(b"a", last=last)
            assert (writer.phase, channel.is_paused) == (Writing.BROKEN, True)
            writer.write(b"b")
            assert channel.calls == ["wake"], "once"
        assert num_sent == [2], "nothing is sent after that"
        channel = Channel()
        writer = BodyWriter(closed, channel)
        task: Any = SimpleNamespace(take=lambda: b"a", finished=False)
        writer.pull(task)
        assert writer.phase is Writing.BROKEN

    run(story)


def test_a_connection_that_closes_while_a_part_waits_is_broken() -> None:
    async def story() -> None:
        go_on = asyncio.Event()

        async def send(message: Any) -> None:
            await go_on.wait()
            raise OSError("closed")

        channel: Any = Channel()
        writer = BodyWriter(send, channel)
        writer.write(b"a")
        assert channel.calls == []
        go_on.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert writer.phase is Writing.BROKEN
        assert "wake" in channel.calls

    run(story)


def test_a_client_that_leaves_too_much_unread_overflows() -> None:
    async def story() -> None:
        full = asyncio.Event()

        async def send(message: Any) -> None:
            await full.wait()

        counted: list[int] = []
        channel: Any = Channel()
        channel.num_unsent = 5
        writer = BodyWriter(send, channel, counted.append)
        writer.write(bytes(16 << 20))
        assert (writer.phase, counted) == (Writing.OPEN, [(16 << 20) + 5])
        writer.write(b"!")
        assert writer.phase is Writing.OVERFLOWED
        assert channel.calls == ["wake"]
        full.set()

    run(story)


def test_a_writer_that_is_closed_waits_for_its_client_no_longer() -> None:
    """By gRPC, nothing else ends it: the room in the outbox never comes."""

    async def story() -> None:
        sent, counted, tasks = list[Any](), list[int](), asyncio.all_tasks()

        async def send(message: Any) -> None:
            await asyncio.Event().wait()
            sent.append(message)

        channel: Any = Channel()
        writer = BodyWriter(send, channel, counted.append)
        writer.write(b"a")
        writer.write(b"b")
        before, (writing,) = [*counted], asyncio.all_tasks() - tasks
        writer.close()
        await asyncio.wait([writing], timeout=20)
        writer.write(b"c")
        assert asyncio.all_tasks() == tasks
        assert (writer.phase, sent, counted) == (Writing.BROKEN, [], before)

    run(story)


def test_a_stream_that_ends_while_its_client_is_full_ends_in_order() -> None:
    async def story() -> None:
        room, sent = asyncio.Event(), list[Any]()

        async def send(message: Any) -> None:
            await room.wait()
            sent.append((message["body"], message["more_body"]))

        channel: Any = Channel()
        writer = BodyWriter(send, channel)
        for chunk, last in ((b"a", False), (b"b", False), (b"c", True)):
            writer.write(chunk, last=last)
        assert channel.is_paused
        room.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert sent == [(b"a", True), (b"bc", False)]
        assert channel.calls == [], "nothing follows"

    run(story)


def keeping(alive: bytes, *, phase: Writing = Writing.OPEN, silent: float = 0.0) -> tuple[list[Any], list[Any]]:
    """Return the waits of a stream that has been silent for so long, and what was written meanwhile."""
    written: list[Any] = []
    channel: Any = Channel()
    channel.written_at = time.monotonic() - silent
    writer: Any = SimpleNamespace(phase=phase, write=written.append)

    async def story() -> None:
        waiting = asyncio.ensure_future(_end_of(writer, channel, alive))
        await asyncio.sleep(0)
        channel.is_over = True
        await waiting

    run(story)
    return channel.waits, written


def test_a_silent_stream_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    assert keeping(b":", silent=4.0) == ([11.0], [])
    assert keeping(b":", silent=15.0) == ([15.0], [b":"])
    assert keeping(b":", silent=40.0) == ([15.0], [b":"])
    assert keeping(b"", silent=40.0) == ([None], [])
    assert keeping(b":", phase=Writing.ENDED, silent=40.0) == ([None], [])
    assert keeping(b":", phase=Writing.BROKEN) == ([], [])
