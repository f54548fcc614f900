"""Requests and their answers, written into files that `lmi replay` reads: `option.capture_requests`.

A thread writes them. The event loop passes it existing values, and never waits: requests that the thread cannot keep
up with are dropped, and counted.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import queue
import random
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.framing import dumps
from handler.core.secrets import known_headers, path_without_credentials

log = logging.getLogger("handler")

MIB = 1 << 20

_MOST_WAITING = 64 * MIB  # bytes of bodies and answers that wait to be written
_END_SECONDS = 5.0  # that the end waits for what is being written
_PERIOD = 60.0  # seconds between two lines of the log about what is dropped
_NAME = "requests-*.jsonl"
_OVERHEAD = 1024  # bytes that a line has beside body and answer, about


class Answer(NamedTuple):
    """An answer: its bytes as they were sent, in pieces."""

    status: int
    content_type: str
    pieces: Sequence[bytes]


class Captured(NamedTuple):
    """A request that has ended.

    Attributes:
        at: when it was opened, in seconds since the epoch.
        headers: names in lower case.
        answer: None if the client left before its end.
    """

    id: str
    at: float
    path: str
    headers: Mapping[str, str]
    body: bytes
    answer: Answer | None

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.body) + sum(map(len, self.answer.pieces if self.answer else ())) + _OVERHEAD


class RequestLog:
    """Writes requests into files of a directory. The oldest files are deleted when all together are too large.

    Args:
        percent: of the requests that are written, chosen at random.
        file_bytes, total_bytes: bounds of a file, and of all of the directory's.

    Attributes:
        num_written, num_dropped: requests so far.
    """

    def __init__(self, directory: Path, *, percent: float, file_bytes: int, total_bytes: int) -> None:
        self._share = percent / 100
        self._files = _Files(directory, file_bytes, total_bytes)
        self.num_written = self.num_dropped = 0
        self._told_at = -_PERIOD
        self._waiting: queue.SimpleQueue[Captured | None] = queue.SimpleQueue()
        self._lock, self._bytes = threading.Lock(), 0  # of those that wait
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def chooses(self) -> bool:
        """Return whether the next request is to be written."""
        return self._share >= 1 or random.random() < self._share

    def put(self, request: Captured) -> None:
        """Queue a request for writing, unless too many bytes wait already."""
        size = request.size
        with self._lock:
            fits = not self._closed and self._bytes + size <= _MOST_WAITING
            if fits:
                self._bytes += size
        if fits:
            self._waiting.put(request)
        else:
            self._drop("the disk is too slow for them, or the server is stopping")

    def close(self) -> None:
        """Write what waits, for a moment; a second call changes nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._waiting.put(None)
        self._thread.join(_END_SECONDS)
        log.info("requests captured: %d written, %d dropped", self.num_written, self.num_dropped)

    def _run(self) -> None:
        while (request := self._waiting.get()) is not None:
            try:
                if self._files.write(_line(request)):
                    self.num_written += 1
                else:
                    self._drop("they are larger than a file may be (option.capture_file_mb)")
            except OSError as error:
                self._drop(error.strerror or str(error))
            except Exception:  # one request must not end the thread
                log.exception("a request could not be captured: a bug")
                self._drop("of a bug")
            with self._lock:
                self._bytes -= request.size
        self._files.close()

    def _drop(self, why: str) -> None:
        with self._lock:
            self.num_dropped += 1
            told, now = self._told_at, time.monotonic()
            if now - told < _PERIOD:
                return
            self._told_at = now
        log.warning("requests are not captured, %d so far: %s", self.num_dropped, why)


class _Files:
    """The files: one that is written, and older ones."""

    def __init__(self, directory: Path, file_bytes: int, total_bytes: int) -> None:
        self._directory, self._file_bytes, self._total_bytes = directory, file_bytes, total_bytes
        self._descriptor = -1
        self._size = self._number = 0

    def write(self, line: bytes) -> bool:
        """Write a line, by a single call: a reader finds whole lines only. False: it is too long for any file.

        Raises:
            OSError: the disk is full, or fails. Then nothing of the line is left in the file.
        """
        if len(line) > self._file_bytes:
            return False
        if self._descriptor < 0 or self._size + len(line) > self._file_bytes:
            self._open()
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            self.close()
            raise
        self._size += len(line)
        return True

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _open(self) -> None:
        """Begin a file, after the oldest ones have made room for it. Their names are in the order of their times."""
        self.close()
        self._make_room()
        self._number += 1
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._directory / f"requests-{now}-{os.getpid()}-{self._number:06}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def _make_room(self) -> None:
        files = sorted(self._directory.glob(_NAME))
        sizes = [path.stat().st_size if path.exists() else 0 for path in files]
        total = sum(sizes) + self._file_bytes
        for path, size in zip(files, sizes, strict=True):
            if total <= self._total_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def _line(request: Captured) -> bytes:
    """Return a request as a line."""
    answer = request.answer
    line: dict[str, Any] = {
        "id": request.id,
        "at": round(request.at, 6),
        "path": path_without_credentials(request.path),
        "headers": known_headers(request.headers),
        **_body(request.body),
    }
    if answer is not None:
        body = _body(b"".join(answer.pieces))
        line["answer"] = {"status": answer.status, "content_type": answer.content_type, **body}
    return dumps(line) + b"\n"


def _body(body: bytes) -> dict[str, str]:
    """Return bytes as a string, or as base64 if they are not UTF-8."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def configured_log(config: Config) -> RequestLog | None:
    """Return the log that the options ask for; None if requests are not captured.

    Raises:
        ConfigError: its directory cannot be used.
    """
    if config.capture_requests is None:
        return None
    directory = Path(config.capture_requests).absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written")
    except OSError as error:
        told = f"requests cannot be captured there: {error.strerror or error}; must be a directory"
        raise ConfigError(config.problem("option.capture_requests", config.capture_requests, told)) from None
    if config.capture_total_mb < config.capture_file_mb:
        least = f"must be at least option.capture_file_mb={config.capture_file_mb}"
        raise ConfigError(config.problem("option.capture_total_mb", config.capture_total_mb, least))
    return RequestLog(
        directory,
        percent=config.capture_percent,
        file_bytes=config.capture_file_mb * MIB,
        total_bytes=config.capture_total_mb * MIB,
    )
