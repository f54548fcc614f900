"""Whether the engine can follow a guide that a client sends, found out before the engine gets it.

Schemas, expressions and grammars of a few hundred characters can keep a compiler busy for hours or take all memory. In
the engine that would be everybody's loss, so each is tried apart first (`sandbox.py`), within limits.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from handler.core.errors import ServingError, Unavailable, serving_error
from handler.core.values import StructuredOutput
from handler.engines.base import StructuredOutputCheck
from handler.engines.structured_output.sandbox import LimitExceeded, MemoryLimitExceeded, NotRun, Purpose, Sandbox
from handler.engines.structured_output.sandbox_tasks import Job, Limits, Work

_MEMORY = 256 << 20
_PATIENCE = 20.0  # seconds by the clock for each of computing: others may have the processors
_WAIT = 60.0  # seconds that a guide may wait for its turn

_QUICK = (0.2, 2.0)  # seconds of computing in the lanes before the last
_ROOM = (256, 64, 8)  # guides that may wait in each lane
_THREADS = (2, 2, 1)
_NICE = (2, 5, 8)

_MAX_KNOWN = 1024  # guides of at most 16,384 characters, and what is wrong with them
# Seconds of computing that the good ones took: many that need much could otherwise reach the engine at once.
_MAX_SECONDS = 30.0

_WORN = 512 << 20  # bytes of guides in an engine, from which on it is replaced as soon as it has nothing to do
_FULL = 1 << 30  # bytes, beyond which it gets none that it does not have
_NO_ROOM = f"guides: the engine keeps {_FULL >> 20} MiB of them already; it takes new ones when it has been idle"


_PURPOSE = Purpose("guides", "are tried", " (option.guide_timeout=0 has them taken as they are)")
_REASON_CHARACTERS = 300


class Verdict(NamedTuple):
    """What came of a trial.

    Attributes:
        refusal: what is wrong with the guide; "" where nothing is.
        seconds: of computing that were needed to tell.
        kept: bytes that the engine keeps of it for as long as it lives.
    """

    refusal: str = ""
    seconds: float = 0.0
    kept: int = 0


class Restartable(Protocol):
    """An engine that keeps guides for as long as it lives (`engines.remote.EngineSupervisor`)."""

    restarts: int

    def renew(self) -> None:
        """Have another one in its place as soon as nothing is in flight. Thread-safe."""


class _Waiting(NamedTuple):
    structured_output: StructuredOutput
    since: float


class _Lane(NamedTuple):
    limits: Limits
    room: int
    waiting: queue.SimpleQueue[_Waiting | None]


class StructuredOutputValidator:
    """Tries guides, each once, and remembers what came of it. Thread-safe.

    There are lanes: every guide gets a fifth of a second of computing at first, and what needs more begins anew in a
    lane with more of it, the last of which allows all. So those who send bad ones keep good ones waiting for little,
    and mostly each other; the last lane's queue is short, and who finds it full is turned away.

    Args:
        make: gives what tries a guide, in a process that is started for it; it is pickled.
        seconds: of computing that a guide may take.
        memory: bytes that it may take.
        engine: that gets the guides, where it may have to be replaced for what it keeps of them.
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
        self._process = Sandbox(functools.partial(_trial_work, make), _PURPOSE)
        self._excess = (
            f"the engine would need more than {seconds:g} s (option.guide_timeout) or {memory >> 20} MiB to make it "
            "ready, or break"
        )
        allowed = [*(quick for quick in _QUICK if quick < seconds), seconds]
        self._lanes = [
            _Lane(Limits(most, memory, most * _PATIENCE, nice), room, queue.SimpleQueue())
            for most, room, nice in zip(allowed, _ROOM[-len(allowed) :], _NICE, strict=False)
        ]
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutput, Verdict] = OrderedDict()  # the one used last comes last
        self._known_seconds = 0.0
        self._asked: dict[StructuredOutput, list[Future[str]]] = {}
        self._running = False
        self._closed = False

    def start(self) -> None:
        """Have the process loaded, in the background; else the first guide does. Again is once."""
        with self._lock:
            self._start()

    def check(self, structured_output: StructuredOutput) -> Future[str]:
        """What is wrong with the guide, "" where nothing is; or the future's exception is `Unavailable`.

        The future is the caller's own, and cannot be cancelled.
        """
        found: Future[str] = Future()
        found.set_running_or_notify_cancel()
        with self._lock:
            if not structured_output.value:  # nothing of it is the client's
                found.set_result("")
            elif self._closed:
                found.set_exception(_stopping())
            elif structured_output in self._known:
                self._known.move_to_end(structured_output)
                if self._kept.add(structured_output, self._known[structured_output]):
                    found.set_result(self._known[structured_output].refusal)
                else:
                    found.set_exception(Unavailable(_NO_ROOM))
            elif structured_output in self._asked:
                self._asked[structured_output].append(found)
            elif not self._enter(self._lanes[0], _Waiting(structured_output, time.monotonic())):
                found.set_exception(_busy())
            else:
                self._asked[structured_output] = [found]
                self._start()
        return found

    def close(self) -> None:
        """End the process; what is not known yet stays so, and who waits for it is told."""
        with self._lock:
            self._closed = True
            asked, self._asked = self._asked, {}
        self._process.close()
        for lane in self._lanes:
            for _ in range(max(_THREADS)):
                lane.waiting.put(None)
        for futures in asked.values():
            for future in futures:
                future.set_exception(_stopping())

    @property
    def pid(self) -> int | None:
        """Of the process, where it runs."""
        return self._process.pid

    # -- lanes ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._running or self._closed:
            return
        self._running = True
        # The process ends with the thread that started it (PR_SET_PDEATHSIG), so that is one that stays.
        for number, threads in zip(range(len(self._lanes)), _THREADS, strict=False):
            for _ in range(threads):
                threading.Thread(target=self._run, args=(number,), name="guides", daemon=True).start()

    def _enter(self, lane: _Lane, waiting: _Waiting) -> bool:
        if lane.waiting.qsize() >= lane.room:
            return False
        lane.waiting.put(waiting)
        return True

    def _run(self, number: int) -> None:
        lane = self._lanes[number]
        if number == 0:
            with contextlib.suppress(Exception):  # the guide that needs it finds that out again
                self._process.start()
        while (waiting := lane.waiting.get()) is not None:
            try:
                if time.monotonic() - waiting.since > _WAIT:
                    raise NotRun("too many others are tried first")
                (verdict,), seconds = self._process.done(Job(waiting.structured_output, lane.limits))
                self._settle(waiting.structured_output, verdict._replace(seconds=seconds))
            except MemoryLimitExceeded:
                self._settle(waiting.structured_output, Verdict(self._excess))
            except LimitExceeded:
                self._go_on(waiting, number + 1)
            except NotRun as error:
                self._settle(waiting.structured_output, Unavailable(f"guides: {error}"))
            except Exception as error:  # a bug; the lane must go on
                self._settle(waiting.structured_output, serving_error(error))

    def _go_on(self, waiting: _Waiting, number: int) -> None:
        if number == len(self._lanes):
            self._settle(waiting.structured_output, Verdict(self._excess))
        elif not self._enter(self._lanes[number], waiting):
            self._settle(waiting.structured_output, _busy())

    def _settle(self, structured_output: StructuredOutput, outcome: Verdict | ServingError) -> None:
        with self._lock:
            asked = self._asked.pop(structured_output, ())  # none: it is closed, and they know
            if isinstance(outcome, Verdict):
                self._remember(structured_output, outcome)
                if not self._kept.add(structured_output, outcome):
                    outcome = Unavailable(_NO_ROOM)
        for future in asked:
            if isinstance(outcome, Verdict):
                future.set_result(outcome.refusal)
            else:
                future.set_exception(outcome)

    def _remember(self, structured_output: StructuredOutput, verdict: Verdict) -> None:
        if not verdict.refusal:
            self._known_seconds += verdict.seconds
        self._known[structured_output] = verdict
        while len(self._known) > _MAX_KNOWN or self._known_seconds > _MAX_SECONDS:
            _, gone = self._known.popitem(last=False)
            self._known_seconds -= 0.0 if gone.refusal else gone.seconds


class _Kept:
    """What an engine keeps of guides in this life of it."""

    def __init__(self, engine: Restartable | None) -> None:
        self._engine = engine
        self._life = 0
        self._guides: set[int] = set()  # hashes
        self._bytes = 0

    def add(self, structured_output: StructuredOutput, verdict: Verdict) -> bool:
        """Whether the engine may have it; false where there is no room for what it would keep."""
        if self._engine is None or not verdict.kept:
            return True
        if self._engine.restarts != self._life:
            self._life, self._bytes = self._engine.restarts, 0
            self._guides.clear()
        if hash(structured_output) in self._guides:
            return True
        if self._bytes + verdict.kept > _WORN:
            self._engine.renew()
        if self._bytes + verdict.kept > _FULL:
            return False
        self._guides.add(hash(structured_output))
        self._bytes += verdict.kept
        return True


def _stopping() -> Unavailable:
    return Unavailable("guides: the server is stopping")


def _busy() -> Unavailable:
    return Unavailable("too many guides are to be tried at once")


def _trial_work(make: Callable[[], StructuredOutputCheck]) -> Work:
    trial = make()

    def work(structured_output: StructuredOutput, data: memoryview) -> Iterator[Verdict]:
        try:
            yield Verdict(kept=trial(structured_output) or 0)
        except MemoryError:
            raise
        except Exception as error:  # as the engine itself would say of the request
            yield Verdict((str(error).strip() or type(error).__name__)[:_REASON_CHARACTERS])

    return work
