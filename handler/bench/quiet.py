"""Measure how many cores other processes take, as a busy machine spoils a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PROC = Path("/proc")


class OthersMeter:
    """Measures the cores that processes other than this one and its descendants keep busy."""

    def __init__(self) -> None:
        self._at, self._others = time.monotonic(), _others_seconds()

    def cores(self) -> float | None:
        """Return the cores; None: there is no /proc."""
        now = _others_seconds()
        if now is None or self._others is None:
            return None
        return max(0.0, (now - self._others) / (time.monotonic() - self._at))


def _others_seconds() -> float | None:
    try:
        # user nice system idle iowait irq softirq steal; the hypervisor's other guests (steal) disturb as well
        ticks = list(map(int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]))
        busy = sum(ticks) - ticks[3] - ticks[4]
        return busy / os.sysconf("SC_CLK_TCK") - _tree_seconds(os.getpid())
    except OSError:
        return None


def _tree_seconds(pid: int) -> float:
    """Return CPU seconds of a process, its descendants, and those of them that have ended."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    for thread in (_PROC / str(pid) / "task").iterdir():
        for child in (thread / "children").read_text().split():
            seconds += _tree_seconds(int(child))
    return seconds
