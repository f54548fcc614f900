"""The choice of an image, its registry and its host."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import botocore.session
import pytest

from deploy.data import table
from deploy.errors import SpecError
from deploy.resolve.images import (
    AMI_CUDA_12,
    AMI_CUDA_13,
    built_for,
    choose_ami,
    cuda_of,
    image_architecture,
    image_cuda,
    push_instructions,
    registry_suffix,
    resolve_image,
)
from deploy.resolve.instances import find
from deploy.spec.sections import Image
from tests.one_test import in_one_test

ACCOUNT = "123456789012"  # moto's


HERE = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com"


@in_one_test(
    ("image", "region", "uri"),
    [
        (Image(repository="lmi", tag="1-cu130"), "us-east-1", f"{HERE}/lmi:1-cu130"),
        (Image(repository="team/lmi", tag="1"), "cn-north-1",
         f"{ACCOUNT}.dkr.ecr.cn-north-1.amazonaws.com.cn/team/lmi:1"),
        (Image(uri=f"{HERE}/lmi:2"), "us-east-1", f"{HERE}/lmi:2"),
        (Image(aws="djl-lmi"), "us-east-1",
         "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.38.0-lmi29.0.0-cu130"),
        (Image(aws="djl-tensorrtllm"), "eu-south-1",
         "692866216735.dkr.ecr.eu-south-1.amazonaws.com/djl-inference:0.33.0-tensorrtllm0.21.0-cu128"),
        (Image(aws="djl-lmi", tag="0.34.0"), "us-gov-west-1",
         "442386744353.dkr.ecr.us-gov-west-1.amazonaws.com/djl-inference:0.34.0-lmi16.0.0-cu128"),
        (Image(aws="djl-lmi", tag="0.36.0-lmi28.0.0-cu130"), "us-west-2",
         "763104351884.dkr.ecr.us-west-2.amazonaws.com/djl-inference:0.36.0-lmi28.0.0-cu130"),
    ],
)  # fmt: skip
def test_uris(image: Image, region: str, uri: str) -> None:
    assert resolve_image(image, region, ACCOUNT).uri == uri


def test_the_packages_version_is_the_tag_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.2.1")
    assert resolve_image(Image(repository="lmi"), "us-east-1", ACCOUNT).uri == f"{HERE}/lmi:3.2.1"


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SpecError, match=r"^image\.tag: is required"):
        resolve_image(Image(repository="lmi"), "us-east-1", ACCOUNT)


def test_registries_lie_where_botocore_says() -> None:
    partitions = botocore.session.Session().get_component("data_loader").load_data("partitions")["partitions"]
    for region in table("image_accounts")["registries"]:
        (suffix,) = [one["outputs"]["dnsSuffix"] for one in partitions if re.match(one["regionRegex"], region)]
        assert registry_suffix(region) == suffix, region


def test_an_image_of_another_region_is_refused() -> None:
    with pytest.raises(SpecError, match=r"is in us-east-1, but the endpoint is in eu-west-1"):
        resolve_image(Image(uri=f"{HERE}/lmi:1"), "eu-west-1", ACCOUNT)


def test_aws_has_no_image_everywhere() -> None:
    with pytest.raises(SpecError, match=r"^image\.aws: the registry of AWS's images in us-west-9 is unknown") as caught:
        resolve_image(Image(aws="djl-lmi"), "us-west-9", ACCOUNT)
    assert "image.uri" in caught.value.advice


@in_one_test(
    ("tag", "cuda"),
    [
        ("0.33.0-tensorrtllm0.21.0-cu128", (12, 8)),
        ("0.38.0-lmi29.0.0-cu130", (13, 0)),
        ("1.0-cuda12.9", (12, 9)),
        ("1.0-cuda-13.0-devel", (13, 0)),
        ("cu1", None),
        ("0.1.0", None),
        ("", None),
    ],
)
def test_the_tag_says_the_cuda(tag: str, cuda: tuple[int, int] | None) -> None:
    assert cuda_of(tag) == cuda


@in_one_test(
    ("image", "cuda"),
    [
        (Image(repository="lmi", tag="1-cu128", cuda="13.0"), (13, 0)),
        (Image(aws="djl-lmi"), (13, 0)),
        (Image(aws="djl-lmi", tag="0.35.0"), (12, 8)),
        (Image(uri=f"{HERE}/lmi:1-cu126"), (12, 6)),
        (Image(uri=f"{HERE}/lmi@sha256:{'0' * 64}"), None),
        (Image(repository="lmi-cu128"), None),  # a repository's name is no tag
    ],
)
def test_the_images_cuda(image: Image, cuda: tuple[int, int] | None) -> None:
    assert image_cuda(image) == cuda


@in_one_test(
    ("asked", "instance", "cuda", "ami", "warning"),
    [
        ("auto", "ml.g5.xlarge", (13, 0), AMI_CUDA_13, ""),
        ("auto", "ml.g5.xlarge", (12, 8), AMI_CUDA_12, ""),
        ("auto", "ml.g5.xlarge", (11, 8), AMI_CUDA_12, ""),
        ("auto", "ml.g5.xlarge", None, None, "Set image.cuda"),
        ("auto", "ml.g7e.2xlarge", (13, 0), AMI_CUDA_13, ""),
        ("auto", "ml.p6-b200.48xlarge", (12, 9), AMI_CUDA_13, "Prefer an image with CUDA 13"),
        ("auto", "ml.g7e.2xlarge", None, AMI_CUDA_13, "Set image.cuda"),
        ("auto", "ml.c7i.xlarge", (13, 0), None, ""),
        ("auto", "ml.g9.xlarge", (12, 8), AMI_CUDA_12, ""),
        ("al2-ami-sagemaker-inference-gpu-2-1", "ml.g5.xlarge", (13, 0), "al2-ami-sagemaker-inference-gpu-2-1", ""),
        ("al2030-ami", "ml.g5.xlarge", (13, 0), "al2030-ami", "is not one of the AMIs known"),
    ],
)
def test_the_host_is_chosen_by_the_images_cuda(
    asked: str, instance: str, cuda: tuple[int, int] | None, ami: str | None, warning: str
) -> None:
    chosen, warnings = choose_ami(asked, find(instance), cuda)
    assert chosen == ami
    assert len(warnings) == bool(warning)
    assert all(warning in one for one in warnings)


def test_push_instructions() -> None:
    assert push_instructions(f"{HERE}/lmi:1").splitlines() == [
        "Build and push the image:",
        "  aws ecr create-repository --region us-east-1 --repository-name lmi",
        "  docker build --platform linux/amd64 --provenance=false --target trtllm -t lmi:1 .",
        f"  aws ecr get-login-password --region us-east-1 | docker login --username AWS --password-stdin {HERE}",
        f"  docker tag lmi:1 {HERE}/lmi:1",
        f"  docker push {HERE}/lmi:1",
    ]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("lmi-handler-cpu", "cpu"),
        ("lmi-handler-vllm", "lmi"),
        ("lmi-handler-llamacpp", "llamacpp"),
        ("llama-cpp-cpu", "llamacpp"),
        ("x", "trtllm"),
    ],
)
def test_push_instructions_guess_the_target_by_the_name(name: str, target: str) -> None:
    assert f"--target {target} -t {name}:1 ." in push_instructions(f"{HERE}/{name}:1")


def test_an_image_for_arm_is_built_for_it() -> None:
    assert "docker build --platform linux/arm64 " in push_instructions(f"{HERE}/lmi-handler-llamacpp-arm64:1")
    assert "docker build --platform linux/arm64 " in push_instructions(f"{HERE}/lmi-handler-cpu:1", "arm64")


def test_llamacpp_with_cuda_is_built_on_other_bases() -> None:
    assert "--target llamacpp --build-arg LLAMACPP_BUILD_BASE=... --build-arg LLAMACPP_BASE=... -t" in (
        push_instructions(f"{HERE}/lmi-handler-llamacpp:1-cu130")
    )
    assert "--target llamacpp -t lmi-handler-llamacpp:1 ." in push_instructions(f"{HERE}/lmi-handler-llamacpp:1")


@in_one_test(
    ("image", "wanted"),
    [
        ({"repository": "lmi"}, "amd64"),
        ({"repository": "lmi-arm64"}, "arm64"),
        ({"repository": "lmi", "tag": "1.1.0-aarch64"}, "arm64"),
        ({"repository": "lmi-graviton"}, "arm64"),
        ({"repository": "charm64/lmi"}, "amd64"),
        ({"repository": "arm64/lmi"}, "amd64"),
        ({"repository": "lmi", "architecture": "arm64"}, "arm64"),
        ({"repository": "lmi-arm64", "architecture": "amd64"}, "amd64"),
        ({"uri": f"{HERE}/llama-cpp-arm64:server-sagemaker-cpu-v1"}, "arm64"),
        ({"uri": f"{HERE}/lmi@sha256:{'ab' * 32}"}, "amd64"),
        ({"aws": "djl-lmi"}, "amd64"),
    ],
)
def test_the_processors_that_an_image_is_built_for(image: dict[str, Any], wanted: str) -> None:
    assert image_architecture(Image(**image)) == wanted
    assert (
        resolve_image(
            Image(**{"tag": "1", **image} if "repository" in image else image), "us-east-1", ACCOUNT
        ).architecture
        == wanted
    )


@in_one_test(
    ("image", "least"),
    [
        ({"aws": "djl-lmi"}, (8, 0)),
        ({"aws": "djl-lmi", "tag": "0.33.0-lmi16.0.0-cu128"}, None),  # LMI 16: nothing is known
        ({"aws": "djl-tensorrtllm"}, (8, 0)),
        ({"uri": f"{HERE}/djl-inference:0.36.0-lmi27.0.0-cu130"}, (8, 0)),
        ({"uri": f"{HERE}/djl-inference:0.33.0-tensorrtllm0.21.0-cu128"}, (8, 0)),
        ({"uri": f"{HERE}/sglang:0.5.20-gpu-py312-cu130-amzn2023-sagemaker"}, (9, 0)),
        ({"uri": f"{HERE}/sglang:0.5.6-gpu-py312-cu129-ubuntu22.04-sagemaker"}, (8, 0)),
        ({"uri": f"{HERE}/sglang@sha256:{'ab' * 32}"}, (8, 0)),
        ({"uri": f"{HERE}/vllm:0.30.0-gpu-py312-cu130-amzn2023-sagemaker"}, (7, 5)),
        ({"uri": f"{HERE}/vllm-omni:server-sagemaker-cuda-v1"}, (7, 5)),
        ({"uri": f"{HERE}/my-vllm:1"}, None),  # somebody's own
        ({"repository": "lmi-handler", "tag": "1-cu130"}, None),
    ],
)
def test_the_least_compute_capability_of_an_image(image: dict[str, str], least: tuple[int, int] | None) -> None:
    assert built_for(Image.model_validate(image)) == least


def test_every_rule_of_capabilities_has_its_source() -> None:
    for row in table("image_capabilities")["images"]:
        assert len(row["source"]) > 10
        assert re.compile(row["name"]).groups == ("from" in row)
