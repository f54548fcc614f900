"""Child processes: Python with the paths of this one, and helpers (pip, converters, downloads) that `stop_all` ends."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_lock = threading.Lock()
_running: dict[subprocess.Popen[bytes], signal.Signals] = {}
_stopped = False


class Stopped(Exception):
    """`stop_all` ended the process, or was called before its start."""


def run(
    command: Sequence[str], *, doing: str | None = None, stop: signal.Signals = signal.SIGKILL, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, without input.

    Args:
        doing: what a terminal shows meanwhile, with the time that it takes; None: nothing.
        stop: the signal that ends the program before its end.
        options: of `subprocess.Popen`.

    Raises:
        Stopped: `stop_all` was called.
    """
    with _lock:
        if _stopped:
            raise Stopped
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
        _running[child] = stop
    try:
        with _shown(doing):
            output, errors = child.communicate()
    finally:
        if child.returncode is None:  # interrupted
            child.send_signal(stop)
            child.wait()
        with _lock:
            del _running[child]
    if _stopped:
        raise Stopped
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


@contextlib.contextmanager
def _shown(doing: str | None) -> Iterator[None]:
    """Show a line on standard error if that is a terminal and rich is installed; it disappears at the end."""
    if doing is None or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as line:
        line.add_task(doing, total=None)
        yield


def python(function: str, argument: str) -> list[str]:
    """Return the command of a process that calls `MODULE:FUNCTION` with an argument, and imports from the same paths.

    `python -m` would put the working directory first.
    """
    module, _, name = function.partition(":")
    boot = f"import sys; sys.path[:] = sys.argv[2:]; from {module} import {name}; {name}(sys.argv[1])"
    return [sys.executable, "-c", boot, argument, *sys.path]


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux send this process a signal when its parent ends: a process that hangs would not notice."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def stop_all() -> None:
    """End all programs and refuse to start others, as this process is about to end; callable on any thread."""
    global _stopped
    with _lock:
        _stopped = True
        for child, stop in _running.items():
            child.send_signal(stop)


def disk_is_full(directory: Path) -> bool:
    """Return whether no further megabyte fits: C++ libraries do not say why a write failed."""
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(1 << 20))
            probe.flush()
    except OSError as error:
        return error.errno in NO_SPACE
    return False


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a quota, or a limit on a file's size."""
