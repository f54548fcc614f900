"""The endpoint that the emulator serves: what SageMaker would know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from deploy.local.answers import ApiError, validation_error

MIB = 2**20
ACCOUNT = "000000000000"


class Status(str, Enum):
    CREATING = "Creating"
    IN_SERVICE = "InService"
    FAILED = "Failed"


@dataclass(frozen=True)
class Limits:
    """SageMaker's, in seconds and bytes (contract section 1)."""

    invoke: float = 60.0
    stream: float = 480.0
    body: int = 25 * MIB
    small_body: int = 6 * MIB
    """The API's model and the inference router still say so: beyond it the log warns."""
    inline_body: int = 128_000
    """Of an asynchronous request without InputLocation."""
    asynchronous: float = 900.0
    """Where the request names no InvocationTimeoutSeconds."""


@dataclass(frozen=True)
class Component:
    """An inference component.

    Args:
        adapter: its name in the container, where the component is an adapter.
        copies: 0: scaled to zero, which clients are told as "no capacity".
    """

    adapter: str | None = None
    copies: int = 1


@dataclass
class Endpoint:
    """One endpoint. It changes while it is served: pings set `status` and `healthy`, tests set `components`.

    Args:
        container: URL of what stands for the container, without a path.
        region: None: requests may be signed for any.
        components: by name; empty: the endpoint has a model, and takes no InferenceComponentName.
        part_bytes: cut the stream's parts at so many bytes, to try clients; None: as the container wrote.
    """

    container: str
    name: str = "local"
    region: str | None = None
    variant: str = "AllTraffic"
    components: Mapping[str, Component] = field(default_factory=dict)
    limits: Limits = Limits()
    part_bytes: int | None = None
    status: Status = Status.IN_SERVICE
    healthy: bool = True

    def admit(self, name: str, variant: str | None) -> None:
        """Whether it takes requests now.

        Raises:
            Rejected: not that one, not yet, or not at the moment.
        """
        if name != self.name:
            raise validation_error(f"Endpoint {name} of account {ACCOUNT} not found.")
        if self.status is not Status.IN_SERVICE:
            raise validation_error(f"Endpoint {name} of account {ACCOUNT} not found: it is {self.status.value}.")
        if variant is not None and variant != self.variant:
            raise validation_error(f"Variant {variant} of endpoint {name} not found: it has {self.variant}.")
        if not self.healthy:
            raise ApiError(503, "ServiceUnavailable", f"No instance of endpoint {name} answers its health check.")

    def adapter(self, component: str | None) -> str | None:
        """The adapter that the named component stands for.

        Raises:
            Rejected: a name is missing, unknown or not wanted, or there is no copy of that component.
        """
        if not self.components:
            if component is not None:
                raise validation_error(
                    f"Inference Component Name header is not allowed: endpoint {self.name} has no inference components."
                )
            return None
        if component is None:
            raise validation_error(
                "Inference Component Name header is required for endpoints to which you plan to deploy inference "
                f"components. Endpoint {self.name} has: {', '.join(self.components)}."
            )
        known = self.components.get(component)
        if known is None:
            raise validation_error(f"Inference Component {component} of endpoint {self.name} not found.")
        if not known.copies:
            raise validation_error(
                "Inference Component has no capacity to process this request. ApplicationAutoScaling may be in "
                "progress (if configured), or its copy count must be raised."
            )
        return known.adapter

    def log_stream(self, region: str) -> str:
        """ARN of the container's log, as ModelError names it."""
        group = f"/aws/sagemaker/Endpoints/{self.name}"
        return f"arn:aws:logs:{region}:{ACCOUNT}:log-group:{group}:log-stream:{self.variant}/local"
