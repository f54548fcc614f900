"""Reads the output of child processes, and keeps the error that may be the reason of their end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import IO

from handler.config.environment import secrets
from handler.core.errors import log_words

_MAX_LINE = 1 << 12  # bytes of a line of a child's output; the rest is dropped
_READ_BYTES = 1 << 16  # a pipe of Linux holds no more bytes
_BREAK = re.compile(rb"[\r\n]")

_LONGEST_REASON = 400
_SAME_CAUSE = 1.0  # maximum seconds between two errors of one cause, of which the first names it
_LONGEST_CAUSE = 10.0  # seconds after which further errors have another cause, even without a pause
_LONGEST_NAME = 300  # characters of a line in which the name of its error is looked for
_RECENT = 10.0  # seconds before the end of a process, in which an error may be its reason
_LONGEST_LOCK = 0.1  # seconds to wait for the thread that passes output on, as nobody may read it any more

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"(?:\([^)]*\) )?(?:\[rank[0-9]+\]: )?(?:(?:ERROR|CRITICAL) [^\]]*\] )?")
"""Matches what vLLM and torch write before each line of a traceback: process, rank, level and file."""
_FAILS = re.compile(
    r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Failure|Interrupt|Timeout)\w*(?=:|$)"
    r"|Fatal Python error: |(?:\S+ )?[Ee]rror(?:: | while )|CUDA error"
    r"|terminate called|what\(\): |.{0,200}Assertion .*failed"
    r"|the engine's process .* has ended"
)
"""Matches the last line of a Python traceback, and what C++, the system and this handler write at an engine's end."""
_VAGUE = re.compile(r"(?i)stack ?trace|root cause|terminate called|^the engine's process .* has ended")
"""Matches errors that refer to another one, such as vLLM's "See stack trace (above) for the root cause"."""


def is_vague(error: str) -> bool:
    """Return whether an error only refers to another one, which its process or a child of it has written."""
    return bool(_VAGUE.search(error))


class LineSplitter:
    """Splits the output of a process into lines. Long lines are cut."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that end in `data`, without empty ones. The rest is kept for the next call."""
        *ended, rest = _BREAK.split(data)
        lines = []
        for line in ended:
            lines.append(_decoded(self._partial + line))
            self._partial = b""
        self._partial = (self._partial + rest)[: _MAX_LINE + 1]
        return [line for line in lines if line]

    def end(self) -> list[str]:
        """Return the last line, which may have no end."""
        return self.feed(b"\n")


def _decoded(line: bytes) -> str:
    text = line[:_MAX_LINE].decode(errors="replace").strip()
    return text + " ..." if len(line) > _MAX_LINE else text


class LastError:
    """Keeps the error in the output of a process that may be the reason of its end.

    A process may continue after most errors, so only recent errors may end it. The first of several errors names their
    cause, unless it is vague: then the first that is not.

    Args:
        hidden: words that are masked.
        is_loaded: whether the process continues after errors. Until it has loaded, its first error ends it.

    Attributes:
        is_loaded: as above.
    """

    def __init__(self, *hidden: str, is_loaded: bool = True) -> None:
        self.is_loaded = is_loaded
        self._error = ""
        self._first_at = self._last_at = 0.0  # times of the kept error, and of the latest one
        self._hidden = hidden

    @property
    def error(self) -> str:
        """The error that has ended the process if it has just ended, or ""."""
        is_old = self.is_loaded and time.monotonic() - self._last_at > _RECENT
        return "" if is_old else self._error

    def end_start(self) -> None:
        """Record that the process has loaded. Earlier errors did not end it."""
        self.is_loaded = True
        self._error = ""

    def read(self, line: str) -> str:
        """Return a line as it should be logged, or "" if it should not."""
        text = _COLOUR.sub("", line)
        prefix = _PREFIX.match(text)
        text = text[prefix.end() :].strip() if prefix else text
        if _FAILS.match(text[:_LONGEST_NAME]):
            self.keep(text)
        return line

    def keep(self, error: str) -> None:
        """Keep an error, unless an earlier one is its cause."""
        now = time.monotonic()
        has_other_cause = now - self._last_at > _SAME_CAUSE or now - self._first_at > _LONGEST_CAUSE
        is_first = not self.error or (is_vague(self._error) and not is_vague(error))
        if is_first or (self.is_loaded and has_other_cause and not is_vague(error)):
            self._error = log_words(error, self._hidden)[:_LONGEST_REASON]
            self._first_at = now
        self._last_at = now


class ChildOutput(ABC):
    """Reads what child processes write, on a thread, until the last of them has ended.

    Args:
        pipes: the pipes that they write, which the thread closes.
    """

    def __init__(self, *pipes: IO[bytes]) -> None:
        self._lines = {pipe.fileno(): LineSplitter() for pipe in pipes}  # of the pipes that have not ended
        self._lock = threading.Lock()
        threading.Thread(target=self._run, args=(pipes,), name="child-output", daemon=True).start()

    @abstractmethod
    def take(self, pipe: int, data: bytes, lines: list[str]) -> None:
        """Receive what was read from a pipe, and the lines that end in it. Both are empty after `patience`."""

    def patience(self) -> float | None:
        """Return the seconds of silence after which `take` is called without data; None if it never is."""
        return None

    def read(self, seconds: float) -> None:
        """Read all that was written before this call, unless the thread needs longer than a number of seconds."""
        if self._lock.acquire(timeout=seconds):
            try:
                self._pass_on()
                for pipe, lines in self._lines.items():
                    self.take(pipe, b"", lines.end())
            finally:
                self._lock.release()

    def _run(self, pipes: Sequence[IO[bytes]]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
        while left := list(self._lines):
            is_silent = not wait(left, self.patience())
            with self._lock:
                if is_silent:
                    self.take(left[0], b"", [])
                self._pass_on()
        for pipe in pipes:
            pipe.close()

    def _pass_on(self) -> None:
        """Pass on what was written since the last call."""
        for pipe, lines in list(self._lines.items()):
            if wait([pipe], 0):
                data = os.read(pipe, _READ_BYTES)
                if not data:
                    del self._lines[pipe]
                self.take(pipe, data, lines.feed(data) if data else lines.end())


class EngineOutput(ChildOutput):
    """The standard output and error of an engine's process and its children. Both are passed on unchanged.

    Args:
        stdout: the engine's standard output.
        stderr: the engine's standard error.
    """

    def __init__(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self._targets = {stdout.fileno(): 1, stderr.fileno(): 2}
        self._last_error = LastError(*secrets())
        super().__init__(stdout, stderr)

    def error(self) -> str:
        """Return the error that may have ended the engine, or ""."""
        self.read(_LONGEST_LOCK)
        return self._last_error.error

    def take(self, pipe: int, data: bytes, lines: list[str]) -> None:
        for line in lines:
            self._last_error.read(line)
        with contextlib.suppress(OSError):  # nobody will ever read it; it must be read here nevertheless
            while data:
                data = data[os.write(self._targets[pipe], data) :]
