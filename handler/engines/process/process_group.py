"""The processes that an engine starts for itself: they and the engine live and end together."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

# Linux tells a process of its parent's death by a signal. The watcher ignores all others: what ends the engine may be
# sent to its whole group. It selects by the session, which the engine's process leads: Open MPI 5 gives each MPI worker
# a process group of its own, but leaves it in the session. It spares Python's resource trackers: they end by themselves
# and then free the shared memory that the killed ones have left. Several passes, as processes may be starting others.
_WATCHER = """
import ctypes, os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
ctypes.CDLL(None).prctl(1, signal.SIGUSR2)
while os.getppid() == int(sys.argv[1]):
    signal.sigtimedwait([signal.SIGUSR2], 5)
for _ in range(20):
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            if pid != os.getpid() and os.getsid(pid) == os.getsid(0):
                with open(f"/proc/{pid}/cmdline", "rb") as command:
                    if b"resource_tracker" not in command.read():
                        os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.05)
"""


def end_with_this_process() -> None:
    """Have this process's session end when this process does, killed or not.

    An engine that is killed, by its host or for want of memory, cannot stop its own workers, and those hold the GPU's
    memory that the next engine needs. Only for the leader of a session (`supervisor.py` makes the worker one):
    another's session would hold processes that are not the engine's.
    """
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        subprocess.Popen([sys.executable, "-S", "-c", _WATCHER, str(os.getpid())], stdin=subprocess.DEVNULL)


def end_with_children() -> Callable[[], None]:
    """Have this process end when one of the processes that it has started by `multiprocessing` does.

    An engine may wait for ever for what a dead process of its own should send. Returns what calls the watch off.
    """
    return _end_with({child.sentinel: child.name for child in multiprocessing.active_children()})


def end_with_descendants(command: str) -> Callable[[], None]:
    """The same for the processes below this one whose command line holds `command`.

    MPI workers are no children of this process: a daemon of Open MPI's starts them. Others are let be, as a compiler
    that a worker runs may end at any time.
    """
    watched = {}
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if command.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and (fd := _opened(pid)) is not None:
                watched[fd] = f"{command} (pid {pid})"
    return _end_with(watched)


def _end_with(processes: Mapping[int, str]) -> Callable[[], None]:
    """
    Args:
        processes: their names, by a file descriptor that becomes readable when the process ends.
    """
    closing = threading.Event()

    def watch() -> None:
        ended = multiprocessing.connection.wait(list(processes))
        if not closing.is_set():
            names = ", ".join(processes[fd] for fd in ended if isinstance(fd, int))
            print(f"the engine's own process {names} ended", file=sys.stderr, flush=True)
            os._exit(1)

    if processes:
        threading.Thread(target=watch, name="engine-family", daemon=True).start()
    return closing.set


def _opened(pid: int) -> int | None:
    """A descriptor of the process.

    Raises:
        ProcessLookupError: it has ended.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:  # a kernel before 5.3, or a container that forbids it
        print(f"the engine's own process {pid} is not watched: {error}", file=sys.stderr, flush=True)
        return None


def _descendants(parent: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # pid (command) state ppid ...; a command may hold anything.
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(pid)
    waiting = [parent]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found
