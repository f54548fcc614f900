"""vLLM's pooling models: embeddings, scores and classifications of whole texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from handler.core.errors import ConfigError
from handler.core.values import Adapter, Extras, Finish, Pooling, Task
from handler.engines.base import EngineConfig, EngineRequest, Output, Step
from handler.engines.huggingface.pooling import NO_POOLED_LORA, read_pooling
from handler.engines.vllm.core import CoreEngine, Pending, engine_info

_MODES = {"cls": "CLS", "last": "LAST", "mean": "MEAN"}


def pooling_type(mode: str, where: str) -> str:
    """Return vLLM's name of a mode of pooling.

    Raises:
        ConfigError: it has none; the message says where the mode stands.
    """
    if mode not in _MODES:
        raise ConfigError(f"{where}: vLLM does not pool by {mode}; openvino does")
    return _MODES[mode]


class VllmPooling(CoreEngine):
    """See `engines.base.Engine`; it gets Pooling in place of Sampling.

    vLLM gives the pooled vector or the logits; all after that is done here, as with other engines.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.model is not None
        self._files = read_pooling(config.model, config.options.pooling)
        pooler: dict[str, Any] = {"use_activation": False}
        if config.task is Task.EMBEDDING:
            pooler["seq_pooling_type"] = pooling_type(self._files.mode, str(config.model))
        self._task = "embed" if config.task is Task.EMBEDDING else "classify"
        super().__init__(config, runner="pooling", pooler_config=pooler)
        from vllm.inputs import tokens_input
        from vllm.pooling_params import PoolingParams

        self._tokens_input, self._params = tokens_input, PoolingParams
        self._running: dict[int, tuple[Pending, Pooling]] = {}
        info = engine_info(self._engine)
        limits = (self._files.most_tokens, info.max_total_tokens)
        self.info = replace(info, max_total_tokens=min(limit for limit in limits if limit), dimensions=self._warm_up())

    def _warm_up(self) -> int:
        """Compute a text of one token; return the length of its vector."""
        self.add(EngineRequest(0, [0], Pooling("embed", normalize=False)))
        while True:
            for output in self.step().others:
                if output.extras is None or output.extras.vector is None:
                    raise RuntimeError(f"its first request failed: {output.error}")
                return len(output.extras.vector)

    def add(self, request: EngineRequest) -> None:
        pooling = request.pooling
        types = None if pooling.second is None else {"compressed_token_type_ids": pooling.second}
        params = self._params(use_activation=False, task=self._task, extra_kwargs=types)
        pending = Pending(request.key)
        self._submit_as(pending, self._tokens_input(list(request.ids)), params)
        self._running[request.key] = pending, pooling

    def cancel(self, key: int) -> None:
        if (running := self._running.pop(key, None)) is not None:
            self._abort([running[0].id])

    def step(self) -> Step:
        found: list[Output] = []
        for output in self._outputs():
            if output.finish_reason is None or (pending := self._results.pending.pop(output.request_id, None)) is None:
                continue
            _, pooling = self._running.pop(pending.key)
            if output.pooling_output is None:
                error = f"vLLM ended it as {output.finish_reason!s}"
                found.append(Output(pending.key, (), (), Finish.ERROR, error=error))
                continue
            vector = self._files.finish(output.pooling_output.float().numpy().reshape(-1), pooling)
            found.append(Output(pending.key, (), (), Finish.EOS, extras=Extras(vector=vector)))
        return Step([], [], [], found)

    def load_adapter(self, adapter: Adapter) -> None:
        raise ValueError(NO_POOLED_LORA)

    drop_adapter = load_adapter
