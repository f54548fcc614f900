"""Tasks of requests that are captured (`option.capture_requests`)."""

from __future__ import annotations

from typing import Any

from handler.core.errors import ServingError
from handler.core.values import Delta
from handler.scheduler.batcher import ClientChannel
from handler.serving.request.life import CLOSED
from handler.serving.request.plan import Intake
from handler.serving.request.task import RequestTask
from handler.serving.request_log import Capture


class CapturedTask(RequestTask):
    """The task of a request that is captured. All bytes of its response pass the task.

    Args:
        capture: records the body and the response.
        arguments: arguments of `RequestTask`.
    """

    __slots__ = ("capture",)

    def __init__(self, capture: Capture, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.capture = capture

    async def parse(self, body: bytes) -> None:
        self.capture.start(body)
        await super().parse(body)

    def note_decoded(self, intake: Intake) -> None:
        """Capture the decompressed body, unless the response will contain the id of a session."""
        self.capture.start(intake.body, is_decompressed=bool(intake.head.encoding))
        if intake.decoded is not None and intake.decoded.session_call:
            self.capture.drop()
        intake.size += len(intake.body)

    def write_tokens_to(self, channel: ClientChannel) -> None:
        """Do nothing, so that all bytes are added to `unsent`."""

    def _put(self, data: bytes, delta: Delta) -> None:
        self.capture.add(data)
        super()._put(data, delta)

    def _keep(self, line: bytes) -> None:
        self.capture.add(line)
        super()._keep(line)

    def _refuse(self, error: ServingError, body: Any = None) -> None:
        super()._refuse(error, body)
        self.capture.replace(self.unsent[0])

    def close(self) -> None:
        if self.phase is not CLOSED:
            is_sent = self.finished and not self.unsent
            self.capture.end(self.head.headers, (self.status, self.content_type) if is_sent else None)
        super().close()
