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
from handler.plugins.api import Session
from handler.protocols.api import SessionAnswer
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat, Headers
from handler.protocols.kernel.readers import quote
from handler.protocols.kernel.reply import PreparedDocument

log = logging.getLogger("handler")

HEADER = "x-amzn-sagemaker-session-id"
"""Request header with the session id, in lower case like all headers that hosts pass on."""
NEW_SESSION, CLOSE = "NEW_SESSION", "CLOSE"

_OFF = "Invalid payload. stateful sessions not enabled"
_HOW = "option.enable_stateful_sessions=true enables them"
_MEMORY, _FOLDER = Path("/dev/shm"), "sagemaker_sessions"
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PLAIN = re.compile(r"[a-zA-Z0-9_-]{1,256}")  # ids that SageMaker's API allows; messages show them without quotes
_LONGEST_CALL = 1 << 16  # maximum size of a body that is searched for `requestType`, in bytes
_PERIOD = 10.0  # seconds between two searches for expired sessions
_END_SECONDS = 5.0  # maximum seconds for removing sessions at the end


class Sessions:
    """The sessions in a root directory. Thread-safe; processes with the same root directory share its sessions.

    A session id is a random UUID whose first eight hex digits are replaced by the expiry time in seconds since 1970.
    The directory name is therefore the only state of a session. Other workers can find the session, and so can the
    server after a crash.

    Args:
        root: directory that contains the directories of all sessions.
        lifetime: number of seconds after which a session expires.
        most: maximum number of open sessions in the root directory.
        clock: function that returns the time, in seconds since 1970.

    Raises:
        OSError: the root directory cannot be created or is not writable.
    """

    def __init__(self, root: Path, lifetime: int, most: int, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._lifetime = lifetime
        self._most = most
        self._clock = clock
        self._opened: set[str] = set()  # opened by this process and not removed yet
        self._closed: queue.SimpleQueue[str] = queue.SimpleQueue()  # closed ids to remove; "" wakes the thread
        self._ended = False
        self._make_root()
        with tempfile.TemporaryFile(dir=root):
            pass
        self.remove_expired()
        atexit.register(self.end)

    def look_after(self) -> None:
        """Start the thread that removes closed and expired sessions."""
        threading.Thread(target=self._remove_in_time, name="sessions", daemon=True).start()

    def open(self) -> Session:
        """Open a session.

        Raises:
            Overloaded: too many sessions are open.
            ServingError: the session directory cannot be created.
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
            InvalidSession: the session does not exist, or has expired.
        """
        if _ID.fullmatch(id) and not self._is_over(id) and (self._root / id).is_dir():
            return self._session(id)
        shown = id if _PLAIN.fullmatch(id) else quote(id)
        raise InvalidSession(f"Bad request: session not found: {shown}")

    def close(self, id: str) -> None:
        """Close a session. Its directory is immediately renamed to mark it as expired, and is removed soon afterwards.

        Raises:
            InvalidSession: the session does not exist, or has expired.
            ServingError: the session directory cannot be renamed.
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
        """Remove the directories of closed and expired sessions, including sessions of other processes."""
        with suppress(OSError):  # without a root directory there are no sessions
            for name in os.listdir(self._root):
                if _ID.fullmatch(name) and self._is_over(name):
                    self._remove(name)
        self._opened -= {id for id in self._opened.copy() if self._is_over(id)}  # other processes remove some of them

    def end(self) -> None:
        """Remove the sessions that this process has opened. Further calls have no effect.

        If this takes too long, the remaining sessions expire later. The next server that uses the root directory
        removes them.
        """
        atexit.unregister(self.end)
        self._ended = True
        self._closed.put("")
        deadline = time.monotonic() + _END_SECONDS
        for id in self._opened.copy():
            if time.monotonic() > deadline:
                log.warning("%d session directories in %s were not removed in time", len(self._opened), self._root)
                self._opened.clear()
                return
            self._remove(id)

    def _num_directories(self) -> int:
        """Return the number of session directories of all processes, or 0 if the file system does not count them."""
        try:
            return max(0, self._root.stat().st_nlink - 2)  # each subdirectory adds a link to its parent
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
            path.rmdir()  # for an empty directory, ten times as fast as rmtree
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
        self._opened.discard(name)

    def _remove_in_time(self) -> None:
        """Remove closed sessions immediately, and check for expired sessions periodically."""
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
    else:  # in memory if possible, otherwise with the temporary files
        root = (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())) / _FOLDER
        if os.path.lexists(root) and root.lstat().st_uid != os.geteuid():
            _refuse(config, root, "it was created by another user of this machine; set option.sessions_path")
            return None
    existing = next(path for path in (root, *root.parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        _refuse(config, root, f"{existing} is not a writable directory")
        return None
    return root


def _refuse(config: Config, root: Path, why: str) -> None:
    """Raise an error if an option enables sessions, otherwise log a warning that they are off."""
    problem = config.problem("option.sessions_path", root, f"sessions cannot be stored in this directory: {why}")
    if config.enable_stateful_sessions or config.sessions_path is not None:
        raise ConfigError(problem)
    log.warning("stateful sessions are off: %s", problem.message)


# -- calls that open or close sessions ---------------------------------------------------------------------------


def session_of(sessions: Sessions | None, id: str) -> Session | None:
    """Return the session from the header of a request, or None for NEW_SESSION.

    Raises:
        InvalidSession: the session does not exist or has expired, or sessions are off.
    """
    if sessions is None:
        raise InvalidSession(f"{_OFF}, X-Amzn-SageMaker-Session-Id header not supported; {_HOW}")
    return None if id == NEW_SESSION else sessions.find(id)


def session_call(body: bytes) -> str:
    """Return the `requestType` of a body, which is NEW_SESSION or CLOSE, or "" for all other bodies.

    Raises:
        InvalidSession: the body has another `requestType`, or has further fields.
    """
    if len(body) > _LONGEST_CALL or b'"requestType"' not in body:
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


def answer_call(sessions: Sessions | None, call: str, id: str | None, errors: ErrorFormat) -> ParsedRequest:
    """Open or close a session, and return a parsed request that already contains its response.

    Args:
        call: NEW_SESSION or CLOSE.
        id: session id from the request header, if any.
        errors: format for errors that occur before the response is sent.

    Raises:
        ServingError: sessions are off, the session id is missing, or the session cannot be opened or closed.
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
