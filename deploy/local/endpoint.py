"""The state of the emulated endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from deploy.local.answers import ApiError, validation_error
from deploy.local.capture import Capture

MIB = 2**20
ACCOUNT = "000000000000"


class Status(str, Enum):
    CREATING = "Creating"
    IN_SERVICE = "InService"
    FAILED = "Failed"


@dataclass(frozen=True)
class Limits:
    """SageMaker's limits, in seconds and bytes."""

    invoke: float = 60.0
    stream: float = 480.0
    body: int = 25 * MIB
    small_body: int = 6 * MIB
    """The API model's limit; the log warns above it."""
    inline_body: int = 128_000
    """Maximum of an asynchronous request's inline body."""
    asynchronous: float = 900.0
    """Default of InvocationTimeoutSeconds."""


@dataclass
class Component:
    """An inference component. Pings set `healthy` of one with a container of its own, while the endpoint is served.

    Args:
        adapter: the adapter's name in the container, if the component is an adapter.
        copies: 0: scaled to zero, and requests get "no capacity".
        container: URL of a container of its own; None: the endpoint's.
        base: name of the component with the adapter's container; None: no adapter, or the endpoint's container.
        ended: its container has exited.
    """

    adapter: str | None = None
    copies: int = 1
    container: str | None = None
    base: str | None = None
    healthy: bool = True
    ended: bool = False


@dataclass
class Endpoint:
    """One endpoint. Pings set `status` and `healthy` while it is served, tests set `components`.

    Args:
        container: URL of the container, without a path.
        region: the required region of signatures; None: any.
        components: by name; empty: the endpoint has a model, and accepts no InferenceComponentName.
        capture: what is written of requests; None: nothing.
        part_bytes: cut the stream's parts at so many bytes, to test clients; None: as the container writes.
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
    account: str = ACCOUNT
    ended: bool = False
    capture: Capture | None = None

    def admit(self, name: str, variant: str | None) -> None:
        """Check that the endpoint accepts requests.

        Raises:
            ApiError: another name or variant, or not in service.
        """
        if name != self.name:
            raise validation_error(f"Endpoint {name} of account {self.account} not found.")
        if self.status is not Status.IN_SERVICE:
            raise validation_error(f"Endpoint {name} of account {self.account} not found: it is {self.status.value}.")
        if variant is not None and variant != self.variant:
            raise validation_error(f"Variant {variant} of endpoint {name} not found: it has {self.variant}.")
        if not self.healthy:
            raise ApiError(503, "ServiceUnavailable", f"No instance of endpoint {name} answers its health check.")

    def component(self, component: str | None) -> Component | None:
        """Return the named component; None: the endpoint has no components.

        Raises:
            ApiError: a name is missing, unknown or not allowed, or the component has no copy, or none that is healthy.
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
        base = known if known.base is None else self.components[known.base]
        if not base.healthy:
            raise ApiError(
                503, "ServiceUnavailable", f"No copy of Inference Component {component} answers its health check."
            )
        return known

    def log_stream(self, region: str, component: str | None = None) -> str:
        """Return the ARN of the container's log, as in ModelError: the component's, if it has a container."""
        known = self.components.get(component) if component is not None else None
        group = f"/aws/sagemaker/Endpoints/{self.name}"
        if known is not None and known.container is not None:
            group = f"/aws/sagemaker/InferenceComponents/{known.base or component}"
        return f"arn:aws:logs:{region}:{self.account}:log-group:{group}:log-stream:{self.variant}/local"
