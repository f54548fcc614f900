"""Runs the functions of a user's model.py on threads of their own: one that sleeps or hangs holds up no event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from handler.core import Delta, Finish
from handler.errors import FormatterFailed, InternalError, ServingError
from handler.schemas.base import Answer, Reply

log = logging.getLogger("handler.formatters")

_BATCH = 16  # deltas of one request that are formatted before the next request's turn


class _Job:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.future: Future[Any] = Future()
        self.abandoned = False


class Threads:
    """A few daemon threads, so that one that never comes back does not hold up the process's end either.

    Args:
        count: of threads; one of them runs everything in order, as DJL would.
        timeout: seconds that a call may take, its wait for a thread included. The thread of one that takes longer is
            given up and replaced: a thread cannot be ended.
    """

    def __init__(self, count: int, timeout: float) -> None:
        self._timeout = timeout
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._count = count
        for _ in range(count):
            self._start()

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns or raises; FormatterFailed when it takes too long."""
        job = _Job(function, arguments)
        self._jobs.put(job)
        waiter = asyncio.wrap_future(job.future)
        try:
            done, _ = await asyncio.wait({waiter}, timeout=self._timeout)
            if done:
                return waiter.result()
        finally:
            # Still running, and nobody waits for it any more: the time is up, or the client is gone.
            if not job.future.cancel() and not job.future.done() and not job.abandoned:
                job.abandoned = True
                self._start()
        raise FormatterFailed(f"model.py's formatter did not end within {self._timeout:g} s (option.predict_timeout)")

    def close(self) -> None:
        for _ in range(self._count):
            self._jobs.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._work, daemon=True, name="formatter").start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                result = job.function(*job.arguments)
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
            if job.abandoned:
                return


class _Made(NamedTuple):
    """What the reply made of one delta."""

    number: int  # of the request in its call
    delta: Delta
    data: bytes
    finished: bool


class Offloaded:
    """A reply whose `feed` is run on `threads`; it is a Reply itself, towards the exchange.

    Deltas are `put`; when their bytes are made, `deliver` is called with each delta on the event loop, in order, and
    `feed` then returns those bytes. Failures pass by the reply's own `feed`: rendering them takes no foreign code.
    """

    def __init__(self, reply: Reply, threads: Threads, deliver: Callable[[int, Delta], None]) -> None:
        self._reply = reply
        self._threads = threads
        self._deliver = deliver
        self._waiting: deque[tuple[int, Delta]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._data = b""
        self._closed = False
        self.content_type = reply.content_type
        self.finished = False

    def put(self, index: int, delta: Delta) -> None:
        self._waiting.append((index, delta))
        if self._task is None:
            self._task = asyncio.ensure_future(self._work())

    def close(self) -> None:
        """Nothing more is wanted."""
        self._closed = True
        self._waiting.clear()

    # -- the Reply -----------------------------------------------------------------------------------------------

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._reply.start(index, num_prompt_tokens)

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is None:
            return self._data
        self.finished = True
        return self._reply.feed(index, delta)

    def refused(self, error: ServingError) -> Answer:
        return self._reply.refused(error)

    # -- the work ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _BATCH))]
            try:
                made = await self._threads.call(self._format, batch)
            except ServingError as error:  # out of time
                made = [_failed(*batch[0], error)]
            for index, delta, data, finished in made:
                if self._closed:
                    break
                self._data, self.finished = data, finished
                self._deliver(index, delta)
        self._task = None

    def _format(self, batch: list[tuple[int, Delta]]) -> list[_Made]:
        """On a thread: up to the first failure."""
        made: list[_Made] = []
        for index, delta in batch:
            if self._closed:
                break
            try:
                data = b"" if delta.error is not None else self._reply.feed(index, delta)
            except ServingError as error:
                made.append(_failed(index, delta, error))
                break
            except Exception as error:
                log.exception("a bug")
                made.append(_failed(index, delta, InternalError(f"internal error: {type(error).__name__}")))
                break
            made.append(_Made(index, delta, data, self._reply.finished))
        return made


def _failed(index: int, delta: Delta, error: ServingError) -> _Made:
    return _Made(index, Delta(delta.id, delta.sequence, (), Finish.ERROR, error), b"", False)
