"""Converts Hugging Face checkpoints to OpenVINO directories, once.

OpenVINO GenAI reads its own format and some GGUF files, but no safetensors. The converter (optimum-intel with torch)
is a large optional extra, needed once a model. It runs in a process of its own, which frees its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from handler.core.errors import ConfigError
from handler.core.values import Task
from handler.engines.huggingface.image_tokens import no_images
from handler.engines.model_cache import fingerprint, make_once, run_converter
from handler.engines.openvino.ir_files import parts

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
}
"""Tasks with optimum's names."""


def convert(source: Path, cache: Path, task: Task = Task.GENERATION) -> Path:
    """Return the OpenVINO directory of `source` below `cache`, converting it where there is none yet."""
    check_converter(source, cache, task)
    needed: Sequence[str]
    if task is Task.GENERATION:
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
    installed = find_spec("optimum") and find_spec("optimum.intel")  # the second alone would raise
    if not installed and not _target(source, cache, task).is_dir():
        raise ConfigError(
            f"{source} has to be converted first, which needs: pip install '.[convert]' in lmi-handler's directory; "
            "then start again"
        )


def _target(source: Path, cache: Path, task: Task) -> Path:
    files = sorted(path for path in source.iterdir() if path.is_file())
    recipe = RECIPE if task is Task.GENERATION else b"1 " + _EXPORTS[task].encode()
    return cache / fingerprint(recipe, files, read=["config.json"])
