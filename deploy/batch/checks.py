"""Check a batch before its job costs money: the places, the lines, the quota. Read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from deploy.aws import Aws, as_deploy_error, pages
from deploy.batch.job import amounts, settings_of
from deploy.errors import DeployError, NotAllowed
from deploy.preflight.check import Check, error, ok, warning
from deploy.resolve.decision import Decision
from deploy.s3.prefix import Prefix, check_region
from deploy.s3.upload import counted, human
from deploy.s3.uri import bucket_and_key
from deploy.spec import Spec

_MB = 2**20
_MOST_READ = 2**30  # bytes of input to read for lines that are too long
_CHUNK = 2**20
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip", ".zst")


class Input(NamedTuple):
    """An object of the input."""

    key: str
    size: int


def checks(aws: Aws, spec: Spec, decision: Decision) -> list[Check]:
    """Run every check of a batch; where reading is not allowed, a warning says so.

    Raises:
        BotoCoreError: AWS cannot be reached.
    """
    found: list[Check] = []
    for name, check in (("input", _input), ("output", _output), ("quota", _quota)):
        found += _run(name, check, aws, spec, decision)
    return found


def _run(
    name: str, check: Callable[[Aws, Spec, Decision], Iterable[Check]], aws: Aws, spec: Spec, decision: Decision
) -> Iterator[Check]:
    try:
        yield from check(aws, spec, decision)
    except ClientError as failure:
        deploy_error = as_deploy_error(failure)
        says = f"not looked at: {deploy_error}"
        if isinstance(deploy_error, NotAllowed):
            says = f"not looked at: {failure.operation_name} is not allowed"
        yield warning(name, says, deploy_error.advice)
    except DeployError as failure:
        yield error(name, str(failure), failure.advice)


def inputs(aws: Aws, uri: str) -> list[Input]:
    """List the objects that a job reads: all whose keys begin with the URI's."""
    bucket, key = bucket_and_key(uri)
    found = pages(aws, "s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=key)
    return [Input(item["Key"], item["Size"]) for item in found]


def _input(aws: Aws, spec: Spec, decision: Decision) -> Iterator[Check]:
    batch = settings_of(spec)
    check_region(aws, Prefix(*bucket_and_key(batch.input)), "batch.input")
    there = inputs(aws, batch.input)
    full = [item for item in there if item.size]
    if not full:
        says = f"{batch.input}: " + (f"{counted(len(there), 'object')}, all empty" if there else "there is no object")
        yield error("input", says, "Give --input an object of JSON lines, or a prefix of such objects.")
        return
    yield ok("input", f"{batch.input}: {counted(len(full), 'object')}, {human(sum(item.size for item in full))}")
    if len(full) < (count := spec.instance.count):
        says = f"{counted(len(full), 'object')} for {counted(count, 'instance')}: "
        says += "one instance reads an object, the others idle"
        yield warning("input", says, "Split the objects, or give a smaller --count.")
    if compressed := [item.key for item in full if item.key.endswith(_COMPRESSED)]:
        says = f"{compressed[0]} seems to be compressed, and {len(compressed) - 1} more"
        yield warning("input", says, "Store the lines as they are: each one is sent as it stands.")
    yield from _lines(aws, spec, bucket_and_key(batch.input)[0], full)


def _lines(aws: Aws, spec: Spec, bucket: str, there: Sequence[Input]) -> Iterator[Check]:
    """Look for lines that are beyond the limit, in objects that may have one, up to a total."""
    most = amounts(spec)[1] * _MB
    left, unread = _MOST_READ, 0
    for item in there:
        if item.size <= most:
            continue
        if item.size > left:
            unread += 1
            continue
        left -= item.size
        body = aws.client("s3").get_object(Bucket=bucket, Key=item.key)["Body"]
        if (found := too_long(iter(lambda: body.read(_CHUNK), b""), most)) is not None:  # noqa: B023
            yield error(
                "input",
                f"s3://{bucket}/{item.key}: line {found} has more than {amounts(spec)[1]} MB: its file would fail",
                "Raise batch.payload_mb (at most 100; times batch.concurrency at most 100), or shorten the line.",
            )
    if unread:
        says = f"{counted(unread, 'object')} too large to read here: a line above {amounts(spec)[1]} MB fails its file"
        yield warning("input", says)


def too_long(chunks: Iterable[bytes], most: int) -> int | None:
    """Return the number of the first line of more than `most` bytes, its end included; None: there is none."""
    number, length = 1, 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        length += len(first)
        for other in others:
            if length + 1 > most:
                return number
            number, length = number + 1, len(other)
        if length > most:
            return number
    return None


def _output(aws: Aws, spec: Spec, decision: Decision) -> Iterator[Check]:
    batch = settings_of(spec)
    bucket, key = bucket_and_key(batch.output)
    check_region(aws, Prefix(bucket, key), "batch.output")
    source, given = bucket_and_key(batch.input)
    if source == bucket and f"{key.rstrip('/')}/".startswith(given):
        yield error(
            "output",
            f"{batch.output} is within the input, {batch.input}: the next job would read these answers",
            "Give --output a prefix beside it.",
        )
        return
    if there := answers(aws, batch.output):
        says = f"{batch.output} has {len(there)} answers already, e.g. {there[0]}"
        yield warning("output", says, "Those of the same objects are replaced.")
        return
    yield ok("output", batch.output)


def answers(aws: Aws, uri: str, since: Any = None) -> list[str]:
    """Return the URIs of the answers below an output.

    Args:
        since: a time; leave out what is older.
    """
    bucket, key = bucket_and_key(uri)
    folder = f"{key.rstrip('/')}/" if key else ""
    found = pages(aws, "s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=folder)
    there = (item for item in found if item["Key"].endswith(".out"))
    return [f"s3://{bucket}/{item['Key']}" for item in there if since is None or item["LastModified"] >= since]


def _quota(aws: Aws, spec: Spec, decision: Decision) -> Iterator[Check]:
    name, needed = f"{decision.instance_type} for transform job usage", spec.instance.count
    quotas = pages(aws, "service-quotas", "list_service_quotas", "Quotas", ServiceCode="sagemaker")
    value = next((quota["Value"] for quota in quotas if quota["QuotaName"] == name), None)
    if value is None:
        yield warning("quota", f"none named {name!r} was found", "See Service Quotas, Amazon SageMaker.")
    elif value < needed:
        advice = f"Ask for {needed} of `{name}` in Service Quotas (Amazon SageMaker), or take another --instance-type."
        yield error("quota", f"{name}: {value:g}, and {needed} are needed", advice)
    else:
        yield ok("quota", f"{name}: {value:g}")
