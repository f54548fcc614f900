"""Dynamic batching as in DJL: requests wait until a batch is full or a short delay is over, then run together."""

from __future__ import annotations

import asyncio
import itertools
from typing import TypeAlias

from handler.config.config import Config
from handler.core.errors import Overloaded
from handler.scheduler.batcher import MAX_OVERTAKES, OwnerQueues

Turn: TypeAlias = "asyncio.Future[list[Turn]]"
"""The turn of a request. When its batch starts, the result of the future is the list of all turns in the batch."""


class BatchGate:
    """A gate that admits requests one batch at a time. Owners take turns, as in the batcher's queue.

    Lines of batch files wait for all other requests, but at most MAX_OVERTAKES later requests can overtake the oldest
    line.

    Args:
        config: configuration, which sets the number of requests in a batch (`batch_size`), how long a batch waits to be
            filled (`max_batch_delay`), how many requests may wait (`job_queue_size`), and how long a request may wait
            (`option.predict_timeout`). The delay starts with the first waiting request, or anew when the
            previous batch has ended.
        max_lines: maximum number of lines from batch files in a dynamic batch (`option.batches_concurrency`, or half of
            the engine's sequences if that is 0).
    """

    def __init__(self, config: Config, *, max_lines: int = 16) -> None:
        self._size = config.batch_size
        self._delay = config.max_batch_delay / 1000  # seconds
        self._max_queued = config.job_queue_size
        self._timeout = config.predict_timeout
        self._max_lines = max_lines
        self._ids = itertools.count()
        self._waiting = OwnerQueues[Turn]()
        self._numbers: dict[Turn, int] = {}  # ids of the waiting turns
        self._lines: dict[Turn, int] = {}  # ids of the lines of batch files, in order of arrival
        self._running: set[Turn] = set()
        self._overtakes = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check_room(self, owner: str = "") -> None:
        """Raise `Overloaded` if the queue is full, and the owner has its share of it."""
        if not self._waiting.has_room(self._max_queued, owner):
            raise Overloaded(f"the queue is full (job_queue_size={self._max_queued})")

    def join(self, owner: str = "", *, line: bool = False) -> Turn:
        """Queue a request, and return its turn. Pass the turn to `leave` at the end, even if the request never ran.

        Args:
            owner: owner of the request, or "" without an owner. Owners take turns.
            line: whether the request is a line of a batch file.

        Raises:
            Overloaded: the queue is full, and the owner has its share of it.
        """
        self.check_room(owner)
        turn: Turn = asyncio.get_running_loop().create_future()
        number = next(self._ids)
        if line:
            self._lines[turn] = number
        else:
            self._waiting.add(number, 0, turn, owner)
            self._numbers[turn] = number
        self._consider()
        return turn

    async def wait(self, turn: Turn, *, patient: bool = False) -> None:
        """Wait until the batch of the request starts. Lines of batch files wait without a time limit.

        Args:
            patient: whether the request also waits without a time limit.

        Raises:
            Overloaded: the request has waited too long.
        """
        done, _ = await asyncio.wait({turn}, timeout=None if patient or turn in self._lines else self._timeout)
        if not done:
            raise Overloaded(f"the request waited {self._timeout:g} s for a batch (option.predict_timeout)")

    def leave(self, turn: Turn) -> None:
        """Remove a waiting or running request. The next batch can start when all requests of this batch have left."""
        self._running.discard(turn)
        self._lines.pop(turn, None)
        number = self._numbers.pop(turn, None)
        if number is not None:
            self._waiting.discard(number)
        if not (self._waiting or self._lines):
            self._stop_timer()
        self._consider()

    def _consider(self) -> None:
        """Unless a batch is running, start the next batch as soon as enough requests wait or the delay is over."""
        num_waiting = len(self._waiting) + min(len(self._lines), self._max_lines)
        if self._running or not num_waiting:
            return
        if num_waiting >= self._size:
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay, self._start)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._stop_timer()
        batch: list[Turn] = []
        num_lines = 0
        while len(batch) < self._size:
            line = next(iter(self._lines), None) if num_lines < self._max_lines else None
            turn = self._waiting.first() if self._waiting else None
            if line is not None and (turn is None or self._overtakes >= MAX_OVERTAKES):
                del self._lines[line]
                self._overtakes = 0
                num_lines += 1
                turn = line
            elif turn is not None:
                self._waiting.take()
                number = self._numbers.pop(turn)
                oldest_line = next(iter(self._lines.values()), None)
                if oldest_line is not None and number > oldest_line:
                    self._overtakes += 1
            else:
                break
            batch.append(turn)
        self._running.update(batch)
        for turn in batch:
            turn.set_result(batch)
