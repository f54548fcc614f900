"""OpenVINO directories with a GGUF file's own weights, made once and kept.

OpenVINO GenAI reads a GGUF file, but not its weights: a Q4_1 or Q4_K block means `scale * q + minimum`, and the
reader keeps `scale * (q - zero)` with `zero` a whole number of 4 bits. SmolLM2's perplexity rises by a quarter from
that. Here the reader's graph is saved and its matrices are replaced by what the file says. Which is which is found by
value: what stands in the graph must differ from the file by that rounding and by nothing more, so a file or a graph
that is laid out otherwise than we think is refused, not served wrong.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from handler.engines import gguf
from handler.engines.made import fingerprint, make_once, run_apart
from handler.errors import ConfigError

log = logging.getLogger(__name__)

RECIPE = "1"  # part of every fingerprint: raise it when something else is made of the same file
SCRIPT = "import sys; from handler.engines.gguf_weights import main; main(*sys.argv[1:], weights={!r})"


def exact_model(source: Path, cache: Path, weights: str) -> Path:
    """The OpenVINO directory made from a GGUF file, below `cache`: an earlier one of the same file or new.

    `weights` is `f32`, all matrices in full, or `i8`: those that the reader rounds in 8 bits, the others as they are.

    Raises:
        ConfigError: it is no GGUF file, or not one that is understood.
    """
    try:
        target = cache / fingerprint(f"{RECIPE} {weights}".encode(), [source])
        if not target.is_dir():
            gguf.context_length(source)  # refuses what is no GGUF file
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {source}: {error}") from error

    def make(directory: Path, lock: int) -> None:
        log.info("making a model with %s weights of %s, once", weights, source)
        run_apart(SCRIPT.format(weights), source, directory, lock)

    return make_once(target, make)


def main(source: str, target: str, weights: str) -> None:
    """The process apart: the end of its output tells what went wrong."""
    try:
        write_model(Path(source), Path(target), weights)
    except (ConfigError, RuntimeError) as error:
        sys.exit(str(error))


def write_model(source: Path, target: Path, weights: str) -> None:
    """Have OpenVINO GenAI save what it reads, give it the file's weights, add the files that a directory needs."""
    import openvino
    import openvino_genai

    scratch = target / "scratch"  # the reader saves next to the file that it reads
    scratch.mkdir(parents=True)
    link = scratch / "model.gguf"
    link.symlink_to(source)
    tokenizer = openvino_genai.Tokenizer(str(link), enable_save_ov_model=True)
    scheduler, save = openvino_genai.SchedulerConfig(), {"enable_save_ov_model": True}
    openvino_genai.ContinuousBatchingPipeline(str(link), scheduler, "CPU", save)
    for path in scratch.glob("openvino_*tokenizer.*"):  # they hold the chat template, too
        path.rename(target / path.name)
    model = openvino.Core().read_model(scratch / "openvino_model.xml")
    replace_weights(model, source, weights)
    openvino.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    shutil.rmtree(scratch)
    named = {"bos_token_id": tokenizer.get_bos_token_id(), "eos_token_id": tokenizer.get_eos_token_id()}
    ids = {key: id for key, id in named.items() if id >= 0}
    (target / "generation_config.json").write_text(json.dumps(ids))
    (target / "config.json").write_text(json.dumps(ids | {"max_position_embeddings": gguf.context_length(source)}))


def replace_weights(model: Any, source: Path, weights: str) -> None:
    """Put the file's matrices in the place of the graph's, each in the one place where it fits."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader, nodes = GGUFReader(source), model.get_ordered_ops()
    heads = _interleaved(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    vectors = {n: dequantize(t.data, t.tensor_type) for n, t in tensors.items() if len(t.shape) == 1}
    first = {n: dequantize(t.data[:1], t.tensor_type)[0] for n, t in tensors.items() if len(t.shape) == 2}
    known = {node.data.tobytes() for node in nodes if node.get_type_name() == "Constant" and _type(node) == "f32"}
    odd = [n for n, v in vectors.items() if not (v.tobytes() in known or (v == 1).all())]
    odd += [n for n in vectors if n.endswith(".bias") and n.split(".")[-2] in heads]  # the reader does not reorder them
    for root, values, slack, period in _matrices(nodes):
        rows, columns = root.get_output_shape(0)
        row = values[0].reshape(columns)  # first in either order of rows; it tells all but twins apart
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
        if weights == "f32" or moved.any():
            root.output(0).replace(_constant(exact, weights).output(0))
    if odd or first:
        raise ConfigError(f"OpenVINO GenAI does not use all weights of {source}: {', '.join([*odd, *first])}")


def _matrices(nodes: Iterable[Any]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Every matrix of the graph: its node, its values, how far rounding may have moved them (any distance where the
    scale is 0), and what a zero point that wrapped in its bits has moved them by a multiple of.
    """
    import numpy as np

    for root in nodes:
        shape = root.get_output_partial_shape(0) if root.get_output_size() else None
        if root.get_type_name() != "Convert" or _type(root) != "f32" or not shape.is_static or len(shape) != 2:
            continue
        inputs = [root]
        while len(inputs) == 1 or inputs[0].get_type_name() in ("Reshape", "Convert"):
            pass


