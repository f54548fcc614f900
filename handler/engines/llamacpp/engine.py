"""An engine that uses llama.cpp's llama-server. It sends token ids to /completion, which returns token ids.

This handler still processes text, stop strings, chat templates and errors itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from handler.core.errors import ConfigError, log_words
from handler.core.values import Adapter, Task
from handler.engines.base import NO_LORA, Capabilities, EngineConfig, EngineRequest, Silence, Tokenizer
from handler.engines.huggingface import files
from handler.engines.huggingface.files import eos_ids
from handler.engines.huggingface.pooling import HfPoolingTokenizer
from handler.engines.llamacpp import child, media
from handler.engines.llamacpp.adapters import LoadedAdapters
from handler.engines.llamacpp.answer import LlamaCall, Tokens, aligned, read_completion, read_event, read_scores
from handler.engines.llamacpp.check import LlamaCheck
from handler.engines.llamacpp.media import NO_PROJECTOR, ImageCall, Projector, Tokenize, tokenized
from handler.engines.llamacpp.parameters import CAPABILITIES, check_pooling, scores
from handler.engines.llamacpp.pieces import Pieces
from handler.engines.llamacpp.probe import Probe
from handler.engines.openai.client import HttpClient, has_tls, suitable
from handler.engines.remote.engine import TLS_CLOSE, C, RemoteEngine, Running
from handler.engines.remote.servers import Failed, Part, Refused, RemoteServer, find_model

if TYPE_CHECKING:
    from handler.engines.llamacpp.pooling import LlamaPooling

__all__ = [
    "LlamaCppEngine",
    "capabilities",
    "check",
    "fetch",
    "load",
    "load_tokenizer",
    "prepare",
    "structured_output_check",
    "weights",
]

_CONNECT_SECONDS = 5.0  # to a server that the engine has started
_SETTING = child.LlamaSetting()
check, prepare, weights = _SETTING.check, _SETTING.prepare, _SETTING.weights

_SCORES = 1000  # log-probabilities among which a token is searched first
_ALL_SCORES = 1 << 20  # more than any vocabulary has
_CACHE_IS_FULL = "Context size has been exceeded"
"""The message with which llama-server fails all running requests if the cache that its slots share is full."""
_ASK_TIMEOUT = 5.0  # seconds for a connection
_ASK_SECONDS = 5.0  # to ask all servers for their adapters
_LOOK = 1.0  # maximum seconds between two checks of a request that waits for a slot


class LlamaModel(NamedTuple):
    """A server's model.

    Attributes:
        max_tokens: limit for the prompt and the response together; None if not reported.
        projector: how the model reads images; None if it does not.
        dimensions: number of dimensions of an embedding; 0 if the server is not used for embeddings.
    """

    name: str
    max_tokens: int | None
    num_slots: int
    projector: Projector | None = None
    dimensions: int = 0


class Slots:
    """The slots of a server, each of which computes one response at a time.

    llama-server itself would queue further requests, but then a waiting request looks the same as a hanging one.
    Its slots may share a cache. If the cache is full, fewer requests run at once until all of them have ended.

    Only requests of the same group run at once. When all of them have ended, those that wait for the same group as the
    first request are next.

    Attributes:
        count: number of slots.
        limit: number of requests that may run at once.
    """

    def __init__(self, count: int) -> None:
        self.count = self.limit = count
        self._num_running = 0
        self._group = ""  # of the running requests
        self._turns: deque[tuple[asyncio.Future[None], str]] = deque()  # each with its group

    @contextlib.asynccontextmanager
    async def occupy(self, silence: Silence, group: str = "") -> AsyncIterator[None]:
        """Wait for a free slot, and occupy it. The time spent waiting does not count as silence of the server."""
        await self._enter(silence, group)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, silence: Silence, group: str) -> None:
        if not self._turns and self._admits(group):
            self._begin(group)
            return
        turn = asyncio.get_running_loop().create_future()
        self._turns.append((turn, group))
        try:
            while not turn.done():
                silence.begin()
                await asyncio.wait([turn], timeout=_LOOK)
        except asyncio.CancelledError:
            if turn.done():
                self._leave()
            else:
                self._turns.remove((turn, group))
                self._admit()
            raise
        silence.begin()

    def _leave(self) -> None:
        self._num_running -= 1
        if not self._num_running and not self._turns:
            self.limit = self.count
        self._admit()

    def _admits(self, group: str) -> bool:
        return self._num_running < self.limit and (not self._num_running or group == self._group)

    def _begin(self, group: str) -> None:
        self._num_running += 1
        self._group = group

    def _admit(self) -> None:
        """Let as many requests begin as possible."""
        if not self._num_running and self._turns:
            first = self._turns[0][1]
            self._turns = deque(sorted(self._turns, key=lambda turn: turn[1] != first))
        while self._turns and self._admits(self._turns[0][1]):
            turn, group = self._turns.popleft()
            self._begin(group)
            turn.set_result(None)


class NotLoaded(Failed):
    """A server has not loaded the adapter of a request. It can still serve other requests."""


class LlamaServers(RemoteEngine[C]):
    """Base class of engines that use llama.cpp's servers. Without option.base_url, they start a server themselves.

    Attributes:
        model: the servers' common model.
    """

    model: LlamaModel

    own_name = child.NAME

    def __init__(self, config: EngineConfig) -> None:
        options = config.engine_options
        self._child = None if "base_url" in options else child.start(config)
        urls = options["base_url"] if self._child is None else (self._child.url,)
        close_seconds = TLS_CLOSE if has_tls(urls) else 0.0
        own = None if self._child is None else self._child.process
        super().__init__("llamacpp", urls, float(options["base_url_timeout"]), close_seconds, own)
        self._config = config
        key = None if self._child is None else self._child.key
        connect_timeout = options.get("base_url_connect_timeout", _CONNECT_SECONDS)
        self._client: HttpClient = self.complete(_new_client(connect_timeout, has_tls(urls), key))
        self._name: str = options.get("base_url_model") or ""  # "": the first model of the first server
        self._slots: dict[str, Slots] = {}
        # Number of connections of the client when it last asked a server for its model, by address.
        self._num_connections: dict[str, int] = {}
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            description = repr(self._name) if self._name else "a model"
            setting = "option.base_url=" if own is None else f"{self.own_name} at "
            try:
                self.model, failed = self.complete(find_model(urls, self.model_at, self.fit, description, setting))
            except ConfigError:
                if self._child is not None and (failure := self._child.failure()):
                    raise ConfigError(f"{self.own_name} {failure}") from None
                raise
            self._name = self.model.name
            self.begin("openai", self.model.max_tokens, config, failed)
            if self._child is not None:
                props = self.complete(self._client.get(f"{self._child.url}/props"))
                self.info = child.described(self.info, props)
                self._child.log.is_loaded = True
                self._child.process.watch()
            on_failure.pop_all()

    async def model_at(self, url: str) -> LlamaModel:
        """Return the model of a server, which also says how many slots it has.

        Raises:
            Failed: the server has no model yet, or does not describe it.
        """
        self._check_child()
        self._num_connections[url] = self._client.num_connections
        name = suitable(await self._client.models(url), self._name or None, None).name
        model = _described(name, await self._client.get(f"{root(url)}/props"))
        if url not in self._slots or self._slots[url].count != model.num_slots:
            self._slots[url] = Slots(model.num_slots)
        return model

    def _check_child(self) -> None:
        """Raise Failed if the server that the engine has started has ended, or if another process has its port."""
        if self._child is None:
            return
        if failure := self._child.failure():
            raise Failed(failure, lasts=True, ill=True)
        self._child.process.check_port()

    def fit(self, model: LlamaModel, first: LlamaModel | None) -> LlamaModel:
        """Return the model of a server. Raise Failed if the first server has another model."""
        if first is not None and model.name != first.name:
            raise Failed("serves another model", f"it serves {model.name!r}")
        return model

    async def check_connection(self, server: RemoteServer) -> None:
        """Ask a server for its model after each new connection, because it may have been restarted with another model.

        llama-server ignores the name of the model in a request.

        Raises:
            Failed: the server serves another model.
        """
        if self._child is not None:
            # While it runs, no other process can listen on its port. That it listens there was checked at the start.
            if failure := self._child.failure():
                raise Failed(failure, lasts=True, ill=True)
            return
        if self._client.num_connections != self._num_connections.get(server.url):
            server.known = False
            await self.ask(server)

    async def check(self, server: RemoteServer) -> None:
        """Check that a server serves the model and accepts as many tokens as this engine."""
        self.check_max_tokens(self.fit(await self.model_at(server.url), self.model).max_tokens)

    async def _post(self, url: str, path: str, body: Mapping[str, Any]) -> bytes:
        """Send a request to llama-server's own API; see `HttpClient.post`."""
        return await self._client.post(f"{root(url)}{path}", body)

    async def disconnect(self) -> None:
        await self._client.close()


class LlamaCppEngine(LlamaServers[LlamaCall]):
    """Engine for text generation with llama.cpp's servers; see `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self._eos = eos_ids(config) if config.model is not None else frozenset()
        self._files: asyncio.Task[tuple[Pieces, Probe]] | None = None  # from the model's tokenizer
        self._differs: set[str] = set()  # addresses of servers that divide texts differently
        self._projectors: dict[str, Projector | None] = {}  # by address
        self._serves_adapters = bool(config.engine_options.get("enable_lora"))
        self._adapters: dict[str, LoadedAdapters] = {}  # by address
        super().__init__(config)
        names = next(iter(self._adapters.values()), LoadedAdapters()).paths_by_name()
        self.info = replace(self.info, adapters=names)

    async def model_at(self, url: str) -> LlamaModel:
        loaded = self._load_files()
        model = await super().model_at(url)
        await self._check_tokenizer(url, loaded)
        if self._serves_adapters:
            data = await self._client.get(f"{root(url)}/lora-adapters", may_miss=True, waits=True)
            self._adapters[url] = LoadedAdapters.read(data)
        self._projectors[url] = await self._complete_projector(url, model.projector)
        return model

    async def _check_tokenizer(self, url: str, loaded: Awaitable[tuple[Pieces, Probe]] | None) -> None:
        """Compare the server's tokenizer with that of the model's files.

        Raises:
            Failed: the server has another vocabulary.
        """
        if loaded is None:
            return
        _, probe = await loaded
        detokenize = functools.partial(self._client.post, f"{root(url)}/detokenize")
        difference = await probe.difference(self._tokenizing(url), detokenize)
        if difference and url not in self._differs:
            self._differs.add(url)
            print(f"{url} divides some texts into other tokens: {difference}", file=sys.stderr, flush=True)

    def load_adapter(self, adapter: Adapter) -> None:
        if not self._serves_adapters:
            raise ValueError(NO_LORA)
        if not self._is_loaded(adapter.path):
            self.complete(asyncio.wait_for(self._ask_all(), _ASK_SECONDS))  # servers may have been restarted
        if not self._is_loaded(adapter.path):
            remedy = "restart this server with option.lora_modules" if self._child else "start it with --lora"
            raise ValueError(f"llama-server loads adapters only when it starts, and has not loaded it: {remedy}")

    def _is_loaded(self, path: str) -> bool:
        return any(loaded.find(path) is not None for loaded in self._adapters.values())

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self.model_at(server.url) for server in self._servers), return_exceptions=True)

    def _with_adapter(self, server: RemoteServer, call: LlamaCall, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of a request with the scales of the server's adapters.

        Raises:
            NotLoaded: the server has not loaded the adapter of the request.
        """
        loaded, adapter = self._adapters.get(server.url, LoadedAdapters()), call.adapter
        used = None if adapter is None else loaded.find(adapter.path)
        if adapter is not None and used is None:
            raise NotLoaded(f"has not loaded the adapter {adapter.name}")
        if not loaded:
            return body
        # llama-server's cache of earlier prompts ignores which adapter has computed a prompt. A server that the engine
        # has started has no such cache.
        reuses = self._child is not None and not loaded.has_activated
        return {**body, "lora": loaded.scales(used), "cache_prompt": reuses}

    async def _check_adapters(self, server: RemoteServer, call: LlamaCall, body: Mapping[str, Any]) -> None:
        """Raise Failed if a server was restarted with other adapters before it received this request."""
        await self.check_connection(server)
        if self._serves_adapters and self._with_adapter(server, call, body).get("lora") != body.get("lora"):
            raise Failed("was restarted with other adapters")

    def leave_out(self, server: RemoteServer, error: Failed) -> None:
        if not isinstance(error, NotLoaded):  # it serves other requests
            super().leave_out(server, error)

    async def _complete_projector(self, url: str, projector: Projector | None) -> Projector | None:
        """Add the tokens with which the server begins a prompt.

        Raises:
            Failed: the server does not tokenize an empty text.
        """
        known = self._projectors.get(url)
        if projector is None or (known is not None and known.marker == projector.marker):
            return known if projector is not None else None
        try:
            begin = await tokenized(self._tokenizing(url), "", add_special=True)
        except Refused as error:
            raise Failed(str(error), error.words) from None
        return projector._replace(begin=tuple(begin))

    def _tokenizing(self, url: str) -> Tokenize:
        return functools.partial(self._client.post, f"{root(url)}/tokenize")

    def new_call(self, request: EngineRequest) -> LlamaCall:
        prompt = request.read_media()
        if prompt is not None and prompt.media:
            return ImageCall(request, prompt, self._eos, self.info.max_total_tokens)
        return LlamaCall(request, self._eos, self.info.max_total_tokens)

    async def stream(self, server: RemoteServer, running: Running[LlamaCall]) -> None:
        """Compute a response, with several completions if necessary.

        Raises:
            Refused: the server refuses the request.
            Failed: the server fails.
        """
        limit = self._slots[server.url].count
        adapter = running.call.adapter
        group = "" if adapter is None else adapter.path
        try:
            while not running.ended:
                slots = self._slots[server.url]
                async with slots.occupy(running.silence, group):
                    try:
                        await self._compute(server, running)
                    except Failed as error:
                        if _CACHE_IS_FULL not in error.detail or limit == 1 or not running.call.resumes:
                            raise
                        limit //= 2  # all requests fail together, but reduce the limit only once
                        slots.limit = min(slots.limit, limit)
        except Refused:
            if not running.call.begun:
                await self.ask(server, again=True)  # a server with another model may refuse what this model accepts
            raise

    async def _compute(self, server: RemoteServer, running: Running[LlamaCall]) -> None:
        """Request completions until the response has ended."""
        call = running.call
        while not running.ended:
            body = self._with_adapter(server, call, call.next_body())
            body = await self._with_images(server, call, body)
            call.begin()
            try:
                await (self._read_events if call.streamed else self._read_whole)(server, running, body)
            except Refused:
                await self._check_marker(server, call)
                raise
            call.check_progress()

    async def _with_images(self, server: RemoteServer, call: LlamaCall, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body with the prompt as text and images if it has images.

        Raises:
            Refused: the server has no projector, or would get other tokens.
        """
        if not isinstance(call, ImageCall):
            return body
        projector = self._projectors.get(server.url)
        if projector is None:
            raise Refused(400, NO_PROJECTOR)
        call.marker = projector.marker
        tokenize = self._tokenizing(server.url)
        return {**body, "prompt": await call.images.prompt(body["prompt"], projector, tokenize, self._load_pieces)}

    async def _check_marker(self, server: RemoteServer, call: LlamaCall) -> None:
        """Raise Failed if a server was restarted, so that another marker represents images in its prompts."""
        if not isinstance(call, ImageCall) or call.begun:
            return
        await self.model_at(server.url)
        projector = self._projectors.get(server.url)
        if projector is not None and projector.marker != call.marker:
            raise Failed("was restarted")

    async def _read_events(self, server: RemoteServer, running: Running[LlamaCall], body: Mapping[str, Any]) -> None:
        """Read a stream to its end, and release the connection. The connection is closed if the stream does not end."""
        tokens: Tokens | None = None
        async with self._client.events(f"{root(server.url)}/completion", body) as events:
            await self._check_adapters(server, running.call, body)
            async for batch in events:
                for event in batch:
                    if running.ended:
                        break
                    tokens = read_event(event)
                    if tokens.is_progress:
                        running.silence.begin()
                        continue
                    if running.held is not None:
                        running.call.count(tokens, running.held)
                        self.release(server, running)
                        if not tokens.stop_type:
                            return
                    elif not await self._take_tokens(server, running, tokens):
                        return
        self.release(server, running)
        if not running.ended and (tokens is None or not tokens.stop_type):
            raise Failed("ended its response without a last event")

    async def _take_tokens(self, server: RemoteServer, running: Running[LlamaCall], tokens: Tokens) -> bool:
        """Pass an event on. Return false if the tokens of the event have to be computed again."""
        pieces = None
        if running.call.num_missing(tokens) and not tokens.stop_type:
            pieces = await self._load_pieces()
        part = self._parts.get(running.key) or Part()
        try:
            is_usable = running.call.take_tokens(tokens, part, pieces)
        except (ValueError, TypeError, KeyError) as error:
            raise Failed("sent an event that cannot be read", repr(error)) from None
        if part.finish is not None and not tokens.stop_type:
            self.hold(running, part)  # the last event may follow
        elif is_usable and (part.ids or part.finish is not None):
            self.take(server, running, part)
        elif is_usable and tokens.ids:
            running.silence.begin()  # tokens that are known already
        return is_usable

    async def _read_whole(self, server: RemoteServer, running: Running[LlamaCall], body: Mapping[str, Any]) -> None:
        """Read a response that is not a stream. It contains the ids of all tokens."""
        data = await self._client.post(f"{root(server.url)}/completion", body)
        await self._check_adapters(server, running.call, body)
        tokens = read_completion(data)
        if not tokens.stop_type:
            raise Failed("ended its response without a reason")
        if running.call.num_scores and len(tokens.scores) < len(tokens.ids):
            tokens = tokens._replace(scores=await self._all_scores(server, running.call, tokens))
        await self._take_tokens(server, running, tokens)

    async def _all_scores(self, server: RemoteServer, call: LlamaCall, tokens: Tokens) -> Sequence[Mapping[str, Any]]:
        """Return the log-probabilities of a completion's tokens. Request those that llama-server did not report."""
        pieces = await self._load_pieces()
        if pieces is None:
            raise Failed("reports no log-probabilities of tokens that end within a character", "set option.model_id")
        return [
            await self._score(server, call, call.prefix(tokens.ids[:index]), tokens.ids[index])
            if reported is None
            else reported
            for index, reported in enumerate(aligned(tokens, pieces))
        ]

    async def _score(self, server: RemoteServer, call: LlamaCall, prefix: Sequence[int], id: int) -> Mapping[str, Any]:
        """Return the log-probabilities of a token after a prefix, and of its alternatives."""
        for count in (max(_SCORES, call.num_scores), _ALL_SCORES):
            body = await self._with_images(server, call, self._with_adapter(server, call, scores(prefix, count)))
            data = await self._client.post(f"{root(server.url)}/completion", body)
            await self._check_adapters(server, call, body)
            if (result := read_scores(data, id, call.num_scores)) is not None:
                return result
        raise Failed("reports no log-probability of a token", f"the id is {id}")

    async def _load_pieces(self) -> Pieces | None:
        """Return the vocabulary of the model's files, or None if there are none."""
        files = self._load_files()
        return None if files is None else (await files)[0]

    def _load_files(self) -> Awaitable[tuple[Pieces, Probe]] | None:
        """Return the tokenizer of the model's files in two forms, or None if there are none. A thread loads it once."""
        if self._config.model is None:
            return None
        if self._files is None:
            self._files = self._loop.create_task(asyncio.to_thread(_load_files, self._config))
        return asyncio.shield(self._files)

    async def disconnect(self) -> None:
        if self._files is not None:
            await asyncio.wait([self._files])
        await super().disconnect()


@functools.lru_cache
def has_projector(urls: tuple[str, ...]) -> bool:
    """Return whether servers read images, as far as is known. This blocks for up to 5 s.

    If no server responds, they may, and the engine refuses images later.
    """
    with ThreadPoolExecutor(1) as thread:  # an event loop may be running on the caller's thread
        found = thread.submit(asyncio.run, _ask_projectors(urls)).result()
    return any(found) or not found


async def _ask_projectors(urls: Sequence[str]) -> list[bool]:
    """Return whether each server that responds reads images."""
    found = []
    for answer in await _ask_props(urls):
        with contextlib.suppress(Failed):
            if isinstance(answer, bytes):
                found.append(_described("", answer).projector is not None)
    return found


async def _ask_props(urls: Sequence[str]) -> list[bytes | BaseException]:
    """Return the description of each server, or the reason why there is none."""
    client = HttpClient(_ASK_TIMEOUT, tls=has_tls(urls))
    try:
        return await asyncio.gather(*(client.get(f"{root(url)}/props") for url in urls), return_exceptions=True)
    finally:
        await client.close()


def served_path(urls: Sequence[str]) -> Path:
    """Return the file that the first of the servers that responds has loaded. This blocks for up to 5 s.

    Raises:
        ConfigError: no server responds, or its file cannot be read here.
    """
    with ThreadPoolExecutor(1) as thread:  # an event loop may be running on the caller's thread
        answers = dict(zip(urls, thread.submit(asyncio.run, _ask_props(urls)).result(), strict=True))
    reasons = []
    for url, answer in answers.items():
        path = None
        with contextlib.suppress(ValueError, AttributeError):
            path = orjson.loads(answer).get("model_path") if isinstance(answer, bytes) else None
        if isinstance(path, str) and path and Path(path).is_file():
            return Path(path)
        served = f"its file {path!r} cannot be read here" if path else "it does not name its file"
        reasons.append(f"{url}: {answer if isinstance(answer, BaseException) else served}")
    raise ConfigError(
        f"there is no MODEL argument, and no file of a server can be read: {log_words('; '.join(reasons))}. Set "
        "option.model_id to the .gguf file that the servers have loaded, or to the model's Hugging Face directory"
    )


def root(url: str) -> str:
    """Return the address of llama-server's own API: that of OpenAI's API without `/v1`."""
    return url.removesuffix("/v1")


def _described(name: str, data: bytes) -> LlamaModel:
    """Read /props.

    Raises:
        Failed: it is not an object.
    """
    try:
        props = orjson.loads(data)
        context = (props.get("default_generation_settings") or {}).get("n_ctx")
        count = props.get("total_slots")
    except (ValueError, AttributeError) as error:
        raise Failed("does not describe its model", f"its /props cannot be read: {error!r}") from None
    is_limit = type(context) is int and context > 0
    num_slots = count if type(count) is int and count > 0 else 1
    return LlamaModel(name, context if is_limit else None, num_slots, Projector.read(props))


def _load_files(config: EngineConfig) -> tuple[Pieces, Probe]:
    tokenizer = files.load_tokenizer(config)
    return Pieces(tokenizer.vocabulary.pieces), Probe.of(tokenizer)


async def _new_client(connect_timeout: float, tls: bool, key: str | None) -> HttpClient:
    return HttpClient(connect_timeout, tls=tls, key=key)  # aiohttp needs a running event loop


def fetch(model_id: str | None, config: EngineConfig) -> str | None:
    """Download the GGUF file of a model on the hub or on S3; see `engines.fetch`."""
    return files.fetch(model_id, config, child.download, files.is_hub_reference)


def capabilities(config: EngineConfig) -> Capabilities:
    check_pooling(config)
    return replace(
        CAPABILITIES,
        no_adapters="" if config.engine_options.get("enable_lora") else NO_LORA,
        no_media=media.no_media(projector=_reads_images(config)),
    )


def _reads_images(config: EngineConfig) -> bool:
    urls = config.engine_options.get("base_url", ())
    return has_projector(urls) if urls else child.has_projector(config)


structured_output_check = LlamaCheck


def load(config: EngineConfig) -> LlamaCppEngine | LlamaPooling:
    if config.task is Task.GENERATION:
        return LlamaCppEngine(config)
    from handler.engines.llamacpp.pooling import LlamaPooling  # imports this module

    return LlamaPooling(config)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    if config.task is Task.GENERATION:
        return media.load_tokenizer(config, projector=_reads_images(config))
    return HfPoolingTokenizer(config.model_path, config.chat_template, keeps_texts=config.task is Task.RERANK)
