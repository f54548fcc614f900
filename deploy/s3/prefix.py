"""List, read and delete the objects under an S3 prefix. An archive is a prefix with a single object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, error_code, pages
from deploy.errors import Failed, NotThere, Refused

ARCHIVE = ".tar.gz"
"""Suffix of archives that SageMaker unpacks into the model directory (botocore's ModelDataUrl)."""


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Split an S3 URI into bucket and key. The key is "" if the URI names only a bucket."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


_AT_ONCE = 1000  # maximum number of keys in a DeleteObjects request


@dataclass(frozen=True)
class Entry:
    """A file or object, with its name relative to the directory or prefix and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Prefix:
    """An S3 prefix, such as `s3://bucket/key/`. `key` ends in a slash, is "", or is the key of an archive."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @classmethod
    def of(cls, uri: str) -> Prefix:
        bucket, key = bucket_and_key(uri)
        return cls(bucket, key if not key or key.endswith(("/", ARCHIVE)) else f"{key}/")


def objects(aws: Aws, prefix: Prefix) -> list[Entry]:
    """List the objects under the prefix, with names relative to it.

    Raises:
        NotThere: the bucket does not exist.
        Failed: the response contains an object that is not under the prefix.
    """
    contents = pages(aws, "s3", "list_objects_v2", "Contents", Bucket=prefix.bucket, Prefix=prefix.key)
    try:
        listed = [(item["Key"], item["Size"]) for item in contents]
    except ClientError as error:
        if error_code(error) == "NoSuchBucket":
            raise NotThere(f"there is no bucket {prefix.bucket}", f"aws s3 mb s3://{prefix.bucket}") from None
        raise
    if outside := next((key for key, _ in listed if not key.startswith(prefix.key)), None):
        raise Failed(f"s3://{prefix.bucket}/{prefix.key}: the list of its objects contains {outside!r}")
    return [Entry(key[len(prefix.key) :], size) for key, size in listed]


def delete(aws: Aws, prefix: Prefix, names: Sequence[str]) -> None:
    """Delete objects under the prefix.

    Raises:
        Failed: an object was not deleted, which S3 reports in a response with status 200.
    """
    for first in range(0, len(names), _AT_ONCE):
        some = [{"Key": prefix.key + name} for name in names[first : first + _AT_ONCE]]
        got = aws.client("s3").delete_objects(Bucket=prefix.bucket, Delete={"Objects": some, "Quiet": True})
        if errors := got.get("Errors"):
            reason = errors[0].get("Message") or errors[0].get("Code")
            were = f"and {len(errors) - 1} more were" if len(errors) > 1 else "was"
            raise Failed(f"s3://{prefix.bucket}/{errors[0]['Key']} {were} not deleted: {reason}")


def reader(aws: Aws, prefix: Prefix) -> Callable[[str], bytes]:
    """Return a function that reads an object by its name relative to the prefix."""

    def read(name: str) -> bytes:
        got = aws.client("s3").get_object(Bucket=prefix.bucket, Key=prefix.key + name)
        return bytes(got["Body"].read())

    return read


def check_region(aws: Aws, prefix: Prefix, fields: str = "model.upload, model.s3") -> None:
    """Check that the bucket is in SageMaker's region, as SageMaker cannot access buckets in other regions.

    The region is read from the response to listing the prefix. HeadBucket would need permission to list the whole
    bucket.

    Args:
        fields: fields of the specification that may name the bucket, for the message.

    Raises:
        Refused: the bucket is in another region.
        NotThere: the bucket does not exist.
    """
    try:
        response = aws.client("s3").list_objects_v2(Bucket=prefix.bucket, Prefix=prefix.key, MaxKeys=1)
    except ClientError as error:
        response = error.response
        if error_code(error) in ("404", "NoSuchBucket"):
            raise NotThere(f"there is no bucket {prefix.bucket}", f"aws s3 mb s3://{prefix.bucket}") from None
        if _region(response) in (None, aws.region):
            raise
    region = _region(response) or aws.region
    if region != aws.region:
        raise Refused(
            f"the bucket {prefix.bucket} is in {region}, but SageMaker is in {aws.region}",
            f"Use a bucket in {aws.region} ({fields}), or set region: {region}.",
        )


def _region(response: Any) -> str | None:
    """Return the region of the bucket from the headers of an S3 response, or None if it is missing."""
    region = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    return None if region is None else str(region)
