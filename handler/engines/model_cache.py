"""Model directories made once from other files and kept: named after those files, made apart, whole or not there."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from handler.core import child_processes
from handler.core.child_processes import NO_SPACE
from handler.core.errors import ConfigError

NEEDED = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")
QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}

UNKNOWN_LAYOUT = 65
"""A converter's exit status where it works, but the model is none that it can convert."""

_NO_SPACE = re.compile(rb"No space left on device|Disk quota exceeded|File too large|iostream error")
"""What a failed write says; the last is OpenVINO's, which then removes the file, so that there is space again."""
_NO_MEMORY = re.compile(rb"MemoryError|bad_alloc|(cannot|can't) allocate memory|not enough memory", re.IGNORECASE)


class UnknownLayout(ConfigError):
    """The converter works, but the model is none that it can convert."""


def fingerprint(recipe: bytes, files: Iterable[Path], read: Collection[str] = ()) -> str:
    """A name that changes whenever one of `files` does: by size and time, for speed, and what is in those to `read`."""
    digest = sha256(recipe)
    for path in files:
        state = path.stat()
        digest.update(f"\n{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        digest.update(path.read_bytes() if path.name in read else b"")
    return digest.hexdigest()[:32]


def make_once(target: Path, make: Callable[[Path, int], None]) -> Path:
    """`target`, an earlier one or what `make(directory, lock)` writes: killed half-way, it leaves none that counts.

    Raises:
        ConfigError: there is no room for it.
    """
    if target.is_dir():
        return target
    try:
        return _make(target, make)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise _no_space(target.parent) from error
        raise


def _make(target: Path, make: Callable[[Path, int], None]) -> Path:
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
    """Make `target` by a process that frees its memory and shares the lock, in case it outlives its parent.

    Raises:
        UnknownLayout: the process says that it cannot convert such a model.
        ConfigError: it failed for another reason, which the message names.
    """
    script = f"from handler.engines.process.engine_process import die_with_parent; die_with_parent()\n{script}"
    command = [sys.executable, "-c", script, str(source.absolute()), str(target.absolute())]
    pipe = subprocess.PIPE
    try:
        done = child_processes.run(command, stdout=pipe, stderr=pipe, env=os.environ | QUIET, pass_fds=(lock,))
    except child_processes.Stopped:
        raise ConfigError(f"stopped while {source} was being converted") from None
    # a tokenizer that cannot be converted is only a warning to the converters, but no engine loads the result
    missing = [name for name in needed if not (target / name).is_file()]
    if not done.returncode and not missing:
        return
    tail = done.stderr[-2000:].decode(errors="replace").strip()
    what = f"cannot convert {source} to {form}"
    # First: what is read of files that were cut short can look like another layout.
    if _NO_SPACE.search(done.stderr) or child_processes.disk_is_full(target.parent):
        raise ConfigError(f"{what}: {_no_space(target.parent)}")
    if done.returncode == UNKNOWN_LAYOUT:
        raise UnknownLayout(f"{what}: {tail}")
    if done.returncode == -signal.SIGKILL:
        raise ConfigError(
            f"{what}: the process that converts it was killed (SIGKILL), as happens when memory runs out: give it "
            "more memory, or convert the model on another machine"
        )
    if _NO_MEMORY.search(done.stderr):
        raise ConfigError(f"{what}: out of memory:\n{tail}")
    how = f"exit status {done.returncode}" if done.returncode else f"no {', '.join(missing)}"
    raise ConfigError(f"{what} ({how}):\n{tail}")


def _no_space(directory: Path) -> ConfigError:
    free = shutil.disk_usage(directory).free >> 20
    return ConfigError(f"no space left in {directory}: {free} MB are free; LMI_CACHE names another directory")
