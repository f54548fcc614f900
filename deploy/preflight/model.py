"""Check the model (a local directory, a prefix or archive in S3, or a hub model), the secret, and the image."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import error_code
from deploy.preflight.check import Check, Context, Verdict, error, ok, warning
from deploy.preflight.key import SECRET, compared, customers
from deploy.resolve.images import ECR_URI
from deploy.resolve.instances import architecture
from deploy.resolve.model.files import endpoint
from deploy.resources.environment import MODEL_DATA
from deploy.s3.archive import Artifact, read_artifact
from deploy.s3.lint import Finding, Level, lint
from deploy.s3.prefix import ARCHIVE, Prefix, check_region, objects, reader
from deploy.s3.upload import UploadPlan, plan_upload
from deploy.spec.options import is_aws_image
from handler.core.sizes import format_size

_DEMO = "demo"  # the handler's name for its small demo model


def model(context: Context) -> list[Check]:
    spec = context.spec.model
    how = {"isolated": context.spec.network.isolated, "trusts_code": context.spec.trusts_code}
    if spec.directory is not None and spec.upload is not None:
        return _upload(f"{spec.path}", plan_upload(context.aws, spec.directory, spec.upload, **how))
    if spec.s3 is not None and spec.s3.endswith(ARCHIVE):
        return _archive(context, spec.s3)
    if spec.s3 is not None:
        prefix = Prefix.of(spec.s3)
        check_region(context.aws, prefix)
        entries = objects(context.aws, prefix)
        summary = f"{prefix}: {len(entries)} objects, {format_size(sum(entry.size for entry in entries))}"
        return [ok("model", summary), *_as_checks(lint(entries, reader(context.aws, prefix), **how))]
    if spec.id == _DEMO:
        return [ok("model", "demo: included in the image, or downloaded by the container from PyPI")]
    return [_hub(context, str(spec.id))]


def _upload(path: str, planned: UploadPlan) -> list[Check]:
    checks = [ok("model", f"{path} to {planned.prefix}: {planned}")]
    if planned.foreign:
        says = f"{planned.prefix} contains other objects ({len(planned.foreign)}), e.g. {planned.foreign[0]}"
        advice = "SageMaker loads them too. Delete the objects that do not belong to the model."
        checks.append(warning("model", says, advice))
    return checks + _as_checks([*planned.findings, *planned.foreign_findings])


_LARGE_ARCHIVE = 10e9  # bytes; unpacking a larger archive in one thread takes minutes


def _archive(context: Context, uri: str) -> list[Check]:
    """Check the size of an archive, and the files in its first 64 MiB."""
    prefix = Prefix.of(uri)
    check_region(context.aws, prefix)
    size = next((entry.size for entry in objects(context.aws, prefix) if not entry.name), None)
    if size is None:
        return [error("model", f"{uri} does not exist", "Correct model.s3.")]
    checks = [ok("model", f"{uri}: an archive of {format_size(size)}, which SageMaker unpacks")]
    if size >= _LARGE_ARCHIVE:
        says = f"the archive is {format_size(size)}, and each instance unpacks it before it starts the container"
        advice = "An endpoint starts faster from uncompressed files (model.path with model.upload) and needs less disk."
        checks.append(warning("model", says, advice))
    return [*checks, *_contents(context, uri, read_artifact(context.aws, uri))]


def _contents(context: Context, uri: str, read: Artifact) -> Iterator[Check]:
    """Check the beginning of an archive."""
    names_model = any(context.spec.environment.get(name, "").startswith(f"{MODEL_DATA}/") for name in _MODEL_IDS)
    if problem := read.fault or read.problem:
        verdict = warning if read.unseen else error
        yield verdict("model", f"{uri}: {problem}", _PACK)
    elif not read.weights and not names_model and "OPTION_MODEL_ID" not in read.variables:
        yield error("model", f"{uri} contains no weights", _PACK)
    elif read.folder and not names_model and not is_aws_image(context.decision.image):  # LMI searches the directory
        says = f"{uri}: all files are in the directory {read.folder!r}, where the server does not look for them"
        yield error("model", says, f"Set environment.OPTION_MODEL_ID: {MODEL_DATA}/{read.folder}")
    if _SCRIPT in read.other_files and not any(_SCRIPT in value for value in context.spec.environment.values()):
        says = f"{uri} contains {_SCRIPT}, which the server does not run"
        yield warning("model", says, "Move its functions to a file model.py beside the weights.")


_SCRIPT = "inference.py"  # the user's code in PyTorch's containers and in those of Hugging Face's inference toolkit


_MODEL_IDS = ("OPTION_MODEL_ID", "HF_MODEL_ID")
_PACK = "In the model's directory: tar --dereference -czf model.tar.gz *"


def _as_checks(findings: Sequence[Finding]) -> list[Check]:
    verdicts = {Level.ERROR: Verdict.ERROR, Level.WARNING: Verdict.WARNING}
    return [Check("model", verdicts[finding.level], str(finding), finding.advice) for finding in findings]


def _hub(context: Context, model_id: str) -> Check:
    """Check that the hub has the model. No token is sent.

    The result is never an error, because the container's network may differ from that of this machine.
    """
    if context.fetch is None:
        return ok("model", f"{model_id}, downloaded by the container from the hub (not checked)")
    parts = model_id.split("/", 2)  # OWNER/MODEL/FILE.gguf names a file of the model
    repository, file = "/".join(parts[:2]), "".join(parts[2:]) or "config.json"
    try:
        status, _ = context.fetch("HEAD", f"{endpoint()}/{repository}/resolve/main/{file}", {})
    except OSError:
        return warning("model", f"not checked: {model_id}, as the hub cannot be reached from this machine")
    if status in (401, 403):
        if context.spec.model.token_secret is not None:
            return ok("model", f"{model_id} is gated; the container uses the token in model.token_secret")
        return warning(
            "model",
            f"{model_id} is private or gated on the hub (status {status})",
            "Accept its licence, and set model.token_secret to a secret with a token.",
        )
    if status == 404:
        return warning("model", f"{repository} on the hub has no file {file}", "Check model.id.")
    return ok("model", f"{model_id} on the hub")


def secret(context: Context) -> Check | list[Check] | None:
    """Check that the secret with the hub token exists in this region, and check its KMS key. Its value is not read."""
    arn = context.spec.model.token_secret
    if arn is None:
        return None
    region = arn.split(":")[3]
    if region != (here := context.aws.region):
        advice = f"Create the secret in {here}, and correct model.token_secret."
        return error("secret", f"{arn} is in {region}, but the endpoint is in {here}", advice)
    client = context.aws.client("secretsmanager")
    try:
        description = client.describe_secret(SecretId=arn)
    except client.exceptions.ResourceNotFoundException:
        return error("secret", f"{arn} does not exist", "Correct model.token_secret, or create the secret.")
    return [
        ok("secret", arn.rpartition(":")[2]),
        *compared(context, SECRET, {arn: customers(context, description.get("KmsKeyId"))}),
    ]


# -- check that the image exists in this region, is for the host's processors, and is not too large --------------------


_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_OCI = "application/vnd.oci.image.manifest.v1+json"
_MANIFESTS = (_OCI, "application/vnd.docker.distribution.manifest.v2+json")
_LARGE = 20e9  # bytes; pulling a larger image takes minutes at each start
_BUILD = "docker buildx build --platform linux/{} --provenance=false --output type=docker -t URI ."
_FORMAT = f"{_BUILD} Or: buildah build --format docker; podman push --format v2s2."


def image(context: Context) -> Check:
    uri = context.decision.image
    match = ECR_URI.fullmatch(uri)
    if match is None:
        advice = "SageMaker pulls images only from ECR. Push the image to ECR, and correct image.uri."
        return error("image", f"{uri} is not in ECR", advice)
    if match["region"] != context.aws.region:
        advice = f"Push the image to ECR in {context.aws.region}, or set region: {match['region']}."
        return error("image", f"{uri} is in {match['region']}, but the endpoint is in {context.aws.region}", advice)
    which, image_id = _names(match)
    try:
        result = context.aws.client("ecr").describe_images(**which, imageIds=[image_id])["imageDetails"][0]
    except ClientError as failure:
        if error_code(failure) in ("ImageNotFoundException", "RepositoryNotFoundException"):
            advice = "Push the image, or correct image.uri (image.repository, image.tag)."
            return error("image", f"{uri} does not exist", advice)
        if match["account"] != context.decision.account:  # for example AWS's repository, which users may not list
            return ok("image", f"{uri} (in another account, not checked)")
        raise
    size = result.get("imageSizeInBytes", 0)
    return _platform(context, which, result["imageDigest"]) or (
        warning("image", f"the image is {format_size(size)}", "Each instance pulls the image when it starts.")
        if size > _LARGE
        else ok("image", f"{match['repository']}@{result['imageDigest'][:19]}, {format_size(size)}")
    )


def never_pulled(context: Context, denied: Collection[str]) -> str:
    """Return why the role, which is denied these actions, cannot pull an image of its own account, or "".

    The policy of the repository may also allow a pull, but not the login before it.
    """
    match = ECR_URI.fullmatch(context.decision.image)
    in_account = match is not None and match["account"] == context.spec.role.split(":")[4]
    if match is None or not in_account or not any(action.startswith("ecr:") for action in denied):
        return ""
    if "ecr:GetAuthorizationToken" in denied:
        return "so it cannot pull the image"
    which, _ = _names(match)
    try:
        context.aws.client("ecr").get_repository_policy(**which)
    except ClientError as failure:
        if error_code(failure) == "RepositoryPolicyNotFoundException":
            return f"so it cannot pull the image: the repository {match['repository']} has no policy that allows it"
    return ""


def image_labels(context: Context) -> dict[str, str] | None:
    """Return the labels of the image, or None if they cannot be read."""
    match = ECR_URI.fullmatch(context.decision.image)
    if match is None or context.fetch is None:
        return None
    which, image_id = _names(match)
    try:
        got = context.aws.client("ecr").batch_get_image(**which, imageIds=[image_id], acceptedMediaTypes=[*_MANIFESTS])
    except ClientError:  # the image does not exist, or belongs to another account
        return None
    if not got["images"]:
        return None
    configuration = _configuration(context, which, json.loads(got["images"][0]["imageManifest"]))
    return None if configuration is None else (configuration.get("config") or {}).get("Labels") or {}


def _names(match: re.Match[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the names of an image's repository and of the image in it, as ECR's API has them."""
    which = {"registryId": match["account"], "repositoryName": match["repository"]}
    return which, {"imageDigest": match["digest"]} if match["digest"] else {"imageTag": match["tag"] or "latest"}


def _platform(context: Context, which: dict[str, Any], digest: str) -> Check | None:
    """Check the image's platform and manifest. Return None if no problem was found."""
    ecr, host = context.aws.client("ecr"), architecture(context.decision.instance_type)
    got = ecr.batch_get_image(**which, imageIds=[{"imageDigest": digest}], acceptedMediaTypes=[*_INDEXES, *_MANIFESTS])
    if not got["images"]:
        return None
    manifest = json.loads(got["images"][0]["imageManifest"])
    if manifest.get("mediaType") in _INDEXES or "manifests" in manifest:
        return error(
            "image", "the image is an index of several platforms, which SageMaker does not accept", _BUILD.format(host)
        )
    if (built_for := _architecture(context, which, manifest)) not in (None, host):
        says = f"the image is for {built_for}, but {context.decision.instance_type} is an {host} host"
        return error("image", says, f"{_BUILD.format(host)} Or use another instance.type.")
    if _OCI in (got["images"][0].get("imageManifestMediaType"), manifest.get("mediaType")):
        says = "the manifest is in OCI format, which SageMaker may reject (amazon-sagemaker-feedback#180)"
        return warning("image", says, _FORMAT.format(host))
    return None


def _architecture(context: Context, which: dict[str, Any], manifest: dict[str, Any]) -> str | None:
    """Return the processor architecture from the image configuration, or None if it cannot be fetched."""
    configuration = _configuration(context, which, manifest)
    return None if configuration is None else str(configuration["architecture"])


def _configuration(context: Context, which: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Return the image configuration, or None if it cannot be fetched."""
    digest = manifest.get("config", {}).get("digest")
    if digest is None or context.fetch is None:
        return None
    try:
        got = context.aws.client("ecr").get_download_url_for_layer(**which, layerDigest=digest)
        status, body = context.fetch("GET", got["downloadUrl"], {})
        configuration = json.loads(body) if status == 200 else None
        return configuration if isinstance(configuration, dict) and "architecture" in configuration else None
    except (ClientError, OSError, ValueError, KeyError):
        return None
