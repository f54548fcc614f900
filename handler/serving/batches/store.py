"""Files and batches in a directory (`option.batches_store`), which several servers may share.

SQLite holds what is known of them, and each file's contents lie beside it under its id. Each belongs to the API key of
the request that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from handler.config.config import Config
from handler.core.errors import ConfigError, Conflict, Overloaded, Problem, ServingError, TooLarge, Unavailable
from handler.core.framing import dumps, loads
from handler.core.loop import run_in_daemon_thread
from handler.core.media import new_secret
from handler.protocols.kernel.readers import Named
from handler.protocols.openai.api import BatchErrors, OpenAiBatch, OpenAiFile
from handler.protocols.openai.batches import (
    INPUT,
    LIFETIME,
    OUTPUT,
    NewBatch,
    NewFile,
    Page,
    new_batch,
    new_file,
    no_batch,
    no_file,
)

log = logging.getLogger("handler")

T = TypeVar("T")

OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")

_BATCH = "batches"
_FILE = "batches.sqlite3"
_VERSION = 1  # of the table
_BUSY_SECONDS = 5.0  # that another process may hold the database
_OVERHEAD = 4096  # bytes that each file and batch takes beside its contents, about
_MOST_ENDED = 1000  # batches of an owner; of more, the oldest are forgotten
_FORGOTTEN = 3600.0  # seconds after which an upload that nobody goes on with is removed

_TABLE = """
CREATE TABLE objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, kind TEXT NOT NULL,
    shown INTEGER NOT NULL, size INTEGER NOT NULL, expires REAL NOT NULL, input TEXT NOT NULL,
    lifetime INTEGER NOT NULL, document BLOB NOT NULL
);
CREATE INDEX objects_by_owner ON objects (owner, kind, shown, number, size);
CREATE INDEX objects_by_expiry ON objects (expires);
"""
"""Files are of a kind by their purpose; those that are still written are not shown. A batch names its input.

What is open has no expiry, and of an output's row `lifetime` counts from the batch's end.
"""

_NEVER = 1e18

_TOO_MANY = """
DELETE FROM objects WHERE id IN (
    SELECT id FROM objects WHERE owner = ? AND kind = ? AND expires < ? ORDER BY number DESC LIMIT -1 OFFSET ?
)
"""


class Limits(NamedTuple):
    """How much may be stored; all but the last two are one owner's."""

    open: int
    bytes: int
    total_bytes: int
    file_bytes: int


class OpenBatch(NamedTuple):
    """A batch that has not ended."""

    owner: str
    batch: OpenAiBatch


class BatchStore:
    """Files and batches of all owners; each owner finds its own. Every call but `call` may block, and is thread-safe.

    Args:
        clock: returns the seconds since 1970.

    Attributes:
        created: set when there may be another batch to answer.

    Raises:
        OSError, sqlite3.Error: the directory cannot be used.
    """

    def __init__(self, directory: Path, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self.limits, self.clock = limits, clock
        self.created = asyncio.Event()
        self._directory = directory
        self._lock = threading.Lock()
        self._database = _open(directory)

    async def call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method on a thread.

        Raises:
            ServingError: the method's own.
            Unavailable: the disk fails.
        """
        try:
            return await run_in_daemon_thread(lambda: method(*arguments))
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
        with self._writing() as database:
            self._check_room(owner, size)
            _insert(database, id, owner, INPUT, shown=False, size=size, expires=self.clock() + _FORGOTTEN)
        return id

    def keep(self, id: str, new: NewFile) -> OpenAiFile:
        """Show a file that has been written."""
        size, now = self.path(id).stat().st_size, self.clock()
        file = new_file(id, new.name, size, now, new.lifetime)
        with self._writing() as database:
            _show(database, file)
        return file

    def drop(self, id: str) -> None:
        """Remove a file that could not be written."""
        with self._writing() as database:
            self._remove(database, [id])

    def file(self, owner: str, id: str) -> OpenAiFile:
        """Return a file.

        Raises:
            NotFound: the owner has none of this id.
        """
        with self._lock:
            found = self._find(owner, id, INPUT, OUTPUT)
        if found is None:
            raise no_file(id)
        return cast(OpenAiFile, found)

    def files(self, owner: str, page: Page) -> tuple[list[Any], bool]:
        """Return a page of an owner's files, and whether there are more."""
        kinds = [kind for kind in (INPUT, OUTPUT) if page.purpose in ("", kind)]
        return self._list(owner, page, kinds, no_file)

    def delete(self, owner: str, id: str) -> None:
        """Delete a file.

        Raises:
            NotFound: the owner has none of this id.
            Conflict: a batch still reads it.
        """
        with self._writing() as database:
            if self._find(owner, id, INPUT, OUTPUT) is None:
                raise no_file(id)
            user = database.execute("SELECT id FROM objects WHERE input = ? AND expires = ?", (id, _NEVER)).fetchone()
            if user is not None:
                raise Conflict(f"{id} is the input of {user[0]}, which has not ended; cancel it first")
            self._remove(database, [id])

    # -- batches -------------------------------------------------------------------------------------------------

    def create(self, owner: str, asked: NewBatch) -> OpenAiBatch:
        """Create a batch, which `open_batches` then returns.

        Raises:
            InvalidParameter: there is no such input.
            Overloaded: the owner has as many batches as it may.
            TooLarge, Unavailable: there is no room for its output.
        """
        secret, now = new_secret(), self.clock()
        batch = new_batch(f"batch_{secret}", asked, now)
        with self._writing() as database:
            if self._find(owner, asked.input, INPUT) is None:
                raise Named("input_file_id", asked.input).refused(f"there is no such file of purpose {INPUT}")
            query = "SELECT count(*) FROM objects WHERE owner = ? AND kind = ? AND expires = ?"
            (number,) = database.execute(query, (owner, _BATCH, _NEVER)).fetchone()
            if number >= self.limits.open:
                raise Overloaded(f"{number} batches of this API key have not ended (option.batches_max_open)")
            self._check_room(owner, 2 * _OVERHEAD)
            _insert(database, batch["id"], owner, _BATCH, shown=True, document=batch, input=asked.input)
            for id in output_ids(batch["id"]):
                self.path(id).touch(mode=0o600)
                _insert(database, id, owner, OUTPUT, shown=False, lifetime=asked.lifetime)
        return batch

    def batch(self, owner: str, id: str) -> OpenAiBatch:
        """Return a batch.

        Raises:
            NotFound: the owner has none of this id.
        """
        with self._lock:
            found = self._find(owner, id, _BATCH)
        if found is None:
            raise no_batch(id)
        return cast(OpenAiBatch, found)

    def batches(self, owner: str, page: Page) -> tuple[list[Any], bool]:
        """Return a page of an owner's batches, and whether there are more."""
        return self._list(owner, page, [_BATCH], no_batch)

    def cancel(self, owner: str, id: str) -> OpenAiBatch:
        """Ask for a batch's end.

        Raises:
            NotFound: the owner has none of this id.
            Conflict: it has ended.
        """
        with self._writing() as database:
            batch = self._find(owner, id, _BATCH)
            if batch is None:
                raise no_batch(id)
            if batch["status"] not in OPEN_STATUSES:
                raise Conflict(f"Cannot cancel a batch with status '{batch['status']}'.")
            if batch["status"] != "cancelling":
                batch |= {"status": "cancelling", "cancelling_at": int(self.clock())}
                _write(database, batch)
        return cast(OpenAiBatch, batch)

    # -- for what runs the batches -------------------------------------------------------------------------------

    def open_batches(self, most: int) -> list[OpenBatch]:
        """Return the batches that have not ended, the oldest first."""
        query = "SELECT owner, document FROM objects WHERE kind = ? AND expires = ? ORDER BY number LIMIT ?"
        with self._lock:
            rows = self._database.execute(query, (_BATCH, _NEVER, most)).fetchall()
        return [OpenBatch(owner, loads(document)) for owner, document in rows]

    def advance(self, id: str, sizes: Sequence[int], change: Mapping[str, Any]) -> OpenAiBatch:
        """Note how far a batch has come, and return it. One that has ended stays as it is, and one cancelled stays so.

        Args:
            sizes: of its output and its error file, in bytes.
            change: fields of the batch.
        """
        with self._writing() as database:
            batch = self._open_batch(id)
            if batch["status"] not in OPEN_STATUSES:
                return cast(OpenAiBatch, batch)
            if batch["status"] == "cancelling":
                change = {name: value for name, value in change.items() if name != "status"}
            batch |= change
            _write(database, batch)
            for file, size in zip(output_ids(id), sizes, strict=True):
                database.execute("UPDATE objects SET size = ? WHERE id = ?", (size, file))
        return cast(OpenAiBatch, batch)

    def end(self, id: str, status: str, errors: BatchErrors | None = None) -> None:
        """End a batch that has not ended, and show the files that it has written, unless they are empty."""
        now, empty = self.clock(), list[str]()
        with self._writing() as database:
            batch = self._open_batch(id)
            if batch["status"] not in OPEN_STATUSES:
                return
            batch |= {"status": status, f"{status}_at": int(now), "errors": errors}
            for file, name in zip(output_ids(id), ("output", "error"), strict=True):
                path = self.path(file)
                size = path.stat().st_size if path.exists() else 0
                if not size:
                    empty.append(file)
                    continue
                (lifetime,) = database.execute("SELECT lifetime FROM objects WHERE id = ?", (file,)).fetchone()
                shown = new_file(file, f"{id}_{name}.jsonl", size, now, lifetime, OUTPUT)
                _show(database, shown)
                batch[f"{name}_file_id"] = file
            _write(database, batch)
            database.execute("UPDATE objects SET expires = ? WHERE id = ?", (now + LIFETIME, id))
            (owner,) = database.execute("SELECT owner FROM objects WHERE id = ?", (id,)).fetchone()
            database.execute(_TOO_MANY, (owner, _BATCH, _NEVER, _MOST_ENDED))
            _forget(database, empty)
        self._unlink(empty)  # now that nobody answers the batch again, and looks for them

    def _open_batch(self, id: str) -> dict[str, Any]:
        found = self._database.execute("SELECT document FROM objects WHERE id = ?", (id,)).fetchone()
        return {"status": "gone"} if found is None else cast(dict[str, Any], loads(found[0]))

    def remove_expired(self) -> None:
        """Remove what has expired, but not the input of an open batch; and uploads that broke off."""
        query = """
        SELECT id FROM objects AS one WHERE expires <= ? AND NOT EXISTS (
            SELECT 1 FROM objects WHERE input = one.id AND expires = ?
        )
        """
        with self._writing() as database:
            found = database.execute(query, (self.clock(), _NEVER)).fetchall()
            self._remove(database, [id for (id,) in found])

    # -- the database --------------------------------------------------------------------------------------------

    def _find(self, owner: str, id: str, *kinds: str) -> dict[str, Any] | None:
        marks = ", ".join("?" * len(kinds))
        query = (
            f"SELECT document FROM objects WHERE id = ? AND owner = ? AND shown AND expires > ? AND kind IN ({marks})"
        )
        found = self._database.execute(query, (id, owner, self.clock(), *kinds)).fetchone()
        return None if found is None else loads(found[0])

    def _list(
        self, owner: str, page: Page, kinds: Sequence[str], missing: Callable[[str], ServingError]
    ) -> tuple[list[Any], bool]:
        order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
        marks = ", ".join("?" * len(kinds))
        query = f"SELECT document FROM objects WHERE owner = ? AND shown AND expires > ? AND kind IN ({marks})"
        values = [owner, self.clock(), *kinds]
        with self._lock:
            if page.after:
                if self._find(owner, page.after, *kinds) is None:
                    raise missing(page.after)
                query += f" AND number {beyond} (SELECT number FROM objects WHERE id = ?)"
                values.append(page.after)
            query += f" ORDER BY number {order} LIMIT ?"
            rows = self._database.execute(query, (*values, page.limit + 1)).fetchall()
        return [loads(document) for (document,) in rows[: page.limit]], len(rows) > page.limit

    def check_output(self, owner: str) -> None:
        """Raise TooLarge or Unavailable where there is no room for more output."""
        with self._lock:
            self._check_room(owner, 0)

    def _check_room(self, owner: str, size: int) -> None:
        query = f"SELECT total(size + {_OVERHEAD}) FROM objects"
        (held,) = self._database.execute(f"{query} WHERE owner = ?", (owner,)).fetchone()
        (total,) = self._database.execute(query).fetchone()
        if held + size > self.limits.bytes:
            raise TooLarge(
                f"the files of this API key have {held:.0f} bytes, of {self.limits.bytes} that they may have "
                "(option.batches_max_bytes): delete some"
            )
        if total + size > self.limits.total_bytes:
            raise Unavailable(f"all files have {total:.0f} bytes (option.batches_total_bytes)")

    def _remove(self, database: sqlite3.Connection, ids: Sequence[str]) -> None:
        _forget(database, ids)
        self._unlink(ids)  # before it is sure that they are forgotten: what is not is removed when it expires

    def _unlink(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.path(id).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Write all that the block writes, or nothing. Nobody else changes what it reads."""
        with self._lock, self._database:  # which commits, or rolls back
            self._database.execute("BEGIN IMMEDIATE")
            yield self._database


def output_ids(batch: str) -> tuple[str, str]:
    """Return the ids of the files that a batch writes: answers, and errors."""
    secret = batch.removeprefix("batch_")
    return f"file-{secret}-output", f"file-{secret}-errors"


def _insert(
    database: sqlite3.Connection,
    id: str,
    owner: str,
    kind: str,
    *,
    shown: bool,
    size: int = 0,
    expires: float = _NEVER,
    input: str = "",
    lifetime: int = 0,
    document: Any = None,
) -> None:
    row = (id, owner, kind, shown, size, expires, input, lifetime, dumps(document))
    columns = "id, owner, kind, shown, size, expires, input, lifetime, document"
    database.execute(f"INSERT INTO objects ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def _forget(database: sqlite3.Connection, ids: Sequence[str]) -> None:
    database.executemany("DELETE FROM objects WHERE id = ?", [(id,) for id in ids])


def _show(database: sqlite3.Connection, file: OpenAiFile) -> None:
    values = (file["bytes"], file["expires_at"], dumps(file), file["id"])
    database.execute("UPDATE objects SET shown = 1, size = ?, expires = ?, document = ? WHERE id = ?", values)


def _write(database: sqlite3.Connection, batch: Mapping[str, Any]) -> None:
    database.execute("UPDATE objects SET document = ? WHERE id = ?", (dumps(batch), batch["id"]))


def _open(directory: Path) -> sqlite3.Connection:
    """Open the database, which nobody else of the machine may read."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / _FILE
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        database.execute("BEGIN IMMEDIATE")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"its table has version {version}; this release has {_VERSION}")
        if not version:
            for statement in filter(str.strip, _TABLE.split(";")):
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {_VERSION}")
        database.execute("COMMIT")
    except sqlite3.Error:
        database.close()
        raise
    return database


def configured_batches(config: Config) -> BatchStore | None:
    """Return the store that the options ask for; None if there are no batches.

    Raises:
        ConfigError: its directory cannot be used.
    """
    place = config.batches_store
    if place == "off":
        return None
    limits = Limits(
        config.batches_max_open,
        config.batches_max_bytes,
        config.batches_total_bytes,
        config.batches_max_file_bytes,
    )
    try:
        return BatchStore(Path(place).absolute(), limits)
    except (OSError, sqlite3.Error) as error:
        key, why = "option.batches_store", getattr(error, "strerror", None) or error
        told = f"{key}={place}: no files can be kept there: {why}; must be off or a directory"
        raise ConfigError(Problem(config.where(key), key, told)) from None
