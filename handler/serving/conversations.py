"""Stores OpenAI's conversations in the database of stored responses, and locks them for the responses in progress.

The store thread makes all calls of this module.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.errors import ConversationLocked, Unavailable
from handler.core.framing import dumps
from handler.protocols.kernel.stored import KeptItem
from handler.protocols.openai.api import Page
from handler.protocols.responses.api import duplicate_item, no_conversation, no_conversation_item
from handler.serving.database import close_lock_file, load_json, open_lock_file, owned_by

TABLES = """
CREATE TABLE IF NOT EXISTS conversations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, head BLOB NOT NULL,
    size INTEGER NOT NULL, used REAL NOT NULL, expires REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS conversations_by_expiry ON conversations (expires);
CREATE INDEX IF NOT EXISTS conversations_by_owner ON conversations (owner, used, size);
CREATE TABLE IF NOT EXISTS conversation_items (
    conversation INTEGER NOT NULL REFERENCES conversations (number) ON DELETE CASCADE, position INTEGER NOT NULL,
    id TEXT NOT NULL, item BLOB NOT NULL, PRIMARY KEY (conversation, position), UNIQUE (conversation, id)
);
CREATE INDEX IF NOT EXISTS conversation_items_by_id ON conversation_items (id)
"""

_NOBODY = "-"  # owner of deleted conversations of which some items are left; the owner "" is everyone
_ITEM = 128  # approximate bytes of an item in the database besides its JSON
MAX_REMOVED = 2000
"""The maximum number of items that a transaction removes, so that it does not keep others waiting."""
_MAX_IDS = 500  # maximum number of ids in a query
_LOCK = "hhqqi4x"  # the kernel's struct flock: kind, origin, first byte, number of bytes, process


class Locks:
    """Locks on conversations. Servers with the same database file share them, and the system releases those of a
    process that ends in whichever way.

    Args:
        path: file with a byte for each conversation, which is created for the first lock, or None without other
            servers.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: int | None = None
        self._held: set[int] = set()

    def take(self, number: int) -> None:
        """Lock a conversation.

        Raises:
            ConversationLocked: a response in this conversation is in progress.
            Unavailable: the file system does not support locks.
        """
        if number in self._held or not self._set(fcntl.F_WRLCK, number):
            raise ConversationLocked
        self._held.add(number)

    def is_held(self, number: int) -> bool:
        """Return whether a response in a conversation is in progress, on any of the servers."""
        try:
            return number in self._held or self._lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, number) != fcntl.F_UNLCK
        except OSError:  # without locks, no response is in progress
            return False

    def release(self, number: int) -> None:
        self._held.discard(number)
        self._set(fcntl.F_UNLCK, number)

    def close(self) -> None:
        if self._file is not None:
            close_lock_file(self._file)
            self._file = None

    def _set(self, kind: int, number: int) -> bool:
        """Change the lock on the byte of a conversation, and return whether this was possible."""
        try:
            self._lock(fcntl.F_OFD_SETLK, kind, number)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            raise Unavailable("conversations cannot be locked", detail=str(error)) from None
        return True

    def _lock(self, command: int, kind: int, number: int) -> int:
        """Run a command for the lock on the byte of a conversation, and return the kind of lock that it found.

        These locks belong to the open file: two stores in a process exclude each other too.
        """
        if self._path is None:
            return fcntl.F_UNLCK
        if self._file is None:
            self._file = open_lock_file(self._path, os.O_RDWR | os.O_CREAT)
        lock = struct.pack(_LOCK, kind, os.SEEK_SET, number, 1, 0)
        kind_before: int = struct.unpack(_LOCK, fcntl.fcntl(self._file, command, lock))[0]
        return kind_before


class ResponseTurn:
    """The turn of a request in a conversation, in which no other response may be in progress meanwhile."""

    def __init__(self, locks: Locks) -> None:
        self._locks = locks
        self._has_ended = False
        self.number = 0
        """The number of the conversation, or 0 while the request has no turn."""

    def take(self, number: int) -> None:
        """Lock a conversation.

        Raises:
            ConversationLocked: another request has its turn, or this request has already ended.
            Unavailable: the file system does not support locks.
        """
        if self._has_ended:
            raise ConversationLocked
        self._locks.take(number)
        self.number = number

    def end(self) -> None:
        self._has_ended = True
        number, self.number = self.number, 0
        if number:
            self._locks.release(number)


class StoredConversation(NamedTuple):
    """A stored conversation.

    Attributes:
        head: the conversation object, as JSON.
        size: total size in bytes, as the limits count it.
    """

    number: int
    head: bytes
    size: int


class Conversations:
    """The conversations of all owners. Each owner can access only its own. All methods must be called within a
    transaction of the database, and may raise sqlite3.Error.

    A conversation is in use while a response in it is in progress: it does not expire, and is not deleted to make room.

    Args:
        lifetime: seconds after its last use at which a conversation expires.
        clock: function that returns the time, in seconds since 1970.
        directory: directory of the database file, or None for memory.
    """

    def __init__(
        self, database: sqlite3.Connection, lifetime: float, clock: Callable[[], float], directory: Path | None
    ) -> None:
        self._database, self._lifetime, self._clock = database, lifetime, clock
        self.locks = Locks(None if directory is None else directory / "conversations.lock")

    def find(self, owner: str, id: str, param: str = "") -> StoredConversation:
        """Return a conversation.

        Args:
            param: request field with the id, or "" if the id is in the path.

        Raises:
            NotKept: the owner has no conversation with this id.
        """
        query = f"SELECT expires > ?, number, head, size FROM conversations WHERE id = ? AND {owned_by(owner)}"
        row = self._database.execute(query, (self._clock(), id, owner)).fetchone()
        if row is None or not (row[0] or self.locks.is_held(row[1])):
            raise no_conversation(id, param)
        return StoredConversation(*row[1:])

    def has(self, number: int) -> bool:
        """Return whether a conversation has not been deleted."""
        query = "SELECT 1 FROM conversations WHERE number = ? AND owner != ?"
        return self._database.execute(query, (number, _NOBODY)).fetchone() is not None

    def create(self, owner: str, conversation: dict[str, Any], items: Sequence[KeptItem]) -> int:
        """Write a conversation with its first items, and return its number.

        Raises:
            InvalidPayload: two items have the same id.
        """
        now, head = self._clock(), dumps(conversation)
        values = (conversation["id"], owner, head, len(head), now, now + self._lifetime)
        query = "INSERT INTO conversations (id, owner, head, size, used, expires) VALUES (?, ?, ?, ?, ?, ?)"
        number = self._database.execute(query, values).lastrowid
        assert number is not None, "the row has been inserted"
        self.append(number, items)
        return number

    def update(self, owner: str, id: str, metadata: dict[str, str]) -> tuple[int, Any]:
        """Replace the metadata of a conversation. Return its number, and the conversation.

        Raises:
            NotKept: the owner has no conversation with this id.
        """
        stored = self.find(owner, id)
        conversation = {**load_json(stored.head), "metadata": metadata}
        head = dumps(conversation)
        query = "UPDATE conversations SET head = ?, size = size + ? WHERE number = ?"
        self._database.execute(query, (head, len(head) - len(stored.head), stored.number))
        self.use(stored.number)
        return stored.number, conversation

    def use(self, number: int) -> None:
        """Record that a conversation has been used, and postpone its expiry."""
        now = self._clock()
        query = "UPDATE conversations SET used = ?, expires = ? WHERE number = ?"
        self._database.execute(query, (now, now + self._lifetime, number))

    def use_held(self, numbers: Iterable[int]) -> bool:
        """Record a use of the conversations in which a response is in progress. Return whether there are any."""
        held = [number for number in numbers if self.locks.is_held(number)]
        for number in held:
            self.use(number)
        return bool(held)

    def append(self, number: int, items: Sequence[KeptItem]) -> None:
        """Append items to a conversation.

        Raises:
            InvalidPayload: the conversation would have two items with the same id.
        """
        self._check_ids(number, [id for id, _ in items])
        query = "SELECT coalesce(max(position), -1) + 1 FROM conversation_items WHERE conversation = ?"
        (first,) = self._database.execute(query, (number,)).fetchone()
        rows = [(number, position, *item) for position, item in enumerate(items, first)]
        self._database.executemany("INSERT INTO conversation_items VALUES (?, ?, ?, ?)", rows)
        self._grow(number, sum(len(item) + _ITEM for _, item in items))
        self.use(number)

    def _check_ids(self, number: int, ids: Sequence[str]) -> None:
        if len({*ids}) < len(ids):
            raise duplicate_item(next(id for id in ids if ids.count(id) > 1))
        for first in range(0, len(ids), _MAX_IDS):
            some = ids[first : first + _MAX_IDS]
            parameters = ", ".join("?" * len(some))
            query = f"SELECT id FROM conversation_items WHERE conversation = ? AND id IN ({parameters}) LIMIT 1"
            if row := self._database.execute(query, (number, *some)).fetchone():
                raise duplicate_item(row[0])

    def _grow(self, number: int, size: int) -> None:
        self._database.execute("UPDATE conversations SET size = size + ? WHERE number = ?", (size, number))

    def items(self, number: int) -> list[bytes]:
        """Return all items of a conversation in order."""
        query = "SELECT item FROM conversation_items WHERE conversation = ? ORDER BY position"
        return [item for (item,) in self._database.execute(query, (number,))]

    def latest_item(self, owner: str, item_id: str) -> tuple[int, int] | None:
        """Find the item with an id in the newest of the owner's conversations that contain this id.

        Returns:
            The number of its row and its size in bytes, or None without such an item.
        """
        query = (
            "SELECT one.rowid, length(item) FROM conversation_items AS one JOIN conversations ON number = conversation "
            f"WHERE one.id = ? AND {owned_by(owner)} AND expires > ? ORDER BY number DESC LIMIT 1"
        )
        row: tuple[int, int] | None = self._database.execute(query, (item_id, owner, self._clock())).fetchone()
        return row

    def page(self, owner: str, id: str, page: Page, reserve: Callable[[int], object]) -> tuple[list[bytes], bool]:
        """Return a page of items, and whether there are more.

        Args:
            reserve: called with the number of bytes to be read next. It may raise an error.

        Raises:
            NotKept: the owner has no conversation with this id, or the conversation has no item `page.after`.
        """
        number = self.find(owner, id).number
        order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
        condition, names = "conversation = ?", [number]
        if page.after:
            condition, names = (
                f"conversation = ? AND position {beyond} ?",
                [number, self._position(number, id, page.after)],
            )
        query = f"FROM conversation_items WHERE {condition} ORDER BY position {order} LIMIT ?"
        (size,) = self._database.execute(
            f"SELECT total(length(item)) FROM (SELECT item {query})", [*names, page.limit]
        ).fetchone()
        reserve(int(size))
        items = [item for (item,) in self._database.execute(f"SELECT item {query}", [*names, page.limit])]
        (read,) = self._database.execute(
            f"SELECT count(*) FROM (SELECT 1 {query})", [*names, page.limit + 1]
        ).fetchone()
        return items, read > len(items)

    def item(self, owner: str, id: str, item_id: str, reserve: Callable[[int], object]) -> bytes:
        """Return an item.

        Raises:
            NotKept: the owner has no conversation with this id, or the conversation has no such item.
        """
        number = self.find(owner, id).number
        position = self._position(number, id, item_id)
        query = "FROM conversation_items WHERE conversation = ? AND position = ?"
        (size,) = self._database.execute(f"SELECT length(item) {query}", (number, position)).fetchone()
        reserve(size)
        item: bytes = self._database.execute(f"SELECT item {query}", (number, position)).fetchone()[0]
        return item

    def _position(self, number: int, id: str, item_id: str) -> int:
        query = "SELECT position FROM conversation_items WHERE conversation = ? AND id = ?"
        row = self._database.execute(query, (number, item_id)).fetchone()
        if row is None:
            raise no_conversation_item(id, item_id)
        position: int = row[0]
        return position

    def delete(self, owner: str, id: str) -> None:
        """Delete a conversation with its items. If it has many, `remove_expired` removes the rest of them.

        Raises:
            NotKept: the owner has no conversation with this id.
        """
        number = self.find(owner, id).number
        self.hide(number)
        self._remove(number, MAX_REMOVED)

    def hide(self, number: int) -> None:
        """Delete a conversation. Its items are removed by `remove_expired`."""
        query = "UPDATE conversations SET owner = ?, head = '', size = 0, expires = 0 WHERE number = ?"
        self._database.execute(query, (_NOBODY, number))

    def hide_expired(self, owner: str) -> None:
        """Delete the expired conversations of an owner. Their items are removed by `remove_expired`."""
        query = "SELECT number FROM conversations WHERE owner = ? AND expires <= ?"
        for (number,) in self._database.execute(query, (owner, self._clock())).fetchall():
            if not self.use_held([number]):
                self.hide(number)

    def _remove(self, number: int, limit: int) -> int:
        """Remove up to `limit` items of a conversation, and the conversation if it has no more. Return their number."""
        query = "SELECT rowid FROM conversation_items WHERE conversation = ? LIMIT ?"
        removed = self._database.execute(
            f"DELETE FROM conversation_items WHERE rowid IN ({query})", (number, limit)
        ).rowcount
        if removed < limit:
            self._database.execute("DELETE FROM conversations WHERE number = ?", (number,))
        return removed

    def delete_item(self, owner: str, id: str, item_id: str) -> Any:
        """Delete an item, and return its conversation.

        Raises:
            NotKept: the owner has no conversation with this id, or the conversation has no such item.
        """
        stored = self.find(owner, id)
        key = (stored.number, self._position(stored.number, id, item_id))
        condition = "FROM conversation_items WHERE conversation = ? AND position = ?"
        (size,) = self._database.execute(f"SELECT length(item) {condition}", key).fetchone()
        self._database.execute(f"DELETE {condition}", key)
        self._grow(stored.number, -(size + _ITEM))
        self.use(stored.number)
        return load_json(stored.head)

    def remove_expired(self) -> bool:
        """Remove expired conversations, up to a number of items. Return whether there may be more."""
        left = MAX_REMOVED
        while left > 0:
            query = "SELECT number, owner FROM conversations WHERE expires <= ? LIMIT 1"
            row = self._database.execute(query, (self._clock(),)).fetchone()
            if row is None:
                return False
            number, owner = row
            left -= 1
            if owner == _NOBODY or not self.use_held([number]):
                left -= self._remove(number, left)
        return True

    def close(self) -> None:
        self.locks.close()
