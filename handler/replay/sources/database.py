"""Tables on disk for what must be found again: their file has no name, and goes with the process."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator

from handler.core.errors import ConfigError
from handler.replay.request import Request, Unreadable


@contextlib.contextmanager
def database(*statements: str) -> Iterator[sqlite3.Connection]:
    """Open a database in a temporary file, with these tables.

    Raises:
        ConfigError: while it is open, the disk is full or cannot be written.
    """
    connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    try:
        for statement in ("PRAGMA journal_mode=OFF", "PRAGMA synchronous=OFF", *statements):
            connection.execute(statement)
        yield connection
    except sqlite3.OperationalError as error:
        raise ConfigError(f"the temporary file of the recording: {error}: set SQLITE_TMPDIR to another disk") from None
    finally:
        connection.close()


def with_unique_ids(found: Iterable[Request | Unreadable]) -> Iterator[Request | Unreadable]:
    """Yield each id once. Another request with the same id is unreadable: a run could not tell them apart."""
    with database("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID") as ids:
        for item in found:
            if isinstance(item, Request):
                try:
                    new = ids.execute("INSERT OR IGNORE INTO ids VALUES (?)", (item.id,)).rowcount
                except UnicodeEncodeError:
                    yield Unreadable(repr(item.id), "the id has half of a surrogate pair, which is not text")
                    continue
                if not new:
                    yield Unreadable(item.id, "an earlier request has this id, and is used")
                    continue
            yield item
