"""The start of a whole DJL Serving, on a directory that only looks like one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.djl import home, servers
from tests.djl.launch import StartFailed


@pytest.fixture
def serving(tmp_path: Path) -> Path:
    """lib/, bin/ and plugins/ of 0.28.0; bin/serving writes down what it was started with and answers no port."""
    root = tmp_path / "djl-serving-0.28.0"
    for folder in ("lib", "bin", "plugins"):
        (root / folder).mkdir(parents=True)
    for jar in ("api-0.28.0.jar", "serving-0.28.0.jar", "servicediscovery-9.9.9.jar", "wlm-0.28.0.jar"):
        (root / "lib" / jar).touch()
    script = root / "bin" / "serving"
    script.write_text('#!/bin/sh\necho "arguments: $@"\necho "JAVA_OPTS: $JAVA_OPTS"\necho "at $PWD"\nexit 3\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return root


def test_version_is_that_of_its_own_jar(serving: Path) -> None:
    assert home.version(serving) == "0.28.0"
    (serving / "lib" / "serving-0.28.0.jar").rename(serving / "lib" / "serving-0.36.0-SNAPSHOT.jar")
    assert home.version(serving) == "0.36.0"


def test_a_directory_without_the_jar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no DJL Serving"):
        home.version(tmp_path)


def test_config_keeps_every_port_on_loopback() -> None:
    assert home.config(8081, 8082).splitlines() == [
        "inference_address=http://127.0.0.1:8081",
        "management_address=http://127.0.0.1:8081",
        "cluster_address=http://127.0.0.1:8082",
    ]


def test_command_registers_the_model_for_the_python_engine(serving: Path) -> None:
    command = home.command(serving, Path("/s/config.properties"), "model", Path("/s/model"))
    assert command == [f"{serving}/bin/serving", "-f", "/s/config.properties", "-m", "model::Python=file:/s/model"]


def test_environment_has_a_plugins_directory_in_any_case(serving: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = home.environment(serving, scratch)
    assert found["MODEL_SERVER_HOME"] == str(serving)
    assert found["JAVA_OPTS"] == f"-Dai.djl.offline=true -Djava.io.tmpdir={scratch}"
    (serving / "plugins").rmdir()
    assert home.environment(serving, scratch)["MODEL_SERVER_HOME"] == str(scratch)
    assert (scratch / "plugins").is_dir()


def test_found_by_variable_before_path(serving: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DJL_SERVING_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert home.find() is None
    on_path = tmp_path / "bin"
    on_path.mkdir()
    os.symlink(serving / "bin" / "serving", on_path / "djl-serving")
    monkeypatch.setenv("PATH", str(on_path))
    assert home.find() == serving
    monkeypatch.setenv("DJL_SERVING_HOME", "/elsewhere")
    assert home.find() == Path("/elsewhere")


def test_its_version_is_the_one_under_test(serving: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJL_SERVING_HOME", str(serving))
    assert servers.versions() == ["0.28.0"]
    assert servers.versions(since="0.31") == []


def test_failing_start_shows_what_it_wrote(serving: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJL_SERVING_HOME", str(serving))
    with pytest.raises(StartFailed) as failed, servers.djl("0.28.0", {"option.rolling_batch": "auto"}):
        pass
    assert "DJL ended with status 3" in str(failed.value)
    assert "-m model::Python=file:" in str(failed.value)
    assert "-Dai.djl.offline=true" in str(failed.value)
