"""Converts GGUF files to OpenVINO directories, once, from the files' exact weights.

OpenVINO GenAI rounds the weights of a GGUF file. A Q4_1 or Q4_K block means `scale * q + minimum`. GenAI keeps
`scale * (q - zero)` with `zero` an integer of 4 bits. This raises SmolLM2's perplexity by a quarter. Here we save
GenAI's graph and replace its matrices by the file's. They are matched by value: rows from all over a matrix may differ
from the file by that rounding only. So a file or graph of another layout is refused, not served wrong.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from handler.config import gguf
from handler.core.child_processes import tell
from handler.core.errors import ConfigError
from handler.engines.downloads import UNKNOWN_LAYOUT, UnknownLayout, fingerprint, make_once, run_converter
from handler.engines.openvino.ir_files import PRECISION, check_directory, parts

log = logging.getLogger(__name__)

Weights = Literal["exact", "blocks", "rows"]
"""Form of a model's weights, see `replace_weights`."""
FULL = frozenset({"F32", "F16", "BF16"})
"""Kinds of weights that are not quantized."""
KEPT = {"Q4_0": "u4", "Q4_1": "u4", "Q4_K": "u4", "Q8_0": "i8"}
"""Kinds whose blocks `exact_blocks` keeps as they are, and their forms."""
_CHECKED = 1024  # rows of a matrix, at most, by which the file's is found
_CHUNK = 4096  # rows of a matrix that are compared or quantized at a time
_READ, _MATCHED = 0.5, 0.4  # parts of the work: GenAI's graph, and finding the file's weights in it
_ROTARY, _DIVISORS = "rotary frequencies", "rope_freqs.weight"


class _Matrix(NamedTuple):
    """A matrix as arrays, with an item for each of its rows.

    `f32`: the weights. `i8`: whole numbers and scales. `u4`: whole numbers, zero points and scales. A group has 32
    weights, or those of a row.
    """

    form: str
    arrays: tuple[Any, ...]


class _Source(NamedTuple):
    """A tensor of the file, the node that it replaces, and the order of its rows there."""

    root: Any
    tensor: Any
    order: Any


def replace_weights(model: Any, path: Path, weights: Weights) -> None:
    """Replace each of the graph's matrices by the one of the file that fits.

    Args:
        weights: `exact`: the blocks of `KEPT` stay as they are, and other kinds become f32. `blocks`: the same, but
            others become 8-bit in groups of 32. `rows`: all become 8-bit, with a scale for each row. The last two leave
            weights that are not quantized as the graph has them.

    Raises:
        ConfigError: the layout of the file or the graph is unknown.
        FloatingPointError: a weight is infinite or not a number.
    """
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader, nodes = GGUFReader(path), model.get_ordered_ops()
    heads = _interleaved(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    vectors = {n: dequantize(t.data, t.tensor_type) for n, t in tensors.items() if len(t.shape) == 1}
    first = {n: dequantize(t.data[:1], t.tensor_type) for n, t in tensors.items() if len(t.shape) == 2}
    for name, vector in vectors.items():
        _check_finite(name, vector)
    computed, scaled = _rotary(reader, vectors)
    odd = _replace_vectors(nodes, {**vectors, _ROTARY: computed}, {**vectors, _ROTARY: scaled})
    odd += [n for n in vectors if n.endswith(".bias") and n.split(".")[-2] in heads]
    odd += [n for n, t in tensors.items() if len(t.shape) not in (1, 2)]  # experts, for one
    sources, done = list[_Source](), 0.0
    total = sum(int(tensors[name].n_elements) for name in first)
    for root, values_of in _matrices(nodes):
        rows, columns = root.get_output_shape(0)
        begin = values_of(np.zeros(1, np.int64))  # the first in either order of rows
        fitting = [n for n in first if list(tensors[n].shape) == [columns, rows]]
        near = {n: _order(rows, heads.get(n.split(".")[-2])) for n in fitting if _apart(first[n], *begin) < np.inf}
        name = _nearest(tensors, near, values_of, rows)
        if name is None:
            for name in fitting:
                _check_finite(name, dequantize(tensors[name].data, tensors[name].tensor_type))
            raise ConfigError(f"no matrix of {path} is what OpenVINO GenAI has as {root.get_friendly_name()}")
        del first[name]
        done += int(tensors[name].n_elements) / total
        tell(_READ + _MATCHED * done)
        if weights == "exact" or tensors[name].tensor_type.name not in FULL:
            sources.append(_Source(root, tensors[name], near[name]))
        else:
            _check_finite(name, tensors[name].data)
    if odd or first:
        raise ConfigError(f"OpenVINO GenAI does not use all weights of {path}: {', '.join([*odd, *first])}")
    _replace_matrices(sources, weights)


def _check_finite(name: str, *arrays: Any) -> None:
    """Raise FloatingPointError where a tensor's numbers are infinite or none: a model with one answers noise."""
    import numpy as np

    if not all(np.isfinite(array).all() for array in arrays):
        raise FloatingPointError(f"{name} has weights that are infinite or not numbers")


def _order(rows: int, heads: int | None) -> Any:
    """Return the order of a matrix's rows in the graph."""
    import numpy as np

    order = np.arange(rows)
    return order.reshape(heads, -1, 2).swapaxes(1, 2).ravel() if heads else order


def _nearest(
    tensors: dict[str, Any], orders: dict[str, Any], values_of: Callable[[Any], tuple[Any, Any, Any]], rows: int
) -> str | None:
    """Return the file's matrix that is the graph's, compared by some rows; by all if several match."""
    import numpy as np

    some = np.unique(np.linspace(0, rows - 1, min(rows, _CHECKED)).astype(int))
    apart = _compare(tensors, orders, values_of, some)
    if len(apart) > 1:  # as embeddings of which a training changed a few
        apart = _compare(tensors, {n: orders[n] for n in apart}, values_of, np.arange(rows))
    return min(apart, key=lambda n: apart[n], default=None)


def _compare(
    tensors: dict[str, Any], orders: dict[str, Any], values_of: Callable[[Any], tuple[Any, Any, Any]], rows: Any
) -> dict[str, float]:
    """Return the matrices that match the graph's in all of `rows`, with their distances from it."""
    import numpy as np
    from gguf.quants import dequantize

    apart = dict.fromkeys(orders, 0.0)
    for begin in range(0, len(rows), _CHUNK):
        some = rows[begin : begin + _CHUNK]
        graph = values_of(some)
        for name, order in orders.items():
            apart[name] += _apart(dequantize(tensors[name].data[order[some]], tensors[name].tensor_type), *graph)
    return {name: distance for name, distance in apart.items() if distance < np.inf}


def _apart(exact: Any, values: Any, slack: Any, period: Any) -> float:
    """Return the sum of differences; infinity where rounding does not explain one, or one is not a number."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        moved = exact - values
        moved = np.abs(moved - period * np.rint(moved / period))
    return float(moved.sum()) if np.all(moved <= slack) else float("inf")


def _replace_vectors(nodes: Iterable[Any], vectors: dict[str, Any], exact: dict[str, Any]) -> list[str]:
    """Replace vectors that are equal up to f16, in which a F16 file's graph is saved; return the unused names.

    Args:
        vectors: as GenAI's reader makes them.
        exact: what to put in their places.
    """
    import numpy as np
    from openvino import opset13

    unused = {name for name, vector in vectors.items() if not (vector == 1).all()}
    for node in nodes:
        if node.get_type_name() == "Constant" and _type(node) in ("f16", "f32"):
            data = node.data.ravel()
            same = [n for n, v in vectors.items() if v.size == data.size and np.allclose(v, data, 1e-3, 1e-7)]
            if same:
                nearest = min(same, key=lambda n: float(np.abs(vectors[n] - data).max()))
                value = exact[nearest].reshape(node.data.shape)
                node.output(0).replace(opset13.constant(value, np.float32).output(0))
                unused -= set(same)
    return sorted(unused)


def _matrices(nodes: Iterable[Any]) -> Iterator[tuple[Any, Callable[[Any], tuple[Any, Any, Any]]]]:
    """Yield each matrix of the graph: its node, and a function that computes some of its rows.

    Args of the function: the rows' indices. It returns three arrays [rows, columns]: the values; by how much rounding
    may have changed each (inf for a scale of 0); and the change by a zero point that overflowed its bits.
    """
    for root in nodes:
        shape = root.get_output_partial_shape(0) if root.get_type_name() == "Convert" else None
        if shape is None or not shape.is_static or len(shape) != 2 or _type(root) != "f32":
            continue
        node = _input(root)
        node = _input(node) if node.get_type_name() == "Reshape" else node
        is_plain = node.get_type_name() == "Constant"  # F16, and Q6_K, which GenAI's reader turns into f16
        yield root, functools.partial(_plain if is_plain else _grouped, node)


def _plain(constant: Any, rows: Any) -> tuple[Any, Any, Any]:
    import numpy as np

    values = constant.data[rows].astype(np.float32)
    return values, np.abs(values) * 2**-10 + 2**-24, 1e30


def _grouped(node: Any, rows: Any) -> tuple[Any, Any, Any]:
    """Compute `(whole - zero) * scale` of Multiply(Subtract(Convert(whole), Convert(zero)), scale)."""
    import numpy as np

    whole, zero = (_input(_input(_input(node), port)) for port in (0, 1))
    scale = _input(node, 1).data[rows].astype(np.float32)
    # Half a step for the zero point, and the rounding of scales and minimums (Q4_K).
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
    """Return rows of a constant's integers as f32; of two 4-bit ones in a byte the lower half comes first."""
    import numpy as np

    if _type(constant) != "u4":
        return constant.data[rows].astype(np.float32)
    shape = list(constant.get_output_shape(0))[1:]
    places = rows[:, None] * np.prod(shape) + np.arange(np.prod(shape))
    halves = constant.data.view(np.uint8).reshape(-1)[places >> 1] >> 4 * (places & 1)
    return (halves & 15).reshape(-1, *shape).astype(np.float32)


def _form(tensor: Any, weights: Weights) -> str:
    """Return the form that `_matrix` gives the tensor, without its arrays."""
    if weights == "rows":
        return "i8"
    return KEPT.get(tensor.tensor_type.name, "f32" if weights == "exact" else "i8")


def _matrix(source: _Source, weights: Weights) -> _Matrix:
    import numpy as np
    from gguf.quants import dequantize

    tensor, order = source.tensor, source.order
    if weights != "rows" and (found := exact_blocks(tensor)):
        _check_finite(tensor.name, *found[1][1:])
        return _Matrix(found[0], tuple(array[order] for array in found[1]))
    if weights == "exact":
        values = dequantize(tensor.data, tensor.tensor_type)[order]
        _check_finite(tensor.name, values)
        return _Matrix("f32", (values,))
    group = int(tensor.shape[0]) if weights == "rows" else 32
    parts = [
        _eight_bits(tensor.name, dequantize(tensor.data[order[begin : begin + _CHUNK]], tensor.tensor_type), group)
        for begin in range(0, len(order), _CHUNK)
    ]
    return _Matrix("i8", tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _eight_bits(name: str, values: Any, group: int) -> tuple[Any, Any]:
    """Quantize rows to whole numbers of -127 to 127, and a scale for each group of a row's weights."""
    import numpy as np

    groups = values.reshape(values.shape[0], -1, group)
    scale = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float32)
    _check_finite(name, scale)
    return np.rint(groups / np.where(scale == 0, 1, scale)).clip(-127, 127).astype(np.int8), scale


def exact_blocks(tensor: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return the form and arrays of a file's matrix of 4 or 8 bits; None for other kinds.

    A weight of `u4` is `(whole - zero) * scale`. Zero points are not whole: f32 represents them as exactly as the
    minimums.
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


def _replace_matrices(sources: Iterable[_Source], weights: Weights) -> None:
    """Put the file's matrices in place. Those multiplied by the same input become one, as queries, keys and values.

    Each multiplication has an overhead of some microseconds. Only what one input needs is in memory at a time.
    """
    import numpy as np
    from openvino import opset13

    joined: dict[tuple[str, int, str], list[tuple[Any, _Source]]] = {}
    for source in sources:
        users = source.root.output(0).get_target_inputs()
        product = next(iter(users)).get_node() if len(users) == 1 else source.root
        if product.get_type_name() == "MatMul" and product.get_attributes()["transpose_b"]:
            other = product.input_value(0)
            key = (other.get_node().get_name(), other.get_index(), _form(source.tensor, weights))
            joined.setdefault(key, []).append((product, source))
        else:
            source.root.output(0).replace(_nodes(_matrix(source, weights)).output(0))
    for (_, _, form), siblings in joined.items():
        matrices = [_matrix(source, weights) for _, source in siblings]
        arrays = tuple(np.concatenate(arrays) for arrays in zip(*(matrix.arrays for matrix in matrices), strict=True))
        product = opset13.matmul(siblings[0][0].input_value(0), _nodes(_Matrix(form, arrays)), False, True)
        if len(siblings) > 1:
            rows = np.array([matrix.arrays[0].shape[0] for matrix in matrices])
            product = opset13.variadic_split(product, np.int64(-1), rows)
        for port, (old, _) in enumerate(siblings):
            old.output(0).replace(product.output(port))


def _nodes(matrix: _Matrix) -> Any:
    """Make a matrix's nodes, in patterns that the CPU plugin multiplies as they are."""
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
        values = opset13.subtract(values, opset13.constant(zero))
    shape = opset13.constant(np.array([whole.shape[0], whole.shape[1] * whole.shape[2]]))
    return opset13.reshape(opset13.multiply(values, opset13.constant(scale)), shape, False)


def _interleaved(reader: Any) -> dict[str, int]:
    """Return the matrices whose rows llama.cpp pairs in another way than the graph, with their numbers of heads."""
    if reader.get_field("general.architecture").contents() != "llama":
        return {}
    heads = reader.get_field("llama.attention.head_count")
    shared = reader.get_field("llama.attention.head_count_kv") or heads
    return {"attn_q": heads.contents(), "attn_k": shared.contents()}


def _rotary(reader: Any, vectors: dict[str, Any]) -> tuple[Any, Any]:
    """Compute the rotary frequencies as GenAI's reader does, and scale them as llama.cpp does.

    Llama 3.1 and later have a vector of divisors, which is taken out of `vectors`. Other files may have one divisor.

    Raises:
        ConfigError: the graph cannot rotate as the file says.
    """
    import numpy as np

    prefix = reader.get_field("general.architecture").contents()
    number = {k.removeprefix(prefix): f.contents() for k, f in reader.fields.items() if k.startswith(prefix)}
    size = number.get(".attention.key_length", number[".embedding_length"] // number[".attention.head_count"])
    if number.get(".rope.dimension_count", size) != size:
        raise ConfigError(f"OpenVINO GenAI rotates all {size} dimensions, not {number['.rope.dimension_count']}")
    frequencies = 1 / np.float32(number.get(".rope.freq_base", 1e4)) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    divisor = number.get(".rope.scaling.factor", number.get(".rope.scale_linear", 1)) or 1
    kind = number.get(".rope.scaling.type", "linear")
    if divisor != 1 and kind not in ("linear", "none"):
        raise ConfigError(f"OpenVINO GenAI does not know this position scaling: {kind}")
    scaled = frequencies if kind == "none" else frequencies / np.float32(divisor)
    if (divisors := vectors.get(_DIVISORS)) is not None and divisors.size == scaled.size:
        scaled = scaled / vectors.pop(_DIVISORS)
    return frequencies, scaled


_UNREADABLE = ("gguf_tensor_to_f16 failed", "Unsupported quantization type")
"""GenAI's messages about a kind of weights that its reader does not support."""

_MAX_ROWS_FILE = 1 << 30  # bytes of a file whose weights become `rows` by default

RECIPE = "4"  # part of every fingerprint: change it with the conversion
SCRIPT = "import sys; from handler.engines.openvino.gguf import main; main(*sys.argv[1:], weights={!r})"


def converted_model(source: Path, cache: Path, weights: Weights) -> Path:
    """Return the OpenVINO directory of a GGUF file, making it below `cache` where there is none yet.

    An image may also have it in `converted/` next to the file. An unknown layout is remembered below `cache`.

    Args:
        weights: their form, see `replace_weights`.

    Raises:
        ConfigError: it is no GGUF file, it cannot be converted (`UnknownLayout` if for its layout), or the directory
            next to it is incomplete.
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
        kinds = _kinds(source)  # raises for other files
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {source}: {error}") from error

    def make(directory: Path, lock: int) -> None:
        log.info("converting %s for OpenVINO, once", source)
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
    """Return the form of a file's weights in the default precision.

    Rows are faster on few cores, and blocks where memory is the limit, as for large models on many cores.
    """
    if source.stat().st_size > _MAX_ROWS_FILE or _kinds(source) <= FULL:
        return "blocks"
    return "rows"


def _kinds(source: Path) -> Set[str]:
    from gguf import GGMLQuantizationType as Kind

    known = {kind.value: kind.name for kind in Kind}
    return {known.get(number, f"type {number}") for number in gguf.matrix_types(source)}


def _changes(kinds: Set[str], weights: Weights) -> str:
    """Say which kinds of weights do not stay as they are, and what they become; empty if all stay."""
    changed = kinds - FULL - (set() if weights == "rows" else KEPT.keys())
    become = {
        "exact": "32-bit: OpenVINO has no form for theirs",
        "blocks": "8-bit: OpenVINO has no form for theirs",
        "rows": "8-bit, with a scale for each row: option.dtype=fp32 keeps them exact",
    }
    return f"its {', '.join(sorted(changed))} weights become {become[weights]}" if changed else ""


def writable(source: Path, cache: Path) -> Path:
    """Return the GGUF file, or a copy of it below `cache` where it is read-only, as SageMaker's model data are.

    OpenVINO's reader opens it for writing, though it writes nothing.
    """
    if os.access(source, os.W_OK):
        return source

    def make(directory: Path, lock: int) -> None:
        log.info("copying the read-only file %s once, as OpenVINO's reader needs write access", source)
        directory.mkdir(parents=True)
        shutil.copyfile(source, directory / source.name)

    return make_once(cache / fingerprint(f"{RECIPE} copy".encode(), [source]), make) / source.name


def main(source: str, target: str, weights: Weights) -> None:
    """Run the converter; the exit status tells an unknown layout from a failure, stderr has the error."""
    try:
        write_model(Path(source), Path(target), weights)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(UNKNOWN_LAYOUT)
    except FloatingPointError as error:
        sys.exit(str(error))
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, ValueError) as error:
        if any(message in str(error) for message in _UNREADABLE):
            kinds = ", ".join(sorted(_kinds(Path(source))))
            sys.exit(f"OpenVINO GenAI does not read all of its kinds of weights, which are {kinds}")
        if isinstance(error, LookupError):  # of GenAI's reader, which does not name it
            sys.exit("OpenVINO GenAI does not find a key or tensor in the file")
        sys.exit(f"{type(error).__name__}: {error}")


def write_model(source: Path, target: Path, weights: Weights) -> None:
    """Save OpenVINO GenAI's graph of the file, replace its weights, and add the other files of a model directory.

    Raises:
        ConfigError: the layout of the file or the graph is unknown.
        FloatingPointError: a weight is infinite or not a number.
    """
    import openvino
    import openvino_genai

    scratch = target / "scratch"  # GenAI saves beside the file that it reads
    scratch.mkdir(parents=True)
    link = scratch / "model.gguf"
    if os.access(source, os.W_OK):
        link.symlink_to(source)
    else:
        shutil.copyfile(source, link)
    tokenizer = openvino_genai.Tokenizer(str(link), enable_save_ov_model=True)
    tell(_READ / 3)
    scheduler, save = openvino_genai.SchedulerConfig(), {"enable_save_ov_model": True}
    openvino_genai.ContinuousBatchingPipeline(str(link), scheduler, "CPU", save)
    tell(_READ)
    for path in scratch.glob("openvino_*tokenizer.*"):  # with the chat template
        path.rename(target / path.name)
    model = openvino.Core().read_model(scratch / "openvino_model.xml")
    try:
        replace_weights(model, source, weights)
    except FloatingPointError:  # GenAI's reader has no better numbers
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # a broken file
        raise ConfigError(f"{source}: {type(error).__name__}: {error}") from error
    openvino.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    shutil.rmtree(scratch)
    special = {"bos_token_id": tokenizer.get_bos_token_id(), "eos_token_id": tokenizer.get_eos_token_id()}
    ids = {key: id for key, id in special.items() if id >= 0}
    (target / "generation_config.json").write_text(json.dumps(ids))
    config = ids | {"max_position_embeddings": gguf.context_length(source)}
    if weights == "rows":
        config[PRECISION] = "f32"  # the CPU plugin quantizes activations only then, and is faster with few clients
    (target / "config.json").write_text(json.dumps(config))
