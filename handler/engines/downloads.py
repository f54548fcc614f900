"""Downloads of a model's files, in a process of their own, and a cache of them on disk."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

from handler.core import child_processes
from handler.core.child_processes import NO_SPACE
from handler.core.errors import ConfigError

_STOP = signal.SIGUSR1
"""Ends a download. A terminal or a service manager may send others to all processes, and this server ends itself."""

_UNFINISHED = re.compile(r"\.[0-9a-f]{8}\.incomplete$")
"""Files of huggingface_hub that no later download continues: their names are used once. Older releases have others."""


def fetch(download: Callable[..., Path], name: str, *arguments: Any) -> str:
    """Call `download(name, *arguments)` in another process, and return the directory or file that it has fetched.

    Args:
        download: a function of a module, which may raise ConfigError.
        arguments: values of JSON.

    Raises:
        ConfigError: that of `download`; or the process died.
    """
    call = json.dumps([download.__module__, download.__name__, name, *arguments])
    command = child_processes.python(f"{__name__}:run_call", call)
    try:
        process = child_processes.run(command, stop=_STOP, stdout=subprocess.PIPE)
    except child_processes.Stopped:
        raise ConfigError(f"stopped while {name} was being fetched") from None
    if process.returncode:
        raise ConfigError(f"{name} was not fetched: the process that fetches ended with {process.returncode}")
    answer: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["path"]


def run_call(call: str) -> None:
    """Make a call of `fetch`'s, and print what it returns or raises as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server's, as a terminal or a service manager sends them to all
    signal.signal(_STOP, _end)
    child_processes.die_with_parent(_STOP)
    module, function, *arguments = json.loads(call)
    try:
        answer = {"path": str(getattr(importlib.import_module(module), function)(*arguments))}
    except ConfigError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def _end(number: int, frame: FrameType | None) -> None:
    """Delete the unfinished files, which only Linux lists, and end the process at once."""
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if _UNFINISHED.search((path := link.readlink()).name):
                path.unlink()
    os._exit(1)


# -- cache of converted models: each directory is named after its source files, and exists only when complete ----------


NEEDED = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")
QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}

SOURCE = "lmi_source.txt"
"""The file of a conversion that names its source."""
UNKNOWN_LAYOUT = 65
"""Exit status of a converter that does not support the model."""

_NO_SPACE = re.compile(rb"No space left on device|Disk quota exceeded|File too large|iostream error")
"""Messages of a failed write; the last is OpenVINO's, which then removes the file and so frees the space."""
_NO_MEMORY = re.compile(rb"MemoryError|bad_alloc|(cannot|can't) allocate memory|not enough memory", re.IGNORECASE)


class UnknownLayout(ConfigError):
    """The converter does not support the model."""


def fingerprint(recipe: bytes, files: Iterable[Path], read: Collection[str] = ()) -> str:
    """Return a name that changes with the size or time of one of `files`, or with the content of those to `read`."""
    digest = sha256(recipe)
    for path in files:
        state = path.stat()
        digest.update(f"\n{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        digest.update(path.read_bytes() if path.name in read else b"")
    return digest.hexdigest()[:32]


def make_once(target: Path, make: Callable[[Path, int], None]) -> Path:
    """Return `target`, after `make(directory, lock)` has written it where it does not exist.

    Raises:
        ConfigError: the disk is full.
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
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one makes it, the others wait
        if target.is_dir():
            return target
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process: this one has the lock
        try:
            make(partial, lock.fileno())
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def run_converter(
    script: str, source: Path, target: Path, lock: int, needed: Sequence[str] = NEEDED, form: str = "OpenVINO's format"
) -> None:
    """Make `target` in a process, which frees its memory at the end, and shares the lock in case it outlives this one.

    Raises:
        UnknownLayout: the converter does not support the model.
        ConfigError: it failed for another reason; the message has it.
    """
    script = f"from handler.core.child_processes import die_with_parent; die_with_parent()\n{script}"
    command = [sys.executable, "-c", script, str(source.absolute()), str(target.absolute())]
    try:
        process = child_processes.run(
            command,
            doing=f"converting {source} to {form}",
            env=os.environ | QUIET,
            pass_fds=(lock,),
        )
    except child_processes.Stopped:
        raise ConfigError(f"stopped while {source} was being converted") from None
    # Converters only warn of a tokenizer that they cannot convert, but no engine loads the result.
    missing = [name for name in needed if not (target / name).is_file()]
    if not process.returncode and not missing:
        (target / SOURCE).write_text(str(source.absolute()))
        return
    tail = process.stderr[-2000:].decode(errors="replace").strip()
    what = f"cannot convert {source} to {form}"
    # First: a file that was cut short can look like another layout.
    if _NO_SPACE.search(process.stderr) or child_processes.disk_is_full(target.parent):
        raise ConfigError(f"{what}: {_no_space(target.parent)}")
    if process.returncode == -signal.SIGKILL:
        raise ConfigError(
            f"{what}: the process that converts it was killed (SIGKILL), as happens when memory runs out: give it "
            "more memory, or convert the model on another machine"
        )
    if _NO_MEMORY.search(process.stderr):
        raise ConfigError(f"{what}: out of memory:\n{tail}")
    if process.returncode == UNKNOWN_LAYOUT:
        raise UnknownLayout(f"{what}: {tail}")
    how = f"exit status {process.returncode}" if process.returncode else f"no {', '.join(missing)}"
    raise ConfigError(f"{what} ({how}):\n{tail}")


def _no_space(directory: Path) -> ConfigError:
    free = shutil.disk_usage(directory).free >> 20
    return ConfigError(f"no space left in {directory}: {free} MB are free; LMI_CACHE names another directory")
