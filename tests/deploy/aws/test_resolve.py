"""Resolving with AWS's answers: images by digest, a model's shape out of S3."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.aws import Aws
from deploy.errors import NotThere, SpecError
from deploy.resolve.images import resolve_image
from deploy.resolve.model.shape import shape_in_s3
from deploy.resolve.resolver import find_size, resolve, times
from deploy.spec import Spec
from deploy.spec.sections import Image
from tests.deploy.cases import LLAMA_CONFIG
from tests.deploy.doubles.aws import ACCOUNT, Cloud
from tests.deploy.doubles.deployments import PLAIN, permit
from tests.deploy.doubles.hub import safetensors_header
from tests.deploy.unit.resolve.test_model_shape import gguf

# -- resolving with AWS's answers --------------------------------------------------------------------------------------


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


def test_an_archive_tells_its_own_size_and_takes_longer(cloud: Cloud) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="models")
    s3.put_object(Bucket="models", Key="llama.tar.gz", Body=bytes(3 << 20))
    given = spec(model={"s3": "s3://models/llama.tar.gz"})
    permit(cloud, with_shape(given))
    found = find_size(given, Aws("us-east-1"))
    assert found.packed == 3 / 1024
    (note,) = found.notes
    assert note.startswith("model.s3 is an archive of 3.1 MB, which each instance unpacks")
    (note,) = find_size(given).notes
    assert note.startswith("model.s3 is an archive, which each instance unpacks")
    assert (times(20).download, times(20, is_archive=True).download) == (720, 1140)


def test_a_prefix_that_cannot_be_read_tells_no_size(cloud: Cloud) -> None:
    given = spec(model={"s3": "s3://nowhere-at-all/llama/"})
    permit(cloud, with_shape(given))
    assert find_size(given, Aws("us-east-1")).shape is None


# -- images by digest, with a double of ECR ----------------------------------------------------------------------------


IMAGE_ACCOUNT = "123456789012"  # moto's


HERE = f"{IMAGE_ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com"


SPEC = {**PLAIN, "image": {"repository": "lmi", "tag": "1"}, "model": {"id": "demo"}}


@pytest.fixture
def aws(cloud: Cloud) -> Aws:
    """Whoever has the printed policy asks for images of two repositories."""
    permit(cloud, SPEC, {**SPEC, "image": {"repository": "other"}})
    return Aws("us-east-1")


@pytest.mark.parametrize("given", [{"repository": "lmi", "tag": "1-cu130"}, {"uri": f"{HERE}/lmi:1-cu130"}])
def test_a_tag_becomes_its_digest(cloud: Cloud, aws: Aws, given: dict[str, Any]) -> None:
    digest = cloud.push("lmi", "1-cu130")
    found = resolve_image(Image(**given), "us-east-1", IMAGE_ACCOUNT, aws)
    assert found.uri == f"{HERE}/lmi@{digest}"
    assert (found.cuda, found.warnings) == ((13, 0), ())


def test_a_list_of_images_is_warned_of(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    detail = {"imageDigest": "sha256:" + "2" * 64, "imageManifestMediaType": "application/vnd.oci.image.index.v1+json"}
    monkeypatch.setattr(aws.client("ecr"), "describe_images", lambda **asked: {"imageDetails": [detail]}, raising=False)
    found = resolve_image(Image(repository="lmi", tag="1"), "us-east-1", IMAGE_ACCOUNT, aws)
    assert found.uri == f"{HERE}/lmi@sha256:{'2' * 64}"
    assert "--provenance=false" in found.warnings[0]


def test_an_image_that_is_not_there_comes_with_the_way_to_put_it(cloud: Cloud, aws: Aws) -> None:
    cloud.push("lmi", "1")
    with pytest.raises(
        NotThere, match=r"there is no image lmi:2 in ECR of the account 123456789012 in us-east-1"
    ) as caught:
        resolve_image(Image(repository="lmi", tag="2"), "us-east-1", IMAGE_ACCOUNT, aws)
    assert f"docker push {HERE}/lmi:2" in caught.value.advice
    with pytest.raises(NotThere, match="there is no repository other:2"):
        resolve_image(Image(repository="other", tag="2"), "us-east-1", IMAGE_ACCOUNT, aws)


def test_others_images_are_not_asked_for(aws: Aws) -> None:
    uri = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.38.0-lmi29.0.0-cu130"
    assert resolve_image(Image(aws="djl-lmi"), "us-east-1", IMAGE_ACCOUNT, aws).uri == uri


# -- a model shape out of S3 -------------------------------------------------------------------------------------------


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
    start, size = safetensors_header({f"model.layers.{number}.w": ("BF16", (64, 1024)) for number in range(32)})
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
