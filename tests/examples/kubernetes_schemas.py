"""Validate manifests by the models and schemas of Kubernetes, KServe and HyperPod, in an environment that has them.

Reads a JSON list of lists of manifests, and prints the problems of each list as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import jinja2
import jsonschema
import kubernetes_validate
import pydantic
import yaml

Manifest = dict[str, Any]


def problems(manifest: Manifest) -> list[str]:
    kind = manifest["kind"]
    try:
        if kind == "InferenceService":
            in_kserve(manifest, "V1beta1InferenceService")
            manifest = as_deployment(manifest)
        elif kind == "InferenceEndpointConfig":
            in_hyperpod(manifest)
            return []
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    except (jsonschema.ValidationError, pydantic.ValidationError, ValueError) as error:
        return [f"{kind}: {error}"]
    return []


def package_directory(name: str) -> Path:
    """Return a package's directory, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def in_kserve(value: Any, kind: str) -> None:
    """Check names and values against KServe's models; Kubernetes' own types are checked in the Deployment."""
    if kind.startswith("list["):
        for item in value:
            in_kserve(item, kind[5:-1])
    if not kind.startswith("V1beta1"):
        return
    words = "_".join(kserve_words(kind))
    model = getattr(importlib.import_module(f"kserve.models.{words}"), kind)
    fields = {name: field for field, name in model.attribute_map.items()}
    if unknown := value.keys() - fields.keys():
        raise ValueError(f"{kind} has no {', '.join(sorted(unknown))}")
    model(**{fields[name]: item for name, item in value.items()})
    for name, item in value.items():
        in_kserve(item, model.openapi_types[fields[name]])


def kserve_words(kind: str) -> list[str]:
    """Return `v1beta1`, `inference`, `service` for V1beta1InferenceService."""
    found = ["v1beta1"]
    for letter in kind.removeprefix("V1beta1"):
        if letter.isupper():
            found.append(letter.lower())
        else:
            found[-1] += letter
    return found


def as_deployment(manifest: Manifest) -> Manifest:
    """Return the Deployment that KServe makes of a predictor: its own fields left out, the others are a pod's."""
    own = ("minReplicas", "maxReplicas", "deploymentStrategy")
    pod = dict(manifest["spec"]["predictor"])
    taken = {name: pod.pop(name) for name in own}
    labels = {"app": manifest["metadata"]["name"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": manifest["metadata"],
        "spec": {
            "replicas": taken["minReplicas"],
            "strategy": taken["deploymentStrategy"],
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def in_hyperpod(manifest: Manifest) -> None:
    """Check by the CRD's models, and that the template's package makes the same object of the same settings."""
    path = package_directory("sagemaker") / "hyperpod/inference/config/hp_endpoint_config.py"
    spec = importlib.util.spec_from_file_location("hp_endpoint_config", path)
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = models
    spec.loader.exec_module(models)
    models._HPEndpoint.model_validate(manifest["spec"])

    if "limits" not in manifest["spec"]["worker"]["resources"]:
        return  # the template then writes `requests` below an empty mapping, which is no YAML
    template = package_directory("hyperpod_custom_inference_template") / "v1_2"
    settings = flat(manifest)
    jsonschema.validate(settings, json.loads((template / "schema.json").read_text()))
    text: dict[str, Any] = {}
    exec((template / "template.py").read_text(), text)
    made = yaml.safe_load(jinja2.Template(text["TEMPLATE_CONTENT"]).render({**defaults(template), **settings}))
    if wrong := differences(manifest["spec"], made["spec"], "spec"):
        raise ValueError("the template makes something else: " + "; ".join(wrong))


def defaults(template: Path) -> dict[str, Any]:
    fields = json.loads((template / "schema.json").read_text())["properties"]
    return {name: field.get("default") for name, field in fields.items()}


def flat(manifest: Manifest) -> dict[str, Any]:
    """Return the object as the settings of the template's package."""
    spec, worker = manifest["spec"], manifest["spec"]["worker"]
    source, balancer = spec["modelSourceConfig"], spec["loadBalancer"]
    routing = spec.get("intelligentRoutingSpec", {})
    found = {
        "metadata_name": manifest["metadata"]["name"],
        "endpoint_name": spec["endpointName"],
        "instance_type": spec.get("instanceType"),
        "instance_types": ",".join(spec["instanceTypes"]) if "instanceTypes" in spec else None,
        "model_name": spec["modelName"],
        "data_capture": spec.get("dataCapture"),
        "replicas": spec["replicas"],
        "max_deploy_time_in_seconds": spec["maxDeployTimeInSeconds"],
        "invocation_endpoint": spec["invocationEndpoint"],
        "model_source_type": source["modelSourceType"],
        "model_location": source.get("modelLocation"),
        "prefetch_enabled": source["prefetchEnabled"],
        "s3_bucket_name": source.get("s3Storage", {}).get("bucketName"),
        "s3_region": source.get("s3Storage", {}).get("region"),
        "huggingface_model_id": source.get("huggingFaceModel", {}).get("modelId"),
        "metrics_enabled": spec["metrics"]["enabled"],
        "model_metrics_path": spec["metrics"]["modelMetrics"]["path"],
        "model_metrics_port": spec["metrics"]["modelMetrics"]["port"],
        "load_balancer_health_check_path": balancer["healthCheckPath"],
        "load_balancer_routing_algorithm": balancer["routingAlgorithm"],
        "intelligent_routing_enabled": routing.get("enabled"),
        "routing_strategy": routing.get("routingStrategy"),
        "image_uri": worker["image"],
        "container_port": worker["modelInvocationPort"]["containerPort"],
        "model_volume_mount_name": worker["modelVolumeMount"]["name"],
        "model_volume_mount_path": worker["modelVolumeMount"]["mountPath"],
        "env": {item["name"]: item["value"] for item in worker["environmentVariables"]},
        "resources_limits": worker["resources"].get("limits"),
        "resources_requests": worker["resources"].get("requests"),
        "probes": worker["probes"],
        "tags": {item["name"]: item["value"] for item in spec.get("tags", [])},
        "kubernetes": spec.get("kubernetes"),
        "auto_scaling_spec": spec.get("autoScalingSpec"),
    }
    return {name: value for name, value in found.items() if value is not None}


def differences(ours: Any, made: Any, place: str) -> list[str]:
    """Name what the template makes otherwise; what it adds, and a quantity's type, do not count."""
    if isinstance(ours, dict) and isinstance(made, dict):
        return [text for name, value in ours.items() for text in differences(value, made.get(name), f"{place}.{name}")]
    if isinstance(ours, list) and isinstance(made, list) and len(ours) == len(made):
        pairs = enumerate(zip(ours, made, strict=True))
        return [text for number, pair in pairs for text in differences(*pair, f"{place}[{number}]")]
    unnamed = place.endswith(".modelInvocationPort.name")  # the template leaves it to the CRD's default
    return [] if str(ours) == str(made) or unnamed else [f"{place}: {made!r}, not {ours!r}"]


if __name__ == "__main__":
    kserve = types.ModuleType("kserve")  # the package itself imports its server
    kserve.__path__ = [str(package_directory("kserve"))]
    models = types.ModuleType("kserve.models")
    models.__path__ = [str(package_directory("kserve") / "models")]
    sys.modules |= {"kserve": kserve, "kserve.models": models}
    print(json.dumps([[text for one in manifests for text in problems(one)] for manifests in json.load(sys.stdin)]))
