"""OpenVINO's graph of a BERT, RoBERTa or XLM-R checkpoint, made from its safetensors; no torch is needed.

The computation is that of transformers' models of these names (arXiv 1810.04805, 1907.11692, 1911.02116).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handler.config import model_files
from handler.engines.huggingface.tensors import Tensors

_FAMILIES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}
"""Model types with the prefix of their tensors' names in a model with a head."""


def is_bert(model: Path) -> bool:
    """Whether the graph of a Hugging Face directory can be made here."""
    return has_bert_config(model) and bool(model_files.visible(model, "*.safetensors"))


def has_bert_config(model: Path) -> bool:
    """Whether its configuration is one of which the graph can be made here."""
    config = model_files.read_json(model / "config.json")
    return (
        config.get("model_type") in _FAMILIES
        and config.get("hidden_act", "gelu") in ("gelu", "relu")
        and config.get("position_embedding_type", "absolute") in ("absolute", None)
        and not config.get("is_decoder")
    )


def bert_graph(model: Path) -> Any:
    """Make the graph: `last_hidden_state` [texts, tokens, size], of a classifier `logits` [texts, labels].

    Its inputs are input_ids, attention_mask and position_ids, and token_type_ids where the model has several types: all
    [texts, tokens] of int64.

    Raises:
        ConfigError: a tensor is missing.
    """
    return _Builder(model_files.read_json(model / "config.json"), _Tensors(model)).build()


class _Tensors:
    """A checkpoint's tensors by transformers' names."""

    def __init__(self, model: Path) -> None:
        self._tensors = Tensors(model)
        self._names = {_newer(name): name for name in self._tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        return self._tensors[self._names.get(name, name)]


def _newer(name: str) -> str:
    """Return transformers' name of a tensor for one of TensorFlow's, which old checkpoints have."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


class _Builder:
    def __init__(self, config: Mapping[str, Any], tensors: _Tensors) -> None:
        from openvino import opset13

        self._ops: Any = opset13
        self._config, self._tensors = config, tensors
        prefix = _FAMILIES[config["model_type"]]
        self._prefix = prefix if f"{prefix}embeddings.word_embeddings.weight" in tensors else ""
        self._size, self._heads = int(config["hidden_size"]), int(config["num_attention_heads"])

    def build(self) -> Any:
        import numpy
        import openvino

        names = ["input_ids", "attention_mask", "position_ids"]
        if self._config.get("type_vocab_size", 2) > 1:
            names.append("token_type_ids")
        inputs = {name: self._ops.parameter([-1, -1], numpy.int64, name) for name in names}
        for name, node in inputs.items():
            node.output(0).get_tensor().set_names({name})
        allowed = self._ops.not_equal(inputs["attention_mask"], self._whole(0))
        allowed = self._ops.unsqueeze(allowed, self._whole([1, 2]))  # [texts, heads, from, to]
        hidden = self._embed(inputs)
        for index in range(int(self._config["num_hidden_layers"])):
            hidden = self._layer(f"encoder.layer.{index}.", hidden, allowed)
        name = "last_hidden_state"
        if (head := self._head(hidden)) is not None:
            hidden, name = head, "logits"
        result = self._ops.result(hidden)
        result.output(0).get_tensor().set_names({name})
        return openvino.Model([result], list(inputs.values()), self._config["model_type"])

    def _embed(self, inputs: Mapping[str, Any]) -> Any:
        total = self._rows("word", inputs["input_ids"])
        total = self._ops.add(total, self._rows("position", inputs["position_ids"]))
        if "token_type_ids" in inputs:
            types = self._rows("token_type", inputs["token_type_ids"])
        else:
            types = self._real(self._tensors[f"{self._prefix}embeddings.token_type_embeddings.weight"][0])
        return self._norm("embeddings.LayerNorm", self._ops.add(total, types))

    def _rows(self, table: str, ids: Any) -> Any:
        weights = self._real(self._tensors[f"{self._prefix}embeddings.{table}_embeddings.weight"])
        return self._ops.gather(weights, ids, self._whole(0))

    def _layer(self, name: str, hidden: Any, allowed: Any) -> Any:
        query, key, value = (
            self._split(self._linear(f"{name}attention.self.{part}", hidden)) for part in ("query", "key", "value")
        )
        mixed = self._ops.scaled_dot_product_attention(query, key, value, allowed)
        mixed = self._ops.transpose(mixed, self._whole([0, 2, 1, 3]))
        mixed = self._ops.reshape(mixed, self._whole([0, 0, self._size]), True)
        mixed = self._linear(f"{name}attention.output.dense", mixed)
        hidden = self._norm(f"{name}attention.output.LayerNorm", self._ops.add(mixed, hidden))
        wide = self._linear(f"{name}intermediate.dense", hidden)
        relu = self._config.get("hidden_act") == "relu"
        wide = self._ops.relu(wide) if relu else self._ops.gelu(wide, "erf")
        wide = self._linear(f"{name}output.dense", wide)
        return self._norm(f"{name}output.LayerNorm", self._ops.add(wide, hidden))

    def _split(self, hidden: Any) -> Any:
        """Return the heads: [texts, heads, tokens, size of a head]."""
        shape = self._whole([0, 0, self._heads, self._size // self._heads])
        return self._ops.transpose(self._ops.reshape(hidden, shape, True), self._whole([0, 2, 1, 3]))

    def _head(self, hidden: Any) -> Any:
        """Classify by the first token; None for a model without a classifier."""
        if not any(name in self._tensors for name in ("classifier.weight", "classifier.out_proj.weight")):
            return None
        first = self._ops.gather(hidden, self._whole(0), self._whole(1))
        if "classifier.weight" in self._tensors:
            return self._linear("classifier", self._ops.tanh(self._linear("pooler.dense", first)), prefix="")
        first = self._ops.tanh(self._linear("classifier.dense", first, prefix=""))
        return self._linear("classifier.out_proj", first, prefix="")

    def _linear(self, name: str, hidden: Any, prefix: str | None = None) -> Any:
        name = f"{self._prefix if prefix is None else prefix}{name}"
        product = self._ops.matmul(hidden, self._real(self._tensors[f"{name}.weight"]), False, True)
        return self._ops.add(product, self._real(self._tensors[f"{name}.bias"]))

    def _norm(self, name: str, hidden: Any) -> Any:
        epsilon = float(self._config.get("layer_norm_eps", 1e-12))
        scaled = self._ops.mvn(hidden, self._whole([-1]), True, epsilon, "inside_sqrt")
        scaled = self._ops.multiply(scaled, self._real(self._tensors[f"{self._prefix}{name}.weight"]))
        return self._ops.add(scaled, self._real(self._tensors[f"{self._prefix}{name}.bias"]))

    def _real(self, values: Any) -> Any:
        return self._ops.constant(values)

    def _whole(self, values: Any) -> Any:
        import numpy

        return self._ops.constant(numpy.array(values, dtype=numpy.int64))
