"""Routes about LoRA adapters: DJL Serving's (0.34), and SageMaker's calls.

SageMaker registers with a body `{"name", "src", "preload", "pin"}` where DJL has a query; all else is alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler.core.errors import BadRequest, InvalidPayload, NotFound, ServingError
from handler.http.asgi import Endpoint, read_body, send_error, send_json
from handler.protocols.kernel.readers.body import decode
from handler.protocols.openapi.answers import AdapterChange, Adapters, DescribedAdapter
from handler.scheduler.lora.calls import AdapterCall, read_adapter_call, required
from handler.scheduler.lora.registry import Registered
from handler.serving.model import ServedModel
from handler.serving.preprocess import ignored_header

_ALIAS = "x-amzn-sagemaker-adapter-alias"
"""SageMaker's header with the name that its user knows the adapter by."""

_PAGE = 100  # adapters in a list, at most and by default
_BODY = 1 << 20  # bytes

Values = tuple[Adapters | DescribedAdapter | AdapterChange, tuple[str, ...]]
"""What is answered as JSON, and the names that meant nothing."""


class AdapterRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._adapters = model.adapters

    @property
    def routes(self) -> list[Route]:
        many = Endpoint({"GET": self._handler(self._list), "POST": self._handler(self._register)})
        one = Endpoint({"GET": self._handler(self._describe), "DELETE": self._handler(self._unregister)})
        update = Endpoint({"POST": self._handler(self._update)})
        return [
            Route(f"{prefix}/adapters{path}", endpoint)
            for prefix in ("", "/models/{model}")
            for path, endpoint in (("", many), ("/{adapter}", one), ("/{adapter}/update", update))
        ]

    def _handler(
        self, answer: Callable[[Scope, Receive], Awaitable[Values | None]]
    ) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            with self._adapters.counted():
                try:
                    answered = await self._answer(answer, scope, receive)
                    if answered is not None:
                        value, ignored = answered
                        extra = [(name.encode(), text.encode()) for name, text in ignored_header(ignored).items()]
                        await send_json(scope, send, 200, value, extra)
                except ServingError as error:
                    await send_error(scope, send, error)

        return handle

    async def _answer(
        self, answer: Callable[[Scope, Receive], Awaitable[Values | None]], scope: Scope, receive: Receive
    ) -> Values | None:
        own = self._model.config.model_name
        if (model := scope["path_params"].get("model", own)) != own:
            raise NotFound(f"The model {model} was not found; served here: {own}")
        self._adapters.registry.check()
        return await answer(scope, receive)

    async def _list(self, scope: Scope, receive: Receive) -> Values:
        query = _query(scope)
        limit, first = _number(query.pop("limit", "100")), max(0, _number(query.pop("next_page_token", "0")))
        entries = list(self._adapters.registry)
        last = first + (limit if 0 <= limit <= _PAGE else _PAGE)
        value: Adapters = {"adapters": [_description(entry) for entry in entries[first:last]]}
        if last < len(entries):
            value["nextPageToken"] = str(last)
        return value, tuple(query)

    async def _describe(self, scope: Scope, receive: Receive) -> Values:
        return _description(self._adapters.registry.get(scope["path_params"]["adapter"])), ()

    async def _register(self, scope: Scope, receive: Receive) -> Values | None:
        call = await self._read_call(scope, receive)
        if call is None:
            return None
        name = required(call.name, "name")
        src, preload = required(call.src, "src"), call.preload is not False
        settled = await self._adapters.register(name, src, preload=preload)
        change = _status(scope, name, "registered")
        change["id"] = settled.number
        return change, call.ignored

    async def _update(self, scope: Scope, receive: Receive) -> Values | None:
        call = await self._read_call(scope, receive)
        if call is None:
            return None
        name = scope["path_params"]["adapter"]
        if call.name not in (None, name):
            raise BadRequest(f"name={call.name}: an adapter cannot be renamed")
        await self._adapters.update(name, call.src, preload=call.preload)
        return _status(scope, name, "updated"), call.ignored

    async def _unregister(self, scope: Scope, receive: Receive) -> Values:
        name = scope["path_params"]["adapter"]
        self._adapters.unregister(name)
        return _status(scope, name, "unregistered"), tuple(_query(scope))

    async def _read_call(self, scope: Scope, receive: Receive) -> AdapterCall | None:
        """From the query or the body, in either of which a name may stand; None when the client went away."""
        values: dict[str, Any] = dict(_query(scope))
        body = await read_body(scope, receive, _BODY, self._model)
        if body is None:
            return None
        if body.strip():
            for name, value in _object(body).items():
                if values.setdefault(name, value) != value:
                    raise BadRequest(f"{name} has one value in the query and another in the body")
        return read_adapter_call(values, refuse_unknown=self._model.config.unknown_parameters == "refuse")


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = decode(body)
    except InvalidPayload as error:
        raise BadRequest(error.message) from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object with 'name' and 'src'")
    return value


def _query(scope: Scope) -> dict[str, str]:
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    values = dict(pairs)
    if len(values) < len(pairs):
        raise BadRequest("a parameter is given twice in the query")
    return values


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadRequest(f"{text[:20]!r}: limit and next_page_token are whole numbers") from None


def _description(entry: Registered) -> DescribedAdapter:
    adapter = entry.adapter
    return {
        "name": adapter.name,
        "id": entry.number,
        "src": adapter.path,
        "preload": entry.preload,
        "pin": False,
    }


def _status(scope: Scope, name: str, done: str) -> AdapterChange:
    return {"status": f"Adapter {scope['headers_by_name'].get(_ALIAS) or name} {done}"}
