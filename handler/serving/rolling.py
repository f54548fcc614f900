"""Rolling batch as DJL steps it: every call names all live requests in order, and wants a piece for each."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from handler.core.errors import InternalError, ServingError
from handler.serving.slots import Item, Place
from handler.serving.steps import StepDriver

log = logging.getLogger("handler.rolling")

_IDLE = 0.03
"""Seconds that a step waits when nobody has anything to say: a new request waits no longer than this for its turn.

Longer than most engines take for a token: then no step comes back empty, and a new request, which could not join the
engine's step amid it, waits for little more than that step's end.
"""

_BEGIN = 0.1
"""Seconds that a step waits for the first word on its new requests where an empty first piece would settle their
status; their neighbours' tokens wait along."""


class Piece(NamedTuple):
    """What one step says of one request: the `first` one begins its answer, the `last` one ends it."""

    place: Place
    data: bytes
    first: bool
    last: bool


class RollingHost:
    """Keeps the places in DJL's order.

    Args:
        driver: the requests.
        commits_early: the Java side takes a first piece without bytes for the answer's beginning.
        max_piece: bytes that fit into one piece; None is no limit.
    """

    def __init__(self, driver: StepDriver, *, commits_early: bool = False, max_piece: int | None = None) -> None:
        self._driver = driver
        self._commits_early = commits_early
        self._max_piece = max_piece
        self._places: list[Place] = []

    @property
    def num_places(self) -> int:
        return len(self._places)

    def reset(self) -> None:
        """The Java side has forgotten all requests."""
        if self._places:
            log.warning("reset: %d requests are dropped", len(self._places))
        self._driver.reset()
        self._places.clear()

    def step(self, size: int, new: Mapping[int, Item]) -> list[Piece]:
        """One step of `size` requests, a piece for each, in order.

        Args:
            size: how many requests the Java side has.
            new: those that it offers for the first time, by their place: they follow the others.
        """
        places = self._places
        if size != len(places) + len(new) or any(index < len(places) for index in new):
            return self._disagreement(size, len(new))
        opened = []
        if new:
            opened = self._driver.open_all([new[index] for index in sorted(new)])
            places = places + opened
        self._wait(places, opened)
        pieces = [self._piece(place) for place in places]
        self._places = [piece.place for piece in pieces if not piece.last]
        return pieces

    def fail(self, size: int, error: ServingError) -> list[Piece]:
        """End every request with `error`."""
        self.reset()
        places = [self._driver.refused(error) for _ in range(size)]
        return [Piece(place, place.take(), True, True) for place in places]

    def _piece(self, place: Place) -> Piece:
        begun = place.committed
        whole = not begun and place.error is not None  # an error's status comes with all of its body
        data = place.take(None if whole else self._max_piece)
        if self._commits_early:
            place.committed = True
        return Piece(place, data, place.committed and not begun, place.finished and not place.unsent)

    def _wait(self, places: Sequence[Place], opened: Sequence[Place]) -> None:
        """Step until somebody has something to say; where it matters, until each new request has."""
        now = time.monotonic()
        begin, idle = now + _BEGIN, now + _IDLE
        timeout = 0.0 if any(place.unsent for place in places) else _IDLE
        while True:
            self._driver.step(timeout)
            now = time.monotonic()
            if self._commits_early and now < begin and not all(place.begun for place in opened):
                timeout = begin - now
            elif now >= idle or any(place.unsent for place in places):
                return
            else:
                timeout = idle - now

    def _disagreement(self, size: int, num_new: int) -> list[Piece]:
        """Never guess whose tokens these are: everybody is told, nobody gets another's."""
        told = f"the server has {size} requests, {num_new} of them new; the handler has {len(self._places)}"
        log.error("the places disagree: %s; all are ended", told)
        return self.fail(size, InternalError("the server and its handler disagreed on the requests in flight"))
