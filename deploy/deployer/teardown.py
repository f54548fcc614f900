"""What `lmi deploy down` removes beside the resources, when asked to: logs, and model data that was uploaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from botocore.exceptions import ClientError

from deploy.aws import Aws, is_missing
from deploy.deployer.calls import call, show
from deploy.errors import Refused
from deploy.operations.logs import component_group, endpoint_group
from deploy.resources.resource import Kind
from deploy.s3.parts import digest_there
from deploy.s3.prefix import Prefix, delete, objects

_WORKERS = 8  # questions to S3 at once


def log_groups(endpoint: str, components: Iterable[str]) -> list[str]:
    return [endpoint_group(endpoint), *(component_group(name) for name in components)]


def delete_logs(aws: Aws, groups: Iterable[str]) -> Iterator[str]:
    """Delete them; yields those that were there."""
    for group in groups:
        try:
            call(aws, "logs", "delete_log_group", {"logGroupName": group})
        except ClientError as error:
            if not is_missing(error):
                raise
        else:
            yield group


def users_of(aws: Aws, uri: str) -> dict[str, str]:
    """All models of the account and region whose data lies below the prefix, or above it: their names, and where."""
    pages = aws.client("sagemaker").get_paginator("list_models").paginate()
    names = [one["ModelName"] for page in pages for one in page["Models"]]
    with ThreadPoolExecutor(_WORKERS) as pool:
        shown = list(pool.map(lambda name: show(aws, Kind.MODEL, (name,)), names))
    found = {}
    for name, said in zip(names, shown, strict=True):
        for container in [said.get("PrimaryContainer", {}), *said.get("Containers", ())] if said is not None else ():
            where = container.get("ModelDataSource", {}).get("S3DataSource", {}).get("S3Uri")
            where = where or container.get("ModelDataUrl")
            if where and (where.startswith(uri) or uri.startswith(where)):
                found[name] = str(where)
    return found


def check_users(aws: Aws, uri: str, own: Iterable[str]) -> None:
    """Args: own: models that go before the data.

    Raises:
        Refused: another model loads from there.
    """
    others = {name: where for name, where in users_of(aws, uri).items() if name not in set(own)}
    if others:
        name, where = sorted(others.items())[0]
        raise Refused(
            f"{uri} is also what the model {name} loads from ({where})"
            + (f", and {len(others) - 1} more" if len(others) > 1 else ""),
            "Leave --data out, or remove those first.",
        )


def delete_data(aws: Aws, uri: str) -> tuple[int, int]:
    """Delete the objects below the prefix that `up` uploaded (those that bear its digest), and unfinished uploads.

    Returns:
        How many were deleted, and how many of others are still there.

    Raises:
        Failed: S3 kept some.
    """
    prefix = Prefix.of(uri)
    s3 = aws.client("s3")
    there = objects(aws, prefix)
    with ThreadPoolExecutor(_WORKERS) as pool:
        digests = list(pool.map(lambda entry: digest_there(aws, prefix, entry.name), there))
    ours = [entry.name for entry, digest in zip(there, digests, strict=True) if digest is not None]
    delete(aws, prefix, ours)
    for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=prefix.bucket, Prefix=prefix.key):
        for one in page.get("Uploads", ()):  # a killed run's parts, which cost as objects do
            s3.abort_multipart_upload(Bucket=prefix.bucket, Key=one["Key"], UploadId=one["UploadId"])
    return len(ours), len(there) - len(ours)
