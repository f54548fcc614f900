"""CPU time of a process and all that it started, from Linux's /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of `pid` and its descendants that live now.

    The scheduler's own nanoseconds (`schedstat`) where the kernel shows them: the 10 ms ticks of `stat` are coarse for
    a server that needs 1 % of a core.
    """
    return sum(process_seconds(process) for process in (pid, *descendants(pid)))


def process_seconds(pid: int) -> float:
    """User and system time of all threads of `pid` that live now."""
    threads = list((_PROC / str(pid) / "task").iterdir())
    try:
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except FileNotFoundError:  # a kernel without CONFIG_SCHED_INFO
        return ticks_seconds(pid)


def ticks_seconds(pid: int) -> float:
    """utime + stime of one process as `stat` has them, ended threads included."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> Iterator[int]:
    """The ids of all processes that `pid` started and those started, that live now."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def children(pid: int) -> list[int]:
    """The ids of all processes that `pid` started and that live now; none where it has ended."""
    while True:
        try:
            threads = list((_PROC / str(pid) / "task").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            return []
        found = [_started_by(thread) for thread in threads]
        if None not in found:  # else what that one started is another's now, perhaps one's that was read before
            return [child for some in found for child in some or ()]


def _started_by(thread: Path) -> list[int] | None:
    """None where it has ended."""
    try:
        return [int(child) for child in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        if thread.exists():  # a kernel without CONFIG_PROC_CHILDREN
            raise
        return None
