"""AWS for the commands of docs/: moto with our doubles, and SageMaker's runtime with the demo model behind it.

The doubles live in a process of their own (`python -m tests.docs.aws`), because `Cloud` changes moto for good.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from deploy.operations.logs import endpoint_group
from tests.deploy.doubles.aws import ACCOUNT, CALLER, Call, Cloud
from tests.deploy.doubles.endpoints import set_quotas
from tests.deploy.local.processes import LocalProcess, local_process
from tests.docs.pages import ROOT
from tests.environment import clean_environment

ENDPOINT = "llama-3-8b"
"""The endpoint that the runtime has; `lmi deploy up` makes it in the double of SageMaker."""

_NOWHERE = "http://127.0.0.1:9"
_REPOSITORY, _TAG = "lmi-handler", "0.1.0"
_ROLE, _SECRET = "lmi-endpoint", "hugging-face-AbCdEf"
_QUOTAS = {
    f"ml.{size} for {usage} usage": 2.0
    for size in ("g6.2xlarge", "g6e.xlarge", "g6e.2xlarge")
    for usage in ("endpoint", "transform job")
}
_REQUESTS = [{"inputs": "The capital of France is"}, {"inputs": "The capital of Italy is"}]


@contextlib.contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Start the doubles; yield the variables with which a command takes them for AWS."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.docs.aws"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=clean_environment(),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, "the doubles of AWS do not start"
            yield json.loads(line)
        finally:
            process.stdin.close()


def _serve() -> None:
    """Print the variables, and serve until standard input ends."""
    cloud = Cloud()
    cloud.trusted.add(CALLER)  # readers have an account; tests/deploy/aws holds the commands to the printed policies
    cloud.sagemaker.polls = 0  # nothing takes time: `lmi deploy up` polls every 15 s
    with pytest.MonkeyPatch.context() as patch:
        set_quotas(patch, _QUOTAS)
        _furnish(cloud)
        with local_process("--endpoint-name", ENDPOINT, "-o", "option.dtype=fp32") as local:
            cloud.before = _ContainerLog(cloud, local)
            print(json.dumps(_variables(cloud.url, local.url)), flush=True)
            sys.stdin.read()
    cloud.stop()


def _variables(cloud: str, runtime: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": cloud,
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": runtime,
        "AWS_ACCESS_KEY_ID": CALLER,
        "AWS_SECRET_ACCESS_KEY": CALLER,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "HTTPS_PROXY": _NOWHERE,  # the hub is not asked
    }


def _furnish(cloud: Cloud) -> None:
    """Make what a deployment needs before: the role, the token's secret, and the image; a batch's buckets."""
    everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    cloud.policies[f"arn:aws:iam::{ACCOUNT}:role/{_ROLE}"] = [{"Statement": [everything]}]
    s3 = cloud.client("s3")
    for bucket in ("requests", "answers"):
        s3.create_bucket(Bucket=bucket)
    body = "".join(json.dumps(one) + "\n" for one in _REQUESTS)
    s3.put_object(Bucket="requests", Key="today/prompts.jsonl", Body=body.encode())
    trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    cloud.client("iam").create_role(RoleName=_ROLE, AssumeRolePolicyDocument=document)
    cloud.client("secretsmanager").create_secret(Name=_SECRET, SecretString="hf_not_a_token")
    ecr = cloud.client("ecr")
    ecr.create_repository(repositoryName=_REPOSITORY)
    media = "application/vnd.docker.distribution.manifest.v2+json"
    layer = {
        "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "size": 1,
        "digest": f"sha256:{'1' * 64}",
    }
    # Without the digest of a configuration: moto serves no layers, so nobody can read the processor there.
    manifest = {"schemaVersion": 2, "mediaType": media, "config": {"size": 1}, "layers": [layer]}
    ecr.put_image(repositoryName=_REPOSITORY, imageTag=_TAG, imageManifest=json.dumps(manifest))


class _ContainerLog:
    """Copy the container's log into CloudWatch's double whenever somebody reads there."""

    def __init__(self, cloud: Cloud, local: LocalProcess) -> None:
        self._cloud, self._local = cloud, local
        self._group, self._stream = endpoint_group(ENDPOINT), "AllTraffic/i-0123456789abcdef0"
        self._written = 0

    def __call__(self, call: Call) -> None:
        exists = ("endpoint", ENDPOINT) in self._cloud.sagemaker.things
        if call.operation != "FilterLogEvents" or not exists:
            return
        logs = self._cloud.client("logs")
        if not self._written:
            logs.create_log_group(logGroupName=self._group)
            logs.create_log_stream(logGroupName=self._group, logStreamName=self._stream)
        lines = [line.partition("container | ")[2] for line in self._local.log.splitlines() if "container | " in line]
        at = int(time.time() * 1000)
        if events := [{"timestamp": at, "message": line} for line in lines[self._written :]]:
            logs.put_log_events(logGroupName=self._group, logStreamName=self._stream, logEvents=events)
        self._written = len(lines)


if __name__ == "__main__":
    _serve()
