"""Stateful sessions: a directory each, opened, found, closed and removed; and the answers to calls about them.

Headers, messages, statuses and defaults are those of AWS's model-hosting-container-standards 0.1.16 (docs/sessions.md
lists the differences).
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
from handler.plugins.api import Session
from handler.protocols.api import SessionAnswer
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat, Headers
from handler.protocols.kernel.readers import quote
from handler.protocols.kernel.reply import PreparedDocument

log = logging.getLogger("handler")

HEADER = "x-amzn-sagemaker-session-id"
"""The request header that names the session, in lower case, as hosts pass headers on."""
NEW_SESSION, CLOSE = "NEW_SESSION", "CLOSE"

_OFF = "Invalid payload. stateful sessions not enabled"
_HOW = "option.enable_stateful_sessions=true enables them"
_MEMORY, _FOLDER = Path("/dev/shm"), "sagemaker_sessions"
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PLAIN = re.compile(r"[a-zA-Z0-9_-]{1,256}")  # what SageMaker's API lets through: messages show it without quotes
_LONGEST_CALL = 1 << 16  # bytes of a body that is searched for `requestType`
_PERIOD = 10.0  # seconds between two looks for expired sessions
_END_SECONDS = 5.0  # that the end may take to remove sessions


class Sessions:
    """The sessions below one directory. Thread-safe; processes with the same directory share its sessions.

    An id is a random UUID whose first eight hex digits are the second of its expiry, since 1970. So a session's state
    is only the name of its directory: another worker finds it, and so does the next start after a crash.

    Args:
        lifetime: of a session, in seconds, from when it is opened.
        most: sessions that may be open in the directory.
        clock: returns the seconds since 1970.

    Raises:
        OSError: the directory cannot be made or written.
    """

    def __init__(self, root: Path, lifetime: int, most: int, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._lifetime = lifetime
        self._most = most
        self._clock = clock
        self._opened: set[str] = set()  # here, and not removed yet
        self._closed: queue.SimpleQueue[str] = queue.SimpleQueue()  # to be removed; "" wakes the thread
        self._ended = False
        self._make_root()
        with tempfile.TemporaryFile(dir=root):
            pass
        self.remove_expired()
        atexit.register(self.end)

    def look_after(self) -> None:
        """Remove closed and expired sessions from now on, on one thread for all sessions."""
        threading.Thread(target=self._remove_in_time, name="sessions", daemon=True).start()

    def open(self) -> Session:
        """Open a session.

        Raises:
            Overloaded: as many as may be are open.
            ServingError: its directory cannot be made.
        """
        if max(len(self._opened), self._num_directories()) >= self._most:
            raise Overloaded(f"{self._most} sessions are open (option.sessions_max)")
        id = f"{math.ceil(self._clock() + self._lifetime):08x}{str(uuid.uuid4())[8:]}"
        try:
            self._make_root()
            (self._root / id).mkdir(mode=0o700)
        except OSError as error:
            raise ServingError(f"Failed to create session: {error.strerror}") from None
        self._opened.add(id)
        return self._session(id)

    def find(self, id: str) -> Session:
        """Return an open session.

        Raises:
            InvalidSession: there is none, or it has expired.
        """
        if _ID.fullmatch(id) and not self._is_over(id) and (self._root / id).is_dir():
            return self._session(id)
        shown = id if _PLAIN.fullmatch(id) else quote(id)
        raise InvalidSession(f"Bad request: session not found: {shown}")

    def close(self, id: str) -> None:
        """Close a session. Its directory gets the name of an expired one at once, and is removed soon.

        Raises:
            InvalidSession: there is none, or it has expired.
            ServingError: its directory cannot be renamed.
        """
        found, closed = self.find(id), f"{0:08x}{id[8:]}"
        try:
            found.directory.rename(self._root / closed)
        except FileNotFoundError:  # another call was faster
            raise InvalidSession(f"Bad request: session not found: {id}") from None
        except OSError as error:
            raise ServingError(f"Failed to close session: {error.strerror}") from None
        self._opened.discard(id)
        self._opened.add(closed)
        self._closed.put(closed)

    def remove_expired(self) -> None:
        """Remove the directories of closed and expired sessions, of whichever process."""
        with suppress(OSError):  # without the directory there are none
            for name in os.listdir(self._root):
                if _ID.fullmatch(name) and self._is_over(name):
                    self._remove(name)
        self._opened -= {id for id in self._opened.copy() if self._is_over(id)}  # another process removes some

    def end(self) -> None:
        """Remove the sessions that this process has opened; a second call changes nothing.

        Sessions that take too long are left: they expire, and the next start with the same directory removes them.
        """
        atexit.unregister(self.end)
        self._ended = True
        self._closed.put("")
        deadline = time.monotonic() + _END_SECONDS
        for id in self._opened.copy():
            if time.monotonic() > deadline:
                log.warning("%d session directories are left in %s", len(self._opened), self._root)
                self._opened.clear()
                return
            self._remove(id)

    def _num_directories(self) -> int:
        """Count the directories, including other processes'; 0 if the file system does not count them."""
        try:
            return max(0, self._root.stat().st_nlink - 2)  # each has a link to its parent
        except OSError:
            return 0

    def _session(self, id: str) -> Session:
        return Session(id, self._root / id, datetime.fromtimestamp(_expiry(id), timezone.utc))

    def _is_over(self, id: str) -> bool:
        return self._clock() >= _expiry(id)

    def _make_root(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _remove(self, name: str) -> None:
        path = self._root / name
        try:
            path.rmdir()  # without files: a tenth of the time
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
        self._opened.discard(name)

    def _remove_in_time(self) -> None:
        """Remove a closed session at once; check all sessions, possibly many, once per period."""
        look_at = time.monotonic() + _PERIOD
        while not self._ended:
            try:
                name = self._closed.get(timeout=max(0.0, look_at - time.monotonic()))
            except queue.Empty:
                look_at = time.monotonic() + _PERIOD
                self.remove_expired()
            else:
                if name:
                    self._remove(name)


def _expiry(id: str) -> int:
    return int(id[:8], 16)


def configured_sessions(config: Config) -> Sessions | None:
    """Return the store of sessions that the options ask for; None if they are off.

    Raises:
        ConfigError: their directory cannot be used.
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
    """Return the directory of the sessions that the options ask for, which may not exist yet; None if they are off.

    Raises:
        ConfigError: it cannot be used, or another user made AWS's default, and could read the ids of sessions there.
    """
    if not config.stateful_sessions:
        return None
    if config.sessions_path is not None:
        root = Path(config.sessions_path).absolute()
    else:  # in memory, else among the temporary files
        root = (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())) / _FOLDER
        if os.path.lexists(root) and root.lstat().st_uid != os.geteuid():
            _refuse(config, root, "another user of this machine made it; set option.sessions_path")
            return None
    existing = next(path for path in (root, *root.parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        _refuse(config, root, f"{existing} is not a directory that can be written to")
        return None
    return root


def _refuse(config: Config, root: Path, why: str) -> None:
    """Refuse to start if an option asks for sessions; otherwise log that there are none."""
    problem = config.problem("option.sessions_path", root, f"sessions cannot be stored there: {why}")
    if config.enable_stateful_sessions or config.sessions_path is not None:
        raise ConfigError(problem)
    log.warning("stateful sessions are off: %s", problem.message)


# -- calls -------------------------------------------------------------------------------------------------------


def session_of(sessions: Sessions | None, id: str) -> Session | None:
    """Return the session that a request's header names; None for NEW_SESSION.

    Raises:
        InvalidSession: it is unknown or has expired, or sessions are off.
    """
    if sessions is None:
        raise InvalidSession(f"{_OFF}, X-Amzn-SageMaker-Session-Id header not supported; {_HOW}")
    return None if id == NEW_SESSION else sessions.find(id)


def session_call(body: bytes) -> str:
    """Return what a body asks for: NEW_SESSION, CLOSE, or "" if it does not concern a session.

    Raises:
        InvalidSession: it has a `requestType`, and another value of it or other fields.
    """
    if len(body) > _LONGEST_CALL or b'"requestType"' not in body:
        return ""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # the dialect says what is wrong
    if not isinstance(value, dict) or "requestType" not in value:
        return ""
    call = value["requestType"]
    if call not in (NEW_SESSION, CLOSE):
        raise InvalidSession(f"requestType={quote(str(call))}: must be {NEW_SESSION} or {CLOSE}")
    if len(value) > 1:
        raise InvalidSession(f"requestType={call}: a body that opens or closes a session has no other fields")
    return str(call)


def answer_call(sessions: Sessions | None, call: str, id: str | None, errors: ErrorFormat) -> ParsedRequest:
    """Open or close a session.

    Args:
        id: that the request's header names, if any.
        errors: renders a failure before the answer is sent.

    Raises:
        ServingError: sessions are off, the call names no session, or its directory cannot be made.
    """
    if sessions is None:
        raise InvalidSession(f"{_OFF}; {_HOW}")
    told: Headers
    if call == NEW_SESSION:
        session = sessions.open()
        value = f"{session.id}; Expires={session.expires:%Y-%m-%dT%H:%M:%SZ}"
        done, told = f"Session {session.id} created", [("x-amzn-sagemaker-new-session-id", value), (HEADER, value)]
    else:
        if not id:
            raise InvalidSession("Session ID is required in request headers to close a session")
        sessions.close(id)
        done, told = f"Session {id} closed", [("x-amzn-sagemaker-closed-session-id", id)]
    answer: SessionAnswer = {"result": done}
    return ParsedRequest((), PreparedDocument(dumps(answer)), errors, headers=lambda timing: told)
