"""Sessions of DJL Serving's Python package: values of a client's, kept in files, for a model.py that makes its own.

The server's own sessions (docs/sessions.md) are others: clients open those, and formatters get them with a request.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("handler.formatters")

_MEMORY = Path("/dev/shm")
_EXPIRATION = ".expiration_ts"


class Session:
    """Values by name, each in a file of the session's directory.

    Args:
        expiration_ts: seconds since 1970; None for what was kept of an earlier start.
    """

    def __init__(self, session_id: str, session_root: str, expiration_ts: float | None = None) -> None:
        self.session_id = session_id
        self.files_path = os.path.join(session_root, session_id)
        self.expiration_ts = self.get(_EXPIRATION) if expiration_ts is None else expiration_ts

    def put(self, key: str, value: Any) -> None:
        self._path(key).write_bytes(pickle.dumps(value))

    def get(self, key: str, d: Any = None) -> Any:
        """Return a value; `d` without one."""
        path = self._path(key)
        return pickle.loads(path.read_bytes()) if path.is_file() else d

    def get_as_numpy(self, key: str, shape: Any, dtype: Any = "float32", create: bool = False) -> Any:
        """Return an array whose content is the file's; with `create` of zeros."""
        path = self._path(key)
        if create:
            path.write_bytes(b"")
        return importlib.import_module("numpy").memmap(path, dtype=dtype, mode="r+", shape=shape)

    def remove(self) -> bool:
        """Remove the directory.

        Raises:
            ValueError: there is none.
        """
        if not os.path.isdir(self.files_path):
            raise ValueError(f"session directory does not exist: {self.session_id}")
        shutil.rmtree(self.files_path)
        return True

    def _path(self, key: str) -> Path:
        return Path(self.files_path, key.replace("/", "-"))


class SessionManager:
    """The sessions below one directory.

    Args:
        properties: `sessions_path` and `sessions_expiration` (seconds) count; both have defaults.

    Raises:
        PermissionError: another user made the directory, whose files would be executed as pickles.
    """

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.expiration = int(properties.get("sessions_expiration", 1200))
        home = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        self.sessions_path = str(properties.get("sessions_path", home / "djl_sessions"))
        os.makedirs(self.sessions_path, mode=0o700, exist_ok=True)
        if os.stat(self.sessions_path).st_uid != os.geteuid():
            raise PermissionError(f"sessions_path={self.sessions_path}: another user made it")
        if properties.get("sessions_s3url"):
            log.warning("sessions_s3url has no effect here: sessions stay in %s", self.sessions_path)
        self.sessions = {id: Session(id, self.sessions_path) for id in os.listdir(self.sessions_path)}

    def create_session(self) -> Session:
        """Open a session, and remove those that have expired."""
        for session in [one for one in self.sessions.values() if self._is_over(one)]:
            self.close_session(session.session_id)
        session = Session(str(uuid.uuid4()), self.sessions_path, time.time() + self.expiration)
        os.mkdir(session.files_path, mode=0o700)
        session.put(_EXPIRATION, session.expiration_ts)
        self.sessions[session.session_id] = session
        return session

    def get_session(self, session_id: str | None) -> Session | None:
        """Return an open session; None where none is named, a new one is asked for, or it has expired.

        Raises:
            ValueError: there is no such session.
        """
        if not session_id or session_id == "NEW_SESSION":
            return None
        session = self._named(session_id)
        return None if self._is_over(session) else session

    def close_session(self, session_id: str) -> None:
        """Remove a session.

        Raises:
            ValueError: there is no such session.
        """
        self._named(session_id).remove()
        del self.sessions[session_id]

    def _named(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise ValueError(f"session not found: {session_id}")
        return self.sessions[session_id]

    def _is_over(self, session: Session) -> bool:
        return session.expiration_ts is None or time.time() > session.expiration_ts
