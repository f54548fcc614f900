"""Upload a model directory to S3 without compression, and verify the result.

Only missing files are uploaded, in parallel parts. The metadata of each object contains the SHA-256 of its file and the
name of the deployment. There is no manifest, as SageMaker would load a manifest in the prefix as model data, and a
manifest elsewhere could be out of date. Parts from a killed run are looked up in S3's list of unfinished uploads.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, error_code
from deploy.errors import Failed
from deploy.s3.lint import Finding, lint, lint_layout, list_directory, refuse
from deploy.s3.prefix import Entry, Prefix, check_region, objects
from handler.core.sizes import format_size

# -- upload files to S3 in parallel parts, and reuse the parts of an earlier unfinished upload -------------------------
# boto3's s3transfer would need less code, but a killed run loses all parts of an unfinished file. For a file of 50 GB,
# the largest on the hub, that is up to 7 minutes at 1 Gbit/s. When a run of this module was killed while it uploaded
# 512 MiB, the next run reused 31 of 32 parts. Parts that s3transfer leaves behind are never reused, and cost storage.
# The CPU time hardly differs: 1.8 s for 512 MiB, and 1.5 s with s3transfer.
#
# S3 verifies the SHA-256 of each part. CRC64NVME would cover the whole object, but botocore can compute it only with
# awscrt.

METADATA = "lmi-sha256"
"""Metadata key under which an object stores the hexadecimal SHA-256 of its file."""

DEPLOYMENT = "lmi-deployment"
"""Metadata key under which an object stores the name of the deployment that uploaded it."""

PART_SIZE = 16 * 2**20
_MOST_PARTS = 9000  # S3's maximum is 10,000
_BLOCK = 2**20


@dataclass(frozen=True)
class Part:
    """A part of a file. `number` starts at 1, `of` is the number of parts, and `offset` and `size` are in bytes."""

    name: str
    number: int
    of: int
    offset: int
    size: int


@dataclass
class _Unfinished:
    """An unfinished multipart upload, with the parts in S3 by number (`parts`) and the number of missing parts."""

    id: str
    parts: Mapping[int, Mapping[str, Any]]
    remaining: int
    sent: dict[int, dict[str, Any]] = field(default_factory=dict)


def parts_of(name: str, size: int) -> list[Part]:
    """Split a file into one or more parts, of which the last may be smaller."""
    part_size = max(PART_SIZE, -(-size // _MOST_PARTS))
    count = max(1, -(-size // part_size))
    return [
        Part(name, number + 1, count, number * part_size, min(part_size, size - number * part_size))
        for number in range(count)
    ]


_CLOCK = 2_000_000_000
"""The coarsest timestamp resolution of any file system, in nanoseconds."""


def file_digest(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file. It is cached as long as the file's size and timestamp do not change."""
    stat = path.stat()
    if time.time_ns() - stat.st_mtime_ns < _CLOCK:  # a second write may get the same timestamp
        return _digest.__wrapped__(path, stat.st_size, stat.st_mtime_ns)
    return _digest(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=10_000)
def _digest(path: Path, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def object_digest(aws: Aws, prefix: Prefix, name: str) -> str | None:
    """Return the digest in an object's metadata, or None if the object does not exist or has no digest."""
    return _metadata(aws, prefix, name).get(METADATA)


def object_sender(aws: Aws, prefix: Prefix, name: str) -> str | None:
    """Return the deployment that uploaded an object, or None if it is unknown or the object does not exist."""
    return _metadata(aws, prefix, name).get(DEPLOYMENT)


def _metadata(aws: Aws, prefix: Prefix, name: str) -> Mapping[str, str]:
    try:
        head = aws.client("s3").head_object(Bucket=prefix.bucket, Key=prefix.key + name)
    except ClientError as error:
        if error_code(error) in ("404", "NoSuchKey"):
            return {}
        raise
    return dict(head["Metadata"])


class PartUploader:
    """An uploader for the parts of the files in a directory. `send` may be called from several threads.

    Args:
        digests: the SHA-256 of the files, by name.
        parts: all parts of all files to upload.
        deployment: name of the deployment to store in the metadata of the objects, or "" for none.
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
        """Upload a part. Return the part, whether S3 already had it, and whether its file is now complete.

        Raises:
            Failed: the file has changed since its digest was computed.
        """
        content, checksum = self._read(part)
        where = {"Bucket": self._prefix.bucket, "Key": self._prefix.key + part.name}
        body = {"Body": content, "ChecksumSHA256": checksum}
        if part.of == 1:
            self._s3.put_object(**where, **body, Metadata=self._metadata(part))
            return part, False, True
        upload = self._upload(part, where)
        tag = there = _matching_tag(upload.parts.get(part.number), content, checksum)
        if there is None:
            tag = self._s3.upload_part(**where, **body, UploadId=upload.id, PartNumber=part.number)["ETag"]
        with self._locks[part.name]:
            upload.sent[part.number] = {"PartNumber": part.number, "ETag": tag, "ChecksumSHA256": checksum}
            upload.remaining -= 1
            complete = upload.remaining == 0
        if complete:
            self._complete(upload, where)
        return part, there is not None, complete

    def _complete(self, upload: _Unfinished, where: Mapping[str, str]) -> None:
        parts = [upload.sent[number] for number in sorted(upload.sent)]
        self._s3.complete_multipart_upload(**where, UploadId=upload.id, MultipartUpload={"Parts": parts})

    def _read(self, part: Part) -> tuple[bytes, str]:
        """Return the content of a part and its SHA-256 in base64.

        Raises:
            Failed: the file was truncated, or a file with only one part has changed.
        """
        path = self._directory / part.name
        with path.open("rb") as file:
            file.seek(part.offset)
            content = file.read(part.size)
        digest = hashlib.sha256(content).digest()
        if len(content) != part.size or (part.of == 1 and digest.hex() != self._digests[part.name]):
            raise Failed(f"{path} has changed since it was read", "Run the command again.")
        return content, base64.b64encode(digest).decode()

    def abandon(self) -> None:
        """Abort unfinished uploads after a file has changed, as no later run may resume them with the old digest."""
        for name, upload in self._uploads.items():
            if upload.remaining:
                where = {"Bucket": self._prefix.bucket, "Key": self._prefix.key + name}
                # If this fails, the next run notices the wrong digest, and uploads the file again.
                with contextlib.suppress(ClientError):
                    self._s3.abort_multipart_upload(**where, UploadId=upload.id)

    def _upload(self, part: Part, where: Mapping[str, str]) -> _Unfinished:
        """Return the unfinished upload of a file, or start an upload. AWS is called only once for each file."""
        with self._locks[part.name]:
            if part.name not in self._uploads:
                self._uploads[part.name] = self._find_unfinished(part, where) or self._start(part, where)
            return self._uploads[part.name]

    def _start(self, part: Part, where: Mapping[str, str]) -> _Unfinished:
        response = self._s3.create_multipart_upload(**where, Metadata=self._metadata(part), ChecksumAlgorithm="SHA256")
        return _Unfinished(response["UploadId"], {}, part.of)

    def _metadata(self, part: Part) -> dict[str, str]:
        return {METADATA: self._digests[part.name], **self._sender}

    def _find_unfinished(self, part: Part, where: Mapping[str, str]) -> _Unfinished | None:
        """Return the unfinished upload of an earlier run, or None if there is none or uploads may not be listed.

        S3 does not return the metadata of an unfinished upload, so it may belong to an earlier version of the file. In
        that case, the digest of the object will not match at the end, and the next run will upload the file again.
        """
        try:
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(
                Bucket=where["Bucket"], Prefix=where["Key"]
            )
            uploads = [item for page in pages for item in page.get("Uploads", []) if item["Key"] == where["Key"]]
            if not uploads:
                return None
            id = max(uploads, key=lambda item: item["Initiated"])["UploadId"]
            pages = self._s3.get_paginator("list_parts").paginate(**where, UploadId=id)
            parts = {item["PartNumber"]: item for page in pages for item in page.get("Parts", [])}
            return _Unfinished(id, parts, part.of)
        except ClientError as error:
            # Listing is not allowed, or the upload has just been aborted.
            if error_code(error) in ("AccessDenied", "NoSuchUpload"):
                return None
            raise


def _matching_tag(there: Mapping[str, Any] | None, content: bytes, checksum: str) -> str | None:
    """Return the entity tag of a part in S3 if its content is the same, or None if it differs.

    If S3 has no checksum of the part, the tag is compared, which is the MD5 unless a KMS key encrypts the bucket.
    """
    if there is None or there["Size"] != len(content):
        return None
    if "ChecksumSHA256" in there:
        same = there["ChecksumSHA256"] == checksum
    else:
        same = there["ETag"].strip('"') == hashlib.md5(content, usedforsecurity=False).hexdigest()
    return str(there["ETag"]) if same else None


WORKERS = 10


@dataclass(frozen=True)
class UploadPlan:
    """A planned upload.

    Attributes:
        files: all files that should be in S3.
        digests: the SHA-256 of the files, by name.
        missing: names of files that are not in S3 with the same content.
        changed: names from `missing` that are in S3 with different content.
        foreign: further objects under the prefix. They are kept, and SageMaker also loads them.
        findings: problems with the directory.
        foreign_findings: problems that `foreign` causes together with the files.
    """

    directory: Path
    prefix: Prefix
    files: tuple[Entry, ...]
    digests: Mapping[str, str]
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    foreign: tuple[str, ...]
    findings: tuple[Finding, ...]
    foreign_findings: tuple[Finding, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def size_to_send(self) -> int:
        return sum(file.size for file in self.files if file.name in set(self.missing))

    def __str__(self) -> str:
        to_send = "all uploaded already"
        if self.missing:
            to_send = f"{len(self.missing)} to upload ({format_size(self.size_to_send)})"
        if self.changed:
            replaced = counted(len(self.changed), "object")
            to_send += f", replacing {replaced} with different content, such as {self.changed[0]}"
        return f"{counted(len(self.files), 'file')}, {format_size(self.size)}, {to_send}"


@dataclass(frozen=True)
class UploadProgress:
    """The progress of an upload, in files and bytes. `resumed` is the number of bytes that an earlier run uploaded."""

    files: int
    of_files: int
    size: int
    of_size: int
    resumed: int = 0


def plan_upload(
    aws: Aws, directory: Path, prefix: str, *, isolated: bool = False, trusts_code: bool = False
) -> UploadPlan:
    """Plan an upload without changing anything.

    Raises:
        Refused: the bucket is in another region, or `directory` is not a directory.
        NotThere: the bucket does not exist.
    """
    to = Prefix.of(prefix)
    listing = list_directory(directory)
    findings = [*listing.findings]
    findings += lint(
        listing.files, lambda name: (directory / name).read_bytes(), isolated=isolated, trusts_code=trusts_code
    )
    check_region(aws, to)
    there = {entry.name: entry.size for entry in objects(aws, to)}

    def is_there(file: Entry) -> bool:
        return there.get(file.name) == file.size and object_digest(aws, to, file.name) == digests[file.name]

    with ThreadPoolExecutor(WORKERS) as pool:
        digests = dict(pool.map(lambda file: (file.name, file_digest(directory / file.name)), listing.files))
        same = list(pool.map(is_there, listing.files))
        missing = tuple(file.name for file, is_same in zip(listing.files, same, strict=True) if not is_same)
    foreign = tuple(Entry(name, there[name]) for name in sorted(set(there) - {file.name for file in listing.files}))
    return UploadPlan(
        directory,
        to,
        listing.files,
        digests,
        missing,
        tuple(name for name in missing if name in there),
        tuple(entry.name for entry in foreign),
        tuple(findings),
        tuple(set(lint_layout([*listing.files, *foreign])) - set(findings)),
    )


def upload(
    aws: Aws,
    directory: Path,
    prefix: str,
    progress: Callable[[UploadProgress], None] = lambda sent: None,
    *,
    isolated: bool = False,
    trusts_code: bool = False,
    deployment: str = "",
) -> UploadPlan:
    """Upload missing files, verify the objects at the end, and return the plan that was carried out.

    Args:
        directory: directory of the model.
        prefix: the S3 URI, such as `s3://bucket/model/`.
        progress: function that is called after each part, in the caller's thread.
        deployment: name of the deployment to store in the metadata of the objects, or "" for none.

    Raises:
        Refused: the model data cannot be loaded, or the bucket is in another region.
        NotThere: the bucket does not exist.
        Failed: a file changed during the upload, or an object in S3 differs from its file.
    """
    planned = plan_upload(aws, directory, prefix, isolated=isolated, trusts_code=trusts_code)
    refuse(planned.findings, str(directory))
    refuse(planned.foreign_findings, str(planned.prefix))
    _send(aws, planned, progress, deployment)
    _verify(aws, planned)
    return planned


def _send(aws: Aws, planned: UploadPlan, progress: Callable[[UploadProgress], None], deployment: str) -> None:
    """Upload the missing files in parts.

    Raises:
        Failed: a file changed during the upload.
    """
    parts = _missing_parts(planned)
    sending = PartUploader(aws, planned.prefix, planned.directory, planned.digests, parts, deployment)
    done = UploadProgress(0, len(planned.missing), 0, planned.size_to_send)
    pool = ThreadPoolExecutor(WORKERS)
    try:
        for part, was_there, complete in pool.map(sending.send, parts):
            done = replace(
                done,
                files=done.files + complete,
                size=done.size + part.size,
                resumed=done.resumed + was_there * part.size,
            )
            progress(done)
    except Failed:
        pool.shutdown(cancel_futures=True)
        sending.abandon()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _missing_parts(planned: UploadPlan) -> list[Part]:
    sizes = {file.name: file.size for file in planned.files}
    return [part for name in planned.missing for part in parts_of(name, sizes[name])]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural, such as `1 file` or `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _verify(aws: Aws, planned: UploadPlan) -> None:
    """Check that the objects in S3 match the files.

    Raises:
        Failed: an object is missing or differs from its file.
    """
    there = {entry.name: entry.size for entry in objects(aws, planned.prefix)}
    with ThreadPoolExecutor(WORKERS) as pool:
        digests = dict(pool.map(lambda name: (name, object_digest(aws, planned.prefix, name)), planned.missing))
    wrong = [file.name for file in planned.files if there.get(file.name) != file.size]
    wrong += [name for name in planned.missing if digests[name] != planned.digests[name]]
    # Compute the digest again if a file has changed: the parts may be of two versions under the first version's digest.
    wrong += [name for name in planned.missing if file_digest(planned.directory / name) != planned.digests[name]]
    if wrong:
        raise Failed(
            f"{planned.prefix}{wrong[0]} differs from the uploaded file",
            "Another process writes there, or the file was changed during the upload. Run the command again.",
        )
