"""Handlers of the routes for stored responses and conversations (`option.responses_store`)."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from handler.core.errors import NotFound, ServingError
from handler.core.framing import JSON, dumps
from handler.http.exchange import EXCHANGE, AnyExchange
from handler.http.inference import Handle, Responded, encoded, send_answer
from handler.http.urls import query_of
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai.api import ERRORS
from handler.serving.head import owner_of
from handler.serving.model import ServedModel
from handler.serving.quota import BODY_MEMORY, Share
from handler.serving.request.task import ignored_header
from handler.serving.stored_responses import ResponseStore


class StoredCall(NamedTuple):
    """A call of a route for stored responses or conversations.

    Attributes:
        store: the store of the server.
        memory: share of the memory quota for the body and the response.
    """

    scope: Scope
    receive: Receive
    store: ResponseStore
    memory: Share

    @property
    def owner(self) -> str:
        return owner_of(self.scope["headers_by_name"])

    @property
    def id(self) -> str:
        """The id of the response or conversation in the path."""
        id: str = next(iter(self.scope["path_params"].values()))
        return id

    @property
    def item(self) -> str:
        """The id of the item in the path."""
        item: str = self.scope["path_params"]["item"]
        return item

    @property
    def query(self) -> QueryParams:
        return QueryParams(query_of(self.scope))

    def take(self, num_bytes: int) -> None:
        """Reserve memory for stored items before they are read."""
        self.memory.take(BODY_MEMORY * num_bytes)


def store_of(model: ServedModel, subject: str = "responses") -> ResponseStore:
    """Return the store of a server.

    Args:
        subject: plural noun for the requested objects.

    Raises:
        NotFound: nothing is stored.
    """
    store = model.preprocessor.store
    if store is None:
        raise NotFound(f"{subject} are not stored on this server (option.responses_store)")
    return store


def stored_handler(
    model: ServedModel, respond: Callable[[StoredCall], Awaitable[Responded]], subject: str = "responses"
) -> Handle:
    """Return a handler that sends the result of `respond` as JSON, or nothing if the client has disconnected.

    Args:
        subject: plural noun for the objects of the route.
    """

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        exchange: AnyExchange = scope["extensions"][EXCHANGE]
        quota = model.admission.memory.of(owner_of(scope["headers_by_name"]))
        with model.adapters.calls, Share(quota) as memory:
            try:
                response, ignored = await responded(scope, receive, memory)
            except ClientDisconnect:
                return
            await send_answer(scope, send, response, encoded(ignored_header(ignored).items()))
            await exchange.read()  # the response needs memory until then

    async def responded(scope: Scope, receive: Receive, memory: Share) -> tuple[HttpResponse, Sequence[str]]:
        try:
            if scope["method"] in ("POST", "DELETE"):
                model.availability.check_open()
            call = StoredCall(scope, receive, store_of(model, subject), memory)
            value, ignored = await respond(call)
            size, encode = memory.size // BODY_MEMORY, functools.partial(dumps, value)
            body = await model.admission.process(size, encode, call.owner, apart=False)
            response = HttpResponse(200, JSON.content_type, body)
            memory.take(len(response.body))
        except ServingError as error:
            return ERRORS.whole(error), ()
        return response, ignored

    return handle
