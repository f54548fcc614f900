"""Requests of two kinds that must not be in an engine together take turns, in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class LoraExclusion:
    """`enter` starts a request at once where that is possible, `leave` those whose turn has come."""

    def __init__(self) -> None:
        self._inside: dict[int, bool] = {}  # key -> kind; all of one kind
        self._waiting: deque[tuple[int, bool, Callable[[], None]]] = deque()

    def enter(self, key: int, kind: bool, start: Callable[[], None]) -> None:
        """Call `start`, now or in a later `leave`. What it raises now, the caller gets, and the key is not inside."""
        if self._waiting or not self._fits(kind):
            self._waiting.append((key, kind, start))
            return
        start()
        self._inside[key] = kind

    def leave(self, key: int) -> list[tuple[int, Exception]]:
        """A request has ended, wherever it was; unknown ones are ignored.

        Returns:
            Those that could not be started when their turn came, and why.
        """
        self._inside.pop(key, None)
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != key)
        failed: list[tuple[int, Exception]] = []
        while self._waiting and self._fits(self._waiting[0][1]):
            next_key, kind, start = self._waiting.popleft()
            try:
                start()
            except Exception as error:
                failed.append((next_key, error))
            else:
                self._inside[next_key] = kind
        return failed

    def _fits(self, kind: bool) -> bool:
        return not self._inside or next(iter(self._inside.values())) == kind
