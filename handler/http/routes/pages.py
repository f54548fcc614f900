"""The chat page at `/`, the OpenAPI document and its page. They load nothing from other servers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler.core.framing import dumps
from handler.http.asgi import Endpoint, Handle, Headers, send_answer, send_json
from handler.http.routes.inference import Inference
from handler.protocols.kernel.http_response import HttpResponse
from handler.protocols.openapi.document import DocumentedRoute, document
from handler.protocols.tgi.errors import UNHEALTHY
from handler.serving.model import ServedModel

_DIRECTORY = Path(__file__).parents[1] / "static"

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
"""Fetch nothing from elsewhere, run nothing but our files, and make elements of text by DOMPurify alone."""

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
"""By path, the libraries of `vendor/` included."""

OPEN_PATHS = frozenset(("GET", path) for path in ("/", "/docs", *ASSETS))
"""Need no key: they say nothing of the model, and ask for the key that the rest needs."""


class PageRoutes:
    """
    Args:
        routes: all that the server has, for the document; asked when it is first wanted.
        locked: the server wants a key, and the document says so.
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
            "/api-doc/openapi.json": self._document,
            **{path: functools.partial(_send_file, file) for path, file in ASSETS.items()},
        }
        return [Route(path, Endpoint({"GET": handler})) for path, handler in handlers.items()]

    def beside(self, path: str) -> dict[str, Handle]:
        """What a dialect's route at `path` answers besides its own."""
        return {"GET": self._root} if path == "/" else {}

    async def _root(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The page for browsers, TGI's health for others (TGI's router has it at `/` too)."""
        vary = (b"vary", b"accept")
        if "text/html" in scope["headers_by_name"].get("accept", "").lower():
            await _send_file(_DIRECTORY / "index.html", scope, receive, send, extra=[vary])
        elif self._model.healthy:
            await send_answer(scope, send, HttpResponse(200, "text/plain", b""), [vary])
        else:
            await send_json(scope, send, 503, UNHEALTHY, [vary])

    async def _document(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = (_served(route, route.app) for route in self._routes() if isinstance(route.app, Endpoint))
        routes = [one for one in served if one.path not in ASSETS]
        has_sessions = self._model.config.stateful_sessions
        openapi = document(routes, self._model.context, locked=self._locked, has_sessions=has_sessions)
        await send_answer(scope, send, HttpResponse(200, "application/json", dumps(openapi)))


def _served(route: Route, endpoint: Endpoint) -> DocumentedRoute:
    handlers = endpoint.handlers
    inference = next((one for one in handlers.values() if isinstance(one, Inference)), None)
    if inference is None:
        return DocumentedRoute(route.path_format, list(handlers))
    return DocumentedRoute(route.path_format, list(handlers), inference.dialect, takes_calls=inference.is_configured)


async def _send_file(path: Path, scope: Scope, receive: Receive, send: Send, extra: Headers | None = None) -> None:
    """Fresh at every start of the server, unsent when the browser has it already."""
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
