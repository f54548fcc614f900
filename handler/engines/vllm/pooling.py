"""vLLM's pooling models: embeddings, scores and classifications of whole texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from handler.core.errors import ConfigError
from handler.core.values import Adapter, Extras, Finish, Pooling, Task
from handler.engines.base import EngineConfig, EngineRequest, EngineStatistics, Output, Step
from handler.engines.huggingface.pooling import NO_POOLED_LORA, read_pooling
from handler.engines.process.supervisor import end_with_children
from handler.engines.vllm.arguments import engine_info, start_engine
from handler.engines.vllm.results import Pending, Results, Statistics

_MODES = {"cls": "CLS", "last": "LAST", "mean": "MEAN"}


def pooling_type(mode: str, where: str) -> str:
    """Return vLLM's name of a mode of pooling.

    Raises:
        ConfigError: it has none; the message says where the mode stands.
    """
    if mode not in _MODES:
        raise ConfigError(f"{where}: vLLM does not pool by {mode}; openvino does")
    return _MODES[mode]


class VllmPooling:
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
        self._engine, _ = start_engine(config, runner="pooling", pooler_config=pooler)
        from vllm.inputs import tokens_input
        from vllm.pooling_params import PoolingParams

        self._tokens_input, self._params = tokens_input, PoolingParams
        self._core = self._engine.engine_core
        self._results = self._engine.output_processor = Results()
        self._stop_watch = end_with_children()
        self._statistics = Statistics()
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

    def interrupt_on(self, fd: int) -> bool:
        if not hasattr(self._core, "interrupt_on"):
            return False
        self._core.interrupt_on(fd)
        return True

    def add(self, request: EngineRequest) -> None:
        pooling = request.pooling
        types = None if pooling.second is None else {"compressed_token_type_ids": pooling.second}
        params = self._params(use_activation=False, task=self._task, extra_kwargs=types)
        self._results.next = pending = Pending(request.key)
        self._engine.add_request(str(request.key), self._tokens_input(list(request.ids)), params)
        self._running[request.key] = pending, pooling

    def cancel(self, key: int) -> None:
        if (running := self._running.pop(key, None)) is not None:
            self._engine.abort_request([running[0].id], internal=True)

    def step(self) -> Step:
        found: list[Output] = []
        if not self._results.pending:  # `get_output` would wait for ever
            return Step([], [], [], found)
        outputs = self._core.get_output()
        if outputs.scheduler_stats is not None:
            self._statistics.add(outputs.scheduler_stats)
        for output in outputs.outputs:
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

    def statistics(self) -> EngineStatistics:
        return self._statistics.report(idle=not self._results.pending)

    def load_adapter(self, adapter: Adapter) -> None:
        raise ValueError(NO_POOLED_LORA)

    drop_adapter = load_adapter

    def close(self) -> None:
        self._stop_watch()
        self._core.shutdown()
