"""The program that watches a server's event loop, in a small process of its own (`loop.py`)."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time

_PERIOD = 1.0  # seconds between two looks
_LATE = 2.0  # seconds; the watcher itself stood still if a look took longer
_UNHEARD = 8.0  # seconds that a SIGTERM may wait for the loop: SageMaker kills 30 s after it
_STACKS = 0.5  # seconds for a process to write its stacks
_ENDING = 3.0  # seconds for it to end
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/")


def watch(pid: int, sending: socket.socket, receiving: socket.socket, stacks: int, dump: int, seconds: float) -> None:
    """Watch a process, the parent of this one, until it ends.

    Args:
        sending: what is sent here comes to the process's event loop.
        receiving: where the loop reads it, and where this process looks whether it has.
        stacks: descriptor of a file, to which the process writes its stacks at the signal `dump`.
        seconds: for which the loop may be blocked.
    """
    silent = unheard = 0.0
    while os.getppid() == pid:
        looked = time.monotonic()
        signal.sigtimedwait([signal.SIGUSR2], _PERIOD)  # at the parent's end, `_end_with_parent` has it sent
        passed = time.monotonic() - looked
        waiting = _waiting(receiving)
        if not waiting:
            silent = unheard = 0.0
            with contextlib.suppress(BlockingIOError):
                sending.send(b"\0")
            continue
        if passed > _LATE or not _runs(pid):
            continue
        stops = sum(number in (signal.SIGTERM, signal.SIGINT) for number in waiting)
        silent += passed
        unheard += passed if stops else 0.0
        if silent < seconds and unheard < _UNHEARD and stops < 2:
            continue
        found = _stacks(pid, stacks, dump)
        if any(name in found for name in _DEBUGGERS):
            silent = unheard = 0.0
        elif _waiting(receiving):
            asked = " and a signal to stop waits" if stops else ""
            print(
                f"the event loop has been blocked for {silent:.0f} s (option.event_loop_timeout={seconds:g}){asked}: "
                f"the server is aborted. Its threads:\n{found}",
                file=sys.stderr,
                flush=True,
            )
            return _end(pid)


def _waiting(receiving: socket.socket) -> bytes:
    """Return the bytes that the loop has not read."""
    try:
        return receiving.recv(4096, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def _runs(pid: int) -> bool:
    """Return whether a process is neither stopped nor traced by a debugger."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return True  # where /proc says nothing, or at the process's end
    return fields["State"].strip()[:1] not in "Tt" and fields["TracerPid"].strip() == "0"


def _stacks(pid: int, stacks: int, dump: int) -> str:
    os.ftruncate(stacks, 0)
    os.lseek(stacks, 0, os.SEEK_SET)  # the process has the same position
    os.kill(pid, dump)
    time.sleep(_STACKS)
    return os.pread(stacks, 1 << 20, 0).decode(errors="replace")


def _end(pid: int) -> None:
    """Abort a process, without a core dump, which has the engine's memory; kill it if that does not help."""
    with contextlib.suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGABRT, signal.SIGKILL):
        if os.getppid() == pid:
            os.kill(pid, number)
            signal.sigtimedwait([signal.SIGUSR2], _ENDING)


def _end_with_parent() -> None:
    import ctypes

    # All signals but that of the parent's end wait: those to the terminal's whole group are not for the watcher.
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    ctypes.CDLL(None).prctl(1, signal.SIGUSR2)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    _end_with_parent()
    watch(
        int(sys.argv[1]),
        socket.socket(fileno=int(sys.argv[2])),
        socket.socket(fileno=int(sys.argv[3])),
        int(sys.argv[4]),
        int(sys.argv[5]),
        float(sys.argv[6]),
    )
