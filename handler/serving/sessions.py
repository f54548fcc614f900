"""Stateful sessions, each with its own directory, and the responses to calls that open or close sessions.

Headers, messages, statuses and defaults follow AWS's model-hosting-container-standards 0.1.16 (docs/sessions.md lists
the differences).
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import queue
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from handler.config.config import Config
from handler.core.errors import ConfigError, InvalidSession, Overloaded, ServingError
from handler.core.framing import dumps
from handler.core.owners import names_of
from handler.plugins.api import Session
from handler.protocols.api import SessionAnswer
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat, Headers
from handler.protocols.kernel.readers import quote
from handler.protocols.kernel.reply import PreparedDocument
from handler.serving.database import check_directory

log = logging.getLogger("handler")

HEADER = "x-amzn-sagemaker-session-id"
"""Request header with the session id, in lower case like all headers that hosts pass on."""
NEW_SESSION, CLOSE = "NEW_SESSION", "CLOSE"

SESSION_CALL = b'"requestType"'
"""Part of every body for which `session_call` may return a call."""

_OFF = "Invalid payload. stateful sessions not enabled"
_HOW = "option.enable_stateful_sessions=true enables them"
_MEMORY, _FOLDER = Path("/dev/shm"), "sagemaker_sessions"
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PLAIN = re.compile(r"[a-zA-Z0-9_-]{1,256}")  # ids that SageMaker's API allows; messages show them without quotes
MAX_CALL_SIZE = 1 << 16  # maximum size of a body that is searched for `requestType`, in bytes
REMOVAL_PERIOD = 10.0  # seconds between two searches for expired sessions
_END_SECONDS = 5.0  # maximum seconds for removing sessions at the end


class Sessions:
    """The sessions in a root directory. Thread-safe; processes with the same root directory share its sessions.

    A session id is a random UUID whose first eight hex digits are replaced by the expiry time in seconds since 1970.
    Sessions of an owner are in the owner's subdirectory of `owners`, all others in the root directory itself. The path
    of the directory is therefore the only state of a session. Other workers can find the session, and so can the
    server after a crash.

    Args:
        root: directory that contains the directories of all sessions.
        lifetime: number of seconds after which a session expires.
        most: maximum number of open sessions in the root directory. Beyond it, the owner with the most sessions loses
            its newest one.
        clock: function that returns the time, in seconds since 1970.

    Raises:
        OSError: the root directory cannot be created or is not writable.
    """

    def __init__(self, root: Path, lifetime: int, most: int, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._lifetime = lifetime
        self._most = most
        self._clock = clock
        self._opened: dict[str, dict[str, None]] = {}  # ids by owner in order, opened here and not removed yet
        self._closed: queue.SimpleQueue[Path | None] = queue.SimpleQueue()  # to remove; None wakes the thread
        self._ended = False
        self._make_home("")
        with tempfile.TemporaryFile(dir=root):
            pass
        self.remove_expired()
        atexit.register(self.end)

    def look_after(self) -> None:
        """Start the thread that removes closed and expired sessions."""
        threading.Thread(target=self._remove_in_time, name="sessions", daemon=True).start()

    def open(self, owner: str = "") -> Session:
        """Open a session.

        Raises:
            Overloaded: too many sessions are open, and no other owner has more of them.
            ServingError: the session directory cannot be created.
        """
        self._make_room(owner)
        id = f"{math.ceil(self._clock() + self._lifetime):08x}{str(uuid.uuid4())[8:]}"
        try:
            self._make_directory(id, owner)
        except OSError as error:
            raise ServingError(f"Failed to create session: {error.strerror}") from None
        self._opened.setdefault(owner, {})[id] = None
        return self._session(id, owner)

    def find(self, id: str, owner: str = "") -> Session:
        """Return an open session of an owner.

        Raises:
            InvalidSession: the owner has no such session, or it has expired.
        """
        if _ID.fullmatch(id) and not self._is_over(id):
            for name in names_of(owner):
                if self._path(id, name).is_dir():
                    return self._session(id, name)
        quoted_id = id if _PLAIN.fullmatch(id) else quote(id)
        raise InvalidSession(f"Bad request: session not found: {quoted_id}")

    def close(self, id: str, owner: str = "") -> None:
        """Close a session. Its directory is immediately renamed to mark it as expired, and is removed soon afterwards.

        Raises:
            InvalidSession: the owner has no such session, or it has expired.
            ServingError: the session directory cannot be renamed.
        """
        directory, closed = self.find(id, owner).directory, f"{0:08x}{id[8:]}"
        path = directory.with_name(closed)
        try:
            directory.rename(path)
        except FileNotFoundError:  # another call was faster
            raise InvalidSession(f"Bad request: session not found: {id}") from None
        except OSError as error:
            raise ServingError(f"Failed to close session: {error.strerror}") from None
        opened = self._opened.setdefault(self._owner_at(path), {})
        opened.pop(id, None)
        opened[closed] = None
        self._closed.put(path)

    def remove_expired(self) -> None:
        """Remove the directories of closed and expired sessions, including sessions of other processes."""
        for owner in ["", *self._owners()]:
            home = self._home(owner)
            with suppress(OSError):  # without a directory there are no sessions
                for name in os.listdir(home):
                    if _ID.fullmatch(name) and self._is_over(name):
                        self._remove(home / name, owner)
        for owner, ids in list(self._opened.items()):  # other processes remove some of them
            for id in [id for id in ids.copy() if self._is_over(id)]:
                ids.pop(id, None)
            if not ids:
                self._opened.pop(owner, None)
        self._remove_empty_homes()

    def end(self) -> None:
        """Remove the sessions that this process has opened. Further calls have no effect.

        If this takes too long, the remaining sessions expire later. The next server that uses the root directory
        removes them.
        """
        atexit.unregister(self.end)
        self._ended = True
        self._closed.put(None)
        deadline = time.monotonic() + _END_SECONDS
        opened, self._opened = self._opened, {}
        paths = [(self._path(id, owner), owner) for owner, ids in opened.items() for id in ids]
        for number, (path, owner) in enumerate(paths):
            if time.monotonic() > deadline:
                log.warning("%d session directories in %s were not removed in time", len(paths) - number, self._root)
                return
            self._remove(path, owner)
        self._remove_empty_homes()

    def _make_room(self, owner: str) -> None:
        """Close the newest session of the owner with the most sessions, if too many sessions are open.

        Raises:
            Overloaded: no other owner has more sessions.
        """
        numbers = {each: self._number(each) for each in {"", owner, *self._owners()}}
        if sum(numbers.values()) < self._most:
            return
        largest = max(numbers, key=numbers.__getitem__)
        if numbers[largest] <= numbers[owner] + 1:
            raise self._full()
        with suppress(OSError, InvalidSession):  # another call has closed it
            if not (newest := self._newest(largest)):
                raise self._full()
            self.close(newest, largest)

    def _full(self) -> Overloaded:
        return Overloaded(f"{self._most} sessions are open (option.sessions_max)")

    def _newest(self, owner: str) -> str:
        """Return the id of the newest session of an owner, if possible one that this process has opened. Return "" if
        its directory contains only other directories.
        """
        opened = (id for id in reversed(self._opened.get(owner, {}).copy()) if not self._is_over(id))
        return next(opened, "") or max(filter(_ID.fullmatch, os.listdir(self._home(owner))), default="")

    def _number(self, owner: str) -> int:
        """Return the number of an owner's sessions in all processes, or in this one if the file system does not count
        directories.
        """
        try:
            num_links = self._home(owner).stat().st_nlink  # each subdirectory adds a link to its parent
        except OSError:
            num_links = 0
        if num_links < 2:
            return len(self._opened.get(owner, ()))
        return num_links - 2 - (not owner and self._owners_home.is_dir())

    def _owners(self) -> list[str]:
        """Return the owners that have a directory."""
        try:
            return os.listdir(self._owners_home)
        except OSError:
            return []

    @property
    def _owners_home(self) -> Path:
        return self._root / "owners"

    def _home(self, owner: str) -> Path:
        return self._owners_home / owner if owner else self._root

    def _path(self, id: str, owner: str) -> Path:
        return self._home(owner) / id

    def _session(self, id: str, owner: str) -> Session:
        return Session(id, self._path(id, owner), datetime.fromtimestamp(_expiry(id), timezone.utc))

    def _is_over(self, id: str) -> bool:
        return self._clock() >= _expiry(id)

    def _make_directory(self, id: str, owner: str) -> None:
        for may_fail in (True, False):
            self._make_home(owner)
            try:
                return self._path(id, owner).mkdir(mode=0o700)
            except FileNotFoundError:  # another thread or process removed the owner's directory while it was empty
                if not may_fail:
                    raise

    def _make_home(self, owner: str) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if owner:
            self._owners_home.mkdir(mode=0o700, exist_ok=True)
            self._home(owner).mkdir(mode=0o700, exist_ok=True)

    def _remove_empty_homes(self) -> None:
        with suppress(OSError):
            for home in self._owners_home.iterdir():
                with suppress(OSError):  # sessions are open
                    home.rmdir()
            self._owners_home.rmdir()

    def _remove(self, path: Path, owner: str) -> None:
        try:
            path.rmdir()  # for an empty directory, ten times as fast as rmtree
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
        self._opened.get(owner, {}).pop(path.name, None)

    def _remove_in_time(self) -> None:
        """Remove closed sessions immediately, and check for expired sessions periodically."""
        look_at = time.monotonic() + REMOVAL_PERIOD
        while not self._ended:
            try:
                path = self._closed.get(timeout=max(0.0, look_at - time.monotonic()))
            except queue.Empty:
                look_at = time.monotonic() + REMOVAL_PERIOD
                self.remove_expired()
            else:
                if path is not None:
                    self._remove(path, self._owner_at(path))

    def _owner_at(self, path: Path) -> str:
        """Return the owner of the session with this directory."""
        return path.parent.name if path.parent != self._root else ""


def _expiry(id: str) -> int:
    return int(id[:8], 16)


def configured_sessions(config: Config) -> Sessions | None:
    """Return the sessions as the options configure them, or None if sessions are off.

    Raises:
        ConfigError: an option enables sessions, but the root directory cannot be used.
    """
    root = sessions_root(config)
    if root is None:
        return None
    try:
        sessions = Sessions(root, config.sessions_expiration, config.sessions_max)
    except OSError as error:
        _refuse(config, root, str(error.strerror))
        return None
    sessions.look_after()
    return sessions


def sessions_root(config: Config) -> Path | None:
    """Return the root directory of sessions, which may not exist yet, or None if sessions are off.

    If the directory cannot be used, sessions are off unless an option enables them.

    Raises:
        ConfigError: an option enables sessions, but the directory cannot be used, or it is AWS's default directory and
            was created by another user, who could read the ids of sessions.
    """
    if not config.stateful_sessions:
        return None
    if config.sessions_path is not None:
        root = Path(config.sessions_path).absolute()
    else:
        root = default_root()
        if is_of_another_user(root):
            _refuse(config, root, "it was created by another user of this machine; set option.sessions_path")
            return None
    try:
        check_directory(root)
    except OSError as error:
        _refuse(config, root, error.strerror or str(error))
        return None
    return root


def default_root() -> Path:
    """Return AWS's directory, in memory if possible, otherwise with the temporary files. It may not exist yet."""
    return (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())) / _FOLDER


def is_of_another_user(root: Path) -> bool:
    """Return whether another user of this machine has created a directory, and can read and change what it contains."""
    return os.path.lexists(root) and root.lstat().st_uid != os.geteuid()


def _refuse(config: Config, root: Path, reason: str) -> None:
    """Raise an error if an option enables sessions, otherwise log a warning that they are off."""
    problem = config.problem("option.sessions_path", root, f"sessions cannot be stored in this directory: {reason}")
    if config.enable_stateful_sessions or config.sessions_path is not None:
        raise ConfigError(problem)
    log.warning("stateful sessions are off: %s", problem.message)


# -- calls that open or close sessions ---------------------------------------------------------------------------


def session_of(sessions: Sessions | None, id: str, owner: str) -> Session | None:
    """Return the session from the header of a request, or None for NEW_SESSION.

    Raises:
        InvalidSession: the owner has no such session, or it has expired, or sessions are off.
    """
    if sessions is None:
        raise InvalidSession(f"{_OFF}, X-Amzn-SageMaker-Session-Id header not supported; {_HOW}")
    return None if id == NEW_SESSION else sessions.find(id, owner)


def session_call(body: bytes) -> str:
    """Return the `requestType` of a body, which is NEW_SESSION or CLOSE, or "" for all other bodies.

    Raises:
        InvalidSession: the body has another `requestType`, or has further fields.
    """
    if len(body) > MAX_CALL_SIZE or SESSION_CALL not in body:
        return ""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # the dialect will report the error
    if not isinstance(value, dict) or "requestType" not in value:
        return ""
    call = value["requestType"]
    if call not in (NEW_SESSION, CLOSE):
        raise InvalidSession(f"requestType={quote(str(call))}: must be {NEW_SESSION} or {CLOSE}")
    if len(value) > 1:
        raise InvalidSession(f"requestType={call}: a body that opens or closes a session must have no other fields")
    return str(call)


def answer_call(sessions: Sessions | None, call: str, id: str | None, owner: str, errors: ErrorFormat) -> ParsedRequest:
    """Open or close a session, and return a parsed request that already contains its response.

    Args:
        call: NEW_SESSION or CLOSE.
        id: session id from the request header, if any.
        owner: owner of the request, or "" without an owner.
        errors: format for errors that occur before the response is sent.

    Raises:
        ServingError: sessions are off, the session id is missing, or the session cannot be opened or closed.
    """
    if sessions is None:
        raise InvalidSession(f"{_OFF}; {_HOW}")
    headers: Headers
    if call == NEW_SESSION:
        session = sessions.open(owner)
        value = f"{session.id}; Expires={session.expires:%Y-%m-%dT%H:%M:%SZ}"
        message = f"Session {session.id} created"
        headers = [("x-amzn-sagemaker-new-session-id", value), (HEADER, value)]
    else:
        if not id:
            raise InvalidSession("Session ID is required in request headers to close a session")
        sessions.close(id, owner)
        message = f"Session {id} closed"
        headers = [("x-amzn-sagemaker-closed-session-id", id)]
    answer: SessionAnswer = {"result": message}
    return ParsedRequest((), PreparedDocument(dumps(answer)), errors, headers=lambda timing: headers)
