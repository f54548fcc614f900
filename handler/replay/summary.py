"""What a run has found so far, in memory that does not grow with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.replay.answer import Answer, Times
from handler.replay.findings import CLASSES, Class, Finding, class_of
from handler.replay.request import Request, Unreadable

SIDES = ("reference", "target")
TIMES = ("first", "gap", "total")
_MAX_NAMES = 500
_MAX_UNREADABLE = 20
_MAX_EXAMPLE = 64 * 1024  # bytes of a request and two answers that are shown


class Outcome(NamedTuple):
    """One request's result, as the journal keeps it.

    Args:
        number: of the request in the recording.
        names: of the findings.
        times: of the reference and of the target; None: not measured.
        throttled: how often each was sent again.
    """

    number: int
    cls: Class
    names: tuple[tuple[str, str], ...]
    times: tuple[Times | None, Times | None]
    throttled: tuple[int, int]


class Example(NamedTuple):
    """The smallest exchange of a class."""

    request: Request
    old: Answer
    new: Answer
    findings: Sequence[Finding]

    @property
    def size(self) -> int:
        return len(self.request.body) + len(self.old.body) + len(self.new.body)


class Histogram:
    """Times by steps of 2 %: percentiles in constant memory."""

    _STEP = math.log(1.02)
    _LEAST = 1e-6

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self._counts[round(math.log(max(seconds, self._LEAST)) / self._STEP)] += 1

    def percentile(self, percent: float) -> float | None:
        """Return seconds; None without values."""
        wanted = sum(self._counts.values()) * percent / 100
        for step in sorted(self._counts):
            wanted -= self._counts[step]
            if wanted <= 0:
                return math.exp(step * self._STEP)
        return None

    def __len__(self) -> int:
        return sum(self._counts.values())


class Summary:
    """Counts of a run.

    Attributes:
        volatile: the classes of what one side changes by itself, by path and name.
    """

    def __init__(self) -> None:
        self.classes: Counter[Class] = Counter()
        self.names: dict[Class, Counter[str]] = {one: Counter() for one in CLASSES}
        self.times = {side: {name: Histogram() for name in TIMES} for side in SIDES}
        self.throttled = dict.fromkeys(SIDES, 0)
        self.num_unreadable = 0
        self.unreadable: list[Unreadable] = []
        self.examples: dict[Class, dict[str, Any]] = {}
        self.volatile: dict[str, str] = {}

    @property
    def num_compared(self) -> int:
        return sum(self.classes.values())

    def add(self, outcome: Outcome) -> None:
        self.classes[outcome.cls] += 1
        for cls, name in dict.fromkeys(outcome.names):
            names = self.names[Class(cls)]
            names[name if name in names or len(names) < _MAX_NAMES else "others"] += 1
        for side, times, throttled in zip(SIDES, outcome.times, outcome.throttled, strict=True):
            self.throttled[side] += throttled
            for name, value in zip(TIMES, times or (), strict=False):
                if value is not None:
                    self.times[side][name].add(value)

    def skip(self, unreadable: Unreadable) -> None:
        self.num_unreadable += 1
        if len(self.unreadable) < _MAX_UNREADABLE:
            self.unreadable.append(unreadable)

    def wants_example(self, cls: Class, size: int) -> bool:
        known = self.examples.get(cls)
        return cls is not Class.EQUAL and size <= _MAX_EXAMPLE and (known is None or size < known["size"])

    def beyond(self, allowed: Mapping[Class, float]) -> list[Class]:
        """Return the classes of which there are more than allowed, in percent of the requests that were compared."""
        return [
            cls
            for cls in CLASSES
            if cls is not Class.EQUAL and 100 * self.classes[cls] > allowed.get(cls, 0.0) * self.num_compared
        ]


def outcome(number: int, found: Sequence[Finding], old: Answer, new: Answer) -> Outcome:
    names = tuple((one.cls.value, one.name) for one in found)
    return Outcome(number, class_of(found), names, (old.times, new.times), (old.throttled, new.throttled))
