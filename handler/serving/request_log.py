"""Captures requests and responses in files, which `lmi replay` reads (`option.capture_requests`).

A thread writes the files, and the event loop never waits for it. If the thread cannot keep up, requests are only
counted and not captured.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import fcntl
import logging
import os
import queue
import random
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.framing import dumps
from handler.core.secrets import path_without_credentials, public_headers
from handler.serving.database import check_directory, close_lock_file, is_locked, open_lock_file

log = logging.getLogger("handler")

MIB = 1 << 20

MAX_WAITING_BYTES = 64 * MIB  # maximum bytes of requests that wait to be written, and of responses in progress
_END_SECONDS = 5.0  # maximum seconds for finishing pending writes at the end
_PERIOD = 60.0  # minimum seconds between two warnings about dropped requests
_NAME = "requests-*.jsonl"
_OVERHEAD = 1024  # approximate bytes of a line besides the body and the response


class CapturedResponse(NamedTuple):
    """A captured response, with the chunks of its body as they were sent."""

    status: int
    content_type: str
    pieces: Sequence[bytes]


class Captured(NamedTuple):
    """A captured request that has finished.

    Attributes:
        at: start time, in seconds since 1970.
        headers: request headers by name in lower case.
        answer: the response, or None if the client disconnected before its end.
    """

    id: str
    at: float
    path: str
    headers: Mapping[str, str]
    body: bytes
    answer: CapturedResponse | None

    @property
    def size(self) -> int:
        """The approximate memory that the request needs, in bytes."""
        return len(self.body) + sum(map(len, self.answer.pieces if self.answer else ())) + _OVERHEAD


class RequestLog:
    """Writes requests to files in a directory. It deletes the oldest files when all files together are too large.

    Args:
        directory: directory of the files.
        config: configuration, which sets the percentage of requests to capture at random, and the maximum size of each
            file and of all files together.

    Attributes:
        num_written: number of requests written so far.
        num_dropped: number of requests dropped so far.
    """

    def __init__(self, directory: Path, config: Config) -> None:
        self._share = config.capture_percent / 100
        self._files = _Files(directory, config.capture_file_mb * MIB, config.capture_total_mb * MIB)
        self.num_written = self.num_dropped = 0
        self._told_at = -_PERIOD
        self._waiting: queue.SimpleQueue[Captured | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._bytes = 0  # bytes of the waiting requests, and of responses in progress
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def capture(self, id: str, path: str) -> Capture | None:
        """Return the capture of a new request, or None if the request is not selected at random.

        Args:
            id: id of the request, which clients may use more than once.
            path: path with the query string.
        """
        return Capture(self, id, path) if self._share >= 1 or random.random() < self._share else None

    def take(self, size: int) -> bool:
        """Reserve memory for bytes of a request, and return whether they fit. If not, the request must be dropped."""
        with self._lock:
            fits = not self._closed and self._bytes + size <= MAX_WAITING_BYTES
            self._bytes += size * fits
        return fits

    def put(self, request: Captured, taken: int = 0) -> None:
        """Queue a request for writing, or drop it if too many bytes are already in memory.

        Args:
            taken: bytes of the request that `take` has reserved.
        """
        if self.take(request.size - taken):
            self._waiting.put(request)
        else:
            self.drop("the disk is too slow, or the server is stopping", taken)

    def close(self) -> None:
        """Finish pending writes, within a time limit, and stop the thread. Further calls have no effect."""
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
                    self.drop("a request is larger than the maximum size of a file (option.capture_file_mb)")
            except OSError as error:
                self.drop(error.strerror or str(error))
            except Exception:  # one request must not end the thread
                log.exception("a bug in the server: a request could not be captured")
                self.drop("a bug in the server")
            with self._lock:
                self._bytes -= request.size
        self._files.close()

    def drop(self, reason: str, taken: int = 0) -> None:
        """Count a dropped request, and release the bytes that `take` has reserved."""
        with self._lock:
            self._bytes -= taken
            self.num_dropped += 1
            logged_at, now = self._told_at, time.monotonic()
            if now - logged_at < _PERIOD:
                return
            self._told_at = now
        log.warning("requests were not captured, %d so far: %s", self.num_dropped, reason)


class Capture:
    """The capture of a request. When the request has ended, the capture is written to a log."""

    def __init__(self, log: RequestLog, id: str, path: str) -> None:
        self._log, self._path = log, path
        self._at = time.time()
        self._id = f"{id}@{self._at:.6f}"
        self._body: bytes | None = None  # None while there is nothing to write
        self._is_decompressed = False
        self._pieces: list[bytes] = []
        self._taken = 0  # bytes of the pieces

    def start(self, body: bytes, *, is_decompressed: bool = False) -> None:
        """Record the body. The decompressed form of a body is recorded without its Content-Encoding."""
        self._body, self._is_decompressed = body, is_decompressed

    def drop(self) -> None:
        """Do not write the request."""
        self._body = None

    def pass_on(self) -> Capture:
        """Return a capture that continues this one, which records nothing any more."""
        other = copy.copy(self)
        self.drop()
        return other

    def add(self, data: bytes) -> None:
        """Add a chunk of the response. If there is no room for it, the request is not captured."""
        if self._body is None or not data:
            return
        if self._log.take(len(data)):
            self._pieces.append(data)
            self._taken += len(data)
        else:
            self._log.drop("the responses in progress need too much memory", self._taken)
            self._pieces.clear()
            self._body = None

    def replace(self, data: bytes) -> None:
        """Replace all chunks of the response."""
        self._pieces.clear()
        self.add(data)

    def end(self, headers: Mapping[str, str], head: tuple[int, str] | None) -> None:
        """Pass the request to the log. Further calls have no effect.

        Args:
            headers: request headers by name in lower case.
            head: status and content type of the response, or None if the client disconnected before its end.
        """
        if self._body is not None:
            answer = None if head is None else CapturedResponse(*head, self._pieces)
            if self._is_decompressed:
                headers = {name: value for name, value in headers.items() if name != "content-encoding"}
            self._log.put(Captured(self._id, self._at, self._path, headers, self._body, answer), self._taken)
            self._body = None


class _Files:
    """The files of the request log: the current file, older files, and the files of other servers in the directory.

    A server locks its current file. A locked file counts as full, because its server may still fill it.
    """

    def __init__(self, directory: Path, file_bytes: int, total_bytes: int) -> None:
        self._directory, self._file_bytes, self._total_bytes = directory, file_bytes, total_bytes
        self._descriptor = -1
        self._size = self._number = 0

    def write(self, line: bytes) -> bool:
        """Write a line, if possible with a single system call, so that readers see only complete lines.

        Returns:
            Whether the line was written. A line that is longer than the maximum size of a file is not written.

        Raises:
            OSError: the disk is full or has failed. No part of the line is left in the file.
        """
        if len(line) > self._file_bytes:
            return False
        fits = self._descriptor >= 0 and self._size + len(line) <= self._file_bytes
        if not fits or not os.fstat(self._descriptor).st_nlink:  # 0 if the file was deleted, perhaps by another server
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
            close_lock_file(descriptor)

    def _open(self) -> None:
        """Start a new file, and delete the oldest files if necessary. File names sort in creation order."""
        self.close()
        self._make_room()
        self._number += 1
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._directory / f"requests-{now}-{os.getpid()}-{self._number:06}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO is an error
        self._descriptor = open_lock_file(path, flags)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        self._size = os.fstat(self._descriptor).st_size

    def _make_room(self) -> None:
        files = sorted((is_locked(path), path) for path in self._directory.glob(_NAME) if _is_regular(path))
        sizes = [self._file_bytes if locked else path.stat().st_size if path.exists() else 0 for locked, path in files]
        total = sum(sizes) + self._file_bytes
        for (_, path), size in zip(files, sizes, strict=True):
            if total <= self._total_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def _is_regular(path: Path) -> bool:
    """Return whether a path is a regular file, not a directory, FIFO or link that has the name of a capture."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _line(request: Captured) -> bytes:
    answer = request.answer
    line: dict[str, Any] = {
        "id": request.id,
        "at": round(request.at, 6),
        "path": path_without_credentials(request.path),
        "headers": public_headers(request.headers),
        **_body(request.body),
    }
    if answer is not None:
        body = _body(b"".join(answer.pieces))
        line["answer"] = {"status": answer.status, "content_type": answer.content_type, **body}
    return dumps(line) + b"\n"


def _body(body: bytes) -> dict[str, str]:
    """Return the JSON field for a body: a string, or base64 if the body is not UTF-8."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def configured_log(config: Config) -> RequestLog | None:
    """Return the request log as the options configure it, or None if requests are not captured.

    Raises:
        ConfigError: the directory cannot be used, or the size limits contradict each other.
    """
    check_log(config)
    if config.capture_requests is None:
        return None
    directory = Path(config.capture_requests).absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return RequestLog(directory, config)


def check_log(config: Config) -> None:
    """Check the options of the request log, without writing to its directory.

    Raises:
        ConfigError: the directory cannot be used, or the size limits contradict each other.
    """
    if config.capture_requests is None:
        return
    try:
        check_directory(Path(config.capture_requests).absolute())
    except OSError as error:
        reason = f"requests cannot be captured in this directory: {error.strerror or error}"
        message = f"{reason}; must be a directory that the server can write to"
        raise ConfigError(config.problem("option.capture_requests", config.capture_requests, message)) from None
    if config.capture_total_mb < config.capture_file_mb:
        least = f"must be at least option.capture_file_mb={config.capture_file_mb}"
        raise ConfigError(config.problem("option.capture_total_mb", config.capture_total_mb, least))
