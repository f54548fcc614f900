"""Read the file names and settings of an archive in S3 without unpacking it, or the serving.properties of a prefix."""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws, error_code
from deploy.s3.lint import WEIGHTS
from deploy.s3.prefix import bucket_and_key
from handler.config.options.names import variable
from handler.config.sources import MOST_BYTES, Setting, decode_properties, settings_of

OPTIONS_FILE = "serving.properties"
_MOST = 64 << 20  # maximum bytes of an archive to read, packed and unpacked; archives with weights may be larger
_ABSENT = ("404", "NoSuchKey", "NoSuchBucket")


@dataclass(frozen=True)
class Artifact:
    """The parts of model data that were read.

    Attributes:
        variables: settings of serving.properties, as variables. They override the container's variables, as in LMI.
        repository: contents of the parameter files in a Triton repository, by path.
        other_files: names of further files, which are known only for an archive.
        weights: name of a weight file, or a reason to assume that weights exist, or "" if there are none.
        folder: the only directory at the top level of the archive, if it contains all files, or "".
        fault: reason why SageMaker cannot unpack the archive, or "" if none was found.
        problem: reason why the data was not read, or "" if it was read.
        unseen: whether SageMaker may be able to read the data despite `problem`.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    repository: Mapping[str, str] = field(default_factory=dict)
    other_files: tuple[str, ...] = ()
    weights: str = ""
    folder: str = ""
    fault: str = ""
    problem: str = ""
    unseen: bool = False

    @property
    def may_serve(self) -> bool:
        """Return whether SageMaker can probably unpack a model from the archive."""
        return self.unseen or bool(self.weights and not self.fault and not self.problem)


def read_artifact(aws: Aws, uri: str) -> Artifact:
    """Read the first 64 MiB of an archive, or serving.properties under a prefix, which ends in a slash."""
    if not uri.startswith("s3://"):
        return Artifact(problem="its URL is not in S3")
    is_prefix = uri.endswith("/")
    bucket, key = bucket_and_key(uri)
    try:
        got = aws.client("s3").get_object(Bucket=bucket, Key=key + OPTIONS_FILE * is_prefix)
        with got["Body"] as body:
            if is_prefix:
                return _with_options(body.read(MOST_BYTES + 1), Artifact())
            return read_archive(body)
    except ClientError as error:
        code = error_code(error)
        if is_prefix and code in _ABSENT:
            return Artifact()
        if code in _ABSENT:
            return Artifact(problem="it does not exist")
        return Artifact(problem=f"{code}: not found, or s3:GetObject is not allowed", unseen=True)
    except BotoCoreError as error:
        return Artifact(problem=str(error), unseen=True)


def read_archive(packed: Any) -> Artifact:
    """Read the file names of an archive, Triton's files, and serving.properties at the top or in the only directory."""
    contents: dict[PurePosixPath, bytes] = {}
    places: list[PurePosixPath] = []
    weights = fault = ""
    try:
        stream = cast("BinaryIO", _Bounded(gzip.GzipFile(fileobj=cast("BinaryIO", _Bounded(packed)))))
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # tarfile would keep all members
                if member.issparse():
                    raise tarfile.ReadError(_SPARSE)
                if len(archive.pax_headers) > _MOST_COMMON:
                    raise tarfile.ReadError(f"it has too many global header fields ({len(archive.pax_headers)})")
                path = PurePosixPath(member.name)
                fault = fault or _fault(member, path)
                if not member.isfile():
                    continue
                places.append(path)
                if path.name.endswith(WEIGHTS):
                    weights = weights or str(path)
                elif _READ.fullmatch(str(path)):
                    file = archive.extractfile(member)
                    contents[path] = file.read(MOST_BYTES + 1) if file is not None else b""
    except _TooLongError:
        weights = weights or f"more than {_MOST >> 20} MiB"
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        problem = f"it cannot be read as a tar.gz: {error}"
        return Artifact(problem=problem, fault=problem)
    options = [path for path in contents if path.name == OPTIONS_FILE]
    texts = {str(path): data.decode(errors="replace") for path, data in contents.items() if path.name != OPTIONS_FILE}
    tops = {path.parts[0] for path in places if path.parts and not path.parts[0].startswith(".")}
    read = Artifact(
        repository=texts,
        other_files=tuple(dict.fromkeys(path.name for path in places if path not in contents)),
        weights=weights,
        folder=tops.pop() if len(tops) == 1 and all(len(path.parts) > 1 for path in places) else "",
        fault=fault,
    )
    return _with_options(contents[min(options, key=lambda path: len(path.parts))], read) if options else read


def _fault(member: tarfile.TarInfo, path: PurePosixPath) -> str:
    """Return the reason why SageMaker cannot unpack a member, or "".

    Only files and directories inside the model directory are accepted.
    """
    if path.is_absolute() or ".." in path.parts:
        return f"its member {member.name!r} is outside the model's directory"
    return "" if member.isfile() or member.isdir() else f"its member {member.name!r} is a link or a special file"


_READ = re.compile(rf"(?:[^/]+/)?{re.escape(OPTIONS_FILE)}|[^/]+/(?:config\.pbtxt|[0-9]+/model\.(?:json|yaml))")
"""Matches the paths of the files to read: LMI's options, and the parameter files of a Triton repository."""
_MOST_COMMON = 16  # maximum number of global header fields, which each member copies; git writes one
_LONGEST = 64 << 10  # maximum size of an extended header, in bytes


class _Member(tarfile.TarInfo):
    """A member that is cheap to read. Long extended headers and sparse files raise an error.

    Some Python versions parse the numbers in an extended header in quadratic time. The map of a sparse file may have
    any length.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if member.type in _EXTENDING and member.size > _LONGEST:
            raise tarfile.ReadError(f"it has an extended header of {member.size} bytes")
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(_SPARSE)
        return member

    def _proc_gnusparse_10(self, *_: object) -> None:
        """Refuse sparse files whose map is in the data of the member. tarfile calls this method for them."""
        raise tarfile.ReadError(_SPARSE)


_SPARSE = "it contains a sparse file"


_EXTENDING = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def _with_options(data: bytes, read: Artifact) -> Artifact:
    if len(data) > MOST_BYTES:
        return replace(read, problem=f"its {OPTIONS_FILE} is larger than {MOST_BYTES} bytes")
    variables: dict[str, str] = {}
    try:
        text = decode_properties(data)
    except ValueError as error:
        return replace(read, problem=f"its {OPTIONS_FILE} cannot be read: {error}")
    for item in settings_of(text, OPTIONS_FILE):
        if not isinstance(item, Setting):
            return replace(read, problem=str(item))
        variables[variable_of_key(item.key)] = item.value
    return replace(read, variables=variables)


def variable_of_key(key: str) -> str:
    """Return the name of the variable that sets the same option as a key of serving.properties."""
    return "OPTION_ENGINE" if key == "engine" else variable(key) or f"SERVING_{key.upper()}"


class _TooLongError(Exception):
    """The error for a stream that exceeds the maximum number of bytes."""


class _Bounded:
    """A stream of which at most 64 MiB may be read."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile) -> None:
        self._read: Callable[[int], bytes] = stream.read
        self._left = _MOST

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes. Raises _TooLongError if the stream exceeds the maximum."""
        data = self._read(size)
        self._left -= len(data)
        if self._left < 0:
            raise _TooLongError
        return data
