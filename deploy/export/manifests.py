"""Common parts of the Kubernetes formats: a deployment's servers, and the settings that have no place there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from deploy.errors import Refused, SpecError
from deploy.export.passthrough import pod_notes
from deploy.resolve.decision import Decision
from deploy.resources.environment import environment
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
