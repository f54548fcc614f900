"""The background responses that run on this server. Each one is an ordinary request whose host is a `BackgroundRun`.

Events are shown to readers only after they have been written, so that later readers see the same events. All pending
events are written together, at most once per `_FLUSH_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from handler.config.config import Config
from handler.core.errors import GenerationFailed, Overloaded, ServingError, TooLarge, Unavailable
from handler.core.fair_queue import Shares
from handler.core.loop import wait_for
from handler.protocols.kernel.stored import Detached
from handler.protocols.responses.background import failed_event, split_events, with_status
from handler.serving.background.tables import EventPage, NewEvents
from handler.serving.request.life import COMMIT
from handler.serving.request.task import RequestTask
from handler.serving.stored_responses import ResponseStore

log = logging.getLogger("handler")

_FLUSH_SECONDS = 0.05  # seconds between two writes of events
_LOOK_SECONDS = 1.0  # seconds between two searches for responses that another server has cancelled or deleted
_WINDOW = 1 << 16  # bytes of the latest events that are kept in memory for readers
_RETRY_SECONDS = 5.0  # seconds until a client with too many responses may retry


class RunState(IntEnum):
    """The state of a run, in order.

    Attributes:
        OPENING: the response is being written as queued.
        RUNNING: the request is running.
        ENDING: the final state is known, and is being written.
        ENDED: the final state is written, or the response is not stored any more.
    """

    OPENING = 0
    RUNNING = 1
    ENDING = 2
    ENDED = 3


class EventLog:
    """The events of a running response.

    Attributes:
        pending: events that have not been written yet.
        written: number of events that have been written.
        size: bytes of the events in memory.
    """

    def __init__(self, events: Sequence[bytes]) -> None:
        self.pending: list[bytes] = []
        self.written = len(events)
        self.size = sum(map(len, events))
        self._latest = deque(events)
        self._latest_size = self.size

    def add(self, events: Sequence[bytes]) -> None:
        """Add events that have not been written yet."""
        self.pending += events
        self.size += sum(map(len, events))

    def drop_pending(self) -> None:
        """Forget the events that have not been written yet."""
        self.pending.clear()
        self.size = self._latest_size

    def note_written(self, number: int) -> None:
        """Record that the first `number` pending events have been written, and forget the oldest ones."""
        written, self.pending = self.pending[:number], self.pending[number:]
        self.written += number
        self._latest.extend(written)
        self._latest_size += sum(map(len, written))
        while self._latest_size > _WINDOW and len(self._latest) > 1:
            size = len(self._latest.popleft())
            self._latest_size -= size
            self.size -= size

    def read(self, first: int) -> Sequence[bytes] | None:
        """Return the written events from a number on, or None if they are not in memory any more."""
        skipped = first - (self.written - len(self._latest))
        return None if skipped < 0 else [*itertools.islice(self._latest, skipped, None)]


class BackgroundRun:
    """A background response that is running on this server, from its creation until its final state is written.

    Args:
        task: the request, which the run closes.
        changed: called when there is data to write.

    Attributes:
        log: its events.
        readers: functions that wake its readers, which are called when events have been written.
        ended: future that completes when the final state has been written.
    """

    def __init__(self, task: RequestTask, detached: Detached, config: Config, changed: Callable[[], object]) -> None:
        self.owner = task.owner
        self.detached = detached
        self.log = EventLog(detached.events if detached.streams else ())
        self.readers = set[Callable[[], object]]()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.state = RunState.OPENING
        self.response = detached.response
        self._task, self._config, self._changed = task, config, changed
        self._begins = False  # whether the response is in progress, and this has not been written yet
        self._num_bytes = 0
        self._last: Sequence[bytes] = ()  # the final event, if there is one

    @property
    def id(self) -> str:
        return self.detached.queued.id

    def begin(self) -> None:
        """Run the request. Its client has been told that the response is queued."""
        task = self._task
        self.state = RunState.RUNNING
        if not task.finished:
            task.on(COMMIT)
            limit = asyncio.get_running_loop().call_later(self._config.background_timeout, self._expire)
            task.hold(limit.cancel)
        task.on_bytes = self._pull
        task.begin(task.run())
        if task.finished:
            self._pull(task)

    def _pull(self, task: RequestTask) -> None:
        """Take the events that the request has produced. The driver calls this in its step."""
        if self.state is not RunState.RUNNING:
            return
        if task.error is not None:  # the request has not begun, so there are no events
            return self.fail(task.error.message)
        if data := task.take():
            self._add(data)
        if task.finished:
            self.fail("the response ended without a result")

    @property
    def _next_number(self) -> int:
        return self.log.written + len(self.log.pending)

    def _add(self, data: bytes) -> None:
        events = split_events(data)
        self._begins |= self.response["status"] == "queued"
        self.response = self.detached.response
        if self.response["status"] != "in_progress":
            self._last, events = events[-1:], events[:-1]
            self.state = RunState.ENDING
        if self.detached.streams:
            self.log.add(events)
            self._num_bytes += len(data)
            self._check_size()
        self._changed()

    def _check_size(self) -> None:
        """Fail the request if its events need too much memory or too much room."""
        limit = self._config.background_max_bytes
        error: ServingError | None = None
        if self._num_bytes > limit:
            error = GenerationFailed(f"the events of the response exceed {limit} bytes (option.background_max_bytes)")
        else:
            try:
                self._task.memory.set_unsent(self.log.size)
            except Overloaded as overloaded:
                error = overloaded
        if error is not None and self.state is RunState.RUNNING:
            self._num_bytes = -limit  # this leaves room for the last event
            asyncio.get_running_loop().call_soon(self._task.fail, error)

    def _expire(self) -> None:
        limit = f"{self._config.background_timeout:g} s (option.background_timeout)"
        self._task.fail(GenerationFailed(f"the response was not complete within {limit}"))

    def fail(self, message: str) -> None:
        """End the response with an error, unless its final state is known."""
        if self.state < RunState.ENDING:
            self.response = with_status(self.response, "failed", message)
            self._last = [failed_event(self._next_number, self.response)]
            self._stop()

    def cancel(self) -> None:
        """Cancel the response, unless its final state is known. The engine stops at once."""
        if self.state < RunState.ENDING:
            self.response = with_status(self.response, "cancelled")
            self._stop()

    def _stop(self) -> None:
        self.state = RunState.ENDING
        self._task.close()
        self._changed()

    # -- writing ---------------------------------------------------------------------------------------------------

    def new_events(self) -> NewEvents:
        """Return the new events of a response that has not ended."""
        head = None
        if self._begins:
            head = {name: value for name, value in self.response.items() if name != "output"}
        return NewEvents(self.id, self.log.written, [*self.log.pending], head)

    def note_written(self, new: NewEvents) -> None:
        """Record that new events have been written, and wake the readers."""
        self.log.note_written(len(new.events))
        self._begins &= new.head is None
        self.wake_readers()

    async def write_end(self, store: ResponseStore) -> bool:
        """Write the final state. Return whether the write succeeded.

        A response that cannot be stored is marked as failed. If the failed state cannot be written either, for example
        because the disk is full, the write is retried later.
        """
        response = self.response
        is_failure = response["status"] in ("failed", "cancelled") and not response["output"]
        try:
            await self._write_end(store, response, needs_room=not is_failure)
            return True
        except ServingError as error:
            if is_failure:
                return False
            log.error("a response could not be stored: %s", error)
        except Exception:
            log.exception("a bug in the server: a response could not be stored")
        self.log.drop_pending()
        failed = with_status(response, "failed", "the response could not be stored")
        self.response, self._last = failed, [failed_event(self.log.written, failed)]
        try:
            await self._write_end(store, failed, needs_room=False)
        except ServingError:
            return False
        return True

    async def _write_end(self, store: ResponseStore, response: Mapping[str, Any], *, needs_room: bool) -> None:
        last = self._last if self.detached.streams else ()
        owner, events = self.owner, [*self.log.pending, *last]
        ending = store.write(owner, store.background.end, owner, self.detached, response, events, needs_room=needs_room)
        await asyncio.wrap_future(ending)
        self.log.add(last)
        self.log.note_written(len(events))

    def finish(self) -> None:
        """Close the request, and notify everyone who is waiting for the end of the response."""
        self.state = RunState.ENDED
        self._task.close()
        if not self.ended.done():
            self.ended.set_result(None)
        self.wake_readers()

    def wake_readers(self) -> None:
        for wake in [*self.readers]:
            wake()

    def read(self, first: int) -> EventPage | None:
        """Return events from a number on, or None if they must be read from the store."""
        events = self.log.read(first)
        return None if events is None else EventPage(events, ended=self.state is RunState.ENDED)


class BackgroundRuns:
    """The background responses that run on this server.

    Clients poll what is in the store, because another server may have cancelled or deleted a response.
    """

    def __init__(self, store: ResponseStore, config: Config) -> None:
        self.store = store
        self._config = config
        self._runs: dict[str, BackgroundRun] = {}
        self._numbers = Shares[str]()  # of runs by owner
        self._changed = asyncio.Event()
        self._dirty = set[BackgroundRun]()
        self._writing: asyncio.Task[None] | None = None

    def find(self, owner: str, id: str) -> BackgroundRun | None:
        """Return an owner's response that is running on this server, or None."""
        run = self._runs.get(id)
        return run if run is not None and run.owner == owner else None

    async def start(self, task: RequestTask) -> BackgroundRun:
        """Store a response as queued, and run its request. The run then owns the task, and closes it.

        Raises:
            ServingError: the response cannot be stored, or the owner has too many of them. The caller still owns
                the task.
        """
        detached = None if task.parsed is None else task.parsed.detached
        assert detached is not None, "the request asks for it"
        self._check_head(detached)
        owner, limit = task.owner, self._config.background_max
        if self._numbers[owner] >= limit:
            raise Overloaded(
                f"this API key has {limit} background responses in progress (option.background_max)",
                retry_after=_RETRY_SECONDS,
            )
        self.store.check_calls(owner)
        run = BackgroundRun(task, detached, self._config, lambda: self._note(run))
        self._numbers.add(owner, 1)
        try:
            await asyncio.wrap_future(self.store.write(owner, self.store.background.queue, owner, run.detached))
        except BaseException:
            self._numbers.add(owner, -1)
            raise
        self._runs[run.id] = run
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write())
        run.begin()
        return run

    def _check_head(self, detached: Detached) -> None:
        """Check that the fields that a response repeats from its request leave room for its other events.

        They are in its first three events and in its last one, and in what each poll returns.
        """
        size, limit = sum(map(len, detached.events)) // len(detached.events), self._config.background_max_bytes
        if 4 * size > limit:
            raise TooLarge(
                f"each snapshot of the background response would take {size} bytes, mostly for 'tools' and "
                f"'instructions'; the maximum is {limit // 4} bytes (a quarter of option.background_max_bytes)"
            )

    def _note(self, run: BackgroundRun) -> None:
        self._dirty.add(run)
        self._changed.set()

    def close(self) -> None:
        """Stop writing. Responses that are still running will have failed when the server starts again."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write(self) -> None:
        """Write changes until no response is running."""
        looked_at = time.monotonic()
        while self._runs:
            with contextlib.suppress(asyncio.TimeoutError):
                await wait_for(self._changed.wait(), _LOOK_SECONDS)
            self._changed.clear()
            runs, self._dirty = self._dirty, set()
            if time.monotonic() - looked_at >= _LOOK_SECONDS:
                looked_at = time.monotonic()
                runs = {*runs, *self._runs.values()}
            try:
                await self._write_all([run for run in runs if run.state < RunState.ENDING])
                await asyncio.gather(*(self._end(run) for run in runs if run.state is RunState.ENDING))
            except Exception:
                log.exception("a bug in the server: background responses could not be written")
            await asyncio.sleep(_FLUSH_SECONDS)

    async def _write_all(self, runs: Sequence[BackgroundRun]) -> None:
        """Write the events of running responses, and end those that another server has cancelled or deleted."""
        if not runs:
            return
        written = [run.new_events() for run in runs]
        try:
            gone = await asyncio.wrap_future(self.store.write("", self.store.background.append, written))
        except Unavailable:  # it is already logged
            for run in runs:
                run.fail("the events of the response could not be stored")
            return
        for run, new in zip(runs, written, strict=True):
            run.note_written(new)
            if run.id in gone:
                run.cancel()

    async def _end(self, run: BackgroundRun) -> None:
        if not await run.write_end(self.store):
            return  # retried after `_LOOK_SECONDS`
        del self._runs[run.id]
        self._numbers.add(run.owner, -1)
        self._dirty.discard(run)
        run.finish()
