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


class NotTried(Exception):
    """Nothing is known of the guide; the message says why."""


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
        ours, theirs = socket.socketpair()
        with contextlib.closing(ours):
            with contextlib.closing(theirs):
                self._hand_over(theirs)
            try:
                return _outcome(ours, job)
            except TooMuch:
                if self._closed or self._process is None or self._process.poll() is not None:
                    raise NotTried("the process that tries guides has ended") from None
                raise

    def close(self) -> None:
        """It ends, trials under way too, when it finds its socket closed, or that this process has ended."""
        self._closed = True
        control, self._control = self._control, None
        if control is not None:
            with contextlib.suppress(OSError):  # a thread may be using it
                control.shutdown(socket.SHUT_RDWR)
            control.close()
        if self._process is not None:
            threading.Thread(target=self._process.wait, name="guides-reaper", daemon=True).start()

    def start(self) -> None:
        """Start it where it is not there; returns when it is loaded.

        Raises:
            NotTried: it cannot be had.
        """
        with self._lock:
            self._started()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def _hand_over(self, theirs: socket.socket) -> None:
        for _ in range(2):
            with self._lock:
                control = self._started()
                try:
                    socket.send_fds(control, [b"\0"], [theirs.fileno()])
                    return
                except OSError:  # it has died since the last guide
                    self._forget()
        raise NotTried("the process that tries guides does not live")

    def _started(self) -> socket.socket:
        if self._closed:
            raise NotTried("the server is stopping")
        if self._control is None:
            if self._failed_at is not None and time.monotonic() - self._failed_at < _PAUSE:
                raise NotTried(self._reason)
            try:
                self._start()
            except (OSError, NotTried) as error:
                self._forget()
                self._failed_at, self._reason = (
                    time.monotonic(),
                    f"guides cannot be tried (option.guide_timeout=0 has them taken as they are): {error}",
                )
                log.error("%s", self._reason)
                raise NotTried(self._reason) from None
            self._failed_at = None
        assert self._control is not None
        return self._control

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        began = time.monotonic()
        with contextlib.closing(theirs):
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # signals to the terminal's group are the host's business
            )
        self._control.settimeout(_LOAD_SECONDS)
        send(self._control, self._make)
        try:
            loaded: Loaded = Messages(self._control).next()
        except HostGone:
            raise NotTried("the process that tries them ended while it was loading") from None
        if loaded.reason:
            log.error("guides cannot be tried\n%s", loaded.trace.rstrip())
            raise NotTried(loaded.reason)
        self._control.settimeout(None)
        log.info("guides are tried by process %d, loaded in %.1f s", self._process.pid, time.monotonic() - began)

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _outcome(channel: socket.socket, job: Job) -> Verdict:
    began = time.monotonic()
    channel.settimeout(job.limits.patience + _FORK_SECONDS)
    messages, begun = Messages(channel), False
    try:
        send(channel, job)
        begun = isinstance(messages.next(), Begun)
        verdict: Verdict = messages.next()
    except HostGone:
        if not begun or time.monotonic() - began > job.limits.patience:
            raise NotTried("the machine is too busy to try the guide") from None
        raise TooMuch from None
    return verdict
