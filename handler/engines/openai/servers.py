"""Servers of option.base_url, and the choice of one for a request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from handler.engines.openai.answer import Failed

_PAUSE, _MOST_PAUSE = 1.0, 30.0  # seconds that a server is left out; doubled by each failure in a row


class Server:
    """One server.

    After a failure it is left out for a pause. Then it is asked what it serves, and gets one request. The first token
    of that brings it back.

    Attributes:
        outstanding: tokens of its requests, those of the prompts and the longest answers.
        known: it has said that it serves the model, and has not failed since.
        asked_at: the time when it last said so.
        asking: the question that is under way; its result is the reason why the server cannot serve.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.outstanding = 0
        self.known = False
        self.asked_at = 0.0
        self.asking: asyncio.Task[Failed | None] | None = None
        self._on_trial = False
        self._num_failures = 0
        self._out_until = 0.0

    def failed(self, now: float, retry_after: float = 0.0) -> float:
        """Leave it out for a while; return for how long, or 0 where it was out already: all its requests fail then.

        Args:
            retry_after: seconds for which it wants to be left alone.
        """
        if self.is_out(now):
            return 0.0
        pause = min(max(_PAUSE * (1 << self._num_failures), retry_after), _MOST_PAUSE)
        self._out_until = now + pause
        self._num_failures = min(self._num_failures + 1, 8)
        self.known, self._on_trial = False, True
        return pause

    def begun(self) -> None:
        """Note a first token."""
        self._on_trial = False

    def answered(self) -> None:
        """Note a whole answer: what failed before no longer counts."""
        self._num_failures, self._out_until = 0, 0.0

    def is_out(self, now: float) -> bool:
        return now < self._out_until

    def serves(self, now: float) -> bool:
        """Whether it gets requests while others do."""
        return self.known and not self.is_out(now) and not (self._on_trial and self.outstanding)


def choose(servers: Iterable[Server], tries: Counter[Server], now: float) -> Server:
    """Return the server with the least outstanding tokens; one that does not serve only where none does.

    Args:
        tries: those of this request; a server that it has not tried comes first.
    """
    return min(servers, key=lambda server: (not server.serves(now), tries[server], server.outstanding))
