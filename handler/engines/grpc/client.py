"""A gRPC client for a single server, based on grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from handler.engines.grpc.contract import MOST_BYTES, UNREADABLE, Contract, GrpcModel
from handler.engines.remote.servers import (
    BrokeOff,
    Busy,
    Failed,
    Ill,
    Lasting,
    NoConnection,
    Refused,
    Silent,
    common_kind,
    kinds_of,
)

CONTRACTS: dict[str, Contract] = kinds_of("grpc")
"""Maps each value of option.base_url_kind to its contract."""

INFO_TIMEOUT = 5.0  # seconds for GetModelInfo
_HEALTH_TIMEOUT = 25.0  # SGLang's health check generates a token, and waits up to 20 s for it
_ABORT_TIMEOUT = 5.0
_LOADS_TIMEOUT = 0.5
_CONSTRAINT_FAILED = "smg-constraint-failed"
"""Trailer that servers send if a request failed because of its own schema or grammar."""
_FOREIGN = ("handshake", "http1.x server", "Expected SETTINGS frame")
"""Parts of gRPC's error messages if the server uses a different protocol, or if only one side uses TLS."""
_OF_THE_REQUEST = ("INVALID_ARGUMENT", "OUT_OF_RANGE")
_KINDS: Mapping[str, type[Failed]] = {
    **dict.fromkeys(("UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND"), Lasting),
    **dict.fromkeys(("RESOURCE_EXHAUSTED", "UNAVAILABLE"), Busy),
    "DEADLINE_EXCEEDED": Silent,
}
_NEAR = 0.01  # tolerance for the length of a normalized embedding in bf16
_MOST_WORDS = 4096
_MOST_RANKS = 1024  # a message has room for millions


class _NotAccepted(Silent, NoConnection):
    """The server did not accept a connection in time."""


def status_error(code: str, details: str, *, connected: bool, constraint_failed: bool = False) -> Refused | Failed:
    """Return the error for a gRPC status.

    Args:
        connected: whether the connection was still open.
        constraint_failed: whether the server sent the trailer `_CONSTRAINT_FAILED`.
    """
    words = details[:_MOST_WORDS] or "no message"
    if code in _OF_THE_REQUEST or (code == "FAILED_PRECONDITION" and constraint_failed):
        return Refused(code, words)
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:  # raised by gRPC on this side
        return Failed("sent a message that is too large", words)
    if code == "UNAVAILABLE" and not connected:
        if any(word in details for word in _FOREIGN):
            return Lasting("uses another protocol", f"{words}; for gRPC over TLS, use grpcs://")
        if "failed to connect" in details:
            return _NotAccepted("cannot be reached", words)
        return BrokeOff("closed the connection", words)
    return _KINDS.get(code, Failed)(f"answered {code}", words)


class GrpcClient:
    """A client with one connection to a server. Create and use a client on the same event loop.

    gRPC reconnects automatically for the next request, perhaps to a different server. Check `connected` before each
    request.
    """

    def __init__(self, url: str, contract: Contract, connect_timeout: float) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise each connection that ends is logged
        import grpc.aio

        self._ready = grpc.ChannelConnectivity.READY
        self._error = grpc.aio.AioRpcError
        self._contract = contract
        self._channel = _channel(grpc.aio, url, connect_timeout)
        self._stub = contract.stub(self._channel)
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return bool(self._channel.get_state() is self._ready)

    async def model(self, *, generates: bool) -> GrpcModel:
        """Ask the server for its model, and check that the server is healthy.

        Args:
            generates: whether the model must generate text. Otherwise, the model must compute embeddings, which is
                tested with a request.

        Raises:
            Failed: the server does not respond, is unhealthy, or has a model for another task.
        """
        messages = self._contract.messages
        info = await self._ask(self._stub.GetModelInfo(messages.GetModelInfoRequest(), timeout=INFO_TIMEOUT))
        model = self._contract.model(info)
        if model.generates != generates:
            raise Lasting(f"serves a model that {'computes embeddings' if generates else 'generates text'}")
        model = self._contract.with_server_info(model, await self._server_info())
        health = await self._ask(self._stub.HealthCheck(messages.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT))
        if reason := self._contract.unhealthy_reason(health):
            raise Ill("is not healthy", reason[:_MOST_WORDS])
        if generates:
            return model
        embedding = _embedding(
            await self._ask(self._stub.Embed(self._contract.embed(uuid4().hex, [0]), timeout=_HEALTH_TIMEOUT))
        )
        length = sum(number * number for number in embedding) ** 0.5
        return model._replace(dimensions=len(embedding), normalizes=abs(length - 1) < _NEAR)

    async def _server_info(self) -> Any:
        """Return the response to GetServerInfo, which is empty if the server does not implement it, as older ones."""
        messages = self._contract.messages
        with contextlib.suppress(Failed):
            return await self._ask(self._stub.GetServerInfo(messages.GetServerInfoRequest(), timeout=INFO_TIMEOUT))
        return messages.GetServerInfoResponse()

    async def embed(self, ids: Sequence[int]) -> Sequence[float]:
        """Return the embedding of a text.

        Raises:
            Refused: the server refuses the text.
            Failed: the server fails.
        """
        return _embedding(await self._answer(self._stub.Embed(self._contract.embed(uuid4().hex, ids))))

    async def loads(self) -> Sequence[Any]:
        """Return the load of each rank, or an empty result if the server does not report its load."""
        request = self._contract.messages.GetLoadsRequest(include=["core"])
        with contextlib.suppress(Failed):
            loads = (await self._ask(self._stub.GetLoads(request, timeout=_LOADS_TIMEOUT))).loads
            if len(loads) <= _MOST_RANKS:
                return list(loads)
        return ()

    async def generate(self, message: Any) -> AsyncGenerator[Any, None]:
        """Send a request, and yield the messages of the response as they arrive.

        A message that cannot be decoded is yielded as None. If the generator is closed early, the request is aborted on
        the server.

        Raises:
            Refused: the server refuses the request.
            Failed: the server fails, perhaps in the middle of the response.
        """
        call, ended = self._stub.Generate(message), False
        try:
            async for response in call:
                yield response
            ended = True
        except self._error as error:
            ended = True
            raise self._translated(error) from None
        finally:
            if not ended:
                call.cancel()
            if not ended and self.connected:  # otherwise the server notices that the connection has ended
                task = asyncio.get_running_loop().create_task(self._abort(message.request_id))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT)
        await self._channel.close()

    async def _abort(self, id: str) -> None:
        with contextlib.suppress(self._error):
            await self._stub.Abort(self._contract.abort(id), timeout=_ABORT_TIMEOUT)

    async def _ask(self, call: Any) -> Any:
        """Await a call that is not made for a client's request. A refusal is treated as a server failure."""
        try:
            return await self._answer(call)
        except Refused as error:
            raise Failed(f"answered {error.status}", error.words) from None

    async def _answer(self, call: Any) -> Any:
        try:
            answer = await call
        except self._error as error:
            raise self._translated(error) from None
        if answer is None:  # gRPC could not decode it
            raise Lasting(UNREADABLE)
        return answer

    def _translated(self, error: Any) -> Refused | Failed:
        trailers = error.trailing_metadata() or ()
        return status_error(
            error.code().name,
            error.details() or "",
            connected=self.connected,
            constraint_failed=any(key == _CONSTRAINT_FAILED for key, _ in trailers),
        )


def _embedding(answer: Any) -> Sequence[float]:
    embedding: Sequence[float] = answer.embedding
    if not embedding or not all(map(math.isfinite, embedding)):
        raise Failed(UNREADABLE, "its embedding is empty, or contains a value that is not a finite number")
    return embedding


def _channel(api: Any, url: str, connect_timeout: float) -> Any:
    """Open a grpc or grpc.aio channel. For grpcs://, trust the CAs in SSL_CERT_FILE, or gRPC's own list."""
    import grpc

    parts = urlsplit(url)
    options = [
        ("grpc.max_receive_message_length", MOST_BYTES),
        ("grpc.max_send_message_length", MOST_BYTES),
        ("grpc.min_reconnect_backoff_ms", int(connect_timeout * 1000)),  # also the time to connect
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if parts.scheme == "grpc":
        return api.insecure_channel(parts.netloc, options)
    roots = os.environ.get("SSL_CERT_FILE")
    credentials = grpc.ssl_channel_credentials(Path(roots).read_bytes() if roots else None)
    return api.secure_channel(parts.netloc, credentials, options)


@functools.lru_cache
def find_contract(urls: tuple[str, ...]) -> str:
    """Find out which contract the servers use. This blocks for up to 5 s per server and contract.

    Raises:
        ConfigError: the contract of no server can be determined, or the servers use different contracts.
    """
    contracts: dict[str, str] = {}
    reasons: list[str] = []
    for url in urls:
        try:
            contracts[url] = _contract_of(url)
        except Failed as error:
            reasons.append(f"{url}: {error}")
    return common_kind(contracts, reasons, CONTRACTS)


def _contract_of(url: str) -> str:
    import grpc

    with _channel(grpc, url, INFO_TIMEOUT) as channel:
        for name, contract in CONTRACTS.items():
            try:
                contract.stub(channel).GetModelInfo(contract.messages.GetModelInfoRequest(), timeout=INFO_TIMEOUT)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    continue
                raised = status_error(error.code().name, error.details() or "", connected=False)
                raise Failed(str(raised)) from None
            return name
    raise Failed(f"supports none of the contracts {', '.join(CONTRACTS)}")
