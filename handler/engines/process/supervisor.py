"""The host's end of an engine that runs elsewhere: starts it, talks to it, notices its death or hang, starts it again.

Nothing here waits for the engine unless asked to: the host may be an event loop.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NoReturn

from handler.core.errors import GenerationFailed
from handler.core.values import Adapter, Sampling
from handler.engines.base import EngineInfo, Step
from handler.engines.process.engine_loop import Add, Cancel, ChangeAdapter, Failed, Ready, Spec, run
from handler.engines.process.ipc import ChannelClosed, MessageReader, send, wait

log = logging.getLogger("handler.engine")

_MAX_BACKOFF = 30.0  # seconds between attempts to start a broken engine
_BACKOFF = 0.5


# The worker imports from where its host does: `python -m` would put the working directory first.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; from handler.engines.process.engine_process import main; "
    "main(int(sys.argv[1]))"
)


class State(str, Enum):
    LOADING = "loading"  # the first start
    READY = "ready"
    RESTARTING = "restarting"  # it was ready before
    CLOSED = "closed"


class Worker:
    """One life of an engine: a channel, and the process or thread at its other end."""

    def __init__(self, spec: Spec, *, isolated: bool) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        if isolated:
            with contextlib.closing(theirs), contextlib.ExitStack() as on_failure:
                on_failure.callback(self.channel.close)
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # its own processes are in its session, to be ended with it (family.py)
                )
                on_failure.pop_all()
            self._commands.put(spec)
        else:
            from handler.engines import load

            threading.Thread(target=run, args=(lambda: load(*spec), theirs), name="engine", daemon=True).start()
        # Sending has a thread of its own: an engine busy with a long step reads nothing, and the host must not wait.
        threading.Thread(target=self._send_all, name="engine-commands", daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def send(self, command: Any) -> None:
        self._commands.put(command)

    def _send_all(self) -> None:
        with contextlib.suppress(ChannelClosed, OSError, ValueError):  # closed, by its end or by ours
            while (command := self._commands.get()) is not None:
                send(self.channel, command)

    def stop(self, grace: float = 0.0) -> None:
        """End it: politely for `grace` seconds, then for good. A thread that hangs is left behind, unheard."""
        self._commands.put(None)
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if grace:
                    self._process.wait(grace)
            self._process.kill()
            # A large process takes its time to go, and whoever calls this has none.
            threading.Thread(target=self._process.wait, name="engine-reaper", daemon=not grace).start()

    def exit_reason(self) -> str:
        """How it ended, for the log and the clients."""
        if self._process is None:
            return "its thread ended"
        try:
            code = self._process.wait(0.1)
        except subprocess.TimeoutExpired:
            return "it closed its channel"
        return f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"


class EngineSupervisor:
    """An engine in a worker, supervised.

    `step` returns what arrived and raises `GenerationFailed` once for each death: every request that was in flight is
    lost then. A new worker is started with growing pauses; until it is ready `ready` is False and `add` must wait.

    Args:
        spec: what the worker loads.
        isolated: in a process of its own, else on a thread.
        timeout: seconds without a step, while requests are in flight, after which the engine counts as hung.
        load_timeout: seconds that loading may take.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        isolated: bool = True,
        timeout: float = 60.0,
        load_timeout: float = 240.0,
    ) -> None:
        self._spec = spec
        self._isolated = isolated
        self._timeout = timeout
        self._load_timeout = load_timeout
        self._on_change: Callable[[State], None] = lambda state: None
        self._watch: Callable[[int | None], None] = lambda fd: None
        self._worker: Worker | None = None
        self._reader = MessageReader()
        self._active: set[int] = set()
        self._deaths = 0  # in a row, for the backoff
        self._since = 0.0  # last sign of life, or start of the load
        self._start_at = 0.0
        self._expecting = False  # a step is due
        self._failed: str | None = None  # what the worker said before it ended
        self._worn = False  # it is to be replaced
        self.info: EngineInfo | None = None
        self.restarts = 0
        self.reason = ""
        self.state = State.LOADING
        self._start()

    # -- what the batcher uses ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    def add(self, key: int, ids: Sequence[int], sampling: Sampling, adapter: Adapter | None = None) -> None:
        self._active.add(key)
        self._send(Add(key, ids, sampling, adapter))

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self._active.add(key)
        self._send(ChangeAdapter(key, adapter, drop))

    def cancel(self, key: int) -> None:
        if key in self._active:
            self._active.discard(key)
            self._send(Cancel(key))

    def step(self, timeout: float = 0.0) -> list[Step]:
        """What the engine's steps brought, waiting up to `timeout` seconds for it; also the place where time passes.

        Raises:
            GenerationFailed: the engine died, hung or raised; nothing that was in flight will come back.
        """
        if self._worker is None:
            self._wait_for_start(timeout)
            return []
        if timeout > 0:
            wait(self._worker.channel, timeout=timeout)
        if self._failed is not None:
            self._died(self._failed)
        steps: list[Step] = []
        try:
            messages = self._reader.receive(self._worker.channel)
        except ChannelClosed:
            self._died(self._worker.exit_reason())
        if messages is None:
            self._check_clock()
            if self._worn:
                self._replace_worn()
            return steps
        self._since = time.monotonic()
        for message in messages:
            if type(message) is tuple:  # a Step: to name its class in each message costs more than all that is in it
                step = Step(*message)
                steps.append(step)
                self._deaths = 0
                for output in step.others:
                    if output.finish is not None:
                        self._active.discard(output.key)
            elif isinstance(message, Ready):
                self._loaded(message.info)
            elif isinstance(message, Failed):
                if message.trace:
                    log.error("engine failed\n%s", message.trace.rstrip())
                self._failed = message.reason  # what came before it is still good: it is delivered first
        self._expecting = bool(self._active)
        if self._failed is not None and not steps:
            self._died(self._failed)
        if self._worn:
            self._replace_worn()
        return steps

    def renew(self) -> None:
        """Have a new worker as soon as nothing is in flight; requests wait while it loads. Thread-safe."""
        self._worn = True

    def close(self, grace: float = 2.0) -> None:
        if self._worker is not None:
            self._watch(None)
            self._worker.stop(grace)
            self._worker = None
        if self.state is not State.CLOSED:
            self._change(State.CLOSED)

    def attach(self, *, watch: Callable[[int | None], None], on_change: Callable[[State], None]) -> None:
        """Tell an event loop what to wait for.

        Args:
            watch: called with the file descriptor that is readable when `step` has something to do, now and at every
                start, and with None before it is closed.
            on_change: called with the state: now, after every change, and for every engine that is lost.
        """
        self._watch, self._on_change = watch, on_change
        if self._worker is not None:
            watch(self._worker.channel.fileno())
        on_change(self.state)

    @property
    def pid(self) -> int | None:
        """Of the worker's process, where it has one."""
        return self._worker.pid if self._worker is not None else None

    # -- lives ---------------------------------------------------------------------------------------------------

    def _send(self, command: Any) -> None:
        """Every command is answered by a step: from now on silence counts, whatever becomes of the request."""
        if self._worker is not None:
            if not self._expecting:
                self._expecting, self._since = True, time.monotonic()
            self._worker.send(command)

    def _start(self) -> None:
        self._reader = MessageReader()
        self._failed = None
        self._worn = False
        self._expecting = False
        self._since = time.monotonic()
        try:
            self._worker = Worker(self._spec, isolated=self._isolated)
        except OSError as error:  # no memory, no file descriptors: perhaps later
            self._lost(f"it could not be started: {error}")
        else:
            self._watch(self._worker.channel.fileno())

    def _wait_for_start(self, timeout: float) -> None:
        pause = self._start_at - time.monotonic()
        if pause > 0 and timeout > 0:
            time.sleep(min(pause, timeout))
        if self.state is State.RESTARTING and time.monotonic() >= self._start_at:
            self._start()

    def _loaded(self, info: EngineInfo) -> None:
        self.info = info
        self.reason = ""
        self._change(State.READY)

    def _check_clock(self) -> None:
        silent = time.monotonic() - self._since
        if self.ready and self._expecting and silent > self._timeout:
            self._died(f"no step for {self._timeout:g} s (option.engine_timeout)")
        elif not self.ready and silent > self._load_timeout:
            self._died(f"not loaded after {self._load_timeout:g} s (option.model_loading_timeout)")

    def _replace_worn(self) -> None:
        if self._active or not self.ready or self._worker is None or self._failed is not None:
            return
        log.info("nothing is in flight: the engine is started anew, as it holds memory that it does not give back")
        self._watch(None)
        self._worker.stop()
        self._worker = None
        self.restarts += 1
        self._start_at = time.monotonic()
        self._change(State.RESTARTING)

    def _died(self, reason: str) -> NoReturn:
        """Give this life up and plan the next; raises what the requests in flight are told."""
        assert self._worker is not None
        self._watch(None)
        self._worker.stop()
        self._worker = None
        self._active.clear()
        self._lost(reason)
        raise GenerationFailed(f"engine failure: {reason}")

    def _lost(self, reason: str) -> None:
        self.reason = reason
        pause = min(_BACKOFF * 2**self._deaths, _MAX_BACKOFF)
        self._deaths += 1
        self._start_at = time.monotonic() + pause
        # A first load that fails is for the host to judge; what has been ready once is worth another attempt.
        again = self.info is not None
        self.restarts += again
        log.error("engine lost: %s%s", reason, f"; starting it again in {pause:g} s" if again else "")
        self._change(State.RESTARTING if again else State.CLOSED)

    def _change(self, state: State) -> None:
        self.state = state
        self._on_change(state)
