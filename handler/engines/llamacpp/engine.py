"""An engine that uses llama.cpp's llama-server. It sends token ids to /completion, which returns token ids.

This handler still processes text, stop strings, chat templates and errors itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from handler.core.values import Adapter, Task
from handler.engines.base import NO_LORA, Capabilities, EngineConfig, EngineRequest, Tokenizer
from handler.engines.huggingface import files
from handler.engines.huggingface.files import eos_ids
from handler.engines.huggingface.pooling import HfPoolingTokenizer
from handler.engines.llamacpp import child, media
from handler.engines.llamacpp.adapters import LoadedAdapters
from handler.engines.llamacpp.answer import (
    LlamaCall,
    Tokens,
    aligned,
    check_free,
    is_scored,
    read_completion,
    read_event,
    read_scores,
)
from handler.engines.llamacpp.check import LlamaCheck
from handler.engines.llamacpp.media import NO_PROJECTOR, ImageCall, Projector, Tokenize, tokenized
from handler.engines.llamacpp.parameters import CAPABILITIES, SETTINGS, check_pooling, scores
from handler.engines.llamacpp.pieces import Pieces
from handler.engines.llamacpp.pooling import LlamaPooling
from handler.engines.llamacpp.probe import Probe
from handler.engines.llamacpp.servers import LlamaModel, LlamaServers, has_projector, root
from handler.engines.remote.engine import Running
from handler.engines.remote.servers import Failed, NotLoaded, Part, Refused, RemoteServer

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
_SETTING = child.LlamaSetting()
check, prepare, weights = _SETTING.check, _SETTING.prepare, _SETTING.weights

_SCORES = 1000  # log-probabilities among which a token is searched first
_ALL_SCORES = 1 << 20  # more than any vocabulary has
_CACHE_IS_FULL = "Context size has been exceeded"
"""The message with which llama-server fails all running requests if the cache that its slots share is full."""
_ASK_SECONDS = 5.0  # to ask all servers for their adapters, or one for what its flags have set


class LlamaCppEngine(LlamaServers[LlamaCall]):
    """Engine for text generation with llama.cpp's servers; see `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self._eos = eos_ids(config) if config.model is not None else frozenset()
        self._files: asyncio.Task[tuple[Pieces, Probe]] | None = None  # from the model's tokenizer
        self._serves_adapters = bool(config.engine_options.get("enable_lora"))
        self._reuses_prompts = config.options.enable_prefix_caching is not False
        super().__init__(config)
        adapters = next((state.adapters for state in self._states.values() if state.adapters), LoadedAdapters())
        self.info = replace(self.info, adapters=adapters.paths_by_name())

    async def model_at(self, url: str) -> LlamaModel:
        loaded = self._load_files()
        model = await super().model_at(url)
        await self._check_tokenizer(url, loaded)
        if self._child is None and not self._states[url].is_free:
            await self._check_flags(url)
        if self._serves_adapters:
            data = await self._client.get(f"{root(url)}/lora-adapters", may_miss=True, waits=True)
            self._states[url].adapters = LoadedAdapters.read(data)
        self._states[url].projector = await self._complete_projector(url, model.projector)
        return model

    async def _check_flags(self, url: str) -> None:
        """Check that the flags of a server do not constrain all responses. If its slots are busy, repeat this later.

        Raises:
            Failed: they do, or the server computes no responses.
        """
        request = self._client.post(f"{root(url)}/completion", SETTINGS)
        with contextlib.suppress(asyncio.TimeoutError):
            try:
                check_free(await asyncio.wait_for(request, _ASK_SECONDS))
            except Refused as error:
                raise Failed(str(error), error.words) from None
            self._states[url].is_free = True

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
        state = self._states[url]
        if difference and not state.divides_differently:
            state.divides_differently = True
            words = f"{url} divides some texts into other tokens than option.model_id, whose tokens are used"
            print(f"{words}: {difference}", file=sys.stderr, flush=True)

    def load_adapter(self, adapter: Adapter) -> None:
        if not self._serves_adapters:
            raise ValueError(NO_LORA)
        if not self._is_loaded(adapter.path):
            self.complete(asyncio.wait_for(self._ask_all(), _ASK_SECONDS))  # servers may have been restarted
        if not self._is_loaded(adapter.path):
            remedy = "this handler with option.lora_modules" if self._child else "llama-server with --lora"
            reason = "llama-server loads adapters only when it starts, and has not loaded this one"
            raise ValueError(f"{reason}: restart {remedy}")

    def _is_loaded(self, path: str) -> bool:
        return any(state.adapters.find(path) is not None for state in self._states.values())

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self.model_at(server.url) for server in self._servers), return_exceptions=True)

    def _with_adapter(self, server: RemoteServer, call: LlamaCall, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of a request with the scales of the server's adapters, and whether it reuses earlier prompts.

        Raises:
            NotLoaded: the server has not loaded the adapter of the request.
        """
        loaded, adapter = self._states[server.url].adapters, call.adapter
        used = None if adapter is None else loaded.find(adapter.path)
        if adapter is not None and used is None:
            raise NotLoaded(f"has not loaded the adapter {adapter.name}")
        if not loaded:
            return body if self._reuses_prompts else {**body, "cache_prompt": False}
        # llama-server's cache of earlier prompts ignores which adapter has computed a prompt. A server that the engine
        # has started has no such cache.
        reuses = self._reuses_prompts and self._child is not None and not loaded.has_activated
        return {**body, "lora": loaded.scales(used), "cache_prompt": reuses}

    async def _check_adapters(self, server: RemoteServer, call: LlamaCall, body: Mapping[str, Any]) -> None:
        """Raise Failed if a server was restarted with other adapters before it received this request."""
        await self.check_connection(server)
        if self._serves_adapters and self._with_adapter(server, call, body).get("lora") != body.get("lora"):
            raise Failed("was restarted with other adapters")

    async def _complete_projector(self, url: str, projector: Projector | None) -> Projector | None:
        """Add the tokens with which the server begins a prompt.

        Raises:
            Failed: the server does not tokenize an empty text.
        """
        known = self._states[url].projector
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
        limit = self._states[server.url].slots.count
        adapter = running.call.adapter
        group = "" if adapter is None else adapter.path
        try:
            while not running.ended:
                slots = self._states[server.url].slots
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
        projector = self._states[server.url].projector
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
        projector = self._states[server.url].projector
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
                    if running.held is None and (id := running.call.take_plain(event.data)) is not None:
                        self.take_token(server, running, id)
                        tokens = None
                        continue
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
            raise Failed("sent an incomplete response", "its last event is missing")

    async def _take_tokens(self, server: RemoteServer, running: Running[LlamaCall], tokens: Tokens) -> bool:
        """Pass an event on. Return false if the tokens of the event have to be computed again."""
        pieces = None
        if running.call.num_missing(tokens) and not tokens.stop_type:
            pieces = await self._load_pieces()
        part = self._steps.parts.get(running.key) or Part()
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
        data = await self._compute_whole(server.url, "/completion", body, running.silence)
        await self._check_adapters(server, running.call, body)
        tokens = read_completion(data)
        if not tokens.stop_type:
            raise Failed("sent an incomplete response", "stop_type is missing")
        if running.call.num_scores and sum(map(is_scored, tokens.scores)) < len(tokens.ids):
            tokens = tokens._replace(scores=await self._all_scores(server, running, tokens))
        await self._take_tokens(server, running, tokens)

    async def _all_scores(
        self, server: RemoteServer, running: Running[LlamaCall], tokens: Tokens
    ) -> Sequence[Mapping[str, Any]]:
        """Return the log-probabilities of a completion's tokens. Request those that llama-server did not report."""
        pieces = await self._load_pieces()
        if pieces is None:
            detail = "with option.model_id, this handler would request them one by one"
            raise Failed("sent no log-probability of a token that ends in the middle of a character", detail)
        return [
            await self._score(server, running, running.call.prefix(tokens.ids[:index]), tokens.ids[index])
            if reported is None
            else reported
            for index, reported in enumerate(aligned(tokens, pieces))
        ]

    async def _score(
        self, server: RemoteServer, running: Running[LlamaCall], prefix: Sequence[int], id: int
    ) -> Mapping[str, Any]:
        """Return the log-probabilities of a token after a prefix, and of its alternatives."""
        call = running.call
        for count in (max(_SCORES, call.num_scores), _ALL_SCORES):
            body = await self._with_images(server, call, self._with_adapter(server, call, scores(prefix, count)))
            data = await self._compute_whole(server.url, "/completion", body, running.silence)
            await self._check_adapters(server, call, body)
            if (result := read_scores(data, id, call.num_scores)) is not None:
                return result
        raise Failed("sent no log-probability of a token", f"the token has the id {id}")

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


def _load_files(config: EngineConfig) -> tuple[Pieces, Probe]:
    tokenizer = files.load_tokenizer(config)
    return Pieces(tokenizer.vocabulary.pieces), Probe.of(tokenizer)


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
    return LlamaPooling(config)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    if config.task is Task.GENERATION:
        return media.load_tokenizer(config, projector=_reads_images(config))
    return HfPoolingTokenizer(config.model_path, config.chat_template, keeps_texts=config.task is Task.RERANK)
