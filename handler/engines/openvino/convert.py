"""Converts Hugging Face checkpoints to OpenVINO directories, once.

OpenVINO GenAI reads its own format and some GGUF files, but no safetensors. The converter (optimum-intel with torch)
is a large optional extra, needed once a model. It runs in a process of its own, which frees its memory.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from handler.core.errors import ConfigError
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


def convert(source: Path, cache: Path) -> Path:
    """Return the OpenVINO directory of `source` below `cache`, converting it where there is none yet."""
    check_converter(source, cache)

    def make(directory: Path, lock: int) -> None:
        log.info("converting %s to OpenVINO's format, once; this takes minutes", source)
        vision = not no_images(source)
        script = CONVERTER.replace("TASK", "image-text-to-text" if vision else "text-generation-with-past")
        run_converter(script, source, directory, lock, [f"{part}.xml" for part in parts(vision=vision)])

    return make_once(_target(source, cache), make)


def check_converter(source: Path, cache: Path) -> None:
    """Raise ConfigError where `source` has not been converted and the converter is not installed."""
    installed = find_spec("optimum") and find_spec("optimum.intel")  # the second alone would raise
    if not installed and not _target(source, cache).is_dir():
        raise ConfigError(
            f"{source} has to be converted first, which needs: pip install '.[convert]' in lmi-handler's directory; "
            "then start again"
        )


def _target(source: Path, cache: Path) -> Path:
    files = sorted(path for path in source.iterdir() if path.is_file())
    return cache / fingerprint(RECIPE, files, read=["config.json"])
