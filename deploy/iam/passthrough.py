"""What the execution role needs for fields of `sagemaker:`, from what these fields name. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from deploy.iam.arns import Arns
from deploy.iam.statements import Statement, allow
from deploy.s3.uri import bucket_and_key
from deploy.spec import Spec

_SHELL = ("CreateControlChannel", "CreateDataChannel", "OpenControlChannel", "OpenDataChannel")


class Written(NamedTuple):
    """A place in S3 that SageMaker writes to in the role's name.

    Attributes:
        field: what names it.
        sid: of its statement.
        key: a KMS key that encrypts it; None: the bucket's default.
    """

    field: str
    sid: str
    uri: str
    key: str | None


def written(spec: Spec) -> list[Written]:
    """Return the places that fields of `sagemaker:` have SageMaker write to."""
    config = spec.sagemaker.endpoint_config
    places = []
    if (capture := config.get("DataCaptureConfig")) is not None:
        field = "sagemaker.endpoint_config.DataCaptureConfig"
        places.append(Written(field, "Capture", capture["DestinationS3Uri"], capture.get("KmsKeyId")))
    variants = [("sagemaker.variant", "CoreDumps", spec.sagemaker.variant)]
    for shadow in config.get("ShadowProductionVariants", ()):
        variants.append(("sagemaker.endpoint_config.ShadowProductionVariants", "ShadowCoreDumps", shadow))
    for place, sid, variant in variants:
        if (dump := variant.get("CoreDumpConfig")) is not None:
            places.append(Written(f"{place}.CoreDumpConfig", sid, dump["DestinationS3Uri"], dump.get("KmsKeyId")))
    return places


def read(spec: Spec) -> list[str]:
    """Return the S3 URIs that fields of `sagemaker:` have SageMaker read from."""
    container = spec.sagemaker.model.get("PrimaryContainer", {})
    sources = [container.get("ModelDataSource", {}), *container.get("AdditionalModelDataSources", ())]
    data = [source.get("S3DataSource", {}) for source in sources]
    uris = [one[name] for one in data for name in ("S3Uri", "ManifestS3Uri") if name in one]
    shap = _shap(spec).get("ShapBaselineConfig", {})
    return [*uris, *[shap[name] for name in ("ShapBaselineUri",) if name in shap]]


def execution_role(spec: Spec, arns: Arns) -> Iterator[Statement]:
    """Yield what the role needs beside what the specification's own settings need."""
    for place in written(spec):
        yield from writing(arns, place)
    if places := read(spec):
        yield allow("FurtherData", ["s3:GetObject"], [arns.objects(place) for place in places])
        for number, (bucket, prefixes) in enumerate(_by_bucket(places).items()):
            condition = {"StringLike": {"s3:prefix": prefixes}}
            yield allow(f"FurtherDataListed{number or ''}", ["s3:ListBucket"], [arns.bucket(bucket)], condition)
    if _shell(spec):  # they take no resource
        yield allow("Shell", [f"ssmmessages:{verb}" for verb in _SHELL], ["*"])
    image = spec.sagemaker.model.get("PrimaryContainer", {}).get("ImageConfig", {})
    if (function := image.get("RepositoryAuthConfig", {}).get("RepositoryCredentialsProviderArn")) is not None:
        yield allow("RegistryLogin", ["lambda:InvokeFunction"], [function])


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


def _shap(spec: Spec) -> dict[str, Any]:
    explainer = spec.sagemaker.endpoint_config.get("ExplainerConfig", {})
    return dict(explainer.get("ClarifyExplainerConfig", {}).get("ShapConfig", {}))
