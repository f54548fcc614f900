"""An engine that uses servers with OpenAI's API. It sends token ids to /v1/completions, which returns token ids.

llama.cpp's servers do not return token ids there, so they are used through their own API (`engines.llamacpp`).

This handler still processes text, stop strings, chat templates and errors itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from handler.engines.base import Capabilities, EngineConfig, EngineRequest
from handler.engines.huggingface.files import eos_ids, load_tokenizer
from handler.engines.huggingface.files import fetch_descriptions as fetch
from handler.engines.llamacpp.engine import LlamaCppEngine
from handler.engines.llamacpp.parameters import CAPABILITIES as LLAMACPP
from handler.engines.openai.answer import EventAnswer
from handler.engines.openai.client import HttpClient, HttpModel, find_kind, has_tls, suitable
from handler.engines.openai.kinds import KINDS, completion
from handler.engines.remote.engine import TLS_CLOSE, RemoteEngine, Running
from handler.engines.remote.servers import Failed, Part, Refused, RemoteOptions, RemoteServer, find_model, with_ends

__all__ = ["UrlEngine", "capabilities", "check", "fetch", "load", "load_tokenizer", "prepare"]

_SETTING = RemoteOptions("openai", "http://host:8000/v1")
check, prepare = _SETTING.check, _SETTING.prepare


class UrlEngine(RemoteEngine[EventAnswer]):
    """Engine for servers with OpenAI's API; see `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        options = config.engine_options
        urls = options["base_url"]
        kind, self._wanted_kind = options["base_url_kind"], None  # the kind that the operator sets is not checked
        if kind == "auto":
            kind = self._wanted_kind = find_kind(urls)
        super().__init__(kind, urls, float(options["base_url_timeout"]), TLS_CLOSE if has_tls(urls) else 0.0)
        self._eos = eos_ids(config) if kind == "vllm" and config.model is not None else frozenset()
        self._client: HttpClient = self.complete(_new_client(options["base_url_connect_timeout"], has_tls(urls)))
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._model: str = options.get("base_url_model") or ""  # "": the first model of the first server
            description = repr(self._model) if self._model else "a model"
            model, failed = self.complete(find_model(urls, self._client.models, self._fit, description))
            self._model = model.name
            self.begin("openai", model.max_tokens, config, failed)
            on_failure.pop_all()

    def _fit(self, models: Sequence[HttpModel], first: HttpModel | None = None) -> HttpModel:
        return suitable(models, first.name if first else self._model or None, self._wanted_kind)

    def new_call(self, request: EngineRequest) -> EventAnswer:
        sampling = with_ends(request.sampling, self._eos)
        return EventAnswer(completion(self._kind, self._model, request.ids, sampling), request)

    async def stream(self, server: RemoteServer, running: Running[EventAnswer]) -> None:
        """Read a response to the end, including the token counts after `finish_reason`, and release the connection.

        Raises:
            Refused: the server refuses the request.
            Failed: the server fails.
        """
        try:
            async with self._client.events(f"{server.url}/completions", running.call.body) as events:
                async for batch in events:
                    for event in batch:
                        if running.ended:
                            break
                        part = running.held or self._parts.get(running.key) or Part()
                        if running.call.read(event, part):
                            self.take(server, running, part)
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
        self.check_max_tokens(self._fit(await self._client.models(server.url)).max_tokens)

    async def disconnect(self) -> None:
        await self._client.close()


async def _new_client(connect_timeout: float, tls: bool) -> HttpClient:
    return HttpClient(connect_timeout, tls=tls)  # aiohttp needs a running event loop


def capabilities(config: EngineConfig) -> Capabilities:
    """Return the servers' capabilities. If option.base_url_kind is auto, find out the kind of the servers first.

    Raises:
        ConfigError: the kind of no server can be determined, or the kinds differ.
    """
    kind = _kind(config)
    return LLAMACPP if kind == "llamacpp" else KINDS[kind].capabilities


def _kind(config: EngineConfig) -> str:
    kind: str = config.engine_options.get("base_url_kind", "auto")
    return find_kind(_SETTING.urls(config)) if kind == "auto" else kind


def load(config: EngineConfig) -> UrlEngine | LlamaCppEngine:
    return LlamaCppEngine(config) if _kind(config) == "llamacpp" else UrlEngine(config)
