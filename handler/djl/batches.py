"""Rolling and dynamic batches. DJL's calls advance them on the worker's event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from handler.core.errors import GenerationFailed, InternalError, ServingError, serving_error
from handler.djl.worker_loop import WorkerLoop
from handler.serving.head import DETACHES, OWNER, PATH_MODEL, unchecked_owner
from handler.serving.model import ServedModel
from handler.serving.preprocessor import TARGET_MODEL
from handler.serving.request.life import ANSWERING, COMMIT, FINISHED
from handler.serving.request.task import RequestTask

log = logging.getLogger("handler.rolling")

IDLE = 0.03
"""Maximum time in seconds that a step waits while no request has output. A new request may wait this long for its first
step.

The limit is longer than most engines need for a token, so most steps return output. It hardly delays a new request,
because the request could not join the current engine step anyway.
"""

_BEGIN = 0.1
"""Maximum time in seconds that a step waits for the first output of its new requests, if an empty first piece would
commit the status of their responses. The tokens of other requests are delayed during this time.
"""

_SETTLED = 0.005
"""Minimum time in seconds from the opening of a request until its complete response is passed to Java.

About a millisecond after Java has handed over a request, it checks whether the response continues. If a complete
response arrives at that moment, Java marks it as ended before it has queued the bytes (ChunkedBytesSupplier in 0.25 to
0.36). Java then sends nothing, and the client keeps waiting. In practice, only refusals are ready that early.
"""


_NOT_THE_CLIENTS = (TARGET_MODEL, OWNER, PATH_MODEL, DETACHES)
"""Names that a client must not set. Java chooses the model, and turns SageMaker's custom attributes of any name into
headers.
"""


class Item(NamedTuple):
    """A request as it arrives, with header names in lower case."""

    body: bytes
    headers: Mapping[str, str]


class Piece(NamedTuple):
    """The output of one step for one request.

    Attributes:
        first: whether the response begins with this piece.
        last: whether the response ends with this piece.
    """

    task: RequestTask
    data: bytes
    first: bool
    last: bool


def start_items(
    model: ServedModel, items: Sequence[Item], on_bytes: Callable[[RequestTask], object]
) -> list[RequestTask]:
    """Open a request for each item, then start them. If an item fails because of a bug, its request is refused.

    The header `route` is one of SageMaker's custom attributes, which DJL's front end turns into headers.
    """
    tasks: list[RequestTask] = []
    for item in items:
        try:
            headers = {name: value for name, value in item.headers.items() if name not in _NOT_THE_CLIENTS}
            headers[OWNER] = unchecked_owner(headers, model.config.owner_header)
            tasks.append(model.open(headers, route=headers.get("route"), on_bytes=on_bytes))
        except Exception as bug:  # one request must not stop the others
            tasks.append(model.refused(serving_error(bug)))
    for index, item in enumerate(items):
        try:
            tasks[index].begin(tasks[index].run(item.body))
        except Exception as bug:  # one request must not stop the others
            close(tasks[index])
            tasks[index] = model.refused(serving_error(bug))
    return tasks


def close(task: RequestTask) -> None:
    """Close a request. An exception is only logged."""
    try:
        task.close()
    except Exception:  # one request must not stop the others
        log.exception("a request could not be closed because of a bug")


def seconds_early(task: RequestTask) -> float:
    """Return for how many seconds to hold back a response: 0 unless it is complete and none of it has been sent."""
    if not task.finished or task.committed:
        return 0.0
    return max(0.0, task.opened_at + _SETTLED - time.monotonic())


def next_piece(task: RequestTask, limit: int | None, *, commits: bool = False) -> Piece:
    """Take the output that a request has produced so far, as one piece.

    A response that has several pieces ends with an empty piece. Java marks a response as ended before it has queued the
    last piece, and a front end that checks at that moment drops the piece (ChunkedBytesSupplier in 0.25 to 0.36).

    Args:
        limit: the maximum number of bytes in a piece, or None for no limit.
        commits: whether the Java side starts the response with the first piece even if that piece is empty.
    """
    begun, unsent = task.committed, task.unsent
    if begun and len(unsent) <= 1 and task.phase < FINISHED:  # nearly always
        data = unsent.pop() if unsent else b""
        if limit is None or len(data) <= limit:
            return Piece(task, data, False, False)
        unsent.append(data)
    whole = not begun and task.error is not None  # an error's status comes with all of its body
    data = task.take(None if whole else limit)
    if commits:
        task.on(COMMIT)
    last = task.finished and not task.unsent and not (begun and data)
    return Piece(task, data, task.committed and not begun, last)


def _has_word(task: RequestTask) -> bool:
    """Return whether a request has output or is finished."""
    return bool(task.unsent) or task.phase >= FINISHED


class RollingBatch:
    """The requests of a rolling batch, in the order that DJL uses. Each DJL call expects a piece for every request.

    A request is closed as soon as its last piece is taken, because nothing else runs until the same call has written
    the piece.

    Args:
        commits_early: whether the Java side starts a response with its first piece even if that piece is empty.
        max_piece: the maximum number of bytes in a piece, or None for no limit.
    """

    def __init__(
        self, model: ServedModel, loop: WorkerLoop, *, commits_early: bool = False, max_piece: int | None = None
    ) -> None:
        self._model = model
        self._loop = loop
        self._commits_early = commits_early
        self._max_piece = max_piece
        self._tasks: list[RequestTask] = []
        self._unsettled: list[RequestTask] = []  # tasks whose complete response may have to be held back

    @property
    def num_requests(self) -> int:
        return len(self._tasks)

    def reset(self) -> None:
        """Drop all requests, because the Java side has dropped them."""
        if self._tasks:
            log.warning("DJL Serving reset the rolling batch: dropping %d requests", len(self._tasks))
        for task in self._tasks:
            close(task)
        self._tasks.clear()
        self._unsettled.clear()

    def step(self, size: int, new: Mapping[int, Item]) -> list[Piece]:
        """Run one step, and return a piece for each request, in order.

        Args:
            size: the number of requests on the Java side.
            new: the new requests by index. They come after all earlier requests.
        """
        tasks = self._tasks
        if size != len(tasks) + len(new) or any(index < len(tasks) for index in new):
            return self._disagreement(size, len(new))
        opened: list[RequestTask] = []
        if new:
            self._loop.poll()  # so that an engine that has died is noticed before it gets the new requests
            opened = start_items(self._model, [new[index] for index in sorted(new)], self._loop.stop)
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
        """End every request with `error`, and return the last piece of each response."""
        self.reset()
        return [self._refusal(error) for _ in range(size)]

    def fail_piece(self, piece: Piece, bug: Exception) -> Piece:
        """End the request of a piece that cannot be written, and return a piece to write instead."""
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
        """Run the loop until a request has output. If an empty piece commits the status, wait for all new requests."""
        now = time.monotonic()
        begin, idle = now + _BEGIN, now + IDLE
        seconds = 0.0 if any(map(_has_word, tasks)) else IDLE
        if all(task.phase >= ANSWERING for task in tasks):  # the next output can only come from the engine
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
        """Hold back a complete response to a new request (see `_SETTLED`). Tokens of other requests queue up."""
        latest = time.monotonic() - _SETTLED
        unsettled = [task for task in (*self._unsettled, *opened) if task.opened_at > latest]
        if early := max(map(seconds_early, unsettled), default=0.0):
            time.sleep(early)
        self._unsettled = [task for task in unsettled if not task.finished]

    def _disagreement(self, size: int, num_new: int) -> list[Piece]:
        """Fail all requests if DJL Serving counts a different number, because tokens could go to the wrong request."""
        counts = f"DJL Serving has {size} requests, of which {num_new} are new; the handler has {len(self._tasks)}"
        log.error("the numbers of requests do not match: %s; all requests fail", counts)
        return self.fail(size, InternalError("the server and its handler disagreed on the requests in flight"))


class DynamicBatch:
    """Dynamic batching, in which each of DJL's calls is for a whole batch, or for a single streaming request.

    Args:
        seconds: the maximum duration of a call in seconds: `option.predict_timeout` minus a second, but at least 0.1.
    """

    def __init__(self, model: ServedModel, loop: WorkerLoop, seconds: float) -> None:
        self._model = model
        self._loop = loop
        self._seconds = seconds

    def run(self, items: Sequence[Item]) -> list[RequestTask]:
        """Run the requests until all are finished, and return them in order. A request that times out gets an error."""
        tasks = self._open(items)
        self._wait(tasks, lambda: all(task.finished for task in tasks))
        return tasks

    def begin(self, item: Item) -> RequestTask:
        """Open a request, wait until its response begins, and return the request."""
        (task,) = self._open([item])
        self._wait([task], lambda: task.begun)
        return task

    def next_bytes(self, task: RequestTask) -> tuple[bytes, bool]:
        """Wait briefly for more of a response.

        Returns:
            The new bytes, which may be empty, and whether the response is complete.
        """
        if not task.unsent and not task.finished:
            self._loop.wait(0.1)
        data = task.take()
        return data, task.finished and not task.unsent

    def refused(self, error: ServingError) -> bytes:
        """Return the body of an error response."""
        with self._model.refused(error) as task:
            return task.take()

    def _open(self, items: Sequence[Item]) -> list[RequestTask]:
        self._loop.poll()  # so that an engine that has died is noticed before it gets the requests
        return start_items(self._model, items, self._loop.stop)

    def _wait(self, tasks: Sequence[RequestTask], done: Callable[[], bool]) -> None:
        if not self._loop.wait_until(done, self._seconds):
            for task in tasks:
                task.fail(GenerationFailed(f"not finished within {self._seconds:g} s (option.predict_timeout)"))
