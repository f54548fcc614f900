"""OpenAI's routes for conversations (`option.responses_store`). Only the owner of a conversation can access it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.datastructures import QueryParams
from starlette.routing import Route

from handler.core.errors import InvalidPayload
from handler.http.inference import Endpoint, Responded, read_body
from handler.http.stored_calls import StoredCall, stored_handler
from handler.protocols.kernel import body as bodies
from handler.protocols.openai.api import ERRORS, Page, listed, read_page
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
from handler.serving.large_bodies import LARGE
from handler.serving.model import ServedModel
from handler.serving.quota import BODY_MEMORY, Share

T = TypeVar("T")


class ConversationRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        path = "/v1/conversations"
        single, items = f"{path}/{{conversation}}", f"{path}/{{conversation}}/items"
        self.routes = [
            self._route(path, POST=self._create),
            self._route(single, GET=self._retrieve, POST=self._update, DELETE=self._delete),
            self._route(items, GET=self._list, POST=self._add),
            self._route(f"{items}/{{item}}", GET=self._item, DELETE=self._delete_item),
        ]

    def _route(self, path: str, **methods: Callable[[StoredCall], Awaitable[Responded]]) -> Route:
        handlers = {
            method: stored_handler(self._model, respond, "conversations") for method, respond in methods.items()
        }
        return Route(path, Endpoint(handlers, errors=ERRORS))

    # -- conversations -------------------------------------------------------------------------------------------

    async def _create(self, call: StoredCall) -> Responded:
        body = await self._read(call)
        value = read_object({} if body is None else body, "items", "metadata")
        conversation = new_conversation(read_metadata(value))
        new = await self._items(call, value, {}, required=False)

        def create(conversations: Conversations) -> tuple[int, Any]:
            return conversations.create(call.owner, {**conversation}, new.kept), conversation

        return await _change(call, create), new.ignored

    async def _retrieve(self, call: StoredCall) -> Responded:
        return load_json(await _look(call, lambda stored: stored.find(call.owner, call.id).head)), ()

    async def _update(self, call: StoredCall) -> Responded:
        body = read_object(await self._read(call), "metadata")
        if "metadata" not in body:
            raise InvalidPayload("'metadata' is missing")
        pairs = read_metadata(body)
        report = functools.partial(bodies.report_unknown, body, ("metadata",), self._model.preprocessor.context)
        ignored = await self._run(call, report)
        return await _change(call, lambda stored: stored.update(call.owner, call.id, pairs)), ignored

    async def _delete(self, call: StoredCall) -> Responded:
        def delete(conversations: Conversations) -> tuple[int, None]:
            conversations.delete(call.owner, call.id)
            return 0, None

        await _change(call, delete)
        return deleted_conversation(call.id), ()

    # -- items ---------------------------------------------------------------------------------------------------

    async def _add(self, call: StoredCall) -> Responded:
        check_include(_included(call.query))
        body = read_object(await self._read(call), "items")
        calls = {}
        if has_outputs(body):
            items = await _look(call, functools.partial(_all_items, call))
            calls = await self._run(call, lambda: calls_in([load_json(item) for item in items]))
        new = await self._items(call, body, calls)

        def add(conversations: Conversations) -> tuple[int, None]:
            number = conversations.find(call.owner, call.id).number
            conversations.append(number, new.kept)
            return number, None

        await _change(call, add)
        return listed(new.items, has_more=False), new.ignored

    async def _list(self, call: StoredCall) -> Responded:
        query = call.query
        check_include(_included(query))
        page = read_page(query)
        return await _look(call, functools.partial(_page, call, page)), ()

    async def _item(self, call: StoredCall) -> Responded:
        check_include(_included(call.query))
        return await _look(call, lambda stored: load_json(stored.item(call.owner, call.id, call.item, call.take))), ()

    async def _delete_item(self, call: StoredCall) -> Responded:
        return await _change(call, lambda stored: (0, stored.delete_item(call.owner, call.id, call.item))), ()

    # -- the body ------------------------------------------------------------------------------------------------

    async def _read(self, call: StoredCall) -> Any:
        """Return the decoded body, or None if it is empty."""
        encoding, limit = content_encoding(call.scope["headers_by_name"]), self._model.config.max_request_size
        check_encoding(encoding)
        body = await read_body(call.scope, call.receive, limit, self._model, call.memory)
        if encoding:
            body = await self._run(call, lambda: _inflated(body, encoding, limit, call.memory), size=LARGE)
        if not body or body.isspace():
            return None
        return await self._model.admission.decode(body, call.memory.set, call.owner)

    async def _items(self, call: StoredCall, body: Any, calls: dict[str, str], *, required: bool = True) -> NewItems:
        context = self._model.preprocessor.context
        read = functools.partial(read_items, body, context, call.owner, calls, required=required)
        new = await self._run(call, read)
        await self._model.admission.check_media(new.media, call.owner)
        return new

    async def _run(self, call: StoredCall, use: Callable[[], T], *, size: int | None = None) -> T:
        """Call `use`, on a thread if there is much to read. By default, the memory that the call holds decides."""
        size = call.memory.size // BODY_MEMORY if size is None else size
        return await self._model.admission.process(size, use, call.owner)


async def _look(call: StoredCall, read: Callable[[Conversations], T]) -> T:
    return await asyncio.wrap_future(call.store.read_conversations(call.owner, read))


async def _change(call: StoredCall, change: Callable[[Conversations], tuple[int, T]]) -> T:
    return await asyncio.wrap_future(call.store.change_conversation(call.owner, change))


def _included(query: QueryParams) -> list[str]:
    return [*query.getlist("include"), *query.getlist("include[]")]  # OpenAI's client sends the latter


def _all_items(call: StoredCall, conversations: Conversations) -> list[bytes]:
    stored = conversations.find(call.owner, call.id)
    call.take(stored.size)
    return conversations.items(stored.number)


def _page(call: StoredCall, page: Page, conversations: Conversations) -> dict[str, Any]:
    items, has_more = conversations.page(call.owner, call.id, page, call.take)
    return listed([*map(load_json, items)], has_more=has_more)


def _inflated(body: bytes, encoding: str, limit: int, memory: Share) -> bytes:
    parts = []
    for part in inflate(body, encoding, limit, " (max_request_size)"):
        memory.take(BODY_MEMORY * len(part))
        parts.append(part)
    return b"".join(parts)
