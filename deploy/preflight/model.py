"""Check the model: a directory to upload, a prefix in S3, or a hub's model."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.preflight.check import Check, Context, Verdict, error, ok, warning
from deploy.preflight.key import SECRET, compared, customers
from deploy.resolve.model.hub import endpoint
from deploy.s3.prefix import Prefix, check_region, objects, reader
from deploy.s3.prefix_lint import Finding, Level, lint
from deploy.s3.upload import human, plan_upload

_DEMO = "demo"  # the handler's name for its small demo model


def model(context: Context) -> list[Check]:
    spec = context.spec.model
    how = {"isolated": context.spec.network.isolated, "own_code": context.spec.own_code}
    if spec.directory is not None and spec.upload is not None:
        planned = plan_upload(context.aws, spec.directory, spec.upload, **how)
        checks = [ok("model", f"{spec.path} to {planned.prefix}: {planned}")]
        if planned.foreign:
            says = f"{planned.prefix} holds {len(planned.foreign)} more objects, e.g. {planned.foreign[0]}"
            checks.append(warning("model", says, "SageMaker loads them too: delete what is not the model's."))
        return checks + _as_checks([*planned.findings, *planned.foreign_findings])
    if spec.s3 is not None:
        prefix = Prefix.of(spec.s3)
        check_region(context.aws, prefix)
        entries = objects(context.aws, prefix)
        summary = f"{prefix}: {len(entries)} objects, {human(sum(entry.size for entry in entries))}"
        return [ok("model", summary), *_as_checks(lint(entries, reader(context.aws, prefix), **how))]
    if spec.id == _DEMO:
        return [ok("model", "demo: in the image, or fetched by the container from PyPI")]
    return [_hub(context, str(spec.id))]


def _as_checks(findings: Sequence[Finding]) -> list[Check]:
    verdicts = {Level.ERROR: Verdict.ERROR, Level.WARNING: Verdict.WARNING}
    return [Check("model", verdicts[finding.level], str(finding), finding.advice) for finding in findings]


def _hub(context: Context, model_id: str) -> Check:
    """Check the hub. The result is never an error: the container's network is another one. No token is sent."""
    if context.fetch is None:
        return ok("model", f"{model_id}, fetched by the container from the hub (not asked)")
    parts = model_id.split("/", 2)  # OWNER/MODEL/FILE.gguf names a file of the model
    repository, file = "/".join(parts[:2]), "".join(parts[2:]) or "config.json"
    try:
        status, _ = context.fetch("HEAD", f"{endpoint()}/{repository}/resolve/main/{file}", {})
    except OSError:
        return ok("model", f"{model_id} (the hub cannot be reached from here)")
    if status in (401, 403):
        if context.spec.model.token_secret is not None:
            return ok("model", f"{model_id} is gated; the container has model.token_secret for it")
        return warning(
            "model",
            f"the hub does not give {model_id} to everyone (status {status})",
            "Accept its licence, and put a token's secret into model.token_secret.",
        )
    if status == 404:
        return warning("model", f"the hub has no {file} of {repository}", "See that model.id is right.")
    return ok("model", f"{model_id} on the hub")


def secret(context: Context) -> Check | list[Check] | None:
    """Check that the token's secret exists in this region, and its key. Its value is not read."""
    arn = context.spec.model.token_secret
    if arn is None:
        return None
    region = arn.split(":")[3]
    if region != context.aws.region:
        return error("secret", f"{arn} is in {region}", f"Make one in {context.aws.region} (model.token_secret).")
    client = context.aws.client("secretsmanager")
    try:
        found = client.describe_secret(SecretId=arn)
    except client.exceptions.ResourceNotFoundException:
        return error("secret", f"{arn} does not exist", "Correct model.token_secret, or make the secret.")
    return [
        ok("secret", arn.rpartition(":")[2]),
        *compared(context, SECRET, {arn: customers(context, found.get("KmsKeyId"))}),
    ]
