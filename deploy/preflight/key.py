"""Check that the specification names the KMS key with which S3 encrypts the model and its adapters."""

from __future__ import annotations

from collections.abc import Iterator

from botocore.exceptions import ClientError

from deploy.aws import as_deploy_error, error_code
from deploy.errors import NotAllowed
from deploy.preflight.check import Check, Context, ok, warning
from deploy.s3.prefix import Prefix
from deploy.s3.uri import bucket_and_key

_PLAIN = ("ServerSideEncryptionConfigurationNotFoundError", "NoSuchBucket")  # the check of the model names the latter


def key(context: Context) -> list[Check]:
    """Check the key. A difference is no error: a key's own policy may allow its use too."""
    named = context.spec.encryption.model_key
    wanted = None if named is None else _arn(context, named)
    found = dict(_found(context))
    checks = [
        warning("key", f"{place} is encrypted with {arn}, which the specification does not name", _advice(arn, named))
        for place, arn in found.items()
        if arn not in (None, wanted)
    ]
    if wanted is not None and wanted in found.values():
        checks.append(ok("key", f"{named} encrypts the model's bucket"))
    elif named is not None and found:
        says = f"encryption.model_key is {named}, and it does not encrypt {', '.join(found)}"
        advice = "Correct it, or leave it out. A bucket's default encryption chooses the key of new objects."
        checks.append(warning("key", says, advice))
    return checks


def _advice(arn: str | None, named: str | None) -> str:
    if named is None:
        return f"Set encryption.model_key: {arn}, and give the role and the deployer what `lmi deploy iam` prints."
    return f"Correct encryption.model_key, or allow kms:Decrypt on {arn} to the role, too."


def _found(context: Context) -> Iterator[tuple[str, str | None]]:
    """Yield what is encrypted, with the ARN of its key; None: S3's own key, or AWS's.

    That is an object of a model that is in S3, and the bucket of what is uploaded and of adapters.
    """
    model, components = context.spec.model, context.spec.components
    uris = [adapter.artifact for component in components for adapter in component.adapters]
    uris += [model.upload] if model.upload is not None else []
    if model.s3 is not None:
        yield from _of_object(context, Prefix.of(model.s3))
    for bucket in dict.fromkeys(bucket_and_key(uri)[0] for uri in uris):
        yield f"s3://{bucket}", _of_bucket(context, bucket)


def _of_object(context: Context, prefix: Prefix) -> Iterator[tuple[str, str | None]]:
    s3 = context.aws.client("s3")
    try:
        for item in s3.list_objects_v2(Bucket=prefix.bucket, Prefix=prefix.key, MaxKeys=1).get("Contents", []):
            head = s3.head_object(Bucket=prefix.bucket, Key=item["Key"])
            yield f"s3://{prefix.bucket}/{item['Key']}", _own(context, head.get("SSEKMSKeyId"))
    except ClientError as failure:
        if error_code(failure) not in _PLAIN:
            raise


def _of_bucket(context: Context, bucket: str) -> str | None:
    try:
        answer = context.aws.client("s3").get_bucket_encryption(Bucket=bucket)
    except ClientError as failure:
        if error_code(failure) in _PLAIN:
            return None
        raise
    rules = answer["ServerSideEncryptionConfiguration"]["Rules"]
    defaults = [rule.get("ApplyServerSideEncryptionByDefault", {}) for rule in rules]
    return _own(context, next((one["KMSMasterKeyID"] for one in defaults if "KMSMasterKeyID" in one), None))


def _own(context: Context, name: str | None) -> str | None:
    """Return the ARN of a customer's key; None: it is AWS's, which everybody of the account may use."""
    if name is None:
        return None
    key = _described(context, name)
    return None if key.get("KeyManager") == "AWS" else key.get("Arn", name)


def _arn(context: Context, name: str) -> str:
    return _described(context, name).get("Arn", name)


def _described(context: Context, name: str) -> dict[str, str]:
    """Return a key's description; empty: it is not for this caller, or of another account."""
    kms = context.aws.client("kms")
    try:
        return dict(kms.describe_key(KeyId=name)["KeyMetadata"])
    except ClientError as failure:
        if isinstance(as_deploy_error(failure), NotAllowed) or error_code(failure) == "NotFoundException":
            return {}
        raise
