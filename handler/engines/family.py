"""The processes that an engine starts for itself: they and the engine live and end together."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import threading
from collections.abc import Callable

# Linux tells a process of its parent's death by a signal. The watcher ignores all others: what ends the engine may be
# sent to its whole group. It spares Python's resource trackers, which end by themselves and then free the shared memory
# that the killed ones have left. More than one pass, as processes may be starting others.
_WATCHER = """
import ctypes, os, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
ctypes.CDLL(None).prctl(1, signal.SIGUSR2)
while os.getppid() == int(sys.argv[1]):
    signal.sigtimedwait([signal.SIGUSR2], 5)
for _ in range(20):
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            if pid != os.getpid() and os.getpgid(pid) == os.getpgrp():
                with open(f"/proc/{pid}/cmdline", "rb") as command:
                    if b"resource_tracker" not in command.read():
                        os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.05)
"""


def end_with_this_process() -> None:
    """Have this process's group end when this process does, killed or not.

    An engine that is killed, by its host or for want of memory, cannot stop its own workers, and those hold the GPU's
    memory that the next engine needs. Only for the leader of a group (`engines/remote.py` makes the worker one).
    """
    if sys.platform == "linux" and os.getpgrp() == os.getpid():
        subprocess.Popen([sys.executable, "-S", "-c", _WATCHER, str(os.getpid())], stdin=subprocess.DEVNULL)


def end_with_children() -> Callable[[], None]:
    """Have this process end when one of the processes that it has started by `multiprocessing` does.

    An engine may wait for ever for what a dead process of its own should send. Returns what calls the watch off.
    """
    children = {child.sentinel: child for child in multiprocessing.active_children()}
    closing = threading.Event()

    def watch() -> None:
        ended = multiprocessing.connection.wait(list(children))
        if not closing.is_set():
            names = ", ".join(children[sentinel].name for sentinel in ended if isinstance(sentinel, int))
            print(f"the engine's own process {names} ended", file=sys.stderr, flush=True)
            os._exit(1)

    if children:
        threading.Thread(target=watch, name="engine-family", daemon=True).start()
    return closing.set
