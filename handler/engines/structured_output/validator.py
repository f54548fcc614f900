"""Validates structured output by checking whether the engine can compile a client's schema or grammar.

A few hundred characters can keep a compiler busy for hours or exhaust the memory. In the engine, this would stall all
requests. Each schema or grammar is therefore first compiled in a sandbox process with limits.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from handler.core.errors import ServingError, Unavailable, client_words, serving_error
from handler.core.fair_queue import FairQueue
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

_COSTLY = re.compile(r'"(?:pattern|format)|[0-9]{3}')  # regular expressions, and large numbers such as repetitions


def sort(subject: StructuredOutput) -> Hashable:
    """Return a key that is usually equal for all schemas or grammars of a client, unless only some of them are costly.

    Without API keys, the client itself is unknown: all requests from SageMaker come from one address.
    """
    text = subject.value
    size = len(text).bit_length() // 2  # to a factor of four
    return subject.kind, subject.allows_text, size, '"$ref"' in text, _COSTLY.search(text) is not None


_MEMORY = 256 << 20
_PATIENCE = 20.0  # seconds of wall time per second of CPU time, because other work may use the processors
_WAIT = 60.0  # seconds that a schema or grammar may wait for its turn

_QUICK = (0.2, 1.0)  # limits of the CPU time in seconds, for all lanes but the last
_CAPACITY = (256, 64, 8)  # schemas and grammars that may wait in each lane
_THREADS = (2, 2, 1)
_NICE = (2, 5, 8)

_MAX_VERDICTS = 1024  # verdicts that are remembered, each for a schema or grammar of at most 16,384 characters
_MAX_SECONDS = 30.0  # total CPU time of the remembered texts that were accepted; all may reach the engine at once

_RESTART_BYTES = 512 << 20  # if an engine keeps more, it is restarted as soon as it is idle
_MAX_BYTES = 1 << 30  # if an engine keeps more, it gets no new schemas and grammars
_MAX_BYTES_OF_KEY = _MAX_BYTES // 2  # of which one API key may use this many

PURPOSE = Purpose("schemas and grammars", "are checked", " (option.guide_timeout=0 accepts them unchecked)")
_REASON_CHARACTERS = 300
_LOCATION = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")  # time and source line in xgrammar's messages


class Verdict(NamedTuple):
    """The result of a check.

    Attributes:
        refusal: the reason why the engine does not support the schema or grammar, or "" if it does.
        seconds: the CPU time that the check took.
        retained_bytes: number of bytes that the engine will not free before it ends.
    """

    refusal: str = ""
    seconds: float = 0.0
    retained_bytes: int = 0


class Restartable(Protocol):
    """One engine (`EngineSupervisor`) or several (`ReplicaSet`) that can be restarted to free memory."""

    @property
    def replica_restarts(self) -> Sequence[int]:
        """The number of restarts of each replica so far. Thread-safe."""

    def restart_when_idle(self, replica: int) -> None:
        """Restart a replica as soon as it has no request in flight. Thread-safe."""


class _Waiting(NamedTuple):
    subject: StructuredOutput
    owner: str
    since: float


class _Lane(NamedTuple):
    limits: Limits
    waiting: FairQueue[_Waiting]


class StructuredOutputValidator:
    """A validator that checks each schema or grammar once and remembers the verdict. Thread-safe.

    Each check starts in a lane with a limit of 0.2 s of CPU time. If that is not enough, the check starts again in a
    lane with a higher limit, up to `seconds`. In each lane, owners take turns, and so do the sorts of an owner's
    grammars, so costly grammars hardly delay other grammars. If a lane is full, the owner with the most entries loses
    the newest entry of its most frequent sort. If two owners wait for the same grammar, each has its own entry, so
    dropping one entry does not affect the other owner.

    Args:
        make: function that returns the engine's check. The function is pickled, and called in the sandbox process.
        seconds: limit on a check's CPU time.
        memory: limit on a check's memory, in bytes.
        engine: the engine to restart if it keeps too much memory for grammars.
    """

    def __init__(
        self,
        make: Callable[[], StructuredOutputCheck],
        *,
        seconds: float,
        memory: int = _MEMORY,
        engine: Restartable | None = None,
    ) -> None:
        self._memory_counts = _MemoryCounts(engine)
        self.seconds = seconds
        self._sandbox = Sandbox(functools.partial(make_work, make), PURPOSE)
        self._excess = (
            f"compiling the schema or grammar would take the engine more than {seconds:g} s (option.guide_timeout) or "
            f"{memory >> 20} MiB, or crash it"
        )
        limits = [*(quick for quick in _QUICK if quick < seconds), seconds]
        self._lanes = [
            _Lane(Limits(limit, memory, limit * _PATIENCE, nice), FairQueue(capacity))
            for limit, capacity, nice in zip(limits, _CAPACITY[-len(limits) :], _NICE, strict=False)
        ]
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[StructuredOutput, Verdict] = OrderedDict()  # least recently used first
        self._verdict_seconds = 0.0
        self._futures: dict[StructuredOutput, dict[str, list[Future[str]]]] = {}  # by grammar and owner
        self._running = False
        self._closed = False

    def start(self) -> None:
        """Start the sandbox process in the background unless it is running, so that the first check is not delayed."""
        with self._lock:
            self._start()

    def check(self, subject: StructuredOutput, owner: str = "") -> Future[str]:
        """Check a schema or grammar.

        Args:
            owner: owner of the request, or "" without an owner.

        Returns:
            A new future, which cannot be cancelled. Its result is the reason for a refusal, or "" if there is none. If
            the check cannot be completed, the future gets an exception, such as `Unavailable`.
        """
        future: Future[str] = Future()
        future.set_running_or_notify_cancel()
        is_new = False
        with self._lock:
            if not subject.value:  # it contains nothing from the client
                future.set_result("")
            elif self._closed:
                future.set_exception(_stopping())
            elif subject in self._verdicts:
                self._verdicts.move_to_end(subject)
                if no_space := self._memory_counts.add(subject, self._verdicts[subject], owner):
                    future.set_exception(Unavailable(no_space))
                else:
                    future.set_result(self._verdicts[subject].refusal)
            else:
                owners = self._futures.setdefault(subject, {})
                is_new = owner not in owners
                owners.setdefault(owner, []).append(future)
                self._start()
        if is_new:
            self._enter(0, _Waiting(subject, owner, time.monotonic()))
        return future

    def close(self) -> None:
        """Stop the sandbox process, and fail all unfinished checks."""
        with self._lock:
            self._closed = True
            futures, self._futures = self._futures, {}
        self._sandbox.close()
        for lane in self._lanes:
            lane.waiting.close()
        for future in (future for owners in futures.values() for several in owners.values() for future in several):
            future.set_exception(_stopping())

    @property
    def pid(self) -> int | None:
        """The process id of the sandbox, or None if it is not running."""
        return self._sandbox.pid

    # -- lanes ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._running or self._closed:
            return
        self._running = True
        # These threads never end, because the process ends with the thread that started it (PR_SET_PDEATHSIG).
        for number, num_threads in zip(range(len(self._lanes)), _THREADS, strict=False):
            for _ in range(num_threads):
                threading.Thread(target=self._run, args=(number,), name="guides", daemon=True).start()

    def _run(self, number: int) -> None:
        lane = self._lanes[number]
        if number == 0:
            with contextlib.suppress(NotRun):  # the first check reports the error
                self._sandbox.start()
        while (waiting := lane.waiting.get()) is not None:
            subject = waiting.subject
            if not self._is_awaited(waiting):
                continue  # the entry of another owner has settled it
            if time.monotonic() - waiting.since > _WAIT:
                self._refuse(waiting, "structured output: too many other schemas and grammars are being checked")
                continue
            try:
                seconds: list[float] = []
                (verdict,) = self._sandbox.run(Job(subject, lane.limits), spent=seconds.append)
                self._settle(subject, verdict._replace(seconds=seconds[-1]))
            except MemoryLimitExceeded:
                self._settle(subject, Verdict(self._excess))
            except (LimitExceeded, NotRun) as error:
                if isinstance(error, LimitExceeded | TooBusy) and number + 1 < len(self._lanes):
                    self._enter(number + 1, waiting)  # its limits are higher
                elif isinstance(error, LimitExceeded):
                    self._settle(subject, Verdict(self._excess))
                else:
                    self._settle(subject, Unavailable(f"structured output: {client_words(str(error))}"))
            except Exception as error:  # a bug: only this check fails, and the lane goes on
                self._settle(subject, serving_error(error))

    def _enter(self, number: int, waiting: _Waiting) -> None:
        refused = self._lanes[number].waiting.put(sort(waiting.subject), waiting, waiting.owner)
        if refused is not None:
            self._refuse(refused, "too many new schemas or grammars at once")

    def _is_awaited(self, waiting: _Waiting) -> bool:
        with self._lock:
            return waiting.owner in self._futures.get(waiting.subject, ())

    def _refuse(self, waiting: _Waiting, message: str) -> None:
        """Fail the checks of one owner. The checks of the same grammar for other owners go on."""
        with self._lock:
            owners = self._futures.get(waiting.subject, {})
            futures = owners.pop(waiting.owner, ())
            if not owners:
                self._futures.pop(waiting.subject, None)
        for future in futures:
            future.set_exception(Unavailable(message))

    def _settle(self, subject: StructuredOutput, outcome: Verdict | ServingError) -> None:
        with self._lock:
            owners = self._futures.pop(subject, {})  # empty if `close` has failed them
            futures = [future for several in owners.values() for future in several]
            if isinstance(outcome, Verdict):
                self._remember(subject, outcome)
                if no_space := self._memory_counts.add(subject, outcome, next(iter(owners), "")):
                    outcome = Unavailable(no_space)
        for future in futures:
            if isinstance(outcome, Verdict):
                future.set_result(outcome.refusal)
            else:
                future.set_exception(outcome)

    def _remember(self, subject: StructuredOutput, verdict: Verdict) -> None:
        if not verdict.refusal:
            self._verdict_seconds += verdict.seconds
        self._verdicts[subject] = verdict
        while len(self._verdicts) > _MAX_VERDICTS or self._verdict_seconds > _MAX_SECONDS:
            _, oldest = self._verdicts.popitem(last=False)
            self._verdict_seconds -= 0.0 if oldest.refusal else oldest.seconds


@dataclass
class _Count:
    """The schemas and grammars that were accepted since the last start of a replica, and that it may have compiled."""

    restarts: int
    hashes: set[int] = field(default_factory=set)
    num_bytes: int = 0
    bytes_by_owner: Counter[str] = field(default_factory=Counter)
    restart_requested: bool = False  # whether the replica has been told to restart


class _MemoryCounts:
    """Counts the memory that each replica may have kept for schemas and grammars since its last start."""

    def __init__(self, engine: Restartable | None) -> None:
        self._engine = engine
        self._counts: dict[int, _Count] = {}

    def add(self, subject: StructuredOutput, verdict: Verdict, owner: str) -> str:
        """Count a schema or grammar and return "". If the engine would keep too much memory, or too much of it for one
        API key, return an error message.
        """
        if self._engine is None or not verdict.retained_bytes:
            return ""
        new = []
        for replica, restarts in enumerate(self._engine.replica_restarts):
            count = self._counts.get(replica)
            if count is None or count.restarts != restarts:
                count = self._counts[replica] = _Count(restarts)
            if hash(subject) not in count.hashes:
                new.append(count)
                if count.num_bytes + verdict.retained_bytes > _RESTART_BYTES and not count.restart_requested:
                    count.restart_requested = True
                    self._engine.restart_when_idle(replica)
        if any(count.num_bytes + verdict.retained_bytes > _MAX_BYTES for count in new):
            return _no_space(_MAX_BYTES)
        if owner and any(count.bytes_by_owner[owner] + verdict.retained_bytes > _MAX_BYTES_OF_KEY for count in new):
            return _no_space(_MAX_BYTES_OF_KEY, " of this API key")
        for count in new:
            count.hashes.add(hash(subject))
            count.num_bytes += verdict.retained_bytes
            count.bytes_by_owner[owner] += verdict.retained_bytes
        return ""


def _no_space(num_bytes: int, whose: str = "") -> str:
    return (
        f"structured output: the engine already keeps {num_bytes >> 20} MiB of schemas and grammars{whose}; "
        "others will be accepted after it has been idle"
    )


def _stopping() -> Unavailable:
    return Unavailable("structured output: the server is stopping")


def make_work(make: Callable[[], StructuredOutputCheck]) -> Work | Prepared:
    check = make()

    def work(subject: StructuredOutput, data: memoryview) -> Iterator[Verdict]:
        try:
            yield Verdict(retained_bytes=check(subject) or 0)
        except MemoryError:
            raise
        except Exception as error:  # the message is the engine's reason for a refusal
            yield Verdict((_LOCATION.sub("", str(error).strip()) or type(error).__name__)[:_REASON_CHARACTERS])

    prepare = getattr(check, "prepare", None)
    return work if prepare is None else Prepared(work, prepare)
