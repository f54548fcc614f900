"""Export as plain Kubernetes: a Deployment with its Service and, with scaling, a HorizontalPodAutoscaler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deploy.export.manifests import (
    ACTIVE,
    QUEUED,
    Manifest,
    Server,
    bounds,
    literal,
    notes,
    servers,
    service_account,
    smallest,
    types,
)
from deploy.resolve.decision import Decision
from deploy.resources.environment import MODEL_DATA
from deploy.spec import Spec
from deploy.spec.sections import Scaling

_COPIER = "public.ecr.aws/aws-cli/aws-cli:2.27.0"
"""Copies the model from S3 before the server starts. Any image with `aws` does."""

_LEAVE = 5  # seconds until a pod that ends gets no new requests
_FINISH = 30  # seconds that the server then has for its answers, as on SageMaker


def kubernetes_manifests(
    spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False
) -> tuple[list[Manifest], list[str]]:
    """Return the objects, and what to know about them: a sentence each.

    Raises:
        Refused: a setting has no place in Kubernetes and its loss would do harm.
    """
    every = servers(spec, decision, allow_plaintext_secret=allow_plaintext_secret)
    return with_pods(spec, every, lambda server: [_deployment(server), _service(server)])


def with_pods(
    spec: Spec, servers: Sequence[Server], workload: Callable[[Server], list[Manifest]], suffix: str = ""
) -> tuple[list[Manifest], list[str]]:
    """Return the account, the servers' objects with their autoscalers, and what to know about them.

    Args:
        workload: returns the objects that run a server.
        suffix: what the Deployment's name has after the server's.
    """
    manifests = [service_account(spec)]
    for server in servers:
        manifests += workload(server)
        if spec.scaling is not None:
            manifests.append(_autoscaler(spec.scaling, server, f"{server.name}{suffix}"))
    return manifests, [*notes(spec), *_pod_notes(spec)]


def _pod_notes(spec: Spec) -> list[str]:
    """Return what to know about pods: a sentence each."""
    sentences = ["role: the account's role must trust the cluster's OIDC provider, or bind it by EKS Pod Identity."]
    if spec.routing != "least_outstanding" or "routing" in spec.model_fields_set:
        sentences.append("routing: no equivalent here; a Service chooses a pod for each connection, at random.")
    if spec.tags:
        sentences.append("tags: they belong to AWS's resources and have no place here.")
    if spec.scaling is not None:
        sentences.append(f"scaling needs {ACTIVE} and {QUEUED} as metrics of pods (prometheus-adapter) in the cluster.")
    return sentences


def pod(server: Server, name: str = "server") -> Manifest:
    """Return a pod's specification, without the model's data.

    Args:
        name: of the container.
    """
    container: Manifest = {
        "name": name,
        "image": server.decision.image,
        "env": server.env,
        "ports": [{"name": "http1", "containerPort": server.port, "protocol": "TCP"}],
        "resources": server.resources(),
        **server.probes(),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_LEAVE)]}}},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    content: Manifest = {
        "serviceAccountName": server.spec.name,
        "terminationGracePeriodSeconds": _LEAVE + _FINISH,
        "affinity": {"nodeAffinity": _nodes(types(server.decision))},
        "containers": [container],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": _shared_memory(server.decision)}}
        ],
    }
    if server.gpus:
        content["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return content


def scrape(server: Server) -> dict[str, str]:
    """Return the annotations by which Prometheus finds a pod's metrics."""
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(server.port),
        "prometheus.io/path": "/metrics",
    }


def rollout(spec: Spec) -> Manifest:
    """Return a Deployment's strategy: new pods first, a batch of `update.batch_percent` at once."""
    surge = {"maxSurge": f"{spec.update.batch_percent}%", "maxUnavailable": 0}
    return {"type": "RollingUpdate", "rollingUpdate": surge}


def _autoscaler(scaling: Scaling, server: Server, deployment: str) -> Manifest:
    """Return a HorizontalPodAutoscaler on the requests in a pod's engine, and on those that wait for it."""
    least, most = bounds(scaling)
    behavior: Manifest = {
        "scaleDown": {"stabilizationWindowSeconds": scaling.scale_in_cooldown},
        "scaleUp": {"stabilizationWindowSeconds": scaling.scale_out_cooldown},
    }
    target = {"type": "AverageValue", "averageValue": f"{round(scaling.concurrency * 1000)}m"}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": server.name},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment},
            "minReplicas": least,
            "maxReplicas": most,
            "metrics": [
                {"type": "Pods", "pods": {"metric": {"name": metric}, "target": target}} for metric in (ACTIVE, QUEUED)
            ],
            "behavior": behavior,
        },
    }


def _nodes(names: list[str]) -> Manifest:
    """Return the affinity to nodes of these types, rather to the first than to the next."""
    label = "node.kubernetes.io/instance-type"
    names = [name.removeprefix("ml.") for name in names]
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": label, "operator": "In", "values": names}]}]}
    affinity: Manifest = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    if len(names) > 1:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {
                "weight": 100 - 20 * place,
                "preference": {"matchExpressions": [{"key": label, "operator": "In", "values": [name]}]},
            }
            for place, name in enumerate(names)
        ]
    return affinity


def _deployment(server: Server) -> Manifest:
    spec, decision = server.spec, server.decision
    labels = {"app.kubernetes.io/name": server.name, "app.kubernetes.io/part-of": spec.name}
    template = pod(server)
    if decision.model_data is not None:
        _mount_copy(template, decision.model_data)
    content: dict[str, Any] = {
        "selector": {"matchLabels": {"app.kubernetes.io/name": server.name}},
        "strategy": rollout(spec),
        "progressDeadlineSeconds": decision.download + decision.startup + 600,
        "template": {"metadata": {"labels": labels, "annotations": scrape(server)}, "spec": template},
    }
    if spec.scaling is None:  # otherwise the autoscaler's number is kept
        content = {"replicas": server.copies, **content}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": server.name, "labels": labels},
        "spec": content,
    }


def _mount_copy(template: Manifest, prefix: str) -> None:
    """Add a volume with the model, which a container before the server's copies from S3."""
    mount = {"name": "model", "mountPath": MODEL_DATA}
    template["initContainers"] = [
        {
            "name": "model",
            "image": _COPIER,
            "args": ["s3", "sync", literal(prefix), MODEL_DATA, "--no-progress"],
            "volumeMounts": [mount],
        }
    ]
    template["containers"][0]["volumeMounts"].append({**mount, "readOnly": True})
    template["volumes"].append({"name": "model", "emptyDir": {}})


def _service(server: Server) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": server.name, "labels": {"app.kubernetes.io/name": server.name}},
        "spec": {
            "selector": {"app.kubernetes.io/name": server.name},
            "ports": [{"name": "http", "port": 80, "targetPort": "http1"}],
        },
    }


def _shared_memory(decision: Decision) -> str:
    """Return the size of /dev/shm: an eighth of the host's memory, for the GPUs' exchange and for sessions."""
    memory = smallest(decision, "ram_gib") or 16
    return f"{max(1, memory // 8)}Gi"
