"""Routes for models, adapters, batch transform and pages."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler.core.errors import (
    BadRequest,
    InvalidPayload,
    ModelNotFound,
    NotFound,
    ServingError,
)
from handler.core.framing import dumps
from handler.core.numbers import whole
from handler.core.values import Task
from handler.http.exchange import EXCHANGE, AnyExchange
from handler.http.inference import (
    Endpoint,
    Handle,
    Headers,
    Inference,
    Responded,
    decode_short_body,
    encoded,
    read_short_body,
    send_answer,
    send_json,
    send_refusal,
)
from handler.http.urls import query_of
from handler.protocols.anthropic import models as anthropic_models
from handler.protocols.anthropic.api import ERRORS as ANTHROPIC_ERRORS
from handler.protocols.anthropic.api import VERSION_HEADER
from handler.protocols.api import AdapterChange, Adapters, DescribedAdapter
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.errors import SERVER, ErrorFormat, HttpResponse
from handler.protocols.kernel.messages import taken_media
from handler.protocols.kernel.parameters import SAMPLING_DEFAULTS
from handler.protocols.lmi.asynchronous import served_name
from handler.protocols.openai.api import ERRORS, OpenAiModel, listed_models
from handler.protocols.openai.request import CHAT
from handler.protocols.openapi import DocumentedRoute, document
from handler.protocols.tgi.api import UNHEALTHY
from handler.scheduler.lora import AdapterCall, Registered, read_adapter_call, required
from handler.serving.batches.runner import OF_THE_LINE, line_answer
from handler.serving.model import ServedModel
from handler.serving.request.task import ignored_header


def json_handler(
    model: ServedModel, answer: Callable[[Scope, Receive], Awaitable[Responded]], errors: ErrorFormat = SERVER
) -> Handle:
    """Return a handler that sends the result of `answer` as JSON, or nothing if the client has disconnected."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        with model.adapters.calls:
            try:
                value, ignored = await answer(scope, receive)
            except ServingError as error:
                return await send_refusal(scope, send, errors.whole(error))
            except ClientDisconnect:
                return
            await send_json(scope, send, 200, value, encoded(ignored_header(ignored).items()))

    return handle


class ModelRoutes:
    """Routes that describe models. Model IDs may contain slashes.

    Clients that send Anthropic's version header get responses in Anthropic's format. All other clients get OpenAI's
    format.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.routes = [
            Route("/v1/models", Endpoint({"GET": self._list}, errors=ERRORS)),
            Route("/v1/models/{id:path}", Endpoint({"GET": self._one}, errors=ERRORS)),
        ]

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_anthropic(scope):
            return await send_json(scope, send, 200, listed_models(self.described()))
        models = [self._describe_to_anthropic(id) for id in self._ids()]
        query = QueryParams(query_of(scope))
        lifecycles = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]  # Anthropic's client sends the latter
        try:
            page = anthropic_models.page(anthropic_models.in_lifecycles(models, lifecycles), query)
        except ServingError as error:
            return await send_answer(scope, send, ANTHROPIC_ERRORS.whole(error))
        return await send_json(scope, send, 200, page)

    async def _one(self, scope: Scope, receive: Receive, send: Send) -> None:
        id, ids = scope["path_params"]["id"], self._ids()
        if id not in ids:
            id = id.removesuffix("/")
        if id not in ids:
            errors = ANTHROPIC_ERRORS if _is_anthropic(scope) else ERRORS
            return await send_answer(scope, send, errors.whole(ModelNotFound(id, served=ids)))
        if _is_anthropic(scope):
            return await send_json(scope, send, 200, self._describe_to_anthropic(id))
        return await send_json(scope, send, 200, self._describe(id, ids[id]))

    def described(self) -> list[OpenAiModel]:
        """Return OpenAI's descriptions of the model's names and of the adapters."""
        return [self._describe(*entry) for entry in self._ids().items()]

    def _describe_to_anthropic(self, id: str) -> anthropic_models.AnthropicModel:
        return anthropic_models.model(id, self._model.availability.started_at, self._model.context)

    def _ids(self) -> dict[str, str | None]:
        """Map each name of the model to None, and the name of each adapter to the name of its base model."""
        config = self._model.config
        own = [*(name for name in config.served_model_name or () if name != "*"), config.name, served_name(config)]
        adapters = [entry.adapter.name for entry in self._model.adapters.registry]
        return {**dict.fromkeys(own), **dict.fromkeys(adapters, config.name)}

    def _describe(self, id: str, parent: str | None) -> OpenAiModel:
        """Return OpenAI's description of a model. The value of `owned_by` is arbitrary, as in TGI and vLLM."""
        model = self._model
        return {
            "id": id,
            "object": "model",
            "created": int(model.availability.started_at),
            "owned_by": "lmi-handler",
            "root": id if parent else model.context.source or model.config.name,
            "parent": parent,
            "max_model_len": model.context.most_tokens(),
            "input_modalities": _modalities(model.context),
            "supported_parameters": _served_parameters(model.context),
        }


def _modalities(context: ServerContext) -> list[str]:
    """Return the kinds of input that the model accepts. Only models that generate text accept media besides text."""
    if context.task is Task.TRANSCRIPTION:
        return ["audio"]
    return ["text", *(taken_media(context) if context.task is Task.GENERATION else ())]


def _served_parameters(context: ServerContext) -> list[str]:
    """Return the sampling parameters of OpenAI's chats that the engine supports, if the model generates text."""
    if context.task is not Task.GENERATION:
        return []
    fields = SAMPLING_DEFAULTS.keys() - context.unsupported.keys()
    return sorted(name for name, parameter in CHAT.parameters.items() if parameter.field in fields)


def _is_anthropic(scope: Scope) -> bool:
    return VERSION_HEADER in scope["headers_by_name"]


# -- routes for LoRA adapters, as in DJL Serving (0.34) and as SageMaker calls them ------------------------------------
# To register an adapter, SageMaker sends a body `{"name", "src", "preload", "pin"}` where DJL has a query. The rest is
# the same.

_ALIAS = "x-amzn-sagemaker-adapter-alias"
"""SageMaker header with the adapter name that the user has chosen."""

_PAGE = 100  # maximum and default number of adapters in a list
_BODY = 1 << 20  # bytes


class AdapterRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._adapters = model.adapters
        many = Endpoint({"GET": self._handler(self._list), "POST": self._handler(self._register)})
        adapter = Endpoint({"GET": self._handler(self._describe), "DELETE": self._handler(self._unregister)})
        update = Endpoint({"POST": self._handler(self._update)})
        self.routes = [
            Route(f"{prefix}/adapters{path}", endpoint)
            for prefix in ("", "/models/{model}")
            for path, endpoint in (("", many), ("/{adapter}", adapter), ("/{adapter}/update", update))
        ]

    def _handler(self, answer: Callable[[Scope, Receive], Awaitable[Responded]]) -> Handle:
        async def checked(scope: Scope, receive: Receive) -> Responded:
            own = self._model.config.model_name
            if (model := scope["path_params"].get("model", own[0])) not in own:
                raise NotFound(f"The model {model} was not found; served here: {', '.join(own)}")
            self._adapters.registry.check()
            return await answer(scope, receive)

        return json_handler(self._model, checked)

    async def _list(self, scope: Scope, receive: Receive) -> Responded:
        query = _query(scope)
        limit, first = _number(query.pop("limit", "100")), max(0, _number(query.pop("next_page_token", "0")))
        entries = list(self._adapters.registry)
        last = first + (limit if 0 <= limit <= _PAGE else _PAGE)
        value: Adapters = {"adapters": [_description(entry) for entry in entries[first:last]]}
        if last < len(entries):
            value["nextPageToken"] = str(last)
        return value, tuple(query)

    async def _describe(self, scope: Scope, receive: Receive) -> Responded:
        return _description(self._adapters.registry.get(scope["path_params"]["adapter"])), ()

    async def _register(self, scope: Scope, receive: Receive) -> Responded:
        call = await self._read_call(scope, receive)
        name = required(call.name, "name")
        src, preload = required(call.src, "src"), call.preload is not False
        settled = await self._adapters.register(name, src, preload=preload)
        change = _status(scope, name, "registered")
        change["id"] = settled.number
        return change, call.ignored

    async def _update(self, scope: Scope, receive: Receive) -> Responded:
        call = await self._read_call(scope, receive)
        name = scope["path_params"]["adapter"]
        if call.name not in (None, name):
            raise BadRequest(f"name={call.name}: an adapter cannot be renamed")
        await self._adapters.update(name, call.src, preload=call.preload)
        return _status(scope, name, "updated"), call.ignored

    async def _unregister(self, scope: Scope, receive: Receive) -> Responded:
        name = scope["path_params"]["adapter"]
        self._adapters.unregister(name)
        return _status(scope, name, "unregistered"), tuple(_query(scope))

    async def _read_call(self, scope: Scope, receive: Receive) -> AdapterCall:
        """Read the parameters of a call from both the query string and the body."""
        values: dict[str, Any] = dict(_query(scope))
        body = await read_short_body(scope, receive, _BODY, self._model)
        if body.strip():
            for name, value in (await self._object(scope, body)).items():
                if values.setdefault(name, value) != value:
                    raise BadRequest(f"{name} has different values in the query and in the body")
        return read_adapter_call(values, refuse_unknown=self._model.config.unknown_parameters == "refuse")

    async def _object(self, scope: Scope, body: bytes) -> dict[str, Any]:
        try:
            value = await decode_short_body(scope, body, self._model)
        except InvalidPayload as error:
            raise BadRequest(error.message) from None
        if not isinstance(value, dict):
            raise BadRequest("the body must be a JSON object with 'name' and 'src'")
        return value


def _query(scope: Scope) -> dict[str, str]:
    pairs = query_of(scope)
    values = dict(pairs)
    if len(values) < len(pairs):
        raise BadRequest("the query contains a parameter twice")
    return values


def _number(text: str) -> int:
    try:
        return whole(text)
    except ValueError:
        raise BadRequest(f"{text[:20]!r}: limit and next_page_token must be whole numbers") from None


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


# -- requests of SageMaker's batch transform: each request and each response is a line of a file -----------------------
# If one request fails, the whole job fails and writes no output file. Errors that concern only one line are therefore
# sent with status 200. They become the output of their line, and the other lines are not affected.

_STREAM = "'stream': batch transform expects one line per response; omit 'stream' and 'output_formatter'"


class Records(Inference):
    """An ASGI application that replaces `Inference` in batch transform."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: AnyExchange = scope["extensions"][EXCHANGE]
        exchange.send_whole()
        with self._open(scope, exchange) as task:
            await self._parse(scope, receive, task)
            if task.parsed is None and task.error is None:
                return  # the client has disconnected
            if task.parsed is not None and task.parsed.streams:
                task.refuse(InvalidPayload(_STREAM))
            task.begin(task.run())
            while not task.finished:
                if exchange.is_over:
                    return
                await exchange.wait()
            answer = line_answer(task)
            if isinstance(task.error, OF_THE_LINE):
                answer = answer._replace(status=200)
            await send_answer(scope, send, answer, encoded(ignored_header(task.ignored).items()))


# -- the chat page at `/`, the OpenAPI document and its page, which load nothing from other servers --------------------


_DIRECTORY = Path(__file__).with_name("static")

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
"""Content Security Policy: pages load files only from this server, and create elements from text only via DOMPurify."""

_GUARDS: Headers = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]

ASSETS = {
    f"/page/{path.relative_to(_DIRECTORY).as_posix()}": path
    for path in sorted(_DIRECTORY.rglob("*"))
    if path.suffix in (".js", ".css", ".svg")
}
"""Maps URL paths to the files of the pages, including the libraries in `vendor/`."""

OPEN_PATHS = frozenset(("GET", path) for path in ("/", "/docs", *ASSETS))
"""Methods and paths that need no API key. The pages reveal nothing about the model, and ask the user for the key."""


class PageRoutes:
    """Routes for the chat page and the OpenAPI document.

    Args:
        routes: function that returns all routes of the server for the document.
        locked: whether the server requires an API key. The document then mentions it.
    """

    def __init__(self, model: ServedModel, routes: Callable[[], Sequence[Route]], *, locked: bool) -> None:
        self._model = model
        self._routes = routes
        self._locked = locked

    @property
    def routes(self) -> list[Route]:
        handlers: dict[str, Handle] = {
            "/": self._root,
            "/docs": functools.partial(_send_file, _DIRECTORY / "docs.html"),
            "/api-doc/openapi.json": self._send_document,
            **{path: functools.partial(_send_file, file) for path, file in ASSETS.items()},
        }
        return [Route(path, Endpoint({"GET": handler})) for path, handler in handlers.items()]

    def beside(self, path: str) -> dict[str, Handle]:
        """Return the handlers of the chat page, by HTTP method, for a path that is also a route of a dialect."""
        return {"GET": self._root} if path == "/" else {}

    async def _root(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chat page to browsers. Other clients get TGI's health check, which TGI serves at `/` too."""
        vary = (b"vary", b"accept")
        if "text/html" in scope["headers_by_name"].get("accept", "").lower():
            await _send_file(_DIRECTORY / "index.html", scope, receive, send, extra=[vary])
        elif self._model.availability.healthy:
            await send_answer(scope, send, HttpResponse(200, "text/plain", b""), [vary])
        else:
            await send_json(scope, send, 503, UNHEALTHY, [vary])

    async def _send_document(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_answer(scope, send, HttpResponse(200, "application/json", self._document))

    @functools.cached_property
    def _document(self) -> bytes:
        """The OpenAPI document as JSON, built once, because this takes several milliseconds of the event loop."""
        served = (_served(route, route.app) for route in self._routes() if isinstance(route.app, Endpoint))
        routes = [served_route for served_route in served if served_route.path not in ASSETS]
        has_sessions = self._model.config.stateful_sessions
        openapi = document(routes, self._model.context, locked=self._locked, has_sessions=has_sessions)
        return dumps(openapi)


def _served(route: Route, endpoint: Endpoint) -> DocumentedRoute:
    handlers = endpoint.handlers
    inference = next((handler for handler in handlers.values() if isinstance(handler, Inference)), None)
    if inference is None:
        return DocumentedRoute(route.path_format, list(handlers))
    return DocumentedRoute(route.path_format, list(handlers), inference.dialect, takes_calls=inference.is_configured)


async def _send_file(path: Path, scope: Scope, receive: Receive, send: Send, extra: Headers | None = None) -> None:
    """Send a file with an ETag, so that browsers download it again only if it has changed."""
    data, tag = _read(path)
    headers = [*_GUARDS, (b"cache-control", b"no-cache"), (b"etag", tag.encode()), *(extra or [])]
    if scope["headers_by_name"].get("if-none-match") == tag:
        headers.append((b"x-request-id", scope["request_id"].encode()))
        await send({"type": "http.response.start", "status": 304, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
    else:
        await send_answer(scope, send, HttpResponse(200, _TYPES[path.suffix], data), headers)


@functools.cache
def _read(path: Path) -> tuple[bytes, str]:
    data = path.read_bytes()
    return data, f'"{hashlib.sha256(data).hexdigest()[:16]}"'
