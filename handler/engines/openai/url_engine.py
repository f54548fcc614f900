"""The engine for servers by URL that stream tokens, by OpenAI's API unless a subclass uses another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.huggingface.files import eos_ids
from handler.engines.openai.answer import EventAnswer
from handler.engines.openai.client import Events, HttpClient, HttpModel, has_tls, new_client, suitable
from handler.engines.openai.kind import ServerKind
from handler.engines.process.own_server import OwnServer
from handler.engines.remote.engine import TLS_CLOSE, C, RemoteEngine, Running
from handler.engines.remote.servers import Failed, Part, Refused, RemoteServer, Software, with_ends

MakeBody = Callable[[str, Sequence[int], Sampling], dict[str, Any]]
"""Returns the body of a request from a model's name, the prompt's ids and the sampling parameters."""
_CONNECT_SECONDS = 5.0  # to a server that the engine has started


class HttpEngine(RemoteEngine[C]):
    """Base class of engines that use servers by HTTP.

    Args:
        key: the API key of the engine's own server.

    Attributes:
        name: the model's name at the servers. Without option.base_url_model, it is "" before a server has told it.
    """

    def __init__(
        self, software: Software, config: EngineConfig, own: OwnServer | None = None, key: str | None = None
    ) -> None:
        options = config.engine_options
        urls = options["base_url"] if own is None else (own.url,)
        tls = has_tls(urls)
        super().__init__(software, urls, float(options["base_url_timeout"]), TLS_CLOSE if tls else 0.0, own)
        timeout = options.get("base_url_connect_timeout", _CONNECT_SECONDS)
        self._client: HttpClient = self.complete(new_client(timeout, tls=tls, key=key))
        self.name: str = options.get("base_url_model") or ""

    async def disconnect(self) -> None:
        await self._client.close()


class UrlEngine(HttpEngine[EventAnswer]):
    """Engine for servers with OpenAI's API; see `engines.base.Engine`.

    Args:
        body: returns a request's body.
        takes_ends: whether the servers receive a model's end tokens.
    """

    def __init__(self, config: EngineConfig, kind: ServerKind, body: MakeBody, *, takes_ends: bool) -> None:
        # The kind that the operator sets is not checked.
        self._wanted_kind = kind if config.engine_options["base_url_kind"] == "auto" else None
        self._body = body
        super().__init__(kind.software, config)
        with self.closed_on_failure():
            self._eos = eos_ids(config) if takes_ends and config.model is not None else frozenset()
            self.name = self.find("openai", config, self.models, self._fit, self.name).name

    def _fit(self, models: Sequence[HttpModel], first: HttpModel | None = None) -> HttpModel:
        return suitable(models, first.name if first else self.name or None, self._wanted_kind)

    def new_call(self, request: EngineRequest) -> EventAnswer:
        return EventAnswer(self.body(request), request)

    def body(self, request: EngineRequest) -> dict[str, Any]:
        """Return the body of a request. Its parts that depend on the server are added later."""
        sampling = with_ends(request.sampling, self._eos)
        return self._body(self.model_name, request.ids, sampling)

    @property
    def model_name(self) -> str:
        """The name of the model in requests."""
        return self.name

    async def models(self, url: str) -> list[HttpModel]:
        """Return a server's models.

        Raises:
            Failed: the server does not report its models, or can serve none of them.
        """
        return await self._client.models(url)

    def send(self, server: RemoteServer, call: EventAnswer) -> AbstractAsyncContextManager[Events]:
        """Send a request to a server; see `HttpClient.events`."""
        return self._client.events(f"{server.url}/completions", call.body)

    def abandon(self, server: RemoteServer, call: EventAnswer) -> None:
        """Tell a server that a request has ended early. Most servers see that its connection is closed."""

    async def stream(self, server: RemoteServer, running: Running[EventAnswer]) -> None:
        """Read a response to the end, including the token counts after `finish_reason`, and release the connection.

        Raises:
            Refused: the server refuses the request.
            Failed: the server fails.
        """
        try:
            async with self.send(server, running.call) as events:
                async for batch in events:
                    for event in batch:
                        if running.ended:
                            break
                        part = running.held or self._steps.parts.get(running.key) or Part()
                        if running.call.read(event, part):
                            if running.call.stopped:
                                self.abandon(server, running.call)
                            self.take(server, running, part)
                            if running.call.stopped:
                                return
                        elif part.finish is not None:
                            self.hold(running, part)
                self.release(server, running)
                if not running.ended:
                    raise Failed("ended its response without a finish_reason")
        except Refused:
            if not running.call.begun:
                await self.ask(server, again=True)  # a server with another model may refuse what this model accepts
            raise

    async def check(self, server: RemoteServer) -> None:
        """Check that a server serves the model and accepts as many tokens as this engine."""
        self.check_max_tokens(self._fit(await self.models(server.url)).max_tokens)
