"""What AWS is asked again for, what counts as missing, and fields that this boto3 does not have."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from deploy.aws import Aws, is_missing
from deploy.deployer.calls import CALLS, call, removal, show
from deploy.errors import DeployError
from deploy.resources.resource import Kind
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployments import NAME


def test_every_kind_is_in_the_table_and_boto3_has_its_calls() -> None:
    assert set(CALLS) == set(Kind)
    aws = Aws("us-east-1")
    for calls in CALLS.values():
        model = aws.client(calls.service).meta.service_model
        operations = aws.client(calls.service).meta.method_to_api_mapping
        made = model.operation_model(operations[calls.create]).input_shape
        assert set(calls.identity) <= set(made.members)
        shown = model.operation_model(operations[calls.describe])
        if calls.list_field is None:
            assert {*calls.identity, calls.arn} <= set(shown.output_shape.members)
        else:
            assert calls.names_argument in shown.input_shape.members
            assert {*calls.identity, calls.arn} <= set(shown.output_shape.members[calls.list_field].member.members)
        assert calls.delete in operations
        assert calls.update is None or calls.update in operations


@pytest.mark.parametrize("code", ["ThrottlingException", "ConflictException", "ConcurrentUpdateException"])
def test_it_is_asked_again_for_five_minutes(cloud: Cloud, pauses: list[float], code: str) -> None:
    cloud.refuse("ListModels", code, times=100)
    with pytest.raises(ClientError, match=code):
        call(Aws("us-east-1"), "sagemaker", "list_models", {})
    assert 240 < sum(pauses) < 360


def test_what_is_no_use_is_not_asked_again(cloud: Cloud, pauses: list[float]) -> None:
    cloud.refuse("ListModels", "AccessDeniedException", "no")
    with pytest.raises(ClientError):
        call(Aws("us-east-1"), "sagemaker", "list_models", {})
    assert pauses == []


def test_what_is_missing_is_none_of_every_kind(cloud: Cloud) -> None:
    aws = Aws("us-east-1")
    for kind, calls in CALLS.items():
        which = tuple({"ServiceNamespace": "sagemaker"}.get(name, f"endpoint/{name}") for name in calls.identity)
        if "ScalableDimension" in calls.identity:
            which = ("sagemaker", "sagemaker:variant:DesiredInstanceCount", *which[2:])
        if kind in (Kind.MODEL, Kind.ENDPOINT_CONFIG):
            which = (f"{NAME}-0123abcd",)
        if kind in (Kind.ENDPOINT, Kind.COMPONENT):
            which = ({Kind.ENDPOINT: NAME, Kind.COMPONENT: "base"}[kind],)
        if kind is Kind.ALARM:
            which = (f"{NAME}/nobody",)
        assert show(aws, kind, which) is None
        operation, request = removal(kind, which)
        if kind is not Kind.ALARM:  # CloudWatch deletes what is not there without a word
            with pytest.raises(ClientError) as raised:
                call(aws, calls.service, operation, request)
            assert is_missing(raised.value)


def test_a_field_that_boto3_does_not_know_is_said_before_the_call(cloud: Cloud) -> None:
    variant = {"VariantName": "v", "RoutingConfig": {"RoutingStrategy": "RANDOM", "FutureStrategy": {}}}
    request = {"EndpointConfigName": "c", "ProductionVariants": [variant], "Another": 1}
    with pytest.raises(
        DeployError, match=r"Another, ProductionVariants\[0\]\.RoutingConfig\.FutureStrategy$"
    ) as raised:
        call(Aws("us-east-1"), "sagemaker", "create_endpoint_config", request)
    assert "boto3" in raised.value.advice
    assert cloud.calls == []
