"""HTTP client of the servers, by aiohttp: one pool of connections, no redirects, no proxies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from handler.config.environment import server_key
from handler.core.errors import ConfigError
from handler.engines.openai.answer import Failed, Refused, status_error
from handler.engines.openai.events import Event, EventReader
from handler.engines.openai.kinds import KINDS

_MOST_BODY = 1 << 20  # bytes that are read of an error or of the models
_MODELS_TIMEOUT = 5.0  # seconds for /models
_POLL_INTERVAL = 0.5  # seconds between looks at a server that is not ready
_LOG_INTERVAL = 10.0  # seconds between messages about it
_HINT = {
    401: "; its key is the variable OPENAI_API_KEY",
    403: "; its key is the variable OPENAI_API_KEY",
    404: "; its model is option.base_url_model, and its address ends with /v1",
}


class Model(NamedTuple):
    """A server's model; `max_tokens` of prompt and answer together, where it says so."""

    name: str
    owner: str
    max_tokens: int | None


class Client:
    """Made and used on one event loop.

    Args:
        connect_timeout: seconds that a connection may take.
    """

    def __init__(self, connect_timeout: float) -> None:
        import aiohttp

        self._untrusted = aiohttp.ClientConnectorCertificateError
        self._unreachable = aiohttp.ClientConnectorError
        self._errors = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
        self._models_timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT)
        # Silence is the engine's to notice: a timer for each read would cost more than the read.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context()),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
            headers=_headers(),
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def models(self, url: str) -> list[Model]:
        """Return the server's models, but its adapters.

        Raises:
            Refused, Failed: with the server's words.
        """
        with self._translated():
            request = self._session.get(f"{url}/models", timeout=self._models_timeout, allow_redirects=False)
            async with request as response:
                data = await _body(response.content)
                _check(response.status, response.headers.get("location", ""), data)
                return _models(data)

    @contextlib.asynccontextmanager
    async def events(self, url: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[list[Event]]]:
        """Send a request; its answer's events come as they arrive. Leaving closes the connection of one in progress.

        Raises:
            Refused, Failed: with the server's words; also while events are read.
        """
        data = json.dumps(body).encode()
        with self._translated():
            async with self._session.post(f"{url}/completions", data=data, allow_redirects=False) as response:
                if response.status != 200:
                    _check(response.status, response.headers.get("location", ""), await _body(response.content))
                if response.content_type != "text/event-stream":
                    words = await _body(response.content)
                    raise status_error(_status_in(words), words or response.content_type.encode())
                yield _read(response.content)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._untrusted as error:
            raise Refused(f"has a certificate of nobody that is known here: {error}") from None
        except self._unreachable as error:
            raise Failed(f"cannot be reached: {error.os_error}") from None
        except self._errors as error:
            raise Failed(f"broke off: {str(error) or type(error).__name__}") from None


async def find_model(client: Client, urls: Sequence[str], name: str | None) -> tuple[str, int | None]:
    """Wait until a server has the model; return its name, and how many tokens it takes.

    Args:
        name: None: any.

    Raises:
        ConfigError: a server will never have it.
    """
    logged_at = time.monotonic()
    while True:
        reasons = []
        for url in urls:
            try:
                models = await client.models(url)
            except Refused as error:
                raise ConfigError(f"option.base_url={url}: {error}") from None
            except Failed as error:
                reasons.append(f"{url} {error}")
                continue
            for model in models:
                if name in (None, model.name):
                    return model.name, model.max_tokens
            reasons.append(f"{url} has {', '.join(repr(one.name) for one in models) or 'no model'}")
        if time.monotonic() - logged_at >= _LOG_INTERVAL:
            logged_at = time.monotonic()
            print(f"waiting for {repr(name) if name else 'a model'}: {'; '.join(reasons)}", file=sys.stderr, flush=True)
        await asyncio.sleep(_POLL_INTERVAL)


async def _body(content: Any) -> bytes:
    data = b""
    while len(data) < _MOST_BODY and (part := await content.readany()):
        data += part
    return data


async def _read(content: Any) -> AsyncIterator[list[Event]]:
    reader = EventReader()
    while data := await content.readany():
        try:
            yield reader.feed(data)
        except ValueError as error:
            raise Failed(f"sent no events: {error}") from None


def _check(status: int, location: str, data: bytes) -> None:
    if 300 <= status < 400:
        raise Refused(f"redirects to {location!r}, which is not followed: write that address")
    if status != 200:
        error = status_error(status, data)
        raise Refused(f"{error}{_HINT[status]}") if status in _HINT else error


def _status_in(data: bytes) -> int:
    """Return the status that an error under 200 names."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        value = json.loads(data)
        code = (value.get("error") or value)["code"]
        if isinstance(code, int):
            return code
    return 502


def _models(data: bytes) -> list[Model]:
    try:
        return [
            Model(one["id"], str(one.get("owned_by")), one.get("max_model_len") or one.get("context_window"))
            for one in json.loads(data)["data"]
            if not one.get("parent")
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Failed(f"its /models cannot be read: {error!r}") from None


def _headers() -> dict[str, str]:
    key = server_key()
    authorization = {"authorization": f"Bearer {key}"} if key else {}
    return {"content-type": "application/json", "accept-encoding": "identity", **authorization}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None


@functools.lru_cache
def find_kind(urls: tuple[str, ...]) -> str:
    """Ask the first server that answers for its kind, by `owned_by` of its models; blocks for up to 5 s a server.

    Raises:
        ConfigError: none answers, or it is of no known kind.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    reasons = []
    for url in urls:
        request = urllib.request.Request(f"{url}/models", headers=_headers())
        try:
            with opener.open(request, timeout=_MODELS_TIMEOUT) as response:
                models = _models(response.read(_MOST_BODY))
        except (OSError, Failed) as error:
            ending = "" if url.endswith("/v1") else "; such addresses end with /v1"
            said = str(error).removeprefix("<urlopen error ").removesuffix(">")
            reasons.append(f"{url}: {said}{_HINT.get(getattr(error, 'code', 0), ending)}")
            continue
        owners = {model.owner for model in models}
        kinds = [name for name, kind in KINDS.items() if any(owner.startswith(kind.owner) for owner in owners)]
        if len(kinds) == 1:
            return kinds[0]
        reasons.append(f"{url}: its models are owned by {', '.join(sorted(owners)) or 'nobody'}")
    raise ConfigError(
        f"option.base_url_kind=auto: a server has to run, and to say what it is: {'; '.join(reasons)}. Otherwise set "
        f"option.base_url_kind to {', '.join(KINDS)}"
    )
