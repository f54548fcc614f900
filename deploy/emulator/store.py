"""A directory in place of S3: `s3://bucket/key` is the file `bucket/key` in it."""

from __future__ import annotations

import asyncio
import hashlib
import re
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

from aiohttp import web

from deploy.emulator.answers import ApiError, validation_error

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


# -- S3, as far as asynchronous inference needs it: GetObject, HeadObject, PutObject, path-style addresses -------------
# With AWS_ENDPOINT_URL_S3 set to the emulator, scripts can store inputs and fetch answers there.


_PATH = r"/{bucket:(?!endpoints/)[^/]+}/{key:.+}"


class Objects:
    """The routes of a store's objects."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, app: web.Application) -> None:
        app.router.add_get(_PATH, self._get)  # and HEAD
        app.router.add_put(_PATH, self._put)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        try:
            data = await asyncio.to_thread(self._path(request).read_bytes)
        except ApiError as error:
            return _failed(400, "InvalidArgument", str(error))
        except OSError:
            return _failed(404, "NoSuchKey", f"{request.path}: the specified key does not exist.")
        return web.Response(body=data, content_type="binary/octet-stream", headers={"ETag": _tag(data)})

    async def _put(self, request: web.Request) -> web.StreamResponse:
        if "aws-chunked" in request.headers.get("Content-Encoding", ""):
            return _failed(501, "NotImplemented", "Content-Encoding aws-chunked: send the body as it is.")
        data = await request.read()
        try:
            await asyncio.to_thread(self._store.put, self._path(request), data)
        except ApiError as error:
            return _failed(400, "InvalidArgument", str(error))
        except OSError as error:  # the name is too long, or an object's name is another's folder
            return _failed(400, "InvalidArgument", f"{request.path}: a directory cannot hold it: {error.strerror}")
        return web.Response(headers={"ETag": _tag(data)})

    def _path(self, request: web.Request) -> Path:
        return self._store.file(request.match_info["bucket"], request.match_info["key"])


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _failed(status: int, code: str, message: str) -> web.Response:
    text = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")
