"""An engine that uses llama.cpp's llama-server. It sends token ids to /completion, which returns token ids.

This handler still processes text, stop strings, chat templates and errors itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from handler.core.errors import ConfigError
from handler.engines.base import Capabilities, EngineConfig, EngineRequest, Silence
from handler.engines.huggingface import files
from handler.engines.huggingface.files import eos_ids
from handler.engines.huggingface.tokenizer import HfTokenizer
from handler.engines.llamacpp import child, media
from handler.engines.llamacpp.answer import LlamaCall, Tokens, aligned, read_completion, read_event, read_scores
from handler.engines.llamacpp.media import NO_PROJECTOR, ImageCall, Projector, Tokenize, tokenized
from handler.engines.llamacpp.parameters import CAPABILITIES, scores
from handler.engines.llamacpp.pieces import Pieces
from handler.engines.openai.client import HttpClient, has_tls, suitable
from handler.engines.remote.engine import TLS_CLOSE, C, RemoteEngine, Running
from handler.engines.remote.servers import Failed, Part, Refused, RemoteServer, find_model

__all__ = ["LlamaCppEngine", "capabilities", "check", "fetch", "load", "load_tokenizer", "prepare", "weights"]

_CONNECT_SECONDS = 5.0  # to a server that the engine has started
_SETTING = child.LlamaSetting()
check, prepare, weights = _SETTING.check, _SETTING.prepare, _SETTING.weights

_SCORES = 1000  # log-probabilities among which a token is searched first
_ALL_SCORES = 1 << 20  # more than any vocabulary has
_CACHE_IS_FULL = "Context size has been exceeded"
"""The message with which llama-server fails all running requests if the cache that its slots share is full."""
_ASK_TIMEOUT = 5.0  # seconds for a connection
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

    Attributes:
        count: number of slots.
        limit: number of requests that may run at once.
    """

    def __init__(self, count: int) -> None:
        self.count = self.limit = count
        self._num_running = 0
        self._turns: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def occupy(self, silence: Silence) -> AsyncIterator[None]:
        """Wait for a free slot, and occupy it. The time spent waiting does not count as silence of the server."""
        await self._enter(silence)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, silence: Silence) -> None:
        if self._num_running < self.limit and not self._turns:
            self._num_running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            while not turn.done():
                silence.begin()
                await asyncio.wait([turn], timeout=_LOOK)
        except asyncio.CancelledError:
            if turn.done():
                self._leave()
            else:
                self._turns.remove(turn)
            raise
        silence.begin()

    def _leave(self) -> None:
        self._num_running -= 1
        if not self._num_running and not self._turns:
            self.limit = self.count
        while self._turns and self._num_running < self.limit:
            self._num_running += 1
            self._turns.popleft().set_result(None)


class LlamaServers(RemoteEngine[C]):
    """Base class of engines that use llama.cpp's servers. Without option.base_url, it starts a server itself.

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
            if own is not None:
                self.info = child.described(self.info, self.complete(self._client.get(f"{own.url}/props")))
                own.watch()
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
        if self._client.num_connections != self._num_connections.get(server.url):
            server.known = False
            await self.ask(server)

    async def check(self, server: RemoteServer) -> None:
        """Check that a server serves the model and accepts as many tokens as this engine."""
        self.check_max_tokens(self.fit(await self.model_at(server.url), self.model).max_tokens)

    async def disconnect(self) -> None:
        await self._client.close()


class LlamaCppEngine(LlamaServers[LlamaCall]):
    """Engine for text generation with llama.cpp's servers; see `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self._eos = eos_ids(config) if config.model is not None else frozenset()
        self._pieces: asyncio.Task[Pieces] | None = None  # needed only if a server does not send all ids
        self._projectors: dict[str, Projector | None] = {}  # by address
        super().__init__(config)

    async def model_at(self, url: str) -> LlamaModel:
        model = await super().model_at(url)
        self._projectors[url] = await self._complete_projector(url, model.projector)
        return model

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
        try:
            while not running.ended:
                slots = self._slots[server.url]
                async with slots.occupy(running.silence):
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
            body = await self._with_images(server, call, call.next_body())
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
            await self.check_connection(server)
            async for batch in events:
                for event in batch:
                    if running.ended:
                        break
                    tokens = read_event(event)
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
        await self.check_connection(server)
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
            body = await self._with_images(server, call, scores(prefix, count))
            data = await self._client.post(f"{root(server.url)}/completion", body)
            if (result := read_scores(data, id, call.num_scores)) is not None:
                return result
        raise Failed("reports no log-probability of a token", f"the id is {id}")

    async def _load_pieces(self) -> Pieces | None:
        """Return the vocabulary of the model's files, or None if there are none. A thread loads it."""
        if self._config.model is None:
            return None
        if self._pieces is None:
            self._pieces = self._loop.create_task(asyncio.to_thread(_load_pieces, self._config))
        return await asyncio.shield(self._pieces)

    async def disconnect(self) -> None:
        if self._pieces is not None:
            await asyncio.wait([self._pieces])
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
    client = HttpClient(_ASK_TIMEOUT, tls=has_tls(urls))
    try:
        answers = await asyncio.gather(*(client.get(f"{root(url)}/props") for url in urls), return_exceptions=True)
    finally:
        await client.close()
    found = []
    for answer in answers:
        with contextlib.suppress(Failed):
            if isinstance(answer, bytes):
                found.append(_described("", answer).projector is not None)
    return found


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


def _load_pieces(config: EngineConfig) -> Pieces:
    vocabulary = files.load_tokenizer(config).vocabulary
    return Pieces(vocabulary.pieces if vocabulary is not None else ())


async def _new_client(connect_timeout: float, tls: bool, key: str | None) -> HttpClient:
    return HttpClient(connect_timeout, tls=tls, key=key)  # aiohttp needs a running event loop


def fetch(model_id: str | None, config: EngineConfig) -> str | None:
    """Download the GGUF file of a model on the hub or on S3; see `engines.fetch`."""
    return files.fetch(model_id, config, child.download, files.is_hub_reference)


def capabilities(config: EngineConfig) -> Capabilities:
    return replace(CAPABILITIES, no_media=media.no_media(projector=child.has_projector(config)))


def load_tokenizer(config: EngineConfig) -> HfTokenizer:
    return media.load_tokenizer(config, projector=child.has_projector(config))


def load(config: EngineConfig) -> LlamaCppEngine:
    return LlamaCppEngine(config)
