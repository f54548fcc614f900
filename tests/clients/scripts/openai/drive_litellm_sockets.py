"""litellm between a client's WebSocket and a server: what its proxy calls for Responses and Realtime.

The prompt names the resource to connect to (`responses` or `realtime`, with the query string in `query`). Without it,
the connection of the call before is used.

Options: `calls` (pairs of an event's type and its fields), `until` (types of events, or `close`), `times` (how many of
them end the call), and `certificate` (a file with the authority of the server's certificate).
"""

from __future__ import annotations

import asyncio
import datetime
import json
from typing import Any

import litellm
from common import main
from litellm.litellm_core_utils.litellm_logging import Logging
from litellm.llms.custom_httpx import http_handler

litellm.telemetry = False
litellm.suppress_debug_info = True  # it goes to stdout, which is the driver's
_CALLS = {"responses": litellm._aresponses_websocket, "realtime": litellm._arealtime}


class Downstream:
    """The WebSocket of a proxy's client, as starlette has it."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"type": "websocket", "headers": []}
        self.headers: dict[str, str] = {}
        self.to_server: asyncio.Queue[str] = asyncio.Queue()
        self.from_server: asyncio.Queue[Any] = asyncio.Queue()

    async def receive_text(self) -> str:
        return await self.to_server.get()

    async def send_text(self, data: str) -> None:
        self.from_server.put_nowait(json.loads(data))

    async def close(self, code: int = 1000, reason: str | None = None) -> None:
        self.from_server.put_nowait({"type": "close", "code": code, "reason": reason})


class Proxy:
    """One connection at a time."""

    _downstream = Downstream()
    _running: asyncio.Task[Any] | None = None

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        if prompt:
            await self._open(url, prompt, options)
        for kind, fields in options.get("calls", ()):
            self._downstream.to_server.put_nowait(json.dumps({"type": kind, **fields}))
        kinds, left = options.get("until", ()), options.get("times", 1)
        events: list[Any] = []
        while kinds and left:
            events.append(await asyncio.wait_for(self._downstream.from_server.get(), 100))
            left -= events[-1]["type"] in kinds
        return events

    async def _open(self, url: str, resource: str, options: dict[str, Any]) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        litellm.ssl_verify = options.get("certificate", True)
        http_handler._shared_realtime_ssl_context = None  # made for the certificate of an earlier connection
        self._downstream = Downstream()
        logging = Logging(
            model="model",
            messages=[],
            stream=False,
            call_type=_CALLS[resource].__name__,
            start_time=datetime.datetime.now(),
            litellm_call_id="call",
            function_id="function",
        )
        arguments = {"websocket": self._downstream, "api_base": f"{url}/v1", "api_key": "none"}
        if resource == "realtime":
            arguments["query_params"] = options.get("query") or {"model": "model"}
        call = _CALLS[resource](model="openai/model", litellm_logging_obj=logging, **arguments)
        self._running = asyncio.ensure_future(call)


main(Proxy(), keeps_connections=True)
