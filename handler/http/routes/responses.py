"""Stored responses at /v1/responses/{id}: read, list their input, delete. A response is its owner's alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import QueryParams
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler.core.errors import NotFound, NotKept, ServingError
from handler.core.framing import JSON, dumps
from handler.http.asgi import Endpoint, send_answer
from handler.http.exchange import EXCHANGE, AnyExchange
from handler.protocols.kernel.http_response import HttpResponse
from handler.protocols.openai.errors import ERRORS
from handler.protocols.responses.stored import check_retrieval, deleted, not_kept, page, read_page
from handler.serving.model import ServedModel
from handler.serving.owners import owner_of
from handler.serving.response_store import ResponseStore
from handler.serving.turns import Share

Answer = Callable[[ResponseStore, str, str, QueryParams], Awaitable[Any]]
"""Takes the store, the owner, the response's id and the query."""


class ResponseRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        one = {"GET": self._handler(_retrieve), "DELETE": self._handler(_delete, changes=True)}
        self.routes = [
            Route("/v1/responses/{response}", Endpoint(one, errors=ERRORS)),
            Route(
                "/v1/responses/{response}/input_items",
                Endpoint({"GET": self._handler(_input_items)}, errors=ERRORS),
            ),
        ]

    def _handler(self, answer: Answer, *, changes: bool = False) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            exchange: AnyExchange = scope["extensions"][EXCHANGE]
            with Share(self._model.memory) as memory:
                await send_answer(scope, send, await found(scope, memory))
                await exchange.read()  # until then it takes memory

        async def found(scope: Scope, memory: Share) -> HttpResponse:
            store, id = self._model.store, scope["path_params"]["response"]
            try:
                if changes:
                    self._model.check_open()
                if store is None:
                    raise NotFound("no responses are stored here (option.responses_store)")
                query = QueryParams(scope["query_string"])
                value = await answer(store, owner_of(scope["headers_by_name"]), id, query)
                whole = HttpResponse(200, JSON.content_type, dumps(value))
                memory.take(len(whole.body))
            except ServingError as error:
                return ERRORS.whole(error)
            return whole

        return handle


async def _retrieve(store: ResponseStore, owner: str, id: str, query: QueryParams) -> Any:
    check_retrieval(query)
    found = await asyncio.wrap_future(store.response(owner, id))
    if found is None:
        raise not_kept(id)
    return found


async def _input_items(store: ResponseStore, owner: str, id: str, query: QueryParams) -> Any:
    limit, after, newest_first = read_page(query)
    found = await asyncio.wrap_future(store.input_items(owner, id, limit=limit, after=after, newest_first=newest_first))
    if found is None:
        raise not_kept(id) if not after else NotKept(f"after={after[:128]}: response {id[:128]!r} has no such item")
    return page(found.items, has_more=found.has_more)


async def _delete(store: ResponseStore, owner: str, id: str, query: QueryParams) -> Any:
    if not await asyncio.wrap_future(store.delete(owner, id)):
        raise not_kept(id)
    return deleted(id)
