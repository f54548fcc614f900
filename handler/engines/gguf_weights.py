"""OpenVINO directories with a GGUF file's own weights, made once and kept.

OpenVINO GenAI reads a GGUF file, but not its weights: a Q4_1 or Q4_K block means `scale * q + minimum`, and the
reader keeps `scale * (q - zero)` with `zero` a whole number, wrapped to 4 bits. SmolLM2's perplexity rises by a
quarter from that. Here the reader's graph is saved and its matrices are replaced by what the file says. Which matrix
is which is found by value: what stands in the graph must differ from the file by that rounding and nothing more, so a
file or a graph that is laid out otherwise than we think is refused and not served wrong.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from handler.engines import gguf
from handler.engines.made import fingerprint, make_once, run_apart
from handler.errors import ConfigError

log = logging.getLogger(__name__)

RECIPE = "1"  # part of every fingerprint: raise it when something else is made of the same file
SCRIPT = "import sys; from handler.engines.gguf_weights import main; main(*sys.argv[1:], weights={!r})"
GROUP = 32  # weights that share one scale in `i8`, as in GGUF's own Q8_0


def exact_model(source: Path, cache: Path, weights: str) -> Path:
    """The OpenVINO directory made from a GGUF file, below `cache`: an earlier one or new.

    `weights` is `f32`, all matrices in full, or `i8`, those that the reader rounds to 8 bits and the others kept.

    Raises:
        ConfigError: it is no GGUF file, or one that cannot be converted without doubt.
    """
    try:
        name = fingerprint(f"{RECIPE} {weights}".encode(), [source])
        target = cache / name
        if not target.is_dir():
            gguf.context_length(source)  # reads the header
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {source}: {error}") from error

    def make(directory: Path, lock: int) -> None:
        log.info("making %s weights of %s, once", weights, source)
        run_apart(SCRIPT.format(weights), source, directory, lock)

    return make_once(target, make)


def main(source: str, target: str, weights: str) -> None:
    """The process apart: what it raises becomes the end of its output."""
    try:
        write_model(Path(source), Path(target), weights)
    except (ConfigError, RuntimeError) as error:
        sys.exit(str(error))


def write_model(source: Path, target: Path, weights: str) -> None:
    """Save the graph that OpenVINO GenAI reads from `source`, give it the file's weights, and write `target`."""
    import openvino
    import openvino_genai

    target.mkdir()
    scratch = target / "scratch"  # the reader saves what it made next to its file
    scratch.mkdir()
    link = scratch / "model.gguf"
    link.symlink_to(source)
    tokenizer = openvino_genai.Tokenizer(str(link), enable_save_ov_model=True)
    openvino_genai.ContinuousBatchingPipeline(
        str(link), openvino_genai.SchedulerConfig(), "CPU", {"enable_save_ov_model": True}
    )
    for path in scratch.glob("openvino_*tokenizer.*"):
        path.rename(target / path.name)
    model = openvino.Core().read_model(scratch / "openvino_model.xml")
    replace_weights(model, source, weights)
    openvino.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    shutil.rmtree(scratch)
    ids = {"bos_token_id": tokenizer.get_bos_token_id(), "eos_token_id": tokenizer.get_eos_token_id()}
    ids = {key: id for key, id in ids.items() if id >= 0}
    (target / "generation_config.json").write_text(json.dumps(ids))
    context = gguf.context_length(source)
    (target / "config.json").write_text(json.dumps(ids | ({"max_position_embeddings": context} if context else {})))


class Matrix(NamedTuple):
    """One matrix of the graph, as the reader left it."""

    node: Any  # its values in f32, what the operations take
    values: Any
    slack: Any  # how far rounding may have moved each value, or each group of them
    period: Any  # what the zero points' wrapping may have moved it by a multiple of; None where there are none


def replace_weights(model: Any, source: Path, weights: str) -> None:
    """Put the file's matrices in the place of the graph's, each in the one place where it fits."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    vectors = {n: dequantize(t.data, t.tensor_type) for n, t in tensors.items() if len(t.shape) == 1}
    first = {n: dequantize(t.data[:1], t.tensor_type)[0] for n, t in tensors.items() if len(t.shape) == 2}
    interleaved = _interleaved(reader)
    nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}.values()
    constants = {node.data.tobytes() for node in nodes if node.get_type_name() == "Constant" and _type(node) == "f32"}
    odd = [n for n, vector in vectors.items() if vector.tobytes() not in constants and not np.all(vector == 1)]
    for matrix in _matrices(nodes):
        rows, columns = matrix.node.output(0).get_shape()
        fitting = [n for n in first if list(tensors[n].shape) == [columns, rows]]
        flat = matrix.values.reshape(rows, columns)
        # The first row of a matrix is the first in any order of its rows, and two rows tell all but twins apart.
        for name in sorted(fitting, key=lambda n: float(np.abs(first[n] - flat[0]).max()))[:2]:
            tensor = tensors[name]
            exact = dequantize(tensor.data, tensor.tensor_type)
            if heads := interleaved.get(name.split(".")[-2]):
                exact = exact.reshape(heads, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
            moved = exact.reshape(matrix.values.shape) - matrix.values
            rest = moved if matrix.period is None else moved - matrix.period * np.rint(moved / matrix.period)
            if np.all(np.abs(rest) <= matrix.slack):
                break
        else:
            raise ConfigError(f"a matrix of {source} is not where it was looked for: {matrix.node.get_friendly_name()}")
        del first[name]
        if weights == "f32" or moved.any():
            matrix.node.output(0).replace(_constant(exact, weights).output(0))
    if odd or first:
        raise ConfigError(f"{source} holds weights that OpenVINO GenAI does not use: {', '.join([*odd, *first])}")
