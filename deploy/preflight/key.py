"""Check that the specification names the customer managed KMS keys that encrypt the resources it uses.

AWS managed keys can be used by the whole account. Customer managed keys must be in the specification, so that the
policies that `lmi deploy iam` prints include them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from botocore.exceptions import ClientError

from deploy.aws import as_deploy_error, error_code
from deploy.errors import NotAllowed
from deploy.preflight.check import Check, Context, ok, warning
from deploy.s3.prefix import Prefix, bucket_and_key

# A missing bucket is reported by the check of the model.
_PLAIN = ("ServerSideEncryptionConfigurationNotFoundError", "NoSuchBucket")
_AWSS = "alias/aws/"


@dataclass(frozen=True)
class Use:
    """The use of one of the KMS keys in `encryption`.

    Attributes:
        option: name of the key's field in `encryption`.
        resource: description of the resource that the key encrypts.
        users: roles and users that need the permissions for the key, as text. `lmi deploy iam` prints the permissions.
        for_existing: whether the resource must already be encrypted with the key. If False, the key is for new data.
        hint: advice to add if the resource is not encrypted with the key.
    """

    option: str
    resource: str
    users: str
    for_existing: bool = True
    hint: str = ""


_DEFAULT = " A bucket's default encryption determines the key of new objects."
_MODEL = Use("model_key", "the model's bucket", "the role and the deployer", hint=_DEFAULT)
_OUTPUT = Use("output_key", "the output's bucket", "the role and the invoker", for_existing=False)
_CAPTURED = Use("capture_key", "captured data", "the role", for_existing=False)
_INPUT = Use("input_key", "batch.input", "the role and the deployer", hint=_DEFAULT)
_TOPICS = Use("topic_key", "the topics of `async`", "the role")
SECRET = Use("secret_key", "model.token_secret", "the role")


def key(context: Context) -> list[Check]:
    """Check the KMS keys of the model, the adapters, the batch input, and the buckets for output and captured data."""
    asynchronous, capture, batch = context.spec.asynchronous, context.spec.capture, context.spec.batch
    outputs = [] if asynchronous is None else [asynchronous.output, asynchronous.failures or asynchronous.output]
    outputs += [] if batch is None else [batch.output]
    objects = [] if batch is None else _of_object(context, Prefix(*bucket_and_key(batch.input)))
    return [
        *compared(context, _INPUT, dict(objects)),
        *compared(context, _MODEL, dict(_of_model(context))),
        *compared(context, _OUTPUT, dict(_of_buckets(context, outputs))),
        *compared(context, _CAPTURED, dict(_of_buckets(context, [capture.output] if capture is not None else []))),
    ]


def topics(context: Context) -> list[Check]:
    """Check that the SNS topics exist, and that the specification names their KMS keys."""
    arns_of = dict(_of_topics(context))
    spec = context.spec
    checks = [
        warning(
            "topics",
            f"{topic} does not exist",
            "Create the topic, or correct async.notify_success, async.notify_error or alarms.notify.",
        )
        for topic in spec.topics
        if topic not in arns_of
    ]
    if spec.alarms is not None and (notify := spec.alarms.notify) in arns_of:
        checks += _of_alarms(context, str(notify), arns_of[str(notify)])
    topics_of_spec = [] if spec.asynchronous is None else spec.asynchronous.topics
    keys = {topic: customers(context, arns_of[topic]) for topic in topics_of_spec if topic in arns_of}
    return checks + compared(context, _TOPICS, keys)


def compared(context: Context, use: Use, keys: Mapping[str, str | None]) -> list[Check]:
    """Compare a key of `encryption` with the keys of existing resources.

    A difference is reported only as a warning, because a key's own policy may allow its use.

    Args:
        keys: the ARN of each resource's customer managed key, or None if the resource has no such key.
    """
    option = getattr(context.spec.encryption, use.option)
    expected = None if option is None else _described(context, option).get("Arn", option)
    checks = [
        warning("key", f"{name} is encrypted with {arn}, which is not in the specification", _advice(use, arn, option))
        for name, arn in keys.items()
        if arn not in (None, expected)
    ]
    if expected is not None and expected in keys.values():
        checks.append(ok("key", f"{option} encrypts {use.resource}"))
    elif option is not None and keys and use.for_existing:
        says = f"encryption.{use.option}: {option} does not encrypt {', '.join(keys)}"
        checks.append(warning("key", says, f"Correct encryption.{use.option}, or omit it.{use.hint}"))
    return checks


def _advice(use: Use, arn: str | None, option: str | None) -> str:
    if option is None:
        return f"Set encryption.{use.option}: {arn}, and give {use.users} the permissions that `lmi deploy iam` prints."
    return f"Correct encryption.{use.option}, or also grant {use.users} kms:Decrypt on {arn}."


def _of_model(context: Context) -> Iterator[tuple[str, str | None]]:
    """Yield an object of the model in S3, and the buckets of the upload and of adapters, each with its KMS key."""
    model, components = context.spec.model, context.spec.components
    uris = [adapter.artifact for component in components for adapter in component.adapters]
    uris += [model.upload] if model.upload is not None else []
    if model.s3 is not None:
        yield from _of_object(context, Prefix.of(model.s3))
    yield from _of_buckets(context, uris)


def _of_object(context: Context, prefix: Prefix) -> Iterator[tuple[str, str | None]]:
    s3 = context.aws.client("s3")
    try:
        for item in s3.list_objects_v2(Bucket=prefix.bucket, Prefix=prefix.key, MaxKeys=1).get("Contents", []):
            head = s3.head_object(Bucket=prefix.bucket, Key=item["Key"])
            yield f"s3://{prefix.bucket}/{item['Key']}", customers(context, head.get("SSEKMSKeyId"))
    except ClientError as failure:
        if error_code(failure) not in _PLAIN:
            raise


def _of_buckets(context: Context, uris: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each URI's bucket and the KMS key of its default encryption, or None."""
    for bucket in dict.fromkeys(bucket_and_key(uri)[0] for uri in uris):
        yield f"s3://{bucket}", _of_bucket(context, bucket)


def _of_bucket(context: Context, bucket: str) -> str | None:
    try:
        encryption = context.aws.client("s3").get_bucket_encryption(Bucket=bucket)
    except ClientError as failure:
        if error_code(failure) in _PLAIN:
            return None
        raise
    rules = encryption["ServerSideEncryptionConfiguration"]["Rules"]
    defaults = [rule.get("ApplyServerSideEncryptionByDefault", {}) for rule in rules]
    return customers(context, next((rule["KMSMasterKeyID"] for rule in defaults if "KMSMasterKeyID" in rule), None))


def _of_topics(context: Context) -> Iterator[tuple[str, str | None]]:
    """Yield each topic that exists, with its KMS key in SNS's notation (an ARN, ID or alias), or None."""
    sns = context.aws.client("sns")
    for topic in context.spec.topics:
        try:
            attributes = sns.get_topic_attributes(TopicArn=topic)["Attributes"]
        except sns.exceptions.NotFoundException:
            continue
        yield topic, attributes.get("KmsMasterKeyId")


def _of_alarms(context: Context, topic: str, name: str | None) -> Iterator[Check]:
    """Yield checks of a topic's key for CloudWatch, which publishes with its own service principal.

    Args:
        name: the topic's KMS key as an ARN, ID or alias, or None.
    """
    needs = "cloudwatch.amazonaws.com kms:Decrypt and kms:GenerateDataKey"
    arn = customers(context, name)
    if arn is not None:
        yield ok("topics", f"{topic} is encrypted with {arn}, whose key policy must allow {needs}")
    elif name is not None:
        says = f"{topic} is encrypted with an AWS managed key, so CloudWatch cannot publish alarms to it"
        yield warning("topics", says, f"Encrypt the topic (alarms.notify) with a key whose policy allows {needs}.")


def customers(context: Context, name: str | None) -> str | None:
    """Return the ARN of a key if it is customer managed, or None otherwise.

    Args:
        name: the ARN, ID or alias of a KMS key, or None.
    """
    if name is None or _AWSS in name:
        return None
    description = _described(context, name)
    return None if description.get("KeyManager") == "AWS" else description.get("Arn", name)


def _described(context: Context, name: str) -> dict[str, str]:
    """Return the description of a key. It is empty if the key does not exist or the caller may not read it."""
    kms = context.aws.client("kms")
    try:
        return dict(kms.describe_key(KeyId=name)["KeyMetadata"])
    except ClientError as failure:
        if isinstance(as_deploy_error(failure), NotAllowed) or error_code(failure) == "NotFoundException":
            return {}
        raise
