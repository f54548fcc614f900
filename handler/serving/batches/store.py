"""Stores files and batches in a directory, which several servers may share (`option.batches_store`).

The metadata is stored in SQLite. The contents of each file are stored next to the database under the id of the file. A
file or batch belongs to the API key of the request that created it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from handler.config.config import Config
from handler.core.errors import ConfigError, Conflict, NotFound, Overloaded, TooLarge, Unavailable
from handler.core.framing import dumps
from handler.core.loop import run_in_daemon_thread
from handler.core.values import new_secret
from handler.protocols.kernel.readers import NamedValue
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
from handler.serving.database import check_directory, is_locked, load_json, open_database, owned_by

log = logging.getLogger("handler")

T = TypeVar("T")

OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")


class BatchKind(NamedTuple):
    """The batches of an API. Batches of different APIs share the limits, and are not visible to each other.

    Attributes:
        batches: value of the column `kind` for batches.
        input: that for input files.
        output: that for output files.
        prefix: what the ids of batches begin with.
    """

    batches: str
    input: str
    output: str
    prefix: str


OPENAI = BatchKind("batches", INPUT, OUTPUT, "batch_")
ANTHROPIC = BatchKind("message_batches", "message_batch", "message_batch_output", "msgbatch_")
_KINDS = {kind.batches: kind for kind in (OPENAI, ANTHROPIC)}
_FILES = (INPUT, OUTPUT)  # the visible files
_FILE = "batches.sqlite3"
_VERSION = 1  # version of the table
_BUSY_SECONDS = 5.0  # maximum seconds to wait while another process locks the database
_OVERHEAD = 4096  # approximate bytes of a file or batch on disk besides its contents
_MOST_ENDED = 1000  # maximum number of ended batches of an owner; older batches are deleted
_FORGOTTEN = 3600.0  # seconds after which an incomplete upload is removed
_NEVER = 1e18  # value of the column `expires`

_TABLE = f"""
CREATE TABLE objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, kind TEXT NOT NULL,
    document BLOB, size INTEGER NOT NULL DEFAULT 0, expires REAL NOT NULL DEFAULT {_NEVER}, input TEXT, lifetime INTEGER
);
CREATE INDEX objects_by_owner ON objects (owner, kind, number, size);
CREATE INDEX objects_by_expiry ON objects (expires);
"""
"""The table of files and batches. The `kind` of a file is its purpose. A file that is still being written has no
document. An open batch does not expire. Its row contains the id of the input file, and the lifetime of the output files
in seconds after the end of the batch.
"""

_OF_KINDS = f"kind IN ({', '.join('?' * len(_KINDS))})"
"""SQL condition that selects batches, with the keys of `_KINDS` as parameters."""

_GONE = b'{"id": "", "status": "gone"}'  # document of a batch that is missing

_TOO_MANY = """
DELETE FROM objects WHERE id IN (
    SELECT id FROM objects WHERE owner = ? AND kind = ? AND expires < ? ORDER BY number DESC LIMIT -1 OFFSET ?
)
"""


class OpenBatch(NamedTuple):
    """A batch that has not ended, with its owner."""

    owner: str
    batch: OpenAiBatch


class BatchStore:
    """Stores the files and batches of all owners. Each owner can access only its own files and batches. All methods
    except `call` may block. They are thread-safe.

    Args:
        directory: directory of the database and the files.
        config: configuration, which sets the limits of the store.
        clock: function that returns the time, in seconds since 1970.

    Attributes:
        created: event that is set when a new batch may be ready to run.

    Raises:
        OSError: the directory or the database file cannot be created.
        sqlite3.Error: the database cannot be used.
    """

    def __init__(self, directory: Path, config: Config, clock: Callable[[], float] = time.time) -> None:
        self._config, self.clock = config, clock
        self.created = asyncio.Event()
        self._directory = directory
        self._lock = threading.RLock()
        self._database = open_database(directory / _FILE, _VERSION, _TABLE, wait=_BUSY_SECONDS)

    async def call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the store on a thread.

        Raises:
            ServingError: raised by the method itself.
            Unavailable: the files or the database cannot be read or written.
        """
        try:
            return await run_in_daemon_thread(method, *arguments)
        except (OSError, sqlite3.Error) as error:
            log.error("the files and batches cannot be read or written: %s", error)
            raise Unavailable("the files and batches cannot be read or written", detail=str(error)) from None

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def path(self, id: str) -> Path:
        """Return the path of the contents of a file."""
        return self._directory / id

    # -- files ---------------------------------------------------------------------------------------------------

    def reserve(self, owner: str, size: int, kind: BatchKind = OPENAI) -> str:
        """Reserve room for a new input file of at most `size` bytes, and return its id.

        Raises:
            TooLarge: the owner has no room for the file.
            Unavailable: the store has no room for the file.
        """
        id = f"file-{new_secret()}"
        with self._writing():
            self.check_room(owner, size)
            self._insert(id=id, owner=owner, kind=kind.input, size=size, expires=self.clock() + _FORGOTTEN)
        return id

    def keep(self, id: str, new: NewFile) -> OpenAiFile:
        """Make a file visible to its owner once its contents have been written."""
        file = new_file(id, new.name, self.path(id).stat().st_size, self.clock(), new.lifetime)
        with self._writing():
            self._show(file)
        return file

    def drop(self, id: str) -> None:
        """Remove a file that could not be written."""
        with self._writing():
            self._remove([id])

    def file(self, owner: str, id: str) -> OpenAiFile:
        """Return the description of a file.

        Raises:
            NotFound: the owner has no file with this id.
        """
        file: OpenAiFile = self._find(owner, id, _FILES)
        return file

    def open(self, owner: str, id: str, kinds: Sequence[str] = _FILES) -> tuple[OpenAiFile, BinaryIO]:
        """Return the description of a file and the file opened for reading. Its bytes count as used until it is closed.

        Raises:
            NotFound: the owner has no file with this id.
        """
        file: OpenAiFile = self._find(owner, id, kinds)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as opened:
            contents = opened.enter_context(self.path(id).open("rb"))
            fcntl.flock(contents, fcntl.LOCK_SH)  # for `is_locked`
            if os.fstat(contents.fileno()).st_nlink:
                opened.pop_all()
                return file, contents
        raise no_file(id)  # the file was deleted just now

    def files(self, owner: str, page: Page) -> tuple[list[Any], bool]:
        """Return a page of an owner's files, and whether there are more files."""
        return self._list(owner, page, [kind for kind in _FILES if page.purpose in ("", kind)])

    def delete(self, owner: str, id: str) -> DeletedFile:
        """Delete a file. It continues to use space while another request reads it.

        Raises:
            NotFound: the owner has no file with this id.
            Conflict: the file is the input of an open batch.
        """
        with self._writing():
            self._find(owner, id, _FILES)
            query = "SELECT id FROM objects WHERE input = ? AND expires = ?"
            if (user := self._database.execute(query, (id, _NEVER)).fetchone()) is not None:
                raise Conflict(f"{id} is the input of {user[0]}, which has not ended; cancel it first")
            self._remove([id])
        return deleted(id)

    # -- batches -------------------------------------------------------------------------------------------------

    def create(self, owner: str, new: NewBatch, kind: BatchKind = OPENAI) -> OpenAiBatch:
        """Create a batch, so that `open_batches` returns it.

        Raises:
            InvalidParameter: the input file does not exist.
            Overloaded: the owner has too many open batches.
            TooLarge: the owner has no room for the output of the batch.
            Unavailable: the store has no room for the output of the batch.
        """
        batch = new_batch(f"{kind.prefix}{new_secret()}", new, self.clock())
        id = batch["id"]
        with self._writing():
            try:
                self._find(owner, new.input, (kind.input,))
            except NotFound:
                raise NamedValue("input_file_id", new.input).refused(
                    f"there is no file with this id and purpose {INPUT}"
                ) from None
            query = f"SELECT count(*) FROM objects WHERE owner = ? AND {_OF_KINDS} AND expires = ?"
            (number,) = self._database.execute(query, (owner, *_KINDS, _NEVER)).fetchone()
            if number >= self._config.batches_max_open:
                raise Overloaded(f"{number} batches of this API key have not ended (option.batches_max_open)")
            self.check_room(owner, 2 * _OVERHEAD)
            columns = {"input": new.input, "lifetime": new.lifetime, "document": dumps(batch)}
            self._insert(id=id, owner=owner, kind=kind.batches, **columns)
            for file in output_ids(id):
                self.path(file).touch(mode=0o600)
                self._insert(id=file, owner=owner, kind=kind.output)
        return batch

    def batch(self, owner: str, id: str, kind: BatchKind = OPENAI) -> OpenAiBatch:
        """Return a batch.

        Raises:
            NotFound: the owner has no batch with this id.
        """
        batch: OpenAiBatch = self._find(owner, id, (kind.batches,))
        return batch

    def batches(self, owner: str, page: Page, kind: BatchKind = OPENAI) -> tuple[list[Any], bool]:
        """Return a page of an owner's batches, and whether there are more batches."""
        return self._list(owner, page, (kind.batches,))

    def cancel(self, owner: str, id: str, kind: BatchKind = OPENAI) -> OpenAiBatch:
        """Mark a batch for cancellation. The server that runs it then ends it.

        Raises:
            NotFound: the owner has no batch with this id.
            Conflict: the batch has already ended.
        """
        with self._writing():
            batch = self.batch(owner, id, kind)
            if batch["status"] not in OPEN_STATUSES:
                raise Conflict(f"Cannot cancel a batch with status '{batch['status']}'.")
            if batch["status"] != "cancelling":
                batch["status"], batch["cancelling_at"] = "cancelling", int(self.clock())
                self._update(id, document=dumps(batch))
        return batch

    def delete_batch(self, owner: str, id: str, kind: BatchKind) -> None:
        """Delete a batch that has ended, its input and its output.

        Raises:
            NotFound: the owner has no batch with this id.
            Conflict: the batch has not ended.
        """
        with self._writing():
            batch = self.batch(owner, id, kind)
            if batch["status"] in OPEN_STATUSES:
                raise Conflict(f"{id} has not ended; cancel it first")
            self._forget([id])
            self._remove([batch["input_file_id"], *output_ids(id)])

    # -- calls of the runner -------------------------------------------------------------------------------------

    def open_batches(self, most: int) -> list[OpenBatch]:
        """Return up to `most` open batches: first the oldest batch of each owner, then the second-oldest, and so on."""
        turn = "row_number() OVER (PARTITION BY owner ORDER BY number)"
        where = f"{_OF_KINDS} AND expires = ?"
        query = f"SELECT owner, document FROM objects WHERE {where} ORDER BY {turn}, number LIMIT ?"
        with self._lock:
            rows = self._database.execute(query, (*_KINDS, _NEVER, most)).fetchall()
        return [OpenBatch(owner, batch) for owner, document in rows if (batch := _readable(document)) is not None]

    def advance(self, id: str, sizes: Sequence[int], change: Mapping[str, Any]) -> OpenAiBatch:
        """Save the progress of a batch, and return the batch. A batch that has ended does not change. A batch that is
        being cancelled retains that status.

        Args:
            sizes: sizes of the output file and the error file, in bytes.
            change: fields of the batch to change.
        """
        with self._writing():
            batch, *_ = self._row(id)
            if batch["status"] in OPEN_STATUSES:
                batch |= {**change, "status": "cancelling"} if batch["status"] == "cancelling" else change
                self._update(id, document=dumps(batch))
                for file, size in zip(output_ids(id), sizes, strict=True):
                    self._update(file, size=size)
        return cast(OpenAiBatch, batch)

    def end(self, id: str, status: str, errors: BatchErrors | None = None) -> None:
        """End an open batch, and make its output files visible unless they are empty."""
        now, empty = self.clock(), list[str]()
        with self._writing():
            batch, owner, kind, lifetime = self._row(id)
            if batch["status"] not in OPEN_STATUSES:
                return
            batch |= {"status": status, f"{status}_at": int(now), "errors": errors}
            for file, name in zip(output_ids(id), ("output", "error"), strict=True):
                path = self.path(file)
                if path.exists() and (size := path.stat().st_size):
                    self._show(new_file(file, f"{id}_{name}.jsonl", size, now, lifetime, kind.output))
                    batch[f"{name}_file_id"] = file
                else:
                    empty.append(file)
            self._update(id, document=dumps(batch), expires=now + LIFETIME)
            self._database.execute(_TOO_MANY, (owner, kind.batches, _NEVER, _MOST_ENDED))
            self._forget(empty)
        self._unlink(empty)  # only now, because no server can run the batch and open the files any more

    def _row(self, id: str) -> tuple[Any, str, BatchKind, int]:
        """Return a batch, its owner, its kind and the lifetime of its output files.

        A missing batch is treated as ended.
        """
        query = "SELECT document, owner, kind, lifetime FROM objects WHERE id = ?"
        row = self._database.execute(query, (id,)).fetchone()
        document, owner, kind, lifetime = row or (_GONE, "", OPENAI.batches, 0)
        return _document(document), owner, _KINDS[kind], lifetime

    def remove_expired(self) -> None:
        """Remove expired files and batches, and incomplete uploads, but not the input of an open batch."""
        query = """
        SELECT id FROM objects AS one WHERE expires <= ? AND NOT EXISTS (
            SELECT 1 FROM objects WHERE input = one.id AND expires = ?
        )
        """
        with self._writing():
            rows = self._database.execute(query, (self.clock(), _NEVER)).fetchall()
            self._remove([id for (id,) in rows])

    def check_room(self, owner: str, size: int = 0) -> None:
        """Check that there is room for `size` more bytes.

        Raises:
            TooLarge: the owner has too little room left.
            Unavailable: the store has too little room left.
        """
        query = f"SELECT total(size + {_OVERHEAD}) FROM objects"
        with self._lock:
            (held,) = self._database.execute(f"{query} WHERE owner = ?", (owner,)).fetchone()
            (total,) = self._database.execute(query).fetchone()
        if held + size > self._config.batches_max_bytes:
            raise TooLarge(
                f"the files of this API key have {held:.0f} bytes, and the limit is {self._config.batches_max_bytes} "
                "(option.batches_max_bytes): delete some files"
            )
        if total + size > self._config.batches_total_bytes:
            raise Unavailable(
                f"the files of all API keys have {total:.0f} bytes, which leaves too little room "
                "(option.batches_total_bytes)"
            )

    # -- the database --------------------------------------------------------------------------------------------

    def _find(self, owner: str, id: str, kinds: Sequence[str]) -> Any:
        """Return an owner's file or batch.

        Args:
            kinds: allowed values of the column `kind`.

        Raises:
            NotFound: the owner has no file or batch of these kinds with this id.
        """
        query = f"SELECT document FROM objects WHERE {_shown(owner, kinds)} AND id = ?"
        with self._lock:
            row = self._database.execute(query, (owner, self.clock(), *kinds, id)).fetchone()
        if row is None:
            missing = no_batch if kinds[0] in _KINDS else no_file
            raise missing(id)
        return _document(row[0])

    def _list(self, owner: str, page: Page, kinds: Sequence[str]) -> tuple[list[Any], bool]:
        order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
        query, values = f"SELECT document FROM objects WHERE {_shown(owner, kinds)}", [owner, self.clock(), *kinds]
        if page.after:
            self._find(owner, page.after, kinds)
            query += f" AND number {beyond} (SELECT number FROM objects WHERE id = ?)"
            values.append(page.after)
        query += f" ORDER BY number {order} LIMIT ?"
        with self._lock:
            rows = self._database.execute(query, (*values, page.limit + 1)).fetchall()
        return [_document(document) for (document,) in rows[: page.limit]], len(rows) > page.limit

    def _insert(self, **values: Any) -> None:
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        self._database.execute(f"INSERT INTO objects ({names}) VALUES ({marks})", [*values.values()])

    def _update(self, id: str, **values: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self._database.execute(f"UPDATE objects SET {names} WHERE id = ?", [*values.values(), id])

    def _show(self, file: OpenAiFile) -> None:
        self._update(file["id"], document=dumps(file), size=file["bytes"], expires=file["expires_at"])

    def _remove(self, ids: Sequence[str]) -> None:
        """Remove files. A file that is being read is only hidden, and uses space until `remove_expired` removes it."""
        busy = [id for id in ids if is_locked(self.path(id))]
        for id in busy:
            self._update(id, document=None, expires=self.clock())
        ids = [id for id in ids if id not in busy]
        self._forget(ids)
        self._unlink(ids)  # before the transaction is committed; if it fails, the rows are removed when they expire

    def _forget(self, ids: Sequence[str]) -> None:
        self._database.executemany("DELETE FROM objects WHERE id = ?", [(id,) for id in ids])

    def _unlink(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.path(id).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Run the block in a write transaction, which excludes other writers and is rolled back after an exception."""
        with self._lock, self._database:  # this commits or rolls back
            self._database.execute("BEGIN IMMEDIATE")
            yield


def _document(data: bytes) -> Any:
    """Return the document of a row.

    Raises:
        sqlite3.DatabaseError: it is not a JSON object with an id, because another program or the disk has changed it.
    """
    try:
        document = load_json(data)
        if not isinstance(document["id"], str):
            raise TypeError("its id is not a string")
    except (TypeError, LookupError) as error:
        raise sqlite3.DatabaseError(f"a document is damaged: {error}") from None
    return document


def _readable(data: bytes) -> Any:
    """Return the document of a row, or None if it is damaged, so that it does not stop other batches."""
    try:
        return _document(data)
    except sqlite3.DatabaseError as error:
        log.error("a batch cannot be run: %s", error)
        return None


def _shown(owner: str, kinds: Sequence[str]) -> str:
    """Return the SQL condition that selects an owner's visible objects of these kinds. Its parameters are the owner,
    the time and the kinds.
    """
    of_kinds = f"kind IN ({', '.join('?' * len(kinds))})"
    return f"{owned_by(owner)} AND document IS NOT NULL AND expires > ? AND {of_kinds}"


def output_ids(batch: str) -> tuple[str, str]:
    """Return the ids of the output file and the error file of a batch."""
    secret = batch.removeprefix(OPENAI.prefix)
    return f"file-{secret}-output", f"file-{secret}-errors"


def configured_batches(config: Config) -> BatchStore | None:
    """Return the store as the options configure it, or None if batches are off.

    Raises:
        ConfigError: the directory cannot be used.
    """
    if config.batches_store == "off":
        return None
    with _refusing(config):
        return BatchStore(Path(config.batches_store).absolute(), config)


def check_batches(config: Config) -> None:
    """Check the directory of the store, without writing to it.

    Raises:
        ConfigError: the directory cannot be used.
    """
    if config.batches_store != "off":
        with _refusing(config):
            check_directory(Path(config.batches_store).absolute())


@contextlib.contextmanager
def _refusing(config: Config) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"files cannot be stored in this directory: {reason}; must be off or a directory"
        raise ConfigError(config.problem("option.batches_store", config.batches_store, message)) from None
