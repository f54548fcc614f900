"""Drive a batcher from an event loop: each message of the engine is one wake-up, whatever it holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from handler.core.errors import InternalError, ServingError
from handler.core.text import Prompt
from handler.core.values import Delta, Finish, Request, Token
from handler.protocols.base import TokenLine
from handler.scheduler.batcher import Batcher
from handler.serving.metrics import RequestStats

log = logging.getLogger("handler.driver")

Sink = Callable[[Delta], None]

_SHORT_STEP = 0.002  # seconds; after a longer one the others have their turn
_MAX_REST = 0.05  # seconds
_TICK = 1.0  # seconds between looks at the clock: hangs, requests that take too long
_SHORT_TICK = 0.2  # while no engine is ready, or requests wait


class Notified(Protocol):
    """A request whose host wants to know of new bytes.

    Attributes:
        notified: it is in `EngineDriver.notified`.
    """

    notified: bool

    @property
    def on_bytes(self) -> Callable[[Any], object]:
        """The host's callback; gets the request."""


class Receiver(NamedTuple):
    """Takes the tokens of one stream in two passes, so that all of a step's lines are written in a row.

    Attributes:
        stats: counts the tokens.
        line: encodes a token.
        write: writes a line; False where it has to be kept.
        keep: keeps a line for `on_bytes`.
        fail: ends the request, whose token could not be encoded.
    """

    stats: RequestStats
    line: TokenLine
    write: Callable[[bytes], bool]
    keep: Callable[[bytes], None]
    fail: Callable[[ServingError], None]


class EngineDriver:
    """All methods belong to the event loop's thread.

    After a long step the driver rests for as long as the step took: new connections, requests and `/ping` come in
    between. Engine steps that wait meanwhile are joined, so on a busy host a token costs less.

    Args:
        rests: the loop has others to serve; False where it only runs in a host's calls.

    Attributes:
        loop: the event loop.
        sinks: who gets a delta, by the batcher's id.
        notified: the requests whose hosts are told at the end of this step.
        num_tokens: that have come so far.
    """

    def __init__(self, batcher: Batcher, *, rests: bool = True) -> None:
        self._batcher = batcher
        self._rests = rests
        self._rest: asyncio.TimerHandle | None = None  # while it rests
        self.sinks: dict[int, Sink] = {}
        self.num_tokens = 0
        self.notified: list[Notified] = []
        self.loop = asyncio.get_running_loop()
        self._fd: int | None = None
        self._timer = self.loop.call_later(_SHORT_TICK, self._tick)

    def watch(self, fd: int | None) -> None:
        """Wake up when `fd` is readable; the engine says which, and None before it closes it."""
        if self._fd is not None:
            self.loop.remove_reader(self._fd)
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        self._fd = fd
        if fd is not None:
            self.loop.add_reader(fd, self._wake_up)
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

    def send_tokens(self, id: int, receiver: Receiver) -> None:
        """Give a request's tokens to `receiver`, where nothing comes with them; its sink gets all else."""
        self._batcher.send_tokens(id, receiver)

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
            self.notified.append(task)

    def flush(self) -> None:
        """Tell the hosts now. A step does so at its end; whoever notifies at another time calls this."""
        tasks = self.notified.copy()
        self.notified.clear()
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

    def _wake_up(self) -> None:
        """Step, and rest after a long one."""
        began = self.loop.time()
        self._step()
        took = self.loop.time() - began
        if took > _SHORT_STEP and self._rests and self._fd is not None:
            self.loop.remove_reader(self._fd)
            self._rest = self.loop.call_later(min(took, _MAX_REST), self.watch, self._fd)

    def _step(self) -> None:
        sinks = self.sinks
        deltas = self._batcher.step()
        lines = self._encode(self._batcher.tokens)
        num_tokens = len(lines)
        for delta in deltas:
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
        for receiver, line in lines:
            if not receiver.write(line):
                receiver.keep(line)
        self.flush()

    def _encode(self, tokens: Sequence[tuple[Receiver, Token]]) -> list[tuple[Receiver, bytes]]:
        lines = []
        for receiver, token in tokens:
            try:
                lines.append((receiver, receiver.line(token)))
                receiver.stats.num_tokens += 1
            except Exception as error:  # one client's answer must not stop the others'
                log.exception("a token could not be written: a bug")
                receiver.fail(InternalError.of(error))
        return lines
