"""Opens SQLite databases for data that later requests need, and the lock files of servers in the same directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from handler.core.framing import loads
from handler.core.owners import names_of


def check_directory(directory: Path) -> None:
    """Check that files can be written to a directory, or that it can be created. Nothing remains there.

    Raises:
        OSError: files cannot be written.
    """
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OSError(error.errno, f"{existing} is not a writable directory") from None


def open_database(path: Path | None, version: int, tables: str, always: str = "", *, wait: float) -> sqlite3.Connection:
    """Open a database, either in a file that other users cannot read or in memory.

    Args:
        path: file of the database, or None for memory.
        version: version of the tables.
        tables: statements that create the tables of a new database.
        always: statements to run each time the database is opened. They must fail on a database of another program.
        wait: maximum number of seconds to wait while another process holds a lock on the file.

    Raises:
        OSError: the file cannot be created or opened.
        sqlite3.Error: the file cannot be used, or is not a database of this program.
    """
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path or ":memory:", timeout=wait, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA foreign_keys = ON")
        database.execute("PRAGMA secure_delete = ON")  # overwrite deleted data
        database.execute("BEGIN IMMEDIATE")
        (stored_version,) = database.execute("PRAGMA user_version").fetchone()
        if stored_version not in (0, version):
            raise sqlite3.DatabaseError(
                f"its tables have version {stored_version}, but this release requires version {version}"
            )
        if not stored_version:
            if database.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise sqlite3.DatabaseError("it is another program's database")
            _run(database, tables)
            database.execute(f"PRAGMA user_version = {version}")
        _run(database, always)
        database.execute("COMMIT")
    except sqlite3.Error:
        database.close()
        raise
    return database


def _run(database: sqlite3.Connection, statements: str) -> None:
    """Run statements within the current transaction, which `executescript` would end."""
    for statement in statements.split(";"):
        database.execute(statement)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # otherwise a FIFO without a writer would block


def owned_by(owner: str, parameter: str = "?") -> str:
    """Return the SQL condition that selects the rows of an owner.

    Args:
        parameter: the parameter of the statement that is the owner. Any other name is the hexadecimal digest of a key.
    """
    former = "".join(f", '{name}'" for name in names_of(owner)[1:])
    return f"owner IN ({parameter}{former})" if former else f"owner = {parameter}"


def load_json(data: bytes) -> Any:
    """Return the JSON value of a column.

    Raises:
        sqlite3.DatabaseError: the column does not contain JSON, because another program or the disk has changed it.
    """
    try:
        return loads(data)
    except (ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(f"a document is damaged: {error}") from None


_lock_files = set[int]()  # descriptors


def open_lock_file(path: Path, flags: int) -> int:
    """Open a file that this server locks, and return its descriptor. Close it by `close_lock_file`.

    Processes that user code forks from this one close the file. Otherwise they would keep the lock after the end of
    this process.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    _lock_files.add(descriptor)
    return descriptor


def close_lock_file(descriptor: int) -> None:
    """Close a file, which releases its locks."""
    _lock_files.discard(descriptor)
    os.close(descriptor)


def _close_lock_files() -> None:
    for descriptor in _lock_files:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _lock_files.clear()


os.register_at_fork(after_in_child=_close_lock_files)


def is_locked(path: Path) -> bool:
    """Return whether a server has locked a file."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=_open_at_once) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
