"""Which of boto3's calls makes, shows, changes and removes each kind of resource; asking AWS again where it says so.

The table is all that the rest of `deploy` knows of the differences between SageMaker, Application Auto Scaling and
CloudWatch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, error_code, is_missing
from deploy.errors import DeployError
from deploy.resources.resource import Json, Kind


@dataclass(frozen=True)
class Calls:
    """One kind's.

    Attributes:
        service: boto3's name.
        create: the method that makes one. Where `update` is the same, it also changes one that is there.
        update: None: it cannot be changed, a changed one is another one.
        describe: the method that shows one, or (with `listed`) those asked for.
        delete: the method that removes one.
        identity: the arguments that say which one, called alike in requests and in answers; the last is its name.
        arn: of its ARN, in answers.
        listed: under which name `describe` gives a list; None: it gives the one.
        asked: the argument that names those asked for, where it takes a list of names.
        deleted: the same of `delete`.
        status: of its state, in answers; None: it is there or it is not.
    """

    service: str
    create: str
    update: str | None
    describe: str
    delete: str
    identity: tuple[str, ...]
    arn: str
    listed: str | None = None
    asked: str | None = None
    deleted: str | None = None
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
        "deregister_scalable_target", _SCALABLE, "ScalableTargetARN", listed="ScalableTargets", asked="ResourceIds",
    ),
    Kind.SCALING_POLICY: Calls(
        "application-autoscaling", "put_scaling_policy", "put_scaling_policy", "describe_scaling_policies",
        "delete_scaling_policy", (*_SCALABLE, "PolicyName"), "PolicyARN", listed="ScalingPolicies",
        asked="PolicyNames",
    ),
    Kind.ALARM: Calls(
        "cloudwatch", "put_metric_alarm", "put_metric_alarm", "describe_alarms", "delete_alarms", ("AlarmName",),
        "AlarmArn", listed="MetricAlarms", asked="AlarmNames", deleted="AlarmNames",
    ),
}  # fmt: skip

Identity = tuple[str, ...]

pause = time.sleep

_PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0, 30.0, 30.0, 60.0, 60.0, 60.0)
"""Seconds before asking again: five minutes in all."""

_AGAIN = ("ConflictException", "ResourceInUse", "ResourceInUseException", "ConcurrentUpdateException")
_SLOWER = ("Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded")


def identity(kind: Kind, said: Json) -> Identity:
    """Which one it is, out of a request or an answer."""
    return tuple(str(said[name]) for name in CALLS[kind].identity)


def is_duplicate(error: ClientError) -> bool:
    said = str(error.response.get("Error", {}).get("Message", "")).lower()
    return error_code(error).startswith("Validation") and "already existing" in said


def call(aws: Aws, service: str, operation: str, request: Json) -> dict[str, Any]:
    """AWS's answer. Where it says that another change is under way, or to slow down, it is asked for five minutes.

    Raises:
        ClientError: what AWS said the last time.
        DeployError: this boto3 does not know a field of the request.
    """
    client = aws.client(service)
    _known(client, operation, request)
    for seconds in (*_PAUSES, None):
        try:
            answer: dict[str, Any] = getattr(client, operation)(**request)
            return answer
        except ClientError as error:
            if seconds is None or not _may_be_asked_again(error):
                raise
        pause(seconds)
    raise AssertionError("the last try returns or raises")


def show(aws: Aws, kind: Kind, which: Identity) -> dict[str, Any] | None:
    """What AWS says of one; None: it does not exist."""
    calls = CALLS[kind]
    arguments: dict[str, Any] = dict(zip(calls.identity, which, strict=True))
    if calls.asked is not None:
        named = {Kind.SCALABLE_TARGET: "ResourceId"}.get(kind, calls.identity[-1])
        arguments[calls.asked] = [arguments.pop(named)]
    try:
        answer = call(aws, calls.service, calls.describe, arguments)
    except ClientError as error:
        if is_missing(error):
            return None
        raise
    if calls.listed is not None:
        return next((one for one in answer[calls.listed] if identity(kind, one) == which), None)
    return {name: value for name, value in answer.items() if name != "ResponseMetadata"}


def removal(kind: Kind, which: Identity) -> tuple[str, dict[str, Any]]:
    """The call that removes one: its name and its arguments."""
    calls = CALLS[kind]
    if calls.deleted is not None:
        return calls.delete, {calls.deleted: [which[-1]]}
    return calls.delete, dict(zip(calls.identity, which, strict=True))


def tags_of(aws: Aws, kind: Kind, said: Json) -> dict[str, str]:
    """The tags of something that AWS showed; a policy has none of its own."""
    if kind is Kind.SCALING_POLICY:
        return {}
    arn = said[CALLS[kind].arn]
    if kind is Kind.SCALABLE_TARGET:
        return dict(call(aws, "application-autoscaling", "list_tags_for_resource", {"ResourceARN": arn})["Tags"])
    if kind is Kind.ALARM:
        return _tags(call(aws, "cloudwatch", "list_tags_for_resource", {"ResourceARN": arn})["Tags"])
    pages = aws.client("sagemaker").get_paginator("list_tags").paginate(ResourceArn=arn)
    return _tags([tag for page in pages for tag in page["Tags"]])


def tagging(kind: Kind, arn: str, tags: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The call that sets tags on one that is there."""
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    if kind is Kind.SCALABLE_TARGET:
        return "tag_resource", {"ResourceARN": arn, "Tags": dict(tags)}
    if kind is Kind.ALARM:
        return "tag_resource", {"ResourceARN": arn, "Tags": listed}
    return "add_tags", {"ResourceArn": arn, "Tags": listed}


def _tags(listed: list[dict[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in listed}


def _may_be_asked_again(error: ClientError) -> bool:
    said = str(error.response.get("Error", {}).get("Message", "")).lower()
    return error_code(error) in (*_AGAIN, *_SLOWER) or "in-progress" in said or "in progress" in said


def _known(client: Any, operation: str, request: Json) -> None:
    """Whether the botocore that is installed knows the request's fields: those of 2026 need a new one."""
    model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
    unknown = _unknown(model.input_shape, request, "")
    if unknown:
        raise DeployError(
            f"{operation}: this boto3 does not know {', '.join(unknown)}", "Update it: pip install --upgrade boto3"
        )


def _unknown(shape: Any, value: Any, place: str) -> list[str]:
    """Places in a request that the shape does not have."""
    if shape is None:
        return []
    if shape.type_name == "structure" and isinstance(value, Mapping):
        found = []
        for name, one in value.items():
            here = f"{place}.{name}".lstrip(".")
            found += _unknown(shape.members[name], one, here) if name in shape.members else [here]
        return found
    if shape.type_name == "list" and isinstance(value, list | tuple):
        return [one for part in value for one in _unknown(shape.member, part, place)]
    return []
