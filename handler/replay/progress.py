"""The progress of a run, on standard error."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from handler.replay.journal import Journal

_ON_TERMINAL, _ELSEWHERE = 0.5, 30.0  # seconds between two lines


class Progress:
    """Says how far a run is: in one line of a terminal, or a line every half minute."""

    def __init__(self, journal: Journal, file: TextIO | None = None) -> None:
        self._journal = journal
        self._file = file or sys.stderr
        self._terminal = self._file.isatty()
        self._began = self._told = time.monotonic()
        self._before = journal.num_done

    def advance(self) -> None:
        now = time.monotonic()
        if now < self._told + (_ON_TERMINAL if self._terminal else _ELSEWHERE):
            return
        self._told = now
        print(f"\r\033[K{self.line(now)}" if self._terminal else self.line(now), file=self._file, flush=True,
              end="" if self._terminal else "\n")  # fmt: skip

    def line(self, now: float) -> str:
        done = self._journal.num_done
        rate = (done - self._before) / max(now - self._began, 1e-3)
        classes = self._journal.summary.classes
        counts = ", ".join(f"{count:,} {cls.value}" for cls, count in sorted(classes.items(), key=lambda one: -one[1]))
        return f"{done:,} requests, {rate:,.0f}/s: {counts}"

    def close(self) -> None:
        if self._terminal:
            print("\r\033[K", file=self._file, end="", flush=True)
