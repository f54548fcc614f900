"""Run a download in a process of its own, which a signal ends at once: Python waits for the threads of libraries."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from handler.core import child_processes
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
        ConfigError: that of `download`; or the process ended before its end.
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
    """End at once, without the unfinished files; only Linux lists them."""
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if _UNFINISHED.search((path := link.readlink()).name):
                path.unlink()
    os._exit(1)
