"""A directory in place of S3: `s3://bucket/key` is the file `bucket/key` in it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from deploy.local.answers import ApiError, validation_error

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class Store:
    """The objects of all buckets.

    Args:
        root: the directory, created if missing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.root.mkdir(parents=True, exist_ok=True)

    def path(self, uri: str) -> Path:
        """Return the file of an s3:// URI.

        Raises:
            ApiError: it is no such URI, or leads out of the directory.
        """
        if not uri.startswith("s3://"):
            raise validation_error(f"{uri}: must be s3://bucket/key")
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        return self.file(bucket, key)

    def file(self, bucket: str, key: str) -> Path:
        if not _BUCKET.fullmatch(bucket) or not key or key.endswith("/") or "\0" in key:
            raise validation_error(f"s3://{bucket}/{key}: names no object")
        path = (self.root / bucket / key).resolve()
        if not path.is_relative_to(self.root / bucket):
            raise validation_error(f"s3://{bucket}/{key}: leads out of the bucket")
        return path

    def read(self, uri: str) -> bytes:
        """Read an object.

        Raises:
            ApiError: there is none.
        """
        try:
            return self.path(uri).read_bytes()
        except OSError as error:
            raise ApiError(404, "NoSuchKey", f"{uri}: {error.strerror}") from None

    def list(self, prefix: str) -> list[str]:
        """Return the URIs of the objects whose own URIs begin with `prefix`, in order.

        Raises:
            ApiError: there is none.
        """
        bucket = prefix.removeprefix("s3://").partition("/")[0]
        self.file(bucket, "any")  # checks the bucket's name
        files = (path for path in (self.root / bucket).rglob("*") if path.is_file())
        uris = sorted(uri for path in files if (uri := f"s3://{path.relative_to(self.root)}").startswith(prefix))
        if not uris:
            raise validation_error(f"{prefix}: no S3 objects found")
        return uris

    def write(self, uri: str, data: bytes) -> None:
        self.put(self.path(uri), data)

    @staticmethod
    def put(path: Path, data: bytes) -> None:
        """Write an object atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".part", delete=False) as part:
            try:
                part.write(data)
                part.flush()
                Path(part.name).replace(path)
            except BaseException:
                Path(part.name).unlink(missing_ok=True)
                raise
