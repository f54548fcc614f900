"""Scaling by hand, and beside what scales by itself."""

from __future__ import annotations

import functools

import pytest

from deploy.cli import main as cli
from deploy.deployer.wait import wait_for
from deploy.errors import NotThere, Refused
from deploy.operations import scale
from deploy.resources.resource import Kind
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.endpoints import Clock, aws, make_component, make_endpoint, settle


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.cli.operate.wait_for", functools.partial(wait_for, clock=Clock()))


DIMENSIONS = {
    "endpoint/chat/variant/main": "sagemaker:variant:DesiredInstanceCount",
    "inference-component/chat-a": "sagemaker:inference-component:DesiredCopyCount",
}


def register(cloud: Cloud, target: str, low: int, high: int, *, policy: bool = False) -> None:
    scaling = cloud.client("application-autoscaling")
    of = {"ServiceNamespace": "sagemaker", "ResourceId": target, "ScalableDimension": DIMENSIONS[target]}
    scaling.register_scalable_target(**of, MinCapacity=low, MaxCapacity=high)
    if policy:
        metric = {"PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"}
        tracking = {"TargetValue": 4.0, "PredefinedMetricSpecification": metric}
        scaling.put_scaling_policy(
            **of, PolicyName="by-requests", PolicyType="TargetTrackingScaling",
            TargetTrackingScalingPolicyConfiguration=tracking,
        )  # fmt: skip


def test_instances_of_an_endpoint(cloud: Cloud, capsys: pytest.CaptureFixture[str], no_waiting: None) -> None:
    settle(make_endpoint(cloud))
    assert cli.main(["scale", "chat", "3"]) == 0
    out = capsys.readouterr().out
    assert "endpoint/chat/variant/main: 1 -> 3\n" in out
    assert "serving (InService)" in out
    assert scale.scaling_target(aws(), "chat").count == 3


def test_copies_of_the_only_component(cloud: Cloud, no_waiting: None) -> None:
    sagemaker = make_endpoint(cloud, components=("chat-a",))
    make_component(sagemaker, "chat", "chat-lora", base="chat-a")
    what = scale.scaling_target(aws(), "chat")
    assert (what.kind, what.name, what.count) == (Kind.COMPONENT, "chat-a", 1)
    assert cli.main(["scale", "chat", "0", "--no-wait"]) == 0
    sagemaker.describe_inference_component(InferenceComponentName="chat-a")
    sagemaker.describe_inference_component(InferenceComponentName="chat-a")
    assert scale.scaling_target(aws(), "chat").count == 0


def test_several_components_must_be_named(cloud: Cloud) -> None:
    make_endpoint(cloud, components=("chat-a", "chat-b"))
    with pytest.raises(Refused, match="several components") as refused:
        scale.scaling_target(aws(), "chat")
    assert refused.value.advice == "Give --component: chat-a, chat-b."
    assert scale.scaling_target(aws(), "chat", "chat-b").target == "inference-component/chat-b"
    with pytest.raises(NotThere, match="no component 'chat-c'"):
        scale.scaling_target(aws(), "chat", "chat-c")


def test_what_scaling_would_undo_is_refused(cloud: Cloud) -> None:
    settle(make_endpoint(cloud))
    register(cloud, "endpoint/chat/variant/main", 1, 2, policy=True)
    what = scale.scaling_target(aws(), "chat")
    changes = cloud.changes()
    with pytest.raises(Refused, match="scales between 1 and 2, which would undo 3") as refused:
        scale.set_count(aws(), what, 3)
    assert "--max" in refused.value.advice
    assert cloud.changes() == changes
    assert scale.set_count(aws(), what, 2) == "Its policy (by-requests) goes on from here, between 1 and 2."


@pytest.mark.parametrize("count", [0, -1])
def test_counts_that_cannot_be(cloud: Cloud, count: int) -> None:
    settle(make_endpoint(cloud))
    with pytest.raises(Refused, match="cannot be"):
        scale.set_count(aws(), scale.scaling_target(aws(), "chat"), count)


def test_bounds_are_moved(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    make_endpoint(cloud, components=("chat-a",))
    register(cloud, "inference-component/chat-a", 1, 2)
    assert cli.main(["scale", "chat", "--max", "5"]) == 0
    assert capsys.readouterr().out == "inference-component/chat-a: scales between 1 and 5\n"
    assert cli.main(["scale", "chat", "4", "--min", "0", "--no-wait"]) == 0
    scaling = scale.scaling_target(aws(), "chat").scaling
    assert scaling is not None
    assert (scaling.min, scaling.max) == (0, 5)
    assert cli.main(["scale", "chat", "--min", "6"]) == 2
    capsys.readouterr()
    assert cli.main(["scale", "chat", "9"]) == 2
    assert capsys.readouterr().out == ""


def test_bounds_need_scaling_and_sense(cloud: Cloud) -> None:
    settle(make_endpoint(cloud))
    with pytest.raises(Refused, match="does not scale by itself"):
        scale.set_bounds(aws(), scale.scaling_target(aws(), "chat"), 1, 2)
    register(cloud, "endpoint/chat/variant/main", 1, 2)
    with pytest.raises(Refused, match="only components and asynchronous endpoints scale to 0"):
        scale.set_bounds(aws(), scale.scaling_target(aws(), "chat"), 0, None)


def test_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scale", "chat"]) == 2
    assert "Give N, or --min and --max." in capsys.readouterr().err
