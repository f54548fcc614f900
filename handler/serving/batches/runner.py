"""Runs batches. It runs a few lines at a time, with the lowest priority, and writes each response once.

A lock on the output files ensures that only one process runs a batch. A process that resumes a batch finds the
completed lines in the output files.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from handler.config.config import Config
from handler.core.errors import (
    BadRequest,
    FormatterFailed,
    InvalidParameter,
    InvalidPayload,
    NotFound,
    NotJson,
    Overloaded,
    ServingError,
    TooLarge,
    TooLong,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.framing import loads
from handler.core.loop import open_in_daemon_thread, run_in_daemon_thread, wait_for
from handler.protocols.kernel.body import decode
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai import batches
from handler.protocols.openai.api import BatchError
from handler.protocols.openai.batches import Line, LineError, batch_error
from handler.serving.batches.store import ANTHROPIC, OPEN_STATUSES, BatchStore, OpenBatch, output_ids
from handler.serving.database import close_lock_file, open_lock_file
from handler.serving.head import OWNER
from handler.serving.large_bodies import LARGE
from handler.serving.model import ServedModel
from handler.serving.quota import BODY_MEMORY
from handler.serving.request.task import RequestTask

log = logging.getLogger("handler")

OF_THE_LINE = (
    BadRequest, FormatterFailed, InvalidParameter, InvalidPayload, NotFound, TooLarge, TooLong, UnsupportedMedia,
)  # fmt: skip
"""Errors that are caused by the line itself. After any other error, the line may be retried."""

STREAM = "'stream' is not supported in batches, which write one line per response; omit 'stream' and 'output_formatter'"

_LAST = 1 << 64  # a priority after all priorities that clients can use
LOOK_SECONDS = 1.0  # seconds between saving a batch's progress and checking whether it was cancelled
_IDLE_SECONDS = 10.0  # seconds between two searches for batches that another server has abandoned
_MAX_EXTRA_OWNERS = 16  # maximum number of owners whose oldest batch runs beyond the limit of open batches
TRIES = 3  # maximum attempts for a line if the engine fails
_MOST_WAIT = 8.0  # maximum seconds between two attempts for a line
MAX_ERRORS = 100  # maximum number of errors that a failed batch lists


def line_answer(task: RequestTask) -> HttpResponse:
    """Return the response of a finished task on one line. In JSON, line breaks are only whitespace between tokens."""
    answer = task.take_whole()
    return answer._replace(body=answer.body.rstrip().replace(b"\n", b" "))


# -- the files of a batch ----------------------------------------------------------------------------------------


class BatchInput:
    """The lines of a batch's input file.

    Args:
        path: path of the file.
        endpoint: endpoint that every request must specify.
        config: configuration, which limits the size of a line and the number of requests. A longer line gets an error.
            A blank line beyond line number 2 x (maximum number of requests) ends reading with an error, because blank
            lines cost time too.
        decode_large: function that decodes a large line. It blocks the calling thread until the line is decoded.
        done: numbers of the lines to skip, counted from 1.
    """

    def __init__(
        self, path: Path, endpoint: str, config: Config, decode_large: Callable[[bytes], Any], done: Container[int] = ()
    ) -> None:
        self._path, self._endpoint = path, endpoint
        self._most, self._most_requests = config.max_request_size, config.batches_max_lines
        self._decode_large, self._done = decode_large, done
        most = f"more than {self._most_requests} requests, or too many blank lines"
        self._too_many = LineError("too_many_tasks", f"The file has {most} (option.batches_max_lines).")

    def __iter__(self) -> Iterator[Line]:
        """Yield the lines that are neither blank nor done. Too many blank lines end this with an error. May block."""
        with self._path.open("rb") as file:
            for number in count(1):
                text = file.readline(self._most + 1)
                if not text:
                    return
                too_long = len(text) > self._most
                while too_long and text and not text.endswith(b"\n"):
                    text = file.readline(LARGE)
                if number in self._done:
                    continue
                if too_long:
                    message = f"This line has more than {self._most} bytes (max_request_size)."
                    yield Line(number, None, error=LineError("line_too_large", message))
                elif text.strip():
                    yield self._read(number, text)
                elif number > 2 * self._most_requests:
                    yield Line(number, None, error=self._too_many)
                    return

    def _read(self, number: int, text: bytes) -> Line:
        try:
            value = decode(text, unique_keys=False) if len(text) < LARGE else self._decode_large(text)
        except NotJson:
            return Line(number, None, error=batches.NOT_JSON)
        except TooLarge as error:
            return Line(number, None, error=LineError("line_too_large", error.message))
        return batches.read_line(number, value, self._endpoint)

    def check(self) -> tuple[int, list[BatchError]]:
        """Return the number of requests, and the errors that prevent the batch from starting.

        An invalid line usually does not prevent this. The error is then written as the response to that line.
        """
        seen, total, errors = set[bytes](), 0, list[BatchError]()
        for line in self:
            total += 1
            if total > self._most_requests or line.error == self._too_many:
                errors.append(batch_error(*self._too_many))
                break
            if line.error is not None and line.error.code == batches.MISMATCH:
                errors.append(batch_error(*line.error, line.number))
            digest = blake2b((line.custom_id or "").encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if line.custom_id is not None and digest in seen:
                message = f"This line has the same custom_id as another line: {line.custom_id[:64]}"
                errors.append(batch_error("duplicate_custom_id", message, "custom_id", line.number))
            seen.add(digest)
            if len(errors) >= MAX_ERRORS:
                break
        if not total:
            errors.append(batch_error("empty_file", "The file has no requests."))
        return total, errors


class BatchOutput:
    """The two output files of a batch, for responses and for errors. Thread-safe; all methods may block.

    Args:
        answers: path of the file for responses.
        errors: path of the file for errors.

    Attributes:
        done: numbers of the input lines that have a response or an error, counted from 1.
        sizes: sizes of the two files, in bytes.
        counts: number of lines in each of the two files.
        num_unsent: number of lines for requests that were not sent before the batch was cancelled or expired.

    Raises:
        BlockingIOError: another process is running the batch.
        OSError: the files cannot be opened.
    """

    def __init__(self, answers: Path, errors: Path) -> None:
        self._lock = threading.Lock()
        self.done = set[int]()
        self.sizes, self.counts = [0, 0], [0, 0]
        self.num_unsent = 0
        self._files = list[int]()  # descriptors
        try:
            for path in (answers, errors):
                self._files.append(open_lock_file(path, os.O_RDWR | os.O_APPEND))
                fcntl.flock(self._files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            for index in range(2):
                self._recover(index)
        except BaseException:
            self.close()
            raise

    def _recover(self, index: int) -> None:
        """Find the input lines that a file already covers, and remove an incomplete last line."""
        with open(self._files[index], "rb", closefd=False) as reader:
            for text in reader:
                try:
                    number = batches.line_number(loads(text)["id"]) if text.endswith(b"\n") else 0
                except ValueError:  # the machine stopped while the line was being written
                    number = 0
                if not number:
                    os.ftruncate(self._files[index], self.sizes[index])
                    break
                self._note(index, number, text)

    def _note(self, index: int, number: int, text: bytes) -> None:
        self.done.add(number)
        self.sizes[index] += len(text)
        self.counts[index] += 1
        if index:  # the file for errors
            self.num_unsent += batches.is_unsent(text)

    def write(self, number: int, text: bytes, *, failed: bool) -> None:
        """Write the response to an input line, unless the line already has a response.

        Args:
            number: number of the input line, counted from 1.
            text: line to write.
            failed: whether to write to the error file.

        Raises:
            OSError: the disk is full or has failed. No part of the line is left in the file.
        """
        with self._lock:
            if number in self.done or not self._files:
                return
            descriptor = self._files[failed]
            try:
                written = os.write(descriptor, text)
                while written < len(text):
                    written += os.write(descriptor, text[written:])
            except OSError:
                os.ftruncate(descriptor, self.sizes[failed])
                raise
            self._note(failed, number, text)

    def sync(self) -> None:
        """Flush both files to disk."""
        with self._lock:
            for file in self._files:
                os.fsync(file)

    def close(self) -> None:
        """Close the files and release their locks. Any later writes have no effect."""
        with self._lock:
            for file in self._files:
                close_lock_file(file)
            self._files.clear()


# -- the runner --------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """Raised if this server must stop running a batch: on shutdown, for other batches, or if the batch has ended."""


@contextlib.asynccontextmanager
async def batches_run(model: ServedModel) -> AsyncIterator[None]:
    """Run batches while the block runs, if the options enable them. They stop when the model is drained."""
    if model.batches is None:
        yield
        return
    running = asyncio.ensure_future(BatchRunner(model, model.batches).run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})


class BatchRunner:
    """Runs all open batches, except those that another server is running."""

    def __init__(self, model: ServedModel, store: BatchStore) -> None:
        self.model, self.store = model, store
        self._most = model.max_batch_lines
        self._wanted = set[str]()  # batches that should run here, according to the last search
        self._running: dict[str, asyncio.Task[None]] = {}
        self.locked: dict[str, str] = {}  # owners of the batches whose files this server has locked, by batch
        self._elsewhere = set[str]()  # batches that another server was running at the last check
        self.held = Held(model.config.requests_total_bytes // (2 * BODY_MEMORY))
        self.scan = asyncio.Lock()  # only one input file is read from start to end at a time

    async def run(self) -> None:
        """Find and start batches until the task is cancelled or the server stops."""
        await asyncio.wait({self.model.availability.opened})
        cleared_at = time.monotonic()
        try:
            while not self.model.availability.draining:
                if time.monotonic() - cleared_at >= _IDLE_SECONDS:
                    self._elsewhere.clear()
                    cleared_at = time.monotonic()
                try:
                    await self.store.call(self.store.remove_expired)
                    most = self._most + len(self._elsewhere) + _MAX_EXTRA_OWNERS
                    self._begin(await self.store.call(self.store.open_batches, most))
                except Unavailable:
                    pass  # it is already logged
                except Exception:
                    log.exception("a bug in the server: open batches could not be started")
                with contextlib.suppress(asyncio.TimeoutError):
                    await wait_for(self.store.created.wait(), _IDLE_SECONDS)
                self.store.created.clear()
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _begin(self, open_batches: Sequence[OpenBatch]) -> None:
        """Run at most as many batches as lines can run at once, and each owner's oldest batch if it is late."""
        owners, self._wanted = set[str](), set()
        for opened in open_batches:
            id = opened.batch["id"]
            if id in self._elsewhere:
                continue
            age = self.store.clock() - opened.batch["created_at"]
            is_late = age > 2 * _IDLE_SECONDS
            if len(self._wanted) < self._most or (is_late and opened.owner not in owners):
                self._wanted.add(id)
                owners.add(opened.owner)
                if id not in self._running:
                    task = self._running[id] = asyncio.ensure_future(self._attend(opened))
                    task.add_done_callback(functools.partial(self._forget, id))

    def _forget(self, id: str, task: asyncio.Task[None]) -> None:
        del self._running[id]
        self.locked.pop(id, None)

    def _hold(self, opened: OpenBatch) -> None:
        """Record that this server runs a batch. If it runs too many batches, make one of them stop."""
        self.locked[opened.batch["id"]] = opened.owner
        if len(self.locked) > max(self._most, len(self._wanted)):
            self.locked.pop(next((id for id in self.locked if id not in self._wanted), opened.batch["id"]))

    async def _attend(self, opened: OpenBatch) -> None:
        """Run a batch, unless another server is running it. A batch that cannot continue now is retried later."""
        id, errors = opened.batch["id"], list[BatchError]()
        try:
            paths = [self.store.path(file) for file in output_ids(id)]
            with contextlib.closing(await open_in_daemon_thread(BatchOutput, *paths)) as output:
                self._hold(opened)
                errors = await _Answering(self, opened, output).run()
        except BlockingIOError:
            self._elsewhere.add(id)
        except (_Stopped, Unavailable):
            return
        except (OSError, TooLarge) as error:
            log.error("batch %s: %s", id, error)
            message = error.message if isinstance(error, TooLarge) else error.strerror or "the disk has failed"
            errors = [batch_error("storage_error", message)]
        except Exception:
            log.exception("batch %s failed because of a bug in the server", id)
            errors = [batch_error("internal_error", "The batch failed because of a bug in the server; see its log.")]
        if errors:
            with contextlib.suppress(Unavailable):  # it is already logged, and the batch is tried again later
                await self.store.call(self.store.end, id, "failed", {"object": "list", "data": errors})
        self.store.created.set()  # another batch can start now

    def share(self, owner: str) -> int:
        """Return the number of lines that each batch of an owner may hold in memory. Every owner gets a share.

        The owners share twice as many lines as can run at once, and the batches of an owner share the owner's lines.
        """
        owners = [*self.locked.values()]
        of_owner = min(self._most, 2 * self._most // len({*owners, owner}))
        num_batches = max(1, owners.count(owner))
        return max(1, of_owner // num_batches)


class Held:
    """The lines of all batches that are in memory. Batches take turns to read lines while there is room.

    Args:
        most: total size of the lines in memory, in bytes, at which reading pauses.
    """

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    async def read(self, read: Callable[[], Line | None]) -> Line | None:
        async with self._turn:
            while self._size >= self._most:
                self._freed.clear()
                await self._freed.wait()
            return await run_in_daemon_thread(read)

    @contextlib.contextmanager
    def line(self, line: Line) -> Iterator[None]:
        """Count a line's body as memory in use until the `with` block ends."""
        self._size += len(line.body)
        try:
            yield
        finally:
            self._size -= len(line.body)
            self._freed.set()


class _Answering:
    """A batch that is running on this server."""

    def __init__(self, runner: BatchRunner, opened: OpenBatch, output: BatchOutput) -> None:
        self._runner, self._model, self._store, self._output = runner, runner.model, runner.store, output
        self._owner, self._batch = opened
        self._id, self._endpoint = self._batch["id"], self._batch["endpoint"]
        self._looked_at = 0.0

    async def run(self) -> list[BatchError]:
        """Run the remaining lines of the batch, and return the errors if the batch has failed.

        Raises:
            _Stopped: the server is stopping, or another server has ended the batch.
            OSError: the output files cannot be written.
            ServingError: the state of the batch cannot be read or written, or there is no room for the output.
        """
        store = self._store
        await self._save()
        if self._batch["status"] not in OPEN_STATUSES:
            return []  # another server has ended the batch in the meantime
        if self._batch["status"] == "cancelling" and self._batch["in_progress_at"] is None:
            await store.call(store.end, self._id, "cancelled")
            return []
        if self._endpoint not in self._model.admission.routes.dialects:  # the batch was created for an earlier model
            return [batch_error("invalid_endpoint", f"'endpoint' {self._endpoint} is not served", "endpoint")]
        path, done = store.path(self._batch["input_file_id"]), self._output.done
        lines = BatchInput(path, self._endpoint, self._model.config, self._decode_large, done)
        if self._batch["status"] == "validating":
            async with self._runner.scan:
                total, errors = await run_in_daemon_thread(lines.check)
            if errors:
                return errors
            self._batch["request_counts"]["total"] = total
            await self._save(status="in_progress", in_progress_at=int(store.clock()))
        status = self._status_left() or await self._answer(lines)
        if status == "expired":
            await self._save(expired_at=int(store.clock()))
        if status != "completed":
            error = batches.EXPIRED if status == "expired" else batches.CANCELLED
            async with self._runner.scan:
                await run_in_daemon_thread(self._write_rest, lines, error)
        await self._save(status="finalizing", finalizing_at=int(store.clock()))
        await run_in_daemon_thread(self._output.sync)
        await store.call(store.end, self._id, status)
        return []

    def _status_left(self) -> str:
        """Return the final status if an earlier process has already written all lines of the batch, otherwise ""."""
        if sum(self._output.counts) < self._batch["request_counts"]["total"]:
            return ""
        if self._batch["expired_at"] is not None:
            return "expired"
        return "cancelled" if self._batch["status"] == "cancelling" else "completed"

    async def _save(self, **change: Any) -> None:
        """Save the progress of the batch, and reload its state, because it may have been cancelled."""
        completed, failed = self._output.counts
        change["request_counts"] = {**self._batch["request_counts"], "completed": completed, "failed": failed}
        if self._id.startswith(ANTHROPIC.prefix):
            change["num_unsent"] = self._output.num_unsent
        self._batch = await self._store.call(self._store.advance, self._id, self._output.sizes, change)

    def _decode_large(self, text: bytes) -> Any:
        """Decode a large line in the queue for large request bodies. This blocks the calling thread."""
        bodies = self._model.preprocessor.large_bodies
        decode = functools.partial(bodies.decode, text, plain=False, unique_keys=False)
        while True:
            try:
                return bodies.submit(len(text), decode).result()[0]
            except Overloaded:
                time.sleep(LOOK_SECONDS)

    def _write_rest(self, lines: BatchInput, error: LineError) -> None:
        for line in lines:
            text = batches.not_answered(self._id, line, line.error or error)
            self._output.write(line.number, text, failed=True)

    async def _answer(self, lines: BatchInput) -> str:
        """Run the remaining lines, and return the final status of the batch."""
        next_line = functools.partial(next, iter(lines), None)
        reading: asyncio.Task[Line | None] | None = None
        tasks = set[asyncio.Task[Any]]()  # running lines, and `reading`
        ended = False
        try:
            while not (status := await self._status()):
                if reading is None and not ended and len(tasks) < self._runner.share(self._owner):
                    reading = asyncio.ensure_future(self._runner.held.read(next_line))
                    tasks.add(reading)
                if not tasks:
                    return "completed"
                await asyncio.wait(tasks, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task.done()]:
                    tasks.remove(task)
                    task.result()
                if reading is not None and reading.done():
                    line, reading = reading.result(), None
                    ended = line is None
                    if line is not None:
                        tasks.add(asyncio.ensure_future(self._line(line)))
            return status
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _status(self) -> str:
        """Return the final status if the batch must end now, otherwise "". Also save the progress from time to time."""
        if self._model.availability.draining or self._id not in self._runner.locked:
            raise _Stopped
        if self._store.clock() >= self._batch["expires_at"]:
            return "expired"
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            await self._save()
            await self._store.call(self._store.check_room, self._owner)
            self._looked_at = time.monotonic()
        if self._batch["status"] not in OPEN_STATUSES:  # another server has ended the batch
            raise _Stopped
        return "cancelled" if self._batch["status"] == "cancelling" else ""

    async def _line(self, line: Line) -> None:
        with self._runner.held.line(line):
            if line.error is not None:
                text, failed = batches.not_answered(self._id, line, line.error), True
            else:
                answer, ignored = await self._ask(line)
                text, failed = batches.answered(self._id, line, answer, ignored), answer.status != 200
            await run_in_daemon_thread(self._output.write, line.number, text, failed=failed)

    async def _ask(self, line: Line) -> tuple[HttpResponse, Sequence[str]]:
        """Return the response to a line, and the ignored parameters. After a temporary failure, retry the line."""
        wait, tries = 0.5, 0
        while True:
            answer, ignored, error = await self._try(line)
            tries += not isinstance(error, Unavailable)
            if error is None or isinstance(error, OF_THE_LINE) or tries >= TRIES:
                return answer, ignored
            await asyncio.sleep(wait)
            wait = min(2 * wait, _MOST_WAIT)

    async def _try(self, line: Line) -> tuple[HttpResponse, Sequence[str], ServingError | None]:
        over = asyncio.Event()

        def on_bytes(task: RequestTask) -> None:
            if task.finished:
                over.set()

        headers = {"content-type": "application/json", OWNER: self._owner}
        id, dialect = batches.line_id(self._id, line.number), self._model.admission.routes.dialect(self._endpoint)
        with self._model.open(headers, dialect, path=self._endpoint, id=id, on_bytes=on_bytes) as task:
            await task.parse(line.body)
            if task.parsed is not None and task.parsed.streams:
                task.refuse(InvalidPayload(STREAM))
            elif task.parsed is not None:
                behind = [
                    request._replace(priority=_LAST + request.priority, background=self._owner)
                    for request in task.parsed.requests
                ]
                task.parsed = task.parsed._replace(requests=behind)
            task.begin(task.run())
            if not task.finished:
                await over.wait()
            return line_answer(task), task.ignored, task.error
