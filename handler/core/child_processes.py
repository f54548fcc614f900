"""Runs helper programs (pip, converters) that `stop_all` can end at once."""

from __future__ import annotations

import errno
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_lock = threading.Lock()
_running: set[subprocess.Popen[bytes]] = set()
_stopped = False


class Stopped(Exception):
    """`stop_all` ended the process, or was called before its start."""


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, without input.

    Args:
        options: of `subprocess.Popen`.

    Raises:
        Stopped: `stop_all` was called.
    """
    with _lock:
        if _stopped:
            raise Stopped
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
        _running.add(child)
    try:
        output, errors = child.communicate()
    finally:
        if child.returncode is None:  # interrupted
            child.kill()
            child.wait()
        with _lock:
            _running.discard(child)
    if _stopped:
        raise Stopped
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def stop_all() -> None:
    """Kill all programs and refuse to start others, as this process is about to end; callable on any thread."""
    global _stopped
    with _lock:
        _stopped = True
        for child in _running:
            child.kill()


def disk_is_full(directory: Path) -> bool:
    """Whether no further megabyte fits: C++ libraries do not say why a write failed."""
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(1 << 20))
            probe.flush()
    except OSError as error:
        return error.errno in NO_SPACE
    return False


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a quota, or a limit on a file's size."""
