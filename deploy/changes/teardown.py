"""What `lmi deploy down` removes beside the resources, when asked to: logs, and model data that was uploaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from botocore.exceptions import ClientError

from deploy.aws import Aws, is_missing
from deploy.changes.calls import call
from deploy.running.logs import component_group, endpoint_group
from deploy.uploads.parts import digest_there
from deploy.uploads.s3 import Prefix, delete, objects

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


def delete_data(aws: Aws, uri: str) -> tuple[int, int]:
    """Delete the objects below the prefix that `up` uploaded: those that bear its digest.

    Returns:
        How many were deleted, and how many of others are still there.

    Raises:
        Failed: S3 did not delete one.
    """
    prefix = Prefix.of(uri)
    there = objects(aws, prefix)
    with ThreadPoolExecutor(_WORKERS) as pool:
        digests = list(pool.map(lambda entry: digest_there(aws, prefix, entry.name), there))
    ours = [entry.name for entry, digest in zip(there, digests, strict=True) if digest is not None]
    delete(aws, prefix, ours)
    return len(ours), len(there) - len(ours)
