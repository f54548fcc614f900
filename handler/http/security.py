"""Access control for the server: API keys, allowed hosts, and web pages from other origins."""

from __future__ import annotations

import functools
import hmac
import re
import ssl
from collections.abc import Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from starlette.routing import Match, Route
from starlette.types import Scope, Send

from handler.config import environment
from handler.config.environment import is_loopback
from handler.config.options.names import KEYS
from handler.core.errors import ConfigError, Forbidden, Unauthorized
from handler.core.owners import digest_of, owner_by_key
from handler.core.values import new_uuid
from handler.http.inference import (
    SHARED,
    Endpoint,
    Headers,
    Inference,
    headers_by_name,
    offers_websocket,
    send_answer,
    send_refusal,
)
from handler.protocols.kernel.errors import FRONT_END, ErrorFormat
from handler.protocols.registry import dialects
from handler.serving.admission import canonical_path
from handler.serving.head import KEY_HEADERS, OWNER, bearer_token, request_id, unchecked_owner

_ORIGINS = "CORS_ALLOW_ORIGIN"  # as in TGI and TEI
ANY_ORIGIN = ANY_HOST = "*"

_KEY = re.compile(r"[!-+\--~]{1,1024}")  # characters allowed in headers, except the comma, which separates keys
_HOST = re.compile(r"\*|[a-z0-9_.-]+|[0-9a-f:.]+")  # a name, or an IPv4 or IPv6 address
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Access:
    """Settings that determine which clients may use the server, and its TLS certificate.

    Attributes:
        keys: API keys, each of which grants access. If empty, no key is needed. They are omitted from the repr.
        origins: origins of web pages that may call the server from a browser; `*` allows all.
        hosts: allowed values of the Host header in addition to the names of this machine; `*` allows all.
        certfile: the PEM file with the certificate for HTTPS, or None for HTTP.
        keyfile: the PEM file with the private key, or None if `certfile` contains it.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    origins: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    certfile: Path | None = None
    keyfile: Path | None = None


OPEN = Access()


def read_access(
    keys: Iterable[str] = (),
    origins: Iterable[str] = (),
    certfile: Path | None = None,
    keyfile: Path | None = None,
    *,
    hosts: Iterable[str] = (),
    environ: MutableMapping[str, str],
) -> Access:
    """Return the access settings from the command line, LMI_API_KEY, and the API-key variables of other servers.

    The variables are removed from `environ`, because later child processes and model.py do not need the keys.

    Raises:
        ConfigError: an option or a file is invalid. The message contains its name, but never a key.
    """
    all_keys = [*keys]
    if any(not _KEY.fullmatch(key) for key in all_keys):
        raise ConfigError("--api-key: a key must be 1 to 1024 visible ASCII characters without commas")
    for name in environment.key_variables():
        text = environ.pop(name, None)
        if text or (text is not None and name == KEYS):  # an empty variable of another server sets no key there either
            all_keys += _keys_in(name, text)
    if certfile is None and keyfile is not None:
        raise ConfigError("--ssl-keyfile: requires --ssl-certfile")
    if certfile is not None:
        check_certificate(certfile, keyfile)
    return Access(
        keys=tuple(dict.fromkeys(all_keys)),
        origins=frozenset([*map(_origin, origins), *_origins_in(environ)]),
        hosts=frozenset(map(_host, hosts)),
        certfile=certfile,
        keyfile=keyfile,
    )


def _keys_in(name: str, text: str) -> list[str]:
    """Return the keys in an environment variable. An empty text is refused, because a key was intended."""
    keys = [key.strip() for key in text.split(",")]
    if any(not _KEY.fullmatch(key) for key in keys):
        raise ConfigError(
            f"environment variable {name}: must be keys, separated by commas, each of 1 to 1024 visible "
            "ASCII characters; unset it to run the server without keys"
        )
    return keys


def _origins_in(environ: Mapping[str, str]) -> list[str]:
    texts = environ.get(_ORIGINS, "").split(",")
    return [_origin(text, f"environment variable {_ORIGINS}={text}") for text in texts if text]


def _origin(text: str, source: str = "") -> str:
    origin = text.strip().lower()
    if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
        source = source or f"--allow-origin {text}"
        raise ConfigError(f"{source}: must be * or an origin like https://example.com, without a path")
    return origin


def _host(text: str) -> str:
    host = text.strip().lower()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not _HOST.fullmatch(host):
        raise ConfigError(f"--allow-host {text}: must be * or a host like models.example.com, without a port")
    return host


def check_certificate(certfile: Path, keyfile: Path | None) -> None:
    """Check the certificate and the private key early. uvicorn reads them only after the model files are prepared.

    Args:
        keyfile: file with the private key, or None if `certfile` contains it.

    Raises:
        ConfigError: one of the files is invalid. The message contains its name.
    """
    option, key = ("--ssl-certfile", certfile) if keyfile is None else ("--ssl-keyfile", keyfile)
    for name, path in (("--ssl-certfile", certfile), (option, key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certfile)  # this reads certificates only
    except ssl.SSLError:
        raise ConfigError(f"--ssl-certfile {certfile}: contains no PEM certificate") from None
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except _Encrypted:
        raise ConfigError(f"{option} {key}: the key is encrypted; use a key without a password") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{option} {key}: does not match the first certificate in {certfile}") from None
        raise ConfigError(f"{option} {key}: contains no PEM private key ({error.reason})") from None


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    """Raise an error for an encrypted key, so that OpenSSL does not prompt for a password on the terminal."""
    raise _Encrypted


# -- API keys: `Authorization: Bearer KEY` or Anthropic's `x-api-key: KEY`, on all routes except the open ones ---------


_KEY_PROTOCOL = "openai-insecure-api-key."
"""Start of the subprotocol in which browsers send a key, because they cannot set headers for a WebSocket."""

CHALLENGE = [(b"www-authenticate", b"Bearer")]
_RAW_KEY_HEADERS = tuple(name.encode() for name in KEY_HEADERS)


class Keys:
    """API keys, compared in constant time, so that response times do not reveal how much of a key is correct."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [digest_of(key) for key in keys]  # digests, because compare_digest reveals lengths

    def owner(self, authorization: str, api_key: str = "") -> str:
        """Return the owner of the valid key in one of the two headers, or "" if neither contains a valid key."""
        sent_keys = (api_key.strip(), bearer_token(authorization))
        return next((owner_by_key(key) for key in sent_keys if key and self._has(key)), "")

    def _has(self, key: str) -> bool:
        digest = digest_of(key)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0  # all, even after a match


class ApiKeys:
    """Checks API keys, and names the owner of each request. Requests without a valid key are refused in the error
    format of the dialect of the route.

    Args:
        keys: valid keys. If there are none, all requests are admitted.
        open_paths: methods and paths that need no key.
        owner_header: header in which a gateway names the owners (`option.owner_header`), or None without one.
    """

    def __init__(
        self, keys: Sequence[str], open_paths: Iterable[tuple[str, str]], owner_header: str | None = None
    ) -> None:
        self._keys = Keys(keys) if keys else None
        self._open = frozenset(open_paths)
        self._owner_header = owner_header

    @property
    def are_checked(self) -> bool:
        """Return whether requests need a key."""
        return self._keys is not None

    def admits(self, scope: Scope) -> bool:
        """Return whether the request is admitted, and name its owner. If keys are checked, remove the headers that may
        contain its key, so that it reaches neither logs nor user code.
        """
        headers = scope["headers_by_name"]
        sent_keys = {name: headers.get(name, "") for name in KEY_HEADERS}
        if not any(sent_keys.values()) and offers_websocket(scope):
            sent_keys["x-api-key"] = _key_of_subprotocols(headers.get("sec-websocket-protocol", ""))
        names = self._names(scope)
        if self._keys is None:
            headers[OWNER] = unchecked_owner({**sent_keys, **names}, self._owner_header)
            return True
        for name in KEY_HEADERS:
            headers.pop(name, None)
        scope["headers"] = _without_keys(scope["headers"])
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if owner := self._keys.owner(*sent_keys.values()):
            client = unchecked_owner(names, self._owner_header)
            headers[OWNER] = owner_by_key(f"{owner} {client}") if client else owner
        return bool(owner) or (method, scope["path"]) in self._open

    def _names(self, scope: Scope) -> dict[str, str]:
        """Return the header in which a gateway names the owner, unless that is the header of a key.

        Values of a repeated header are joined: one of them may be the client's own, which must not count as a name.
        """
        header = self._owner_header
        if header is None or header in KEY_HEADERS:
            return {}
        values = (value.decode("latin-1") for name, value in scope["headers"] if name.lower() == header.encode())
        return {header: ", ".join(values)}

    async def refuse(self, scope: Scope, send: Send, routes: Sequence[Route]) -> bool:
        """Send an error response for the route, and return True. If no route has this path, only return False."""
        route = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
        if route is None:
            return False
        error = Unauthorized("this server needs a key: send the header Authorization: Bearer KEY, or x-api-key: KEY")
        handler = route.app.handlers.get(scope["method"]) if isinstance(route.app, Endpoint) else None
        if isinstance(handler, Inference):  # this counts and logs the request
            await send_answer(scope, send, handler.refused(error, scope["request_id"]), CHALLENGE)
        else:
            await send_refusal(scope, send, _error_format(route, routes).whole(error), CHALLENGE)
        return True


def _key_of_subprotocols(header: str) -> str:
    """Return the key among the subprotocols that a browser offers for a WebSocket, or "" without one."""
    offered = (name.strip() for name in header.split(","))
    return next((name.removeprefix(_KEY_PROTOCOL) for name in offered if name.startswith(_KEY_PROTOCOL)), "")


def _without_keys(headers: Headers) -> Headers:
    return [item for item in headers if item[0].lower() not in _RAW_KEY_HEADERS]


def _error_format(route: Route, routes: Sequence[Route]) -> ErrorFormat:
    """Return the error format of a route. If it has none, use the first format of the routes with the same first path
    segment, or else the format of the server. GET /v1/models is thus refused in the same format as POST
    /v1/chat/completions.
    """
    family = f"/{route.path.split('/')[1]}/"
    relatives = [candidate for candidate in routes if candidate.path.startswith(family)]
    forms = (candidate.app.errors for candidate in (route, *relatives) if isinstance(candidate.app, Endpoint))
    return next(filter(None, forms), FRONT_END)


# -- hosts: on a loopback address and without keys, the Host header must name this machine -----------------------------
# Otherwise any web page could use the server by DNS rebinding: the host name of the page is made to resolve to
# 127.0.0.1, so that the browser treats the server as the page's origin. The Host header still contains that name.


_LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST_HEADER = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::[0-9]*)?")


class AllowedHosts:
    """Checks the Host header.

    Args:
        names: allowed host names in lower case, or None to allow all.
    """

    def __init__(self, names: Iterable[str] | None) -> None:
        self._names = None if names is None else frozenset(names)

    @classmethod
    def of(cls, access: Access, host: str, address: str) -> AllowedHosts:
        """Return the check for a server.

        Args:
            host: host from the command line, which is always allowed.
            address: address that the socket listens on.
        """
        is_checked = bool(access.hosts) or (not access.keys and is_loopback(address))
        if not is_checked or ANY_HOST in access.hosts:
            return cls(None)
        return cls([*_LOCAL, host.lower(), *access.hosts])

    def admits(self, header: str) -> bool:
        """Return whether the Host header is allowed. A missing header is allowed, because browsers always send it."""
        if self._names is None or not header:
            return True
        name = _name(header)
        return name in self._names or is_loopback(name)

    @staticmethod
    def refusal(header: str) -> str:
        name = _name(header)[:100]
        return (
            f"the Host header names {name}, which is not this machine; web pages that use DNS rebinding send such "
            f"requests. If the name is correct, start the server with --allow-host {name}"
        )


@functools.lru_cache(16)  # clients repeat their header
def _name(header: str) -> str:
    """Return the host from a Host header, without the port, brackets and final dot (as in the fully qualified
    `localhost.`). A malformed header is returned unchanged.
    """
    match = _HOST_HEADER.fullmatch(header)
    return (match[1] or match[2] or "").lower().removesuffix(".") if match else header


def warning_of(access: Access, host: str) -> str:
    """Return a warning if other machines can reach the server at this address and need no key, or "" otherwise."""
    return "" if access.keys else environment.warning_without_keys(host)


# -- CORS: web pages of other origins that may call the server, always without cookies ---------------------------------
# CORS only adds headers to the start of a response (`inference.SHARED`), so streamed chunks cost no more with it.


EXPOSED = tuple(dict.fromkeys((
    "x-request-id", "x-lmi-ignored-parameters", "retry-after", "retry-after-ms",
    "x-amzn-sagemaker-new-session-id", "x-amzn-sagemaker-session-id", "x-amzn-sagemaker-closed-session-id",
    *(name for dialect in dialects().values() for name in dialect.response_headers),
)))  # fmt: skip
"""Response headers that a web page may read: those of the server, of sessions and of the dialects."""

_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,4096}")
_READING = ("GET", "HEAD", "OPTIONS")
_MAX_AGE = b"600"  # seconds for which a browser may cache the response to a preflight request


class Cors:
    """Adds CORS headers for web pages from other origins, and responds to preflight requests.

    Args:
        origins: allowed origins. If there are none, CORS is off and no response has CORS headers.
    """

    def __init__(self, origins: Set[str]) -> None:
        self._origins = frozenset(origins)
        self._any = ANY_ORIGIN in origins
        self._vary: Headers = [] if self._any else [(b"vary", b"origin")]

    def prepare(self, scope: Scope) -> None:
        """Add the CORS headers to all responses to this request."""
        if self._origins:
            scope[SHARED] = self._headers(scope["headers_by_name"].get("origin", ""))

    def _headers(self, origin: str) -> Headers:
        if not origin or not self._is_allowed(origin):
            return self._vary
        return [
            (b"access-control-allow-origin", b"*" if self._any else origin.encode("latin-1")),
            (b"access-control-expose-headers", ", ".join(EXPOSED).encode()),
            *self._vary,
        ]

    def _is_allowed(self, origin: str) -> bool:
        return self._any or origin.lower() in self._origins

    def is_forgery(self, scope: Scope) -> bool:
        """Return whether a web page from another origin opens a WebSocket, or has sent a form or an empty body.

        Browsers send these without a preflight request.

        Requests with a JSON content type require a preflight request, which the server refuses.
        """
        headers = scope["headers_by_name"]
        origin = headers.get("origin", "")
        if not origin or self._is_allowed(origin) or origin.partition("://")[2] == headers.get("host"):
            return False
        if scope["method"] in _READING:
            return offers_websocket(scope)
        return "json" not in headers.get("content-type", "").partition(";")[0]

    def is_preflight(self, scope: Scope) -> bool:
        """Return whether the request is a browser's preflight request."""
        headers = scope["headers_by_name"]
        is_request = scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
        return bool(self._origins) and is_request

    async def answer_preflight(self, scope: Scope, send: Send) -> None:
        """Allow all methods and headers if the origin is allowed. The request itself is checked when it arrives."""
        headers: Headers = [(b"x-request-id", scope["request_id"].encode()), *scope[SHARED]]
        is_allowed = self._is_allowed(scope["headers_by_name"]["origin"])
        if is_allowed:
            headers += [
                (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE, OPTIONS"),
                (b"access-control-max-age", _MAX_AGE),
            ]
            names = scope["headers_by_name"].get("access-control-request-headers", "")
            if names and _NAMES.fullmatch(names):
                headers.append((b"access-control-allow-headers", names.encode()))
        await send({"type": "http.response.start", "status": 204 if is_allowed else 403, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


# -- all checks that need no model -------------------------------------------------------------------------------------


class Checks:
    """The checks of a request's head that need no model.

    Args:
        open_paths: methods and paths that need no key.
        owner_header: header in which a gateway names the owners, or None without one.

    Attributes:
        cors: origins of web pages that may call the server.
        keys: the API keys.
    """

    def __init__(
        self,
        access: Access,
        hosts: AllowedHosts | None,
        open_paths: Iterable[tuple[str, str]] = (),
        owner_header: str | None = None,
    ) -> None:
        self._hosts = hosts or AllowedHosts(None)
        self.cors = Cors(access.origins)
        self.keys = ApiKeys(access.keys, open_paths, owner_header)

    def refusal(self, scope: Scope) -> Forbidden | None:
        """Read the head into the scope. Return the error for a host or origin that is not allowed, or None."""
        headers = scope["headers_by_name"] = headers_by_name(scope)
        scope["request_id"] = request_id(headers)
        scope["path"] = canonical_path(scope["path"])
        host = headers.get("host", "")
        if not self._hosts.admits(host):
            return Forbidden(self._hosts.refusal(host))
        self.cors.prepare(scope)
        if self.cors.is_forgery(scope):
            return Forbidden(
                "a page of another origin may only send JSON as application/json, unless --allow-origin allows it"
            )
        return None


# -- heads that come again ---------------------------------------------------------------------------------------------


class AdmittedHead:
    """A head that has passed all checks, which a client with a connection of its own sends again and again. The checks
    depend only on the head and on settings that stay the same while the server runs.

    Args:
        scope: scope of a request with this head after the checks.
        has_keys: whether the headers of keys must be removed.
    """

    def __init__(self, scope: Scope, *, has_keys: bool) -> None:
        names = [name for name, _ in scope["headers"]]
        self._headers: dict[str, str] = scope["headers_by_name"].copy()
        self._length_index = names.index(b"content-length") if b"content-length" in names else None
        self._id = scope["request_id"] if request_id(self._headers) == scope["request_id"] else ""
        self._has_keys = has_keys
        self._others = {name: scope[name] for name in ("path", SHARED) if name in scope}

    def apply_to(self, scope: Scope) -> None:
        """Set the results of the checks in the scope of another request with this head."""
        if self._has_keys:
            scope["headers"] = _without_keys(scope["headers"])
        headers = self._headers.copy()
        if self._length_index is not None:
            headers["content-length"] = scope["headers"][self._length_index][1].decode("latin-1")
        scope["headers_by_name"] = headers
        scope["request_id"] = self._id or new_uuid()
        scope.update(self._others)
