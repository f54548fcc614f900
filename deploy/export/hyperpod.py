"""Export for SageMaker HyperPod: the InferenceEndpointConfig of its inference operator (EKS)."""

from __future__ import annotations

from typing import Any

from deploy.errors import Refused
from deploy.export.kubernetes import (
    ACTIVE,
    QUEUED,
    Manifest,
    Server,
    bounds,
    notes,
    servers,
    service_account,
    setting_paths,
    types,
)
from deploy.resolve.decision import Decision
from deploy.resources.environment import MODEL_DATA
from deploy.spec import Spec
from deploy.spec.sections import Capture, PrefixAware, Scaling

_CAPTURE = ("capture:", "encryption.capture_key:")
"""Notes of settings that HyperPod has a place for, and other formats have not."""

_CONTENTS = {"both": ("Input", "Output"), "input": ("Input",), "output": ("Output",)}
_DEPLOYED = 3600  # seconds; the operator's own limit of a deployment


def hyperpod_manifests(
    spec: Spec,
    decision: Decision,
    *,
    prometheus: str | None = None,
    allow_plaintext_secret: bool = False,
) -> tuple[list[Manifest], list[str]]:
    """Return the objects, and what to know about them: a sentence each.

    Args:
        prometheus: address of the Prometheus that has the pods' metrics, for scaling.

    Raises:
        Refused: a setting has no place in HyperPod and its loss would do harm.
    """
    every = servers(spec, decision, allow_plaintext_secret=allow_plaintext_secret)
    manifests = [_config(server, prometheus) for server in every]
    others = [note for note in notes(spec) if not note.startswith(_CAPTURE)]
    comments = [*others, *_notes(spec, decision)]
    if all(server.spec.model.token_secret is None for server in every):
        return manifests, [*comments, "role: no equivalent here; the operator's role reads S3 and pulls the image."]
    # The operator takes only accounts with this label.
    account = service_account(spec, {"sagemaker.amazonaws.com/user-assignable": "true"})
    return [account, *manifests], [*comments, "role: it must trust the cluster's OIDC provider, to read the token."]


def _notes(spec: Spec, decision: Decision) -> list[str]:
    sentences = ["/dev/shm has the cluster's default size: the operator mounts no volume into the server."]
    if isinstance(spec.routing, PrefixAware):
        sentences.append(
            "routing.prefix_length and routing.concurrency_threshold: no equivalent here; HyperPod chooses."
        )
    if "update.batch_percent" in setting_paths(spec):
        sentences.append("update.batch_percent: no equivalent here; the operator replaces pods as it chooses.")
    if len(spec.components) > 1:
        sentences.append("components: each becomes an endpoint of its own, called by the component's name.")
    if decision.download + decision.startup > _DEPLOYED:
        sentences.append(f"timeouts: a deployment may take {_DEPLOYED} seconds, less than download and startup need.")
    return sentences


def _config(server: Server, prometheus: str | None) -> Manifest:
    spec, decision = server.spec, server.decision
    content: dict[str, Any] = {
        "endpointName": server.name,
        "modelName": server.name,
        **_types(types(decision)),
        "replicas": server.copies,
        "invocationEndpoint": "invocations",
        "maxDeployTimeInSeconds": min(decision.download + decision.startup, _DEPLOYED),
        "modelSourceConfig": _source(spec, decision),
        "metrics": {"enabled": True, "modelMetrics": {"path": "/metrics", "port": server.port}},
        **_routing(spec),
        "worker": {
            "image": decision.image,
            "environmentVariables": server.env,
            "modelInvocationPort": {"name": "http", "containerPort": server.port},
            "modelVolumeMount": {"name": "model-weights", "mountPath": MODEL_DATA},
            "resources": server.resources(),
            "probes": server.probes(),
        },
    }
    if spec.tags:
        content["tags"] = [{"name": name, "value": value} for name, value in spec.tags.items()]
    if spec.model.token_secret is not None:
        content["kubernetes"] = {"serviceAccountName": spec.name}
    if spec.capture is not None:
        content["dataCapture"] = _capture(spec.capture, spec.encryption.capture_key)
    if spec.scaling is not None:
        content["autoScalingSpec"] = _scaling(spec.scaling, server, prometheus)
    return {
        "apiVersion": "inference.sagemaker.aws.amazon.com/v1",
        "kind": "InferenceEndpointConfig",
        "metadata": {"name": server.name},
        "spec": content,
    }


def _capture(capture: Capture, key: str | None) -> Manifest:
    """Return the capture of the SageMaker endpoint that the operator registers."""
    endpoint: Manifest = {
        "enabled": True,
        "initialSamplingPercentage": capture.percent,
        "captureOptions": [{"captureMode": mode} for mode in _CONTENTS[capture.content]],
        "captureContentTypeHeader": {"jsonContentTypes": ["application/json"]},
    }
    return {"s3Uri": capture.output, "sagemakerEndpoint": {**endpoint, **({"kmsKeyId": key} if key else {})}}


def _types(names: list[str]) -> Manifest:
    return {"instanceTypes": names} if len(names) > 1 else {"instanceType": names[0]}


def _source(spec: Spec, decision: Decision) -> Manifest:
    if decision.model_data is None:  # the server downloads it, with its own token
        return {
            "modelSourceType": "huggingface",
            "huggingFaceModel": {"modelId": spec.model.id},
            "prefetchEnabled": False,
        }
    bucket, _, prefix = decision.model_data.removeprefix("s3://").partition("/")
    return {
        "modelSourceType": "s3",
        "s3Storage": {"bucketName": bucket, "region": decision.region},
        "modelLocation": prefix.rstrip("/"),
        "prefetchEnabled": True,
    }


def _routing(spec: Spec) -> Manifest:
    if spec.routing == "random":
        raise Refused("routing: random: HyperPod has none", "Take least_outstanding, or prefix-aware routing.")
    balancer = {"healthCheckPath": "/ping", "routingAlgorithm": "least_outstanding_requests"}
    if isinstance(spec.routing, PrefixAware):
        return {"loadBalancer": balancer, "intelligentRoutingSpec": {"enabled": True, "routingStrategy": "prefixaware"}}
    return {"loadBalancer": balancer}


def _scaling(scaling: Scaling, server: Server, prometheus: str | None) -> Manifest:
    least, most = bounds(scaling)
    if prometheus is None:
        raise Refused(
            "scaling: HyperPod asks a Prometheus for the pods' metrics, and the specification names none",
            "Add --prometheus URL, e.g. of the cluster's Amazon Managed Prometheus workspace.",
        )
    # The operator makes a Deployment of that name: NAME-HASH-SUFFIX is a pod of it, and of no NAME-OTHER.
    pods = f'{{pod=~"{server.name}-[a-z0-9]+-[a-z0-9]{{5}}"}}'
    return {
        "minReplicaCount": least,
        "maxReplicaCount": most,
        "scaleDownStabilizationTime": scaling.scale_in_cooldown,
        "scaleUpStabilizationTime": scaling.scale_out_cooldown,
        "prometheusTrigger": {
            "serverAddress": prometheus,
            "query": f"sum({ACTIVE}{pods}) + sum({QUEUED}{pods})",
            "targetValue": scaling.concurrency,
            "metricType": "Average",
        },
    }
