"""Supervisor of a server that does not drain at SIGTERM, as DJL Serving's Java side.

SageMaker sends SIGTERM and kills after 30 seconds. The server gets the signal when its answers have gone out, and is
killed before SageMaker would do so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from handler.container.monitor import WorkerWatch, connections

log = logging.getLogger("handler.container")

DRAIN = 22.0  # seconds for answers to finish
END = 28.0  # seconds after SIGTERM until the server is killed
_QUIET = 2000  # milliseconds without a byte after which an answer counts as finished
_POLL = 2.0  # seconds between checks of the worker
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def supervise(
    command: Sequence[str], environ: Mapping[str, str], port: int, *, drain: float = DRAIN, end: float = END
) -> int:
    """Run a server on `port` until it ends, or until a signal to stop; return its exit status, 0 after a signal.

    The server gets a process group of its own, and is restarted when it has lost its worker. As process 1 of a
    container this also reaps orphans.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = _start(command, environ)
    watch = WorkerWatch(child)
    status: int | None = None
    try:
        while status is None:
            received = signal.sigtimedwait(_SIGNALS, _POLL)
            if received is not None and received.si_signo != signal.SIGCHLD:
                return _stop(child, port, signal.Signals(received.si_signo).name, drain, end)
            status = _reap(child)
            if status is None and watch.is_lost():
                log.error("DJL Serving has lost its worker and starts no other: DJL Serving is started again")
                _kill(child)
                os.waitpid(child, 0)
                child = _start(command, environ)
                watch = WorkerWatch(child)
        log.error("the server ended by itself with status %d", status)
        return status
    finally:
        _kill(child)
        _reap(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def run_as_init(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a server that drains by itself, as process 1, which must also reap orphans.

    Signals are passed on to the server, which starts with them blocked until it has its handlers.

    Returns:
        The server's exit status.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    blocked = _SIGNALS - {signal.SIGCHLD}
    child = os.posix_spawn(command[0], list(command), dict(environ), setpgroup=0, setsigmask=blocked)
    status: int | None = None
    while status is None:
        number = signal.sigwaitinfo(_SIGNALS).si_signo
        if number == signal.SIGCHLD:
            status = _reap(child)
        else:
            os.kill(child, number)  # it exists: only `_reap` waits for it
    return status


def _start(command: Sequence[str], environ: Mapping[str, str]) -> int:
    return os.posix_spawn(command[0], list(command), dict(environ), setpgroup=0, setsigmask=())


def _kill(child: int) -> None:
    """Kill the server with its workers and their engines."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _stop(child: int, port: int, name: str, drain: float, end: float) -> int:
    began = time.monotonic()
    log.info("%s: stopping; answers to finish: %s", name, _waiting(port))

    def ended(deadline: float, done: Callable[[], bool]) -> bool:
        """Wait; true when the server has ended. A second signal ends the wait."""
        while (left := deadline - time.monotonic()) > 0 and not done():
            received = signal.sigtimedwait(_SIGNALS, min(left, 0.2))
            if received is not None and received.si_signo != signal.SIGCHLD:
                return False
            if _reap(child) is not None:
                return True
        return False

    if ended(began + drain, lambda: _waiting(port) == 0):
        return 0
    if left := _waiting(port):
        log.warning("answers that are cut off after %.0f s: %s", time.monotonic() - began, left)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)
    if not ended(began + end, lambda: False):
        log.warning("the server did not end within %.0f s; it is killed", time.monotonic() - began)
    return 0


def _waiting(port: int) -> int:
    """Count the connections that wait for an answer; 0 where the kernel does not list them."""
    try:
        return sum(connection.waits(_QUIET) for connection in connections(port))
    except OSError as error:
        log.warning("the kernel does not tell of connections (%s): answers are not waited for", error)
        return 0


def _reap(child: int) -> int | None:
    """Reap all ended processes; return the exit status of `child` if it is one, 128 + N after a signal N."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                status = code if code >= 0 else 128 - code
    return status
