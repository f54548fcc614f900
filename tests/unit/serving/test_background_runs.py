"""The events of a running background response: those in memory, and the limit on all of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest

from handler.config.config import Config
from handler.core.errors import Unavailable
from handler.protocols.kernel.stored import Detached, KeptResponse
from handler.serving.background.runs import BackgroundRun, EventLog, RunState


def in_memory(log: EventLog) -> Sequence[bytes]:
    """The events that are in memory: the latest written ones, then the others."""
    first = next(number for number in range(log.written + 1) if log.read(number) is not None)
    return [*(log.read(first) or ()), *log.pending]


def test_the_size_is_that_of_the_events_in_memory() -> None:
    draw = random.Random(20261129)
    log, events = EventLog([b"created", b"queued"]), [b"created", b"queued"]
    for _ in range(300):
        new = [draw.randbytes(draw.randrange(1, 4000)) for _ in range(draw.randrange(5))]
        log.add(new)
        events += new
        log.note_written(draw.randrange(len(log.pending) + 1))
        assert log.size == sum(map(len, in_memory(log)))
        assert log.size <= (1 << 16) + 4000 + sum(map(len, log.pending))
        assert log.read(log.written - 1) == events[log.written - 1 : log.written]
    log.add([b"last"])
    log.drop_pending()
    assert (log.size, log.pending) == (sum(map(len, in_memory(log))), [])


def begun(task: mock.Mock, limit: int) -> BackgroundRun:
    """A run whose response is in progress."""
    queued = KeptResponse("resp_1", "response", "", False, {"status": "queued"}, (), ())
    detached = Detached(queued, (), streams=True)
    run = BackgroundRun(task, detached, Config(background_max_bytes=limit), mock.Mock())
    detached.begin("resp_1", {"status": "in_progress", "output": []})
    run.begin()
    return run


@pytest.mark.parametrize("events", [b"", b"event: response.in_progress\n\n"])
def test_a_response_whose_last_event_is_missing_has_failed(events: bytes) -> None:
    async def end() -> BackgroundRun:
        task = mock.Mock(error=None, finished=False)
        run = begun(task, 1000)
        task.finished, task.take.return_value = True, events
        task.on_bytes(task)
        return run

    run = asyncio.run(end())
    assert (run.state, run.response["status"]) == (RunState.ENDING, "failed")


def test_events_may_have_as_many_bytes_as_the_limit() -> None:
    async def fails(*sizes: int) -> bool:
        task = mock.Mock(error=None, finished=False)
        begun(task, 100)
        for size in sizes:
            task.take.return_value = b"x" * (size - 2) + b"\n\n"
            task.on_bytes(task)
        await asyncio.sleep(0)
        return bool(task.fail.called)

    assert not asyncio.run(fails(60, 40))
    assert asyncio.run(fails(60, 41))


@pytest.mark.parametrize(("failures", "status", "written"), [(0, "completed", 1), (1, "failed", 1), (2, "failed", 0)])
def test_a_response_that_cannot_be_stored_fails_and_is_written_later(failures: int, status: str, written: int) -> None:
    writes = list[tuple[str, bytes]]()

    def write(owner: object, end: object, *arguments: Any, needs_room: bool) -> Future[bool]:
        future, (_, _, response, events) = Future[bool](), arguments
        if len(tried) < failures:
            future.set_exception(Unavailable("full"))
        else:
            writes.append((response["status"], b"".join(events)))
            future.set_result(True)
        tried.append(needs_room)
        return future

    async def end() -> None:
        task = mock.Mock(error=None, finished=False)
        run, store = begun(task, 1000), mock.Mock(write=write)
        run.detached.begin("resp_1", {"status": "completed", "output": [{"id": "msg_1"}]})
        task.take.return_value = b"event: delta\n\nevent: done\n\n"
        task.on_bytes(task)
        assert await run.write_end(store) is (written == 1)
        if not written:
            assert await run.write_end(store)

    tried = list[bool]()
    asyncio.run(end())
    ((last, events),) = writes
    assert last == status
    assert events.count(b"event: response.failed\n") == (status == "failed")
    assert (events == b"event: delta\n\nevent: done\n\n") is (status == "completed")
    assert tried == [True, False, False][: failures + 1]  # a failure needs no room
