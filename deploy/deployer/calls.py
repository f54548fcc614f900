"""The boto3 calls that create, describe, update and delete each kind of resource, with retries.

The table `CALLS` covers all differences between SageMaker, Application Auto Scaling and CloudWatch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError, ParamValidationError

from deploy.aws import Aws, error_code, error_message, is_missing, pages, unless_missing
from deploy.credentials import NOT_SIGNED_IN, NOT_VALID
from deploy.errors import DeployError, Refused
from deploy.resources.resource import TAG_DEPLOYMENT, Json, Kind, Resource, tag_list, tag_map
from deploy.web_pages import WebPage


@dataclass(frozen=True)
class Calls:
    """The calls for one kind of resource.

    Attributes:
        service: boto3's name for the service.
        create: method that creates a resource. If `update` is the same method, it also updates existing resources.
        update: method that updates a resource, or None if a new version must replace it because AWS cannot update it.
        describe: method that describes one resource or, if `list_field` is set, several.
        delete: method that deletes a resource.
        identity: fields that identify a resource in requests and responses. The last field is its name.
        arn: field of responses that contains the resource's ARN.
        list_field: field of `describe`'s response that contains the list, or None if it describes one resource.
        names_argument: argument of `describe` that accepts a list of names, if there is one.
        delete_argument: argument of `delete` that accepts a list of names, if there is one.
        status: field of responses that contains the resource's status, or None if this kind has no status.
    """

    service: str
    create: str
    update: str | None
    describe: str
    delete: str
    identity: tuple[str, ...]
    arn: str
    list_field: str | None = None
    names_argument: str | None = None
    delete_argument: str | None = None
    status: str | None = None


_SCALABLE = ("ServiceNamespace", "ScalableDimension", "ResourceId")

CALLS: Mapping[Kind, Calls] = {
    Kind.MODEL: Calls(
        "sagemaker", "create_model", None, "describe_model", "delete_model", ("ModelName",), "ModelArn"
    ),
    Kind.ENDPOINT_CONFIG: Calls(
        "sagemaker", "create_endpoint_config", None, "describe_endpoint_config", "delete_endpoint_config",
        ("EndpointConfigName",), "EndpointConfigArn",
    ),
    Kind.ENDPOINT: Calls(
        "sagemaker", "create_endpoint", "update_endpoint", "describe_endpoint", "delete_endpoint",
        ("EndpointName",), "EndpointArn", status="EndpointStatus",
    ),
    Kind.COMPONENT: Calls(
        "sagemaker", "create_inference_component", "update_inference_component", "describe_inference_component",
        "delete_inference_component", ("InferenceComponentName",), "InferenceComponentArn",
        status="InferenceComponentStatus",
    ),
    Kind.SCALABLE_TARGET: Calls(
        "application-autoscaling", "register_scalable_target", "register_scalable_target", "describe_scalable_targets",
        "deregister_scalable_target", _SCALABLE, "ScalableTargetARN", list_field="ScalableTargets",
        names_argument="ResourceIds",
    ),
    Kind.SCALING_POLICY: Calls(
        "application-autoscaling", "put_scaling_policy", "put_scaling_policy", "describe_scaling_policies",
        "delete_scaling_policy", (*_SCALABLE, "PolicyName"), "PolicyARN", list_field="ScalingPolicies",
        names_argument="PolicyNames",
    ),
    Kind.ALARM: Calls(
        "cloudwatch", "put_metric_alarm", "put_metric_alarm", "describe_alarms", "delete_alarms", ("AlarmName",),
        "AlarmArn", list_field="MetricAlarms", names_argument="AlarmNames", delete_argument="AlarmNames",
    ),
}  # fmt: skip

Identity = tuple[str, ...]

pause = time.sleep

_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0, 30.0, 30.0, 60.0, 60.0, 60.0)
"""Seconds between attempts, five minutes in total."""

_AGAIN = ("ConflictException", "ResourceInUse", "ResourceInUseException", "ConcurrentUpdateException")
_SLOWER = ("Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded")
_MAKING = ("create_", "update_", "register_", "put_", "add_", "tag_")
"""Beginnings of the names of methods whose requests may name a resource that was created just before."""

_NOT_YET_TRUSTED = re.compile("could not assume|cannot be assumed|unable to assume|ensure that the role", re.IGNORECASE)
"""Matches SageMaker's messages about a role whose policies IAM may not have distributed yet."""

CONSISTENCY_SECONDS = 60.0
"""Seconds after a call during which AWS may still describe the previous state, without the new resource or version."""

_UNKNOWN = re.compile(r'Unknown parameter in (\S+): "(\w+)"')
"""Matches botocore's message about a field that it does not know. Fields added in 2026 need a recent botocore."""


def identity(kind: Kind, fields: Json) -> Identity:
    """Return a resource's identity from the fields of a request or a response."""
    return tuple(str(fields[name]) for name in CALLS[kind].identity)


def identity_of(resource: Resource) -> Identity:
    """Return the identity of a desired resource."""
    return identity(resource.kind, resource.request)


def is_duplicate(error: ClientError) -> bool:
    message = error_message(error).lower()
    return error_code(error).startswith("Validation") and "already existing" in message


def call(
    aws: Aws,
    service: str,
    operation: str,
    request: Json,
    *,
    is_due: Callable[[], bool] = lambda: True,
    is_new: bool = False,
) -> dict[str, Any]:
    """Call AWS, and retry for up to five minutes while another change is in progress or AWS throttles the calls.

    A call that creates or changes something is retried for a minute if AWS does not see what the request names, because
    that may be new (CreateEndpoint in SageMaker's API reference asks for it). So is another call with `is_new`.

    Args:
        is_due: function that is called before each attempt. If it returns False, `call` returns {} without calling AWS.
        is_new: whether the request names what was created just before.

    Raises:
        ClientError: the last attempt failed, or an attempt failed with an error that is not retried.
        DeployError: the installed boto3 does not know a field of the request.
    """
    client, waited = aws.client(service), 0.0
    for seconds in (*_PAUSES, None):
        if not is_due():
            return {}
        try:
            response: dict[str, Any] = getattr(client, operation)(**request)
            return response
        except ParamValidationError as error:
            if not (fields := _unknown_fields(error)):
                raise
            raise DeployError(
                f"{operation}: the installed boto3 does not know {fields}", "Update it: pip install --upgrade boto3"
            ) from None
        except ClientError as error:
            names_new = waited < CONSISTENCY_SECONDS and (is_new or operation.startswith(_MAKING))
            if seconds is None or not (_is_retryable(error) or (names_new and _may_appear(error))):
                raise
        pause(seconds)
        waited += seconds
    raise AssertionError("the last try returns or raises")


def _unknown_fields(error: ParamValidationError) -> str:
    return ", ".join(f"{path}.{name}".removeprefix("input.") for path, name in _UNKNOWN.findall(str(error)))


def show(aws: Aws, kind: Kind, which: Identity) -> dict[str, Any] | None:
    """Return AWS's description of a resource, or None if it does not exist."""
    calls = CALLS[kind]
    arguments: dict[str, Any] = dict(zip(calls.identity, which, strict=True))
    if calls.names_argument is not None:
        argument = {Kind.SCALABLE_TARGET: "ResourceId"}.get(kind, calls.identity[-1])
        arguments[calls.names_argument] = [arguments.pop(argument)]
    response = unless_missing(lambda: call(aws, calls.service, calls.describe, arguments))
    if response is None:
        return None
    if calls.list_field is not None:
        return next((item for item in response[calls.list_field] if identity(kind, item) == which), None)
    return {name: value for name, value in response.items() if name != "ResponseMetadata"}


def removal(kind: Kind, which: Identity) -> tuple[str, dict[str, Any]]:
    """Return the operation and the arguments of the call that deletes a resource."""
    calls = CALLS[kind]
    if calls.delete_argument is not None:
        return calls.delete, {calls.delete_argument: [which[-1]]}
    return calls.delete, dict(zip(calls.identity, which, strict=True))


def tags_of(aws: Aws, kind: Kind, description: Json) -> dict[str, str]:
    """Return a resource's tags, looked up by the ARN in its description. A scaling policy has no tags."""
    if kind is Kind.SCALING_POLICY:
        return {}
    arn = description[CALLS[kind].arn]
    if kind is Kind.SCALABLE_TARGET:
        return dict(call(aws, "application-autoscaling", "list_tags_for_resource", {"ResourceARN": arn})["Tags"])
    if kind is Kind.ALARM:
        return tag_map(call(aws, "cloudwatch", "list_tags_for_resource", {"ResourceARN": arn})["Tags"])
    return tag_map(pages(aws, "sagemaker", "list_tags", "Tags", ResourceArn=arn))


def is_there(aws: Aws, kind: Kind, which: Identity, deployment: str) -> bool:
    """Return whether the resource exists and belongs to the deployment.

    Raises:
        Refused: the resource has another owner.
    """
    description = show(aws, kind, which)
    tags = None if description is None else unless_missing(lambda: tags_of(aws, kind, description))
    if tags is not None and tags.get(TAG_DEPLOYMENT) != deployment:
        raise Refused(foreign(f"{kind.value}/{which[-1]}"), "Choose another name, or have its owner delete it.")
    return tags is not None


def foreign(key: str) -> str:
    return f"{key} exists and was not created by this deployment"


def tagging(kind: Kind, arn: str, tags: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the operation and the arguments of the call that sets tags on an existing resource."""
    if kind is Kind.SCALABLE_TARGET:
        return "tag_resource", {"ResourceARN": arn, "Tags": dict(tags)}
    if kind is Kind.ALARM:
        return "tag_resource", {"ResourceARN": arn, "Tags": tag_list(tags)}
    return "add_tags", {"ResourceArn": arn, "Tags": tag_list(tags)}


def _may_appear(error: ClientError) -> bool:
    """Return whether AWS does not see a resource or a role that may be new. Files in S3 are visible at once."""
    message = error_message(error)
    return (is_missing(error) and "model data" not in message.lower()) or bool(_NOT_YET_TRUSTED.search(message))


def _is_retryable(error: ClientError) -> bool:
    message = error_message(error).lower()
    return error_code(error) in (*_AGAIN, *_SLOWER) or "in-progress" in message or "in progress" in message


# -- classify errors: temporary failures of AWS, and reasons why it cannot be called at all ----------------------------


_TEMPORARY = (
    "InternalFailure", "InternalServerError", "InternalError", "InternalServiceError", "ServiceUnavailable",
    "RequestLimitExceeded", "RequestThrottled", "SlowDown", "Throttling", "ThrottledException", "ThrottlingException",
    "TooManyRequestsException",
)  # fmt: skip


def is_temporary(error: BotoCoreError | ClientError) -> bool:
    """Return whether a retry may succeed, because AWS is busy or the network is down."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return error_code(error) in _TEMPORARY or status >= 500
    return isinstance(error, ConnectionError | HTTPClientError)


def unreachable_reason(error: BotoCoreError | ClientError) -> str | None:
    """Return a phrase that explains why AWS cannot be called, or None if AWS itself returned the error."""
    if isinstance(error, NOT_SIGNED_IN):
        return "no AWS credentials"
    if isinstance(error, ConnectionError | HTTPClientError | WebPage):
        return "no connection to AWS"
    if isinstance(error, ClientError) and error_code(error) in NOT_VALID:
        return "the AWS credentials are not valid"
    return None
