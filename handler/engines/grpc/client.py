"""gRPC client of one server, by grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from handler.engines.grpc.contract import MOST_BYTES, UNREADABLE, Contract, Model
from handler.engines.grpc.sglang import Sglang
from handler.engines.grpc.trtllm import TrtLlm
from handler.engines.grpc.vllm import Vllm
from handler.engines.remote.servers import Failed, Refused, one_kind

CONTRACTS: dict[str, Contract] = {contract.name: contract for contract in (Vllm(), Sglang(), TrtLlm())}
"""Contracts by the value of option.base_url_kind."""

INFO_TIMEOUT = 5.0  # seconds for a description
_HEALTH_TIMEOUT = 25.0  # SGLang computes a token for an answer, and itself waits 20 s for it
_ABORT_TIMEOUT = 5.0
_LOADS_TIMEOUT = 0.5
_CONSTRAINT_FAILED = "smg-constraint-failed"
"""Trailer of the servicers: the request's own constraint ended it."""
_FOREIGN = ("handshake", "http1.x server", "Expected SETTINGS frame")
"""Parts of gRPC's error messages if the server speaks another protocol, or only one side uses TLS."""
_OF_THE_REQUEST = ("INVALID_ARGUMENT", "OUT_OF_RANGE")
_OF_THE_OPERATOR = ("UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND")
_NEAR = 0.01  # of 1, the length of a normalized vector in bf16
_MOST_WORDS = 4096
_MOST_RANKS = 1024  # a message has room for millions


def status_error(code: str, details: str, *, connected: bool, constraint_failed: bool = False) -> Refused | Failed:
    """Return the error of a gRPC status.

    Args:
        connected: the connection is still open.
        constraint_failed: that trailer was sent.
    """
    words = details[:_MOST_WORDS] or "no message"
    if code in _OF_THE_REQUEST or (code == "FAILED_PRECONDITION" and constraint_failed):
        return Refused(code, words)
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:  # of gRPC on this side
        return Failed("sent too large a message", words)
    if code == "UNAVAILABLE" and not connected:
        if any(word in details for word in _FOREIGN):
            return Failed("speaks another protocol", f"{words}; grpcs:// is gRPC over TLS", lasts=True)
        unreachable = "failed to connect" in details
        plain = "cannot be reached" if unreachable else "broke off"
        return Failed(plain, words, broke_off=not unreachable, silent=unreachable)
    busy = code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
    silent = code == "DEADLINE_EXCEEDED"
    return Failed(f"answered {code}", words, lasts=code in _OF_THE_OPERATOR, busy=busy, silent=silent)


class Client:
    """A server, by one connection; made and used on one event loop.

    gRPC reconnects by itself with the next request, perhaps to another server: check `connected` before each.
    """

    def __init__(self, url: str, contract: Contract, connect_timeout: float) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # each connection that ends would be a line
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

    async def model(self, *, generates: bool) -> Model:
        """Ask the server for its model, and check its health.

        Args:
            generates: the model must generate text; otherwise it must embed, which is tried.

        Raises:
            Failed: it does not answer, is unhealthy, or has a model for another task.
        """
        messages = self._contract.messages
        info = await self._ask(self._stub.GetModelInfo(messages.GetModelInfoRequest(), timeout=INFO_TIMEOUT))
        model = self._contract.model(info)
        if model.generates != generates:
            raise Failed(f"has a model that {'computes embeddings' if generates else 'generates text'}", lasts=True)
        health = await self._ask(self._stub.HealthCheck(messages.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT))
        if reason := self._contract.unhealthy_reason(health):
            raise Failed("is not healthy", reason[:_MOST_WORDS], ill=True)
        if generates:
            return model
        vector = _vector(
            await self._ask(self._stub.Embed(self._contract.embed(uuid4().hex, [0]), timeout=_HEALTH_TIMEOUT))
        )
        length = sum(number * number for number in vector) ** 0.5
        return model._replace(dimensions=len(vector), normalizes=abs(length - 1) < _NEAR)

    async def embed(self, ids: Sequence[int]) -> Sequence[float]:
        """Return a text's embedding.

        Raises:
            Refused, Failed: the server refuses it, or fails.
        """
        return _vector(await self._answer(self._stub.Embed(self._contract.embed(uuid4().hex, ids))))

    async def loads(self) -> Sequence[Any]:
        """Return the load of each rank; nothing if the server does not report it."""
        request = self._contract.messages.GetLoadsRequest(include=["core"])
        with contextlib.suppress(Failed):
            loads = (await self._ask(self._stub.GetLoads(request, timeout=_LOADS_TIMEOUT))).loads
            if len(loads) <= _MOST_RANKS:
                return list(loads)
        return ()

    async def generate(self, message: Any) -> AsyncGenerator[Any, None]:
        """Send a request; its answer's messages come as they arrive, None for one that cannot be decoded.

        Leaving early aborts it on the server.

        Raises:
            Refused, Failed: also while messages are read.
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
            if not ended and self.connected:  # else it is told by the connection's end
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
        """Make a call of our own; its failure is no client's fault."""
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
            raise Failed(UNREADABLE, lasts=True)
        return answer

    def _translated(self, error: Any) -> Refused | Failed:
        trailers = error.trailing_metadata() or ()
        return status_error(
            error.code().name,
            error.details() or "",
            connected=self.connected,
            constraint_failed=any(key == _CONSTRAINT_FAILED for key, _ in trailers),
        )


def _vector(answer: Any) -> Sequence[float]:
    """Read an embedding."""
    vector: Sequence[float] = answer.embedding
    if not vector or not all(map(math.isfinite, vector)):
        raise Failed(UNREADABLE, "its embedding is empty, or contains something that is not a number")
    return vector


def _channel(api: Any, url: str, connect_timeout: float) -> Any:
    """Open a channel of grpc's or grpc.aio's; grpcs:// uses this machine's certificate authorities."""
    import grpc

    parts = urlsplit(url)
    options = [
        ("grpc.max_receive_message_length", MOST_BYTES),
        ("grpc.max_send_message_length", MOST_BYTES),
        ("grpc.min_reconnect_backoff_ms", int(connect_timeout * 1000)),  # in which a connection is made
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
    """Ask all servers which contract they speak; blocks for up to 5 s for each.

    Raises:
        ConfigError: none answers, one speaks none, or they speak several.
    """
    found: dict[str, str] = {}
    reasons: list[str] = []
    for url in urls:
        try:
            found[url] = _contract_of(url)
        except Failed as error:
            reasons.append(f"{url}: {error}")
    return one_kind(found, reasons, CONTRACTS)


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
    raise Failed(f"speaks none of the contracts {', '.join(CONTRACTS)}")
