"""Program that watches the event loop of a server from a small separate process, which `loop.py` starts."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time

_PERIOD = 1.0  # seconds between two checks
_LATE = 2.0  # seconds; a check that takes longer shows that the watcher itself was paused
_UNHEARD = 8.0  # seconds in which the loop must handle a SIGTERM; SageMaker sends SIGKILL 30 s after it
_STACKS = 0.5  # seconds in which the process writes its stacks
_ENDING = 3.0  # seconds in which the process ends after a signal
_PAUSED = ("T", "t")  # states of a process that is stopped, or that a debugger has stopped
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/")


def watch(pid: int, sending: socket.socket, receiving: socket.socket, stacks: int, dump: int, seconds: float) -> None:
    """Watch the event loop of the parent process until the parent ends.

    Args:
        pid: process id of the parent.
        sending: socket that sends bytes to the event loop of the parent.
        receiving: the other end of that socket, which the event loop reads. This process peeks at the bytes that the
            loop has not read yet.
        stacks: descriptor of the file to which the parent writes its stacks.
        dump: signal that makes the parent write its stacks.
        seconds: how long the event loop may be blocked. Time in which it waits for a CPU does not count.
    """
    silent = unheard = 0.0
    turns = _turns(pid)
    while os.getppid() == pid:
        looked = time.monotonic()
        signal.sigtimedwait([signal.SIGUSR2], _PERIOD)  # sent when the parent ends: see `_end_with_parent`
        passed = time.monotonic() - looked
        before, turns = turns, _turns(pid)
        waiting = _waiting(receiving)
        if not waiting:
            silent = unheard = 0.0
            with contextlib.suppress(BlockingIOError):
                sending.send(b"\0")
            continue
        if passed > _LATE or (state := _state(pid)) in _PAUSED:
            continue
        if before and turns:  # the kernel adds the time of a wait for a CPU only when the wait ends
            computed, delayed = turns[0] - before[0], turns[1] - before[1]
            passed = min(passed, computed) if state == "R" else max(0.0, passed - delayed)
        stops = sum(number in (signal.SIGTERM, signal.SIGINT) for number in waiting)
        silent += passed
        unheard += passed if stops else 0.0
        if silent < seconds and unheard < _UNHEARD and stops < 2:
            continue
        stack = _stacks(pid, stacks, dump)
        if any(name in stack for name in _DEBUGGERS):
            silent = unheard = 0.0
        elif _waiting(receiving):
            note = " and a stop signal is pending" if stops else ""
            print(
                f"the event loop has been blocked for {silent:.0f} s (option.event_loop_timeout={seconds:g}){note}: "
                f"the server is aborted. Its threads:\n{stack}",
                file=sys.stderr,
                flush=True,
            )
            return _end(pid)


def _waiting(receiving: socket.socket) -> bytes:
    """Return the bytes that the event loop has not read yet."""
    try:
        return receiving.recv(4096, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def _state(pid: int) -> str:
    """Return the state letter of the main thread, such as R (running or waiting for a CPU), or t under a debugger."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return ""  # there is no /proc, or the process has just ended
    return "t" if fields["TracerPid"].strip() != "0" else fields["State"].strip()[:1]


def _turns(pid: int) -> tuple[float, float] | None:
    """Return the seconds that the main thread has run on a CPU and has waited for a CPU, or None if unknown.

    Source: docs.kernel.org, "Scheduler Statistics": the first two numbers of /proc/PID/schedstat are nanoseconds. All
    numbers are 0 if the kernel was built without CONFIG_SCHEDSTATS.
    """
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            computed, delayed, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return (computed / 1e9, delayed / 1e9) if computed else None


def _stacks(pid: int, stacks: int, dump: int) -> str:
    os.ftruncate(stacks, 0)
    os.lseek(stacks, 0, os.SEEK_SET)  # the process has the same position
    os.kill(pid, dump)
    time.sleep(_STACKS)
    return os.pread(stacks, 1 << 20, 0).decode(errors="replace")


def _end(pid: int) -> None:
    """Abort a process without a core dump, which would contain the engine memory. Kill it if it does not end."""
    with contextlib.suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGABRT, signal.SIGKILL):
        if os.getppid() == pid:
            os.kill(pid, number)
            signal.sigtimedwait([signal.SIGUSR2], _ENDING)


def _end_with_parent() -> None:
    import ctypes

    # Block all signals: those to the terminal's group are not for the watcher, and `sigtimedwait` takes SIGUSR2.
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    ctypes.CDLL(None).prctl(1, signal.SIGUSR2)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    _end_with_parent()
    pid, sending, receiving, stacks, dump = map(int, sys.argv[1:6])
    watch(pid, socket.socket(fileno=sending), socket.socket(fileno=receiving), stacks, dump, float(sys.argv[6]))
