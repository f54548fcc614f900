"""A model's directory to S3, uncompressed: many parts at once, only what is not there yet, and checked at the end.

Each object bears its file's SHA-256 in its metadata, and its deployment's name. No manifest lies in the prefix, where
SageMaker would load it as model data, nor beside it, where it could tell of objects that have changed since. A part
that was sent before a kill is found again in S3's list of unfinished uploads and is not sent twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.aws import Aws
from deploy.errors import Failed
from deploy.s3.parts import Part, Sending, digest_there, file_digest, parts_of
from deploy.s3.prefix import Prefix, check_region, objects
from deploy.s3.prefix_lint import Entry, Finding, lint, lint_layout, list_directory, refuse

WORKERS = 10


@dataclass(frozen=True)
class UploadPlan:
    """What an upload would do.

    Attributes:
        files: all of the directory's that are model data, with their SHA-256.
        missing: the names of those that S3 does not have so; `changed` those of them that it has otherwise.
        left_out: what is not sent, with the reason.
        foreign: objects below the prefix that the directory does not have; they stay, and SageMaker loads them too.
        findings: what is wrong with the directory; `foreign_findings`: what only together with `foreign`.
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
            to_send += f", in the place of {len(self.changed)} objects with other content, e.g. {self.changed[0]}"
        return f"{len(self.files)} files, {human(self.size)}, {to_send}"


@dataclass(frozen=True)
class Sent:
    """How far an upload is: files and bytes done, of how many; `resumed` bytes of them were there from before."""

    files: int
    of_files: int
    size: int
    of_size: int
    resumed: int = 0


@dataclass(frozen=True)
class Uploaded:
    """What an upload did: files and bytes sent, and the files that were there."""

    prefix: str
    sent: int
    sent_size: int
    kept: int


def plan_upload(
    aws: Aws, directory: Path, prefix: str, *, isolated: bool = False, own_code: bool = False
) -> UploadPlan:
    """What `upload` would do. Changes nothing.

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
        return there.get(file.name) == file.size and digest_there(aws, to, file.name) == digests[file.name]

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
    progress: Callable[[Sent], None] = lambda sent: None,
    *,
    isolated: bool = False,
    own_code: bool = False,
    deployment: str = "",
) -> Uploaded:
    """Send what is not there yet, and see at the end that all is there.

    Args:
        directory: the model's.
        prefix: `s3://bucket/.../`.
        progress: called after each part, from the caller's thread.
        deployment: whose the objects are, which they then bear; empty: they do not say.

    Raises:
        Refused: the directory cannot be loaded as it is, or the bucket is in another region.
        Failed: what lies there at the end is not what was sent.
    """
    planned = plan_upload(aws, directory, prefix, isolated=isolated, own_code=own_code)
    refuse(planned.findings, str(directory))
    refuse(planned.foreign_findings, str(planned.prefix))
    sizes = {file.name: file.size for file in planned.files}
    parts = [part for name in planned.missing for part in parts_of(name, sizes[name])]
    sending = Sending(aws, planned.prefix, directory, planned.digests, parts, deployment)
    done = Sent(0, len(planned.missing), 0, planned.size_to_send)
    pool = ThreadPoolExecutor(WORKERS)
    try:
        for part, was_there, ended in pool.map(sending.send, parts):
            done = _after(done, part, was_there, ended)
            progress(done)
    except Failed:
        pool.shutdown(cancel_futures=True)
        sending.abandon()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    _verify(aws, planned)
    return Uploaded(
        str(planned.prefix), len(planned.missing), planned.size_to_send, len(planned.files) - len(planned.missing)
    )


def human(size: int) -> str:
    """Bytes in decimal units, as AWS counts storage: `16.1 GB`."""
    for unit, value in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= value:
            return f"{size / value:.1f} {unit}"
    return f"{size} B"


def _after(done: Sent, part: Part, was_there: bool, ended: bool) -> Sent:
    return replace(
        done,
        files=done.files + ended,
        size=done.size + part.size,
        resumed=done.resumed + (part.size if was_there else 0),
    )


def _verify(aws: Aws, planned: UploadPlan) -> None:
    """What S3 has now is what the directory held when it was read.

    Raises:
        Failed: it is not.
    """
    there = {entry.name: entry.size for entry in objects(aws, planned.prefix)}
    with ThreadPoolExecutor(WORKERS) as pool:
        seen = dict(pool.map(lambda name: (name, digest_there(aws, planned.prefix, name)), planned.missing))
    wrong = [file.name for file in planned.files if there.get(file.name) != file.size]
    wrong += [name for name in planned.missing if seen[name] != planned.digests[name]]
    # Read anew where it has changed since: parts of two versions would bear the digest of the first one.
    wrong += [name for name in planned.missing if file_digest(planned.directory / name) != planned.digests[name]]
    if wrong:
        raise Failed(
            f"{planned.prefix}{wrong[0]} is not what was sent",
            "Another process writes there, or the file changed meanwhile; run it again.",
        )
