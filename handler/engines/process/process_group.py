"""Process group of an engine: the engine and the processes that it starts end together."""

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

# Linux signals its parent's death to the watcher, which blocks all other signals: the one that ends the engine may go
# to its whole group. It kills by session, which the engine's process leads: Open MPI 5 gives each MPI worker a process
# group of its own, but not a session. It spares Python's resource trackers, which free the shared memory of killed
# processes and then end by themselves. It makes several passes, as processes may be starting others.
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
    """End this process's session when this process ends, killed or not.

    An engine that is killed cannot stop its own workers, and they hold the GPU memory that the next engine needs.
    Without effect unless this process leads its session, as `supervisor.py` arranges: another session would also have
    foreign processes.
    """
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        subprocess.Popen([sys.executable, "-S", "-c", _WATCHER, str(os.getpid())], stdin=subprocess.DEVNULL)


def end_with_children() -> Callable[[], None]:
    """End this process when one of its `multiprocessing` children ends: an engine may wait for it for ever.

    Returns:
        A function that stops the watch.
    """
    return _end_with({child.sentinel: child.name for child in multiprocessing.active_children()})


def end_with_descendants(command: str) -> Callable[[], None]:
    """End this process when a descendant whose command line holds `command` ends.

    MPI workers are not children of this process: a daemon of Open MPI starts them. Other descendants, as a worker's
    compiler, may end at any time.

    Returns:
        A function that stops the watch.
    """
    names = {}
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if command.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and (fd := _open(pid)) is not None:
                names[fd] = f"{command} (pid {pid})"
    return _end_with(names)


def _end_with(processes: Mapping[int, str]) -> Callable[[], None]:
    """Watch processes, given as names by file descriptors that become readable when the process ends."""
    closing = threading.Event()

    def watch() -> None:
        ended = multiprocessing.connection.wait(list(processes))
        if not closing.is_set():
            names = ", ".join(processes[fd] for fd in ended if isinstance(fd, int))
            print(f"the engine's own process {names} ended", file=sys.stderr, flush=True)
            os._exit(1)

    if processes:
        threading.Thread(target=watch, name="engine-processes", daemon=True).start()
    return closing.set


def _open(pid: int) -> int | None:
    """Open a descriptor of the process; None where the system forbids it.

    Raises:
        ProcessLookupError: the process has ended.
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
    parents = [parent]
    while parents:
        pids = children.get(parents.pop(), [])
        yield from pids
        parents += pids
