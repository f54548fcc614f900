"""The host's end of the process that tries guides: it is started when it is needed, and again when it is gone."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from handler.engines.base import GuideTrial
from handler.engines.frames import HostGone, Messages, send
from handler.engines.guide_process import Begun, Job, Loaded, Verdict

log = logging.getLogger("handler.guides")

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from handler.engines.guide_process import main; main(int(sys.argv[1]))"
_LOAD_SECONDS = 240.0
_PAUSE = 30.0  # seconds after a start that failed, before the next
_FORK_SECONDS = 20.0  # to begin a trial, beside its own limit
_DEATH_SECONDS = 0.01  # from the end of a trial whose process was killed until that can be seen of the process
_STOPPING = "the server is stopping"


class NotTried(Exception):
    """Nothing is known of the guide; the message says why."""


class _Lost(NotTried):
    """The process hung, or ended over another guide."""


class TooMuch(Exception):
    """It went beyond the limits of its trial."""


class TrialProcess:
    """Tries one guide a call; several threads may, at the same time.

    Args:
        make: gives what tries a guide; it is pickled, and called in the process.
    """

    def __init__(self, make: Callable[[], GuideTrial]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._failed_at: float | None = None
        self._reason = ""
        self._closed = False

    def tried(self, job: Job) -> Verdict:
        """What there is to say of a guide.

        Raises:
            TooMuch: it was given up.
            NotTried: the process cannot be had, or the machine is too busy.
        """
        try:
            return self._try(job)
        except _Lost:
            return self._try(job)  # once more, in its successor

    def _try(self, job: Job) -> Verdict:
        ours, theirs = socket.socketpair()
        with contextlib.closing(ours):
            with contextlib.closing(theirs):
                process = self._hand_over(theirs)  # by now there may be another one
            try:
                return _outcome(ours, job)
            except TooMuch:
                if self._closed or _ended(process):
                    raise _Lost("the process that tries guides has ended") from None
                raise
            except _Lost:
                with self._lock:
                    if self._process is process:
                        self._forget()
                raise

    def close(self) -> None:
        """It ends, trials under way too, when it finds its socket closed, or that this process has ended."""
        self._closed = True
        # Without the lock, which a thread holds for as long as the process takes to load.
        if (control := self._control) is not None:
            with contextlib.suppress(OSError):  # a thread has closed it
                control.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._reap, name="guides-reaper", daemon=True).start()

    def start(self) -> None:
        """Start it where it is not there; returns when it is loaded.

        Raises:
            NotTried: it cannot be had.
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
                except OSError:  # it has died since the last guide
                    self._forget()
        raise NotTried("the process that tries guides does not live")

    def _started(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Called with the lock."""
        if self._closed:
            raise NotTried(_STOPPING)
        if self._control is None or self._process is None:
            if self._failed_at is not None and time.monotonic() - self._failed_at < _PAUSE:
                raise NotTried(self._reason)
            try:
                self._failed_at = None
                return self._start()
            except Exception as error:  # the system's, or foreign code's
                self._forget()
                if self._closed:
                    raise NotTried(_STOPPING) from None
                self._failed_at, self._reason = (
                    time.monotonic(),
                    f"guides cannot be tried (option.guide_timeout=0 has them taken as they are): {error}",
                )
                log.error("%s", self._reason)
                raise NotTried(self._reason) from None
        return self._control, self._process

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        control, theirs = socket.socketpair()
        self._control = control
        began = time.monotonic()
        with contextlib.closing(theirs):
            if self._closed:  # which has not seen this socket
                raise NotTried(_STOPPING)
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
        except HostGone:
            raise NotTried("the process that tries them ended while it was loading") from None
        if loaded.reason:
            log.error("guides cannot be tried\n%s", loaded.trace.rstrip())
            raise NotTried(loaded.reason)
        control.settimeout(None)
        log.info("guides are tried by process %d, loaded in %.1f s", process.pid, time.monotonic() - began)
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


def _outcome(channel: socket.socket, job: Job) -> Verdict:
    channel.settimeout(_FORK_SECONDS)
    messages = Messages(channel)
    try:
        send(channel, job)
        begun = messages.next()
    except HostGone:
        raise _Lost("the process that tries guides does not answer") from None
    assert isinstance(begun, Begun), "that is its first word"
    began = time.monotonic()
    channel.settimeout(job.limits.patience)
    try:
        verdict: Verdict = messages.next()
    except HostGone:
        if time.monotonic() - began > 0.99 * job.limits.patience:
            raise NotTried("the machine is too busy to try the guide") from None
        raise TooMuch from None
    return verdict
