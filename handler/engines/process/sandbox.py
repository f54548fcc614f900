"""Sandbox for work on untrusted input: the host's end of a process that is started on demand, and again when it ends.

It compiles clients' schemas and grammars, parses large bodies and decodes images. The other end is `sandbox_tasks.py`.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from handler.core.child_processes import python
from handler.engines.process.ipc import ChannelClosed, Messages, send
from handler.engines.process.sandbox_tasks import Begun, Done, Job, Loaded, OutOfMemory, Prepared, Raised, Work

log = logging.getLogger("handler.trials")

_MAIN = "handler.engines.process.sandbox_tasks:main"
_LOAD_SECONDS = 240.0
_PAUSE = 30.0  # seconds between a start that failed and the next
_FORK_SECONDS = 20.0  # to begin a job, beside the job's own limit
_EXIT_SECONDS = 0.01  # from the end of a job whose process was killed until the exit is visible
_STOPPING = "the server is stopping"
Spent = Callable[[float], object]
_NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)
"""Exceptions of pickle for a function that cannot be sent."""


class NotRun(Exception):
    """The job was not run; the message says why."""


class TooBusy(NotRun):
    """The job did not end in its limit by the clock, as other work had the processors."""


class _ProcessLost(NotRun):
    """The process hung, or ended during another job."""


class LimitExceeded(Exception):
    """The job exceeded its limits, or crashed the copy of the process that ran it."""


class MemoryLimitExceeded(LimitExceeded):
    """The job exceeded its memory limit."""


class Purpose(NamedTuple):
    """Words for messages: the subject ("large request bodies"), the verb ("are read"), and a remedy."""

    subject: str
    verb: str
    remedy: str = ""

    @property
    def impossible(self) -> str:
        return f"{self.subject} cannot be {self.verb.removeprefix('are ')}"


class Sandbox:
    """Runs one job a call; several threads may call at the same time.

    The process ends with the thread that starts it (PR_SET_PDEATHSIG): call from threads that stay.

    Args:
        make: returns the function that does the work; it is pickled, and called in the process.
        purpose: for messages.
    """

    def __init__(self, make: Callable[[], Work | Prepared], purpose: Purpose) -> None:
        self._make = make
        self._purpose = purpose
        self._name = f"the process where {purpose.subject} {purpose.verb}"
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._failed_at: float | None = None
        self._reason = ""
        self._closed = False

    def run(self, job: Job, data: bytes | memoryview = b"", spent: Spent = lambda seconds: None) -> list[Any]:
        """Run a job; return its results.

        Args:
            data: `job.size` bytes.
            spent: gets the seconds of CPU time that the job took, all that it may take where it was stopped.

        Raises:
            LimitExceeded: the job was stopped.
            NotRun: the process cannot be started, or the machine is too busy.
            Exception: the job's own.
        """
        try:
            return self._run(job, data, spent)
        except _ProcessLost:
            return self._run(job, data, spent)  # once more, in a new process

    def start(self) -> None:
        """Start the process where it does not run, and wait until it is loaded.

        Raises:
            NotRun: it cannot be started.
        """
        with self._lock:
            self._ensure_started()

    def close(self) -> None:
        """End the process and its jobs: it exits when its socket closes, or when this process ends."""
        self._closed = True
        # Without the lock, which a thread holds for as long as the process takes to load.
        if (control := self._control) is not None:
            with contextlib.suppress(OSError):  # a thread has closed it
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
                if self._closed or _has_ended(process):
                    raise _ProcessLost(f"{self._name} has ended") from None
                spent(job.limits.seconds)
                raise
            except _ProcessLost:
                with self._lock:
                    if self._process is process:  # else a new one has been started
                        self._kill()
                raise

    def _hand_over(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        for _ in range(2):
            with self._lock:
                control, process = self._ensure_started()
                try:
                    socket.send_fds(control, [b"\0"], [theirs.fileno()])
                    return process
                except OSError:  # it has died since the last job
                    self._kill()
        raise NotRun(f"{self._name} does not live")

    def _outcome(self, channel: socket.socket, job: Job, data: bytes | memoryview, spent: Spent) -> list[Any]:
        channel.settimeout(_FORK_SECONDS)
        messages = Messages(channel)
        try:
            send(channel, job)
            first = messages.next()
        except ChannelClosed:
            raise _ProcessLost(f"{self._name} does not answer") from None
        assert isinstance(first, Begun), "the first message of a job"
        began = time.monotonic()
        channel.settimeout(job.limits.patience)
        try:
            return _results(channel, messages, data, spent)
        except ChannelClosed:
            if time.monotonic() - began > 0.99 * job.limits.patience:
                raise TooBusy("the machine is too busy") from None
            raise LimitExceeded from None

    # -- the process ---------------------------------------------------------------------------------------------

    def _ensure_started(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Called with the lock."""
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

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        control, theirs = socket.socketpair()
        self._control = control
        began = time.monotonic()
        with contextlib.closing(theirs):
            if self._closed:  # `close` has not seen this socket
                raise NotRun(_STOPPING)
            process = self._process = subprocess.Popen(
                python(_MAIN, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the host handles signals to the terminal's group
            )
        control.settimeout(_LOAD_SECONDS)
        try:
            send(control, self._make)
            loaded: Loaded = Messages(control).next()
        except ChannelClosed:
            raise NotRun("the process ended while it was loading") from None
        if loaded.reason:
            log.error("%s\n%s", self._purpose.impossible, loaded.trace.rstrip())
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
                self._process.wait()

    def _kill(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


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
