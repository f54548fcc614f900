"""The part of S3's API that asynchronous inference needs: GetObject, HeadObject, PutObject, with path-style addresses.

With AWS_ENDPOINT_URL_S3 set to the emulator, scripts can store inputs and fetch answers there.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from xml.sax.saxutils import escape

from aiohttp import web

from deploy.local.answers import ApiError
from deploy.local.store import Store

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
