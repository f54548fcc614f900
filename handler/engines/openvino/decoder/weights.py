"""A checkpoint's matrices as nodes of OpenVINO's graph: as they are stored, or with 8 or 4 bits a weight.

Nothing is read at once: nodes refer to the mapped files, and quantized matrices to files beside the graph. So memory
holds a part of one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.engines.huggingface.tensors import Tensors, as_float32

_CHUNK = 1 << 24  # weights that are quantized at a time
_CUT = 0.9  # part of a group's range; further ones bring little more (measured)
_LEAST_SCALE = 2.0**-14  # f16's smallest number of full precision


class Quantization(NamedTuple):
    """Bits of a weight, and weights of a row that share a scale and a zero point; 0 for whole rows."""

    bits: int
    group: int


class Matrices:
    """Makes the nodes of matrices, and holds the memory that they refer to: it must live as long as the graph.

    Args:
        scratch: a directory for quantized matrices.
    """

    def __init__(self, tensors: Tensors, scratch: Path) -> None:
        self._tensors, self._scratch = tensors, scratch
        self._held: list[Any] = []

    def stored(self, name: str) -> Any:
        """Make the nodes of a matrix as it is stored."""
        import numpy as np
        from openvino import Type, opset13

        kind, values = self._tensors.place(name).kind, self._tensors.raw(name)
        types = {"BF16": Type.bf16, "F16": Type.f16}
        if kind in types:
            return opset13.convert(self._constant(values, values.shape, types[kind]), np.float32)
        return self._constant(values.astype(np.float32, copy=False), values.shape, Type.f32)

    def quantized(self, name: str, how: Quantization) -> Any:
        """Make the nodes of a matrix of weights `(whole - zero) * scale`, in the form that the CPU plugin keeps."""
        import numpy as np
        from openvino import Type, opset13

        rows, columns = self._tensors.place(name).shape
        size = how.group or columns
        count = columns // size
        whole = np.memmap(self._scratch / name, np.uint8, "w+", shape=(rows, count, size * how.bits // 8))
        zero, scale = np.empty((rows, count, 1), np.uint8), np.empty((rows, count, 1), np.float16)
        source, kind = self._tensors.raw(name), self._tensors.place(name).kind
        step = max(_CHUNK // columns, 1)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            groups = as_float32(source[part], kind).reshape(-1, count, size)
            numbers, zero[part], scale[part] = quantize(groups, how.bits)
            whole[part] = numbers if how.bits == 8 else _packed(numbers)
        bits = Type.u8 if how.bits == 8 else Type.u4
        zeros = zero if how.bits == 8 else _packed(np.pad(zero.ravel(), (0, zero.size % 2)))
        values = opset13.convert(self._constant(whole, (rows, count, size), bits), np.float16)
        shift = opset13.convert(self._constant(zeros, zero.shape, bits), np.float16)
        product = opset13.multiply(opset13.subtract(values, shift), self._constant(scale, scale.shape, Type.f16))
        return opset13.convert(opset13.reshape(product, np.array([rows, columns]), False), np.float32)

    def _constant(self, values: Any, shape: Sequence[int], kind: Any) -> Any:
        from openvino import Tensor, op

        self._held.append(values)
        return op.Constant(Tensor(values, list(shape), kind), shared_memory=True)


def _packed(numbers: Any) -> Any:
    """Put two numbers of 4 bits into a byte, the lower half first."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def quantize(groups: Any, bits: int) -> tuple[Any, Any, Any]:
    """Return whole numbers, zero points and scales (float16) of groups of weights, which lie in the last dimension.

    With 4 bits a group's range is cut by a tenth where the sum of the squared errors is then less, as it often is.
    """
    import numpy as np

    whole = _quantize(groups, bits, 1)
    if bits == 8:
        return whole
    cut = _quantize(groups, bits, _CUT)
    nearer = _error(groups, cut) < _error(groups, whole)
    return tuple(np.where(nearer, one, other) for one, other in zip(cut, whole, strict=True))


def _quantize(groups: Any, bits: int, part: float) -> tuple[Any, Any, Any]:
    """Quantize with a part of each group's range, which always has 0 in it: the zero point is one of the numbers."""
    import numpy as np

    most = (1 << bits) - 1
    low = np.minimum(groups.min(-1, keepdims=True), 0) * part
    high = np.maximum(groups.max(-1, keepdims=True), 0) * part
    scale = np.maximum((high - low) / most, _LEAST_SCALE).astype(np.float16)
    zero = np.rint(-low / scale).clip(0, most)
    numbers = np.rint(groups / scale.astype(np.float32) + zero).clip(0, most)
    return numbers.astype(np.uint8), zero.astype(np.uint8), scale


def _error(groups: Any, quantized: tuple[Any, Any, Any]) -> Any:
    import numpy as np

    numbers, zero, scale = quantized
    restored = (numbers.astype(np.float32) - zero) * scale.astype(np.float32)
    return np.square(restored - groups).sum(-1, keepdims=True)
