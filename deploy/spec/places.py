"""Places in S3 that SageMaker writes to or reads from in the role's name, beside models and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from deploy.spec import Spec

_CONFIG = "sagemaker.endpoint_config"


class Written(NamedTuple):
    """A place that SageMaker writes to.

    Attributes:
        field: what names it.
        sid: of its statement in policies.
        key: a KMS key that encrypts it; None: the bucket's default.
    """

    field: str
    sid: str
    uri: str
    key: str | None


def written(spec: Spec) -> list[Written]:
    """Return the places that SageMaker writes captured data and core dumps to."""
    config = spec.sagemaker.endpoint_config
    places = []
    if spec.capture is not None:
        places.append(Written("capture.output", "Capture", spec.capture.output, spec.encryption.capture_key))
    elif (capture := config.get("DataCaptureConfig")) is not None:
        field = f"{_CONFIG}.DataCaptureConfig"
        places.append(Written(field, "Capture", capture["DestinationS3Uri"], capture.get("KmsKeyId")))
    variants = [("sagemaker.variant", "CoreDumps", spec.sagemaker.variant)]
    for shadow in config.get("ShadowProductionVariants", ()):
        variants.append((f"{_CONFIG}.ShadowProductionVariants", "ShadowCoreDumps", shadow))
    for place, sid, variant in variants:
        if (dump := variant.get("CoreDumpConfig")) is not None:
            places.append(Written(f"{place}.CoreDumpConfig", sid, dump["DestinationS3Uri"], dump.get("KmsKeyId")))
    return places


def named(spec: Spec) -> dict[str, str]:
    """Return the S3 URIs of all these places and of asynchronous answers, with what names each."""
    found = {place.uri: place.field for place in written(spec)}
    if spec.asynchronous is not None:
        found |= {spec.asynchronous.output: "async.output"}
        found |= {} if spec.asynchronous.failures is None else {spec.asynchronous.failures: "async.failures"}
    return found | read(spec)


def read(spec: Spec) -> dict[str, str]:
    """Return the S3 URIs that SageMaker reads further model data from, with what names each."""
    container = spec.sagemaker.model.get("PrimaryContainer", {})
    place = "sagemaker.model.PrimaryContainer"
    found: dict[str, str] = {}
    sources = [
        ("ModelDataSource", container.get("ModelDataSource", {})),
        *[("AdditionalModelDataSources", source) for source in container.get("AdditionalModelDataSources", ())],
    ]
    for field, source in sources:
        data = source.get("S3DataSource", {})
        found |= {data[name]: f"{place}.{field}" for name in ("S3Uri", "ManifestS3Uri") if name in data}
    explainer = spec.sagemaker.endpoint_config.get("ExplainerConfig", {}).get("ClarifyExplainerConfig", {})
    shap = explainer.get("ShapConfig", {}).get("ShapBaselineConfig", {})
    if "ShapBaselineUri" in shap:
        found[shap["ShapBaselineUri"]] = f"{_CONFIG}.ExplainerConfig"
    return found
