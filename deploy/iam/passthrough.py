"""What capture and fields of `sagemaker:` need, from what these name. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.iam.arns import Arns
from deploy.iam.statements import Statement, allow
from deploy.s3.uri import bucket_and_key
from deploy.spec import Spec
from deploy.spec.places import Written, named, read, written

_SHELL = ("CreateControlChannel", "CreateDataChannel", "OpenControlChannel", "OpenDataChannel")


def execution_role(spec: Spec, arns: Arns) -> Iterator[Statement]:
    """Yield what the role needs beside what the specification's own settings need."""
    for place in written(spec):
        yield from writing(arns, place)
    if places := [*read(spec)]:
        yield allow("FurtherData", ["s3:GetObject"], [arns.objects(place) for place in places])
        for number, (bucket, prefixes) in enumerate(_by_bucket(places).items()):
            condition = {"StringLike": {"s3:prefix": prefixes}}
            yield allow(f"FurtherDataListed{number or ''}", ["s3:ListBucket"], [arns.bucket(bucket)], condition)
    if _shell(spec):  # they take no resource
        yield allow("Shell", [f"ssmmessages:{verb}" for verb in _SHELL], ["*"])
    image = spec.sagemaker.model.get("PrimaryContainer", {}).get("ImageConfig", {})
    if (function := image.get("RepositoryAuthConfig", {}).get("RepositoryCredentialsProviderArn")) is not None:
        yield allow("RegistryLogin", ["lambda:InvokeFunction"], [function])


def deployer(spec: Spec, arns: Arns) -> Iterator[Statement]:
    """Yield what the deployer needs to check, before it creates anything, in which region these places are."""
    for number, (bucket, prefixes) in enumerate(_by_bucket([*named(spec)]).items()):
        condition = {"StringLike": {"s3:prefix": prefixes}}
        yield allow(f"PlacesChecked{number or ''}", ["s3:ListBucket"], [arns.bucket(bucket)], condition)
    if spec.reservation is not None:
        yield allow("ReservationChecked", ["sagemaker:DescribeTrainingPlan"], [spec.reservation])


def writing(arns: Arns, place: Written) -> Iterator[Statement]:
    """Yield the statements for one place that SageMaker writes to."""
    yield allow(place.sid, ["s3:PutObject"], [arns.objects(place.uri)])
    if place.key is not None:
        # S3 reads the parts of a multipart upload again.
        actions = ["kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey"]
        yield allow(f"{place.sid}Key", actions, *arns.key(place.key))


def _by_bucket(places: list[str]) -> dict[str, list[str]]:
    buckets: dict[str, list[str]] = {}
    for place in places:
        bucket, key = bucket_and_key(place)
        buckets.setdefault(bucket, []).append(f"{key}*")
    return {bucket: sorted(set(prefixes)) for bucket, prefixes in buckets.items()}


def _shell(spec: Spec) -> bool:
    shadows = spec.sagemaker.endpoint_config.get("ShadowProductionVariants", ())
    return any(variant.get("EnableSSMAccess") for variant in (spec.sagemaker.variant, *shadows))
