"""Resolving with AWS's answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.aws import Aws
from deploy.errors import SpecError
from deploy.resolve.resolver import find_size, resolve
from deploy.spec import Spec
from tests.deploy.cases import LLAMA_CONFIG
from tests.deploy.doubles.aws import ACCOUNT, Cloud
from tests.deploy.doubles.deployer import permit

GIVEN: dict[str, Any] = {
    "name": "llama",
    "role": "arn:aws:iam::111122223333:role/endpoint",
    "image": {"repository": "lmi", "tag": "1-cu130"},
    "model": {"id": "meta-llama/Meta-Llama-3-8B-Instruct"},
    "options": {"llm_engine": "trtllm"},
}


def spec(**changes: Any) -> Spec:
    return Spec.model_validate({**GIVEN, **changes})


def with_shape(given: Spec) -> Spec:
    """The same in the double's account, whose policies are printed without asking AWS for the model's size."""
    shape = {"parameters": 8e9, "layers": 32, "kv_heads": 8, "head_dim": 128}
    role = given.role.replace("111122223333", ACCOUNT)
    return spec(role=role, model={**given.model.model_dump(exclude_none=True), "shape": shape})


def test_with_aws_the_account_the_digest_and_the_config_are_its_answers(cloud: Cloud) -> None:
    digest = cloud.push("lmi", "1-cu130")
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="models")
    s3.put_object(Bucket="models", Key="llama/config.json", Body=json.dumps(LLAMA_CONFIG).encode())
    given = spec(model={"s3": "s3://models/llama/"})
    permit(cloud, with_shape(given))
    found = resolve(given, "us-east-1", aws=Aws("us-east-1")).decision
    assert found.account == "123456789012"
    assert found.image == f"123456789012.dkr.ecr.us-east-1.amazonaws.com/lmi@{digest}"
    assert (found.instance_type, found.ami) == ("ml.g6.2xlarge", "al2023-ami-sagemaker-inference-gpu-4-1")
    with pytest.raises(SpecError, match="needs the model's size"):
        resolve(given, "us-east-1")


def test_a_prefix_that_cannot_be_read_tells_no_size(cloud: Cloud) -> None:
    given = spec(model={"s3": "s3://nowhere-at-all/llama/"})
    permit(cloud, with_shape(given))
    assert find_size(given, Aws("us-east-1")).shape is None
