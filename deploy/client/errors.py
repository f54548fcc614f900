"""What can become of a request, by what the caller may do about it.

    RequestFailed                anything below; all are `DeployError`s, so the command line prints them
    ├── NotStarted               nothing was computed, so the same request may be sent again (`retry.py` does)
    │   ├── NoCapacity           scaled to zero, or all copies starting
    │   ├── Throttled            too many requests for the account or endpoint
    │   ├── NotReady             the model is being loaded, or SageMaker has nothing to send it to
    │   └── Unreachable          no connection to SageMaker
    ├── NotSent                  not a request that SageMaker takes: too large, a wrong parameter, an unknown endpoint
    │   └── NoSuchEndpoint
    ├── Forbidden                AWS denies the call
    ├── ModelRefused             the container answered 4xx: the request is wrong (LMI: 424, as for much else)
    ├── ModelFailed              the container answered 5xx, its engine failed, or it failed within a stream
    │   └── ModelBusy            429 or 503: its queue is full, or it is stopping
    ├── ServiceFailed            SageMaker itself failed; whether the model ran is not known
    └── Broken                   the answer did not come whole; the model may be at it still
        ├── TimedOut             SageMaker's limit (60 s, of a stream 8 min), or ours
        └── StreamBroken         the connection went, or the stream ended before the answer did

Every one keeps what had arrived of the answer in `arrived`. Contract sagemaker.md, section 1.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deploy.errors import DeployError, NotAllowed, NotThere

if TYPE_CHECKING:
    from deploy.client.streaming.events import Event


class RequestFailed(DeployError):
    """A request failed.

    Attributes:
        original_status: what the container answered; None where none did, 0 where SageMaker says that none did.
        log_stream: the ARN of the container's log, where SageMaker named it.
        request_id: AWS's, to be told to its support.
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
