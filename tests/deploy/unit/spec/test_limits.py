"""The specification takes no more than SageMaker does: its limits are those of botocore's service model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import botocore.session
import pytest
from pydantic import TypeAdapter, ValidationError

from deploy.resolve.images import KNOWN_AMIS
from deploy.spec import Spec, sections, values
from tests.one_test import in_one_test

SERVICE = botocore.session.Session().get_service_model("sagemaker")


def numbers(section: type[values.Section], name: str) -> tuple[Any, Any]:
    """Least and most."""
    field = dict(_branches(section.model_json_schema()["properties"][name]))
    return field.get("minimum"), field.get("maximum")


def _branches(field: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for one in field.get("anyOf", [field]):
        yield from one.items()


@in_one_test(
    ("section", "name", "shape"),
    [
        (sections.Timeouts, "download", "ProductionVariantModelDataDownloadTimeoutInSeconds"),
        (sections.Timeouts, "startup", "ProductionVariantContainerStartupHealthCheckTimeoutInSeconds"),
        (sections.Timeouts, "provision", "VariantInstanceProvisionTimeoutInSeconds"),
        (sections.Instance, "volume_gb", "ProductionVariantVolumeSizeInGB"),
        (sections.Pool, "priority", "InstancePoolPriority"),
        (sections.Async, "concurrency", "MaxConcurrentInvocationsPerInstance"),
        (sections.Update, "wait", "WaitIntervalInSeconds"),
    ],
)
def test_numbers_have_its_bounds(section: type[values.Section], name: str, shape: str) -> None:
    told = SERVICE.shape_for(shape).metadata
    assert numbers(section, name) == (told["min"], told["max"])


def test_pools_are_as_many_as_aws_takes() -> None:
    assert sections.Instance.model_json_schema()["properties"]["pools"]["maxItems"] == 5
    assert SERVICE.shape_for("InstancePoolList").metadata["max"] == 5


def test_prefix_aware_routing_has_its_bounds() -> None:
    told = SERVICE.shape_for("PrefixAwareRoutingConfig").members
    for name, member in (("prefix_length", "PrefixLength"), ("concurrency_threshold", "ConcurrencyThreshold")):
        assert numbers(sections.PrefixAware, name) == (told[member].metadata["min"], told[member].metadata["max"])


@in_one_test(
    ("annotation", "shape", "right"),
    [
        (values.Name, "EndpointName", "a-1"),
        (values.Name, "InferenceComponentName", "a-1"),
        (values.ImageUri, "ContainerImage", "1" * 12 + ".dkr.ecr.us-east-1.amazonaws.com/x:1"),
        (values.RoleArn, "RoleArn", "arn:aws:iam::111122223333:role/service-role/x"),
        (values.KeyId, "KmsKeyId", "mrk-0123456789abcdef0123456789abcdef"),
        (values.TopicArn, "SnsTopicArn", "arn:aws-cn:sns:cn-north-1:111122223333:x"),
        (values.S3Prefix, "S3ModelUri", "s3://bucket/"),
        (values.ArtifactUri, "Url", "s3://bucket/x.tar.gz"),
        (values.OutputUri, "DestinationS3Uri", "s3://bucket"),
        (values.VpcId, "SubnetId", "subnet-0"),
        (values.TagKey, "TagKey", "a b"),
        (values.TagValue, "TagValue", ""),
    ],
)
def test_texts_are_not_longer_than_it_takes(annotation: Any, shape: str, right: str) -> None:
    take = TypeAdapter(annotation).validate_python
    assert take(right) == right
    longest = SERVICE.shape_for(shape).metadata["max"]
    fill = right.replace("x", "x" * longest) if "x" in right else right + "1" * (longest + 1)
    with pytest.raises(ValidationError):
        take(fill)
    assert TypeAdapter(annotation).json_schema()["maxLength"] <= longest


def test_lists_have_its_lengths() -> None:
    fields = sections.Network.model_json_schema()["properties"]
    assert fields["subnets"]["maxItems"] == SERVICE.shape_for("Subnets").metadata["max"]
    assert fields["security_groups"]["maxItems"] == SERVICE.shape_for("VpcSecurityGroupIds").metadata["max"]
    tags = Spec.model_json_schema()["properties"]["tags"]
    own = 3  # lmi:deployment, lmi:spec, lmi:before
    assert tags["maxProperties"] == SERVICE.shape_for("TagList").metadata["max"] - own


def test_the_hosts_are_all_that_botocore_knows() -> None:
    assert set(KNOWN_AMIS) == set(SERVICE.shape_for("ProductionVariantInferenceAmiVersion").enum)


def test_every_instance_type_of_sagemaker_is_a_name_that_is_taken() -> None:
    take = TypeAdapter(values.InstanceType).validate_python
    types = SERVICE.shape_for("ProductionVariantInstanceType").enum
    assert [take(one) for one in types] == types


@in_one_test("region", ["us-east-1", "us-isob-east-1", "eusc-de-east-1", "cn-northwest-1", "mx-central-1"])
def test_regions_of_all_partitions_are_taken(region: str) -> None:
    assert TypeAdapter(values.Region).validate_python(region) == region
