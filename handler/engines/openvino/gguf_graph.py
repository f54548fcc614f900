"""Replaces the rounded weights in OpenVINO GenAI's graph of a GGUF file by the file's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from handler.core.errors import ConfigError


def replace_weights(model: Any, source: Path, weights: str) -> None:
    """Replace each of the graph's matrices by the one of the file that fits."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader, nodes = GGUFReader(source), model.get_ordered_ops()
    heads = _interleaved(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    vectors = {n: dequantize(t.data, t.tensor_type) for n, t in tensors.items() if len(t.shape) == 1}
    first = {n: dequantize(t.data[:1], t.tensor_type)[0] for n, t in tensors.items() if len(t.shape) == 2}
    odd = _replace_vectors(nodes, {**vectors, "rotary frequencies": _rotary(reader)})
    odd += [n for n in vectors if n.endswith(".bias") and n.split(".")[-2] in heads]
    for root, values, slack, period in _matrices(nodes):
        rows, columns = root.get_output_shape(0)
        row = values[0].reshape(columns)  # the first in either order of rows; only equal matrices share it
        fitting = [n for n in first if list(tensors[n].shape) == [columns, rows]]
        for name in sorted(fitting, key=lambda n: float(np.abs(first[n] - row).max()))[:2]:
            exact = dequantize(tensors[name].data, tensors[name].tensor_type)
            if number := heads.get(name.split(".")[-2]):
                exact = exact.reshape(number, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
            moved = exact.reshape(values.shape) - values
            if np.all(np.abs(moved - period * np.rint(moved / period)) <= slack):
                break
        else:
            raise ConfigError(f"no matrix of {source} is what OpenVINO GenAI has as {root.get_friendly_name()}")
        del first[name]
        # Weights that were only rounded to f16 are closer than `i8` would be.
        if weights == "f32" or np.abs(moved).max() > np.abs(exact).max() * 2**-9:
            root.output(0).replace(_constant(exact, weights).output(0))
    if odd or first:
        raise ConfigError(f"OpenVINO GenAI does not use all weights of {source}: {', '.join([*odd, *first])}")


def _replace_vectors(nodes: Iterable[Any], vectors: dict[str, Any]) -> list[str]:
    """Replace vectors that are equal up to f16, in which a F16 file's graph is saved; return the unused names."""
    import numpy as np
    from openvino import opset13

    unused = {name for name, vector in vectors.items() if not (vector == 1).all()}
    for node in nodes:
        if node.get_type_name() == "Constant" and _type(node) in ("f16", "f32"):
            data = node.data.ravel()
            same = [n for n, v in vectors.items() if v.size == data.size and np.allclose(v, data, 1e-3, 1e-7)]
            if same:
                exact = vectors[same[0]].reshape(node.data.shape)
                node.output(0).replace(opset13.constant(exact, np.float32).output(0))
                unused -= set(same)
    return sorted(unused)


def _matrices(nodes: Iterable[Any]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield the graph's matrices: node, values, the largest difference by rounding (unlimited for a scale of 0), and
    the period of differences by a zero point that overflowed its bits.
    """
    import numpy as np

    for root in nodes:
        shape = root.get_output_partial_shape(0) if root.get_type_name() == "Convert" else None
        if shape is None or not shape.is_static or len(shape) != 2 or _type(root) != "f32":
            continue
        node = _input(root)
        node = _input(node) if node.get_type_name() == "Reshape" else node
        if node.get_type_name() == "Constant":  # F16, and Q6_K, which GenAI's reader turns into f16
            values = node.data.astype(np.float32)
            yield root, values, np.abs(values) * 2**-10 + 2**-24, 1e30
        else:  # Multiply(Subtract(Convert(whole), Convert(zero)), scale)
            whole, zero = (_input(_input(_input(node), port)) for port in (0, 1))
            scale = _input(node, 1).data.astype(np.float32)
            # Half a step for the zero point, and the rounding of scales and minimums (Q4_K).
            slack = np.where(scale == 0, np.inf, np.abs(scale) * 0.52 + 1e-6)
            period = np.where(scale == 0, 1, scale * {"u4": 16, "u8": 256}[_type(whole)])
            yield root, (_whole(whole) - _whole(zero)) * scale, slack, period


def _input(node: Any, port: int = 0) -> Any:
    return node.input_value(port).get_node()


def _type(node: Any) -> str:
    return str(node.get_output_element_type(0).get_type_name()) if node.get_output_size() else ""


def _whole(constant: Any) -> Any:
    """Return the integers of a constant; of two 4-bit ones in a byte the lower half comes first."""
    import numpy as np

    data = constant.data
    if _type(constant) == "u4":
        packed = np.frombuffer(data.tobytes(), np.uint8)
        shape = list(constant.get_output_shape(0))
        data = np.stack([packed & 15, packed >> 4], -1).ravel()[: np.prod(shape)].reshape(shape)
    return data.astype(np.float32)


def _constant(exact: Any, weights: str) -> Any:
    """Make a matrix's nodes; `i8` has 32 weights a scale, in the pattern that the CPU plugin multiplies directly."""
    import numpy as np
    from openvino import opset13

    if weights == "f32":
        return opset13.constant(np.ascontiguousarray(exact))
    groups = exact.reshape(exact.shape[0], -1, 32)
    scale = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float16)
    whole = np.rint(groups / np.where(scale == 0, 1, scale).astype(np.float32)).clip(-127, 127).astype(np.int8)
    product = opset13.multiply(opset13.convert(opset13.constant(whole), "f16"), opset13.constant(scale))
    return opset13.convert(opset13.reshape(product, opset13.constant(np.array(exact.shape)), False), "f32")


def _interleaved(reader: Any) -> dict[str, int]:
    """Return the matrices whose rows llama.cpp pairs in another way than the graph, with their numbers of heads."""
    if reader.get_field("general.architecture").contents() != "llama":
        return {}
    heads = reader.get_field("llama.attention.head_count")
    shared = reader.get_field("llama.attention.head_count_kv") or heads
    return {"attn_q": heads.contents(), "attn_k": shared.contents()}


def _rotary(reader: Any) -> Any:
    """Compute the rotary frequencies as GenAI's reader does."""
    import numpy as np

    prefix = reader.get_field("general.architecture").contents()
    number = {key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if prefix in key}
    size = number.get(".attention.key_length", number[".embedding_length"] // number[".attention.head_count"])
    return 1 / np.float32(number.get(".rope.freq_base", 1e4)) ** (np.arange(0, size, 2, dtype=np.float32) / size)
