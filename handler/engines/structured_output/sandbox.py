"""The host's end of a process that works on untrusted input: started when it is needed, and again when it is gone."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from handler.engines.process.ipc import ChannelClosed, Messages, send
from handler.engines.structured_output.sandbox_tasks import Begun, Done, Job, Loaded, OutOfMemory, Raised, Work

log = logging.getLogger("handler.trials")

_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; from handler.engines.structured_output.sandbox_tasks import main; "
    "main(int(sys.argv[1]))"
)
_LOAD_SECONDS = 240.0
_PAUSE = 30.0  # seconds after a start that failed, before the next
_FORK_SECONDS = 20.0  # to begin a trial, beside its own limit
_DEATH_SECONDS = 0.01  # from the end of a trial whose process was killed until that can be seen of the process
_STOPPING = "the server is stopping"


class NotRun(Exception):
    """The job was not done; the message says why."""


class _Lost(NotRun):
    """The process hung, or ended over another job."""


class LimitExceeded(Exception):
    """The job went beyond its limits, or broke the copy of the process that did it."""


class MemoryLimitExceeded(LimitExceeded):
    """It needed more memory than its limit."""


class Purpose(NamedTuple):
    """How messages name what a process is for: "guides", "are tried", and what to do where it cannot be had."""

    what: str
    done: str
    otherwise: str = ""

    @property
    def impossible(self) -> str:
        return f"{self.what} cannot be {self.done.removeprefix('are ')}"


class Sandbox:
    """Has one job done a call; several threads may call it at the same time.

    The process ends with the thread that starts it (PR_SET_PDEATHSIG): call it from threads that stay.

    Args:
        make: gives what does the work; it is pickled, and called in the process.
        purpose: for messages.
    """

    def __init__(self, make: Callable[[], Work], purpose: Purpose) -> None:
        self._make = make
        self._purpose = purpose
        self._name = f"the process where {purpose.what} {purpose.done}"
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._failed_at: float | None = None
        self._reason = ""
        self._closed = False

    def done(self, job: Job, data: bytes | memoryview = b"") -> tuple[list[Any], float]:
        """What the work yielded, and the seconds of computing that it took.

        Args:
            data: `job.size` bytes.

        Raises:
            LimitExceeded: it was given up.
            NotRun: the process cannot be had, or the machine is too busy.
            Exception: what the work raised.
        """
        try:
            return self._try(job, data)
        except _Lost:
            return self._try(job, data)  # once more, in its successor

    def _try(self, job: Job, data: bytes | memoryview) -> tuple[list[Any], float]:
        ours, theirs = socket.socketpair()
        with contextlib.closing(ours):
            with contextlib.closing(theirs):
                process = self._hand_over(theirs)  # by now there may be another one
            try:
                return self._outcome(ours, job, data)
            except LimitExceeded:
                if self._closed or _ended(process):
                    raise _Lost(f"{self._name} has ended") from None
                raise
            except _Lost:
                with self._lock:
                    if self._process is process:
                        self._forget()
                raise

    def _outcome(self, channel: socket.socket, job: Job, data: bytes | memoryview) -> tuple[list[Any], float]:
        channel.settimeout(_FORK_SECONDS)
        messages = Messages(channel)
        try:
            send(channel, job)
            begun = messages.next()
        except ChannelClosed:
            raise _Lost(f"{self._name} does not answer") from None
        assert isinstance(begun, Begun), "that is its first word"
        began = time.monotonic()
        channel.settimeout(job.limits.patience)
        try:
            return _results(channel, messages, data)
        except ChannelClosed:
            if time.monotonic() - began > 0.99 * job.limits.patience:
                raise NotRun("the machine is too busy") from None
            raise LimitExceeded from None

    def close(self) -> None:
        """It ends, trials under way too, when it finds its socket closed, or that this process has ended."""
        self._closed = True
        # Without the lock, which a thread holds for as long as the process takes to load.
        if (control := self._control) is not None:
            with contextlib.suppress(OSError):  # a thread has closed it
                control.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._reap, name="trials-reaper", daemon=True).start()

    def start(self) -> None:
        """Start it where it is not there; returns when it is loaded.

        Raises:
            NotRun: it cannot be had.
        """
        with self._lock:
            self._started()

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def _hand_over(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        for _ in range(2):
            with self._lock:
                control, process = self._started()
                try:
                    socket.send_fds(control, [b"\0"], [theirs.fileno()])
                    return process
                except OSError:  # it has died since the last job
                    self._forget()
        raise NotRun(f"{self._name} does not live")

    def _started(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Called with the lock."""
        if self._closed:
            raise NotRun(_STOPPING)
        if self._control is None or self._process is None:
            if self._failed_at is not None and time.monotonic() - self._failed_at < _PAUSE:
                raise NotRun(self._reason)
            try:
                self._failed_at = None
                return self._start()
            except Exception as error:  # the system's, or foreign code's
                self._forget()
                if self._closed:
                    raise NotRun(_STOPPING) from None
                self._failed_at, self._reason = (
                    time.monotonic(),
                    f"{self._purpose.impossible}{self._purpose.otherwise}: {error}",
                )
                log.error("%s", self._reason)
                raise NotRun(self._reason) from None
        return self._control, self._process

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        control, theirs = socket.socketpair()
        self._control = control
        began = time.monotonic()
        with contextlib.closing(theirs):
            if self._closed:  # which has not seen this socket
                raise NotRun(_STOPPING)
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # signals to the terminal's group are the host's business
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
        log.info("%s %s by process %d, loaded in %.1f s", *self._purpose[:2], process.pid, seconds)
        return control, process

    def _reap(self) -> None:
        with self._lock:
            if self._control is not None:
                self._control.close()
                self._control = None
            if self._process is not None:
                self._process.wait()

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_DEATH_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _results(channel: socket.socket, messages: Messages, data: bytes | memoryview) -> tuple[list[Any], float]:
    try:
        if data:  # else the copy may have ended already, and be no failure
            channel.sendall(data)  # frees the GIL
    except OSError as error:
        raise ChannelClosed from error
    found: list[Any] = []
    while True:
        message = messages.next()
        if isinstance(message, Done):
            return found, message.seconds
        if isinstance(message, OutOfMemory):
            raise MemoryLimitExceeded
        if isinstance(message, Raised):
            try:
                raise message.error
            finally:
                del message  # else the error's traceback, which names it, would keep `data` until it is collected
        found.append(message)
