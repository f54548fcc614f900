"""What `lmi deploy export` writes for Kubernetes, KServe and HyperPod, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from deploy.errors import Refused, SpecError
from deploy.export import kubernetes
from deploy.export.hyperpod import hyperpod_manifests
from deploy.export.kubernetes import kserve_manifests, kubernetes_manifests, setting_paths, to_yaml
from deploy.resolve.decision import Pool
from tests.deploy.cases import KEY, decision, spec
from tests.deploy.unit.spec.document import names
from tests.one_test import in_one_test

FORMATS = ("kserve", "hyperpod", "kubernetes")
S3 = {"model": {"s3": "s3://models/llama-3-8b/"}}
SCALING = {"scaling": {"min": 2, "max": 6, "concurrency": 12.5}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "hub": ("single", {}),
    "s3": ("single", S3),
    "scaled": ("single", {**S3, **SCALING}),
    "copies": (
        "components",
        {
            "components": [
                {"name": "llama-chat", "copies": 3, "cpus": 4, "memory_mb": 24_576},
                {"name": "llama-batch"},
            ],
            "scaling": None,
        },
    ),
    "pooled": ("single", {"instance": {"pools": [{"type": "ml.g6e.xlarge"}, {"type": "ml.g6.xlarge"}]}}),
    "cpu": ("cpu", {}),
    "aws": ("aws-image", {}),
    "captured": (
        "single",
        {"capture": {"output": "s3://captured/llama/", "percent": 20}, "encryption": {"capture_key": KEY}},
    ),
    "routed": ("single", {"routing": {"prefix_length": 4096, "concurrency_threshold": 8}, "tags": {"team": "search"}}),
}
EXPORTED = [(case, format) for case in CASES for format in FORMATS]


def exported(case: str, format: str = "kubernetes", **changes: Any) -> tuple[list[dict[str, Any]], list[str]]:
    base, own = CASES.get(case, (case, {}))
    said = spec(base, **{**own, **changes})
    decided = decision(base, vcpus=4, ram_gib=32, **({} if said.model.s3 is None else {"model_data": said.model.s3}))
    if said.instance.pools and not decided.pools:
        pools = (Pool(place, item.type, 1, 1, 4, 32) for place, item in enumerate(said.instance.pools, 1))
        decided = replace(decided, pools=tuple(pools))
    if format == "hyperpod":
        return hyperpod_manifests(said, decided, prometheus="http://prometheus:9090")
    return {"kserve": kserve_manifests, "kubernetes": kubernetes_manifests}[format](said, decided)


def of_kind(found: tuple[list[dict[str, Any]], list[str]], kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in found[0] if manifest["kind"] == kind]


def container(case: str, format: str = "kubernetes", **changes: Any) -> dict[str, Any]:
    found = exported(case, format, **changes)
    if format == "hyperpod":
        worker: dict[str, Any] = of_kind(found, "InferenceEndpointConfig")[0]["spec"]["worker"]
        return {**worker, "env": worker["environmentVariables"], **worker["probes"]}
    if format == "kserve":
        pod = of_kind(found, "InferenceService")[0]["spec"]["predictor"]
    else:
        pod = of_kind(found, "Deployment")[0]["spec"]["template"]["spec"]
    (only,) = pod["containers"]
    return dict(only)


def environment(case: str, format: str = "kubernetes", **changes: Any) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container(case, format, **changes)["env"]}


@pytest.mark.parametrize("format", FORMATS)
def test_the_container_has_its_variables_probes_and_gpus(format: str) -> None:
    found = container("hub", format)
    assert found["resources"] == {
        "requests": {"cpu": "3000m", "memory": "24576Mi", "nvidia.com/gpu": "1"},
        "limits": {"nvidia.com/gpu": "1"},
    }
    for probe, failures in ("startupProbe", 150), ("readinessProbe", 2), ("livenessProbe", 90):
        assert found[probe]["httpGet"] == {"path": "/ping", "port": 8080}
        assert found[probe]["failureThreshold"] == failures
    variables = environment("hub", format)
    assert variables["OPTION_LLM_ENGINE"] == "trtllm"
    assert variables["SERVING_JOB_QUEUE_SIZE"] == "200"
    assert environment("hub", format, environment={"WORDS": "a$$b $(PORT) $"})["WORDS"] == "a$$$$b $$(PORT) $$"
    assert "nvidia.com/gpu" not in str(container("cpu", format)["resources"])
    assert container("hub", format, environment={"SAGEMAKER_BIND_TO_PORT": "9000"})["readinessProbe"]["httpGet"] == {
        "path": "/ping",
        "port": 9000,
    }


def test_a_model_in_s3_is_copied_before_the_server_starts() -> None:
    pod = of_kind(exported("s3"), "Deployment")[0]["spec"]["template"]["spec"]
    (copier,) = pod["initContainers"]
    assert copier["args"][:4] == ["s3", "sync", "s3://models/llama-3-8b/", "/opt/ml/model"]
    assert {"name": "model", "mountPath": "/opt/ml/model", "readOnly": True} in pod["containers"][0]["volumeMounts"]
    assert environment("s3")["OPTION_MODEL_ID"] == "/opt/ml/model"


def test_kserve_mounts_it_in_its_own_place() -> None:
    variables = environment("s3", "kserve", environment={"WORDS": "/opt/ml/model/words", "OTHER": "/opt/ml/models"})
    assert variables["STORAGE_URI"] == "s3://models/llama-3-8b/"
    assert variables["SAGEMAKER_MODEL_PATH"] == variables["OPTION_MODEL_ID"] == "/mnt/models"
    assert (variables["WORDS"], variables["OTHER"]) == ("/mnt/models/words", "/opt/ml/models")
    assert "STORAGE_URI" not in environment("hub", "kserve")


def test_hyperpod_has_sources_routing_and_tags() -> None:
    (config,) = of_kind(exported("s3", "hyperpod"), "InferenceEndpointConfig")
    assert config["spec"]["modelSourceConfig"] == {
        "modelSourceType": "s3",
        "s3Storage": {"bucketName": "models", "region": "eu-west-1"},
        "modelLocation": "llama-3-8b",
        "prefetchEnabled": True,
    }
    (config,) = of_kind(exported("routed", "hyperpod"), "InferenceEndpointConfig")
    assert config["spec"]["intelligentRoutingSpec"] == {"enabled": True, "routingStrategy": "prefixaware"}
    assert config["spec"]["tags"] == [{"name": "team", "value": "search"}]
    assert config["spec"]["modelSourceConfig"]["huggingFaceModel"] == {"modelId": "meta-llama/Meta-Llama-3-8B-Instruct"}
    assert config["spec"]["kubernetes"] == {"serviceAccountName": "llama"}


@pytest.mark.parametrize(("format", "target"), [("kserve", "llama-predictor"), ("kubernetes", "llama")])
def test_pods_scale_by_the_servers_own_metrics(format: str, target: str) -> None:
    found = exported("scaled", format)
    (scaler,) = of_kind(found, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == target
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 6)
    metrics = {item["pods"]["metric"]["name"]: item["pods"]["target"] for item in scaler["spec"]["metrics"]}
    assert metrics.keys() == {"lmi_active_sequences", "lmi_queued_requests"}
    assert metrics["lmi_queued_requests"] == {"type": "AverageValue", "averageValue": "12500m"}
    assert environment("scaled", format)["LMI_FRONT"] == "embedded"
    assert "LMI_FRONT" not in environment("s3", format)
    for deployment in of_kind(found, "Deployment"):
        assert "replicas" not in deployment["spec"]


def test_hyperpod_scales_by_them_too() -> None:
    (config,) = of_kind(exported("scaled", "hyperpod"), "InferenceEndpointConfig")
    trigger = config["spec"]["autoScalingSpec"]["prometheusTrigger"]
    [pods] = set(re.findall('{pod=~"(.*?)"}', trigger["query"]))
    assert trigger["query"].replace(pods, "...") == (
        'sum(lmi_active_sequences{pod=~"..."}) + sum(lmi_queued_requests{pod=~"..."})'
    )
    assert re.fullmatch(pods, "llama-675886c7bb-7bhhg")
    for other in ("llama-chat-675886c7bb-7bhhg", "llama-default-router-8787cf46c-jmgqd", "a-llama-675886c7bb-7bhhg"):
        assert not re.fullmatch(pods, other), other
    assert trigger["targetValue"] == 12.5
    with pytest.raises(Refused, match="scaling: HyperPod asks a Prometheus"):
        hyperpod_manifests(spec("single", **SCALING), decision("single"))


@pytest.mark.parametrize("format", FORMATS)
def test_each_component_is_a_server(format: str) -> None:
    found = exported("copies", format)[0]
    servers = [one for one in found if one["kind"] in ("Deployment", "InferenceService", "InferenceEndpointConfig")]
    assert [one["metadata"]["name"] for one in servers] == ["llama-chat", "llama-batch"]
    assert container("copies", format)["resources"]["requests"] == {
        "cpu": "4000m",
        "memory": "24576Mi",
        "nvidia.com/gpu": "1",
    }


def test_pools_are_preferred_in_their_order() -> None:
    types = {"ml.g6e.xlarge": 1, "ml.g5.2xlarge": 3}
    said = spec("single", instance={"pools": [{"type": name, "priority": place} for name, place in types.items()]})
    pools = tuple(Pool(place, name, 1, 1, vcpus=4 * place, ram_gib=32) for name, place in types.items())
    decided = decision("single", instance_type="ml.g6e.xlarge", pools=pools)
    pod = kubernetes_manifests(said, decided)[0][1]["spec"]["template"]["spec"]
    nodes = pod["affinity"]["nodeAffinity"]
    (term,) = nodes["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["g6e.xlarge", "g5.2xlarge"]
    weights = [item["weight"] for item in nodes["preferredDuringSchedulingIgnoredDuringExecution"]]
    assert weights == [100, 80]
    assert pod["containers"][0]["resources"]["requests"]["cpu"] == "3000m"
    assert hyperpod_manifests(said, decided)[0][1]["spec"]["instanceTypes"] == list(types)
    with pytest.raises(Refused, match="pools: a pod has one number of GPUs"):
        exported("pools", "kserve")


ZERO = {
    "scaling": {"min": 0, "max": 2, "concurrency": 4},
    "components": [{"name": "llama-chat"}],
    "instance": {"type": "ml.g6e.xlarge", "managed": {"min": 0, "max": 2}},
}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("kubernetes", "asynchronous", {"scaling": None, "encryption": {}}, "async: requests in a queue"),
    ("kserve", "isolated", {}, "encryption.volume_key: .*; network: pods have"),
    ("hyperpod", "components", {}, "components.adapters: put them"),
    ("kubernetes", "single", ZERO, "scaling.min: 0"),
    ("hyperpod", "single", {"routing": "random"}, "routing: random"),
    ("kserve", "aws-image", SCALING, "scaling: AWS's image"),
    ("kserve", "single", {**SCALING, "environment": {"LMI_FRONT": "djl"}}, "environment.LMI_FRONT=djl"),
    ("kserve", "single", {"scaling": {"max": 2, "concurrency": 4, "scale_in_cooldown": 9999}}, "scale_in_cooldown"),
    ("kserve", "single", {"name": "Llama"}, "Llama: in Kubernetes a name"),
    ("kserve", "single", {"environment": {"SAGEMAKER_BIND_TO_PORT": "http"}}, "SAGEMAKER_BIND_TO_PORT=http: must be"),
    ("kserve", "copies", {"name": "Llama"}, "Llama: in Kubernetes a name"),  # the account's
]


@in_one_test(("format", "case", "changes", "message"), REFUSED)
def test_what_would_do_harm_is_refused_by_name(format: str, case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((Refused, SpecError), match=message):
        exported(case, format, **changes)


EXPRESSED = {
    "name", "region", "role", "tags", "options", "environment", "routing", "components", "scaling", "update",
    "encryption", "timeouts", "timeouts.download", "timeouts.startup", "instance", "instance.type", "instance.count",
    "instance.unchecked", "instance.price", "routing.prefix_length", "routing.concurrency_threshold",
    "update.policy", "update.batch_percent", "scaling.min", "scaling.max", "scaling.concurrency",
    "scaling.scale_in_cooldown", "scaling.scale_out_cooldown", "components.name", "components.copies",
    "instance.pools", "instance.pools.type", "instance.pools.priority", "instance.pools.options",
    "components.accelerators", "components.memory_mb", "components.cpus",
    "components.model", "components.image", "components.options", "components.environment",
}  # fmt: skip
"""Settings that the formats have a place for, or a note of their own in each that has none; planning's too."""


def test_no_setting_is_lost_without_a_word() -> None:
    known = EXPRESSED | kubernetes._REFUSED.keys() | kubernetes._NOTED.keys()
    for place in names():
        path = place.replace("[]", "")
        parents = {path.rsplit(".", count)[0] for count in range(path.count(".") + 1)}
        # tests/deploy/unit/resources/test_passthrough.py has the fields of `sagemaker`
        whole = parents & (
            {"image", "model", "sagemaker", "components.sagemaker"}
            | kubernetes._REFUSED.keys()
            | kubernetes._NOTED.keys()
        )
        assert path in known or whole, path


def test_a_setting_without_a_place_is_a_comment() -> None:
    said = {"update": {"policy": "blue_green", "wait": 5}, "instance": {"type": "ml.g6e.xlarge", "volume_gb": 90}}
    manifests, notes = exported("single", "kserve", **said)
    text = to_yaml(manifests, notes)
    for path in "update.policy", "update.wait", "instance.volume_gb", "role":
        assert f"\n# {path}: " in text
    assert list(yaml.safe_load_all(text)) == manifests
    assert "&id" not in text
    assert "instance.price" not in set(setting_paths(spec("single")))
