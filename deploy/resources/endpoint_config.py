"""Functions that build the model and the endpoint configuration: instances, host AMI, timeouts and routing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from deploy.errors import SpecError
from deploy.resolve.decision import Decision
from deploy.resources.environment import environment
from deploy.resources.resource import SHADOW, Content, Json, Kind, Resource, merged, version_name
from deploy.s3.prefix import ARCHIVE
from deploy.spec import Spec
from deploy.spec.components import shadow_of
from deploy.spec.sections import Async, Capture, PrefixAware


def model(spec: Spec, decision: Decision, tags: list[dict[str, str]], *, allow_plaintext_secret: bool) -> Resource:
    """Build the SageMaker model of the endpoint, or of components that share a server.

    Metrics do not need a setting, because SageMaker scrapes /metrics on port 8080 by default.
    """
    container: Content = {
        "Image": decision.image,
        "Environment": environment(spec, decision, allow_plaintext_secret=allow_plaintext_secret),
    }
    if decision.model_data is not None:
        container |= _data(decision.model_data, spec.sagemaker.model.get("PrimaryContainer", {}))
    content: Content = {"PrimaryContainer": container, "ExecutionRoleArn": spec.role}
    if not spec.components:  # with components, the endpoint configuration has these settings
        content |= isolation(spec)
    content = merged(content, spec.sagemaker.model)
    name = version_name(spec.name, content)
    return Resource(Kind.MODEL, name, {"ModelName": name, **content, "Tags": tags})


def _data(uri: str, passed: Json) -> Content:
    """Return the container's fields for the model data.

    An archive is set as ModelDataUrl, which transform jobs also accept, unless `passed` has fields of ModelDataSource.

    Args:
        passed: container fields that the specification sets (`sagemaker.model.PrimaryContainer`).
    """
    is_archive = uri.endswith(ARCHIVE)
    if is_archive and "ModelDataSource" not in passed:
        return {"ModelDataUrl": uri}
    kind, compression = ("S3Object", "Gzip") if is_archive else ("S3Prefix", "None")
    return {"ModelDataSource": {"S3DataSource": {"S3Uri": uri, "S3DataType": kind, "CompressionType": compression}}}


def isolation(spec: Spec) -> Content:
    """Return the network settings of a model or an endpoint configuration."""
    properties: Content = {}
    if spec.network.subnets:
        properties["VpcConfig"] = {
            "SecurityGroupIds": list(spec.network.security_groups),
            "Subnets": list(spec.network.subnets),
        }
    if spec.network.isolated:
        properties["EnableNetworkIsolation"] = True
    return properties


_CAPTURED = {"both": "InputAndOutput", "input": "Input", "output": "Output"}


def endpoint_config(
    spec: Spec,
    decision: Decision,
    models: Sequence[Resource],
    tags: list[dict[str, str]],
    shadow: Resource | None = None,
) -> Resource:
    """Build the endpoint configuration.

    With components, it has the role, the network settings and managed instances instead of a model.

    Args:
        models: a model for each of `decision.pools` in the same order, or one model without pools. Ignored with
            components.
        shadow: the shadow variant's model, or None.
    """
    content: Content = {"ProductionVariants": [_variant(spec, decision, models)]}
    if spec.components:
        content |= {"ExecutionRoleArn": spec.role, **isolation(spec)}
    if spec.encryption.volume_key is not None:
        content["KmsKeyId"] = spec.encryption.volume_key
    if spec.asynchronous is not None:
        content["AsyncInferenceConfig"] = _asynchronous(spec.asynchronous, spec.encryption.output_key)
    if spec.capture is not None:
        content["DataCaptureConfig"] = capture_config(spec.capture, spec.encryption.capture_key)
    if shadow is not None:
        content["ShadowProductionVariants"] = [_shadow(spec, decision, shadow)]
    content = merged(content, spec.sagemaker.endpoint_config)
    name = version_name(spec.name, content)
    model_names = () if spec.components else (*models, *([shadow] if shadow is not None else []))
    needs = tuple(dict.fromkeys(model.key for model in model_names))
    return Resource(Kind.ENDPOINT_CONFIG, name, {"EndpointConfigName": name, **content, "Tags": tags}, needs)


def _variant(spec: Spec, decision: Decision, models: Sequence[Resource]) -> Content:
    variant: Content = {
        "VariantName": spec.instance.variant,
        **_types(decision, () if spec.components else models),
        "InitialInstanceCount": instances(spec),
        "RoutingConfig": _routing(spec.routing),
    }
    if spec.components:  # components have their own timeouts
        if (managed := spec.instance.managed) is not None:
            variant["ManagedInstanceScaling"] = {
                "Status": "ENABLED",
                "MinInstanceCount": managed.min,
                "MaxInstanceCount": managed.max,
            }
    else:
        variant |= {"ModelName": models[0].name, "InitialVariantWeight": 1.0, **times(decision)}
    if decision.provision is not None:
        variant["VariantInstanceProvisionTimeoutInSeconds"] = decision.provision
    if decision.ami is not None:
        variant["InferenceAmiVersion"] = decision.ami
    if spec.reservation is not None:
        variant["CapacityReservationConfig"] = {
            "CapacityReservationPreference": "capacity-reservations-only",
            "MlReservationArn": spec.reservation,
        }
    if spec.instance.volume_gb is not None:
        variant["VolumeSizeInGB"] = spec.instance.volume_gb
    return merged(variant, spec.sagemaker.variant)


def _shadow(spec: Spec, decision: Decision, model: Resource) -> Content:
    """Return the shadow variant. Its weight is its share of the requests, as the serving variant's weight is 1."""
    assert spec.shadow is not None
    assert decision.shadow is not None
    variant = _variant(shadow_of(spec), decision.shadow, [model])
    return {**variant, "VariantName": SHADOW, "InitialVariantWeight": spec.shadow.percent / 100}


def capture_config(capture: Capture, key: str | None) -> Content:
    """Return the DataCaptureConfig, which captures JSON as text and everything else as base64.

    Args:
        key: the KMS key that encrypts the files, or None for the bucket default.
    """
    config = {
        "EnableCapture": True,
        "InitialSamplingPercentage": capture.percent,
        "DestinationS3Uri": capture.output,
        "CaptureOptions": [{"CaptureMode": _CAPTURED[capture.content]}],
        "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
    }
    return config if key is None else {**config, "KmsKeyId": key}


def _types(decision: Decision, models: Sequence[Resource]) -> Content:
    """Return the fields for the instance type, or for the pools. A pool with a different model names its own model."""
    if not decision.pools:
        return {"InstanceType": decision.instance_type}
    pools = []
    for pool, model in zip_longest(decision.pools, models):
        override = {"ModelNameOverride": model.name} if model and model.name != models[0].name else {}
        pools.append({"InstanceType": pool.instance_type, **override, "Priority": pool.priority})
    return {"InstancePools": pools}


def instances(spec: Spec) -> int:
    """Return the initial number of instances.

    Raises:
        SpecError: instance.count is greater than instance.managed.max.
    """
    managed = spec.instance.managed
    if managed is None:
        return spec.instance.count
    if spec.instance.count > managed.max:
        raise SpecError(f"instance.count: {spec.instance.count} is greater than instance.managed.max ({managed.max})")
    return max(spec.instance.count, managed.min)


def times(decision: Decision) -> dict[str, int]:
    """Return the timeouts of a variant or component. SageMaker's defaults are too short for large models."""
    return {
        "ModelDataDownloadTimeoutInSeconds": decision.download,
        "ContainerStartupHealthCheckTimeoutInSeconds": decision.startup,
    }


def _routing(routing: PrefixAware | str) -> Content:
    if not isinstance(routing, PrefixAware):
        return {"RoutingStrategy": {"least_outstanding": "LEAST_OUTSTANDING_REQUESTS", "random": "RANDOM"}[routing]}
    prefix = {"PrefixLength": routing.prefix_length, "ConcurrencyThreshold": routing.concurrency_threshold}
    return {"RoutingStrategy": "PREFIX_AWARE", "PrefixAwareRoutingConfig": prefix}


def _asynchronous(asynchronous: Async, key: str | None) -> Content:
    topics = {"SuccessTopic": asynchronous.notify_success, "ErrorTopic": asynchronous.notify_error}
    output: Content = {
        "S3OutputPath": asynchronous.output,
        "S3FailurePath": asynchronous.failures,
        "KmsKeyId": key,
        "NotificationConfig": {name: topic for name, topic in topics.items() if topic is not None} or None,
    }
    config: Content = {"OutputConfig": {name: value for name, value in output.items() if value is not None}}
    if asynchronous.concurrency is not None:
        config["ClientConfig"] = {"MaxConcurrentInvocationsPerInstance": asynchronous.concurrency}
    return config
