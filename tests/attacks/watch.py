"""How long a server's event loop stands still while it is attacked, and how many go before a neighbour."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

from handler.serving.head import owner_by_key
from handler.serving.turns import Flow, Turns
from tests.servers import ServerProcess, http

LONGEST = 0.5  # seconds in which the loop may stand still
TRIES = 3


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


def cpu_of_loop(server: ServerProcess) -> Callable[[], float]:
    """Return the clock of a server's event loop: the seconds that its thread, the main one, has computed."""
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/schedstat")
    return lambda: int(path.read_text().split()[0]) / 1e9


def pings(url: str) -> dict[str, tuple[Callable[[], object], float]]:
    """Return the neighbour for `hold` that asks for /ping, which the server's event loop answers."""
    return {"ping": (lambda: http.get(url + "/ping", timeout=60), LONGEST)}


def hold(limits: dict[str, tuple[Callable[[], object], float]], attack: Callable[[], object]) -> None:
    """Play an attack while neighbours ask; assert that none of them waits for longer than its limit.

    Where one does, the attack is played again: the machine may have been busy with something else.

    Args:
        limits: what each neighbour does again and again, and the seconds that it may take.
    """
    for _ in range(TRIES):
        with contextlib.ExitStack() as stack:
            watches = {name: stack.enter_context(Watch(what)) for name, (what, _) in limits.items()}
            attack()
        late = {name: watch.longest for name, watch in watches.items() if watch.longest >= limits[name][1]}
        if not late:
            return
    raise AssertionError(f"seconds of waiting: {late}")


NEIGHBOUR = {"Authorization": "Bearer neighbour"}
"""Headers of the one whose turns `counted` counts."""


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Count, for each turn of the neighbour's at a server of this process, those of others that began while it waited.

    Turns without an owner are no media's.
    """
    enter, others, waits = Turns.enter, [0], list[int]()

    def watched(
        turns: Turns, flow: Flow, cost: float, kind: str, wanted: Future[Any], begin: Callable[[], None]
    ) -> None:
        before = others[0]

        def begins() -> None:
            if flow.owner == owner_by_key("neighbour"):
                waits.append(others[0] - before)
            elif flow.owner:
                others[0] += 1
            begin()

        enter(turns, flow, cost, kind, wanted, begins)

    with mock.patch.object(Turns, "enter", watched):
        yield waits
