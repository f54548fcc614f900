"""Asynchronous endpoints that sleep: no instance while no request waits, and the first one wakes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.aws import Aws
from deploy.cli.main import main as run
from deploy.client import Predictor, TimedOut
from deploy.emulator.autoscaling import INSTANCES
from deploy.errors import Refused
from deploy.operations import scale
from deploy.spec import Spec
from tests.deploy.aws.test_permissions import prepared, written
from tests.deploy.doubles.aws import CALLER, Cloud
from tests.deploy.doubles.deployments import NAME, PLAIN, Deployer, printed

pytestmark = pytest.mark.usefixtures("only_aws")

ASLEEP: dict[str, Any] = {
    **PLAIN,
    "instance": {"type": "ml.g6e.2xlarge"},
    "async": {"output": "s3://models/answers/"},
    "scaling": {"min": 0, "max": 2, "concurrency": 4},
}
INVOKED = ["invoke", NAME, "Hello", "--async", "--region", "us-east-1"]


@pytest.fixture
def content(cloud: Cloud) -> dict[str, Any]:
    """The specification, with what it needs; who runs commands may also invoke."""
    content = prepared(cloud, "us-east-1", ASLEEP)
    cloud.policies[content["role"]] = [printed(content, "execution-role")]
    return content


def may_invoke(cloud: Cloud, content: dict[str, Any]) -> None:
    cloud.policies[CALLER] = [printed(content), printed(content, "invoker")]


def instances() -> int:
    return scale.scaling_target(Aws("us-east-1"), NAME).count


def alarms(cloud: Cloud) -> list[str]:
    return [alarm["AlarmName"] for alarm in cloud.client("cloudwatch").describe_alarms()["MetricAlarms"]]


def fall_asleep(cloud: Cloud, endpoint: str) -> None:
    """Have an asynchronous endpoint's queue empty for long: target tracking takes what the target allows."""
    tracking, scaling = "TargetTrackingScalingPolicyConfiguration", cloud.scaling
    (resource,) = (resource for resource, _ in scaling.targets if resource.startswith(f"endpoint/{endpoint}/"))
    (tracked,) = (rule for key, rule in scaling.policies.items() if key[0] == resource and tracking in rule)
    metric = tracked[tracking]["CustomizedMetricSpecification"]
    assert metric["MetricName"] == "ApproximateBacklogSizePerInstance"
    assert metric["Dimensions"] == [{"Name": "EndpointName", "Value": endpoint}]
    scaling.set_count(endpoint, resource, scaling.targets[resource, INSTANCES]["MinCapacity"])


def test_a_sleeping_endpoint_is_woken_by_a_request(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, content)
    assert main(["up", path, "--yes"]) == 0
    assert "create alarm/llama/backlog" in capsys.readouterr().out
    may_invoke(cloud, content)
    fall_asleep(cloud, NAME)
    assert instances() == 0
    assert run(["status", NAME, "--region", "us-east-1"]) == 0
    assert "scaled to zero: requests wait until an instance is running" in capsys.readouterr().out
    assert run(INVOKED) == 0
    assert json.loads(capsys.readouterr().out) == {"generated_text": "Hello"}
    assert instances() == 1
    assert run(["status", NAME, "--region", "us-east-1"]) == 0
    assert "scaled to zero" not in capsys.readouterr().out


def test_without_the_alarm_a_request_waits_for_ever(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: dict[str, Any]
) -> None:
    """Else the test above shows nothing."""
    assert main(["up", written(tmp_path, content), "--yes"]) == 0
    may_invoke(cloud, content)
    fall_asleep(cloud, NAME)
    cloud.client("cloudwatch").delete_alarms(AlarmNames=[f"{NAME}/backlog"])
    with pytest.raises(TimedOut):
        Predictor(NAME, "us-east-1").predict_async({"inputs": "Hello"}).wait(0)
    assert instances() == 0


@pytest.mark.parametrize("kind", ["async", "components"])
def test_what_wakes_it_comes_goes_and_is_mended(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: dict[str, Any], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    stem, wakes, others = NAME, "backlog", [f"{NAME}/5xx"]
    if kind == "components":
        instance = {"type": "ml.g6e.12xlarge", "managed": {"min": 0, "max": 2}}
        content = {**content, "async": None, "instance": instance, "components": [{"name": "base"}]}
        cloud.policies[content["role"]] = [printed(content, "execution-role")]
        stem, wakes = f"{NAME}/base", "no-capacity"
        others = [f"{name}/{metric}" for name in (NAME, stem) for metric in ("5xx", "model-errors")]
    asleep = sorted([*others, f"{stem}/{wakes}"])
    watched = others if kind == "async" else asleep  # without copies, a component has an alarm of that name too
    awake = {**content, "scaling": {**content["scaling"], "min": 1}}
    assert main(["up", written(tmp_path, awake), "--yes"]) == 0
    assert sorted(alarms(cloud)) == watched
    with pytest.raises(Refused, match="could not scale up again from 0: a policy of the type StepScaling is missing"):
        scale.set_bounds(Aws("us-east-1"), scale.scaling_target(Aws("us-east-1"), NAME), 0, None)
    path = written(tmp_path, content)
    assert main(["update", path, "--yes"]) == 0
    capsys.readouterr()
    assert main(["plan", path]) == 0
    assert "0 to" not in capsys.readouterr().out.splitlines()[-1]
    cloud.client("cloudwatch").put_metric_alarm(
        **{
            **alarm_of(cloud, f"{stem}/{wakes}"),
            "Threshold": 2.0,
            "AlarmActions": ["arn:aws:sns:us-east-1:123456789012:other"],
        }
    )
    assert main(["plan", path]) == 0
    shown = capsys.readouterr().out
    assert f"~ update alarm/{stem}/{wakes}" in shown
    assert "Threshold: 2.0 -> 1.0" in shown
    assert main(["up", path, "--yes"]) == 0
    assert alarm_of(cloud, f"{stem}/{wakes}")["Threshold"] == 1.0
    assert main(["status", NAME, "--region", "us-east-1"]) == 0
    assert "0 to 2" in (told := capsys.readouterr().out), told
    assert f"{stem}/wake" in told
    assert main(["update", written(tmp_path, awake), "--yes"]) == 0
    assert sorted(alarms(cloud)) == watched
    assert [name for _, _, name in cloud.scaling.policies] == [f"{stem}/concurrency"]
    assert main(["update", written(tmp_path, content), "--yes"]) == 0
    assert sorted(alarms(cloud)) == asleep
    assert main(["down", path, "--yes"]) == 0
    assert alarms(cloud) == []
    assert not cloud.scaling.policies


def test_a_sleeping_endpoint_is_not_set_to_zero_by_hand(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: dict[str, Any]
) -> None:
    assert main(["up", written(tmp_path, content), "--yes"]) == 0
    what = scale.scaling_target(Aws("us-east-1"), NAME)
    assert scale.set_bounds(Aws("us-east-1"), what, 0, 3) == (0, 3)
    with pytest.raises(Refused) as refused:
        scale.set_count(Aws("us-east-1"), what, 0)
    assert "scales to zero by itself" in refused.value.advice


def alarm_of(cloud: Cloud, name: str) -> dict[str, Any]:
    """The alarm that wakes it, as PutMetricAlarm takes it."""
    (alarm,) = cloud.client("cloudwatch").describe_alarms(AlarmNames=[name])["MetricAlarms"]
    names = (
        "AlarmName", "MetricName", "Namespace", "Statistic", "Dimensions", "Period", "EvaluationPeriods",
        "DatapointsToAlarm", "Threshold", "ComparisonOperator", "TreatMissingData", "AlarmActions", "AlarmDescription",
    )  # fmt: skip
    return {name: alarm[name] for name in names}


@pytest.mark.parametrize("setting", ["async", "components"])
def test_only_what_can_be_woken_may_sleep(setting: str) -> None:
    scaled = {**PLAIN, "scaling": ASLEEP["scaling"]}
    with pytest.raises(ValidationError, match=r"scaling\.min: 0 requires components or async"):
        Spec.model_validate(scaled)
    components = {
        "components": [{"name": "a"}],
        "instance": {"type": "ml.g6e.2xlarge", "managed": {"min": 0, "max": 1}},
    }
    assert Spec.model_validate({**scaled, **({"async": ASLEEP["async"]} if setting == "async" else components)})
