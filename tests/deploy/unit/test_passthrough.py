"""Fields of `sagemaker:`: which are taken, and where they stand in requests, templates and policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli.views import plan_as_json
from deploy.deployer.live import Live
from deploy.deployer.plan import plan
from deploy.errors import Refused, SpecError
from deploy.export.cloudformation import cloudformation_template, template_notes
from deploy.iam.policies import policies
from deploy.resources.build import resources
from deploy.resources.resource import Kind, Resource
from deploy.spec.passthrough import OWNED, SageMaker, shape_of
from deploy.spec.reading import FILLERS, read_spec
from tests.deploy.cases import KEY, spec
from tests.deploy.passthrough import CAPTURE, FIELDS, RESERVATION, SHADOW, decided, specification
from tests.deploy.strict import wrong_in
from tests.one_test import in_one_test

# -- `sagemaker:` takes what SageMaker's API takes, and names what it does not -----------------------------------------


MANAGED = {"instance": {"type": "ml.p5.48xlarge", "managed": {"max": 2}}, "components": [{"name": "chat"}]}


def refused(content: dict[str, Any], tmp_path: Path) -> list[str]:
    """The lines of the error."""
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump({**FILLERS, **content}))
    with pytest.raises(SpecError) as raised:
        read_spec(path)
    return [line.strip().removeprefix(f"{path}: ") for line in str(raised.value).splitlines() if line != f"{path}:"]


@pytest.mark.parametrize(
    ("part", "fields", "line"),
    [
        ("variant", {"EnableSSMAcces": 1}, ".EnableSSMAcces: there is no such field; did you mean EnableSSMAccess?"),
        ("variant", {"enableSSMAccess": 1}, ".enableSSMAccess: there is no such field; did you mean EnableSSMAccess?"),
        (
            "variant",
            {"DataCaptureConfig": {}},
            ".DataCaptureConfig: there is no such field; did you mean sagemaker.endpoint_config.DataCaptureConfig?",
        ),
        (
            "variant",
            {"MlReservationArn": "x"},
            ".MlReservationArn: there is no such field; did you mean "
            "sagemaker.variant.CapacityReservationConfig.MlReservationArn?",
        ),
        ("variant", {"EnableSSMAccess": "yes"}, '.EnableSSMAccess: must be true or false (given: "yes")'),
        ("variant", {"EnableSSMAccess": None},
         ".EnableSSMAccess: must be true or false; omit it, or set a value"),
        ("variant", {"CoreDumpConfig": []}, ".CoreDumpConfig: must be a mapping of names to values"),
        ("variant", {"CoreDumpConfig": {}}, ".CoreDumpConfig.DestinationS3Uri: is required"),
        (
            "variant",
            {"CoreDumpConfig": {"DestinationS3Uri": "https://b/x"}},
            '.CoreDumpConfig.DestinationS3Uri: must start with s3:// (given: "https://b/x")',
        ),
        (
            "variant",
            {"AcceleratorPartitionLayouts": [{"AcceleratorPartitionTypes": ["3g.40gb"]}]},
            ".AcceleratorPartitionLayouts[0].AcceleratorPartitionTypes[0]: must match "
            r'mig-[0-9]+g\.[0-9]+gb([+-][a-z0-9.]+)* (given: "3g.40gb")',
        ),
        (
            "component",
            {"Specification": {"SchedulingConfig": {"PlacementStrategy": "PACK"}}},
            '.Specification.SchedulingConfig.PlacementStrategy: must be SPREAD or BINPACK (given: "PACK")',
        ),
        (
            "endpoint_config",
            {"MetricsConfig": {"MetricPublishFrequencyInSeconds": True}},
            ".MetricsConfig.MetricPublishFrequencyInSeconds: must be a whole number (given: true)",
        ),
        (
            "endpoint_config",
            {"MetricsConfig": {"MetricPublishFrequencyInSeconds": 20}},
            ".MetricsConfig.MetricPublishFrequencyInSeconds: must be 10, 30, 60, 120, 180, 240 or 300 (given: 20)",
        ),
        (
            "endpoint_config",
            {"ShadowProductionVariants": [{"VariantName": "S", "InstanceType": "ml.g6e.xlrge"}]},
            ".ShadowProductionVariants[0].InstanceType: is not one of the 277 values that SageMaker accepts; "
            "did you mean "
            'ml.g6e.xlarge? (given: "ml.g6e.xlrge")',
        ),
        ("endpoint_config", {"CrossRegionTrafficConfig": {"MaxInvocationsPerSecondPerInstance": 0,
          "MaxCrossRegionPercentPerEndpoint": 50}},
         ".CrossRegionTrafficConfig.MaxInvocationsPerSecondPerInstance: must be at least 1 (given: 0)"),
        ("model", {"PrimaryContainer": {"AdditionalModelDataSources": [{}] * 6}},
         ".PrimaryContainer.AdditionalModelDataSources: must have at most 5 entries (given: 6)"),
        ("variant", {"CoreDumpConfig": {1: 2}}, ".CoreDumpConfig.1: there is no such field"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_what_is_right(
    part: str, fields: dict[Any, Any], line: str, tmp_path: Path
) -> None:
    lines = refused({"sagemaker": {part: fields}}, tmp_path)
    assert lines[0].startswith(f"sagemaker.{part}{line}".split(" words ")[0].split("277")[0])
    assert "277" in line or lines[0] == f"sagemaker.{part}{line}"


@in_one_test(("part", "place"), [(part, place) for part, owned in OWNED.items() for place in owned])
def test_what_another_setting_decides_is_refused_with_its_name(part: str, place: str) -> None:
    *above, name = place.split(".")
    fields: Any = {name: "x"}
    for step in reversed(above):
        fields = {step: [fields] if step == "Specifications" else fields}
    with pytest.raises(ValueError, match="is set by ") as raised:
        SageMaker(**{part: fields})
    where = f".{place}".replace("Specifications.", "Specifications[0].")
    assert f"{where}: is set by {OWNED[part][place]}" in str(raised.value)


@in_one_test(("part", "place"), [(part, place) for part, owned in OWNED.items() for place in owned])
def test_every_place_of_another_setting_is_a_field_of_the_api(part: str, place: str) -> None:
    if (part, place) in {("endpoint", "Tags"), ("component", "DeploymentConfig")}:  # of the other call
        return
    shape = shape_of(part)
    for step in place.split("."):
        inner = shape.member if shape.type_name == "list" else shape
        shape = inner.members[step]


PASSTHROUGH_SHADOW = {
    "VariantName": "Shadow",
    "ModelName": "other",
    "InstanceType": "ml.g6e.xlarge",
    "InitialInstanceCount": 1,
}
PARTITIONED = {"AcceleratorPartitionLayouts": [{"AcceleratorPartitionTypes": ["mig-3g.40gb"]}]}


def partition(kind: str) -> dict[str, Any]:
    return {"Specification": {"ComputeResourceRequirements": {"AcceleratorPartitionType": kind}}}


@in_one_test(
    ("content", "line"),
    [
        ({"sagemaker": {"component": partition("mig-1g.10gb")}}, "sagemaker.component: requires components"),
        (
            {"sagemaker": {"variant": {"ManagedInstanceScaling": {"ScaleInPolicy": {"Strategy": "IDLE_RELEASE"}}}}},
            "sagemaker.variant.ManagedInstanceScaling: requires instance.managed",
        ),
        (
            {
                "sagemaker": {
                    "endpoint_config": {
                        "ShadowProductionVariants": [PASSTHROUGH_SHADOW, {**PASSTHROUGH_SHADOW, "VariantName": "T"}]
                    }
                }
            },
            "sagemaker.endpoint_config.ShadowProductionVariants: SageMaker accepts only one",
        ),
        (
            {**MANAGED, "sagemaker": {"endpoint_config": {"ShadowProductionVariants": [PASSTHROUGH_SHADOW]}}},
            "sagemaker.endpoint_config.ShadowProductionVariants: cannot be combined with components",
        ),
        (
            {
                "async": {"output": "s3://answers/"},
                "sagemaker": {"endpoint_config": {"ShadowProductionVariants": [PASSTHROUGH_SHADOW]}},
            },
            "sagemaker.endpoint_config.ShadowProductionVariants: cannot be combined with async",
        ),
        ({"sagemaker": {"variant": PARTITIONED}}, "AcceleratorPartitionLayouts: requires components"),
        (
            {**MANAGED, "sagemaker": {"variant": PARTITIONED}},
            "chat: AcceleratorPartitionType: is required",
        ),
        (
            {**MANAGED, "sagemaker": {"component": partition("mig-3g.40gb")}},
            "AcceleratorPartitionType: requires sagemaker.variant.AcceleratorPartitionLayouts",
        ),
        (
            {**MANAGED, "sagemaker": {"variant": PARTITIONED, "component": partition("mig-7g.80gb")}},
            "AcceleratorPartitionType: mig-7g.80gb is not in",
        ),
        (
            {
                **MANAGED,
                "components": [{"name": "chat", "accelerators": 2}],
                "sagemaker": {"variant": PARTITIONED, "component": partition("mig-3g.40gb")},
            },
            "requires accelerators: 1 (one partition), but accelerators is 2",
        ),
        (
            {**MANAGED, "sagemaker": {"component": {"Specifications": [{"InstanceType": "ml.g6e.xlarge"}]}}},
            "Specifications: requires instance.pools",
        ),
        (
            {
                "instance": {"pools": [{"type": "ml.g6e.xlarge"}]},
                "components": [{"name": "chat"}],
                "sagemaker": {"component": {"Specifications": [{"InstanceType": "ml.g5.xlarge"}]}},
            },
            "components chat: Specifications: ml.g5.xlarge is not in instance.pools (ml.g6e.xlarge)",
        ),
        (
            {
                "async": {"output": "s3://answers/"},
                "sagemaker": {
                    "endpoint_config": {
                        "CrossRegionTrafficConfig": {
                            "MaxInvocationsPerSecondPerInstance": 1,
                            "MaxCrossRegionPercentPerEndpoint": 1,
                        }
                    }
                },
            },
            "CrossRegionTrafficConfig: cannot be combined with async",
        ),
        (
            {"sagemaker": {"endpoint_config": {"AsyncInferenceConfig": {"OutputConfig": {}}}}},
            "AsyncInferenceConfig: requires async",
        ),
        (
            {"sagemaker": {"endpoint": {"DeploymentConfig": {"RollingUpdatePolicy": {}}}}},
            "RollingUpdatePolicy: requires update.policy: rolling, and an instance.count of 2 or more",
        ),
        (
            {"sagemaker": {"model": {"PrimaryContainer": {"ModelDataSource": {"S3DataSource": {"ETag": "x"}}}}}},
            "ModelDataSource: requires a model in S3",
        ),
        *(
            (
                {
                    "model": {"s3": "s3://models/llama/"},
                    **other,
                    "sagemaker": {"model": {"PrimaryContainer": {"ModelDataSource": {"S3DataSource": {"ETag": "x"}}}}},
                },
                "ModelDataSource: requires a model in S3",
            )
            for other in (
                {"components": [{"name": "chat"}, {"name": "embed", "model": {"id": "a/b"}}]},
                {"shadow": {"percent": 5, "model": {"id": "a/b"}}},
            )
        ),
    ],
)
def test_what_does_not_go_together_is_said_in_passthrough(content: dict[str, Any], line: str, tmp_path: Path) -> None:
    assert [one for one in refused(content, tmp_path) if line in one] != []


def test_fields_are_set_on_the_command_line_too(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(dict(FILLERS)))
    spec = read_spec(path, ["sagemaker.variant.EnableSSMAccess=true"])
    assert spec.sagemaker.variant == {"EnableSSMAccess": True}
    with pytest.raises(SpecError, match=r"sagemaker\.variant\.EnableSSM: there is no such field"):
        read_spec(path, ["sagemaker.variant.EnableSSM=true"])


# -- fields of `sagemaker:` in the requests, the templates and the policies --------------------------------------------


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
    text = json.dumps(plan_as_json(plan(made, Live("llama", online=False))))
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
