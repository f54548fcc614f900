"""requirements.txt beside the model: pip itself installs it, from wheels beside it and into a directory of the test."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
import zipfile
from pathlib import Path

import pytest

from handler.config.loader import read_config
from handler.config.user_files import install, requirements_file
from handler.core import child_processes
from handler.core.errors import ConfigError
from handler.serving.user_code import model_formatters


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip installs; it asks no index."""
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "site"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "site"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory that names a package, with its wheel."""
    directory = tmp_path / "model"
    (directory / "requirements").mkdir(parents=True)
    (directory / "serving.properties").write_text("option.llm_engine=echo\n")
    (directory / "requirements.txt").write_text("lmi-test-package==1.0\n")
    name = "lmi_test_package-1.0"
    with zipfile.ZipFile(directory / "requirements" / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lmi_test_package.py", "ANSWER = 42\n")
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: lmi-test-package\nVersion: 1.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    return directory


def start(directory: Path, *options: str) -> None:
    """What a start does before it imports model.py, and that."""
    model_formatters(read_config(properties=directory / "serving.properties", overrides=options, environ={}).checked())


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno == logging.ERROR]


def test_it_is_installed_before_model_py_is_imported(
    model: Path, site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(site))
    (model / "model.py").write_text("import lmi_test_package\nassert lmi_test_package.ANSWER == 42\n")
    with caplog.at_level(logging.INFO):
        start(model)
    sys.modules.pop("lmi_test_package", None)
    assert (site / "lmi_test_package.py").is_file()
    assert f"installing {model}/requirements.txt (option.install_requirements=false skips this)" in caplog.text
    assert "installed" in caplog.messages[-1]


def test_the_option_leaves_it_out(model: Path, site: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        start(model, "option.install_requirements=false")
    assert not site.exists()
    assert not caplog.messages
    assert read_config(environ={"STANDARD_AUTO_INSTALL_REQ": "false"}).checked().install_requirements is False


def test_only_the_model_directorys_own_is_installed(
    model: Path, tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the working directory's, nor one that DJL Serving's Java side installs itself."""
    monkeypatch.chdir(model)
    model_formatters(read_config(overrides=["option.llm_engine=echo"], environ={}).checked())
    model_formatters(read_config(properties=model / "serving.properties", environ={}).checked(), model)
    assert not site.exists()
    assert requirements_file(None, is_enabled=True) is None
    assert requirements_file(tmp_path, is_enabled=True) is None


def test_a_missing_package_is_named_and_model_py_then_lacks_it(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "requirements.txt").write_text("lmi-test-package==1.0\nno-such-package-of-lmi\n")
    (model / "model.py").write_text("import no_such_package_of_lmi\n")
    with pytest.raises(ConfigError, match="no_such_package_of_lmi"):
        start(model)
    (record,) = errors(caplog)
    assert f"{model}/requirements.txt could not be installed; starting without it" in record.getMessage()
    assert "No matching distribution found for no-such-package-of-lmi" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_broken_file_is_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "requirements.txt").write_text("this is no requirement\n")
    start(model)
    assert "Invalid requirement: 'this is no requirement'" in caplog.text


def test_what_pip_itself_fails_by_is_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "requirements.txt").write_bytes(b"\xff\xfe\x00")  # half of UTF-16, which pip does not catch
    start(model)
    (record,) = errors(caplog)
    assert "as LMI does: UnicodeDecodeError: " in record.getMessage()


def test_without_a_network_one_line_says_what_to_do(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:1/simple")
    (model / "requirements.txt").write_text("no-such-package-of-lmi\n")
    began = time.monotonic()
    start(model)
    assert time.monotonic() - began < 30
    (record,) = errors(caplog)
    message = record.getMessage()
    assert "no package index can be reached" in message
    assert "build the packages into the image, or put wheels into requirements/" in message
    assert "secret" not in message


def test_uv_takes_pips_place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    install(model / "requirements.txt")
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:4] == ["pip", "install", "--python", sys.executable]
    assert str(model / "requirements") in asked


def test_without_either_that_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    install(model / "requirements.txt")
    assert "neither pip nor uv is installed" in caplog.text


def test_a_signal_ends_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*command: object, **options: object) -> None:
        raise child_processes.Stopped

    monkeypatch.setattr(child_processes, "run", stopped)
    with pytest.raises(ConfigError, match="stopped while"):
        start(model)
