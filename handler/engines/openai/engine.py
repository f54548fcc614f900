"""An engine that uses servers with OpenAI's API. It sends token ids to /v1/completions, which returns token ids.

llama.cpp's servers and SGLang do not return token ids there, so they are used through their own APIs
(`engines.llamacpp`, `sglang`).

This handler still processes text, stop strings, chat templates and errors itself.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from handler.config.environment import secrets
from handler.core.errors import ConfigError, Problem, client_words, log_words
from handler.core.values import Adapter, Sampling, Task
from handler.engines.base import (
    NO_LORA,
    Capabilities,
    EngineConfig,
    EngineRequest,
    StructuredOutputCheck,
    Tokenizer,
)
from handler.engines.huggingface import files
from handler.engines.huggingface.files import eos_ids, fetch_descriptions, gguf_file
from handler.engines.llamacpp import child
from handler.engines.llamacpp import engine as llamacpp
from handler.engines.llamacpp.check import LlamaCheck
from handler.engines.llamacpp.engine import LlamaCppEngine
from handler.engines.llamacpp.files import is_model_directory, model_directory, served_file
from handler.engines.llamacpp.parameters import check_pooling
from handler.engines.llamacpp.pooling import LlamaPooling
from handler.engines.llamacpp.servers import served_path
from handler.engines.openai.adapters import AllowedPaths, ServerAdapters, is_loaded, is_unknown, loaded_name
from handler.engines.openai.answer import EventAnswer
from handler.engines.openai.check import SglangCheck, uses_xgrammar
from handler.engines.openai.client import Events, HttpClient, HttpModel, find_kind, has_tls, new_client, suitable
from handler.engines.openai.embeddings import SglangPooling
from handler.engines.openai.kinds import KINDS
from handler.engines.openai.sglang import (
    GenerateAnswer,
    LabelAnswer,
    SglangServer,
    depends_on_flags,
    label_sampling,
    native,
)
from handler.engines.remote.engine import TLS_CLOSE, TRUST, RemoteEngine, Running
from handler.engines.remote.servers import (
    Failed,
    NotLoaded,
    Part,
    Refused,
    RemoteOptions,
    RemoteServer,
    find_model,
    with_ends,
)
from handler.engines.remote.steps import Deliver

__all__ = [
    "UrlEngine",
    "capabilities",
    "check",
    "checks_structured_output",
    "fetch",
    "load",
    "load_tokenizer",
    "prepare",
    "structured_output_check",
]

_TAKES_ENDS = ("vllm", "sglang")
"""Kinds of servers that receive a model's end tokens, because their flags may make them use others."""
_GGUF = "the MODEL can be a .gguf file only for llama.cpp's servers: use the model's Hugging Face directory"
_ABORT_TIMEOUT = 5.0  # seconds
_ABORT_SECONDS = 0.5  # for a server to receive the last notice before the event loop rests
_DEAF = ", so it ends cancelled requests only two seconds later; with --admin-api-key, that must be the key"
_NOT_ALLOWED = "load it by --lora-paths, or set option.adapters_root to a directory on its machine that contains it"


class UrlSetting(RemoteOptions):
    """The options of the engine, which are checked before it is loaded."""

    def urls(self, config: EngineConfig) -> tuple[str, ...]:
        """Return the servers' addresses, after checking the task.

        Raises:
            ConfigError: a kind of server does not support the model's task, or option.base_url is not set.
        """
        check_task(config, _set_kind(config))
        return super().urls(config)

    def check_model(self, model_id: str | None, config: EngineConfig) -> None:
        if model_id is None and _set_kind(config) == "llamacpp":
            return  # at startup, the servers are asked for their file
        if gguf_file(model_id) is None:
            super().check_model(model_id, config)
        else:
            check_gguf(config)

    def prepare(self, model_id: str | None, config: EngineConfig) -> Path:
        """Return the directory of the model's tokenizer, chat template and config, which a GGUF file also contains.

        Raises:
            ConfigError: the model does not exist, or has no tokenizer.
        """
        if model_id is None and _set_kind(config) == "llamacpp":
            return model_directory(served_path(self.urls(config)))
        if (file := served_file(model_id)) is None:
            return super().prepare(model_id, config)
        check_gguf(config)
        return model_directory(file)


def _set_kind(config: EngineConfig) -> str:
    return str(config.engine_options.get("base_url_kind", "auto"))


def check_gguf(config: EngineConfig) -> None:
    """Raise ConfigError if the servers are certainly not llama.cpp's, for which alone a GGUF file is enough."""
    if (kind := _set_kind(config)) not in ("llamacpp", "auto"):
        raise ConfigError(f"option.base_url_kind={kind}: {_GGUF}")


def fetch(model_id: str | None, config: EngineConfig) -> str | None:
    """Download a model's files except the weights, or the GGUF file of llama.cpp's servers; see `engines.fetch`."""
    if gguf_file(model_id) is None:
        return fetch_descriptions(model_id, config)
    return files.fetch(model_id, config, child.download, files.is_hub_reference)


def check_task(config: EngineConfig, kind: str) -> None:
    """Raise ConfigError if a kind of server does not support the model's task, or if option.pooling is set."""
    check_pooling(config)
    pools = ("llamacpp", "sglang", "auto") if config.task is Task.EMBEDDING else ("llamacpp", "auto")
    if config.task is not Task.GENERATION and kind not in pools:
        servers = f"option.task={config.options.task}: servers of the kind {kind}"
        if kind == "sglang":
            message = f"{servers} score only texts, not tokens; llamacpp also computes scores"
        else:
            message = f"{servers} only generate text here; llamacpp and sglang also compute embeddings"
        raise ConfigError(Problem("", "option.task", message))


_SETTING = UrlSetting("openai", "http://host:8000/v1")
check, prepare = _SETTING.check, _SETTING.prepare


class UrlEngine(RemoteEngine[EventAnswer]):
    """Engine for servers with OpenAI's API; see `engines.base.Engine`."""

    def __init__(self, config: EngineConfig, kind: str) -> None:
        options = config.engine_options
        urls = options["base_url"]
        # The kind that the operator sets is not checked.
        self._wanted_kind = kind if options["base_url_kind"] == "auto" else None
        super().__init__(kind, urls, float(options["base_url_timeout"]), TLS_CLOSE if has_tls(urls) else 0.0)
        self._eos = eos_ids(config) if kind in _TAKES_ENDS and config.model is not None else frozenset()
        self._client: HttpClient = self.complete(new_client(options["base_url_connect_timeout"], tls=has_tls(urls)))
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._model: str = options.get("base_url_model") or ""  # "": the first model of the first server
            description = repr(self._model) if self._model else "a model"
            model, failed = self.complete(find_model(urls, self.models, self._fit, description))
            self._model = model.name
            self.begin("openai", model.max_tokens, config, failed)
            on_failure.pop_all()

    def _fit(self, models: Sequence[HttpModel], first: HttpModel | None = None) -> HttpModel:
        return suitable(models, first.name if first else self._model or None, self._wanted_kind)

    def new_call(self, request: EngineRequest) -> EventAnswer:
        return EventAnswer(self.body(request), request)

    def body(self, request: EngineRequest) -> dict[str, Any]:
        """Return the body of a request. Its parts that depend on the server are added later."""
        sampling = with_ends(request.sampling, self._eos)
        return KINDS[self._kind].body(self.model_name, request.ids, sampling)

    @property
    def model_name(self) -> str:
        """The name of the model in requests."""
        return self._model

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

    async def disconnect(self) -> None:
        await self._client.close()


class SglangEngine(UrlEngine):
    """Engine for SGLang servers, by their own API.

    SGLang notices a closed connection only after two seconds, so requests that end early are also aborted.
    """

    def __init__(self, config: EngineConfig, kind: str) -> None:
        self._reports: dict[str, SglangServer] = {}  # by address
        self._adapters = {url: ServerAdapters() for url in config.engine_options["base_url"]}
        self._allowed = AllowedPaths.of(config) if config.engine_options.get("enable_lora") else None
        self._users: dict[str, set[int]] = {}  # ids of the adapters in use, by path
        self._notices: set[asyncio.Task[None]] = set()  # aborts, and adapters that the servers may unload
        self._deaf: set[str] = set()  # addresses of servers that refuse notices, which the log has named
        self._is_adapter = False  # whether option.base_url_model names a LoRA adapter that the servers have loaded
        super().__init__(config, kind)
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
        return self._model if self._is_adapter else ""

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
            if not error.lasts:
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
                if error.lasts and url not in self._deaf:
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


def capabilities(config: EngineConfig) -> Capabilities:
    """Return the servers' capabilities. If option.base_url_kind is auto, find out the kind of the servers first.

    Raises:
        ConfigError: the kind of no server can be determined, or the kinds differ.
    """
    kind = _kind(config)
    check_task(config, kind)
    if kind == "llamacpp":
        return llamacpp.capabilities(config)
    able = KINDS[kind].capabilities
    return replace(able, no_adapters="") if kind == "sglang" and config.engine_options.get("enable_lora") else able


def _kind(config: EngineConfig) -> str:
    kind = _set_kind(config)
    return find_kind(_SETTING.urls(config)) if kind == "auto" else kind


def checks_structured_output(config: EngineConfig) -> bool:
    """Return whether clients' schemas and grammars are checked here.

    The back ends of vLLM, Dynamo and SGLang's other back ends are not installed here.
    """
    kind = _kind(config)
    return kind == "llamacpp" or (kind == "sglang" and uses_xgrammar(_SETTING.urls(config)))


def structured_output_check(config: EngineConfig) -> StructuredOutputCheck:
    return SglangCheck(config) if _kind(config) == "sglang" else LlamaCheck(config)


def load(config: EngineConfig) -> UrlEngine | LlamaCppEngine | LlamaPooling | SglangPooling:
    kind = _kind(config)
    check_task(config, kind)
    if kind != "llamacpp" and config.model is not None and is_model_directory(config.model):
        raise ConfigError(f"the servers are of the kind {kind}: {_GGUF}")
    if kind == "llamacpp":
        return llamacpp.load(config)
    if config.task is not Task.GENERATION:
        return SglangPooling(config)
    return SglangEngine(config, kind) if kind == "sglang" else UrlEngine(config, kind)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    if config.task is Task.GENERATION and not (config.engine_options.get("base_url") and _kind(config) == "llamacpp"):
        return files.load_tokenizer(config)
    return llamacpp.load_tokenizer(config)
