"""Converts GGUF files to OpenVINO directories, with the files' exact weights or with weights rounded to 8 bits.

OpenVINO GenAI rounds the weights of a GGUF file. A weight in a Q4_1 or Q4_K block is `scale * q + minimum`. GenAI
stores `scale * (q - zero)`, where `zero` is a 4-bit integer. This raises SmolLM2's perplexity by a quarter. We
therefore save GenAI's graph and replace its matrices with those of the file. Matrices are matched by value: a sample of
their rows may differ only by this rounding. This way, a file or graph with an unknown layout is refused rather than
served with wrong weights.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from handler.config import gguf
from handler.core.child_processes import tell
from handler.core.errors import ConfigError
from handler.engines.downloads import UNKNOWN_LAYOUT, UnknownLayout, fingerprint, make_once, run_converter
from handler.engines.llamacpp import readable
from handler.engines.openvino.ir_files import PRECISION, check_directory, parts

log = logging.getLogger(__name__)

Weights = Literal["exact", "blocks", "rows"]
"""The format of a model's weights; see `replace_weights`."""
FULL = frozenset({"F32", "F16", "BF16"})
"""Kinds of weights that are not quantized."""
BLOCK_FORMATS = {"Q4_0": "u4", "Q4_1": "u4", "Q4_K": "u4", "Q8_0": "i8"}
"""Kinds of weights with blocks that `exact_blocks` leaves unchanged, with their formats."""
_CHECKED = 1024  # maximum number of rows that are compared to find a matrix in the file
_CHUNK = 4096  # rows of a matrix that are compared or quantized at a time
_READ, _MATCHED = 0.5, 0.4  # fractions of the work: saving GenAI's graph, and matching its matrices
_ROTARY, _DIVISORS = "rotary frequencies", "rope_freqs.weight"


_Rows = tuple[Any, Any, Any]
"""Values of some rows of a matrix, with their largest errors; see `_matrices`."""


class _Matrix(NamedTuple):
    """A matrix in one of three formats. The first dimension of each array corresponds to the matrix's rows.

    The format `f32` has one array, the weights. `i8` has integers and scales. `u4` has integers, zero points and
    scales. A scale applies to 32 adjacent weights or to a whole row.
    """

    form: str
    arrays: tuple[Any, ...]


class _Source(NamedTuple):
    """A tensor from the file, the node that it replaces in the graph, and the order of its rows in that node."""

    root: Any
    tensor: Any
    order: Any


def replace_weights(model: Any, path: Path, weights: Weights) -> None:
    """Replace each of the graph's matrices with the matching matrix of the file.

    Args:
        model: the file's graph from OpenVINO GenAI.
        path: the GGUF file.
        weights: the format of the new weights. `exact` leaves blocks of the kinds in `BLOCK_FORMATS` unchanged, and
            converts other kinds to f32. `blocks` leaves the same blocks unchanged, and converts other kinds to 8 bits
            in groups of 32. `rows` converts all weights to 8 bits with one scale per row. `blocks` and `rows` do not
            replace unquantized weights.

    Raises:
        ConfigError: the layout of the file or the graph is unknown.
        FloatingPointError: a weight is infinite or not a number.
    """
    reader, nodes = make_reader(path), model.get_ordered_ops()
    unused = [*_replace_arrays(reader, nodes), *_unreadable(reader)]
    matcher, sources = _Matcher(reader), list[_Source]()
    for root, values_of in _matrices(nodes):
        source = matcher.match(root, values_of)
        if source is None:
            raise ConfigError(f"no matrix of {path} matches {root.get_friendly_name()} in OpenVINO GenAI's graph")
        tell(_READ + _MATCHED * matcher.done)
        if weights == "exact" or source.tensor.tensor_type.name not in FULL:
            sources.append(source)
        else:
            _check_finite(source.tensor.name, source.tensor.data)
    if unused := [*unused, *matcher.unmatched]:
        raise ConfigError(f"OpenVINO GenAI does not use all weights of {path}: {', '.join(unused)}")
    _replace_matrices(sources, weights)


def make_reader(path: Path) -> Any:
    """Open a file with gguf's reader, but skip the items of long lists: the vocabulary takes it several seconds."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):  # type: ignore[misc]  # gguf has no types
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type == GGUFValueType.ARRAY:
                item, count = struct.unpack_from("<IQ", self.data, orig_offs)
                begin = orig_offs + struct.calcsize("<IQ")
                if count > _MAX_ITEMS and item == GGUFValueType.STRING:
                    return _end_of_strings(self.data, begin, count) - orig_offs, [], [], [GGUFValueType.ARRAY]
                if count > _MAX_ITEMS and item in self.gguf_scalar_to_np:
                    size = count * np.dtype(self.gguf_scalar_to_np[item]).itemsize
                    return begin + size - orig_offs, [], [], [GGUFValueType.ARRAY]
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]

    return Reader(path)


def _end_of_strings(data: Any, begin: int, count: int) -> int:
    """Return the offset behind a list of strings. Each has its length in eight bytes before it."""
    length = struct.Struct("<Q")
    for _ in range(count):
        begin += length.size + length.unpack_from(data, begin)[0]
    return begin


class _Matcher:
    """Finds the matching matrix in the file for each matrix of the graph.

    Attributes:
        unmatched: the first row of each matrix that has not been matched yet, by matrix name.
    """

    def __init__(self, reader: Any) -> None:
        self._tensors = {tensor.name: tensor for tensor in reader.tensors if len(tensor.shape) == 2}
        self.unmatched = {name: _values(tensor, slice(1)) for name, tensor in self._tensors.items()}
        self._heads = _interleaved(reader)

    @property
    def done(self) -> float:
        """The fraction of the weights that have been matched."""
        left = sum(int(self._tensors[name].n_elements) for name in self.unmatched)
        return 1 - left / sum(int(tensor.n_elements) for tensor in self._tensors.values())

    def match(self, root: Any, values_of: Callable[[Any], _Rows]) -> _Source | None:
        """Return the matrix of the file that matches a matrix of the graph, or None if there is none.

        Args:
            root: the node of the graph's matrix.
            values_of: function that computes some rows of the graph's matrix; see `_matrices`.
        """
        import numpy as np

        rows, columns = root.get_output_shape(0)
        begin = values_of(np.zeros(1, np.int64))  # the first row, which is the same in either order
        fitting = [name for name in self.unmatched if list(self._tensors[name].shape) == [columns, rows]]
        near = [name for name in fitting if _apart(self.unmatched[name], *begin) < np.inf]
        orders = {name: _order(rows, self._heads.get(name.split(".")[-2])) for name in near}
        name = self._nearest(orders, values_of, rows)
        if name is None:
            for name in fitting:
                _check_finite(name, _values(self._tensors[name]))
            return None
        del self.unmatched[name]
        return _Source(root, self._tensors[name], orders[name])

    def _nearest(self, orders: dict[str, Any], values_of: Callable[[Any], _Rows], rows: int) -> str | None:
        """Return the name of the matrix in the file that is closest to the graph's matrix, or None if none matches.

        Only some rows are compared, or all rows if several matrices match.
        """
        import numpy as np

        some = np.unique(np.linspace(0, rows - 1, min(rows, _CHECKED)).astype(int))
        apart = self._compare(orders, values_of, some)
        if len(apart) > 1:  # for example embeddings and an output matrix that differ in a few rows
            apart = self._compare({name: orders[name] for name in apart}, values_of, np.arange(rows))
        return min(apart, key=lambda name: apart[name], default=None)

    def _compare(self, orders: dict[str, Any], values_of: Callable[[Any], _Rows], rows: Any) -> dict[str, float]:
        """Return the names and distances of the file's matrices that match the graph's matrix in all of `rows`."""
        apart = dict.fromkeys(orders, 0.0)
        for begin in range(0, len(rows), _CHUNK):
            some = rows[begin : begin + _CHUNK]
            graph = values_of(some)
            for name, order in orders.items():
                apart[name] += _apart(_values(self._tensors[name], order[some]), *graph)
        return {name: distance for name, distance in apart.items() if distance < float("inf")}


def _values(tensor: Any, rows: Any = slice(None)) -> Any:
    """Return rows of a tensor as f32."""
    from gguf.quants import dequantize

    return dequantize(tensor.data[rows], tensor.tensor_type)


def _check_finite(name: str, *arrays: Any) -> None:
    """Raise FloatingPointError if a tensor contains infinity or NaN, because the model would generate noise."""
    import numpy as np

    if not all(np.isfinite(array).all() for array in arrays):
        raise FloatingPointError(f"{name} has weights that are infinite or not numbers")


def _order(rows: int, heads: int | None) -> Any:
    """Return the indices of the file's rows, in the order in which the graph contains these rows."""
    import numpy as np

    order = np.arange(rows)
    return order.reshape(heads, -1, 2).swapaxes(1, 2).ravel() if heads else order


def _apart(exact: Any, values: Any, slack: Any, period: Any) -> float:
    """Return the sum of the absolute differences, or infinity if rounding cannot explain all of them."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        moved = exact - values
        moved = np.abs(moved - period * np.rint(moved / period))
    return float(moved.sum()) if np.all(moved <= slack) else float("inf")


def _replace_arrays(reader: Any, nodes: Iterable[Any]) -> list[str]:
    """Replace the graph's one-dimensional arrays with the file's, and return the names of those that it does not use.

    Arrays match if they are equal in f16, because the graph of an F16 file is saved in f16.

    Raises:
        ConfigError: the file's rotary position embedding is not supported by OpenVINO GenAI.
        FloatingPointError: a weight is infinite or not a number.
    """
    exact = {tensor.name: _values(tensor) for tensor in reader.tensors if len(tensor.shape) == 1}
    for name, array in exact.items():
        _check_finite(name, array)
    computed, exact[_ROTARY] = _rotary(reader, exact)
    arrays = {**exact, _ROTARY: computed}  # as GenAI's reader computes them
    unused = {name for name, array in arrays.items() if not (array == 1).all()}
    for node in nodes:
        if node.get_type_name() == "Constant" and _type(node) in ("f16", "f32"):
            unused -= _replace_array(node, arrays, exact)
    return sorted(unused)


def _unreadable(reader: Any) -> list[str]:
    """Return the names of tensors that GenAI ignores, or that are ordered differently in the file and the graph."""
    heads = _interleaved(reader)
    biases = [
        tensor.name
        for tensor in reader.tensors
        if tensor.name.endswith(".bias") and tensor.name.split(".")[-2] in heads
    ]
    return biases + [tensor.name for tensor in reader.tensors if len(tensor.shape) not in (1, 2)]  # for example experts


def _replace_array(constant: Any, arrays: dict[str, Any], exact: dict[str, Any]) -> Set[str]:
    """Replace a constant of the graph if it is one of the file's arrays, and return the names of all equal arrays.

    Args:
        arrays: the arrays that GenAI's reader computes, by name.
        exact: the arrays that replace them, by name.
    """
    import numpy as np
    from openvino import opset13

    data = constant.data.ravel()
    same = [name for name, v in arrays.items() if v.size == data.size and np.allclose(v, data, 1e-3, 1e-7)]
    if same:
        nearest = min(same, key=lambda name: float(np.abs(arrays[name] - data).max()))
        value = exact[nearest].reshape(constant.data.shape)
        constant.output(0).replace(opset13.constant(value, np.float32).output(0))
    return set(same)


def _matrices(nodes: Iterable[Any]) -> Iterator[tuple[Any, Callable[[Any], _Rows]]]:
    """Yield the node of each matrix in the graph, with a function that computes some of its rows.

    The function accepts the indices of rows. It returns three arrays [rows, columns]: the values, the largest rounding
    error of each value (inf for a scale of 0), and the error of each value if its zero point has overflowed.
    """
    for root in nodes:
        shape = root.get_output_partial_shape(0) if root.get_type_name() == "Convert" else None
        if shape is None or not shape.is_static or len(shape) != 2 or _type(root) != "f32":
            continue
        node = _input(root)
        node = _input(node) if node.get_type_name() == "Reshape" else node
        is_plain = node.get_type_name() == "Constant"  # F16, or Q6_K, which GenAI's reader converts to f16
        yield root, functools.partial(_plain if is_plain else _grouped, node)


def _plain(constant: Any, rows: Any) -> _Rows:
    import numpy as np

    values = constant.data[rows].astype(np.float32)
    return values, np.abs(values) * 2**-10 + 2**-24, 1e30


def _grouped(node: Any, rows: Any) -> _Rows:
    """Compute `(whole - zero) * scale` from the nodes Multiply(Subtract(Convert(whole), Convert(zero)), scale)."""
    import numpy as np

    whole, zero = (_input(_input(_input(node), port)) for port in (0, 1))
    scale = _input(node, 1).data[rows].astype(np.float32)
    # The zero point is rounded by up to half a step; the rest allows for rounded scales and minimums (Q4_K).
    slack = np.where(scale == 0, np.inf, np.abs(scale) * 0.52 + 1e-6)
    period = np.where(scale == 0, 1, scale * {"u4": 16, "u8": 256}[_type(whole)])
    values = (_whole(whole, rows) - _whole(zero, rows)) * scale
    count = len(rows)
    return (
        values.reshape(count, -1),
        np.broadcast_to(slack, values.shape).reshape(count, -1),
        np.broadcast_to(period, values.shape).reshape(count, -1),
    )


def _input(node: Any, port: int = 0) -> Any:
    return node.input_value(port).get_node()


def _type(node: Any) -> str:
    return str(node.get_output_element_type(0).get_type_name()) if node.get_output_size() else ""


def _whole(constant: Any, rows: Any) -> Any:
    """Return rows of a constant's integers as f32. The lower half of a byte is the first of two 4-bit integers."""
    import numpy as np

    if _type(constant) != "u4":
        return constant.data[rows].astype(np.float32)
    shape = list(constant.get_output_shape(0))[1:]
    indices = rows[:, None] * np.prod(shape) + np.arange(np.prod(shape))
    halves = constant.data.view(np.uint8).reshape(-1)[indices >> 1] >> 4 * (indices & 1)
    return (halves & 15).reshape(-1, *shape).astype(np.float32)


def _form(tensor: Any, weights: Weights) -> str:
    """Return the format to which `_matrix` converts a tensor."""
    if weights == "rows":
        return "i8"
    return BLOCK_FORMATS.get(tensor.tensor_type.name, "f32" if weights == "exact" else "i8")


def _matrix(source: _Source, weights: Weights) -> _Matrix:
    tensor, order = source.tensor, source.order
    if weights != "rows" and (blocks := exact_blocks(tensor)):
        _check_finite(tensor.name, *blocks[1][1:])
        return _Matrix(blocks[0], tuple(array[order] for array in blocks[1]))
    if weights == "exact":
        values = _values(tensor)[order]
        _check_finite(tensor.name, values)
        return _Matrix("f32", (values,))
    group = int(tensor.shape[0]) if weights == "rows" else 32
    parts = [
        _eight_bits(tensor.name, _values(tensor, order[begin : begin + _CHUNK]), group)
        for begin in range(0, len(order), _CHUNK)
    ]
    return _joined("i8", parts)


def _joined(form: str, parts: Iterable[tuple[Any, ...]]) -> _Matrix:
    """Concatenate the rows of several matrices that have the same format."""
    import numpy as np

    return _Matrix(form, tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _eight_bits(name: str, values: Any, group: int) -> tuple[Any, Any]:
    """Quantize rows to integers from -127 to 127, with one scale for each group of `group` weights."""
    import numpy as np

    groups = values.reshape(values.shape[0], -1, group)
    scale = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float32)
    _check_finite(name, scale)
    return np.rint(groups / np.where(scale == 0, 1, scale)).clip(-127, 127).astype(np.int8), scale


def exact_blocks(tensor: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return the format and arrays of a matrix of a kind in `BLOCK_FORMATS`, or None for other kinds.

    A `u4` weight is `(whole - zero) * scale`. The zero points are not integers, but f32 represents them as exactly as
    it represents the minimums in the file.
    """
    import numpy as np
    from gguf import GGMLQuantizationType as Kind

    kind, data = tensor.tensor_type, tensor.data
    if kind is Kind.Q8_0:  # scale, 32 weights
        blocks = data.reshape(data.shape[0], -1, 34)
        return "i8", (np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _from_f16(blocks[..., :2]))
    if kind in (Kind.Q4_0, Kind.Q4_1):
        scale, minimum, packed = _small_blocks(data, has_minimum=kind is Kind.Q4_1)
    elif kind is Kind.Q4_K:
        scale, minimum, packed = _large_blocks(data)
    else:
        return None
    whole = np.concatenate([packed & 15, packed >> 4], -1).reshape(data.shape[0], -1, 32)
    flat = scale == 0  # all weights of the group equal its minimum
    scale = np.where(flat, np.float32(1), scale)
    return "u4", (np.where(flat, np.uint8(0), whole), -minimum / scale, scale)


def _small_blocks(data: Any, *, has_minimum: bool) -> _Rows:
    """Return scales, minimums and packed weights from blocks of 32 weights: Q4_1, or Q4_0, which has no minimums."""
    blocks = data.reshape(data.shape[0], -1, 20 if has_minimum else 18)
    numbers = _from_f16(blocks[..., :-16])
    scale = numbers[..., :1]
    return scale, numbers[..., 1:] if has_minimum else -8 * scale, blocks[..., -16:]


def _large_blocks(data: Any) -> _Rows:
    """Return scales, minimums and packed weights from Q4_K blocks, which store 6-bit values and two factors."""
    from gguf.quants import Q4_K

    blocks = data.reshape(-1, 144)
    scale, minimum = Q4_K.get_scale_min(blocks[:, 4:16])
    factors = _from_f16(blocks[:, :4])
    scale = (factors[:, :1] * scale).reshape(data.shape[0], -1, 1)
    minimum = -(factors[:, 1:] * minimum).reshape(data.shape[0], -1, 1)
    return scale, minimum, blocks[:, 16:].reshape(data.shape[0], -1, 32)  # the halves of 32 bytes are two groups


def _from_f16(data: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _replace_matrices(sources: Iterable[_Source], weights: Weights) -> None:
    """Replace the graph's matrices with those of the file, and join matrices that are multiplied by the same input.

    Joining matrices, such as the matrices for queries, keys and values, saves some microseconds per multiplication.
    Only the matrices for one input are in memory at a time.
    """
    joined: dict[tuple[str, int, str], list[tuple[Any, _Source]]] = {}
    for source in sources:
        product = _product(source.root)
        if product is None:
            source.root.output(0).replace(_nodes(_matrix(source, weights)).output(0))
        else:
            other = product.input_value(0)
            key = (other.get_node().get_name(), other.get_index(), _form(source.tensor, weights))
            joined.setdefault(key, []).append((product, source))
    for siblings in joined.values():
        _join([product for product, _ in siblings], [_matrix(source, weights) for _, source in siblings])


def _product(root: Any) -> Any:
    """Return the multiplication by a matrix, or None if the matrix is used more than once or in another way."""
    users = root.output(0).get_target_inputs()
    user = next(iter(users)).get_node() if len(users) == 1 else root
    return user if user.get_type_name() == "MatMul" and user.get_attributes()["transpose_b"] else None


def _join(products: Sequence[Any], matrices: Sequence[_Matrix]) -> None:
    """Replace multiplications of the same input by a single multiplication, whose output is split."""
    from openvino import opset13

    matrix = _joined(matrices[0].form, [matrix.arrays for matrix in matrices])
    product = opset13.matmul(products[0].input_value(0), _nodes(matrix), False, True)
    if len(products) > 1:
        rows = [matrix.arrays[0].shape[0] for matrix in matrices]
        product = opset13.variadic_split(product, -1, rows)
    for port, old in enumerate(products):
        old.output(0).replace(product.output(port))


def _nodes(matrix: _Matrix) -> Any:
    """Build a matrix's nodes in a pattern that the CPU plugin multiplies without decompressing the weights first."""
    import numpy as np
    from openvino import Tensor, Type, op, opset13

    if matrix.form == "f32":
        return opset13.constant(np.ascontiguousarray(matrix.arrays[0]))
    whole, *zeros, scale = matrix.arrays
    constant = opset13.constant(whole)
    if matrix.form == "u4":
        tensor = Tensor(Type.u4, list(whole.shape))
        tensor.data.view(np.uint8).reshape(-1)[:] = (whole[..., ::2] | whole[..., 1::2] << 4).ravel()
        constant = op.Constant(tensor, shared_memory=False)
    values = opset13.convert(constant, "f32")
    for zero in zeros:
        values -= opset13.constant(zero)
    shape = [whole.shape[0], whole.shape[1] * whole.shape[2]]
    return opset13.reshape(values * opset13.constant(scale), shape, False)


def _interleaved(reader: Any) -> dict[str, int]:
    """Return the names of matrices whose rows llama.cpp orders differently from the graph, with their head counts."""
    if reader.get_field("general.architecture").contents() != "llama":
        return {}
    heads, shared = (reader.get_field(f"llama.attention.{name}") for name in ("head_count", "head_count_kv"))
    return {"attn_q": heads.contents(), "attn_k": (shared or heads).contents()}


def _architecture(reader: Any) -> dict[str, Any]:
    """Return the values of architecture-specific keys, such as `.embedding_length` for `llama.embedding_length`."""
    prefix = reader.get_field("general.architecture").contents()
    return {
        key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if key.startswith(prefix)
    }


def _rotary(reader: Any, arrays: dict[str, Any]) -> tuple[Any, Any]:
    """Return the rotary frequencies that GenAI's reader computes, and the same frequencies as scaled by llama.cpp.

    Files of Llama 3.1 and later contain an array of divisors, which is removed from `arrays`. Other files may contain
    a single divisor.

    Raises:
        ConfigError: the file's rotary position embedding is not supported by OpenVINO GenAI.
    """
    import numpy as np

    number = _architecture(reader)
    size = number.get(".attention.key_length", number[".embedding_length"] // number[".attention.head_count"])
    if number.get(".rope.dimension_count", size) != size:
        raise ConfigError(f"OpenVINO GenAI always rotates all {size} dimensions, not {number['.rope.dimension_count']}")
    frequencies = 1 / np.float32(number.get(".rope.freq_base", 1e4)) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    divisor = number.get(".rope.scaling.factor", number.get(".rope.scale_linear", 1)) or 1
    kind = number.get(".rope.scaling.type", "linear")
    if divisor != 1 and kind not in ("linear", "none"):
        raise ConfigError(f"OpenVINO GenAI does not support the position scaling {kind!r}")
    scaled = frequencies if kind == "none" else frequencies / np.float32(divisor)
    if (divisors := arrays.get(_DIVISORS)) is not None and divisors.size == scaled.size:
        scaled = scaled / arrays.pop(_DIVISORS)
    return frequencies, scaled


_BUILD_PATH = re.compile(r"( failed at|Exception from) \S+:[0-9]+:?\s*")
"""Matches the source locations (path and line on the build machine) in OpenVINO's messages."""

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_READABLE = {1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K"}
"""Kinds of matrices that OpenVINO GenAI 2026.4 reads, by ggml's numbers."""
_F32 = 0  # GenAI reads such a matrix only if its graph does not use it
_TOKENIZER_KEY, _TOKENIZER = b"tokenizer.ggml.model", b"gpt2"
_OTHER_FORM = "serve the model's Hugging Face directory instead"
_REMEDY = f"use a file with {', '.join(_READABLE.values())} weights, or the model's Hugging Face directory"
_KEYS = (
    *("general.file_type", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.merges"),
    *("tokenizer.ggml.token_type", "{}.block_count", "{}.embedding_length", "{}.attention.head_count"),
    "{}.attention.layer_norm_rms_epsilon",
)
"""Keys that OpenVINO GenAI needs; `{}` stands for the architecture."""

_MAX_ROWS_FILE = 1 << 30  # bytes; smaller files are converted to `rows` by default

_MAX_ITEMS = 1024  # of a list in the header that is read: more than a model has layers

RECIPE = "6"  # part of every fingerprint: change it whenever the conversion changes
SCRIPT = "import sys; from handler.engines.openvino.gguf import main; main(*sys.argv[1:], weights={!r})"


def check_readable(path: Path, header: gguf.Header) -> None:
    """Check that OpenVINO GenAI can read a GGUF file, as far as the header tells.

    Raises:
        ConfigError: the architecture, the tokenizer or a kind of weights is not supported, or a key is missing.
    """
    if reason := unreadable(header):
        raise ConfigError(f"{path} {reason.text}: {readable.remedy(header)}{reason.remedy}")


class Unreadable(NamedTuple):
    """Why OpenVINO GenAI does not read a GGUF file, and what the user can do about it."""

    text: str
    remedy: str


def unreadable(header: gguf.Header) -> Unreadable | None:
    """Return why OpenVINO GenAI cannot read a GGUF file, or None if it can, as far as the header tells."""
    architecture = header.architecture
    if architecture not in _ARCHITECTURES:
        names = ", ".join(_ARCHITECTURES)
        text = f"has the architecture {architecture}, but OpenVINO GenAI reads GGUF files only of {names}"
        return Unreadable(text, _OTHER_FORM)
    kinds = header.matrix_types
    unknown = kinds - _READABLE.keys()
    if kinds & _READABLE.keys():
        unknown -= {_F32}
    if unknown:
        names = ", ".join(gguf.type_names(unknown))
        return Unreadable(f"has {names} weights, which OpenVINO GenAI does not read", _REMEDY)
    tokenizer = header.values.get(_TOKENIZER_KEY)
    if isinstance(tokenizer, bytes) and tokenizer != _TOKENIZER:
        kind = tokenizer.decode(errors="replace")
        only = f"OpenVINO GenAI reads only {_TOKENIZER.decode()} tokenizers from GGUF files"
        return Unreadable(f"has a tokenizer of the kind {kind}, but {only}", _OTHER_FORM)
    keys = [key.format(architecture) for key in _KEYS]
    if missing := [key for key in keys if key.encode() not in header.values]:
        text = f"cannot be read: its header lacks {', '.join(missing)}, which OpenVINO GenAI needs"
        return Unreadable(text, f"convert the model again with llama.cpp, or {_OTHER_FORM}")
    return None


def converted_model(source: Path, cache: Path, weights: Weights) -> Path:
    """Convert a GGUF file to an OpenVINO directory, unless this was done before, and return the directory.

    A container image may include the directory in `converted/` beside the file. Otherwise, the directory is created
    below `cache`, or a note there records that the layout of the file is unknown.

    Args:
        source: the GGUF file.
        cache: the directory for converted models.
        weights: the format of the weights; see `replace_weights`.

    Raises:
        ConfigError: the file is not a GGUF file, its conversion fails, or the directory beside it is incomplete.
        UnknownLayout: the layout of the file is unknown.
    """
    try:
        name = fingerprint(f"{RECIPE} {weights}".encode(), [source])
        note = cache / fingerprint(f"{RECIPE} {weights} unknown to {version('openvino-genai')}".encode(), [source])
        beside = source.parent / "converted" / name
        if beside.is_dir():
            check_directory(beside, parts(vision=False))
            return beside
        if (cache / name).is_dir():
            return cache / name
        if note.is_file():
            raise UnknownLayout(note.read_text())
        kinds = _kinds(source)  # raises an error if it is not a GGUF file
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {source}: {error}") from error

    def make(directory: Path, lock: int) -> None:
        log.info("converting %s for OpenVINO; this happens once", source)
        if changes := _changes(kinds, weights):
            log.info(changes)
        run_converter(SCRIPT.format(weights), source, directory, lock)

    try:
        return make_once(cache / name, make)
    except UnknownLayout as error:
        with contextlib.suppress(OSError):
            note.write_text(str(error))
        raise


def default_weights(source: Path) -> Weights:
    """Choose the format of a file's weights for the default precision.

    `rows` is faster on few cores. `blocks` is faster if memory is the bottleneck, as for large models on many cores.
    """
    if source.stat().st_size > _MAX_ROWS_FILE or _kinds(source) <= FULL:
        return "blocks"
    return "rows"


def _kinds(source: Path) -> Set[str]:
    return {*gguf.type_names(gguf.matrix_types(source))}


def _changes(kinds: Set[str], weights: Weights) -> str:
    """Return a message that says which kinds of weights the conversion changes, or "" if it changes none."""
    changed = kinds - FULL - (set() if weights == "rows" else BLOCK_FORMATS.keys())
    become = {
        "exact": "32-bit, because OpenVINO does not support their format",
        "blocks": "8-bit, because OpenVINO does not support their format",
        "rows": "8-bit with one scale per row; option.dtype=fp32 would keep them exact",
    }
    return f"the file's {', '.join(sorted(changed))} weights become {become[weights]}" if changed else ""


def writable(source: Path, cache: Path) -> Path:
    """Return the GGUF file, or a copy of it below `cache` if it is read-only, as model data is on SageMaker.

    OpenVINO's reader opens the file for writing, but writes nothing. It also wants the suffix in small letters.
    """
    is_writable = os.access(source, os.W_OK)
    if is_writable and source.suffix == ".gguf":
        return source
    name = f"{source.stem}.gguf"

    def make(directory: Path, lock: int) -> None:
        directory.mkdir(parents=True)
        if not is_writable:
            log.info("copying the read-only file %s once, because OpenVINO's reader needs write access", source)
        _link_or_copy(source, directory / name)

    return make_once(cache / fingerprint(f"{RECIPE} copy".encode(), [source]), make) / name


def _link_or_copy(source: Path, target: Path) -> None:
    """Make a file that OpenVINO's reader can open for writing: a link, or a copy of a read-only file."""
    if os.access(source, os.W_OK):
        target.symlink_to(source.absolute())
    else:
        shutil.copyfile(source, target)


def main(source: str, target: str, weights: Weights) -> None:
    """Convert a file, or exit with an error on stderr. The status is `UNKNOWN_LAYOUT` if the layout is unknown."""
    try:
        write_model(Path(source), Path(target), weights)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(UNKNOWN_LAYOUT)
    except FloatingPointError as error:
        sys.exit(str(error))
    except MemoryError as error:
        sys.exit(f"MemoryError: {error}")
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        if isinstance(error, LookupError):  # raised by GenAI's reader, which does not say what is missing
            sys.exit(f"a key or tensor that OpenVINO GenAI needs is missing from the file; {_REMEDY}")
        sys.exit(f"OpenVINO GenAI cannot read the file: {_BUILD_PATH.sub('', str(error)).strip()}; {_REMEDY}")


def write_model(source: Path, target: Path, weights: Weights) -> None:
    """Write a model directory: OpenVINO GenAI's graph with the file's weights, the tokenizer and the configuration.

    Raises:
        ConfigError: the layout of the file or the graph is unknown.
        FloatingPointError: a weight is infinite or not a number.
    """
    import openvino

    scratch = target / "scratch"  # GenAI writes beside the file that it reads
    scratch.mkdir(parents=True)
    ids = _save_graphs(source, scratch / "model.gguf")
    tell(_READ)
    for path in scratch.glob("openvino_*tokenizer.*"):  # these contain the chat template
        path.rename(target / path.name)
    model = openvino.Core().read_model(scratch / "openvino_model.xml")
    try:
        replace_weights(model, source, weights)
    except FloatingPointError:  # not a question of layout: GenAI's reader would find the same numbers
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # a broken file
        raise ConfigError(f"{source}: {type(error).__name__}: {error}") from error
    openvino.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    shutil.rmtree(scratch)
    if ends := sorted(gguf.end_ids(source)):
        ids["eos_token_id"] = ends
    (target / "generation_config.json").write_text(json.dumps(ids))
    config = ids | {"max_position_embeddings": gguf.context_length(source)}
    if weights == "rows":
        config[PRECISION] = "f32"  # only then does the CPU plugin quantize activations, which is faster for few clients
    (target / "config.json").write_text(json.dumps(config))


def _save_graphs(source: Path, link: Path) -> dict[str, Any]:
    """Make GenAI save its graphs beside `link`, and return the ids of the tokenizer's special tokens."""
    import openvino_genai

    _link_or_copy(source, link)
    tokenizer = openvino_genai.Tokenizer(str(link), enable_save_ov_model=True)
    tell(_READ / 3)
    # Nothing is computed. With bf16, OpenVINO 2026.4 divides by zero while it compiles some f32 weights for AMX.
    save = {"enable_save_ov_model": True, "INFERENCE_PRECISION_HINT": "f32"}
    openvino_genai.ContinuousBatchingPipeline(str(link), openvino_genai.SchedulerConfig(), "CPU", save)
    special = {"bos_token_id": tokenizer.get_bos_token_id(), "eos_token_id": tokenizer.get_eos_token_id()}
    return {name: id for name, id in special.items() if id >= 0}
