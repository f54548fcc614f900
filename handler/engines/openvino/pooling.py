"""The engine for pooling models on CPUs with OpenVINO. It batches texts of similar length and pools in the graph."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from handler.config import model_files
from handler.core.errors import ConfigError
from handler.core.values import Pooling, Task
from handler.engines.base import EngineConfig, EngineInfo, EngineRequest, NoAdapters, Step
from handler.engines.huggingface.files import Tensors
from handler.engines.huggingface.pooling import NO_POOLED_LORA, read_pooling
from handler.engines.openvino.graph_builder import GraphBuilder

# -- build OpenVINO's graph of a BERT, RoBERTa or XLM-R checkpoint from its safetensors, without torch -----------------
# The graph computes the same values as transformers' models of these names (arXiv 1810.04805, 1907.11692, 1911.02116).

_FAMILIES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}
"""Supported model types, with the prefix of their tensor names in checkpoints that have a task head."""


def is_bert(model: Path) -> bool:
    """Return whether `bert_graph` can build the graph of the checkpoint in a directory."""
    return has_bert_config(model) and bool(model_files.visible(model, "*.safetensors"))


def has_bert_config(model: Path) -> bool:
    """Return whether `bert_graph` supports the architecture that config.json specifies."""
    config = model_files.read_json(model / "config.json")
    return (
        config.get("model_type") in _FAMILIES
        and config.get("hidden_act", "gelu") in ("gelu", "relu")
        and config.get("position_embedding_type", "absolute") in ("absolute", None)
        and not config.get("is_decoder")
    )


def bert_graph(model: Path) -> Any:
    """Build the graph of a checkpoint.

    A classifier's output is `logits` [texts, labels]; other models return `last_hidden_state` [texts, tokens, size].
    The inputs are input_ids, attention_mask, position_ids and, if the model has several token types, token_type_ids.
    Each input is int64 [texts, tokens].

    Raises:
        ConfigError: a tensor is missing.
    """
    return _Builder(model_files.read_json(model / "config.json"), _Tensors(model)).build()


class _Tensors:
    """A mapping from transformers' current tensor names to a checkpoint's tensors."""

    def __init__(self, model: Path) -> None:
        self._tensors = Tensors(model)
        self._names = {_newer(name): name for name in self._tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        return self._tensors[self._names.get(name, name)]


def _newer(name: str) -> str:
    """Replace the TensorFlow name of a tensor, which old checkpoints use, with the current transformers name."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


class _Builder(GraphBuilder):
    def __init__(self, config: Mapping[str, Any], tensors: _Tensors) -> None:
        size, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        super().__init__(heads, size // heads, lambda name: self._real(tensors[name]), tensors.__getitem__)
        self._config, self._tensors = config, tensors
        prefix = _FAMILIES[config["model_type"]]
        self._prefix = prefix if f"{prefix}embeddings.word_embeddings.weight" in tensors else ""

    def build(self) -> Any:
        import openvino

        types = ["token_type_ids"] if self._config.get("type_vocab_size", 2) > 1 else []
        inputs = self._parameters(["input_ids", "attention_mask", "position_ids", *types])
        allowed = self._ops.not_equal(inputs["attention_mask"], 0)
        allowed = self._ops.unsqueeze(allowed, [1, 2])  # [texts, heads, from, to]
        hidden = self._embed(inputs)
        for index in range(int(self._config["num_hidden_layers"])):
            hidden = self._layer(f"{self._prefix}encoder.layer.{index}.", hidden, allowed)
        logits = self._head(hidden)
        result = self._result("last_hidden_state", hidden) if logits is None else self._result("logits", logits)
        return openvino.Model([result], list(inputs.values()), self._config["model_type"])

    def _embed(self, inputs: Mapping[str, Any]) -> Any:
        total = self._rows("word", inputs["input_ids"]) + self._rows("position", inputs["position_ids"])
        if "token_type_ids" in inputs:
            types = self._rows("token_type", inputs["token_type_ids"])
        else:
            types = self._real(self._array(f"{self._prefix}embeddings.token_type_embeddings.weight")[0])
        return self._norm(f"{self._prefix}embeddings.LayerNorm", total + types)

    def _rows(self, table: str, ids: Any) -> Any:
        weights = self._matrix(f"{self._prefix}embeddings.{table}_embeddings.weight")
        return self._ops.gather(weights, ids, 0)

    def _layer(self, name: str, hidden: Any, allowed: Any) -> Any:
        query, key, value = (
            self._swap(self._split(self._linear(f"{name}attention.self.{part}", hidden), self._num_heads))
            for part in ("query", "key", "value")
        )
        mixed = self._linear(f"{name}attention.output.dense", self._attend(query, key, value, allowed))
        hidden = self._norm(f"{name}attention.output.LayerNorm", mixed + hidden)
        wide = self._linear(f"{name}intermediate.dense", hidden)
        relu = self._config.get("hidden_act") == "relu"
        wide = self._ops.relu(wide) if relu else self._ops.gelu(wide, "erf")
        wide = self._linear(f"{name}output.dense", wide)
        return self._norm(f"{name}output.LayerNorm", wide + hidden)

    def _head(self, hidden: Any) -> Any:
        """Compute the classifier's logits from the first token, or return None if the model has no classifier."""
        if not any(name in self._tensors for name in ("classifier.weight", "classifier.out_proj.weight")):
            return None
        first = self._ops.gather(hidden, 0, 1)
        if "classifier.weight" in self._tensors:
            return self._linear("classifier", self._ops.tanh(self._linear(f"{self._prefix}pooler.dense", first)))
        return self._linear("classifier.out_proj", self._ops.tanh(self._linear("classifier.dense", first)))

    def _norm(self, name: str, hidden: Any) -> Any:
        epsilon = float(self._config.get("layer_norm_eps", 1e-12))
        scaled = self._ops.mvn(hidden, [-1], True, epsilon, "inside_sqrt")
        return scaled * self._real(self._array(f"{name}.weight")) + self._real(self._array(f"{name}.bias"))


MODEL = "openvino_model.xml"

_TOKENS_PER_STEP = 1024  # including padding; larger steps are no faster on a CPU, but delay new requests
_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
_HIDDEN = ("last_hidden_state", "token_embeddings")
_NO_LIMIT = 1 << 20  # tokens of a text, for models whose files specify no limit


class OpenVinoPooling(NoAdapters):
    """An engine whose requests contain `Pooling` instead of `Sampling`. See `engines.base.Engine`.

    Args:
        properties: properties of OpenVINO's CPU plugin.
    """

    no_adapters = NO_POOLED_LORA

    def __init__(self, config: EngineConfig, properties: Mapping[str, str]) -> None:
        import openvino

        self._files = read_pooling(config.model_path, config.options.pooling)
        graph = read_graph(config.model_path, self._files.mode, config.task)
        compiled = openvino.Core().compile_model(graph, "CPU", dict(properties))
        self._inputs = {port.any_name for port in compiled.inputs}
        self._request: Any = compiled.create_infer_request()
        self._most_texts = config.options.max_rolling_batch_size
        self._most_tokens = config.options.max_num_batched_tokens or _TOKENS_PER_STEP
        self._waiting: dict[int, EngineRequest] = {}
        model_config = model_files.read_json(config.model_path / "config.json")
        # RoBERTa numbers positions from the padding id + 1.
        self._shifted = "roberta" in str(model_config.get("model_type"))
        self._padding = int(model_config.get("pad_token_id") or self._shifted)
        most = self._files.limit(config.options.max_model_len or _NO_LIMIT)
        dimensions, seconds = self._warm_up()
        self.info = EngineInfo(
            name="openvino",
            version=importlib.metadata.version("openvino"),
            device="CPU",
            dtype=config.options.dtype,
            max_total_tokens=most,
            dimensions=dimensions,
            longest_step=round(seconds * max(most, self._most_tokens), 1),
        )

    def _warm_up(self) -> tuple[int, float]:
        """Compile the kernels. Return the number of output dimensions, and the seconds for a one-token step."""
        first = [EngineRequest(0, [self._padding + 1], Pooling("embed"))]
        self._compute(first)
        began = time.monotonic()
        output = self._compute(first)
        return output.shape[1], time.monotonic() - began

    def add(self, request: EngineRequest) -> None:
        self._waiting[request.key] = request

    def cancel(self, key: int) -> None:
        self._waiting.pop(key, None)

    def step(self) -> Step:
        texts = self._next()
        rows = self._compute(texts) if texts else ()
        for text in texts:
            del self._waiting[text.key]
        pairs = zip(texts, rows, strict=True)
        return Step.of([self._files.output(text.key, row, text.pooling) for text, row in pairs])

    def _next(self) -> list[EngineRequest]:
        """Choose the oldest text and the texts closest to it in length, within the limits of a step."""
        if not self._waiting:
            return []
        oldest = len(next(iter(self._waiting.values())).ids)
        chosen: list[EngineRequest] = []
        longest = 0
        for text in sorted(self._waiting.values(), key=lambda text: abs(len(text.ids) - oldest)):
            longest = max(longest, len(text.ids))
            if chosen and (len(chosen) == self._most_texts or longest * (len(chosen) + 1) > self._most_tokens):
                break
            chosen.append(text)
        return chosen

    def _compute(self, texts: Sequence[EngineRequest]) -> Any:
        """Return the graph's output, one row per text: float32 [texts, dimensions]."""
        import numpy

        shape = len(texts), max(len(text.ids) for text in texts)
        ids = numpy.full(shape, self._padding, dtype=numpy.int64)
        mask, types = numpy.zeros(shape, dtype=numpy.int64), numpy.zeros(shape, dtype=numpy.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text.ids)], mask[row, : len(text.ids)] = text.ids, 1
            if text.pooling.second is not None:
                types[row, text.pooling.second : len(text.ids)] = 1
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        if "position_ids" in self._inputs:
            values["position_ids"] = self._positions(ids)
        return self._request.infer({name: values[name] for name in self._inputs})[0]

    def _positions(self, ids: Any) -> Any:
        import numpy

        if not self._shifted:
            return numpy.broadcast_to(numpy.arange(ids.shape[1], dtype=numpy.int64), ids.shape)
        real = (ids != self._padding).astype(numpy.int64)
        return numpy.cumsum(real, axis=1) * real + self._padding

    def close(self) -> None:
        self._waiting.clear()


def read_graph(model: Path, mode: str, task: Task) -> Any:
    """Read or build the model's graph, and reduce it to a single output with one row per text.

    Args:
        mode: the pooling mode, as in `PoolingFiles`.

    Raises:
        ConfigError: the graph has unsupported inputs, or lacks the output that the task needs.
    """
    import openvino

    graph = openvino.Core().read_model(model / MODEL) if (model / MODEL).is_file() else bert_graph(model)
    if unknown := {port.any_name for port in graph.inputs} - _INPUTS:
        raise ConfigError(f"{model}: the graph has unsupported inputs: {', '.join(sorted(unknown))}")
    outputs = {name: port for port in graph.outputs for name in port.get_names()}
    accepted = _HIDDEN if task is Task.EMBEDDING else ("logits",)
    output = next((outputs[name] for name in accepted if name in outputs), None)
    if output is None:
        raise ConfigError(
            f"{model}: for option.task={task.value} the graph must return {accepted[0]}; "
            f"it has {', '.join(sorted(outputs)) or 'no named output'}"
        )
    node = output.get_node().input_value(0)
    if task is Task.EMBEDDING:
        node = _pooled(node, graph.input("attention_mask"), mode)
    return openvino.Model([node], [port.get_node() for port in graph.inputs], "pooled")


def _pooled(hidden: Any, mask: Any, mode: str) -> Any:
    """Pool token embeddings [texts, tokens, size] to text embeddings [texts, size]."""
    import numpy
    from openvino import opset13 as ops

    if mode == "cls":
        return ops.gather(hidden, 0, 1).output(0)
    if mode == "last":  # padding is on the right
        last = ops.reduce_sum(mask, [1], True) - 1
        return ops.gather(hidden, ops.squeeze(last, [1]), 1, 1).output(0)
    weights = ops.unsqueeze(ops.convert(mask, "f32"), 2)
    if mode == "max":
        is_token = ops.greater(weights, ops.constant(numpy.float32(0)))
        seen = ops.select(is_token, hidden, ops.constant(numpy.float32(-3e38)))
        return ops.reduce_max(seen, [1]).output(0)
    total = ops.reduce_sum(ops.multiply(hidden, weights), [1])  # `hidden` may be an output, which has no operators
    return (total / ops.reduce_sum(weights, [1])).output(0)
