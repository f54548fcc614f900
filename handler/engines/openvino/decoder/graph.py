"""Builds an OpenVINO graph of a language model, without torch.

The graph computes the same as transformers' models. OpenVINO GenAI recognizes its attention and replaces it with paged
attention, and the CPU plugin recognizes and fuses its norms and rotary positions (OpenVINO, sdpa_to_paged_attention,
rms_fusion, fuse_rotary_positional_embeddings).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from handler.engines.openvino.decoder.config import DecoderConfig, Layer

Load = Callable[[str], Any]
"""A function that returns the tensor with a given name: a matrix as a node, or a vector as a float32 numpy array."""


def decoder_graph(decoder: DecoderConfig, matrix: Load, vector: Load) -> Any:
    """Build the graph of a language model. Its state is a cache of keys and values.

    Its output is `logits` [texts, tokens, vocabulary]. Its inputs are the same as those of a model exported by
    optimum-intel: input_ids, attention_mask and position_ids [texts, tokens], and beam_idx [texts].

    Args:
        decoder: the architecture.
        matrix: function that returns the node for a matrix.
        vector: function that returns a vector as a numpy array.
    """
    return _Builder(decoder, matrix, vector).build()


class _Builder:
    def __init__(self, decoder: DecoderConfig, matrix: Load, vector: Load) -> None:
        import numpy
        from openvino import opset13

        self._np: Any = numpy
        self._ops: Any = opset13
        self._decoder, self._matrix, self._vector = decoder, matrix, vector
        self._sinks: list[Any] = []
        self._masks: dict[int | None, Any] = {}
        self._rotations: dict[int, tuple[Any, Any]] = {}

    def build(self) -> Any:
        import openvino

        ops, decoder = self._ops, self._decoder
        inputs = {
            name: ops.parameter([-1, -1], self._np.int64) for name in ("input_ids", "attention_mask", "position_ids")
        }
        inputs["beam_idx"] = ops.parameter([-1], self._np.int32)
        for name, node in inputs.items():
            node.set_friendly_name(name)  # GenAI finds inputs by this name
            node.output(0).get_tensor().set_names({name})
        self._inputs = inputs
        self._batch = ops.gather(ops.shape_of(inputs["input_ids"]), self._whole([0]), self._whole(0))
        embeddings = self._matrix("model.embed_tokens.weight")
        hidden = ops.gather(embeddings, ops.convert(inputs["input_ids"], "i32"), self._whole(0))
        if decoder.is_gemma:
            hidden = ops.multiply(hidden, self._real(math.sqrt(decoder.size)))
        for index, layer in enumerate(decoder.layers):
            hidden = self._layer(index, layer, hidden)
        hidden = self._norm("model.norm", hidden)
        head = embeddings if decoder.tied else self._matrix("lm_head.weight")
        logits = ops.matmul(hidden, head, False, True)
        if decoder.logit_cap is not None:
            cap = self._real(decoder.logit_cap)
            logits = ops.multiply(ops.tanh(ops.divide(logits, cap)), cap)
        result = ops.result(logits)
        result.output(0).get_tensor().set_names({"logits"})
        return openvino.Model([result], self._sinks, list(inputs.values()), decoder.model_type)

    def _layer(self, index: int, layer: Layer, hidden: Any) -> Any:
        ops, name = self._ops, f"model.layers.{index}."
        mixed = self._attention(index, layer, self._norm(f"{name}input_layernorm", hidden))
        if self._decoder.four_norms:
            mixed = self._norm(f"{name}post_attention_layernorm", mixed)
        hidden = ops.add(hidden, mixed)
        before = "pre_feedforward_layernorm" if self._decoder.four_norms else "post_attention_layernorm"
        wide = self._feed_forward(f"{name}mlp.", self._norm(f"{name}{before}", hidden))
        if self._decoder.four_norms:
            wide = self._norm(f"{name}post_feedforward_layernorm", wide)
        return ops.add(hidden, wide)

    def _feed_forward(self, name: str, hidden: Any) -> Any:
        bias = self._decoder.mlp_bias
        gate = self._activate(self._linear(f"{name}gate_proj", hidden, bias))
        return self._linear(
            f"{name}down_proj", self._ops.multiply(gate, self._linear(f"{name}up_proj", hidden, bias)), bias
        )

    def _activate(self, values: Any) -> Any:
        match self._decoder.activation:
            case "silu":
                return self._ops.swish(values)
            case "relu":
                return self._ops.relu(values)
        return self._ops.gelu(values, "tanh" if self._decoder.activation == "gelu_tanh" else "erf")

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, index: int, layer: Layer, hidden: Any) -> Any:
        ops, decoder = self._ops, self._decoder
        name = f"model.layers.{index}.self_attn."
        query, key, value = (
            self._heads(self._linear(f"{name}{part}_proj", hidden, part in decoder.attention_biases), count)
            for part, count in (("q", decoder.heads), ("k", decoder.key_heads), ("v", decoder.key_heads))
        )
        if decoder.head_norms:
            query, key = self._norm(f"{name}q_norm", query), self._norm(f"{name}k_norm", key)
        query, key = (self._rotate(layer, ops.transpose(part, self._whole([0, 2, 1, 3]))) for part in (query, key))
        value = ops.transpose(value, self._whole([0, 2, 1, 3]))
        key, value = (
            self._repeat(self._cached(f"past_key_values.{index}.{kind}present.{index}.{kind}", new))
            for kind, new in (("key", key), ("value", value))
        )
        scale = self._real(decoder.scale)
        mixed = ops.scaled_dot_product_attention(query, key, value, self._mask(layer.window), scale)
        mixed = ops.transpose(mixed, self._whole([0, 2, 1, 3]))
        mixed = ops.reshape(mixed, self._whole([0, 0, decoder.heads * decoder.head_size]), True)
        return self._linear(f"{name}o_proj", mixed, "o" in decoder.attention_biases)

    def _heads(self, hidden: Any, count: int) -> Any:
        """Split vectors into heads: [texts, tokens, heads, head size]."""
        return self._ops.reshape(hidden, self._whole([0, 0, count, self._decoder.head_size]), True)

    def _rotate(self, layer: Layer, heads: Any) -> Any:
        ops = self._ops
        cosine, sine = self._angles(layer)
        half, end = self._decoder.head_size // 2, (1 << 63) - 1
        last, step = self._whole([3]), self._whole([1])
        second = ops.slice(heads, self._whole([half]), self._whole([end]), step, last)
        first = ops.slice(heads, self._whole([0]), self._whole([half]), step, last)
        turned = ops.concat([ops.multiply(second, self._real([[[[-1.0]]]])), first], -1)
        return ops.add(ops.multiply(heads, cosine), ops.multiply(turned, sine))

    def _angles(self, layer: Layer) -> tuple[Any, Any]:
        """Return the cosine and sine of each position's angles: [texts, 1, tokens, head size]."""
        ops, key = self._ops, id(layer.rotary)
        if key not in self._rotations:
            frequencies, factor = layer.rotary.frequencies()
            table = ops.constant(frequencies.reshape(1, -1, 1))
            table = ops.broadcast(
                table, ops.concat([self._batch, self._whole([1, 1])], 0), broadcast_spec="BIDIRECTIONAL"
            )
            positions = ops.convert(ops.unsqueeze(self._inputs["position_ids"], self._whole(1)), "f32")
            angles = ops.transpose(ops.matmul(table, positions, False, False), self._whole([0, 2, 1]))
            angles = ops.concat([angles, angles], -1)
            both = [ops.unsqueeze(values, self._whole(1)) for values in (ops.cos(angles), ops.sin(angles))]
            if factor != 1:
                both = [ops.multiply(values, self._real(factor)) for values in both]
            self._rotations[key] = (both[0], both[1])
        return self._rotations[key]

    def _cached(self, name: str, new: Any) -> Any:
        """Append new keys or values to the earlier ones, which the graph keeps in a variable."""
        from openvino import PartialShape, Type
        from openvino.op.util import Variable, VariableInfo

        ops, decoder = self._ops, self._decoder
        info = VariableInfo()
        info.data_shape = PartialShape([-1, decoder.key_heads, -1, decoder.head_size])
        info.data_type = Type.f32
        info.variable_id = name
        variable = Variable(info)
        shape = ops.concat([self._batch, self._whole([decoder.key_heads, 0, decoder.head_size])], 0)
        empty = ops.broadcast(self._real(0.0), shape)
        before = ops.gather(ops.read_value(empty, variable), self._inputs["beam_idx"], self._whole(0))
        values = ops.concat([before, new], 2)
        self._sinks.append(ops.assign(values, variable))
        return values

    def _repeat(self, values: Any) -> Any:
        """Repeat the keys or values that several heads share, so that each head has its own."""
        ops, decoder = self._ops, self._decoder
        if decoder.heads == decoder.key_heads:
            return values
        groups = [decoder.key_heads, decoder.heads // decoder.key_heads, 1, 1]
        shape = ops.concat([self._batch, self._whole(groups)], 0)
        wide = ops.broadcast(ops.unsqueeze(values, self._whole(2)), shape, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, self._whole([0, decoder.heads, -1, decoder.head_size]), True)

    def _mask(self, window: int | None) -> Any:
        """Return the mask to add to products of queries and keys: [texts, 1, tokens, all tokens].

        Paged attention is causal and ignores the mask, except that it reads the window's size from this pattern of
        nodes (OpenVINO, state_management_pattern).
        """
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Any:
        ops, yes = self._ops, self._ops.constant(self._np.ones((1, 1, 1, 1), bool))
        attention_mask = self._inputs["attention_mask"]
        total = ops.gather(ops.shape_of(attention_mask), self._whole(1), self._whole(0))
        new = ops.gather(ops.shape_of(self._inputs["input_ids"]), self._whole(1), self._whole(0))
        step = self._whole(1)
        keys = ops.range(self._whole(0), total, step, "i64")
        keys = ops.unsqueeze(keys, self._whole([0, 1, 2]))
        queries = ops.range(ops.subtract(total, new), total, step, "i64")
        queries = ops.unsqueeze(queries, self._whole([0, 1, 3]))
        earlier = ops.less_equal(keys, queries)
        real = ops.unsqueeze(ops.not_equal(attention_mask, self._whole(0)), self._whole([1, 2]))
        if window is not None:
            near = ops.greater(keys, ops.add(queries, self._whole(-window)))
            allowed = ops.bitwise_and(ops.bitwise_and(earlier, near), real)
        else:
            allowed = ops.bitwise_and(earlier, real)
        allowed = ops.bitwise_and(ops.bitwise_and(yes, allowed), yes)
        sizes = [ops.unsqueeze(number, self._whole(0)) for number in (new, total)]
        allowed = ops.broadcast(allowed, ops.concat([self._batch, self._whole([1]), *sizes], 0))
        mask = ops.select(allowed, self._real(0.0), self._real(-math.inf))
        return ops.slice(mask, self._whole([0]), sizes[1], self._whole([1]), self._whole([3]))

    # -- parts -------------------------------------------------------------------------------------------------------

    def _linear(self, name: str, hidden: Any, bias: bool) -> Any:
        product = self._ops.matmul(hidden, self._matrix(f"{name}.weight"), False, True)
        return self._ops.add(product, self._real(self._vector(f"{name}.bias"))) if bias else product

    def _norm(self, name: str, hidden: Any) -> Any:
        ops, weight = self._ops, self._vector(f"{name}.weight")
        square = ops.power(hidden, self._real(2.0))
        mean = ops.reduce_mean(square, self._whole([-1]), True)
        root = ops.sqrt(ops.add(mean, self._real(self._decoder.epsilon)))
        normed = ops.multiply(hidden, ops.divide(self._real(1.0), root))
        return ops.multiply(normed, self._real(weight + 1 if self._decoder.is_gemma else weight))

    def _real(self, values: Any) -> Any:
        return self._ops.constant(self._np.array(values, dtype=self._np.float32))

    def _whole(self, values: Any) -> Any:
        return self._ops.constant(self._np.array(values, dtype=self._np.int64))
