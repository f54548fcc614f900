"""Converts GGUF files to OpenVINO directories, once, from the files' exact weights.

OpenVINO GenAI rounds the weights of a GGUF file. A Q4_1 or Q4_K block means `scale * q + minimum`. GenAI keeps
`scale * (q - zero)` with `zero` an integer of 4 bits. This raises SmolLM2's perplexity by a quarter. Here we save
GenAI's graph and replace its matrices by the file's. They are matched by value: rows from all over a matrix may differ
from the file by that rounding only. So a file or graph of another layout is refused, not served wrong.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Set
from importlib.metadata import version
from pathlib import Path

from handler.config import gguf
from handler.core.errors import ConfigError
from handler.engines.model_cache import UNKNOWN_LAYOUT, UnknownLayout, fingerprint, make_once, run_converter
from handler.engines.openvino.gguf_graph import FULL, KEPT, Weights, replace_weights
from handler.engines.openvino.ir_files import PRECISION, check_directory, parts

log = logging.getLogger(__name__)

_UNREADABLE = ("gguf_tensor_to_f16 failed", "Unsupported quantization type")
"""GenAI's messages of a kind of weights that its reader lacks."""

_MAX_ROWS_FILE = 1 << 30  # bytes of a file whose weights become `rows` by default

RECIPE = "4"  # part of every fingerprint: change it with the conversion
SCRIPT = "import sys; from handler.engines.openvino.gguf_weights import main; main(*sys.argv[1:], weights={!r})"


def converted_model(source: Path, cache: Path, weights: Weights) -> Path:
    """Return the OpenVINO directory of a GGUF file, making it below `cache` where there is none yet.

    An image may also have it in `converted/` beside the file. An unknown layout is remembered below `cache`.

    Args:
        weights: their form, see `replace_weights`.

    Raises:
        ConfigError: it is no GGUF file, it cannot be converted (`UnknownLayout` if for its layout), or the directory
            beside it is not complete.
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
        log.info("copying %s, which cannot be written to, for OpenVINO's reader, once", source)
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
            sys.exit("OpenVINO GenAI misses a key or a tensor in the file")
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
    scheduler, save = openvino_genai.SchedulerConfig(), {"enable_save_ov_model": True}
    openvino_genai.ContinuousBatchingPipeline(str(link), scheduler, "CPU", save)
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
