"""Resolve the container image to a URI in ECR, and choose the host's AMI for its CUDA version.

SageMaker only takes images from ECR in the endpoint's own region. Any push can move a tag. So if AWS is queried, the
digest replaces the tag of an image in the user's account.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from deploy.aws import error_code
from deploy.data import table
from deploy.errors import DeployError, NotThere, SpecError

if TYPE_CHECKING:
    from deploy.aws import Aws
    from deploy.resolve.instances import InstanceType
    from deploy.spec.sections import Image

_SUFFIXES = {
    "cn-": "amazonaws.com.cn",
    "us-iso-": "c2s.ic.gov",
    "us-isob-": "sc2s.sgov.gov",
    "us-isof-": "csp.hci.ic.gov",
    "eu-isoe-": "cloud.adc-e.uk",
    "eusc-": "amazonaws.eu",
}
ECR_URI = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z0-9.-]+)/(?P<repository>[^:@]+)"
    r"(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
"""An image in ECR, in any partition."""


def registry_suffix(region: str) -> str:
    """Return the domain of a region's registries."""
    return next((suffix for start, suffix in _SUFFIXES.items() if region.startswith(start)), "amazonaws.com")


AMI_CUDA_12 = "al2-ami-sagemaker-inference-gpu-3-1"
"""Driver 550."""

AMI_CUDA_13 = "al2023-ami-sagemaker-inference-gpu-4-1"
"""Driver 580: the newest, which Blackwell needs."""

KNOWN_AMIS = (
    "al2-ami-sagemaker-inference-gpu-2",
    "al2-ami-sagemaker-inference-gpu-2-1",
    AMI_CUDA_12,
    AMI_CUDA_13,
    "al2-ami-sagemaker-inference-neuron-2",
)

_CUDA = re.compile(r"cu(?:da)?-?(\d{2})\.?(\d)(?!\d)")
_TAGS = {"djl-lmi": "lmi_tags", "djl-tensorrtllm": "tensorrtllm_tags"}


@dataclass(frozen=True)
class ResolvedImage:
    """An image by its whole URI.

    Attributes:
        cuda: CUDA version, e.g. (12, 8); None: unknown.
        built_for: the least compute capability that it runs on, e.g. (8, 0); None: unknown.
        warnings: one sentence each.
    """

    uri: str
    cuda: tuple[int, int] | None
    built_for: tuple[int, int] | None = None
    warnings: tuple[str, ...] = ()


def resolve_image(image: Image, region: str, account: str | None, aws: Aws | None = None) -> ResolvedImage:
    """Resolve the image of a specification.

    Args:
        account: the account that `repository` is in.
        aws: queried for the digest; None: the tag stays.

    Raises:
        SpecError: SageMaker cannot use the image in this region.
        NotThere: ECR does not have the image; the advice lists the commands to push it.
    """
    uri = _uri(image, region, account)
    match = ECR_URI.fullmatch(uri)
    if match is None:
        raise SpecError(f"image: {uri} is not an image in ECR", "SageMaker takes its images from ECR only.")
    if match["region"] != region:
        raise SpecError(
            f"image.uri: the image is in {match['region']}, and the endpoint is in {region}",
            "SageMaker takes images from the endpoint's own region: push it there, or set up ECR's replication.",
        )
    warnings: tuple[str, ...] = ()
    if aws is not None and match["tag"] and match["account"] == account:
        uri, warnings = _by_digest(aws, match)
    return ResolvedImage(uri, image_cuda(image), built_for(image), warnings)


def image_cuda(image: Image) -> tuple[int, int] | None:
    """Return the CUDA version from image.cuda, else from the tag."""
    if image.cuda is not None:
        major, minor = image.cuda.split(".")
        return int(major), int(minor)
    if image.aws is not None:
        return cuda_of(_aws_tag(image))
    return cuda_of(image.tag or (image.uri or "").rpartition(":")[2])


def built_for(image: Image) -> tuple[int, int] | None:
    """Return the least compute capability that the image has kernels for; None: unknown."""
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
    """Return (12, 8) for `0.33.0-tensorrtllm0.21.0-cu128`; None: the tag has no CUDA version."""
    match = _CUDA.search(tag)
    return (int(match[1]), int(match[2])) if match else None


def choose_ami(
    setting: str, instance: InstanceType | None, cuda: tuple[int, int] | None
) -> tuple[str | None, tuple[str, ...]]:
    """Return the InferenceAmiVersion, and warnings.

    The default host's driver can be years old. With a driver too old for the image an endpoint stays in Creating
    without a line of log. The same happens with a CUDA 12 image on the newest host. The image's CUDA version therefore
    decides.

    Args:
        setting: instance.ami; `auto` chooses.
        instance: None: the tables do not know the type.
        cuda: the image's CUDA version; None: unknown.
    """
    if setting != "auto":
        unknown = (f"instance.ami: {setting} is not among those known in 2026: {', '.join(KNOWN_AMIS)}",)
        return setting, () if setting in KNOWN_AMIS else unknown
    if instance is not None and instance.gpus == 0:
        return None, ()
    if cuda is None:
        newest = AMI_CUDA_13 if instance is not None and instance.blackwell else None
        host = f"the newest host ({newest})" if newest else "the default host, whose driver may be too old"
        return newest, (f"The image's CUDA is not known, so it gets {host}: set image.cuda, such as 12.8 or 13.0.",)
    if cuda[0] >= 13:
        return AMI_CUDA_13, ()
    if instance is not None and instance.blackwell:
        text = f"{instance.name} needs the newest host, on which CUDA {cuda[0]}.{cuda[1]} images have been seen to hang"
        return AMI_CUDA_13, (f"{text} in Creating: prefer an image of CUDA 13.",)
    return AMI_CUDA_12, ()


def push_instructions(uri: str) -> str:
    """Return the commands that build the image and push it to `uri`."""
    match = ECR_URI.fullmatch(uri)
    if match is None:
        raise ValueError(f"{uri} is not an image in ECR")
    registry = f"{match['account']}.dkr.ecr.{match['region']}.{match['suffix']}"
    tag = match["tag"] or "TAG"
    local = f"{match['repository']}:{tag}"
    return "\n".join(
        (
            "Build it, and push it:",
            f"  aws ecr create-repository --region {match['region']} --repository-name {match['repository']}",
            f"  docker build --platform linux/amd64 --provenance=false --target {_target(local)} -t {local} .",
            f"  aws ecr get-login-password --region {match['region']} | "
            f"docker login --username AWS --password-stdin {registry}",
            f"  docker tag {local} {registry}/{local}",
            f"  docker push {registry}/{local}",
        )
    )


def _target(name: str) -> str:
    """Guess the Dockerfile's target from the image's name."""
    words = re.split("[^a-z0-9]+", name)
    return "cpu" if "cpu" in words else "lmi" if "vllm" in words else "trtllm"


def _uri(image: Image, region: str, account: str | None) -> str:
    if image.uri is not None:
        return image.uri
    if image.aws is not None:
        images = table("image_accounts")
        if region not in images["registries"]:
            raise SpecError(
                f"image.aws: no AWS registry is known in {region}",
                "Give image.uri, from github.com/aws/deep-learning-containers (available_images.md).",
            )
        account = images["registries"][region]
        return f"{account}.dkr.ecr.{region}.{registry_suffix(region)}/djl-inference:{_aws_tag(image)}"
    tag = image.tag or _own_version()
    return f"{account}.dkr.ecr.{region}.{registry_suffix(region)}/{image.repository}:{tag}"


def _aws_tag(image: Image) -> str:
    """Return the whole tag: the known one of a version such as `0.36.0`; by default the newest."""
    tags: dict[str, str] = table("image_accounts")[_TAGS[str(image.aws)]]
    newest = max(tags, key=lambda version: [int(part) for part in version.split(".")])
    tag = image.tag or newest
    return tags.get(tag, tag)


def _own_version() -> str:
    try:
        return importlib.metadata.version("lmi-handler")
    except importlib.metadata.PackageNotFoundError:
        raise SpecError("image.tag: must be given: lmi-handler is not installed, so it has no version") from None


def _by_digest(aws: Aws, match: re.Match[str]) -> tuple[str, tuple[str, ...]]:
    """Return the URI by digest, and warnings about the image."""
    try:
        answer = aws.client("ecr").describe_images(
            registryId=match["account"], repositoryName=match["repository"], imageIds=[{"imageTag": match["tag"]}]
        )
    except ClientError as error:
        code = error_code(error)
        if code in ("RepositoryNotFoundException", "ImageNotFoundException"):
            what = "repository" if code.startswith("Repository") else "image"
            raise NotThere(
                f"image: there is no {what} {match['repository']}:{match['tag']} in {match['account']}'s ECR "
                f"of {match['region']}",
                push_instructions(match.string),
            ) from None
        raise
    details: list[dict[str, Any]] = answer["imageDetails"]
    if not details:
        raise DeployError(f"image: ECR has no description of {match.string}")
    detail = details[0]
    warnings = []
    kind = str(detail.get("imageManifestMediaType", ""))
    if "index" in kind or "manifest.list" in kind:
        warnings.append(
            f"{match['repository']}:{match['tag']} is a list of images ({kind}); SageMaker may refuse it: build with "
            "docker build --platform linux/amd64 --provenance=false."
        )
    registry = match.string.split("/", 1)[0]
    return f"{registry}/{match['repository']}@{detail['imageDigest']}", tuple(warnings)
