"""The time for which somebody has said nothing, without that in which this process stood still."""

from __future__ import annotations

import time

_STANDSTILL = 2.0  # seconds between two looks; usually 1 at most


class Silence:
    """Begins when it is made. Whoever waits for its end looks at least once a second, or as often as it can.

    A paused container or virtual machine does not look, and its engine does not work. Such a time does not count.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._began = self._looked = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def look(self, waited: float = 0.0) -> float:
        """Return its seconds.

        Args:
            waited: seconds that the caller may have waited on purpose since the last look.
        """
        now = time.monotonic()
        if now - self._looked > waited + _STANDSTILL:
            self._began += now - self._looked
        self._looked = now
        return now - self._began
