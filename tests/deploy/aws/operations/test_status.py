"""An endpoint's status: values, tables, JSON, and an exit status that a script can ask."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
from botocore.client import BaseClient
from moto.cloudwatch.models import CloudWatchBackend
from rich.console import Console

from deploy.aws import Aws
from deploy.cli import main as cli
from deploy.cli.views import coloured, view
from deploy.client.runtime import boto_session
from deploy.errors import NotThere
from deploy.operations.status import Alarm, ComponentStatus, ScalingStatus, Variant, look
from tests.deploy.doubles.aws import Call, Cloud
from tests.deploy.doubles.endpoints import aws, make_component, make_endpoint, settle


@pytest.fixture(autouse=True)
def _percentiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moto 5.2 knows no percentiles and answers 500: the greatest value stands for them."""
    own = CloudWatchBackend.get_metric_data

    def get_metric_data(self: Any, queries: list[dict[str, Any]], *others: Any, **named: Any) -> Any:
        for query in queries:
            if query["MetricStat"]["Stat"].startswith("p"):
                query["MetricStat"]["Stat"] = "Maximum"
        return own(self, queries, *others, **named)

    monkeypatch.setattr(CloudWatchBackend, "get_metric_data", get_metric_data)


def shown(status: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(view(status))
    return out.getvalue()


def test_an_endpoint_that_serves(cloud: Cloud) -> None:
    settle(make_endpoint(cloud, instances=2))
    status = look(aws(), "chat")
    assert status.serving
    assert (status.status, status.config, status.unread) == ("InService", "chat-1", ())
    assert status.variants == (Variant("main", 2, 2, "ml.g5.xlarge"),)
    assert status.metrics["invocations"] is None
    assert "ml.g5.xlarge" in shown(status)


def test_all_that_there_is(cloud: Cloud) -> None:
    sagemaker = make_endpoint(cloud, components=("chat-a",))
    make_component(sagemaker, "chat", "chat-lora", base="chat-a")
    scaling = cloud.client("application-autoscaling")
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": "inference-component/chat-a",
        "ScalableDimension": "sagemaker:inference-component:DesiredCopyCount",
    }
    scaling.register_scalable_target(**target, MinCapacity=1, MaxCapacity=4)
    metric = {"PredefinedMetricType": "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"}
    scaling.put_scaling_policy(
        **target, PolicyName="chat-concurrency", PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration={"TargetValue": 4.0, "PredefinedMetricSpecification": metric},
    )  # fmt: skip
    activity = {"ActivityId": "1", "ServiceNamespace": "sagemaker", "ResourceId": target["ResourceId"], "Cause": "c",
                "ScalableDimension": target["ScalableDimension"], "Description": "Setting desired copy count to 2.",
                "StatusCode": "Successful", "StartTime": 1_760_000_000}  # fmt: skip
    cloud.scaling.activities[target["ResourceId"]] = [activity]
    cloudwatch = cloud.client("cloudwatch")
    cloudwatch.put_metric_alarm(
        AlarmName="chat/5xx", Namespace="AWS/SageMaker", MetricName="Invocation5XXErrors", Statistic="Sum", Period=60,
        EvaluationPeriods=1, Threshold=5, ComparisonOperator="GreaterThanThreshold",
    )  # fmt: skip
    cloudwatch.set_alarm_state(AlarmName="chat/5xx", StateValue="ALARM", StateReason="6 errors")
    dimensions = [{"Name": "EndpointName", "Value": "chat"}, {"Name": "VariantName", "Value": "main"}]
    for name, value in (("Invocations", 3.0), ("Invocations", 4.0), ("ModelLatency", 250_000.0)):
        data = {"MetricName": name, "Dimensions": dimensions, "Value": value, "Timestamp": datetime.now(timezone.utc)}
        cloudwatch.put_metric_data(Namespace="AWS/SageMaker", MetricData=[data])

    status = look(aws(), "chat")
    assert status.serving
    assert status.components == (
        ComponentStatus("chat-a", "InService", 1, 1, model="chat-m", gpus=1),
        ComponentStatus("chat-lora", "InService", 1, 1, base="chat-a"),
    )
    (scales,) = status.scaling
    assert replace(scales, activities=()) == ScalingStatus("inference-component/chat-a", 1, 4, ("chat-concurrency",))
    assert [activity[5:] for activity in scales.activities] == [" Successful: Setting desired copy count to 2."]
    assert status.alarms == (Alarm("chat/5xx", "ALARM", "6 errors"),)
    assert status.metrics["invocations"] == 7
    assert status.metrics["latency_p95_ms"] == 250
    text = shown(status)
    for said in ("adapter of chat-a", "1 to 4", "chat-concurrency", "6 errors", "invocations"):
        assert said in text


def test_scaling_is_read_to_the_last_page(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS answers at most 50 targets and 10 policies at a time."""
    lists = {"DescribeScalableTargets": "ScalableTargets", "DescribeScalingPolicies": "ScalingPolicies"}
    whole = BaseClient._make_api_call

    def paged(client: Any, operation: str, arguments: Any) -> Any:
        start = int(arguments.pop("NextToken", 0)) if operation in lists else 0
        answer = whole(client, operation, arguments)
        if (field := lists.get(operation)) is not None:
            every = answer[field]
            answer[field] = every[start : start + 1]
            answer |= {"NextToken": str(start + 1)} if start + 1 < len(every) else {}
        return answer

    make_endpoint(cloud, components=("chat-a", "chat-b"))
    scaling = cloud.client("application-autoscaling")
    for name in ("chat-a", "chat-b"):
        target = {"ServiceNamespace": "sagemaker", "ResourceId": f"inference-component/{name}",
                  "ScalableDimension": "sagemaker:inference-component:DesiredCopyCount"}  # fmt: skip
        scaling.register_scalable_target(**target, MinCapacity=1, MaxCapacity=4)
        for policy in ("days", "nights"):
            scaling.put_scaling_policy(
                **target,
                PolicyName=policy,
                PolicyType="StepScaling",
                StepScalingPolicyConfiguration={"AdjustmentType": "ChangeInCapacity"},
            )
    monkeypatch.setattr(BaseClient, "_make_api_call", paged)
    read = {item.target: item.policies for item in look(aws(), "chat").scaling}
    assert read == {f"inference-component/chat-{name}": ("days", "nights") for name in ("a", "b")}


def test_a_configuration_that_was_deleted_hides_only_the_type(cloud: Cloud) -> None:
    """AWS lets a configuration that serves be deleted, and the endpoint goes on."""
    settle(make_endpoint(cloud, instances=2))

    def deleted(call: Call) -> None:
        if call.operation == "DescribeEndpoint":
            cloud.sagemaker.things.pop(("endpoint-config", "chat-1"))

    cloud.after = deleted
    status = look(aws(), "chat")
    assert status.serving
    assert status.variants == (Variant("main", 2, 2),)


def test_a_component_that_is_deleted_meanwhile_is_left_out(cloud: Cloud) -> None:
    make_endpoint(cloud, components=("chat-a", "chat-b"))

    def gone(call: Call) -> None:
        if call.operation == "ListInferenceComponents":
            cloud.sagemaker.things.pop(("inference-component", "chat-a"))

    cloud.after = gone
    assert [item.name for item in look(aws(), "chat").components] == ["chat-b"]


def test_a_failed_one_gives_advice(cloud: Cloud) -> None:
    cloud.sagemaker.fate("chat", "Failed", "InsufficientInstanceCapacity")
    settle(make_endpoint(cloud))
    status = look(aws(), "chat")
    assert not status.serving
    assert status.reason == "InsufficientInstanceCapacity"
    assert "timeouts.provision" in shown(status)


def test_states_that_need_somebody_are_red() -> None:
    assert {coloured(state).style for state in ("Failed", "OutOfService", "UpdateRollbackFailed", "ALARM")} == {"red"}
    assert [coloured(state).style for state in ("InService", "Updating")] == ["green", "yellow"]


def test_copies_scaled_to_zero_do_not_serve(cloud: Cloud) -> None:
    sagemaker = make_endpoint(cloud, components=("chat-a",))
    runtime = {"CopyCount": 0}
    sagemaker.update_inference_component_runtime_config(InferenceComponentName="chat-a", DesiredRuntimeConfig=runtime)
    look(aws(), "chat")
    status = look(aws(), "chat")
    assert [component.copies for component in status.components] == [0]
    assert not status.serving


def test_what_may_not_be_read_is_said(cloud: Cloud) -> None:
    settle(make_endpoint(cloud))
    cloud.refuse("DescribeScalableTargets", "AccessDeniedException", "no")
    status = look(aws(), "chat")
    assert status.unread == ("scaling: AccessDeniedException",)
    assert "could not be read: scaling" in shown(status)


def test_the_command_in_status(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotThere):
        look(aws(), "chat")
    assert cli.main(["status", "chat"]) == 4
    assert "there is no endpoint 'chat' in us-east-1" in capsys.readouterr().err
    make_endpoint(cloud)
    assert cli.main(["status", "chat", "--json"]) == 5
    said = json.loads(capsys.readouterr().out)
    assert (said["status"], said["serving"]) == ("Creating", False)
    settle(cloud.client("sagemaker"))
    assert cli.main(["status", "chat"]) == 0
    assert "InService" in capsys.readouterr().out
    assert cloud.changes() == [one for one in cloud.changes() if one.startswith("Create")]


def test_a_pipe_gets_lines_that_are_not_folded(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    reason = "The container [/opt/ml] " + "did not answer " * 8 + "to its ping."
    make_endpoint(cloud)
    status = look(aws(), "chat")
    monkeypatch.setattr("deploy.cli.operate.look", lambda *of: replace(status, status="Failed", config=reason))
    assert cli.main(["status", "chat"]) == 5
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "logs"])
def test_without_a_region_the_flag_is_named(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.delenv("AWS_REGION")
    assert cli.main([command, "chat"]) == 2
    assert "Pass --region, set AWS_REGION" in capsys.readouterr().err


def test_aws_region_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert Aws().region == "eu-west-1"
    assert boto_session().region_name == "eu-west-1"
