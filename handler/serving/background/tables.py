"""The tables of background responses: the server of each one, and its events.

A response is in the table of all stored responses from the time it is queued. Its row here names the server that runs
it, until its final state is written. Each server locks a file. If the file of a server is not locked, its process has
ended, and the responses that it was running have failed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from handler.config.config import Config
from handler.core.errors import NotKept
from handler.core.framing import dumps
from handler.core.values import new_uuid
from handler.protocols.kernel.stored import CONVERSATION, Detached, KeptItem, kept_items
from handler.protocols.responses.background import failed_event, split_events, with_status
from handler.serving.database import close_lock_file, is_locked, load_json, open_lock_file, owned_by

if TYPE_CHECKING:
    from handler.serving.stored_responses import ResponseDatabase

log = logging.getLogger("handler")

LEAST_SECONDS = 600.0
"""Seconds for which the final state of a background response with `store=false` can be polled."""
_MARGIN = 60.0  # seconds from the time limit of a response until its row may expire
_CHUNK = 1 << 17  # maximum bytes of events in a row once the response has ended
_MAX_FAILED = 100  # maximum number of an ended server's responses that a transaction ends
_MAX_FAILED_BYTES = 1 << 22  # bytes of such responses after which a transaction ends no more
_STOPPED = "the server stopped before the response was complete"
IN_PROGRESS = 2
"""Value of the column `failed` of a response that is being generated."""
_ALL = "answers"  # the table of all stored responses

TABLES = f"""
CREATE TABLE IF NOT EXISTS runs (
    response TEXT PRIMARY KEY REFERENCES {_ALL} (id) ON DELETE CASCADE, server TEXT NOT NULL, streams INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS runs_by_server ON runs (server);
CREATE TABLE IF NOT EXISTS events (
    response TEXT NOT NULL REFERENCES {_ALL} (id) ON DELETE CASCADE, first INTEGER NOT NULL, number INTEGER NOT NULL,
    data BLOB NOT NULL, PRIMARY KEY (response, first)
);
"""
"""Statements that create the tables, if they do not exist yet."""


class EventPage(NamedTuple):
    """Consecutive events of a response.

    Attributes:
        events: the events, each framed. None: the response is not stored any more.
        ended: whether the response has ended, and these are its last events.
    """

    events: Sequence[bytes] | None
    ended: bool = False


class NewEvents(NamedTuple):
    """New events of a running response.

    Attributes:
        first: the number of the first event.
        head: the response without its items, if its state has changed.
    """

    id: str
    first: int
    events: Sequence[bytes]
    head: Mapping[str, Any] | None = None


class BackgroundTables:
    """The rows of background responses in the database of stored responses. All methods may block, and may raise
    sqlite3.Error.

    Args:
        responses: the database of stored responses.
        database: its connection.
        clock: function that returns the time, in seconds since 1970.

    Attributes:
        server: name of this server, which is new with each start.
    """

    def __init__(
        self, responses: ResponseDatabase, database: sqlite3.Connection, config: Config, clock: Callable[[], float]
    ) -> None:
        self._responses, self._database, self._config, self._clock = responses, database, config, clock
        self.server = new_uuid()
        self._lock: int | None = None
        if responses.directory is not None:
            self._lock = open_lock_file(self._lock_path(self.server), os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def _lock_path(self, server: str) -> Path:
        assert self._responses.directory is not None, "only files have locks"
        return self._responses.directory / f"background-{server}.lock"

    def close(self) -> None:
        """Unlock the file of this server."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock_path(self.server).unlink()
            close_lock_file(self._lock)
            self._lock = None

    # -- a response that runs on this server -----------------------------------------------------------------------

    def queue(self, owner: str, detached: Detached) -> None:
        """Write a response that is queued on this server.

        Raises:
            Unavailable: there is no room for the response. Nothing has changed.
        """
        queued = detached.queued
        head = dumps(queued.head)
        size = len(head) + sum(len(item) for _, item in queued.given)
        with self._responses.writing() as database:
            self._responses.insert(owner, queued, head, queued.given, size, failed=IN_PROGRESS)
            limit = self._config.background_timeout + self._config.responses_expiration + _MARGIN
            database.execute(f"UPDATE {_ALL} SET expires = ? WHERE id = ?", (self._clock() + limit, queued.id))
            database.execute("INSERT INTO runs VALUES (?, ?, ?)", (queued.id, self.server, detached.streams))
            if detached.streams:
                self._add_events(queued.id, 0, detached.events)

    def append(self, events: Sequence[NewEvents]) -> set[str]:
        """Append events of running responses, and return the ids of those that are no longer running.

        Their final state has been written, or they have been deleted, by another server.
        """
        with self._responses.writing() as database:
            running = self._running()
            for new in events:
                if new.id not in running:
                    continue
                if new.head is not None:
                    database.execute(f"UPDATE {_ALL} SET head = ? WHERE id = ?", (dumps(new.head), new.id))
                if new.events:
                    self._add_events(new.id, new.first, new.events)
        return {new.id for new in events} - running

    def _running(self) -> set[str]:
        rows = self._database.execute("SELECT response FROM runs WHERE server = ?", (self.server,))
        return {id for (id,) in rows}

    def end(
        self,
        owner: str,
        detached: Detached,
        response: Mapping[str, Any],
        events: Sequence[bytes],
        *,
        needs_room: bool = True,
    ) -> bool:
        """Write the final state of a response with its last events. Return False if it is no longer running here.

        Args:
            events: the events that have not been written yet.
            needs_room: whether to check that the owner has room. A response without output needs none.

        Raises:
            Unavailable: there is no room for the response. Nothing has changed.
        """
        id, first = detached.queued.id, len(detached.queued.given)
        head = dumps({name: value for name, value in response.items() if name != "output"})
        items = kept_items(response["output"])
        with self._responses.writing() as database:
            ended = database.execute("UPDATE runs SET server = '' WHERE response = ? AND server = ?", (id, self.server))
            if not ended.rowcount:
                return False
            rows = [(id, position, True, *item) for position, item in enumerate(items, first)]
            database.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", rows)
            if response["status"] in ("completed", "incomplete"):
                self._append_to_conversation(owner, detached, items)
            num_bytes = self._pack(id, events) if detached.streams else 0
            size = len(head) + sum(len(item) for _, item in (*detached.queued.given, *items)) + num_bytes
            self._end(id, head, response["status"], size)
            if needs_room:
                self._responses.make_room(owner, id, size)
        return True

    def _append_to_conversation(self, owner: str, detached: Detached, output: Sequence[KeptItem]) -> None:
        """Append the items of a response to its conversation, if it has one that has not been deleted."""
        id = detached.queued.previous
        if id.startswith(CONVERSATION):
            with contextlib.suppress(NotKept):
                conversation = self._responses.conversations.find(owner, id)
                self._responses.conversations.append(conversation.number, [*detached.queued.given, *output])

    def _end(self, id: str, head: bytes, status: str, size: int) -> None:
        now, kind = self._clock(), f"SELECT kind FROM {_ALL} WHERE id = ?"
        (kept_as,) = self._database.execute(kind, (id,)).fetchone()
        seconds = self._config.responses_expiration if kept_as == "response" else LEAST_SECONDS
        values = (head, status in ("failed", "cancelled"), size, now, now + seconds, id)
        query = f"UPDATE {_ALL} SET head = ?, failed = ?, size = ?, used = ?, expires = ? WHERE id = ?"
        self._database.execute(query, values)

    def _add_events(self, id: str, first: int, events: Sequence[bytes]) -> None:
        row = (id, first, len(events), b"".join(events))
        self._database.execute("INSERT INTO events VALUES (?, ?, ?, ?)", row)
        self._database.execute(f"UPDATE {_ALL} SET size = size + ? WHERE id = ?", (len(row[3]), id))

    def _pack(self, id: str, last: Sequence[bytes]) -> int:
        """Replace the events of a response with fewer rows, add its last events, and return the total size in bytes."""
        rows = self._database.execute("SELECT data FROM events WHERE response = ? ORDER BY first", (id,)).fetchall()
        events = [*split_events(b"".join(map(_unpacked, rows))), *last]
        self._database.execute("DELETE FROM events WHERE response = ?", (id,))
        total = first = 0
        while first < len(events):
            end, size = first, 0
            while end < len(events) and size < _CHUNK:
                size += len(events[end])
                end += 1
            packed = zlib.compress(b"".join(events[first:end]), 1)
            self._database.execute("INSERT INTO events VALUES (?, ?, ?, ?)", (id, first, end - first, packed))
            total += len(packed)
            first = end
        return total

    # -- any response of an owner ----------------------------------------------------------------------------------

    def streams(self, owner: str, id: str) -> bool | None:
        """Return whether an owner's response has events, or None if it is not a background response."""
        condition = f"id = ? AND {owned_by(owner)} AND expires > ?"
        query = f"SELECT runs.streams FROM runs JOIN {_ALL} ON id = response WHERE {condition}"
        row = self._database.execute(query, (id, owner, self._clock())).fetchone()
        return None if row is None else bool(row[0])

    def read(self, owner: str, id: str, first: int, limit: int) -> EventPage:
        """Return events of a response, in order.

        Args:
            first: number of the first event.
            limit: number of bytes after which reading stops.
        """
        with self._responses.reading():
            condition = f"id = ? AND {owned_by(owner)} AND expires > ?"
            query = f"SELECT server FROM runs JOIN {_ALL} ON id = response WHERE {condition}"
            row = self._database.execute(query, (id, owner, self._clock())).fetchone()
            if row is None:
                return EventPage(None)
            query = "SELECT first, data FROM events WHERE response = ? AND first + number > ? ORDER BY first"
            events, size = list[bytes](), 0
            for start, data in self._database.execute(query, (id, first)):
                for event in split_events(_unpacked((data,)))[max(0, first - start) :]:
                    if size >= limit:
                        return EventPage(events)
                    events.append(event)
                    size += len(event)
        return EventPage(events, ended=not row[0])

    def cancel(self, owner: str, id: str) -> bool:
        """Cancel a response that is running on another server, which will detect it. Return whether it was running."""
        with self._responses.writing() as database:
            condition = f"id = ? AND {owned_by(owner)} AND server != ''"
            query = f"SELECT head FROM {_ALL} JOIN runs ON response = id WHERE {condition}"
            row = database.execute(query, (id, owner)).fetchone()
            if row is None:
                return False
            self._end_elsewhere(id, with_status(load_json(row[0]), "cancelled"), ())
        return True

    def _end_elsewhere(self, id: str, response: Mapping[str, Any], events: Sequence[bytes]) -> None:
        self._database.execute("UPDATE runs SET server = '' WHERE response = ?", (id,))
        (streams, size) = self._database.execute(
            f"SELECT streams, size FROM runs JOIN {_ALL} ON id = response WHERE id = ?", (id,)
        ).fetchone()
        if streams:
            self._pack(id, events)
        head = dumps({name: value for name, value in response.items() if name != "output"})
        self._end(id, head, response["status"], size)

    def recover(self) -> bool:
        """Fail some responses of servers whose processes have ended. Return whether there may be more."""
        rows = self._database.execute("SELECT DISTINCT server FROM runs WHERE server NOT IN ('', ?)", (self.server,))
        ended = [
            server
            for (server,) in rows.fetchall()
            if self._responses.directory is None or not is_locked(self._lock_path(server))
        ]
        for server in ended:
            if self._fail_some(server):
                return True
            with contextlib.suppress(OSError):
                self._lock_path(server).unlink()
        return False

    def _fail_some(self, server: str) -> bool:
        """Fail some responses of a server. Return whether there may be more."""
        with self._responses.writing() as database:
            query = f"SELECT id, head, size FROM {_ALL} JOIN runs ON response = id WHERE server = ? LIMIT ?"
            rows, size = database.execute(query, (server, _MAX_FAILED)).fetchall(), 0
            for number, (id, head, num_bytes) in enumerate(rows, 1):
                try:
                    stored = load_json(head)
                except sqlite3.DatabaseError as error:  # it must not keep the others from ending
                    log.error("deleting response %s, because it cannot be read: %s", id, error)
                    database.execute(f"DELETE FROM {_ALL} WHERE id = ?", (id,))
                else:
                    self._fail_elsewhere(id, stored)
                size += num_bytes
                if number == _MAX_FAILED or size > _MAX_FAILED_BYTES:
                    return True
        return False

    def _fail_elsewhere(self, id: str, stored: Mapping[str, Any]) -> None:
        response = with_status(stored, "failed", _STOPPED)
        query = "SELECT first + number FROM events WHERE response = ? ORDER BY first DESC LIMIT 1"
        row = self._database.execute(query, (id,)).fetchone()
        self._end_elsewhere(id, response, () if row is None else (failed_event(row[0], response),))
        log.warning("response %s failed: %s", id, _STOPPED)


def _unpacked(row: tuple[bytes]) -> bytes:
    """Return the events in a row, which are compressed after the response has ended."""
    (data,) = row
    if data.startswith(b"event: "):
        return data
    try:
        return zlib.decompress(data)
    except zlib.error as error:
        raise sqlite3.DatabaseError(f"the events of a response are damaged: {error}") from None
