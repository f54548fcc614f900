"""Fields of `sagemaker:` in the requests, the templates and the policies."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.cli.views import plan_as_json
from deploy.deployer.live import Live
from deploy.deployer.plan import plan
from deploy.errors import Refused
from deploy.export.cloudformation import cloudformation_template, template_notes
from deploy.iam.policies import policies
from deploy.resources.build import resources
from deploy.resources.resource import Kind, Resource
from tests.deploy.cases import KEY, spec
from tests.deploy.passthrough import CAPTURE, FIELDS, RESERVATION, SHADOW, decided, specification
from tests.deploy.strict import wrong_in
from tests.one_test import in_one_test


def built(field: str, **changes: Any) -> tuple[Resource, ...]:
    return resources(specification(field, **changes), decided(field))


def one(made: tuple[Resource, ...], kind: Kind) -> Any:
    return next(item.request for item in made if item.kind is kind)


PLACES: dict[str, tuple[Kind, tuple[Any, ...], Any]] = {
    "data-capture": (Kind.ENDPOINT_CONFIG, ("DataCaptureConfig",), CAPTURE),
    "shadow": (Kind.ENDPOINT_CONFIG, ("ShadowProductionVariants",), [SHADOW]),
    "reservation": (
        Kind.ENDPOINT_CONFIG,
        ("ProductionVariants", 0, "CapacityReservationConfig", "MlReservationArn"),
        RESERVATION,
    ),
    "partitions": (
        Kind.COMPONENT,
        ("Specification", "ComputeResourceRequirements"),
        {
            "MinMemoryRequiredInMb": 1024,
            "NumberOfAcceleratorDevicesRequired": 1.0,
            "AcceleratorPartitionType": "mig-4g.40gb",
        },
    ),
    "metrics": (
        Kind.ENDPOINT_CONFIG,
        ("MetricsConfig",),
        {"EnableEnhancedMetrics": True, "MetricPublishFrequencyInSeconds": 10},
    ),
    "scheduling": (Kind.COMPONENT, ("Specification", "SchedulingConfig", "PlacementStrategy"), "BINPACK"),
    "shell": (Kind.ENDPOINT_CONFIG, ("ProductionVariants", 0, "EnableSSMAccess"), True),
    "core-dumps": (
        Kind.ENDPOINT_CONFIG,
        ("ProductionVariants", 0, "CoreDumpConfig"),
        {"DestinationS3Uri": "s3://dumps/llama/", "KmsKeyId": KEY},
    ),
    "scale-in": (
        Kind.ENDPOINT_CONFIG,
        ("ProductionVariants", 0, "ManagedInstanceScaling"),
        {
            "Status": "ENABLED",
            "MinInstanceCount": 1,
            "MaxInstanceCount": 4,
            "ScaleInPolicy": {"Strategy": "CONSOLIDATION", "MaximumStepSize": 2, "CooldownInMinutes": 10},
        },
    ),
    "specifications": (Kind.COMPONENT, ("Specifications", 1, "ComputeResourceRequirements"), {
        "MinMemoryRequiredInMb": 1024, "NumberOfAcceleratorDevicesRequired": 4,
    }),
}  # fmt: skip


def test_every_field_is_shown() -> None:
    assert set(PLACES) == set(FIELDS)
    assert len(FIELDS) == 10


@in_one_test("field", FIELDS)
def test_it_is_in_the_request_and_the_request_is_valid(field: str) -> None:
    made = built(field)
    kind, place, wanted = PLACES[field]
    found = one(made, kind)
    for step in place:
        found = found[step]
    assert found == wanted
    assert [line for item in made for line in wrong_in(item)] == []


@in_one_test("field", FIELDS)
def test_a_field_makes_new_versions_and_shows_in_the_plan(field: str) -> None:
    without = {item.key for item in built(field, sagemaker={}, components=_bare(field))}
    made = built(field)
    kind = PLACES[field][0]
    if kind is Kind.ENDPOINT_CONFIG:  # its name ends in a digest of its content
        assert {item.key for item in made if item.kind is kind}.isdisjoint(without)
    text = plan_as_json(plan(made, Live("llama", online=False)))
    assert str(PLACES[field][1][-1]) in text


def _bare(field: str) -> list[dict[str, Any]]:
    components = FIELDS[field][1].get("components", [])
    return [{name: value for name, value in item.items() if name != "sagemaker"} for item in components]


@in_one_test("field", [field for field in FIELDS if field != "partitions"])
def test_it_is_in_the_template(field: str) -> None:
    made = built(field)
    kind, place, wanted = PLACES[field]
    template = cloudformation_template(made)["Resources"]
    name = "InferenceComponentLlamaChat" if kind is Kind.COMPONENT else "EndpointConfig"
    found = template[name]["Properties"]
    for step in place:
        found = found[step]
    assert found == wanted
    assert template_notes(made) == []


def test_partitions_have_no_place_in_a_template() -> None:
    with pytest.raises(Refused, match=r"ProductionVariants\.AcceleratorPartitionLayouts of endpoint-config"):
        cloudformation_template(built("partitions"))


def test_what_a_template_leaves_out_is_named() -> None:
    metrics = {"PrimaryContainer": {"ContainerMetricsConfig": {"MetricsEndpoints": [{"MetricsEndpointPath": "/m"}]}}}
    made = built("shell", sagemaker={"model": metrics})
    (note,) = template_notes(made)
    assert note.startswith("PrimaryContainer.ContainerMetricsConfig of model/llama-")
    assert "ContainerMetricsConfig" not in str(cloudformation_template(made))


def role(field: str, **changes: Any) -> dict[str, Any]:
    document = policies(specification(field, **changes), decided(field))["execution-role"]
    return {one["Sid"]: one for one in document["Statement"]}


def test_the_role_may_do_what_a_field_needs() -> None:
    assert role("data-capture")["Capture"]["Resource"] == ["arn:aws:s3:::captured/llama/*"]
    assert role("data-capture")["Capture"]["Action"] == ["s3:PutObject"]
    assert role("data-capture")["CaptureKey"]["Resource"] == [KEY]
    assert role("core-dumps")["CoreDumps"]["Resource"] == ["arn:aws:s3:::dumps/llama/*"]
    assert "kms:Encrypt" in role("core-dumps")["CoreDumpsKey"]["Action"]
    assert len(role("shell")["Shell"]["Action"]) == 4
    assert role("metrics") == role("metrics", sagemaker={})


def test_the_role_may_read_further_model_data() -> None:
    source = {"S3Uri": "s3://drafts/llama/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    fields = {"AdditionalModelDataSources": [{"ChannelName": "draft", "S3DataSource": source}]}
    found = role("shell", sagemaker={"model": {"PrimaryContainer": fields}})
    assert found["FurtherData"]["Resource"] == ["arn:aws:s3:::drafts/llama/*"]
    assert found["FurtherDataListed"]["Condition"] == {"StringLike": {"s3:prefix": ["llama/*"]}}
    assert "Shell" not in found


def test_a_component_s_own_fields_come_over_those_of_all() -> None:
    both = {"Specification": {"SchedulingConfig": {"PlacementStrategy": "SPREAD"}}}
    made = built("scheduling", components=[{"name": "llama-chat", "sagemaker": both}, {"name": "llama-batch"}])
    strategies = [
        item.request["Specification"]["SchedulingConfig"]["PlacementStrategy"]
        for item in made
        if item.kind is Kind.COMPONENT
    ]
    assert strategies == ["SPREAD", "BINPACK"]


def test_an_adapter_has_none_of_them() -> None:
    base = {"name": "base", "adapters": [{"name": "french", "artifact": "s3://models/french.tar.gz"}]}
    made = built("scheduling", components=[base])
    adapter = next(item.request for item in made if item.name == "french")
    assert "SchedulingConfig" not in adapter["Specification"]


def test_every_type_of_the_pools_has_a_specification() -> None:
    request = one(built("specifications"), Kind.COMPONENT)
    assert "Specification" not in request
    first, second = request["Specifications"]
    assert [first["InstanceType"], second["InstanceType"]] == ["ml.g6e.xlarge", "ml.g6.12xlarge"]
    assert first["ModelName"] == second["ModelName"] == one(built("specifications"), Kind.MODEL)["ModelName"]
    assert first["ComputeResourceRequirements"]["NumberOfAcceleratorDevicesRequired"] == 1.0


def test_an_update_has_the_endpoint_s_fields_beside_ours() -> None:
    rolling = {"RollbackMaximumBatchSize": {"Type": "CAPACITY_PERCENT", "Value": 100}}
    fields = {
        "ExcludeRetainedVariantProperties": [{"VariantPropertyType": "DataCaptureConfig"}],
        "DeploymentConfig": {"RollingUpdatePolicy": rolling},
    }
    made = built("shell", sagemaker={"endpoint": fields})
    update = next(item.update for item in made if item.kind is Kind.ENDPOINT)
    policy = update["DeploymentConfig"]["RollingUpdatePolicy"]
    assert policy["RollbackMaximumBatchSize"] == rolling["RollbackMaximumBatchSize"]
    assert policy["MaximumBatchSize"] == {"Type": "INSTANCE_COUNT", "Value": 1}
    properties = cloudformation_template(made)["Resources"]["Endpoint"]["Properties"]
    assert properties["ExcludeRetainedVariantProperties"] == fields["ExcludeRetainedVariantProperties"]


def test_nothing_changes_without_them() -> None:
    assert resources(spec("plain"), decided("shell")) == built("shell", sagemaker={})
