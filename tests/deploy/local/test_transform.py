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

from deploy.local.endpoint import Endpoint
from deploy.local.runtime import Runtime
from deploy.local.store import Store
from tests.app.server import serve
from tests.deploy.local.servers import Loop
from tests.servers import PATIENCE, LiveServer, wait_for

LINES = "application/jsonlines"
PROMPTS = [f"prompt number {index}" for index in range(20)]


class Batch(NamedTuple):
    """The emulator's control plane, and its store."""

    sagemaker: Any
    store: Store
    url: str

    def run(self, records: list[Any], *, name: str = "job", end: str = "Completed", **more: Any) -> list[Any]:
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
        wait_for(lambda: self.describe(name)["TransformJobStatus"] != "InProgress", PATIENCE, "the job does not end")
        assert self.describe(name)["TransformJobStatus"] == end, self.describe(name).get("FailureReason")
        if end != "Completed":
            return []
        return [json.loads(line) for line in self.store.read("s3://data/out/records.jsonl.out").splitlines()]

    def describe(self, name: str) -> Any:
        return self.sagemaker.describe_transform_job(TransformJobName=name)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve("--engine", "echo") as made:
        made.wait_ready()
        yield made


@pytest.fixture
def batch(server: LiveServer, loop: Loop, tmp_path: Path) -> Iterator[Batch]:
    store = Store(tmp_path / "s3")
    with loop.serving(Runtime(Endpoint(container=server.url), store).app()) as url:
        config = Config(retries={"total_max_attempts": 1})
        client = boto3.client("sagemaker", region_name="us-east-1", endpoint_url=url, aws_access_key_id="x",
                              aws_secret_access_key="x", config=config)  # fmt: skip
        with contextlib.closing(client):
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


def test_a_record_that_the_server_refuses_fails_the_job_with_its_words(batch: Batch) -> None:
    batch.run([{"inputs": "a"}, {"inputs": ""}], end="Failed")
    assert "'inputs' must be a non-empty string" in batch.describe("job")["FailureReason"]


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
