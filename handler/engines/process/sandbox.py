"""A sandbox for untrusted input, in a process that is started on demand and restarted if it has ended.

The sandbox compiles clients' schemas and grammars, parses large bodies and decodes images. The host uses `Sandbox`, and
the process runs `main`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from handler.core.child_processes import Child, die_with_parent, serving_host, start
from handler.core.log import log_trace
from handler.engines.process.ipc import ChannelClosed, Messages, send

log = logging.getLogger("handler.trials")

_MAIN = "handler.engines.process.sandbox:main"
_LOAD_SECONDS = 240.0
_PAUSE = 30.0  # seconds between a failed start and the next one
_FORK_SECONDS = 20.0  # for the beginning of a job, in addition to the job's limit
_END_SECONDS = 5.0  # for the process to end after its socket has closed
_EXIT_SECONDS = 0.01  # within which the exit of a killed process becomes visible
_STOPPING = "the server is stopping"
Spent = Callable[[float], object]
_NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)
"""Exceptions that pickle raises when it cannot encode a function."""

Work = Callable[[Any, memoryview], Iterator[Any]]
"""Type of a function that receives a job's subject and data, and yields results for the host or raises an exception."""


class Prepared(NamedTuple):
    """Work that needs preparation. Each fork calls `prepare` before its limits apply, because forking loses threads."""

    work: Work
    prepare: Callable[[], object]


class Limits(NamedTuple):
    """The limits of one job.

    Attributes:
        seconds: maximum CPU time in seconds.
        memory: memory in bytes, in addition to the memory of the loaded process.
        patience: maximum wall-clock time in seconds.
        nice: number added to the process's niceness, so that token generation has priority.
    """

    seconds: float
    memory: int
    patience: float
    nice: int


class Job(NamedTuple):
    """A job. It is followed by `size` bytes of data on the channel."""

    subject: Any
    limits: Limits
    size: int = 0


class Loaded(NamedTuple):
    """Message that the process is ready for jobs. If `reason` is set, loading failed and the process will end."""

    reason: str = ""
    trace: str = ""


class JobBegun(NamedTuple):
    """Message that a job is running. If there is no later message about its end, it exceeded its limits or crashed."""


class Done(NamedTuple):
    """Message that a job has ended after `seconds` of CPU time. All its results have been sent."""

    seconds: float


class Raised(NamedTuple):
    """Message that a job ended with an exception after `seconds` of CPU time."""

    error: Exception
    seconds: float


class OutOfMemory(NamedTuple):
    """Message that a job exceeded its memory limit."""


class NotRun(Exception):
    """The job was not run or not completed for a reason unrelated to the job. The message contains the reason."""


class TooBusy(NotRun):
    """The job exceeded its wall-clock limit because the processors were busy with other work."""


class _ProcessLost(NotRun):
    """The process hung, or ended during another job."""


class LimitExceeded(Exception):
    """The job exceeded its limits, or crashed the process that ran it."""


class MemoryLimitExceeded(LimitExceeded):
    """The job exceeded its memory limit."""


class Purpose(NamedTuple):
    """Parts of log and error messages: the subject ("large request bodies"), the verb ("are read"), and a remedy."""

    subject: str
    verb: str
    remedy: str = ""

    @property
    def impossible(self) -> str:
        return f"{self.subject} cannot be {self.verb.removeprefix('are ')}"


class Sandbox:
    """Runs one job per call. Several threads may call it at the same time.

    The process ends when the thread that started it ends (PR_SET_PDEATHSIG), so only long-lived threads may call a
    sandbox.

    Args:
        make: function that returns the work function. `make` is pickled, and called in the process.
        purpose: parts of messages.
    """

    def __init__(self, make: Callable[[], Work | Prepared], purpose: Purpose) -> None:
        self._make = make
        self._purpose = purpose
        self._name = f"the process where {purpose.subject} {purpose.verb}"
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: Child | None = None
        self._failed_at: float | None = None
        self._reason = ""
        self._closed = False

    def run(self, job: Job, data: bytes | memoryview = b"", spent: Spent = lambda seconds: None) -> list[Any]:
        """Run a job and return its results.

        Args:
            data: `job.size` bytes.
            spent: function that is called with the CPU time of the job in seconds, or with the limit if the job was
                stopped.

        Raises:
            LimitExceeded: the job was stopped.
            NotRun: the process cannot be started, or hung or ended in both attempts, or the machine is too busy.
            Exception: any exception that the job itself raised.
        """
        try:
            return self._run(job, data, spent)
        except _ProcessLost:
            return self._run(job, data, spent)  # once more, in a new process

    def start(self) -> None:
        """Start the process if it is not running, and wait until it is loaded.

        Raises:
            NotRun: the process cannot be started.
        """
        with self._lock:
            self._ensure_started()

    def close(self) -> None:
        """End the process and its jobs. The process exits when its socket closes, or when this process ends."""
        self._closed = True
        # The lock is not used, because another thread holds it while the process loads.
        if (control := self._control) is not None:
            with contextlib.suppress(OSError):  # another thread has closed it
                control.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._reap, name="trials-reaper", daemon=True).start()

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _run(self, job: Job, data: bytes | memoryview, spent: Spent) -> list[Any]:
        ours, theirs = socket.socketpair()
        with contextlib.closing(ours):
            with contextlib.closing(theirs):
                process = self._hand_over(theirs)
            try:
                return self._outcome(ours, job, data, spent)
            except LimitExceeded:
                if self._closed or process.status(_EXIT_SECONDS) is not None:
                    raise _ProcessLost(f"{self._name} has ended") from None
                spent(job.limits.seconds)
                raise
            except _ProcessLost:
                with self._lock:
                    if self._process is process:  # otherwise a new one has been started
                        self._kill()
                raise

    def _hand_over(self, theirs: socket.socket) -> Child:
        for _ in range(2):
            with self._lock:
                control, process = self._ensure_started()
                try:
                    socket.send_fds(control, [b"\0"], [theirs.fileno()])
                    return process
                except OSError:  # the process has died since the last job
                    self._kill()
        raise NotRun(f"{self._name} is not running")

    def _outcome(self, channel: socket.socket, job: Job, data: bytes | memoryview, spent: Spent) -> list[Any]:
        channel.settimeout(_FORK_SECONDS)
        messages = Messages(channel)
        try:
            send(channel, job)
            first = messages.next()
        except ChannelClosed:
            raise _ProcessLost(f"{self._name} does not respond") from None
        assert isinstance(first, JobBegun), "a job's first message is JobBegun"
        began = time.monotonic()
        channel.settimeout(job.limits.patience)
        try:
            return _results(channel, messages, data, spent)
        except ChannelClosed:
            if time.monotonic() - began > 0.99 * job.limits.patience:
                raise TooBusy("the machine is too busy") from None
            raise LimitExceeded from None

    # -- the process ---------------------------------------------------------------------------------------------

    def _ensure_started(self) -> tuple[socket.socket, Child]:
        """Start the process if it is not running. The caller must hold the lock."""
        if self._closed:
            raise NotRun(_STOPPING)
        if self._control is not None and self._process is not None:
            return self._control, self._process
        if self._failed_at is not None and time.monotonic() - self._failed_at < _PAUSE:
            raise NotRun(self._reason)
        try:
            self._failed_at = None
            return self._start()
        except (NotRun, OSError, subprocess.SubprocessError, *_NOT_PICKLED) as error:
            self._kill()
            if self._closed:
                raise NotRun(_STOPPING) from None
            self._failed_at = time.monotonic()
            self._reason = f"{self._purpose.impossible}{self._purpose.remedy}: {error}"
            log.error("%s", self._reason)
            raise NotRun(self._reason) from None

    def _start(self) -> tuple[socket.socket, Child]:
        control, theirs = socket.socketpair()
        self._control = control
        began = time.monotonic()
        with contextlib.closing(theirs):
            if self._closed:  # `close` has not seen this socket
                raise NotRun(_STOPPING)
            process = self._process = start(_MAIN, theirs)
        control.settimeout(_LOAD_SECONDS)
        try:
            send(control, self._make)
            loaded: Loaded = Messages(control).next()
        except ChannelClosed:
            raise NotRun("the process ended while it was loading") from None
        if loaded.reason:
            log_trace(log, self._purpose.impossible, loaded.trace)
            raise NotRun(loaded.reason)
        control.settimeout(None)
        seconds = time.monotonic() - began
        log.debug("%s %s by process %d, loaded in %.1f s", *self._purpose[:2], process.pid, seconds)
        return control, process

    def _reap(self) -> None:
        with self._lock:
            if self._control is not None:
                self._control.close()
                self._control = None
            if self._process is not None:
                self._process.end(_END_SECONDS)

    def _kill(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.end()
            self._process = None


def _results(channel: socket.socket, messages: Messages, data: bytes | memoryview, spent: Spent) -> list[Any]:
    try:
        if data:  # without data the job may have ended already
            channel.sendall(data)  # frees the GIL
    except OSError as error:
        raise ChannelClosed from error
    results: list[Any] = []
    while True:
        message = messages.next()
        if isinstance(message, Done | Raised):
            spent(message.seconds)
        if isinstance(message, Done):
            return results
        if isinstance(message, OutOfMemory):
            raise MemoryLimitExceeded
        if isinstance(message, Raised):
            try:
                raise message.error
            finally:
                del message  # its traceback refers to this frame, and would keep `data` until a collection
        results.append(message)


# -- process of the sandbox, which runs each job in a fork of itself, within limits ------------------------------------
# A fork takes milliseconds while loading takes seconds, and its end frees all memory. The host's side is `Sandbox`.


def main(fd: str) -> None:
    """Create the work by calling the function in the first message. Then run a job for each further message.

    Each further message is a single byte, sent together with the job's socket.
    """
    with serving_host(fd) as control, contextlib.suppress(ChannelClosed):
        work = _load(control)
        if work is not None:
            _serve(control, work)


def _load(control: socket.socket) -> Work | Prepared | None:
    try:
        make: Callable[[], Work | Prepared] = Messages(control).next()
        work = make()
    except ChannelClosed:
        raise
    except Exception as error:  # foreign code: report it to the host
        send(control, Loaded(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return None
    gc.collect()
    gc.freeze()  # forks share memory that nobody writes to
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    send(control, Loaded())
    return work


def _serve(control: socket.socket, work: Work | Prepared) -> None:
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=fds[0]) as channel:
            try:
                pid = os.fork()
            except OSError:  # out of memory or processes: the host sees that the job has not begun
                continue
            if pid == 0:
                control.close()
                _run_job(channel, work)


def _run_job(channel: socket.socket, work: Work | Prepared) -> None:
    """Run one job, then end the process."""
    try:
        die_with_parent()
        job: Job = Messages(channel).next()
        null = os.open(os.devnull, os.O_WRONLY)  # libraries write clients' texts to stdout, which must not be logged
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.nice(job.limits.nice)
        if isinstance(work, Prepared):
            work.prepare()
            work = work.work
        _apply(job.limits)
        send(channel, JobBegun())
        thread = threading.Thread(target=lambda: send(channel, _outcome(channel, work, job)))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _outcome(channel: socket.socket, work: Work, job: Job) -> Done | Raised | OutOfMemory:
    began = time.process_time()
    try:
        for result in work(job.subject, _receive(channel, job.size)):
            send(channel, result)
        return Done(time.process_time() - began)
    except MemoryError:
        return OutOfMemory()
    except ChannelClosed:
        raise
    except Exception as error:  # foreign code: raised again on the host's side
        return Raised(error.with_traceback(None), time.process_time() - began)


def _receive(channel: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    if size and channel.recv_into(data, size, socket.MSG_WAITALL) < size:  # with size 0 it would wait for a byte
        raise ChannelClosed
    return data


def _apply(limits: Limits) -> None:
    # When memory runs out, the kernel must kill this process rather than the engine.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    # Half of the engine's stack, so that deep recursion ends here and not there. From 3.14, Python measures a thread's.
    half = 4 << 20 if stack == resource.RLIM_INFINITY else max(stack // 2, 1 << 16)
    threading.stack_size(half)
    data = status_bytes("VmData") + half + limits.memory  # RLIMIT_DATA counts all private writable memory
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # both signals end the process, even inside C code
    signal.setitimer(signal.ITIMER_REAL, limits.patience)


def status_bytes(field: str) -> int:
    """Return a field of /proc/self/status about the memory of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields[field].split()[0]) << 10
