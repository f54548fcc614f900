"""Downloads a model's files in a separate process, and caches converted models on disk."""

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
from handler.core.sizes import format_size

_STOP = signal.SIGUSR1
"""Signal that ends a download. Terminals and service managers do not send it to all processes at once."""

_UNFINISHED = re.compile(r"\.[0-9a-f]{8}\.incomplete$")
"""Matches names of huggingface_hub's partial files, which are never resumed. Older releases use other names."""


def is_inner_path(name: str) -> bool:
    """Return whether a file name from another machine is a relative path that stays in the directory before it."""
    return name.isprintable() and {"", ".", ".."}.isdisjoint(name.split("/"))


def fetch(download: Callable[..., Path | str], name: str, *arguments: Any) -> str:
    """Call `download(name, *arguments)` in another process, and return its result: a downloaded path, or a text.

    Args:
        download: module-level function, which may raise ConfigError.
        arguments: values that can be encoded as JSON.

    Raises:
        ConfigError: `download` raised it, the process died, or the download was stopped.
    """
    call = json.dumps([download.__module__, download.__name__, name, *arguments])
    command = child_processes.python(f"{__name__}:run_call", call)
    try:
        process = child_processes.run(command, stop=_STOP, stdout=subprocess.PIPE)
    except child_processes.Stopped:
        raise ConfigError(f"stopped while {name} was being fetched") from None
    if process.returncode:
        raise ConfigError(f"{name} was not fetched: the download process exited with status {process.returncode}")
    answer: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["path"]


def run_call(call: str) -> None:
    """Run a call that `fetch` has encoded as JSON, and print its result or error as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server handles them; terminals send them to all processes
    signal.signal(_STOP, _end)
    child_processes.die_with_parent(_STOP)
    module, function, *arguments = json.loads(call)
    try:
        answer = {"path": str(getattr(importlib.import_module(module), function)(*arguments))}
    except ConfigError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def _end(number: int, frame: FrameType | None) -> None:
    """Delete huggingface_hub's partial files (only on Linux), and end the process at once."""
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if _UNFINISHED.search((path := link.readlink()).name):
                path.unlink()
    os._exit(1)


# -- cache of converted models: each directory is named after its source files, and exists only when complete ----------


NEEDED = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")
QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}

SOURCE = "lmi_source.txt"
"""Name of the file, in a converted model's directory, that contains the path of the original model."""
UNKNOWN_LAYOUT = 65
"""Exit status of a converter that does not support the model."""

_NO_SPACE = re.compile(rb"No space left on device|Disk quota exceeded|File too large|iostream error")
"""Matches messages about failed writes. After an iostream error, OpenVINO deletes the file, which frees the space."""
_NO_MEMORY = re.compile(rb"MemoryError|bad_alloc|(cannot|can't) allocate memory|not enough memory", re.IGNORECASE)


class UnknownLayout(ConfigError):
    """Raised if the converter does not support the model."""


def fingerprint(recipe: bytes, files: Iterable[Path], read: Collection[str] = ()) -> str:
    """Return a name that changes when the size or modification time of any of the files changes.

    Args:
        recipe: identifies how the files are converted.
        read: names of files whose content affects the returned name as well.
    """
    digest = sha256(recipe)
    for path in files:
        state = path.stat()
        digest.update(f"\n{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        digest.update(path.read_bytes() if path.name in read else b"")
    return digest.hexdigest()[:32]


def make_once(target: Path, make: Callable[[Path, int], None]) -> Path:
    """Return the directory `target`. If it does not exist, call `make(directory, lock)` to write it first.

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
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process makes the directory while the others wait
        if target.is_dir():
            return target
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process, as only this one has the lock
        try:
            make(partial, lock.fileno())
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def run_converter(
    script: str, source: Path, target: Path, lock: int, needed: Sequence[str] = NEEDED, form: str = "OpenVINO's format"
) -> None:
    """Convert a model in a separate process, whose memory is freed when it ends.

    Args:
        script: code in Python that receives the paths of the source and the target as arguments.
        lock: file descriptor of the lock. The new process also holds the lock, because it may outlive this process.
        needed: files that the converter must have written.
        form: name of the target format, for messages.

    Raises:
        UnknownLayout: the converter does not support the model.
        ConfigError: the conversion failed for another reason, which the message contains.
    """
    script = f"from handler.core.child_processes import die_with_parent; die_with_parent()\n{script}"
    command = [sys.executable, "-c", script, str(source.absolute()), str(target.absolute())]
    try:
        process = child_processes.run(
            command, doing=f"converting {source} to {form}", env=os.environ | QUIET, pass_fds=(lock,)
        )
    except child_processes.Stopped:
        raise ConfigError(f"stopped while {source} was being converted") from None
    # If a converter cannot convert the tokenizer, it only prints a warning, but no engine can load the result.
    missing = [name for name in needed if not (target / name).is_file()]
    if not process.returncode and not missing:
        (target / SOURCE).write_text(str(source.absolute()))
        return
    tail = process.stderr[-2000:].decode(errors="replace").strip()
    failure = f"cannot convert {source} to {form}"
    # This is checked first: a truncated file can look like an unknown layout.
    if _NO_SPACE.search(process.stderr) or child_processes.disk_is_full(target.parent):
        raise ConfigError(f"{failure}: {_no_space(target.parent)}")
    if process.returncode == -signal.SIGKILL:
        raise ConfigError(
            f"{failure}: the process that converts it was killed (SIGKILL), as happens when memory runs out: provide "
            "more memory, or convert the model on another machine"
        )
    if _NO_MEMORY.search(process.stderr):
        raise ConfigError(f"{failure}: out of memory:\n{tail}")
    if process.returncode == UNKNOWN_LAYOUT:
        raise UnknownLayout(f"{failure}: {tail}")
    how = f"exit status {process.returncode}" if process.returncode else f"no {', '.join(missing)}"
    raise ConfigError(f"{failure} ({how}):\n{tail}")


def _no_space(directory: Path) -> ConfigError:
    free = format_size(shutil.disk_usage(directory).free)
    return ConfigError(f"no space left in {directory} ({free} free): free some space, or change LMI_CACHE")
