"""What only looks like a deployment's own stays as it is."""

from __future__ import annotations

import pytest

from deploy.resources.resource import TAG_DEPLOYMENT
from tests.deploy.doubles.aws import Call, Cloud
from tests.deploy.doubles.deployments import COMPONENTS, NAME, PLAIN, down, up, wanted_of

COPIED = [{"Key": TAG_DEPLOYMENT, "Value": NAME}]
ROLE = "arn:aws:iam::123456789012:role/other"


@pytest.mark.parametrize("name", ["llama-2-0000aaaa", "llama-production", "llama", "llama2-0000aaaa"])
def test_a_tag_that_was_copied_by_hand_makes_nothing_ours(cloud: Cloud, name: str) -> None:
    sagemaker = cloud.client("sagemaker")
    sagemaker.create_model(ModelName=name, ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x"}, Tags=COPIED)
    variant = {"VariantName": "a", "ModelName": name, "InstanceType": "ml.g5.xlarge", "InitialInstanceCount": 1}
    sagemaker.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant], Tags=COPIED)
    up(wanted_of(PLAIN), keep=1)
    up(wanted_of(PLAIN, options={"max_tokens": 2}), keep=1)
    down()
    assert set(cloud.everything()) == {f"model/{name}", f"endpoint-config/{name}"}


def test_an_alarm_of_another_name_stays_whatever_its_tag_says(cloud: Cloud) -> None:
    cloud.client("cloudwatch").put_metric_alarm(
        AlarmName="on-call", Namespace="AWS/SageMaker", MetricName="Invocation5XXErrors", Statistic="Sum", Period=60,
        Dimensions=[{"Name": "EndpointName", "Value": NAME}], EvaluationPeriods=1, Threshold=1.0,
        ComparisonOperator="GreaterThanThreshold", Tags=COPIED,
    )  # fmt: skip
    up(wanted_of(PLAIN))
    up(wanted_of(PLAIN))
    down()
    assert set(cloud.everything()) == {"alarm/on-call"}


def test_a_policy_that_was_put_on_our_target_by_hand_is_not_taken_away(cloud: Cloud) -> None:
    wanted = wanted_of(PLAIN)
    up(wanted)
    where = next(one.request for one in wanted if one.kind.value == "scaling-policy")
    cloud.client("application-autoscaling").put_scaling_policy(**{**where, "PolicyName": "nights"})
    assert up(wanted).changing == ()
    assert "nights" in [key[-1] for key in cloud.scaling.policies]
    down()
    assert cloud.everything() == {}


def test_another_s_component_that_goes_while_we_look_is_no_error(cloud: Cloud) -> None:
    """Targets and tags are two questions: what was listed may be gone at the second."""
    up(wanted_of(COMPONENTS))

    def gone(call: Call) -> None:
        if call.operation == "DescribeScalableTargets":
            cloud.after = None
            cloud.refuse("ListTagsForResource", "ResourceNotFoundException", "no such target")

    cloud.after = gone
    down()
    assert cloud.sagemaker.names("endpoint") == []
