"""CORS: pages of other origins that may call the server from a browser. No cookies, ever: who may is known by a key.

It asks for headers and nothing more, so that a streamed chunk costs what it costs without it (`asgi.SHARED`).
"""

from __future__ import annotations

import re
from collections.abc import Set

from starlette.types import Scope, Send

from handler.http.asgi import SHARED, Headers
from handler.http.security.access import ANY_ORIGIN

EXPOSED = (
    "x-request-id", "x-lmi-ignored-parameters", "retry-after", "retry-after-ms",
    "x-compute-type", "x-compute-time", "x-compute-characters", "x-total-time", "x-validation-time", "x-queue-time",
    "x-inference-time", "x-time-per-token", "x-prompt-tokens", "x-generated-tokens",
    "x-amzn-sagemaker-new-session-id", "x-amzn-sagemaker-session-id", "x-amzn-sagemaker-closed-session-id",
)  # fmt: skip
"""Headers of answers that a page may read: ours, TGI's and those of sessions."""

_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,4096}")
_READING = ("GET", "HEAD", "OPTIONS")
_MAX_AGE = b"600"  # seconds that a browser need not ask again


class Cors:
    """
    Args:
        origins: that are let in; empty: CORS is off, and no answer says a word of it.
    """

    def __init__(self, origins: Set[str]) -> None:
        self._origins = origins
        self._any = ANY_ORIGIN in origins
        self._vary: Headers = [] if self._any else [(b"vary", b"origin")]

    def prepare(self, scope: Scope) -> None:
        """Have every answer to this request say whether its origin is let in."""
        if self._origins:
            scope[SHARED] = self._headers(scope["headers_by_name"].get("origin", ""))

    def _headers(self, origin: str) -> Headers:
        if not origin or not self._lets_in(origin):
            return self._vary
        return [
            (b"access-control-allow-origin", b"*" if self._any else origin.encode("latin-1")),
            (b"access-control-expose-headers", ", ".join(EXPOSED).encode()),
            *self._vary,
        ]

    def _lets_in(self, origin: str) -> bool:
        return self._any or origin.lower() in self._origins

    def is_forgery(self, scope: Scope) -> bool:
        """A page of an origin that is not let in has a browser send what it may send unasked: a form's body, or none.

        With JSON's own content type a browser asks first, and is told no.
        """
        headers = scope["headers_by_name"]
        origin = headers.get("origin", "")
        if not origin or scope["method"] in _READING or self._lets_in(origin):
            return False
        host = origin.partition("://")[2]
        return host != headers.get("host") and "json" not in headers.get("content-type", "").partition(";")[0]

    def is_preflight(self, scope: Scope) -> bool:
        """A browser asking before it sends what a form could not."""
        headers = scope["headers_by_name"]
        asked = scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
        return bool(self._origins) and asked

    async def answer_preflight(self, scope: Scope, send: Send) -> None:
        """Any method and headers for those who are let in: the request itself is looked at when it comes."""
        headers: Headers = [(b"x-request-id", scope["request_id"].encode()), *scope[SHARED]]
        let_in = self._lets_in(scope["headers_by_name"]["origin"])
        if let_in:
            headers += [
                (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE, OPTIONS"),
                (b"access-control-max-age", _MAX_AGE),
            ]
            names = scope["headers_by_name"].get("access-control-request-headers", "")
            if names and _NAMES.fullmatch(names):
                headers.append((b"access-control-allow-headers", names.encode()))
        await send({"type": "http.response.start", "status": 204 if let_in else 403, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
