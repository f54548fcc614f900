"""Builds an OpenVINO graph of a language model, without torch.

The graph computes the same values as transformers' model. OpenVINO GenAI recognizes the graph's attention and replaces
it with paged attention. The CPU plugin recognizes and fuses norms and rotary positions (OpenVINO:
sdpa_to_paged_attention, rms_fusion, fuse_rotary_positional_embeddings).
"""

from __future__ import annotations

import math
from typing import Any

from handler.engines.openvino.decoder.config import DecoderConfig, Layer, Rotary
from handler.engines.openvino.graph_builder import GraphBuilder, Load

_END = (1 << 63) - 1  # the end of a slice up to the last element


def decoder_graph(decoder: DecoderConfig, matrix: Load, array: Load) -> Any:
    """Build the graph of a language model. Its state is a cache of keys and values.

    Its output is `logits` [texts, tokens, vocabulary]. Its inputs are the same as those of a model exported by
    optimum-intel: input_ids, attention_mask and position_ids [texts, tokens], and beam_idx [texts].

    Args:
        decoder: the architecture.
        matrix: function that returns the node for a matrix.
        array: function that returns a one-dimensional tensor as a numpy array.
    """
    return _Builder(decoder, matrix, array).build()


class _Builder(GraphBuilder):
    def __init__(self, decoder: DecoderConfig, matrix: Load, array: Load) -> None:
        super().__init__(decoder.heads, decoder.head_size, matrix, array)
        self._decoder = decoder
        self._inputs = self._parameters(["input_ids", "attention_mask", "position_ids"])
        self._inputs["beam_idx"] = self._parameter("beam_idx", [-1], self._np.int32)
        self._batch = self._size("input_ids", [0])
        self._sinks: list[Any] = []
        self._masks = {window: self._mask(window) for window in {layer.window for layer in decoder.layers}}
        rotaries = {id(layer.rotary): layer.rotary for layer in decoder.layers}
        self._rotations = {key: self._angles(rotary) for key, rotary in rotaries.items()}

    def build(self) -> Any:
        import openvino

        decoder = self._decoder
        embeddings = self._matrix("model.embed_tokens.weight")
        hidden = self._ops.gather(embeddings, self._ops.convert(self._inputs["input_ids"], "i32"), 0)
        if decoder.is_gemma:
            hidden *= self._real(math.sqrt(decoder.size))
        for index, layer in enumerate(decoder.layers):
            hidden = self._layer(index, layer, hidden)
        hidden = self._norm("model.norm", hidden)
        head = embeddings if decoder.tied else self._matrix("lm_head.weight")
        result = self._result("logits", self._capped(self._ops.matmul(hidden, head, False, True)))
        return openvino.Model([result], self._sinks, list(self._inputs.values()), decoder.model_type)

    def _capped(self, logits: Any) -> Any:
        if self._decoder.logit_cap is None:
            return logits
        cap = self._real(self._decoder.logit_cap)
        return self._ops.tanh(logits / cap) * cap

    def _layer(self, index: int, layer: Layer, hidden: Any) -> Any:
        name = f"model.layers.{index}."
        mixed = self._attention(index, layer, self._norm(f"{name}input_layernorm", hidden))
        if self._decoder.four_norms:
            mixed = self._norm(f"{name}post_attention_layernorm", mixed)
        hidden += mixed
        before = "pre_feedforward_layernorm" if self._decoder.four_norms else "post_attention_layernorm"
        wide = self._feed_forward(f"{name}mlp.", self._norm(f"{name}{before}", hidden))
        if self._decoder.four_norms:
            wide = self._norm(f"{name}post_feedforward_layernorm", wide)
        return hidden + wide

    def _feed_forward(self, name: str, hidden: Any) -> Any:
        bias = self._decoder.mlp_bias
        gate = self._activate(self._linear(f"{name}gate_proj", hidden, bias))
        return self._linear(f"{name}down_proj", gate * self._linear(f"{name}up_proj", hidden, bias), bias)

    def _activate(self, values: Any) -> Any:
        match self._decoder.activation:
            case "silu":
                return self._ops.swish(values)
            case "relu":
                return self._ops.relu(values)
        return self._ops.gelu(values, "tanh" if self._decoder.activation == "gelu_tanh" else "erf")

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, index: int, layer: Layer, hidden: Any) -> Any:
        name, keys = f"model.layers.{index}.self_attn.", self._decoder.key_heads
        query, key, value = (
            self._projected(name, part, hidden, count)
            for part, count in (("q", self._num_heads), ("k", keys), ("v", keys))
        )
        query, key = self._rotate(layer, query), self._rotate(layer, key)
        key = self._repeat(self._cached(index, "key", key))
        value = self._repeat(self._cached(index, "value", value))
        mixed = self._attend(query, key, value, self._masks[layer.window], self._real(self._decoder.scale))
        return self._linear(f"{name}o_proj", mixed, "o" in self._decoder.attention_biases)

    def _projected(self, name: str, part: str, hidden: Any, count: int) -> Any:
        """Compute queries (`q`), keys (`k`) or values (`v`): [texts, heads, tokens, head size]."""
        bias = part in self._decoder.attention_biases
        heads = self._split(self._linear(f"{name}{part}_proj", hidden, bias), count)
        if self._decoder.head_norms and part != "v":
            heads = self._norm(f"{name}{part}_norm", heads)
        return self._swap(heads)

    def _rotate(self, layer: Layer, heads: Any) -> Any:
        cosine, sine = self._rotations[id(layer.rotary)]
        half = self._ops.constant([self._head_size // 2])
        first, second = self._slice(heads, [0], half), self._slice(heads, half, [_END])
        turned = self._ops.concat([second * self._real([[[[-1.0]]]]), first], -1)
        return heads * cosine + turned * sine

    def _angles(self, rotary: Rotary) -> tuple[Any, Any]:
        """Return the cosine and sine of each position's angles: [texts, 1, tokens, head size]."""
        frequencies, factor = rotary.frequencies()
        angles = self._multiplied_positions(frequencies)
        return self._wave(self._ops.cos(angles), factor), self._wave(self._ops.sin(angles), factor)

    def _multiplied_positions(self, frequencies: Any) -> Any:
        """Return the product of each position with all frequencies, twice: [texts, tokens, head size]."""
        ops = self._ops
        shape = ops.concat([self._batch, [1, 1]], 0)
        table = ops.broadcast(ops.constant(frequencies.reshape(1, -1, 1)), shape, broadcast_spec="BIDIRECTIONAL")
        positions = ops.convert(ops.unsqueeze(self._inputs["position_ids"], 1), "f32")
        angles = ops.transpose(ops.matmul(table, positions, False, False), [0, 2, 1])
        return ops.concat([angles, angles], -1)

    def _wave(self, values: Any, factor: float) -> Any:
        values = self._ops.unsqueeze(values, 1)
        return values if factor == 1 else values * self._real(factor)

    def _cached(self, index: int, kind: str, new: Any) -> Any:
        """Append new keys or values to the earlier keys or values, which the graph stores in a variable."""
        from openvino import PartialShape, Type
        from openvino.op.util import Variable, VariableInfo

        ops, decoder = self._ops, self._decoder
        info = VariableInfo()
        info.data_shape = PartialShape([-1, decoder.key_heads, -1, decoder.head_size])
        info.data_type = Type.f32
        info.variable_id = f"past_key_values.{index}.{kind}present.{index}.{kind}"
        variable = Variable(info)
        shape = ops.concat([self._batch, [decoder.key_heads, 0, decoder.head_size]], 0)
        empty = ops.broadcast(self._real(0.0), shape)
        before = ops.gather(ops.read_value(empty, variable), self._inputs["beam_idx"], 0)
        values = ops.concat([before, new], 2)
        self._sinks.append(ops.assign(values, variable))
        return values

    def _repeat(self, values: Any) -> Any:
        """Repeat the keys or values that several heads share, so that each head has its own copy."""
        ops, decoder = self._ops, self._decoder
        if decoder.heads == decoder.key_heads:
            return values
        groups = [decoder.key_heads, decoder.heads // decoder.key_heads, 1, 1]
        shape = ops.concat([self._batch, groups], 0)
        wide = ops.broadcast(ops.unsqueeze(values, 2), shape, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, [0, decoder.heads, -1, decoder.head_size], True)

    def _mask(self, window: int | None) -> Any:
        """Return the mask to add to products of queries and keys: [texts, 1, tokens, all tokens].

        Paged attention is causal and ignores the mask, except that it reads the window's size from this pattern of
        nodes (OpenVINO, state_management_pattern).
        """
        ops, total, new = self._ops, self._size("attention_mask", 1), self._size("input_ids", 1)
        keys = self._range(0, total, [0, 1, 2])
        queries = self._range(total - new, total, [0, 1, 3])
        allowed = ops.less_equal(keys, queries)
        if window is not None:
            allowed = ops.bitwise_and(allowed, ops.greater(keys, queries + -window))
        is_token = ops.not_equal(self._inputs["attention_mask"], 0)
        allowed = ops.bitwise_and(allowed, ops.unsqueeze(is_token, [1, 2]))
        yes = ops.constant(self._np.ones((1, 1, 1, 1), bool))
        allowed = ops.bitwise_and(ops.bitwise_and(yes, allowed), yes)
        new, total = ops.unsqueeze(new, 0), ops.unsqueeze(total, 0)
        allowed = ops.broadcast(allowed, ops.concat([self._batch, [1], new, total], 0))
        return self._slice(ops.select(allowed, self._real(0.0), self._real(-math.inf)), [0], total)

    def _range(self, start: Any, end: Any, axes: list[int]) -> Any:
        """Return consecutive integers as a tensor with four dimensions, of which `axes` have size 1."""
        return self._ops.unsqueeze(self._ops.range(start, end, 1, "i64"), axes)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _size(self, name: str, axis: Any) -> Any:
        """Return the size of an input along an axis."""
        return self._ops.gather(self._ops.shape_of(self._inputs[name]), axis, 0)

    def _slice(self, values: Any, start: Any, end: Any) -> Any:
        """Return a part of a tensor along the last of its four dimensions."""
        return self._ops.slice(values, start, end, [1], [3])

    def _norm(self, name: str, hidden: Any) -> Any:
        ops, weight = self._ops, self._array(f"{name}.weight")
        square = ops.power(hidden, self._real(2.0))
        mean = ops.reduce_mean(square, [-1], True)
        root = ops.sqrt(mean + self._real(self._decoder.epsilon))
        normed = hidden * (self._real(1.0) / root)
        return normed * self._real(weight + 1 if self._decoder.is_gemma else weight)
