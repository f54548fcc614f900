"""Writes an OpenVINO directory of a checkpoint, in a process of its own."""

from __future__ import annotations

import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from handler.config.options.openvino import GROUP_SIZES
from handler.core.errors import ConfigError
from handler.engines.huggingface.tensors import Tensors
from handler.engines.openvino.decoder.config import Decoder, read_decoder
from handler.engines.openvino.decoder.graph import decoder_graph
from handler.engines.openvino.decoder.weights import Matrices, Quantization

_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WINDOW = 10  # the input of paged attention that has the window, 0 for none
_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def check_weights(model: Path, decoder: Decoder) -> None:
    """Check that the checkpoint has the tensors that config.json describes, in their shapes, and no others.

    Raises:
        ConfigError: a tensor is missing, has another shape or type, or would not be used.
    """
    tensors, expected = Tensors(model), dict(shapes(decoder))
    for name, shape in expected.items():
        place = tensors.place(name)
        if place.shape != shape:
            raise ConfigError(f"{place.path}: {name} has the shape {list(place.shape)}, by config.json {list(shape)}")
        tensors.weight(name)
    allowed = {*expected, _HEAD} if decoder.tied else {*expected}
    unused = [name for name in tensors if name not in allowed and not name.endswith(".rotary_emb.inv_freq")]
    if unused:
        raise ConfigError(f"{model}: a {decoder.model_type} of this config.json has no {', '.join(sorted(unused)[:3])}")


def _equal(tensors: Tensors, one: str, other: str) -> bool:
    import numpy

    same = tensors.place(one)[1:3] == tensors.place(other)[1:3]
    return same and bool(numpy.array_equal(tensors.raw(one), tensors.raw(other)))


def shapes(decoder: Decoder) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names of a model's tensors with their shapes: a matrix has a row for each of its results."""
    size, inner, biases = decoder.size, decoder.inner_size, decoder.attention_biases
    queries, keys = decoder.heads * decoder.head_size, decoder.key_heads * decoder.head_size
    yield _EMBEDDINGS, (decoder.vocabulary, size)
    for index in range(len(decoder.layers)):
        layer = f"model.layers.{index}."
        for part, rows, columns in (("q", queries, size), ("k", keys, size), ("v", keys, size), ("o", size, queries)):
            yield f"{layer}self_attn.{part}_proj.weight", (rows, columns)
            if part in biases:
                yield f"{layer}self_attn.{part}_proj.bias", (rows,)
        if decoder.head_norms:
            yield f"{layer}self_attn.q_norm.weight", (decoder.head_size,)
            yield f"{layer}self_attn.k_norm.weight", (decoder.head_size,)
        for part, rows, columns in (("gate", inner, size), ("up", inner, size), ("down", size, inner)):
            yield f"{layer}mlp.{part}_proj.weight", (rows, columns)
            if decoder.mlp_bias:
                yield f"{layer}mlp.{part}_proj.bias", (rows,)
        yield f"{layer}input_layernorm.weight", (size,)
        yield f"{layer}post_attention_layernorm.weight", (size,)
        if decoder.four_norms:
            yield f"{layer}pre_feedforward_layernorm.weight", (size,)
            yield f"{layer}post_feedforward_layernorm.weight", (size,)
    yield "model.norm.weight", (size,)
    if not decoder.tied:
        yield _HEAD, (decoder.vocabulary, size)


def main(source: str, target: str, bits: int, group: int) -> None:
    """Run the conversion; stderr has the error."""
    try:
        write_model(Path(source), Path(target), Quantization(bits, group) if bits else None)
    except ConfigError as error:
        sys.exit(str(error))


def write_model(source: Path, target: Path, how: Quantization | None) -> None:
    """Write the graph with its weights, the tokenizer's graphs, and copies of the files that describe the model."""
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
        raise ConfigError(f"{source}: config.json has tie_word_embeddings, but {_HEAD} is not {_EMBEDDINGS}")
    matrices = Matrices(tensors, scratch)

    def matrix(name: str) -> Any:
        if how is None:
            return matrices.stored(name)
        return matrices.quantized(name, _rounding(name, tensors.place(name).shape[1], how))

    model = decoder_graph(decoder, matrix, tensors.__getitem__)
    check_windows(model, decoder)
    openvino.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    shutil.rmtree(scratch)


def _rounding(name: str, columns: int, how: Quantization) -> Quantization:
    """Embeddings and the last matrix keep 8 bits, and so do rows that no group divides."""
    sizes = [size for size in GROUP_SIZES if size <= how.group and columns % size == 0]
    if how.bits == 8 or name in (_EMBEDDINGS, _HEAD) or not sizes:
        return Quantization(8, 0)
    return Quantization(4, max(sizes))


def check_windows(model: Any, decoder: Decoder) -> None:
    """Check that paged attention will have each layer's window; an unknown OpenVINO could overlook it.

    Raises:
        ConfigError: it would attend to other tokens.
    """
    import openvino
    from openvino._offline_transformations import paged_attention_transformation

    paged = model.clone()
    paged_attention_transformation(paged)
    nodes = [node for node in paged.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]
    windows = Counter(_window(node.input_value(_WINDOW).get_node()) for node in nodes)
    if windows != Counter(layer.window or 0 for layer in decoder.layers):
        raise ConfigError(f"OpenVINO {openvino.__version__} does not see this model's sliding windows")


def _window(node: Any) -> int:
    """Return the value of a whole number, which may be a product of constants."""
    if node.get_type_name() == "Constant":
        return int(node.data.item())
    values = [_window(value.get_node()) for value in node.input_values()]
    return math.prod(values)


def _write_tokenizer(source: Path, target: Path) -> None:
    """Write the tokenizer as OpenVINO's graphs, with its chat template."""
    import openvino
    import transformers  # openvino_tokenizers asks whether it has been imported
    from openvino_tokenizers import convert_tokenizer

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    if len(tokenizer) < 100:  # transformers invents one where there are no files
        raise ConfigError(f"{source} comes without its tokenizer's files")
    graphs = convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, graph in zip(("openvino_tokenizer", "openvino_detokenizer"), graphs, strict=True):
        openvino.save_model(graph, target / f"{name}.xml")
