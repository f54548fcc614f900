"""Keeps requests of two kinds apart: only one kind is in the engine at a time, in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class LoraExclusion:
    """`enter` starts a request at once where possible; `leave` starts those that waited."""

    def __init__(self) -> None:
        self._inside: dict[int, bool] = {}  # key -> kind, the same for all
        self._waiting: deque[tuple[int, bool, Callable[[], None]]] = deque()

    def enter(self, key: int, kind: bool, start: Callable[[], None]) -> None:
        """Call `start`, now or in a later `leave`. If it raises now, the key does not enter."""
        if self._waiting or not self._fits(kind):
            self._waiting.append((key, kind, start))
            return
        start()
        self._inside[key] = kind

    def leave(self, key: int) -> list[tuple[int, Exception]]:
        """Remove a request, inside or waiting; unknown keys are ignored.

        Returns:
            Requests that could not be started now, and their errors.
        """
        self._inside.pop(key, None)
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != key)
        failed: list[tuple[int, Exception]] = []
        while self._waiting and self._fits(self._waiting[0][1]):
            next_key, kind, start = self._waiting.popleft()
            try:
                start()
            except Exception as error:  # the engine refuses this request; the others go on
                failed.append((next_key, error))
            else:
                self._inside[next_key] = kind
        return failed

    def _fits(self, kind: bool) -> bool:
        return not self._inside or next(iter(self._inside.values())) == kind
