"""End a process whose event loop stands still, so that whatever started it can start it again.

A process of its own watches (`loop_watcher.py`): the loop may stand still in C code that lets no Python thread run. It
sends the loop a byte each second, which the loop reads. Python's C signal handler writes the numbers of signals to the
same socket, so that the watcher also learns of a SIGTERM that the loop does not hear.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

log = logging.getLogger("handler.server")

_WATCHER = Path(__file__).with_name("loop_watcher.py")
_DUMP = getattr(signal, "SIGRTMAX", 0)  # at this signal the process writes its threads' stacks
_OPTION = "option.event_loop_timeout"


class LoopWatch:
    """Ends the process if its event loop is blocked between `start` and `stop`. Linux only.

    Time does not count while the process is stopped or under a debugger, or while the whole machine is paused.

    Args:
        seconds: how long the loop may be blocked; 0 disables the watch.
        signals: whether the loop handles SIGTERM and SIGINT. One left unhandled for 8 s also ends the process.
    """

    def __init__(self, seconds: float, *, signals: bool) -> None:
        self._seconds = seconds
        self._signals = signals
        self._watcher: subprocess.Popen[bytes] | None = None
        self._opened = contextlib.ExitStack()

    def start(self) -> None:
        """Start watching the running loop; do nothing outside the main thread, where the process may not be ours."""
        is_main = threading.current_thread() is threading.main_thread()
        if not self._seconds or sys.platform != "linux" or not is_main or self._watcher is not None:
            return
        with contextlib.ExitStack() as opened:
            loop = asyncio.get_running_loop()
            sending, receiving = map(opened.enter_context, socket.socketpair())
            sending.setblocking(False)
            receiving.setblocking(False)
            stacks = opened.enter_context(open(os.memfd_create("stacks"), "wb", buffering=0))
            faulthandler.register(_DUMP, file=stacks, all_threads=True)
            loop.add_reader(receiving.fileno(), _read, receiving)
            opened.callback(loop.remove_reader, receiving.fileno())
            if self._signals:
                # In the place of the loop's own: the byte wakes the loop all the same.
                before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
                opened.callback(signal.set_wakeup_fd, before, warn_on_full_buffer=False)
            fds = (sending.fileno(), receiving.fileno(), stacks.fileno())
            numbers = map(str, (os.getpid(), *fds, _DUMP, self._seconds))
            command = [sys.executable, "-S", "-I", str(_WATCHER), *numbers]
            try:
                self._watcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
            except OSError as error:
                log.warning("%s: the event loop is not watched: %s", _OPTION, error)
                return
            self._opened = opened.pop_all()

    def stop(self) -> None:
        """End the watch; the loop still runs."""
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher = None
        self._opened.close()


def _read(receiving: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        receiving.recv(4096)
