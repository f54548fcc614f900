"""Divide a server's CPU time between the engine's core and workers, and the processes around them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cpu import children

from systems.base import CpuSeconds

_PROC = Path("/proc")
_MODULE = re.compile(r"\b(?:from|import) (\w+(?:\.\w+)+)")
_SHOWN = 48  # letters of a command line


class Process(NamedTuple):
    pid: int
    name: str
    is_core: bool


class UsedMeter:
    """CPU of a server's processes between `start` and `stop`.

    Args:
        pid: the process that was started; all its descendants count.
        core: what the names of the engine's own processes begin with; what those start is the engine's too. Empty
            where the engine has none.
    """

    def __init__(self, pid: int, core: Sequence[str]) -> None:
        self._pid, self._core = pid, tuple(core)
        self._before: dict[int, float] = {}

    def start(self) -> None:
        """Raises RuntimeError where no process looks like the engine's: its CPU would count as the host's."""
        found = list(tree(self._pid, self._core))
        if self._core and not any(process.is_core for process in found):
            names = ", ".join(process.name for process in found)
            raise RuntimeError(f"none of these is an engine's core ({' or '.join(self._core)}): {names}")
        self._before = {process.pid: spent_by(process) or 0.0 for process in found}

    def stop(self) -> CpuSeconds:
        host: dict[str, float] = {}
        engine = 0.0
        for process in tree(self._pid, self._core):
            # A process that came meanwhile has spent all that it has in this time.
            spent = spent_by(process)
            if spent is None:
                continue
            seconds = spent - self._before.get(process.pid, 0.0)
            if process.is_core:
                engine += seconds
            else:
                name = process.name if process.name not in host else f"{process.name} #{process.pid}"
                host[name] = seconds
        return CpuSeconds(host, engine)


def tree(pid: int, core: tuple[str, ...] = ()) -> Iterator[Process]:
    """A process and its descendants, but those that end while they are looked at and are not the engine's.

    Raises OSError where the process itself has ended, or one of the engine's.
    """
    return _tree(pid, name_of(pid), core, inside=False)


def _tree(pid: int, name: str, core: tuple[str, ...], *, inside: bool) -> Iterator[Process]:
    inside = inside or (bool(core) and name.startswith(core))
    yield Process(pid, name, inside)
    for child in children(pid):
        try:
            child_name = name_of(child)
        except (FileNotFoundError, ProcessLookupError):
            if inside:
                raise
            continue
        yield from _tree(child, child_name, core, inside=inside)


def spent_by(process: Process) -> float | None:
    """Its CPU seconds; None where it has ended meanwhile. Raises OSError where it is the engine's and has."""
    try:
        return cpu_seconds(process.pid)
    except OSError:
        if process.is_core:
            raise
        return None


def name_of(pid: int) -> str:
    """The title that a process has given itself, else its command; of a program in that only the module it starts."""
    words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0 ").split("\0")
    if len(words) == 1:
        return words[0][:_SHOWN]
    command = " ".join([Path(words[0]).name, *words[1:]])
    if "-c" in words and (module := _MODULE.search(command)):
        return module[1]
    return " ".join(command.split())[:_SHOWN]


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of one process, those that have ended included, to the nanosecond.

    The kernel's clock of another process: its number is made of the process's as clock_getcpuclockid(3) does it.
    """
    return time.clock_gettime(~pid << 3 | 2)


def tree_seconds(pid: int) -> float:
    """CPU seconds of a process and its descendants, but those that end while they are looked at."""
    return sum(spent_by(process) or 0.0 for process in tree(pid))
