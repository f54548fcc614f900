"""Fetches a hub's models for OpenVINO; converts Hugging Face checkpoints to OpenVINO directories, once.

OpenVINO GenAI reads its own format and some GGUF files, but no safetensors. The converter (optimum-intel with torch)
is a large optional extra, needed once a model. It runs in a process of its own, which frees its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from handler.config.model_files import is_openvino
from handler.core.errors import ConfigError
from handler.core.values import Task
from handler.engines.huggingface import hub
from handler.engines.huggingface.image_tokens import no_images
from handler.engines.model_cache import fingerprint, make_once, run_converter
from handler.engines.openvino.ir_files import parts, whisper_parts
from handler.engines.openvino.pooling.bert_graph import has_bert_config

log = logging.getLogger(__name__)

RECIPE = b"1"  # part of every fingerprint: change it with CONVERTER

# Not `optimum-cli`: it offers fp32 (twice the size of a bf16 checkpoint), fp16 (rounds its small weights) or,
# with no format given, int8 from 1e9 parameters on. An empty OVConfig keeps the checkpoint's own type.
CONVERTER = """
import sys
from transformers import AutoTokenizer
if len(AutoTokenizer.from_pretrained(sys.argv[1])) < 100:  # transformers invents one where there are no files
    sys.exit("the checkpoint comes without its tokenizer's files")
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig
main_export(sys.argv[1], sys.argv[2], task="TASK", library_name="transformers",
            ov_config=OVConfig(), convert_tokenizer=True)
"""

POOLING_CONVERTER = """
import shutil, sys
from pathlib import Path
from transformers import AutoTokenizer
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig
source, target = Path(sys.argv[1]), Path(sys.argv[2])
main_export(source, target, task="TASK", library_name="transformers", ov_config=OVConfig(), convert_tokenizer=False)
for pattern in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "*_Pooling"):
    for path in source.glob(pattern):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, target / path.name)
AutoTokenizer.from_pretrained(source).save_pretrained(target)
"""

_EXPORTS = {
    Task.EMBEDDING: "feature-extraction",
    Task.CLASSIFICATION: "text-classification",
    Task.RERANK: "text-classification",
    Task.TRANSCRIPTION: "automatic-speech-recognition-with-past",
}
"""Tasks with optimum's names."""


def download(model_id: str, revision: str | None) -> Path:
    """Download a hub's model; first its descriptions, which say what the weights need.

    Raises:
        ConfigError: the hub does not have it, cannot be reached, or has no format that can be loaded here.
    """
    if named := hub.gguf_file(model_id):
        name, file = named
        path = hub.download(name, revision, only=[file], without=()) / file
        if not path.is_file():
            raise ConfigError(f"{name} on the hub has no file {file!r}")
        return path
    directory = hub.download_descriptions(model_id, revision)
    if is_openvino(directory):
        return hub.download(model_id, revision, without=(*hub.OTHER_FORMATS, "*.safetensors", *hub.TORCH))
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{model_id} on the hub has neither openvino_model.xml nor config.json; "
            f"name a file of GGUF with its name: {model_id}/FILE.gguf"
        )
    fetched = any(directory.glob("*.safetensors"))  # and maybe converted too
    if not fetched and not has_bert_config(directory) and not converter_is_installed():
        raise ConfigError(
            f"{model_id} has to be converted for OpenVINO, which needs: pip install 'lmi-handler[convert]'; "
            "then start again. The hub's owner OpenVINO has models that need no conversion. "
            f"On a GPU run: lmi serve {model_id} --engine vllm"
        )
    return hub.download_checkpoint(model_id, revision, torch=converter_is_installed())


def conversion(model_id: str) -> str:
    """Say what a start does with a checkpoint of the hub, and what that takes; "" for models that need none of it."""
    if not hub.is_hub_name(model_id) or model_id.startswith("OpenVINO/"):
        return ""
    there = "is" if converter_is_installed() else "is not"
    return (
        "unless the hub has it in OpenVINO's format, it is converted once, into the cache; that needs "
        f"pip install 'lmi-handler[convert]' (6 GB with torch), which {there} here"
    )


fetch = partial(hub.fetch, download=download, is_name=hub.is_hub_reference)


def convert(source: Path, cache: Path, task: Task = Task.GENERATION) -> Path:
    """Return the OpenVINO directory of `source` below `cache`, converting it where there is none yet."""
    check_converter(source, cache, task)
    needed: Sequence[str]
    if task is Task.TRANSCRIPTION:
        script = CONVERTER.replace("TASK", _EXPORTS[task])
        needed = [f"{part}.xml" for part in whisper_parts()]
    elif task is Task.GENERATION:
        vision = not no_images(source)
        script = CONVERTER.replace("TASK", "image-text-to-text" if vision else "text-generation-with-past")
        needed = [f"{part}.xml" for part in parts(vision=vision)]
    else:
        script, needed = POOLING_CONVERTER.replace("TASK", _EXPORTS[task]), ("openvino_model.xml", "tokenizer.json")

    def make(directory: Path, lock: int) -> None:
        log.info("converting %s to OpenVINO's format, once; this takes minutes", source)
        run_converter(script, source, directory, lock, needed)

    return make_once(_target(source, cache, task), make)


def check_converter(source: Path, cache: Path, task: Task = Task.GENERATION) -> None:
    """Raise ConfigError where `source` has not been converted and the converter is not installed."""
    if not converter_is_installed() and not _target(source, cache, task).is_dir():
        raise ConfigError(
            f"{source} has to be converted first, which needs: pip install 'lmi-handler[convert]'; then start again"
        )


def converter_is_installed() -> bool:
    return bool(find_spec("optimum") and find_spec("optimum.intel"))  # the second alone would raise


def _target(source: Path, cache: Path, task: Task) -> Path:
    files = sorted(path for path in source.iterdir() if path.is_file())
    recipe = RECIPE if task is Task.GENERATION else b"1 " + _EXPORTS[task].encode()
    return cache / fingerprint(recipe, files, read=["config.json"])
