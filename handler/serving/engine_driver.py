"""Drive a batcher from an event loop: each message of the engine is one wake-up, whatever it holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from handler.core.errors import InternalError
from handler.core.text import Prompt
from handler.core.values import Delta, Finish, Request
from handler.scheduler.batcher import Batcher

log = logging.getLogger("handler.driver")

Sink = Callable[[Delta], None]

_TICK = 1.0  # seconds between looks at the clock: hangs, requests that take too long
_SHORT_TICK = 0.2  # while no engine is ready, or requests wait


class Notified(Protocol):
    """A request whose host wants to know of new bytes.

    Attributes:
        notified: it is among those whose hosts are told next.
    """

    notified: bool

    @property
    def on_bytes(self) -> Callable[[Any], object]:
        """The host's callback; gets the request."""


class EngineDriver:
    """All methods belong to the event loop's thread.

    Attributes:
        loop: the event loop.
        sinks: who gets a delta, by the batcher's id.
        num_tokens: that have come so far.
    """

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self.sinks: dict[int, Sink] = {}
        self.num_tokens = 0
        self._notified: list[Notified] = []
        self.loop = asyncio.get_running_loop()
        self._fd: int | None = None
        self._timer = self.loop.call_later(_SHORT_TICK, self._tick)

    def watch(self, fd: int | None) -> None:
        """Wake up when `fd` is readable; the engine says which, and None before it closes it."""
        if self._fd is not None:
            self.loop.remove_reader(self._fd)
        self._fd = fd
        if fd is not None:
            self.loop.add_reader(fd, self._step)
        else:  # the next one is started by a tick
            self._tick_in(_SHORT_TICK)

    @property
    def fd(self) -> int | None:
        """What is watched; None while there is no engine."""
        return self._fd

    def step(self) -> None:
        """Deliver what the engine has said; for a host that waits for `fd` itself."""
        self._step()

    def submit(self, request: Request, prompt: Prompt, sink: Sink, started: Callable[[], None] = lambda: None) -> int:
        """Submit a request; return its id.

        Args:
            sink: gets its deltas until the finishing one.
            started: called when the engine gets it.

        Raises:
            Overloaded: the queue is full.
            InvalidPayload: its adapter was dropped since it was parsed.
        """
        id = self._batcher.submit(request, prompt, started)
        self.sinks[id] = sink
        return id

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
        """Tell the hosts now. A step does so at its end; whoever notifies at another time calls this."""
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
        self._step()
        nobody_waits = self._batcher.ready and not self._batcher.num_queued
        self._tick_in(_TICK if nobody_waits else _SHORT_TICK)

    def _tick_in(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._tick)

    def _step(self) -> None:
        sinks = self.sinks
        num_tokens = 0
        for delta in self._batcher.step():
            num_tokens += len(delta.tokens)
            sink = sinks.get(delta.id)
            if sink is None:
                continue
            try:
                sink(delta)
            except Exception as error:  # one client's answer must not stop the others'
                log.exception("an answer could not be written: a bug")
                self.cancel(delta.id)
                failure = InternalError.of(error)
                with contextlib.suppress(Exception):  # it has been logged, and its request is ended
                    sink(Delta(delta.id, delta.sequence, (), Finish.ERROR, failure))
        self.num_tokens += num_tokens
        self.flush()
