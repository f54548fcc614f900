"""Validator of structured output: whether the engine can follow a client's schema, expression or grammar.

A few hundred characters can keep a compiler busy for hours or take all memory. In the engine that would stop every
request, so each text is first compiled in a sandbox process, within limits.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from handler.core.errors import ServingError, Unavailable, client_words, serving_error
from handler.core.values import StructuredOutput
from handler.engines.base import StructuredOutputCheck
from handler.engines.process.sandbox import (
    Job,
    LimitExceeded,
    Limits,
    MemoryLimitExceeded,
    NotRun,
    Prepared,
    Purpose,
    Sandbox,
    TooBusy,
    Work,
)

T = TypeVar("T")

_COSTLY = re.compile(r'"(?:pattern|format)|\d{3}')  # expressions, and large counts as of repetitions


def sort(subject: StructuredOutput) -> Hashable:
    """Return what texts of one client have in common, and what distinguishes costly ones from others.

    A client has no other mark here: behind SageMaker all requests come from one address.
    """
    text = subject.value
    size = len(text).bit_length() // 2  # to a factor of four
    return subject.kind, subject.allows_text, size, '"$ref"' in text, _COSTLY.search(text) is not None


class FairQueue(Generic[T]):
    """Flows that take turns, each first in, first out. Thread-safe.

    Args:
        capacity: of all flows; None for any. Beyond it the longest flow loses its newest entry.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._flows: OrderedDict[Hashable, deque[T]] = OrderedDict()  # the next one comes first
        self._num_waiting = 0
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return self._num_waiting

    def put(self, flow: Hashable, item: T) -> T | None:
        """Add an entry; return the one that finds no room, perhaps this one."""
        with self._changed:
            self._flows.setdefault(flow, deque()).append(item)
            self._num_waiting += 1
            if self._capacity is not None and self._num_waiting > self._capacity:
                longest = max(reversed(self._flows), key=lambda flow: len(self._flows[flow]))
                return self._take(longest, deque.pop)
            self._changed.notify()
            return None

    def first(self) -> T | None:
        """Return the entry that `get` would take now; None if none waits."""
        with self._changed:
            return next(iter(self._flows.values()))[0] if self._flows else None

    def get(self) -> T | None:
        """Wait for an entry and take it out; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._flows or self._closed)
            if self._closed:
                return None
            flow = next(iter(self._flows))
            item = self._take(flow, deque.popleft)
            if flow in self._flows:
                self._flows.move_to_end(flow)
            return item

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        """Forget entries."""
        with self._changed:
            for flow, items in list(self._flows.items()):
                kept = deque(item for item in items if not unwanted(item))
                self._num_waiting -= len(items) - len(kept)
                if kept:
                    self._flows[flow] = kept
                else:
                    del self._flows[flow]

    def close(self) -> None:
        """Release all current and future waiters in `get`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self, flow: Hashable, pop: Callable[[deque[T]], T]) -> T:
        items = self._flows[flow]
        item = pop(items)
        self._num_waiting -= 1
        if not items:
            del self._flows[flow]
        return item


_MEMORY = 256 << 20
_PATIENCE = 20.0  # seconds by the clock for each of CPU time: other work may have the processors
_WAIT = 60.0  # seconds that a text may wait for its turn

_QUICK = (0.2, 1.0)  # seconds of CPU time in the lanes before the last
_CAPACITY = (256, 64, 8)  # texts that may wait in each lane
_THREADS = (2, 2, 1)
_NICE = (2, 5, 8)

_MAX_KNOWN = 1024  # texts of at most 16,384 characters, with their verdicts
# Seconds of CPU time that the good ones took together: more could reach the engine at once.
_MAX_SECONDS = 30.0

_RESTART_BYTES = 512 << 20  # kept in an engine; it is restarted above this as soon as it is idle
_MAX_BYTES = 1 << 30  # kept in an engine; above this it gets no new texts
_NO_SPACE = (
    f"structured output: the engine already keeps {_MAX_BYTES >> 20} MiB of schemas and grammars; "
    "it takes new ones when it has been idle"
)

_PURPOSE = Purpose("schemas and grammars", "are tried", " (option.guide_timeout=0 accepts them unchecked)")
_REASON_CHARACTERS = 300
_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")  # time and source line in xgrammar's messages


class Verdict(NamedTuple):
    """Result of a check.

    Attributes:
        refusal: the reason why the engine cannot follow the text; "" if it can.
        seconds: CPU time of the check.
        kept: bytes that the engine keeps of it for the rest of its life.
    """

    refusal: str = ""
    seconds: float = 0.0
    kept: int = 0


class Restartable(Protocol):
    """An engine that may have to be restarted to free memory (`EngineSupervisor`), or several (`ReplicaSet`)."""

    @property
    def replica_restarts(self) -> Sequence[int]:
        """Number of restarts so far, of each replica. Thread-safe."""

    def restart_when_idle(self, replica: int) -> None:
        """Restart a replica as soon as no request of its own is in flight. Thread-safe."""


class _Waiting(NamedTuple):
    subject: StructuredOutput
    since: float


class _Lane(NamedTuple):
    limits: Limits
    waiting: FairQueue[_Waiting]


class StructuredOutputValidator:
    """Checks each text once and keeps the verdict. Thread-safe.

    Every text starts in a lane with a fifth of a second of CPU time. One that needs more starts again in a lane with
    more. The last lane allows all. In each lane texts of one sort wait for each other, and the sorts take turns. So bad
    texts hardly delay good ones. Where a lane is full, the sort with the most texts loses its newest.

    Args:
        make: returns the engine's check, in the sandbox process; it is pickled.
        seconds: of CPU time that a text may take.
        memory: bytes that it may take.
        engine: restarted where it keeps too much of the texts.
    """

    def __init__(
        self,
        make: Callable[[], StructuredOutputCheck],
        *,
        seconds: float,
        memory: int = _MEMORY,
        engine: Restartable | None = None,
    ) -> None:
        self._kept = _Kept(engine)
        self.seconds = seconds
        self._sandbox = Sandbox(functools.partial(_make_work, make), _PURPOSE)
        self._excess = (
            f"compiling it would take the engine more than {seconds:g} s (option.guide_timeout) or "
            f"{memory >> 20} MiB, or crash it"
        )
        limits = [*(quick for quick in _QUICK if quick < seconds), seconds]
        self._lanes = [
            _Lane(Limits(limit, memory, limit * _PATIENCE, nice), FairQueue(capacity))
            for limit, capacity, nice in zip(limits, _CAPACITY[-len(limits) :], _NICE, strict=False)
        ]
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutput, Verdict] = OrderedDict()  # the one used last comes last
        self._known_seconds = 0.0
        self._futures: dict[StructuredOutput, list[Future[str]]] = {}
        self._running = False
        self._closed = False

    def start(self) -> None:
        """Start the process in the background, at the first call; else the first text starts it."""
        with self._lock:
            self._start()

    def check(self, subject: StructuredOutput) -> Future[str]:
        """Check a text.

        Returns:
            The caller's own future of the refusal, "" for none; its exception is `Unavailable`. It is not cancellable.
        """
        future: Future[str] = Future()
        future.set_running_or_notify_cancel()
        is_new = False
        with self._lock:
            if not subject.value:  # nothing in it is the client's
                future.set_result("")
            elif self._closed:
                future.set_exception(_stopping())
            elif subject in self._known:
                self._known.move_to_end(subject)
                if self._kept.add(subject, self._known[subject]):
                    future.set_result(self._known[subject].refusal)
                else:
                    future.set_exception(Unavailable(_NO_SPACE))
            elif subject in self._futures:
                self._futures[subject].append(future)
            else:
                self._futures[subject] = [future]
                self._start()
                is_new = True
        if is_new:
            self._enter(0, _Waiting(subject, time.monotonic()))
        return future

    def close(self) -> None:
        """End the process and fail the checks under way."""
        with self._lock:
            self._closed = True
            futures, self._futures = self._futures, {}
        self._sandbox.close()
        for lane in self._lanes:
            lane.waiting.close()
        for future in (future for several in futures.values() for future in several):
            future.set_exception(_stopping())

    @property
    def pid(self) -> int | None:
        """Process id of the sandbox, where it runs."""
        return self._sandbox.pid

    # -- lanes ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._running or self._closed:
            return
        self._running = True
        # The process ends with the thread that started it (PR_SET_PDEATHSIG), so these threads stay.
        for number, num_threads in zip(range(len(self._lanes)), _THREADS, strict=False):
            for _ in range(num_threads):
                threading.Thread(target=self._run, args=(number,), name="guides", daemon=True).start()

    def _run(self, number: int) -> None:
        lane = self._lanes[number]
        if number == 0:
            with contextlib.suppress(NotRun):  # the first text reports it
                self._sandbox.start()
        while (waiting := lane.waiting.get()) is not None:
            subject = waiting.subject
            try:
                if time.monotonic() - waiting.since > _WAIT:
                    raise NotRun("too many others are checked first")
                seconds: list[float] = []
                (verdict,) = self._sandbox.run(Job(subject, lane.limits), spent=seconds.append)
                self._settle(subject, verdict._replace(seconds=seconds[-1]))
            except MemoryLimitExceeded:
                self._settle(subject, Verdict(self._excess))
            except LimitExceeded:
                self._try_next_lane(waiting, number + 1)
            except NotRun as error:
                if isinstance(error, TooBusy) and number + 1 < len(self._lanes):  # which has more patience
                    self._enter(number + 1, waiting)
                else:
                    self._settle(subject, Unavailable(f"structured output: {client_words(str(error))}"))
            except Exception as error:  # a bug: it ends this check, not the lane
                self._settle(subject, serving_error(error))

    def _try_next_lane(self, waiting: _Waiting, number: int) -> None:
        if number == len(self._lanes):
            self._settle(waiting.subject, Verdict(self._excess))
        else:
            self._enter(number, waiting)

    def _enter(self, number: int, waiting: _Waiting) -> None:
        refused = self._lanes[number].waiting.put(sort(waiting.subject), waiting)
        if refused is not None:
            self._settle(refused.subject, Unavailable("too many new schemas or grammars at once"))

    def _settle(self, subject: StructuredOutput, outcome: Verdict | ServingError) -> None:
        with self._lock:
            futures = self._futures.pop(subject, ())  # none where `close` has failed them
            if isinstance(outcome, Verdict):
                self._remember(subject, outcome)
                if not self._kept.add(subject, outcome):
                    outcome = Unavailable(_NO_SPACE)
        for future in futures:
            if isinstance(outcome, Verdict):
                future.set_result(outcome.refusal)
            else:
                future.set_exception(outcome)

    def _remember(self, subject: StructuredOutput, verdict: Verdict) -> None:
        if not verdict.refusal:
            self._known_seconds += verdict.seconds
        self._known[subject] = verdict
        while len(self._known) > _MAX_KNOWN or self._known_seconds > _MAX_SECONDS:
            _, oldest = self._known.popitem(last=False)
            self._known_seconds -= 0.0 if oldest.refusal else oldest.seconds


@dataclass
class _Count:
    """Texts that a replica may keep since its last start: any replica may get any text."""

    restarts: int
    hashes: set[int] = field(default_factory=set)
    num_bytes: int = 0
    is_told: bool = False  # to restart


class _Kept:
    """Counts the memory that each replica of an engine may keep of texts since its last start."""

    def __init__(self, engine: Restartable | None) -> None:
        self._engine = engine
        self._counts: dict[int, _Count] = {}

    def add(self, subject: StructuredOutput, verdict: Verdict) -> bool:
        """Count a text; False if the engine has no memory left for it."""
        if self._engine is None or not verdict.kept:
            return True
        new = []
        for replica, restarts in enumerate(self._engine.replica_restarts):
            count = self._counts.get(replica)
            if count is None or count.restarts != restarts:
                count = self._counts[replica] = _Count(restarts)
            if hash(subject) not in count.hashes:
                new.append(count)
                if count.num_bytes + verdict.kept > _RESTART_BYTES and not count.is_told:
                    count.is_told = True
                    self._engine.restart_when_idle(replica)
        if any(count.num_bytes + verdict.kept > _MAX_BYTES for count in new):
            return False
        for count in new:
            count.hashes.add(hash(subject))
            count.num_bytes += verdict.kept
        return True


def _stopping() -> Unavailable:
    return Unavailable("structured output: the server is stopping")


def _make_work(make: Callable[[], StructuredOutputCheck]) -> Work | Prepared:
    check = make()

    def work(subject: StructuredOutput, data: memoryview) -> Iterator[Verdict]:
        try:
            yield Verdict(kept=check(subject) or 0)
        except MemoryError:
            raise
        except Exception as error:  # the engine's own words about the text
            yield Verdict((_PLACE.sub("", str(error).strip()) or type(error).__name__)[:_REASON_CHARACTERS])

    prepare = getattr(check, "prepare", None)
    return work if prepare is None else Prepared(work, prepare)
