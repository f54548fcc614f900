"""The run on disk: a line a request, so that a killed run goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from handler.core.errors import ConfigError
from handler.replay.answer import Times
from handler.replay.findings import Class
from handler.replay.request import Unreadable
from handler.replay.summary import Outcome, Summary

_FLUSH = 0.5  # seconds
_BEGIN = b'{"run":'


class Journal:
    """Outcomes in a file, those of an earlier part of the run too.

    Args:
        directory: of this run; made where it does not exist.
        run: what must be the same for a run to go on.
        restart: forget an earlier run.

    Raises:
        ConfigError: the directory holds another run, one that is complete, or one that another process does; later,
            from all functions that write: the disk is full.
    """

    def __init__(self, directory: Path, run: Mapping[str, Any], *, restart: bool = False) -> None:
        self._path, self._examples = directory / "journal.jsonl", directory / "examples.json"
        self.summary = Summary()
        self._below = 0
        self._done: set[int] = set()
        self._flushed = 0.0
        with self._told(), contextlib.ExitStack() as opened:
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

    def add(self, one: Outcome) -> None:
        self.summary.add(one)
        self._mark(one.number)
        times = [list(times) if times else None for times in one.times]
        self._write([one.number, one.cls.value, one.names, times, one.throttled])

    def skip(self, number: int, unreadable: Unreadable) -> None:
        self.summary.skip(unreadable)
        self._mark(number)
        self._write([number, unreadable.place, unreadable.reason])

    def keep_example(self, cls: Class, example: Mapping[str, Any]) -> None:
        self.summary.examples[cls] = dict(example)
        part = self._examples.with_suffix(".part")
        with self._told():
            part.write_bytes(orjson.dumps({one.value: value for one, value in self.summary.examples.items()}))
            part.replace(self._examples)

    def keep_volatile(self, learnt: Mapping[str, str]) -> None:
        """Keep what is new of what a run has learnt to be volatile."""
        if new := {name: learnt[name] for name in learnt.keys() - self.summary.volatile.keys()}:
            self.summary.volatile |= new
            self._write({"volatile": new})

    def finish(self) -> None:
        self._write({"complete": True})
        self.close()

    def close(self) -> None:
        with self._told():
            self._file.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn an error of the disk into a line that says where."""
        try:
            yield
        except OSError as error:
            raise ConfigError(f"lmi replay: --output {self._path.parent}: {error.strerror}") from None

    def _lock(self) -> None:
        """Keep other processes away until the file is closed."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"lmi replay: --output {self._path.parent}: another lmi replay writes there") from None
        except OSError:  # a file system without locks
            return

    def _check_ours(self) -> None:
        """Raise ConfigError if somebody else wrote the file: it would be cut off."""
        with self._path.open("rb") as file:
            if not _BEGIN.startswith(file.read(len(_BEGIN))):
                name = self._path.name
                raise ConfigError(
                    f"lmi replay: {self._path.parent} holds a {name} of something else; give another --output"
                )

    def _write(self, line: Any) -> None:
        with self._told():
            self._file.write(orjson.dumps(line) + b"\n")
            if (now := time.monotonic()) > self._flushed + _FLUSH:
                self._file.flush()
                self._flushed = now

    def _mark(self, number: int) -> None:
        """Keep only numbers above the first one that is not done: as many as requests are in flight."""
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
                    break  # the kill cut it
                if not line.endswith(b"\n"):
                    break
                self._replay(value, run)
                whole += len(line)
        os.truncate(self._path, whole)
        with contextlib.suppress(OSError, ValueError):
            kept = orjson.loads(self._examples.read_bytes())
            self.summary.examples = {Class(name): example for name, example in kept.items()}

    def _replay(self, line: Any, run: Any) -> None:
        match line:
            case {"run": before} if before != run:
                raise self._taken(
                    f"a run with other {', '.join(name for name in run if before.get(name) != run[name])}"
                )
            case {"complete": True}:
                raise self._taken("a complete run")
            case {"volatile": dict(learnt)}:
                self.summary.volatile |= learnt
            case [int(number), str(place), str(reason)]:
                self.summary.skip(Unreadable(place, reason))
                self._mark(number)
            case [int(number), str(cls), list(names), [old, new], [int(one), int(other)]]:
                times = (Times(*old) if old else None, Times(*new) if new else None)
                pairs = tuple((kind, name) for kind, name in names)
                self.summary.add(Outcome(number, Class(cls), pairs, times, (one, other)))
                self._mark(number)

    def _taken(self, what: str) -> ConfigError:
        return ConfigError(f"lmi replay: {self._path.parent} holds {what}; give another --output, or --restart")
