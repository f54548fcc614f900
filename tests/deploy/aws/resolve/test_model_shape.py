"""A model shape out of S3."""

from __future__ import annotations

import json

from deploy.aws import Aws
from deploy.resolve.model.shape import shape_in_s3
from tests.deploy.cases import LLAMA_CONFIG
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployer import permit
from tests.deploy.doubles.deployments import PLAIN
from tests.deploy.unit.resolve.safetensors_files import header
from tests.deploy.unit.resolve.test_model_shape import gguf


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


def test_a_prefix_of_a_large_model_of_which_headers_are_read(cloud: Cloud) -> None:
    permit(cloud, {**PLAIN, "model": {**PLAIN["model"], "s3": "s3://models/"}})
    aws, s3 = Aws("us-east-1"), cloud.client("s3")
    s3.create_bucket(Bucket="models")
    s3.put_object(Bucket="models", Key="llama/config.json", Body=json.dumps(LLAMA_CONFIG).encode())
    start, size = header({f"model.layers.{number}.w": ("BF16", (64, 1024)) for number in range(32)})
    s3.put_object(Bucket="models", Key="llama/model.safetensors", Body=start + bytes(size))
    notes: list[str] = []
    shape = shape_in_s3(aws, "s3://models/llama/", notes)
    assert shape is not None
    assert (shape.parameters, shape.stored, shape.layers) == (32 * 64 * 1024, size, 32)
    assert notes == []


def test_a_prefix_with_a_gguf_file(cloud: Cloud) -> None:
    permit(cloud, {**PLAIN, "model": {**PLAIN["model"], "s3": "s3://models/"}})
    aws, s3 = Aws("us-east-1"), cloud.client("s3")
    s3.create_bucket(Bucket="models")
    s3.put_object(Bucket="models", Key="small/model.gguf", Body=gguf() + bytes(100))
    shape = shape_in_s3(aws, "s3://models/small/")
    assert shape is not None
    assert (shape.parameters, shape.stored) == (52, len(gguf()) + 100)
