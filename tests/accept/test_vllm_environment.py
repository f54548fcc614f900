"""Where acceptance's vLLM comes from, and what is said where it cannot be had."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.accept import vllm_environment


def refused(directory: Path) -> str:
    with pytest.raises(SystemExit) as found:
        vllm_environment.main(directory)
    return str(found.value)


def test_another_python_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    assert "needs Python 3.11 to 3.13, this is 3.10: make accept-vllm PYTHON=" in refused(tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_python_of_ones_own_is_told_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(vllm_environment, "IMPORTED", ("pytest", "no_such_module"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "vllm.py").touch()
    said = refused(tmp_path)
    assert f"lacks no_such_module; in this directory: {sys.executable} -m pip install -e . pytest" in said


def test_a_python_with_all_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(vllm_environment, "IMPORTED", ("pytest",))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "vllm.py").touch()
    vllm_environment.main(tmp_path)
    assert capsys.readouterr().out == f"{sys.executable}\n"


def test_an_interpreter_that_is_none_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "python"))
    assert "cannot be run: No such file" in refused(tmp_path)
