"""The adapters that the workers of a model share. Since 0.31, Java tells only one worker of a change, and a worker that
replaces another receives no changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from handler.core.errors import NotFound, ServingError
from handler.core.framing import dumps
from handler.scheduler.lora import Registered
from handler.serving.database import close_lock_file, open_lock_file
from handler.serving.model import ServedAdapters

log = logging.getLogger("handler.djl")

LOOK = 0.02
"""Seconds between looks at the lock of another worker."""
RETRY = 10.0
"""Seconds after which what could not be taken over is tried again."""


class _Entry(NamedTuple):
    """An adapter in the document. `version` differs for each registration and each update."""

    path: str
    number: int
    preload: bool
    version: str


class _Known(NamedTuple):
    """An entry of the document, and the id of its adapter here, or 0 if it could not be taken over."""

    entry: _Entry
    id: int


class SharedAdapters:
    """The adapters of a model on all workers of a DJL Serving process, in a document that every worker can replace.

    A worker changes adapters while it locks a second file, which contains the adapter's name. The kernel releases the
    lock of a worker that dies.

    Args:
        directory: directory that the workers share, and that no other user can change.
        model: model directory.
        adapters: adapters of this worker.
        patience: seconds to wait for other workers' changes, one of which may have been stopped.
        is_notified: whether Java tells each worker of every change. This one then follows others only when it starts.
    """

    def __init__(
        self, directory: Path, model: Path, adapters: ServedAdapters, patience: float, *, is_notified: bool = False
    ) -> None:
        name = f"adapters-{hashlib.sha256(bytes(model)).hexdigest()[:16]}"
        self._document, self._lock_file = directory / f"{name}.json", directory / f"{name}.lock"
        self._adapters = adapters
        self._patience = patience
        self._is_notified = is_notified
        self._known: dict[str, _Known] = {}
        self._last_read: tuple[int, int] | None = None  # inode and time of the document
        self._retry_at = math.inf

    async def begin(self) -> None:
        """Take over what other workers have registered. The first worker writes the adapters next to the model.

        Raises:
            OSError: the document cannot be read or written.
        """
        self._document.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with self._lock(""):
            if not self._document.exists():
                return self._write(*self._adapters.registry.names())
            for entry in self._adapters.registry:  # it has loaded those next to the model already
                self._known[entry.adapter.name] = _Known(_entry(entry, ""), entry.adapter.id)
            await self.take_over()

    @property
    def is_behind(self) -> bool:
        """Whether other workers have made changes of which Java does not tell this one, or which it must try again."""
        is_unread = self._version() not in (None, self._last_read) or time.monotonic() >= self._retry_at
        return is_unread and not self._is_notified

    def changing(self) -> str | None:
        """Return the name of the adapter that a worker is changing now, or None."""
        with contextlib.suppress(OSError), self._lock_file.open("rb") as file:
            name = file.read().decode()
            if name:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return name
        return None

    @contextlib.asynccontextmanager
    async def change(self, name: str) -> AsyncIterator[None]:
        """Lock the adapters, take over the changes of other workers, and write what the block has changed.

        Raises:
            ServingError: the change could not be written, so that the other workers will not know of it.
        """
        try:
            async with self._lock(name):
                await self.take_over()
                yield
                self._write(name)
        except BaseException as error:
            self._last_read = None  # so that this worker forgets what it may have changed, too
            if isinstance(error, OSError):
                raise ServingError(f"the workers cannot share the adapter {name}: {error.strerror or error}") from None
            raise

    async def take_over(self) -> None:
        """Make the adapters of this worker those of the document. What fails is tried again later."""
        self._last_read, self._retry_at = self._version(), math.inf
        try:
            document = json.loads(self._document.read_bytes())
            entries = {name: _Entry(*fields) for name, fields in document["adapters"].items()}
            next_number = int(document["next"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("cannot read the adapters of the other workers in %s: %s", self._document, error)
            self._retry_at = time.monotonic() + RETRY
            return
        for name in [entry.adapter.name for entry in self._adapters.registry if entry.adapter.name not in entries]:
            with self._logged(name):
                self._adapters.leave(name)
        ids = {entry.adapter.name: entry.adapter.id for entry in self._adapters.registry}
        for name, entry in sorted(entries.items(), key=lambda item: item[1].number):
            known = self._known.get(name)
            if known is None or not _is_same(known.entry, entry) or ids.get(name) != known.id:
                known = _Known(entry, 0)
                with self._logged(name):
                    path = Path(entry.path)
                    taken = await self._adapters.take_over(name, path, number=entry.number, preload=entry.preload)
                    known = _Known(entry, taken.adapter.id)
            self._known[name] = known._replace(entry=entry)
        self._known = {name: known for name, known in self._known.items() if name in entries}
        self._adapters.registry.next_number = max(self._adapters.registry.next_number, next_number)

    @contextlib.contextmanager
    def _logged(self, name: str) -> Iterator[None]:
        try:
            yield
        except NotFound:
            pass
        except ServingError as error:
            log.warning("cannot take over a change of the adapter %s: %s", name, error.public)
            self._retry_at = time.monotonic() + RETRY

    def _write(self, *names: str) -> None:
        """Write the adapters with these names, as this worker has them. All others remain as they are.

        Raises:
            OSError: the document cannot be written.
        """
        registry = self._adapters.registry
        own = {entry.adapter.name: entry for entry in registry if entry.adapter.name in names}
        for name in names:
            known = self._known.pop(name, None)
            if name in own:
                entry, id = own[name], own[name].adapter.id
                if known is None or known.id != id:
                    known = _Known(_entry(entry, uuid.uuid4().hex), id)
                self._known[name] = known
        document = {
            "next": registry.next_number,
            "adapters": {name: tuple(known.entry) for name, known in self._known.items()},
        }
        draft = self._document.with_suffix(".new")
        draft.write_bytes(dumps(document))
        draft.replace(self._document)
        self._last_read = self._version()

    def _version(self) -> tuple[int, int] | None:
        try:
            status = self._document.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    @contextlib.asynccontextmanager
    async def _lock(self, name: str) -> AsyncIterator[None]:
        deadline = time.monotonic() + self._patience
        descriptor = open_lock_file(self._lock_file, os.O_RDWR | os.O_CREAT)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # another worker's change
                    if time.monotonic() >= deadline:
                        raise TimeoutError(errno.ETIMEDOUT, "another worker's change has not ended") from None
                    await asyncio.sleep(LOOK)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, name.encode(), 0)
            yield
            os.ftruncate(descriptor, 0)
        finally:
            close_lock_file(descriptor)


def _entry(registered: Registered, version: str) -> _Entry:
    return _Entry(registered.adapter.path, registered.number, registered.preload, version)


def _is_same(known: _Entry, entry: _Entry) -> bool:
    """Return whether this worker has the adapter of an entry. Without a version, it has just loaded its files."""
    return known == entry if known.version else known[:2] == entry[:2]
