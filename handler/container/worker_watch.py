"""Notices that DJL Serving has no Python worker any more: in rolling and dynamic batching Java starts no other.

A worker that dies while no request is under way is then missed by nobody: each request gets 400 "Backend Python process
is stopped.", and /ping stays 200. The same holds for a model that Java has given up (`retry_threshold`).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

PATIENCE = 6.0  # seconds without a worker; where Java starts another, it does so within two
_WORKER = b"djl_python_engine.py"  # also in the command line of an mpirun around it


class WorkerWatch:
    """
    Args:
        group: the process group of DJL Serving and its workers.
        patience: seconds without a worker after which it is lost.
    """

    def __init__(self, group: int, patience: float = PATIENCE) -> None:
        self._group = group
        self._patience = patience
        self._last_seen: float | None = None

    def is_lost(self) -> bool:
        """Whether there was a worker once, and there has been none for a while."""
        now = time.monotonic()
        if _has_worker(self._group):
            self._last_seen = now
        return self._last_seen is not None and now - self._last_seen > self._patience


def _has_worker(group: int) -> bool:
    return any(_is_worker(Path("/proc") / name, group) for name in os.listdir("/proc") if name.isdigit())


def _is_worker(process: Path, group: int) -> bool:
    with contextlib.suppress(OSError):  # it has just ended
        state, _, its_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
        return state != "Z" and int(its_group) == group and _WORKER in (process / "cmdline").read_bytes()
    return False
