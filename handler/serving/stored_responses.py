"""Answers that are kept for later requests, in memory or in a directory: `option.responses_store`.

SQLite stores them in either place, on a thread of its own. Each belongs to the API key of the request that made it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from handler.config.config import Config
from handler.core.errors import ConfigError, Conflict, Overloaded, Unavailable
from handler.core.framing import dumps, loads
from handler.protocols.kernel.dialect import KeptAnswer, KeptItem, Kind, Recalled, State, Wanted, kept_items
from handler.serving.database import open_database

log = logging.getLogger("handler")

T = TypeVar("T")

_PERIOD = 10.0  # seconds between two looks for expired ones
_END_SECONDS = 5.0  # that the end waits for what is being written
_MOST_WAITING = 1000  # calls

_FILE = "responses.sqlite3"
_VERSION = 1  # of the tables
BUSY_SECONDS = 5.0  # that another process may hold the file

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
_ALWAYS = """
SELECT id, owner, kind, previous, failed, head, size, used, expires FROM answers LIMIT 0;
SELECT answer, place, is_output, id, item FROM items LIMIT 0;
CREATE INDEX IF NOT EXISTS answers_by_owner ON answers (owner, used, size);
DROP INDEX IF EXISTS answers_by_use;
"""
"""Queries that fail in another program's file; and indexes that differ from earlier releases'."""

_CHAIN = """
WITH RECURSIVE chain (id, previous, failed, head, size, depth) AS (
    SELECT id, previous, failed, head, size, 0 FROM answers WHERE id = :id AND owner = :owner AND kind = :kind
    AND expires > :now
    UNION ALL
    SELECT one.id, one.previous, one.failed, one.head, one.size, depth + 1 FROM chain JOIN answers AS one
    ON one.id = chain.previous WHERE one.owner = :owner AND one.kind = :kind AND one.expires > :now AND depth < :most
) SELECT id, previous, failed, size, depth FROM chain ORDER BY depth DESC
"""
_OVERHEAD = 1024  # bytes that an answer takes beside its JSON, about
_HELD = f"SELECT count(*), total(size + {_OVERHEAD}) FROM answers"
_TOO_MANY = f"""
DELETE FROM answers WHERE id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER latest AS number, sum(size + {_OVERHEAD}) OVER latest AS bytes FROM answers
        WHERE owner = ? WINDOW latest AS (ORDER BY used DESC, rowid DESC ROWS UNBOUNDED PRECEDING)
    ) WHERE number > ? OR bytes > ?
)
"""


class ItemPage(NamedTuple):
    """A page of a response's input items."""

    items: Sequence[Any]
    has_more: bool


class Row(NamedTuple):
    """An answer to write, as JSON."""

    owner: str
    answer: KeptAnswer
    head: bytes
    items: Sequence[KeptItem]
    size: int


class ResponseDatabase:
    """Answers of all owners; each owner finds its own. Every call may block, and raise sqlite3.Error.

    If an owner has too many, its own least recently used ones are deleted: no owner's answers make room for
    another's. An answer that a request continues counts as used, with all before it.

    Args:
        directory: of the file; None: memory.
        lifetime: in seconds, from when an answer was last used.
        most, most_bytes: answers of one owner.
        total_bytes: of all owners' answers.
        most_recalled: bytes of a conversation.
        clock: returns the seconds since 1970.

    Raises:
        OSError, sqlite3.Error: the file cannot be used.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        lifetime: float,
        most: int,
        most_bytes: int,
        total_bytes: int,
        most_recalled: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._lifetime, self._most, self.most_bytes, self._most_recalled = lifetime, most, most_bytes, most_recalled
        self._total_bytes = total_bytes
        self._clock = clock
        path = None if directory is None else directory / _FILE
        self._database = open_database(path, _VERSION, _TABLES, _ALWAYS, wait=BUSY_SECONDS)
        self.may_be_full = False
        """Whether an owner may find no room, as far as known without a query."""
        self._room("")

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    def remove_expired(self) -> None:
        """Delete answers that were not used for its lifetime."""
        now = (self._clock(),)
        if self._database.execute("SELECT 1 FROM answers WHERE expires <= ? LIMIT 1", now).fetchone():
            with self._writing() as database:
                database.execute("DELETE FROM answers WHERE expires <= ?", now)

    def wait_at_most(self, seconds: float) -> None:
        """Set how long later calls wait while another process writes."""
        self._database.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")

    def keep(self, row: Row) -> None:
        """Write an answer, and delete those of its owner that no longer fit.

        Raises:
            Unavailable: all answers together leave no room for it. Nothing is changed then.
        """
        owner, answer, head, kept, size = row
        now, first = self._clock(), len(answer.given)
        items = [(answer.id, place, place >= first, *item) for place, item in enumerate(kept)]
        previous, failed = answer.previous, answer.failed
        values = (answer.id, owner, answer.kind, previous, failed, head, size, now, now + self._lifetime)
        with self._writing() as database:
            database.execute("DELETE FROM answers WHERE expires <= ?", (now,))
            database.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            database.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", items)
            number, held, room = self._room(owner)
            if number > self._most or held > room:
                database.execute(_TOO_MANY, (owner, self._most, room))
                if database.execute("SELECT 1 FROM answers WHERE id = ?", (answer.id,)).fetchone() is None:
                    raise self._full(size)

    def check_room(self, owner: str, size: int) -> None:
        """Raise Unavailable where an answer of this size could not be kept."""
        self.remove_expired()
        with self._reading():
            _, _, room = self._room(owner)
        if size + _OVERHEAD > room:
            raise self._full(size)

    def _room(self, owner: str) -> tuple[int, float, float]:
        """Return the number of an owner's answers, their bytes, and how many bytes they may have."""
        number, held = self._database.execute(f"{_HELD} WHERE owner = ?", (owner,)).fetchone()
        _, total = self._database.execute(_HELD).fetchone()
        self.may_be_full = total > self._total_bytes - self.most_bytes
        return number, held, min(self.most_bytes, held + self._total_bytes - total)

    def _full(self, size: int) -> Unavailable:
        if size + _OVERHEAD > self.most_bytes:
            return Unavailable(
                f"{size} bytes are more than an API key's responses may have (option.responses_max_bytes)"
            )
        told = f"all stored responses have {self._total_bytes} bytes"
        return Unavailable(f"{told}, and this API key has none to delete (option.responses_total_bytes)")

    def recall(self, owner: str, wanted: Wanted) -> Recalled:
        """Return the stored answers that a request needs."""
        with self._writing():
            read = self._conversation(owner, wanted) if wanted.previous else _Read()
            if read.state == "found" and wanted.items:
                read = self._with_items(read, owner, wanted)
        if read.state != "found":
            return Recalled(read.state)
        items = {id: loads(item) for id, item in read.items.items()}
        return Recalled(head=loads(read.head), history=[*map(loads, read.history)], items=items, size=read.size)

    def _with_items(self, read: _Read, owner: str, wanted: Wanted) -> _Read:
        items, answers, size = dict[str, bytes](), list[str](), read.size
        for id in dict.fromkeys(wanted.items):
            query = (
                "SELECT item, answers.id FROM items JOIN answers ON answers.id = answer WHERE items.id = ? AND "
                "owner = ? AND kind = ? AND expires > ? ORDER BY answers.rowid DESC LIMIT 1"
            )
            found = self._database.execute(query, (id, owner, wanted.kind, self._clock())).fetchone()
            if found is not None:
                size += len(found[0])
                if size > self._most_recalled:
                    return _Read("too_long")
                items[id] = found[0]
                answers.append(found[1])
        self._use(answers)
        return read._replace(items=items, size=size)

    def _conversation(self, owner: str, wanted: Wanted) -> _Read:
        names = {"id": wanted.previous, "owner": owner, "kind": wanted.kind, "now": self._clock(), "most": self._most}
        chain = self._database.execute(_CHAIN, names).fetchall()
        if not chain:
            return _Read("missing")
        if chain[-1][2]:
            return _Read("failed")
        if chain[0][1]:
            return _Read("broken")
        size = sum(one[3] for one in chain)
        if size > self._most_recalled:
            return _Read("too_long")
        ids = [one[0] for one in chain]
        history = [item for id in ids for item in self._items(id)]
        (head,) = self._database.execute("SELECT head FROM answers WHERE id = ?", ids[:1]).fetchone()
        self._use(ids)
        return _Read(head=head, history=history, size=size)

    def _use(self, ids: Sequence[str]) -> None:
        """Note that answers are used, the later ones later."""
        now = self._clock()
        new = ((now, now + self._lifetime, id) for id in ids)
        self._database.executemany("UPDATE answers SET used = ?, expires = ? WHERE id = ?", new)

    def _items(self, id: str, *, output_only: bool = False) -> list[bytes]:
        query = "SELECT item FROM items WHERE answer = ? AND is_output >= ? ORDER BY place"
        return [item for (item,) in self._database.execute(query, (id, output_only))]

    def _head(self, owner: str, id: str) -> bytes | None:
        query = "SELECT head FROM answers WHERE id = ? AND owner = ? AND kind = ? AND expires > ?"
        kind: Kind = "response"
        found = self._database.execute(query, (id, owner, kind, self._clock())).fetchone()
        return None if found is None else found[0]

    def response(self, owner: str, id: str) -> dict[str, Any] | None:
        """Return a response; None if the owner has none of this id."""
        with self._reading():
            head = self._head(owner, id)
            output = [] if head is None else self._items(id, output_only=True)
        return None if head is None else {**loads(head), "output": [*map(loads, output)]}

    def input_items(self, owner: str, id: str, limit: int, after: str, newest_first: bool) -> ItemPage | None:
        """Return a page of a response's own input; None if it, or the item before the page, is not there."""
        with self._reading():
            rows = self._page(owner, id, limit + 1, after, newest_first)
        return None if rows is None else ItemPage([*map(loads, rows[:limit])], len(rows) > limit)

    def _page(self, owner: str, id: str, most: int, after: str, newest_first: bool) -> list[bytes] | None:
        if self._head(owner, id) is None:
            return None
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        query, names = "SELECT item FROM items WHERE answer = ? AND NOT is_output", [id]
        if after:
            place = "SELECT place FROM items WHERE answer = ? AND id = ? LIMIT 1"
            found = self._database.execute(place, (id, after)).fetchone()
            if found is None:
                return None
            query, names = f"{query} AND place {beyond} ?", [id, found[0]]
        return [item for (item,) in self._database.execute(f"{query} ORDER BY place {order} LIMIT ?", [*names, most])]

    def delete(self, owner: str, id: str) -> bool:
        """Delete a response; whether there was one."""
        with self._writing() as database:
            query = "DELETE FROM answers WHERE id = ? AND owner = ? AND kind = 'response' AND expires > ?"
            return database.execute(query, (id, owner, self._clock())).rowcount > 0

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Commit everything that the block writes, or nothing. No other process changes what the block reads."""
        with self._database:  # which commits, or rolls back
            self._database.execute("BEGIN IMMEDIATE")
            yield self._database

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Let all reads in the block see the database as of its start, whatever other processes delete."""
        with self._database:
            self._database.execute("BEGIN")
            yield


class _Read(NamedTuple):
    """The recalled values, as JSON."""

    state: State = "found"
    head: bytes = b"{}"
    history: Sequence[bytes] = ()
    items: Mapping[str, bytes] = MappingProxyType({})
    size: int = 0


class ResponseStore:
    """Stores answers. Calls return at once; the future is done when the store's thread has done them, in order.

    Args:
        database: no one else uses it from now on; the store closes it.
    """

    def __init__(self, database: ResponseDatabase) -> None:
        self.most_bytes = database.most_bytes
        self._database = database
        self._in_progress: weakref.WeakValueDictionary[str, InProgress] = weakref.WeakValueDictionary()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def keeper(self, owner: str) -> OwnersKeeper:
        """Return the keeper of an owner's answers."""
        return OwnersKeeper(self, owner)

    @property
    def may_be_full(self) -> bool:
        """Return whether an owner may find no room for an answer; `check_room` queries."""
        return self._database.may_be_full

    def check_room(self, owner: str, size: int) -> Future[None]:
        """Check whether an answer of this size can be stored; the future raises Unavailable where it cannot.

        Raises:
            Overloaded: too many calls wait.
        """
        return self._submit(lambda: self._database.check_room(owner, size))

    def recall(self, owner: str, wanted: Wanted) -> Future[Recalled]:
        """Recall the stored values that a request refers to.

        Raises:
            Overloaded: too many calls wait.
        """
        if self._begun(owner, wanted.previous) is not None:
            return _done(Recalled("in_progress"))
        return self._submit(lambda: self._database.recall(owner, wanted))

    def response(self, owner: str, id: str) -> Future[dict[str, Any] | None]:
        """Return a response, also one in progress; None if the owner has none of this id."""
        if (begun := self._begun(owner, id)) is not None:
            return _done({**begun.answer})
        return self._submit(lambda: self._database.response(owner, id))

    def input_items(
        self, owner: str, id: str, *, limit: int, after: str, newest_first: bool
    ) -> Future[ItemPage | None]:
        """Return a page of a response's own input; None if the owner has no such response, or it no such item."""
        return self._submit(lambda: self._database.input_items(owner, id, limit, after, newest_first))

    def delete(self, owner: str, id: str) -> Future[bool]:
        """Delete a response; whether there was one.

        Raises:
            Conflict: it is in progress.
        """
        if self._begun(owner, id) is not None:
            raise Conflict(f"Response with id '{id}' is in progress; delete it when it has ended.")
        return self._submit(lambda: self._database.delete(owner, id))

    def begin(self, owner: str, id: str, answer: Mapping[str, Any]) -> object:
        """Note an answer in progress, for as long as the returned object exists."""
        one = InProgress(owner, answer)
        self._in_progress[id] = one
        return one

    def write(self, feed: Callable[[], T]) -> Future[T]:
        """Call a reply's `feed`, which stores its answer, so that it is written before the client is told."""
        return self._put(feed)

    def keep(self, owner: str, answer: KeptAnswer) -> bool:
        """Store a finished answer; return whether it was stored. Called within `write`."""
        try:
            head, items = dumps(answer.head), [*answer.given, *kept_items(answer.output)]
            self._database.keep(Row(owner, answer, head, items, len(head) + sum(len(item.json) for item in items)))
        except (sqlite3.Error, Unavailable) as error:  # a full disk, say
            log.error("a response could not be stored: %s", error)
            return False
        except Exception:
            log.exception("a response could not be stored: a bug")
            return False
        finally:
            self._in_progress.pop(answer.id, None)
        return True

    def close(self) -> None:
        """Write pending answers, for a short time; a second call changes nothing."""
        self._calls.put(None)
        self._thread.join(_END_SECONDS)

    def _begun(self, owner: str, id: str) -> InProgress | None:
        """Return an owner's answer that is in progress."""
        found = self._in_progress.get(id)
        return found if found is not None and found.owner == owner else None

    def check_calls(self) -> None:
        """Raise Overloaded where too many calls wait."""
        if self._calls.qsize() >= _MOST_WAITING:
            raise Overloaded(f"{_MOST_WAITING} calls wait for the stored responses")

    # -- the thread ----------------------------------------------------------------------------------------------

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        self.check_calls()
        return self._put(call)

    def _put(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        deadline = time.monotonic() + BUSY_SECONDS

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._database.wait_at_most(max(0.0, deadline - time.monotonic()))
                future.set_result(call())
            except sqlite3.Error as error:
                log.error("stored responses: %s", error)
                future.set_exception(Unavailable("the stored responses cannot be read", detail=str(error)))
            except Exception as error:
                future.set_exception(error)

        self._calls.put(run)
        return future

    def _run(self) -> None:
        look_at = time.monotonic() + _PERIOD
        while True:
            try:
                call = self._calls.get(timeout=max(0.0, look_at - time.monotonic()))
            except queue.Empty:
                look_at = time.monotonic() + _PERIOD
                call = self._remove_expired
            if call is None:
                break
            call()
            del call  # it holds an answer
        self._database.close()

    def _remove_expired(self) -> None:
        try:
            self._database.remove_expired()
        except sqlite3.Error as error:  # a full disk, say
            log.error("expired responses could not be removed: %s", error)


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


class InProgress:
    """An answer in progress, known while its reply refers to this object."""

    def __init__(self, owner: str, answer: Mapping[str, Any]) -> None:
        self.owner, self.answer = owner, answer


class OwnersKeeper(NamedTuple):
    """Keeps one owner's answers."""

    store: ResponseStore
    owner: str

    def begin(self, id: str, answer: Mapping[str, Any]) -> object:
        return self.store.begin(self.owner, id, answer)

    def keep(self, answer: KeptAnswer) -> bool:
        return self.store.keep(self.owner, answer)


def configured_store(config: Config) -> ResponseStore | None:
    """Return the store that the options ask for; None if nothing is kept.

    Raises:
        ConfigError: its file cannot be used.
    """
    if not config.stores_responses:
        return None
    place = config.responses_store
    directory = None if place == "memory" else Path(place).absolute()
    try:
        database = ResponseDatabase(
            directory,
            lifetime=config.responses_expiration,
            most=config.responses_max,
            most_bytes=config.responses_max_bytes,
            total_bytes=config.responses_total_bytes,
            most_recalled=config.max_request_size,
        )
    except (OSError, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or error
        told = f"no responses can be stored there: {why}; must be off, memory or a directory"
        raise ConfigError(config.problem("option.responses_store", place, told)) from None
    return ResponseStore(database)
