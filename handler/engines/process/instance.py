"""One start of an engine: the channel, and the process or thread at its other end."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import threading
from typing import Any

from handler.core.child_processes import python
from handler.engines.process.engine_loop import Spec, run
from handler.engines.process.ipc import ChannelClosed, encode, send_all, send_some
from handler.engines.process.places import ANYWHERE, Place

_MAIN = "handler.engines.process.engine_process:main"


class EngineInstance:
    """One start of an engine: a channel, and the process or thread at its other end."""

    def __init__(self, spec: Spec, *, isolated: bool, place: Place = ANYWHERE) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        self._unsent = bytearray()
        self._late: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._num_late = self._num_late_sent = 0
        self._process: subprocess.Popen[bytes] | None = None
        if isolated:
            with contextlib.closing(theirs), contextlib.ExitStack() as on_failure:
                on_failure.callback(self.channel.close)
                self._process = subprocess.Popen(
                    python(_MAIN, str(theirs.fileno())),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **place.environ},
                    start_new_session=True,  # for `process_group.py`, which ends the session with the engine
                )
                on_failure.pop_all()
            if place.cores:  # before it has the Spec: until then it has one thread, which later ones take after
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(self._process.pid, place.cores)
            self.put(spec)
            self.flush()
        else:
            from handler.engines import load

            threading.Thread(target=run, args=(lambda: load(*spec), theirs), name="engine", daemon=True).start()
        threading.Thread(target=self._send_late, name="engine-commands", daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def put(self, command: Any) -> bool:
        """Keep a command for the next `flush`; return whether it is the first one."""
        is_first = not self._unsent
        self._unsent += encode(command)
        return is_first

    def flush(self) -> None:
        """Send the commands without waiting: a thread sends what the channel has no room for.

        An engine in a long step reads nothing. One that has ended reads nothing more; `step` will notice.
        """
        if not self._unsent:
            return
        data, self._unsent = memoryview(self._unsent), bytearray()
        if self._num_late == self._num_late_sent:
            try:
                data = data[send_some(self.channel, data) :]
            except ChannelClosed:
                return
        if data:
            self._num_late += 1
            self._late.put(data)

    def _send_late(self) -> None:
        with contextlib.suppress(ChannelClosed, ValueError):  # closed, by its end or by ours
            while (data := self._late.get()) is not None:
                send_all(self.channel, data)
                self._num_late_sent += 1

    def stop(self, grace: float = 0.0) -> None:
        """Close the channel, wait `grace` seconds, then kill the process. A hung thread stays, but is not heard."""
        self._late.put(None)
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if grace:
                    self._process.wait(grace)
            self._process.kill()
            # A large process takes long to end, and the caller must not wait for it.
            threading.Thread(target=self._process.wait, name="engine-reaper", daemon=not grace).start()

    def exit_reason(self) -> str:
        """Say how it ended, for the log and the clients."""
        if self._process is None:
            return "its thread ended"
        try:
            code = self._process.wait(0.1)
        except subprocess.TimeoutExpired:
            return "it closed its channel"
        return f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"
