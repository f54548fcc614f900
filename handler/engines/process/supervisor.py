"""The supervisor starts an engine, sends it commands, detects crashes and hangs, and restarts it.

Only calls with a timeout block, because the host may be an event loop.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from handler.core.child_processes import Child, start
from handler.core.errors import ServerLost
from handler.core.log import log_trace
from handler.core.text import Prompt
from handler.core.values import Adapter, Request
from handler.engines.base import (
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    Silence,
    Step,
    engine_failure,
    pack,
    unpack_step,
)
from handler.engines.process.engine_process import Cancel, ChangeAdapter, EngineFailed, Spec, run
from handler.engines.process.ipc import ChannelClosed, ChannelReader, encode, send_all, send_some, wait
from handler.engines.process.output import EngineOutput, is_vague

log = logging.getLogger("handler.engine")


@dataclass(frozen=True)
class Placement:
    """The environment and CPU cores of an engine process.

    Attributes:
        environ: environment variables that extend and override those of the host.
        cores: cores to which the process and its threads are pinned; if empty, the host's cores are used.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] = frozenset()


ANYWHERE = Placement()


def on_devices(devices: Sequence[str], count: int) -> list[Placement]:
    """Divide devices equally among `count` processes.

    Args:
        devices: indices or UUIDs, as in CUDA_VISIBLE_DEVICES; at least `count`.
    """
    each = len(devices) // count
    parts = (devices[index * each : (index + 1) * each] for index in range(count))
    return [Placement({"CUDA_VISIBLE_DEVICES": ",".join(part)}) for part in parts]


def on_cores(cores: Collection[int], count: int) -> list[Placement]:
    """Divide cores among `count` processes so that each gets adjacent cores. Cores are shared if there are too few.

    Args:
        cores: indices of the cores; empty if processes cannot be pinned to cores.
    """
    order = sorted(cores)
    if not order:
        return [ANYWHERE] * count
    if len(order) < count:
        return [Placement(cores=frozenset({order[index % len(order)]})) for index in range(count)]
    parts = (order[index * len(order) // count : (index + 1) * len(order) // count] for index in range(count))
    return [Placement(cores=frozenset(part)) for part in parts]


# -- one start of an engine: the channel, and the process or thread at its other end -----------------------------------


_MAIN = "handler.engines.process.engine_process:main"


class EngineInstance:
    """One run of an engine: a channel, and the process or thread at its other end.

    Attributes:
        reader: assembles the engine's messages.
        failure: the reason for a failure that the engine itself reported, or None.
        lost_server: whether the failure is that of a server that the engine had started.
        restart_requested: whether to restart the engine as soon as no request is running.
    """

    def __init__(self, spec: Spec, *, isolated: bool, placement: Placement = ANYWHERE) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        self.reader = ChannelReader()
        self.failure: str | None = None
        self.lost_server = False
        self.restart_requested = False
        self._unsent = bytearray()
        self._late: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._num_late = self._num_late_sent = 0
        self._process: Child | None = None
        self._output: EngineOutput | None = None
        if isolated:
            with contextlib.closing(theirs), contextlib.ExitStack() as on_failure:
                on_failure.callback(self.channel.close)
                # The session is ended with the engine: see `end_with_this_process`.
                self._process = start(_MAIN, theirs, {**os.environ, **placement.environ}, captured=True)
                on_failure.pop_all()
            if self._process.stdout is not None and self._process.stderr is not None:
                self._output = EngineOutput(self._process.stdout, self._process.stderr)
            if placement.cores:  # before the Spec is sent: all later threads inherit the cores of the first thread
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(self._process.pid, placement.cores)
            self.put(spec)
            self.flush()
        else:
            from handler.engines import load

            threading.Thread(target=run, args=(lambda: load(*spec), theirs), name="engine", daemon=True).start()
        threading.Thread(target=self._send_late, name="engine-commands", daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def put(self, command: Any) -> bool:
        """Queue a command for the next `flush`. Return whether it is the only queued command."""
        is_first = not self._unsent
        self._unsent += encode(command)
        return is_first

    def flush(self) -> None:
        """Send the queued commands without waiting. If the channel is full, a thread sends the rest.

        The channel fills up when an engine does not read during a long step. If the engine has ended, `step` will
        notice this.
        """
        if not self._unsent:
            return
        data, self._unsent = memoryview(self._unsent), bytearray()
        if self._num_late == self._num_late_sent:
            try:
                data = data[send_some(self.channel, data) :]
            except ChannelClosed:
                return
        if data:
            self._num_late += 1
            self._late.put(data)

    def _send_late(self) -> None:
        with contextlib.suppress(ChannelClosed, ValueError):  # closed by either side
            while (data := self._late.get()) is not None:
                send_all(self.channel, data)
                self._num_late_sent += 1

    def stop(self, grace: float = 0.0) -> None:
        """Close the channel, wait up to `grace` seconds, then kill the process. A thread that hangs is not stopped."""
        self._late.put(None)
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        if self._process is not None:
            self._process.status(grace)
            self._process.kill()
            self._last_error()  # so that what the engine wrote at its end is passed on even if this process ends now
            # A large process takes a long time to end, and the caller must not wait for this.
            threading.Thread(target=self._process.wait, name="engine-reaper", daemon=not grace).start()

    def exit_reason(self) -> str:
        """Return how the engine's process or thread ended, for the log and for clients."""
        if self._process is None:
            return "its thread ended"
        if (code := self._process.status(0.1)) is None:
            return "it closed its channel"
        if code == -signal.SIGKILL:
            return f"it was killed by signal {-code}"
        ended = f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"
        return f"{ended}: {reason}" if (reason := self._last_error()) else ended

    def failure_reason(self, failure: str) -> str:
        """Return a failure that the engine reported, or the error in its output to which the failure refers.

        The error may be that of a process that the engine has started, such as vLLM's core.
        """
        return (is_vague(failure) and self._last_error()) or failure

    def _last_error(self) -> str:
        error = "" if self._output is None else self._output.error()
        return "" if is_vague(error) else error


_BACKOFF = 0.5  # seconds before the first restart, doubled by each failure in a row
_MAX_BACKOFF = 30.0


class State(str, Enum):
    """The state of an engine. RESTARTING means that the engine was ready before."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    CLOSED = "closed"


class LoopHooks(NamedTuple):
    """Functions of the event loop that steps an engine. By default, there is no loop.

    Attributes:
        watch: called with a file descriptor each time the engine starts, and with None before the descriptor is closed.
            When the descriptor is readable, `step` should be called.
        on_change: called with the state of the engine after each change of state and each failure.
        soon: schedules a callback after the callbacks that are ready to run, so that commands are sent together.
    """

    watch: Callable[[int | None], object] = lambda fd: None
    on_change: Callable[[State], object] = lambda state: None
    soon: Callable[[Callable[[], None]], object] = lambda callback: callback()


@dataclass
class _HangTimer:
    """Detects whether an engine hangs.

    Attributes:
        silence: time since the last message, the start, or the first command after an idle period, whichever is latest.
        expects_step: whether a working engine will return a step.
    """

    timeout: float
    load_timeout: float
    silence: Silence = field(default_factory=Silence)
    expects_step: bool = False

    def check(self, waited: float, info: EngineInfo | None, *, ready: bool) -> str:
        """Return why the engine is considered hung, or "" if it is not.

        Args:
            waited: maximum number of seconds that the caller has waited since the last check.
        """
        silence = self.silence.look(waited)
        longest = info.longest_step if info is not None else 0.0
        limit = max(self.timeout, min(longest, self.load_timeout))
        if ready and self.expects_step and silence > limit:
            setting = "option.engine_timeout"
            if limit > self.timeout:
                cut = longest > self.load_timeout
                setting = "option.model_loading_timeout" if cut else "its longest step as measured while loading"
            return f"no step for {limit:g} s ({setting})"
        if not ready and silence > self.load_timeout:
            return f"not loaded after {self.load_timeout:g} s (option.model_loading_timeout)"
        return ""


class EngineSupervisor:
    """Runs an engine in a process or on a thread, and restarts it when it fails.

    `step` returns the engine's steps. After each failure, `step` raises `GenerationFailed` once, and all running
    requests are lost. The engine is restarted after a delay that grows with each failure. Until the engine is ready,
    `ready` is False and `add` must not be called.

    Args:
        spec: name and configuration of the engine.
        isolated: whether to run the engine in its own process rather than on a thread.
        timeout: number of seconds without a step after which an engine that has requests is considered hung. If the
            longest step takes longer, as estimated while loading, the estimate applies instead, up to `load_timeout`.
        load_timeout: maximum time for loading the engine, in seconds.
        placement: environment and cores of the process.
    """

    reports = ()  # only a ReplicaSet has reports

    def __init__(
        self,
        spec: Spec,
        *,
        isolated: bool = True,
        timeout: float = 60.0,
        load_timeout: float = 240.0,
        placement: Placement = ANYWHERE,
    ) -> None:
        self._launch: Callable[[], EngineInstance] = lambda: EngineInstance(
            spec, isolated=isolated, placement=placement
        )
        self._hang_timer = _HangTimer(timeout, load_timeout)
        self._host = LoopHooks()
        self._instance: EngineInstance | None = None
        self._active: set[int] = set()
        self._num_failures = 0  # in a row
        self._start_at = 0.0
        self.info: EngineInfo | None = None
        self.statistics: EngineStatistics | None = None  # None: the engine has not reported any since its start
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
        """Return the engine's steps, after waiting up to `timeout` seconds for the first step.

        This also checks timers and restarts the engine.

        Raises:
            GenerationFailed: the engine died, hung or raised an exception, and all running requests are lost.
        """
        instance = self._instance
        if instance is None:
            self._wait_for_start(timeout)
            return []
        instance.flush()
        if timeout > 0:
            wait(instance.channel, timeout=timeout)
        if instance.failure is not None:
            self._fail(instance.failure)
        steps: list[Step] = []
        try:
            messages = instance.reader.receive(instance.channel)
        except ChannelClosed:
            self._fail(instance.exit_reason())
        if messages is None:
            if reason := self._hang_timer.check(timeout, self.info, ready=self.ready):
                self._fail(reason)
            if instance.restart_requested:
                self._restart_if_idle(instance)
            return steps
        self._hang_timer.silence.begin()
        for message in messages:
            if type(message) is tuple:  # a packed Step
                step = unpack_step(message)
                steps.append(step)
                self._num_failures = 0
                for output in step.others:
                    if output.finish is not None:
                        self._active.discard(output.key)
            else:
                self._note(instance, message)
        self._hang_timer.expects_step = bool(self._active)
        if instance.failure is not None and not steps:
            self._fail(instance.failure)
        if instance.restart_requested and not steps:  # another part of the same request may follow
            self._restart_if_idle(instance)
        return steps

    @property
    def replica_restarts(self) -> Sequence[int]:
        """The number of restarts of each replica. There is only one replica."""
        return (self.restarts,)

    def restart_when_idle(self, replica: int = 0) -> None:
        """Restart the engine as soon as no request is running. New requests wait during the restart. Thread-safe."""
        if (instance := self._instance) is not None:
            instance.restart_requested = True

    def close(self, grace: float = 2.0) -> None:
        self._stop(grace)
        if self.state is not State.CLOSED:
            self._change(State.CLOSED)

    def attach(self, host: LoopHooks) -> None:
        """Connect an event loop, and call `host.watch` and `host.on_change` for the first time."""
        self._host = host
        if self._instance is not None:
            host.watch(self._instance.channel.fileno())
        host.on_change(self.state)

    @property
    def silence(self) -> float:
        """Time in seconds that the engine has been silent although a step is expected; 0 if no step is expected."""
        return self._hang_timer.silence.seconds if self._hang_timer.expects_step else 0.0

    @property
    def pid(self) -> int | None:
        """The engine's process id, or None if the engine runs on a thread."""
        return self._instance.pid if self._instance is not None else None

    # -- starts and failures -------------------------------------------------------------------------------------

    def _send(self, command: Any) -> None:
        """Send a command and start the hang timer, because the engine responds to every command with a step."""
        if self._instance is not None:
            if not self._hang_timer.expects_step:
                self._hang_timer.expects_step = True
                self._hang_timer.silence.begin()
            if self._instance.put(command):
                self._host.soon(self._flush)

    def _flush(self) -> None:
        if self._instance is not None:
            self._instance.flush()

    def _note(self, instance: EngineInstance, message: Any) -> None:
        """Process a message from the engine that is not a step."""
        if isinstance(message, EngineStatistics):
            self.statistics = message
        elif isinstance(message, EngineInfo):  # it is loaded
            self.info, self.reason = message, ""
            if self.restarts:
                log.info("the engine is ready again after %.1f s", time.monotonic() - self._start_at)
            self._change(State.READY)
        elif isinstance(message, EngineFailed):
            if message.trace:
                log_trace(log, "engine failed", message.trace)
            instance.lost_server = message.lost_server
            instance.failure = instance.failure_reason(message.reason)  # the steps before it are delivered first

    def _start(self) -> None:
        self.statistics = None
        self._hang_timer.expects_step = False
        self._hang_timer.silence.begin()
        try:
            self._instance = self._launch()
        except OSError as error:  # no memory or no file descriptors: try again later
            self._schedule_restart(f"it could not be started: {error}")
        else:
            self._host.watch(self._instance.channel.fileno())

    def _wait_for_start(self, timeout: float) -> None:
        pause = self._start_at - time.monotonic()
        if pause > 0 and timeout > 0:
            time.sleep(min(pause, timeout))
        if self.state is State.RESTARTING and time.monotonic() >= self._start_at:
            self._start()

    def _restart_if_idle(self, instance: EngineInstance) -> None:
        if self._active or not self.ready or instance.failure is not None:
            return
        log.info("no request is running: restarting the engine, because it keeps memory that it does not free")
        self._stop()
        self.restarts += 1
        self._start_at = time.monotonic()
        self._change(State.RESTARTING)

    def _fail(self, reason: str) -> NoReturn:
        """Give up on this instance, schedule the next one, and raise the error for all running requests."""
        lost_server = self._instance is not None and self._instance.lost_server
        self._stop()
        self._active.clear()
        self._schedule_restart(reason)
        failure = engine_failure(reason)
        raise ServerLost(failure.message, detail=failure.detail) if lost_server else failure

    def _stop(self, grace: float = 0.0) -> None:
        if self._instance is not None:
            self._host.watch(None)
            self._instance.stop(grace)
            self._instance = None

    def _schedule_restart(self, reason: str) -> None:
        self.reason = reason
        pause = min(_BACKOFF * 2**self._num_failures, _MAX_BACKOFF)
        self._num_failures += 1
        self._start_at = time.monotonic() + pause
        was_ready = self.info is not None  # otherwise the host ends, as its first engine cannot be loaded
        self.restarts += was_ready
        log.error("engine lost: %s%s", reason, f"; restarting it in {pause:g} s" if was_ready else "")
        self._change(State.RESTARTING if was_ready else State.CLOSED)

    def _change(self, state: State) -> None:
        self.state = state
        self._host.on_change(state)


# -- process group of an engine: the engine and the processes that it starts end together ------------------------------


# Linux signals its parent's death to the watcher. All other signals are blocked, as the signal that ends the engine may
# be sent to its whole group. The watcher kills all processes of the session that the engine's process leads, because
# Open MPI 5 gives each MPI worker a process group of its own, but not a session. It also kills all processes that have
# the engine's marker in their environment, because a script may start a server in another session. It spares Python's
# resource trackers, which free the shared memory of killed processes and then end by themselves. It makes several
# passes, as processes may be starting others.
_WATCHER = """
import ctypes, os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
ctypes.CDLL(None).prctl(1, signal.SIGUSR2)
while os.getppid() == int(sys.argv[1]):
    signal.sigtimedwait([signal.SIGUSR2], 5)

def read(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()

def is_of_engine(pid):
    return os.getsid(pid) == os.getsid(0) or any(marker.encode() in read(pid, "environ") for marker in sys.argv[2:])

for _ in range(20):
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            if pid != os.getpid() and is_of_engine(pid) and b"resource_tracker" not in read(pid, "cmdline"):
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.05)
"""


_watchers: list[Child] = []  # which outlive this process


def end_with_this_process(*markers: str) -> None:
    """When this process ends, even if it is killed, end all processes in its session.

    On Linux, processes in other sessions end too if their environment contains one of `markers`.

    An engine that is killed cannot stop its own workers, which would keep the GPU memory that the next engine needs.
    This function has no effect unless this process leads its session, as `supervisor.py` arranges. Any other session
    might contain processes that do not belong to the engine.
    """
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        _watchers.append(Child([sys.executable, "-S", "-c", _WATCHER, str(os.getpid()), *markers]))


def end_with_children() -> Callable[[], None]:
    """End this process when one of its `multiprocessing` children ends, because the engine might wait for it forever.

    Returns:
        A function that stops the watch.
    """
    return _end_with({child.sentinel: child.name for child in multiprocessing.active_children()})


def end_with_descendants(command: str) -> Callable[[], None]:
    """End this process when a descendant whose command line contains `command` ends.

    MPI workers are not children of this process, because a daemon of Open MPI starts them. Other descendants, such as a
    worker's compiler, may end at any time.

    Returns:
        A function that stops the watch.
    """
    names = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if command.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and (fd := open_process(pid)) is not None:
                names[fd] = f"{command} (pid {pid})"
    return _end_with(names)


def end_with_process(pid: int, name: str, grace: float = 0.0) -> Callable[[], None]:
    """End this process when one of its children ends.

    Args:
        pid: process id of the child.
        name: name of the child in the log.
        grace: number of seconds in which this process may end by itself.

    Returns:
        A function that stops the watch.
    """
    fd = open_process(pid)
    return _end_with({} if fd is None else {fd: name}, grace)


def _end_with(processes: Mapping[int, str], grace: float = 0.0) -> Callable[[], None]:
    """End this process when one of several processes ends.

    Args:
        processes: names of the processes, by a file descriptor that becomes readable when the process ends.
        grace: number of seconds in which this process may end by itself.

    Returns:
        A function that stops the watch.
    """
    closing = threading.Event()

    def watch() -> None:
        ended = multiprocessing.connection.wait(list(processes))
        if not closing.wait(grace):
            names = ", ".join(processes[fd] for fd in ended if isinstance(fd, int))
            print(f"the engine's process {names} has ended", file=sys.stderr, flush=True)
            os._exit(1)

    if processes:
        threading.Thread(target=watch, name="engine-processes", daemon=True).start()
    return closing.set


def open_process(pid: int) -> int | None:
    """Open a file descriptor that refers to a process. Return None if the system does not allow this.

    Raises:
        ProcessLookupError: the process has ended.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:  # a kernel before 5.3, or a container that forbids it
        print(f"the engine's process {pid} is not watched: {error}", file=sys.stderr, flush=True)
        return None


def processes_with(marker: str) -> Iterator[int]:
    """Yield the ids of all processes whose environment contains a marker."""
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has just ended, or it is another user's
            if marker.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                yield pid


def descendants(parent: int) -> Iterator[int]:
    """Yield the ids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # pid (command) state ppid ...; the command may contain anything.
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(pid)
    parents = [parent]
    while parents:
        pids = children.get(parents.pop(), [])
        yield from pids
        parents += pids
