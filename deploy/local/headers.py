"""Which headers pass: from the client to the container, and back (contract section 1.1).

SageMaker strips all others. TargetModel and TargetContainerHostname are of multi-model and multi-container endpoints,
EnableExplanations of endpoints with an explainer: this one is none of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.local.answers import validation_error

_AMZN = "X-Amzn-SageMaker-"
CUSTOM_ATTRIBUTES = _AMZN + "Custom-Attributes"
SESSION_ID = _AMZN + "Session-Id"
COMPONENT = _AMZN + "Inference-Component"
ADAPTER = _AMZN + "Adapter-Identifier"
VARIANT = _AMZN + "Target-Variant"
INFERENCE_ID = _AMZN + "Inference-Id"
NEW_SESSION = "NEW_SESSION"

_PASSED = (CUSTOM_ATTRIBUTES, SESSION_ID, INFERENCE_ID, VARIANT, _AMZN + "Prefix-Aware-Id")
_REFUSED = {
    _AMZN + "Target-Model": "TargetModel is for multi-model endpoints",
    _AMZN + "Target-Container-Hostname": "TargetContainerHostname is for multi-container endpoints",
    _AMZN + "Enable-Explanations": "EnableExplanations is for endpoints with an explainer",
}
_PATTERNS = {
    CUSTOM_ATTRIBUTES: re.compile(r"[\x20-\x7e]{0,1024}"),
    SESSION_ID: re.compile(r"(?=.{1,256}$)(NEW_SESSION|[a-zA-Z0-9](-*[a-zA-Z0-9])*)"),
    INFERENCE_ID: re.compile(r"\S[\x20-\x7e]{0,63}"),
    _AMZN + "Prefix-Aware-Id": re.compile(r"\S[\x20-\x7e]{0,63}"),
}


@dataclass(frozen=True)
class Operation:
    """What differs between the three ways to invoke.

    Args:
        content_type: name of the header that holds the body's type.
        accept: likewise the type of the answer that is wanted; the container reads Accept.
        may_open_session: whether SessionId may be NEW_SESSION.
        returned: headers of the container's answer that go back.
    """

    content_type: str
    accept: str
    may_open_session: bool
    returned: tuple[str, ...]


INVOKE = Operation(
    "Content-Type", "Accept", True, (CUSTOM_ATTRIBUTES, _AMZN + "New-Session-Id", _AMZN + "Closed-Session-Id")
)
STREAM = Operation("Content-Type", _AMZN + "Accept", False, (CUSTOM_ATTRIBUTES,))
ASYNC = Operation(_AMZN + "Content-Type", _AMZN + "Accept", False, ())


def to_container(headers: Mapping[str, str], operation: Operation, adapter: str | None) -> dict[str, str]:
    """What the container is sent of a client's headers.

    Args:
        headers: looked up without regard to case.
        adapter: that of the component which the client named.

    Raises:
        Rejected: a header is not for this endpoint, or breaks the API's pattern.
    """
    for name, why in _REFUSED.items():
        if name in headers:
            raise validation_error(f"{why}; this endpoint is not one.")
    passed = {name: headers[name] for name in _PASSED if name in headers}
    for name, pattern in _PATTERNS.items():
        if name in passed and not pattern.fullmatch(passed[name]):
            raise validation_error(f"Header {name} must match {pattern.pattern}.")
    if passed.get(SESSION_ID) == NEW_SESSION and not operation.may_open_session:
        raise validation_error("A session is opened by InvokeEndpoint only: SessionId cannot be NEW_SESSION here.")
    for name, source in (("Content-Type", operation.content_type), ("Accept", operation.accept)):
        if source in headers:
            passed[name] = headers[source]
    if adapter is not None:
        passed[ADAPTER] = adapter
    return passed


def to_client(headers: Mapping[str, str], operation: Operation, variant: str) -> dict[str, str]:
    """What the client is sent of the container's headers; the answer's type is not among them."""
    returned = {name: headers[name] for name in operation.returned if name in headers}
    return {**returned, "x-Amzn-Invoked-Production-Variant": variant}
