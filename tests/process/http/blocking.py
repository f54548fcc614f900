"""Run `lmi` with an event loop that stands still once a file exists.

Usage: python -m tests.process.http.blocking KIND FILE serve ...
"""

from __future__ import annotations

import ctypes
import os
import pdb
import re
import sys
import time
from pathlib import Path

from handler.cli import main
from handler.http.server import HttpServer


def sleeping() -> None:
    while True:
        time.sleep(0.01)


def matching() -> None:
    """Computes, and lets no other thread run."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def holding() -> None:
    """Waits in C code, and lets no other thread run; no Python code has the signals' turn."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def waiting() -> None:
    """Computes for half a second, as soon as no other process wants the first CPU."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        pass


def debugging() -> None:
    sys.stdin = os.fdopen(os.pipe()[0])  # which nobody writes to
    pdb.Pdb(stdin=sys.stdin, stdout=sys.stderr).set_trace()
    time.sleep(0)


KINDS = {"sleep": sleeping, "regex": matching, "gil": holding, "cpu": waiting, "debugger": debugging}


def block_when(file: Path, kind: str) -> None:
    tick = HttpServer.on_tick

    async def on_tick(self: HttpServer, counter: int) -> bool:
        if file.exists():
            file.unlink()
            print(f"the loop stands still: {kind}", file=sys.stderr, flush=True)
            KINDS[kind]()
        return await tick(self, counter)

    HttpServer.on_tick = on_tick  # type: ignore[method-assign]


if __name__ == "__main__":
    kind, file, *arguments = sys.argv[1:]
    block_when(Path(file), kind)
    raise SystemExit(main(arguments))
