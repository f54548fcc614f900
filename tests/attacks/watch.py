"""Measures how long a server's event loop stands still under attack, and how many go before a neighbour."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import psutil

from handler.core.owners import owner_by_key
from handler.serving.turns import Flow, Turns
from tests.servers import LiveServer, ServerProcess, http

LONGEST = 0.5  # CPU seconds of the server's that a neighbour's ping may take


class Watch:
    """Does something again and again; `longest` is the longest time that it took, in seconds.

    Args:
        clock: the time by which it is measured.
    """

    def __init__(self, what: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock, self.longest = what, clock, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            began = self._clock()
            self._what()
            self.longest = max(self.longest, self._clock() - began)


@contextlib.contextmanager
def answering(server: LiveServer, what: Callable[[], object] | None = None, most: float = LONGEST) -> Iterator[None]:
    """Have a neighbour ask a server again and again; assert that it computes little until each answer.

    A thread that keeps the event loop from running counts as the loop itself does. Other processes of a busy machine
    do not.

    Args:
        what: the neighbour's request; None asks for /ping, which the event loop answers.
        most: the CPU seconds of the server's process that it may take.
    """
    process = psutil.Process(server.process.pid if isinstance(server, ServerProcess) else None)
    ask = what or (lambda: http.get(server.url + "/ping", timeout=60))
    with Watch(ask, lambda: process.cpu_times().user + process.cpu_times().system) as watch:
        yield
    assert watch.longest < most


NEIGHBOUR = {"Authorization": "Bearer neighbour"}
"""Headers of the one whose turns `counted` counts."""


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Count, for each turn of the neighbour's at a server of this process, those of others that began while it waited.

    Turns without an owner are no media's. A queue gives its slots only while work enters and leaves. Here one thread at
    a time does either, so that the counts do not depend on when the machine runs the others.
    """
    enter, leave, order = Turns.enter, Turns.leave, threading.RLock()
    others, waits = Counter[Turns](), list[int]()

    def entered(
        turns: Turns, flow: Flow, cost: float, kind: str, wanted: Future[Any], begin: Callable[[], None]
    ) -> None:
        def begins() -> None:
            if flow.owner == owner_by_key("neighbour"):
                waits.append(others[turns] - before)
            elif flow.owner:
                others[turns] += 1
            begin()

        with order:
            before = others[turns]
            enter(turns, flow, cost, kind, wanted, begins)

    def left(turns: Turns, flow: Flow, cost: float, kind: str) -> None:
        with order:
            leave(turns, flow, cost, kind)

    with mock.patch.object(Turns, "enter", entered), mock.patch.object(Turns, "leave", left):
        yield waits
