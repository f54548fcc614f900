"""An engine for embeddings of SGLang's servers, started with --is-embedding. It sends token ids to /encode.

Sources: SGLang 0.5.23 (sglang/srt/entrypoints/http_server.py, managers/tokenizer_manager.py, layers/pooler.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.huggingface.pooling import PoolingFiles, read_pooling
from handler.engines.openai.answer import shortened
from handler.engines.openai.client import suitable
from handler.engines.openai.sglang.api import SglangServer, native
from handler.engines.openai.url_engine import HttpEngine
from handler.engines.remote.engine import Running
from handler.engines.remote.servers import (
    Failed,
    Lasting,
    PooledCall,
    Refused,
    RemoteServer,
    check_same,
    other_size,
    score,
)
from handler.engines.remote.sglang import SOFTWARE

_MODES = ("cls", "last")
"""Pooling modes of SGLang's models. The class of the model decides, whatever its files say."""
_ANY_ID = 0  # every vocabulary contains it
_ROUNDING = 1e-2  # by which the length of a normalized embedding may differ from 1, in 16-bit floats


class EmbeddingModel(NamedTuple):
    """A server's model. `max_tokens` is None if not reported."""

    name: str
    max_tokens: int | None
    dimensions: int
    normalizes: bool


class SglangPooling(HttpEngine[PooledCall]):
    """Engine for embeddings; see `engines.base.Engine`. Requests have Pooling instead of Sampling.

    The server pools. The engine truncates an embedding to the requested dimensions, and normalizes it if the model's
    files or the request specify this.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(SOFTWARE, config)
        with self.closed_on_failure():
            self._files: PoolingFiles = read_pooling(config.model_path)
            if self._files.mode not in _MODES:
                reason = f"the model's files specify {self._files.mode} pooling, which SGLang does not support"
                raise ConfigError(reason)
            self._model = self.find("openai", config, self._model_at, _fit, self.name)
        self.info = self._files.described(self.info, self._model.dimensions)

    async def _model_at(self, url: str) -> EmbeddingModel:
        """Return a server's model. An embedding shows its dimensions, and whether the server normalizes.

        Raises:
            Failed: the server has no model yet, or its model does not compute embeddings.
        """
        model = suitable(await self._client.models(url), self.name or None, None)
        report = await SglangServer.ask(self._client, url, generates=False)
        try:
            values = await self._encode(url, [_ANY_ID, _ANY_ID])
        except Refused as error:
            raise Lasting(f"answered {error.status}", error.words) from None
        limits = [limit for limit in (model.max_tokens, report.max_tokens) if limit]
        normalizes = abs(sum(value * value for value in values) ** 0.5 - 1) < _ROUNDING
        return EmbeddingModel(model.name, min(limits, default=None), len(values), normalizes)

    async def _encode(self, url: str, ids: Sequence[int]) -> Sequence[float]:
        data = await self._client.post(f"{native(url)}/encode", {"input_ids": list(ids)})
        try:
            value: Mapping[str, Any] = orjson.loads(data)
            count = value["meta_info"]["prompt_tokens"]
            if count != len(ids):  # with --allow-auto-truncate
                raise Failed("computed the embedding of only a part of the text", f"{count!r} of {len(ids)} tokens")
            values = [score(number) for number in value["embedding"]]
        except (ValueError, TypeError, KeyError) as error:
            raise Failed("sent a response that cannot be read", f"{error!r}: {shortened(data)}") from None
        if not values:
            raise Failed("sent an empty embedding")
        return values

    def new_call(self, request: EngineRequest) -> PooledCall:
        if self._model.normalizes and request.pooling.normalize is False:
            raise ValueError("normalize=false is not supported: the server normalizes its embeddings")
        return PooledCall(request.ids, request.pooling)

    async def stream(self, server: RemoteServer, running: Running[PooledCall]) -> None:
        """Request an embedding.

        Raises:
            Refused: the server refuses the request.
            Failed: the server fails.
        """
        call = running.call
        try:
            values = await self._encode(server.url, call.ids)
        except Refused:
            await self.ask(server, again=True)  # a server with another model may refuse what this model accepts
            raise
        if len(values) != self._model.dimensions:
            raise other_size([len(values)], self._model.dimensions)
        self.take_result(server, running, self._files.finish(values, call.pooling))

    async def check(self, server: RemoteServer) -> None:
        """Check that a server serves the model and accepts as many tokens as this engine."""
        model = _fit(await self._model_at(server.url), self._model)
        self.check_max_tokens(model.max_tokens)


def _fit(model: EmbeddingModel, first: EmbeddingModel | None) -> EmbeddingModel:
    """Return the model of a server. Raise Failed if the first server has another model."""
    if first is not None:
        check_same(model, first)
    return model
