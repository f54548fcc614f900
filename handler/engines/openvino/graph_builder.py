"""The base class of graph builders, with the nodes that several architectures need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Load = Callable[[str], Any]
"""Type of a function that returns a tensor by name: a matrix as a node, other tensors as float32 numpy arrays."""


class GraphBuilder:
    """Base class of builders. OpenVINO converts integers, and lists of integers, to int64 constants.

    Args:
        heads: number of attention heads.
        head_size: number of dimensions of a head.
        matrix: function that returns the node for a matrix.
        array: function that returns a one-dimensional tensor as a numpy array.
    """

    def __init__(self, heads: int, head_size: int, matrix: Load, array: Load) -> None:
        import numpy
        from openvino import opset13

        self._np: Any = numpy
        self._ops: Any = opset13
        self._num_heads, self._head_size = heads, head_size
        self._matrix, self._array = matrix, array

    def _parameters(self, names: Iterable[str]) -> dict[str, Any]:
        """Create inputs of the graph, each int64 [texts, tokens], and return them by name."""
        return {name: self._parameter(name, [-1, -1], self._np.int64) for name in names}

    def _parameter(self, name: str, shape: list[int], kind: Any) -> Any:
        node = self._ops.parameter(shape, kind)
        node.set_friendly_name(name)  # GenAI finds inputs by this name
        node.output(0).get_tensor().set_names({name})
        return node

    def _result(self, name: str, values: Any) -> Any:
        result = self._ops.result(values)
        result.output(0).get_tensor().set_names({name})
        return result

    def _linear(self, name: str, hidden: Any, bias: bool = True) -> Any:
        product = self._ops.matmul(hidden, self._matrix(f"{name}.weight"), False, True)
        return product + self._real(self._array(f"{name}.bias")) if bias else product

    def _split(self, hidden: Any, count: int) -> Any:
        """Split hidden states into heads: [texts, tokens, heads, head size]."""
        return self._ops.reshape(hidden, [0, 0, count, self._head_size], True)

    def _swap(self, values: Any) -> Any:
        """Swap the dimensions of heads and tokens."""
        return self._ops.transpose(values, [0, 2, 1, 3])

    def _attend(self, query: Any, key: Any, value: Any, *mask_and_scale: Any) -> Any:
        """Compute the attention of heads [texts, heads, tokens, head size], and concatenate the heads' outputs."""
        mixed = self._swap(self._ops.scaled_dot_product_attention(query, key, value, *mask_and_scale))
        return self._ops.reshape(mixed, [0, 0, self._num_heads * self._head_size], True)

    def _real(self, values: Any) -> Any:
        return self._ops.constant(self._np.asarray(values, dtype=self._np.float32))
