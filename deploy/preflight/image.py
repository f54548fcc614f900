"""Check the image: it exists, in this region, for amd64, and is not too large."""

from __future__ import annotations

import json
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import error_code
from deploy.preflight.check import Check, Context, error, ok, warning
from deploy.resolve.ecr import ECR_URI

_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_OCI = "application/vnd.oci.image.manifest.v1+json"
_MANIFESTS = (_OCI, "application/vnd.docker.distribution.manifest.v2+json")
_LARGE = 20e9  # bytes: pulling a larger image takes minutes of each start
_BUILD = "docker buildx build --platform linux/amd64 --provenance=false --output type=docker -t URI ."
_FORMAT = f"{_BUILD} Or: buildah build --format docker; podman push --format v2s2."


def image(context: Context) -> Check:
    uri = context.decision.image
    match = ECR_URI.fullmatch(uri)
    if match is None:
        return error("image", f"{uri} is not in ECR", "SageMaker pulls from ECR only: push it there, set image.uri.")
    account, region, repository, tag, digest = match.group("account", "region", "repository", "tag", "digest")
    if region != context.aws.region:
        return error(
            "image",
            f"{uri} is in {region}, the endpoint in {context.aws.region}",
            f"Push it to ECR in {context.aws.region}, or set region: {region}.",
        )
    which = {"registryId": account, "repositoryName": repository}
    named = [{"imageDigest": digest} if digest else {"imageTag": tag or "latest"}]
    ecr = context.aws.client("ecr")
    try:
        result = ecr.describe_images(**which, imageIds=named)["imageDetails"][0]
    except ClientError as failure:
        if error_code(failure) in ("ImageNotFoundException", "RepositoryNotFoundException"):
            return error(
                "image", f"{uri} does not exist", "Push it, or correct image.uri (image.repository, image.tag)."
            )
        if account != context.decision.account:  # AWS's own repository, which users may not list
            return ok("image", f"{uri} (of another account: not looked at)")
        raise
    size = result.get("imageSizeInBytes", 0)
    return _platform(context, which, result["imageDigest"]) or (
        warning("image", f"{size / 1e9:.1f} GB", "Each instance pulls it at its start; smaller layers start sooner.")
        if size > _LARGE
        else ok("image", f"{repository}@{result['imageDigest'][:19]}, {size / 1e9:.1f} GB")
    )


def _platform(context: Context, which: dict[str, Any], digest: str) -> Check | None:
    """Check the image's platform; None: unknown."""
    ecr = context.aws.client("ecr")
    got = ecr.batch_get_image(**which, imageIds=[{"imageDigest": digest}], acceptedMediaTypes=[*_INDEXES, *_MANIFESTS])
    if not got["images"]:
        return None
    manifest = json.loads(got["images"][0]["imageManifest"])
    if manifest.get("mediaType") in _INDEXES or "manifests" in manifest:
        return error("image", "an index of several platforms, which SageMaker does not take", _BUILD)
    architecture = _architecture(context, which, manifest)
    if architecture not in (None, "amd64"):
        return error("image", f"built for {architecture}; SageMaker's GPU hosts are amd64", _BUILD)
    if _OCI in (got["images"][0].get("imageManifestMediaType"), manifest.get("mediaType")):
        says = "a manifest in OCI's format, which users report that SageMaker refuses (amazon-sagemaker-feedback#180)"
        return warning("image", says, _FORMAT)
    return None


def _architecture(context: Context, which: dict[str, Any], manifest: dict[str, Any]) -> str | None:
    """Read the processor from the image's configuration; None: it cannot be fetched."""
    digest = manifest.get("config", {}).get("digest")
    if digest is None or context.fetch is None:
        return None
    try:
        got = context.aws.client("ecr").get_download_url_for_layer(**which, layerDigest=digest)
        status, body = context.fetch("GET", got["downloadUrl"], {})
        return str(json.loads(body)["architecture"]) if status == 200 else None
    except (ClientError, OSError, ValueError, KeyError):
        return None
