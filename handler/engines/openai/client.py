"""An HTTP client based on aiohttp, with one connection pool, and without redirects, proxies or cookies."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import orjson

from handler.config.environment import server_key
from handler.core.event_stream import EventReader, StreamEvent
from handler.engines.openai.answer import MAX_EVENT, status_error, status_in
from handler.engines.openai.kind import ServerKind
from handler.engines.remote.servers import BrokeOff, Failed, Lasting, NoConnection

_MOST_BODY = 1 << 20  # bytes read from an error or a list of models
_MOST_NAME = 1000  # characters
_MAX_RESPONSE = 1 << 26  # bytes of a response that is not a stream
_MODELS_TIMEOUT = 5.0  # seconds for /models
_MOST_STALE = 4  # idle connections that one request tries
_LARGE = 1 << 20  # bytes of a request
_PLAIN = ("", "identity")

Events = AsyncIterator[list[StreamEvent]]
"""The events of a response, as they arrive."""


class HttpModel(NamedTuple):
    """A server's model, or a LoRA adapter of it.

    Attributes:
        max_tokens: limit for the prompt and the response together; None if not reported.
        path: path of an adapter as the server knows it; "" if not reported.
    """

    name: str
    owner: str
    max_tokens: int | None
    is_adapter: bool = False
    path: str = ""


class HttpClient:
    """An HTTP client. Create and use it on the same event loop.

    Args:
        connect_timeout: maximum time to open a connection, in seconds.
        tls: whether a server's address begins with https. If so, certificate authorities are loaded, which takes 20 ms
            or more.
        key: the API key of the servers; by default the key of servers at option.base_url.

    Attributes:
        num_connections: number of connections that were opened so far.
    """

    def __init__(self, connect_timeout: float, *, tls: bool, key: str | None = None) -> None:
        import aiohttp

        from handler.engines.openai.connector import CleanConnector

        self.num_connections = 0
        self._untrusted = aiohttp.ClientConnectorCertificateError
        self._unreachable = aiohttp.ClientConnectorError
        self._errors = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
        self._broken = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
        self._models_timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT)
        key = server_key() if key is None else key
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        # The engine notices silence itself: a timer for each read would take more time than the read.
        self._session = aiohttp.ClientSession(
            connector=CleanConnector(limit=0, ssl=ssl.create_default_context() if tls else True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
            headers={"content-type": "application/json", "accept-encoding": "identity", **authorization},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            trace_configs=[_noting_reuse(), self._counting()],
        )

    def _counting(self) -> Any:
        """Return a trace that counts connections."""
        import aiohttp

        async def count(session: object, context: object, params: object) -> None:
            self.num_connections += 1

        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(count)
        return trace

    async def close(self) -> None:
        await self._session.close()

    async def models(self, url: str, *, adapters: bool = False) -> list[HttpModel]:
        """Return the server's models, and its adapters if requested.

        Raises:
            Failed: the server does not report its models.
        """
        models = _models(await self.get(f"{url}/models"))
        return [model for model in models if adapters or not model.is_adapter]

    async def document(self, *urls: str) -> Any:
        """Return the JSON document at the first of these addresses that exists.

        Raises:
            Failed: the server does not return the document.
        """
        for url in urls:
            data = await self.get(url, may_miss=url != urls[-1])
            if data:
                break
        try:
            return orjson.loads(data)
        except ValueError as error:
            raise Failed("does not report its settings", f"its {urls[-1]} cannot be read: {error!r}") from None

    async def get(self, url: str, *, may_miss: bool = False, waits: bool = False) -> bytes:
        """Return the body of a description, such as a list of models.

        Args:
            may_miss: whether to return b"" if the server does not have this address.
            waits: whether the response may take as long as a step of the server.

        Raises:
            Failed: the server does not return it.
        """
        with self._translated():
            timeout = None if waits else self._models_timeout
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as response:
                data = await _body(response.content)
                if response.status == 404 and may_miss:
                    return b""
                if response.status != 200:
                    error = status_error(response.status, data, response.headers)
                    raise error if isinstance(error, Failed) else Failed(f"answered {error.status}", error.words)
                _check_encoding(response.headers)
                return data

    async def post(self, url: str, body: Mapping[str, Any]) -> bytes:
        """Send a request, and return the body of its response.

        Raises:
            Refused: the server refuses the request.
            Failed: the server fails.
        """
        with self._translated():
            async with await self._post(url, json.dumps(body).encode()) as response:
                data = await _body(response.content, _MAX_RESPONSE)
                if response.status != 200:
                    raise status_error(response.status, data[:_MOST_BODY], response.headers)
                _check_encoding(response.headers)
                return data

    @contextlib.asynccontextmanager
    async def events(self, url: str, body: Mapping[str, Any]) -> AsyncIterator[Events]:
        """Send a request to this address, and yield an iterator over the events of the response as they arrive.

        If the context exits before the response ends, the connection is closed.

        Raises:
            Refused: the server refuses the request.
            Failed: the server fails, perhaps in the middle of the response.
        """
        with self._translated():
            async with await self._post(url, json.dumps(body).encode()) as response:
                if response.status != 200:
                    raise status_error(response.status, await _body(response.content), response.headers)
                _check_encoding(response.headers)
                if response.content_type != "text/event-stream":
                    words = await _body(response.content)
                    if (status := status_in(words, 200)) != 200:
                        raise status_error(status, words)
                    detail = f"{response.content_type}: {words[:1000].decode('utf-8', 'replace')}"
                    raise Failed("answered 200 without events", detail)
                yield _read(response.content)

    async def _post(self, url: str, data: bytes) -> Any:
        """Send a request body. If the server has just closed an idle connection, try another connection."""
        for _ in range(_MOST_STALE):
            connection: dict[str, bool] = {}
            try:
                payload = _payload(data)
                return await self._session.post(url, data=payload, allow_redirects=False, trace_request_ctx=connection)
            except self._broken:
                if not connection:
                    raise
        return await self._session.post(url, data=_payload(data), allow_redirects=False)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._untrusted as error:
            detail = f"its certificate is not signed by a trusted authority: {error}"
            raise Lasting("cannot be trusted", detail) from None
        except self._unreachable as error:
            raise NoConnection("cannot be reached", str(error.os_error)) from None
        except self._errors as error:
            raise BrokeOff("closed the connection", str(error) or type(error).__name__) from None


T = TypeVar("T")


def ask_each(urls: Sequence[str], ask: Callable[[HttpClient, str], Awaitable[T]]) -> list[T | BaseException]:
    """Ask each server once. Return its response, or the error. This blocks for up to 5 s per question."""

    async def ask_all() -> list[T | BaseException]:
        client = HttpClient(_MODELS_TIMEOUT, tls=has_tls(urls))
        try:
            return await asyncio.gather(*(ask(client, url) for url in urls), return_exceptions=True)
        finally:
            await client.close()

    with ThreadPoolExecutor(1) as thread:  # an event loop may be running on the caller's thread
        return thread.submit(asyncio.run, ask_all()).result()


async def new_client(connect_timeout: float, *, tls: bool, key: str | None = None) -> HttpClient:
    """Return a client; see `HttpClient`. aiohttp needs a running event loop."""
    return HttpClient(connect_timeout, tls=tls, key=key)


def _payload(data: bytes) -> Any:
    """Return the data as aiohttp expects it: large data as a file, which it sends in parts."""
    return io.BytesIO(data) if len(data) > _LARGE else data


def suitable(models: Sequence[HttpModel], name: str | None, kind: ServerKind | None) -> HttpModel:
    """Return the server's model with this name and kind. None matches any name or any kind.

    Raises:
        Failed: the server has no such model.
    """
    matching = [model for model in models if name in (None, model.name)]
    if not models:
        raise Failed("serves no model")
    if not matching:
        names = ", ".join(repr(other.name) for other in models[:8])
        raise Failed("serves another model", f"{names} instead of {name!r}")
    if kind is not None and not matching[0].owner.startswith(kind.owner):
        owner = f"its models are owned by {matching[0].owner!r}"
        raise Failed("is of another kind", f"{owner}, which is not {kind.software.name}")
    return matching[0]


def _noting_reuse() -> Any:
    """Return a trace that records, in a request's context, whether the request reuses a connection."""
    import aiohttp

    async def note(session: object, context: Any, params: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx["reused"] = True

    async def forget(session: object, context: Any, params: object) -> None:
        if context.trace_request_ctx is not None:  # the connection that was to be reused was not clean
            context.trace_request_ctx.clear()

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(note)
    trace.on_connection_create_start.append(forget)
    return trace


async def _body(content: Any, limit: int = _MOST_BODY) -> bytes:
    data = bytearray()
    while len(data) < limit and (part := await content.readany()):
        data += part
    return bytes(data)


async def _read(content: Any) -> AsyncIterator[list[StreamEvent]]:
    reader = EventReader(MAX_EVENT)
    while data := await content.readany():
        try:
            yield reader.feed(data)
        except ValueError as error:
            raise Failed("sent a response that is not a stream of events", str(error)) from None


def _check_encoding(headers: Mapping[str, str]) -> None:
    """Raise Failed if a response is compressed. Compression was not requested, and the data could expand enormously."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in _PLAIN:
        raise Failed("sent a compressed response", f"Content-Encoding: {encoding[:100]}")


def _models(data: bytes) -> list[HttpModel]:
    try:
        entries = orjson.loads(data)["data"]
        limits = {entry["id"]: _limit(entry) for entry in entries if not entry.get("parent")}
        return [_model(entry, limits) for entry in entries]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Failed("does not report its models", f"its /models cannot be read: {error!r}") from None


def _limit(entry: Mapping[str, Any]) -> int | None:
    most = entry.get("max_model_len") or entry.get("context_window")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"a model's limit is {most!r:.100} tokens")
    return most


def _model(entry: Mapping[str, Any], limits: Mapping[str, int | None]) -> HttpModel:
    """Return a model or an adapter, which has the limit of its model."""
    name, parent = entry["id"], entry.get("parent")
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
        raise ValueError(f"a model's id must be a string of 1 to {_MOST_NAME} characters")
    owner, root = str(entry.get("owned_by"))[:_MOST_NAME], entry.get("root")
    path = root if parent and isinstance(root, str) else ""
    return HttpModel(name, owner, limits.get(parent or name), bool(parent), path)


def has_tls(urls: Sequence[str]) -> bool:
    return any(url.lower().startswith("https:") for url in urls)
