"""`lmi deploy batch` with the policies that `lmi deploy iam` prints, of the deployer and of the role."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError

from deploy.aws import Aws
from deploy.batch import running
from deploy.cli.main import main as run
from tests.deploy.aws.test_permissions import REGIONS, own_key, prepared, written
from tests.deploy.doubles.aws import ACCOUNT, CALLER, Call, Cloud
from tests.deploy.doubles.deployments import NAME, PLAIN, Deployer, printed
from tests.deploy.doubles.endpoints import listed_price

pytestmark = pytest.mark.usefixtures("only_aws")

BATCH: dict[str, Any] = {
    **PLAIN,
    "instance": {"type": "ml.g6e.2xlarge"},
    "scaling": None,
    "batch": {"input": "s3://data/in/", "output": "s3://answers/out"},
}
LINES = [{"inputs": f"line {number}"} for number in range(5)]


@pytest.fixture
def quotas() -> dict[str, float]:
    return {f"ml.g6e.2xlarge for {usage} usage": 2.0 for usage in ("transform job", "endpoint")}


@pytest.fixture(autouse=True)
def _looks_follow_each_other_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "EVERY", 0.0)


def body_of(lines: list[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def with_places(cloud: Cloud, region: str, content: dict[str, Any], lines: list[Any]) -> dict[str, Any]:
    """The specification with what it needs in a region: buckets with an input, and a role with the printed policy."""
    content = prepared(cloud, region, content)
    s3 = cloud.client("s3", region)
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    for bucket in ("data", "answers"):
        s3.create_bucket(Bucket=bucket, **where)
    if lines:
        s3.put_object(Bucket="data", Key="in/deep/lines.jsonl", Body=body_of(lines))
    cloud.policies[content["role"]] = [printed(content, "execution-role")]
    return content


@pytest.fixture
def content(cloud: Cloud) -> dict[str, Any]:
    return with_places(cloud, "us-east-1", BATCH, LINES)


def answered(cloud: Cloud, key: str = "out/deep/lines.jsonl.out", region: str = "us-east-1") -> list[Any]:
    body = cloud.client("s3", region).get_object(Bucket="answers", Key=key)["Body"].read()
    return [json.loads(line) for line in body.splitlines()]


def jobs(cloud: Cloud) -> list[str]:
    return cloud.sagemaker.names("transform-job")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


@pytest.mark.parametrize("region", [REGIONS[0], *REGIONS[4:]])
def test_each_line_has_its_answer_in_its_place(
    cloud: Cloud, tmp_path: Path, main: Deployer, region: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each partition. What is refused has its error there, and the model goes with the deployment."""
    lines = [*LINES[:2], b"no JSON", *LINES[2:], {"prompt": "a"}]
    content = with_places(cloud, region, BATCH, lines)
    path = written(tmp_path, content)
    assert main(["batch", path, "--yes"]) == 0
    found = answered(cloud, region=region)
    assert ["error" in one for one in found] == [False, False, True, False, False, False, True]
    assert [one["generated_text"] for one in found if "error" not in one] == [one["inputs"] for one in LINES]
    text = said(capsys)
    assert "The outputs are under s3://answers/out: s3://answers/out/deep/lines.jsonl.out" in text
    assert "finding instances, loading the model (InProgress)" in text
    assert "done (Completed)" in text
    (name,) = jobs(cloud)
    assert re.fullmatch(rf"{NAME}-[0-9a-f]{{8}}-1", name)
    assert main(["iam", path, "--who", "deployer"]) == 0
    (model,) = cloud.sagemaker.names("model")
    assert model.startswith(f"{NAME}-batch-")
    assert main(["down", path, "--region", region, "--yes"]) == 0
    assert not cloud.sagemaker.names("model")


def test_a_new_model_and_a_new_job_may_appear_a_little_later(
    cloud: Cloud, tmp_path: Path, main: Deployer, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, with_places(cloud, "us-east-1", BATCH, LINES))
    for operation, what in (("CreateTransformJob", "model"), ("DescribeTransformJob", "transform job")):
        cloud.refuse(operation, "ValidationException", f"Could not find {what} x.", times=2)
    assert main(["batch", path, "--yes"]) == 0
    assert "done (Completed)" in said(capsys)
    assert pauses == [1.0, 2.0] * 2


def test_a_model_in_s3_is_fetched_by_the_container(cloud: Cloud, tmp_path: Path, main: Deployer, content: Any) -> None:
    """SageMaker takes no uncompressed model data for batch transform, and the double refuses it."""
    assert main(["batch", written(tmp_path, content), "--yes"]) == 0
    (model,) = [thing for (kind, _), thing in cloud.sagemaker.things.items() if kind == "model"]
    container = model.request["PrimaryContainer"]
    assert container["Environment"]["HF_MODEL_ID"] == "s3://models/llama/"
    assert "ModelDataSource" not in container
    (name,) = jobs(cloud)
    request = cloud.sagemaker.get("transform-job", name).request
    assert (request["MaxConcurrentTransforms"], request["MaxPayloadInMB"], request["BatchStrategy"]) == (
        32, 3, "SingleRecord",
    )  # fmt: skip
    assert request["TransformResources"] == {
        "InstanceType": "ml.g6e.2xlarge",
        "InstanceCount": 1,
        "TransformAmiVersion": "al2-ami-sagemaker-batch-gpu-535",
    }


@pytest.mark.parametrize("named", [True, False])
def test_keys_of_one_s_own(
    cloud: Cloud, tmp_path: Path, main: Deployer, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    content = with_places(cloud, "us-east-1", BATCH, [])
    keys = {bucket: own_key(cloud, "us-east-1") for bucket in ("data", "answers")}
    s3 = cloud.client("s3")
    for bucket, key in keys.items():
        rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}}
        s3.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": [rule]})
        cloud.keys[bucket] = key
    s3.put_object(Bucket="data", Key="in/deep/lines.jsonl", Body=body_of(LINES))
    if named:
        content["encryption"] = {"input_key": keys["data"], "output_key": keys["answers"]}
    cloud.policies[content["role"]] = [printed(content, "execution-role")]
    status = main(["batch", written(tmp_path, content), "--yes"])
    text = said(capsys)
    if named:
        assert status == 0
        assert len(answered(cloud)) == len(LINES)
        return
    assert status == 5
    assert "The role is not authorized to perform: kms:Decrypt" in text
    for option, key in zip(("input_key", "output_key"), keys.values(), strict=True):
        assert f"Set encryption.{option}: {key}" in text
    assert {need.action for need in cloud.denied} == {"kms:Decrypt"}
    cloud.denied.clear()


def test_flags_stand_for_the_section(
    cloud: Cloud, tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.policies[CALLER] = [printed(content)]
    path = written(tmp_path, {name: value for name, value in content.items() if name != "batch"})
    assert run(["batch", path]) == 2
    assert "batch: must be given" in said(capsys)
    places = ["--input", "s3://data/in/", "--output", "s3://answers/out"]
    assert run(["batch", path, *places, "--job", "mine", "--set", "batch.payload_mb=50", "--yes"]) == 3
    assert [need.action for need in cloud.denied] == ["sagemaker:CreateTransformJob"]  # of that name
    cloud.denied.clear()
    assert run(["batch", path, *places, "--job", f"{NAME}-mine", "--set", "batch.payload_mb=50", "--yes"]) == 0
    request = cloud.sagemaker.get("transform-job", f"{NAME}-mine").request
    assert (request["MaxConcurrentTransforms"], request["MaxPayloadInMB"]) == (2, 50)
    assert run(["batch", path, *places, "--job", f"{NAME}-mine", "--yes"]) == 2
    assert f"the transform job {NAME}-mine already exists" in said(capsys)


def test_prices_are_asked_for_only_by_who_is_signed_in(
    cloud: Cloud,
    tmp_path: Path,
    main: Deployer,
    content: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud.price_list = [listed_price("Host:ml.g6e.2xlarge", "2.71828")]
    cloud.calls.clear()
    with monkeypatch.context() as patch:
        refused = ClientError({"Error": {"Code": "ExpiredToken", "Message": "expired"}}, "GetCallerIdentity")
        patch.setattr(Aws, "account", Mock(side_effect=refused))
        assert main(["batch", written(tmp_path, content), "--yes"]) == 3
    assert "GetCallerIdentity: ExpiredToken" in said(capsys)
    assert cloud.calls == []
    assert main(["batch", written(tmp_path, content), "--yes"]) == 0
    assert "1 x ml.g6e.2xlarge, $2.71828/h each, until the job ends" in said(capsys)


def test_waiting_is_given_up_and_taken_up_again(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.sagemaker.polls = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", _interrupt)
        assert main(["batch", written(tmp_path, content), "--yes"]) == 130
    (name,) = jobs(cloud)
    text = said(capsys)
    assert (
        f"Interrupted. The job continues. To wait for it: lmi deploy batch --resume {name} --region us-east-1" in text
    )
    assert f"To stop it: lmi deploy batch --stop {name} --region us-east-1" in text
    assert run(["batch", "--resume", name, "--region", "us-east-1"]) == 0
    assert "s3://answers/out/deep/lines.jsonl.out" in said(capsys)
    assert run(["batch", "--stop", name, "--region", "us-east-1"]) == 0
    assert f"{name} is already Completed." in said(capsys)


def _interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


def test_a_job_is_stopped(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.sagemaker.polls = 50
    assert main(["batch", written(tmp_path, content), "--yes", "--no-wait"]) == 0
    (name,) = jobs(cloud)
    assert f"--resume {name}" in said(capsys)
    assert run(["batch", "--stop", name, "--region", "us-east-1"]) == 0
    change = cloud.sagemaker.things["transform-job", name].change
    assert change is not None
    change.left = 0
    assert run(["batch", "--resume", name]) == 5
    assert f"transform-job/{name}: Stopped" in said(capsys)
    assert run(["batch", "--resume", f"{NAME}-none"]) == 4
    assert run(["batch", "--resume", name, "--stop", name]) == 2


def test_two_at_once_do_not_write_to_one_place(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.sagemaker.polls = 50
    path = written(tmp_path, content)
    assert main(["batch", path, "--yes", "--no-wait"]) == 0
    (name,) = jobs(cloud)
    capsys.readouterr()
    assert main(["batch", path, "--yes", "--set", "batch.output=s3://answers/out/"]) == 2
    assert f"the job {name} is InProgress and writes to the same output, s3://answers/out" in said(capsys)
    assert main(["batch", path, "--yes", "--no-wait", "--set", "batch.output=s3://answers/other"]) == 0
    assert len(jobs(cloud)) == 2


def test_of_two_at_the_same_moment_aws_takes_one(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have looked before either has created its job."""

    def another(call: Call) -> None:
        if call.operation == "CreateTransformJob" and call.caller == CALLER:
            cloud.before = None
            cloud.client("sagemaker").create_transform_job(**{**call.parameters, "Tags": []})

    cloud.before = another
    assert main(["batch", written(tmp_path, content), "--yes"]) == 2
    (name,) = jobs(cloud)
    assert f"the transform job {name} already exists" in said(capsys)


def test_a_call_whose_answer_is_lost_is_known_again(cloud: Cloud, tmp_path: Path, main: Deployer, content: Any) -> None:
    """boto3 sends it once more; the job is there, with this run's own tag."""

    def first(call: Call) -> None:
        if call.operation == "CreateTransformJob" and call.caller == CALLER:
            cloud.before = None
            cloud.client("sagemaker").create_transform_job(**call.parameters)

    cloud.before = first
    assert main(["batch", written(tmp_path, content), "--yes"]) == 0
    assert len(jobs(cloud)) == 1
    assert len(answered(cloud)) == len(LINES)


def test_a_further_job_has_the_next_number(cloud: Cloud, tmp_path: Path, main: Deployer, content: Any) -> None:
    path = written(tmp_path, content)
    for _ in range(12):  # beyond a page of ten
        assert main(["batch", path, "--yes"]) == 0
    assert {name.rpartition("-")[2] for name in jobs(cloud)} == {str(number) for number in range(1, 13)}
    assert len(cloud.sagemaker.names("model")) == 1


def test_a_file_that_fails_is_told_with_the_log_and_the_others(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.client("s3").put_object(Bucket="data", Key="in/bad.jsonl", Body=body_of([LINES[0], {"inputs": "<die>"}]))
    logs, group = cloud.client("logs"), "/aws/sagemaker/TransformJobs"
    logs.create_log_group(logGroupName=group)

    def written_to(call: Call) -> None:
        if call.operation == "CreateTransformJob":
            stream = f"{call.parameters['TransformJobName']}/i-1"
            logs.create_log_stream(logGroupName=group, logStreamName=stream)
            events = [{"timestamp": int(time.time() * 1000), "message": "the engine has gone"}]
            logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)

    cloud.after = written_to
    assert main(["batch", written(tmp_path, content), "--yes"]) == 5
    text = said(capsys)
    assert "ClientError: in/bad.jsonl: Bad HTTP status received from algorithm: 503" in text
    assert "Last lines of the log: the engine has gone" in text
    assert "1 file finished before the job ended. The outputs are under s3://answers/out:" in text
    assert len(answered(cloud)) == len(LINES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": {**BATCH["batch"], "input": "s3://data/none/"}}, "s3://data/none/: there is no object"),
        ({"batch": {**BATCH["batch"], "input": "s3://data/empty/"}}, "s3://data/empty/: 1 object, all empty"),
        ({"batch": {**BATCH["batch"], "input": "s3://nobody-has-it/in/"}}, "there is no bucket nobody-has-it"),
        (
            {"batch": {**BATCH["batch"], "input": "s3://data/long/", "payload_mb": 1}},
            "s3://data/long/1.jsonl: line 2 exceeds 1 MB, so the file would fail",
        ),
        (
            {"batch": {**BATCH["batch"], "output": "s3://elsewhere/out/"}},
            "the bucket elsewhere is in eu-west-1, but SageMaker is in us-east-1 "
            "Use a bucket in us-east-1 (batch.output)",
        ),
        (
            {"batch": {**BATCH["batch"], "input": "s3://elsewhere/in/"}},
            "the bucket elsewhere is in eu-west-1, but SageMaker is in us-east-1 "
            "Use a bucket in us-east-1 (batch.input)",
        ),
        (
            {"batch": {**BATCH["batch"], "output": "s3://data/in/answers"}},
            "s3://data/in/answers is inside the input s3://data/in/",
        ),
        ({"instance": {"type": "ml.g7e.2xlarge"}}, "instance.type: batch transform does not support ml.g7e.2xlarge"),
        (
            {"instance": {"type": "ml.g6e.2xlarge", "count": 3}},
            "ml.g6e.2xlarge for transform job usage: 2, but 3 are needed",
        ),
        ({"instance": {"type": "ml.g6e.2xlarge", "count": 101}}, "instance.count: 101, but a job may have at most 100"),
        (
            {"network": {"isolated": True}},
            "network.isolated: the container of a job downloads the model from S3 itself",
        ),
        ({"options": {"output_formatter": "jsonlines"}}, "options.output_formatter: jsonlines: each response must be"),
        (
            {"batch": {**BATCH["batch"], "concurrency": 20, "payload_mb": 6}},
            "concurrency times payload_mb is 120, but must be at most 100",
        ),
        ({"batch": {"input": "data/in", "output": "s3://answers/out"}}, "batch.input"),
    ],
)
def test_what_would_fail_is_refused_before_anything_is_made(
    cloud: Cloud,
    tmp_path: Path,
    main: Deployer,
    content: Any,
    changes: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    s3 = cloud.client("s3")
    s3.put_object(Bucket="data", Key="empty/1.jsonl", Body=b"")
    s3.put_object(Bucket="data", Key="long/1.jsonl", Body=body_of([LINES[0], {"inputs": "x" * 2**20}, LINES[1]]))
    elsewhere = cloud.client("s3", "eu-west-1")
    elsewhere.create_bucket(Bucket="elsewhere", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    cloud.calls.clear()
    assert main(["batch", written(tmp_path, content, **changes), "--yes"]) == 2
    assert message in said(capsys)
    assert not cloud.changes()
    cloud.denied.clear()


def test_idle_instances_compressed_files_and_old_answers_are_told(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    s3 = cloud.client("s3")
    s3.put_object(Bucket="answers", Key="out/old.jsonl.out", Body=b"{}\n")
    s3.put_object(Bucket="data", Key="zipped/1.jsonl.gz", Body=b"no JSON")
    changes = {
        "batch": {**content["batch"], "input": "s3://data/zipped/1"},
        "instance": {**content["instance"], "count": 2},
    }
    cloud.policies[content["role"]] = [printed({**content, **changes}, "execution-role")]
    assert main(["batch", written(tmp_path, content, **changes), "--yes"]) == 0
    text = said(capsys)
    assert "1 object for 2 instances: each object is read by one instance, so some instances are idle" in text
    assert "1 object may be compressed, such as zipped/1.jsonl.gz" in text
    assert "s3://answers/out already contains 1 output, such as s3://answers/out/old.jsonl.out" in text


def test_who_may_not_is_told(cloud: Cloud, tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Else the tests above show nothing: without the section no policy allows a job, nor the role its input."""
    without = {**content, "batch": None}
    cloud.policies[CALLER] = [printed(without)]
    path = written(tmp_path, content)
    assert run(["batch", path, "--yes", "--no-checks"]) == 3
    assert "sagemaker:ListTransformJobs" in said(capsys)
    cloud.policies[CALLER] = [printed(content)]
    cloud.policies[content["role"]] = [printed(without, "execution-role")]
    assert run(["batch", path, "--yes"]) == 5
    assert "The role is not authorized to perform: s3:ListBucket" in said(capsys)
    assert [need.action for need in cloud.denied] == ["sagemaker:ListTransformJobs", "s3:ListBucket"]
    cloud.denied.clear()


def test_the_endpoint_and_the_batch_leave_each_other_alone(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    without = {name: value for name, value in content.items() if name != "batch"}
    assert main(["up", written(tmp_path, without), "--yes"]) == 0
    path = written(tmp_path, content)
    assert main(["batch", path, "--yes"]) == 0
    capsys.readouterr()
    assert main(["up", path, "--yes"]) == 0
    assert "nothing to do" in said(capsys)
    assert main(["up", path, "--yes", "--set", "options.max_tokens=3"]) == 0
    assert sum(name.startswith(f"{NAME}-batch-") for name in cloud.sagemaker.names("model")) == 1
    assert main(["down", path, "--yes"]) == 0
    assert not cloud.sagemaker.names("model")


def test_a_model_of_that_name_that_another_made_is_not_used(
    cloud: Cloud, tmp_path: Path, main: Deployer, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, content)
    assert main(["batch", path, "--yes"]) == 0
    (model,) = [thing for (kind, _), thing in cloud.sagemaker.things.items() if kind == "model"]
    model.tags.clear()
    capsys.readouterr()
    assert main(["batch", path, "--yes"]) == 2
    assert f"model/{model.name} exists and was not created by this deployment" in said(capsys)


def test_a_local_model_is_uploaded_before(cloud: Cloud, tmp_path: Path, main: Deployer, content: Any) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for item in cloud.client("s3").list_objects_v2(Bucket="models", Prefix="llama/")["Contents"]:
        name = item["Key"].removeprefix("llama/")
        (model / name).write_bytes(cloud.client("s3").get_object(Bucket="models", Key=item["Key"])["Body"].read())
    upload = {"path": str(model), "upload": "s3://models/mine/", "shape": PLAIN["model"]["shape"]}
    content = {**content, "model": upload}
    cloud.policies[content["role"]] = [printed(content, "execution-role")]
    assert main(["batch", written(tmp_path, content), "--yes"]) == 0
    assert cloud.client("s3").list_objects_v2(Bucket="models", Prefix="mine/")["KeyCount"] > 0
    assert len(answered(cloud)) == len(LINES)


def test_only_what_the_job_wrote_counts_as_its_answers(cloud: Cloud, content: Any) -> None:
    cloud.client("s3").put_object(Bucket="answers", Key="out/old.jsonl.out", Body=b"{}\n")
    cloud.policies[CALLER] = [printed(content)]
    aws = Aws("us-east-1")
    written_at = cloud.client("s3").head_object(Bucket="answers", Key="out/old.jsonl.out")["LastModified"]
    job = {"TransformOutput": {"S3OutputPath": "s3://answers/out"}}
    assert running.output_uris(aws, {**job, "CreationTime": written_at}) == ["s3://answers/out/old.jsonl.out"]
    later = written_at.replace(year=written_at.year + 1)
    assert running.output_uris(aws, {**job, "CreationTime": later}) == []
    assert content["role"].startswith(f"arn:aws:iam::{ACCOUNT}:")
