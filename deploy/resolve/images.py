"""Resolve the URI of the container image in ECR, and the host AMI for the image's CUDA version.

SageMaker accepts only images from ECR in the endpoint's own region. A tag may later be moved to another image.
Therefore, if AWS is queried, the tag of an image in the user's account is replaced by its digest.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore.exceptions import ClientError

from deploy.aws import error_code
from deploy.data import table
from deploy.errors import DeployError, NotThere, SpecError

if TYPE_CHECKING:
    from deploy.aws import Aws
    from deploy.resolve.instances import InstanceType
    from deploy.spec.sections import Image
    from deploy.spec.values import Architecture

_SUFFIXES = {
    "cn-": "amazonaws.com.cn",
    "us-iso-": "c2s.ic.gov",
    "us-isob-": "sc2s.sgov.gov",
    "us-isof-": "csp.hci.ic.gov",
    "eu-isoe-": "cloud.adc-e.uk",
    "eusc-": "amazonaws.eu",
}
ECR_URI = re.compile(
    r"(?P<account>[0-9]{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z0-9.-]+)/(?P<repository>[^:@]+)"
    r"(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
"""Pattern for the URI of an image in ECR, in any partition."""


def registry_suffix(region: str) -> str:
    """Return the domain suffix of a region's ECR registries."""
    return next((suffix for start, suffix in _SUFFIXES.items() if region.startswith(start)), "amazonaws.com")


AMI_CUDA_12 = "al2-ami-sagemaker-inference-gpu-3-1"
"""Host AMI with NVIDIA driver 550."""

AMI_CUDA_13 = "al2023-ami-sagemaker-inference-gpu-4-1"
"""The newest host AMI, with NVIDIA driver 580. Blackwell GPUs need it."""

LISTED_AMIS = (
    "al2-ami-sagemaker-inference-gpu-2",
    "al2-ami-sagemaker-inference-gpu-2-1",
    AMI_CUDA_12,
    AMI_CUDA_13,
    "al2-ami-sagemaker-inference-neuron-2",
)

_CUDA = re.compile(r"cu(?:da)?-?([0-9]{2})\.?([0-9])(?![0-9])")
_TAGS = {"djl-lmi": "lmi_tags", "djl-tensorrtllm": "tensorrtllm_tags"}


@dataclass(frozen=True)
class ResolvedImage:
    """A container image in ECR.

    Attributes:
        uri: full URI of the image.
        cuda: the CUDA version of the image, e.g. (12, 8), or None if it is unknown.
        built_for: minimum compute capability of the GPU, e.g. (8, 0), or None if it is unknown.
        warnings: warnings about the image, each as a sentence.
        architecture: the processors that the image is built for, according to the specification or the image's name.
    """

    uri: str
    cuda: tuple[int, int] | None
    built_for: tuple[int, int] | None = None
    warnings: tuple[str, ...] = ()
    architecture: Architecture = "amd64"


def resolve_image(image: Image, region: str, account: str | None, aws: Aws | None = None) -> ResolvedImage:
    """Resolve the image of a specification.

    Args:
        region: region of the endpoint.
        account: account of `image.repository`.
        aws: client to query for the digest, or None to keep the tag.

    Raises:
        SpecError: the URI is not an ECR URI, or the image is in another region.
        NotThere: the image or its repository does not exist. The advice lists the commands to push the image.
    """
    uri, built = _uri(image, region, account), image_architecture(image)
    match = ECR_URI.fullmatch(uri)
    if match is None:
        raise SpecError(f"image: {uri} is not an image in ECR", "SageMaker pulls images only from ECR.")
    if match["region"] != region:
        raise SpecError(
            f"image.uri: the image is in {match['region']}, but the endpoint is in {region}",
            "SageMaker pulls images only from the endpoint's region. Push the image there, or replicate it in ECR.",
        )
    warnings: tuple[str, ...] = ()
    if aws is not None and match["tag"] and match["account"] == account:
        uri, warnings = _by_digest(aws, match, built)
    return ResolvedImage(uri, image_cuda(image), built_for(image), warnings, built)


def image_architecture(image: Image) -> Architecture:
    """Return the processors that an image is built for: image.architecture, or else arm64 if the name says so."""
    if image.architecture is not None or image.aws is not None:
        return image.architecture or "amd64"
    return architecture_of(image.uri or f"{image.repository}:{image.tag}")


def architecture_of(name: str) -> Architecture:
    """Return the processors that an image's name says it is built for, e.g. arm64 for `lmi-llamacpp-arm64:1`."""
    return "arm64" if {"arm64", "aarch64", "graviton"} & _words(name.rpartition("/")[2]) else "amd64"


def _words(name: str) -> set[str]:
    return set(re.split("[^a-z0-9]+", name.lower()))


def has_word(image: Image, word: str) -> bool:
    """Return whether a word, such as `cpu`, is in the name or tag of an image."""
    return word in _words(image.uri or f"{image.repository}:{image.tag}")


def image_cuda(image: Image) -> tuple[int, int] | None:
    """Return the image's CUDA version from image.cuda or the tag, or None if neither states it."""
    if image.cuda is not None:
        major, minor = image.cuda.split(".")
        return int(major), int(minor)
    if image.aws is not None:
        return cuda_of(_aws_tag(image))
    return cuda_of(image.tag or (image.uri or "").rpartition(":")[2])


def built_for(image: Image) -> tuple[int, int] | None:
    """Return the minimum compute capability that the image has kernels for, or None if it is unknown."""
    if image.aws is not None:
        name = f"djl-inference:{_aws_tag(image)}"
    else:
        name = (image.uri or f"{image.repository}:{image.tag or ''}").rpartition("/")[2]
    for row in table("image_capabilities")["images"]:
        match = re.match(row["name"], name)
        if match is not None and ("from" not in row or int(match[1]) >= row["from"]):
            major, minor = row["least"].split(".")
            return int(major), int(minor)
    return None


def cuda_of(tag: str) -> tuple[int, int] | None:
    """Return the CUDA version in a tag, e.g. (12, 8) for `0.33.0-tensorrtllm0.21.0-cu128`, or None."""
    match = _CUDA.search(tag)
    return (int(match[1]), int(match[2])) if match else None


class Ami(NamedTuple):
    """The InferenceAmiVersion of a host, or None for SageMaker's default, and warnings about it."""

    name: str | None
    warnings: tuple[str, ...] = ()


def choose_ami(setting: str, instance: InstanceType | None, cuda: tuple[int, int] | None) -> Ami:
    """Choose the host AMI.

    The default host's driver can be years old. If the driver is too old for the image, or if an image with CUDA 12 runs
    on the newest host, the endpoint stays in Creating without any log. So the AMI depends on the image's CUDA version.

    Args:
        setting: the value of instance.ami. `auto` chooses the AMI.
        instance: the instance type, or None if it is unknown.
        cuda: the CUDA version of the image, or None if it is unknown.
    """
    if setting != "auto":
        unknown = (f"instance.ami: {setting} is not one of the AMIs known in 2026: {', '.join(LISTED_AMIS)}.",)
        return Ami(setting, () if setting in LISTED_AMIS else unknown)
    if instance is not None and instance.gpus == 0:
        return Ami(None)
    if cuda is None:
        newest = AMI_CUDA_13 if instance is not None and instance.blackwell else None
        host = f"on the newest AMI ({newest})" if newest else "on the default AMI, whose driver may be too old"
        text = f"The image's CUDA version is unknown, so it runs {host}. Set image.cuda, e.g. 12.8 or 13.0."
        return Ami(newest, (text,))
    if cuda[0] >= 13:
        return Ami(AMI_CUDA_13)
    if instance is not None and instance.blackwell:
        text = f"{instance.name} needs the newest AMI, where endpoints with CUDA {cuda[0]}.{cuda[1]} images have hung"
        return Ami(AMI_CUDA_13, (f"{text} in Creating. Prefer an image with CUDA 13.",))
    return Ami(AMI_CUDA_12)


def push_instructions(uri: str, architecture: Architecture | None = None) -> str:
    """Return the commands that build the image and push it to `uri`.

    Args:
        architecture: the processors to build for, or None to read them from the name.
    """
    match = ECR_URI.fullmatch(uri)
    if match is None:
        raise ValueError(f"{uri} is not an image in ECR")
    registry = f"{match['account']}.dkr.ecr.{match['region']}.{match['suffix']}"
    tag = match["tag"] or "TAG"
    local = f"{match['repository']}:{tag}"
    options = f"--platform linux/{architecture or architecture_of(local)} --provenance=false --target {_target(local)}"
    if _target(local) == "llamacpp" and cuda_of(tag) is not None:
        options += " --build-arg LLAMACPP_BUILD_BASE=... --build-arg LLAMACPP_BASE=..."  # docs/container.md names them
    return "\n".join(
        (
            "Build and push the image:",
            f"  aws ecr create-repository --region {match['region']} --repository-name {match['repository']}",
            f"  docker build {options} -t {local} .",
            f"  aws ecr get-login-password --region {match['region']} | "
            f"docker login --username AWS --password-stdin {registry}",
            f"  docker tag {local} {registry}/{local}",
            f"  docker push {registry}/{local}",
        )
    )


def _target(name: str) -> str:
    """Guess the build target in the Dockerfile from the image name."""
    words = _words(name)
    if "llamacpp" in words or {"llama", "cpp"} <= words:
        return "llamacpp"
    return "cpu" if "cpu" in words else "lmi" if "vllm" in words else "trtllm"


def _uri(image: Image, region: str, account: str | None) -> str:
    if image.uri is not None:
        return image.uri
    if image.aws is not None:
        images = table("image_accounts")
        if region not in images["registries"]:
            raise SpecError(
                f"image.aws: the registry of AWS's images in {region} is unknown",
                "Set image.uri to a URI from github.com/aws/deep-learning-containers (available_images.md).",
            )
        account = images["registries"][region]
        return f"{account}.dkr.ecr.{region}.{registry_suffix(region)}/djl-inference:{_aws_tag(image)}"
    tag = image.tag or package_version()
    return f"{account}.dkr.ecr.{region}.{registry_suffix(region)}/{image.repository}:{tag}"


def _aws_tag(image: Image) -> str:
    """Return the full tag of AWS's image for a version such as `0.36.0`, by default for the newest known version."""
    tags: dict[str, str] = table("image_accounts")[_TAGS[str(image.aws)]]
    newest = max(tags, key=lambda version: [int(part) for part in version.split(".")])
    tag = image.tag or newest
    return tags.get(tag, tag)


def package_version() -> str:
    """Return the version of this package, which is the default tag of its images.

    Raises:
        SpecError: the package is not installed.
    """
    try:
        return importlib.metadata.version("lmi-handler")
    except importlib.metadata.PackageNotFoundError:
        raise SpecError("image.tag: is required, as lmi-handler is not installed and its version is unknown") from None


def _by_digest(aws: Aws, match: re.Match[str], architecture: Architecture) -> tuple[str, tuple[str, ...]]:
    """Return the image URI with its digest, and warnings about the image.

    Args:
        architecture: the processors to build the image for, for the advice.

    Raises:
        NotThere: the image or its repository does not exist.
    """
    try:
        response = aws.client("ecr").describe_images(
            registryId=match["account"], repositoryName=match["repository"], imageIds=[{"imageTag": match["tag"]}]
        )
    except ClientError as error:
        code = error_code(error)
        if code in ("RepositoryNotFoundException", "ImageNotFoundException"):
            missing = "repository" if code.startswith("Repository") else "image"
            raise NotThere(
                f"image: there is no {missing} {match['repository']}:{match['tag']} in ECR of the account "
                f"{match['account']} in {match['region']}",
                push_instructions(match.string, architecture),
            ) from None
        raise
    details: list[dict[str, Any]] = response["imageDetails"]
    if not details:
        raise DeployError(f"image: ECR returned no details of {match.string}")
    detail = details[0]
    warnings = []
    kind = str(detail.get("imageManifestMediaType", ""))
    if "index" in kind or "manifest.list" in kind:
        warnings.append(
            f"{match['repository']}:{match['tag']} is an image index ({kind}), which SageMaker may reject. "
            f"Build the image with docker build --platform linux/{architecture} --provenance=false."
        )
    registry = match.string.split("/", 1)[0]
    return f"{registry}/{match['repository']}@{detail['imageDigest']}", tuple(warnings)
