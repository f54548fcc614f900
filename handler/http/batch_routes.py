"""OpenAI's routes of files and batches (`option.batches_store`). A file is read and sent in parts, and never whole."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from starlette.datastructures import QueryParams
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler.core.errors import (
    InvalidPayload,
    NotFound,
    Overloaded,
    ServingError,
    TooLarge,
    TooSlow,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.loop import run_in_daemon_thread
from handler.http.inference import (
    GIVEN_UP,
    Endpoint,
    Handle,
    encoded,
    read_body,
    send_answer,
    send_json,
    send_start,
)
from handler.protocols.kernel.body import decode
from handler.protocols.openai.api import ERRORS, OpenAiFile
from handler.protocols.openai.batches import page, read_batch, read_file, read_page
from handler.serving.batches.store import BatchStore
from handler.serving.call import FormReader
from handler.serving.head import media_type, owner_of
from handler.serving.model import ServedModel
from handler.serving.task import ignored_header

_MOST_WAITING = 64  # calls
_PART = 1 << 18  # bytes of a file that is sent
_FORM = 1 << 16  # bytes that a form may have beside its file
_UPLOAD_SECONDS = 1800.0
_MOST_BATCHES, _USUAL_BATCHES = 100, 20  # in a list
_MOST_FILES = 10_000

T = TypeVar("T")

Answer = tuple[Any, Sequence[str]]
"""What is answered as JSON, and the names that meant nothing."""


class BatchRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._num_waiting = 0
        self._endpoints = [path for path in model.routes.dialects if path.startswith("/v1/") and "{" not in path]

    @property
    def routes(self) -> list[Route]:
        def route(path: str, **handlers: Handle) -> Route:
            return Route(path, Endpoint(handlers, errors=ERRORS))

        return [
            route("/v1/files", GET=self._json(self._files), POST=self._json(self._upload)),
            route("/v1/files/{file}", GET=self._json(self._file), DELETE=self._json(self._delete)),
            route("/v1/files/{file}/content", GET=self._content),
            route("/v1/batches", GET=self._json(self._batches), POST=self._json(self._create)),
            route("/v1/batches/{batch}", GET=self._json(self._batch)),
            route("/v1/batches/{batch}/cancel", POST=self._json(self._cancel)),
        ]

    def _json(self, answer: Callable[[Scope, Receive], Awaitable[Answer | None]]) -> Handle:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            with self._model.adapters.counted():
                try:
                    if scope["method"] in ("POST", "DELETE"):
                        self._model.check_open()
                    answered = await answer(scope, receive)
                except ServingError as error:
                    return await send_answer(scope, send, ERRORS.whole(error))
                if answered is not None:  # else the client has gone
                    value, ignored = answered
                    await send_json(scope, send, 200, value, encoded(ignored_header(ignored).items()))

        return handle

    @property
    def _store(self) -> BatchStore:
        if self._model.batches is None:
            raise NotFound("there are no files and batches here (option.batches_store)")
        return self._model.batches

    async def _call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the store.

        Raises:
            ServingError: the method's own; or too many wait.
        """
        if self._num_waiting >= _MOST_WAITING:
            raise Overloaded(f"{_MOST_WAITING} calls wait for files and batches")
        self._num_waiting += 1
        try:
            return await self._store.call(method, *arguments)
        finally:
            self._num_waiting -= 1

    # -- files ---------------------------------------------------------------------------------------------------

    async def _upload(self, scope: Scope, receive: Receive) -> Answer | None:
        store, headers = self._store, scope["headers_by_name"]
        if media_type(headers) != "multipart/form-data":
            raise UnsupportedMedia("a file comes as multipart/form-data")
        length, most = headers.get("content-length", ""), store.limits.file_bytes
        if length.isdigit() and (len(length) > 18 or int(length) > most + _FORM):
            scope[GIVEN_UP] = True
            raise _too_large(most)
        size = min(int(length), most) if length.isdigit() else most
        id = await self._call(store.reserve, owner_of(headers), size)
        kept = False
        try:
            with self._model.receiving():
                form = await asyncio.wait_for(self._receive(scope, receive, store.path(id), most), _UPLOAD_SECONDS)
            if form is None:
                return None
            new = read_file(form, self._model.context)
            file = await self._call(store.keep, id, new)
            kept = True
            return file, new.ignored
        except asyncio.TimeoutError:
            scope[GIVEN_UP] = True
            raise TooSlow("the file did not arrive in time (option.client_timeout)") from None
        except OSError as error:
            scope[GIVEN_UP] = True
            raise Unavailable("the file cannot be written", detail=str(error)) from None
        finally:
            if not kept:
                await store.call(store.drop, id)

    async def _receive(self, scope: Scope, receive: Receive, path: Path, most: int) -> dict[str, Any] | None:
        """Write the file of a form; return the form, or None when the client went away."""
        with open(path, "xb", opener=_private) as file:
            form = FormReader(scope["headers_by_name"]["content-type"], _bounded(file, most))
            size = 0
            while True:
                message = await asyncio.wait_for(receive(), self._model.config.client_timeout)
                if message["type"] == "http.disconnect":
                    return None
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                try:
                    await run_in_daemon_thread(functools.partial(form.feed, part))
                    if size - file.tell() > _FORM:
                        raise InvalidPayload(f"the form has more than {_FORM} bytes beside its file")
                except ServingError:
                    if more:
                        scope[GIVEN_UP] = True
                    raise
                if not more:
                    return form.end()

    async def _files(self, scope: Scope, receive: Receive) -> Answer:
        store, asked = self._store, read_page(_query(scope), _MOST_FILES, _MOST_FILES)
        items, more = await self._call(store.files, _owner(scope), asked)
        return page(items, has_more=more), ()

    async def _file(self, scope: Scope, receive: Receive) -> Answer:
        return await self._found(scope), ()

    async def _delete(self, scope: Scope, receive: Receive) -> Answer:
        store, id = self._store, scope["path_params"]["file"]
        await self._call(store.delete, _owner(scope), id)
        return {"id": id, "object": "file", "deleted": True}, ()

    async def _content(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._model.adapters.counted():
            try:
                found, store = await self._found(scope), self._store
                file = await self._call(functools.partial(open, store.path(found["id"]), "rb"))
            except ServingError as error:
                return await send_answer(scope, send, ERRORS.whole(error))
            with file:
                length = [(b"content-length", str(found["bytes"]).encode())]
                await send_start(scope, send, 200, "application/octet-stream", length)
                left = found["bytes"] if scope["method"] != "HEAD" else 0
                while left > 0 and (part := await run_in_daemon_thread(functools.partial(file.read, min(left, _PART)))):
                    left -= len(part)
                    await send({"type": "http.response.body", "body": part, "more_body": left > 0})
                if not found["bytes"] or scope["method"] == "HEAD":
                    await send({"type": "http.response.body", "body": b""})

    async def _found(self, scope: Scope) -> OpenAiFile:
        store = self._store
        return await self._call(store.file, _owner(scope), scope["path_params"]["file"])

    # -- batches -------------------------------------------------------------------------------------------------

    async def _create(self, scope: Scope, receive: Receive) -> Answer | None:
        store = self._store
        body = await read_body(scope, receive, _FORM, self._model)
        if body is None:
            return None
        asked = read_batch(decode(body), self._endpoints, self._model.context)
        batch = await self._call(store.create, _owner(scope), asked)
        store.created.set()
        return batch, asked.ignored

    async def _batches(self, scope: Scope, receive: Receive) -> Answer:
        store, asked = self._store, read_page(_query(scope), _MOST_BATCHES, _USUAL_BATCHES)
        items, more = await self._call(store.batches, _owner(scope), asked)
        return page(items, has_more=more), ()

    async def _batch(self, scope: Scope, receive: Receive) -> Answer:
        store = self._store
        return await self._call(store.batch, _owner(scope), scope["path_params"]["batch"]), ()

    async def _cancel(self, scope: Scope, receive: Receive) -> Answer:
        store = self._store
        return await self._call(store.cancel, _owner(scope), scope["path_params"]["batch"]), ()


def _owner(scope: Scope) -> str:
    return owner_of(scope["headers_by_name"])


def _query(scope: Scope) -> QueryParams:
    return QueryParams(scope["query_string"])


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"'file' has more than {most} bytes (option.batches_max_file_bytes)")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _bounded(file: BinaryIO, most: int) -> Callable[[memoryview], None]:
    """Return a function that writes to a file until it is too large."""

    def write(data: memoryview) -> None:
        if file.tell() + len(data) > most:
            raise _too_large(most)
        file.write(data)

    return write
