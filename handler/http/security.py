"""Access to the server: API keys, hosts, and pages of other origins."""

from __future__ import annotations

import hmac
import ipaddress
import re
import ssl
from collections.abc import Iterable, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from starlette.routing import Match, Route
from starlette.types import Scope, Send

from handler.core.errors import ConfigError, Unauthorized
from handler.http.inference import SHARED, Endpoint, Headers, Inference, send_answer, send_refusal
from handler.protocols.kernel.errors import FRONT_END, ErrorFormat
from handler.serving.head import OWNER, bearer_token, digest_of, owner_by_key

KEYS_VARIABLE = "LMI_API_KEY"
ANY_ORIGIN = ANY_HOST = "*"

_KEY = re.compile(r"[!-+\--~]{1,1024}")  # what fits a header, but for the comma, which parts keys in the environment
_HOST = re.compile(r"\*|[a-z0-9_.-]+|[0-9a-f:.]+")  # a name, or an IPv4 or IPv6 address
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Access:
    """Clients that may use the server, and the certificate that it shows them.

    Attributes:
        keys: any of which opens the server; none: it is open. They are not in the repr.
        origins: of pages that may call it from a browser; `*` is all.
        hosts: by which it may be called besides those of this machine; `*` is any.
        certfile, keyfile: PEM files for HTTPS; None: HTTP.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    origins: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    certfile: Path | None = None
    keyfile: Path | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.certfile is None else "https"


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
    """Return what the command line and LMI_API_KEY ask for.

    The variable is taken out of `environ`: the processes that are started later, and a model.py, need not know keys.

    Raises:
        ConfigError: naming the option or the file that is wrong, and never a key.
    """
    named = [*keys]
    if any(not _KEY.fullmatch(key) for key in named):
        raise ConfigError("--api-key: a key is 1 to 1024 visible ASCII characters without commas")
    if KEYS_VARIABLE in environ:
        found = [key.strip() for key in environ.pop(KEYS_VARIABLE).split(",")]
        if any(not _KEY.fullmatch(key) for key in found):  # also when it is empty: it was meant to lock something
            raise ConfigError(
                f"environment variable {KEYS_VARIABLE}: must be keys, separated by commas, each of 1 to 1024 visible "
                "ASCII characters; unset it for a server without keys"
            )
        named += found
    if certfile is None and keyfile is not None:
        raise ConfigError("--ssl-keyfile: needs --ssl-certfile")
    if certfile is not None:
        check_certificate(certfile, keyfile)
    return Access(
        keys=tuple(dict.fromkeys(named)),
        origins=frozenset(map(_origin, origins)),
        hosts=frozenset(map(_host, hosts)),
        certfile=certfile,
        keyfile=keyfile,
    )


def _origin(text: str) -> str:
    found = text.strip().lower()
    if found != ANY_ORIGIN and not _ORIGIN.fullmatch(found):
        raise ConfigError(f"--allow-origin {text}: must be * or like https://example.com, with no path")
    return found


def _host(text: str) -> str:
    found = text.strip().lower()
    if found.startswith("[") and found.endswith("]"):
        found = found[1:-1]
    if not _HOST.fullmatch(found):
        raise ConfigError(f"--allow-host {text}: must be * or a host like models.example.com, with no port")
    return found


def check_certificate(certfile: Path, keyfile: Path | None) -> None:
    """Try the pair before anything is loaded; uvicorn reads it again when it starts.

    Args:
        keyfile: None: the key is in `certfile` too.

    Raises:
        ConfigError: naming the file that is wrong.
    """
    option, key = ("--ssl-certfile", certfile) if keyfile is None else ("--ssl-keyfile", keyfile)
    for name, path in (("--ssl-certfile", certfile), (option, key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certfile)  # reads certificates and nothing else
    except ssl.SSLError:
        raise ConfigError(f"--ssl-certfile {certfile}: contains no PEM certificate") from None
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except _Encrypted:
        raise ConfigError(f"{option} {key}: its key is encrypted; give one without a password") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{option} {key}: does not belong to the first certificate in {certfile}") from None
        raise ConfigError(f"{option} {key}: contains no PEM private key ({error.reason})") from None


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    """Refuse an encrypted key, in place of OpenSSL's prompt on the terminal."""
    raise _Encrypted


# -- API keys: `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`, on every route but the open ones ----------


CHALLENGE = [(b"www-authenticate", b"Bearer")]


class Keys:
    """API keys, compared in constant time: the time of an answer does not reveal how much of a key was right."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [digest_of(key) for key in keys]  # of one length: compare_digest tells that of what it gets

    def owner(self, authorization: str, api_key: str = "") -> str:
        """Return the owner of the key in one of the headers' values; "" if there is none. An empty value is none."""
        given = (api_key.strip(), bearer_token(authorization))
        return next((owner_by_key(key) for key in given if key and self._has(key)), "")

    def _has(self, given: str) -> bool:
        digest = digest_of(given)
        found = False
        for known in self._digests:  # all of them, whatever the first ones say
            found |= hmac.compare_digest(digest, known)
        return found


class ApiKeys:
    """Refuses requests without a key, in the form of the dialect that the route speaks.

    Args:
        keys: empty: everyone may pass.
        open_paths: methods and paths that need none.
    """

    def __init__(self, keys: Sequence[str], open_paths: Iterable[tuple[str, str]]) -> None:
        self._keys = Keys(keys) if keys else None
        self._open = frozenset(open_paths)

    def admits(self, scope: Scope) -> bool:
        """Return whether the request may pass; its key goes no further, neither to a model.py nor to a log."""
        if self._keys is None:
            return True
        given = [scope["headers_by_name"].pop(name, "") for name in ("authorization", "x-api-key")]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if owner := self._keys.owner(*given):
            scope["headers_by_name"][OWNER] = owner
        return bool(owner) or (method, scope["path"]) in self._open

    async def refuse(self, scope: Scope, send: Send, routes: Sequence[Route]) -> bool:
        """Answer instead of the route; False if there is no such route, which is not a secret."""
        route = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
        if route is None:
            return False
        error = Unauthorized("this server needs a key: send the header Authorization: Bearer KEY, or x-api-key: KEY")
        handler = route.app.handlers.get(scope["method"]) if isinstance(route.app, Endpoint) else None
        if isinstance(handler, Inference):  # counted, and in the log
            await send_answer(scope, send, handler.refused(error, scope["request_id"]), CHALLENGE)
        else:
            await send_refusal(scope, send, _form([route, *_kin(route, routes)]).whole(error), CHALLENGE)
        return True


def _form(routes: Iterable[Route]) -> ErrorFormat:
    """Return the form of errors of the first route whose dialect has one."""
    forms = (route.app.errors for route in routes if isinstance(route.app, Endpoint))
    return next(filter(None, forms), FRONT_END)


def _kin(route: Route, routes: Sequence[Route]) -> list[Route]:
    """Return the routes of the same name: GET /v1/models is refused as POST /v1/chat/completions is."""
    family = f"/{route.path.split('/')[1]}/"
    return [one for one in routes if one.path.startswith(family)]


# -- hosts: a server without keys on a loopback address answers those that name this machine ---------------------------
# Otherwise any page could use it by DNS rebinding: the page's own name is made to resolve to 127.0.0.1, and the
# browser takes the server for the page's origin. The Host header still has the page's name.


_LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST_HEADER = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::[0-9]*)?")


class AllowedHosts:
    """Check of the Host header.

    Args:
        names: in lower case; None: any.
    """

    def __init__(self, names: Iterable[str] | None) -> None:
        self._names = None if names is None else frozenset(names)

    @classmethod
    def of(cls, access: Access, host: str, address: str) -> AllowedHosts:
        """Make the check of a server.

        Args:
            host: as the command line has it, which is allowed.
            address: where the socket listens.
        """
        is_checked = bool(access.hosts) or (not access.keys and _is_loopback(address))
        if not is_checked or ANY_HOST in access.hosts:
            return cls(None)
        return cls([*_LOCAL, host.lower(), *access.hosts])

    def admits(self, header: str) -> bool:
        """Return whether a request with this Host header is answered. One without the header cannot come from a
        browser.
        """
        if self._names is None or not header:
            return True
        name = _name(header)
        return name in self._names or _is_loopback(name)

    @staticmethod
    def refusal(header: str) -> str:
        name = _name(header)[:100]
        return (
            f"the Host header names {name}, which is not this machine: a web page that uses DNS rebinding sends such "
            f"requests; to answer them start the server with --allow-host {name}"
        )


def _name(header: str) -> str:
    """Return the header's name without port, brackets and a final dot (`localhost.` is fully qualified); "" if
    malformed.
    """
    match = _HOST_HEADER.fullmatch(header)
    return (match[1] or match[2] or "").lower().removesuffix(".") if match else header


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


# -- CORS: pages of other origins that may call the server; no cookies, ever -------------------------------------------
# It asks for headers and nothing more, so that a streamed chunk costs what it costs without it (`asgi.SHARED`).


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
    """Headers for pages of other origins, and answers to their browsers' preflight requests.

    Args:
        origins: that are allowed; empty: CORS is off, and no answer mentions it.
    """

    def __init__(self, origins: Set[str]) -> None:
        self._origins = origins
        self._any = ANY_ORIGIN in origins
        self._vary: Headers = [] if self._any else [(b"vary", b"origin")]

    def prepare(self, scope: Scope) -> None:
        """Add to every answer to this request whether its origin is allowed."""
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
        """Return whether a page of another origin had a browser send what needs no preflight: a form's body, or none.

        With JSON's own content type a browser asks first, and is told no.
        """
        headers = scope["headers_by_name"]
        origin = headers.get("origin", "")
        if not origin or scope["method"] in _READING or self._lets_in(origin):
            return False
        host = origin.partition("://")[2]
        return host != headers.get("host") and "json" not in headers.get("content-type", "").partition(";")[0]

    def is_preflight(self, scope: Scope) -> bool:
        """Return whether the request is a browser's preflight for what a form could not send."""
        headers = scope["headers_by_name"]
        asked = scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
        return bool(self._origins) and asked

    async def answer_preflight(self, scope: Scope, send: Send) -> None:
        """Allow any method and header to allowed origins: the request itself is checked when it comes."""
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
