"""An engine for embeddings and scores of llama.cpp's llama-server, started with --embeddings or --reranking.

Sources: llama.cpp b11434, tools/server/server-context.cpp (`handle_embeddings_impl`, `post_rerank`, `send_embedding`).

Embeddings are computed from token ids. For scores, the server receives the texts. Its route for embeddings would accept
token ids, but reads past the end of a score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from handler.config.model_files import read_json
from handler.core.numbers import is_digits
from handler.core.values import Task
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.huggingface.pooling import HfPoolingTokenizer, PoolingFiles, read_pooling
from handler.engines.llamacpp.files import ARCHITECTURE
from handler.engines.llamacpp.servers import LlamaModel, LlamaServers
from handler.engines.openai.answer import shortened
from handler.engines.remote.engine import Running
from handler.engines.remote.servers import Failed, Lasting, PooledCall, Refused, RemoteServer, other_size, score

_TOO_LARGE = "is too large to process"
"""The response of llama-server, with the status 500, to a text that exceeds its `--ubatch-size`."""
_NO_ROOM = "exceeds the available context size"
"""The response to a text that a server may divide, and that leaves no room in the context for one more token.

It divides texts of decoders that pool by the last token (`can_split`). Others may fill the context.
"""
_NOT_SUPPORTED = "does not support"
_ANY_ID = 0  # every vocabulary contains it
_OF_PROBABILITIES = {"model_type": ("qwen3", "qwen3_vl"), ARCHITECTURE: ("qwen3", "qwen3vl")}
"""Values in the config.json of models whose scores llama.cpp converts to probabilities itself.

Source: `build_pooling` in src/llama-graph.cpp.
"""


class LlamaPooling(LlamaServers[PooledCall]):
    """Engine for embeddings and scores; see `engines.base.Engine`. Requests have Pooling instead of Sampling.

    The server pools. The engine truncates an embedding to the requested dimensions, and normalizes it. By default, it
    does so as the model's files specify or, if they do not specify it, as the server's own route for embeddings does.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._ranks = config.task is Task.RERANK
        model = config.model_path
        files = read_pooling(model)
        self._files: PoolingFiles = files if (model / "modules.json").is_file() else files._replace(normalize=True)
        described = read_json(model / "config.json")
        self._is_probability = any(described.get(key) in values for key, values in _OF_PROBABILITIES.items())
        self._num_special = HfPoolingTokenizer(model).num_special(is_pair=True) if self._ranks else 0
        super().__init__(config)
        self.info = self._files.described(self.info, self.model.dimensions)

    async def model_at(self, url: str) -> LlamaModel:
        model = await super().model_at(url)
        try:
            await self._check_flags(url)
            if model.max_tokens is not None:
                model = model._replace(max_tokens=await self._max_tokens(url, model.max_tokens))
            if self._ranks:
                num_more = await self._num_added(url) - self._num_special
                return model._replace(max_tokens=model.max_tokens and model.max_tokens - num_more)
            embeddings = _embeddings(await self._post(url, "/embedding", _embedding([_ANY_ID, _ANY_ID])))
        except Refused as error:
            raise Lasting(f"answered {error.status}", error.words) from None
        if len(embeddings) != 1:
            remedy = "set option.pooling" if self._child else "start it with --pooling, for example `--pooling mean`"
            raise Lasting("computes an embedding for each token instead of one for the text", remedy)
        return model._replace(dimensions=len(embeddings[0]))

    def fit(self, model: LlamaModel, first: LlamaModel | None) -> LlamaModel:
        model = super().fit(model, first)
        if first is not None and model.dimensions != first.dimensions:
            detail = f"its embeddings have {model.dimensions} dimensions instead of {first.dimensions}"
            raise Failed("serves another model", detail)
        return model

    async def _check_flags(self, url: str) -> None:
        """Find out with incomplete requests, which cost nothing, whether a server supports the task.

        Raises:
            Failed: it does not.
        """
        ranks = await self._supports(url, "/rerank")
        if self._ranks and not ranks:
            raise Lasting("computes no rerank scores", "start it with --reranking")
        if self._ranks:
            return
        if ranks:
            detail = "set option.task=rerank, or start it without --reranking"
            raise Lasting("computes only rerank scores, not embeddings", detail)
        if not await self._supports(url, "/embedding"):
            raise Lasting("does not compute embeddings", "start it with --embeddings")

    async def _supports(self, url: str, path: str) -> bool:
        try:
            await self._post(url, path, {})
        except Refused:
            return True  # for a missing field
        except Failed as error:
            if _NOT_SUPPORTED not in error.detail:
                raise
        return False

    async def _max_tokens(self, url: str, context: int) -> int:
        """Return the maximum number of tokens in a text, from the server's refusal of a text that exceeds the context.

        Args:
            context: the server's context.
        """
        try:
            await self._post(url, "/embedding", _embedding([_ANY_ID] * (context + 1)))
        except Refused as error:
            return context - 1 if _NO_ROOM in error.words else context
        except Failed as error:
            if (batch := _batch_size(error.detail)) is None:
                raise
            return min(batch, context)
        return context

    async def _num_added(self, url: str) -> int:
        """Return the number of tokens that a server adds to a query and a document."""
        data = await self._post(url, "/rerank", {"query": "", "documents": [""]})
        try:
            return int(orjson.loads(data)["usage"]["prompt_tokens"])
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(data, error) from None

    def new_call(self, request: EngineRequest) -> PooledCall:
        return PooledCall(request.ids, request.pooling)

    async def stream(self, server: RemoteServer, running: Running[PooledCall]) -> None:
        """Request an embedding or a score.

        Raises:
            Refused: the server refuses the request.
            Failed: the server fails.
        """
        call = running.call
        try:
            async with self._states[server.url].slots.occupy(running.silence):
                values = await (self._score if self._ranks else self._embed)(server, running)
        except Refused:
            await self.ask(server, again=True)  # a server with another model may refuse what this model accepts
            raise
        except Failed as error:
            if _TOO_LARGE in error.detail:
                raise Refused(500, error.detail) from None
            raise
        is_finished = self._ranks and self._is_probability
        self.take_result(server, running, [*values] if is_finished else self._files.finish(values, call.pooling))

    async def _embed(self, server: RemoteServer, running: Running[PooledCall]) -> Sequence[float]:
        body = _embedding(running.call.ids)
        data = await self._compute_whole(server.url, "/embedding", body, running.silence)
        await self.check_connection(server)
        embeddings = _embeddings(data)
        sizes = [len(embedding) for embedding in embeddings]
        if sizes != [self.info.dimensions]:
            raise other_size(sizes, self.info.dimensions)
        return embeddings[0]

    async def _score(self, server: RemoteServer, running: Running[PooledCall]) -> Sequence[float]:
        query, document = running.call.pooling.texts
        body = {"query": query, "documents": [document]}
        data = await self._compute_whole(server.url, "/rerank", body, running.silence)
        await self.check_connection(server)
        try:
            (result,) = orjson.loads(data)["results"]
            return [score(result["relevance_score"])]
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(data, error) from None


def _embedding(ids: Sequence[int]) -> Mapping[str, Any]:
    """Return the body of a request for an embedding, without normalization."""
    return {"content": list(ids), "embd_normalize": -1}


def _embeddings(data: bytes) -> list[list[float]]:
    """Return the embeddings in a response: one, or one for each token if the server does not pool."""
    try:
        (result,) = orjson.loads(data)
        return [[score(value) for value in embedding] for embedding in result["embedding"]]
    except (ValueError, TypeError, KeyError) as error:
        raise _unreadable(data, error) from None


def _batch_size(words: str) -> int | None:
    """Return the size of a server's batches from its refusal of a text that is too long."""
    _, separator, rest = words.partition("current batch size: ")
    digits = rest.partition(")")[0]
    return int(digits) if _TOO_LARGE in words and separator and is_digits(digits) else None


def _unreadable(data: bytes, error: Exception) -> Failed:
    return Failed("sent a response that cannot be read", f"{error!r}: {shortened(data)}")
