"""Child processes: programs such as pip, and Python processes with the same import paths as this process."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from handler.core.terminal import unescaped

SECONDS = 10.0
"""Number of seconds between progress lines if standard error is not a terminal."""

_STOP_SECONDS = 10.0  # for a program to end after a signal
_DONE = re.compile(rb"([0-9]{1,3}) % done\n")

_lock = threading.Lock()
_stopped = False


class Child(subprocess.Popen[bytes]):
    """A child process without standard input. Its owner calls `end`, at any time, and as often as it likes.

    Args:
        options: arguments of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        super().__init__(command, stdin=subprocess.DEVNULL, **options)

    def status(self, seconds: float = 0.0) -> int | None:
        """Return the exit status, or the negative number of the signal that ended it; None if it runs longer.

        Args:
            seconds: how long to wait for its end.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(seconds)
        return None

    def end(self, seconds: float = 0.0, number: signal.Signals | None = None) -> None:
        """Send a signal, if any. Kill the process if it does not end within a number of seconds, and reap it."""
        if number is not None:
            self.send_signal(number)
        if self.status(seconds) is None:
            self.kill()
            self.wait()


_running: dict[Child, signal.Signals] = {}


class Stopped(Exception):
    """Raised if `stop_all` has ended the process, or was called before the process started."""


def run(
    command: Sequence[str], *, doing: str | None = None, stop: signal.Signals = signal.SIGKILL, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run a program until it ends, without standard input.

    Args:
        doing: text to show with the percentage that the program reports with `tell`, or None to show nothing. If it is
            set, the standard output of the program is discarded and its standard error is captured.
        stop: signal that ends the program early.
        options: arguments of `subprocess.Popen`.

    Raises:
        Stopped: `stop_all` was called.
    """
    with _lock:
        if _stopped:
            raise Stopped
        if doing is not None:
            options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        child = Child(command, **options)
        _running[child] = stop
    try:
        output, errors = child.communicate() if doing is None else (b"", _follow(child, doing))
    finally:
        if child.returncode is None:  # interrupted
            child.end(_STOP_SECONDS, stop)
        with _lock:
            del _running[child]
    if _stopped:
        raise Stopped
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def _follow(child: Child, doing: str) -> bytes:
    """Show the percentages that a program reports until it ends, and return the rest of its standard error."""
    assert child.stderr is not None
    tail = bytearray()
    with _progress(doing) as show, child.stderr as lines:
        for line in lines:
            if match := _DONE.fullmatch(line):
                show(int(match[1]))
            else:
                tail += line
        child.wait()
    return bytes(tail)


def tell(done: float) -> None:
    """Report the completed fraction of the work, from 0 to 1, to the process that started this process with `run`."""
    print(f"{done * 100:.0f} % done", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress(doing: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows a percentage on standard error.

    On a terminal, if rich is installed, the function updates a line that disappears at the end. Otherwise it prints a
    line at most every `SECONDS` seconds.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _printer(doing)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    description = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
    columns, console = (SpinnerColumn(), TimeElapsedColumn(), description), Console(file=unescaped(sys.stderr))
    with Progress(*columns, console=console, transient=True, expand=True) as line:
        task = line.add_task(doing, total=None)
        yield lambda percent: line.update(task, description=f"{percent} % {doing}")


def _printer(doing: str) -> Callable[[int], None]:
    last_shown = time.monotonic()

    def show(percent: int) -> None:
        nonlocal last_shown
        if (now := time.monotonic()) - last_shown >= SECONDS:
            last_shown = now
            print(f"{doing}: {percent} %", file=sys.stderr, flush=True)

    return show


def python(function: str, argument: str) -> list[str]:
    """Return the command for a Python process that calls a function and has the same import paths as this process.

    `python -m` is not used because it would put the working directory first.

    Args:
        function: the function as `MODULE:FUNCTION`.
        argument: the only argument of the function.
    """
    module, _, name = function.partition(":")
    boot = f"import sys; sys.path[:] = sys.argv[2:]; from {module} import {name}; {name}(sys.argv[1])"
    return [sys.executable, "-c", boot, argument, *sys.path]


def start(
    function: str, channel: socket.socket, environ: Mapping[str, str] | None = None, *, captured: bool = False
) -> Child:
    """Start a Python process in a new session, so that signals to the process group of the terminal do not reach it.

    Args:
        function: the function as `MODULE:FUNCTION`. It calls `serving_host` with its only argument.
        channel: the end of a channel that the new process uses to communicate with this process.
        environ: the environment of the new process. The default is a copy of the current environment.
        captured: whether the caller reads the output of the new process. By default, it goes to that of this process.
    """
    fd = channel.fileno()
    output = subprocess.PIPE if captured else None
    return Child(
        python(function, str(fd)),
        pass_fds=(fd,),
        stdout=output,
        stderr=output,
        env=environ,
        start_new_session=True,
    )


@contextlib.contextmanager
def serving_host(fd: str) -> Iterator[socket.socket]:
    """Open the channel in a process that `start` has started, and end this process after the `with` block.

    The process also ends when its host ends. It ignores SIGINT and SIGTERM, because only the host handles them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    yield socket.socket(fileno=int(fd))
    # Native threads may outlive the block; nothing is left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let Linux send a signal to this process when its parent ends. This works even if this process hangs."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def stop_all() -> None:
    """Stop all programs started by `run`, and start no more, because this process is about to end. Thread-safe."""
    global _stopped
    with _lock:
        _stopped = True
        for child, stop in _running.items():
            child.send_signal(stop)


def disk_is_full(directory: Path) -> bool:
    """Return whether writing 1 MiB to this directory fails because of a lack of space or a limit on space.

    Call this after a program has failed, because not every program reports why a write failed.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(1 << 20))
            probe.flush()
    except OSError as error:
        return error.errno in NO_SPACE
    return False


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exceeded quota, and an exceeded limit on file size."""
