"""Converts a checkpoint to an OpenVINO directory, in a separate process."""

from __future__ import annotations

import math
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.config.options.tables import GROUP_SIZES
from handler.core.child_processes import tell
from handler.core.errors import ConfigError
from handler.engines.huggingface.files import Tensors, as_float32
from handler.engines.openvino.decoder.config import DecoderConfig, read_decoder
from handler.engines.openvino.decoder.graph import decoder_graph

# -- turn a checkpoint's matrices into nodes of OpenVINO's graph, unchanged or quantized to 8 or 4 bits per weight -----
# Only a part of one matrix is in memory at a time: nodes refer to memory-mapped files, which are the checkpoint's own
# or, for quantized matrices, temporary files beside the graph.

_CHUNK = 1 << 24  # weights that are quantized at a time
_QUANTIZED = 0.9  # share of the work; the rest is writing the graph
_CUT = 0.9  # share of a group's range; trying more shares improves little (measured)
_LEAST_SCALE = 2.0**-14  # f16's smallest normal number


class Quantization(NamedTuple):
    """The number of bits per weight, and the number of weights that share a scale and a zero point (0: a whole row)."""

    bits: int
    group: int


class Matrices:
    """Creates nodes for matrices. It owns the memory that the nodes use, so it must outlive the graph.

    Args:
        tensors: the checkpoint's tensors.
        scratch: a directory for files with quantized matrices.
        how: the quantization, or None for unchanged weights.
        weights: number of the model's weights, for progress reports.
    """

    def __init__(self, tensors: Tensors, scratch: Path, how: Quantization | None, weights: int) -> None:
        self._tensors, self._scratch, self._how = tensors, scratch, how
        self._weights, self._done = weights, 0
        self._held: list[Any] = []

    def __call__(self, name: str) -> Any:
        """Return the node for a matrix, and report the progress if it is quantized."""
        if self._how is None:
            return self.stored(name)
        shape = self._tensors.location(name).shape
        node = self.quantized(name, _rounding(name, shape[1], self._how))
        self._done += math.prod(shape)
        tell(_QUANTIZED * self._done / self._weights)
        return node

    def stored(self, name: str) -> Any:
        """Return a node for a matrix with unchanged weights."""
        import numpy as np
        from openvino import Type, opset13

        kind, values = self._tensors.location(name).kind, self._tensors.raw(name)
        types = {"BF16": Type.bf16, "F16": Type.f16}
        if kind in types:
            return opset13.convert(self._constant(values, values.shape, types[kind]), np.float32)
        return self._constant(values.astype(np.float32, copy=False), values.shape, Type.f32)

    def quantized(self, name: str, how: Quantization) -> Any:
        """Return a node for a matrix with quantized weights `(whole - zero) * scale`.

        The CPU plugin recognizes this pattern of nodes and therefore keeps the weights compressed.
        """
        import numpy as np
        from openvino import Type, opset13

        shape = self._tensors.location(name).shape
        size = how.group or shape[1]
        groups = (shape[0], shape[1] // size, size)
        whole, zero, scale = self._quantize(name, groups, how.bits)
        whole, zero = self._integers(whole, groups, how.bits), self._integers(zero, scale.shape, how.bits)
        values = (whole - zero) * self._constant(scale, scale.shape, Type.f16)
        return opset13.convert(opset13.reshape(values, list(shape), False), np.float32)

    def _quantize(self, name: str, shape: tuple[int, int, int], bits: int) -> tuple[Any, Any, Any]:
        """Return a matrix's quantized weights (in a file), zero points and scales. 4-bit integers are packed."""
        import numpy as np

        count, size = shape[1:]
        whole = np.memmap(self._scratch / name, np.uint8, "w+", shape=(*shape[:2], size * bits // 8))
        zero, scale = np.empty((*shape[:2], 1), np.uint8), np.empty((*shape[:2], 1), np.float16)
        for part, rows in self._parts(name):
            numbers, zero[part], scale[part] = quantize(rows.reshape(-1, count, size), bits)
            whole[part] = numbers if bits == 8 else _packed(numbers)
        return whole, zero if bits == 8 else _packed(np.pad(zero.ravel(), (0, zero.size % 2))), scale

    def _parts(self, name: str) -> Iterator[tuple[slice, Any]]:
        """Yield a matrix in parts: a slice of row indices, and these rows as float32."""
        tensor, source = self._tensors.location(name), self._tensors.raw(name)
        step = max(_CHUNK // tensor.shape[1], 1)
        for first in range(0, tensor.shape[0], step):
            part = slice(first, first + step)
            yield part, as_float32(source[part], tensor.kind)

    def _integers(self, values: Any, shape: Sequence[int], bits: int) -> Any:
        """Return a node that converts integers to f16."""
        import numpy as np
        from openvino import Type, opset13

        return opset13.convert(self._constant(values, shape, Type.u8 if bits == 8 else Type.u4), np.float16)

    def _constant(self, values: Any, shape: Sequence[int], kind: Any) -> Any:
        from openvino import Tensor, op

        self._held.append(values)
        return op.Constant(Tensor(values, list(shape), kind), shared_memory=True)


def _packed(numbers: Any) -> Any:
    """Pack two 4-bit integers into each byte, with the first integer in the lower half."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def quantize(groups: Any, bits: int) -> tuple[Any, Any, Any]:
    """Quantize groups of weights to integers, zero points and scales (float16). The last dimension is a group.

    With 4 bits, the range of a group is reduced by a tenth if this decreases the sum of squared errors, which is often
    the case.
    """
    import numpy as np

    whole = _quantize(groups, bits, 1)
    if bits == 8:
        return whole
    cut = _quantize(groups, bits, _CUT)
    nearer = _error(groups, cut) < _error(groups, whole)
    integers, zeros, scales = (np.where(nearer, *pair) for pair in zip(cut, whole, strict=True))
    return integers, zeros, scales


def _quantize(groups: Any, bits: int, part: float) -> tuple[Any, Any, Any]:
    """Quantize groups of weights. Extend each group's range to include 0, then cover the fraction `part` of it."""
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


_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WINDOW = 10  # index of paged attention's input for the window size (0 for no window)
_COPIED = (
    "config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def check_weights(model: Path, decoder: DecoderConfig) -> None:
    """Check that a checkpoint contains exactly the tensors that config.json describes, with the right shapes.

    Tensors that can be computed from the others may also be present.

    Raises:
        ConfigError: a tensor is missing or unused, or has the wrong shape or type.
    """
    tensors, expected = Tensors(model), dict(shapes(decoder))
    for name, shape in expected.items():
        tensor = tensors.location(name)
        if tensor.shape != shape:
            raise ConfigError(
                f"{tensor.path}: {name} has the shape {list(tensor.shape)}, but config.json requires {list(shape)}"
            )
        tensors.weight(name)
    allowed = {*expected, _HEAD} if decoder.tied else {*expected}
    unused = [name for name in tensors if name not in allowed and not name.endswith(".rotary_emb.inv_freq")]
    if unused:
        raise ConfigError(
            f"{model}: a {decoder.model_type} model with this config.json does not use {', '.join(sorted(unused)[:3])}"
        )


def _equal(tensors: Tensors, first: str, second: str) -> bool:
    import numpy

    same = tensors.location(first)[1:3] == tensors.location(second)[1:3]
    return same and bool(numpy.array_equal(tensors.raw(first), tensors.raw(second)))


def shapes(decoder: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each of a model's tensors. A matrix has one row per output."""
    size, inner = decoder.size, decoder.inner_size
    queries, keys = decoder.heads * decoder.head_size, decoder.key_heads * decoder.head_size
    attention = {"q": (queries, size), "k": (keys, size), "v": (keys, size), "o": (size, queries)}
    feed_forward = {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}
    yield _EMBEDDINGS, (decoder.vocabulary, size)
    for index in range(len(decoder.layers)):
        layer = f"model.layers.{index}."
        yield from _projections(f"{layer}self_attn.", attention, decoder.attention_biases)
        if decoder.head_norms:
            yield f"{layer}self_attn.q_norm.weight", (decoder.head_size,)
            yield f"{layer}self_attn.k_norm.weight", (decoder.head_size,)
        yield from _projections(f"{layer}mlp.", feed_forward, feed_forward if decoder.mlp_bias else ())
        yield f"{layer}input_layernorm.weight", (size,)
        yield f"{layer}post_attention_layernorm.weight", (size,)
        if decoder.four_norms:
            yield f"{layer}pre_feedforward_layernorm.weight", (size,)
            yield f"{layer}post_feedforward_layernorm.weight", (size,)
    yield "model.norm.weight", (size,)
    if not decoder.tied:
        yield _HEAD, (decoder.vocabulary, size)


def _projections(
    prefix: str, matrices: Mapping[str, tuple[int, int]], biases: Collection[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part, shape in matrices.items():
        yield f"{prefix}{part}_proj.weight", shape
        if part in biases:
            yield f"{prefix}{part}_proj.bias", shape[:1]


def main(source: str, target: str, bits: int, group: int) -> None:
    """Convert a checkpoint, or exit with an error on stderr."""
    try:
        write_model(Path(source), Path(target), Quantization(bits, group) if bits else None)
    except ConfigError as error:
        sys.exit(str(error))


def write_model(source: Path, target: Path, how: Quantization | None) -> None:
    """Write the graph with its weights, the tokenizer's graphs, and copies of the configuration and chat template."""
    target.mkdir(parents=True)
    _write_tokenizer(source, target)
    _write_graph(source, target, how)
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write_graph(source: Path, target: Path, how: Quantization | None) -> None:
    import openvino

    decoder, tensors, scratch = read_decoder(source), Tensors(source), target / "scratch"
    scratch.mkdir()
    if decoder.tied and _HEAD in tensors and not _equal(tensors, _EMBEDDINGS, _HEAD):
        raise ConfigError(f"{source}: config.json sets tie_word_embeddings, but {_HEAD} differs from {_EMBEDDINGS}")
    matrices = Matrices(tensors, scratch, how, sum(math.prod(shape) for _, shape in shapes(decoder)))
    model = decoder_graph(decoder, matrices, tensors.__getitem__)
    check_windows(model, decoder)
    openvino.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    shutil.rmtree(scratch)


def _rounding(name: str, columns: int, how: Quantization) -> Quantization:
    """Return the quantization of a matrix.

    It has 4 bits if `how` has 4 bits, the rows can be divided into groups, and the matrix computes neither embeddings
    nor logits. Otherwise, it has 8 bits.
    """
    sizes = [size for size in GROUP_SIZES if size <= how.group and columns % size == 0]
    if how.bits == 8 or name in (_EMBEDDINGS, _HEAD) or not sizes:
        return Quantization(8, 0)
    return Quantization(4, max(sizes))


def check_windows(model: Any, decoder: DecoderConfig) -> None:
    """Check that paged attention uses each layer's sliding window, because some OpenVINO versions might ignore it.

    Raises:
        ConfigError: paged attention would use a different window.
    """
    import openvino
    from openvino._offline_transformations import paged_attention_transformation

    paged = model.clone()
    paged_attention_transformation(paged)
    nodes = [node for node in paged.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]
    windows = Counter(_window(node.input_value(_WINDOW).get_node()) for node in nodes)
    if windows != Counter(layer.window or 0 for layer in decoder.layers):
        raise ConfigError(f"OpenVINO {openvino.__version__} does not recognize this model's sliding windows")


def _window(node: Any) -> int:
    """Return the integer that a node computes. The node must be a constant or a product of constants."""
    if node.get_type_name() == "Constant":
        return int(node.data.item())
    values = [_window(value.get_node()) for value in node.input_values()]
    return math.prod(values)


def _write_tokenizer(source: Path, target: Path) -> None:
    """Convert the tokenizer and its chat template to OpenVINO graphs, and write these to files."""
    import openvino
    import transformers  # openvino_tokenizers checks whether it has been imported
    from openvino_tokenizers import convert_tokenizer

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    if len(tokenizer) < 100:  # transformers invents a tokenizer if the files are missing
        raise ConfigError(f"{source} has no tokenizer files")
    graphs = convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, graph in zip(("openvino_tokenizer", "openvino_detokenizer"), graphs, strict=True):
        openvino.save_model(graph, target / f"{name}.xml")
