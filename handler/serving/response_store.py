"""Answers that are kept for later requests, in memory or in a directory: `option.responses_store`.

SQLite holds them in either place, on a thread of its own. Each belongs to the API key of the request that made it.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from handler.config.config import Config
from handler.core.errors import ConfigError, Conflict, Overloaded, Problem, Unavailable
from handler.core.framing import dumps
from handler.protocols.kernel.kept import KeptAnswer, Recalled, Wanted, kept_items
from handler.serving.response_database import BUSY_SECONDS, ItemPage, ResponseDatabase, Row

T = TypeVar("T")

log = logging.getLogger("handler")

_PERIOD = 10.0  # seconds between two looks for expired ones
_END_SECONDS = 5.0  # that the end waits for what is being written
_MOST_WAITING = 1000  # calls


class ResponseStore:
    """Keeps answers. Calls return at once; the future is done when the store's thread has done them, in order.

    Args:
        database: nobody else uses it from now on; the store closes it.
    """

    def __init__(self, database: ResponseDatabase) -> None:
        self.most_bytes = database.most_bytes
        self._database = database
        self._in_progress: weakref.WeakValueDictionary[str, InProgress] = weakref.WeakValueDictionary()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def keeper(self, owner: str) -> OwnersKeeper:
        """Return what keeps an owner's answers."""
        return OwnersKeeper(self, owner)

    @property
    def may_be_full(self) -> bool:
        """Whether an owner may find no room for an answer; `check_room` looks."""
        return self._database.may_be_full

    def check_room(self, owner: str, size: int) -> Future[None]:
        """Look whether an answer of so many bytes can be kept; the future raises Unavailable where it cannot.

        Raises:
            Overloaded: too many calls wait.
        """
        return self._submit(lambda: self._database.check_room(owner, size))

    def recall(self, owner: str, wanted: Wanted) -> Future[Recalled]:
        """Recall what a request needs.

        Raises:
            Overloaded: too many calls wait.
        """
        if self._begun(owner, wanted.previous) is not None:
            return _done(Recalled("in_progress"))
        return self._submit(lambda: self._database.recall(owner, wanted))

    def response(self, owner: str, id: str) -> Future[dict[str, Any] | None]:
        """Return a response, also one in progress; None where the owner has none of this id."""
        if (begun := self._begun(owner, id)) is not None:
            return _done({**begun.answer})
        return self._submit(lambda: self._database.response(owner, id))

    def input_items(
        self, owner: str, id: str, *, limit: int, after: str, newest_first: bool
    ) -> Future[ItemPage | None]:
        """Return a page of a response's own input; None where the owner has no such response, or it no such item."""
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
        """Note an answer in progress, for as long as what it returns is held."""
        one = InProgress(owner, answer)
        self._in_progress[id] = one
        return one

    def write(self, feed: Callable[[], T]) -> Future[T]:
        """Have a reply's `feed` called, which keeps its answer: so it is written before anybody is told."""
        return self._put(feed)

    def keep(self, owner: str, answer: KeptAnswer) -> bool:
        """Keep an answer that has ended; return whether it is kept. `write` calls what calls this."""
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
        """Write what is left, for a moment; a second call changes nothing."""
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
    """An answer in progress, known while its reply holds this."""

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
    """Return the store that the options ask for; None where nothing is kept.

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
        key, why = "option.responses_store", getattr(error, "strerror", None) or error
        told = f"{key}={place}: no responses can be stored there: {why}; must be off, memory or a directory"
        raise ConfigError(Problem(config.where(key), key, told)) from None
    return ResponseStore(database)
