"""Check what stands beside serving: places in S3 that SageMaker writes to, further model data, a reservation."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.errors import DeployError
from deploy.preflight.check import Check, Context, error, ok, warning
from deploy.s3.prefix import Prefix, check_region
from deploy.s3.uri import bucket_and_key
from deploy.spec.places import named

_ENDED = ("Expired", "Failed")


def places(context: Context) -> list[Check]:
    """Check that each bucket exists, in the endpoint's region."""
    return [_place(context, uri, field) for uri, field in named(context.spec).items()]


def _place(context: Context, uri: str, field: str) -> Check:
    bucket, key = bucket_and_key(uri)
    try:
        check_region(context.aws, Prefix(bucket, key), field)
    except DeployError as failure:
        return error("places", f"{field}: {failure}", failure.advice)
    return ok("places", f"{field}: {uri}")


def reservation(context: Context) -> list[Check]:
    """Check the reservation: it exists, is for endpoints, of the right instance type, and has room."""
    arn = context.spec.reservation
    return [] if arn is None else [*_reservation(context, arn)]


def _reservation(context: Context, arn: str) -> Iterator[Check]:
    region, name = arn.split(":")[3], arn.rpartition("/")[2]
    if region != context.aws.region:
        advice = f"Take a reservation in {context.aws.region}, or set region: {region}."
        yield error("reservation", f"{name} is in {region}, the endpoint in {context.aws.region}", advice)
        return
    sagemaker = context.aws.client("sagemaker")
    try:
        found = sagemaker.describe_training_plan(TrainingPlanName=name)
    except sagemaker.exceptions.ResourceNotFound:
        yield error("reservation", f"{arn} does not exist", "Correct reservation.")
        return
    wanted = context.decision.instance_type
    types = sorted({one["InstanceType"] for one in found.get("ReservedCapacitySummaries", ())})
    available, needed = found.get("AvailableInstanceCount", 0), context.spec.instance.count
    if found["Status"] in _ENDED:
        yield error("reservation", f"{name} is {found['Status']}", "Take another one, or leave reservation out.")
    elif "endpoint" not in found.get("TargetResources", ()):
        what = ", ".join(found.get("TargetResources", ())) or "nothing"
        yield error("reservation", f"{name} is for {what}, not for endpoints", "Reserve capacity for endpoints.")
    elif types and wanted not in types:
        advice = f"Set instance.type: {types[0]}, or take another reservation."
        yield error("reservation", f"{name} is of {', '.join(types)}, the endpoint of {wanted}", advice)
    elif found["Status"] != "Active":
        advice = "No instance starts before: wait, or leave reservation out."
        yield warning(
            "reservation", f"{name} is {found['Status']}, from {found.get('StartTime', 'a later time')}", advice
        )
    elif available < needed:
        advice = "No instance starts beyond it; those of this endpoint that serve already are not free."
        yield warning("reservation", f"{name} has {available} free instances, and {needed} are wanted", advice)
    else:
        yield ok("reservation", f"{name}: {available} free instances of {wanted}")
