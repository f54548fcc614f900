"""Whether the model can be had: a directory that is to be uploaded, a prefix in S3, or the hub's."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.preflight.check import Check, Given, Verdict, error, ok, warning
from deploy.s3.prefix import Prefix, check_region, objects, reader
from deploy.s3.prefix_lint import Finding, Level, lint
from deploy.s3.upload import human, plan_upload

_HUB = "https://huggingface.co"
_DEMO = "demo"  # the handler's own name for its small model


def model(given: Given) -> list[Check]:
    spec = given.spec.model
    how = {"isolated": given.spec.network.isolated, "own_code": given.spec.own_code}
    if spec.directory is not None and spec.upload is not None:
        planned = plan_upload(given.aws, spec.directory, spec.upload, **how)
        checks = [ok("model", f"{spec.path} to {planned.prefix}: {planned}")]
        if planned.foreign:
            says = f"{planned.prefix} holds {len(planned.foreign)} more objects, e.g. {planned.foreign[0]}"
            checks.append(warning("model", says, "SageMaker loads them too: delete what is not the model's."))
        return checks + _said([*planned.findings, *planned.foreign_findings])
    if spec.s3 is not None:
        prefix = Prefix.of(spec.s3)
        check_region(given.aws, prefix)
        entries = objects(given.aws, prefix)
        summary = f"{prefix}: {len(entries)} objects, {human(sum(entry.size for entry in entries))}"
        return [ok("model", summary), *_said(lint(entries, reader(given.aws, prefix), **how))]
    if spec.id == _DEMO:
        return [ok("model", "demo: in the image, or fetched by the container from PyPI")]
    return [_hub(given, str(spec.id))]


def _said(findings: Sequence[Finding]) -> list[Check]:
    verdicts = {Level.ERROR: Verdict.ERROR, Level.WARNING: Verdict.WARNING}
    return [Check("model", verdicts[finding.level], str(finding), finding.advice) for finding in findings]


def _hub(given: Given, model_id: str) -> Check:
    """Never an error: the network here is not the container's. No token is sent."""
    if given.fetch is None:
        return ok("model", f"{model_id}, fetched by the container from the hub (not asked)")
    try:
        status, _ = given.fetch("HEAD", f"{_HUB}/{model_id}/resolve/main/config.json", {})
    except OSError:
        return ok("model", f"{model_id} (the hub cannot be reached from here)")
    if status in (401, 403):
        if given.spec.model.token_secret is not None:
            return ok("model", f"{model_id} is gated; the container has model.token_secret for it")
        return warning("model", f"the hub does not give {model_id} to everyone (status {status})",
                       "Accept its licence, and put a token's secret into model.token_secret.")  # fmt: skip
    if status == 404:
        return warning("model", f"the hub has no config.json of {model_id}", "See that model.id is right.")
    return ok("model", f"{model_id} on the hub")


def secret(given: Given) -> Check | None:
    """The token's secret exists, in this region; its value is not read."""
    arn = given.spec.model.token_secret
    if arn is None:
        return None
    region = arn.split(":")[3]
    if region != given.aws.region:
        return error("secret", f"{arn} is in {region}", f"Make one in {given.aws.region} (model.token_secret).")
    client = given.aws.client("secretsmanager")
    try:
        client.describe_secret(SecretId=arn)
    except client.exceptions.ResourceNotFoundException:
        return error("secret", f"{arn} does not exist", "Correct model.token_secret, or make the secret.")
    return ok("secret", arn.rpartition(":")[2])
