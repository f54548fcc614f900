"""Triton's gRPC service. Calls are passed as requests to the ASGI application, which checks keys, logs and responds.

Source: triton-inference-server/common, protobuf/grpc_service.proto.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp, Message, Scope
from tritonclient.grpc import service_pb2

from handler.core.errors import ConfigError, InvalidPayload
from handler.core.loop import wait_for
from handler.http.exchange import EXCHANGE, AsgiExchange
from handler.http.inference import again
from handler.http.security import Access, Keys
from handler.protocols.triton.api import VERSION
from handler.protocols.triton.grpc import FRAMES, body_of, check_fields, failure, messages
from handler.protocols.triton.infer import HEADER
from handler.serving.head import KEY_HEADERS

log = logging.getLogger("handler.server")

SERVICE = "inference.GRPCInferenceService"
INFER, STREAM = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"
"""Paths of the inference calls. The application receives them with the model name and version appended."""
_HEALTH = "/grpc.health.v1.Health/Check"  # the only call that needs no key; its message is not read
_MAX_REQUESTS = 128  # maximum number of running requests of a stream; more are read only as these end
_MAX_UNSENT = 1 << 16  # bytes of a stream that may wait to be sent
_OVERHEAD = 1 << 16  # bytes of a message besides its tensors
_MAX_MESSAGE = 1 << 24  # bytes; an arriving message takes memory before the server can count it
_OWN_HEADERS = ("content-type", "content-encoding", "content-length", "host", "origin", HEADER)

_SHARED_MEMORY = {
    f"{kind}SharedMemory{call}": f"/v2/{kind.lower()}sharedmemory/{path}"
    for kind in ("System", "Cuda")
    for call, path in {"Status": "status", "Register": "region/-/register", "Unregister": "unregister"}.items()
}
"""Maps shared-memory calls to their routes."""

_INDEX = "/v2/repository/index"
_POSTS = {_INDEX, *(path for path in _SHARED_MEMORY.values() if path.endswith("register"))}
"""Paths that `_reader` requests with POST. It requests all other paths with GET."""

_CODES = defaultdict(lambda: grpc.StatusCode.INVALID_ARGUMENT) | {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.UNAVAILABLE,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""Maps HTTP status codes to gRPC status codes. All other HTTP codes map to INVALID_ARGUMENT."""


def _error(status: int, body: bytes) -> str:
    """Return the message of an error response."""
    try:
        value = json.loads(body)
        return str(value.get("error") or value["message"])
    except (ValueError, LookupError, AttributeError):
        return body.decode(errors="replace") or f"status {status}"


class _Outbox:
    """The messages of a stream that have not been sent yet."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self.size = 0

    def put(self, *parts: bytes) -> None:
        for part in parts:
            self._messages.put_nowait(part)
            self.size += len(part)

    def end(self) -> None:
        self._messages.put_nowait(None)

    async def room(self) -> None:
        """Wait until at most `_MAX_UNSENT` bytes are unsent."""
        while self.size > _MAX_UNSENT:
            self._room.clear()
            await self._room.wait()

    async def take(self) -> bytes | None:
        """Return the next message, or None at the end."""
        data = await self._messages.get()
        self.size -= len(data or b"")
        if self.size <= _MAX_UNSENT:
            self._room.set()
        return data


class _Exchange(AsgiExchange):
    """The exchange for one request in a stream. It puts the messages of the response into the outbox.

    Args:
        id: the id of the request.
        drop: function that ends the streaming call.
        patience: maximum time that the outbox may stay full, in seconds.
    """

    def __init__(self, id: str, outbox: _Outbox, drop: Callable[[], object], patience: float) -> None:
        super().__init__(again(b"", _never), self.send, "2")
        self._id, self._outbox, self._drop, self._patience = id, outbox, drop, patience
        self._is_framed, self._rest = False, b""
        self.status = 0

    @property
    def num_unsent(self) -> int:
        return self._outbox.size

    def drop(self) -> None:
        super().drop()
        self._drop()

    def resume(self) -> None:
        self.is_paused = self.is_over or not self._is_framed

    def write_chunk(self, data: bytes) -> bool:
        if self.is_paused or self._outbox.size > _MAX_UNSENT:
            return False
        self._outbox.put(*messages(data))
        return True

    async def send(self, message: Message) -> None:
        """Send a message of the response. This needs no task unless the outbox is full."""
        if self.is_over:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._is_framed = (b"content-type", FRAMES.encode()) in message["headers"]
            return
        if self._outbox.size > _MAX_UNSENT:
            try:
                await asyncio.sleep(0)  # `BodyWriter` steps to the first wait, and a timeout needs a task
                await wait_for(self._outbox.room(), self._patience)
            except asyncio.TimeoutError:
                self.drop()
                raise OSError("the client reads too slowly") from None
            if self.is_over:
                return
        data, last = message.get("body", b""), not message.get("more_body", False)
        if self._is_framed:
            self._outbox.put(*messages(data))
        else:
            self._rest += data
        if last:
            if not self._is_framed:
                self._outbox.put(failure(self._id, _error(self.status, self._rest)))
            self._end()


async def _never() -> Message:
    """Wait forever. The caller is cancelled when its call ends."""
    message: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await message


class _KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a valid key before their messages are read, because messages take memory.

    Args:
        refuse: function that responds to a call without a valid key. Its first argument is the path of the call.
    """

    def __init__(self, keys: Iterable[str], refuse: Callable[[str, Any, Any], AsyncIterator[bytes]]) -> None:
        self._keys, self._refuse = Keys(keys), refuse

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        metadata = dict(reversed(tuple(call.invocation_metadata)))  # the first value counts, as in the application
        has_key = self._keys.owner(*(str(metadata.get(name, "")) for name in KEY_HEADERS))
        if has_key or call.method == _HEALTH:
            return await continuation(call)
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._refuse, call.method))


class GrpcServer:
    """Serves Triton's gRPC service.

    Args:
        app: the application that responds.
        access: the clients that may use the server.
        patience: maximum time that a client may go without reading its stream, in seconds.
        max_bytes: maximum size of a request body, in bytes.
        max_calls: maximum number of concurrent calls per connection. The queue limits the requests over all
            connections.
    """

    def __init__(self, app: ASGIApp, access: Access, *, patience: float, max_bytes: int, max_calls: int) -> None:
        self._app, self._access, self._patience = app, access, patience
        options = [
            ("grpc.max_receive_message_length", min(max_bytes, _MAX_MESSAGE) + _OVERHEAD),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", max_calls),
        ]
        checks = [_KeyCheck(access.keys, self._refuse)] if access.keys else []
        self._server = grpc.aio.server(interceptors=checks, options=options)
        health = {"Check": grpc.stream_unary_rpc_method_handler(self._check)}
        self._server.add_registered_method_handlers(SERVICE, self._handlers())
        self._server.add_registered_method_handlers(_HEALTH.split("/")[1], health)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port.

        Raises:
            ConfigError: the server cannot listen on this address.
        """
        access = self._access
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if access.certfile is None:
                bound = self._server.add_insecure_port(address)
            else:
                pair = ((access.keyfile or access.certfile).read_bytes(), access.certfile.read_bytes())
                bound = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError:
            raise ConfigError(f"cannot listen on {address} (option.grpc_port)") from None
        await self._server.start()
        return int(bound)

    async def stop(self) -> None:
        await self._server.stop(1.0)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _handlers(self) -> Mapping[str, Any]:
        methods: dict[str, Callable[[Any, Any], Any]] = {
            "ServerLive": self._reader("/v2/health/live", "live"),
            "ServerReady": self._reader("/v2/health/ready", "ready"),
            "ModelReady": self._reader(lambda request: f"{_path(request)}/ready", "ready"),
            "ServerMetadata": self._reader("/v2"),
            "ModelMetadata": self._reader(_path),
            "ModelConfig": self._reader(lambda request: f"{_path(request)}/config", "config"),
            "ModelStatistics": self._reader(
                lambda request: f"{_path(request)}/stats" if request.name else "/v2/models/stats"
            ),
            **{name: self._reader(path) for name, path in _SHARED_MEMORY.items()},
            "RepositoryIndex": self._reader(_INDEX, "models"),
            "ModelInfer": self._infer,
        }
        methods = {name: self._handler(name, method) for name, method in methods.items()}
        return methods | {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream)}

    def _handler(self, name: str, method: Callable[[Any, Any], Any]) -> Any:
        request, response = (getattr(service_pb2, f"{name}{kind}") for kind in ("Request", "Response"))

        async def handle(data: bytes, context: Any) -> Any:
            try:
                value = await method(await _parsed(request, data, context), context)
            except InvalidPayload as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
            if isinstance(value, response):
                return value
            return json_format.ParseDict(value, response(), ignore_unknown_fields=True)

        return grpc.unary_unary_rpc_method_handler(handle, None, response.SerializeToString)

    def _reader(self, path: str | Callable[[Any], str], field: str | None = None) -> Callable[[Any, Any], Any]:
        """Return a gRPC method that responds like a route. The fields `live` and `ready` depend only on the status."""

        async def read(request: Any, context: Any) -> Mapping[str, Any]:
            route = path if isinstance(path, str) else path(request)
            status, body = await self._call(context, "POST" if path in _POSTS else "GET", route)
            if field in ("live", "ready") and status not in (401, 403):
                return {field: status == 200}
            if status >= 400:
                await context.abort(_CODES[status], _error(status, body))
            value = json.loads(body or b"{}")
            return {field: value} if field is not None else value or {}

        return read

    async def _refuse(self, path: str, _: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """End a call without a valid key, with the same error as for an HTTP request.

        The call is logged. It counts as a refused request only if it is an inference call.
        """
        route = ("POST", f"{path}/-") if path in (INFER, STREAM) else ("GET", "/v2")
        status, body = await self._call(context, *route)
        await context.abort(_CODES[status], _error(status, body))
        yield b""

    async def _check(self, request: AsyncIterator[bytes], context: Any) -> bytes:
        """Return the state for a health check: SERVING or NOT_SERVING (grpc/grpc, health.proto)."""
        status, _ = await self._call(context, "GET", "/health")
        return b"\x08\x01" if status == 200 else b"\x08\x02"

    async def _infer(self, request: Any, context: Any) -> Any:
        outbox = _Outbox()
        responding = self._request(INFER, request, context, outbox, bool)
        del request
        status = await responding
        outbox.end()
        response = service_pb2.ModelStreamInferResponse.FromString(await outbox.take() or b"")
        if response.error_message:
            await context.abort(_CODES[status], response.error_message)
        response.infer_response.parameters.clear()
        return response.infer_response

    async def _stream(self, _: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Respond to the requests of a stream concurrently. An error in one request does not end the stream."""
        outbox, running, call = _Outbox(), set[asyncio.Future[Any]](), asyncio.current_task()
        drop = call.cancel if call is not None else bool

        def ended(task: asyncio.Future[Any]) -> None:
            running.discard(task)
            if reader.done() and not running:
                outbox.end()

        async def receive() -> bytes:
            await outbox.room()
            message: bytes = await context.read()  # the iterator would keep the last one
            return message

        async def read() -> None:
            while (data := await receive()) is not grpc.aio.EOF:
                try:
                    request = await _parsed(service_pb2.ModelInferRequest, data, context)
                except InvalidPayload as error:
                    outbox.put(failure("", error.message))
                    continue
                task = asyncio.ensure_future(self._request(STREAM, request, context, outbox, drop))
                running.add(task)
                del data, request  # the next message may take long to arrive
                task.add_done_callback(ended)
                if len(running) >= _MAX_REQUESTS:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

        reader = asyncio.ensure_future(read())
        reader.add_done_callback(ended)
        try:
            while (message := await outbox.take()) is not None:
                yield message
            reader.result()
        finally:
            for task in (reader, *running):
                task.cancel()

    async def _request(self, path: str, request: Any, context: Any, outbox: _Outbox, drop: Callable[[], object]) -> int:
        """Put the messages of the response into the outbox, and return the status of the response."""
        id, name, version = request.id, request.model_name, request.model_version
        try:
            body, length = body_of(request)
        except InvalidPayload as error:
            outbox.put(failure(id, error.message))
            return 400
        headers = [(HEADER, str(length)), ("content-length", str(len(body)))]
        receive, exchange = again(body, _never), _Exchange(id, outbox, drop, self._patience)
        del request, body  # the application frees the body once it is decoded
        path = f"{path}/{_escaped(name)}" + (f"/versions/{_escaped(version)}" if version else "")
        scope = _scope(context, exchange, "POST", path, headers)
        try:
            await self._app(scope, receive, exchange.send)
        except Exception:  # one request must not end the others of its stream
            log.exception("request %r failed", id)
        finally:
            exchange.close()
        if not exchange.is_over:
            outbox.put(failure(id, "internal error"))
            return 500
        return exchange.status

    async def _call(self, context: Any, method: str, path: str) -> tuple[int, bytes]:
        """Process a request for the state of the server or the model, and return the status and the body."""
        status, parts = 0, list[bytes]()

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        receive = again(b"", _never)
        exchange = AsgiExchange(receive, send, "2")
        scope = _scope(context, exchange, method, path)
        with contextlib.closing(exchange):
            await self._app(scope, receive, exchange.send)
        return status, b"".join(parts)


async def _parsed(kind: Any, data: bytes, context: Any) -> Any:
    """Parse the message of a call. If it is invalid, end the call with the status that Triton uses.

    Raises:
        InvalidPayload: the message may need much more memory than its size.
    """
    if kind is service_pb2.ModelInferRequest:
        check_fields(data)
    try:
        return kind.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INTERNAL, "Unable to parse request")


def _path(request: Any) -> str:
    """Return the path of a model. The version distinguishes the path from routes such as /v2/models/stats."""
    return f"/v2/models/{_escaped(request.name)}/versions/{_escaped(request.version or VERSION)}"


def _escaped(name: str) -> str:
    """Escape the slashes in a name, because they would select another route. An empty name becomes a space."""
    return name.replace("/", "%2F") or " "


def _scope(
    context: Any, exchange: AsgiExchange, method: str, path: str, headers: Iterable[tuple[str, str]] = ()
) -> Scope:
    """Return the ASGI scope of a call. The metadata of the call is passed as request headers."""
    metadata = [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]
    passed = [pair for pair in metadata if pair[0] not in _OWN_HEADERS and not pair[0].startswith("grpc-")]
    pairs = [("host", "localhost"), *headers, *passed]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "2",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in pairs],
        "extensions": {EXCHANGE: exchange},
    }
