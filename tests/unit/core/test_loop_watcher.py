"""The watcher of the event loop: its start, and a kernel that does not count a thread's turns."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import signal
import socket
import time
from typing import Any

import pytest

from handler.core import loop, loop_watcher


@pytest.mark.parametrize("schedstat", ["0 0 0\n", "", "1000000000 0 5\n"])
def test_a_computing_loop_is_aborted_with_and_without_the_kernels_counts(
    monkeypatch: pytest.MonkeyPatch, schedstat: str
) -> None:
    """Without CONFIG_SCHEDSTATS, all numbers of /proc/PID/schedstat are 0."""
    now, looks, turns, ended = itertools.count(0.0, 0.5), itertools.count(), itertools.count(1), list[int]()

    def open_(path: str) -> io.StringIO:
        seconds = 1_000_000_000 * next(turns)
        return io.StringIO(schedstat.replace("1000000000", str(seconds)))

    def wait(signals: Any, seconds: float) -> None:
        """Pass no time: the clock goes on with each look at it."""

    monkeypatch.setattr(loop_watcher, "open", open_, raising=False)
    monkeypatch.setattr(loop_watcher, "_state", lambda pid: "R")
    monkeypatch.setattr(loop_watcher, "_stacks", lambda *more: "")
    monkeypatch.setattr(loop_watcher, "_end", ended.append)
    monkeypatch.setattr(signal, "sigtimedwait", wait)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    monkeypatch.setattr(os, "getppid", lambda: 7 if next(looks) < 20 else 1)
    sending, receiving = socket.socketpair()
    with sending, receiving:
        sending.setblocking(False)
        receiving.setblocking(False)
        loop_watcher.watch(7, sending, receiving, 0, 0, 2.0)
    assert ended == [7]


def test_a_started_watcher_sends_bytes_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of signals are enums, whose texts differ between versions of Python."""

    async def watched() -> None:
        heard = asyncio.Event()
        monkeypatch.setattr(loop, "_read", lambda receiving: heard.set())
        watch = loop.LoopWatch(60.0, signals=False)
        watch.start()
        try:
            await asyncio.wait_for(heard.wait(), 30)
        finally:
            watch.stop()

    asyncio.run(watched())
