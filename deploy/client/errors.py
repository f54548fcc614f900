"""Errors of a request, by what the caller may do about them.

    RequestFailed                any of the errors below; all are `DeployError`s, which the command line prints
    ├── NotStarted               nothing was computed, so the request may be sent again (`retry.py` does)
    │   ├── NoCapacity           scaled to zero, or all copies starting
    │   ├── Throttled            too many requests for the account or endpoint
    │   ├── NotReady             the model is loading, or SageMaker has no healthy instance
    │   └── Unreachable          no connection to SageMaker
    ├── NotSent                  SageMaker does not accept it: too large, a wrong parameter, an unknown endpoint
    │   └── NoSuchEndpoint
    ├── Forbidden                AWS denies the call
    ├── ModelRefused             the container answered 4xx: the request is wrong (LMI: 424, also used for others)
    ├── ModelFailed              the container answered 5xx, its engine failed, or it failed within a stream
    │   └── ModelBusy            429 or 503: its queue is full, or it is stopping
    ├── ServiceFailed            SageMaker itself failed; the model may have run
    └── Broken                   the answer is incomplete; the model may still be running
        ├── TimedOut             SageMaker's limit (60 s, of a stream 8 min), or the client's
        └── StreamBroken         the connection was lost, or the stream ended early

Each keeps the part of the answer that arrived before it in `arrived`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deploy.errors import DeployError, NotAllowed, NotThere

if TYPE_CHECKING:
    from deploy.client.streaming.events import Event


class RequestFailed(DeployError):
    """A failed request.

    Attributes:
        original_status: the container's status; None: unknown; 0: SageMaker reports that there was none.
        log_stream: ARN of the container's log; None: unknown.
        request_id: AWS's id of the request, for its support; None: unknown.
        arrived: a stream's events before the failure, in order.
    """

    def __init__(
        self,
        message: str,
        advice: str = "",
        *,
        original_status: int | None = None,
        log_stream: str | None = None,
        request_id: str | None = None,
        arrived: Sequence[Event] = (),
    ) -> None:
        super().__init__(message, advice)
        self.original_status = original_status
        self.log_stream = log_stream
        self.request_id = request_id
        self.arrived = tuple(arrived)


class NotStarted(RequestFailed): ...


class NoCapacity(NotStarted): ...


class Throttled(NotStarted): ...


class NotReady(NotStarted): ...


class Unreachable(NotStarted): ...


class NotSent(RequestFailed): ...


class NoSuchEndpoint(NotSent, NotThere): ...


class Forbidden(RequestFailed, NotAllowed): ...


class ModelRefused(RequestFailed): ...


class ModelFailed(RequestFailed): ...


class ModelBusy(ModelFailed): ...


class ServiceFailed(RequestFailed): ...


class Broken(RequestFailed): ...


class TimedOut(Broken): ...


class StreamBroken(Broken): ...
