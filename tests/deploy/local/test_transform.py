"""Batch transform by stock boto3: an object's lines are requests, in front of the real server."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pytest
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from deploy.emulator.endpoint import Endpoint
from deploy.emulator.runtime import Runtime
from deploy.emulator.store import Store
from tests.app.server import serve
from tests.deploy.local.processes import local_process
from tests.deploy.local.servers import Loop
from tests.deploy.local.servers import client as client_of_runtime
from tests.process_tree import descendants
from tests.servers import PATIENCE, LiveServer, wait_for

LINES = "application/jsonlines"
PROMPTS = [f"prompt number {index}" for index in range(20)]


class Batch(NamedTuple):
    """The emulator's control plane, and its store."""

    sagemaker: Any
    store: Store
    url: str

    def run(
        self, records: list[Any], *, name: str = "job", end: str = "Completed", stop: bool = False, **more: Any
    ) -> list[Any]:
        """Run a job over one object; return the lines of its output."""
        self.store.write("s3://data/in/records.jsonl", "".join(json.dumps(one) + "\n" for one in records).encode())
        request: dict[str, Any] = {
            "TransformJobName": name,
            "ModelName": "model",
            "TransformInput": {
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://data/in/"}},
                "ContentType": LINES,
                "SplitType": "Line",
            },
            "TransformOutput": {"S3OutputPath": "s3://data/out", "AssembleWith": "Line"},
            "TransformResources": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
        }
        self.sagemaker.create_transform_job(**{**request, **more})
        if stop:
            self.sagemaker.stop_transform_job(TransformJobName=name)
        wait_for(lambda: "TransformEndTime" in self.describe(name), PATIENCE, "the job does not end")
        assert self.describe(name)["TransformJobStatus"] == end, self.describe(name).get("FailureReason")
        if end != "Completed":
            return []
        return [json.loads(line) for line in self.store.read("s3://data/out/records.jsonl.out").splitlines()]

    def describe(self, name: str) -> Any:
        return self.sagemaker.describe_transform_job(TransformJobName=name)


@contextlib.contextmanager
def sagemaker(url: str) -> Iterator[Any]:
    config = Config(retries={"total_max_attempts": 1})
    client = boto3.client("sagemaker", region_name="us-east-1", endpoint_url=url, aws_access_key_id="x",
                          aws_secret_access_key="x", config=config)  # fmt: skip
    with contextlib.closing(client):
        yield client


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve("--engine", "echo") as made:
        made.wait_ready()
        yield made


@pytest.fixture
def batch(server: LiveServer, loop: Loop, tmp_path: Path) -> Iterator[Batch]:
    store = Store(tmp_path / "s3")
    with loop.serving(Runtime(Endpoint(container=server.url), store).app()) as url, sagemaker(url) as client:
        yield Batch(client, store, url)


def test_each_line_is_answered_in_its_place(batch: Batch) -> None:
    records = [{"inputs": prompt, "parameters": {"max_new_tokens": 3}} for prompt in PROMPTS]
    answers = batch.run(records)
    assert [answer["generated_text"].split()[-1] for answer in answers] == [str(index) for index in range(20)]


def test_chats_are_answered_too(batch: Batch) -> None:
    answers = batch.run([{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}] * 3)
    assert [answer["object"] for answer in answers] == ["chat.completion"] * 3


def test_several_records_a_request_fail_the_job_by_name(batch: Batch) -> None:
    batch.run([{"inputs": "a"}, {"inputs": "b"}], end="Failed", BatchStrategy="MultiRecord")
    assert "one line of JSON, this body has 2" in batch.describe("job")["FailureReason"]


def test_a_record_that_a_container_refuses_fails_the_job_with_its_words(batch: Batch) -> None:
    """As of a container that was started for an endpoint, without SAGEMAKER_BATCH."""
    batch.run([{"inputs": "a"}, {"inputs": ""}], end="Failed")
    assert "'inputs' must be a non-empty string" in batch.describe("job")["FailureReason"]


def test_a_job_s_own_container_answers_what_it_refuses_in_its_place(tmp_path: Path) -> None:
    """`lmi deploy local` starts one for each job, with SAGEMAKER_BATCH, as SageMaker does."""
    good = [{"inputs": prompt, "parameters": {"max_new_tokens": 3}} for prompt in PROMPTS[:3]]
    bad = [{"inputs": ""}, {"inputs": "a", "stream": True}, {"inputs": "a", "parameters": {"top_p": 2}}]
    with local_process("--engine", "echo", "--s3", str(tmp_path)) as local, sagemaker(local.url) as client:
        batch = Batch(client, Store(tmp_path), local.url)
        answers = batch.run([bad[0], *good, bad[1], bad[2]])
        processes = descendants(local.process.pid)
        assert len(answers) == 6
        assert ["error" in answer for answer in answers] == [True, False, False, False, True, True]
        assert [answer["generated_text"].split()[-1] for answer in answers[1:4]] == ["0", "1", "2"]
        assert "container | (transform) " in local.log
        batch.run([{"inputs": "a"}], name="broken", end="Failed", Environment={"OPTION_LLM_ENGINE": "none"})
        assert "the container ended with status 2" in batch.describe("broken")["FailureReason"]
        assert {*descendants(local.process.pid)} <= {*processes}, "a job's container was left behind"
        answer = client_of_runtime(local.url).invoke_endpoint(
            EndpointName="local", ContentType=LINES, Body=b'{"inputs": "a"}'
        )
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200


def test_a_file_that_fails_leaves_no_output_and_the_others_theirs(batch: Batch) -> None:
    batch.store.write("s3://data/in/deep/a.jsonl", b'{"inputs": "a"}\n{"inputs": ""}\n')
    batch.store.write("s3://data/in/deep/b/records.jsonl", b'{"inputs":\r "a b"}\n{"inputs": "c"}')
    batch.run([{"inputs": "a"}], end="Failed", ModelClientConfig={"InvocationsMaxRetries": 0})
    assert batch.describe("job")["FailureReason"].startswith("ClientError: s3://data/in/deep/a.jsonl: ")
    assert batch.store.list("s3://data/out") == [
        "s3://data/out/deep/b/records.jsonl.out", "s3://data/out/records.jsonl.out",
    ]  # fmt: skip
    assert len(batch.store.read("s3://data/out/deep/b/records.jsonl.out").splitlines()) == 2


def test_a_record_beyond_the_limit_fails_its_file(batch: Batch) -> None:
    batch.run([{"inputs": "a" * 2**20}], end="Failed", MaxPayloadInMB=1)
    assert "at most 1048576 (MaxPayloadInMB)" in batch.describe("job")["FailureReason"]


def test_a_job_over_nothing_fails(batch: Batch) -> None:
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://data/nothing/"}}
    batch.run([{"inputs": "a"}], end="Failed", TransformInput={"DataSource": source, "SplitType": "Line"})
    assert "no S3 objects found" in batch.describe("job")["FailureReason"]


def test_a_job_is_stopped_and_listed(batch: Batch, server: LiveServer) -> None:
    batch.run([{"inputs": "a"}], name="first")
    long = {"inputs": "a", "parameters": {"max_new_tokens": 4000}}
    batch.run([long] * 500, name="second", end="Stopped", stop=True, MaxConcurrentTransforms=1)
    listed = batch.sagemaker.list_transform_jobs()["TransformJobSummaries"]
    assert [(job["TransformJobName"], job["TransformJobStatus"]) for job in listed] == [
        ("first", "Completed"), ("second", "Stopped"),
    ]  # fmt: skip
    stopped = batch.sagemaker.list_transform_jobs(StatusEquals="Stopped", NameContains="sec")
    assert [job["TransformJobName"] for job in stopped["TransformJobSummaries"]] == ["second"]
    with pytest.raises(ClientError, match="Stopped: it cannot be stopped"):
        batch.sagemaker.stop_transform_job(TransformJobName="second")
    with pytest.raises(ClientError, match="Job name must be unique: second"):
        batch.run([{"inputs": "a"}], name="second")


def test_what_the_emulator_lacks_is_refused_by_name(batch: Batch) -> None:
    with pytest.raises(ClientError, match="DataProcessing: the emulator"):
        batch.run([{"inputs": "a"}], DataProcessing={"JoinSource": "Input"})


def test_the_limits_of_a_job_are_sagemakers(batch: Batch) -> None:
    with pytest.raises(ClientError, match="at most 100"):
        batch.run([{"inputs": "a"}], MaxConcurrentTransforms=50, MaxPayloadInMB=6)
    with pytest.raises(ClientError, match="Could not find requested job"):
        batch.describe("other")


def test_a_job_is_described_by_a_presigned_url(batch: Batch) -> None:
    batch.run([{"inputs": "a"}])
    headers = {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": "SageMaker.DescribeTransformJob"}
    content = json.dumps({"TransformJobName": "job"}).encode()
    asked = AWSRequest("POST", f"{batch.url}/", data=content, headers=headers)
    SigV4QueryAuth(Credentials("AKID", "secret"), "sagemaker", "us-east-1", expires=60).add_auth(asked)
    request = urllib.request.Request(asked.url, content, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert json.load(answer)["TransformJobStatus"] == "Completed"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{batch.url}/", content, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("operation", "body", "code"),
    [
        ("CreateTransformJob", b"{", "SerializationException"),
        ("CreateTransformJob", b"[" * 100_000, "SerializationException"),
        ("CreateTransformJob", b"[]", "SerializationException"),
        ("CreateTransformJob", b"{}", "ValidationException"),
        ("CreateTransformJob", b'{"TransformJobName": 7}', "SerializationException"),
        ("DescribeTransformJob", b"{}", "ValidationException"),
        ("DescribeTransformJob", b'{"TransformJobName": "none"}', "ValidationException"),
        ("ListTransformJobs", b'{"NameContains": []}', "SerializationException"),
        ("StopTransformJob", b'{"TransformJobName": {}}', "SerializationException"),
        ("DeleteModel", b"{}", "UnknownOperationException"),
    ],
)
def test_a_malformed_request_of_a_job_is_the_clients_error(
    batch: Batch, operation: str, body: bytes, code: str
) -> None:
    scope = "AKIDEXAMPLE/20261120/us-east-1/sagemaker/aws4_request"
    signed = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature={'0' * 64}"
    headers = {"X-Amz-Target": f"SageMaker.{operation}", "Authorization": signed}
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(batch.url, body, headers), timeout=PATIENCE)
    with raised.value as refused:
        assert (refused.code, refused.headers["x-amzn-ErrorType"]) == (400, code)
        assert refused.headers["x-amzn-RequestId"]
