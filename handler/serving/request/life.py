"""The life of a request: its phases, and its holdings, which are released at one point.

A `RequestTask` takes these holdings:

    released at   holding                                    taken in
    FINISHED      the background task, if it has to wait     `RequestTask.start`
                  the formatter's delivery of deltas         `RequestTask._accept`
                  the timer of the request's own timeout     `RequestTask._accept`
                  the memory of media                        `Admission._load_media`
                  the turn at the gate                       `RequestTask._wait_for_batch`
                  the sequences in the engine and the sink   `RequestTask._run`
                  the fast path                              `RequestTask._open_fast_path`
    CLOSED        the share of the memory quota              `RequestTask.__init__`
                  the entry in `Admission.tasks`             `RequestTask.__init__`

Everything else is not a holding: calls of a user's `handle` (`http/custom.py`) have no task, `RequestTask.close` ends
the capture, and `Held.line` (`serving/batches/runner.py`) counts the memory of a batch's line. Releasing sequences
that have ended by themselves has no effect, because the batcher has forgotten them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import IntEnum

log = logging.getLogger("handler.request")


class Phase(IntEnum):
    """A phase of a request's life. The phases follow each other in this order, and a request may skip some.

    Attributes:
        RECEIVING: the body is received, decoded and parsed.
        PARSED: the host may change the parsed request, and then starts it.
        ENCODING: media are loaded, and prompts are tokenized.
        WAITING: the request waits for its dynamic batch.
        SUBMITTED: the engine has the request, or will get it from the queue.
        ANSWERING: the first output for the response has arrived.
        FINISHED: the response is complete, or the request was refused or cancelled.
        CLOSED: the host has closed the request.
    """

    RECEIVING = 0
    PARSED = 1
    ENCODING = 2
    WAITING = 3
    SUBMITTED = 4
    ANSWERING = 5
    FINISHED = 6
    CLOSED = 7


RECEIVING, PARSED, ENCODING, WAITING, SUBMITTED, ANSWERING, FINISHED, CLOSED = Phase

TRANSITIONS = {
    RECEIVING: (PARSED, FINISHED),
    PARSED: (ENCODING, FINISHED),
    ENCODING: (WAITING, SUBMITTED, ANSWERING, FINISHED),  # some responses need no engine
    WAITING: (SUBMITTED, FINISHED),
    SUBMITTED: (ANSWERING, FINISHED),
    ANSWERING: (FINISHED,),
    FINISHED: (CLOSED,),
    CLOSED: (),
}
"""Phases that may follow each phase."""


class Life:
    """The phase and the holdings of a request.

    A holding is anything that must be given back: memory, the turn at the gate, a sequence in the engine. It is
    released when the request enters the phase until which it is held. Only the share of memory may shrink earlier.

    Attributes:
        phase: current phase.
        opened_at: start time, by time.monotonic().
    """

    __slots__ = ("_holdings", "opened_at", "phase")

    def __init__(self) -> None:
        self.phase = RECEIVING
        self.opened_at = time.monotonic()
        self._holdings: list[tuple[Phase, Callable[[], object]]] = []

    def hold(self, release: Callable[[], object], until: Phase = FINISHED) -> None:
        """Hold something until the request enters a phase. If the request has entered it, release it immediately.

        Args:
            release: gives the holding back. An exception is only logged.
            until: FINISHED or CLOSED.
        """
        self._holdings.append((until, release))
        if self.phase >= until:
            self._release()

    def enter(self, phase: Phase) -> None:
        """Enter the next phase, and release the holdings that end with it, the latest first."""
        assert phase in TRANSITIONS[self.phase], f"a request that is {self.phase.name} cannot become {phase.name}"
        self.phase = phase
        if phase >= FINISHED:
            self._release()

    def _release(self) -> None:
        due = [release for until, release in self._holdings if until <= self.phase]
        self._holdings = [holding for holding in self._holdings if holding[0] > self.phase]
        for release in reversed(due):
            try:
                release()
            except Exception:  # one holding must not keep the others
                log.exception("a bug in the server: a resource of a request could not be released")
