"""Downloads models from S3: all objects below the prefix of `s3://bucket/prefix/`, to a directory on this machine.

Files are downloaded to a temporary directory next to the final directory. The temporary directory is renamed when all
files are complete. After an interrupted download, the next start reuses the complete files. An incomplete model is
never served. If several processes start at once, only one of them downloads, and the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from handler.config import environment, gguf, model_files
from handler.core.child_processes import NO_SPACE
from handler.core.errors import ConfigError
from handler.core.package import install
from handler.core.sizes import format_size
from handler.engines.downloads import is_inner_path

_SCHEME = "s3://"
_MODEL = ("config.json", "openvino_model.xml", "openvino_language_model.xml", "*.gguf", "*.GGUF")
"""Patterns for file names. Every model directory contains a file that matches one of these patterns."""

SETTINGS = ("serving.properties", "*.py", "*.txt", "*.jinja", "*.yaml", "*.yml", "*.json")
"""Patterns for files with options or code, which are read at startup, before the model is downloaded."""

_FORM = "write it as s3://BUCKET/PREFIX/, a directory with the model's files"

_MOST_OBJECTS = 10_000  # of a model; a bucket's root may have millions
_MOST_PAGES = 1_000  # of a listing; each page takes a request and has up to 1,000 objects
_REQUESTS = 24  # at the same time; one connection reaches about 80 MB/s
_TRIES = 5  # attempts to read a complete response
_PIECE = 32 << 20  # bytes per request for larger files
_SECONDS = 10.0  # between two progress lines; also the timeout for connecting
_CURE = (
    "SageMaker itself downloads the files, outside the container, if they are the model's ModelDataSource and "
    "option.model_id is not set"
)

_ADVICE = {
    "NoSuchBucket": "there is no bucket {bucket}",
    "AccessDenied": "access is denied: the role needs s3:ListBucket on arn:aws:s3:::{bucket}, and s3:GetObject on "
    "arn:aws:s3:::{bucket}/{prefix}*; and kms:Decrypt on the KMS key if the objects are encrypted with one",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION to that region",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION to that region",
    "IllegalLocationConstraintException": "the bucket is in another region: set AWS_REGION to that region",
    "InvalidObjectState": "an object is archived; restore it first",
    "NoSuchKey": "an object was deleted during the download; start again",
    "PreconditionFailed": "an object was replaced during the download; start again",
}
"""Explanations of S3 error codes, with remedies."""
_SAME = {"403": "AccessDenied", "AllAccessDisabled": "AccessDenied", "404": "NoSuchBucket", "301": "PermanentRedirect"}


class _Source(NamedTuple):
    """The location of a model on S3. The prefix ends with a slash or is empty."""

    url: str
    bucket: str
    prefix: str


class _Object(NamedTuple):
    """An object on S3. `name` is its path below the prefix, `time` its last modification in seconds since the epoch."""

    key: str
    name: str
    size: int
    time: int
    etag: str


def is_url(model_id: str | None) -> TypeGuard[str]:
    return model_id is not None and model_id.startswith(_SCHEME)


def check(url: str) -> None:
    """Check the URL, and check that boto3 is installed.

    Raises:
        ConfigError: the URL has no bucket or contains a `*` other than in a trailing `/*`, or boto3 is missing.
    """
    _split(url)
    if importlib.util.find_spec("boto3") is None:
        raise ConfigError(f"{url}: downloads need boto3: {install('lmi-handler[container]')}. Without boto3: {_CURE}")


def _split(url: str) -> _Source:
    """Return the bucket and the prefix of a URL.

    As in LMI, `/*` at the end of the URL has no effect.

    Raises:
        ConfigError: the URL has no bucket, or contains any other `*`.
    """
    bucket, _, prefix = url.removeprefix(_SCHEME).partition("/")
    prefix = prefix.removesuffix("*") if prefix.endswith("/*") or prefix == "*" else prefix
    if not bucket or "*" in bucket + prefix:
        raise ConfigError(f"{url}: {_FORM}")
    return _Source(url, bucket, f"{prefix.rstrip('/')}/" if prefix.strip("/") else "")


def download(url: str, only: Sequence[str] = ()) -> Path:
    """Download the files below a prefix that are not on this machine yet, and return the model's directory.

    Args:
        only: patterns for file names; () selects all files. With `SETTINGS`, files in subdirectories are ignored, and
            it is not an error if no file matches.

    Raises:
        ConfigError: the model is not available; the message contains the reason and a remedy.
    """
    check(url)
    source = _split(url)
    with _refusals(source):
        client = _client()
        objects = _listed(client, source, only)
        home = _home()
        name = _digest(source.bucket, source.prefix, *only)
        target = home / f"{name}-{_digest(*(f'{item.name} {item.size} {item.etag}' for item in objects))}"
        home.mkdir(parents=True, exist_ok=True)
        with _alone(home / f"{name}.lock", url):
            if not target.is_dir():
                part = home / f"{name}.part"
                _fill(client, source, part, objects)
                if _listed(client, source, only) != objects:  # S3 has no versions of a prefix
                    raise ConfigError(f"{url} has changed during the download; start again")
                part.rename(target)
            else:
                _say(f"{url} was downloaded before, to {target}")
    return target


def first_bytes(url: str, count: int) -> Iterator[tuple[str, Iterable[bytes]]]:
    """Yield the names of the GGUF files below a prefix, and the beginning of each file in parts.

    Nothing is yielded if the prefix contains a model in another format.

    Args:
        count: maximum number of bytes of each file.

    Raises:
        ConfigError: the model is not available.
    """
    check(url)
    source = _split(url)
    with _refusals(source):
        client = _client()
        objects = _listed(client, source, ())
        if any(item.name in _MODEL for item in objects):
            return
        for item in objects:
            if "/" not in item.name and gguf.is_gguf_name(item.name):
                got = client.get_object(Bucket=source.bucket, Key=item.key, Range=f"bytes=0-{count - 1}")
                with contextlib.closing(got["Body"]) as body:
                    yield item.name, body.iter_chunks(1 << 20)


def is_download(directory: Path | None) -> bool:
    """Return whether a directory was created by `download`."""
    return directory is not None and directory.parent == _home()


def downloads() -> Iterator[tuple[str, Path]]:
    """Yield the URL and the directory of each download, complete or not."""
    for lock in sorted(_home().glob("*.lock")):
        url = lock.read_text().strip()
        for path in sorted(_home().glob(f"{lock.stem}[.-]*")):
            if path.is_dir():
                yield url or path.name, path


def _home() -> Path:
    return (environment.download_directory() or model_files.cache_directory()).absolute() / "download"


@contextlib.contextmanager
def _refusals(source: _Source) -> Iterator[None]:
    """Convert errors from boto3 or the disk to a ConfigError that describes the remedy."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionError,
        HTTPClientError,
        IncompleteReadError,
        NoCredentialsError,
        ParamValidationError,
        PartialCredentialsError,
    )
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

    url = source.url
    try:
        yield
    except ClientError as error:
        error_code = str(error.response.get("Error", {}).get("Code", "unknown"))
        code = _SAME.get(error_code, error_code)
        reason = _ADVICE.get(code, "S3 refused the request").format(bucket=source.bucket, prefix=source.prefix)
        if code == "PermanentRedirect" and (region := _region(error.response)):
            reason = f"the bucket is in {region}: set AWS_REGION={region}"
        raise ConfigError(f"{url} cannot be fetched: {reason} ({error_code}). {_CURE}") from None
    except ParamValidationError:
        raise ConfigError(f"{url}: {source.bucket!r} is not the name of a bucket; {_FORM}") from None
    except (NoCredentialsError, PartialCredentialsError) as error:
        reason = f"there are no AWS credentials here ({type(error).__name__})"
        raise ConfigError(f"{url} cannot be fetched: {reason}: give the container a role. {_CURE}") from None
    except S3DownloadFailedError:
        raise ConfigError(f"{url} cannot be fetched: {_ADVICE['PreconditionFailed']}. {_CURE}") from None
    except (ConnectionError, HTTPClientError, IncompleteReadError, RetriesExceededError) as error:
        raise ConfigError(
            f"{url} cannot be fetched: S3 does not respond ({type(error).__name__}). It cannot be reached under "
            f"network isolation, and a VPC needs a gateway endpoint for S3. {_CURE}"
        ) from None
    except BotoCoreError as error:  # a problem of this machine, such as an AWS profile that does not exist
        raise ConfigError(f"{url} cannot be fetched: {error} ({type(error).__name__}). {_CURE}") from None
    except OSError as error:
        cure = "; free some space, or set SERVING_DOWNLOAD_DIR to another directory" if error.errno in NO_SPACE else ""
        where = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"{url} cannot be saved: {where}{error.strerror or error}{cure}") from None


def _region(response: Any) -> str | None:
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or response.get("Error", {}).get("Region")
    return None if region is None else str(region)


def _client() -> Any:
    import boto3
    from botocore.config import Config

    limits = Config(
        connect_timeout=_SECONDS,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 5},
        max_pool_connections=_REQUESTS,
    )
    return boto3.session.Session().client("s3", region_name=environment.aws_region(), config=limits)


def _listed(client: Any, source: _Source, only: Sequence[str]) -> list[_Object]:
    """List the objects below the prefix. Omit keys that end with a slash, because they only represent directories.

    Raises:
        ConfigError: there are no objects or too many, no object belongs to a model, or a name is not a valid path.
    """
    objects: list[_Object] = []
    num_listed, url = 0, source.url
    for number, items in enumerate(_pages(client, source), 1):
        num_listed += len(items)
        objects += [item for item in items if _is_selected(item.name, only)]
        if number >= _MOST_PAGES:
            raise ConfigError(f"{url}: the list of its objects does not end after {_MOST_PAGES} pages")
        if num_listed > _MOST_OBJECTS:
            raise ConfigError(f"{url} has more than {_MOST_OBJECTS} objects: name the prefix of one model")
    if not (objects or (tuple(only) == SETTINGS and num_listed)):
        raise ConfigError(f"{url}: {_empty(client, source)}")
    for item in objects:
        if not is_inner_path(item.name):
            raise ConfigError(f"{url}: the object's key {item.key!r} is not a valid file path")
    if not only:
        _check_model(url, [item.name for item in objects])
    return objects


def _is_selected(name: str, only: Sequence[str]) -> bool:
    if not name or name.endswith("/") or (tuple(only) == SETTINGS and "/" in name):
        return False
    return not only or any(fnmatch(name, pattern) for pattern in only)


def _check_model(url: str, names: Sequence[str]) -> None:
    if not any(fnmatch(name, pattern) for name in names if "/" not in name for pattern in _MODEL):
        first = ", ".join(dict.fromkeys(name.partition("/")[0] + ("/" if "/" in name else "") for name in names[:8]))
        raise ConfigError(
            f"{url} contains no model: no config.json, openvino_model.xml or .gguf file, but {first}. Name the "
            "prefix that contains them; archives are not unpacked"
        )


def _pages(client: Any, source: _Source) -> Iterator[list[_Object]]:
    """Yield the objects of each page of a listing.

    Raises:
        ConfigError: the response is not an S3 listing.
    """
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=source.bucket, Prefix=source.prefix)
    try:
        for page in pages:
            yield [_object(item, source.prefix) for item in page.get("Contents", [])]
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # botocore's too
        raise ConfigError(f"{source.url}: the list of its objects cannot be read: {error!r}") from None


def _object(item: Mapping[str, Any], prefix: str) -> _Object:
    key, size = item["Key"], item["Size"]
    if not key.startswith(prefix):
        raise ValueError(f"{key!r} is not below the prefix {prefix!r}")
    if size < 0:
        raise ValueError(f"an object has the size {size}")
    return _Object(key, key[len(prefix) :], size, int(item["LastModified"].timestamp()), item["ETag"])


def _empty(client: Any, source: _Source) -> str:
    key = source.prefix.removesuffix("/")
    markers = client.list_objects_v2(Bucket=source.bucket, Prefix=key, MaxKeys=1).get("Contents", []) if key else []
    if markers and markers[0]["Key"] == key:
        return "it is a single object; name the prefix of the directory with the model's files"
    return "there are no files below it"


def _digest(*texts: str) -> str:
    return sha256("\n".join(texts).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _alone(path: Path, url: str) -> Iterator[None]:
    """Lock a file, so that only one process on this machine downloads the model."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that is downloading {url}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        print(url, file=lock, flush=True)  # `downloads` reads it
        yield


def _fill(client: Any, source: _Source, part: Path, objects: Collection[_Object]) -> None:
    """Download the objects to `part`, except for objects that were completely downloaded by an earlier start.

    Raises:
        ConfigError: the objects do not fit on the disk, or a file does not have the size that S3 listed.
    """
    part.mkdir(exist_ok=True)
    by_path = {part / item.name: item for item in objects}
    for path in [path for path in part.rglob("*") if not path.is_dir()]:
        if not (path in by_path and _is_whole(path, by_path[path])):
            path.unlink()
    missing = {path: item for path, item in by_path.items() if not path.exists()}
    size, total = sum(item.size for item in missing.values()), sum(item.size for item in objects)
    free = shutil.disk_usage(part).free
    if size > free:
        raise ConfigError(
            f"{source.url}: {format_size(size)} do not fit into {part.parent}, where {format_size(free)} are free "
            f"({format_size(size - free)} are missing). Free some space, or set SERVING_DOWNLOAD_DIR to another "
            "directory"
        )
    reused = f", of which {format_size(total - size)} are already here" if size < total else ""
    _say(f"downloading {source.url}: {len(objects)} files, {format_size(total)}{reused}, to {part.parent}")
    _transfer(client, source, missing)


def _is_whole(path: Path, item: _Object) -> bool:
    """Return whether a file is a complete copy of the object, judging by its size and modification time."""
    state = path.stat()
    return (state.st_size, int(state.st_mtime)) == (item.size, item.time)


class _Progress:
    """Counts downloaded bytes and prints a progress line every few seconds. Thread-safe."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size = url, size
        self._received = 0
        self._lock = threading.Lock()
        self._began = self._shown = time.monotonic()

    def add(self, size: int) -> None:
        """Count bytes. A negative number means that this many bytes will be downloaded again."""
        with self._lock:
            self._received += size
            now = time.monotonic()
            if now - self._shown < _SECONDS:
                return
            self._shown = now
        rate = self._received / (now - self._began)
        left = f", {(self._size - self._received) / rate:.0f} s left" if rate > 0 else ""
        _say(f"{self._url}: {format_size(self._received)} of {format_size(self._size)}, {rate / 1e6:.0f} MB/s{left}")


class _Subscriber:
    """Passes the listed size and ETag of an object to s3transfer, counts bytes, and sets the file's modification time.

    S3 sends parts of a large object only while the object's ETag matches the listing. A change of a smaller object is
    detected when the prefix is listed again after the download.
    """

    def __init__(self, url: str, item: _Object, path: Path, progress: _Progress) -> None:
        self._url, self._item, self._path, self._progress = url, item, path, progress
        self._received = 0

    def on_queued(self, future: Any, **_: Any) -> None:
        future.meta.provide_transfer_size(self._item.size)
        future.meta.provide_object_etag(self._item.etag)

    def on_progress(self, bytes_transferred: int, **_: Any) -> None:
        self._received += bytes_transferred
        if self._received > self._item.size:  # otherwise the download might never end
            raise ConfigError(
                f"{self._url}: S3 sent more than {self._item.size} bytes of {self._item.name}; start again"
            )
        self._progress.add(bytes_transferred)

    def on_done(self, **_: Any) -> None:
        with contextlib.suppress(FileNotFoundError):  # the download failed
            os.utime(self._path, (self._item.time, self._item.time))


def _transfer(client: Any, source: _Source, files: Mapping[Path, _Object]) -> None:
    """Download the objects with several concurrent requests."""
    from s3transfer.manager import TransferConfig, TransferManager

    settings = TransferConfig(
        multipart_threshold=_PIECE,
        multipart_chunksize=_PIECE,
        max_request_concurrency=_REQUESTS,
        num_download_attempts=_TRIES,
    )
    progress = _Progress(source.url, sum(item.size for item in files.values()))
    with TransferManager(client, settings) as manager:
        transfers = []
        for path, item in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            subscribers = [_Subscriber(source.url, item, path, progress)]
            transfers.append(manager.download(source.bucket, item.key, str(path), subscribers=subscribers))
        for transfer in transfers:
            transfer.result()
    _check_sizes(source, files)


def _check_sizes(source: _Source, files: Mapping[Path, _Object]) -> None:
    for path, item in files.items():
        if path.stat().st_size != item.size:
            received = f"{path.stat().st_size} of {item.size} bytes"
            raise ConfigError(f"{source.url}: S3 sent {received} of {item.name}; start again")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # logging is not set up in this process
