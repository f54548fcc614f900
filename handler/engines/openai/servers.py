"""Servers of option.base_url, and the choice of one for a request."""

from __future__ import annotations

from collections.abc import Iterable

_PAUSE, _MOST_PAUSE = 1.0, 30.0  # seconds that a server is left out; doubled by each failure in a row


class Server:
    """One server. `outstanding` are the tokens of its requests, those of the prompts and the longest answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.outstanding = 0
        self._num_failures = 0
        self._out_until = 0.0

    def failed(self, now: float) -> None:
        """Leave it out for a while."""
        self._out_until = now + min(_PAUSE * 2**self._num_failures, _MOST_PAUSE)
        self._num_failures = min(self._num_failures + 1, 8)

    def answered(self) -> None:
        self._num_failures, self._out_until = 0, 0.0

    def is_out(self, now: float) -> bool:
        return now < self._out_until


def choose(servers: Iterable[Server], now: float) -> Server:
    """Return the server with the least outstanding tokens; one that failed lately only where all did."""
    return min(servers, key=lambda server: (server.is_out(now), server.outstanding))
