"""A deployment in operation: its logs, its scale, and the doctor's measurements."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError

from deploy.cli import main as cli
from deploy.client.runtime import boto_session, runtime_client
from deploy.deployer.wait import wait_for
from deploy.emulator.endpoint import Endpoint
from deploy.emulator.runtime import RuntimeEmulator
from deploy.errors import DeployError, NotThere, Refused
from deploy.operations import logs, scale
from deploy.operations.doctor import OPEN, SIZES, Measurement, Target, measure, report
from deploy.resources.resource import Kind
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployments import Deployer
from tests.deploy.doubles.endpoints import IMAGE, ROLE, Clock, aws, make_component, make_endpoint, settle
from tests.deploy.local.servers import Loop
from tests.servers import serve

# -- what containers wrote, out of moto's CloudWatch -------------------------------------------------------------------


GROUP = "/aws/sagemaker/Endpoints/chat"


def write(
    cloud: Cloud, texts: list[str], *, group: str = GROUP, stream: str = "main/i-1", at: int | None = None
) -> int:
    """One event each, a millisecond apart; returns the first one's time."""
    client = cloud.client("logs")
    for make, name in ((client.create_log_group, {"logGroupName": group}),
                       (client.create_log_stream, {"logGroupName": group, "logStreamName": stream})):  # fmt: skip
        with contextlib.suppress(client.exceptions.ResourceAlreadyExistsException):
            make(**name)
    at = int(time.time() * 1000) - 60_000 if at is None else at
    events = [{"timestamp": at + n, "message": text} for n, text in enumerate(texts)]
    client.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)
    return at


def test_the_tail_is_of_the_newest_stream(cloud: Cloud) -> None:
    now = int(time.time() * 1000)
    write(cloud, ["old"], stream="main/i-0", at=now - 600_000)
    write(cloud, ["one", "two\n", "three"], stream="main/i-1", at=now)
    assert [line.text for line in logs.tail(aws(), GROUP, 2) or []] == ["two", "three"]


def test_no_group_and_no_stream_are_no_log(cloud: Cloud) -> None:
    assert logs.tail(aws(), GROUP) is None
    cloud.client("logs").create_log_group(logGroupName=GROUP)
    assert logs.tail(aws(), GROUP) is None
    assert list(logs.lines(aws(), "/aws/sagemaker/Endpoints/none", since=0)) == []


def test_a_stretch_of_time_and_a_text(cloud: Cloud) -> None:
    at = write(cloud, ["INFO up", 'ERROR "quoted"', "INFO served"])
    assert [line.text for line in logs.lines(aws(), GROUP, since=at + 1)] == ['ERROR "quoted"', "INFO served"]
    assert [line.text for line in logs.lines(aws(), GROUP, since=0, pattern="INFO")] == ["INFO up", "INFO served"]


def test_following_gives_each_line_once_and_late_ones_too(cloud: Cloud) -> None:
    at = write(cloud, ["one", "one again"])
    late: Iterator[Callable[[], int]] = iter(
        [lambda: write(cloud, ["three"], at=at + 50), lambda: write(cloud, ["two"], stream="b", at=at + 20)]
    )
    coming = logs.follow(aws(), [GROUP], since=at, sleep=lambda seconds: next(late)())  # type: ignore[arg-type]
    assert [line.text for line in itertools.islice(coming, 4)] == ["one", "one again", "three", "two"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400)])
def test_periods(text: str, seconds: int) -> None:
    assert logs.period(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "15", "m", "-1m", "1w"])
def test_no_periods(text: str) -> None:
    with pytest.raises(DeployError, match="is not a period"):
        logs.period(text)


def test_the_command_shows_endpoint_and_components_in_order(cloud: Cloud, capsys: Any) -> None:
    at = write(cloud, ["INFO up", "ERROR down"])
    write(cloud, ["from a component"], group="/aws/sagemaker/InferenceComponents/chat-a", at=at - 1)
    assert cli.main(["logs", "chat", "--component", "chat-a"]) == 0
    assert capsys.readouterr().out.endswith("i-1 from a component\n")
    assert cli.main(["logs", "chat", "--filter", "ERROR"]) == 0
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()] == ["i-1 ERROR down"]
    assert cli.main(["logs", "chat", "--since", "10s"]) == 0
    assert capsys.readouterr().err == "no lines were logged in the last 10s\n"
    assert cli.main(["logs", "chat", "--since", "soon"]) == 1


def test_no_log_group_is_said_by_its_name(cloud: Cloud, capsys: Any) -> None:
    assert cli.main(["logs", "nope"]) == 4
    assert "there is no log group /aws/sagemaker/Endpoints/nope in us-east-1" in capsys.readouterr().err
    cloud.refuse("DescribeLogGroups", "AccessDeniedException", "not allowed", times=1)
    assert cli.main(["logs", "nope"]) == 0


# -- scaling by hand, and beside what scales by itself -----------------------------------------------------------------


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


@pytest.mark.parametrize("arguments", [["3"], ["--max", "3"]])
def test_another_owners_endpoint_is_not_scaled(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], no_waiting: None, arguments: list[str]
) -> None:
    settle(make_endpoint(cloud))
    cloud.sagemaker.things["endpoint", "chat"].tags.clear()
    cloud.calls.clear()
    assert cli.main(["scale", "chat", *arguments]) == 2
    assert "endpoint chat was not created by lmi deploy" in capsys.readouterr().err
    assert cloud.changes() == []


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
    assert refused.value.advice == "Choose a --component: chat-a, chat-b."
    assert scale.scaling_target(aws(), "chat", "chat-b").resource_id == "inference-component/chat-b"
    with pytest.raises(NotThere, match="no component 'chat-c'"):
        scale.scaling_target(aws(), "chat", "chat-c")


def test_what_scaling_would_undo_is_refused(cloud: Cloud) -> None:
    settle(make_endpoint(cloud))
    register(cloud, "endpoint/chat/variant/main", 1, 2, policy=True)
    what = scale.scaling_target(aws(), "chat")
    changes = cloud.changes()
    with pytest.raises(Refused, match="scales automatically between 1 and 2, which would undo 3") as refused:
        scale.set_count(aws(), what, 3)
    assert "--max" in refused.value.advice
    assert cloud.changes() == changes
    note = "Automatic scaling (by-requests) continues from this number, between 1 and 2."
    assert scale.set_count(aws(), what, 2) == note


@pytest.mark.parametrize("count", [0, -1])
def test_counts_that_cannot_be(cloud: Cloud, count: int) -> None:
    settle(make_endpoint(cloud))
    with pytest.raises(Refused, match=f"cannot be scaled to {count}"):
        scale.set_count(aws(), scale.scaling_target(aws(), "chat"), count)


def test_a_component_has_no_negative_number_of_copies(cloud: Cloud) -> None:
    what = scale.ScalingTarget(Kind.COMPONENT, "chat-a", "", 1, None)
    changes = cloud.changes()
    with pytest.raises(Refused, match="inference-component/chat-a cannot be scaled to -1") as refused:
        scale.set_count(aws(), what, -1)
    assert refused.value.advice == "Use 0 or a positive number of copies."
    assert cloud.changes() == changes


def test_bounds_are_moved(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    make_endpoint(cloud, components=("chat-a",))
    register(cloud, "inference-component/chat-a", 1, 2)
    assert cli.main(["scale", "chat", "--max", "5"]) == 0
    assert capsys.readouterr().out == "inference-component/chat-a: scales between 1 and 5\n"
    assert cli.main(["scale", "chat", "4", "--min", "0", "--no-wait"]) == 2
    assert "could not scale up again from 0" in capsys.readouterr().err
    cloud.client("application-autoscaling").put_scaling_policy(
        ServiceNamespace="sagemaker", ResourceId="inference-component/chat-a", PolicyName="somebody-wakes-it",
        ScalableDimension="sagemaker:inference-component:DesiredCopyCount", PolicyType="StepScaling",
        StepScalingPolicyConfiguration={"AdjustmentType": "ChangeInCapacity"},
    )  # fmt: skip
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
    with pytest.raises(Refused, match="does not scale automatically"):
        scale.set_bounds(aws(), scale.scaling_target(aws(), "chat"), 1, 2)
    register(cloud, "endpoint/chat/variant/main", 1, 2)
    with pytest.raises(Refused, match="only components and asynchronous endpoints can scale to 0"):
        scale.set_bounds(aws(), scale.scaling_target(aws(), "chat"), 0, None)


def test_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scale", "chat"]) == 2
    assert "Pass a number of instances or copies, or --min and --max." in capsys.readouterr().err


# -- doctor ------------------------------------------------------------------------------------------------------------
# The measurements, through the emulator on our own server; and the checks before `up` from the command line.


@pytest.fixture(scope="module")
def emulated() -> Iterator[str]:
    """The echo engine behind the emulator, whose parts are of 7 bytes."""
    with ExitStack() as stack:
        server = stack.enter_context(serve("--engine", "echo"))
        server.wait_ready()
        loop = Loop()
        stack.callback(loop.close)
        yield stack.enter_context(loop.serving(RuntimeEmulator(Endpoint(server.url, part_bytes=7)).app()))


def by_question(findings: list[Measurement]) -> dict[str, Measurement]:
    return {finding.question: finding for finding in findings}


def client_of(url: str) -> Any:
    return runtime_client(boto_session("us-east-1", url), "us-east-1", url, read_timeout=130)


def test_an_endpoint_is_measured(emulated: str) -> None:
    found = by_question(list(measure(Target(client_of(emulated), "local"), tokens=6)))
    plain = found["a whole response"].figures
    assert plain is not None
    assert plain["bytes"] > 0
    assert found["the Accept header of a streaming request"].answer.startswith(
        "has no effect: application/jsonlines returns"
    )
    assert found["the Accept header of a streaming request"].figures == {
        "content_types": {
            "application/jsonlines": "application/jsonlines",
            "text/event-stream": "application/jsonlines",
        }
    }
    parts = found["PayloadParts of a stream"].figures
    assert parts is not None
    assert parts["parts"] > 6
    assert parts["bytes_max"] == 7
    assert parts["first_after"] <= parts["last_after"]
    assert found["a request body of 20.00 MiB"].answer == "accepted"
    headers = found["response headers"].figures
    assert headers is not None
    assert "x-amzn-invoked-production-variant" in headers["headers"]
    assert [name for name, finding in found.items() if finding.answer.startswith("cannot be measured")] == [*OPEN]


def test_what_fails_is_an_answer_too(emulated: str) -> None:
    asked = Target(client_of(emulated), "another")
    findings = list(measure(asked))
    assert findings[0].figures is None
    assert findings[0].answer.startswith("ValidationError (status 400)")
    assert len(findings) == 6 + len(SIZES) + len(OPEN)


class Stuck:
    """A client whose answers take a minute and a half, on a clock of its own, and whose streams break."""

    def __init__(self) -> None:
        self.now = 0.0
        self.bodies: list[bytes] = []

    def clock(self) -> float:
        return self.now

    def invoke_endpoint(self, **arguments: Any) -> Any:
        self.bodies.append(arguments["Body"])
        self.now += 60
        error = {"Error": {"Code": "ModelError", "Message": "timed out"}, "OriginalStatusCode": 0,
                 "ResponseMetadata": {"HTTPStatusCode": 424}}  # fmt: skip
        raise ClientError(error, "InvokeEndpoint")

    def invoke_endpoint_with_response_stream(self, **arguments: Any) -> Any:
        def body() -> Iterator[Any]:
            self.now += 1
            yield {"PayloadPart": {"Bytes": b"a\n"}}
            self.now += 2
            yield {"PayloadPart": {"Bytes": b"bcd"}}
            self.invoke_endpoint(**arguments)

        return {"Body": body(), "ContentType": "application/jsonlines"}


def test_the_time_limit_is_seen_where_it_is_asked_for() -> None:
    client = Stuck()
    found = by_question(list(measure(Target(client, "e", "chat-a"), slow=9000, clock=client.clock)))
    limit = found["a response longer than the timeout"]
    assert limit.answer == "failed after 60.0 s: ModelError (status 424, the container's status 0): timed out"
    assert limit.figures == {"seconds": 60.0, "answered": False}
    stream = found["a stream longer than a minute"]
    assert stream.answer.startswith("2 parts of 2 to 3 bytes (median 2.5), first after 1.00 s, last after 3.00 s")
    assert stream.answer.endswith("ended with ModelError (status 424, the container's status 0): timed out")
    assert [len(body) for body in client.bodies if len(body) > 1000] == list(SIZES)
    assert report("e", list(found.values()))["findings"][0]["figures"] is None


def test_the_command_measures(emulated: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "local", "--live", "--endpoint-url", emulated, "--tokens", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["endpoint"] == "local"
    assert said["findings"][0]["question"] == "a whole response"
    assert cli.main(["doctor", "--live"]) == 1
    assert "--live needs the endpoint's name" in capsys.readouterr().err
    assert cli.main(["doctor", "local", "--endpoint-url", emulated]) == 2
    assert (
        "--endpoint-url and --component apply only with --live\nRun `lmi deploy doctor NAME --live`"
        in capsys.readouterr().err
    )


def test_the_emulator_is_measured_without_credentials(
    emulated: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    assert cli.main(["doctor", "local", "--live", "--endpoint-url", emulated, "--tokens", "2"]) == 0
    assert "a whole response: " in capsys.readouterr().out
    assert cli.main(["doctor", "local", "--live"]) == 2
    assert "no region is set" in capsys.readouterr().err


def test_the_command_checks(cloud: Cloud, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="of-ours")
    content = {"name": "chat", "role": ROLE, "image": {"uri": IMAGE}, "model": {"s3": "s3://of-ours/llama/"},
               "instance": {"type": "ml.g5.xlarge"}}  # fmt: skip
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump(content))
    Deployer(cloud, cli.main).takes(str(path), ["model.shape={parameters: 1e9, layers: 9, kv_heads: 8, head_dim: 64}"])
    assert cli.main(["doctor", str(tmp_path / "chat.yaml"), "--aws-only"]) == 2
    out = capsys.readouterr().out
    assert f"error   role: {ROLE} does not exist" in out
    assert "error   model: it contains no files" in out
    assert cli.main(["doctor", str(tmp_path / "chat.yaml"), "--aws-only", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)[0] == {
        "name": "account", "verdict": "ok", "says": "123456789012 in us-east-1", "advice": "",
    }  # fmt: skip
