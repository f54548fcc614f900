"""A deployment on the endpoint of another one: what it is called, and which settings are that one's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.spec import Spec

_AT = "@"
"""Stands in no name of SageMaker's: a guest's tag is never the tag of an endpoint's own deployment."""


def deployment_of(name: str, endpoint: str | None = None) -> str:
    """Return what a deployment is called in tags: its name, and that of the endpoint that it is a guest on.

    Args:
        endpoint: of another deployment; None: this one has its own, of its own name.
    """
    return name if endpoint is None else f"{name}{_AT}{endpoint}"


def name_and_endpoint(deployment: str) -> tuple[str, str]:
    """Return a deployment's name, and its endpoint's."""
    name, _, endpoint = deployment.partition(_AT)
    return name, endpoint or name


def is_guest(deployment: str) -> bool:
    """Whether the deployment's endpoint is another's."""
    return _AT in deployment


def guest_contradictions(spec: Spec) -> Iterator[str]:
    """Say what does not go with `endpoint`."""
    if spec.endpoint is None:
        return
    if spec.endpoint == spec.name:
        yield f"endpoint: {spec.endpoint} is this deployment's own name: take another name, or leave endpoint out"
    if not spec.components:
        yield "endpoint: only components go onto another deployment's endpoint"
    if spec.instance.type == "auto":
        yield "endpoint: instance.type must be named: the type of that endpoint's instances"
    if spec.batch is not None:
        yield "batch: does not go with endpoint, which a job does not need: give it a file of its own"
    theirs = {
        "routing": spec.routing != "least_outstanding",
        "capture": spec.capture is not None,
        "reservation": spec.reservation is not None,
        "network": bool(spec.network.subnets) or spec.network.isolated,
        "async": spec.asynchronous is not None,
        "encryption.volume_key": spec.encryption.volume_key is not None,
        "timeouts.provision": spec.timeouts.provision is not None,
        "instance.pools": bool(spec.instance.pools),
        "instance.managed": spec.instance.managed is not None,
        "instance.ami": spec.instance.ami != "auto",
        "instance.volume_gb": spec.instance.volume_gb is not None,
        "sagemaker.endpoint_config": bool(spec.sagemaker.endpoint_config),
        "sagemaker.variant": bool(spec.sagemaker.variant),
        "sagemaker.endpoint": bool(spec.sagemaker.endpoint),
    }
    for path, given in theirs.items():
        if given:
            yield f"{path} is of the endpoint {spec.endpoint}: it belongs in the file of that endpoint's deployment"
