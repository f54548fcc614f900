"""Runs the functions in a user's model.py on a thread, so that a function that hangs does not block the event loop."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from handler.core.errors import FormatterFailed, ServingError, serving_error
from handler.core.loop import settle
from handler.core.values import Delta, Finish
from handler.protocols.kernel.reply import Reply, WrappedReply

log = logging.getLogger("handler.formatters")

LIMIT = 10.0
"""Maximum duration of a call in seconds, measured from its start."""

_TURN = 0.01  # seconds for which one request's deltas are formatted before the next request's turn

_Formatted = list[tuple[int, Delta, bytes, bool]]
"""For each delta: the index of the request, the delta, its formatted bytes, and whether the reply is finished."""

Post = Callable[[Callable[[], None]], object]
"""A thread-safe function that schedules a function on the thread of the host."""


@dataclass(eq=False)
class _Job:
    title: str
    call: Callable[[], Any]
    limit: float
    future: Future[Any] = field(default_factory=Future)
    started_at: float = 0.0


class FormatterThread:
    """A thread that runs calls one at a time in order of submission, as in DJL.

    A call that takes longer than `limit` seconds fails. Its thread cannot be stopped, so another thread replaces it,
    and the result of the call is ignored. All threads are daemons, so that they do not delay the exit of the process.

    Args:
        post: a function that schedules another function on the thread of the host.
        limit: the maximum duration of a call, in seconds.
        late: the error to raise for a call that takes longer.
    """

    def __init__(self, post: Post, limit: float = LIMIT, *, late: type[ServingError] = FormatterFailed) -> None:
        self._post = post
        self._limit = limit
        self._late = late
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: _Job | None = None  # under the lock; a thread whose job is no longer here has been replaced
        self._closed = threading.Event()
        self._start(self._work)
        self._start(self._watch)

    def submit(
        self, title: str, function: Callable[..., Any], *arguments: Any, limit: float | None = None
    ) -> Future[Any]:
        """Run a function, and return a future for its result. After a timeout, the future raises `late`.

        Args:
            title: the name of the function in the timeout message.
            limit: the maximum duration of this call, in seconds. The default is the limit of the thread.
        """
        job = _Job(title, functools.partial(function, *arguments), self._limit if limit is None else limit)
        self._jobs.put(job)
        return job.future

    def run(self, then: Callable[[Future[Any]], None], title: str, function: Callable[..., Any], *args: Any) -> None:
        """Run a function as `submit` does, and call `then` with the finished future on the thread of the host."""

        def done(future: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop may be closed
                self._post(functools.partial(then, future))

        self.submit(title, function, *args).add_done_callback(done)

    def close(self) -> None:
        self._closed.set()
        self._jobs.put(None)

    def _start(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, daemon=True, name="formatter").start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            job.started_at = time.monotonic()
            with self._lock:
                self._running = job
            outcome: Future[Any] = Future()
            settle(outcome, job.call)
            with self._lock:
                if self._running is not job:
                    return
                self._running = None
            settle(job.future, outcome.result)

    def _watch(self) -> None:
        while not self._closed.wait(self._limit / 20):
            with self._lock:
                job = self._running
                if job is None or time.monotonic() < job.started_at + job.limit:
                    continue
                self._running = None
                self._start(self._work)
            error = self._late(f"{job.title} did not end within {job.limit:g} s")
            log.error("%s; replacing its thread", error.message)
            job.future.set_exception(error)


class ThreadedReply(WrappedReply):
    """A reply that calls `feed` of another reply on a separate thread, because `feed` runs user code.

    The host passes deltas to `put`. After a delta has been formatted on the thread, `deliver` is called with it on the
    thread of the host, and then `feed` returns its bytes. The order of deltas is preserved. Errors are passed to the
    other reply directly, because writing them runs no user code.

    Args:
        reply: the reply that calls the user's function.
        title: the name of the user's function, for messages.
        thread: the thread for the user's function.
        deliver: a function that takes the index of the request in its call, and the delta.
    """

    def __init__(
        self, reply: Reply, title: str, thread: FormatterThread, deliver: Callable[[int, Delta], None]
    ) -> None:
        super().__init__(reply)
        self._title = title
        self._thread = thread
        self._deliver: Callable[[int, Delta], None] | None = deliver  # None once the reply is closed
        self._waiting: deque[tuple[int, Delta]] = deque()
        self._is_formatting = False
        self._data = b""

    def put(self, index: int, delta: Delta) -> None:
        self._waiting.append((index, delta))
        if not self._is_formatting and self._deliver is not None:
            self._submit()

    def close(self) -> None:
        """Stop the delivery of deltas. This also breaks a reference cycle with the request."""
        self._deliver = None

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is None:
            return self._data
        self.finished = True
        return self._reply.feed(index, delta)

    def _submit(self) -> None:
        self._is_formatting = True
        formatted: _Formatted = []
        self._thread.run(functools.partial(self._returned, formatted), self._title, self._format, formatted)

    def _format(self, formatted: _Formatted) -> None:
        """Format waiting deltas on the formatter thread until `_TURN` seconds have passed."""
        end = time.monotonic() + _TURN
        while self._waiting and self._deliver is not None:
            index, delta = self._waiting.popleft()
            data = b"" if delta.error is not None else self._reply.feed(index, delta)
            formatted.append((index, delta, data, self._reply.finished))
            if time.monotonic() > end:
                return

    def _returned(self, formatted: _Formatted, future: Future[None]) -> None:
        for index, delta, data, finished in formatted:
            if self._deliver is not None:
                self._data, self.finished = data, finished
                self._deliver(index, delta)
        self._is_formatting = False
        if self._deliver is None:
            return
        error = future.exception()
        if error is not None:
            self._deliver(0, Delta(0, 0, (), Finish.ERROR, serving_error(error)))
        elif self._waiting:
            self._submit()
