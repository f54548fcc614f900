"""Objects of S3 as files: listed by their prefix, and read as a stream that goes on where a connection broke."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from typing import IO, Any

from handler.core.errors import ConfigError

SCHEME = "s3://"
FORM = "write it as s3://BUCKET/PREFIX/"

_TRIES = 5  # to read an object to its end
_PIECE = 1 << 20


def objects(argument: str) -> Iterator[tuple[str, int, Callable[[], IO[bytes]]]]:
    """Yield name, size and opener of the object that `argument` names, or of all below the prefix that it names.

    Raises:
        ConfigError: boto3 is missing, or S3 refuses.
    """
    bucket, _, prefix = argument.removeprefix(SCHEME).partition("/")
    if not bucket:
        raise ConfigError(f"{argument}: {FORM}")
    if importlib.util.find_spec("boto3") is None:
        raise ConfigError(f"{argument} needs boto3: pip install 'lmi-handler[deploy]'")
    client = _client()
    with _told(argument):
        if prefix and not prefix.endswith("/"):
            for one in client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("Contents", ()):
                if one["Key"] == prefix:
                    yield _named(client, bucket, one, prefix.rpartition("/")[2])
                    return
            prefix += "/"
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for one in page.get("Contents", ()):
                yield _named(client, bucket, one, one["Key"].removeprefix(prefix))


def _client() -> Any:
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client("s3", config=Config(retries={"mode": "standard", "total_max_attempts": 5}))


def _named(client: Any, bucket: str, one: Any, name: str) -> tuple[str, int, Callable[[], IO[bytes]]]:
    return name, one["Size"], lambda: _Object(client, bucket, one["Key"], one["ETag"], one["Size"])  # type: ignore[return-value]


@contextlib.contextmanager
def _told(argument: str) -> Iterator[None]:
    """Turn boto3's errors into a line that says what to change."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        advice = {
            "NoSuchBucket": "there is no such bucket",
            "AccessDenied": "access is denied: you need s3:ListBucket and s3:GetObject there (kms:Decrypt on its key)",
        }.get(code, str(error))
        raise ConfigError(f"{argument}: {advice}") from None
    except BotoCoreError as error:
        raise ConfigError(f"{argument}: {error}") from None


class _Object(io.RawIOBase):
    """An object as a raw stream."""

    def __init__(self, client: Any, bucket: str, key: str, etag: str, size: int) -> None:
        self._client = client
        self._wanted = {"Bucket": bucket, "Key": key, "IfMatch": etag}
        self._size, self._at, self._tries = size, 0, 0
        self._body: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read on.

        Raises:
            OSError: S3 refuses, or breaks off too often.
        """
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
        from urllib3.exceptions import HTTPError

        while self._at < self._size:
            try:
                if self._body is None:
                    self._body = self._client.get_object(**self._wanted, Range=f"bytes={self._at}-")["Body"]
                if data := self._body.read(min(len(buffer), _PIECE)):
                    buffer[: len(data)] = data
                    self._at += len(data)
                    return len(data)
                raise HTTPError("it ended early")
            except ClientError as error:
                raise OSError(f"S3: {error}") from None
            except (HTTPError, HTTPClientError, BotoCoreError) as error:
                self._body, self._tries = None, self._tries + 1
                if self._tries >= _TRIES:
                    raise OSError(f"S3 broke off {self._tries} times: {error}") from None
        return 0

    def close(self) -> None:
        if self._body is not None:
            self._body.close()
        super().close()
