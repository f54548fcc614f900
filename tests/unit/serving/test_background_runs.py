"""The events of a running background response in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

from handler.serving.background.runs import EventLog


def in_memory(log: EventLog) -> Sequence[bytes]:
    """The events that are in memory: the latest written ones, then the others."""
    first = next(number for number in range(log.written + 1) if log.read(number) is not None)
    return [*(log.read(first) or ()), *log.pending]


def test_the_size_is_that_of_the_events_in_memory() -> None:
    draw = random.Random(20261129)
    log, events = EventLog([b"created", b"queued"]), [b"created", b"queued"]
    for _ in range(300):
        new = [draw.randbytes(draw.randrange(1, 4000)) for _ in range(draw.randrange(5))]
        log.add(new)
        events += new
        log.note_written(draw.randrange(len(log.pending) + 1))
        assert log.size == sum(map(len, in_memory(log)))
        assert log.size <= (1 << 16) + 4000 + sum(map(len, log.pending))
        assert log.read(log.written - 1) == events[log.written - 1 : log.written]
    log.add([b"last"])
    log.drop_pending()
    assert (log.size, log.pending) == (sum(map(len, in_memory(log))), [])
