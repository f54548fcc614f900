"""Drive a batcher from an event loop: the engine's messages wake it, and those that waited are joined."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from handler.core.errors import InternalError, Overloaded
from handler.core.text import Prompt
from handler.core.values import Delta, Finish, Request
from handler.scheduler.batcher import Batcher, FastPath

log = logging.getLogger("handler.driver")

Sink = Callable[[Delta], None]

_SHORT_STEP = 0.002  # seconds; after a longer one the others have their turn
_REST = 2.0  # times the step's duration
_MAX_REST = 0.1  # seconds
_MAX_GAP = 0.05  # seconds from step to step while requests begin
_TICK = 1.0  # seconds between looks at the clock: hangs, requests that take too long
_SHORT_TICK = 0.2  # while no engine is ready, or requests wait


class Notified(Protocol):
    """A request whose host wants to know of new bytes.

    Attributes:
        notified: its host is told next.
    """

    notified: bool

    @property
    def on_bytes(self) -> Callable[[Any], object]:
        """The host's callback; gets the request."""


class EngineDriver:
    """All methods belong to the event loop's thread.

    Two rules give other work its turn:

    * After a long step the driver rests twice as long as the step took, at most 100 ms: new connections, requests and
      `/ping` come in between.
    * Where requests began since the last wake-up, the step waits for the loop's next turn, at most until 50 ms after
      the last step. So all of a burst begins sooner.

    Engine steps that wait meanwhile are joined, so on a busy host a token costs less.

    Args:
        rests: the loop has others to serve; False if it only runs in a host's calls.

    Attributes:
        loop: the event loop.
        fd: what is watched; None while there is no engine.
        sinks: receivers of deltas, by the batcher's id.
    """

    def __init__(self, batcher: Batcher, *, rests: bool = True) -> None:
        self._batcher = batcher
        self._rests = rests
        self._rest: asyncio.TimerHandle | None = None  # while it rests
        self._requests_began = False  # since the last wake-up, whether that stepped or not
        self._stepped = 0.0  # when the last wake-up's step ended, by time.monotonic()
        self.sinks: dict[int, Sink] = {}
        self._notified: list[Notified] = []
        self.loop = asyncio.get_running_loop()
        self.fd: int | None = None
        self._timer = self.loop.call_later(_SHORT_TICK, self._tick)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have come so far."""
        return self._batcher.num_tokens

    def watch(self, fd: int | None) -> None:
        """Call the driver when `fd` is readable; the engine says which, and None before it closes it."""
        if self.fd is not None:
            self.loop.remove_reader(self.fd)
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        self.fd = fd
        if fd is not None:
            self.loop.add_reader(fd, self._wake_up)
        else:  # the next one is started by a tick
            self._tick_in(_SHORT_TICK)

    def soon(self, callback: Callable[[], None]) -> None:
        """Call a function after the loop has served other work; at once if the loop may stop running until then."""
        if self._rests:
            self.loop.call_soon(callback)
        else:
            callback()

    def submit(
        self,
        request: Request,
        prompt: Prompt,
        sink: Sink,
        started: Callable[[], None] = lambda: None,
        *,
        follows: bool = False,
    ) -> int:
        """Submit a request; return its id.

        Args:
            sink: gets its deltas until the finishing one.
            started, follows: as in Batcher.submit.

        Raises:
            Overloaded: the queue is full.
            InvalidPayload: its adapter was dropped since it was parsed.
        """
        id = self._batcher.submit(request, prompt, started, follows=follows)
        if not self._batcher.num_queued:  # else only a step makes room
            self._requests_began = True
        self.sinks[id] = sink
        return id

    def set_fast_path(self, fast_path: FastPath) -> None:
        """Let `fast_path` encode a request's plain tokens; its sink gets everything else."""
        self._batcher.set_fast_path(fast_path.id, fast_path)

    def cancel(self, id: int) -> None:
        if self.sinks.pop(id, None) is not None:
            self._batcher.cancel(id)

    def notify(self, task: Notified) -> None:
        """Tell a request's host at the end of this step.

        So all of a step's bytes are written in a row. A write between two computations finds its reader asleep again,
        and waking it costs more than all that we compute for a token.
        """
        if not task.notified:
            task.notified = True
            self._notified.append(task)

    def flush(self) -> None:
        """Tell the hosts now. A step does so at its end; a notification outside of a step must call it."""
        tasks, self._notified = self._notified, []
        for task in tasks:
            task.notified = False
            try:
                task.on_bytes(task)
            except Exception:  # one client's host must not stop the others'
                log.exception("bytes could not be handed over: a bug")

    def close(self) -> None:
        self.watch(None)
        self._timer.cancel()

    def _tick(self) -> None:
        try:
            if self._rest is None:  # else its end does what is due
                self._wake_up()
        finally:
            nobody_waits = self._batcher.ready and not self._batcher.num_queued
            self._tick_in(_TICK if nobody_waits else _SHORT_TICK)

    def _tick_in(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._tick)

    def _wake_up(self) -> None:
        """Run a step, and pause after a long one. The event loop calls this in each iteration while messages
        of the engine wait.
        """
        began = time.monotonic()
        requests_began, self._requests_began = self._requests_began, False
        if requests_began and self._rests and began < self._stepped + _MAX_GAP:
            return
        self.step()
        self._stepped = time.monotonic()
        took = self._stepped - began
        if took > _SHORT_STEP and self._rests and self.fd is not None:
            self.loop.remove_reader(self.fd)
            self._rest = self.loop.call_later(min(_REST * took, _MAX_REST), self.watch, self.fd)

    def step(self) -> None:
        """Deliver the engine's messages."""
        deltas = self._batcher.step()
        self._write_lines()  # before the deltas: a sequence's tokens precede its end
        for delta in deltas:
            sink = self.sinks.get(delta.id)
            if sink is None:
                continue
            try:
                sink(delta)
            except Exception as error:  # one client's answer must not stop the others'
                self._fail(delta.id, delta.sequence, error)
        self.flush()

    def _write_lines(self) -> None:
        """Write the lines of plain tokens in a row: the hot path, once a token."""
        for fast_path, line in zip(self._batcher.fast_paths, self._batcher.lines, strict=True):
            channel = fast_path.channel
            try:
                if channel is None or not channel.write_chunk(line):
                    fast_path.keep(line)
            except Exception:  # its connection is closed; whoever writes what is kept finds that out
                fast_path.keep(line)

    def _fail(self, id: int, sequence: int, error: Exception) -> None:
        """End a request whose answer could not be written, and tell its sink."""
        log.error("an answer could not be written: a bug", exc_info=error)
        sink = self.sinks.get(id)
        self.cancel(id)
        if sink is not None:
            with contextlib.suppress(Exception):  # it has been logged, and its request is ended
                sink(Delta(id, sequence, (), Finish.ERROR, InternalError.of(error)))


# -- dynamic batching as DJL does it: requests wait for a full batch or a short while, then run together ---------------


class DynamicBatcher:
    """Admits requests one batch at a time.

    Args:
        size: requests in a batch (`batch_size`).
        delay: seconds that the first of a batch waits for the others (`max_batch_delay`).
        max_queued: requests that may wait (`job_queue_size`).
        timeout: seconds that a request may wait (`option.predict_timeout`).
    """

    def __init__(self, size: int, delay: float, max_queued: int, timeout: float = 120.0) -> None:
        self._size = size
        self._delay = delay
        self._max_queued = max_queued
        self._timeout = timeout
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order of arrival
        self._num_running = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check_room(self) -> None:
        """Raise `Overloaded` if another request could not even wait."""
        if len(self._waiting) >= self._max_queued:
            raise Overloaded(f"the queue is full: {self._max_queued} requests wait (job_queue_size)")

    async def join(self) -> None:
        """Return when the request's batch begins; `leave` must follow.

        Raises:
            Overloaded: the queue is full, or it has waited too long.
        """
        self.check_room()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        self._consider()
        try:
            done, _ = await asyncio.wait({turn}, timeout=self._timeout)
        except asyncio.CancelledError:
            if turn not in self._waiting:  # its batch had begun
                self.leave()
            self._forget(turn)
            raise
        if not done:
            self._forget(turn)
            raise Overloaded(f"waited {self._timeout:g} s for a batch (option.predict_timeout)")

    def leave(self) -> None:
        """Note that the request has ended: the next batch may begin when all requests of this one have."""
        self._num_running -= 1
        self._consider()

    def _forget(self, turn: asyncio.Future[None]) -> None:
        self._waiting.pop(turn, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _consider(self) -> None:
        """Start a batch if the last one has ended and this one is full; else give it `delay` to fill."""
        if self._num_running or not self._waiting:
            return
        if len(self._waiting) >= self._size:
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay, self._start)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for turn in list(self._waiting)[: self._size]:
            del self._waiting[turn]
            turn.set_result(None)
            self._num_running += 1
