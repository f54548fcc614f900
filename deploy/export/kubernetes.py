"""Export as plain Kubernetes: a Deployment with its Service and, with scaling, a HorizontalPodAutoscaler."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from deploy.errors import Refused, SpecError
from deploy.export.cloudformation import pod_notes
from deploy.resolve.decision import Decision
from deploy.resources.environment import MODEL_DATA, environment
from deploy.spec import Spec
from deploy.spec.components import servers as of_components
from deploy.spec.options import is_aws_image
from deploy.spec.sections import Scaling
from deploy.spec.values import Section

Manifest = dict[str, Any]

ACTIVE, QUEUED = "lmi_active_sequences", "lmi_queued_requests"
"""The server's own gauges that scaling reads (handler/serving/metrics/prometheus.py)."""

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST = 50  # of 63 characters; KServe and the operators append `-predictor` and hashes
_COOLDOWN = 3600  # seconds; stabilizationWindowSeconds of autoscaling/v2
_SHARE = 0.75  # of a node's cores and memory; the rest is the system's

_PORT = "SAGEMAKER_BIND_TO_PORT"

_REFUSED = {
    "async": "requests in a queue are SageMaker's",
    "network": "pods have the cluster's network; write a NetworkPolicy and a node group's subnets",
    "encryption.volume_key": "volumes of a cluster have their StorageClass's key",
    "encryption.output_key": "answers of queues and batches are SageMaker's",
    "encryption.topic_key": "asynchronous answers are SageMaker's",
    "shadow": "it is a variant of an endpoint; export one specification for each",
    "reservation": "reservations are the node group's",
    "components.adapters": "put them into adapters/ beside the model, or register them with each pod",
}
_NOTED = {
    "endpoint": "each component is a service of its own",
    "alarms": "make alarms of /metrics; an update does not roll back by them",
    "capture": "requests and answers are not kept; a proxy or the server's own logs may",
    "encryption.capture_key": "there are no captured files",
    "batch": "`lmi deploy batch` runs it on SageMaker",
    "encryption.input_key": "a batch's input is SageMaker's",
    "encryption.model_key": "the account's role uses it, as `lmi deploy iam` allows",
    "encryption.secret_key": "the account's role uses it, as `lmi deploy iam` allows",
    "instance.ami": "the nodes' image must have the driver that the container needs",
    "instance.managed": "the cluster's autoscaler adds nodes",
    "instance.volume_gb": "the nodes' volume must hold the image and, for a model in S3, the model",
    "instance.variant": "there are no variants to name",
    "timeouts.provision": "a pod waits for a node without limit",
    "update.wait": "there is no wait between batches",
    "update.keep": "kubectl rollout undo has the earlier versions",
    "components.cache": "the nodes keep images; the model is loaded by each pod",
}
"""Settings without a place in the formats, by their path: those whose loss would do harm, and the others."""


@dataclass(frozen=True)
class Server:
    """One server of the deployment: the endpoint's, or an inference component's.

    Attributes:
        name: of its objects.
        copies: first number of pods.
        gpus: GPUs of one pod; 0: none.
        cpus: CPU cores to ask for; None: not said.
        memory_mib: MiB of memory to ask for; None: not said.
        variables: the container's environment.
        spec, decision: of what this server runs, where components differ.
    """

    name: str
    copies: int
    gpus: int
    cpus: float | None
    memory_mib: int | None
    variables: Mapping[str, str]
    spec: Spec
    decision: Decision

    @property
    def env(self) -> list[Manifest]:
        """The container's variables."""
        return [{"name": name, "value": literal(value)} for name, value in sorted(self.variables.items())]

    @property
    def port(self) -> int:
        return int(self.variables.get(_PORT, 8080))

    def resources(self) -> Manifest:
        """The container's resources. A GPU's request is its limit, as Kubernetes requires."""
        wants: Manifest = {}
        if self.cpus is not None:
            wants["cpu"] = f"{round(self.cpus * 1000)}m"
        if self.memory_mib is not None:
            wants["memory"] = f"{self.memory_mib}Mi"
        gpus = {"nvidia.com/gpu": str(self.gpus)} if self.gpus else {}
        return {name: value for name, value in (("requests", {**wants, **gpus}), ("limits", gpus)) if value}

    def probes(self) -> Manifest:
        """The container's probes, all of /ping.

        /ping is 503 while a lost engine is started again. So the container is only replaced after as long as a start.
        """
        ping = {"httpGet": {"path": "/ping", "port": self.port}, "periodSeconds": 10, "timeoutSeconds": 2}
        # A hub's model the container downloads itself, before /ping answers 200.
        download = self.decision.download if self.spec.model.id is not None else 0
        starts = -(-(self.decision.startup + download) // 10)
        restarts = -(-self.decision.startup // 10)
        return {
            "startupProbe": {**ping, "failureThreshold": starts},
            "readinessProbe": {**ping, "periodSeconds": 5, "failureThreshold": 2},
            "livenessProbe": {**ping, "failureThreshold": restarts},
        }


def servers(spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False) -> list[Server]:
    """Return the deployment's servers: one, or one a component.

    Raises:
        Refused: the environment would hold a secret, or a setting would be lost whose loss does harm.
        SpecError: a name is none in Kubernetes, or the environment is wrong.
    """
    if lost := [f"{path}: {_REFUSED[path]}" for path in setting_paths(spec) if path in _REFUSED]:
        raise Refused("this format has no place for " + "; ".join(lost), "Leave it out, or deploy to SageMaker.")
    pod_notes(spec)
    result = [
        one
        for server in of_components(spec)
        for one in _of_one(server, decision.of(server), allow_plaintext_secret=allow_plaintext_secret)
    ]
    order = {item.name: place for place, item in enumerate(spec.components)}
    result.sort(key=lambda one: order.get(one.name, 0))
    for name in (spec.name, *[server.name for server in result]):  # the first is that of the pods' account
        if not _NAME.fullmatch(name) or len(name) > _LONGEST:
            raise SpecError(
                f"{name}: in Kubernetes a name has at most {_LONGEST} lower-case letters, digits and hyphens, "
                "and begins with a letter"
            )
    return result


def _of_one(spec: Spec, decision: Decision, *, allow_plaintext_secret: bool) -> list[Server]:
    """Return the endpoint's server, or those of components that run the same."""
    variables = environment(spec, decision, allow_plaintext_secret=allow_plaintext_secret)
    if not (port := variables.get(_PORT, "8080")).isdecimal() or not 0 < int(port) < 1 << 16:
        raise SpecError(f"environment.{_PORT}={port}: must be a port, 1 to 65535")
    if spec.scaling is not None:
        variables |= _with_metrics(spec, decision, variables)
    runs = (variables, spec, decision)
    if spec.components:
        return [
            Server(item.name, item.copies, min(item.accelerators, decision.gpus), item.cpus, item.memory_mb, *runs)
            for item in spec.components
        ]
    vcpus, ram = smallest(decision, "vcpus"), smallest(decision, "ram_gib")
    cpus, memory_mib = vcpus and vcpus * _SHARE, ram and int(ram * 1024 * _SHARE)
    return [Server(spec.name, spec.instance.count, decision.gpus, cpus, memory_mib, *runs)]


def literal(text: str) -> str:
    """Escape `$`: in a container's variables and arguments `$(NAME)` is another variable's value, and `$$` is `$`."""
    return text.replace("$", "$$")


def types(decision: Decision) -> list[str]:
    """Return the instance types, the first choice first.

    Raises:
        Refused: the pools differ in what a pod asks for.
    """
    if len({(pool.gpus, pool.tensor_parallel, tuple(pool.options.items())) for pool in decision.pools}) > 1:
        raise Refused(
            "instance.pools: a pod has one number of GPUs and one environment, and these pools differ in them",
            "Export one specification for each, or deploy to SageMaker.",
        )
    return [pool.instance_type for pool in decision.pools] or [decision.instance_type]


def smallest(decision: Decision, name: str) -> int | None:
    """Return the smallest number among the instance types; None: unknown of one."""
    numbers = [getattr(item, name) for item in decision.pools or (decision,)]
    return None if None in numbers else min(numbers)


def notes(spec: Spec) -> list[str]:
    """Return a sentence for each setting that the format has no place for; in the file they are comments."""
    sentences = [f"{path}: no equivalent here; {_NOTED[path]}." for path in setting_paths(spec) if path in _NOTED]
    if spec.update.policy == "blue_green":
        sentences.append("update.policy: no equivalent here for blue_green; pods are replaced in batches.")
    if spec.components and "instance.count" in setting_paths(spec):
        sentences.append(
            "instance.count: no equivalent here; the cluster's autoscaler adds nodes for the components' pods."
        )
    return [*sentences, *pod_notes(spec)]


def setting_paths(section: Section, before: str = "") -> Iterator[str]:
    """Yield the paths of all settings that the specification has, without positions in lists, each once."""
    paths: dict[str, None] = {}
    for name in section.model_fields_set:
        value = getattr(section, name)
        if value in (None, (), {}, False):
            continue
        path = before + (type(section).model_fields[name].alias or name)
        paths[path] = None
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Section):
                paths.update(dict.fromkeys(setting_paths(item, f"{path}.")))
    yield from sorted(paths)


def service_account(spec: Spec, labels: Mapping[str, str] | None = None) -> Manifest:
    """Return the account of the pods: EKS gives it the role (IRSA), if the role trusts the cluster's provider."""
    metadata: Manifest = {"name": spec.name, "annotations": {"eks.amazonaws.com/role-arn": spec.role}}
    if labels:
        metadata["labels"] = dict(labels)
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}


def bounds(scaling: Scaling) -> tuple[int, int]:
    """Return the minimum and maximum number of pods.

    Raises:
        Refused: a value is beyond what the autoscalers of Kubernetes do.
    """
    if scaling.min == 0:
        raise Refused(
            "scaling.min: 0: without a pod there is no /metrics that would wake one",
            "Set scaling.min to 1, or deploy inference components or an asynchronous endpoint to SageMaker.",
        )
    for name in ("scale_in_cooldown", "scale_out_cooldown"):
        if getattr(scaling, name) > _COOLDOWN:
            raise Refused(f"scaling.{name}: a HorizontalPodAutoscaler takes at most {_COOLDOWN} seconds")
    return scaling.min, scaling.max


def to_yaml(manifests: list[Manifest], comments: list[str]) -> str:
    """Return the file: comments, then a document a manifest."""
    head = "".join(f"# {comment}\n" for comment in ["Written by lmi deploy export.", *comments])
    separate: list[Manifest] = json.loads(json.dumps(manifests))  # a value that occurs twice would become an anchor
    return head + str(yaml.safe_dump_all(separate, sort_keys=False, width=120)).rstrip("\n")


def _with_metrics(spec: Spec, decision: Decision, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that chooses the front end with /metrics; DJL Serving has none of the server's."""
    if is_aws_image(decision.image):
        raise Refused("scaling: AWS's image has no metrics that scaling could read", "Use this project's image.")
    if variables.get("LMI_FRONT", "embedded") != "embedded":
        raise Refused(
            f"scaling reads the server's /metrics, which environment.LMI_FRONT={variables['LMI_FRONT']} has not",
            "Leave environment.LMI_FRONT out.",
        )
    return {"LMI_FRONT": "embedded"}


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


# -- KServe: an InferenceService with the server as custom predictor, in Standard mode ---------------------------------


_MOUNTED = "/mnt/models"
"""Where KServe puts the files of a custom container's STORAGE_URI."""


def kserve_manifests(
    spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False
) -> tuple[list[Manifest], list[str]]:
    """Return the objects, and what to know about them: a sentence each.

    Raises:
        Refused: a setting has no place in KServe and its loss would do harm.
    """
    every = servers(spec, decision, allow_plaintext_secret=allow_plaintext_secret)
    return with_pods(spec, every, lambda server: [_inference_service(server)], suffix="-predictor")


def _inference_service(server: Server) -> Manifest:
    spec, prefix = server.spec, server.decision.model_data
    if prefix is not None:
        server = replace(server, variables=_mounted(server, prefix))
    least, most = (server.copies, server.copies) if spec.scaling is None else bounds(spec.scaling)
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": server.name,
            "annotations": {
                "serving.kserve.io/deploymentMode": "RawDeployment",  # newer versions call it Standard, and take both
                "serving.kserve.io/autoscalerClass": "external",  # KServe's own would scale by CPU
                **scrape(server),
            },
        },
        "spec": {
            "predictor": {
                "minReplicas": least,
                "maxReplicas": most,
                "deploymentStrategy": rollout(spec),
                **pod(server, "kserve-container"),
            }
        },
    }


def _mounted(server: Server, prefix: str) -> dict[str, str]:
    """Return the environment with the model where KServe puts it."""
    moved = {
        name: _MOUNTED + value.removeprefix(MODEL_DATA)
        if value == MODEL_DATA or value.startswith(f"{MODEL_DATA}/")
        else value
        for name, value in server.variables.items()
    }
    return {**moved, "SAGEMAKER_MODEL_PATH": _MOUNTED, "STORAGE_URI": prefix}
