"""`lmi deploy local --aws`, as a process, with the echo engine: stock boto3 and `lmi deploy` take it for AWS."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from deploy.cli.main import main
from handler.cli import main as lmi
from handler.core.errors import ConfigError
from handler.core.package import install
from proof.replay.exchange import Request
from proof.replay.sources import open_requests
from tests.deploy.local.servers import rehearsal
from tests.deploy.tutorials import TUTORIALS
from tests.process_tree import alive, descendants
from tests.servers import PATIENCE, wait_for

ROLE = "arn:aws:iam::123456789012:role/lmi"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi-handler:1"
FILE: dict[str, Any] = {
    "name": "chat",
    "region": "us-east-1",
    "role": ROLE,
    "image": {"uri": IMAGE},
    "model": {"s3": "s3://models/llama/", "shape": {"parameters": 1e9, "layers": 16, "kv_heads": 8, "head_dim": 64}},
    "options": {"llm_engine": "trtllm"},
    "instance": {"type": "ml.g6.xlarge"},
    "alarms": None,
}
BODY = json.dumps({"inputs": "one two three", "parameters": {"max_new_tokens": 2}})


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    directory = tmp_path_factory.mktemp("rehearsal")
    pace = ("-o", "option.echo_tokens_per_second=20")
    with rehearsal(directory, "--engine", "echo", *pace, "--image", "lmi-handler:1") as (local, variables):
        yield local, variables


@pytest.fixture
def variables(started: tuple[Any, dict[str, str]], _no_aws: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """In this process too, whatever credentials boto3 has found before."""
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    for name, value in started[1].items():
        monkeypatch.setenv(name, value)
    return started[1]


@pytest.fixture
def account(variables: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Path]:
    """The role that the file needs, as the documents make it, and model data; yields the file."""
    file = tmp_path / "chat.yaml"
    file.write_text(json.dumps(FILE))
    boto3.client("s3").create_bucket(Bucket="models")
    for name, content in {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}.items():
        boto3.client("s3").put_object(Bucket="models", Key=f"llama/{name}", Body=content)
    iam = boto3.client("iam")
    iam.create_role(RoleName="lmi", AssumeRolePolicyDocument=printed("trust", file, capsys))
    iam.put_role_policy(RoleName="lmi", PolicyName="lmi", PolicyDocument=printed("execution-role", file, capsys))
    yield file
    main(["down", str(file), "--yes"])
    iam.delete_role_policy(RoleName="lmi", PolicyName="lmi")
    iam.delete_role(RoleName="lmi")


def printed(who: str, file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["iam", str(file), "--who", who]) == 0
    return capsys.readouterr().out


def up(file: Path, *more: str) -> int:
    return main(["up", str(file), "--yes", "--no-checks", *more])


def test_an_endpoint_that_up_creates_answers(account: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert up(account) == 0
    runtime = boto3.client("sagemaker-runtime")
    whole = runtime.invoke_endpoint(EndpointName="chat", ContentType="application/json", Body=BODY)
    assert json.loads(whole["Body"].read()) == {"generated_text": " one two"}
    assert whole["InvokedProductionVariant"] == "AllTraffic"
    body = runtime.invoke_endpoint_with_response_stream(
        EndpointName="chat", ContentType="application/json", Body=json.dumps({**json.loads(BODY), "stream": True})
    )["Body"]
    parts = [part["PayloadPart"]["Bytes"] for part in body]
    assert len(parts) > 1
    assert b'" one"' in b"".join(parts).split(b"\n")[0]
    with pytest.raises(ClientError) as raised:
        runtime.invoke_endpoint(EndpointName="chat", ContentType="application/json", Body=b"{")
    assert raised.value.response["Error"]["Code"] == "ModelError"
    assert "123456789012:log-group:/aws/sagemaker/Endpoints/chat" in raised.value.response["LogStreamArn"]
    with pytest.raises(ClientError, match="Endpoint chats of account 123456789012 not found"):
        runtime.invoke_endpoint(EndpointName="chats", Body=b"{}")
    capsys.readouterr()
    assert main(["logs", "chat", "--filter", "outcome=ok"]) == 0
    assert capsys.readouterr().out.count("outcome=ok") >= 2
    assert main(["down", str(account), "--yes"]) == 0
    with pytest.raises(ClientError, match="not found"):
        runtime.invoke_endpoint(EndpointName="chat", Body=b"{}")


def test_components_answer_by_their_names(account: Path) -> None:
    content = {
        **FILE,
        "components": [{"name": "a"}, {"name": "b", "copies": 0}],
        "instance": {"type": "ml.g6.12xlarge"},
    }
    account.write_text(json.dumps({**content, "components": [{"name": "a"}, {"name": "b"}]}))
    assert up(account) == 0
    account.write_text(json.dumps(content))
    assert up(account) == 0
    runtime = boto3.client("sagemaker-runtime")

    def ask(**more: str) -> bytes:
        answer = runtime.invoke_endpoint(EndpointName="chat", ContentType="application/json", Body=BODY, **more)
        return bytes(answer["Body"].read())

    assert ask(InferenceComponentName="a") == b'{"generated_text":" one two"}'
    with pytest.raises(ClientError, match="has no capacity"):
        ask(InferenceComponentName="b")
    with pytest.raises(ClientError, match="header is required"):
        ask()


def gone(describe: Callable[..., Any], **name: str) -> bool:
    try:
        describe(**name)
    except ClientError:
        return True
    return False


def test_the_endpoints_of_tutorials_come_into_service(account: Path) -> None:
    """Their variables are read at each start, and the requests of those for text are answered."""
    sagemaker, runtime = boto3.client("sagemaker"), boto3.client("sagemaker-runtime")
    for name, tutorial in ((name, one) for group in TUTORIALS.values() for name, one in group.items()):
        container = {"Image": IMAGE, "Environment": tutorial.environment}
        sagemaker.create_model(ModelName="tutorial", ExecutionRoleArn=ROLE, PrimaryContainer=container)
        variant = {"VariantName": "AllTraffic", "InstanceType": "ml.g6.xlarge", "InitialInstanceCount": 1}
        more: dict[str, Any] = {"ExecutionRoleArn": ROLE} if tutorial.kind == "component" else {}
        if tutorial.kind == "async":
            more = {"AsyncInferenceConfig": {"OutputConfig": {"S3OutputPath": "s3://models/answers/"}}}
        if tutorial.kind != "component":
            variant["ModelName"] = "tutorial"
        sagemaker.create_endpoint_config(EndpointConfigName="tutorial", ProductionVariants=[variant], **more)
        sagemaker.create_endpoint(EndpointName="tutorial", EndpointConfigName="tutorial")
        found = sagemaker.describe_endpoint(EndpointName="tutorial")
        assert found["EndpointStatus"] == "InService", (name, found.get("FailureReason"))
        target: dict[str, str] = {}
        if tutorial.kind == "component":
            target = {"InferenceComponentName": "tutorial"}
            sagemaker.create_inference_component(
                **target, EndpointName="tutorial", VariantName="AllTraffic", RuntimeConfig={"CopyCount": 1},
                Specification={"ModelName": "tutorial", "ComputeResourceRequirements": {
                    "NumberOfAcceleratorDevicesRequired": 1, "MinMemoryRequiredInMb": 1024}},
            )  # fmt: skip
            copies = sagemaker.describe_inference_component(**target)
            assert copies["InferenceComponentStatus"] == "InService", copies.get("FailureReason")
        if tutorial.kind != "async" and "parameters" in tutorial.asked:
            body = json.dumps({key: tutorial.asked[key] for key in ("inputs", "parameters")})
            asked = {"EndpointName": "tutorial", "ContentType": "application/json", "Body": body, **target}
            assert b'" a b"' in runtime.invoke_endpoint(**asked)["Body"].read(), name
        if target:
            sagemaker.delete_inference_component(**target)
            wait_for(partial(gone, sagemaker.describe_inference_component, **target), PATIENCE, "it stays")
        sagemaker.delete_endpoint(EndpointName="tutorial")
        wait_for(lambda: gone(sagemaker.describe_endpoint, EndpointName="tutorial"), PATIENCE, "it stays")
        sagemaker.delete_endpoint_config(EndpointConfigName="tutorial")
        sagemaker.delete_model(ModelName="tutorial")


REFUSED_ASYNC: list[tuple[dict[str, Any], str]] = [
    ({}, "Exactly one of InputLocation and Body"),
    ({"Body": b"x", "InputLocation": "s3://models/b"}, "Exactly one of InputLocation and Body"),
    ({"InputLocation": "https://a-bucket/b"}, "must be s3://bucket/key"),
    ({"Body": 128_001 * b"x"}, "Body has 128001 bytes, but an inline body must have at most 128000"),
    ({"Body": b"x", "InvocationTimeoutSeconds": 3601}, "a number from 1 to 3600"),
    ({"Body": b"x", "RequestTTLSeconds": 21601}, "a number from 60 to 21600"),
    ({"Body": b"x", "Filename": "a/b"}, "Filename 'a/b' must match"),
]


def test_an_asynchronous_endpoint_writes_its_answer(account: Path, capsys: pytest.CaptureFixture[str]) -> None:
    account.write_text(json.dumps({**FILE, "async": {"output": "s3://models/answers/"}}))
    boto3.client("iam").put_role_policy(
        RoleName="lmi", PolicyName="lmi", PolicyDocument=printed("execution-role", account, capsys)
    )
    assert up(account) == 0
    runtime, s3 = boto3.client("sagemaker-runtime"), boto3.client("s3")
    done = runtime.invoke_endpoint_async(EndpointName="chat", ContentType="application/json", Body=BODY)
    failed = runtime.invoke_endpoint_async(EndpointName="chat", ContentType="application/json", Body=b"{")
    s3.put_object(Bucket="models", Key="answers/in/a b.json", Body=BODY)
    named = runtime.invoke_endpoint_async(
        EndpointName="chat", ContentType="application/json", InputLocation="s3://models/answers/in/a b.json",
        S3OutputPathExtension="team/a", Filename="one.out", InferenceId="i-1", RequestTTLSeconds=600,
    )  # fmt: skip
    assert (named["OutputLocation"], named["InferenceId"]) == ("s3://models/answers/team/a/one.out", "i-1")
    gone = runtime.invoke_endpoint_async(EndpointName="chat", InputLocation="s3://models/answers/in/none.json")
    for call in (runtime.invoke_endpoint, runtime.invoke_endpoint_with_response_stream):
        with pytest.raises(ClientError, match="only InvokeEndpointAsync is supported") as raised:
            call(EndpointName="chat", ContentType="application/json", Body=BODY)
        assert raised.value.response["Error"]["Code"] == "ValidationError"
    for given, part in REFUSED_ASYNC:
        with pytest.raises(ClientError, match=part):
            runtime.invoke_endpoint_async(EndpointName="chat", **given)

    def objects() -> dict[str, bytes]:
        found = s3.list_objects_v2(Bucket="models", Prefix="answers/").get("Contents", ())
        keys = [item["Key"] for item in found]
        return {f"s3://models/{key}": s3.get_object(Bucket="models", Key=key)["Body"].read() for key in keys}

    wait_for(lambda: len(objects()) == 5, PATIENCE, "no answers")
    assert b"Unable to read s3://models/answers/in/none.json" in objects()[gone["FailureLocation"]]
    assert objects()[named["OutputLocation"]] == b'{"generated_text":" one two"}'
    assert objects()[done["OutputLocation"]] == b'{"generated_text":" one two"}'
    assert b"Received client error (424)" in objects()[failed["FailureLocation"]]


@pytest.mark.parametrize(
    ("changes", "answers", "fails"),
    [
        ({}, [True, False, True], ""),  # single records: the server's own way
        ({"BatchStrategy": "MultiRecord", "MaxPayloadInMB": 1}, [False], ""),  # which refuses several in a body
        ({"TransformInput": {"SplitType": "None"}}, [False], ""),
        ({"MaxPayloadInMB": 1, "padding": 2**20}, [], "in/a.jsonl: a record is larger than MaxPayloadInMB"),
        ({"TransformInput": {"SplitType": "RecordIO"}}, None, "The emulator does not support SplitType RecordIO"),
        ({"TransformInput": {"CompressionType": "Gzip"}}, None, "The emulator does not support CompressionType Gzip"),
        ({"DataProcessing": {"JoinSource": "Input"}}, None, "The emulator does not support DataProcessing"),
    ],
)
def test_a_transform_job_answers_an_object_s_records(
    account: Path, changes: dict[str, Any], answers: list[bool] | None, fails: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By stock boto3: the answers are at the places of the records, what is refused among them."""
    batch = {"input": "s3://models/in/", "output": "s3://models/out"}
    account.write_text(json.dumps({**FILE, "batch": batch}))
    policy = printed("execution-role", account, capsys)
    boto3.client("iam").put_role_policy(RoleName="lmi", PolicyName="lmi", PolicyDocument=policy)
    sagemaker, s3 = boto3.client("sagemaker"), boto3.client("s3")
    sagemaker.create_model(ModelName="batch", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": IMAGE})
    padding = " " * changes.pop("padding", 0)
    s3.put_object(Bucket="models", Key="in/a.jsonl", Body=f"{BODY}\n{{{padding}\n{BODY}".encode())
    given = {"SplitType": "Line", "ContentType": "application/jsonlines", **changes.pop("TransformInput", {})}
    source = {"S3DataType": "S3Prefix", "S3Uri": batch["input"]}
    name = f"job-{uuid.uuid4()}"
    request = {
        "TransformJobName": name,
        "ModelName": "batch",
        "TransformInput": {"DataSource": {"S3DataSource": source}, **given},
        "TransformOutput": {"S3OutputPath": batch["output"], "AssembleWith": "Line"},
        "TransformResources": {"InstanceType": "ml.g6.xlarge", "InstanceCount": 1},
        **changes,
    }
    try:
        if answers is None:
            with pytest.raises(ClientError, match=fails):
                sagemaker.create_transform_job(**request)
            return
        sagemaker.create_transform_job(**request)

        def described() -> Any:
            return sagemaker.describe_transform_job(TransformJobName=name)

        wait_for(lambda: described()["TransformJobStatus"] != "InProgress", PATIENCE, "the job does not end")
        assert fails in described().get("FailureReason", "")
        assert described()["TransformJobStatus"] == ("Failed" if fails else "Completed")
        if not fails:
            lines = s3.get_object(Bucket="models", Key="out/a.jsonl.out")["Body"].read().splitlines()
            assert ["error" not in json.loads(line) for line in lines] == answers
    finally:
        sagemaker.delete_model(ModelName="batch")


def test_a_capture_with_a_shadows_is_read_from_s3(account: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The capture is written in the role's name, at the share that the file says, as SageMaker would."""
    capture = {
        "capture": {"output": "s3://models/captured/"},
        "shadow": {"percent": 50, "options": {"max_rolling_batch_size": 16}},
    }
    account.write_text(json.dumps({**FILE, **capture}))
    boto3.client("iam").put_role_policy(
        RoleName="lmi", PolicyName="lmi", PolicyDocument=printed("execution-role", account, capsys)
    )
    assert up(account) == 0
    runtime = boto3.client("sagemaker-runtime")
    asked = {"EndpointName": "chat", "ContentType": "application/json", "Body": BODY}
    for number in range(12):
        runtime.invoke_endpoint(**asked, InferenceId=f"mine-{number}")
    stream = runtime.invoke_endpoint_with_response_stream(
        **{**asked, "Body": json.dumps({**json.loads(BODY), "stream": True})}
    )
    streamed = b"".join(part["PayloadPart"]["Bytes"] for part in stream["Body"])

    def requests() -> list[Request]:
        try:
            found = list(open_requests("s3://models/captured"))
        except ConfigError:  # nothing is written yet
            return []
        assert [one for one in found if not isinstance(one, Request)] == []
        return [one for one in found if isinstance(one, Request)]

    wait_for(lambda: len(requests()) == 13 and any(one.other for one in requests()), PATIENCE, "no capture")
    found = requests()
    assert [one.body for one in found if "stream" not in one.body.decode()] == [BODY.encode()] * 12
    assert {one.headers.get("x-amzn-sagemaker-inference-id") for one in found} == {
        None, *(f"mine-{number}" for number in range(12))
    }  # fmt: skip
    answers = [one.response for one in found if one.response is not None]
    assert {answer.body for answer in answers} == {b'{"generated_text":" one two"}', streamed}
    assert sum(one.other is not None for one in found) > 0
    keys = [item["Key"] for item in boto3.client("s3").list_objects_v2(Bucket="models", Prefix="captured/")["Contents"]]
    assert {"/".join(key.split("/")[:3]) for key in keys} == {"captured/chat/AllTraffic", "captured/chat/Shadow"}
    output = account.with_name("replay")
    recorded = ["--to", "recorded", "--against", "recorded", "--output", str(output)]
    assert lmi(["replay", "s3://models/captured/", *recorded]) == 0
    report = json.loads((output / "report.json").read_text())
    assert 0 < report["classes"]["equal"]["requests"] == report["compared"] == 13 - report["unreadable"]["count"]
    shared = "of an emulated account, whose one container serves all variants"
    assert report["answered"] == {
        "reference": [f"recorded (variant AllTraffic {shared})"], "target": [f"recorded (variant Shadow {shared})"]
    }  # fmt: skip
    with pytest.raises(ConfigError, match="there are no files to read"):
        open_requests("s3://models/nothing/")
    with pytest.raises(ConfigError, match="there is no such bucket"):
        open_requests("s3://missing-bucket/")


def test_two_endpoints_behind_one_container_are_not_compared(account: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would be equal whatever their options are."""
    other = account.with_name("other.yaml")
    other.write_text(json.dumps({**FILE, "name": "other"}))
    requests = account.with_name("requests.jsonl")
    requests.write_text(json.dumps({"path": "/invocations", "body": json.loads(BODY)}) + "\n")
    try:
        assert up(account) == up(other) == 0
        words = ["replay", str(requests), "--to", "sagemaker:chat", "--output", str(account.with_name("replay"))]
        capsys.readouterr()
        assert lmi([*words, "--against", "sagemaker:other"]) != 0
        assert "a single container of `lmi deploy local --aws`" in capsys.readouterr().err
        assert lmi([*words, "--against", "serve:--engine echo", "--restart"]) == 0
        report = json.loads((account.with_name("replay") / "report.json").read_text())
        (answered,) = report["answered"]["target"]
        assert re.fullmatch(r"sagemaker:chat \(configuration chat-\w+, variant AllTraffic\)", answered)
    finally:
        main(["down", str(other), "--yes"])


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        ("ecr:", "does not have BatchGetImage permission for the image"),
        ("s3:", "is not authorized to perform: s3:"),
    ],
)
def test_a_role_that_may_too_little_fails_the_endpoint(
    account: Path, taken: str, said: str, started: tuple[Any, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    policy = json.loads(printed("execution-role", account, capsys))
    kept = [one for one in policy["Statement"] if not any(action.startswith(taken) for action in one["Action"])]
    document = json.dumps({**policy, "Statement": kept})
    boto3.client("iam").put_role_policy(RoleName="lmi", PolicyName="lmi", PolicyDocument=document)
    assert up(account) == 5
    assert said in capsys.readouterr().err
    assert f"aws       | denied: {taken}" in started[0].log


def test_a_role_that_sagemaker_may_not_take_is_refused(account: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trust = json.dumps(
        {
            "Version": "2012-10-17",
            "Statement": [
                {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "ec2.amazonaws.com"}}
            ],
        }
    )
    boto3.client("iam").update_assume_role_policy(RoleName="lmi", PolicyDocument=trust)
    assert up(account) == 1
    assert f"Could not assume role {ROLE}" in capsys.readouterr().err


def test_a_missing_image_fails_the_endpoint(account: Path) -> None:
    assert up(account) == 0
    sagemaker = boto3.client("sagemaker")
    image = IMAGE.replace(":1", ":2")
    sagemaker.create_model(ModelName="other", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": image})
    variant = {"VariantName": "v", "ModelName": "other", "InstanceType": "ml.g6.xlarge", "InitialInstanceCount": 1}
    sagemaker.create_endpoint_config(EndpointConfigName="other", ProductionVariants=[variant])
    sagemaker.create_endpoint(EndpointName="other", EndpointConfigName="other")
    reason = f"The requested image '{image}' could not be found."
    assert sagemaker.describe_endpoint(EndpointName="other")["FailureReason"] == reason
    sagemaker.update_endpoint(EndpointName="chat", EndpointConfigName="other")
    updated = sagemaker.describe_endpoint(EndpointName="chat")
    assert (updated["EndpointStatus"], updated["FailureReason"]) == ("InService", reason)
    assert updated["EndpointConfigName"].startswith("chat-"), "it is not as before the update"


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (
            "exit",
            ["did not pass the ping health check", "LMI_REHEARSAL=exit: the container exits with status 1"],
        ),
        ("no-ping", ["did not pass the ping health check", "the container never responds to /ping"]),
        ("ping-500", ["did not pass the ping health check", "the container responds to /ping with status 500"]),
        ("no-capacity", ["InsufficientInstanceCapacity error", "AWS has no free instances of this type now"]),
        ("no-quota", ["The account-level service limit 'ml.g6.xlarge for endpoint usage' is 0 Instances"]),
    ],
)
def test_a_start_fails_as_its_model_s_environment_says(
    account: Path, variable: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    account.write_text(json.dumps({**FILE, "environment": {"LMI_REHEARSAL": variable}}))
    assert up(account) == (1 if variable == "no-quota" else 5)
    told = capsys.readouterr().err
    assert [text for text in said if text not in told] == []
    assert "ready after" not in told, "the log is another container's"
    assert boto3.client("sagemaker").list_endpoints(NameContains="chat")["Endpoints"] == []


def test_a_quota_without_components_is_not_rehearsed_by_a_component(
    account: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {**FILE, "environment": {"LMI_REHEARSAL": "no-quota"}, "components": [{"name": "a"}]}
    account.write_text(json.dumps(content))
    assert up(account) == 5
    assert "LMI_REHEARSAL=no-quota: quotas limit the instances of endpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "logged"),
    [
        (
            {"OPTION_MAX_ROLLING_BATCH_SIZE": "many"},
            "OPTION_MAX_ROLLING_BATCH_SIZE: max_rolling_batch_size=many: must be",
        ),
        ({"LMI_FRONT": "nginx"}, "LMI_FRONT: nginx: must be djl or embedded"),
    ],
)
def test_an_update_with_a_container_that_cannot_start_is_rolled_back(
    account: Path, environment: dict[str, str], logged: str
) -> None:
    """`lmi deploy` refuses it before; other clients of AWS do not read options."""
    assert up(account) == 0
    sagemaker = boto3.client("sagemaker")
    wrong = {"Image": IMAGE, "Environment": environment}
    sagemaker.create_model(ModelName="wrong", ExecutionRoleArn=ROLE, PrimaryContainer=wrong)
    variant = {"VariantName": "v", "ModelName": "wrong", "InstanceType": "ml.g6.xlarge", "InitialInstanceCount": 1}
    sagemaker.create_endpoint_config(EndpointConfigName="wrong", ProductionVariants=[variant])
    sagemaker.update_endpoint(EndpointName="chat", EndpointConfigName="wrong")
    assert sagemaker.list_endpoints(NameContains="chat")["Endpoints"][0]["EndpointStatus"] == "InService"
    updated = sagemaker.describe_endpoint(EndpointName="chat")
    assert (
        updated["FailureReason"] == "The primary container for production variant v did not pass the ping health check."
    )
    assert updated["EndpointConfigName"].startswith("chat-")
    events = boto3.client("logs").filter_log_events(logGroupName="/aws/sagemaker/Endpoints/chat")["events"]
    assert logged in "".join(event["message"] for event in events)
    sagemaker.delete_endpoint_config(EndpointConfigName="wrong")
    sagemaker.delete_model(ModelName="wrong")


def test_an_unknown_failure_is_refused(variables: dict[str, str]) -> None:
    container = {"Image": IMAGE, "Environment": {"LMI_REHEARSAL": "no-luck"}}
    with pytest.raises(ClientError, match="LMI_REHEARSAL=no-luck: must be one of exit, no-ping, ping-500, no-capacity"):
        boto3.client("sagemaker").create_model(ModelName="m", ExecutionRoleArn=ROLE, PrimaryContainer=container)


def test_each_variant_serves_its_share(account: Path) -> None:
    """TargetVariant overrides the weights; the weights and counts of a variant are changed by its name."""
    sagemaker, runtime = boto3.client("sagemaker"), boto3.client("sagemaker-runtime")
    sagemaker.create_model(ModelName="two", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": IMAGE})
    types = {"A": "ml.g6.xlarge", "B": "ml.g5.xlarge"}
    variants = [
        {"VariantName": name, "ModelName": "two", "InstanceType": kind, "InitialInstanceCount": 1}
        for name, kind in types.items()
    ]
    variants[0]["InitialVariantWeight"] = 0
    sagemaker.create_endpoint_config(EndpointConfigName="two", ProductionVariants=variants)
    sagemaker.create_endpoint(EndpointName="two", EndpointConfigName="two")

    def served(**target: str) -> str:
        answer = runtime.invoke_endpoint(EndpointName="two", ContentType="application/json", Body=BODY, **target)
        return str(answer["InvokedProductionVariant"])

    def change(**wanted: Any) -> None:
        sagemaker.describe_endpoint(EndpointName="two")
        sagemaker.update_endpoint_weights_and_capacities(EndpointName="two", DesiredWeightsAndCapacities=[wanted])

    try:
        assert sagemaker.describe_endpoint(EndpointName="two")["EndpointStatus"] == "InService"
        assert {served() for _ in range(8)} == {"B"}
        assert [served(TargetVariant=name) for name in types] == ["A", "B"]
        with pytest.raises(ClientError, match="Variant C of endpoint two not found: it has A, B"):
            served(TargetVariant="C")
        change(VariantName="A", DesiredWeight=1)
        change(VariantName="B", DesiredWeight=0)
        sagemaker.describe_endpoint(EndpointName="two")
        assert {served() for _ in range(8)} == {"A"}
        for wrong, code in (("B", "ResourceLimitExceeded"), ("C", "ValidationException")):
            with pytest.raises(ClientError) as raised:
                change(VariantName=wrong, DesiredInstanceCount=3)
            assert raised.value.response["Error"]["Code"] == code
        change(VariantName="B", DesiredInstanceCount=2)
        shown = sagemaker.describe_endpoint(EndpointName="two")["ProductionVariants"]
        assert [one["CurrentInstanceCount"] for one in shown] == [1, 2]
    finally:
        sagemaker.describe_endpoint(EndpointName="two")
        sagemaker.delete_endpoint(EndpointName="two")
        sagemaker.delete_endpoint_config(EndpointConfigName="two")
        sagemaker.delete_model(ModelName="two")


def test_instances_are_counted_against_the_quota(account: Path) -> None:
    """Two of each type, by all endpoints together; a deleted endpoint is not listed."""
    account.write_text(json.dumps({**FILE, "instance": {"type": "ml.g6.xlarge", "count": 2}}))
    assert up(account) == 0
    sagemaker = boto3.client("sagemaker")
    config = sagemaker.describe_endpoint(EndpointName="chat")["EndpointConfigName"]
    with pytest.raises(ClientError) as raised:
        sagemaker.create_endpoint(EndpointName="second", EndpointConfigName=config)
    assert raised.value.response["Error"]["Code"] == "ResourceLimitExceeded"
    assert "is 2 Instances, with current utilization of 2 Instances and a request delta of 2" in str(raised.value)
    sagemaker.delete_endpoint(EndpointName="chat")
    sagemaker.create_endpoint(EndpointName="second", EndpointConfigName=config)
    assert sagemaker.list_endpoints(NameContains="chat")["Endpoints"] == []
    assert sagemaker.describe_endpoint(EndpointName="second")["EndpointStatus"] == "InService"
    sagemaker.delete_endpoint(EndpointName="second")


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (("s3://nobody-has-it/in/", "s3://models/out"), "The specified bucket does not exist"),
        (("s3://models/llama/", "s3://nobody-has-it/out"), "The specified bucket does not exist"),
    ],
)
def test_a_transform_job_that_could_do_nothing_is_not_completed(
    account: Path, places: tuple[str, str], reason: str
) -> None:
    allowed = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    boto3.client("iam").put_role_policy(RoleName="lmi", PolicyName="lmi", PolicyDocument=json.dumps(allowed))
    sagemaker, name = boto3.client("sagemaker"), f"job-{uuid.uuid4()}"
    sagemaker.create_model(ModelName="batch", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": IMAGE})
    sagemaker.create_transform_job(
        TransformJobName=name, ModelName="batch", TransformOutput={"S3OutputPath": places[1]},
        TransformInput={"DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": places[0]}}},
        TransformResources={"InstanceType": "ml.g6.xlarge", "InstanceCount": 1},
    )  # fmt: skip
    sagemaker.delete_model(ModelName="batch")
    said = sagemaker.describe_transform_job(TransformJobName=name)
    assert (said["TransformJobStatus"], said["FailureReason"]) == ("Failed", f"ClientError: {reason}")


def test_an_access_key_that_nobody_has_gets_each_services_error(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODYHASTHISONE")
    calls: dict[str, tuple[Callable[[Any], Any], str, int]] = {
        "sts": (lambda client: client.get_caller_identity(), "InvalidClientTokenId", 403),
        "iam": (lambda client: client.list_roles(), "InvalidClientTokenId", 403),
        "s3": (lambda client: client.list_buckets(), "InvalidAccessKeyId", 403),
        "sagemaker": (lambda client: client.list_endpoints(), "UnrecognizedClientException", 400),
        "ecr": (lambda client: client.describe_repositories(), "UnrecognizedClientException", 400),
        "ec2": (lambda client: client.describe_vpcs(), "AuthFailure", 403),
    }
    for service, (ask, code, status) in calls.items():
        with pytest.raises(ClientError) as raised:
            ask(boto3.session.Session().client(service))
        told = raised.value.response
        assert (told["Error"]["Code"], told["ResponseMetadata"]["HTTPStatusCode"]) == (code, status), service


def test_a_user_may_do_what_their_policies_allow(
    account: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    iam = boto3.client("iam")
    iam.create_user(UserName="ann")
    key = iam.create_access_key(UserName="ann")["AccessKey"]
    deployer = printed("deployer", account, capsys)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        assert up(account) == 3
        said = capsys.readouterr().err
        assert "User: arn:aws:iam::123456789012:user/ann is not authorized to perform: ecr:" in said
        with pytest.raises(ClientError, match="not authorized to perform: iam:PutUserPolicy"):
            boto3.session.Session().client("iam").put_user_policy(
                UserName="ann", PolicyName="d", PolicyDocument=deployer
            )
    iam.put_user_policy(UserName="ann", PolicyName="d", PolicyDocument=deployer)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        assert up(account) == 0
        with pytest.raises(ClientError, match="sagemaker:InvokeEndpoint"):
            boto3.session.Session().client("sagemaker-runtime").invoke_endpoint(EndpointName="chat", Body=BODY)
        assert main(["down", str(account), "--yes"]) == 0


def test_a_managed_policy_of_awss_can_be_attached(variables: dict[str, str]) -> None:
    iam = boto3.client("iam")
    trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    iam.create_role(RoleName="managed", AssumeRolePolicyDocument=json.dumps({"Statement": [trust]}))
    iam.attach_role_policy(RoleName="managed", PolicyArn="arn:aws:iam::aws:policy/AmazonSageMakerFullAccess")
    (attached,) = iam.list_attached_role_policies(RoleName="managed")["AttachedPolicies"]
    assert attached["PolicyName"] == "AmazonSageMakerFullAccess"


def test_what_is_not_rehearsed_is_refused_by_name(variables: dict[str, str]) -> None:
    with pytest.raises(ClientError, match="CreateTrainingJob is not emulated: training jobs do not run here"):
        boto3.client("sagemaker").create_training_job(
            TrainingJobName="j", RoleArn="arn:aws:iam::123456789012:role/lmi-endpoint",
            AlgorithmSpecification={"TrainingInputMode": "File"}, OutputDataConfig={"S3OutputPath": "s3://a/c"},
            ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
            StoppingCondition={"MaxRuntimeInSeconds": 60},
        )  # fmt: skip


def test_a_search_is_refused_where_it_would_find_nothing(variables: dict[str, str]) -> None:
    with pytest.raises(ClientError, match="Search is not emulated: use the List operations instead"):
        boto3.client("sagemaker").search(Resource="Endpoint")


def test_it_listens_on_loopback_and_ctrl_c_ends_all(tmp_path: Path) -> None:
    with rehearsal(tmp_path, "--engine", "echo") as (local, variables):
        processes = descendants(local.process.pid)
        assert processes
        host, port = variables["AWS_ENDPOINT_URL"].removeprefix("http://").split(":")
        assert host == "127.0.0.1"
        assert local.end(signal.SIGINT) == 0
        wait_for(lambda: not any(map(alive, processes)), 10, f"left behind: {processes}")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0
        assert "Traceback" not in local.log


def test_without_moto_it_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "moto", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "moto" else object())
    assert main(["local", "--aws", "--container", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == f"lmi deploy: --aws needs moto: {install('lmi-handler[rehearse]')}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--endpoint-name", "mine"),
            "--endpoint-name cannot be combined with --aws: endpoints have the names under which you",
        ),
        (
            ("--host", "0.0.0.0"),
            "--host cannot be combined with --aws: the emulator accepts all keys, so it listens only on 127.0.0.1",
        ),
        (("--image", "lmi-handler"), "--image lmi-handler: must be REPOSITORY:TAG, e.g. lmi-handler:"),
    ],
)
def test_arguments_that_are_not_for_it(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["local", "--aws", "--container", "http://127.0.0.1:1", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_a_file_of_several_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "name: two\nrole: arn:aws:iam::111122223333:role/x\nimage: {repository: lmi, tag: 1-cu130}\n"
        "instance: {type: ml.g6e.12xlarge}\noptions: {llm_engine: echo}\n"
        "components: [{name: a, model: {id: x/a}}, {name: b, model: {id: x/b}}]\n"
    )
    assert main(["local", "--aws", "--port", "0", str(file)]) == 1
    assert "two.yaml has components, but with --aws one container serves all endpoints" in capsys.readouterr().err


def test_an_image_without_a_rehearsal_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "--container", "http://127.0.0.1:1", "--image", "a:b"]) == 1
    assert "--image applies only with --aws" in capsys.readouterr().err
