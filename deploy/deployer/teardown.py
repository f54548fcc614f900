"""Delete logs and uploaded model data on request (`lmi deploy down --logs --data`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from deploy.aws import Aws, pages, unless_missing
from deploy.deployer.calls import call, show
from deploy.errors import Refused
from deploy.operations.logs import component_group, endpoint_group
from deploy.resources.resource import Json, Kind, containers
from deploy.s3.prefix import Prefix, delete, objects
from deploy.s3.upload import object_digest

_WORKERS = 8  # parallel requests to S3


def log_groups(endpoint: str | None, components: Iterable[str]) -> list[str]:
    """Return the log groups of components, and of the endpoint unless it is None."""
    of_endpoint = [endpoint_group(endpoint)] if endpoint is not None else []
    return [*of_endpoint, *(component_group(name) for name in components)]


def delete_logs(aws: Aws, groups: Iterable[str]) -> Iterator[str]:
    """Delete log groups, and yield the names of the groups that existed."""
    for group in groups:
        if unless_missing(partial(call, aws, "logs", "delete_log_group", {"logGroupName": group})) is not None:
            yield group


def users_of(aws: Aws, uri: str) -> dict[str, str]:
    """Return the model data URI of each model whose data overlaps with the prefix, by model name."""
    names = [item["ModelName"] for item in pages(aws, "sagemaker", "list_models", "Models")]
    users = {}
    with ThreadPoolExecutor(_WORKERS) as pool:
        for name, model in zip(names, pool.map(lambda name: show(aws, Kind.MODEL, (name,)), names), strict=True):
            for where in map(data_uri, containers(model or {})):
                if where and (where.startswith(uri) or uri.startswith(where)):
                    users[name] = where
    return users


def data_uri(container: Json) -> str:
    """Return the URI of a container's model data, or "" if it has no model data."""
    data = container.get("ModelDataSource", {}).get("S3DataSource", {})
    return str(data.get("S3Uri") or container.get("ModelDataUrl") or "")


def check_users(aws: Aws, uri: str, deleted_models: Iterable[str]) -> None:
    """Check that no other model loads from the prefix.

    Args:
        deleted_models: names of models that are deleted before the data.

    Raises:
        Refused: another model loads from the prefix.
    """
    users = {name: where for name, where in users_of(aws, uri).items() if name not in set(deleted_models)}
    if users:
        name, where = sorted(users.items())[0]
        raise Refused(
            f"the model {name} also loads from {uri} ({where})"
            + (f", and {len(users) - 1} more" if len(users) > 1 else ""),
            "Omit --data, or delete those models first.",
        )


def delete_data(aws: Aws, uri: str) -> tuple[int, int]:
    """Delete unfinished uploads under the prefix, and the objects whose metadata shows that `up` uploaded them.

    Returns:
        The number of deleted objects, and the number of remaining objects.

    Raises:
        Failed: some objects could not be deleted.
    """
    prefix = Prefix.of(uri)
    entries = objects(aws, prefix)
    with ThreadPoolExecutor(_WORKERS) as pool:
        digests = pool.map(lambda entry: object_digest(aws, prefix, entry.name), entries)
        uploaded = [entry.name for entry, digest in zip(entries, digests, strict=True) if digest is not None]
    delete(aws, prefix, uploaded)
    for item in pages(aws, "s3", "list_multipart_uploads", "Uploads", Bucket=prefix.bucket, Prefix=prefix.key):
        # Uploaded parts of a killed run, which cost as much as objects.
        aws.client("s3").abort_multipart_upload(Bucket=prefix.bucket, Key=item["Key"], UploadId=item["UploadId"])
    return len(uploaded), len(entries) - len(uploaded)
