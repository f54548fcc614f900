"""The engine for text generation by SGLang's own API, and for labels."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import Any

from handler.config.environment import secrets
from handler.core.errors import client_words, log_words
from handler.core.values import Adapter, Sampling
from handler.engines.base import NO_LORA, EngineConfig, EngineRequest
from handler.engines.openai.answer import EventAnswer
from handler.engines.openai.client import Events, HttpModel
from handler.engines.openai.kind import ServerKind
from handler.engines.openai.sglang.adapters import (
    AllowedPaths,
    ServerAdapters,
    is_loaded,
    is_unknown,
    loaded_name,
)
from handler.engines.openai.sglang.api import (
    GenerateAnswer,
    LabelAnswer,
    SglangServer,
    depends_on_flags,
    generate,
    label_sampling,
    native,
)
from handler.engines.openai.url_engine import UrlEngine
from handler.engines.remote.engine import TRUST, Running
from handler.engines.remote.servers import Failed, Lasting, NotLoaded, Refused, RemoteServer
from handler.engines.remote.steps import Deliver

_ABORT_TIMEOUT = 5.0  # seconds
_ABORT_SECONDS = 0.5  # for a server to receive the last notice before the event loop rests
_DEAF = ", so it ends cancelled requests only two seconds later; with --admin-api-key, that must be the key"
_NOT_ALLOWED = "load it by --lora-paths, or set option.adapters_root to a directory on its machine that contains it"


class SglangEngine(UrlEngine):
    """Engine for SGLang servers, by their own API.

    SGLang notices a closed connection only after two seconds, so requests that end early are also aborted.
    """

    def __init__(self, config: EngineConfig, kind: ServerKind) -> None:
        self._reports: dict[str, SglangServer] = {}  # by address
        self._adapters = {url: ServerAdapters() for url in config.engine_options["base_url"]}
        self._allowed = AllowedPaths.of(config) if config.engine_options.get("enable_lora") else None
        self._users: dict[str, set[int]] = {}  # ids of the adapters in use, by path
        self._notices: set[asyncio.Task[None]] = set()  # aborts, and adapters that the servers may unload
        self._deaf: set[str] = set()  # addresses of servers that refuse notices, which the log has named
        self._is_adapter = False  # whether option.base_url_model names a LoRA adapter that the servers have loaded
        super().__init__(config, kind, generate, takes_ends=True)
        if self._allowed is not None:
            known = (adapters.paths_by_name() for adapters in self._adapters.values())
            self.info = replace(self.info, adapters=tuple({name: path for all in known for name, path in all}.items()))

    def new_call(self, request: EngineRequest) -> GenerateAnswer:
        if request.adapter is not None:
            self._users.setdefault(request.adapter.path, set()).add(request.adapter.id)
        if isinstance(request.parameters, Sampling):
            return GenerateAnswer(self.body(request), request)
        body = self.body(request._replace(parameters=label_sampling(request.pooling)))
        return LabelAnswer(body, request)

    async def models(self, url: str) -> list[HttpModel]:
        models = await self._client.models(url, adapters=True)
        self._adapters[url].add_listed(models)
        report = self._reports[url] = await SglangServer.ask(self._client, url)
        if report.max_tokens is None:
            return models
        most = report.max_tokens
        return [model._replace(max_tokens=min(model.max_tokens or most, most)) for model in models]

    @property
    def model_name(self) -> str:
        return self.name if self._is_adapter else ""

    def _fit(self, models: Sequence[HttpModel], first: HttpModel | None = None) -> HttpModel:
        model = super()._fit(models, first)
        if first is not None and model.is_adapter != first.is_adapter:
            raise Failed("serves another model", f"{model.name!r} is an adapter of one server and a model of another")
        self._is_adapter = model.is_adapter
        return model

    def send(self, server: RemoteServer, call: EventAnswer) -> AbstractAsyncContextManager[Events]:
        assert isinstance(call, GenerateAnswer)
        body = self._reports[server.url].addressed(call.body)
        if call.adapter is not None:
            body["lora_path"] = self._adapters[server.url].find(call.adapter.path)
        call.id = body["rid"]
        return self._client.events(f"{native(server.url)}/generate", body)

    async def stream(self, server: RemoteServer, running: Running[EventAnswer]) -> None:
        call = running.call
        assert isinstance(call, GenerateAnswer)
        depends = depends_on_flags(call.body) or call.adapter is not None
        if depends and self._loop.time() - server.asked_at > TRUST:
            await self.ask(server, again=True)
        self._reports[server.url].check(call.body)
        try:
            if call.adapter is None:
                await super().stream(server, running)
            else:
                await self._stream_with_adapter(server, running, call.adapter)
        except asyncio.CancelledError:
            if not running.ended:
                self.abandon(server, call)
            raise

    def abandon(self, server: RemoteServer, call: EventAnswer) -> None:
        url = f"{native(server.url)}/abort_request"
        self._notify(server.url, asyncio.wait_for(self._client.post(url, {"rid": call.id}), _ABORT_TIMEOUT))

    # -- adapters ------------------------------------------------------------------------------------------------

    async def _stream_with_adapter(self, server: RemoteServer, running: Running[EventAnswer], adapter: Adapter) -> None:
        """Read a response. Let the server load the adapter again if it was restarted.

        Raises:
            NotLoaded: the server has not loaded the adapter.
        """
        name = await self._ensure_loaded(server, adapter)
        for is_last in (False, True):
            try:
                return await super().stream(server, running)
            except Refused as error:
                if running.call.begun or not is_unknown(error.words):
                    raise
                self._adapters[server.url].forget(name)
                if is_last:
                    raise NotLoaded(f"does not keep the adapter {adapter.name}", error.words) from None
                name = await self._ensure_loaded(server, adapter)

    async def _ensure_loaded(self, server: RemoteServer, adapter: Adapter) -> str:
        """Return the name of an adapter at a server, which loads it if necessary.

        Raises:
            NotLoaded: the server has not loaded it, and may not or cannot.
            Failed: the server fails.
        """
        await self.ask(server)
        adapters = self._adapters[server.url]
        if (name := adapters.find(adapter.path)) is not None:
            return name
        adapters.add_listed(await self._client.models(server.url, adapters=True))
        if (name := adapters.find(adapter.path)) is not None:
            return name
        await self._load(server, adapter)
        adapters.add(name := loaded_name(adapter.path), adapter.path)
        return name

    async def _load(self, server: RemoteServer, adapter: Adapter) -> None:
        """Make a server load an adapter; see `_ensure_loaded`."""
        failure = f"has not loaded the adapter {adapter.name}"
        if remedy := self._reports[server.url].no_loading:
            raise NotLoaded(failure, remedy)
        if self._allowed is None or adapter.path not in self._allowed:
            raise NotLoaded(failure, _NOT_ALLOWED)
        body = {"lora_name": loaded_name(adapter.path), "lora_path": adapter.path}
        try:
            await self._client.post(f"{native(server.url)}/load_lora_adapter", body)
        except Refused as error:
            if not is_loaded(error.words):
                raise NotLoaded(f"cannot load the adapter {adapter.name}", error.words) from None
        except Failed as error:
            if not isinstance(error, Lasting):
                raise
            raise NotLoaded(failure, f"{error}; with --admin-api-key, it loads adapters only with that key") from None

    def load_adapter(self, adapter: Adapter) -> None:
        if self._allowed is None:
            raise ValueError(NO_LORA)
        failures = self.complete(asyncio.wait_for(self._load_everywhere(adapter), self._max_silence))
        if len(failures) == len(self._servers):
            raise ValueError(client_words(f"the server {next(iter(failures.values()))}", self._secrets))
        for url, error in failures.items():  # it may load the adapter for the first request that it gets
            print(log_words(f"{url} {error}", secrets()), file=sys.stderr, flush=True)
        self._users.setdefault(adapter.path, set()).add(adapter.id)

    async def _load_everywhere(self, adapter: Adapter) -> dict[str, BaseException]:
        """Make all servers load an adapter. Return the errors by address."""
        loading = (self._ensure_loaded(server, adapter) for server in self._servers)
        results = await asyncio.gather(*loading, return_exceptions=True)
        ends = zip(self._servers, results, strict=True)
        return {server.url: result for server, result in ends if isinstance(result, BaseException)}

    def drop_adapter(self, adapter: Adapter) -> None:
        """Let the servers unload an adapter that this engine has loaded, unless it has another name here."""
        users = self._users.get(adapter.path, set())
        users.discard(adapter.id)
        if users:
            return
        self._users.pop(adapter.path, None)
        name = loaded_name(adapter.path)
        for url, adapters in self._adapters.items():
            if adapters.find(adapter.path) == name:
                adapters.forget(name)
                self._notify(url, self._client.post(f"{native(url)}/unload_lora_adapter", {"lora_name": name}))
        self._send_notices()

    # -- what servers are told -----------------------------------------------------------------------------------

    def _notify(self, url: str, notice: Coroutine[Any, Any, object]) -> None:
        """Send a notice to a server while the event loop runs."""
        task = self._loop.create_task(self._try(url, notice))
        self._notices.add(task)
        task.add_done_callback(self._notified)

    async def _try(self, url: str, notice: Coroutine[Any, Any, object]) -> None:
        """Send a notice. If a server does not get an abort, it notices that the connection is closed."""
        with suppress(Refused, asyncio.TimeoutError):
            try:
                await notice
            except Failed as error:
                if isinstance(error, Lasting) and url not in self._deaf:
                    self._deaf.add(url)
                    print(f"{url} {log_words(str(error), secrets())}{_DEAF}", file=sys.stderr, flush=True)

    def _notified(self, task: asyncio.Task[None]) -> None:
        self._notices.discard(task)
        self._loop.stop()

    def cancel(self, key: int) -> None:
        super().cancel(key)
        self._send_notices()

    def run_steps(self, deliver: Deliver) -> None:
        super().run_steps(deliver)
        if self._notices:
            self._send_notices()

    def _send_notices(self) -> None:
        """Run the event loop until the servers have the notices, unless requests run it anyway."""
        if not self.rests:
            return
        self._interrupted = False  # set again as long as commands wait
        timer = self._loop.call_later(_ABORT_SECONDS, self._loop.stop)
        deadline = self._loop.time() + _ABORT_SECONDS
        while self._notices and not self._interrupted and self._loop.time() < deadline:
            self._loop.run_forever()
        timer.cancel()

    async def disconnect(self) -> None:
        for task in self._notices:
            task.cancel()
        await super().disconnect()
