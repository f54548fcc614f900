"""The interface of a target."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from handler.replay.answer import Answer
from handler.replay.request import Request


class Attempt(NamedTuple):
    """One sending of a request.

    Args:
        busy: the target takes the request later: it is throttled, full, or not ready.
        after: the seconds that it names for this; 0: none.
    """

    answer: Answer
    busy: bool = False
    after: float = 0.0


class Target(Protocol):
    """A target. Its functions run on the event loop."""

    async def open(self) -> None:
        """Raise ConfigError if nobody is there."""

    async def send(self, request: Request) -> Attempt:
        """Send the request once, and wait for its whole answer. A failure is an answer too."""

    async def close(self) -> None: ...
