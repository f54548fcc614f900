"""The journal of a run on disk, from which a killed run can continue, and the summary and progress of the run."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import orjson

from handler.core.errors import ConfigError
from handler.core.terminal import unescaped
from proof.replay.comparison import CLASSES, Class, Finding, class_of
from proof.replay.exchange import Request, Response, Times, Unreadable

SIDES = ("reference", "target")
TIMES = ("first", "gap", "total")
_MAX_NAMES = 500
_MAX_UNREADABLE = 20
_MAX_ANSWERED = 10
_MAX_EXAMPLE = 64 * 1024  # maximum size of a request and its two responses in an example, in bytes


class Outcome(NamedTuple):
    """The result of one request, as stored in the journal.

    Attributes:
        number: the index of the request in the recording.
        names: the classes and names of the findings.
        times: the times of the reference and of the target. Each is None if it was not measured.
        throttled: the number of retries for the reference and for the target.
    """

    number: int
    cls: Class
    names: tuple[tuple[str, str], ...]
    times: tuple[Times | None, Times | None]
    throttled: tuple[int, int]


class Example(NamedTuple):
    """A request and its two responses, which are an example of a class."""

    request: Request
    reference: Response
    target: Response
    findings: Sequence[Finding]

    @property
    def size(self) -> int:
        return len(self.request.body) + len(self.reference.body) + len(self.target.body)


class Histogram:
    """A histogram of times in steps of 2 %, which provides percentiles in constant memory."""

    _STEP = math.log(1.02)
    _LEAST = 1e-6

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self._counts[round(math.log(max(seconds, self._LEAST)) / self._STEP)] += 1

    def percentile(self, percent: float) -> float | None:
        """Return the percentile in seconds, or None if the histogram is empty."""
        rank = sum(self._counts.values()) * percent / 100
        for step in sorted(self._counts):
            rank -= self._counts[step]
            if rank <= 0:
                return math.exp(step * self._STEP)
        return None

    def __len__(self) -> int:
        return sum(self._counts.values())


class Summary:
    """The counts, times and examples of a run.

    Attributes:
        volatile: the classes of the volatile differences, by path and name.
        answered: what answered on each side, as far as it is known.
    """

    def __init__(self) -> None:
        self.classes: Counter[Class] = Counter()
        self.names: dict[Class, Counter[str]] = {cls: Counter() for cls in CLASSES}
        self.times = {side: {name: Histogram() for name in TIMES} for side in SIDES}
        self.throttled = dict.fromkeys(SIDES, 0)
        self.num_unreadable = 0
        self.unreadable: list[Unreadable] = []
        self.examples: dict[Class, dict[str, Any]] = {}
        self.volatile: dict[str, str] = {}
        self.answered: dict[str, list[str]] = {side: [] for side in SIDES}

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
        stored = self.examples.get(cls)
        return cls is not Class.EQUAL and size <= _MAX_EXAMPLE and (stored is None or size < stored["size"])

    def beyond(self, allowed: Mapping[Class, float]) -> list[Class]:
        """Return the classes with more requests than allowed.

        Args:
            allowed: maximum percentage of the compared requests, by class.
        """
        return [
            cls
            for cls in CLASSES
            if cls is not Class.EQUAL and 100 * self.classes[cls] > allowed.get(cls, 0.0) * self.num_compared
        ]


def outcome(number: int, differences: Sequence[Finding], reference: Response, target: Response) -> Outcome:
    names = tuple((finding.cls.value, finding.name) for finding in differences)
    return Outcome(
        number, class_of(differences), names, (reference.times, target.times), (reference.throttled, target.throttled)
    )


# -- the run on disk: one line per request, so that a killed run can be continued -------------------------------------


_FLUSH = 0.5  # seconds
_BEGIN = b'{"run":'


class Journal:
    """A file with the outcomes of a run, including the outcomes from before an interruption.

    Args:
        directory: the directory of the run. It is created if it does not exist.
        run: the settings that must match for a run to be continued.
        restart: whether to discard a previous run in the directory.

    Raises:
        ConfigError: the directory contains a different or complete run, or another process is writing there. All
            methods that write also raise this error, for example if the disk is full.
    """

    def __init__(self, directory: Path, run: Mapping[str, Any], *, restart: bool = False) -> None:
        self._path, self._examples = directory / "journal.jsonl", directory / "examples.json"
        self.summary = Summary()
        self._below = 0
        self._done: set[int] = set()
        self._flushed = 0.0
        with self._as_config_error(), contextlib.ExitStack() as opened:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = opened.enter_context(self._path.open("ab"))
            self._lock()
            self._check_ours()
            if restart:
                os.truncate(self._path, 0)
                self._examples.unlink(missing_ok=True)
            self._read(orjson.loads(orjson.dumps(run)))
            if not self._path.stat().st_size:
                self._write({"run": run})
            opened.pop_all()

    @property
    def num_done(self) -> int:
        return self._below + len(self._done)

    def has(self, number: int) -> bool:
        return number < self._below or number in self._done

    def add(self, outcome: Outcome) -> None:
        self.summary.add(outcome)
        self._mark(outcome.number)
        times = [list(times) if times else None for times in outcome.times]
        self._write([outcome.number, outcome.cls.value, outcome.names, times, outcome.throttled])

    def skip(self, number: int, unreadable: Unreadable) -> None:
        self.summary.skip(unreadable)
        self._mark(number)
        self._write([number, unreadable.location, unreadable.reason])

    def keep_example(self, cls: Class, example: Mapping[str, Any]) -> None:
        self.summary.examples[cls] = dict(example)
        part = self._examples.with_suffix(".part")
        with self._as_config_error():
            part.write_bytes(orjson.dumps({cls.value: value for cls, value in self.summary.examples.items()}))
            part.replace(self._examples)

    def keep_volatile(self, learnt: Mapping[str, str]) -> None:
        """Store the volatile differences that are not in the journal yet."""
        if new := {name: learnt[name] for name in learnt.keys() - self.summary.volatile.keys()}:
            self.summary.volatile |= new
            self._write({"volatile": new})

    def keep_answered(self, *by: str) -> None:
        """Store what answered on the sides, if it is not in the journal yet."""
        for side, name in zip(SIDES, by, strict=True):
            known = self.summary.answered[side]
            if name and name not in known and len(known) < _MAX_ANSWERED:
                known.append(name)
                self._write({"answered": {side: name}})

    def finish(self) -> None:
        self._write({"complete": True})
        self.close()

    def close(self) -> None:
        with self._as_config_error():
            self._file.close()

    @contextlib.contextmanager
    def _as_config_error(self) -> Iterator[None]:
        """Convert an OSError to a ConfigError that contains the directory."""
        try:
            yield
        except OSError as error:
            raise ConfigError(f"lmi replay: --output {self._path.parent}: {error.strerror}") from None

    def _lock(self) -> None:
        """Lock the file, so that no other process writes to it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"lmi replay: --output {self._path.parent}: another lmi replay is using it") from None
        except OSError:  # a file system without locks
            return

    def _check_ours(self) -> None:
        """Raise ConfigError if the file is not a journal, because an incomplete last line will be removed."""
        with self._path.open("rb") as file:
            if not _BEGIN.startswith(file.read(len(_BEGIN))):
                name = self._path.name
                raise ConfigError(
                    f"lmi replay: {self._path.parent} contains a {name} of another program; give another --output"
                )

    def _write(self, line: Any) -> None:
        with self._as_config_error():
            self._file.write(orjson.dumps(line) + b"\n")
            if (now := time.monotonic()) > self._flushed + _FLUSH:
                self._file.flush()
                self._flushed = now

    def _mark(self, number: int) -> None:
        """Record a finished request. To save memory, only indexes above the first unfinished request are stored."""
        self._done.add(number)
        while self._below in self._done:
            self._done.remove(self._below)
            self._below += 1

    def _read(self, run: Any) -> None:
        whole = 0
        with self._path.open("rb") as lines:
            for line in lines:
                try:
                    value = orjson.loads(line)
                except ValueError:
                    break  # cut off when the process was killed
                if not line.endswith(b"\n"):
                    break
                self._replay(value, run)
                whole += len(line)
        os.truncate(self._path, whole)
        with contextlib.suppress(OSError, ValueError):
            examples = orjson.loads(self._examples.read_bytes())
            self.summary.examples = {Class(name): example for name, example in examples.items()}

    def _replay(self, line: Any, run: Any) -> None:
        match line:
            case {"run": before} if before != run:
                raise self._taken(
                    f"a run with different {', '.join(name for name in run if before.get(name) != run[name])}"
                )
            case {"complete": True}:
                raise self._taken("a complete run")
            case {"volatile": dict(learnt)}:
                self.summary.volatile |= learnt
            case {"answered": dict(answered)}:
                for side, name in answered.items():
                    self.summary.answered[side].append(name)
            case [int(number), str(place), str(reason)]:
                self.summary.skip(Unreadable(place, reason))
                self._mark(number)
            case [int(number), str(cls), list(names), [reference, target], [int(one), int(other)]]:
                times = (Times(*reference) if reference else None, Times(*target) if target else None)
                pairs = tuple((kind, name) for kind, name in names)
                self.summary.add(Outcome(number, Class(cls), pairs, times, (one, other)))
                self._mark(number)

    def _taken(self, content: str) -> ConfigError:
        return ConfigError(f"lmi replay: {self._path.parent} contains {content}; give another --output, or --restart")


# -- the progress of a run, on standard error --------------------------------------------------------------------------


_ON_TERMINAL, _ELSEWHERE = 0.5, 30.0  # seconds between two lines


class Progress:
    """Shows progress, as a line that is updated on a terminal, or as a new line every half minute elsewhere."""

    def __init__(self, journal: Journal, file: TextIO | None = None) -> None:
        self._journal = journal
        self._file = file or sys.stderr
        self._terminal = self._file.isatty()
        self._began = self._reported = time.monotonic()
        self._before = journal.num_done

    def advance(self) -> None:
        now = time.monotonic()
        if now < self._reported + (_ON_TERMINAL if self._terminal else _ELSEWHERE):
            return
        self._reported = now
        self._clear()
        print(self.line(now), file=self._file, flush=True, end="" if self._terminal else "\n")

    def line(self, now: float) -> str:
        done = self._journal.num_done
        rate = (done - self._before) / max(now - self._began, 1e-3)
        classes = self._journal.summary.classes
        counts = ", ".join(
            f"{count:,} {cls.value}" for cls, count in sorted(classes.items(), key=lambda item: -item[1])
        )
        return f"{done:,} requests, {rate:,.0f}/s: {counts}"

    def close(self) -> None:
        self._clear()

    def _clear(self) -> None:
        if self._terminal:
            print("\r\033[K", file=unescaped(self._file), end="", flush=True)
