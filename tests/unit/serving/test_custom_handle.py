"""The calls of a user's `handle`: one by one or side by side, their streams, and what a client that goes leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError, Overloaded, Unavailable
from handler.core.user_functions import Role
from handler.plugins.handle import Answer, Broken, Call, Handle, PassOn
from handler.serving import custom_handle
from handler.serving.custom_handle import CustomHandle
from handler.serving.quota import Quota
from handler.serving.request.life import Life

PLENTY = Quota(1 << 30, 0, 0, "too much")


def test_the_end_of_the_server_ends_the_watch_of_a_hung_loop() -> None:
    free = threading.Event()

    async def hang(item: Call) -> None:
        free.wait()

    async def run() -> None:
        config = Config(predict_timeout=600, model_loading_timeout=0.01)
        handle = CustomHandle(Handle(hang, Role.ALONE, {}, {}), config, PLENTY)
        before = asyncio.all_tasks()
        with pytest.raises(ConfigError, match=r"did not end within 0\.01 s"):
            await handle.begin()
        watch = asyncio.all_tasks() - before
        assert watch
        handle.close()
        await asyncio.wait(watch, timeout=20)
        free.set()
        assert all(task.cancelled() for task in watch)

    asyncio.run(run())


# -- any handle ----------------------------------------------------------------------------------------------------

Respond = Callable[[Call], Any]


class Closing:
    """An iterator of parts that knows whether it was closed."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = iter(parts)
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._parts)

    def close(self) -> None:
        self.closed.set()


class ClosingAlone(Closing):
    """The same, asynchronous."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return next(self._parts)
        except StopIteration:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        self.closed.set()


async def coroutine(item: Any) -> None: ...


def plain(item: Any) -> None: ...


@pytest.fixture(params=[plain, coroutine], ids=["plain", "coroutine"])
def function(request: pytest.FixtureRequest) -> Any:
    return request.param


def told(
    monkeypatch: pytest.MonkeyPatch,
    function: Any,
    respond: Respond,
    story: Callable[[CustomHandle], Awaitable[None]],
    *,
    role: Role = Role.ALONE,
    memory: Quota = PLENTY,
    properties: dict[str, str] | None = None,
    **options: Any,
) -> None:
    """Tell a story of a handle whose results are the test's own."""

    def call(handle: Handle, item: Call) -> list[Any]:
        return [respond(item)]

    async def call_async(handle: Handle, item: Call) -> Any:
        result = respond(item)
        return await result if asyncio.iscoroutine(result) else result

    monkeypatch.setattr(custom_handle, "call", call)
    monkeypatch.setattr(custom_handle, "call_async", call_async)

    async def main() -> None:
        given = Handle(function, role, properties or {"a": "first"}, {"b": "always"})
        made = CustomHandle(given, Config(**options), memory)
        try:
            await story(made)
        finally:
            made.close()

    asyncio.run(main())


def test_owners_take_turns_to_call_a_plain_function(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()

    def respond(item: Call) -> Answer:
        called.append(item.properties["name"])
        return Answer(200)

    async def story(handle: CustomHandle) -> None:
        names = ("a0", "a1", "a2", "a3", "b0", "b1")
        await asyncio.gather(*(handle.answer({}, {"name": name}, Life(), name[0]) for name in names))
        assert called == ["a0", "a1", "b0", "a2", "b1", "a3"]

    told(monkeypatch, plain, respond, story)


def test_a_call_has_its_own_properties_and_those_of_every_call(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    seen = list[tuple[Any, Any]]()

    def respond(item: Call) -> Answer:
        seen.append((dict(item.content), dict(item.properties)))
        return Answer(200, body=b"x")

    async def story(handle: CustomHandle) -> None:
        await handle.begin()
        assert (await handle.answer({"data": b"1"}, {"c": "own"}, Life())).body == b"x"

    told(monkeypatch, function, respond, story)
    first, second = seen
    assert first[1].items() >= {"a": "first"}.items()
    assert second[1].items() >= {"b": "always", "c": "own"}.items()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(300, body=b"no weights"), "no weights"),
        (Answer(507, body=b"x"), "out of memory"),
        (Answer(500, body=b"\xff" + b"y" * 2000), "\ufffd" + "y" * 999),
    ],
)
def test_a_first_call_that_fails_stops_a_start_without_an_engine(
    answer: Answer, words: str, monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    async def fails(handle: CustomHandle) -> None:
        with pytest.raises(ConfigError) as raised:
            await handle.begin()
        assert str(raised.value).endswith(f" failed when it was called to initialize: {words}")

    async def goes_on(handle: CustomHandle) -> None:
        await handle.begin()

    told(monkeypatch, function, lambda item: answer, fails)
    told(monkeypatch, function, lambda item: answer, goes_on, role=Role.FIRST)
    told(monkeypatch, function, lambda item: Answer(299), goes_on)
    told(monkeypatch, function, lambda item: PassOn(None), goes_on)


def test_a_first_call_may_take_as_long_as_a_model_loads(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    async def story(handle: CustomHandle) -> None:
        call = mock.AsyncMock(return_value=[Answer(200)])
        monkeypatch.setattr(handle._runs, "call", call)
        await handle.begin()
        assert call.call_args.args[1] == 7.0
        call.side_effect = Unavailable("it did not end")
        with pytest.raises(ConfigError, match=r"^it did not end \(option\.model_loading_timeout\)$"):
            await handle.begin()

    told(monkeypatch, function, lambda item: Answer(200), story, model_loading_timeout=7.0, predict_timeout=600)


@pytest.mark.parametrize("kind", [Closing, ClosingAlone])
def test_parts_of_a_stream_are_read_to_their_end(kind: type[Closing], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = kind(b"1", b"2")

    async def story(handle: CustomHandle) -> None:
        answer = await handle.answer({}, {}, Life())
        assert isinstance(answer, Answer)
        assert [await answer.parts.next() for _ in range(4)] == [b"1", b"2", None, None]
        assert answer.parts.ended.is_set()
        life = Life()
        again = await asyncio.wait_for(handle.answer({}, {}, life), 20)
        life.close()
        life.close()
        assert await again.parts.next() is None  # type: ignore[union-attr]
        await asyncio.to_thread(parts.closed.wait, 20)
        assert parts.closed.is_set()

    function = coroutine if kind is ClosingAlone else plain
    told(monkeypatch, function, lambda item: Answer(200, parts=parts), story, job_queue_size=1)


def test_a_coroutine_may_return_a_plain_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(handle: CustomHandle) -> None:
        answer = await handle.answer({}, {}, Life())
        assert [await answer.parts.next() for _ in range(3)] == [b"1", b"2", None]  # type: ignore[union-attr]

    told(monkeypatch, coroutine, lambda item: Answer(200, parts=iter([b"1", b"2"])), story)


def test_a_part_that_is_late_breaks_its_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()

    def slow() -> Iterator[bytes]:
        yield b"1"
        free.wait()
        yield b"2"

    async def story(handle: CustomHandle) -> None:
        answer = await handle.answer({}, {}, Life())
        assert isinstance(answer, Answer)
        assert await answer.parts.next() == b"1"
        broken = await answer.parts.next()
        assert isinstance(broken, Broken)
        assert answer.parts.ended.is_set()
        assert await answer.parts.next() is None
        free.set()

    told(monkeypatch, plain, lambda item: Answer(200, parts=slow()), story, predict_timeout=0.05)
    assert any("within 0.05 s" in message for message in caplog.messages)


def test_a_call_that_is_late_is_answered_and_logged(
    monkeypatch: pytest.MonkeyPatch, function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()

    def respond(item: Call) -> Any:
        if function is plain:
            free.wait()
            return Answer(200)
        return asyncio.sleep(600)

    async def story(handle: CustomHandle) -> None:
        answer = await handle.answer({}, {}, Life())
        assert isinstance(answer, Answer)
        assert answer.status == 503
        free.set()

    told(monkeypatch, function, respond, story, predict_timeout=0.05)
    assert [message for message in caplog.messages if "within 0.05 s" in message]


def test_as_many_coroutines_run_as_may_wait_and_their_streams_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(handle: CustomHandle) -> None:
        life = Life()
        await handle.answer({}, {}, life)
        await handle.answer({}, {}, Life())
        refused = await handle.answer({}, {}, Life())
        assert isinstance(refused, Answer)
        assert (refused.status, b"the queue is full (job_queue_size=2)" in refused.body) == (503, True)
        life.close()
        third = await handle.answer({}, {}, Life())
        assert third.status == 200  # type: ignore[union-attr]

    told(monkeypatch, coroutine, lambda item: Answer(200, parts=ClosingAlone(b"1")), story, job_queue_size=2)


def test_calls_that_run_count_until_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    async def later(free: asyncio.Event) -> Answer:
        await free.wait()
        return Answer(200)

    async def story(handle: CustomHandle) -> None:
        waiting = asyncio.ensure_future(handle.answer({}, {}, Life()))
        await asyncio.sleep(0)
        refused: Any = await handle.answer({}, {}, Life())
        assert (refused.status, b"the queue is full (job_queue_size=1)" in refused.body) == (503, True)
        waiting.cancel()
        await asyncio.wait([waiting])
        another = asyncio.ensure_future(handle.answer({}, {}, Life()))
        await asyncio.sleep(0)
        assert not another.done()
        another.cancel()

    told(monkeypatch, coroutine, lambda item: later(asyncio.Event()), story, job_queue_size=1)


def test_a_client_that_goes_while_it_waits_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, free, calls = threading.Event(), threading.Event(), list[bytes]()

    def respond(item: Call) -> Answer:
        begun.set()
        calls.append(item.content["data"])
        free.wait(20)
        return Answer(200, body=b"x")

    async def story(handle: CustomHandle) -> None:
        first, gone, last = (
            asyncio.ensure_future(handle.answer({"data": name}, {}, Life())) for name in (b"1", b"2", b"3")
        )
        await asyncio.to_thread(begun.wait, 20)
        gone.cancel()
        await asyncio.wait([gone])
        free.set()
        assert [(await asyncio.wait_for(one, 20)).body for one in (first, last)] == [b"x", b"x"]
        assert calls == [b"1", b"3"]

    told(monkeypatch, plain, respond, story)


def test_a_stream_of_a_client_that_went_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, free, parts = threading.Event(), threading.Event(), Closing(b"1")

    def respond(item: Call) -> Answer:
        begun.set()
        free.wait(20)
        return Answer(200, parts=parts) if item.content else Answer(200, body=b"next")

    async def story(handle: CustomHandle) -> None:
        gone = asyncio.ensure_future(handle.answer({"data": b"1"}, {}, Life()))
        await asyncio.to_thread(begun.wait, 20)
        gone.cancel()
        await asyncio.wait([gone])
        free.set()
        following = await asyncio.wait_for(handle.answer({}, {}, Life()), 20)
        assert following.body == b"next"
        assert parts.closed.is_set()

    told(monkeypatch, plain, respond, story)


def test_a_plain_function_is_not_called_before_a_stream_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, calls = threading.Event(), list[bool]()

    def made() -> Iterator[bytes]:
        yield b"1"
        ended.wait(20)

    def respond(item: Call) -> Answer:
        calls.append(ended.is_set())
        return Answer(200, parts=made())

    async def story(handle: CustomHandle) -> None:
        with Life() as life:
            first = await handle.answer({}, {}, life)
            second = asyncio.ensure_future(handle.answer({}, {}, life))
            assert await first.parts.next() == b"1"  # type: ignore[union-attr]
            ended.set()
            await asyncio.wait_for(second, 20)

    told(monkeypatch, plain, respond, story)
    assert calls == [False, True]


def test_calls_that_wait_at_the_end_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, free = threading.Event(), threading.Event()

    def respond(item: Call) -> Answer:
        begun.set()
        free.wait(20)
        return Answer(200)

    async def story(handle: CustomHandle) -> None:
        waiting = [asyncio.ensure_future(handle.answer({}, {}, Life())) for _ in range(2)]
        await asyncio.to_thread(begun.wait, 20)
        handle.close()
        free.set()
        done, _ = await asyncio.wait(waiting, timeout=20)
        assert done == {*waiting}
        assert all(one.cancelled() for one in waiting)

    told(monkeypatch, plain, respond, story)


@pytest.mark.parametrize("kind", [Closing, ClosingAlone])
def test_a_stream_that_fails_to_close_is_logged(
    kind: type[Closing], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = kind(b"1")

    def fail() -> None:
        parts.closed.set()
        raise ValueError("no")

    async def fail_alone() -> None:
        fail()

    monkeypatch.setattr(parts, "close", fail)
    monkeypatch.setattr(parts, "aclose", fail_alone, raising=False)

    async def story(handle: CustomHandle) -> None:
        with Life() as life:
            await handle.answer({}, {}, life)
        await asyncio.to_thread(parts.closed.wait, 20)
        with Life() as life:
            await asyncio.wait_for(handle.answer({}, {}, life), 20)

    function = coroutine if kind is ClosingAlone else plain
    told(monkeypatch, function, lambda item: Answer(200, parts=parts), story)
    assert any(message.endswith(" failed when its stream was closed") for message in caplog.messages)


@pytest.mark.parametrize(
    ("role", "engine", "files"), [(Role.ALONE, "echo", ()), (Role.FIRST, "echo", "some"), (Role.FIRST, "openvino", ())]
)
def test_a_model_of_s3_is_downloaded_as_its_engine_needs_it(
    role: Role, engine: str, files: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    download, seen = mock.Mock(return_value=tmp_path), list[Any]()
    monkeypatch.setattr("handler.engines.s3.download", download)

    def respond(item: Call) -> Answer:
        seen.append(item.properties["model_id"])
        return Answer(200)

    async def story(handle: CustomHandle) -> None:
        await handle.begin()

    told(monkeypatch, plain, respond, story, role=role, properties={"model_id": "s3://a/b/"}, llm_engine=engine)
    assert seen == [str(tmp_path)]
    assert download.call_args.args[0] == "s3://a/b/"
    assert bool(download.call_args.args[1]) is bool(files)


def test_the_parts_of_a_request_that_has_ended_are_closed_when_they_arrive(
    monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    parts = Closing(b"1") if function is plain else ClosingAlone(b"1")

    async def story(handle: CustomHandle) -> None:
        with Life() as life:
            pass
        response = await handle.answer({}, {}, life)
        assert await response.parts.next() is None  # type: ignore[union-attr]
        await asyncio.to_thread(parts.closed.wait, 20)
        assert parts.closed.is_set()

    told(monkeypatch, function, lambda item: Answer(200, parts=parts), story)


# -- a client that reads slowly holds up nobody else -------------------------------------------------------------------

MIB = 1 << 20


class Large(Closing):
    """Parts of 1 MiB, as many as are asked for."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.num_made, self._most = 0, most

    def __next__(self) -> bytes:
        if self.num_made == self._most:
            raise StopIteration
        self.num_made += 1
        return bytes(MIB)


def streams(parts: Large) -> Respond:
    return lambda item: Answer(200, parts=parts) if item.content else Answer(200, body=b"next")


def test_who_waits_for_the_function_does_not_wait_for_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, memory = Large(40), Quota(100 * MIB, 0, 0, "too much")

    async def story(handle: CustomHandle) -> None:
        life = Life()
        slow = await handle.answer({"data": b"1"}, {}, life)
        assert isinstance(slow, Answer)
        following = await asyncio.wait_for(handle.answer({}, {}, Life()), 20)
        assert isinstance(following, Answer)
        assert (following.body, parts.num_made, memory.taken) == (b"next", 40, 40 * MIB)
        assert await slow.parts.next() == bytes(MIB)
        assert memory.taken == 40 * MIB  # the part may not have been sent yet
        while await slow.parts.next() is not None:
            pass
        assert memory.taken == 0
        life.close()
        assert memory.taken == 0

    told(monkeypatch, plain, streams(parts), story, memory=memory)


def test_while_nobody_waits_the_function_is_not_far_ahead_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Large(40)

    async def story(handle: CustomHandle) -> None:
        slow = await handle.answer({"data": b"1"}, {}, Life())
        assert isinstance(slow, Answer)
        for taken in range(1, 41):
            assert await slow.parts.next() == bytes(MIB)
            assert parts.num_made <= taken + 17
        assert await slow.parts.next() is None

    told(monkeypatch, plain, streams(parts), story)


def test_a_client_for_whose_bytes_there_is_no_memory_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, memory = Large(40), Quota(20 * MIB, 0, 0, "too much")

    async def story(handle: CustomHandle) -> None:
        life = Life()
        slow = await handle.answer({"data": b"1"}, {}, life)
        assert isinstance(slow, Answer)
        following = await asyncio.wait_for(handle.answer({}, {}, Life()), 20)
        assert isinstance(following, Answer)
        assert (following.body, memory.taken, parts.closed.is_set()) == (b"next", 0, True)
        with pytest.raises(Overloaded):
            await slow.parts.next()
        life.close()

    told(monkeypatch, plain, streams(parts), story, memory=memory)


def test_a_client_may_leave_unread_exactly_the_bytes_for_which_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, memory = Large(20), Quota(20 * MIB, 0, 0, "too much")

    async def story(handle: CustomHandle) -> None:
        life = Life()
        slow = await handle.answer({"data": b"1"}, {}, life)
        assert isinstance(slow, Answer)
        await asyncio.wait_for(handle.answer({}, {}, Life()), 20)
        assert memory.taken == 20 * MIB
        assert [await slow.parts.next() for _ in range(21)] == [*[bytes(MIB)] * 20, None]
        life.close()

    told(monkeypatch, plain, streams(parts), story, memory=memory)


def test_what_a_client_leaves_unread_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a part that the function returns after the client has gone."""
    begun, free, memory = threading.Event(), threading.Event(), Quota(100 * MIB, 0, 0, "too much")

    def made() -> Iterator[bytes]:
        yield bytes(MIB)
        begun.set()
        free.wait(20)
        yield bytes(MIB)

    async def story(handle: CustomHandle) -> None:
        life = Life()
        await handle.answer({"data": b"1"}, {}, life)
        await asyncio.to_thread(begun.wait, 20)
        assert memory.taken == MIB
        life.close()
        assert memory.taken == 0
        free.set()
        assert (await asyncio.wait_for(handle.answer({}, {}, Life()), 20)).body == b"next"
        assert memory.taken == 0

    parts = made()
    respond: Respond = lambda item: Answer(200, parts=parts) if item.content else Answer(200, body=b"next")  # noqa: E731
    told(monkeypatch, plain, respond, story, memory=memory)


def test_a_request_does_not_wait_for_the_function_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the other client's stream comes in time, but there is no end to them."""
    closed = threading.Event()

    def endless() -> Iterator[bytes]:
        try:
            while True:
                yield b"x"
                closed.wait(0.01)
        finally:
            closed.set()

    async def story(handle: CustomHandle) -> None:
        life = Life()
        await handle.answer({"data": b"1"}, {}, life)
        refused = await asyncio.wait_for(handle.answer({}, {}, Life()), 20)
        assert isinstance(refused, Answer)
        assert (refused.status, b"option.predict_timeout" in refused.body) == (503, True)
        life.close()
        assert (await asyncio.wait_for(handle.answer({}, {}, Life()), 20)).body == b"next"

    parts = endless()
    respond: Respond = lambda item: Answer(200, parts=parts) if item.content else Answer(200, body=b"next")  # noqa: E731
    told(monkeypatch, plain, respond, story, predict_timeout=0.2)
