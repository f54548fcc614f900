"""Replaces the rounded weights in OpenVINO GenAI's graph of a GGUF file by the file's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.errors import ConfigError


class _Matrix(NamedTuple):
    """Arrays that hold a matrix, with an item for each of its rows.

    `f32`: the weights. `i8`: whole numbers and scales. `u4`: whole numbers, zero points and scales. Groups have 32
    weights.
    """

    form: str
    arrays: tuple[Any, ...]


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
    replaced: list[tuple[Any, _Matrix]] = []
    for root, values, slack, period in _matrices(nodes):
        rows, columns = root.get_output_shape(0)
        row = values[0].reshape(columns)  # the first in either order of rows; only equal matrices share it
        fitting = [n for n in first if list(tensors[n].shape) == [columns, rows]]
        for name in sorted(fitting, key=lambda n: float(np.abs(first[n] - row).max()))[:2]:
            order = np.arange(rows)
            if number := heads.get(name.split(".")[-2]):
                order = order.reshape(number, -1, 2).swapaxes(1, 2).ravel()
            exact = dequantize(tensors[name].data, tensors[name].tensor_type)[order]
            moved = exact.reshape(values.shape) - values
            if np.all(np.abs(moved - period * np.rint(moved / period)) <= slack):
                break
        else:
            raise ConfigError(f"no matrix of {source} is what OpenVINO GenAI has as {root.get_friendly_name()}")
        del first[name]
        # Weights that were only rounded to f16 are closer than `i8` would be.
        if weights == "f32" or np.abs(moved).max() > np.abs(exact).max() * 2**-9:
            replaced.append((root, _matrix(tensors[name], exact, order, weights)))
    _replace_matrices(replaced)
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


def _matrix(tensor: Any, exact: Any, order: Any, weights: str) -> _Matrix:
    import numpy as np

    if weights == "f32":
        form, arrays = exact_blocks(tensor) or ("f32", (exact,))
        return _Matrix(form, arrays if form == "f32" else tuple(array[order] for array in arrays))
    groups = exact.reshape(exact.shape[0], -1, 32)
    scale = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float16)
    whole = np.rint(groups / np.where(scale == 0, 1, scale).astype(np.float32)).clip(-127, 127).astype(np.int8)
    return _Matrix("i8", (whole, scale))


def exact_blocks(tensor: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return the form and arrays of a file's matrix of 4 or 8 bits; None for other kinds.

    A weight of `u4` is `(whole - zero) * scale`. Zero points are not whole: f32 holds them as well as the minimums.
    """
    import numpy as np
    from gguf import GGMLQuantizationType as Kind
    from gguf.quants import Q4_K

    kind, data = tensor.tensor_type, tensor.data
    if kind is Kind.Q8_0:  # scale, 32 weights
        blocks = data.reshape(data.shape[0], -1, 34)
        scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
        return "i8", (np.ascontiguousarray(blocks[..., 2:]).view(np.int8), scale)
    if kind in (Kind.Q4_0, Kind.Q4_1):  # scale, minimum (Q4_1), 32 weights
        blocks = data.reshape(data.shape[0], -1, 18 if kind is Kind.Q4_0 else 20)
        numbers = np.ascontiguousarray(blocks[..., :-16]).view(np.float16).astype(np.float32)
        scale = numbers[..., :1]
        minimum = -8 * scale if kind is Kind.Q4_0 else numbers[..., 1:]
        packed = blocks[..., -16:]
    elif kind is Kind.Q4_K:  # two factors, scales and minimums of 6 bits, 8 groups of 32 weights
        blocks = data.reshape(-1, 144)
        scale, minimum = Q4_K.get_scale_min(blocks[:, 4:16])
        factors = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
        scale = (factors[:, :1] * scale).reshape(data.shape[0], -1, 1)
        minimum = -(factors[:, 1:] * minimum).reshape(data.shape[0], -1, 1)
        packed = blocks[:, 16:].reshape(data.shape[0], -1, 32)  # of two groups in turn
    else:
        return None
    whole = np.concatenate([packed & 15, packed >> 4], -1).reshape(data.shape[0], -1, 32)
    flat = scale == 0  # all weights of the group are its minimum
    scale = np.where(flat, np.float32(1), scale)
    return "u4", (np.where(flat, np.uint8(0), whole), -minimum / scale, scale)


def _replace_matrices(replaced: Iterable[tuple[Any, _Matrix]]) -> None:
    """Put matrices in the place of others. Those multiplied by the same input become one, as queries, keys and values.

    Each multiplication costs some microseconds beside its work.
    """
    import numpy as np
    from openvino import opset13

    joined: dict[tuple[str, int, str], list[tuple[Any, _Matrix]]] = {}
    for root, matrix in replaced:
        users = root.output(0).get_target_inputs()
        product = next(iter(users)).get_node() if len(users) == 1 else root
        if product.get_type_name() == "MatMul" and product.get_attributes()["transpose_b"]:
            other = product.input_value(0)
            key = (other.get_node().get_name(), other.get_index(), matrix.form)
            joined.setdefault(key, []).append((product, matrix))
        else:
            root.output(0).replace(_nodes(matrix).output(0))
    for (_, _, form), parts in joined.items():
        arrays = (np.concatenate(arrays) for arrays in zip(*(matrix.arrays for _, matrix in parts), strict=True))
        product = opset13.matmul(parts[0][0].input_value(0), _nodes(_Matrix(form, tuple(arrays))), False, True)
        if len(parts) > 1:
            rows = np.array([matrix.arrays[0].shape[0] for _, matrix in parts])
            product = opset13.variadic_split(product, np.int64(-1), rows)
        for port, (old, _) in enumerate(parts):
            old.output(0).replace(product.output(port))


def _nodes(matrix: _Matrix) -> Any:
    """Make a matrix's nodes, in patterns that the CPU plugin multiplies as they are."""
    import numpy as np
    from openvino import Tensor, Type, op, opset13

    if matrix.form == "f32":
        return opset13.constant(np.ascontiguousarray(matrix.arrays[0]))
    whole, *_, scale = matrix.arrays
    shape = opset13.constant(np.array([whole.shape[0], whole.shape[1] * whole.shape[2]]))
    if matrix.form == "i8":
        values = opset13.convert(opset13.constant(whole), scale.dtype)
        return opset13.convert(opset13.reshape(opset13.multiply(values, opset13.constant(scale)), shape, False), "f32")
    tensor = Tensor(Type.u4, list(whole.shape))
    tensor.data.view(np.uint8).reshape(-1)[:] = (whole[..., ::2] | whole[..., 1::2] << 4).ravel()
    values = opset13.convert(op.Constant(tensor, shared_memory=False), "f32")
    product = opset13.multiply(opset13.subtract(values, opset13.constant(matrix.arrays[1])), opset13.constant(scale))
    return opset13.reshape(product, shape, False)


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
