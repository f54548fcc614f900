"""Hugging Face checkpoints made into OpenVINO directories, once, and kept.

OpenVINO GenAI reads its own format and some GGUF files, but no safetensors. The converter (optimum-intel with
torch) is heavy and needed once a model: it is an optional extra, runs in a process of its own and frees its
memory at the end, and a checkpoint that was converted before loads without it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from handler.errors import ConfigError

log = logging.getLogger(__name__)

RECIPE = b"1"  # part of every fingerprint: raise it when CONVERTER makes something else of the same source
NEEDED = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")

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
QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}


def is_huggingface(directory: Path) -> bool:
    """Whether `directory` holds a checkpoint that must be converted before OpenVINO can load it."""
    weights = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]
    return bool(weights) and (directory / "config.json").is_file() and not (directory / NEEDED[0]).is_file()


def convert(source: Path, cache: Path) -> Path:
    """The OpenVINO directory made from `source`, below `cache`: an earlier one of the same files or new."""
    target = cache / fingerprint(source)
    if target.is_dir():
        return target
    if not (find_spec("optimum") and find_spec("optimum.intel")):  # the second alone would raise
        raise ConfigError(f"{source} has to be converted first: pip install 'lmi-handler[convert]'")
    cache.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers start together: one converts, the others wait and reuse
        if target.is_dir():
            return target
        shutil.rmtree(partial, ignore_errors=True)  # under the lock it can only be a killed process's
        log.info("converting %s to OpenVINO's format, once; this takes minutes", source)
        try:
            run_converter(source, partial, lock.fileno())
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def fingerprint(source: Path) -> str:
    """A name that changes whenever a file of `source` does; weights by size and time, for speed."""
    digest = sha256(RECIPE)
    for path in sorted(path for path in source.iterdir() if path.is_file()):
        state = path.stat()
        digest.update(f"\n{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        digest.update(path.read_bytes() if path.name == "config.json" else b"")
    return digest.hexdigest()[:32]


def run_converter(source: Path, target: Path, lock: int) -> None:
    """Convert into `target` or raise; the child shares the lock, in case it outlives its parent."""
    command = [sys.executable, "-c", CONVERTER, str(source.resolve()), str(target.resolve())]
    done = subprocess.run(command, capture_output=True, input=b"", env=os.environ | QUIET, pass_fds=(lock,))
    # a tokenizer that cannot be converted is only a warning to optimum, but no engine loads the result
    missing = [name for name in NEEDED if not (target / name).is_file()]
    if done.returncode or missing:
        how = f"exit status {done.returncode}" if done.returncode else f"no {', '.join(missing)}"
        tail = done.stderr[-2000:].decode(errors="replace").strip()
        raise ConfigError(f"cannot convert {source} to OpenVINO's format ({how}):\n{tail}")
