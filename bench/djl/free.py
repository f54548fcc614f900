"""Our handler on an engine that costs nothing and steps when it is asked to, like the stub under upstream's handler.

It is a worker's model.py: every step of DJL's brings every request one token.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from handler.core.values import Finish
from handler.engines.base import EngineInfo, EngineRequest, Output, Step
from handler.engines.process.supervisor import EngineSupervisor, Soon, State, now
from handler.entry import handle as handle
from handler.serving import start as loading


class Free(EngineSupervisor):
    """Supervises nothing. No process is at the other end of its channel, which can always be read."""

    def __init__(self) -> None:  # without the supervisor's own, which starts an engine
        self.info = EngineInfo("free", "1", "none", "none", 1 << 20)
        self.statistics = None
        self.state = State.READY
        self.reason = ""
        self.restarts = 0
        self._left: dict[int, int] = {}
        self._channel, self._theirs = socket.socketpair()
        self._theirs.send(b"x")

    def attach(
        self, *, watch: Callable[[int | None], None], on_change: Callable[[State], None], soon: Soon = now
    ) -> None:
        watch(self._channel.fileno())
        on_change(self.state)

    def add(self, request: EngineRequest) -> None:
        self._left[request.key] = request.sampling.max_new_tokens

    def cancel(self, key: int) -> None:
        self._left.pop(key, None)

    def step(self, timeout: float = 0.0) -> list[Step]:
        left = self._left
        last = [Output(key, (5,), (-0.5,), Finish.LENGTH) for key, count in left.items() if count == 1]
        keys = [key for key, count in left.items() if count > 1]
        self._left = {key: left[key] - 1 for key in keys}
        return [Step(keys, [5] * len(keys), [-0.5] * len(keys), last)]

    def close(self, grace: float = 0.0) -> None:
        self._channel.close()
        self._theirs.close()


def _start(*arguments: Any) -> Free:
    return Free()


vars(loading)["start_engine"] = _start
