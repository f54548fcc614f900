"""Computes whole texts by OpenVINO on a CPU: texts of like length together, their vectors pooled in the graph."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.config import model_files
from handler.core.errors import ConfigError
from handler.core.values import Adapter, Extras, Finish, Pooling, Task
from handler.engines.base import EngineConfig, EngineInfo, EngineRequest, Output, Step
from handler.engines.huggingface.pooling import NO_POOLED_LORA, read_pooling
from handler.engines.openvino.pooling.bert_graph import bert_graph

MODEL = "openvino_model.xml"

_TOKENS_PER_STEP = 1024  # padding included: more are no faster on a CPU, and let new requests wait for longer
_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
_HIDDEN = ("last_hidden_state", "token_embeddings")
_ANY = 1 << 20  # tokens of a text, where a model names no limit


class _Text(NamedTuple):
    key: int
    ids: Sequence[int]
    pooling: Pooling


class OpenVinoPooling:
    """See `engines.base.Engine`; it gets Pooling in place of Sampling.

    Args:
        properties: the CPU plugin's.
    """

    def __init__(self, config: EngineConfig, properties: Mapping[str, str]) -> None:
        import openvino

        assert config.model is not None
        self._files = read_pooling(config.model, config.options.pooling)
        graph = read_graph(config.model, self._files.mode, config.task)
        compiled = openvino.Core().compile_model(graph, "CPU", dict(properties))
        self._inputs = {port.any_name for port in compiled.inputs}
        self._request: Any = compiled.create_infer_request()
        self._most_texts = config.options.max_rolling_batch_size
        self._most_tokens = config.options.max_num_batched_tokens or _TOKENS_PER_STEP
        self._waiting: dict[int, _Text] = {}
        own = model_files.read_json(config.model / "config.json")
        # RoBERTa's positions begin after that of padding.
        self._shifted = "roberta" in str(own.get("model_type"))
        self._padding = int(own.get("pad_token_id") or self._shifted)
        limits = (self._files.most_tokens, config.options.max_model_len)
        numbers = self._compute([_Text(0, [self._padding + 1], Pooling("embed"))])  # compiles kernels, too
        self.info = EngineInfo(
            name="openvino",
            version=importlib.metadata.version("openvino"),
            device="CPU",
            dtype=config.options.dtype,
            max_total_tokens=min((limit for limit in limits if limit), default=_ANY),
            dimensions=numbers.shape[1],
        )

    def add(self, request: EngineRequest) -> None:
        self._waiting[request.key] = _Text(request.key, request.ids, request.pooling)

    def cancel(self, key: int) -> None:
        self._waiting.pop(key, None)

    def step(self) -> Step:
        texts = self._next()
        rows = self._compute(texts) if texts else ()
        for text in texts:
            del self._waiting[text.key]
        return Step(
            [],
            [],
            [],
            [
                Output(text.key, (), (), Finish.EOS, extras=Extras(vector=self._files.finish(row, text.pooling)))
                for text, row in zip(texts, rows, strict=True)
            ],
        )

    def _next(self) -> list[_Text]:
        """Choose the oldest text and those whose lengths are nearest, within the step's tokens."""
        if not self._waiting:
            return []
        oldest = len(next(iter(self._waiting.values())).ids)
        chosen: list[_Text] = []
        longest = 0
        for text in sorted(self._waiting.values(), key=lambda text: abs(len(text.ids) - oldest)):
            longest = max(longest, len(text.ids))
            if chosen and (len(chosen) == self._most_texts or longest * (len(chosen) + 1) > self._most_tokens):
                break
            chosen.append(text)
        return chosen

    def _compute(self, texts: Sequence[_Text]) -> Any:
        """Return a row for each text, float32 [texts, numbers]."""
        import numpy

        shape = len(texts), max(len(text.ids) for text in texts)
        ids = numpy.full(shape, self._padding, dtype=numpy.int64)
        mask, types = numpy.zeros(shape, dtype=numpy.int64), numpy.zeros(shape, dtype=numpy.int64)
        for row, text in enumerate(texts):
            end = len(text.ids)
            ids[row, :end], mask[row, :end] = text.ids, 1
            if text.pooling.second is not None:
                types[row, text.pooling.second : end] = 1
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        if "position_ids" in self._inputs:
            values["position_ids"] = self._positions(ids)
        result = self._request.infer({name: values[name] for name in self._inputs})
        return result[0]

    def _positions(self, ids: Any) -> Any:
        import numpy

        if not self._shifted:
            return numpy.broadcast_to(numpy.arange(ids.shape[1], dtype=numpy.int64), ids.shape)
        real = (ids != self._padding).astype(numpy.int64)
        return numpy.cumsum(real, axis=1) * real + self._padding

    def load_adapter(self, adapter: Adapter) -> None:
        raise ValueError(NO_POOLED_LORA)

    drop_adapter = load_adapter

    def close(self) -> None:
        self._waiting.clear()


def read_graph(model: Path, mode: str, task: Task) -> Any:
    """Read or make the model's graph; its only output has a row for each text.

    Args:
        mode: as in PoolingFiles.

    Raises:
        ConfigError: the graph has other inputs or outputs than such models.
    """
    import openvino

    graph = openvino.Core().read_model(model / MODEL) if (model / MODEL).is_file() else bert_graph(model)
    if unknown := {port.any_name for port in graph.inputs} - _INPUTS:
        raise ConfigError(f"{model}: the graph wants {', '.join(sorted(unknown))}, which a text does not have")
    outputs = {name: port for port in graph.outputs for name in port.get_names()}
    wanted = _HIDDEN if task is Task.EMBEDDING else ("logits",)
    found = next((outputs[name] for name in wanted if name in outputs), None)
    if found is None:
        names = ", ".join(sorted(outputs)) or "no name"
        raise ConfigError(f"{model}: for option.task={task.value} the graph has to give {wanted[0]}; it gives {names}")
    node = found.get_node().input_value(0)
    if task is Task.EMBEDDING:
        mask = next(port for port in graph.inputs if port.any_name == "attention_mask")
        node = _pooled(node, mask, mode)
    return openvino.Model([node], [port.get_node() for port in graph.inputs], "pooled")


def _pooled(hidden: Any, mask: Any, mode: str) -> Any:
    """Pool the tokens' vectors [texts, tokens, size] to [texts, size]."""
    import numpy
    from openvino import opset13 as ops

    def whole(values: Any) -> Any:
        return ops.constant(numpy.array(values, dtype=numpy.int64))

    if mode == "cls":
        return ops.gather(hidden, whole(0), whole(1)).output(0)
    if mode == "last":  # padding is on the right
        place = ops.subtract(ops.reduce_sum(mask, whole([1]), True), whole(1))
        return ops.gather(hidden, ops.squeeze(place, whole([1])), whole(1), 1).output(0)
    weights = ops.unsqueeze(ops.convert(mask, "f32"), whole(2))
    if mode == "max":
        is_token = ops.greater(weights, ops.constant(numpy.float32(0)))
        seen = ops.select(is_token, hidden, ops.constant(numpy.float32(-3e38)))
        return ops.reduce_max(seen, whole([1])).output(0)
    total = ops.reduce_sum(ops.multiply(hidden, weights), whole([1]))
    return ops.divide(total, ops.reduce_sum(weights, whole([1]))).output(0)
