"""A model shape out of S3."""

from __future__ import annotations

import json

from deploy.aws import Aws
from deploy.resolve.model.shape import shape_in_s3
from tests.deploy.cases import LLAMA_CONFIG
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployer import permit
from tests.deploy.doubles.deployments import PLAIN


def test_a_prefix_in_s3(cloud: Cloud) -> None:
    permit(cloud, {**PLAIN, "model": {**PLAIN["model"], "s3": "s3://models/"}})
    aws, s3 = Aws("us-east-1"), cloud.client("s3")
    s3.create_bucket(Bucket="models")
    s3.put_object(Bucket="models", Key="llama/config.json", Body=json.dumps(LLAMA_CONFIG).encode())
    s3.put_object(Bucket="models", Key="llama/model.safetensors", Body=b"0" * 1600)
    s3.put_object(Bucket="models", Key="llama/original/consolidated.safetensors", Body=b"0" * 99)
    shape = shape_in_s3(aws, "s3://models/llama/")
    assert shape is not None
    assert (shape.layers, shape.stored) == (32, 1600)
    assert shape_in_s3(aws, "s3://models/other/") is None
