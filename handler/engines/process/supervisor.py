"""Supervisor of an engine: starts it, sends commands, detects a crash or hang, and restarts it.

Calls do not block unless they are given a timeout: the host may be an event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NoReturn

from handler.core.text import Prompt
from handler.core.values import Adapter, Request
from handler.engines.base import EngineInfo, EngineRequest, EngineStatistics, Step, engine_failure, pack
from handler.engines.process.engine_loop import Cancel, ChangeAdapter, Failed, Ready, Spec
from handler.engines.process.instance import EngineInstance
from handler.engines.process.ipc import ChannelClosed, MessageReader, wait
from handler.engines.process.places import ANYWHERE, Place
from handler.engines.silence import Silence

log = logging.getLogger("handler.engine")

_BACKOFF = 0.5  # seconds before the first restart, doubled by each failure in a row
_MAX_BACKOFF = 30.0


class State(str, Enum):
    """State of the engine; RESTARTING means that it was ready before."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    CLOSED = "closed"


Soon = Callable[[Callable[[], None]], object]
"""Has a callback called soon."""


def now(callback: Callable[[], None]) -> None:
    """Call it now, where no event loop runs."""
    callback()


class EngineSupervisor:
    """An engine in a process or thread, restarted when it fails.

    `step` returns the engine's steps. It raises `GenerationFailed` once for each failure, which loses every request in
    flight. Restarts come after growing pauses; until the engine is ready `ready` is False and `add` is not allowed.

    Args:
        spec: the engine and its configuration.
        isolated: run it in a process of its own, else on a thread.
        timeout: seconds without a step after which an engine with requests counts as hung.
        load_timeout: seconds that loading may take.
        place: of the process.
    """

    reports = ()  # those of replicas, which one engine does not have

    def __init__(
        self,
        spec: Spec,
        *,
        isolated: bool = True,
        timeout: float = 60.0,
        load_timeout: float = 240.0,
        place: Place = ANYWHERE,
    ) -> None:
        self._spec = spec
        self._place = place
        self._isolated = isolated
        self._timeout = timeout
        self._load_timeout = load_timeout
        self._on_change: Callable[[State], None] = lambda state: None
        self._watch: Callable[[int | None], None] = lambda fd: None
        self._soon: Soon = now
        self._instance: EngineInstance | None = None
        self._reader = MessageReader()
        self._active: set[int] = set()
        self._num_failures = 0  # in a row
        self._silence = Silence()  # since the last message, the start, or the first command after a rest
        self._start_at = 0.0
        self._expects_step = False
        self._failure: str | None = None  # the engine's own last message
        self._restart_wanted = False
        self.info: EngineInfo | None = None
        self.statistics: EngineStatistics | None = None  # None: it has reported none since its start
        self.restarts = 0
        self.reason = ""
        self.state = State.LOADING
        self._start()

    # -- the batcher's side --------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    def admits(self, request: Request, prompt: Prompt) -> bool:
        return self.ready

    def continues(self, key: int) -> bool:
        return self.ready

    def add(self, request: EngineRequest) -> None:
        self._active.add(request.key)
        self._send(pack(request))

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self._active.add(key)
        self._send(ChangeAdapter(key, adapter, drop))

    def cancel(self, key: int) -> None:
        if key in self._active:
            self._active.discard(key)
            self._send(Cancel(key))

    def step(self, timeout: float = 0.0) -> list[Step]:
        """Return the engine's steps, waiting up to `timeout` seconds for one; also check timers and restart.

        Raises:
            GenerationFailed: the engine died, hung or raised; every request in flight is lost.
        """
        if self._instance is None:
            self._wait_for_start(timeout)
            return []
        self._flush()
        if timeout > 0:
            wait(self._instance.channel, timeout=timeout)
        if self._failure is not None:
            self._fail(self._failure)
        steps: list[Step] = []
        try:
            messages = self._reader.receive(self._instance.channel)
        except ChannelClosed:
            self._fail(self._instance.exit_reason())
        if messages is None:
            self._check_clock(timeout)
            if self._restart_wanted:
                self._restart_if_idle()
            return steps
        self._silence.begin()
        for message in messages:
            if type(message) is tuple:  # a Step without its class name, which would cost more than its content
                step = Step(*message)
                steps.append(step)
                self._num_failures = 0
                for output in step.others:
                    if output.finish is not None:
                        self._active.discard(output.key)
            elif isinstance(message, EngineStatistics):
                self.statistics = message
            elif isinstance(message, Ready):
                self.info, self.reason = message.info, ""
                self._change(State.READY)
            elif isinstance(message, Failed):
                if message.trace:
                    log.error("engine failed\n%s", message.trace.rstrip())
                self._failure = message.reason  # the steps before it are delivered first
        self._expects_step = bool(self._active)
        if self._failure is not None and not steps:
            self._fail(self._failure)
        if self._restart_wanted and not steps:  # what ended may be the first part of a request
            self._restart_if_idle()
        return steps

    @property
    def replica_restarts(self) -> Sequence[int]:
        """`restarts`, as of the only replica."""
        return (self.restarts,)

    def restart_when_idle(self, replica: int = 0) -> None:
        """Restart the engine as soon as no request is in flight; others wait while it loads. Thread-safe."""
        self._restart_wanted = True

    def close(self, grace: float = 2.0) -> None:
        if self._instance is not None:
            self._watch(None)
            self._instance.stop(grace)
            self._instance = None
        if self.state is not State.CLOSED:
            self._change(State.CLOSED)

    def attach(
        self, *, watch: Callable[[int | None], None], on_change: Callable[[State], None], soon: Soon = now
    ) -> None:
        """Connect an event loop.

        Args:
            watch: called with the file descriptor that is readable when `step` should be called: now and at every
                start; with None before it is closed.
            on_change: called with the state: now, after every change, and for every engine failure.
            soon: has a callback called when the loop has served those who wait: their commands are sent together.
        """
        self._watch, self._on_change, self._soon = watch, on_change, soon
        if self._instance is not None:
            watch(self._instance.channel.fileno())
        on_change(self.state)

    @property
    def silence(self) -> float:
        """Seconds since it said anything, while it owes a step."""
        return self._silence.seconds if self._expects_step else 0.0

    @property
    def pid(self) -> int | None:
        """Process id of the engine, where it has a process."""
        return self._instance.pid if self._instance is not None else None

    # -- starts and failures -------------------------------------------------------------------------------------

    def _send(self, command: Any) -> None:
        """Send a command and start the hang timer: the engine answers every command by a step."""
        if self._instance is not None:
            if not self._expects_step:
                self._expects_step = True
                self._silence.begin()
            if self._instance.put(command):
                self._soon(self._flush)

    def _flush(self) -> None:
        if self._instance is not None:
            self._instance.flush()

    def _start(self) -> None:
        self._reader = MessageReader()
        self._failure = None
        self.statistics = None
        self._restart_wanted = False
        self._expects_step = False
        self._silence.begin()
        try:
            self._instance = EngineInstance(self._spec, isolated=self._isolated, place=self._place)
        except OSError as error:  # no memory or no file descriptors: try again later
            self._schedule_restart(f"it could not be started: {error}")
        else:
            self._watch(self._instance.channel.fileno())

    def _wait_for_start(self, timeout: float) -> None:
        pause = self._start_at - time.monotonic()
        if pause > 0 and timeout > 0:
            time.sleep(min(pause, timeout))
        if self.state is State.RESTARTING and time.monotonic() >= self._start_at:
            self._start()

    def _check_clock(self, waited: float) -> None:
        silence = self._silence.look(waited)
        if self.ready and self._expects_step and silence > self._timeout:
            self._fail(f"no step for {self._timeout:g} s (option.engine_timeout)")
        elif not self.ready and silence > self._load_timeout:
            self._fail(f"not loaded after {self._load_timeout:g} s (option.model_loading_timeout)")

    def _restart_if_idle(self) -> None:
        if self._active or not self.ready or self._instance is None or self._failure is not None:
            return
        log.info("nothing is in flight: the engine is started anew, as it holds memory that it does not give back")
        self._watch(None)
        self._instance.stop()
        self._instance = None
        self.restarts += 1
        self._start_at = time.monotonic()
        self._change(State.RESTARTING)

    def _fail(self, reason: str) -> NoReturn:
        """Give this instance up and plan the next; raises the error of the requests in flight."""
        assert self._instance is not None
        self._watch(None)
        self._instance.stop()
        self._instance = None
        self._active.clear()
        self._schedule_restart(reason)
        raise engine_failure(reason)

    def _schedule_restart(self, reason: str) -> None:
        self.reason = reason
        pause = min(_BACKOFF * 2**self._num_failures, _MAX_BACKOFF)
        self._num_failures += 1
        self._start_at = time.monotonic() + pause
        was_ready = self.info is not None  # else the host ends: its first engine cannot be loaded
        self.restarts += was_ready
        log.error("engine lost: %s%s", reason, f"; starting it again in {pause:g} s" if was_ready else "")
        self._change(State.RESTARTING if was_ready else State.CLOSED)

    def _change(self, state: State) -> None:
        self.state = state
        self._on_change(state)
