"""The lifecycle of a request: its phases, and its holdings, which are all released in `Life._release`.

A `RequestTask` takes these holdings:

    released at   holding                                    taken in
    FINISHED      the background task, if it has to wait     `RequestTask.start`
                  the formatter's delivery of deltas         `RequestTask._accept`
                  the timer of the request's own timeout     `RequestTask._accept`
                  the id of a stored response in progress    `RequestTask._accept`
                  the memory of media                        `Admission._load_media`
                  the turn at the gate                       `RequestTask._wait_for_batch`
                  the sequences in the engine and the sink   `RequestTask._run`
                  the fast path                              `RequestTask._open_fast_path`
    CLOSED        the share of the memory quota              `RequestTask.__init__`
                  the entry in `Admission.tasks`             `RequestTask.__init__`
                  the writer of a stream and its backlog     `_ResponseSender._send_stream`

Nothing else is a holding: calls of a user's `handle` (`http/custom.py`) have no task, `RequestTask.close` ends the
capture, and `Held.line` (`serving/batches/runner.py`) counts the memory of a batch line. Releasing sequences that have
already ended has no effect, because the batcher has removed them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import IntEnum

log = logging.getLogger("handler.request")


class Phase(IntEnum):
    """A phase in the lifecycle of a request. The phases follow in this order, and a request may skip some of them.

    Attributes:
        RECEIVING: the body is received, decoded and parsed.
        PARSED: the host may change the parsed request, and then starts it.
        ENCODING: media are loaded, and prompts are tokenized.
        WAITING: the request waits for its dynamic batch.
        SUBMITTED: the request is in the engine or in its queue.
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
"""The allowed next phases of each phase."""


class Life:
    """The phase and the holdings of a request.

    A holding is any resource that must be released: memory, the turn at the gate, a sequence in the engine. It is held
    until the request enters a certain phase. Only the share of memory may shrink earlier.

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
        """Hold a resource until the request enters a phase. If this has already happened, release it immediately.

        Args:
            release: releases the resource. Exceptions are only logged.
            until: FINISHED or CLOSED.
        """
        self._holdings.append((until, release))
        if self.phase >= until:
            self._release()

    def enter(self, phase: Phase) -> None:
        """Enter the next phase, and release the holdings that end with it, in reverse order."""
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
