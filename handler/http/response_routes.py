"""OpenAI's routes for stored responses (`option.responses_store`). Only the owner of a response can access it."""

from __future__ import annotations

import asyncio

from starlette.routing import Route

from handler.core.errors import NotKept
from handler.http.background_responses import BackgroundHandlers
from handler.http.inference import Endpoint, Handle, Responded
from handler.http.stored_calls import StoredCall, stored_handler
from handler.protocols.openai.api import ERRORS, listed, read_page
from handler.protocols.responses.api import deleted, not_kept
from handler.serving.model import ServedModel


class ResponseRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._background = BackgroundHandlers(model)
        retrieve = self._background.retrieve(stored_handler(model, _retrieve))
        delete = stored_handler(model, self._delete)
        path = "/v1/responses/{response}"
        self.routes = [
            _route(path, GET=retrieve, DELETE=delete),
            _route(f"{path}/cancel", POST=stored_handler(model, self._background.cancel)),
            _route(f"{path}/input_items", GET=stored_handler(model, _input_items)),
        ]

    async def _delete(self, call: StoredCall) -> Responded:
        await self._background.stop(call.owner, call.id)
        if not await asyncio.wrap_future(call.store.delete(call.owner, call.id)):
            raise not_kept(call.id)
        return deleted(call.id), ()


def _route(path: str, **handlers: Handle) -> Route:
    return Route(path, Endpoint(handlers, errors=ERRORS))


async def _retrieve(call: StoredCall) -> Responded:
    response = await asyncio.wrap_future(call.store.response(call.owner, call.id, call.take))
    if response is None:
        raise not_kept(call.id)
    return response, ()


async def _input_items(call: StoredCall) -> Responded:
    page = read_page(call.query)
    listing = await asyncio.wrap_future(call.store.input_items(call.owner, call.id, page, call.take))
    if listing is None:
        if not page.after:
            raise not_kept(call.id)
        raise NotKept(f"after={page.after[:128]}: response {call.id[:128]!r} has no such item")
    items, has_more = listing
    return listed(items, has_more=has_more), ()
