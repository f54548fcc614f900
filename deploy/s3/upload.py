"""Upload a model's directory to S3, uncompressed: parallel parts, only missing files, verified at the end.

Each object has its file's SHA-256 and the deployment's name as metadata. There is no manifest: SageMaker would load one
in the prefix as model data, and one elsewhere could describe objects that have changed since. Parts that a killed run
uploaded are found in S3's list of unfinished uploads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.aws import Aws
from deploy.errors import Failed
from deploy.s3.parts import Part, PartUploader, file_digest, object_digest, parts_of
from deploy.s3.prefix import Prefix, check_region, objects
from deploy.s3.prefix_lint import Entry, Finding, lint, lint_layout, list_directory, refuse

WORKERS = 10


@dataclass(frozen=True)
class UploadPlan:
    """A planned upload.

    Attributes:
        files: all model data in the directory.
        digests: SHA-256 of the files, by name.
        missing: names of files that S3 does not have with this content.
        changed: those of `missing` that S3 has with other content.
        left_out: files that are not uploaded, with the reason.
        foreign: objects below the prefix without a file; they stay, and SageMaker loads them too.
        findings: problems of the directory.
        foreign_findings: problems only together with `foreign`.
    """

    directory: Path
    prefix: Prefix
    files: tuple[Entry, ...]
    digests: Mapping[str, str]
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
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
        to_send = f"{len(self.missing)} to send ({human(self.size_to_send)})" if self.missing else "all there"
        if self.changed:
            to_send += (
                f", in the place of {counted(len(self.changed), 'object')} with other content, e.g. {self.changed[0]}"
            )
        return f"{counted(len(self.files), 'file')}, {human(self.size)}, {to_send}"


@dataclass(frozen=True)
class UploadProgress:
    """Progress in files and bytes; `resumed`: bytes that S3 had already from an earlier run."""

    files: int
    of_files: int
    size: int
    of_size: int
    resumed: int = 0


@dataclass(frozen=True)
class UploadResult:
    """The result: the number of files sent, and of those that were there already."""

    prefix: str
    sent: int
    kept: int


def plan_upload(
    aws: Aws, directory: Path, prefix: str, *, isolated: bool = False, own_code: bool = False
) -> UploadPlan:
    """Plan an upload. Changes nothing.

    Raises:
        Refused: the bucket is in another region, or `directory` is none.
        NotThere: there is no such bucket.
    """
    to = Prefix.of(prefix)
    listing = list_directory(directory)
    findings = [*listing.findings]
    findings += lint(listing.files, lambda name: (directory / name).read_bytes(), isolated=isolated, own_code=own_code)
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
        listing.left_out,
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
    own_code: bool = False,
    deployment: str = "",
) -> UploadResult:
    """Upload missing files, and verify the prefix at the end.

    Args:
        directory: the model's directory.
        prefix: `s3://bucket/.../`.
        progress: called after each part, from the caller's thread.
        deployment: stored with the objects; empty: none.

    Raises:
        Refused: the model data cannot load, or the bucket is in another region.
        Failed: S3 does not have what was sent.
    """
    planned = plan_upload(aws, directory, prefix, isolated=isolated, own_code=own_code)
    refuse(planned.findings, str(directory))
    refuse(planned.foreign_findings, str(planned.prefix))
    sizes = {file.name: file.size for file in planned.files}
    parts = [part for name in planned.missing for part in parts_of(name, sizes[name])]
    sending = PartUploader(aws, planned.prefix, directory, planned.digests, parts, deployment)
    done = UploadProgress(0, len(planned.missing), 0, planned.size_to_send)
    pool = ThreadPoolExecutor(WORKERS)
    try:
        for part, was_there, complete in pool.map(sending.send, parts):
            done = _after(done, part, was_there, complete)
            progress(done)
    except Failed:
        pool.shutdown(cancel_futures=True)
        sending.abandon()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    _verify(aws, planned)
    return UploadResult(str(planned.prefix), len(planned.missing), len(planned.files) - len(planned.missing))


def counted(number: int, noun: str) -> str:
    """Write a number of things: `1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def human(size: int) -> str:
    """Format bytes in decimal units, as AWS counts storage: `16.1 GB`."""
    for unit, value in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= value:
            return f"{size / value:.1f} {unit}"
    return f"{size} B"


def _after(done: UploadProgress, part: Part, was_there: bool, complete: bool) -> UploadProgress:
    return replace(
        done,
        files=done.files + complete,
        size=done.size + part.size,
        resumed=done.resumed + (part.size if was_there else 0),
    )


def _verify(aws: Aws, planned: UploadPlan) -> None:
    """Check that S3 has the files.

    Raises:
        Failed: it has not.
    """
    there = {entry.name: entry.size for entry in objects(aws, planned.prefix)}
    with ThreadPoolExecutor(WORKERS) as pool:
        digests = dict(pool.map(lambda name: (name, object_digest(aws, planned.prefix, name)), planned.missing))
    wrong = [file.name for file in planned.files if there.get(file.name) != file.size]
    wrong += [name for name in planned.missing if digests[name] != planned.digests[name]]
    # Read again if the file has changed: parts of two versions would have the digest of the first.
    wrong += [name for name in planned.missing if file_digest(planned.directory / name) != planned.digests[name]]
    if wrong:
        raise Failed(
            f"{planned.prefix}{wrong[0]} is not what was sent",
            "Another process writes there, or the file changed meanwhile; run it again.",
        )
