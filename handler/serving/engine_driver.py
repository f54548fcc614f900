"""Drives a batcher on an event loop: runs a step whenever the engine has sent messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from handler.core.errors import InternalError, ServingError
from handler.core.text import Prompt
from handler.core.values import Delta, Finish, Request
from handler.scheduler.batcher import Batcher, FastPath

log = logging.getLogger("handler.driver")

Sink = Callable[[Delta], None]

_SHORT_STEP = 0.002  # seconds; the driver rests after longer steps
_REST = 2.0  # length of a rest, in durations of the step
_MAX_REST = 0.1  # seconds
_MAX_GAP = 0.05  # maximum seconds between two steps while new requests start
_TICK = 1.0  # seconds between two checks for hangs and expired requests
_SHORT_TICK = 0.2  # the same while no engine is ready or requests are waiting


class Notified(Protocol):
    """A request whose host is notified of new bytes."""

    @property
    def on_bytes(self) -> Callable[[Any], object]:
        """Return the host's callback, which is called with the request."""


class EngineDriver:
    """Drives a batcher. All methods must be called on the event loop thread.

    Two rules leave the event loop time for other work:

    * After a long step, the driver rests for twice the step's duration, at most 100 ms. In the meantime, the loop
      handles new connections, requests and `/ping`.
    * If requests have started since the last wake-up, the step is delayed until the next loop iteration, but no later
      than 50 ms after the last step. All requests of a burst therefore start sooner.

    The output of engine steps that arrives in the meantime is processed together. This lowers the cost per token on a
    busy host.

    Args:
        rests: whether to rest. This is False if the loop runs only while its host calls it, since it then has no other
            work.

    Attributes:
        batcher: batcher of the engine.
        loop: the event loop.
        fd: file descriptor to watch, or None while no engine is running.
        sinks: callbacks that receive the deltas of each request, by the id of the request in the batcher.
    """

    def __init__(self, batcher: Batcher, *, rests: bool = True) -> None:
        self.batcher = batcher
        self._rests = rests
        self._rest: asyncio.TimerHandle | None = None  # timer that ends the current rest
        self._requests_began = False  # whether requests have started since the last wake-up, with or without a step
        self._stepped = 0.0  # end of the last step that a wake-up ran, by time.monotonic()
        self.sinks: dict[int, Sink] = {}
        self._notified: dict[Notified, None] = {}  # in order of their first bytes
        self.loop = asyncio.get_running_loop()
        self.fd: int | None = None
        self._timer = self.loop.call_later(_SHORT_TICK, self._tick)

    def watch(self, fd: int | None) -> None:
        """Watch a file descriptor, and wake up when it is readable. The engine passes None before closing the file."""
        if self.fd is not None:
            self.loop.remove_reader(self.fd)
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        self.fd = fd
        if fd is not None:
            self.loop.add_reader(fd, self._wake_up)
        else:  # a tick starts the next engine
            self._tick_in(_SHORT_TICK)

    def soon(self, callback: Callable[[], object]) -> None:
        """Call a function in the next loop iteration, or immediately if the loop may stop running before then."""
        if self._rests:
            self.loop.call_soon(callback)
        else:
            callback()

    def submit(
        self,
        request: Request,
        prompt: Prompt,
        sink: Sink,
        started: Callable[[], object] = bool,
        owner: str = "",
        *,
        follows: bool = False,
    ) -> int:
        """Submit a request and return its id.

        Args:
            sink: called with each delta of the request, up to the last delta.
            started, owner, follows: the arguments of `Batcher.submit`.

        Raises:
            Overloaded: the queue is full.
            InvalidPayload: the request's adapter was unregistered after the request was parsed.
        """
        num_active = self.batcher.num_active
        id = self.batcher.submit(request, prompt, started, owner, follows=follows)
        if self.batcher.num_active > num_active:  # otherwise the request starts when a step has made room
            self._requests_began = True
        self.sinks[id] = sink
        return id

    def set_fast_path(self, fast_path: FastPath) -> None:
        """Encode the plain tokens of a request with `fast_path`. The sink receives all other output."""
        self.batcher.set_fast_path(fast_path.id, fast_path)

    def cancel(self, id: int) -> None:
        if self.sinks.pop(id, None) is not None:
            self.batcher.cancel(id)

    def notify(self, task: Notified) -> None:
        """Notify the host of a request at the end of this step.

        The bytes of all requests are thus written one after another. If they were written as they are computed, the
        reader would fall asleep between the writes, and waking it costs more than all computation for a token.
        """
        self._notified[task] = None

    def flush(self) -> None:
        """Send the pending notifications, as at the end of each step. Outside of a step, call this after `notify`."""
        tasks, self._notified = self._notified, {}
        for task in tasks:
            try:
                task.on_bytes(task)
            except Exception:  # one client's host must not stop the others
                log.exception("a bug in the server: new bytes could not be passed to the client's connection")

    def close(self) -> None:
        self.watch(None)
        self._timer.cancel()

    def _tick(self) -> None:
        try:
            if self._rest is None:  # otherwise the end of the rest runs the next step
                self._wake_up()
        finally:
            nobody_waits = self.batcher.ready and not self.batcher.num_queued
            self._tick_in(_TICK if nobody_waits else _SHORT_TICK)

    def _tick_in(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._tick)

    def _wake_up(self) -> None:
        """Run a step, and rest if it was long. The event loop calls this in each iteration while messages from the
        engine are waiting.
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
        """Run a step of the batcher and deliver its output."""
        deltas = self.batcher.step()
        self._write_lines()  # before the deltas, because the tokens of a sequence precede its end
        for delta in deltas:
            sink = self.sinks.get(delta.id)
            if sink is None:
                continue
            try:
                sink(delta)
            except Exception as error:  # one client's response must not stop the others
                self._fail(delta.id, delta.sequence, error)
        self.flush()

    def _write_lines(self) -> None:
        """Write the encoded plain tokens. This is the hot path: it runs once per token."""
        for fast_path, line in zip(self.batcher.fast_paths, self.batcher.lines, strict=True):
            channel = fast_path.channel
            try:
                if channel is None or not channel.write_chunk(line):
                    fast_path.keep(line)
            except Exception:  # the connection is closed, which the next regular write will detect
                fast_path.keep(line)

    def _fail(self, id: int, sequence: int, error: Exception) -> None:
        """Cancel a request whose response could not be encoded, and pass the error to its sink."""
        if not isinstance(error, ServingError):
            log.error("a bug in the server: a response could not be encoded", exc_info=error)
            error = InternalError.of(error)
        sink = self.sinks.get(id)
        self.cancel(id)
        if sink is not None:
            with contextlib.suppress(Exception):  # the error is already logged, and the request is cancelled
                sink(Delta(id, sequence, (), Finish.ERROR, error))
