"""Model directories made once from other files and kept: named after those files, made apart, whole or not there."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from handler.errors import ConfigError

NEEDED = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")
QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}


def fingerprint(recipe: bytes, files: Iterable[Path], read: Collection[str] = ()) -> str:
    """A name that changes whenever one of `files` does: by size and time, for speed, and what is in those to `read`."""
    digest = sha256(recipe)
    for path in files:
        state = path.stat()
        digest.update(f"\n{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        digest.update(path.read_bytes() if path.name in read else b"")
    return digest.hexdigest()[:32]


def make_once(target: Path, make: Callable[[Path, int], None]) -> Path:
    """`target`, an earlier one or what `make(directory, lock)` writes: killed half-way, it leaves none that counts."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers start together: one makes it, the others wait and reuse
        if target.is_dir():
            return target
        shutil.rmtree(partial, ignore_errors=True)  # under the lock it can only be a killed process's
        try:
            make(partial, lock.fileno())
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def run_apart(
    script: str, source: Path, target: Path, lock: int, needed: Sequence[str] = NEEDED, form: str = "OpenVINO's format"
) -> None:
    """Make `target` by a process that frees its memory and shares the lock, in case it outlives its parent."""
    script = f"from handler.engines.process import die_with_parent; die_with_parent()\n{script}"
    command = [sys.executable, "-c", script, str(source.absolute()), str(target.absolute())]
    done = subprocess.run(command, capture_output=True, input=b"", env=os.environ | QUIET, pass_fds=(lock,))
    # a tokenizer that cannot be converted is only a warning to the converters, but no engine loads the result
    missing = [name for name in needed if not (target / name).is_file()]
    if done.returncode or missing:
        how = f"exit status {done.returncode}" if done.returncode else f"no {', '.join(missing)}"
        tail = done.stderr[-2000:].decode(errors="replace").strip()
        raise ConfigError(f"cannot convert {source} to {form} ({how}):\n{tail}")
