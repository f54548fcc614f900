"""Anthropic's routes for message batches (`option.batches_store`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, BinaryIO

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from handler.core.errors import BadRequest, Conflict, ServingError
from handler.http.batch_routes import StoreRoutes, create_file, file_too_large, owner_in
from handler.http.inference import Responded, send_refusal, send_start
from handler.http.urls import query_of
from handler.protocols.anthropic.api import ERRORS, listed, read_page
from handler.protocols.anthropic.batches import (
    BATCHES,
    ENDPOINT,
    DeletedMessageBatch,
    MessageBatch,
    MessageResults,
    RequestReader,
    RequestSplitter,
    message_batch,
    new_message_batch,
)
from handler.protocols.openai.api import OpenAiBatch
from handler.protocols.openai.batches import DAY, LIFETIME, NewFile
from handler.serving.batches.store import ANTHROPIC, OPEN_STATUSES, BatchStore
from handler.serving.compression import body_decoder, content_encoding
from handler.serving.large_bodies import LARGE, max_decoded
from handler.serving.model import ServedModel
from handler.serving.quota import Share

_PART = 1 << 18  # approximate number of bytes of results to send at once
_BODY = "the body"
_INPUT = NewFile("requests.jsonl", LIFETIME + 2 * DAY, ())  # the file is kept as long as the batch


class MessageBatchRoutes(StoreRoutes):
    errors = ERRORS
    uploaded = _BODY

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        if ENDPOINT not in model.admission.routes.dialects:
            self.routes = []
            return
        route, path = self.route, f"{BATCHES}/{{batch}}"
        self.routes = [
            route(BATCHES, GET=self.json(self._list), POST=self.json(self._create)),
            route(path, GET=self.json(self._retrieve), DELETE=self.json(self._delete)),
            route(f"{path}/cancel", POST=self.json(self._cancel)),
            route(f"{path}/results", GET=self._results),
        ]

    async def _create(self, scope: Scope, receive: Receive) -> Responded:
        store = self.store
        async with self.new_file(scope, ANTHROPIC) as id:
            with create_file(store.path(id)) as file:
                requests = _Requests(self._model, owner_in(scope), content_encoding(scope["headers_by_name"]), file)
                await self.receive(scope, receive, requests)
            rest = requests.end()
            await self.call(scope, BatchStore.keep, id, _INPUT)
            new = new_message_batch(id, rest, self._model.context)
            new = new._replace(total=requests.num_requests)
            batch = await self.call(scope, BatchStore.create, owner_in(scope), new, ANTHROPIC)
        store.created.set()
        return _shown(batch), new.ignored

    async def _retrieve(self, scope: Scope, receive: Receive) -> Responded:
        return _shown(await self._batch(scope, BatchStore.batch)), ()

    async def _cancel(self, scope: Scope, receive: Receive) -> Responded:
        try:
            batch = await self._batch(scope, BatchStore.cancel)
        except Conflict:  # it has ended
            batch = await self._batch(scope, BatchStore.batch)
        return _shown(batch), ()

    async def _delete(self, scope: Scope, receive: Receive) -> Responded:
        try:
            await self._batch(scope, BatchStore.delete_batch)
        except Conflict as error:  # clients would retry after 409
            raise BadRequest(error.message) from None
        deleted: DeletedMessageBatch = {"id": scope["path_params"]["batch"], "type": "message_batch_deleted"}
        return deleted, ()

    async def _list(self, scope: Scope, receive: Receive) -> Responded:
        page = read_page(QueryParams(query_of(scope)))
        batches, has_more = await self.call(scope, BatchStore.batches, owner_in(scope), page, ANTHROPIC)
        shown = [*map(_shown, reversed(batches) if page.is_reversed else batches)]
        return listed(shown, has_more=has_more), ()

    async def _results(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._model.adapters.calls, contextlib.ExitStack() as opened:
            try:
                results = await self.call(scope, _open_results, owner_in(scope), scope["path_params"]["batch"])
                opened.enter_context(contextlib.closing(results))
            except ServingError as error:
                return await send_refusal(scope, send, ERRORS.whole(error))
            except ClientDisconnect:
                return
            await send_start(scope, send, 200, "application/x-jsonl", [])
            await self.send(scope, receive, send, functools.partial(_next_part, iter(results)))

    async def _batch(self, scope: Scope, method: Any) -> Any:
        return await self.call(scope, method, owner_in(scope), scope["path_params"]["batch"], ANTHROPIC)


class _Requests:
    """A body with requests, which are written as lines while the body arrives.

    Args:
        owner: owner of the body, who holds the memory for its requests.
        encoding: the body's Content-Encoding, or "".
        file: file for the lines.

    Attributes:
        num_held: number of bytes that are held in memory.
    """

    def __init__(self, model: ServedModel, owner: str, encoding: str, file: BinaryIO) -> None:
        self._limit = model.config.batches_max_file_bytes
        self._file = file
        self._decoder = body_decoder(encoding, self._limit)
        self._splitter = RequestSplitter(model.config.max_request_size, model.config.batches_max_lines)
        self._reader = RequestReader(functools.partial(_decode_request, model, owner))
        self.num_held = 0

    @property
    def num_requests(self) -> int:
        return self._reader.num_requests

    def feed(self, data: bytes) -> None:
        for part in self._decoder.feed(data):
            for request in self._splitter.feed(part):
                line = self._reader.line(request)
                if self._file.tell() + len(line) > self._limit:
                    raise file_too_large(self._limit, _BODY)
                self._file.write(line)
        self.num_held = self._splitter.size

    def end(self) -> dict[str, Any]:
        """Return the members of the body besides the requests.

        Raises:
            InvalidPayload: the body ends too early, or is not an object with a list of requests.
        """
        self._decoder.end()
        return self._splitter.end()


def _decode_request(model: ServedModel, owner: str, request: bytes) -> Any:
    """Decode a request. A large one is decoded in the queue for large bodies, which blocks the calling thread."""
    bodies = model.preprocessor.large_bodies
    with Share(model.admission.memory.of(owner)) as memory:
        memory.take(len(request) + max_decoded(request))
        if len(request) < LARGE:
            return bodies.read(request)[0]
        return bodies.submit(len(request), bodies.read, request, owner=owner).result()[0]


def _shown(batch: OpenAiBatch) -> MessageBatch:
    num_unsent: int = batch.get("num_unsent", 0)  # type: ignore[assignment]
    return message_batch(batch, num_unsent)


def _open_results(store: BatchStore, owner: str, id: str) -> MessageResults:
    """Open the files of a batch that has ended.

    Raises:
        NotFound: the owner has no batch with this id, or its results have been removed.
        BadRequest: it has not ended.
    """
    batch = store.batch(owner, id, ANTHROPIC)
    if batch["status"] in OPEN_STATUSES:
        raise BadRequest(f"{id} has not ended; its results are available when its processing_status is ended")
    counts = batch["request_counts"]
    names = [batch["output_file_id"], batch["error_file_id"]]
    with contextlib.ExitStack() as opened:

        def open_file(name: str, kind: str) -> BinaryIO:
            return opened.enter_context(store.open(owner, name, (kind,))[1])

        outputs = [open_file(name, ANTHROPIC.output) for name in names if name is not None]
        is_complete = counts["completed"] + counts["failed"] == counts["total"]
        input = None if is_complete else open_file(batch["input_file_id"], ANTHROPIC.input)
        opened.pop_all()
    return MessageResults(batch["status"], outputs, input)


def _next_part(lines: Iterator[bytes]) -> bytes:
    """Return the next lines, or b"" after the last one."""
    part = bytearray()
    for line in lines:
        part += line
        if len(part) >= _PART:
            break
    return bytes(part)
