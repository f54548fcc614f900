"""Files and batches in a directory (`option.batches_store`), which several servers may share.

SQLite stores their metadata, and each file's contents are next to it under its id. Each belongs to the API key of the
request that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from handler.config.config import Config
from handler.core.errors import ConfigError, Conflict, NotFound, Overloaded, TooLarge, Unavailable
from handler.core.framing import dumps, loads
from handler.core.loop import run_in_daemon_thread
from handler.core.media import new_secret
from handler.protocols.kernel.readers import Named
from handler.protocols.openai.api import BatchErrors, DeletedFile, OpenAiBatch, OpenAiFile, Page
from handler.protocols.openai.batches import (
    INPUT,
    LIFETIME,
    OUTPUT,
    NewBatch,
    NewFile,
    deleted,
    new_batch,
    new_file,
    no_batch,
    no_file,
)
from handler.serving.database import open_database

log = logging.getLogger("handler")

T = TypeVar("T")

OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")

_FILES, _BATCHES = (INPUT, OUTPUT), ("batches",)  # kinds
_FILE = "batches.sqlite3"
_VERSION = 1  # of the table
_BUSY_SECONDS = 5.0  # that another process may hold the database
_OVERHEAD = 4096  # bytes that each file and batch takes beside its contents, about
_MOST_ENDED = 1000  # batches of an owner; of more, the oldest are forgotten
_FORGOTTEN = 3600.0  # seconds after which an upload that nobody goes on with is removed
_NEVER = 1e18

_TABLE = f"""
CREATE TABLE objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, kind TEXT NOT NULL,
    document BLOB, size INTEGER NOT NULL DEFAULT 0, expires REAL NOT NULL DEFAULT {_NEVER}, input TEXT, lifetime INTEGER
);
CREATE INDEX objects_by_owner ON objects (owner, kind, number, size);
CREATE INDEX objects_by_expiry ON objects (expires);
"""
"""Files are of a kind by their purpose; those that are still written have no document. What is open does not expire.

A batch names its input, and the lifetime of its output, in seconds from its end.
"""

_TOO_MANY = """
DELETE FROM objects WHERE id IN (
    SELECT id FROM objects WHERE owner = ? AND kind = ? AND expires < ? ORDER BY number DESC LIMIT -1 OFFSET ?
)
"""


class OpenBatch(NamedTuple):
    """A batch that has not ended."""

    owner: str
    batch: OpenAiBatch


class BatchStore:
    """Files and batches of all owners; each owner finds its own. Every call but `call` may block, and is thread-safe.

    Args:
        config: how much it may keep.
        clock: returns the seconds since 1970.

    Attributes:
        created: set when there may be another batch to answer.

    Raises:
        OSError, sqlite3.Error: the directory cannot be used.
    """

    def __init__(self, directory: Path, config: Config, clock: Callable[[], float] = time.time) -> None:
        self._config, self.clock = config, clock
        self.created = asyncio.Event()
        self._directory = directory
        self._lock = threading.RLock()
        self._database = open_database(directory / _FILE, _VERSION, _TABLE, wait=_BUSY_SECONDS)

    async def call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method on a thread.

        Raises:
            ServingError: the method's own.
            Unavailable: the disk fails.
        """
        try:
            return await run_in_daemon_thread(method, *arguments)
        except (OSError, sqlite3.Error) as error:
            log.error("files and batches: %s", error)
            raise Unavailable("the files and batches cannot be read or written", detail=str(error)) from None

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def path(self, id: str) -> Path:
        """Return where a file's contents lie."""
        return self._directory / id

    # -- files ---------------------------------------------------------------------------------------------------

    def reserve(self, owner: str, size: int) -> str:
        """Return the id of a file that is to be written, of at most so many bytes.

        Raises:
            TooLarge, Unavailable: there is no room for it.
        """
        id = f"file-{new_secret()}"
        with self._writing():
            self.check_room(owner, size)
            self._insert(id=id, owner=owner, kind=INPUT, size=size, expires=self.clock() + _FORGOTTEN)
        return id

    def keep(self, id: str, new: NewFile) -> OpenAiFile:
        """Show a file that has been written."""
        file = new_file(id, new.name, self.path(id).stat().st_size, self.clock(), new.lifetime)
        with self._writing():
            self._show(file)
        return file

    def drop(self, id: str) -> None:
        """Remove a file that could not be written."""
        with self._writing():
            self._remove([id])

    def file(self, owner: str, id: str) -> OpenAiFile:
        """Return a file.

        Raises:
            NotFound: the owner has none of this id.
        """
        file: OpenAiFile = self._find(owner, id, _FILES)
        return file

    def open(self, owner: str, id: str) -> tuple[OpenAiFile, BinaryIO]:
        """Return a file with its contents.

        Raises:
            NotFound: the owner has none of this id.
        """
        file = self.file(owner, id)
        try:
            return file, self.path(id).open("rb")
        except FileNotFoundError:  # it was deleted a moment ago
            raise no_file(id) from None

    def files(self, owner: str, page: Page) -> tuple[list[Any], bool]:
        """Return a page of an owner's files, and whether there are more."""
        return self._list(owner, page, [kind for kind in _FILES if page.purpose in ("", kind)])

    def delete(self, owner: str, id: str) -> DeletedFile:
        """Delete a file.

        Raises:
            NotFound: the owner has none of this id.
            Conflict: a batch still reads it.
        """
        with self._writing():
            self._find(owner, id, _FILES)
            query = "SELECT id FROM objects WHERE input = ? AND expires = ?"
            if (user := self._database.execute(query, (id, _NEVER)).fetchone()) is not None:
                raise Conflict(f"{id} is the input of {user[0]}, which has not ended; cancel it first")
            self._remove([id])
        return deleted(id)

    # -- batches -------------------------------------------------------------------------------------------------

    def create(self, owner: str, asked: NewBatch) -> OpenAiBatch:
        """Create a batch, which `open_batches` then returns.

        Raises:
            InvalidParameter: there is no such input.
            Overloaded: the owner has as many batches as it may.
            TooLarge, Unavailable: there is no room for its output.
        """
        batch = new_batch(f"batch_{new_secret()}", asked, self.clock())
        id = batch["id"]
        with self._writing():
            try:
                self._find(owner, asked.input, (INPUT,))
            except NotFound:
                raise Named("input_file_id", asked.input).refused(f"there is no such file of purpose {INPUT}") from None
            query = "SELECT count(*) FROM objects WHERE owner = ? AND kind = ? AND expires = ?"
            (number,) = self._database.execute(query, (owner, *_BATCHES, _NEVER)).fetchone()
            if number >= self._config.batches_max_open:
                raise Overloaded(f"{number} batches of this API key have not ended (option.batches_max_open)")
            self.check_room(owner, 2 * _OVERHEAD)
            given = {"input": asked.input, "lifetime": asked.lifetime, "document": dumps(batch)}
            self._insert(id=id, owner=owner, kind=_BATCHES[0], **given)
            for file in output_ids(id):
                self.path(file).touch(mode=0o600)
                self._insert(id=file, owner=owner, kind=OUTPUT)
        return batch

    def batch(self, owner: str, id: str) -> OpenAiBatch:
        """Return a batch.

        Raises:
            NotFound: the owner has none of this id.
        """
        batch: OpenAiBatch = self._find(owner, id, _BATCHES)
        return batch

    def batches(self, owner: str, page: Page) -> tuple[list[Any], bool]:
        """Return a page of an owner's batches, and whether there are more."""
        return self._list(owner, page, _BATCHES)

    def cancel(self, owner: str, id: str) -> OpenAiBatch:
        """Ask for a batch's end.

        Raises:
            NotFound: the owner has none of this id.
            Conflict: it has ended.
        """
        with self._writing():
            batch = self.batch(owner, id)
            if batch["status"] not in OPEN_STATUSES:
                raise Conflict(f"Cannot cancel a batch with status '{batch['status']}'.")
            if batch["status"] != "cancelling":
                batch["status"], batch["cancelling_at"] = "cancelling", int(self.clock())
                self._update(id, document=dumps(batch))
        return batch

    # -- for what runs the batches -------------------------------------------------------------------------------

    def open_batches(self, most: int) -> list[OpenBatch]:
        """Return the batches that have not ended, the oldest first."""
        query = "SELECT owner, document FROM objects WHERE kind = ? AND expires = ? ORDER BY number LIMIT ?"
        with self._lock:
            rows = self._database.execute(query, (*_BATCHES, _NEVER, most)).fetchall()
        return [OpenBatch(owner, loads(document)) for owner, document in rows]

    def advance(self, id: str, sizes: Sequence[int], change: Mapping[str, Any]) -> OpenAiBatch:
        """Note how far a batch has come, and return it. One that has ended stays as it is, and one cancelled stays so.

        Args:
            sizes: of its output and its error file, in bytes.
            change: fields of the batch.
        """
        with self._writing():
            batch, _, _ = self._row(id)
            if batch["status"] in OPEN_STATUSES:
                batch |= {**change, "status": "cancelling"} if batch["status"] == "cancelling" else change
                self._update(id, document=dumps(batch))
                for file, size in zip(output_ids(id), sizes, strict=True):
                    self._update(file, size=size)
        return cast(OpenAiBatch, batch)

    def end(self, id: str, status: str, errors: BatchErrors | None = None) -> None:
        """End a batch that has not ended, and show the files that it has written, unless they are empty."""
        now, empty = self.clock(), list[str]()
        with self._writing():
            batch, owner, lifetime = self._row(id)
            if batch["status"] not in OPEN_STATUSES:
                return
            batch |= {"status": status, f"{status}_at": int(now), "errors": errors}
            for file, name in zip(output_ids(id), ("output", "error"), strict=True):
                path = self.path(file)
                if path.exists() and (size := path.stat().st_size):
                    self._show(new_file(file, f"{id}_{name}.jsonl", size, now, lifetime, OUTPUT))
                    batch[f"{name}_file_id"] = file
                else:
                    empty.append(file)
            self._update(id, document=dumps(batch), expires=now + LIFETIME)
            self._database.execute(_TOO_MANY, (owner, *_BATCHES, _NEVER, _MOST_ENDED))
            self._forget(empty)
        self._unlink(empty)  # now that no one answers the batch again, and looks for them

    def _row(self, id: str) -> tuple[Any, str, int]:
        """Return a batch, its owner and the lifetime of its output; one that is gone has ended."""
        query = "SELECT document, owner, lifetime FROM objects WHERE id = ?"
        document, owner, lifetime = self._database.execute(query, (id,)).fetchone() or (b'{"status": "gone"}', "", 0)
        return loads(document), owner, lifetime

    def remove_expired(self) -> None:
        """Remove expired files and batches, except the input of an open batch; and incomplete uploads."""
        query = """
        SELECT id FROM objects AS one WHERE expires <= ? AND NOT EXISTS (
            SELECT 1 FROM objects WHERE input = one.id AND expires = ?
        )
        """
        with self._writing():
            found = self._database.execute(query, (self.clock(), _NEVER)).fetchall()
            self._remove([id for (id,) in found])

    def check_room(self, owner: str, size: int = 0) -> None:
        """Raise TooLarge or Unavailable where there is no room for so many bytes more."""
        query = f"SELECT total(size + {_OVERHEAD}) FROM objects"
        with self._lock:
            (held,) = self._database.execute(f"{query} WHERE owner = ?", (owner,)).fetchone()
            (total,) = self._database.execute(query).fetchone()
        if held + size > self._config.batches_max_bytes:
            raise TooLarge(
                f"the files of this API key have {held:.0f} bytes, of {self._config.batches_max_bytes} that they may "
                "have (option.batches_max_bytes): delete some"
            )
        if total + size > self._config.batches_total_bytes:
            raise Unavailable(f"all files have {total:.0f} bytes (option.batches_total_bytes)")

    # -- the database --------------------------------------------------------------------------------------------

    def _find(self, owner: str, id: str, kinds: Sequence[str]) -> Any:
        """Return what an owner has of these kinds.

        Raises:
            NotFound: there is no such.
        """
        query = f"SELECT document FROM objects WHERE {_shown(kinds)} AND id = ?"
        with self._lock:
            found = self._database.execute(query, (owner, self.clock(), *kinds, id)).fetchone()
        if found is None:
            missing = no_batch if kinds == _BATCHES else no_file
            raise missing(id)
        return loads(found[0])

    def _list(self, owner: str, page: Page, kinds: Sequence[str]) -> tuple[list[Any], bool]:
        order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
        query, values = f"SELECT document FROM objects WHERE {_shown(kinds)}", [owner, self.clock(), *kinds]
        if page.after:
            self._find(owner, page.after, kinds)
            query += f" AND number {beyond} (SELECT number FROM objects WHERE id = ?)"
            values.append(page.after)
        query += f" ORDER BY number {order} LIMIT ?"
        with self._lock:
            rows = self._database.execute(query, (*values, page.limit + 1)).fetchall()
        return [loads(document) for (document,) in rows[: page.limit]], len(rows) > page.limit

    def _insert(self, **values: Any) -> None:
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        self._database.execute(f"INSERT INTO objects ({names}) VALUES ({marks})", [*values.values()])

    def _update(self, id: str, **values: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self._database.execute(f"UPDATE objects SET {names} WHERE id = ?", [*values.values(), id])

    def _show(self, file: OpenAiFile) -> None:
        self._update(file["id"], document=dumps(file), size=file["bytes"], expires=file["expires_at"])

    def _remove(self, ids: Sequence[str]) -> None:
        self._forget(ids)
        self._unlink(ids)  # before it is sure that they are forgotten: what is not is removed when it expires

    def _forget(self, ids: Sequence[str]) -> None:
        self._database.executemany("DELETE FROM objects WHERE id = ?", [(id,) for id in ids])

    def _unlink(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.path(id).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Write everything in the block, or nothing. No other process changes what it reads."""
        with self._lock, self._database:  # which commits, or rolls back
            self._database.execute("BEGIN IMMEDIATE")
            yield


def _shown(kinds: Sequence[str]) -> str:
    """Return the condition for what an owner finds of these kinds."""
    return f"owner = ? AND document IS NOT NULL AND expires > ? AND kind IN ({', '.join('?' * len(kinds))})"


def output_ids(batch: str) -> tuple[str, str]:
    """Return the ids of the files that a batch writes: answers, and errors."""
    secret = batch.removeprefix("batch_")
    return f"file-{secret}-output", f"file-{secret}-errors"


def configured_batches(config: Config) -> BatchStore | None:
    """Return the store that the options ask for; None if there are no batches.

    Raises:
        ConfigError: its directory cannot be used.
    """
    place = config.batches_store
    if place == "off":
        return None
    try:
        return BatchStore(Path(place).absolute(), config)
    except (OSError, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or error
        told = f"no files can be kept there: {why}; must be off or a directory"
        raise ConfigError(config.problem("option.batches_store", place, told)) from None
