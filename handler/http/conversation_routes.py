"""OpenAI's routes for conversations (`option.responses_store`). Only the owner of a conversation can access it."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler.core.errors import InvalidPayload, NotFound, ServingError
from handler.core.framing import JSON, dumps
from handler.http.exchange import EXCHANGE, AnyExchange
from handler.http.inference import Endpoint, Handle, encoded, read_body, send_answer
from handler.http.urls import query_of
from handler.protocols.kernel import body as bodies
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai.api import ERRORS, listed, read_page
from handler.protocols.responses.conversations import (
    NewItems,
    calls_in,
    check_include,
    deleted_conversation,
    has_outputs,
    new_conversation,
    read_items,
    read_metadata,
)
from handler.protocols.responses.conversations import read_body as read_object
from handler.serving.compression import check_encoding, content_encoding, inflate
from handler.serving.conversations import Conversations
from handler.serving.database import load_json
from handler.serving.head import owner_of
from handler.serving.large_bodies import LARGE, MOST_DECODED
from handler.serving.model import ServedModel
from handler.serving.quota import BODY_MEMORY, Share
from handler.serving.request.stages import PARSE_INLINE
from handler.serving.request.task import ignored_header

T = TypeVar("T")


class _Call(NamedTuple):
    """A call of a route.

    Attributes:
        memory: share of the memory quota for the body and the response.
    """

    scope: Scope
    receive: Receive
    memory: Share

    @property
    def owner(self) -> str:
        return owner_of(self.scope["headers_by_name"])

    @property
    def id(self) -> str:
        id: str = self.scope["path_params"]["conversation"]
        return id

    @property
    def item(self) -> str:
        item: str = self.scope["path_params"]["item"]
        return item

    @property
    def query(self) -> QueryParams:
        return QueryParams(query_of(self.scope))

    def take(self, num_bytes: int) -> None:
        """Take memory for stored items, before they are read."""
        self.memory.take(BODY_MEMORY * num_bytes)


_Answered = tuple[Any, Sequence[str]]
"""The JSON value of a response, and the names of the ignored parameters."""


class ConversationRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        path = "/v1/conversations"
        one, items = f"{path}/{{conversation}}", f"{path}/{{conversation}}/items"
        self.routes = [
            self._route(path, POST=self._create),
            self._route(one, GET=self._retrieve, POST=self._update, DELETE=self._delete),
            self._route(items, GET=self._list, POST=self._add),
            self._route(f"{items}/{{item}}", GET=self._item, DELETE=self._delete_item),
        ]

    def _route(self, path: str, **answers: Callable[[_Call], Awaitable[_Answered]]) -> Route:
        handlers = {method: self._handler(answer) for method, answer in answers.items()}
        return Route(path, Endpoint(handlers, errors=ERRORS))

    def _handler(self, answer: Callable[[_Call], Awaitable[_Answered]]) -> Handle:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            exchange: AnyExchange = scope["extensions"][EXCHANGE]
            with self._model.adapters.calls, Share(self._model.admission.memory) as memory:
                try:
                    found, ignored = await answered(_Call(scope, receive, memory))
                except ClientDisconnect:
                    return
                await send_answer(scope, send, found, encoded(ignored_header(ignored).items()))
                await exchange.read()  # the response needs memory until then

        async def answered(call: _Call) -> tuple[HttpResponse, Sequence[str]]:
            try:
                if call.scope["method"] in ("POST", "DELETE"):
                    self._model.availability.check_open()
                if self._model.preprocessor.store is None:
                    raise NotFound("conversations are not stored on this server (option.responses_store)")
                value, ignored = await answer(call)
                found = HttpResponse(200, JSON.content_type, dumps(value))
                call.memory.take(len(found.body))
            except ServingError as error:
                return ERRORS.whole(error), ()
            return found, ignored

        return handle

    # -- conversations -------------------------------------------------------------------------------------------

    async def _create(self, call: _Call) -> _Answered:
        body = await self._read(call)
        value = read_object({} if body is None else body, "items", "metadata")
        conversation = new_conversation(read_metadata(value))
        new = await self._run(call, functools.partial(self._items, call, value, {}, required=False))
        kept = new.kept()

        def create(conversations: Conversations) -> tuple[int, Any]:
            return conversations.create(call.owner, {**conversation}, kept), conversation

        return await self._change(call, create), new.ignored

    async def _retrieve(self, call: _Call) -> _Answered:
        return load_json(await self._look(call, lambda found: found.find(call.owner, call.id).head)), ()

    async def _update(self, call: _Call) -> _Answered:
        body = read_object(await self._read(call), "metadata")
        if "metadata" not in body:
            raise InvalidPayload("'metadata' is missing")
        pairs = read_metadata(body)
        ignored = bodies.report_unknown(
            [name for name in body if name != "metadata"], body, self._model.preprocessor.context
        )
        return await self._change(call, lambda found: found.update(call.owner, call.id, pairs)), ignored

    async def _delete(self, call: _Call) -> _Answered:
        def delete(conversations: Conversations) -> tuple[int, None]:
            conversations.delete(call.owner, call.id)
            return 0, None

        await self._change(call, delete)
        return deleted_conversation(call.id), ()

    # -- items ---------------------------------------------------------------------------------------------------

    async def _add(self, call: _Call) -> _Answered:
        check_include(_included(call.query))
        body = read_object(await self._read(call), "items")
        calls = {}
        if has_outputs(body):
            items = await self._look(call, functools.partial(_all_items, call))
            calls = await self._run(call, lambda: calls_in([load_json(item) for item in items]))
        new = await self._run(call, functools.partial(self._items, call, body, calls))
        kept = new.kept()

        def add(conversations: Conversations) -> tuple[int, None]:
            number = conversations.find(call.owner, call.id).number
            conversations.append(number, kept)
            return number, None

        await self._change(call, add)
        return listed(new.items, has_more=False), new.ignored

    async def _list(self, call: _Call) -> _Answered:
        check_include(_included(call.query))
        page = read_page(call.query)
        items, has_more = await self._look(call, lambda found: found.page(call.owner, call.id, page, call.take))
        return listed([load_json(item) for item in items], has_more=has_more), ()

    async def _item(self, call: _Call) -> _Answered:
        check_include(_included(call.query))
        item = await self._look(call, lambda found: found.item(call.owner, call.id, call.item, call.take))
        return load_json(item), ()

    async def _delete_item(self, call: _Call) -> _Answered:
        return await self._change(call, lambda found: (0, found.delete_item(call.owner, call.id, call.item))), ()

    # -- the body and the store ----------------------------------------------------------------------------------

    async def _read(self, call: _Call) -> Any:
        """Return the decoded body, or None if it is empty."""
        encoding, limit = content_encoding(call.scope["headers_by_name"]), self._model.config.max_request_size
        check_encoding(encoding)
        body = await read_body(call.scope, call.receive, limit, self._model, call.memory)
        if encoding:
            body = await self._run(call, lambda: _inflated(body, encoding, limit, call.memory), size=LARGE)
        if not body.strip():
            return None
        call.memory.take(bodies.decoded_size(body, MOST_DECODED if len(body) >= LARGE else sys.maxsize))
        return await self._run(call, functools.partial(self._decode, body), size=len(body))

    def _decode(self, body: bytes) -> Any:
        if len(body) < LARGE:
            return bodies.decode(body)
        return self._model.preprocessor.large_bodies.decode(body, plain=False, unique_keys=True)[0]

    def _items(self, call: _Call, body: Any, calls: dict[str, str], *, required: bool = True) -> NewItems:
        return read_items(body, self._model.preprocessor.context, call.owner, calls, required=required)

    async def _run(self, call: _Call, use: Callable[[], T], *, size: int | None = None) -> T:
        """Call `use`, on a thread if there is much to read. By default, the memory that the call holds tells this."""
        size = call.memory.size // BODY_MEMORY if size is None else size
        return use() if size < PARSE_INLINE else await self._model.admission.run(size, use, call.owner)

    async def _look(self, call: _Call, read: Callable[[Conversations], T]) -> T:
        store = self._model.preprocessor.store
        assert store is not None, "the handler has checked this"
        return await asyncio.wrap_future(store.read_conversations(call.owner, read))

    async def _change(self, call: _Call, change: Callable[[Conversations], tuple[int, T]]) -> T:
        store = self._model.preprocessor.store
        assert store is not None, "the handler has checked this"
        return await asyncio.wrap_future(store.change_conversation(call.owner, change))


def _included(query: QueryParams) -> list[str]:
    return [*query.getlist("include"), *query.getlist("include[]")]  # OpenAI's client sends the latter


def _all_items(call: _Call, conversations: Conversations) -> list[bytes]:
    stored = conversations.find(call.owner, call.id)
    call.take(stored.size)
    return conversations.items(stored.number)


def _inflated(body: bytes, encoding: str, limit: int, memory: Share) -> bytes:
    parts = []
    for part in inflate(body, encoding, limit, " (max_request_size)"):
        memory.take(BODY_MEMORY * len(part))
        parts.append(part)
    return b"".join(parts)
