"""S3 prefixes: list, read and delete the objects below one. An archive is one with a single object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, error_code, pages
from deploy.errors import Failed, NotThere, Refused

ARCHIVE = ".tar.gz"
"""Suffix of a key that SageMaker unpacks into the model's directory (botocore's ModelDataUrl)."""


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Return bucket and key; the key may be empty."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


_AT_ONCE = 1000  # maximum of keys in one DeleteObjects


@dataclass(frozen=True)
class Entry:
    """A file or object: its name relative to the directory or prefix, with slashes; and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Prefix:
    """`s3://bucket/key/`; `key` ends in a slash, is empty, or is an archive's."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @classmethod
    def of(cls, uri: str) -> Prefix:
        bucket, key = bucket_and_key(uri)
        return cls(bucket, key if not key or key.endswith(("/", ARCHIVE)) else f"{key}/")


def objects(aws: Aws, prefix: Prefix) -> list[Entry]:
    """List the objects below the prefix, with names relative to it.

    Raises:
        NotThere: there is no such bucket.
    """
    found = pages(aws, "s3", "list_objects_v2", "Contents", Bucket=prefix.bucket, Prefix=prefix.key)
    try:
        return [Entry(item["Key"][len(prefix.key) :], item["Size"]) for item in found]
    except ClientError as error:
        if error_code(error) == "NoSuchBucket":
            raise NotThere(f"there is no bucket {prefix.bucket}", f"aws s3 mb s3://{prefix.bucket}") from None
        raise


def delete(aws: Aws, prefix: Prefix, names: Sequence[str]) -> None:
    """Delete these objects below the prefix.

    Raises:
        Failed: S3 did not delete one, which it reports in an answer of status 200.
    """
    for first in range(0, len(names), _AT_ONCE):
        some = [{"Key": prefix.key + name} for name in names[first : first + _AT_ONCE]]
        got = aws.client("s3").delete_objects(Bucket=prefix.bucket, Delete={"Objects": some, "Quiet": True})
        if errors := got.get("Errors"):
            why = errors[0].get("Message") or errors[0].get("Code")
            raise Failed(f"s3://{prefix.bucket}/{errors[0]['Key']} and {len(errors) - 1} more were not deleted: {why}")


def reader(aws: Aws, prefix: Prefix) -> Callable[[str], bytes]:
    """Return a function that reads one object below the prefix."""

    def read(name: str) -> bytes:
        got = aws.client("s3").get_object(Bucket=prefix.bucket, Key=prefix.key + name)
        return bytes(got["Body"].read())

    return read


def check_region(aws: Aws, prefix: Prefix, fields: str = "model.upload, model.s3") -> None:
    """Check the bucket's region: SageMaker reads and writes files of its own region only.

    Uses a list, which also names the region: HEAD of a bucket would need permission to list all of it.

    Args:
        fields: fields of the specification that may name the bucket.

    Raises:
        Refused: the bucket is in another region.
        NotThere: there is no such bucket.
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
            f"the bucket {prefix.bucket} is in {region}, SageMaker in {aws.region}",
            f"Use a bucket in {aws.region} ({fields}), or set region: {region}.",
        )


def _region(response: Any) -> str | None:
    """Return the bucket's region from the headers of S3's answer."""
    region = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    return None if region is None else str(region)
