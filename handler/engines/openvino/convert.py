"""Hugging Face checkpoints made into OpenVINO directories, once, and kept.

OpenVINO GenAI reads its own format and some GGUF files, but no safetensors. The converter (optimum-intel with
torch) is heavy and needed once a model: it is an optional extra, runs in a process of its own and frees its
memory at the end, and a checkpoint that was converted before loads without it.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from handler.core.errors import ConfigError
from handler.engines.model_cache import fingerprint, make_once, run_apart

log = logging.getLogger(__name__)

RECIPE = b"1"  # part of every fingerprint: raise it when CONVERTER makes something else of the same source

# Not `optimum-cli`: it offers fp32 (twice the size of a bf16 checkpoint), fp16 (rounds its small weights) or,
# with no format given, int8 from 1e9 parameters on. An empty OVConfig keeps the checkpoint's own type.
CONVERTER = """
import sys
from transformers import AutoTokenizer
if len(AutoTokenizer.from_pretrained(sys.argv[1])) < 100:  # transformers invents one where there are no files
    sys.exit("the checkpoint comes without its tokenizer's files")
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig
main_export(sys.argv[1], sys.argv[2], task="text-generation-with-past", library_name="transformers",
            ov_config=OVConfig(), convert_tokenizer=True)
"""


def convert(source: Path, cache: Path) -> Path:
    """The OpenVINO directory made from `source`, below `cache`: an earlier one of the same files or new."""
    files = sorted(path for path in source.iterdir() if path.is_file())
    target = cache / fingerprint(RECIPE, files, read=["config.json"])
    found = find_spec("optimum") and find_spec("optimum.intel")  # the second alone would raise
    if not found and not target.is_dir():
        raise ConfigError(
            f"{source} has to be converted first, which needs: pip install '.[convert]' in lmi-handler's directory; "
            "then start again"
        )

    def make(directory: Path, lock: int) -> None:
        log.info("converting %s to OpenVINO's format, once; this takes minutes", source)
        run_apart(CONVERTER, source, directory, lock)

    return make_once(target, make)
