"""Check that the specification names the customer's KMS keys that encrypt what it uses.

AWS's own keys can be used by the whole account; a customer's key must be in the policies that `lmi deploy iam` prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from botocore.exceptions import ClientError

from deploy.aws import as_deploy_error, error_code
from deploy.errors import NotAllowed
from deploy.preflight.check import Check, Context, ok, warning
from deploy.s3.prefix import Prefix, bucket_and_key

_PLAIN = ("ServerSideEncryptionConfigurationNotFoundError", "NoSuchBucket")  # the check of the model names the latter
_AWSS = "alias/aws/"


@dataclass(frozen=True)
class Use:
    """The purpose of a key of `encryption`.

    Attributes:
        option: its name there.
        what: what it encrypts.
        users: who needs the printed policies for it.
        at_rest: whether it already encrypts existing data; otherwise AWS uses it only for new data.
        hint: further advice if it does not.
    """

    option: str
    what: str
    users: str
    at_rest: bool = True
    hint: str = ""


_DEFAULT = " A bucket's default encryption chooses the key of new objects."
_MODEL = Use("model_key", "the model's bucket", "the role and the deployer", hint=_DEFAULT)
_ANSWERS = Use("output_key", "the answers' bucket", "the role and the invoker", at_rest=False)
_CAPTURED = Use("capture_key", "the files of capture", "the role", at_rest=False)
_INPUT = Use("input_key", "batch.input", "the role and the deployer", hint=_DEFAULT)
_TOPICS = Use("topic_key", "the topics of async", "the role")
SECRET = Use("secret_key", "model.token_secret", "the role")


def key(context: Context) -> list[Check]:
    """Check the keys of the model and its adapters, and of the buckets of answers, captures and a batch's input."""
    asynchronous, capture, batch = context.spec.asynchronous, context.spec.capture, context.spec.batch
    answers = [] if asynchronous is None else [asynchronous.output, asynchronous.failures or asynchronous.output]
    answers += [] if batch is None else [batch.output]
    given = [] if batch is None else _of_object(context, Prefix(*bucket_and_key(batch.input)))
    return [
        *compared(context, _INPUT, dict(given)),
        *compared(context, _MODEL, dict(_of_model(context))),
        *compared(context, _ANSWERS, dict(_of_buckets(context, answers))),
        *compared(context, _CAPTURED, dict(_of_buckets(context, [capture.output] if capture is not None else []))),
    ]


def topics(context: Context) -> list[Check]:
    """Check the SNS topics and their keys."""
    found = dict(_of_topics(context))
    spec = context.spec
    checks = [
        warning(
            "topics",
            f"{topic} does not exist",
            "Create it, or correct async.notify_success, async.notify_error or alarms.notify: nobody is notified.",
        )
        for topic in spec.topics
        if topic not in found
    ]
    if spec.alarms is not None and (notify := spec.alarms.notify) in found:
        checks += _of_alarms(context, str(notify), found[str(notify)])
    told = [] if spec.asynchronous is None else spec.asynchronous.topics
    keys = {topic: customers(context, found[topic]) for topic in told if topic in found}
    return checks + compared(context, _TOPICS, keys)


def compared(context: Context, use: Use, found: Mapping[str, str | None]) -> list[Check]:
    """Compare a key of `encryption` with what was found. A difference is not an error: keys have policies of their own.

    Args:
        found: ARNs of the customer's keys, by what they encrypt; None: there is none.
    """
    named = getattr(context.spec.encryption, use.option)
    wanted = None if named is None else _described(context, named).get("Arn", named)
    checks = [
        warning(
            "key", f"{place} is encrypted with {arn}, which the specification does not name", _advice(use, arn, named)
        )
        for place, arn in found.items()
        if arn not in (None, wanted)
    ]
    if wanted is not None and wanted in found.values():
        checks.append(ok("key", f"{named} encrypts {use.what}"))
    elif named is not None and found and use.at_rest:
        says = f"encryption.{use.option} is {named}, but it does not encrypt {', '.join(found)}"
        checks.append(warning("key", says, f"Correct it, or leave it out.{use.hint}"))
    return checks


def _advice(use: Use, arn: str | None, named: str | None) -> str:
    if named is None:
        return f"Set encryption.{use.option}: {arn}, and give {use.users} the permissions that `lmi deploy iam` prints."
    return f"Correct encryption.{use.option}, or allow kms:Decrypt on {arn} to {use.users}, too."


def _of_model(context: Context) -> Iterator[tuple[str, str | None]]:
    """Yield encrypted resources with their keys: an object of a model in S3, the buckets of uploads and adapters."""
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
    """Yield the bucket of each URI, with its default key."""
    for bucket in dict.fromkeys(bucket_and_key(uri)[0] for uri in uris):
        yield f"s3://{bucket}", _of_bucket(context, bucket)


def _of_bucket(context: Context, bucket: str) -> str | None:
    try:
        answer = context.aws.client("s3").get_bucket_encryption(Bucket=bucket)
    except ClientError as failure:
        if error_code(failure) in _PLAIN:
            return None
        raise
    rules = answer["ServerSideEncryptionConfiguration"]["Rules"]
    defaults = [rule.get("ApplyServerSideEncryptionByDefault", {}) for rule in rules]
    return customers(context, next((one["KMSMasterKeyID"] for one in defaults if "KMSMasterKeyID" in one), None))


def _of_topics(context: Context) -> Iterator[tuple[str, str | None]]:
    """Yield each topic that exists, with its key as SNS names it."""
    sns = context.aws.client("sns")
    for topic in context.spec.topics:
        try:
            attributes = sns.get_topic_attributes(TopicArn=topic)["Attributes"]
        except sns.exceptions.NotFoundException:
            continue
        yield topic, attributes.get("KmsMasterKeyId")


def _of_alarms(context: Context, topic: str, name: str | None) -> Iterator[Check]:
    """Yield checks of the topic's key for CloudWatch, which publishes as itself and not for a caller."""
    needs = "cloudwatch.amazonaws.com kms:Decrypt and kms:GenerateDataKey"
    arn = customers(context, name)
    if arn is not None:
        yield ok("topics", f"{topic} is encrypted with {arn}, whose own policy must allow {needs}")
    elif name is not None:
        says = f"{topic} is encrypted with AWS's own key, with which CloudWatch cannot publish alarms"
        yield warning("topics", says, f"Give the topic (alarms.notify) a key whose policy allows {needs}.")


def customers(context: Context, name: str | None) -> str | None:
    """Return the ARN of a customer's key; None: it is AWS's own, which the whole account may use."""
    if name is None or _AWSS in name:
        return None
    found = _described(context, name)
    return None if found.get("KeyManager") == "AWS" else found.get("Arn", name)


def _described(context: Context, name: str) -> dict[str, str]:
    """Return a key's description; empty: it is not for this caller, or of another account."""
    kms = context.aws.client("kms")
    try:
        return dict(kms.describe_key(KeyId=name)["KeyMetadata"])
    except ClientError as failure:
        if isinstance(as_deploy_error(failure), NotAllowed) or error_code(failure) == "NotFoundException":
            return {}
        raise
