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
import os
import shutil
import sys
from pathlib import Path

from handler.core.errors import ConfigError
from handler.engines.model_cache import UNKNOWN_LAYOUT, fingerprint, make_once, run_apart
from handler.engines.openvino import gguf
from handler.engines.openvino.gguf_graph import replace_weights

log = logging.getLogger(__name__)

RECIPE = "1"  # part of every fingerprint: raise it when something else is made of the same file
SCRIPT = "import sys; from handler.engines.openvino.gguf_weights import main; main(*sys.argv[1:], weights={!r})"


def exact_model(source: Path, cache: Path, weights: str) -> Path:
    """The OpenVINO directory made from a GGUF file: an earlier one of the same file, or a new one below `cache`.

    An earlier one may also lie in `converted/` beside the file, where an image brings both.

    `weights` is `f32`, all in full, or `i8`: what loses by the reader's rounding in 8 bits, the rest as it is read.

    Raises:
        ConfigError: it is no GGUF file, or not one that is understood.
    """
    try:
        name = fingerprint(f"{RECIPE} {weights}".encode(), [source])
        for place in (source.parent / "converted", cache):
            if (place / name).is_dir():
                return place / name
        gguf.context_length(source)  # refuses what is no GGUF file
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {source}: {error}") from error

    def make(directory: Path, lock: int) -> None:
        log.info("making a model with %s weights of %s, once", weights, source)
        run_apart(SCRIPT.format(weights), source, directory, lock)

    return make_once(cache / name, make)


def writable(source: Path, cache: Path) -> Path:
    """The GGUF file, or a copy of it below `cache`: OpenVINO's reader opens it for writing, though it writes nothing,
    and so cannot have one on a file system that is mounted read only, as SageMaker's model data are."""
    if os.access(source, os.W_OK):
        return source

    def make(directory: Path, lock: int) -> None:
        log.info("copying %s, which cannot be written to, for OpenVINO's reader, once", source)
        directory.mkdir(parents=True)
        shutil.copyfile(source, directory / source.name)

    return make_once(cache / fingerprint(f"{RECIPE} copy".encode(), [source]), make) / source.name


def main(source: str, target: str, weights: str) -> None:
    """The process apart: its status tells a file of another layout from a failure, its output what went wrong."""
    try:
        write_model(Path(source), Path(target), weights)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(UNKNOWN_LAYOUT)
    except (MemoryError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def write_model(source: Path, target: Path, weights: str) -> None:
    """Have OpenVINO GenAI save what it reads, give it the file's weights, add the files that a directory needs.

    Raises:
        ConfigError: the file's matrices and the graph's are laid out otherwise than we think.
    """
    import openvino
    import openvino_genai

    scratch = target / "scratch"  # the reader saves next to the file that it reads
    scratch.mkdir(parents=True)
    link = scratch / "model.gguf"
    if os.access(source, os.W_OK):
        link.symlink_to(source)
    else:
        shutil.copyfile(source, link)
    tokenizer = openvino_genai.Tokenizer(str(link), enable_save_ov_model=True)
    scheduler, save = openvino_genai.SchedulerConfig(), {"enable_save_ov_model": True}
    openvino_genai.ContinuousBatchingPipeline(str(link), scheduler, "CPU", save)
    for path in scratch.glob("openvino_*tokenizer.*"):  # they hold the chat template, too
        path.rename(target / path.name)
    model = openvino.Core().read_model(scratch / "openvino_model.xml")
    try:
        replace_weights(model, source, weights)
    except (ConfigError, MemoryError, OSError):
        raise
    except Exception as error:  # the package reads no such file
        raise ConfigError(f"{source}: {type(error).__name__}: {error}") from error
    openvino.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    shutil.rmtree(scratch)
    named = {"bos_token_id": tokenizer.get_bos_token_id(), "eos_token_id": tokenizer.get_eos_token_id()}
    ids = {key: id for key, id in named.items() if id >= 0}
    (target / "generation_config.json").write_text(json.dumps(ids))
    (target / "config.json").write_text(json.dumps(ids | {"max_position_embeddings": gguf.context_length(source)}))
