"""A request in flight that is captured: its task keeps its body, and the bytes of its answer."""

from __future__ import annotations

import time
from typing import Any

from handler.core.errors import ServingError
from handler.core.values import Delta, Finish
from handler.protocols.kernel.base import Reply
from handler.scheduler.active import Channel
from handler.serving.request_log import Answer, Captured, RequestLog
from handler.serving.request_task import RequestTask


class CapturedTask(RequestTask):
    """Hands its request to the log when it is closed.

    Args:
        id: the request's, which a client may use again.
        path: with the query.
        more: those of `RequestTask`.
    """

    keeps_body = True

    __slots__ = ("_at", "_body", "_id", "_log", "_path", "_pieces")

    def __init__(self, log: RequestLog, id: str, path: str, *more: Any) -> None:
        super().__init__(*more)
        self._log, self._path = log, path
        self._at = time.time()
        self._id = f"{id}@{self._at:.6f}"
        self._body: bytes | None = None
        self._pieces: list[bytes] = []

    async def parse(self, body: bytes) -> None:
        self._body = body
        await super().parse(body)

    def write_tokens_to(self, channel: Channel) -> None:
        """Without effect: all tokens pass by here, the short way would lead past it."""

    def _put(self, reply: Reply, data: bytes, finish: Finish | None) -> None:
        if data:
            self._pieces.append(data)
        super()._put(reply, data, finish)

    def _keep(self, line: bytes) -> None:
        self._pieces.append(line)
        super()._keep(line)

    def _fail(self, index: int, delta: Delta) -> None:
        finished = self.finished
        super()._fail(index, delta)
        if not finished and self.error is None:  # the stream's last line tells it
            self._pieces.append(self.unsent[-1])

    def _refuse(self, error: ServingError, body: Any = None) -> None:
        super()._refuse(error, body)
        self._pieces[:] = self.unsent

    def close(self) -> None:
        if not self.closed and self._body is not None:
            answer = Answer(self.status, self.content_type, self._pieces) if self.finished else None
            self._log.put(Captured(self._id, self._at, self._path, self._headers, self._body, answer))
            self._body = None
        super().close()
