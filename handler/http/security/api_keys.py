"""API keys: `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`, on every route but the open ones."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from starlette.routing import Match, Route
from starlette.types import Scope, Send

from handler.core.errors import ServingError, Unauthorized
from handler.http.asgi import Endpoint, send_answer
from handler.http.routes.inference import Inference
from handler.protocols.kernel.errors import FRONT_END
from handler.protocols.kernel.http_response import HttpResponse
from handler.serving.owners import OWNER, bearer_token, digest_of, owner_by_key

CHALLENGE = [(b"www-authenticate", b"Bearer")]


class Keys:
    """Constant time: how long an answer takes tells nothing of how much of which key was right."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [digest_of(key) for key in keys]  # of one length: compare_digest tells that of what it gets

    def admit(self, authorization: str, api_key: str = "") -> bool:
        """Whether one of the headers' values holds one of the keys; an empty value holds none."""
        return bool(self.owner(authorization, api_key))

    def owner(self, authorization: str, api_key: str = "") -> str:
        """Return the owner of the key that one of the headers' values holds; "" where none does."""
        given = (api_key.strip(), bearer_token(authorization))
        return next((owner_by_key(key) for key in given if key and self._has(key)), "")

    def _has(self, given: str) -> bool:
        digest = digest_of(given)
        found = False
        for known in self._digests:  # all of them, whatever the first ones say
            found |= hmac.compare_digest(digest, known)
        return found


class ApiKeys:
    """Turns away who has no key, in the form of the dialect that the route speaks.

    Args:
        keys: empty: everyone may pass.
        open_paths: methods and paths that need none.
    """

    def __init__(self, keys: Sequence[str], open_paths: Iterable[tuple[str, str]]) -> None:
        self._keys = Keys(keys) if keys else None
        self._open = frozenset(open_paths)

    def admits(self, scope: Scope) -> bool:
        """Whether the request may pass; its key goes no further, neither to a model.py nor to a log."""
        if self._keys is None:
            return True
        given = [scope["headers_by_name"].pop(name, "") for name in ("authorization", "x-api-key")]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if owner := self._keys.owner(*given):
            scope["headers_by_name"][OWNER] = owner
        return bool(owner) or (method, scope["path"]) in self._open

    async def refuse(self, scope: Scope, send: Send, routes: Sequence[Route]) -> bool:
        """Answer in the place of the route; False where there is no such route, which is said to anyone."""
        route = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
        if route is None:
            return False
        error = Unauthorized("this server needs a key: send the header Authorization: Bearer KEY, or x-api-key: KEY")
        answer = _answer(scope, [route, *_kin(route, routes)], error)
        await send_answer(scope, send, answer, CHALLENGE)
        return True


def _answer(scope: Scope, routes: Sequence[Route], error: ServingError) -> HttpResponse:
    """As the first route's dialect says it; where it has none, as the others do."""
    endpoints = [route.app for route in routes if isinstance(route.app, Endpoint)]
    if endpoints and endpoints[0] is routes[0].app:
        handler = endpoints[0].handlers.get(scope["method"])
        if isinstance(handler, Inference):  # counted, and in the log
            return handler.refused(error, scope["request_id"])
    formats = (endpoint.errors for endpoint in endpoints)
    return next(filter(None, formats), FRONT_END).whole(error)


def _kin(route: Route, routes: Sequence[Route]) -> list[Route]:
    """Those under the same name: GET /v1/models is refused as POST /v1/chat/completions is."""
    family = f"/{route.path.split('/')[1]}/"
    return [one for one in routes if one.path.startswith(family)]
