"""Files to S3 in parts, several at once; what an earlier try has left in an unfinished upload is not sent again."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, error_code
from deploy.errors import Failed
from deploy.s3.prefix import Prefix

METADATA = "lmi-sha256"
"""Of an object: its file's SHA-256 in hexadecimal digits."""

DEPLOYMENT = "lmi-deployment"
"""Of an object: the name of the deployment that sent it."""

PART_SIZE = 16 * 2**20
_MOST_PARTS = 9000  # S3 takes 10,000
_BLOCK = 2**20


@dataclass(frozen=True)
class Part:
    """A part of a file: `number` counts from 1, `of` is how many there are; offset and size in bytes."""

    name: str
    number: int
    of: int
    offset: int
    size: int


@dataclass
class _Unfinished:
    """A multipart upload: those parts that S3 has, by number, with their tag and checksum; `left` are to be done."""

    id: str
    there: Mapping[int, Mapping[str, Any]]
    left: int
    done: dict[int, dict[str, Any]] = field(default_factory=dict)


def parts_of(name: str, size: int, part_size: int | None = None) -> list[Part]:
    """At least one, the last may be small."""
    part_size = max(part_size or PART_SIZE, -(-size // _MOST_PARTS))
    count = max(1, -(-size // part_size))
    return [
        Part(name, number + 1, count, number * part_size, min(part_size, size - number * part_size))
        for number in range(count)
    ]


_CLOCK = 2_000_000_000
"""Nanoseconds: no file system's clock ticks slower."""


def file_digest(path: Path) -> str:
    """Its SHA-256 in hexadecimal digits; read once as long as the file stays as it is."""
    seen = path.stat()
    if time.time_ns() - seen.st_mtime_ns < _CLOCK:  # written again, it may bear the same time
        return _digest.__wrapped__(path, seen.st_size, seen.st_mtime_ns)
    return _digest(path, seen.st_size, seen.st_mtime_ns)


@functools.lru_cache(maxsize=10_000)
def _digest(path: Path, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def digest_there(aws: Aws, prefix: Prefix, name: str) -> str | None:
    """The digest in the object's metadata; None: it bears none, or does not exist."""
    return _metadata(aws, prefix, name).get(METADATA)


def sender_there(aws: Aws, prefix: Prefix, name: str) -> str | None:
    """The deployment that sent the object; None: it does not say, or does not exist."""
    return _metadata(aws, prefix, name).get(DEPLOYMENT)


def _metadata(aws: Aws, prefix: Prefix, name: str) -> Mapping[str, str]:
    try:
        head = aws.client("s3").head_object(Bucket=prefix.bucket, Key=prefix.key + name)
    except ClientError as error:
        if error_code(error) in ("404", "NoSuchKey"):
            return {}
        raise
    return dict(head["Metadata"])


class Sending:
    """The sending of a directory's parts, from several threads.

    Args:
        digests: of the files, by name.
        parts: all parts of all files that are sent.
        deployment: whose they are; empty: the objects do not say.
    """

    def __init__(
        self,
        aws: Aws,
        prefix: Prefix,
        directory: Path,
        digests: Mapping[str, str],
        parts: Sequence[Part],
        deployment: str = "",
    ) -> None:
        self._sender = {DEPLOYMENT: deployment} if deployment else {}
        self._s3 = aws.client("s3")
        self._prefix = prefix
        self._directory = directory
        self._digests = digests
        self._uploads: dict[str, _Unfinished] = {}
        self._locks = {part.name: threading.Lock() for part in parts}

    def send(self, part: Part) -> tuple[Part, bool, bool]:
        """Send one: the part, whether S3 had it already, and whether its file is complete with it.

        Raises:
            Failed: the file is not what it was when its digest was taken.
        """
        with (self._directory / part.name).open("rb") as file:
            file.seek(part.offset)
            content = file.read(part.size)
        digest = hashlib.sha256(content)
        if len(content) != part.size or (part.of == 1 and digest.hexdigest() != self._digests[part.name]):
            raise Failed(f"{self._directory / part.name} has changed since it was read", "Run it again.")
        checksum = base64.b64encode(digest.digest()).decode()
        where = {"Bucket": self._prefix.bucket, "Key": self._prefix.key + part.name}
        if part.of == 1:
            metadata = self._marks(part)
            self._s3.put_object(**where, Body=content, Metadata=metadata, ChecksumSHA256=checksum)
            return part, False, True
        upload = self._upload(part, where)
        there = _same(upload.there.get(part.number), content, checksum)
        if there is None:
            sent = self._s3.upload_part(
                **where, UploadId=upload.id, PartNumber=part.number, Body=content, ChecksumSHA256=checksum
            )
            tag = sent["ETag"]
        else:
            tag = there
        with self._locks[part.name]:
            upload.done[part.number] = {"PartNumber": part.number, "ETag": tag, "ChecksumSHA256": checksum}
            upload.left -= 1
            ended = upload.left == 0
        if ended:
            parts = [upload.done[number] for number in sorted(upload.done)]
            self._s3.complete_multipart_upload(**where, UploadId=upload.id, MultipartUpload={"Parts": parts})
        return part, there is not None, ended

    def abandon(self) -> None:
        """Drop what is unfinished: it bears the digest of a file that has changed; no later run may go on with it."""
        for name, upload in self._uploads.items():
            if upload.left:
                where = {"Bucket": self._prefix.bucket, "Key": self._prefix.key + name}
                with contextlib.suppress(ClientError):  # the next run finds it out, and sends the file once more
                    self._s3.abort_multipart_upload(**where, UploadId=upload.id)

    def _upload(self, part: Part, where: Mapping[str, str]) -> _Unfinished:
        """The file's unfinished upload, or a new one: asked for once."""
        with self._locks[part.name]:
            if part.name not in self._uploads:
                self._uploads[part.name] = self._found(part, where) or self._begun(part, where)
            return self._uploads[part.name]

    def _begun(self, part: Part, where: Mapping[str, str]) -> _Unfinished:
        made = self._s3.create_multipart_upload(**where, Metadata=self._marks(part), ChecksumAlgorithm="SHA256")
        return _Unfinished(made["UploadId"], {}, part.of)

    def _marks(self, part: Part) -> dict[str, str]:
        return {METADATA: self._digests[part.name], **self._sender}

    def _found(self, part: Part, where: Mapping[str, str]) -> _Unfinished | None:
        """What an earlier try left. Its metadata cannot be read, so a file that has changed since is only seen at the
        end, by the digest that it then bears: it is sent once more by the next run.
        """
        try:
            return self._listed(part, where)
        except ClientError as error:
            if error_code(error) in ("AccessDenied", "NoSuchUpload"):  # may not be listed, or has just been aborted
                return None
            raise

    def _listed(self, part: Part, where: Mapping[str, str]) -> _Unfinished | None:
        pages = self._s3.get_paginator("list_multipart_uploads").paginate(Bucket=where["Bucket"], Prefix=where["Key"])
        uploads = [one for page in pages for one in page.get("Uploads", []) if one["Key"] == where["Key"]]
        if not uploads:
            return None
        newest = max(uploads, key=lambda one: one["Initiated"])
        pages = self._s3.get_paginator("list_parts").paginate(**where, UploadId=newest["UploadId"])
        there = {one["PartNumber"]: one for page in pages for one in page.get("Parts", [])}
        return _Unfinished(newest["UploadId"], there, part.of)


def _same(there: Mapping[str, Any] | None, content: bytes, checksum: str) -> str | None:
    """The tag of the part that S3 has, if it is this one: by its checksum, else by MD5, which the tag is without a key
    of KMS.
    """
    if there is None or there["Size"] != len(content):
        return None
    if "ChecksumSHA256" in there:
        same = there["ChecksumSHA256"] == checksum
    else:
        same = there["ETag"].strip('"') == hashlib.md5(content, usedforsecurity=False).hexdigest()
    return str(there["ETag"]) if same else None
