"""What `lmi deploy down` removes beside the resources, when asked to: logs, and model data that was uploaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from botocore.exceptions import ClientError

from deploy.aws import Aws
from deploy.calls import call, is_missing
from deploy.logs import component_group, endpoint_group
from deploy.s3 import Prefix, objects

_AT_ONCE = 1000  # keys that one DeleteObjects takes


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


def delete_data(aws: Aws, uri: str) -> int:
    """Delete all objects below the prefix.

    Returns:
        How many there were.
    """
    prefix = Prefix.of(uri)
    keys = [f"{prefix.key}{entry.name}" for entry in objects(aws, prefix)]
    for first in range(0, len(keys), _AT_ONCE):
        some = [{"Key": key} for key in keys[first : first + _AT_ONCE]]
        aws.client("s3").delete_objects(Bucket=prefix.bucket, Delete={"Objects": some, "Quiet": True})
    return len(keys)
