"""The lifecycle of a request: its phases, and its holdings, which are all released in `Life._release`.

A `RequestTask` takes these holdings:

    released at   holding                                    taken in
    FINISHED      the background task, if it has to wait     `RequestTask.begin`
                  the formatter's delivery of deltas         `Formatting` (stages.py)
                  the timer of the request's own timeout     `RequestTask._accept`
                  the id of a stored response in progress    `Recall` (stages.py)
                  the turn in a conversation, which a        `Recall` (stages.py)
                  background response releases at CLOSED
                  the memory of media                        `MediaLoading` (stages.py)
                  the media for the reply's next request     `_follow_up` (courses.py)
                  the timer of a background response         `BackgroundRun.begin`
                  the turn at the gate                       `Gating` (stages.py)
                  the sequences in the engine and the sink   `RequestTask.run`
                  the fast path                              `RequestTask._open_fast_path`
    CLOSED        the share of the memory quota              `RequestTask.__init__`
                  the entry in `Admission.tasks`             `RequestTask.__init__`
                  the writer of a stream and its backlog     `_ResponseSender._send_stream`

A call of a user's `handle` (`http/custom.py`) has no task, but a `Life` that holds the parts of its response until it
is finished. Nothing else is a holding: `CapturedTask.close` ends the capture, and `Held.line`
(`serving/batches/runner.py`) counts the memory of a batch line. Releasing sequences that have already ended has no
effect, because the batcher has removed them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TypeVar

log = logging.getLogger("handler.request")

T = TypeVar("T", bound="Life")


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


class Event(IntEnum):
    """An event in the lifecycle of a request. The order has no meaning, but integers are hashed faster.

    Attributes:
        ACCEPT: the body has been parsed.
        START: the host has started the request.
        JOIN: the request has joined the queue for dynamic batches.
        SUBMIT: the prompts are submitted to the engine.
        OUTPUT: the first output for the response has arrived, and more will follow.
        COMMIT: the host has taken bytes or announced the response, so the status can no longer change.
        END: the response is complete, or the request was refused or cancelled.
        CLOSE: the host needs the request no longer.
    """

    ACCEPT = 0
    START = 1
    JOIN = 2
    SUBMIT = 3
    OUTPUT = 4
    COMMIT = 5
    END = 6
    CLOSE = 7


RECEIVING, PARSED, ENCODING, WAITING, SUBMITTED, ANSWERING, FINISHED, CLOSED = Phase
ACCEPT, START, JOIN, SUBMIT, OUTPUT, COMMIT, END, CLOSE = Event

TRANSITIONS: Mapping[tuple[Phase, Event], Phase] = {
    (RECEIVING, ACCEPT): PARSED,
    (PARSED, START): ENCODING,
    (ENCODING, JOIN): WAITING,
    (ENCODING, SUBMIT): SUBMITTED,
    (ENCODING, OUTPUT): ANSWERING,  # some responses need no engine
    (WAITING, SUBMIT): SUBMITTED,
    (SUBMITTED, OUTPUT): ANSWERING,
    (FINISHED, CLOSE): CLOSED,
    **{(phase, END): FINISHED for phase in Phase if phase < FINISHED},
    **{(phase, COMMIT): phase for phase in Phase if phase < CLOSED},
}
"""The phase after each event that is possible in a phase."""


class IllegalEvent(Exception):
    """An event that is impossible in the current phase of a request, which is a bug in the server."""

    def __init__(self, phase: Phase, event: Event) -> None:
        super().__init__(f"{event.name} is impossible for a request that is {phase.name}")


class Life:
    """The phase and the holdings of a request. As a context manager, it closes itself.

    A holding is any resource that must be released: memory, the turn at the gate, a sequence in the engine. It is held
    until the request enters a certain phase. Only the share of memory may shrink earlier.

    Attributes:
        phase: current phase, which only `on` changes.
        committed: whether the status of the response can no longer change.
        opened_at: start time, by time.monotonic().
    """

    __slots__ = ("_holdings", "committed", "opened_at", "phase")

    def __init__(self) -> None:
        self.phase = RECEIVING
        self.committed = False
        self.opened_at = time.monotonic()
        self._holdings: dict[Phase, list[Callable[[], object]]] = {FINISHED: [], CLOSED: []}

    @property
    def finished(self) -> bool:
        """Whether the response is complete, or the request was cancelled."""
        return self.phase >= FINISHED

    def hold(self, release: Callable[[], object], until: Phase = FINISHED) -> None:
        """Hold a resource until the request enters a phase. If this has already happened, release it immediately.

        Args:
            release: releases the resource. Exceptions are only logged.
            until: FINISHED or CLOSED.
        """
        self._holdings[until].append(release)
        if self.phase >= until:
            self._release(until)

    def on(self, event: Event) -> None:
        """Enter the phase that follows an event, and release the holdings that end with it, in reverse order.

        Raises:
            IllegalEvent: the event is impossible in the current phase.
        """
        try:
            phase = TRANSITIONS[self.phase, event]
        except KeyError:
            raise IllegalEvent(self.phase, event) from None
        if event is COMMIT:
            self.committed = True
            return
        self.phase = phase
        if phase >= FINISHED:
            self._release(phase)

    def close(self) -> None:
        """Close the request after its last byte has been sent, or cancel it if its client has disconnected."""
        if not self.finished:
            self.on(END)
        if self.phase is not CLOSED:
            self.on(CLOSE)

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _release(self, until: Phase) -> None:
        due, self._holdings[until] = self._holdings[until], []
        for release in reversed(due):
            try:
                release()
            except Exception:  # one holding must not keep the others
                log.exception("a bug in the server: a resource of a request could not be released")
