"""A model's files, wherever they are: sizes by name, and pieces of their content. Nothing is read whole but JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deploy.errors import SpecError
from deploy.resolve.model.config import LARGEST_FILE, parse
from deploy.s3.uri import bucket_and_key

if TYPE_CHECKING:
    from deploy.aws import Aws


class Files(Protocol):
    """The files of one model, not those of folders within."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of all files, by name."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """Read a piece of a file; shorter where the file ends."""


class Directory:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.sizes: Mapping[str, int] = {item.name: item.stat().st_size for item in path.iterdir() if item.is_file()}

    def read(self, name: str, start: int, length: int) -> bytes:
        with (self._path / name).open("rb") as file:
            file.seek(start)
            return file.read(length)


class S3Prefix:
    """`s3://bucket/prefix/`, with ListObjectsV2 and ranged GetObject."""

    def __init__(self, aws: Aws, prefix: str) -> None:
        self._s3: Any = aws.client("s3")
        self._bucket, self._path = bucket_and_key(prefix)
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._path, Delimiter="/"
        )
        self.sizes: Mapping[str, int] = {
            item["Key"].removeprefix(self._path): item["Size"] for page in pages for item in page.get("Contents", ())
        }

    def read(self, name: str, start: int, length: int) -> bytes:
        wanted = f"bytes={start}-{start + length - 1}"
        with self._s3.get_object(Bucket=self._bucket, Key=self._path + name, Range=wanted)["Body"] as body:
            return bytes(body.read(length))


def json_file(files: Files, name: str) -> dict[str, Any] | None:
    """Read a JSON object; None: there is no such file.

    Raises:
        SpecError: it is too large, or no JSON object.
    """
    size = files.sizes.get(name)
    if size is None:
        return None
    if size > LARGEST_FILE:
        raise SpecError(
            f"the model's {name} has {size / 1e6:.0f} MB, more than the {LARGEST_FILE / 1e6:.0f} MB that are read",
            "Set model.shape in the specification.",
        )
    return parse(name, files.read(name, 0, size) if size else b"")
