"""Rolling and dynamic batches as DJL steps them, on the worker's own event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from handler.core.errors import GenerationFailed, InternalError, ServingError, serving_error
from handler.djl.worker_loop import WorkerLoop
from handler.serving.model import ServedModel
from handler.serving.task import RequestTask

log = logging.getLogger("handler.rolling")

_IDLE = 0.03
"""Seconds that a step waits when no request has output: a new request waits at most this long for its turn.

Longer than most engines take for a token: then no step comes back empty, and a new request, which could not join a
running engine step anyway, waits for little more than that step's end.
"""

_BEGIN = 0.1
"""Seconds that a step waits for its new requests' first output if an empty first piece would fix their status; other
requests' tokens wait meanwhile.
"""

_SETTLED = 0.005
"""Seconds after a request is opened in which no whole answer is handed over.

Java asks whether an answer goes on when it has handed the request over, in about a millisecond. If just then a whole
one arrives, it is marked as ended before its bytes are there (ChunkedBytesSupplier of 0.25 to 0.36): Java sends
nothing, and the client waits. It mostly meets refusals.
"""


class Item(NamedTuple):
    """One request as it arrives; header names in lower case."""

    body: bytes
    headers: Mapping[str, str]


class Piece(NamedTuple):
    """One request's part of a step: the `first` one begins its answer, the `last` one ends it."""

    task: RequestTask
    data: bytes
    first: bool
    last: bool


def open_items(
    model: ServedModel, items: Sequence[Item], on_bytes: Callable[[RequestTask], object]
) -> list[RequestTask]:
    """Open requests; a bug while opening one becomes its answer.

    DJL's front end turns SageMaker's custom attributes into headers, `route` among them.
    """
    tasks: list[RequestTask] = []
    for item in items:
        try:
            tasks.append(model.open(item.headers, route=item.headers.get("route"), on_bytes=on_bytes))
        except Exception as bug:  # one request must not stop the others
            tasks.append(model.refused(serving_error(bug)))
    return tasks


def in_place_of(task: RequestTask, bug: Exception, model: ServedModel) -> RequestTask:
    """Return a refusal to replace a request that a bug has ended."""
    close(task)
    return model.refused(serving_error(bug))


def close(task: RequestTask) -> None:
    """Close an answered request; a bug there is only logged."""
    try:
        task.close()
    except Exception:  # one request must not stop the others
        log.exception("a bug")


def seconds_early(task: RequestTask) -> float:
    """Return how long an answer must wait if it is whole before any piece was handed over; 0 for others."""
    if not task.finished or task.committed:
        return 0.0
    return max(0.0, task.opened_at + _SETTLED - time.monotonic())


def next_piece(task: RequestTask, limit: int | None, *, commits: bool = False) -> Piece:
    """Take a request's output so far.

    A begun answer ends with a piece without bytes: Java marks an answer as ended before it has queued the last piece,
    and a front end that asks just then drops that piece (ChunkedBytesSupplier of 0.25 to 0.36).

    Args:
        limit: bytes of a piece; None is no limit.
        commits: the Java side begins the answer with the first piece even if it is empty.
    """
    begun, unsent = task.committed, task.unsent
    if begun and len(unsent) <= 1 and not task.finished:  # nearly always
        data = unsent.pop() if unsent else b""
        if limit is None or len(data) <= limit:
            return Piece(task, data, False, False)
        unsent.append(data)
    whole = not begun and task.error is not None  # an error's status comes with all of its body
    data = task.take(None if whole else limit)
    if commits:
        task.committed = True
    last = task.finished and not task.unsent and not (begun and data)
    return Piece(task, data, task.committed and not begun, last)


def _has_word(task: RequestTask) -> bool:
    """Return whether a request has output, or has ended."""
    return bool(task.unsent) or task.finished


class RollingBatch:
    """Keeps the requests in DJL's order: every call names all live ones, and expects a piece for each.

    A request whose last piece is taken is closed: nothing else runs before the call that took it has written it.

    Args:
        commits_early: the Java side begins an answer with an empty first piece.
        max_piece: bytes that fit into one piece; None is no limit.
    """

    def __init__(
        self, model: ServedModel, loop: WorkerLoop, *, commits_early: bool = False, max_piece: int | None = None
    ) -> None:
        self._model = model
        self._loop = loop
        self._commits_early = commits_early
        self._max_piece = max_piece
        self._tasks: list[RequestTask] = []
        self._unsettled: list[RequestTask] = []  # of them, those opened a moment ago

    @property
    def num_requests(self) -> int:
        return len(self._tasks)

    def reset(self) -> None:
        """Drop all requests: the Java side has forgotten them."""
        if self._tasks:
            log.warning("reset: %d requests are dropped", len(self._tasks))
        for task in self._tasks:
            close(task)
        self._tasks.clear()
        self._unsettled.clear()

    def step(self, size: int, new: Mapping[int, Item]) -> list[Piece]:
        """Run one step of `size` requests; return a piece for each, in order.

        Args:
            size: number of requests on the Java side.
            new: its new requests, by index: they follow the others.
        """
        tasks = self._tasks
        if size != len(tasks) + len(new) or any(index < len(tasks) for index in new):
            return self._disagreement(size, len(new))
        opened: list[RequestTask] = []
        if new:
            self._loop.poll()  # an engine that died meanwhile must not take them along
            items = [new[index] for index in sorted(new)]
            opened = open_items(self._model, items, self._loop.stop)
            for index, item in enumerate(items):
                try:
                    opened[index].start(item.body)
                except Exception as bug:  # one request must not stop the others
                    opened[index] = in_place_of(opened[index], bug, self._model)
            tasks = self._tasks = tasks + opened
        self._wait(tasks, opened)
        self._settle(opened)
        pieces = []
        for task in tasks:
            try:
                pieces.append(next_piece(task, self._max_piece, commits=self._commits_early))
            except Exception as bug:  # one request must not stop the others
                pieces.append(self._failure(task, bug))
        self._tasks = [piece.task for piece in pieces if not piece.last]
        if len(self._tasks) < len(pieces):
            for piece in pieces:
                if piece.last:
                    close(piece.task)
        return pieces

    def fail(self, size: int, error: ServingError) -> list[Piece]:
        """End every request with `error`."""
        self.reset()
        return [self._refusal(error) for _ in range(size)]

    def fail_one(self, piece: Piece, bug: Exception) -> Piece:
        """End the request of a piece that cannot be written; return the one to write in its place."""
        if not piece.last:
            self._tasks.remove(piece.task)
        return self._failure(piece.task, bug)

    def _failure(self, task: RequestTask, bug: Exception) -> Piece:
        close(task)
        return self._refusal(serving_error(bug))

    def _refusal(self, error: ServingError) -> Piece:
        with self._model.refused(error) as task:
            return Piece(task, task.take(), True, True)

    def _wait(self, tasks: Sequence[RequestTask], opened: Sequence[RequestTask]) -> None:
        """Run the loop until a request has output; if it matters, until each new one has."""
        now = time.monotonic()
        begin, idle = now + _BEGIN, now + _IDLE
        seconds = 0.0 if any(map(_has_word, tasks)) else _IDLE
        if all(task.begun for task in tasks):  # only the engine has more to say
            self._loop.step(self._model.driver, seconds)
        elif seconds:
            self._loop.wait(seconds)
        else:
            self._loop.poll()
        while True:
            now = time.monotonic()
            if self._commits_early and now < begin and not all(task.begun for task in opened):
                self._loop.wait(begin - now)
            elif now >= idle or any(map(_has_word, tasks)):
                return
            else:
                self._loop.wait(idle - now)

    def _settle(self, opened: Sequence[RequestTask]) -> None:
        """Sleep if a new request's answer would come too early for Java. Other requests' tokens queue meanwhile."""
        latest = time.monotonic() - _SETTLED
        unsettled = [task for task in (*self._unsettled, *opened) if task.opened_at > latest]
        if early := max(map(seconds_early, unsettled), default=0.0):
            time.sleep(early)
        self._unsettled = [task for task in unsettled if not task.finished]

    def _disagreement(self, size: int, num_new: int) -> list[Piece]:
        """Fail all requests rather than guess whose tokens these are."""
        counts = f"the server has {size} requests, {num_new} of them new; the handler has {len(self._tasks)}"
        log.error("the numbers of requests disagree: %s; all are ended", counts)
        return self.fail(size, InternalError("the server and its handler disagreed on the requests in flight"))


class DynamicBatch:
    """Answers a whole batch, or one stream, per call.

    Args:
        seconds: that a call may take (`option.predict_timeout`).
    """

    def __init__(self, model: ServedModel, loop: WorkerLoop, seconds: float) -> None:
        self._model = model
        self._loop = loop
        self._seconds = seconds

    def run(self, items: Sequence[Item]) -> list[RequestTask]:
        """Return all requests, finished, in order; those that take too long end with an error."""
        tasks = self._open(items)
        self._wait(tasks, lambda: all(task.finished for task in tasks))
        return tasks

    def begin(self, item: Item) -> RequestTask:
        """Return a request whose answer has begun."""
        (task,) = self._open([item])
        self._wait([task], lambda: task.begun)
        return task

    def next_bytes(self, task: RequestTask) -> tuple[bytes, bool]:
        """Wait a moment for more of an answer; return it, possibly nothing, and whether that is the end."""
        if not task.unsent and not task.finished:
            self._loop.wait(0.1)
        data = task.take()
        return data, task.finished and not task.unsent

    def refused(self, error: ServingError) -> bytes:
        """Return the body of an answer that is `error`."""
        with self._model.refused(error) as task:
            return task.take()

    def _open(self, items: Sequence[Item]) -> list[RequestTask]:
        self._loop.poll()  # an engine that died meanwhile must not take them along
        tasks = open_items(self._model, items, self._loop.stop)
        for index, item in enumerate(items):
            try:
                tasks[index].start(item.body)
            except Exception as bug:  # one request must not stop the others
                tasks[index] = in_place_of(tasks[index], bug, self._model)
        return tasks

    def _wait(self, tasks: Sequence[RequestTask], done: Callable[[], bool]) -> None:
        if not self._loop.wait_until(done, self._seconds):
            for task in tasks:
                task.fail(GenerationFailed(f"not finished within {self._seconds:g} s (option.predict_timeout)"))
