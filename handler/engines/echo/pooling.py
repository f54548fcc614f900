"""Echo's embeddings, scores and classifications: numbers that depend on nothing but a text's words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from handler.core.values import Adapter, Extras, Finish, Pooling
from handler.engines.base import EngineConfig, EngineInfo, EngineRequest, Output, Step
from handler.engines.echo.cues import CUES, REFUSE, act
from handler.engines.echo.tokenizer import CONTEXT
from handler.engines.huggingface.pooling import NO_POOLED_LORA, PoolingFiles

_DIMENSIONS = 8
_LABELS = 2


class EchoPooling:
    """Computes numbers of a text's words: equal texts have equal ones, and the order of the words counts."""

    def __init__(self, config: EngineConfig) -> None:
        self._cues = bool(config.options.engine_options.get("echo_cues", 0))
        self._waiting: dict[int, tuple[Sequence[int], Pooling]] = {}
        self._files = PoolingFiles("mean", normalize=True, most_tokens=None, exclusive=True)
        self.info = EngineInfo("echo", "1", "none", "none", config.options.max_model_len or CONTEXT, _DIMENSIONS)

    def add(self, request: EngineRequest) -> None:
        if self._cues and REFUSE in request.ids:
            raise ValueError("refused on cue")
        self._waiting[request.key] = request.ids, request.pooling

    def cancel(self, key: int) -> None:
        self._waiting.pop(key, None)

    def step(self) -> Step:
        outputs = []
        for key, (ids, pooling) in self._waiting.items():
            if self._cues and (cue := min(ids)) < len(CUES):
                act(CUES[cue])
            outputs.append(
                Output(
                    key,
                    (),
                    (),
                    Finish.EOS,
                    extras=Extras(vector=self._files.finish(self._numbers(ids, pooling), pooling)),
                )
            )
        self._waiting.clear()
        return Step([], [], [], outputs)

    def _numbers(self, ids: Sequence[int], pooling: Pooling) -> Any:
        import numpy

        size = {"embed": _DIMENSIONS, "score": 1, "classify": _LABELS}[pooling.kind]
        digest = hashlib.shake_128(repr((*ids, pooling.second)).encode()).digest(2 * size)
        return numpy.frombuffer(digest, dtype="<i2").astype(numpy.float32) / (1 << 13)  # from -4 to 4

    def load_adapter(self, adapter: Adapter) -> None:
        raise ValueError(NO_POOLED_LORA)

    drop_adapter = load_adapter

    def close(self) -> None:
        self._waiting.clear()
