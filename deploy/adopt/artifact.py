"""Read what lies in a container's model data beside its variables: serving.properties, and the names of other files."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws, error_code
from deploy.s3.lint import WEIGHTS
from deploy.s3.prefix import bucket_and_key
from handler.config.loader import MOST_BYTES, Setting, decode_properties, settings_of
from handler.config.options.names import variable

OPTIONS_FILE = "serving.properties"
_MOST = 64 << 20  # bytes of an archive, packed or not: one with weights has more
_ABSENT = ("404", "NoSuchKey", "NoSuchBucket")


@dataclass(frozen=True)
class Artifact:
    """Files of model data.

    Attributes:
        variables: serving.properties, under the names of variables. It beats the container's own, as in LMI.
        others: names of further files; of an archive only.
        weights: the name of a file with weights, or why there must be one; "": there is none.
        problem: why it was not read; "": it was.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    weights: str = ""
    problem: str = ""


def read_artifact(aws: Aws, uri: str) -> Artifact:
    """Read an archive of at most 64 MiB, or serving.properties below a prefix (which ends in a slash)."""
    if not uri.startswith("s3://"):
        return Artifact(problem="it is no address of S3")
    is_prefix = uri.endswith("/")
    bucket, key = bucket_and_key(uri)
    try:
        got = aws.client("s3").get_object(Bucket=bucket, Key=key + OPTIONS_FILE * is_prefix)
        with got["Body"] as body:
            if is_prefix:
                return _with_options(body.read(MOST_BYTES + 1))
            if got["ContentLength"] > _MOST:
                return Artifact(weights=f"{got['ContentLength'] / 1e9:.1f} GB")
            return unpacked(body)
    except ClientError as error:
        code = error_code(error)
        if is_prefix and code in _ABSENT:
            return Artifact()
        return Artifact(problem="it is not there" if code in _ABSENT else f"{code}: not there, or s3:GetObject lacks")
    except BotoCoreError as error:
        return Artifact(problem=str(error))


def unpacked(packed: Any) -> Artifact:
    """Read an archive's names, and its serving.properties: at the top, or in the only directory there."""
    found: dict[PurePosixPath, bytes] = {}
    names: list[str] = []
    try:
        stream = cast("BinaryIO", _Bounded(gzip.GzipFile(fileobj=packed)))
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # else each is kept
                if len(archive.pax_headers) > _MOST_COMMON:
                    raise tarfile.ReadError(f"{len(archive.pax_headers)} fields common to all its members")
                place = PurePosixPath(member.name)
                if not member.isfile():
                    continue
                if place.name.endswith(WEIGHTS):
                    return Artifact(weights=place.name)
                if place.name == OPTIONS_FILE and len(place.parts) <= _DEEPEST:
                    file = archive.extractfile(member)
                    found[place] = file.read(MOST_BYTES + 1) if file is not None else b""
                else:
                    names.append(place.name)
    except _TooLongError:
        return Artifact(weights=f"more than {_MOST >> 20} MiB")
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        return Artifact(problem=f"it cannot be read as a tar.gz: {error}")
    others = tuple(dict.fromkeys(names))
    if not found:
        return Artifact(others=others)
    first = min(found, key=lambda place: len(place.parts))
    return _with_options(found[first], others)


_DEEPEST = 2  # parts of the path of serving.properties
_MOST_COMMON = 16  # fields that hold for all members, each of which copies them; git writes one
_LONGEST = 64 << 10  # bytes of a header that extends the next one: names, and numbers as text


class _Member(tarfile.TarInfo):
    """A member that takes little to read: its extended header is short, and it is no sparse file.

    Reading an extended header's numbers takes quadratic time in some Pythons. A sparse file's map has any length.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if member.type in _EXTENDING and member.size > _LONGEST:
            raise tarfile.ReadError(f"an extended header of {member.size} bytes")
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(_SPARSE)
        return member

    def _proc_gnusparse_10(self, *_: object) -> None:
        """Refuse the form of sparse files whose map is in the member's data; tarfile calls this."""
        raise tarfile.ReadError(_SPARSE)


_SPARSE = "a sparse file"


_EXTENDING = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def _with_options(data: bytes, others: tuple[str, ...] = ()) -> Artifact:
    if len(data) > MOST_BYTES:
        return Artifact(others=others, problem=f"its {OPTIONS_FILE} has more than {MOST_BYTES} bytes")
    variables: dict[str, str] = {}
    try:
        text = decode_properties(data)
    except ValueError as error:
        return Artifact(others=others, problem=f"its {OPTIONS_FILE} cannot be read: {error}")
    for item in settings_of(text, OPTIONS_FILE):
        if not isinstance(item, Setting):
            return Artifact(others=others, problem=str(item))
        variables[_name(item.key)] = item.value
    return Artifact(variables, others)


def _name(key: str) -> str:
    """Return the variable that sets the same."""
    return "OPTION_ENGINE" if key == "engine" else variable(key) or f"SERVING_{key.upper()}"


class _TooLongError(Exception):
    """More was unpacked than is read."""


class _Bounded:
    """A stream of which no more than 64 MiB are read."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile) -> None:
        self._read: Callable[[int], bytes] = stream.read
        self._left = _MOST

    def read(self, size: int) -> bytes:
        """Read, or raise _TooLongError."""
        data = self._read(size)
        self._left -= len(data)
        if self._left < 0:
            raise _TooLongError
        return data
