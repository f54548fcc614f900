"""Stores responses for later requests, in memory or in a directory (`option.responses_store`).

SQLite stores the responses on a separate thread. A response belongs to the API key of the request that created it.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from handler.config.config import Config
from handler.core.errors import ConfigError, Conflict, Overloaded, ServingError, Unavailable
from handler.core.fair_queue import FairQueue
from handler.core.framing import dumps
from handler.protocols.kernel.stored import (
    CONVERSATION,
    KeptItem,
    KeptResponse,
    Recalled,
    State,
    Wanted,
    kept_items,
)
from handler.protocols.openai.api import Page
from handler.serving.background.tables import IN_PROGRESS, BackgroundTables
from handler.serving.background.tables import TABLES as BACKGROUND_TABLES
from handler.serving.conversations import TABLES as CONVERSATION_TABLES
from handler.serving.conversations import Conversations, ResponseTurn
from handler.serving.database import check_directory, load_json, open_database, owned_by

log = logging.getLogger("handler")

T = TypeVar("T")
P = ParamSpec("P")

_PERIOD = 10.0  # seconds between two searches for expired responses
_SILENCE = 1.0  # seconds for which the same error of the database is not logged again
_END_SECONDS = 5.0  # maximum seconds for finishing pending writes at the end
_PAUSE = 0.05  # seconds between two searches while there are more expired responses
_MAX_REMOVED = 500  # maximum number of expired responses that a transaction deletes
_MAX_REMOVED_BYTES = 1 << 24  # number of deleted bytes after which a transaction ends
_MAX_WAITING = 1000  # maximum number of waiting calls

_FILE = "responses.sqlite3"
_VERSION = 1  # version of the tables
BUSY_SECONDS = 5.0  # maximum seconds to wait while another process locks the file

_TABLES = """
CREATE TABLE answers (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, kind TEXT NOT NULL, previous TEXT NOT NULL, failed INTEGER NOT NULL,
    head BLOB NOT NULL, size INTEGER NOT NULL, used REAL NOT NULL, expires REAL NOT NULL
);
CREATE INDEX answers_by_expiry ON answers (expires);
CREATE TABLE items (
    answer TEXT NOT NULL REFERENCES answers (id) ON DELETE CASCADE, place INTEGER NOT NULL, is_output INTEGER NOT NULL,
    id TEXT NOT NULL, item BLOB NOT NULL, PRIMARY KEY (answer, place)
);
CREATE INDEX items_by_id ON items (id);
"""
_ALWAYS = f"""
SELECT id, owner, kind, previous, failed, head, size, used, expires FROM answers LIMIT 0;
SELECT answer, place, is_output, id, item FROM items LIMIT 0;
CREATE INDEX IF NOT EXISTS answers_by_owner ON answers (owner, used, size);
DROP INDEX IF EXISTS answers_by_use;
{CONVERSATION_TABLES}
"""
"""Statements to run each time the database is opened. The queries fail on the database of another program. The other
statements update the indexes, and add the tables of conversations.
"""

_CHAIN = """
WITH RECURSIVE chain (id, previous, failed, head, size, depth) AS (
    SELECT id, previous, failed, head, size, 0 FROM answers WHERE id = :id AND {owned} AND kind = :kind
    AND expires > :now
    UNION ALL
    SELECT one.id, one.previous, one.failed, one.head, one.size, depth + 1 FROM chain JOIN answers AS one
    ON one.id = chain.previous WHERE {owned} AND one.kind = :kind AND one.expires > :now AND depth < :most
) SELECT id, previous, failed, size, depth FROM chain ORDER BY depth DESC
"""
_OVERHEAD = 1024  # approximate bytes of a response in the database besides its JSON
_STORED = "SELECT owner, size FROM answers UNION ALL SELECT owner, size FROM conversations"
_HELD = f"SELECT count(*), total(size + {_OVERHEAD}) FROM ({_STORED})"
_OLDEST_FIRST = f"""
SELECT 0 AS is_conversation, rowid AS number, used, size + {_OVERHEAD} FROM answers
WHERE owner = :owner AND failed != {IN_PROGRESS}
UNION ALL SELECT 1, number, used, size + {_OVERHEAD} FROM conversations WHERE owner = :owner
ORDER BY used, is_conversation, number
"""
"""The responses and conversations of an owner, the least recently used first. Responses that are being generated are
not among them. The order is that of an index, so that reading the first ones takes little time.
"""
_FAILED = 1  # value of the column `failed`, which may also be `IN_PROGRESS`


ItemPage = tuple[list[Any], bool]
"""A page of input items of a response, and whether there are more items."""


Reserve = Callable[[int], object]
"""Called with the number of bytes of JSON to be read next. It may raise an error."""


def _reserve_nothing(num_bytes: int) -> None:
    """Reserve no memory, for a caller who has done so, or whose memory is not limited."""


class ResponseDatabase:
    """The database for the responses of all owners. Each owner can access only its own responses. All methods may
    block, and may raise sqlite3.Error.

    If an owner has too many responses and conversations, its least recently used ones are deleted. Other owners'
    responses and conversations are never deleted to make room. Continuing a response counts as a use of it and of all
    earlier responses.
    A response in a conversation and each change of a conversation count as a use of it.

    Args:
        directory: directory of the database file, or None for memory.
        config: configuration, which sets the limits of the database. `max_request_size` also limits the size of
            conversations that requests continue.
        clock: function that returns the time, in seconds since 1970.

    Raises:
        OSError: the file cannot be created or opened.
        sqlite3.Error: the file cannot be used.
    """

    def __init__(self, directory: Path | None, config: Config, clock: Callable[[], float] = time.time) -> None:
        self._config, self._clock = config, clock
        self.directory = directory
        self.most_bytes = config.responses_max_bytes
        path = None if directory is None else directory / _FILE
        self._database = open_database(path, _VERSION, _TABLES, f"{_ALWAYS};{BACKGROUND_TABLES}", wait=BUSY_SECONDS)
        self.conversations = Conversations(self._database, config.responses_expiration, clock, directory)
        self.background = BackgroundTables(self, self._database, config, clock)
        self.may_be_full = False
        """Whether an owner may have no room for another response, according to the last query."""
        self._room("")
        while self.background.recover():
            pass

    def close(self) -> None:
        self.conversations.close()
        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    def remove_expired(self) -> bool:
        """Delete some expired responses and conversations. Return whether there may be more."""
        if not self._has_expired():
            return False
        with self.writing():
            return self._remove_expired()

    def _has_expired(self) -> bool:
        queries = (f"SELECT 1 FROM {table} WHERE expires <= ? LIMIT 1" for table in ("answers", "conversations"))
        now = (self._clock(),)
        return any(self._database.execute(query, now).fetchone() for query in queries)

    def _remove_expired(self) -> bool:
        """Delete a limited number of expired responses and conversations. Return whether there may be more.

        Call this within a transaction. Other requests, and servers with the same file, wait until it ends.
        """
        query = "SELECT rowid, size FROM answers WHERE expires <= ? ORDER BY expires LIMIT ?"
        rows = self._database.execute(query, (self._clock(), _MAX_REMOVED)).fetchall()
        size = 0
        for number, (row, num_bytes) in enumerate(rows, 1):
            self._database.execute("DELETE FROM answers WHERE rowid = ?", (row,))
            size += num_bytes
            if number == _MAX_REMOVED or size > _MAX_REMOVED_BYTES:
                return True
        return self.conversations.remove_expired()

    def wait_at_most(self, seconds: float) -> None:
        """Set the maximum number of seconds that later calls wait while another process writes."""
        self._database.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")

    def keep(
        self,
        owner: str,
        kept: KeptResponse,
        head: bytes,
        encoded_items: Sequence[KeptItem],
        size: int,
        turn: ResponseTurn | None = None,
    ) -> bool:
        """Write a response, and append its items to its conversation unless the conversation was deleted. Delete the
        least recently used responses and conversations of the owner if there is not enough room.

        Args:
            head: the response without its items, as JSON.
            encoded_items: the items.
            size: total size of the head and the items, in bytes.
            turn: turn in the conversation, or None if the response is not appended to one.

        Returns:
            Whether the response was stored.

        Raises:
            Unavailable: there is no room for the response. Nothing has changed.
            InvalidPayload: the conversation now has items with the same ids. Nothing has changed.
        """
        with self.writing():
            number = 0
            if turn is not None and self.conversations.has(turn.number):
                number = turn.number
                self.conversations.append(number, encoded_items)
            self._remove_expired()
            if kept.stored:
                self.insert(owner, kept, head, encoded_items, size)
            if not self._make_room(owner):
                return kept.stored
            if number and not self.conversations.has(number):
                raise self._full(size, "the conversation with the response")
            is_kept = self._database.execute("SELECT 1 FROM answers WHERE id = ?", (kept.id,)).fetchone() is not None
            if kept.stored and not is_kept and turn is None:
                raise self._full(size)
            return is_kept

    def insert(
        self, owner: str, kept: KeptResponse, head: bytes, encoded_items: Sequence[KeptItem], size: int, failed: int = 0
    ) -> None:
        """Insert a response, within a transaction.

        Args:
            failed: value of the column. By default, it depends on the response.
        """
        now, first = self._clock(), len(kept.given)
        items = [(kept.id, position, position >= first, *item) for position, item in enumerate(encoded_items)]
        expires = now + self._config.responses_expiration
        values = (kept.id, owner, kept.kind, kept.previous, failed or kept.failed, head, size, now, expires)
        self._database.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        self._database.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", items)

    def make_room(self, owner: str, id: str, size: int) -> None:
        """Delete responses and conversations above the limits of an owner, within a transaction.

        Args:
            id: the response that needs the room.
            size: its size in bytes.

        Raises:
            Unavailable: there is no room for this response, or too many responses of the owner are being generated.
        """
        if not self._make_room(owner):
            return
        number, held, room = self._room(owner)
        is_kept = self._database.execute("SELECT 1 FROM answers WHERE id = ?", (id,)).fetchone() is not None
        if not is_kept or number > self._config.responses_max or held > room:
            raise self._full(size)

    def _make_room(self, owner: str) -> bool:
        """Delete an owner's least recently used responses and conversations above its limits. Return whether any."""
        number, held, room = self._room(owner)
        if number <= self._config.responses_max and held <= room:
            return False
        if self._has_expired():
            expired = "SELECT rowid FROM answers WHERE owner = ? AND expires <= ? ORDER BY expires LIMIT ?"
            values = (owner, self._clock(), _MAX_REMOVED)
            self._database.execute(f"DELETE FROM answers WHERE rowid IN ({expired})", values)
            self.conversations.hide_expired(owner)
            number, held, room = self._room(owner)
        excess = number - self._config.responses_max, held - room
        rows = self._oldest(owner, *excess)
        if self.conversations.use_held(row for is_conversation, row, *_ in rows if is_conversation):
            rows = self._oldest(owner, *excess)
        for is_conversation, row, *_ in rows:
            if is_conversation:
                self.conversations.hide(row)
            else:
                self._database.execute("DELETE FROM answers WHERE rowid = ?", (row,))
        return True

    def _oldest(self, owner: str, number: int, size: float) -> list[Any]:
        """Return an owner's least recently used responses and conversations, enough to reach this number and this size,
        or all of them.
        """
        oldest = list[Any]()
        for row in self._database.execute(_OLDEST_FIRST, {"owner": owner}):
            if number <= 0 and size <= 0:
                break
            oldest.append(row)
            number, size = number - 1, size - row[3]
        return oldest

    def read_conversations(self, read: Callable[[Conversations], T]) -> T:
        """Read conversations within one transaction."""
        with self.reading():
            return read(self.conversations)

    def change_conversation(self, owner: str, change: Callable[[Conversations], tuple[int, T]]) -> T:
        """Change a conversation of an owner.

        Args:
            change: makes the change. It returns the number of the conversation, or 0 if the change needs no room, and
                the result.

        Raises:
            Unavailable: there is no room for the conversation. Nothing has changed.
        """
        with self.writing():
            self._remove_expired()
            number, result = change(self.conversations)
            if number and self._make_room(owner) and not self.conversations.has(number):
                raise self._full(self.most_bytes, "the conversation")
            return result

    def check_room(self, owner: str, size: int) -> None:
        """Raise Unavailable if there is no room for a response of this size."""
        self.remove_expired()
        with self.reading():
            _, _, room = self._room(owner)
        if size + _OVERHEAD > room:
            raise self._full(size)

    def _room(self, owner: str) -> tuple[int, float, float]:
        """Return the number of responses and conversations of an owner, their total size, and the maximum size, both in
        bytes.
        """
        number, held = self._database.execute(f"{_HELD} WHERE owner = ?", (owner,)).fetchone()
        _, total = self._database.execute(_HELD).fetchone()
        self.may_be_full = total > self._config.responses_total_bytes - self.most_bytes
        return number, held, min(self.most_bytes, held + self._config.responses_total_bytes - total)

    def _full(self, size: int, subject: str = "the response") -> Unavailable:
        if size + _OVERHEAD > self.most_bytes:
            return Unavailable(
                f"{subject} has {size} bytes, more than an API key may store (option.responses_max_bytes)"
            )
        limit = f"all API keys together may store {self._config.responses_total_bytes} bytes of responses"
        reason = "and deleting the responses of this API key would not make enough room"
        return Unavailable(f"{limit}, {reason} (option.responses_total_bytes)")

    def recall(
        self, owner: str, references: Wanted, reserve: Callable[[int], object], turn: ResponseTurn | None = None
    ) -> Recalled:
        """Return the stored responses and items that a request refers to.

        Args:
            reserve: called with the size in bytes of stored JSON before it is decoded. It may raise an error.
            turn: turn that the request takes in its conversation, or None if its response is not appended to it.

        Raises:
            NotKept: the owner has no such conversation.
            ConversationLocked: another request has its turn in the conversation.
        """
        with self.writing():
            read = self._conversation(owner, references, reserve) if references.previous else _Read()
            if references.conversation:
                read = self._stored_conversation(owner, references, reserve, turn)
            if read.state == "found" and references.items:
                read = self._with_items(read, owner, references, reserve)
        if read.state != "found":
            return Recalled(read.state)
        items = {id: load_json(item) for id, item in read.items.items()}
        return Recalled(head=load_json(read.head), history=[*map(load_json, read.history)], items=items, size=read.size)

    def _stored_conversation(
        self, owner: str, references: Wanted, reserve: Callable[[int], object], turn: ResponseTurn | None
    ) -> _Read:
        stored = self.conversations.find(owner, references.conversation, "conversation")
        if turn is not None:
            turn.take(stored.number)
            self.conversations.use(stored.number)
        if stored.size > self._config.max_request_size:
            return _Read("too_long")
        reserve(stored.size)
        return _Read(history=self.conversations.items(stored.number), size=stored.size)

    def _with_items(self, read: _Read, owner: str, references: Wanted, reserve: Callable[[int], object]) -> _Read:
        items, answers, size = dict[str, bytes](), list[str](), read.size
        for id in dict.fromkeys(references.items):
            if item := self._find_item(owner, id, references.kind):
                size += item.size
                if size > self._config.max_request_size:
                    return _Read("too_long")
                reserve(item.size)
                (items[id],) = self._database.execute(item.query, (item.row,)).fetchone()
                answers += item.responses
        self._use(answers)
        return read._replace(items=items, size=size)

    def _find_item(self, owner: str, id: str, kind: str) -> _ItemRow | None:
        """Find an owner's newest item with an id, without reading it. Return None if there is none."""
        query = (
            "SELECT items.rowid, length(item), answers.id FROM items JOIN answers ON answers.id = answer "
            f"WHERE items.id = ? AND {owned_by(owner)} AND kind = ? AND expires > ? ORDER BY answers.rowid DESC LIMIT 1"
        )
        if row := self._database.execute(query, (id, owner, kind, self._clock())).fetchone():
            return _ItemRow("SELECT item FROM items WHERE rowid = ?", row[0], row[1], row[2:])
        row = self.conversations.latest_item(owner, id) if kind == "response" else None
        return None if row is None else _ItemRow("SELECT item FROM conversation_items WHERE rowid = ?", *row)

    def _conversation(self, owner: str, references: Wanted, reserve: Callable[[int], object]) -> _Read:
        key = {"id": references.previous, "owner": owner, "kind": references.kind, "now": self._clock()}
        query = _CHAIN.format(owned=owned_by(owner, ":owner"))
        chain = self._database.execute(query, {**key, "most": self._config.responses_max}).fetchall()
        if not chain:
            return _Read("missing")
        if chain[-1][2]:
            return _Read("failed" if chain[-1][2] == _FAILED else "in_progress")
        if chain[0][1]:
            return _Read("in_conversation" if chain[0][1].startswith(CONVERSATION) else "broken")
        size = sum(row[3] for row in chain)
        if size > self._config.max_request_size:
            return _Read("too_long")
        reserve(size)
        ids = [row[0] for row in chain]
        history = [item for id in ids for item in self._items(id)]
        (head,) = self._database.execute("SELECT head FROM answers WHERE id = ?", ids[:1]).fetchone()
        self._use(ids)
        return _Read(head=head, history=history, size=size)

    def _use(self, ids: Sequence[str]) -> None:
        """Record that responses have been used, in the order of `ids`, and postpone their expiry."""
        now = self._clock()
        new = ((now, now + self._config.responses_expiration, id) for id in ids)
        self._database.executemany("UPDATE answers SET used = ?, expires = ? WHERE id = ?", new)

    def _items(self, id: str, *, output_only: bool = False) -> list[bytes]:
        query = "SELECT item FROM items WHERE answer = ? AND is_output >= ? ORDER BY place"
        return [item for (item,) in self._database.execute(query, (id, output_only))]

    def response(self, owner: str, id: str, reserve: Reserve = _reserve_nothing) -> dict[str, Any] | None:
        """Return a response, or None if the owner has no response with this id."""
        with self.reading():
            if not self.exists(owner, id):
                return None
            query = (
                "SELECT length(head) + (SELECT total(length(item)) FROM items WHERE answer = :id AND is_output) "
                "FROM answers WHERE id = :id"
            )
            (size,) = self._database.execute(query, {"id": id}).fetchone()
            reserve(int(size))
            (head,) = self._database.execute("SELECT head FROM answers WHERE id = ?", (id,)).fetchone()
            output = self._items(id, output_only=True)
        return {**load_json(head), "output": [*map(load_json, output)]}

    def exists(self, owner: str, id: str) -> bool:
        """Return whether an owner has a response with this id."""
        query = f"SELECT 1 FROM answers WHERE id = ? AND {owned_by(owner)} AND kind != 'thread' AND expires > ?"
        return self._database.execute(query, (id, owner, self._clock())).fetchone() is not None

    def input_items(self, owner: str, id: str, page: Page, reserve: Reserve = _reserve_nothing) -> ItemPage | None:
        """Return a page of input items of a response, or None if the response or its item `page.after` is missing."""
        with self.reading():
            rows = self._page(owner, id, page, reserve)
        return None if rows is None else ([*map(load_json, rows[: page.limit])], len(rows) > page.limit)

    def _page(self, owner: str, id: str, page: Page, reserve: Reserve) -> list[bytes] | None:
        """Return the items of a page and the next one."""
        if not self.exists(owner, id):
            return None
        order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
        query, names = "FROM items WHERE answer = ? AND NOT is_output", [id]
        if page.after:
            position_query = "SELECT place FROM items WHERE answer = ? AND id = ? LIMIT 1"
            row = self._database.execute(position_query, (id, page.after)).fetchone()
            if row is None:
                return None
            query, names = f"{query} AND place {beyond} ?", [id, row[0]]
        query, values = f"{query} ORDER BY place {order} LIMIT ?", (*names, page.limit + 1)
        sizes = f"SELECT total(size) FROM (SELECT length(item) AS size {query})"
        reserve(int(self._database.execute(sizes, values).fetchone()[0]))
        return [item for (item,) in self._database.execute(f"SELECT item {query}", values)]

    def delete(self, owner: str, id: str) -> bool:
        """Delete a response, and return whether it existed."""
        with self.writing() as database:
            query = f"DELETE FROM answers WHERE id = ? AND {owned_by(owner)} AND kind != 'thread' AND expires > ?"
            return database.execute(query, (id, owner, self._clock())).rowcount > 0

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run the block in a write transaction, which excludes other writers and is rolled back after an exception."""
        with self._database:  # this commits or rolls back
            self._database.execute("BEGIN IMMEDIATE")
            yield self._database

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Run the block in a read transaction, so that it does not see changes by other processes."""
        with self._database:
            self._database.execute("BEGIN")
            yield


class _Read(NamedTuple):
    """Stored values that a request refers to, as JSON."""

    state: State = "found"
    head: bytes = b"{}"
    history: Sequence[bytes] = ()
    items: Mapping[str, bytes] = MappingProxyType({})
    size: int = 0


class _ItemRow(NamedTuple):
    """An item that a request refers to, which has not been read.

    Attributes:
        query: reads the item of a row.
        row: number of the item's row.
        size: number of bytes of its JSON.
        responses: id of its response, or nothing for an item of a conversation.
    """

    query: str
    row: int
    size: int
    responses: Sequence[str] = ()


class ResponseStore:
    """Stores responses. Most methods return a future immediately, and a thread executes the calls. Owners take turns,
    and the calls of an owner are executed in order.

    Args:
        database: database, which the store owns and closes.
    """

    def __init__(self, database: ResponseDatabase) -> None:
        self.most_bytes = database.most_bytes
        self._database = database
        self._in_progress: weakref.WeakValueDictionary[str, InProgress] = weakref.WeakValueDictionary()
        self._calls = FairQueue[Callable[[], None]]()
        self._closed = False
        self._reported = "", 0.0
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    @property
    def may_be_full(self) -> bool:
        """Whether the store may be full, according to the last query. `check_room` runs a query."""
        return self._database.may_be_full

    def check_room(self, owner: str, size: int) -> Future[None]:
        """Check whether a response of this size can be stored. If not, the future raises Unavailable.

        Raises:
            Overloaded: too many calls are waiting.
        """
        return self.call(owner, self._database.check_room, owner, size)

    def recall(
        self, owner: str, references: Wanted, reserve: Callable[[int], object], turn: ResponseTurn | None = None
    ) -> Future[Recalled]:
        """Return the stored responses and items that a request refers to.

        Args:
            reserve: called on the store thread with the number of bytes to be read next. Its errors are raised by the
                future.
            turn: turn that the request takes in its conversation, or None. The caller ends it by `end_turn`.

        Raises:
            Overloaded: too many calls are waiting.
        """
        if self._begun(owner, references.previous) is not None:
            return _done(Recalled("in_progress"))
        return self.call(owner, self._database.recall, owner, references, reserve, turn)

    def new_turn(self) -> ResponseTurn:
        """Return a turn for a request in a conversation, as an argument of `recall`."""
        return ResponseTurn(self._database.conversations.locks)

    def end_turn(self, owner: str, turn: ResponseTurn) -> None:
        """End a turn after all earlier calls of the owner, because its response may still be waiting to be stored."""
        self.write(owner, turn.end)

    def read_conversations(self, owner: str, read: Callable[[Conversations], T]) -> Future[T]:
        """Read conversations of an owner.

        Raises:
            Overloaded: too many calls are waiting.
        """
        return self.call(owner, self._database.read_conversations, read)

    def change_conversation(self, owner: str, change: Callable[[Conversations], tuple[int, T]]) -> Future[T]:
        """Change a conversation of an owner, as `ResponseDatabase.change_conversation` does.

        Raises:
            Overloaded: too many calls are waiting.
        """
        return self.call(owner, self._database.change_conversation, owner, change)

    def response(self, owner: str, id: str, reserve: Reserve = _reserve_nothing) -> Future[dict[str, Any] | None]:
        """Return a response, which may be in progress, or None if the owner has no response with this id."""
        if (begun := self._begun(owner, id)) is not None:
            return _done({**begun.response})
        return self.call(owner, self._database.response, owner, id, reserve)

    def exists(self, owner: str, id: str) -> Future[bool]:
        """Return whether an owner has a response with this id, which may be in progress."""
        if self._begun(owner, id) is not None:
            return _done(True)
        return self.call(owner, self._database.exists, owner, id)

    def input_items(
        self, owner: str, id: str, page: Page, reserve: Reserve = _reserve_nothing
    ) -> Future[ItemPage | None]:
        """Return a page of input items of a response, or None if the response or its item `page.after` is missing."""
        return self.call(owner, self._database.input_items, owner, id, page, reserve)

    def delete(self, owner: str, id: str) -> Future[bool]:
        """Delete a response, and return whether it existed.

        Raises:
            Conflict: the response is in progress.
        """
        if self._begun(owner, id) is not None:
            raise Conflict(f"Response with id '{id}' is in progress; delete it when it has ended.")
        return self.call(owner, self._database.delete, owner, id)

    def call(self, owner: str, method: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Call a method of the database on the store thread.

        Raises:
            Overloaded: too many calls are waiting.
        """
        self.check_calls(owner)
        return self.write(owner, method, *arguments, **options)

    @property
    def background(self) -> BackgroundTables:
        """The tables of background responses. Call their methods with `call` or `write`."""
        return self._database.background

    def begin(self, owner: str, id: str, response: Mapping[str, Any]) -> InProgress:
        """Register a response in progress. It is registered until `end` or `keep`, while the returned object exists."""
        in_progress = InProgress(owner, response)
        self._in_progress[id] = in_progress
        return in_progress

    def end(self, id: str) -> None:
        """Remove a response in progress that is not stored, if it is registered."""
        self._in_progress.pop(id, None)

    def keep(self, owner: str, response: KeptResponse, turn: ResponseTurn | None = None) -> bool:
        """Store a finished response, and return whether it was stored. This must be called within `write`, because a
        database has one transaction at a time.

        Args:
            turn: turn in the conversation, to which the response is appended unless it failed. The turn ends. None
                without a conversation.

        Raises:
            ServingError: the response could not be appended. Nothing has changed.
        """
        assert threading.current_thread() is self._thread, "only the thread of the store uses the database"
        try:
            head, items = dumps(response.head), [*response.given, *kept_items(response.output)]
            size = len(head) + sum(len(item) for _, item in items)
            appending = None if response.failed else turn
            return self._database.keep(owner, response, head, items, size, appending)
        except (sqlite3.Error, ServingError) as error:  # for example a full disk
            log.error("a response could not be stored: %s", error)
            failure: Exception = error
        except Exception as error:
            log.exception("a bug in the server: a response could not be stored")
            failure = error
        finally:
            self.end(response.id)
            if turn is not None:
                turn.end()
        if turn is None or response.failed:
            return False
        if isinstance(failure, ServingError):
            raise failure
        raise Unavailable("the response could not be appended to its conversation", detail=str(failure)) from None

    def close(self) -> None:
        """Finish pending writes, within a time limit, and stop the thread. Further calls have no effect."""
        self._closed = True
        self._calls.put("", lambda: None)  # wakes the thread
        self._thread.join(_END_SECONDS)

    def _begun(self, owner: str, id: str) -> InProgress | None:
        """Return an owner's response that is in progress, or None."""
        begun = self._in_progress.get(id)
        return begun if begun is not None and begun.owner == owner else None

    def check_calls(self, owner: str) -> None:
        """Raise Overloaded if too many calls are waiting, and the owner has its share of them."""
        if not self._calls.has_room(_MAX_WAITING, owner):
            raise Overloaded(f"too many calls to the response store are waiting: {_MAX_WAITING}")

    # -- the thread ----------------------------------------------------------------------------------------------

    def write(self, owner: str, method: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Do the same as `call`, even if many calls are waiting. Use it for data that must not be lost."""
        future: Future[T] = Future()
        deadline = time.monotonic() + BUSY_SECONDS

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._database.wait_at_most(max(0.0, deadline - time.monotonic()))
                future.set_result(method(*arguments, **options))
            except sqlite3.Error as error:
                self._report(error)
                future.set_exception(Unavailable("the stored responses cannot be read or written", detail=str(error)))
            except ServingError as error:  # its traceback would keep the data in memory
                future.set_exception(error.with_traceback(None))
            except Exception as error:
                future.set_exception(error)

        self._calls.put("", run, owner)
        return future

    def _report(self, error: sqlite3.Error) -> None:
        """Log an error, unless the same one has just been logged: a full disk makes each call fail."""
        message, now = str(error), time.monotonic()
        if message != self._reported[0] or now - self._reported[1] > _SILENCE:
            log.error("the stored responses cannot be read or written: %s", message)
            self._reported = message, now

    def _run(self) -> None:
        look_at = time.monotonic() + _PERIOD
        while True:
            wait = look_at - time.monotonic()
            call = self._calls.get(timeout=max(0.0, wait)) if wait > 0 or self._closed else None
            if call is not None:
                call()
                del call  # it refers to a response
            elif not self._closed:
                look_at = time.monotonic() + (_PAUSE if self._remove_expired() else _PERIOD)
            if self._closed and not self._calls:
                break
        self._database.background.close()
        self._database.close()

    def _remove_expired(self) -> bool:
        """Delete some expired responses, and fail those of some ended servers. Return whether there may be more."""
        try:
            return self._database.remove_expired() | self._database.background.recover()
        except (sqlite3.Error, OSError) as error:  # for example a full disk, or too many open files
            log.error("expired responses could not be removed: %s", error)
            return False


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


class InProgress:
    """A response in progress. The `OwnersKeeper` of its request refers to this object."""

    def __init__(self, owner: str, response: Mapping[str, Any]) -> None:
        self.owner, self.response = owner, response


class OwnersKeeper:
    """A view of the store for one request, which stores the responses of the request's owner.

    Args:
        turn: turn of the request in its conversation, or None without a conversation.
    """

    def __init__(self, store: ResponseStore, owner: str, turn: ResponseTurn | None = None) -> None:
        self._store = store
        self._owner = owner
        self._turn = turn
        self._in_progress: dict[str, InProgress] = {}
        self._has_ended = False

    def begin(self, id: str, response: Mapping[str, Any]) -> None:
        self._in_progress[id] = self._store.begin(self._owner, id, response)
        if self._has_ended:  # in the meantime, on another thread
            self._store.end(id)

    def keep(self, response: KeptResponse) -> bool:
        return self._store.keep(self._owner, response, self._turn)

    def end(self) -> None:
        """End the responses in progress, which are not stored any more, and those that begin later."""
        self._has_ended = True
        for id in list(self._in_progress):
            self._store.end(id)


def configured_store(config: Config) -> ResponseStore | None:
    """Return the store as the options configure it, or None if responses are not stored.

    Raises:
        ConfigError: the database file cannot be used.
    """
    if not config.stores_responses:
        return None
    with _refusing(config):
        return ResponseStore(ResponseDatabase(_directory(config), config))


def check_store(config: Config) -> None:
    """Check the directory of the store, without writing to it.

    Raises:
        ConfigError: the directory cannot be used.
    """
    if config.stores_responses and (directory := _directory(config)) is not None:
        with _refusing(config):
            check_directory(directory)


def _directory(config: Config) -> Path | None:
    return None if config.responses_store == "memory" else Path(config.responses_store).absolute()


@contextlib.contextmanager
def _refusing(config: Config) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"responses cannot be stored in this directory: {reason}; must be off, memory or a directory"
        raise ConfigError(config.problem("option.responses_store", config.responses_store, message)) from None
