"""OpenAI's routes for files and batches (`option.batches_store`). Files are received and sent in chunks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol, TypeVar

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler.core.errors import (
    InvalidPayload,
    NotFound,
    ServingError,
    TooLarge,
    TooSlow,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.fair_queue import OwnerCounts
from handler.core.loop import run_in_daemon_thread, wait_for
from handler.http.inference import (
    GIVEN_UP,
    Endpoint,
    Handle,
    Responded,
    declared_length,
    decode_short_body,
    read_short_body,
    send_refusal,
    send_start,
)
from handler.http.routes import json_handler
from handler.http.urls import query_of
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.openai.api import ERRORS, Page, listed, read_page
from handler.protocols.openai.batches import read_batch, read_file
from handler.serving.batches.store import OPENAI, BatchKind, BatchStore
from handler.serving.compression import body_decoder, check_encoding, content_encoding
from handler.serving.forms import FormReader, Parts
from handler.serving.head import media_type, owner_of
from handler.serving.model import ServedModel
from handler.serving.quota import BODY_MEMORY, Share

_MAX_WAITING = 64  # number of calls that wait for the store, from which on each owner may have only its share
_PART = 1 << 18  # bytes of a file to send at once
_FORM = 1 << 16  # maximum size of a form besides its file, in bytes
_UPLOAD_SECONDS = 1800.0
_MOST_FILES = 10_000  # maximum number of files in a list

T = TypeVar("T")


class StoreRoutes:
    """Routes that use the store of batches."""

    errors: ClassVar[ErrorFormat]
    uploaded: ClassVar = "'file'"
    """The noun for the uploaded data in error messages."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._waiting = OwnerCounts(_MAX_WAITING, f"{_MAX_WAITING} requests for files and batches are already waiting")

    def route(self, path: str, **handlers: Handle) -> Route:
        return Route(path, Endpoint(handlers, errors=self.errors))

    def json(self, answer: Callable[[Scope, Receive], Awaitable[Responded]]) -> Handle:
        async def checked(scope: Scope, receive: Receive) -> Responded:
            if scope["method"] in ("POST", "DELETE"):
                self._model.availability.check_open()
            return await answer(scope, receive)

        return json_handler(self._model, checked, self.errors)

    @property
    def store(self) -> BatchStore:
        if self._model.batches is None:
            raise NotFound("files and batches are not enabled on this server (option.batches_store)")
        return self._model.batches

    async def call(self, scope: Scope, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the store.

        Raises:
            ServingError: the method failed, or too many calls are waiting, and the owner has its share of them.
        """
        store = self.store
        with self._waiting.hold(owner_in(scope)):
            return await store.call(method, store, *arguments)

    # -- the contents of files -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def new_file(self, scope: Scope, kind: BatchKind) -> AsyncIterator[str]:
        """Yield the id of a new file, which the block writes. Remove the file if the block fails.

        Raises:
            ServingError: there is no room for the file, it does not arrive in time, or it cannot be written.
        """
        store, encoding = self.store, content_encoding(scope["headers_by_name"])
        check_encoding(encoding)
        scope[GIVEN_UP] = True  # until the whole body has been received
        length, most = declared_length(scope), self._model.config.batches_max_file_bytes
        if length > most + _FORM:
            raise file_too_large(most, self.uploaded)
        size = most if encoding else length  # of a compressed file, only the maximum is certain
        id = await self.call(scope, BatchStore.reserve, owner_in(scope), min(size, most) if size else most, kind)
        kept = False
        try:
            yield id
            kept = True
        except asyncio.TimeoutError:
            raise TooSlow(
                "the file did not arrive in time (option.client_timeout for each part, 30 minutes in all)"
            ) from None
        except OSError as error:
            raise Unavailable("the file cannot be written", detail=str(error)) from None
        finally:
            if not kept:
                await store.call(store.drop, id)

    async def receive(self, scope: Scope, receive: Receive, upload: BodyReader) -> None:
        """Pass the body to a reader, on a thread."""
        with self._model.receiving:
            await wait_for(self._receive_parts(scope, receive, upload), _UPLOAD_SECONDS)

    async def _receive_parts(self, scope: Scope, receive: Receive, upload: BodyReader) -> None:
        more = True
        with Share(self._model.admission.memory.of(owner_in(scope))) as memory:
            while more:
                message = await wait_for(receive(), self._model.config.client_timeout)
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part, more = message.get("body", b""), message.get("more_body", False)
                if not more:
                    del scope[GIVEN_UP]
                await run_in_daemon_thread(upload.feed, part)
                memory.set(BODY_MEMORY * upload.num_held)

    async def send(self, scope: Scope, receive: Receive, send: Send, parts: Callable[[], bytes]) -> None:
        """Send a body whose parts are read on a thread, until its end or until the client disconnects."""
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            more = scope["method"] != "HEAD"
            while more and not gone.done():
                part = await run_in_daemon_thread(parts)
                more = bool(part)
                if more:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()


class BatchRoutes(StoreRoutes):
    """OpenAI's routes for files and batches."""

    errors = ERRORS

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        paths = model.admission.routes.dialects
        self._endpoints = [path for path in paths if path.startswith("/v1/") and "{" not in path]
        route, upload, create = self.route, self.json(self._upload), self.json(self._create)
        self.routes = [
            route("/v1/files", GET=self._many(BatchStore.files, _MOST_FILES, _MOST_FILES), POST=upload),
            route("/v1/files/{file}", GET=self._one(BatchStore.file), DELETE=self._one(BatchStore.delete)),
            route("/v1/files/{file}/content", GET=self._content),
            route("/v1/batches", GET=self._many(BatchStore.batches), POST=create),
            route("/v1/batches/{batch}", GET=self._one(BatchStore.batch)),
            route("/v1/batches/{batch}/cancel", POST=self._one(BatchStore.cancel)),
        ]

    def _one(self, method: Callable[[BatchStore, str, str], Any]) -> Handle:
        """Return a handler that calls a method of the store with the owner of the request and the ID in the path."""

        async def answer(scope: Scope, receive: Receive) -> Responded:
            (id,) = scope["path_params"].values()
            return await self.call(scope, method, owner_in(scope), id), ()

        return self.json(answer)

    def _many(self, method: Callable[[BatchStore, str, Page], tuple[list[Any], bool]], *limits: int) -> Handle:
        """Return a handler that calls a method of the store with the owner of the request and the requested page.

        Args:
            limits: maximum and default number of items on a page, as for `read_page`.
        """

        async def answer(scope: Scope, receive: Receive) -> Responded:
            page = read_page(QueryParams(query_of(scope)), *limits)
            items, has_more = await self.call(scope, method, owner_in(scope), page)
            return listed(items, has_more=has_more), ()

        return self.json(answer)

    async def _create(self, scope: Scope, receive: Receive) -> Responded:
        store = self.store
        body = await read_short_body(scope, receive, _FORM, self._model)
        value = await decode_short_body(scope, body, self._model)
        params = read_batch(value, self._endpoints, self._model.context)
        batch = await self.call(scope, BatchStore.create, owner_in(scope), params)
        store.created.set()
        return batch, params.ignored

    # -- the contents of files -----------------------------------------------------------------------------------

    async def _upload(self, scope: Scope, receive: Receive) -> Responded:
        store = self.store
        if media_type(scope["headers_by_name"]) != "multipart/form-data":
            raise UnsupportedMedia("a file must be sent as multipart/form-data")
        async with self.new_file(scope, OPENAI) as id:
            with create_file(store.path(id)) as file:
                upload = _Upload(scope["headers_by_name"], file, self._model.config.batches_max_file_bytes)
                await self.receive(scope, receive, upload)
            new = read_file(upload.end(), self._model.context)
            return await self.call(scope, BatchStore.keep, id, new), new.ignored

    async def _content(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._model.adapters.calls:
            try:
                content, file = await self.call(scope, BatchStore.open, owner_in(scope), scope["path_params"]["file"])
            except ServingError as error:
                return await send_refusal(scope, send, ERRORS.whole(error))
            with file:
                length = [(b"content-length", str(content["bytes"]).encode())]
                await send_start(scope, send, 200, "application/octet-stream", length)
                await self.send(scope, receive, send, functools.partial(file.read, _PART))


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def owner_in(scope: Scope) -> str:
    """Return the owner of a request's API key."""
    return owner_of(scope["headers_by_name"])


def file_too_large(most: int, name: str = "'file'") -> TooLarge:
    """Return the error for a file, or for another part of a request, that is too large."""
    return TooLarge(f"{name} has more than {most} bytes (option.batches_max_file_bytes)")


def create_file(path: Path) -> BinaryIO:
    """Create a file that only this user can read, and open it for writing."""
    return open(path, "xb", opener=functools.partial(os.open, mode=0o600))


class BodyReader(Protocol):
    """Reads a body while it arrives.

    Attributes:
        num_held: number of bytes that it holds in memory.
    """

    num_held: int

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the body.

        Raises:
            ServingError: the body is invalid or too large.
        """


class _Upload:
    """A form with a file, which is written as the body arrives, without its Content-Encoding.

    Args:
        headers: headers by name in lower case.
        limit: maximum size of the file, in bytes.
    """

    num_held = 0

    def __init__(self, headers: Mapping[str, str], file: BinaryIO, limit: int) -> None:
        self._file = file
        self._form = FormReader(headers["content-type"], _bounded(file, limit))
        self._decoder = body_decoder(content_encoding(headers), limit + _FORM)
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the body.

        Raises:
            ServingError: the form is invalid or too large, or is not compressed as its Content-Encoding says.
        """
        for part in self._decoder.feed(data):
            self._form.feed(part)
            self._size += len(part)
            if self._size - self._file.tell() > _FORM:
                raise InvalidPayload(f"the form has more than {_FORM} bytes outside its file")

    def end(self) -> Parts:
        """Return the parts of the form.

        Raises:
            InvalidPayload: the body ends too early.
        """
        self._decoder.end()
        return self._form.end()


def _bounded(file: BinaryIO, most: int) -> Callable[[memoryview], None]:
    """Return a function that writes to a file, and raises TooLarge when the file would exceed `most` bytes."""

    def write(data: memoryview) -> None:
        if file.tell() + len(data) > most:
            raise file_too_large(most)
        file.write(data)

    return write
