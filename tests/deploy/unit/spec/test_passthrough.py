"""`sagemaker:` takes what SageMaker's API takes, and names what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.errors import SpecError
from deploy.spec.passthrough import OWNED, SageMaker, shape_of
from deploy.spec.reading import FILLERS, read_spec
from tests.one_test import in_one_test

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
         ".EnableSSMAccess: must be true or false; leave it out, or give a value"),
        ("variant", {"CoreDumpConfig": []}, ".CoreDumpConfig: must be a mapping of names to values"),
        ("variant", {"CoreDumpConfig": {}}, ".CoreDumpConfig.DestinationS3Uri: must be given"),
        (
            "variant",
            {"CoreDumpConfig": {"DestinationS3Uri": "https://b/x"}},
            '.CoreDumpConfig.DestinationS3Uri: must begin with s3:// (given: "https://b/x")',
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
            ".ShadowProductionVariants[0].InstanceType: is none of the 277 words that SageMaker takes; did you mean "
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
    with pytest.raises(ValueError, match=r"belongs to ") as raised:
        SageMaker(**{part: fields})
    where = f".{place}".replace("Specifications.", "Specifications[0].")
    assert f"{where}: belongs to {OWNED[part][place]}" in str(raised.value)


@in_one_test(("part", "place"), [(part, place) for part, owned in OWNED.items() for place in owned])
def test_every_place_of_another_setting_is_a_field_of_the_api(part: str, place: str) -> None:
    if (part, place) in {("endpoint", "Tags"), ("component", "DeploymentConfig")}:  # of the other call
        return
    shape = shape_of(part)
    for step in place.split("."):
        inner = shape.member if shape.type_name == "list" else shape
        shape = inner.members[step]


CAPTURE = {
    "InitialSamplingPercentage": 1,
    "DestinationS3Uri": "s3://b/x",
    "CaptureOptions": [{"CaptureMode": "Input"}],
}
SHADOW = {"VariantName": "Shadow", "ModelName": "other", "InstanceType": "ml.g6e.xlarge", "InitialInstanceCount": 1}
PARTITIONED = {"AcceleratorPartitionLayouts": [{"AcceleratorPartitionTypes": ["mig-3g.40gb"]}]}


def partition(kind: str) -> dict[str, Any]:
    return {"Specification": {"ComputeResourceRequirements": {"AcceleratorPartitionType": kind}}}


@in_one_test(
    ("content", "line"),
    [
        ({"sagemaker": {"component": partition("mig-1g.10gb")}}, "sagemaker.component: the specification has no"),
        (
            {"sagemaker": {"variant": {"ManagedInstanceScaling": {"ScaleInPolicy": {"Strategy": "IDLE_RELEASE"}}}}},
            "sagemaker.variant.ManagedInstanceScaling: needs instance.managed",
        ),
        (
            {"sagemaker": {"endpoint_config": {"ShadowProductionVariants": [SHADOW, {**SHADOW, "VariantName": "T"}]}}},
            "sagemaker.endpoint_config.ShadowProductionVariants: SageMaker takes one beside",
        ),
        (
            {**MANAGED, "sagemaker": {"endpoint_config": {"ShadowProductionVariants": [SHADOW]}}},
            "sagemaker.endpoint_config.ShadowProductionVariants: does not go with components",
        ),
        (
            {
                "async": {"output": "s3://answers/"},
                "sagemaker": {"endpoint_config": {"ShadowProductionVariants": [SHADOW]}},
            },
            "sagemaker.endpoint_config.ShadowProductionVariants: does not go with async",
        ),
        ({"sagemaker": {"variant": PARTITIONED}}, "AcceleratorPartitionLayouts: needs components"),
        (
            {**MANAGED, "sagemaker": {"variant": PARTITIONED}},
            "chat: AcceleratorPartitionType: must be given",
        ),
        (
            {**MANAGED, "sagemaker": {"component": partition("mig-3g.40gb")}},
            "AcceleratorPartitionType: needs sagemaker.variant.AcceleratorPartitionLayouts",
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
            "a partition has one accelerator, and accelerators is 2",
        ),
        (
            {**MANAGED, "sagemaker": {"component": {"Specifications": [{"InstanceType": "ml.g6e.xlarge"}]}}},
            "Specifications: needs instance.pools",
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
            "CrossRegionTrafficConfig: does not go with async",
        ),
        (
            {"sagemaker": {"endpoint_config": {"AsyncInferenceConfig": {"OutputConfig": {}}}}},
            "AsyncInferenceConfig: needs async",
        ),
        (
            {"sagemaker": {"endpoint": {"DeploymentConfig": {"RollingUpdatePolicy": {}}}}},
            "RollingUpdatePolicy: needs update.policy: rolling, and an instance.count above 1",
        ),
        (
            {"sagemaker": {"model": {"PrimaryContainer": {"ModelDataSource": {"S3DataSource": {"ETag": "x"}}}}}},
            "ModelDataSource: needs model data in S3",
        ),
        *(
            (
                {
                    "model": {"s3": "s3://models/llama/"},
                    **other,
                    "sagemaker": {"model": {"PrimaryContainer": {"ModelDataSource": {"S3DataSource": {"ETag": "x"}}}}},
                },
                "ModelDataSource: needs model data in S3",
            )
            for other in (
                {"components": [{"name": "chat"}, {"name": "embed", "model": {"id": "a/b"}}]},
                {"shadow": {"percent": 5, "model": {"id": "a/b"}}},
            )
        ),
    ],
)
def test_what_does_not_go_together_is_said(content: dict[str, Any], line: str, tmp_path: Path) -> None:
    assert [one for one in refused(content, tmp_path) if line in one] != []


def test_fields_are_set_on_the_command_line_too(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(dict(FILLERS)))
    spec = read_spec(path, ["sagemaker.variant.EnableSSMAccess=true"])
    assert spec.sagemaker.variant == {"EnableSSMAccess": True}
    with pytest.raises(SpecError, match=r"sagemaker\.variant\.EnableSSM: there is no such field"):
        read_spec(path, ["sagemaker.variant.EnableSSM=true"])
